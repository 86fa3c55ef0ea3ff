"""Where statements run, awaited: the links of `connections` over psycopg's async connection and pool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import psycopg
from psycopg import pq
from psycopg.rows import dict_row
from psycopg.types.json import set_json_loads

from pycontext.connections import OPTIONS, is_alive, pool_errors
from pycontext.errors import translate
from pycontext.queries import query
from pycontext.steps import Question, Row, Step, Steps, run_async

if TYPE_CHECKING:
    from psycopg_pool import AsyncConnectionPool

T = TypeVar("T")


class AsyncLink(Protocol):
    """What an operation's statements run on; `connections.Link`, awaited."""

    async def execute(
        self, statement: str, parameters: Mapping[str, Any], *, is_repeatable: bool, is_alone: bool
    ) -> list[Row]:
        """Run one statement, return its rows. `is_alone`: in a transaction of its own, in any mode."""
        ...

    @property
    def in_transaction(self) -> bool:
        """True inside a transaction that is not ours to end."""
        ...

    async def open(self) -> None:
        """Connect, where that is ours to do."""
        ...

    async def close(self) -> None:
        """Give back what is ours."""
        ...


class AsyncOwnLink:
    """A connection of our own, in autocommit: every statement is its own transaction.

    It is opened when first used. One that died while idle is opened anew; the statement it died under is run
    again, once, where that is harmless. Tasks take turns.
    """

    in_transaction = False

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._is_closed = False
        self._lock = asyncio.Lock()
        self._connection: psycopg.AsyncConnection[Any] | None = None

    async def open(self) -> None:
        """Connect."""
        async with self._lock:
            await self._open()

    async def _open(self) -> psycopg.AsyncConnection[Any]:
        with translate():
            self._connection = await psycopg.AsyncConnection.connect(self._conninfo, **OPTIONS)
        return self._connection

    async def execute(
        self, statement: str, parameters: Mapping[str, Any], *, is_repeatable: bool, is_alone: bool
    ) -> list[Row]:
        """Run one statement in a transaction of its own."""
        async with self._lock:
            if self._is_closed:
                raise RuntimeError("this database is closed")
            connection = self._connection
            if connection is not None and is_alive(connection):
                try:
                    with translate():
                        return await _rows(connection, statement, parameters)
                except psycopg.OperationalError:
                    if not (is_repeatable and connection.closed):
                        raise
            connection = await self._open()
            with translate():
                return await _rows(connection, statement, parameters)

    async def close(self) -> None:
        """Close the connection."""
        self._is_closed = True
        if self._connection is not None:
            await self._connection.close()


class AsyncCallersLink:
    """The caller's connection. Nothing here ends a transaction that the caller began or must end.

    In autocommit and outside a transaction every statement is its own transaction; otherwise it is part of
    the caller's, and durable at the caller's commit.
    """

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    @property
    def in_transaction(self) -> bool:
        """True while a transaction of the caller's is open."""
        return self._connection.info.transaction_status != pq.TransactionStatus.IDLE

    async def execute(
        self, statement: str, parameters: Mapping[str, Any], *, is_repeatable: bool, is_alone: bool
    ) -> list[Row]:
        """Run one statement in whatever transaction the caller is in."""
        with translate():
            if not is_alone:
                return await _rows(self._connection, statement, parameters)
            async with self._connection.transaction():
                return await _rows(self._connection, statement, parameters)

    async def open(self) -> None:
        """It is open: it is the caller's."""

    async def close(self) -> None:
        """Leave it open: it is the caller's."""


class AsyncPoolLink:
    """The caller's pool: each statement borrows a connection for a transaction of its own, and gives it back.

    Nothing is borrowed while a model works, and tasks may share it.
    """

    in_transaction = False

    def __init__(self, pool: AsyncConnectionPool[Any]) -> None:
        self._pool = pool

    async def execute(
        self, statement: str, parameters: Mapping[str, Any], *, is_repeatable: bool, is_alone: bool
    ) -> list[Row]:
        """Run one statement; committed when the connection goes back."""
        with pool_errors(self._pool):
            for _ in range(self._pool.max_size):  # those that died idle; the pool replaces them
                async with self._pool.connection() as connection:
                    if is_alive(connection):
                        return await _rows(connection, statement, parameters)
            async with self._pool.connection() as connection:
                return await _rows(connection, statement, parameters)

    async def open(self) -> None:
        """It is the caller's to open."""

    async def close(self) -> None:
        """Leave it open: it is the caller's."""


class AsyncRunner:
    """Runs operations on a link, step by step, in the calling task."""

    def __init__(self, link: AsyncLink) -> None:
        self.link = link

    @property
    def may_ask(self) -> bool:
        """False inside the caller's transaction: no model is called while one is open."""
        return not self.link.in_transaction

    async def run(self, steps: Steps[T], *, is_alone: bool = False) -> T:
        """Run an operation to its end."""

        async def perform(step: Step) -> Any:
            if isinstance(step, Question):
                return await step.answer_async()
            return await self.link.execute(
                query(step.query), step.parameters, is_repeatable=step.is_repeatable, is_alone=is_alone
            )

        return await run_async(steps, perform)


async def _rows(
    connection: psycopg.AsyncConnection[Any], statement: str, parameters: Mapping[str, Any]
) -> list[Row]:
    async with psycopg.AsyncCursor(connection, row_factory=dict_row) as cursor:
        set_json_loads(json.loads, cursor)
        await cursor.execute(statement, parameters, prepare=False)
        return await cursor.fetchall()
