"""Errors of pycontext, one class per SQLSTATE, each with the server's detail and hint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import psycopg

__all__ = [
    "PycontextError",
    "NoSuchChat",
    "BadMessage",
    "UnknownMessageType",
    "MessageIdReused",
    "ToolResultWithoutId",
    "BudgetTooSmall",
    "BadProfile",
    "SummaryRefused",
    "LeaseHeld",
    "AdoptedChat",
    "NotYourTenant",
    "SchemaTooNew",
    "BadSource",
    "BadEmbedding",
    "SchemaMissing",
    "InTransaction",
    "ContextOverflow",
    "StatementCanceled",
    "PoolExhausted",
    "EmbeddedUnavailable",
    "UnknownEncoding",
    "from_psycopg",
    "translate",
]


class PycontextError(Exception):
    """Base of all errors of pycontext. `str()` gives message, detail and hint, a line each.

    sqlstate: the five-character code, None for an error that did not come from the server.
    message, detail, hint: what happened, with which values, and what to run next.
    """

    SQLSTATE: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, detail: str | None = None, hint: str | None = None, sqlstate: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint
        self.sqlstate = sqlstate if sqlstate is not None else self.SQLSTATE

    def __str__(self) -> str:
        lines = [self.message]
        if self.detail:
            lines.append(f"detail: {self.detail}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.detail, self.hint, self.sqlstate)


def _rebuild(
    cls: type[PycontextError], message: str, detail: str | None, hint: str | None, sqlstate: str | None
) -> PycontextError:
    return cls(message, detail=detail, hint=hint, sqlstate=sqlstate)


class NoSuchChat(PycontextError):
    """There is no chat of this id (for this tenant)."""

    SQLSTATE = "PCX01"


class BadMessage(PycontextError):
    """The message can't be stored as it is: role, content or tool calls are wrong."""

    SQLSTATE = "PCX02"


class UnknownMessageType(BadMessage, TypeError):
    """What was given is of no form that a message or a reply can have."""


class MessageIdReused(PycontextError):
    """The message id is taken by a message with another body."""

    SQLSTATE = "PCX03"


class ToolResultWithoutId(PycontextError):
    """A message of role `tool` has no `tool_call_id`."""

    SQLSTATE = "PCX04"


class BudgetTooSmall(PycontextError):
    """What may never be left out does not fit the token budget."""

    SQLSTATE = "PCX05"


class BadProfile(PycontextError):
    """No such profile, or its limits contradict each other."""

    SQLSTATE = "PCX06"


class SummaryRefused(PycontextError):
    """The summary would do harm (empty, too large, stale) and was not stored."""

    SQLSTATE = "PCX07"


class LeaseHeld(PycontextError):
    """Somebody else is compacting this chat now."""

    SQLSTATE = "PCX08"


class AdoptedChat(PycontextError):
    """The chat's messages live in the product's own table: write there."""

    SQLSTATE = "PCX09"


class NotYourTenant(PycontextError):
    """No right to this tenant."""

    SQLSTATE = "PCX10"


class SchemaTooNew(PycontextError):
    """The database holds a schema that this version of the code does not know."""

    SQLSTATE = "PCX11"


class BadSource(PycontextError):
    """The relation does not fit as a source of messages."""

    SQLSTATE = "PCX12"


class BadEmbedding(PycontextError):
    """An embedding of another model or dimension than those that are kept."""

    SQLSTATE = "PCX13"


class SchemaMissing(PycontextError):
    """Schema pycontext is not installed in this database, or only an older one."""


class InTransaction(PycontextError):
    """What calls a model was asked for inside the caller's open transaction."""


class ContextOverflow(PycontextError):
    """The provider refuses the prompt as too long, and the window can't be made any smaller."""


class StatementCanceled(PycontextError):
    """The server broke a statement off: a timeout of the session, or somebody's order. Nothing was stored."""


class PoolExhausted(PycontextError):
    """The connection pool, or the pooler in front of the server, had no connection to give in time."""


class EmbeddedUnavailable(PycontextError):
    """The embedded server can't be used here; the message says why and the hint what to do."""


class UnknownEncoding(PycontextError):
    """No token tables for an encoding of this name."""


_BY_SQLSTATE: dict[str, type[PycontextError]] = {
    cls.SQLSTATE: cls
    for cls in (
        NoSuchChat, BadMessage, MessageIdReused, ToolResultWithoutId, BudgetTooSmall, BadProfile,
        SummaryRefused, LeaseHeld, AdoptedChat, NotYourTenant, SchemaTooNew, BadSource, BadEmbedding,
    )
    if cls.SQLSTATE is not None
}  # fmt: skip

# query_canceled, lock_not_available
_CANCELED = {
    "57014": "raise statement_timeout for this session or role, or ask for less (token_budget, max_rows)",
    "55P03": "another transaction holds this chat; raise lock_timeout, or look for it in pg_stat_activity",
}

# invalid_schema_name, undefined_function, undefined_table
_MISSING = frozenset({"3F000", "42883", "42P01"})


def from_psycopg(error: psycopg.Error) -> PycontextError | None:
    """The pycontext error for a driver's error, or None where it is not one of ours."""
    state = error.sqlstate
    message = error.diag.message_primary or str(error)
    if state is None:
        return None
    if state in _MISSING:
        # A missing table of the caller's own is not our business.
        if "pycontext" not in message:
            return None
        return SchemaMissing(
            "schema pycontext is not installed in this database, or only an older one",
            detail=message,
            hint="run `pycontext install`, or `pycontext sql | psql -v ON_ERROR_STOP=1`",
            sqlstate=state,
        )
    if state in _CANCELED:
        return StatementCanceled(
            message, detail=error.diag.message_detail, hint=_CANCELED[state], sqlstate=state
        )
    if state == "08P01" and "query_wait_timeout" in message:  # PgBouncer's word for it
        return PoolExhausted(
            "the pooler had no server connection to give",
            detail=message,
            hint="give PgBouncer a larger default_pool_size or query_wait_timeout, or find what holds its"
            " server connections: SHOW SERVERS in its admin console",
            sqlstate=state,
        )
    if not state.startswith("PCX"):
        return None
    cls = _BY_SQLSTATE.get(state, PycontextError)
    return cls(message, detail=error.diag.message_detail, hint=error.diag.message_hint, sqlstate=state)


@contextmanager
def translate(*, missing: bool = True) -> Iterator[None]:
    """Raises the classes of this module in place of the driver's errors; others pass unchanged.

    missing: whether an object that is not there means that the schema is not installed.
    """
    try:
        yield
    except psycopg.Error as error:
        mapped = from_psycopg(error)
        if mapped is None or (isinstance(mapped, SchemaMissing) and not missing):
            raise
        raise mapped from error
