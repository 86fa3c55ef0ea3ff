"""Whether a provider accepts a request: its documented rules, written down once more.

OpenAI chat completions, OpenAI Responses (`input`), Anthropic messages. Each function raises Refused with the
place and the rule; it shares no code with the product.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

JSON = Mapping[str, Any]


class Refused(AssertionError):
    """The provider would answer 400."""


def _refuse(place: str, rule: str, value: object = None) -> None:
    raise Refused(f"{place}: {rule}" + ("" if value is None else f": {str(value)[:300]}"))


def _need(holds: bool, place: str, rule: str, value: object = None) -> None:
    if not holds:
        _refuse(place, rule, value)


def _text(value: object, place: str) -> None:
    _need(
        isinstance(value, str) and value.strip() != "", place, "text must not be empty or blank", repr(value)
    )
    try:
        str(value).encode()
    except UnicodeEncodeError:
        _refuse(place, "half a character")
    _need("\x00" not in str(value), place, "NUL in text")


def _keys(item: JSON, place: str, required: set[str], optional: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    _need(isinstance(item, Mapping), place, "must be an object", item)
    missing, unknown = required - set(item), set(item) - required - set(optional)
    _need(not missing, place, f"missing {sorted(missing)}", item)
    _need(not unknown, place, f"unknown {sorted(unknown)}")


_IMAGES = {"image/png", "image/jpeg", "image/gif", "image/webp"}


def _image_data(media_type: object, data: object, place: str) -> None:
    _need(media_type in _IMAGES, place, "not an image type that providers take", media_type)
    _need(isinstance(data, str) and data != "", place, "image without data")
    try:
        base64.b64decode(str(data), validate=True)
    except binascii.Error:
        _refuse(place, "image data is not base64", str(data)[:60])


def _image_url(url: object, place: str) -> None:
    _need(isinstance(url, str) and url != "", place, "image without url", url)
    if str(url).startswith("data:"):
        found = re.fullmatch(r"data:([^;,]+);base64,(.*)", str(url), re.DOTALL)
        _need(found is not None, place, "not a base64 data url", str(url)[:60])
        if found:
            _image_data(found[1], found[2], place)
    else:
        _need(re.match(r"https?://\S+$", str(url)) is not None, place, "not an http url", str(url)[:60])


# --- OpenAI chat completions ---

_ROLES = {"system", "developer", "user", "assistant", "tool"}
_OPENAI_PARTS = {
    "user": {"text", "image_url", "input_audio", "file"},
    "assistant": {"text", "refusal"},
    "system": {"text"},
    "developer": {"text"},
    "tool": {"text"},
}


def openai_chat(messages: Sequence[JSON]) -> None:
    """`messages` of a chat completion."""
    _need(isinstance(messages, list) and len(messages) > 0, "messages", "must not be empty")
    _need(
        any(m.get("role") not in ("system", "developer") for m in messages),
        "messages",
        "at least one message that is not the system's",
    )
    _need(messages[-1].get("role") in ("user", "tool"), "messages", "must end on a user or tool message")
    open_ids: set[str] = set()
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        role = message.get("role")
        _need(role in _ROLES, place, "unknown role", role)
        optional = {"name"}
        if role == "assistant":
            optional |= {"tool_calls", "refusal"}
        required = {"role", "content", "tool_call_id"} if role == "tool" else {"role", "content"}
        _keys(message, place, required, optional)
        if "name" in message:
            _need(
                isinstance(message["name"], str)
                and re.fullmatch(r"[^\s<|\\/>]{1,64}", message["name"]) is not None,
                place,
                "name",
                message["name"],
            )
        if role == "tool":
            _need(
                message["tool_call_id"] in open_ids,
                place,
                "a tool message must follow the message with its call",
                message["tool_call_id"],
            )
            open_ids.discard(message["tool_call_id"])
        else:
            _need(not open_ids, place, "calls without results before this message", sorted(open_ids))
        if message["content"] is None:
            _need(role == "assistant" and bool(message.get("tool_calls")), place, "content must not be null")
        else:
            _openai_content(message["content"], str(role), place)
        if message.get("tool_calls") is not None:
            open_ids = _openai_calls(message["tool_calls"], place)
    _need(not open_ids, "messages", "calls without results at the end", sorted(open_ids))


def _openai_content(content: object, role: str, place: str) -> None:
    if isinstance(content, str):
        _text(content, place)
        return
    _need(isinstance(content, list) and len(content) > 0, place, "content must not be empty", content)
    assert isinstance(content, list)
    for number, part in enumerate(content):
        at = f"{place}.content[{number}]"
        _need(isinstance(part, Mapping), at, "a part must be an object", part)
        kind = part.get("type")
        _need(kind in _OPENAI_PARTS[role], at, f"a part of this type does not go into a {role} message", kind)
        if kind == "text":
            _text(part.get("text"), at)
        elif kind == "image_url":
            _need(isinstance(part.get("image_url"), Mapping), at, "image_url must be an object")
            _image_url(part["image_url"].get("url"), at)


def _openai_calls(calls: object, place: str) -> set[str]:
    _need(isinstance(calls, list) and len(calls) > 0, place, "tool_calls must not be empty", calls)
    ids: set[str] = set()
    assert isinstance(calls, list)
    for number, call in enumerate(calls):
        at = f"{place}.tool_calls[{number}]"
        _need(isinstance(call, Mapping), at, "a call must be an object")
        _need(
            isinstance(call.get("id"), str) and 1 <= len(call["id"]) <= 40,
            at,
            "id of 1 to 40 characters",
            call,
        )
        _need(call["id"] not in ids, at, "two calls share an id", call["id"])
        kind = call.get("type")
        _need(kind in ("function", "custom"), at, "type must be function or custom", kind)
        _keys(call, at, {"id", "type", kind})
        function = call[kind]
        _need(isinstance(function, Mapping), at, "function must be an object")
        assert isinstance(function, Mapping)
        _need(
            isinstance(function.get("name"), str)
            and re.fullmatch(r"[a-zA-Z0-9_.-]{1,128}", function["name"]) is not None,
            at,
            "name of the function",
            function.get("name"),
        )
        text = function.get("arguments" if kind == "function" else "input")
        _need(isinstance(text, str), at, "arguments must be a string")
        ids.add(call["id"])
    return ids


# --- OpenAI Responses ---

_RESPONSES_PARTS = {
    "user": {"input_text", "input_image", "input_file"},
    "system": {"input_text"},
    "developer": {"input_text"},
}


def openai_responses(items: Sequence[JSON]) -> None:
    """`input` of a response that carries its whole context: no previous_response_id, nothing looked up."""
    _need(isinstance(items, list) and len(items) > 0, "input", "must not be empty")
    kinds = [item.get("type", "message") for item in items]
    _need(
        any(
            k != "message" or i.get("role") in ("user", "assistant")
            for k, i in zip(kinds, items, strict=True)
        ),
        "input",
        "at least one item that is not the system's",
    )
    last = items[-1]
    _need(
        kinds[-1] in _CALLS or (kinds[-1] == "message" and last.get("role") == "user"),
        "input",
        "must end on a user message or a result",
        last,
    )
    calling: dict[str, str] = {}  # calls of the group that is being read, each with its type
    called: set[str] = set()  # all so far: an output is found by its call_id alone
    answering = False
    for number, (kind, item) in enumerate(zip(kinds, items, strict=True)):
        place = f"input[{number}]"
        if kind in ("tool_search_call", "tool_search_output") and item.get("call_id") is None:
            continue  # the API searched by itself
        if kind in _CALLS.values():
            _need(
                not (answering and calling), place, "calls without results before this call", sorted(calling)
            )
            answering = False
            call_id = item["id" if kind == "mcp_approval_request" else "call_id"]
            _call_id(call_id, place)
            _need(call_id not in called, place, "two calls share an id", call_id)
            calling[call_id] = kind
            called.add(call_id)
            if kind not in ("function_call", "custom_tool_call"):
                _need(bool(item.keys() & _ASKED[kind]), place, "a call that asks for nothing", item)
                _need(kind not in _NEEDS_ID or bool(item.get("id")), place, "needs its id", item)
                continue
            text = "arguments" if kind == "function_call" else "input"
            _keys(
                item,
                place,
                {"type", "call_id", "name", text},
                {"id", "status", "caller", "namespace", "async"},
            )
            _need(
                isinstance(item["name"], str)
                and re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", item["name"]) is not None,
                place,
                "name of the function",
                item["name"],
            )
            _need(isinstance(item[text], str), place, "arguments must be a string")
        elif kind in _CALLS:
            key = {"local_shell_call_output": "id", "mcp_approval_response": "approval_request_id"}.get(
                kind, "call_id"
            )
            call_id = item[key]
            _call_id(call_id, place)
            _need(calling.get(call_id) == _CALLS[kind], place, "no call for this result", call_id)
            del calling[call_id]
            answering = True
            _responses_output(item, kind, place)
        else:
            _need(
                not (answering and calling), place, "calls without results before this item", sorted(calling)
            )
            answering = False
            if kind == "message":
                _need(
                    not calling or item.get("role") == "assistant",
                    place,
                    "calls without results before",
                    item,
                )
                _responses_message(item, place)
            elif kind == "reasoning":
                _keys(
                    item,
                    place,
                    {"type", "id", "summary"},
                    {"content", "encrypted_content", "status"},
                )
                _need(isinstance(item["summary"], list), place, "reasoning needs its summary list")
                following = items[number + 1] if number + 1 < len(items) else {}
                _need(
                    following.get("type") in _AFTER_REASONING or following.get("role") == "assistant",
                    place,
                    "reasoning without the item that must follow it",
                )
            elif kind in _HOSTED:
                _need(isinstance(item.get("id"), str), place, "needs its id", item)
            else:
                _need(kind in _OTHER, place, "unknown type", kind)
    _need(not calling, "input", "calls without results at the end", sorted(calling))


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
_ASKED = {
    "shell_call": {"action"},
    "local_shell_call": {"action"},
    "apply_patch_call": {"operation"},
    "computer_call": {"action", "actions"},
    "tool_search_call": {"arguments"},
    "mcp_approval_request": {"arguments"},
}
_NEEDS_ID = ("local_shell_call", "computer_call")
_HOSTED = {
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "item_reference",
}
_OTHER = {"additional_tools", "configuration_update", "compaction"}
_AFTER_REASONING = _HOSTED | set(_CALLS.values()) | {"reasoning"}


def _responses_output(item: JSON, kind: str, place: str) -> None:
    if kind in ("function_call_output", "custom_tool_call_output"):
        _keys(item, place, {"type", "call_id", "output"}, {"id", "status", "caller"})
        _responses_content(item["output"], "user", place)
    elif kind in ("apply_patch_call_output", "local_shell_call_output"):
        _text(item["output"], place)
    elif kind == "shell_call_output":
        _need(len(item["output"]) > 0, place, "empty result", item)
        for run in item["output"]:
            _keys(run, place, {"stdout", "stderr", "outcome"})
    elif kind == "computer_call_output":
        output = item["output"]
        _need(output.get("type") == "computer_screenshot", place, "no screenshot", output)
        if output.get("file_id") is None:
            _image_url(output.get("image_url"), place)
    elif kind == "tool_search_output":
        _need(isinstance(item.get("tools"), list), place, "tools must be a list", item)
    else:
        _need(isinstance(item.get("approve"), bool), place, "approve must be true or false", item)


def _call_id(value: object, place: str) -> None:
    _need(
        isinstance(value, str) and 1 <= len(value) <= 64,
        place,
        "call_id must be of 1 to 64 characters",
        value,
    )


def _responses_message(item: JSON, place: str) -> None:
    role = item.get("role")
    _need(role in ("user", "assistant", "system", "developer"), place, "unknown role", role)
    if role == "assistant" and not isinstance(item.get("content"), str):
        # an output message as the API returned it
        _keys(item, place, {"type", "role", "content", "id", "status"}, {"phase"})
        _need(
            isinstance(item["content"], list) and len(item["content"]) > 0, place, "content must not be empty"
        )
        for number, part in enumerate(item["content"]):
            at = f"{place}.content[{number}]"
            kind = part.get("type")
            _need(
                kind in ("output_text", "refusal"),
                at,
                "a part of this type does not go into a assistant message",
                kind,
            )
            _text(part.get("text", part.get("refusal")), at)
        return
    _keys(item, place, {"role", "content"}, {"type", "phase"})
    _responses_content(item["content"], str(role), place)


def _responses_content(content: object, role: str, place: str) -> None:
    if isinstance(content, str):
        _text(content, place)
        return
    _need(isinstance(content, list) and len(content) > 0, place, "content must not be empty", content)
    assert isinstance(content, list)
    for number, part in enumerate(content):
        at = f"{place}.content[{number}]"
        _need(isinstance(part, Mapping), at, "a part must be an object", part)
        kind = part.get("type")
        _need(
            kind in _RESPONSES_PARTS[role], at, f"a part of this type does not go into a {role} message", kind
        )
        if kind == "input_text":
            _keys(part, at, {"type", "text"})
            _text(part["text"], at)
        elif kind == "input_image":
            _keys(part, at, {"type", "detail"}, {"image_url", "file_id"})
            _need(part["detail"] in ("auto", "low", "high", "original"), at, "detail", part["detail"])
            if part.get("file_id") is None:
                _image_url(part.get("image_url"), at)


# --- Anthropic messages ---


def anthropic(request: JSON) -> None:
    """`system` and `messages` of a request."""
    if isinstance(request.get("system"), list):
        _need(len(request["system"]) > 0, "system", "must not be empty")
        for number, block in enumerate(request["system"]):
            _block_text(block, f"system[{number}]")
    elif "system" in request:
        _text(request["system"], "system")
    _need(len(marks(request)) <= 4, "cache_control", "at most four blocks are marked", marks(request))
    messages = request.get("messages")
    _need(isinstance(messages, list) and len(messages) > 0, "messages", "must not be empty")
    assert isinstance(messages, list)
    called: set[str] = set()
    waiting: set[str] = set()
    hosted: set[str] = set()
    working: set[str] = set()  # calls of Anthropic's own tools: their results come from the assistant's side
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        _keys(message, place, {"role", "content"})
        side = ("user", "assistant")[number % 2]
        _need(
            message["role"] == side,
            place,
            f"roles alternate and start with user; here {side}",
            message["role"],
        )
        content = message["content"]
        if isinstance(content, str):
            _need(not waiting, place, "tool_use without tool_result in the next message", sorted(waiting))
            _text(content, place)
            continue
        _need(isinstance(content, list) and len(content) > 0, place, "content must not be empty", content)
        results: list[str] = []
        past_results = False
        uses: list[str] = []
        for place_of_block, block in enumerate(content):
            at = f"{place}.content[{place_of_block}]"
            _need(isinstance(block, Mapping), at, "a block must be an object", block)
            kind = block.get("type")
            _need(kind in _BLOCKS[side], at, f"a block of this type is not the {side}'s", kind)
            _BLOCKS[side][kind](block, at)
            if kind == "tool_result":
                _need(not past_results, at, "tool_result blocks come first")
                results.append(block["tool_use_id"])
            else:
                past_results = True
            if kind == "tool_use":
                uses.append(block["id"])
                caller = block.get("caller", {"type": "direct"})
                _need(
                    caller["type"] == "direct" or caller["tool_id"] in hosted,
                    at,
                    "no such caller before",
                    caller,
                )
            elif kind in ("server_tool_use", "mcp_tool_use"):
                working.add(block["id"])
                hosted.add(block["id"])
            elif side == "assistant" and "tool_use_id" in block:
                _need(block["tool_use_id"] in working, at, "a result without its server_tool_use", block)
                working.discard(block["tool_use_id"])
            elif side == "user" and kind != "tool_result":
                _need(not working, at, "server_tool_use without its result before", sorted(working))
        _need(len(set(results)) == len(results), place, "two results for one call", results)
        lost = sorted(waiting - set(results))
        _need(not lost, place, "tool_use without tool_result in the next message", lost)
        stray = sorted(set(results) - waiting)
        _need(not stray, place, "tool_result without tool_use in the previous message", stray)
        _need(
            len(set(uses)) == len(uses) and not called & set(uses), place, "tool_use ids must be unique", uses
        )
        _need(
            message["role"] == "user" or content[-1].get("type") not in ("thinking", "redacted_thinking"),
            place,
            "the last block must not be thinking",
        )
        called |= set(uses)
        waiting = set(uses)
    _need(
        messages[-1]["role"] == "user" or bool(working), "messages", "must end on the user's side, or paused"
    )


def marks(request: JSON) -> list[tuple[int, int]]:
    """Where cache marks are: message and block; message -1 is the system prompt."""
    system = request.get("system")
    sides = [(-1, system if isinstance(system, list) else [])]
    sides += list(enumerate(m["content"] for m in request.get("messages") or ()))
    return [
        (message, number)
        for message, blocks in sides
        if isinstance(blocks, list)
        for number, block in enumerate(blocks)
        if isinstance(block, Mapping) and "cache_control" in block
    ]


def _block_text(block: JSON, place: str) -> None:
    _keys(block, place, {"type", "text"}, {"cache_control", "citations"})
    if "cache_control" in block:
        _need(
            block["cache_control"] in ({"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}),
            place,
            "cache_control",
            block["cache_control"],
        )
    _text(block["text"], place)


def _block_image(block: JSON, place: str) -> None:
    _keys(block, place, {"type", "source"}, {"cache_control"})
    source = block["source"]
    _need(isinstance(source, Mapping), place, "source must be an object")
    if source.get("type") == "base64":
        _keys(source, place, {"type", "media_type", "data"})
        _image_data(source["media_type"], source["data"], place)
    else:
        _need(source.get("type") == "url", place, "source type", source.get("type"))
        _image_url(source.get("url"), place)


def _block_use(block: JSON, place: str) -> None:
    _keys(block, place, {"type", "id", "name", "input"}, {"cache_control", "caller", "toolset_name"})
    _need(
        re.fullmatch(r"[a-zA-Z0-9_-]+", str(block["id"])) is not None, place, "id of a tool_use", block["id"]
    )
    _need(
        re.fullmatch(r"[a-zA-Z0-9_-]{1,128}", str(block["name"])) is not None,
        place,
        "name of a tool",
        block["name"],
    )
    _need(isinstance(block["input"], Mapping), place, "input must be an object", block["input"])


def _block_result(block: JSON, place: str) -> None:
    _keys(block, place, {"type", "tool_use_id", "content"}, {"is_error", "cache_control"})
    if isinstance(block["content"], str):
        _text(block["content"], place)
        return
    _need(isinstance(block["content"], list) and len(block["content"]) > 0, place, "empty result", block)
    for number, inner in enumerate(block["content"]):
        at = f"{place}.content[{number}]"
        _need(inner.get("type") in ("text", "image"), at, "a block that no result holds", inner.get("type"))
        (_block_text if inner["type"] == "text" else _block_image)(inner, at)


def _block_thinking(block: JSON, place: str) -> None:
    _keys(block, place, {"type", "thinking", "signature"})


def _block_redacted(block: JSON, place: str) -> None:
    _keys(block, place, {"type", "data"})


def _block_hosted(block: JSON, place: str) -> None:
    key = "id" if str(block["type"]).endswith("_use") else "tool_use_id"
    _need(
        re.fullmatch(r"(srvtoolu|mcptoolu)_\w+", str(block.get(key))) is not None,
        place,
        "id of a server's",
        block,
    )


_Block = Callable[[JSON, str], None]
_BLOCKS: dict[str, dict[object, _Block]] = {
    "user": {"text": _block_text, "image": _block_image, "tool_result": _block_result},
    "assistant": {
        "text": _block_text,
        "tool_use": _block_use,
        "thinking": _block_thinking,
        "redacted_thinking": _block_redacted,
        "server_tool_use": _block_hosted,
        "mcp_tool_use": _block_hosted,
        "web_search_tool_result": _block_hosted,
        "mcp_tool_result": _block_hosted,
        "code_execution_tool_result": _block_hosted,
    },
}


def is_json(text: str) -> bool:
    """Whether arguments of a call parse."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
