"""The validators refuse what providers refuse: each rule has a request that breaks it and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import validators
from validators import Refused

Change = Callable[[Any], Any]

PIXEL = "iVBORw0KGgo="


def call(name: str = "A") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "look", "arguments": '{"q": 1}'}}


CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "look"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        ],
    },
    {"role": "assistant", "content": None, "tool_calls": [call("A"), call("B")]},
    {"role": "tool", "tool_call_id": "B", "content": "b"},
    {"role": "tool", "tool_call_id": "A", "content": "a"},
    {"role": "assistant", "content": "done"},
    {"role": "assistant", "content": None, "tool_calls": [call("A")]},  # an id used again in a later turn
    {"role": "tool", "tool_call_id": "A", "content": "again"},
]

ANTHROPIC: dict[str, Any] = {
    "system": "Be brief.",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "A", "name": "look", "input": {}},
                {"type": "tool_use", "id": "B", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "B", "content": [{"type": "text", "text": "b"}]},
                {"type": "tool_result", "tool_use_id": "A", "content": "a"},
                {"type": "text", "text": "and now?"},
            ],
        },
    ],
}

RESPONSES: list[dict[str, Any]] = [
    {"role": "user", "content": "look"},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "function_call", "call_id": "A", "name": "look", "arguments": "{}"},
    {"type": "function_call", "call_id": "B", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "B", "output": "b"},
    {"type": "function_call_output", "call_id": "A", "output": "a"},
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "done", "annotations": []}],
    },
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]},
]


def test_good_requests_pass() -> None:
    validators.openai_chat(CHAT)
    validators.anthropic(ANTHROPIC)
    validators.openai_responses(RESPONSES)


def put(*path: Any) -> Change:
    """A change that sets the last of path at the place the others lead to."""

    def change(request: Any) -> Any:
        place = request
        for step in path[:-2]:
            place = place[step]
        place[path[-2]] = path[-1]
        return request

    return change


def drop(*path: Any) -> Change:
    def change(request: Any) -> Any:
        place = request
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]
        return request

    return change


def insert(number: int, message: Any, *path: Any) -> Change:
    def change(request: Any) -> Any:
        place = request
        for step in path:
            place = place[step]
        place.insert(number, message)
        return request

    return change


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda r: [], "empty"),
        (lambda r: r[:1], "not the system"),
        (lambda r: [*r, {"role": "assistant", "content": "and"}], "must end on"),
        (drop(3), "calls without results"),
        (drop(7), "must end on"),
        (drop(2), "must follow the message with its call"),
        (insert(4, {"role": "user", "content": "hello?"}), "calls without results"),
        (insert(5, {"role": "tool", "tool_call_id": "A", "content": "twice"}), "must follow"),
        (insert(3, {"role": "system", "content": "note"}), "calls without results"),
        (put(1, "content", ""), "blank"),
        (put(1, "content", " \n"), "blank"),
        (put(1, "content", []), "empty"),
        (put(1, "content", None), "null"),
        (put(1, "content", 0, "text", " "), "blank"),
        (put(1, "content", 1, "image_url", "url", "data:image/png;base64,%%"), "base64"),
        (put(1, "content", 1, "image_url", "url", "picture.png"), "http"),
        (put(1, "content", 1, "image_url", "url", f"data:image/svg+xml;base64,{PIXEL}"), "image type"),
        (put(5, "content", [{"type": "thinking", "thinking": "hm", "signature": "s"}]), "does not go into"),
        (
            put(3, "content", [{"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}]),
            "does not go",
        ),
        (put(5, "content", "half \ud83d"), "half a character"),
        (put(5, "content", "nul \x00"), "NUL"),
        (put(2, "tool_calls", []), "null"),
        (put(2, "tool_calls", 1, "id", "A"), "share an id"),
        (put(2, "tool_calls", 1, "function", "arguments", {}), "string"),
        (put(2, "tool_calls", 1, "function", "name", "a b"), "name"),
        (drop(2, "tool_calls", 1, "type"), "type"),
        (put(1, "role", "summary"), "role"),
        (put(1, "seq", 7), "unknown"),
        (drop(3, "tool_call_id"), "missing"),
        (put(1, "name", "a b"), "name"),
    ],
)
def test_openai_refuses(change: Change, rule: str) -> None:
    with pytest.raises(Refused, match=rule):
        validators.openai_chat(change(copy.deepcopy(CHAT)))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (put("messages", []), "empty"),
        (put("system", " "), "blank"),
        (drop("messages", 0), "alternate"),
        (drop("messages", 2), "end on the user"),
        (insert(1, {"role": "user", "content": "x"}, "messages"), "alternate"),
        (drop("messages", 2, "content", 0), "without tool_result"),
        (drop("messages", 1, "content", 1), "without tool_use"),
        (insert(0, {"type": "text", "text": "x"}, "messages", 2, "content"), "come first"),
        (put("messages", 2, "content", "x"), "without tool_result"),
        (put("messages", 2, "content", 1, "tool_use_id", "B"), "two results"),
        (put("messages", 1, "content", 2, "id", "A"), "without tool_use|unique"),
        (put("messages", 1, "content", 1, "id", "call:1"), "id of a tool_use"),
        (put("messages", 1, "content", 1, "input", "{}"), "object"),
        (put("messages", 1, "content", 1, "name", "a b"), "name"),
        (drop("messages", 1, "content", 0, "signature"), "missing"),
        (drop("messages", 1, "content", slice(1, None)), "last block must not be thinking"),
        (put("messages", 1, "content", 0, "cache_control", {"type": "ephemeral"}), "unknown"),
        (put("messages", 0, "content", 0, "cache_control", True), "cache_control"),
        (put("system", [{"type": "text", "text": " "}]), "blank"),
        (put("system", []), "empty"),
        (put("messages", 0, "content", 0, "text", "\n"), "blank"),
        (put("messages", 0, "content", []), "empty"),
        (put("messages", 0, "content", 1, "source", "media_type", "text/plain"), "image type"),
        (put("messages", 0, "content", 1, "source", "data", "%"), "base64"),
        (put("messages", 2, "content", 0, "content", []), "empty"),
        (put("messages", 2, "content", 0, "content", 0, "text", ""), "blank"),
        (insert(0, {"type": "image_url", "image_url": {}}, "messages", 0, "content"), "not the user's"),
        (
            insert(0, {"type": "tool_use", "id": "C", "name": "x", "input": {}}, "messages", 0, "content"),
            "not the user",
        ),
    ],
)
def test_anthropic_refuses(change: Change, rule: str) -> None:
    with pytest.raises(Refused, match=rule):
        validators.anthropic(change(copy.deepcopy(ANTHROPIC)))


def test_anthropic_refuses_a_fifth_cache_mark() -> None:
    request = copy.deepcopy(ANTHROPIC)
    mark = {"cache_control": {"type": "ephemeral"}}
    request["system"] = [{"type": "text", "text": "be brief", **mark}]
    blocks = [b for m in request["messages"] for b in m["content"] if b["type"] != "thinking"]
    for block in blocks[:3]:
        block.update(mark)
    validators.anthropic(request)
    assert len(validators.marks(request)) == 4
    blocks[3].update(mark)
    with pytest.raises(Refused, match="at most four"):
        validators.anthropic(request)


def test_anthropic_refuses_an_id_of_an_earlier_turn() -> None:
    request = copy.deepcopy(ANTHROPIC)
    request["messages"] += [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "A", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "A", "content": "x"}]},
    ]
    with pytest.raises(Refused, match="unique"):
        validators.anthropic(request)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda r: [], "empty"),
        (lambda r: r[:-1], "must end on"),
        (drop(4), "calls without results"),
        (drop(2), "no call for this result"),
        (insert(4, {"role": "user", "content": "x"}), "calls without results"),
        (
            insert(5, {"type": "function_call", "call_id": "C", "name": "x", "arguments": ""}),
            "calls without results",
        ),
        (insert(6, {"type": "reasoning", "id": "rs_2", "summary": []}), None),
        (insert(7, {"type": "reasoning", "id": "rs_2", "summary": []}), "must follow"),
        (insert(0, {"type": "reasoning", "id": "rs_2", "summary": []}), "must follow"),
        (put(1, "summary", "x"), "summary"),
        (put(0, "content", ""), "blank"),
        (put(7, "content", 0, "type", "text"), "does not go into"),
        (put(6, "content", 0, "type", "input_text"), "does not go into"),
        (put(2, "arguments", {}), "string"),
        (put(0, "role", "tool"), "role"),
        (put(0, "type", "note"), "unknown type"),
        (put(3, "call_id", "A"), "share an id"),
        (put(3, "call_id", ""), "1 to 64"),
        (put(4, "call_id", "x" * 65), "1 to 64"),
        (put(2, "name", "a.b"), "name"),
        (put(2, "extra", 1), "unknown"),
        (drop(1, "id"), "missing"),
        (drop(6, "id"), "missing"),
        (put(6, "content", []), "empty"),
        (put(6, "content", "done"), "missing|unknown"),
        (put(7, "content", 0, {"type": "input_image", "image_url": "https://x.org/a.png"}), "missing"),
        (put(7, "content", 0, {"type": "input_image", "detail": "auto", "image_url": "a.png"}), "http"),
        (put(7, "content", 0, {"type": "input_image", "detail": "fine", "image_url": "a.png"}), "detail"),
        (
            put(7, "content", 0, {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}),
            "does not",
        ),
        (put(5, "output", " "), "blank"),
        (put(5, "output", [{"type": "output_text", "text": "a"}]), "does not"),
        (
            lambda r: [
                *r,
                {"type": "function_call", "call_id": "A", "name": "x", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "A", "output": "again"},
            ],
            "share an id",
        ),
    ],
)
def test_responses_refuses(change: Change, rule: str | None) -> None:
    request = change(copy.deepcopy(RESPONSES))
    if rule is None:
        validators.openai_responses(request)
        return
    with pytest.raises(Refused, match=rule):
        validators.openai_responses(request)


@pytest.mark.parametrize(
    ("text", "expected"), [("{}", True), ('{"a": "b', False), ("", False), ("null", True)]
)
def test_arguments(text: str, expected: bool) -> None:
    assert validators.is_json(text) is expected
