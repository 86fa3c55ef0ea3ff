"""One core for sync and async: an operation is a generator of steps, and what runs it does the waiting.

An operation yields `Call` (one statement, a transaction of its own) and gets its rows back, or a `Question`
(to a model) and gets its answer. It never holds a connection, so nothing is open between two steps.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any, TypeVar

from pycontext.clean import clean_text
from pycontext.errors import BudgetTooSmall, PycontextError
from pycontext.queries import parameter_types
from pycontext.summarizer import AnySummarizer, SummarizerFailed, SummaryRequest, SummaryResult

T = TypeVar("T")

_MOST = {"integer": 2**31 - 1, "bigint": 2**63 - 1}

_GRACE = 10.0
"""How many seconds a cancelled operation has to give back what it holds."""


@dataclass(frozen=True)
class Call:
    """A statement of queries.sql. `is_repeatable`: running it twice does what running it once does."""

    query: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_repeatable: bool = True

    def __post_init__(self) -> None:
        types = parameter_types(self.query)
        for name, value in self.parameters.items():
            # contents have been cleaned; a name is not changed behind the caller's back
            if isinstance(value, str) and value != clean_text(value):
                raise ValueError(f"{name} must be text without NUL and lone surrogates")
            if value is not None:
                _check(name, value, types.get(name))


def _check(name: str, value: Any, kind: str | None) -> None:
    """Whether Postgres can take a value as a parameter of its statement's type."""
    wanted = str if kind == "text" else int if kind in _MOST else None
    if wanted is not None and (not isinstance(value, wanted) or isinstance(value, bool)):
        raise TypeError(f"{name} must be {wanted.__name__}, not {type(value).__name__}")
    if kind in _MOST and not -_MOST[kind] <= value <= _MOST[kind]:
        refused = BudgetTooSmall if name == "token_budget" else PycontextError
        raise refused(
            f"{name} is out of range",
            detail=f"{name} is {value}",
            hint=f"pass at most {_MOST[kind]}, or leave it out",
        )


class Question:
    """What takes its time outside the database; nothing is open meanwhile."""

    def answer(self) -> Any:
        """The answer."""
        raise NotImplementedError

    async def answer_async(self) -> Any:
        """The answer; other tasks go on meanwhile."""
        return await in_thread(self.answer)


@dataclass(frozen=True)
class Ask(Question):
    """A summarizer and what to tell."""

    summarizer: AnySummarizer
    request: SummaryRequest

    def answer(self) -> SummaryResult:
        """Call the summarizer. Whatever goes wrong in it, known or not, is SummarizerFailed."""
        with self._failing():
            return self._checked(self.summarizer.summarize(self.request))

    async def answer_async(self) -> SummaryResult:
        """Await the summarizer where it is async."""
        if not iscoroutinefunction(self.summarizer.summarize):
            return await in_thread(self.answer)
        with self._failing():
            return self._checked(await self.summarizer.summarize(self.request))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except SummarizerFailed:
            raise
        except Exception as error:
            # Of an unforeseen error the pass log gets the class only, for its text may quote the chat.
            raise SummarizerFailed(f"{type(error).__name__} in summarizer {self.summarizer.name}") from error

    def _checked(self, result: Any) -> SummaryResult:
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

    async def answer_async(self) -> None:
        """Wait."""
        await asyncio.sleep(self.seconds)


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


async def run_async(steps: Steps[T], perform: Callable[[Step], Awaitable[Any]]) -> T:
    """`run`, awaited. Of a cancelled operation the steps that give back what it holds are still run."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await perform(step)
            except asyncio.CancelledError as error:
                await _give_back(steps, steps.throw(error), perform)
                raise
            except BaseException as error:  # noqa: BLE001  the operation decides
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        steps.close()


async def _give_back(steps: Steps[Any], step: Step, perform: Callable[[Step], Awaitable[Any]]) -> None:
    """The rest of a cancelled operation, in a task of its own: its scope may cancel again at every await."""

    async def rest() -> None:
        todo = step
        with suppress(StopIteration, asyncio.CancelledError):
            while True:
                try:
                    answer = await perform(todo)
                except Exception as error:  # noqa: BLE001  the operation decides
                    todo = steps.throw(error)
                else:
                    todo = steps.send(answer)

    task = asyncio.ensure_future(rest())
    until = time.monotonic() + _GRACE
    while not task.done() and (left := until - time.monotonic()) > 0:
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task}, timeout=left)
    task.cancel()


async def in_thread(work: Callable[[], T]) -> T:
    """What `work` returns or raises, from a thread of its own.

    Not one of the loop's: these are few, others wait for them, and the process's exit waits for them too.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def tell(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def run_there() -> None:
        told: tuple[Callable[[Any], None], Any]
        try:
            told = future.set_result, context.run(work)
        except BaseException as error:  # noqa: BLE001  handed to the task that waits
            told = future.set_exception, error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, *told)

    threading.Thread(target=run_there, name="pycontext-question", daemon=True).start()
    return await future


def documented_as(pattern: type) -> Callable[[type[T]], type[T]]:
    """Methods without a docstring get that of their namesake in `pattern`."""

    def copy(made: type[T]) -> type[T]:
        for name, member in vars(made).items():
            if callable(member) and not member.__doc__:
                member.__doc__ = getattr(getattr(pattern, name, None), "__doc__", None)
        return made

    return copy
