"""Responses items become messages, and the very items again."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pycontext.items import KEY, to_items, to_messages

IDS = st.sampled_from(["a", "b", "call_9", ""])
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)
REST = st.fixed_dictionaries(
    {}, optional={"id": TEXT, "status": st.just("completed"), "n": st.none() | st.floats(0, 1), "phase": TEXT}
)
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["output_text", "input_text", "refusal", "input_image"]), "text": TEXT},
        optional={"annotations": st.just([])},
    ),
    min_size=1,
    max_size=3,
)


def kind(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    own = {
        key: value if isinstance(value, st.SearchStrategy) else st.just(value)
        for key, value in fields.items()
    }
    return st.tuples(REST, st.fixed_dictionaries(own)).map(lambda pair: {**pair[0], **pair[1]})


ITEM = st.one_of(
    kind(role=st.sampled_from(["user", "system", "developer", "assistant"]), content=TEXT | PARTS),
    kind(type="message", role=st.sampled_from(["user", "assistant"]), content=TEXT | PARTS),
    kind(type="function_call", call_id=IDS, name="look", arguments=TEXT),
    kind(type="function_call_output", call_id=IDS, output=TEXT | PARTS),
    kind(type="reasoning", summary=PARTS | st.just([])),
    kind(type="web_search_call", action=PARTS),
    kind(type="function_call", call_id=st.integers(), name="odd"),
    kind(type="message", role="assistant", content=st.none()),
    kind(what="no type"),
)


def stored(message: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from the database."""
    row = {"content": None, "tool_calls": None, "tool_call_id": None, **json.loads(json.dumps(message))}
    return {**row, KEY: row["metadata"][KEY]}


@given(st.lists(ITEM, max_size=8))
@settings(max_examples=200, deadline=None)
def test_the_very_items_come_back(items: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(items)
    messages = to_messages(items)
    assert items == before
    assert [item for message in messages for item in to_items(stored(message))] == items
    for message in messages:
        ids = [call["id"] for call in message.get("tool_calls", ())]
        assert len(set(ids)) == len(ids)
        assert message["role"] == "assistant" or len(message["metadata"][KEY]) == 1


def test_what_the_model_said_in_one_go_is_one_message() -> None:
    items = [
        {"type": "message", "role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "look", "arguments": '{"at": "x"}'},
        {"type": "function_call", "id": "fc_2", "call_id": "b", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "function_call_output", "call_id": "b", "output": "sun"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Rain."}],
            "id": "msg_1",
        },
    ]
    messages = to_messages(items)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["a", "b"]
    assert messages[1]["content"] == [items[1]]


def test_a_row_that_was_changed_goes_without_ids_and_an_old_one_without_reasoning() -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "look", "arguments": "{}"}
    output = {
        "type": "function_call_output",
        "id": "o",
        "call_id": "a",
        "output": [{"type": "input_text", "text": "x"}],
    }
    said, result = map(
        stored, to_messages([{"type": "reasoning", "id": "rs_1", "summary": []}, call, output])
    )
    bare = {key: value for key, value in call.items() if key != "id"}
    assert to_items({**said, "content": None}) == [bare]
    short = [{"type": "text", "text": "[look: shortened]"}]
    assert to_items({**result, "content": short, "is_changed": True}) == [
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_text", "text": "[look: shortened]"}],
        }
    ]
    note = {**result, "role": "user", "content": "[result of tool call a]", "tool_call_id": None}
    assert to_items(note) == [{"role": "user", "content": "[result of tool call a]"}]


def test_rows_of_others_are_told_as_items() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    picture = {"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}
    rows: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "See"}, picture, {"type": "file", "file": {}}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking"}, {"type": "text", "text": "Hm"}],
            "tool_calls": [call],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "a"},
        {"role": "assistant", "content": "Rain."},
    ]
    assert [item for row in rows for item in to_items({"tool_calls": None, **row})] == [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "See"},
                {"type": "input_image", "image_url": "https://x.example/a.png", "detail": "auto"},
                {"type": "input_text", "text": '{"type":"file","file":{}}'},
            ],
        },
        {"role": "assistant", "content": "Hm"},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"role": "assistant", "content": "Rain."},
    ]
