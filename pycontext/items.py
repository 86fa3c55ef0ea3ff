"""Items of OpenAI's Responses API as stored messages, and the very items back.

A message holds all that the model said in one go: its content has the text, and, whole, reasoning items and
calls of hosted tools; calls that wait for an output of the caller's are tool_calls, whatever their type, and
their outputs are results. What of an item has no place there (ids, status) is kept in the message's
metadata, in the order of the items. The SQL twin, for rows as they stand in a window: 092_responses.sql.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from pycontext.messages import Element, to_json
from pycontext.tokens import IMAGE_TYPES, REASONING_TYPES

Item = dict[str, Any]

KEY = "items"
"""Where a message's metadata keeps the rest of its items."""

_CALLS = {
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
    "shell_call_output": "shell_call",
    "local_shell_call_output": "local_shell_call",
    "apply_patch_call_output": "apply_patch_call",
    "computer_call_output": "computer_call",
    "tool_search_output": "tool_search_call",
    "mcp_approval_response": "mcp_approval_request",
}
_TEXTS = {"function_call": "arguments", "custom_tool_call": "input", "mcp_approval_request": "arguments"}
_ARGUMENTS = {
    "shell_call": ("action",),
    "local_shell_call": ("action",),
    "apply_patch_call": ("operation",),
    "computer_call": ("action", "actions"),
    "tool_search_call": ("arguments",),
}
# What the database needs of a call, to tell it as what it was.
_BESIDE = ("caller", "namespace", "async", "environment", "server_label")
_NEEDS_ID = ("local_shell_call", "computer_call", "mcp_approval_request")
_NEEDS_CONTENT = ("computer_call", "tool_search_call", "mcp_approval_request")
_DIRECTIONS = ("additional_tools", "configuration_update", "compaction_trigger")


def is_item(fields: Mapping[str, Any]) -> bool:
    """Whether these are an item's: one with a type of its own, which no message has."""
    kind = fields.get("type")
    if not isinstance(kind, str) or ("role" in fields and kind != "additional_tools"):
        return False
    return kind in (*_CALLS, *_DIRECTIONS, "reasoning", "compaction", "program", "item_reference") or (
        kind.startswith("mcp_") or kind.endswith(("_call", "_output"))
    )


def to_messages(items: Iterable[Mapping[str, Any]]) -> list[Element]:
    """The messages that hold the items, in OpenAI's chat form."""
    found: list[Element] = []
    reply: Element | None = None
    for given in items:
        item = dict(given)
        kind = item.get("type") or "message"
        if isinstance(_call_id(item), str) and kind in _CALLS:
            found.append(_result(item))
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            found.append(_message(item.pop("role"), item, "content"))
        elif kind in _DIRECTIONS:
            part = _part(item)
            found.append({"role": "developer", "content": [part], "metadata": {KEY: [part["type"]]}})
        else:
            if reply is None or any(call["id"] == _call_id(item) for call in reply["tool_calls"]):
                reply = {"role": "assistant", "content": [], "tool_calls": [], "metadata": {KEY: []}}
                found.append(reply)
            reply["metadata"][KEY].append(_taken(reply, item))
            continue
        reply = None
    for message in found:
        for call in message.get("tool_calls", ()):
            if call["item"].get("at") == len(message["content"]):
                del call["item"]["at"]
            if not call["item"]:
                del call["item"]
    return [{key: value for key, value in message.items() if value not in (None, [])} for message in found]


def window_items(rows: Sequence[Mapping[str, Any]]) -> Iterator[Item]:
    """The items of a window's rows; a call is a function's where it, or its output, can't be what it was."""
    plain: set[str] = set()
    for at, row in enumerate(rows):
        if row["role"] == "assistant":
            plain = _plain(row, list(takewhile(lambda later: later["role"] == "tool", rows[at + 1 :])))
        yield from to_items(row, plain)


