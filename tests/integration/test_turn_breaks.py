"""Turns under ill treatment: threads, pools of one connection, unread streams, odd ids, huge texts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import psycopg_pool
import pytest
import validators

import pycontext
from pycontext.extractor import ExtractorRequest, ExtractorResult
from pycontext.install import extra_sql
from pycontext.summarizer import SummaryRequest, SummaryResult
from pycontext.summarizer.extractive import ExtractiveSummarizer

Connection = psycopg.Connection[Any]

REPLY = {"role": "assistant", "content": "In hub 7."}


def call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": "{}"}}


def result(call_id: str, content: str = "hub 7") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


@contextmanager
def connected(way: str, dsn: str, loop: Any, **options: Any) -> Iterator[Any]:
    """A database of chats over a connection of its own, one of the caller's, or a pool of a single one."""
    from conftest import Awaited

    if way == "own":
        with pycontext.connect(dsn, **options) as memory:
            yield memory
    elif way == "caller's":
        with psycopg.connect(dsn, autocommit=True) as conn:
            yield pycontext.connect(connection=conn, **options)
    elif way == "caller's transaction":
        with psycopg.connect(dsn) as conn:
            yield pycontext.connect(connection=conn, **options)
    elif way == "pool of one":
        with psycopg_pool.ConnectionPool(dsn, min_size=1, max_size=1) as pool:
            yield pycontext.connect(pool=pool, **options)
    else:
        pool = psycopg_pool.AsyncConnectionPool(dsn, min_size=1, max_size=1, open=False)
        loop.run(pool.open())
        yield Awaited(pycontext.aconnect(pool=pool, **options), loop)
        loop.run(pool.close())


WAYS = ("own", "caller's", "caller's transaction", "pool of one", "async pool of one")


def test_a_turn_is_the_same_over_every_kind_of_connection(dsn: str, loop: Any) -> None:
    read = []
    for way in WAYS:
        with connected(way, dsn, loop) as memory:
            for _ in range(2):  # and sent again, it stores nothing
                with memory.turn(way, "Where?", message_id="u1", format="all", recall=True) as turn:
                    turn.add({"role": "assistant", "tool_calls": [call("c1"), call("c2")]})
                    turn.add([result("c1"), result("c2")])
                    turn.add(REPLY)
                    read.append([turn.messages, turn.responses_input, turn.anthropic, turn.is_answered])
        with pycontext.connect(dsn) as memory:
            assert [row.role for row in memory.thread(way)] == [
                "user",
                "assistant",
                "tool",
                "tool",
                "assistant",
            ]
    assert all(one == read[0] for one in read)


def test_threads_share_a_pool_of_one_connection(dsn: str) -> None:
    """More turns at once than connections, on two chats: nothing is lost, nothing waits for itself."""
    with psycopg_pool.ConnectionPool(dsn, min_size=1, max_size=1, timeout=60) as pool:
        memory = pycontext.connect(pool=pool)

        def one(number: int) -> None:
            with memory.turn(number % 2, f"Question {number}?", message_id=f"u{number}") as turn:
                turn.add({"role": "assistant", "tool_calls": [call(f"c{number}")]})
                validators.openai_chat(turn.messages)
                turn.add(result(f"c{number}"))
                turn.add({**REPLY, "content": f"Answer {number}."})
                assert turn.is_answered
                assert turn.reply == f"Answer {number}."

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(one, range(16)))
        for chat in range(2):
            rows = memory.thread(chat, max_rows=100)
            assert len(rows) == 4 * 8
            assert [row.seq for row in rows] == list(range(1, 33))
            validators.openai_chat(memory.messages(chat))


def test_threads_add_the_results_of_one_turns_tools(dsn: str) -> None:
    """Each add reads the window after it wrote: what the turn holds at the end is what stands in the chat."""
    names = [f"c{n}" for n in range(12)]
    with pycontext.connect(dsn) as memory, memory.turn("a", "Where?", compact="off") as turn:
        turn.add({"role": "assistant", "tool_calls": list(map(call, names))})
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(lambda name: turn.add(result(name)), names))
            list(threads.map(lambda _: turn.add(REPLY), range(4)))  # equal ones are as many rows
        assert len(memory.thread("a", max_rows=50)) == 2 + 12 + 4
        assert turn.messages == memory.messages("a")


