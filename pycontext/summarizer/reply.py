"""What a model's answer is worth: parsed into a `Summary`, or the reason why it is not one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pycontext.summarizer.wording import language, without_thinking
from pycontext.summary import LISTS, Summary, plain, tidy, validate

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "resolved": {"type": "array", "items": {"type": "string"}},
        "pending": {"type": "array", "items": {"type": "string"}},
        "active_task": {"type": ["string", "null"]},
        "decisions": {"type": "array", "items": {"type": "string"}},
        "facts": {"type": "array", "items": {"type": "string"}},
        "artifacts": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["resolved", "pending", "active_task", "decisions", "facts", "artifacts"],
    "additionalProperties": False,
}

_NAMES = {
    "resolved": "resolved|done|completed|решено|сделано|выполнено|已解决|已完成|解決済み",
    "pending": "pending|open|open questions|todo|ожидает|не решено|открыто|待处理|待办|未解决|保留",
    "active_task": "active[ _]task|current[ _]task|активная задача|текущая задача|当前任务|現在のタスク",
    "decisions": "decisions?|key decisions|решения|决定|決定",
    "facts": "facts?|key facts|факты|事实|事実",
    "artifacts": "artifacts?|files|артефакты|файлы|文件|成果物|ファイル",
    "notes": "notes?|summary|заметки|итог|резюме|备注|总结|摘要|要約|メモ",
}
_HEADING = re.compile(
    r"^[#*_\s>\-]*(?:"
    + "|".join(f"(?P<{name}>{words})" for name, words in _NAMES.items())
    + r")[*_\s]*(?:[:：][*_]*\s*(?P<rest>.*)|[*_\s]*)$",
    re.IGNORECASE,
)
_STEERS = re.compile(
    r"^\W*(?:(?:now |please |you (?:must|should|need to|have to) |make sure to )?(?:continue|resume|proceed"
    r"|go on) (?:with|to|by|the|working)\b"
    r"|next,? (?:you|the assistant) (?:should|must)\b|(?:продолжи(?:те)?|продолжай(?:те)?"
    r"|возобнови(?:те)?)\s|(?:请|接下来请|继续)(?:继续|完成|执行|处理))",
    re.IGNORECASE,
)


class Unusable(Exception):
    """The answer can't be used; `reason` is told to the model once and then to the pass log."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def text_of(choice: Any) -> str:
    """The content of a choice; raises `Unusable` for anything that is not a whole answer."""
    message = getattr(choice, "message", None)
    if message is None:
        raise Unusable("the answer holds no message")
    reason = getattr(choice, "finish_reason", None)
    if reason == "length":
        raise Unusable("the answer was cut off at the length limit")
    if reason == "content_filter" or getattr(message, "refusal", None):
        raise Unusable("the model refused to answer")
    content = getattr(message, "content", None)
    if not isinstance(content, str):
        content = ""
    content = without_thinking(tidy(content)).strip()
    if content:
        return content
    if getattr(message, "tool_calls", None) or getattr(message, "function_call", None):
        raise Unusable("the answer is a tool call, not a summary")
    extra = getattr(message, "model_extra", None) or {}
    if any(extra.get(key) for key in ("reasoning", "reasoning_content", "thinking")):
        raise Unusable("the answer holds reasoning only")
    raise Unusable("the answer is empty")


def parse(text: str, *, takes_prose: bool) -> Summary:
    """The summary in an answer: JSON, else headings, else (where `takes_prose`) notes. Raises `Unusable`."""
    value = _json(text)
    if isinstance(value, dict) and (value.keys() & {*LISTS, "active_task", "notes"}):
        summary = Summary.from_json(value)
    elif value is not None or text.lstrip("`json \n").startswith(("{", "[")):
        raise Unusable("the answer is not the JSON object that was asked for")
    else:
        summary = _headings(text)
        if summary.is_empty:
            raise Unusable("the answer holds headings only")
        prose = not any(summary.items(name) for name in LISTS)
        if prose and not takes_prose and not validate(summary):
            raise Unusable("the answer is not the JSON object that was asked for")
    summary = summary.map(lambda item: "" if _STEERS.match(item) else item)
    reason = validate(summary)
    if reason:
        raise Unusable(reason)
    return summary


def check_language(summary: Summary, expected: str) -> None:
    """Raises `Unusable` where the chat is in a script of its own and the summary is not."""
    words = [
        *summary.resolved,
        *summary.pending,
        *summary.decisions,
        *summary.facts,
        summary.active_task or "",
        summary.notes,
    ]
    if expected == "en" or not any(words) or sum(map(len, words)) < 40:
        return
    if language(words) != expected:
        raise Unusable("the answer is not in the language of the chat")


def _json(text: str) -> Any:
    fenced = re.search(r"```(?:json)?\s*([\s\S]*?)```", text)
    for part in (text, fenced[1] if fenced else "", text[text.find("{") : text.rfind("}") + 1]):
        if part.strip()[:1] in ("{", "["):
            try:
                return json.loads(part, strict=False)
            except (ValueError, RecursionError):
                continue
    return None


def _headings(text: str) -> Summary:
    """Plain text under headings; what stands under none, or under a heading nobody knows, becomes notes."""
    found: dict[str, list[str]] = {}
    for name, line in _lines(text):
        found.setdefault(name, []).append(line)
    return Summary.from_json(found)


def _lines(text: str) -> Iterator[tuple[str, str]]:
    name = "notes"
    for line in text.replace("```", "").split("\n"):
        match = _HEADING.match(line)
        if match:
            name = next(key for key in _NAMES if match[key])
            rest = plain(match["rest"] or "")
            if rest:
                yield name, rest
        elif plain(line):
            yield name, plain(line)
