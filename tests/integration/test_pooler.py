"""PgBouncer in transaction mode: what it takes away, and what it says when it has no connection left.

That everything else works through it, the modules with a runner `pooled` show.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from pooler import SIZE, Pooler, serve

import pycontext
from pycontext.summarizer.extractive import ExtractiveSummarizer

pytestmark = pytest.mark.runners("pooled")

Fill = Callable[..., list[pycontext.Message]]
Connection = psycopg.Connection[Any]


def test_it_is_what_it_is_meant_to_be(dsn: str, direct_dsn: str) -> None:
    """Two transactions in a row are on two servers; options, such as a search path, are refused."""
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as conn:
        served = [conn.execute("select pg_backend_pid()").fetchone() for _ in range(6)]
        assert len(set(served)) == SIZE
        assert all(one != two for one, two in pairwise(served))
        assert conn.execute("select to_regclass('chat_overview')").fetchone() == (None,)
    with pytest.raises(psycopg.OperationalError, match="options"):
        psycopg.connect(dsn, options="-c search_path=pycontext")


def test_no_statement_is_prepared_and_nothing_is_set_on_a_server(
    memory: pycontext.Database, dsn: str, fill: Fill
) -> None:
    fill("a", 25)
    for number in range(12):
        with memory.turn("a", f"more {number}") as turn:
            turn.add({"role": "assistant", "content": "well"})
    state = """
        select pg_backend_pid(), (select count(*) from pg_prepared_statements),
            (select count(*) from pg_locks where locktype = 'advisory'),
            (select count(*) from pg_class where relpersistence = 't'),
            (select array_agg(name) from pg_settings where source = 'session'
                and name ~ '^(pycontext|search)')
        """
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as conn:
        seen = {row[0]: row[1:] for row in (conn.execute(state).fetchone() for _ in range(9)) if row}
    assert list(seen.values()) == [(0, 0, 0, None)] * SIZE


def test_many_chats_at_once_async(dsn: str, fill: Fill, loop: Any) -> None:
    """More tasks and passes than server connections."""
    chats = [f"chat-{number}" for number in range(8)]
    for chat_id in chats:
        fill(chat_id, 25)

    async def one(chat_id: str) -> None:
        async with pycontext.aconnect(dsn, summarizer=ExtractiveSummarizer()) as db:
            for number in range(3):
                async with db.turn(chat_id, f"more {number}") as turn:
                    await turn.add({"role": "assistant", "content": "well"})
            assert (await db.status(chat_id)).line_origin == "compaction"
            assert [row.content for row in await db.thread(chat_id, max_rows=2)] == ["more 2", "well"]

    async def all_of_them() -> None:
        await asyncio.gather(*map(one, chats))

    loop.run(all_of_them())


@pytest.fixture
def impatient(server18: Any) -> Iterator[Pooler]:
    """A pooler whose clients wait for a second at most."""
    with serve(server18.host, server18.port, server18.user, wait=1) as running:
        yield running


def test_a_pooler_without_a_free_connection_is_a_typed_error(impatient: Pooler, direct_dsn: str) -> None:
    dsn = impatient.dsn(direct_dsn)
    everybody = threading.Barrier(SIZE + 1)
    with pycontext.connect(dsn) as memory, ThreadPoolExecutor() as threads:
        memory.create_chat("a")

        def hold() -> None:
            with psycopg.connect(dsn) as conn:
                conn.execute("select 1")
                everybody.wait(30)
                everybody.wait(30)

        for _ in range(SIZE):
            threads.submit(hold)
        everybody.wait(30)
        try:
            with pytest.raises(pycontext.PoolExhausted, match="default_pool_size"):
                memory.append("a", "one")
        finally:
            everybody.wait(30)
        memory.append("a", "two")  # it closed our connection
        assert [row.content for row in memory.thread("a")] == ["two"]