class Watching:
    """Every model there is: at each call it looks whether anything of the database is held."""

    name = "watching"

    def __init__(self, db: Connection) -> None:
        self.db = db
        self.seen: list[str] = []

    def look(self, which: str) -> None:
        held = self.db.execute("""
            select count(*) from pg_stat_activity
            where datname = current_database() and pid <> pg_backend_pid()
                and (state <> 'idle' or backend_xid is not null or backend_xmin is not null)""").fetchone()
        assert held == (0,), which
        self.db.execute("select from pycontext.chat for update nowait")
        self.seen.append(which)

    def summarize(self, request: SummaryRequest) -> SummaryResult:
        self.look("summarize")
        return ExtractiveSummarizer().summarize(request)

    def extract(self, request: ExtractorRequest) -> ExtractorResult:
        self.look("extract")
        return ExtractorResult([], self.name)

    def embed(self, texts: Sequence[str], *, is_query: bool, seconds: float) -> list[list[float]]:
        self.look("query" if is_query else "embed")
        return [[1.0, 0.5] for _ in texts]


@pytest.mark.parametrize("way", [way for way in WAYS if "transaction" not in way])
def test_nothing_is_held_while_any_model_works(
    dsn: str, db: Connection, loop: Any, fill: Any, way: str
) -> None:
    """C45 for its kind: summaries, facts, embeddings of messages and of questions; pools of one."""
    db.execute(extra_sql("embeddings"))
    fill("a", 25)
    models = Watching(db)
    with connected(way, dsn, loop, summarizer=models, extractor=models, embedder=models) as memory:
        memory.embed("a")
        with memory.turn("a", "Anything new?", recall=True) as turn:
            turn.add(REPLY)
        memory.append("a", "And now?")
        with memory.turn("a", recall=True, compact="off"):
            pass
        assert memory.recall("a", "parcel")
        assert memory.status("a").line_origin == "compaction"
    assert set(models.seen) == {"embed", "query", "extract", "summarize"}
    assert models.seen.count("query") == 3


def stream(memory: Any, pieces: list[str]) -> Iterator[str]:
    """A handler that streams, as a web framework drives it."""
    with memory.turn("a", "Where?", message_id="u1") as turn:
        said = []
        for piece in pycontext.scrub_stream(pieces):
            said.append(piece)
            yield piece
        turn.add({"role": "assistant", "content": "".join(said)})


def test_a_stream_that_nobody_reads_to_its_end(dsn: str, db: Connection) -> None:
    pieces = ["In ", "hub ", "7."]
    with pycontext.connect(dsn) as memory:
        stream(memory, pieces)  # never begun: nothing is stored
        with pytest.raises(pycontext.NoSuchChat):
            memory.thread("a")
        begun = stream(memory, pieces)
        assert next(begun)
        begun.close()  # the reader went away
        assert [row.role for row in memory.thread("a")] == ["user"]
        assert "".join(stream(memory, pieces)) == "In hub 7."
        assert [row.content for row in memory.thread("a")] == ["Where?", "In hub 7."]

    async def left() -> None:
        async def replies(memory: Any) -> AsyncIterator[str]:
            async with memory.turn("b", "Where?", message_id="u1") as turn:
                async for piece in pycontext.ascrub_stream(apieces()):
                    yield piece
                await turn.add(REPLY)

        async def apieces() -> AsyncIterator[str]:
            for piece in pieces:
                yield piece

        async with pycontext.aconnect(dsn) as memory:
            begun = replies(memory)
            await anext(begun)
            await begun.aclose()
            assert [row.role for row in await memory.thread("b")] == ["user"]
            assert "".join([piece async for piece in replies(memory)]) == "In hub 7."
            assert len(await memory.thread("b")) == 2

    asyncio.run(left())
    assert db.execute("select count(*) from pycontext.lease where holder is not null").fetchone() == (0,)


@pytest.mark.parametrize("statement", ["append_messages", "start_turn"])
def test_an_add_that_is_cancelled_is_stored_once_when_it_is_sent_again(dsn: str, statement: str) -> None:
    """The chat's row is held, so that the add stands in one of its two statements."""

    async def work() -> None:
        async with pycontext.aconnect(dsn) as memory, memory.turn("a", "Where?", message_id="u1") as turn:
            calls = {"role": "assistant", "tool_calls": [call("c1"), call("c2")]}
            table = "chat" if statement == "append_messages" else "profile"
            async with await psycopg.AsyncConnection.connect(dsn) as holder:
                await holder.execute(f"lock table pycontext.{table} in access exclusive mode")
                task = asyncio.create_task(turn.add(calls))
                await asyncio.sleep(0.3)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            for step in (calls, result("c1"), result("c2"), REPLY):
                await turn.add(step)
            assert len(await memory.thread("a")) == 5
            assert turn.is_answered
            validators.openai_chat(turn.messages)

    asyncio.run(work())