def to_items(row: Mapping[str, Any], plain: Collection[str] = ()) -> list[Item]:
    """The items of a row: the very ones that were added where it is sent as it was stored, else what it says.

    row: role, content, tool_calls and tool_call_id as they are sent, is_changed where content is not what was
    stored, items: the rest of its items. plain: ids of calls to be told as functions.
    """
    if row.get(KEY):
        try:
            return list(_restored(row, row[KEY], plain))
        except (LookupError, TypeError, ValueError):
            pass  # it was shortened to another form
    return list(_told(row))


def _message(role: str, item: Item, content: str, **more: Any) -> Element:
    return {"role": role, "content": item.pop(content, None), **more, "metadata": {KEY: [item]}}


def _call_id(item: Mapping[str, Any]) -> Any:
    kind = item.get("type")
    if kind == "mcp_approval_request":
        return item.get("id")
    if kind == "mcp_approval_response":
        return item.get("approval_request_id")
    if kind == "local_shell_call_output" and item.get("call_id") is None:
        return item.get("id")  # the reference calls it id, OpenAI's own SDK for agents call_id
    return item.get("call_id")


def _part(item: Item) -> Item:
    """An item as a part of a message's content."""
    is_part = isinstance(item.get("type"), str) and isinstance(item.get("text", ""), str)
    return item if is_part else {"type": "item", "item": item}


def _result(item: Item) -> Element:
    """A call's output, its text or its parts as the content of a result."""
    kind, call_id, output = item["type"], _call_id(item), item.get("output")
    found: Element = {"role": "tool", "tool_call_id": call_id}
    if kind == "function_call_output":
        del item["call_id"]
        return _message("tool", item, "output", tool_call_id=call_id)
    if kind == "mcp_approval_response" and isinstance(item.get("approve"), bool):
        answer = {key: item.pop(key) for key in ("approve", "reason") if key in item}
        found["content"] = to_json(answer)
    elif kind == "apply_patch_call_output" and isinstance(item.get("status"), str):
        if isinstance(output, str):
            found["content"] = item.pop("output")
        else:
            found["content"] = item.pop("status")
            item["told"] = "status"
        if "failed" in (item.get("status"), found["content"]):
            found["metadata"] = {"is_error": True}
    elif kind == "shell_call_output" and _is_printed(output):
        found["content"] = [{"type": "shell_output", **printed} for printed in item.pop("output")]
    elif kind == "computer_call_output" and isinstance(output, dict) and _is_screenshot(output):
        found["content"] = [{**item.pop("output"), "type": "input_image"}]
    elif kind == "tool_search_output" and isinstance(item.get("tools"), list):
        found["content"] = [{"type": "tool_search_output", "tools": item.pop("tools")}]
    elif kind in ("custom_tool_call_output", "local_shell_call_output") and isinstance(output, (str, list)):
        found["content"] = item.pop("output")
    else:
        item = {"type": "item", "item": item}
        found["content"] = [item]
    found["metadata"] = {**found.get("metadata", {}), KEY: [item if item["type"] != "item" else "item"]}
    return found


def _is_printed(output: Any) -> bool:
    runs = output if isinstance(output, list) else ()
    return bool(runs) and all(isinstance(run, dict) and not {"type", "text"} & {*run} for run in runs)


def _is_screenshot(output: Item) -> bool:
    is_there = bool(output.get("image_url") or output.get("file_id"))
    return is_there and output.get("type") == "computer_screenshot"


def _taken(reply: Element, item: Item) -> Item | str:
    """Put an item into the reply; returns what has no place there, or its type where it went in whole."""
    call = _call(item)
    if call is not None:
        call["item"]["at"] = len(reply["content"])
        reply["tool_calls"].append(call)
        if item["type"] == "mcp_approval_request":
            reply["metadata"]["pending"] = True
        return item
    if item.get("role") == "assistant" and isinstance(item.get("content"), (str, list)):
        content = item.pop("content")
        is_text = isinstance(content, str)
        parts = [{"type": "output_text", "text": content}] if is_text else content
        phase = {"phase": item["phase"]} if isinstance(item.get("phase"), str) else {}
        reply["content"].extend({**part, **phase} if isinstance(part, dict) else part for part in parts)
        return {**item, "parts": None if is_text else len(content)}
    part = _part(item)
    reply["content"].append(part)
    return str(part["type"])


