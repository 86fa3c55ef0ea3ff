"""Every item of OpenAI's Responses API: kept whole, paired, cut without becoming invalid, told to all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, get_args

import psycopg
import pytest
import validators

openai = pytest.importorskip("openai", reason="needs the openai client: extra openai")

from openai.types.responses import ResponseInputItem, ResponseInputItemParam  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402

import pycontext  # noqa: E402
from pycontext.items import KEY, to_items, to_messages  # noqa: E402

pytestmark = pytest.mark.runners("sync", "pooled", long="pooled")

Item = dict[str, Any]

SHOT = {"type": "computer_screenshot", "image_url": "data:image/png;base64,iVBORw0KGgo="}
RUN = {"stdout": "a.py\nb.py\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
TOOL = {"type": "function", "name": "look", "parameters": {}, "strict": False, "description": "d"}
DONE = {"status": "completed"}

#: A call and its output, by the call's type.
PAIRS: dict[str, tuple[Item, Item]] = {
    "function_call": (
        {
            "id": "fc_1",
            "call_id": "c",
            "name": "look",
            "arguments": "{}",
            "caller": {"type": "direct"},
            **DONE,
        },
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": "привет 你好",
            "caller": {"type": "direct"},
        },
    ),
    "custom_tool_call": (
        {"id": "ctc_1", "call_id": "c", "name": "grep", "input": "привет\n\"'{"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "a.py"}],
        },
    ),
    "shell_call": (
        {"id": "sh_1", "call_id": "c", "action": {"commands": ["ls", "echo привет"]}, **DONE},
        {"type": "shell_call_output", "call_id": "c", "output": [RUN, RUN], "max_output_length": 4096},
    ),
    "local_shell_call": (
        {"id": "lsh_1", "call_id": "c", "action": {"type": "exec", "command": ["ls"], "env": {}}, **DONE},
        {"type": "local_shell_call_output", "id": "c", "output": '{"stdout": "a.py"}'},
    ),
    "apply_patch_call": (
        {
            "id": "ap_1",
            "call_id": "c",
            "operation": {"type": "update_file", "path": "a", "diff": "+"},
            **DONE,
        },
        {"type": "apply_patch_call_output", "call_id": "c", "status": "failed", "output": "no such file: a"},
    ),
    "computer_call": (
        {"id": "cu_1", "call_id": "c", "action": {"type": "wait"}, "pending_safety_checks": [], **DONE},
        {"type": "computer_call_output", "call_id": "c", "output": SHOT, "acknowledged_safety_checks": []},
    ),
    "tool_search_call": (
        {"id": "ts_1", "call_id": "c", "arguments": {"q": ["look"]}, "execution": "client", **DONE},
        {"type": "tool_search_output", "call_id": "c", "tools": [TOOL], "execution": "client", **DONE},
    ),
    "mcp_approval_request": (
        {"id": "c", "name": "pay", "arguments": '{"sum": 7}', "server_label": "bank"},
        {"type": "mcp_approval_response", "approval_request_id": "c", "approve": False, "reason": "нет"},
    ),
}
PAIRS = {kind: ({"type": kind, **call}, output) for kind, (call, output) in PAIRS.items()}
#: What a model's reply holds that waits for nothing of the caller's.
HOSTED: list[Item] = [
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm"}]},
    {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "q"}, **DONE},
    {"type": "file_search_call", "id": "fs_1", "queries": ["q"], "results": None, **DONE},
    {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "container_id": "x", "outputs": [], **DONE},
    {"type": "image_generation_call", "id": "ig_1", "result": "iVBORw0KGgo=" * 9000, **DONE},
    {"type": "mcp_list_tools", "id": "ml_1", "server_label": "bank", "tools": []},
    {
        "type": "mcp_call",
        "id": "mc_1",
        "server_label": "bank",
        "name": "pay",
        "arguments": "{}",
        "output": "ok",
    },
    {"type": "program", "id": "pr_1", "call_id": "p", "code": "look()", "fingerprint": "f"},
    {"type": "program_output", "id": "po_1", "call_id": "p", "result": "7", **DONE},
    {"type": "tool_search_call", "arguments": {}, "call_id": None, "execution": "server"},
    {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"},
    {"type": "item_reference", "id": "msg_7"},
]
SAID: Item = {"type": "message", "id": "msg_1", "role": "assistant", **DONE}
SAID["content"] = [{"type": "output_text", "text": "Done.", "annotations": []}]
#: What only a caller puts in.
GIVEN: list[Item] = [
    {"role": "user", "content": "Where?"},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"type": "additional_tools", "role": "developer", "tools": [TOOL]},
    {"type": "configuration_update", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
    {"type": "compaction_trigger"},
]


def asked(memory: pycontext.Database, chat_id: str = "a", text: str | None = "Where?", **options: Any) -> Any:
    """A turn read in every form."""
    given = {"system_prompt": "Be brief.", "profile": "small-8k", **options}
    return memory.turn(chat_id, text, format="all", compact="off", **given)


def check(turn: Any) -> None:
    """What is sent is valid for every provider; each item is one that the client's own types know."""
    validators.openai_chat(turn.messages)
    validators.anthropic(turn.anthropic)
    validators.openai_responses(turn.responses_input)
    known: TypeAdapter[Any] = TypeAdapter(ResponseInputItemParam)
    for item in turn.responses_input:
        known.validate_python(item)


