"""Where statements run: on a connection of our own, or on the caller's, who keeps the transaction."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import psycopg
from psycopg import pq
from psycopg.rows import dict_row
from psycopg.types.json import set_json_loads

from pycontext import steps as core
from pycontext.errors import PycontextError, translate
from pycontext.queries import query
from pycontext.steps import Question, Row, Step, Steps

if TYPE_CHECKING:
    from psycopg_pool import ConnectionPool

T = TypeVar("T")

VARIABLES = ("PYCONTEXT_DSN", "DATABASE_URL")

# postgresql+psycopg://… is how SQLAlchemy writes it; libpq wants it without the driver.
_DRIVER = re.compile(r"^(postgres(?:ql)?)\+\w+://")


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


class OwnLink:
    """A connection of our own, in autocommit: every statement is its own transaction.

    No prepared statements and no session state, so a transaction pooler may stand in between. A connection
    that died while idle is opened anew; the statement it died under is run again where that is harmless.
    """

    in_transaction = False

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._is_closed = False
        self._connection = self._open()

    def _open(self) -> psycopg.Connection[Row]:
        with translate():
            return psycopg.connect(
                self._conninfo,
                autocommit=True,
                prepare_threshold=None,
                row_factory=dict_row,
                client_encoding="utf8",
                fallback_application_name="pycontext",
            )

    def execute(
        self, statement: str, parameters: Mapping[str, Any], *, is_repeatable: bool, is_alone: bool
    ) -> list[Row]:
        """Run one statement in a transaction of its own."""
        if self._is_closed:
            raise RuntimeError("this database is closed")
        if self._connection.closed:
            self._connection = self._open()
        try:
            with translate():
                return _rows(self._connection, statement, parameters)
        except Exception:
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
        with translate(), self._pool.connection() as connection:
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
