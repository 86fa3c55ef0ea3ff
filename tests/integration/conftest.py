"""A database of chats on the test's own Postgres, and a chat long enough to be compacted."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from inspect import isawaitable
from typing import Any, TypeVar

import psycopg
import pytest
from llm_server import LLMServer
from pooler import PROGRAM, Pooler, serve

import pycontext
from pycontext.summarizer import SummaryRequest, SummaryResult
from pycontext.summarizer.extractive import ExtractiveSummarizer
from pycontext.tools import AsyncTools

T = TypeVar("T")
Fill = Callable[..., list[pycontext.Message]]
Bring = Callable[..., AbstractContextManager[tuple[Any, Any]]]


@pytest.fixture
def llm() -> Iterator[LLMServer]:
    """A server that speaks OpenAI's protocol, with faults where they are asked for."""
    with LLMServer() as running:
        yield running


@dataclass
class Watched:
    """The built-in summarizer, seen at work: what it was asked, and what happens meanwhile."""

    name: str = "watched"
    meanwhile: Callable[[SummaryRequest], None] = lambda request: None
    requests: list[SummaryRequest] = field(default_factory=list)

    def summarize(self, request: SummaryRequest) -> SummaryResult:
        self.requests.append(request)
        self.meanwhile(request)
        return ExtractiveSummarizer().summarize(request)


class Loop:
    """An event loop in a thread of its own, for tests that are not written for one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Awaitable[T]) -> T:
        """What it comes to."""

        async def awaited() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()

    def close(self) -> None:
        """Stop it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Awaited:
    """An async object of ours that looks like the sync one: each call is run on the loop to its end."""

    def __init__(self, subject: Any, loop: Loop) -> None:
        self._subject, self._loop = subject, loop

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._subject, name)
        if not callable(member):
            return member

        @wraps(member)
        def called(*args: Any, **options: Any) -> Any:
            found = member(*args, **options)
            if isawaitable(found):
                return self._loop.run(found)
            if isinstance(found, AsyncTools) or hasattr(found, "__aenter__"):
                return Awaited(found, self._loop)
            return found

        return called

    def __contains__(self, item: Any) -> bool:
        return item in self._subject

    def __enter__(self) -> Any:
        entered = self._loop.run(self._subject.__aenter__())
        return self if entered is self._subject else entered

    def __exit__(self, *raised: Any) -> Any:
        return self._loop.run(self._subject.__aexit__(*raised))


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def watched() -> Watched:
    """The summarizer that `memory` uses."""
    return Watched()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # A module's tests run over each of its runners; those that connect themselves do so in their own way.
    marked = metafunc.definition.get_closest_marker("runners")
    if marked and "runner" in metafunc.fixturenames:
        own = not {"memory", "bring"} & set(metafunc.fixturenames)
        long = marked.kwargs.get("long")
        runners = [
            pytest.param(name, marks=pytest.mark.long if name == long else ())
            for name in marked.args
            if not (own and name == "async")
        ]
        metafunc.parametrize("runner", runners, indirect=True)


@pytest.fixture
def runner(request: pytest.FixtureRequest) -> str:
    """What `memory` is: a Database (sync, and over a pooler: pooled), or an AsyncDatabase (async)."""
    return str(getattr(request, "param", "sync"))


@pytest.fixture(scope="session")
def pooler(server18: Any) -> Iterator[Pooler]:
    """PgBouncer in front of the server."""
    if not os.access(PROGRAM, os.X_OK):
        pytest.skip("no PgBouncer (Debian: apt-get install pgbouncer)")
    with serve(server18.host, server18.port, server18.user) as running:
        yield running


@pytest.fixture
def dsn(direct_dsn: str, runner: str, request: pytest.FixtureRequest) -> str:
    """Connection string of this test's own database, for second sessions and other processes."""
    if runner != "pooled":
        return direct_dsn
    if request.getfixturevalue("pg") != 18:
        pytest.skip("the pooler stands in front of the newest server")
    return str(request.getfixturevalue("pooler").dsn(direct_dsn))


@pytest.fixture
def memory(
    runner: str, dsn: str, watched: Watched, request: pytest.FixtureRequest
) -> Iterator[pycontext.Database]:
    """A database of chats over a connection of its own; an async one in the clothes of a sync one."""
    if runner != "async":
        with pycontext.connect(dsn, summarizer=watched) as database:
            yield database
    else:
        loop = request.getfixturevalue("loop")
        with Awaited(pycontext.aconnect(dsn, summarizer=watched), loop) as database:
            yield database


@pytest.fixture
def bring(runner: str, dsn: str, watched: Watched, request: pytest.FixtureRequest) -> Bring:
    """Opens a connection of the caller's; gives it, and a database of chats over it."""

    @contextmanager
    def bring(**options: Any) -> Iterator[tuple[Any, Any]]:
        if runner != "async":
            with psycopg.connect(dsn, **options) as conn:
                yield conn, pycontext.connect(connection=conn, summarizer=watched)
        else:
            loop = request.getfixturevalue("loop")
            own = loop.run(psycopg.AsyncConnection.connect(dsn, **options))
            with Awaited(own, loop) as conn:
                yield conn, Awaited(pycontext.aconnect(connection=own, summarizer=watched), loop)

    return bring


def exchange(number: int) -> list[dict[str, Any]]:
    """One turn of about 300 tokens, told apart by its code."""
    return [
        {"role": "user", "content": f"Order QX-{4000 + number}: please look where the parcel is. " * 6},
        {
            "role": "assistant",
            "content": f"Parcel {number} left hub B-{number} on 3 March, due on Friday. " * 8,
        },
    ]


@pytest.fixture
def fill(dsn: str) -> Fill:
    """Creates a chat (profile small-8k) and appends that many turns of about 300 tokens."""

    def fill(chat_id: str, turns: int, first: int = 1) -> list[pycontext.Message]:
        rows = [row for number in range(first, first + turns) for row in exchange(number)]
        with pycontext.connect(dsn) as memory:
            memory.create_chat(chat_id, system_prompt="You are a shop's assistant.", profile="small-8k")
            return memory.append(chat_id, rows)

    return fill
