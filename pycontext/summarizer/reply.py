"""What a model's answer is worth: parsed into a `Summary`, or the reason why it is not one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pycontext.models import Unusable, json_in
from pycontext.summarizer import wording
from pycontext.summarizer.provenance import Sources, places
from pycontext.summary import LISTS, Summary, plain, validate

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


def parse(text: str, *, takes_prose: bool) -> Summary:
    """The summary in an answer: JSON, else headings, else (where `takes_prose`) notes. Raises `Unusable`."""
    value = json_in(text)
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
    if wording.language(words) != expected:
        raise Unusable("the answer is not in the language of the chat")


def check_wishes(summary: Summary, sources: Sources) -> Summary:
    """The summary without wishes that users did not utter. Raises `Unusable` where nothing else is told."""

    def kept(item: str) -> str:
        if not sources.is_forged(item):
            return item
        cited = places(item)
        return " ".join(part for part in wording.sentences(item) if not sources.is_forged(part, cited))

    found = summary.map(kept)
    if found.is_empty:
        raise Unusable("what it says the user wants is not what the user said")
    return found


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
