"""One compaction pass: claim, plan, prune, read, flush, summarize, merge, store.

A model is called between two transactions, by one process at a time.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

from pycontext import messages, operations, tokens
from pycontext.errors import LeaseHeld, PycontextError, SummaryRefused
from pycontext.masking import MASK, mask
from pycontext.operations import Encodings
from pycontext.rows import Lease, Pass, Plan, as_row
from pycontext.steps import Ask, Call, Pause, Row, Steps
from pycontext.summarizer import AnySummarizer, SummarizerFailed, SummaryRequest, SummaryResult
from pycontext.summary import (
    Count,
    SourceMessage,
    Summary,
    merge,
    merge_segments,
    size,
    validate,
    without_memory,
)

logger = logging.getLogger("pycontext")

ON_DEMAND = "demand"
AFTER_TURN = "after"
BEFORE_TURN = "before"
BY_WORKER = "worker"

LEASE_SECONDS = 300
"""How long a lease lasts; a slow model may still store its summary after it, while nobody took the lease."""

_PATIENCE = {ON_DEMAND: 60.0, BEFORE_TURN: 20.0}
"""How long to wait, in seconds, for somebody else's pass to end; others do not wait."""


@dataclass(frozen=True)
class FlushRequest:
    """What a memory flush is to look at: the original rows of exactly the range about to be summarized.

    messages: secrets masked; `is_told` is false for rows that stay in sight. window_tokens: of the
    summarizer's model, from the chat's profile.
    """

    chat_id: str
    after_message_id: str
    edit_no: int
    holder: str
    trigger: str
    messages: Sequence[SourceMessage]
    count: Count
    window_tokens: int


class FlushFailed(Exception):
    """No fact was taken; nothing is summarized. `reason` is one line for the pass log (no chat content)."""

    def __init__(
        self, reason: str, *, calls: int = 0, prompt_tokens: int = 0, completion_tokens: int = 0
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.calls = calls
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens


class Flush(Protocol):
    """Takes durable facts before a range is summarized, as steps; raises `FlushFailed`."""

    def __call__(self, request: FlushRequest) -> Steps[None]:
        """Take the facts, all or none; a second time changes nothing."""
        ...


@dataclass(frozen=True)
class Job:
    """What one compaction is asked to do. `choose` gives the summarizer once there is something to tell."""

    chat_id: str
    trigger: str
    choose: Callable[[], AnySummarizer]
    token_budget: int | None = None
    focus: str | None = None
    flush: Flush | None = None
    lease_seconds: int = LEASE_SECONDS


@dataclass
class _Spent:
    """What a pass has cost so far."""

    model: str | None = None
    started: float = 0.0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, part: SummaryResult | SummarizerFailed | FlushFailed) -> None:
        self.calls += part.calls
        self.prompt_tokens += part.prompt_tokens
        self.completion_tokens += part.completion_tokens

    def as_pass(self, outcome: str, reason: str) -> Pass:
        return Pass(
            outcome,
            reason,
            model=self.model,
            calls=self.calls,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            seconds=round(time.monotonic() - self.started, 3) if self.started else 0.0,
        )


@dataclass(frozen=True)
class _Held:
    """The lease of this pass."""

    holder: str
    lease: Lease


def compact(job: Job, encodings: Encodings) -> Steps[Pass]:
    """Compact where the plan says so; on demand, wherever there is something to cut.

    One process at a time: who comes second waits for the first one's line on demand and before a turn, and
    leaves it alone otherwise. A long stretch takes several passes, each logged: on demand all of them,
    one at a time otherwise. A summarizer that fails and a summary that is refused leave no row: the pass is
    logged and returned as failed, and automatic passes wait.
    """
    begun: Pass | None = None
    while True:
        done, is_more = yield from _compact(job, encodings)
        done = replace(done, trigger=job.trigger)
        _report(job, done)
        done = done if begun is None else _joined(begun, done)
        if not is_more or job.trigger != ON_DEMAND:
            return done
        begun = done


def _joined(one: Pass, two: Pass) -> Pass:
    """Two passes in a row as one; where the second stored nothing, the first one stands."""
    both = replace(
        one if two.outcome != "summarized" else two,
        reason=two.reason,
        from_seq=one.from_seq,
        tokens_before=one.tokens_before,
        calls=(one.calls or 0) + (two.calls or 0),
        prompt_tokens=(one.prompt_tokens or 0) + (two.prompt_tokens or 0),
        completion_tokens=(one.completion_tokens or 0) + (two.completion_tokens or 0),
        seconds=round((one.seconds or 0) + (two.seconds or 0), 3),
    )
    return replace(both, saved_tokens=(both.tokens_before or 0) - (both.tokens_after or 0))