def _call(item: Item) -> Item | None:
    """A call that waits for an output as one of tool_calls; what goes in there is taken out of the item."""
    kind, call_id = str(item.get("type")), _call_id(item)
    if not isinstance(call_id, str):
        return None
    beside = {key: item[key] for key in _BESIDE if key in item}
    if kind in _NEEDS_ID:
        beside["id"] = item.get("id")
    if kind in _TEXTS:
        if not all(isinstance(item.get(key), str) for key in ("name", _TEXTS[kind])):
            return None
        name, arguments = item.pop("name"), item.pop(_TEXTS[kind])
    elif kind in _ARGUMENTS and any(item.get(key) is not None for key in _ARGUMENTS[kind]):
        name = kind.removesuffix("_call")
        arguments = to_json({key: item.pop(key) for key in _ARGUMENTS[kind] if key in item})
    else:
        return None
    item.pop("call_id", None)
    own = {"function_call": "function", "custom_tool_call": "custom"}.get(kind, kind)
    return {"id": call_id, "type": own, "function": {"name": name, "arguments": arguments}, "item": beside}


def _called(call: Mapping[str, Any], rest: Item) -> Item:
    """The item of a call. Raises ValueError where its arguments are no longer an item's."""
    kind, function = rest["type"], call["function"]
    own = {} if kind == "mcp_approval_request" else {"call_id": call["id"]}
    if kind in _TEXTS:
        return {**rest, **own, "name": function["name"], _TEXTS[kind]: function["arguments"]}
    arguments = json.loads(function["arguments"])
    if not isinstance(arguments, dict) or not set(arguments) <= set(_ARGUMENTS[kind]):
        raise ValueError("shortened to another form")
    return {**rest, **own, **arguments}


