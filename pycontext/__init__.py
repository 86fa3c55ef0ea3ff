"""Short-term memory for LLM chats in Postgres: the window is a SELECT, the summary is a row of the chat."""

from __future__ import annotations

# The module is loaded before the function of its name is bound, or its later import would take the name.
import pycontext.embedded  # noqa: F401  # isort: skip
from pycontext.async_chat import AsyncDatabase, aconnect
from pycontext.chat import Database, connect, embedded  # type: ignore[no-redef,assignment,unused-ignore]
from pycontext.connections import NotConfigured
from pycontext.errors import (
    AdoptedChat,
    BadEmbedding,
    BadMessage,
    BadProfile,
    BadSource,
    BudgetTooSmall,
    ContextOverflow,
    EmbeddedUnavailable,
    InTransaction,
    LeaseHeld,
    MessageIdReused,
    NoSuchChat,
    NotYourTenant,
    PoolExhausted,
    PycontextError,
    SchemaMissing,
    SchemaTooNew,
    StatementCanceled,
    SummaryRefused,
    ToolResultWithoutId,
    UnknownMessageType,
)
from pycontext.memory import told as memory_text
from pycontext.overflow import is_overflow
from pycontext.rows import Message, Pass, Plan, Status, ThreadRow, WindowRow
from pycontext.scrub import Scrubber, ascrub_stream, scrub, scrub_stream
from pycontext.turn import AsyncTurn, Turn

__all__ = [
    "AdoptedChat",
    "AsyncDatabase",
    "AsyncTurn",
    "BadMessage",
    "BadProfile",
    "BadSource",
    "BadEmbedding",
    "BudgetTooSmall",
    "ContextOverflow",
    "Database",
    "EmbeddedUnavailable",
    "InTransaction",
    "LeaseHeld",
    "Message",
    "MessageIdReused",
    "NoSuchChat",
    "NotConfigured",
    "NotYourTenant",
    "Pass",
    "Plan",
    "PoolExhausted",
    "PycontextError",
    "SchemaMissing",
    "SchemaTooNew",
    "Scrubber",
    "StatementCanceled",
    "Status",
    "SummaryRefused",
    "ThreadRow",
    "ToolResultWithoutId",
    "Turn",
    "UnknownMessageType",
    "WindowRow",
    "aconnect",
    "is_overflow",
    "memory_text",
    "ascrub_stream",
    "connect",
    "embedded",
    "scrub",
    "scrub_stream",
]
