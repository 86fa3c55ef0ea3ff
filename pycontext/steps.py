"""One core for sync and async: an operation is a generator of steps, and what runs it does the waiting.

An operation yields `Call` (one statement, a transaction of its own) and gets its rows back, or a `Question`
(to a model) and gets its answer. It never holds a connection, so nothing is open between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pycontext.summarizer import Summarizer, SummarizerFailed, SummaryRequest, SummaryResult

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """A statement of queries.sql. `is_repeatable`: running it twice does what running it once does."""

    query: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_repeatable: bool = True


class Question:
    """What takes its time outside the database; nothing is open meanwhile."""

    def answer(self) -> Any:
        """The answer."""
        raise NotImplementedError


@dataclass(frozen=True)
class Ask(Question):
    """A summarizer and what to tell."""

    summarizer: Summarizer
    request: SummaryRequest

    def answer(self) -> SummaryResult:
        """Call the summarizer. Whatever goes wrong in it, known or not, is SummarizerFailed."""
        try:
            result = self.summarizer.summarize(self.request)
        except SummarizerFailed:
            raise
        except Exception as error:
            # Of an unforeseen error the pass log gets the class only, for its text may quote the chat.
            raise SummarizerFailed(f"{type(error).__name__} in summarizer {self.summarizer.name}") from error
        if not isinstance(result, SummaryResult):
            kind = type(result).__name__
            raise SummarizerFailed(f"summarizer {self.summarizer.name} returned {kind}, not SummaryResult")
        return result


@dataclass(frozen=True)
class Pause(Question):
    """A wait, in seconds."""

    seconds: float

    def answer(self) -> None:
        """Wait."""
        time.sleep(self.seconds)


Step = Call | Question
Row = dict[str, Any]
Steps = Generator[Step, Any, T]


def run(steps: Steps[T], perform: Callable[[Step], Any]) -> T:
    """Run an operation to its end, each step by `perform`; what a step raises is raised inside it.

    So is an interruption: an operation that holds something gives it back in steps of its own.
    """
    try:
        step = next(steps)
        while True:
            try:
                answer = perform(step)
            except BaseException as error:  # noqa: BLE001  the operation decides
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        steps.close()