def ids(items: Any) -> Iterator[Any]:
    """Without what the API makes: ids and states."""
    for item in items:
        yield {key: value for key, value in item.items() if key not in ("id", "status")}


def test_no_type_of_the_clients_is_left_out() -> None:
    union = get_args(get_args(ResponseInputItem)[0])
    types = {get_args(kind)[0] if get_args(kind) else kind for kind in union}
    kinds = {
        name
        for made in types
        for name in get_args(made.model_fields["type"].annotation)
        if isinstance(name, str)
    }
    optional = {
        get_args(name)[0]
        for made in types
        for name in get_args(made.model_fields["type"].annotation)
        if get_args(name)
    }
    mine = [item for pair in PAIRS.values() for item in pair] + HOSTED + GIVEN + [SAID]
    assert kinds | optional == {item.get("type", "message") for item in mine}


def test_a_call_and_its_output_stay_a_pair(memory: pycontext.Database) -> None:
    for kind, (call, output) in PAIRS.items():
        thought = HOSTED[0]
        with asked(memory, kind) as turn:
            turn.add([thought, call])
            check(turn)
            waiting = turn.responses_input[-1]
            assert waiting["type"] in (
                output["type"],
                "function_call_output",
            )  # a stand-in of its type, where it can be
            assert "no result yet" in json.dumps(waiting) or "waiting for a person" in json.dumps(waiting)
            turn.add([output])
            check(turn)
            *_, before, sent, answer = turn.responses_input
            assert before == thought
            expected = {key: value for key, value in call.items() if key not in ("id", "status")}
            assert expected.items() <= sent.items()
            assert answer["type"] == output["type"]
            own = {
                key: value
                for key, value in output.items()
                if key in ("output", "tools", "approve", "reason", "caller")
            }
            assert own.items() <= answer.items()
            assert [c["id"] for m in turn.messages for c in m.get("tool_calls", ())] == ["c"]
            turn.add([SAID])
            assert turn.is_answered
        rows = memory.thread(kind)
        assert [row.role for row in rows] == ["user", "assistant", "tool", "assistant"]
        with asked(memory, kind, "And now?") as turn:  # an older turn: ids and reasoning are gone
            check(turn)
            assert thought not in turn.responses_input
            kinds = [item["type"] for item in turn.responses_input]
            is_bound = kind in ("local_shell_call", "computer_call", "mcp_approval_request")
            assert kinds[2:4] == (
                ["function_call", "function_call_output"] if is_bound else [kind, output["type"]]
            )


def test_an_output_whose_call_is_gone_is_a_note(memory: pycontext.Database) -> None:
    for kind, (_, output) in PAIRS.items():
        with asked(memory, kind) as turn:
            turn.add([output])
            check(turn)
            assert "which is not in view" in json.dumps(turn.responses_input[-1])
            assert turn.messages[-1]["role"] == "user"


def test_a_failed_tool_is_told_as_one(memory: pycontext.Database) -> None:
    failed = PAIRS["apply_patch_call"]
    with asked(memory) as turn:
        turn.add(failed)
        assert turn.responses_input[-1]["status"] == "failed"
        assert turn.anthropic["messages"][-1]["content"][0]["is_error"] is True
        good = {"type": "apply_patch_call_output", "call_id": "d", "status": "completed"}
        turn.add([{**failed[0], "call_id": "d"}, good])
        check(turn)
        assert turn.responses_input[-1] == {**good, "output": "completed"}
        assert "is_error" not in turn.anthropic["messages"][-1]["content"][0]


