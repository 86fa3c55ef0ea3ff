"""The text a model gets to read of a range: role-labelled lines with their `#seq`, masked, cut into
pieces that fit."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pycontext.masking import mask
from pycontext.summarizer.wording import without_thinking
from pycontext.summary import Count, SourceMessage, tidy

_BASE64 = re.compile(r"(?:data:[\w/+.-]{1,60};base64,)?(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{400,}={0,2}")
_REASONING_PART = re.compile(
    r"^\s*\{\s*\"type\"\s*:\s*\"(?:thinking|redacted_thinking|reasoning|compaction)\""
)
_MIN_PIECE = 256
_SHORT = 80
ATTACHED = re.compile(r"^\{(?=.*\"type\": ?\").*\}$", re.MULTILINE)
"""A part of a message that is neither text nor image, as `compaction_source` tells it: its JSON on a line."""
_FILE_NAME = re.compile(r'"(?:filename|title|name)": ?"([^"\\]{1,100})"')


@dataclass(frozen=True)
class Piece:
    """A part of the transcript, and the rows it holds (a row too large for one piece is in several)."""

    text: str
    seqs: tuple[int, ...]


def new_marker(text: str = "") -> str:
    """A line no text of the chat can hold, since it is drawn for this one request."""
    while True:
        marker = f"=====[{secrets.token_hex(12)}]====="
        if marker not in text:
            return marker


def without_attached(text: str) -> str:
    """What a user said himself: files that came with it are named only."""

    def named(part: re.Match[str]) -> str:
        name = _FILE_NAME.search(part[0])
        return f"[attached: {name[1]}]" if name else "[attached]"

    return ATTACHED.sub(named, text) if '"type"' in text else text


def pieces(messages: Sequence[SourceMessage], limit: int, count: Count) -> list[Piece]:
    """The told rows of `messages` in pieces of at most `limit` tokens of `count`; every row is in at
    least one. Of results that say the same the newest is there in full, the others name it."""
    limit = max(limit, _MIN_PIECE)
    found: list[Piece] = []
    lines: list[str] = []
    seqs: list[int] = []
    used = 0
    day = ""
    newest = {row.text: row.seq for row in messages if row.is_told and row.role == "tool"}
    for row in messages:
        if not row.is_told:
            continue
        if row.role == "tool" and len(row.text) > _SHORT and newest[row.text] != row.seq:
            row = replace(row, text=f"(the same as #{newest[row.text]})")
        today = row.created_at.strftime("%Y-%m-%d") if row.created_at else ""
        for text in _row_parts(row, limit - 24, count):
            cost = count(text) + 1
            if lines and used + cost + 12 > limit:
                found.append(Piece("\n".join(lines), tuple(dict.fromkeys(seqs))))
                lines, seqs, used, day = [], [], 0, ""
            if today and today != day:
                lines.append(f"-- {today} --")
                day, used = today, used + 10
            lines.append(text)
            seqs.append(row.seq)
            used += cost
    if lines:
        found.append(Piece("\n".join(lines), tuple(dict.fromkeys(seqs))))
    return found


def _row_parts(row: SourceMessage, limit: int, count: Count) -> Iterator[str]:
    """One row, whole where it fits into `limit`, else in numbered parts that do."""
    head, text = _label(row), _body(row)
    whole = f"{head}: {text}"
    if len(whole) <= limit or count(whole) <= limit:
        yield whole
        return
    room = max(limit - count(f"{head} (part 100 of 100): "), _MIN_PIECE // 4)
    parts = list(_cut(text, room, count))
    for at, part in enumerate(parts, 1):
        yield f"{head} (part {at} of {len(parts)}): {part}"


def _cut(text: str, limit: int, count: Count) -> Iterator[str]:
    """`text` in runs of at most `limit` tokens, cut at line ends or spaces where there are any."""
    size = limit * 4
    start = 0
    while start < len(text):
        end = min(len(text), start + size)
        while end - start > 1 and count(text[start:end]) > limit:
            end = start + max(1, (end - start) * 3 // 4)
        if end < len(text):
            border = max(text.rfind("\n", start, end), text.rfind(" ", start, end))
            end = border + 1 if border > start + (end - start) // 2 else end
        yield text[start:end]
        start = end


def _label(row: SourceMessage) -> str:
    role = row.role if row.role in ("user", "assistant", "tool") else "system"
    name = f" {row.name}" if row.role == "tool" and row.name else ""
    return f"#{row.seq} {role}{tidy(name)}"


def _body(row: SourceMessage) -> str:
    text = tidy(row.text)
    if row.role == "assistant":
        text = without_thinking(text)
        text = "\n".join(line for line in text.split("\n") if not _REASONING_PART.match(line))
    if row.role == "user":
        text = ATTACHED.sub(r"[attached, not the user's words: \g<0>]", text)
    calls = [_call(call) for call in row.tool_calls or () if isinstance(call, Mapping)]
    text = "\n".join((text.strip(), *calls)).strip()
    text = _BASE64.sub(lambda run: f"[{len(run[0])} characters of base64]", mask(text))
    # continuation lines are indented, so that no text can open a line of its own with somebody's label
    return text.replace("\r", "").replace("\n", "\n    ") or "(empty)"


def _call(call: Mapping[str, Any]) -> str:
    inner = call.get("function") or call.get("custom")
    inner = inner if isinstance(inner, Mapping) else call
    raw = next((inner[key] for key in ("arguments", "input", "args") if inner.get(key) is not None), "")
    text = raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False, default=str)
    return f"[called {tidy(str(inner.get('name') or 'tool'))} with {tidy(text)}]"
