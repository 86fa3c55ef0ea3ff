"""Short-term memory for LLM chats in Postgres: the window is a SELECT, the summary is a row of the chat."""

from __future__ import annotations

# The module is loaded before the function of its name is bound, or its later import would take the name.
import pycontext.embedded  # noqa: F401  # isort: skip
from pycontext.chat import Database, connect, embedded  # type: ignore[no-redef,assignment,unused-ignore]
from pycontext.connections import NotConfigured
from pycontext.errors import (
    AdoptedChat,
    BadMessage,
    BadProfile,
    BadSource,
    BudgetTooSmall,
    EmbeddedUnavailable,
    LeaseHeld,
    MessageIdReused,
    NoSuchChat,
    NotYourTenant,
    PycontextError,
    SchemaMissing,
    SchemaTooNew,
    SummaryRefused,
    ToolResultWithoutId,
)
from pycontext.rows import Message, Pass, Plan, Status, ThreadRow, WindowRow
from pycontext.scrub import Scrubber, ascrub_stream, scrub, scrub_stream
from pycontext.turn import Turn

__all__ = [
    "AdoptedChat",
    "BadMessage",
    "BadProfile",
    "BadSource",
    "BudgetTooSmall",
    "Database",
    "EmbeddedUnavailable",
    "LeaseHeld",
    "Message",
    "MessageIdReused",
    "NoSuchChat",
    "NotConfigured",
    "NotYourTenant",
    "Pass",
    "Plan",
    "PycontextError",
    "SchemaMissing",
    "SchemaTooNew",
    "Scrubber",
    "Status",
    "SummaryRefused",
    "ThreadRow",
    "ToolResultWithoutId",
    "Turn",
    "WindowRow",
    "ascrub_stream",
    "connect",
    "embedded",
    "scrub",
    "scrub_stream",
]
