"""What a provider's client returned, as elements for `append_messages`: told apart by form, not by class.

Taken are messages of chat completions, items of the Responses API and messages of Anthropic's, as dicts or as
the objects of their libraries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pycontext import items, messages
from pycontext.errors import BadMessage, UnknownMessageType
from pycontext.messages import Element

_OWN = ("role", "message_id", "created_at", "metadata")
_USES = frozenset({"tool_use", "tool_result"})
# What goes back to Anthropic with a call, but for what goes without saying.
_BESIDE = ("caller", "toolset_name")
_DIRECT = {"type": "direct"}
_PARSED = frozenset({"parsed", "parsed_arguments", "parsed_output"})
_PROMPT = ("prompt_tokens", "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_ACCEPTED = (
    "text (a user message), a message dict with 'role', a ChatCompletion of one choice or its"
    " ChatCompletionMessage, a Response of OpenAI's Responses API or its items, a Message of Anthropic's or"
    " its tool_result blocks, or a list of these"
)


@dataclass(frozen=True)
class Usage:
    """A provider's count of the prompt, cached tokens included, and the model that it is of."""

    model: str
    prompt_tokens: int


def elements(value: Any) -> list[Element]:
    """One message, reply or item, or a list of them, as elements in their order.

    Raises UnknownMessageType and BadMessage.
    """
    try:
        return [messages.element(message) for message in _read(value)]
    except RecursionError:
        raise BadMessage("message is nested too deeply") from None


def request(value: Any) -> Element:
    """A turn's message: text or a list of content parts is a user message, a dict with 'role' is itself."""
    parts = isinstance(value, (list, tuple))
    found = elements({"role": "user", "content": list(value)} if parts else value)
    if len(found) != 1:
        raise BadMessage(
            "a turn begins with one message",
            detail=f"{len(found)} were given",
            hint="resume the turn (message=None), and turn.add the others",
        )
    return found[0]


def usage(value: Any) -> Usage | None:
    """What the newest reply given says of the prompt's tokens, where it does."""
    for given in reversed(value if isinstance(value, (list, tuple)) else [value]):
        model, counts = _get(given, "model"), _get(given, "usage")
        numbers = [_get(counts, name) for name in _PROMPT]
        tokens = sum(number for number in numbers if isinstance(number, int))
        if isinstance(model, str) and 0 < len(model.strip()) <= 200 and 0 < tokens < 2**31:
            return Usage(model, tokens)
    return None


def _read(value: Any) -> list[Element]:
    found: list[Element] = []
    said: list[dict[str, Any]] = []  # items in a row: what a model says in one go is one message
    for given in value if isinstance(value, (list, tuple)) else [value]:
        fields = {"role": "user", "content": given} if isinstance(given, str) else fields_of(given)
        if _is_item(fields):
            said.append(fields)
            continue
        found += items.to_messages(said)
        said = []
        found += _messages(fields, type(given).__name__)
    return found + items.to_messages(said)


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def fields_of(value: Any) -> dict[str, Any]:
    """A dict, or an object of a provider's library, as a dict. Raises UnknownMessageType."""
    fields = _mapping(value)
    if fields is None:
        raise _unknown(type(value).__name__)
    return fields


