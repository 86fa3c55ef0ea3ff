"""What the database returns, as frozen dataclasses by column name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Message:
    """A stored row: its place and its name. Its content is what was given."""

    chat_id: str
    seq: int
    message_id: str
    kind: str
    role: str
    created_at: datetime


@dataclass(frozen=True)
class WindowRow:
    """One row of `working_window`. `content` is exactly what the model reads, `tokens` what it takes."""

    ordinal: int
    section: str
    message_id: str | None
    seq: int | None
    kind: str
    role: str
    content: Any
    tool_calls: list[dict[str, Any]] | None
    tool_call_id: str | None
    name: str | None
    tokens: int
    is_estimate: bool
    is_shortened: bool
    is_escaped: bool
    created_at: datetime | None


@dataclass(frozen=True)
class Explained:
    """One row of `explain_window`: what became of a row in the window, whose doing it is, and why.

    seq is None for what only the window has; `tokens` is what is sent, `stored` what was stored.
    """

    seq: int | None
    preview: str
    fate: str
    by: str | None
    reason: str
    tokens: int
    stored: int | None
    role: str | None
    section: str | None
    message_id: str | None


@dataclass(frozen=True)
class ThreadRow:
    """One row of `thread`: what was stored. `origin` is set on a summary row ('compaction' or 'reset')."""

    seq: int
    message_id: str
    kind: str
    origin: str | None
    role: str
    content: Any
    tool_calls: list[dict[str, Any]] | None
    tool_call_id: str | None
    name: str | None
    tokens: int
    is_estimate: bool
    created_at: datetime
    metadata: dict[str, Any] | None
    summary: dict[str, Any] | None


@dataclass(frozen=True)
class Plan:
    """One row of `compaction_plan`. `from_seq` … `after_message_id` are None where nothing can be cut."""

    decision: str
    reason: str
    token_budget: int
    window_tokens: int
    trigger_tokens: int
    target_tokens: int
    head_tokens: int
    summary_tokens: int
    tail_tokens: int
    from_seq: int | None
    to_seq: int | None
    after_message_id: str | None
    covered_tokens: int | None
    max_summary_tokens: int | None
    max_line_tokens: int | None
    expected_tokens: int | None
    edit_no: int


@dataclass(frozen=True)
class Status:
    """One row of `window_status`."""

    chat_id: str
    profile: str
    encoding: str
    token_scale: float
    token_budget: int
    window_tokens: int
    trigger_tokens: int
    is_degraded: bool
    messages: int
    last_seq: int
    line_id: str | None
    line_seq: int | None
    line_origin: str | None
    uncounted: int
    act_no: int
    edit_no: int


@dataclass(frozen=True)
class Pass:
    """One compaction attempt; tokens are the window's.

    outcome: 'summarized', 'pruned', 'skipped' or 'failed'. trigger: 'demand', 'before', 'after' or 'worker'.
    """

    outcome: str
    reason: str | None = None
    from_seq: int | None = None
    to_seq: int | None = None
    summary_id: str | None = None
    tokens_before: int | None = None
    tokens_after: int | None = None
    saved_tokens: int | None = None
    model: str | None = None
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    trigger: str | None = None


@dataclass(frozen=True)
class Lease:
    """One row of `claim_compaction`: who compacts the chat, until when, and the chat's newest pass."""

    is_claimed: bool
    holder: str
    expires_at: datetime
    pass_no: int
    encoding: str
    summarizer_window: int


@dataclass(frozen=True)
class DueChat:
    """One row of `chats_due`. `token_budget` is what its newest turn read under, None for the profile's."""

    chat_id: str
    token_budget: int | None
    last_seq: int
    act_no: int


@dataclass(frozen=True)
class StoredFact:
    """One row of `remember` and `memory_page`. `is_superseded`: a newer fact says the same, or otherwise."""

    chat_id: str
    fact_id: str
    seq: int
    role: str
    source: str
    kind: str
    subject: str | None
    content: str
    is_superseded: bool
    stated_at: datetime
    created_at: datetime


@dataclass(frozen=True)
class Recalled:
    """One row of `recall`: a fact, or a passage of a message. `score` is None where nothing was asked.

    beside: how the reply to the message begins, or what it replies to; None where there is none to tell.
    also: messages right before or after that fit too, in short: dicts of seq, role and content.
    """

    kind: str
    chat_id: str
    seq: int
    fact_id: str | None
    message_id: str | None
    role: str
    subject: str | None
    content: str
    score: float | None
    tokens: int
    stated_at: datetime
    beside_seq: int | None
    beside: str | None
    also: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class LostValue:
    """One row of `lost_values`: a value of a covered message that neither the line nor a fact names."""

    seq: int
    message_id: str
    role: str
    kind: str
    value: str


@dataclass(frozen=True)
class Pin:
    """A pinned message. `unit_seq`: where what is shown with it begins."""

    seq: int
    message_id: str
    unit_seq: int
    created_at: datetime


@dataclass(frozen=True)
class Found:
    """One row of `search_thread`. `preview` is the text around the first word that was found."""

    seq: int
    message_id: str
    role: str
    preview: str
    tokens: int
    created_at: datetime


def as_row(kind: type[T], record: Mapping[str, Any]) -> T:
    """The record as that dataclass; columns it does not know are left out."""
    names = (f.name for f in fields(kind))  # type: ignore[arg-type]
    return kind(**{name: record[name] for name in names})