def _plain(row: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> set[str]:
    """The calls of a row that can't be told as what they were, or their results can't."""
    calls = [call for call in row["tool_calls"] or () if call["type"] != "function"]
    try:
        if calls and row.get(KEY):
            list(_restored(row, row[KEY], ()))
    except (LookupError, TypeError, ValueError):
        return {call["id"] for call in calls}
    changed = {result["tool_call_id"] for result in results if result.get("is_changed")}
    return {
        call["id"]
        for call in calls
        if (call["type"] in _NEEDS_ID and _is_bare(row))
        or (call["type"] in _NEEDS_CONTENT and call["id"] in changed)
    }


def _is_bare(row: Mapping[str, Any]) -> bool:
    """Whether a row's items go without ids: it was changed, or the reasoning that ids ask for is not sent."""
    kinds = [part.get("type") for part in row["content"]] if isinstance(row["content"], list) else []
    left_out = (rest for rest in row.get(KEY) or () if isinstance(rest, str) and rest not in kinds)
    return bool(row.get("is_changed")) or any(rest in REASONING_TYPES for rest in left_out)


def _restored(row: Mapping[str, Any], rests: Sequence[Any], plain: Collection[str]) -> Iterator[Item]:
    """The items, as they were added. One whose content is not what it was goes without the id that it had."""
    if row["role"] == "tool":
        if row["tool_call_id"] in plain:
            raise ValueError("told as a function's")
        (rest,) = rests
        yield _output(row, rest)
        return
    is_bare = _is_bare(row)
    if row["role"] != "assistant":
        (rest,) = rests
        if isinstance(rest, str):
            (part,) = row["content"]
            yield part["item"] if rest == "item" else part
            return
        if rest.get("type") in _CALLS:
            raise ValueError("a result told as a note")
        content = _input(row["content"]) if is_bare else row["content"]
        item = {**rest, "role": row["role"], "content": content}
        yield _without_id(item) if is_bare else item
        return
    parts = row["content"] if isinstance(row["content"], list) else [_text_part(row["content"] or "(empty)")]
    kinds = [part.get("type") for part in parts]
    calls = iter(row["tool_calls"] or ())
    at = 0
    found: list[Item] = []
    for rest in rests:
        if isinstance(rest, str):
            if rest in REASONING_TYPES and rest not in kinds:
                continue  # an older turn: its reasoning is not sent
            part = parts[at]["item"] if rest == "item" else parts[at]
            hosted = is_bare and rest not in REASONING_TYPES
            found.append({"role": "assistant", "content": _text(part)} if hosted else part)
            at += 1
        elif rest.get("type") in _CALLS.values():
            call = next(calls, None)
            if call is None:
                raise LookupError("a call is missing")
            found.append(_function_call(call) if call["id"] in plain else _called(call, rest))
        else:
            count = rest["parts"]
            content = parts[at]["text"] if count is None else [*map(_without_phase, parts[at : at + count])]
            at += 1 if count is None else count
            found.append(
                {**{k: v for k, v in rest.items() if k != "parts"}, "role": "assistant", "content": content}
            )
    if at != len(parts) and (row["content"] is not None or at):
        raise ValueError("other parts than were added")
    yield from map(_without_id, found) if is_bare else found


def _output(row: Mapping[str, Any], rest: Any) -> Item:
    """The item of a result."""
    content, is_changed = row["content"], bool(row.get("is_changed"))
    if rest == "item":
        if is_changed:
            raise ValueError("shortened to another form")
        item: Item = content[0]["item"]
        return item
    kind = rest["type"]
    item = {key: value for key, value in rest.items() if key != "told"}
    if kind == "function_call_output":
        item |= {"call_id": row["tool_call_id"], "output": _input(content) if is_changed else content}
    elif kind == "mcp_approval_response":
        item |= json.loads(content)
    elif kind == "computer_call_output":
        item["output"] = {**content[0], "type": "computer_screenshot"}
    elif kind == "tool_search_output":
        item["tools"] = content[0]["tools"]
    elif kind == "shell_call_output" and isinstance(content, list):
        item["output"] = [{key: value for key, value in part.items() if key != "type"} for part in content]
    elif kind == "shell_call_output":
        item["output"] = [{"stdout": content, "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
    else:
        told = rest.get("told", "output")
        is_text = kind in ("apply_patch_call_output", "local_shell_call_output")
        item[told] = content if not is_changed else _all_text(content) if is_text else _input(content)
    is_named = kind == "local_shell_call_output" and "call_id" not in item  # by its id
    return _without_id(item) if is_changed and not is_named else item


def _without_id(item: Item) -> Item:
    return {key: value for key, value in item.items() if key != "id"}


def _without_phase(part: Any) -> Any:
    """A part as it was added: which phase its message was of stands in the message's rest."""
    return {key: value for key, value in part.items() if key != "phase"} if isinstance(part, dict) else part


def _told(row: Mapping[str, Any]) -> Iterator[Item]:
    """A row as items, whoever wrote it."""
    content, role = row["content"], row["role"]
    if role == "tool":
        yield {"type": "function_call_output", "call_id": row["tool_call_id"], "output": _input(content)}
    elif role != "assistant":
        yield {"role": role, "content": _input(content)}
    else:
        for part in [content] if isinstance(content, str) else content or ():
            if isinstance(part, dict) and part.get("type") in REASONING_TYPES:
                continue
            yield {"role": "assistant", "content": _text(part)}
        yield from map(_function_call, row["tool_calls"] or ())


def _function_call(call: Mapping[str, Any]) -> Item:
    function = call["function"]
    return {
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
    if part.get("type") in IMAGE_TYPES:
        return "[image]"
    told = part.get("text", part.get("refusal"))
    return told if isinstance(told, str) else to_json(part)


def _all_text(content: Any) -> str:
    return "\n".join(map(_text, content)) if isinstance(content, list) else str(content)


def _text_part(text: str) -> Item:
    return {"type": "output_text", "text": text}
