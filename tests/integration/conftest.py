"""A database of chats on the test's own Postgres, and a chat long enough to be compacted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import pycontext
from pycontext.summarizer import SummaryRequest, SummaryResult
from pycontext.summarizer.extractive import ExtractiveSummarizer

Fill = Callable[..., list[pycontext.Message]]


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


@pytest.fixture
def watched() -> Watched:
    """The summarizer that `memory` uses."""
    return Watched()


@pytest.fixture
def memory(dsn: str, watched: Watched) -> Iterator[pycontext.Database]:
    """A Database over a connection of its own."""
    with pycontext.connect(dsn, summarizer=watched) as database:
        yield database


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
def fill(memory: pycontext.Database) -> Fill:
    """Creates a chat (profile small-8k) and appends that many turns of about 300 tokens."""

    def fill(chat_id: str, turns: int, first: int = 1) -> list[pycontext.Message]:
        memory.create_chat(chat_id, system_prompt="You are a shop's assistant.", profile="small-8k")
        rows = [row for number in range(first, first + turns) for row in exchange(number)]
        return memory.append(chat_id, rows)

    return fill