def _mapping(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if not callable(getattr(value, "model_dump", None)) or isinstance(value, type):
        return None
    fields = value.model_dump(exclude_none=True, warnings=False)
    return _unparsed(fields) if isinstance(fields, dict) else None


def _unknown(kind: str) -> UnknownMessageType:
    return UnknownMessageType(f"a message can't be a {kind}", hint=f"taken are {_ACCEPTED}")


def _is_item(fields: Mapping[str, Any]) -> bool:
    kind = fields.get("type")
    if kind == "message":
        return "role" in fields and not _is_anthropic(fields)
    return items.is_item(fields)


def _is_anthropic(fields: Mapping[str, Any]) -> bool:
    return "stop_reason" in fields or "model" in fields or _uses_tools(fields)


def _uses_tools(fields: Mapping[str, Any]) -> bool:
    """True where calls or results are blocks of the content, as only Anthropic has them."""
    content = fields.get("content")
    found = map(_mapping, content) if isinstance(content, (list, tuple)) else ()
    return any(block is not None and block.get("type") in _USES for block in found)


def _messages(fields: dict[str, Any], kind: str) -> list[Element]:
    """The messages of a reply that is no lone item."""
    choices, output = fields.get("choices"), fields.get("output")
    if "role" not in fields and isinstance(choices, list) and choices:
        if len(choices) > 1:
            raise BadMessage(
                "the reply has several choices",
                detail=f"{len(choices)} choices in a {kind}",
                hint="add the .message of the one that was used",
            )
        message = choices[0].get("message")
        if isinstance(message, dict):
            return [_unparsed({**message, "completion_id": fields.get("id")})]
    elif fields.get("object") == "response" and isinstance(output, list):
        return _response(fields, output)
    elif fields.get("type") == "tool_result":
        return _anthropic({"role": "user", "content": [fields]})
    elif "role" in fields:
        is_anthropic = fields.get("type") == "message" or _uses_tools(fields)
        return _anthropic(fields) if is_anthropic else [fields]
    raise _unknown(f"{kind} without a role")


def _response(fields: Mapping[str, Any], output: Iterable[Any]) -> list[Element]:
    found = items.to_messages(_unparsed(item) for item in output)
    if not found:
        raise BadMessage(
            "the response says nothing that could be stored",
            detail=f"status is {fields.get('status')}, output is empty",
            hint="look at its error and incomplete_details, and ask again",
        )
    for message in found:
        message["metadata"]["response_id"] = fields.get("id")
    return found


def _anthropic(fields: dict[str, Any]) -> list[Element]:
    """A message of Anthropic's: its calls are tool_calls, each of its results is a message of its own."""
    content = fields.get("content")
    results: list[Element] = []
    calls: list[dict[str, Any]] = []
    rest: list[Any] = []
    for part in content if isinstance(content, (list, tuple)) else ():
        block = _mapping(part)
        if block is None:
            rest.append(part)
        elif block.get("type") == "tool_result":
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": block.get("content", ""),
                    "metadata": {"is_error": True} if block.get("is_error") else {},
                }
            )
        elif block.get("type") == "tool_use":
            function = {"name": block.get("name"), "arguments": messages.to_json(block.get("input") or {})}
            use = {key: block[key] for key in _BESIDE if block.get(key) not in (None, _DIRECT)}
            call = {"id": block.get("id"), "type": "function", "function": function}
            calls.append({**call, "use": use} if use else call)
        else:
            rest.append({key: value for key, value in block.items() if key != "cache_control"})
    if results and not rest:
        return results
    message = {key: fields[key] for key in _OWN if key in fields}
    message["content"] = rest or (content if isinstance(content, str) else None)
    if fields.get("stop_reason") == "pause_turn":  # no answer yet: it is sent back as it is, and goes on
        message["stop_reason"] = "pause_turn"
    return [*results, {**message, "tool_calls": calls, "completion_id": fields.get("id")}]


def _unparsed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without what the client library read out of a reply for the caller: no provider takes it back."""
    found = {key: value for key, value in fields.items() if key not in _PARSED}
    for key, inner in (("content", None), ("tool_calls", "function")):
        if isinstance(found.get(key), list):
            found[key] = [_unparsed_part(part, inner) for part in found[key]]
    return found


def _unparsed_part(part: Any, inner: str | None) -> Any:
    if not isinstance(part, dict):
        return part
    if inner in part and isinstance(part[inner], dict):
        return {**part, inner: _unparsed_part(part[inner], None)}
    return {key: value for key, value in part.items() if key not in _PARSED}
