"""What `turn.add` takes: what each provider's own client returned, and results in each provider's form."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
import validators
from llm_server import LLMServer, _response
from openai import OpenAI
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

import pycontext

pytestmark = pytest.mark.runners("sync", "async", "pooled", long="pooled")

Connection = psycopg.Connection[Any]
JSON = dict[str, Any]

CALLS = (("c1", '{"b": 1, "a": {"parsed": 2}}'), ("c2", '{"a": 2}'))
THOUGHT = {"type": "thinking", "thinking": "Which hub?", "signature": "c2ln"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Which hub?"}]}


def completion(identity: str, text: str | None, tokens: int = 0) -> ChatCompletion:
    message: JSON = {"role": "assistant", "content": text}
    if text is None:
        message["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": "look", "arguments": arguments}}
            for name, arguments in CALLS
        ]
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
    return ChatCompletion.model_validate(
        {"id": identity, "created": 1, "model": "m", "object": "chat.completion", "choices": [choice]}
        | {"usage": usage}
    )


def response(identity: str, text: str | None, tokens: int = 0) -> Response:
    output: list[JSON] = [REASONING]
    if text is None:
        output += [
            {
                "type": "function_call",
                "id": f"fc_{name}",
                "call_id": name,
                "name": "look",
                "arguments": arguments,
            }
            for name, arguments in CALLS
        ]
    else:
        part = {"type": "output_text", "text": text, "annotations": []}
        output.append(
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
        )
    message = {"message": {"output": output}}
    made = Response.model_validate(
        _response({}, {"created": 1, "model": "m", "choices": [message]}) | {"id": identity}
    )
    assert made.usage is not None
    made.usage.input_tokens = tokens
    return made


def anthropic_message(identity: str, text: str | None, tokens: int = 0) -> Any:
    types = pytest.importorskip("anthropic.types", reason="needs the package anthropic (extra test)")
    blocks: list[JSON] = [THOUGHT]
    if text is None:
        blocks += [
            {"type": "tool_use", "id": name, "name": "look", "input": json.loads(arguments)}
            for name, arguments in CALLS
        ]
    else:
        blocks.append({"type": "text", "text": text})
    third = tokens // 3
    usage = {
        "input_tokens": tokens - 2 * third,
        "cache_creation_input_tokens": third,
        "cache_read_input_tokens": third,
        "output_tokens": 1,
    }
    return types.Message.model_validate(
        {"id": identity, "type": "message", "role": "assistant", "model": "m", "content": blocks}
        | {"stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
    )


RESULTS: dict[str, Callable[[], list[Any]]] = {
    "openai": lambda: [{"role": "tool", "tool_call_id": name, "content": f"hub {name}"} for name, _ in CALLS],
    "responses": lambda: [
        {"type": "function_call_output", "call_id": name, "output": f"hub {name}"} for name, _ in CALLS
    ],
    "anthropic": lambda: [
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": name, "content": f"hub {name}"} for name, _ in CALLS
            ],
        }
    ],
}
MADE: dict[str, Callable[..., Any]] = {
    "openai": completion,
    "responses": response,
    "anthropic": anthropic_message,
}
VALID: dict[str, Callable[[Any], None]] = {
    "openai": validators.openai_chat,
    "responses": validators.openai_responses,
    "anthropic": validators.anthropic,
}


def sent(turn: Any, format: str) -> Any:
    return getattr(turn, {"openai": "messages", "responses": "responses_input"}.get(format, format))


@pytest.mark.parametrize("format", MADE)
def test_a_tool_loop_with_the_clients_own_objects(memory: pycontext.Database, dsn: str, format: str) -> None:
    made, results = MADE[format], RESULTS[format]()
    for attempt in range(2):  # the second one, of a process that knows nothing, stores nothing
        with pycontext.connect(dsn) as other:
            base = memory if attempt == 0 else other
            with base.turn("a", "Where?", message_id="u1", format=format, system_prompt="Be brief.") as turn:
                held = sent(turn, format)
                for reply in (made("one", None), results, made("two", "In hub c1.")):
                    turn.add(reply)
                    VALID[format](sent(turn, format))
                assert held is sent(turn, format)
                assert turn.is_answered
    rows = memory.thread("a")
    assert [row.role for row in rows] == ["user", "assistant", "tool", "tool", "assistant"]
    calls = [call["function"] for call in rows[1].tool_calls or ()]
    assert [json.loads(call["arguments"]) for call in calls] == [json.loads(text) for _, text in CALLS]
    assert [row.tool_call_id for row in rows[2:4]] == ["c1", "c2"]
    assert [row.content for row in rows[2:4]] == ["hub c1", "hub c2"]
    with memory.turn("a", "And now?", format="all") as turn:  # whichever provider is asked next
        for name, check in VALID.items():
            check(sent(turn, name))
            assert "In hub c1." in json.dumps(sent(turn, name))


def test_reasoning_stands_before_what_it_led_to(memory: pycontext.Database) -> None:
    with memory.turn("a", "Where?", format="responses") as turn:
        turn.add(response("one", None))
        turn.add(RESULTS["responses"]())
        kinds = [item.get("type") for item in turn.responses_input]
    assert kinds == ["message", "reasoning", *["function_call"] * 2, *["function_call_output"] * 2]
    with memory.turn("b", "Where?", format="anthropic") as turn:
        turn.add(anthropic_message("one", None))
        turn.add(RESULTS["anthropic"]())
        assert turn.anthropic["messages"][1]["content"][0] == THOUGHT


def test_a_reply_that_was_paused_goes_on_when_the_request_is_sent_again(memory: pycontext.Database) -> None:
    paused, answer = anthropic_message("one", "Looking."), anthropic_message("two", "In hub seven.")
    paused.stop_reason = "pause_turn"
    for reply in (paused, answer):  # each by a process that is gone then
        with memory.turn("a", "Where?", message_id="u1", format="anthropic") as turn:
            assert not turn.is_answered
            turn.add(reply)
    with memory.turn("a", "Where?", message_id="u1", format="anthropic") as turn:
        assert turn.is_answered
        assert turn.reply == "In hub seven."


def test_a_call_that_anthropics_code_made_says_so_where_the_code_is_told(memory: pycontext.Database) -> None:
    code = {
        "type": "server_tool_use",
        "id": "srvtoolu_1",
        "name": "code_execution",
        "input": {"code": "look()"},
    }
    caller = {"type": "code_execution_20250825", "tool_id": "srvtoolu_1"}
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}, "caller": caller}
    direct = {**use, "id": "c3", "caller": {"type": "direct"}}
    done = {"type": "code_execution_tool_result", "tool_use_id": "srvtoolu_1", "content": {"stdout": "7"}}

    def said(*blocks: JSON) -> JSON:
        return {"type": "message", "role": "assistant", "model": "m", "content": list(blocks)}

    def uses(turn: Any) -> list[JSON]:
        for name, check in VALID.items():
            check(sent(turn, name))
        blocks = [block for message in turn.anthropic["messages"] for block in message["content"]]
        return [block for block in blocks if block["type"] == "tool_use"]

    with memory.turn("a", "Where?", format="all") as turn:
        for number, reply in enumerate((said(code, use), said({**use, "id": "c2"}))):
            turn.add(reply)
            turn.add({"type": "tool_result", "tool_use_id": f"c{number + 1}", "content": "hub"})
            assert [block.get("caller") for block in uses(turn)] == [caller] * (number + 1)
        turn.add(said(done, direct))
        turn.add({"type": "tool_result", "tool_use_id": "c3", "content": "hub"})
        assert [block.get("caller") for block in uses(turn)] == [caller, caller, None]
    with memory.turn("b", "Where?", format="all") as turn:
        turn.add(said(use))
        assert "caller" not in json.dumps(uses(turn))


def test_the_old_form_of_a_call_is_kept_as_a_call(memory: pycontext.Database) -> None:
    call = {"name": "look", "arguments": '{"q":  1}'}
    for _ in range(2):
        reply = completion("one", "x").model_dump()
        reply["choices"][0]["message"] = {"role": "assistant", "content": None, "function_call": call}
        with memory.turn("a", "Where?", format="all") as turn:
            turn.add(ChatCompletion.model_validate(reply))
            turn.add({"role": "function", "name": "look", "content": "In hub seven."})
            for name, check in VALID.items():
                check(sent(turn, name))
            made, result = turn.messages[-2:]
            assert made["tool_calls"][0]["function"] == call
            assert result["tool_call_id"] == made["tool_calls"][0]["id"]
            assert result["content"] == "In hub seven."


def test_results_in_any_form_answer_calls_of_any_form(memory: pycontext.Database) -> None:
    for number, (format, form) in enumerate((f, g) for f in MADE for g in RESULTS):
        with memory.turn(f"c{number}", "Where?", format="all", compact="off") as turn:
            turn.add(MADE[format]("one", None))
            turn.add(RESULTS[form]())
            for name, check in VALID.items():
                check(sent(turn, name))
                assert "hub c2" in json.dumps(sent(turn, name))
    one = {"type": "tool_result", "tool_use_id": "c1", "is_error": True}
    with memory.turn("x", "Where?") as turn:
        turn.add(MADE["openai"]("one", None))
        said = [{"type": "text", "text": "and hurry"}]
        turn.add({"role": "user", "content": [one, {**one, "tool_use_id": "c2", "content": []}, *said]})
    rows = memory.thread("x")
    assert [row.role for row in rows] == ["user", "assistant", "tool", "tool", "user"]
    assert rows[2].metadata == {"is_error": True}
    assert rows[4].content == said


def test_what_was_spoken_is_what_the_reply_says(memory: pycontext.Database) -> None:
    audio = {"id": "audio_1", "data": "AAAA", "expires_at": 1, "transcript": "In hub seven."}
    reply = completion("one", None).model_dump()
    reply["choices"][0]["message"] = {"role": "assistant", "content": None, "audio": audio}
    with memory.turn("a", "Where?") as turn:
        turn.add(ChatCompletion.model_validate(reply))
        assert turn.reply == "In hub seven."


def test_two_equal_replies_are_told_apart_by_their_ids(memory: pycontext.Database) -> None:
    for number, made in enumerate(MADE.values()):
        for added in (("one",), ("one", "two")):
            with memory.turn(f"c{number}", "Where?", message_id="u1") as turn:
                for identity in added:
                    turn.add(made(identity, "On its way."))
        assert [row.role for row in memory.thread(f"c{number}")] == ["user", "assistant", "assistant"]


def test_what_a_reply_was_parsed_into_is_not_sent_back(memory: pycontext.Database) -> None:
    reply = completion("one", '{"hub": 7}').choices[0].message.model_dump()
    parsed = response("two", '{"hub": 7}').model_dump(exclude_none=True)
    parsed["output"][1]["content"][0]["parsed"] = {"hub": 7}
    with memory.turn("a", "Where?", format="all") as turn:
        turn.add(
            ChatCompletion.model_validate(
                {
                    **completion("one", "x").model_dump(),
                    "choices": [
                        {"index": 0, "finish_reason": "stop", "message": {**reply, "parsed": {"hub": 7}}}
                    ],
                }
            )
        )
        turn.add(parsed)
    assert "parsed" not in json.dumps([(row.content, row.metadata) for row in memory.thread("a")])


WRONG: list[Any] = [
    object(),
    None,
    7,
    dict,
    {"content": "no role"},
    {"type": "text", "text": "a lone block"},
    {"object": "response"},
    [completion("one", "fine"), object()],
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_message_is_named_and_nothing_is_stored(memory: pycontext.Database, wrong: Any) -> None:
    with memory.turn("a", "Where?") as turn:
        with pytest.raises(pycontext.UnknownMessageType) as error:
            turn.add(wrong)
        kind = type(wrong[1] if isinstance(wrong, list) else wrong).__name__
        assert f"can't be a {kind}" in str(error.value)
        assert "Anthropic" in (error.value.hint or "")
        with pytest.raises(pycontext.BadMessage, match="says nothing"):
            turn.add({"object": "response", "id": "r", "status": "failed", "output": []})
        with pytest.raises(pycontext.BadMessage, match="several choices"):
            turn.add({"id": "x", "choices": [{"message": {"role": "assistant", "content": "x"}}] * 2})
    assert len(memory.thread("a")) == 1


@pytest.mark.parametrize("format", MADE)
def test_a_replys_usage_teaches_the_scale_once(
    memory: pycontext.Database, db: Connection, format: str
) -> None:
    def learned() -> Any:
        return db.execute("select scales from pycontext.chat where chat_id = 'a'").fetchone()

    made = MADE[format]
    with memory.turn("a", "Where is it? " * 500, message_id="u1", format=format) as turn:
        turn.add(made("one", None, tokens=turn.window_tokens * 3 // 2))
        assert learned()[0]["m"] == pytest.approx(1.5, abs=0.01)
        turn.add(RESULTS[format]())
        turn.add(made("two", "there", tokens=turn.window_tokens * 5 // 4))
        down = learned()[0]["m"]
        assert 1.45 < down < 1.5
    with memory.turn("a", "Where is it? " * 500, message_id="u1", format=format) as turn:
        turn.add(made("two", "there", tokens=turn.window_tokens * 2))  # of a window before this one
    assert learned()[0]["m"] == down
    with memory.turn("b", "Where?", format=format) as turn:
        turn.add(made("one", "there", tokens=0))
        turn.add({"role": "assistant", "content": "x", "model": "m", "usage": {"prompt_tokens": "many"}})
    assert db.execute("select scales from pycontext.chat where chat_id = 'b'").fetchone() == ({},)


def test_the_real_client_in_a_loop_of_both_apis(memory: pycontext.Database) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    with LLMServer() as server:
        client = OpenAI(base_url=server.url, api_key="none", max_retries=0)
        server.script(
            lambda _: {"tool_calls": calls},
            lambda _: "In hub 7.",
            lambda _: {"tool_calls": calls},
            lambda _: "In hub 8.",
        )
        with memory.turn("a", "Where?") as turn:
            key = turn.prompt_cache_key
            turn.add(client.chat.completions.create(model="m", messages=turn.messages, prompt_cache_key=key))
            turn.add({"role": "tool", "tool_call_id": "c1", "content": "hub 7"})
            turn.add(client.chat.completions.create(model="m", messages=turn.messages, prompt_cache_key=key))
        with memory.turn("a", "And now?", format="responses") as turn:
            for _ in range(2):
                reply = client.responses.create(model="m", input=turn.responses_input, prompt_cache_key=key)
                turn.add(reply)
                if not reply.output_text:
                    turn.add({"type": "function_call_output", "call_id": "c1", "output": "hub 8"})
        assert {request["prompt_cache_key"] for request in server.requests} == {turn.prompt_cache_key}
    assert len(key) <= 64
    assert [row.role for row in memory.thread("a")] == ["user", "assistant", "tool", "assistant"] * 2


def test_what_was_not_asked_for_says_how_to_ask(memory: pycontext.Database) -> None:
    with memory.turn("a", "Where?", format="anthropic") as turn:
        assert set(turn.anthropic) == {"messages"}
        for name in ("messages", "responses_input"):
            with pytest.raises(RuntimeError, match="format="):
                getattr(turn, name)
    with pytest.raises(ValueError, match="openai, responses, anthropic or all"):
        memory.turn("a", "Where?", format="yaml")


def test_no_clients_library_is_imported() -> None:
    code = "import sys, pycontext, pycontext.replies; print({'openai', 'anthropic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
