"""Durable facts: the flush that takes them from messages, before a summary replaces these in the window."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

from pycontext import messages, tokens
from pycontext.compaction import Flush, FlushFailed, FlushRequest, told_call
from pycontext.errors import BadMessage, SummaryRefused
from pycontext.extractor import (
    AnyExtractor,
    AsyncExtractor,
    Extractor,
    ExtractorFailed,
    ExtractorRequest,
    ExtractorResult,
    Fact,
    from_environment,
)
from pycontext.masking import mask
from pycontext.rows import Recalled
from pycontext.steps import Call, Question, Row, Steps, in_thread
from pycontext.summary import Count, SourceMessage, plain, without_memory

__all__ = ["Flushed", "Learn", "flush", "from_environment", "hook", "told", "without_memory"]

logger = logging.getLogger("pycontext")

#: An extractor, or a plain function that does for one.
GivenExtractor = Extractor | Callable[[ExtractorRequest], Sequence[Fact]]
GivenAsyncExtractor = AsyncExtractor | Callable[[ExtractorRequest], Awaitable[Sequence[Fact]]]

SECONDS = 60.0
"""How long a flush may take, all its requests together."""

_ROWS_AT_ONCE = 500
_MAX_LENGTH = 2000
_OTHER = {"user": "assistant", "assistant": "user"}


@dataclass(frozen=True)
class Flushed:
    """What a flush came to: `outcome` is 'flushed', 'nothing' (there was nothing to read) or 'failed'."""

    outcome: str
    facts: int = 0
    reason: str | None = None
    is_required: bool = True
    model: str | None = None
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @property
    def blocks(self) -> bool:
        """True where no summary may be written: the flush failed, and the profile requires it."""
        return self.outcome == "failed" and self.is_required


@dataclass(frozen=True)
class Learn(Question):
    """An extractor, what it is to read, and for how many seconds it may."""

    extractor: AnyExtractor
    request: ExtractorRequest
    seconds: float

    def answer(self) -> ExtractorResult:
        """Call the extractor. Whatever goes wrong in it, also that it takes too long, is ExtractorFailed."""
        found: list[Any] = []
        thread = threading.Thread(target=self._work, args=(found,), name="pycontext-extractor", daemon=True)
        thread.start()
        thread.join(max(self.seconds, 0.0))
        return self._told(found[0] if found else TimeoutError())

    async def answer_async(self) -> ExtractorResult:
        """Await the extractor where it is async."""
        found: Any
        try:
            found = await asyncio.wait_for(self._work_async(), max(self.seconds, 0.0))
        except asyncio.TimeoutError:
            found = TimeoutError()
        except Exception as error:  # noqa: BLE001  told below
            found = error
        return self._told(found)

    def _told(self, answer: Any) -> ExtractorResult:
        name = self.extractor.name
        if isinstance(answer, TimeoutError):
            raise ExtractorFailed(f"{name} gave no answer in time")
        if isinstance(answer, ExtractorFailed):
            raise answer
        if isinstance(answer, BaseException):
            # Of an unforeseen error the log gets the class only, for its text may quote the chat.
            raise ExtractorFailed(f"{type(answer).__name__} in {name}") from answer
        return _checked(answer, name, {row.seq for row in self.request.messages})

    def _work(self, found: list[Any]) -> None:
        try:
            found.append(self.extractor.extract(self.request))
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits
            found.append(error)

    async def _work_async(self) -> Any:
        if iscoroutinefunction(self.extractor.extract):
            return await self.extractor.extract(self.request)
        return await in_thread(partial(self.extractor.extract, self.request))


@dataclass(frozen=True)
class FunctionExtractor:
    """A plain function from an ExtractorRequest to facts, as an extractor."""

    function: Callable[[ExtractorRequest], Any]

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def extract(self, request: ExtractorRequest) -> ExtractorResult:
        """What the function returns."""
        return ExtractorResult(self.function(request), self.name)


@dataclass(frozen=True)
class AsyncFunctionExtractor(FunctionExtractor):
    """The same of an async function."""

    async def extract(self, request: ExtractorRequest) -> ExtractorResult:  # type: ignore[override]
        """What the function returns."""
        return ExtractorResult(await self.function(request), self.name)


def as_extractor(given: GivenExtractor | GivenAsyncExtractor) -> AnyExtractor:
    """`given`, a function wrapped. Raises TypeError for anything else."""
    if isinstance(given, (Extractor, AsyncExtractor)):
        return given
    if iscoroutinefunction(given):
        return AsyncFunctionExtractor(given)
    if callable(given):
        return FunctionExtractor(given)
    kind = type(given).__name__
    raise TypeError(f"an extractor has a name and extract(request), or is a function, not {kind}")


def flush(
    chat_id: str,
    after_message_id: str,
    choose: Callable[[], AnyExtractor],
    *,
    edit_no: int | None = None,
    count: Count = tokens.count,
    seconds: float = SECONDS,
) -> Steps[Flushed]:
    """Take the facts of all messages up to M that no flush has read yet.

    They are read in pieces, each stored whole or not at all. edit_no: what the caller read the chat under;
    facts are refused where it moved. What goes wrong in the extractor and facts that are refused are not
    raised: that is the outcome, and noted on the chat. No message is written, nothing is compacted.
    """
    started = time.monotonic()
    total = Flushed("nothing")
    extractor: AnyExtractor | None = None
    while True:
        rows: list[Row] = yield Call(
            "flush_source",
            {"chat_id": chat_id, "after_message_id": after_message_id, "max_rows": _ROWS_AT_ONCE},
        )
        if not rows:
            return replace(total, seconds=round(time.monotonic() - started, 3))
        extractor = extractor or choose()
        request = ExtractorRequest([_message(row) for row in rows], count)
        total = replace(total, model=extractor.name, is_required=rows[0]["flush_mode"] == "required")
        try:
            result: ExtractorResult = yield Learn(extractor, request, started + seconds - time.monotonic())
            total = _spent(total, result)
            stored: list[Row] = yield Call(
                "flush_facts",
                {
                    "chat_id": chat_id,
                    "after_message_id": rows[-1]["message_id"],
                    "facts": messages.to_json([_element(fact) for fact in result.facts]),
                    "edit_no": rows[0]["edit_no"] if edit_no is None else edit_no,
                },
            )
        except ExtractorFailed as error:
            reason = error.reason
            total = _spent(total, error)
        except (BadMessage, SummaryRefused) as error:
            reason = error.message
        else:
            total = replace(total, outcome="flushed", facts=total.facts + len(stored))
            continue
        logger.warning("memory flush of chat %s failed: %s", chat_id, reason)
        yield Call("fail_flush", {"chat_id": chat_id, "reason": reason})
        return replace(total, outcome="failed", reason=reason, seconds=round(time.monotonic() - started, 3))


def hook(choose: Callable[[], AnyExtractor], *, seconds: float = SECONDS) -> Flush:
    """The flush as compaction runs it: a failure that the profile does not excuse is FlushFailed."""

    def run(request: FlushRequest) -> Steps[None]:
        done = yield from flush(
            request.chat_id,
            request.after_message_id,
            choose,
            edit_no=request.edit_no,
            count=request.count,
            seconds=seconds,
        )
        if done.blocks:
            raise FlushFailed(
                done.reason or "",
                calls=done.calls,
                prompt_tokens=done.prompt_tokens,
                completion_tokens=done.completion_tokens,
            )

    return run


def told(rows: Sequence[Recalled]) -> str:
    """What was recalled as text for a turn: `db.turn(…, context=pycontext.memory_text(db.recall(…)))`.

    One paragraph a row, with its day and where it stands; fenced by the window, never stored. Empty for none.
    """
    return "\n\n".join(_told(row) for row in rows)


def _told(row: Recalled) -> str:
    place = f"{row.stated_at:%Y-%m-%d} #{row.seq}"
    if row.kind == "fact":
        return f"[{place}] {row.content}"
    said = {row.seq: f"[{place} {row.role}] {row.content}"}
    if row.beside_seq is not None:
        said[row.beside_seq] = f"[#{row.beside_seq} {_OTHER[row.role]}] {row.beside}"
    for near in row.also or ():
        said[near["seq"]] = f"[#{near['seq']} {near['role']}] {near['content']}"
    return "\n".join(said[seq] for seq in sorted(said))


def _message(row: Row) -> SourceMessage:
    """A row as the extractor reads it: masked, without what nobody said."""
    role = row["role"] if row["role"] != "user" or row["is_user"] else "system"
    return SourceMessage(
        seq=row["seq"],
        message_id=row["message_id"],
        role=role,
        text=mask(without_memory(row["text"] or "")),
        tool_calls=[told_call(call) for call in row["tool_calls"] or ()] or None,
        tool_call_id=row["tool_call_id"],
        name=row["name"],
        tokens=row["tokens"],
        created_at=row["created_at"],
    )


def _checked(answer: Any, name: str, seqs: set[int]) -> ExtractorResult:
    """The answer with tidy facts, or ExtractorFailed: one fact that can't be kept refuses them all."""
    if not isinstance(answer, ExtractorResult):
        raise ExtractorFailed(f"{name} returned {type(answer).__name__}, not ExtractorResult")
    facts: list[Fact] = []
    cost = {
        "calls": answer.calls,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
    }
    try:
        given = [_fact(fact) for fact in answer.facts]
    except TypeError:
        raise ExtractorFailed(f"{name} returned facts of a wrong form", **cost) from None
    for fact in given:
        content = mask(plain(fact.content)) if isinstance(fact.content, str) else ""
        wrong = not any(map(str.isalnum, content)) or len(content) > _MAX_LENGTH
        if wrong or isinstance(fact.seq, bool) or fact.seq not in seqs:
            raise ExtractorFailed(f"{name} returned a fact that can't be kept, one of {len(given)}", **cost)
        subject = plain(fact.subject)[:200] if fact.subject else None
        facts.append(Fact(fact.seq, content, subject or None, plain(fact.kind or "fact")[:60]))
    return replace(answer, facts=facts)


def _fact(value: Any) -> Fact:
    if isinstance(value, Fact):
        return value
    if isinstance(value, Mapping):
        return Fact(**value)
    raise TypeError


def _element(fact: Fact) -> dict[str, Any]:
    return {"seq": fact.seq, "content": fact.content, "subject": fact.subject, "kind": fact.kind}


def _spent(total: Flushed, cost: ExtractorResult | ExtractorFailed) -> Flushed:
    return replace(
        total,
        calls=total.calls + cost.calls,
        prompt_tokens=total.prompt_tokens + cost.prompt_tokens,
        completion_tokens=total.completion_tokens + cost.completion_tokens,
    )