def quietly(job: Job, encodings: Encodings) -> Steps[Pass | None]:
    """Compact in the course of a turn: a failure is logged, and never becomes the user's."""
    try:
        return (yield from compact(job, encodings))
    except Exception as error:  # noqa: BLE001  the turn is over, or goes on without
        report_error(job.chat_id, error)
        return None


def report_error(chat_id: str, error: Exception) -> None:
    """Log an unforeseen error by its class and place: its text may quote the chat."""
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    place = f"{os.path.basename(frame[0].filename)}:{frame[0].lineno}" if frame else "?"
    what = type(error).__name__
    if isinstance(error, PycontextError):
        what += f" {error.sqlstate or ''}: {error.message}"
    logger.error("compaction of chat %s broke off: %s (%s)", chat_id, what, place)


def _compact(job: Job, encodings: Encodings) -> Steps[tuple[Pass, bool]]:
    """One pass, and whether it took a piece only of what can be cut."""
    yield from operations.count_tokens(job.chat_id, encodings)
    plan = yield from operations.plan(job.chat_id, job.token_budget)
    if not _is_due(job, plan):
        return (yield from _skip(job, plan)), False
    held = yield from _claim(job, plan)
    if isinstance(held, Pass):
        return held, False
    try:
        done = yield from _hold(job, held, encodings)
    except GeneratorExit:
        raise
    except BaseException:
        yield from _release(job, held)
        raise
    if done.outcome != "summarized":
        return done, False
    yield from operations.count_tokens(job.chat_id, encodings)
    after = yield from operations.plan(job.chat_id, job.token_budget)
    saved = (done.tokens_before or 0) - after.window_tokens
    done = replace(done, tokens_after=after.window_tokens, saved_tokens=saved)
    return done, after.after_message_id is not None and (after.to_seq or 0) > (done.to_seq or 0)


def _is_due(job: Job, plan: Plan) -> bool:
    if job.trigger == ON_DEMAND:
        return plan.after_message_id is not None or plan.decision == "prune"
    return plan.decision == "prune" or (plan.decision == "summarize" and plan.after_message_id is not None)


def _claim(job: Job, plan: Plan) -> Steps[_Held | Pass]:
    """The lease, or how the pass of the process that had it came out."""
    holder = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:12]}"
    parameters = {"chat_id": job.chat_id, "holder": holder, "seconds": job.lease_seconds}
    until = time.monotonic() + _PATIENCE.get(job.trigger, 0.0)
    wait = 0.05
    seen: int | None = None
    while True:
        lease = as_row(Lease, (yield Call("claim_compaction", parameters))[0])
        if lease.is_claimed:
            held = _Held(holder, lease)
            if seen is None or lease.pass_no == seen:
                return held
            yield from _release(job, held)
            return (yield from _others(job, plan, seen))
        seen = lease.pass_no if seen is None else seen
        if time.monotonic() >= until:
            moment = lease.expires_at.strftime("%Y-%m-%d %H:%M:%S %Z").strip()
            reason = f"{lease.holder} is compacting this chat, until {moment} at most"
            return _unchanged("skipped", plan, reason)
        yield Pause(wait)
        wait = min(wait * 1.6, 1.0)


def _others(job: Job, plan: Plan, seen: int) -> Steps[Pass]:
    passes: list[Row] = yield Call("passes", {"chat_id": job.chat_id, "after": seen})
    for row in reversed(passes):
        if row["outcome"] in ("summarized", "pruned"):
            done = _unchanged("skipped", plan, "another process was first")
            return replace(done, summary_id=row["summary_id"])
    reason = next((row["reason"] for row in reversed(passes)), "no reason was logged")
    return _unchanged("skipped", plan, f"another process was first, and stored nothing: {reason}")


def _release(job: Job, held: _Held) -> Steps[None]:
    try:
        yield Call("release_compaction", {"chat_id": job.chat_id, "holder": held.holder})
    except Exception as error:  # noqa: BLE001  it runs out by itself
        logger.warning(
            "the lease of chat %s could not be given back (%s); it runs out at %s",
            job.chat_id,
            type(error).__name__,
            held.lease.expires_at,
        )


