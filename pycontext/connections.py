"""Where statements run: on a connection of our own, or on the caller's, who keeps the transaction."""

from __future__ import annotations

import json
import os
import re
import selectors
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import psycopg
from psycopg import pq
from psycopg.rows import dict_row
from psycopg.types.json import set_json_loads

from pycontext import steps as core
from pycontext.errors import PoolExhausted, PycontextError, translate
from pycontext.queries import query
from pycontext.steps import Question, Row, Step, Steps

if TYPE_CHECKING:
    from psycopg_pool import AsyncConnectionPool, ConnectionPool

T = TypeVar("T")

VARIABLES = ("PYCONTEXT_DSN", "DATABASE_URL")

# postgresql+psycopg://… is how SQLAlchemy writes it; libpq wants it without the driver.
_DRIVER = re.compile(r"^(postgres(?:ql)?)\+\w+://")

#: How connections of our own are opened: no prepared statements and no session state, so that a transaction
#: pooler may stand in between.
OPTIONS: dict[str, Any] = {
    "autocommit": True,
    "prepare_threshold": None,
    "client_encoding": "utf8",
    "fallback_application_name": "pycontext",
}


class NotConfigured(PycontextError):
    """No database was named, neither by the caller nor by the environment."""


class Link(Protocol):
    """What an operation's statements run on."""

    def execute(
        self, statement: str, parameters: Mapping[str, Any], *, is_repeatable: bool, is_alone: bool
    ) -> list[Row]:
        """Run one statement, return its rows. `is_alone`: in a transaction of its own, in any mode."""
        ...

    @property
    def in_transaction(self) -> bool:
        """True inside a transaction that is not ours to end."""
        ...

    def close(self) -> None:
        """Give back what is ours."""
        ...


def conninfo_from(dsn: str | None) -> str:
    """The given conninfo, else the environment's, else an error that names both."""
    found = dsn or next((os.environ[name] for name in VARIABLES if os.environ.get(name)), None)
    if not found:
        raise NotConfigured(
            "no database to connect to",
            detail=f"no dsn was given, and neither {VARIABLES[0]} nor {VARIABLES[1]} is set",
            hint=f"call connect('postgresql://…'), set {VARIABLES[0]}, or use pycontext.embedded()",
        )
    return _DRIVER.sub(r"\1://", found)


def check_given(dsn: Any, connection: Any, pool: Any, kind: type, pool_kind: str) -> None:
    """At most one is given, and it is of the kind that can be run here: sync or async."""
    if sum(given is not None for given in (dsn, connection, pool)) > 1:
        raise ValueError("give a dsn, a connection or a pool, not both or all")
    if dsn is not None and not isinstance(dsn, str):
        raise TypeError(f"dsn is text, not {type(dsn).__name__}: name it, connection=… or pool=…")
    if connection is not None and not isinstance(connection, kind):
        raise TypeError(f"connection must be a psycopg.{kind.__name__}, not {type(connection).__name__}")
    if pool is not None:
        import psycopg_pool

        if not isinstance(pool, getattr(psycopg_pool, pool_kind)):
            raise TypeError(f"pool must be a psycopg_pool.{pool_kind}, not {type(pool).__name__}")


