"""Extractors: what takes durable facts out of messages before these are summarized."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pycontext.summary import SourceMessage

__all__ = [
    "AnyExtractor",
    "AsyncExtractor",
    "Extractor",
    "ExtractorFailed",
    "ExtractorRequest",
    "ExtractorResult",
    "Fact",
    "from_environment",
]


@dataclass(frozen=True)
class Fact:
    """One fact and the message it cites.

    `subject` names what it is about, such as `user.name`: of two facts about one subject the newer holds.
    """

    seq: int
    content: str
    subject: str | None = None
    kind: str = "fact"


@dataclass(frozen=True)
class ExtractorRequest:
    """The original messages, oldest first, masked; `count` counts tokens.

    Roles are the stored ones, but for role `user` on what the user did not write himself: that is `system`.
    """

    messages: Sequence[SourceMessage]
    count: Callable[[str], int]


@dataclass(frozen=True)
class ExtractorResult:
    """The facts and what they cost. `model` names what found them."""

    facts: Sequence[Fact]
    model: str
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ExtractorFailed(Exception):
    """No usable facts came back; `reason` is one line without chat content. The rest is what it cost."""

    def __init__(
        self, reason: str, *, calls: int = 0, prompt_tokens: int = 0, completion_tokens: int = 0
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.calls = calls
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens


@runtime_checkable
class Extractor(Protocol):
    """Anything with a `name` and `extract`. No facts is a good answer; a wrong one is refused whole."""

    @property
    def name(self) -> str:
        """What the log calls it."""
        ...

    def extract(self, request: ExtractorRequest) -> ExtractorResult:
        """The facts of the request's messages; raises `ExtractorFailed`."""
        ...


@runtime_checkable
class AsyncExtractor(Protocol):
    """An `Extractor` whose `extract` is awaited; for `pycontext.aconnect`."""

    @property
    def name(self) -> str:
        """What the log calls it."""
        ...

    async def extract(self, request: ExtractorRequest) -> ExtractorResult:
        """The facts of the request's messages; raises `ExtractorFailed`."""
        ...


AnyExtractor = Extractor | AsyncExtractor


def from_environment() -> Extractor:
    """The extractor of this process: the model `PYCONTEXT_SUMMARIZER_MODEL` names, else the built-in rules.

    `PYCONTEXT_SUMMARIZER_BASE_URL` and `OPENAI_API_KEY` say where it is and with which key.
    """
    model = os.environ.get("PYCONTEXT_SUMMARIZER_MODEL", "").strip()
    if model:
        from pycontext.extractor.openai import OpenAIExtractor

        return OpenAIExtractor(
            model, base_url=os.environ.get("PYCONTEXT_SUMMARIZER_BASE_URL", "").strip() or None
        )
    from pycontext.extractor.rules import RuleExtractor

    return RuleExtractor()
