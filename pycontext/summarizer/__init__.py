"""Summarizers: what a compaction pass calls to tell a part of a chat."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pycontext.summary import SourceMessage, Summary

__all__ = [
    "AnySummarizer",
    "AsyncSummarizer",
    "Summarizer",
    "SummarizerFailed",
    "SummaryRequest",
    "SummaryResult",
    "from_environment",
]


@dataclass(frozen=True)
class SummaryRequest:
    """What to tell: the original rows, oldest first, and the limit of the segment in tokens of `count`.

    window_tokens: what the chat's profile says of the summarizer's context window; null = it does not say.
    complaint: why the answer before this one was refused, where it was. ledger_tokens: what the artifacts may
    take beside max_tokens.
    """

    messages: Sequence[SourceMessage]
    previous: Summary | None
    max_tokens: int
    focus: str | None
    count: Callable[[str], int]
    window_tokens: int | None = None
    complaint: str = ""
    ledger_tokens: int = 0


@dataclass(frozen=True)
class SummaryResult:
    """The segment and what it cost. `model` names what made it."""

    segment: Summary
    model: str
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class SummarizerFailed(Exception):
    """No usable summary came back; `reason` is one line fit for the pass log (no chat content).

    `calls`, `prompt_tokens` and `completion_tokens` say what the attempt cost all the same.
    """

    def __init__(
        self, reason: str, *, calls: int = 0, prompt_tokens: int = 0, completion_tokens: int = 0
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.calls = calls
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens


@runtime_checkable
class Summarizer(Protocol):
    """Anything with a `name` and `summarize`.

    A summary that is refused is asked for once more, with the reason; not where `is_deterministic` is true.
    """

    @property
    def name(self) -> str:
        """What the pass log calls it."""
        ...

    def summarize(self, request: SummaryRequest) -> SummaryResult:
        """Tell the request's messages; raises `SummarizerFailed`."""
        ...


@runtime_checkable
class AsyncSummarizer(Protocol):
    """A `Summarizer` whose `summarize` is awaited; for `pycontext.aconnect`."""

    @property
    def name(self) -> str:
        """What the pass log calls it."""
        ...

    async def summarize(self, request: SummaryRequest) -> SummaryResult:
        """Tell the request's messages; raises `SummarizerFailed`."""
        ...


AnySummarizer = Summarizer | AsyncSummarizer


def from_environment() -> Summarizer:
    """The summarizer of this process: the model `PYCONTEXT_SUMMARIZER_MODEL` names, else the built-in one.

    `PYCONTEXT_SUMMARIZER_BASE_URL` and `OPENAI_API_KEY` say where it is and with which key. `.name` says
    which.
    """
    model = os.environ.get("PYCONTEXT_SUMMARIZER_MODEL", "").strip()
    if model:
        from pycontext.summarizer.openai import OpenAISummarizer

        return OpenAISummarizer(
            model, base_url=os.environ.get("PYCONTEXT_SUMMARIZER_BASE_URL", "").strip() or None
        )
    from pycontext.summarizer.extractive import ExtractiveSummarizer

    return ExtractiveSummarizer()