ODD = ("м/1", "м", "м/1/2", "注文 7", "a'b\"c\\d", "%s", "x" * 500, "e\u0301", "é", "🚚")


def test_ids_are_any_text(dsn: str) -> None:
    with pycontext.connect(dsn) as memory:
        for chat in ODD:
            for number, message in enumerate(ODD):
                with memory.turn(chat, f"Where? {number}", message_id=message) as turn:
                    assert turn.message_id == message
                    assert not turn.is_answered, (chat, message)
                    turn.add({**REPLY, "content": f"In hub {number}."})
                    assert turn.reply == f"In hub {number}."
            for number, message in enumerate(ODD):
                with memory.turn(chat, f"Where? {number}", message_id=message) as turn:
                    assert turn.reply == f"In hub {number}.", (chat, message)
            assert len(memory.thread(chat, max_rows=100)) == 2 * len(ODD)


def test_an_id_within_another_is_not_answered_by_that_ones_reply(dsn: str) -> None:
    with pycontext.connect(dsn) as memory, pycontext.connect(dsn) as other:
        with memory.turn("a", "one", message_id="a/b"), other.turn("a", "two", message_id="a/b/c") as two:
            two.add(REPLY)
        with memory.turn("a", "one", message_id="a/b") as one:
            assert (one.is_answered, one.reply) == (False, None)


def test_what_is_huge_is_stored_or_refused_by_name(dsn: str) -> None:
    with pycontext.connect(dsn) as memory:
        started = time.monotonic()
        with memory.turn("a", "Where?", profile="small-8k", compact="off") as turn:
            turn.add({"role": "assistant", "tool_calls": [call("c1")]})
            turn.add(result("c1", "слово word 詞 " * 250_000))
            assert turn.window_tokens <= turn.token_budget
            validators.openai_chat(turn.messages)
            assert len(json.dumps(turn.messages)) < 100_000
        with pytest.raises(pycontext.BudgetTooSmall) as error:
            memory.turn("a", "Why? " * 400_000).__enter__()
        assert error.value.hint
        assert [row.role for row in memory.thread("a")] == ["user", "assistant", "tool"]
        assert time.monotonic() - started < 60


def test_an_exception_leaves_a_turn_that_others_can_go_on_with(dsn: str, db: Connection) -> None:
    for raised in (KeyboardInterrupt, SystemExit, ZeroDivisionError, asyncio.CancelledError):
        with pycontext.connect(dsn) as memory:
            turn = memory.turn(raised.__name__, "Where?", message_id="u1")
            with pytest.raises(raised), turn:  # noqa: PT012
                turn.add({"role": "assistant", "tool_calls": [call("c1")]})
                raise raised
            with pytest.raises(RuntimeError, match="with block"):
                turn.add(result("c1"))
            with memory.turn(raised.__name__, "Where?", message_id="u1") as turn:
                validators.openai_chat(turn.messages)
                turn.add(result("c1"))
                turn.add(REPLY)
            assert [row.role for row in memory.thread(raised.__name__)] == [
                *("user", "assistant"),
                *("tool", "assistant"),
            ]


def test_two_turns_of_one_chat_in_threads_that_go_in_step(dsn: str) -> None:
    """Both users' messages stand as they were stored, each call with its result, whoever comes first."""
    step = threading.Barrier(2, timeout=30)

    def tab(number: int) -> list[Any]:
        with pycontext.connect(dsn) as memory:
            step.wait()
            with memory.turn("a", f"Tab {number}?", message_id=f"u{number}", format="all") as turn:
                for n in range(4):
                    step.wait()
                    turn.add({"role": "assistant", "tool_calls": [call(f"t{number}-{n}")]})
                    validators.openai_chat(turn.messages)
                    validators.openai_responses(turn.responses_input)
                    validators.anthropic(turn.anthropic)
                    step.wait()
                    turn.add(result(f"t{number}-{n}"))
                turn.add({**REPLY, "content": f"To tab {number}."})
                return [turn.is_answered, turn.reply]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(tab, range(2))) == [[True, f"To tab {n}."] for n in range(2)]
    with pycontext.connect(dsn) as memory:
        rows = memory.thread("a", max_rows=50)
        assert len(rows) == 2 * 10
        validators.openai_chat(memory.messages("a"))