def _hold(job: Job, held: _Held, encodings: Encodings) -> Steps[Pass]:
    """The pass, under the lease; the lease is given back with its outcome."""
    encodings.learn(job.chat_id, held.lease.encoding)
    plan = yield from operations.plan(job.chat_id, job.token_budget)
    pruned = None
    if plan.decision == "prune" and (job.trigger != ON_DEMAND or plan.after_message_id is None):
        rows: list[Row] = yield Call(
            "prune_chat", {"chat_id": job.chat_id, "token_budget": job.token_budget}, is_repeatable=False
        )
        if rows:
            pruned = _pruned(rows[0])
            plan = yield from operations.plan(job.chat_id, job.token_budget)
    if plan.after_message_id is None or not _is_due(job, plan) or (plan.decision == "prune" and pruned):
        yield from _release(job, held)
        return pruned or (yield from _skip(job, plan))
    source: list[Row] = yield Call(
        "compaction_source", {"chat_id": job.chat_id, "after_message_id": plan.after_message_id}
    )
    segments: list[Row] = []
    if source and source[0]["kind"] == "summary":
        segments = yield Call(
            "line_segments", {"chat_id": job.chat_id, "after_message_id": plan.after_message_id}
        )
    request = _request(source, segments, plan, job.focus, held.lease)
    if not any(row.is_told for row in request.messages):
        yield from _release(job, held)
        return _unchanged("skipped", plan, "nothing can be cut: what is in the range stays in sight")
    return (yield from _summarize(job, held, plan, request, source[0]))


def _summarize(job: Job, held: _Held, plan: Plan, request: SummaryRequest, read: Row) -> Steps[Pass]:
    spent = _Spent(started=time.monotonic())
    edit_no: int = read["edit_no"]
    try:
        yield from _flush(job, held, plan, request, edit_no, spent)
        segment, merged = yield from _ask(job.choose(), request, spent)
        done = spent.as_pass("summarized", plan.reason)
        stored: list[Row] = yield Call(
            "put_summary",
            {
                "chat_id": job.chat_id,
                "after_message_id": plan.after_message_id,
                "summary": messages.to_json(merged.to_json()),
                "segment": messages.to_json(segment.to_json()),
                "edit_no": edit_no,
                "token_budget": job.token_budget,
                "details": _details(
                    done, job, digest=read["digest"], line_tokens=size(merged, request.count)
                ),
                "holder": held.holder,
            },
        )
    except FlushFailed as error:
        spent.add(error)
        reason = f"the memory flush failed: {error.reason}"
        return (yield from _ended(job, held, plan, spent.as_pass("failed", reason)))
    except SummarizerFailed as error:
        spent.add(error)
        return (yield from _ended(job, held, plan, spent.as_pass("failed", error.reason)))
    except SummaryRefused as error:
        reason = f"{error.message} ({error.detail})" if error.detail else error.message
        return (yield from _ended(job, held, plan, spent.as_pass("failed", reason)))
    except LeaseHeld as error:
        reason = f"{error.message} ({error.detail})" if error.detail else error.message
        lost = yield from _ended(job, held, plan, spent.as_pass("skipped", reason))
        others = yield from _others(job, plan, held.lease.pass_no)
        return replace(lost, summary_id=others.summary_id)
    if not _is_same(stored[0]["segment"], segment.to_json()):
        late = spent.as_pass("skipped", "another process was first")
        return replace((yield from _ended(job, held, plan, late)), summary_id=stored[0]["message_id"])
    return replace(_unchanged("summarized", plan, done.reason, done), summary_id=stored[0]["message_id"])


def _flush(
    job: Job, held: _Held, plan: Plan, request: SummaryRequest, edit_no: int, spent: _Spent
) -> Steps[None]:
    if job.flush is None or plan.after_message_id is None:
        return
    yield from job.flush(
        FlushRequest(
            job.chat_id,
            plan.after_message_id,
            edit_no,
            held.holder,
            job.trigger,
            request.messages,
            request.count,
            held.lease.summarizer_window,
        )
    )


def _ask(summarizer: AnySummarizer, request: SummaryRequest, spent: _Spent) -> Steps[tuple[Summary, Summary]]:
    """The segment and the merged summary. One that is refused is asked for once more, with the reason."""
    spent.model = summarizer.name
    is_last = getattr(summarizer, "is_deterministic", False)
    while True:
        result: SummaryResult = yield Ask(summarizer, request)
        spent.model = result.model
        spent.add(result)
        segment = result.segment.map(mask)
        merged = merge(request.previous, segment, request.max_tokens, request.count, request.ledger_tokens)
        whole = request.max_tokens + request.ledger_tokens
        refused = validate(segment) or validate(merged, whole, request.count)
        if refused is None:
            return segment, merged
        if is_last:
            raise SummaryRefused(refused)
        is_last = True
        request = replace(request, complaint=refused)