def is_alive(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """False where the server hung up on a connection that nobody uses. Nothing is sent to find out."""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(connection.pgconn.socket, selectors.EVENT_READ)
            while selector.select(0):
                connection.pgconn.consume_input()
    except psycopg.OperationalError:
        pass
    return not connection.closed


@contextmanager
def pool_errors(pool: ConnectionPool[Any] | AsyncConnectionPool[Any]) -> Iterator[None]:
    """`translate`, and PoolExhausted where the pool had no connection to give."""
    from psycopg_pool import PoolTimeout, TooManyRequests

    try:
        with translate():
            yield
    except (PoolTimeout, TooManyRequests) as error:
        found = pool.get_stats()
        raise PoolExhausted(
            f"pool {pool.name!r} had no connection to give",
            detail=f"waited up to {pool.timeout} s; of {pool.max_size} connections at most "
            f"{found.get('pool_size', 0)} are open and {found.get('pool_available', 0)} free, "
            f"{found.get('connections_errors', 0)} attempts to connect failed",
            hint="give the pool a larger max_size or timeout, and hold no connection of it around calls or"
            " models (pycontext holds none while a model works)",
        ) from error


class OwnLink:
    """A connection of our own, in autocommit: every statement is its own transaction.

    A connection that died while idle is opened anew; the statement it died under is run again, once, where
    that is harmless. Threads take turns.
    """

    in_transaction = False

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._is_closed = False
        self._lock = threading.Lock()
        self._connection = self._open()

    def _open(self) -> psycopg.Connection[Any]:
        with translate():
            return psycopg.connect(self._conninfo, **OPTIONS)

    def execute(
        self, statement: str, parameters: Mapping[str, Any], *, is_repeatable: bool, is_alone: bool
    ) -> list[Row]:
        """Run one statement in a transaction of its own."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this database is closed")
            if is_alive(self._connection):
                try:
                    with translate():
                        return _rows(self._connection, statement, parameters)
                except psycopg.OperationalError:
                    if not (is_repeatable and self._connection.closed):
                        raise
            self._connection = self._open()
            with translate():
                return _rows(self._connection, statement, parameters)

    def close(self) -> None:
        """Close the connection."""
        self._is_closed = True
        self._connection.close()


class CallersLink:
    """The caller's connection. Nothing here ends a transaction that the caller began or must end.

    In autocommit and outside a transaction every statement is its own transaction; otherwise it is part of
    the caller's, and durable at the caller's commit.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    @property
    def in_transaction(self) -> bool:
        """True while a transaction of the caller's is open."""
        return self._connection.info.transaction_status != pq.TransactionStatus.IDLE

    def execute(
        self, statement: str, parameters: Mapping[str, Any], *, is_repeatable: bool, is_alone: bool
    ) -> list[Row]:
        """Run one statement in whatever transaction the caller is in."""
        with translate():
            if not is_alone:
                return _rows(self._connection, statement, parameters)
            with self._connection.transaction():
                return _rows(self._connection, statement, parameters)

    def close(self) -> None:
        """Leave it open: it is the caller's."""


class PoolLink:
    """The caller's pool: each statement borrows a connection for a transaction of its own, and gives it back.

    Nothing is borrowed while a model works, and threads may share it.
    """

    in_transaction = False

    def __init__(self, pool: ConnectionPool[Any]) -> None:
        self._pool = pool

    def execute(
        self, statement: str, parameters: Mapping[str, Any], *, is_repeatable: bool, is_alone: bool
    ) -> list[Row]:
        """Run one statement; committed when the connection goes back."""
        with pool_errors(self._pool):
            for _ in range(self._pool.max_size):  # those that died idle; the pool replaces them
                with self._pool.connection() as connection:
                    if is_alive(connection):
                        return _rows(connection, statement, parameters)
            with self._pool.connection() as connection:
                return _rows(connection, statement, parameters)

    def close(self) -> None:
        """Leave it open: it is the caller's."""


class Runner:
    """Runs operations on a link, step by step, in the calling thread."""

    def __init__(self, link: Link) -> None:
        self.link = link

    @property
    def may_ask(self) -> bool:
        """False inside the caller's transaction: no model is called while one is open."""
        return not self.link.in_transaction

    def run(self, steps: Steps[T], *, is_alone: bool = False) -> T:
        """Run an operation to its end."""

        def perform(step: Step) -> Any:
            if isinstance(step, Question):
                return step.answer()
            return self.link.execute(
                query(step.query), step.parameters, is_repeatable=step.is_repeatable, is_alone=is_alone
            )

        return core.run(steps, perform)


def _rows(connection: psycopg.Connection[Any], statement: str, parameters: Mapping[str, Any]) -> list[Row]:
    with psycopg.Cursor(connection, row_factory=dict_row) as cursor:
        set_json_loads(json.loads, cursor)
        return cursor.execute(statement, parameters, prepare=False).fetchall()
