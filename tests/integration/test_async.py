"""What only the async side has: cancelling, tasks that share a database, models that are awaited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest

import pycontext
from pycontext.summarizer import SummaryRequest, SummaryResult
from pycontext.summarizer.extractive import ExtractiveSummarizer

Fill = Callable[..., list[pycontext.Message]]
Connection = psycopg.Connection[Any]

LEASED = "select count(*) from pycontext.lease where holder is not null"
BUSY = """
    select count(*) from pg_stat_activity
    where application_name = 'pycontext' and datname = current_database() and state <> 'idle'
    """


class Awaiting:
    """A summarizer that is async, and waits to be told to go on."""

    name = "awaiting"

    def __init__(self) -> None:
        self.asked, self.may_go = asyncio.Event(), asyncio.Event()

    async def summarize(self, request: SummaryRequest) -> SummaryResult:
        self.asked.set()
        await self.may_go.wait()
        return ExtractiveSummarizer().summarize(request)


class Blocking:
    """The same in a thread."""

    name = "blocking"

    def __init__(self) -> None:
        self.asked, self.may_go = threading.Event(), threading.Event()

    def summarize(self, request: SummaryRequest) -> SummaryResult:
        self.asked.set()
        self.may_go.wait(30)
        return ExtractiveSummarizer().summarize(request)


async def until_asked(summarizer: Any) -> None:
    while not summarizer.asked.is_set():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", [Awaiting, Blocking])
@pytest.mark.parametrize("again", [False, True], ids=["once", "at every await"])
def test_a_cancelled_pass_gives_its_lease_back(
    dsn: str, db: Connection, fill: Fill, kind: Callable[[], Any], again: bool
) -> None:
    fill("a", 25)

    async def work() -> None:
        summarizer = kind()
        async with pycontext.aconnect(dsn, summarizer=summarizer) as memory:

            async def turn() -> None:
                async with memory.turn("a", "Anything new?") as turn:
                    await turn.add({"role": "assistant", "content": "no"})

            task = asyncio.create_task(turn())
            await until_asked(summarizer)
            assert db.execute(LEASED).fetchone() == (1,)
            task.cancel()
            while again and not task.done():  # as a scope of anyio does
                await asyncio.sleep(0)
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            summarizer.may_go.set()
            assert db.execute(LEASED).fetchone() == (0,)
            assert db.execute(BUSY).fetchone() == (0,)
            assert [row.content for row in await memory.thread("a", max_rows=2)] == ["Anything new?", "no"]
            assert (await memory.compact("a", summarizer=ExtractiveSummarizer())).outcome == "summarized"

    asyncio.run(work())


def test_a_cancelled_statement_leaves_the_connection_usable(dsn: str, db: Connection) -> None:
    async def work() -> None:
        async with pycontext.aconnect(dsn) as memory:
            await memory.create_chat("a")
            with psycopg.connect(dsn) as holder:
                holder.execute("select from pycontext.chat where chat_id = 'a' for update")
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(memory.append("a", "one"), 0.3)
            await memory.append("a", "two")
            assert [row.content for row in await memory.thread("a")] == ["two"]

    asyncio.run(work())


@pytest.mark.parametrize("kind", [Awaiting, Blocking])
def test_other_tasks_go_on_while_a_model_works(dsn: str, fill: Fill, kind: Callable[[], Any]) -> None:
    """On the same database and connection, which no pass holds."""
    fill("a", 25)

    async def work() -> None:
        summarizer = kind()
        async with pycontext.aconnect(dsn, summarizer=summarizer) as memory:
            task = asyncio.create_task(memory.compact("a"))
            await until_asked(summarizer)
            await memory.append("a", "I am new here")
            summarizer.may_go.set()
            assert (await task).outcome == "summarized"
            assert (await memory.window("a"))[-1].content == "I am new here"

    asyncio.run(work())


def test_tasks_may_add_to_one_turn(dsn: str) -> None:
    """Equal results of several tools are as many rows."""

    async def work() -> None:
        calls = [
            {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            for n in range(4)
        ]
        async with pycontext.aconnect(dsn) as memory, memory.turn("a", "go") as turn:
            await turn.add({"role": "assistant", "tool_calls": calls})
            results: list[Awaitable[Any]] = [
                turn.add({"role": "tool", "tool_call_id": call["id"], "content": "ok"}) for call in calls
            ]
            await asyncio.gather(*results)
            await asyncio.gather(*(turn.add({"role": "assistant", "content": "done"}) for _ in range(2)))
            roles = [row.role for row in await memory.thread("a")]
            assert roles == ["user", "assistant", *["tool"] * 4, "assistant", "assistant"]

    asyncio.run(work())