def _request(
    source: Sequence[Row], segments: Sequence[Row], plan: Plan, focus: str | None, lease: Lease
) -> SummaryRequest:
    """What to tell. The summary so far is merged anew from the segments of its lines."""
    count = partial(tokens.count, encoding=lease.encoding)
    earlier = [Summary.from_json(row["summary"]) for row in segments if row["summary"]]
    previous = merge_segments(earlier, None, count) if earlier else None
    told = [_source_message(row) for row in source if row["kind"] != "summary"]
    return SummaryRequest(
        told,
        previous,
        plan.max_summary_tokens or 0,
        focus,
        count,
        lease.summarizer_window,
        ledger_tokens=(plan.max_line_tokens or 0) - (plan.max_summary_tokens or 0),
    )


def _source_message(row: Row) -> SourceMessage:
    """As it is told: role `user` on what no user wrote is `system`."""
    return SourceMessage(
        seq=row["seq"],
        message_id=row["message_id"],
        kind=row["kind"],
        role=row["role"] if row["role"] != "user" or row["is_user"] else "system",
        text=mask(row["text"] or "" if row["role"] == "user" else without_memory(row["text"] or "")),
        tool_calls=[told_call(call) for call in row["tool_calls"] or ()] or None,
        tool_call_id=row["tool_call_id"],
        name=row["name"],
        tokens=row["tokens"],
        created_at=row["created_at"],
        is_head=row["is_head"],
        is_request=row["is_request"],
    )


def told_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call as models are told of it: masked, without what nobody said."""
    function = call.get("function") or {}
    return {
        **call,
        "function": {**function, "arguments": mask(without_memory(function.get("arguments") or ""))},
    }


def _unchanged(outcome: str, plan: Plan, reason: str | None, cost: Pass | None = None) -> Pass:
    """A pass over the plan's range, the window being as it was."""
    return replace(
        cost or Pass(outcome),
        outcome=outcome,
        reason=reason,
        from_seq=plan.from_seq,
        to_seq=plan.to_seq,
        tokens_before=plan.window_tokens,
        tokens_after=plan.window_tokens,
        saved_tokens=0,
    )


def _pruned(row: Row) -> Pass:
    saved = row["tokens_before"] - row["tokens_after"]
    return Pass(
        "pruned",
        row["reason"],
        row["from_seq"],
        row["to_seq"],
        None,
        row["tokens_before"],
        row["tokens_after"],
        saved,
    )


def _skip(job: Job, plan: Plan) -> Steps[Pass]:
    """Nothing is done. It is logged where somebody asked for it, and where the window is over the trigger."""
    reason = plan.reason if plan.after_message_id else f"nothing can be cut: {plan.reason}"
    done = _unchanged("skipped", plan, reason)
    if job.trigger == ON_DEMAND or plan.decision == "skip":
        yield _log(job, plan, replace(done, seconds=0.0), None)
    return done


def _ended(job: Job, held: _Held, plan: Plan, cost: Pass) -> Steps[Pass]:
    """The pass stored nothing: logged, and the lease given back, in one transaction."""
    yield _log(job, plan, cost, held.holder)
    return _unchanged(cost.outcome, plan, cost.reason, cost)


def _log(job: Job, plan: Plan, done: Pass, holder: str | None) -> Call:
    return Call(
        "fail_compaction",
        {
            "chat_id": job.chat_id,
            "after_message_id": plan.after_message_id,
            "outcome": done.outcome,
            "reason": done.reason,
            "details": _details(done, job),
            "holder": holder,
        },
        is_repeatable=False,
    )


def _is_same(stored: Any, given: Any) -> bool:
    """Whether a segment is the one given, but for what the database masked in it, too."""
    if isinstance(stored, dict) and isinstance(given, dict):
        return stored.keys() == given.keys() and all(_is_same(stored[key], given[key]) for key in given)
    if isinstance(stored, list) and isinstance(given, list):
        return len(stored) == len(given) and all(map(_is_same, stored, given))
    return stored == given or (isinstance(stored, str) and MASK in stored)


def _details(done: Pass, job: Job, **more: Any) -> str:
    return messages.to_json(
        {
            "model": done.model,
            "calls": done.calls,
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": done.completion_tokens,
            "seconds": done.seconds,
            "trigger": job.trigger,
            "token_budget": job.token_budget,
            "reason": done.reason,
            **more,
        }
    )


_LEVELS = {"failed": logging.WARNING, "skipped": logging.DEBUG}


def _report(job: Job, done: Pass) -> None:
    """The pass as a log record: its figures, in the text and as `record.compaction`; nothing of the chat."""
    fields = {"chat_id": job.chat_id, **asdict(done)}
    logger.log(
        _LEVELS.get(done.outcome, logging.INFO),
        "compaction of chat %s %s: %s",
        job.chat_id,
        done.outcome,
        " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("chat_id", "outcome")),
        extra={"compaction": fields},
    )