def results(request: Any) -> list[Any]:
    return [
        (block["tool_use_id"], block.get("is_error"))
        for message in request["messages"]
        for block in message["content"]
        if block["type"] == "tool_result"
    ]


def test_a_failed_tool_of_anthropics_is_sent_back_as_one(
    memory: pycontext.Database, db: psycopg.Connection[Any]
) -> None:
    """Given as a block, by a caller of the SQL, or told by the metadata of a product's own table."""
    calls = [{"type": "tool_use", "id": f"c{n}", "name": "look", "input": {}} for n in range(3)]
    blocks = [{"type": "tool_result", "tool_use_id": f"c{n}", "content": "no"} for n in range(3)]
    with memory.turn("a", "Where?", format="all", compact="off") as turn:
        turn.add({"role": "assistant", "content": calls})
        turn.add(
            {"role": "user", "content": [{**blocks[0], "is_error": True}, {**blocks[1], "is_error": False}]}
        )
        check(turn)
        message = json.dumps([{"role": "tool", "tool_call_id": "c2", "content": "no", "is_error": True}])
        db.execute("select pycontext.append_messages('a', %s)", (message,))
    sent = db.execute("select pycontext.anthropic_messages('a')").fetchone()
    assert sent is not None
    validators.anthropic(sent[0])
    assert results(sent[0]) == [("c0", True), ("c1", None), ("c2", True)]
    db.execute("""
        create table said as
        select 7 as chat_id, seq, seq::text as message_id, role, content, tool_calls, tool_call_id, metadata,
            now() as created_at
        from pycontext.thread('a');
        select pycontext.register_source('shop', 'said', true)""")
    adopted = db.execute("select pycontext.anthropic_messages('7')").fetchone()
    assert adopted is not None
    assert adopted[0]["messages"] == sent[0]["messages"]


def test_pruned_and_cut_it_is_valid_still(memory: pycontext.Database) -> None:
    for kind, (call, output) in PAIRS.items():
        long = "where is it, где оно? " * 400
        grown = {
            "function_call": {"arguments": json.dumps({"q": long})},
            "custom_tool_call": {"input": long},
            "shell_call": {"action": {"commands": [long]}},
            "local_shell_call": {"action": {"type": "exec", "command": [long], "env": {}}},
            "apply_patch_call": {"operation": {"type": "update_file", "path": "a", "diff": long}},
            "computer_call": {"action": {"type": "type", "text": long}},
            "tool_search_call": {"arguments": {"q": long}},
            "mcp_approval_request": {"arguments": json.dumps({"q": long})},
        }[kind]
        answers = {
            "shell_call": {"output": [{**RUN, "stdout": long}]},
            "computer_call": {},
            "tool_search_call": {"tools": [{**TOOL, "description": long}]},
            "mcp_approval_request": {"reason": long},
        }.get(kind, {"output": long})
        for number in range(2):
            named = {"id" if kind == "mcp_approval_request" else "call_id": f"c{number}"}
            key = {"mcp_approval_request": "approval_request_id", "local_shell_call": "id"}.get(
                kind, "call_id"
            )
            with asked(memory, kind, f"Question {number}?") as turn:
                turn.add([{**call, **grown, **named}, {**output, **answers, key: f"c{number}"}])
                check(turn)
                turn.add([SAID])
        for budget in (3000, 1200, 250):
            with asked(memory, kind, None, token_budget=budget) as turn:
                check(turn)
                assert turn.window_tokens <= budget


def test_every_message_keeps_its_phase(memory: pycontext.Database) -> None:
    """OpenAI asks for commentary and final answers to be sent back as such, through the whole chat."""
    said = [
        {**SAID, "id": "msg_1", "phase": "commentary"},
        {"type": "message", "role": "assistant", "content": "Looked.", "phase": "final_answer"},
    ]
    with asked(memory) as turn:
        turn.add(said)
    with asked(memory, text="And now?") as turn:
        told = turn.responses_input
        check(turn)
    phases = [item.get("phase") for item in told if item.get("role") == "assistant"]
    assert phases == ["commentary", "final_answer"]
    assert not [item for item in told if "phase" in item and item["role"] != "assistant"]


def test_hosted_tools_stay_whole_while_their_turn_lasts(memory: pycontext.Database) -> None:
    with asked(memory) as turn:
        turn.add([*HOSTED, PAIRS["function_call"][0]])
        turn.add([PAIRS["function_call"][1]])
        check(turn)
        at = [item for item in turn.responses_input if item in HOSTED]
        assert at == HOSTED
        assert turn.window_tokens < 6000  # an image costs what images cost
        turn.add([SAID])
    with asked(memory, text="And now?") as turn:
        check(turn)
        told = json.dumps(turn.responses_input)
        assert "rs_1" not in told
        assert "encrypted_content" not in told
        assert "iVBORw0KGgo" not in json.dumps([turn.messages, turn.anthropic, told])
        assert "bank" in told


