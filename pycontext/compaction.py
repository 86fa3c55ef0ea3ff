"""One compaction pass: plan, read, summarize, merge, store. The model is called between two transactions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pycontext import messages, operations, tokens
from pycontext.errors import SummaryRefused
from pycontext.masking import mask
from pycontext.operations import Encodings
from pycontext.rows import Pass, Plan
from pycontext.steps import Ask, Call, Row, Steps
from pycontext.summarizer import Summarizer, SummarizerFailed, SummaryRequest, SummaryResult
from pycontext.summary import Count, SourceMessage, Summary, merge, validate

logger = logging.getLogger("pycontext")

ON_DEMAND = "demand"
AFTER_TURN = "after"
BEFORE_TURN = "before"


@dataclass(frozen=True)
class Job:
    """What one compaction is asked to do. `choose` gives the summarizer once there is something to tell."""

    chat_id: str
    trigger: str
    choose: Callable[[], Summarizer]
    token_budget: int | None = None
    focus: str | None = None


def compact(job: Job, encodings: Encodings) -> Steps[Pass]:
    """Compact where the plan says so; on demand, wherever there is something to cut.

    A summarizer that fails and a summary that is refused leave no row: the pass is logged and returned as
    failed.
    """
    yield from operations.count_tokens(job.chat_id, encodings)
    plan = yield from operations.plan(job.chat_id, job.token_budget)
    if plan.after_message_id is None or (job.trigger != ON_DEMAND and plan.decision != "summarize"):
        return _skipped(plan, plan.reason if plan.after_message_id else f"nothing can be cut: {plan.reason}")
    summarizer = job.choose()
    encoding = (yield from operations.status(job.chat_id, encodings)).encoding
    source: list[Row] = yield Call(
        "compaction_source", {"chat_id": job.chat_id, "after_message_id": plan.after_message_id}
    )
    request = _request(source, plan, job.focus, partial(tokens.count, encoding=encoding))
    if not request.messages:
        return _skipped(plan, "nothing can be cut: there is no message in the range")
    cost = Pass("failed", model=summarizer.name)
    started = time.monotonic()
    try:
        result: SummaryResult = yield Ask(summarizer, request)
        cost = _cost(result.model, result, started)
        segment = result.segment.map(mask)
        merged = merge(request.previous, segment, request.max_tokens, request.count)
        refused = validate(segment) or validate(merged, request.max_tokens, request.count)
        if refused is not None:
            raise SummaryRefused(refused)
        stored: list[Row] = yield Call(
            "put_summary",
            {
                "chat_id": job.chat_id,
                "after_message_id": plan.after_message_id,
                "summary": messages.to_json(merged.to_json()),
                "segment": messages.to_json(segment.to_json()),
                "edit_no": source[0]["edit_no"],
                "token_budget": job.token_budget,
                "details": _details(cost, job, plan.reason),
            },
        )
    except SummarizerFailed as error:
        logger.warning("compaction of chat %s failed", job.chat_id, exc_info=error)
        return (yield from _failed(job, plan, _cost(summarizer.name, error, started), error.reason))
    except SummaryRefused as error:
        reason = f"{error.message} ({error.detail})" if error.detail else error.message
        logger.warning("compaction of chat %s failed: %s", job.chat_id, reason)
        return (yield from _failed(job, plan, cost, reason))
    if stored[0]["segment"] != segment.to_json():
        return replace(_skipped(plan, "another process was first"), summary_id=stored[0]["message_id"])
    yield from operations.count_tokens(job.chat_id, encodings)
    after = yield from operations.plan(job.chat_id, job.token_budget)
    return replace(
        cost,
        outcome="summarized",
        reason=plan.reason,
        from_seq=plan.from_seq,
        to_seq=plan.to_seq,
        summary_id=stored[0]["message_id"],
        tokens_before=plan.window_tokens,
        tokens_after=after.window_tokens,
        saved_tokens=plan.window_tokens - after.window_tokens,
    )


def quietly(job: Job, encodings: Encodings) -> Steps[Pass | None]:
    """Compact in the course of a turn: a failure is logged, and never becomes the user's."""
    try:
        return (yield from compact(job, encodings))
    except Exception:
        logger.exception("compaction of chat %s failed", job.chat_id)
        return None


def _request(source: Sequence[Row], plan: Plan, focus: str | None, count: Count) -> SummaryRequest:
    previous = None
    told = []
    for row in source:
        if row["kind"] == "summary":
            previous = Summary.from_json(row["summary"]) if row["summary"] else None
        else:
            told.append(_source_message(row))
    return SummaryRequest(told, previous, plan.max_summary_tokens or 0, focus, count)


def _source_message(row: Row) -> SourceMessage:
    return SourceMessage(
        seq=row["seq"],
        message_id=row["message_id"],
        kind=row["kind"],
        role=row["role"],
        text=mask(row["text"] or ""),
        tool_calls=[_masked_call(call) for call in row["tool_calls"] or ()] or None,
        tool_call_id=row["tool_call_id"],
        name=row["name"],
        tokens=row["tokens"],
        created_at=row["created_at"],
        is_head=row["is_head"],
        is_request=row["is_request"],
    )


def _masked_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {**call, "function": {**function, "arguments": mask(function.get("arguments") or "")}}


def _skipped(plan: Plan, reason: str) -> Pass:
    before = plan.window_tokens
    return Pass("skipped", reason, plan.from_seq, plan.to_seq, None, before, before, 0)


def _failed(job: Job, plan: Plan, cost: Pass, reason: str) -> Steps[Pass]:
    yield Call(
        "fail_compaction",
        {
            "chat_id": job.chat_id,
            "after_message_id": plan.after_message_id,
            "outcome": "failed",
            "reason": reason,
            "details": _details(cost, job, reason),
        },
        is_repeatable=False,
    )
    return replace(
        cost,
        reason=reason,
        from_seq=plan.from_seq,
        to_seq=plan.to_seq,
        tokens_before=plan.window_tokens,
        tokens_after=plan.window_tokens,
        saved_tokens=0,
    )


def _cost(model: str, spent: SummaryResult | SummarizerFailed, started: float) -> Pass:
    return Pass(
        "failed",
        model=model,
        calls=spent.calls,
        prompt_tokens=spent.prompt_tokens,
        completion_tokens=spent.completion_tokens,
        seconds=round(time.monotonic() - started, 3),
    )


def _details(cost: Pass, job: Job, reason: str) -> str:
    return messages.to_json(
        {
            "model": cost.model,
            "calls": cost.calls,
            "prompt_tokens": cost.prompt_tokens,
            "completion_tokens": cost.completion_tokens,
            "seconds": cost.seconds,
            "trigger": job.trigger,
            "reason": reason,
        }
    )
