"""What a message says, as pieces of text that a page can show: nothing in it acts, loads or reorders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from pycontext.tokens import IMAGE_TYPES

# Controls, marks that reorder what stands beside them, and letters that only a model sees.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u202a-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f]+"
)
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?[^,\s]{0,100},", re.ASCII)


@dataclass(frozen=True)
class Piece:
    """A part of a message. kind: 'text', 'thinking', 'call', 'note' (what is not shown) or 'data' (JSON)."""

    kind: str
    label: str
    text: str


def pieces(content: Any, tool_calls: Sequence[Mapping[str, Any]] | None = None) -> list[Piece]:
    """A message's text, images by size, other parts as JSON, calls with their arguments as they came."""
    found = list(_parts(content))
    for call in tool_calls or ():
        function = call.get("function")
        if not isinstance(function, Mapping):
            function = {}
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        found.append(Piece("call", str(function.get("name") or ""), text))
    return found


def _parts(content: Any) -> Iterator[Piece]:
    if isinstance(content, str):
        if content:
            yield Piece("text", "", content)
    elif isinstance(content, list):
        for part in content:
            yield _part(part)
    elif content is not None:
        yield Piece("data", "", json.dumps(content, ensure_ascii=False))


def _part(part: Any) -> Piece:
    if isinstance(part, Mapping):
        kind = str(part.get("type") or "part")
        if kind in IMAGE_TYPES:
            return Piece("note", "", _image(part))
        for key, shown in (("text", "text"), ("thinking", "thinking"), ("refusal", "text")):
            if isinstance(part.get(key), str):
                return Piece(shown, "" if kind == "text" else kind, part[key])
        return Piece("data", kind, json.dumps(part, ensure_ascii=False))
    return Piece("text", "", part) if isinstance(part, str) else Piece("data", "", json.dumps(part))


def _image(part: Mapping[str, Any]) -> str:
    where = part.get("image_url", part.get("source"))
    if isinstance(where, Mapping):
        where = where.get("url") or where.get("data")
    text = where if isinstance(where, str) else ""
    generated = part.get("result")
    if isinstance(generated, str):
        return f"image, {len(generated):,} characters of data, not loaded"
    data = _DATA_URL.match(text)
    if data:
        return f"{data.group(1) or 'image'}, {len(text):,} characters of data, not loaded"
    return f"image, not loaded: {text[:200]}" if text else "image, not loaded"


def length(of: Sequence[Piece]) -> int:
    """Characters that a limit takes from."""
    return sum(len(piece.text) for piece in of)


def cut(of: Sequence[Piece], limit: int) -> list[Piece]:
    """The pieces up to a limit of characters."""
    kept = []
    for piece in of:
        if limit <= 0:
            break
        kept.append(Piece(piece.kind, piece.label, piece.text[:limit]))
        limit -= len(piece.text)
    return kept


def shown(text: str) -> Markup:
    """The text as HTML: escaped, and what would be invisible as its number."""
    text = text.replace("\r\n", "\n")
    done = []
    at = 0
    for match in _HIDDEN.finditer(text):
        done.append(escape(text[at : match.start()]))
        codes = " ".join(f"U+{ord(letter):04X}" for letter in match.group()[:8])
        more = len(match.group()) - 8
        done.append(
            Markup('<span class="code">{}{}</span>').format(codes, f" and {more} more" if more > 0 else "")
        )
        at = match.end()
    if not done:
        return escape(text)
    return Markup("").join([*done, escape(text[at:])])


def one_line(text: str, limit: int) -> str:
    """The beginning of a text on one line."""
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
