from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pycontext.importer import Conversation, ImportProblem, read_conversations


def read(*lines: Any, **options: Any) -> list[Conversation | ImportProblem]:
    """Read lines: bytes as they are, anything else as its JSON."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines]
    return list(read_conversations(raw, default_id="file", **options))


def conversation(*messages: Any, **fields: Any) -> Conversation:
    (found,) = read({"id": "c", "messages": list(messages), **fields})
    assert isinstance(found, Conversation), found
    return found


def problem(*messages: Any) -> str:
    (found,) = read({"id": "c", "messages": list(messages)})
    assert isinstance(found, ImportProblem), found
    return str(found)


USER = {"role": "user", "content": "hi"}


def call(**changes: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **changes}


def test_a_conversation_becomes_rows_for_append_messages() -> None:
    found = conversation(
        {"role": "system", "content": "Be brief.", "cache": True},
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi"}],
            "created_at": "2025-01-02T03:04:05.5Z",
            "x": 1,
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call(index=0)],
            "metadata": {"pending": True},
            "y": 2,
        },
        {
            "role": "tool",
            "content": "",
            "tool_call_id": "c1",
            "name": "f",
            "message_id": "m-9",
            "created_at": 0,
        },
        source="pi",
    )
    assert found == Conversation(
        line=1,
        chat_id="c",
        system_prompt="Be brief.",
        messages=(
            {
                "role": "user",
                "content": [{"type": "text", "text": "hi"}],
                "message_id": "import-1",
                "created_at": "2025-01-02T03:04:05.500000+00:00",
                "metadata": {"x": 1},
            },
            {
                "role": "assistant",
                "content": None,
                "message_id": "import-2",
                "tool_calls": [call(index=0)],
                "metadata": {"y": 2, "pending": True},
            },
            {
                "role": "tool",
                "content": "",
                "message_id": "m-9",
                "tool_call_id": "c1",
                "name": "f",
                "created_at": "1970-01-01T00:00:00+00:00",
            },
        ),
        metadata={"source": "pi", "system_prompt": [{"cache": True}]},
    )


def test_only_leading_system_messages_are_the_prompt() -> None:
    found = conversation(
        {"role": "system", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "developer", "content": "three"},
        USER,
        {"role": "system", "content": "later"},
    )
    assert found.system_prompt == "one\n\ntwo\n\nthree"
    assert [row["role"] for row in found.messages] == ["user", "system"]
    assert [row["message_id"] for row in found.messages] == ["import-2", "import-3"]


def test_bom_blank_lines_and_crlf() -> None:
    line = json.dumps({"messages": [USER]}).encode()
    found = read(b"\xef\xbb\xbf" + line + b"\r\n", b"\r\n", b"   \n", line)
    assert [(each.line, each.chat_id) for each in found if isinstance(each, Conversation)] == [
        (1, "file-1"),
        (4, "file-4"),
    ]


def test_chat_ids() -> None:
    assert [
        each.chat_id
        for each in read({"id": 42, "messages": [USER]}, {"messages": [USER]}, prefix="p-")
        if isinstance(each, Conversation)
    ] == ["p-42", "p-file-2"]
    first, second = read({"id": "a", "messages": [USER]}, {"id": "b", "messages": [USER]}, chat_id="mine")
    assert isinstance(first, Conversation)
    assert first.chat_id == "mine"
    assert str(second) == "line 2: --chat-id is for one conversation, and this is a second one"
    _, again = read({"id": "a", "messages": [USER]}, {"id": "a", "messages": [USER]})
    assert str(again) == "line 2, id: 'a' is already the id of line 1"


def test_nul_and_lone_surrogates_are_replaced_at_every_depth() -> None:
    found = conversation(
        {"role": "user", "content": [{"type": "text", "text": "a\x00b", "k\ud800": "\udc00"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call(function={"name": "f", "arguments": "\x00"})],
        },
        {"role": "tool", "content": "ok \ud83d tail", "tool_call_id": "c1"},
    )
    assert found.messages[0]["content"] == [{"type": "text", "text": "a\ufffdb", "k\ufffd": "\ufffd"}]
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == "\ufffd"
    assert found.messages[2]["content"] == "ok \ufffd tail"


def test_arguments_stay_the_exact_string() -> None:
    arguments = '{"path":1,"b":2,  "content":3,"b":1.0e3}'
    found = conversation(
        USER, {"role": "assistant", "tool_calls": [call(function={"name": "f", "arguments": arguments})]}
    )
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{nope\n", "line 2: not JSON: Expecting property name enclosed in double quotes (column 2)"),
        (b"\xff\xfe{\x00\n", "line 2: not UTF-8 (byte 1 of the line)"),
        (b"[1]\n", "line 2: must be an object with messages, not a list"),
        (b'"text"\n', "line 2: must be an object with messages, not a string"),
        (b'{"id": "x"}\n', "line 2, messages: missing"),
        (b'{"messages": "x"}\n', "line 2, messages: must be a list, not a string"),
        (b'{"messages": []}\n', "line 2, messages: is empty"),
        (
            b'{"messages": [{"role":"user","content":"x","n":NaN}]}\n',
            "line 2: not JSON: NaN is not a JSON number",
        ),
        (
            b'{"messages": [{"role":"user","content":"x","n":1e999}]}\n',
            "line 2: not JSON: number out of range: 1e999",
        ),
        (b"[" * 100_000 + b"\n", "line 2: nested too deeply"),
        (
            b'{"id": true, "messages": []}\n',
            "line 2, id: must be a non-empty string or a whole number, not true or false",
        ),
        (b'{"id": "", "messages": []}\n', "line 2, id: must be a non-empty string or a whole number, not ''"),
    ],
)
def test_a_bad_line_is_named(raw: bytes, said: str) -> None:
    first, second = read({"messages": [USER]}, raw)
    assert isinstance(first, Conversation)
    assert isinstance(second, ImportProblem)
    assert str(second) == said


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("hello", "messages[1]: must be an object, not a string"),
        ({"content": "x"}, "messages[1].role: missing"),
        (
            {"role": "bot", "content": "x"},
            "messages[1].role: 'bot' is none of system, developer, user, assistant, tool",
        ),
        (
            {"role": ["user"], "content": "x"},
            "messages[1].role: ['user'] is none of system, developer, user, assistant, tool",
        ),
        ({"role": "user"}, "messages[1].content: missing"),
        (
            {"role": "user", "content": 7},
            "messages[1].content: must be a string, a list of parts or null, not a number",
        ),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]: must be an object, not a string"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0].type: missing"),
        (
            {"role": "user", "content": [{"type": "text", "text": 1}]},
            "messages[1].content[0].text: must be a string, not a number",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "http://x"}]},
            "messages[1].content[0].image_url: must be an object with url, not a string",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[1].content[0].image_url.url: missing",
        ),
        (
            {"role": "user", "content": "x", "tool_calls": [call()]},
            "messages[1].tool_calls: only an assistant message has tool calls, not one of role user",
        ),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls: must be a list, not an object"),
        (
            {"role": "assistant", "tool_calls": ["f"]},
            "messages[1].tool_calls[0]: must be an object, not a string",
        ),
        (
            {"role": "assistant", "tool_calls": [call(), call(id=None)]},
            "messages[1].tool_calls[1].id: missing",
        ),
        (
            {"role": "assistant", "tool_calls": [call(type="magic")]},
            "messages[1].tool_calls[0].type: must be 'function', not 'magic'",
        ),
        (
            {"role": "assistant", "tool_calls": [call(function="f")]},
            "messages[1].tool_calls[0].function: must be an object with name and arguments, not a string",
        ),
        (
            {"role": "assistant", "tool_calls": [call(function={"arguments": "{}"})]},
            "messages[1].tool_calls[0].function.name: missing",
        ),
        (
            {"role": "assistant", "tool_calls": [call(function={"name": "f", "arguments": [1]})]},
            "messages[1].tool_calls[0].function.arguments: "
            "must be a string (the JSON text as it came), not a list",
        ),
        (
            {"role": "assistant", "tool_calls": [call(), call()]},
            "messages[1].tool_calls[1].id: 'c1' is already the id of tool_calls[0]",
        ),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id: missing: a tool result names its call"),
        (
            {"role": "tool", "content": "x", "tool_call_id": 5},
            "messages[1].tool_call_id: must be a string, not a number",
        ),
        ({"role": "user", "content": "x", "name": ""}, "messages[1].name: is empty"),
        (
            {"role": "user", "content": "x", "created_at": "yesterday"},
            "messages[1].created_at: 'yesterday' is not a time (ISO 8601 or seconds since 1970)",
        ),
        (
            {"role": "user", "content": "x", "created_at": 1e30},
            "messages[1].created_at: 1e+30 is not a time (ISO 8601 or seconds since 1970)",
        ),
        (
            {"role": "user", "content": "x", "created_at": True},
            "messages[1].created_at: must be an ISO 8601 time or seconds since 1970, not true or false",
        ),
        (
            {"role": "user", "content": "x", "metadata": "m"},
            "messages[1].metadata: must be an object, not a string",
        ),
        (
            {"role": "user", "content": "x", "message_id": "import-0"},
            "messages[1].message_id: 'import-0' is already the id of messages[0]",
        ),
    ],
)
def test_a_bad_message_is_named_by_line_and_field(message: Any, said: str) -> None:
    assert problem(USER, message) == f"line 1, {said}"


def test_an_image_in_the_system_prompt_is_named() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    said = problem({"role": "system", "content": [{"type": "text", "text": "x"}, image]}, USER)
    assert said == "line 1, messages[0].content[1].type: a system prompt is text, not 'image_url'"


@pytest.mark.real
def test_real_files_have_no_problem_and_lose_no_message(shared_data: Path) -> None:
    for path in sorted(shared_data.glob("*.jsonl")):
        with path.open("rb") as lines:
            found = list(read_conversations(lines, default_id=path.stem))
        assert [str(each) for each in found if isinstance(each, ImportProblem)] == []
        given = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
        assert len(found) == len(given)
        for each, original in zip(found, given, strict=True):
            assert isinstance(each, Conversation)
            roles = [m["role"] for m in original["messages"]]
            leading = next(index for index, role in enumerate(roles) if role != "system")
            kept = [(row["role"], row["content"], row.get("tool_calls")) for row in each.messages]
            assert kept == [
                (m["role"], m.get("content"), m.get("tool_calls")) for m in original["messages"][leading:]
            ]
            assert (each.system_prompt is None) == (leading == 0)
