"""Items of OpenAI's Responses API as stored messages, and the very items back.

A message holds all that the model said in one go: its content has the text, and, whole, reasoning items and
calls of built-in tools; its function calls are tool_calls. What of an item has no place there (ids, status)
is kept in the message's metadata, in the order of the items.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pycontext.messages import Element, to_json

Item = dict[str, Any]

KEY = "items"
"""Where a message's metadata keeps the rest of its items."""

_IMAGES = ("image_url", "image", "input_image")


def to_messages(items: Iterable[Mapping[str, Any]]) -> list[Element]:
    """The messages that hold the items, in OpenAI's chat form."""
    found: list[Element] = []
    reply: Element | None = None
    for given in items:
        item = dict(given)
        kind = item.get("type") or "message"
        if kind == "function_call_output" and isinstance(item.get("call_id"), str):
            found.append(_message("tool", item, "output", tool_call_id=item.pop("call_id")))
            reply = None
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            found.append(_message(item.pop("role"), item, "content"))
            reply = None
        else:
            if reply is None or any(call["id"] == item.get("call_id") for call in reply["tool_calls"]):
                reply = {"role": "assistant", "content": [], "tool_calls": [], "metadata": {KEY: []}}
                found.append(reply)
            reply["metadata"][KEY].append(_taken(reply, item))
    return [{key: value for key, value in message.items() if value not in (None, [])} for message in found]


def to_items(row: Mapping[str, Any]) -> list[Item]:
    """The items of a row: the very ones that were added where it is sent as it was stored, else what it says.

    row: role, content, tool_calls and tool_call_id as they are sent, is_changed where content is not what was
    stored, items: the rest of its items.
    """
    if row.get(KEY):
        try:
            return list(_restored(row, row[KEY]))
        except (LookupError, TypeError, ValueError):
            pass  # it was shortened to another form
    return list(_told(row))


def _message(role: str, item: Item, content: str, **more: Any) -> Element:
    return {"role": role, "content": item.pop(content, None), **more, "metadata": {KEY: [item]}}


def _taken(reply: Element, item: Item) -> Item | str:
    """Put an item into the reply; returns what has no place there, or its type where it went in whole."""
    names = ("call_id", "name", "arguments")
    if item.get("type") == "function_call" and all(isinstance(item.get(name), str) for name in names):
        call_id, name, arguments = (item.pop(name) for name in names)
        function = {"name": name, "arguments": arguments}
        reply["tool_calls"].append({"id": call_id, "type": "function", "function": function})
        return item
    if item.get("role") == "assistant" and isinstance(item.get("content"), (str, list)):
        content = item.pop("content")
        is_text = isinstance(content, str)
        reply["content"].extend([{"type": "output_text", "text": content}] if is_text else content)
        return {**item, "parts": None if is_text else len(content)}
    if not isinstance(item.get("type"), str) or not isinstance(item.get("text", ""), str):
        item = {"type": "item", "item": item}
    reply["content"].append(item)
    return str(item["type"])


def _restored(row: Mapping[str, Any], rests: Sequence[Any]) -> Iterator[Item]:
    """The items, as they were added. One whose content is not what it was goes without the id that it had."""
    is_changed = bool(row.get("is_changed"))
    if row["role"] != "assistant":
        (rest,) = rests
        if (rest.get("type") == "function_call_output") != (row["role"] == "tool"):
            raise ValueError("a result told as a note")
        own = {"call_id": row["tool_call_id"]} if row["role"] == "tool" else {"role": row["role"]}
        content = _input(row["content"]) if is_changed else row["content"]
        item = {**rest, **own, "output" if row["role"] == "tool" else "content": content}
        yield _without_id(item) if is_changed else item
        return
    parts = row["content"] if isinstance(row["content"], list) else [_text_part(row["content"] or "(empty)")]
    if "reasoning" in rests and not any(part.get("type") == "reasoning" for part in parts):
        # an older turn: its reasoning is not sent, and ids would ask for it
        rests, is_changed = [rest for rest in rests if rest != "reasoning"], True
    calls = iter(row["tool_calls"] or ())
    at = 0
    found: list[Item] = []
    for rest in rests:
        if isinstance(rest, str):
            found.append(parts[at]["item"] if rest == "item" else parts[at])
            at += 1
        elif rest.get("type") == "function_call":
            call = next(calls, None)
            if call is None:
                raise LookupError("a call is missing")
            found.append({**rest, "call_id": call["id"], **call["function"]})
        else:
            count = rest["parts"]
            content = parts[at]["text"] if count is None else parts[at : at + count]
            at += 1 if count is None else count
            found.append(
                {**{k: v for k, v in rest.items() if k != "parts"}, "role": "assistant", "content": content}
            )
    if at != len(parts) and (row["content"] is not None or at):
        raise ValueError("other parts than were added")
    yield from map(_without_id, found) if is_changed else found


def _without_id(item: Item) -> Item:
    return {key: value for key, value in item.items() if key != "id"}


def _told(row: Mapping[str, Any]) -> Iterator[Item]:
    """A row as items, whoever wrote it."""
    content, role = row["content"], row["role"]
    if role == "tool":
        yield {"type": "function_call_output", "call_id": row["tool_call_id"], "output": _input(content)}
    elif role != "assistant":
        yield {"role": role, "content": _input(content)}
    else:
        for part in [content] if isinstance(content, str) else content or ():
            if isinstance(part, dict) and part.get("type") in ("reasoning", "thinking", "redacted_thinking"):
                continue
            yield {"role": "assistant", "content": _text(part)}
        for call in row["tool_calls"] or ():
            function = call["function"]
            yield {
                "type": "function_call",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": function["arguments"],
            }


def _input(content: Any) -> Any:
    """Content with parts of other APIs, and what the window put in place of parts, as this one takes them."""
    return [_input_part(part) for part in content] if isinstance(content, list) else content


def _input_part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else "text"
    if str(kind).startswith("input_"):
        return part
    url = part.get("image_url") if kind == "image_url" else None
    if isinstance(url, dict) and isinstance(url.get("url"), str):
        return {"type": "input_image", "image_url": url["url"], "detail": url.get("detail", "auto")}
    return {"type": "input_text", "text": _text(part)}


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if part.get("type") in _IMAGES:
        return "[image]"
    told = part.get("text", part.get("refusal"))
    return told if isinstance(told, str) else to_json(part)


def _text_part(text: str) -> Item:
    return {"type": "output_text", "text": text}