def test_a_call_stands_where_it_stood(memory: pycontext.Database) -> None:
    call, output = PAIRS["shell_call"]
    items = [HOSTED[0], call, {**HOSTED[0], "id": "rs_2"}, {**call, "call_id": "d"}]
    with asked(memory) as turn:
        turn.add([*items, output, {**output, "call_id": "d"}])
        check(turn)
        assert [item.get("id", item.get("call_id")) for item in turn.responses_input[2:]] == [
            *("rs_1", "c", "rs_2", "d"),
            *("c", "d"),
        ]


def test_directions_stand_where_they_were_given(memory: pycontext.Database) -> None:
    with asked(memory) as turn:
        turn.add(GIVEN[1:])
        check(turn)
        assert [item for item in turn.responses_input if "type" in item and item in GIVEN[2:]] == GIVEN[2:4]
        assert "compaction_trigger" not in json.dumps(turn.responses_input)


def test_a_custom_tool_of_chat_completions(memory: pycontext.Database, db: psycopg.Connection[Any]) -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "grep", "input": 'привет {"'}}
    result = {"role": "tool", "tool_call_id": "c", "content": "a.py"}
    with asked(memory) as turn:
        turn.add([{"role": "assistant", "content": None, "tool_calls": [call]}, result])
        check(turn)
        assert turn.messages[-2]["tool_calls"] == [call]
        assert turn.responses_input[-2]["type"] == "custom_tool_call"
        assert turn.responses_input[-2]["input"] == call["custom"]["input"]  # type: ignore[index]
    messages = json.dumps([{"role": "assistant", "tool_calls": [{**call, "id": "d"}]}])
    db.execute("select pycontext.append_messages('a', %s::jsonb)", (messages,))
    sent = db.execute("select pycontext.openai_messages('a')").fetchone()
    assert sent is not None
    validators.openai_chat(sent[0])
    assert {**call, "id": "d"} in [c for m in sent[0] for c in m.get("tool_calls", ())]


def test_all_of_them_come_back_as_they_were_added(dsn: str) -> None:
    pytest.importorskip("agents", reason="needs the Agents SDK: extra openai-agents")
    from pycontext.integrations.openai_agents import ChatSession

    turns: list[list[Any]] = [[GIVEN[0], *GIVEN[1:], SAID]]
    turns += [[GIVEN[0], call, output, SAID] for call, output in PAIRS.values()]
    turns += [
        [GIVEN[0], call, {**output, "call_id": "c"}, SAID] for call, output in [PAIRS["local_shell_call"]]
    ]
    blank = [GIVEN[0], PAIRS["function_call"][0], {**PAIRS["function_call"][1], "output": ""}, SAID]
    turns += [
        [{"id": "msg_1"}, *HOSTED[1:10], *HOSTED[11:], SAID],
        [GIVEN[0], HOSTED[10], *HOSTED[:10], *HOSTED[11:], SAID],
    ]

    async def use() -> None:
        async with pycontext.aconnect(dsn) as db:
            for number, items in enumerate([*turns, blank]):
                session = ChatSession(number, db)
                await session.add_items(items)
                assert await session.get_items() == items
                popped = [await session.pop_item() for _ in items]
                assert popped[::-1] == items
            unseen = ({"id": "msg_1"}, {"type": "compaction_trigger"})
            for budget in (None, 4000, 1500):  # one session for all: the SDK adds the new input
                session = ChatSession("all", db, token_budget=budget, compact="off", profile="long-1m")
                for n, items in enumerate(() if budget else turns):
                    await session.add_items(json.loads(json.dumps(items).replace('"c"', f'"c{n}"')))
                found = [item for item in await session.get_items() if item not in unseen]
                validators.openai_responses([*found, GIVEN[0]])

    asyncio.run(use())


def test_twice_through_storage_is_once(memory: pycontext.Database) -> None:
    for call, output in PAIRS.values():
        for message in to_messages([call, output]):
            row = {
                "content": None,
                "tool_calls": None,
                "tool_call_id": None,
                **message,
                KEY: message["metadata"][KEY],
            }
            assert to_messages(to_items(row)) == [message]
