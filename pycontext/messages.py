"""What callers hand in (text, dicts, OpenAI objects) as elements for `append_messages`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from pycontext import tokens
from pycontext.clean import clean, clean_text
from pycontext.errors import BadMessage, PycontextError

Element = dict[str, Any]

#: What a chat or a message is called: the product's own id.
Id = str | int | UUID

_KEYS = frozenset(
    {
        "role",
        "content",
        "tool_calls",
        "tool_call_id",
        "name",
        "message_id",
        "created_at",
        "metadata",
        "tokens",
    }
)
# What a malformed message or an unknown encoding raises: the database then tells, or estimates.
_UNCOUNTABLE = (
    AttributeError,
    TypeError,
    ValueError,
    KeyError,
    ArithmeticError,
    RecursionError,
    PycontextError,
)


def identity(value: Any, what: str = "chat_id") -> str:
    """A chat's or message's id as text: str, int or UUID."""
    if isinstance(value, bool) or not isinstance(value, (str, int, UUID)):
        raise TypeError(f"{what} must be str, int or UUID, not {type(value).__name__}")
    text = str(value)
    if not text or text != clean_text(text):
        raise ValueError(f"{what} must be text without NUL and lone surrogates, and not empty")
    return text


def optional_identity(value: Any, what: str = "chat_id") -> str | None:
    """None as it is, anything else as `identity` has it."""
    return None if value is None else identity(value, what)


def text(value: str | None) -> str | None:
    """Text as Postgres can store it; what is no text is for the statement it goes to, to refuse."""
    return clean_text(value) if isinstance(value, str) else value


def to_json(value: Any) -> str:
    """JSON text that Postgres takes as jsonb, keys in the order given."""
    try:
        return json.dumps(clean(value), ensure_ascii=False, separators=(",", ":"), default=_plain)
    except RecursionError:
        raise BadMessage("message is nested too deeply") from None


def element(fields: Mapping[str, Any]) -> Element:
    """One message as an element: cleaned, arguments as text, keys of the caller's own in metadata."""
    try:
        return _element(clean(fields))
    except RecursionError:
        raise BadMessage("message is nested too deeply") from None


def derived_id(message_id: str, given: Element, repeats: int) -> str:
    """The id of a message added in the turn of message_id: the same for the same body, on every retry.

    `repeats` counts earlier messages with this very body in the turn, so that two equal ones stay two.
    """
    body = {key: given[key] for key in sorted(given) if key not in ("message_id", "created_at", "tokens")}
    digest = hashlib.sha256(to_json(body).encode()).hexdigest()[:16]
    return f"{message_id}/{digest}" + (f".{repeats}" if repeats else "")


def counted(given: Element, encoding: str) -> Element:
    """The element with its exact token count, or as it is where that is for the database to tell.

    Images cost what the chat's profile says; fence tags and reasoning depend on how they are rendered.
    """
    if "tokens" in given:
        return given
    try:
        pieces = tokens.message_pieces(given)
        if pieces.has_fence or pieces.has_reasoning or pieces.images:
            return given
        count = pieces.overhead + sum(tokens.count(text, encoding) for text in pieces.texts)
    except _UNCOUNTABLE:
        return given
    return {**given, "tokens": {"encoding": encoding, "count": count}}


def _element(fields: dict[str, Any]) -> Element:
    extra = {key: item for key, item in fields.items() if key not in _KEYS and item not in (None, [], {})}
    found = {key: item for key, item in fields.items() if key in _KEYS and item is not None}
    own = extra.pop("id", None)
    if "message_id" not in found and own is not None:
        found["message_id"] = own
    if "message_id" in found:
        found["message_id"] = identity(found["message_id"], "message_id")
    refusal = extra.get("refusal")
    if not found.get("content") and not found.get("tool_calls") and isinstance(refusal, str):
        found["content"] = [{"type": "refusal", "refusal": extra.pop("refusal")}]
    audio = extra.get("audio")
    if not found.get("content") and isinstance(audio, dict) and isinstance(audio.get("transcript"), str):
        found["content"] = audio["transcript"]  # what was spoken
    called = extra.get("function_call")
    if isinstance(called, dict) and not found.get("tool_calls"):  # the old form of a call, and of its result
        del extra["function_call"]
        found["tool_calls"] = [
            {"id": f"function_{called.get('name')}", "type": "function", "function": called}
        ]
    elif found.get("role") == "function":
        found |= {"role": "tool", "tool_call_id": f"function_{found.get('name')}"}
    if isinstance(found.get("tool_calls"), list):
        found["tool_calls"] = [_call(call) for call in found["tool_calls"]]
    if not found.get("tool_calls"):
        found.pop("tool_calls", None)
    if extra:
        found["metadata"] = {**extra, **found.get("metadata", {})}
    return found


def _call(call: Any) -> Any:
    """Arguments given as an object become text here, in the caller's key order: jsonb would change it.

    A custom tool's call is kept as a function's, its input as arguments.
    """
    custom = call.get("custom") if isinstance(call, dict) and call.get("type") == "custom" else None
    if isinstance(custom, dict):
        told = {"name": custom.get("name"), "arguments": custom.get("input")}
        return {**{key: value for key, value in call.items() if key != "custom"}, "function": told}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    arguments = function.get("arguments")
    text = "{}" if arguments is None else to_json(arguments)
    return {**call, "function": {**function, "arguments": text}}


def _plain(value: Any) -> Any:
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal):
        return float(value)
    if callable(getattr(value, "model_dump", None)):
        return value.model_dump(exclude_none=True)
    raise TypeError(f"{type(value).__name__} can't be stored as JSON")
