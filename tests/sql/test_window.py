"""What people met in other systems, as small chats: calls and results, counts, roles, stable prefixes.

Each on a chat of our own and on one adopted through a source view.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import validators
from histories import (
    KINDS,
    PIXEL,
    Compact,
    Count,
    Drop,
    Machine,
    Move,
    Pin,
    Prompt,
    Prune,
    Reply,
    Result,
    Rewind,
    Say,
    StartOver,
    Unpin,
    Words,
    Work,
    prepare_adopted,
)
from psycopg.conninfo import make_conninfo

from pycontext.tokens import count

Connection = psycopg.Connection[Any]
Begin = Callable[..., Machine]
Message = dict[str, Any]


@pytest.fixture(scope="module")
def sessions(server18: Any, template18: Any) -> Iterator[tuple[Connection, Connection]]:
    """A database for this file, a session that writes and one that may not; each test has its own chats."""
    with psycopg.connect(server18.dsn(), autocommit=True) as admin:
        admin.execute(f"create database window_tests template {template18.template_dbname}")
        info = make_conninfo(server18.dsn("window_tests"), options="-c search_path=public,pycontext")
        only = make_conninfo(info, options="-c default_transaction_read_only=on -c search_path=pycontext")
        with (
            psycopg.connect(info, autocommit=True) as writer,
            psycopg.connect(only, autocommit=True) as reader,
        ):
            prepare_adopted(writer)
            yield writer, reader
        admin.execute("drop database window_tests with (force)")


_chats = itertools.count(1)


@pytest.fixture(params=KINDS)
def begin(request: pytest.FixtureRequest, sessions: tuple[Connection, Connection]) -> Begin:
    """Begins a chat of each kind with these messages."""
    writer, reader = sessions

    def create(*messages: Message, prompt: str | None = None, profile: str = "default") -> Machine:
        machine = Machine(writer, reader, str(next(_chats)), request.param, profile, prompt)
        machine.create()
        if messages:
            machine.append(*messages)
        return machine

    return create


def user(text: Any, **more: Any) -> Message:
    return {"role": "user", "content": text, **more}


def says(text: Any) -> Message:
    return {"role": "assistant", "content": text}


def calls(*ids: str, arguments: str = '{"q": 1}', name: str = "look", **more: Any) -> Message:
    made = [{"id": i, "type": "function", "function": {"name": name, "arguments": arguments}} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": made, **more}


def result(call: str, text: Any = "done", **more: Any) -> Message:
    return {"role": "tool", "tool_call_id": call, "content": text, **more}


def held(machine: Machine, budget: int = 100000) -> list[Message]:
    """The request, once every promise and every validator has been asked."""
    machine.refresh()
    window = machine.window(budget)
    machine.thread.check(window, budget)
    if machine.thread.must_be_full(budget):
        machine.thread.check_full(window)
    messages: list[Message] = machine.messages("openai_messages", budget)
    validators.openai_chat(messages)
    validators.anthropic(machine.messages("anthropic_messages", budget))
    validators.openai_responses(machine.messages("responses_input", budget))
    return messages


def shape(messages: list[Message]) -> list[tuple[Any, ...]]:
    return [
        (m["role"], m["tool_call_id"], m["content"]) if m["role"] == "tool" else (m["role"], m["content"])
        for m in messages
    ]


# --- tool-call structure ---


def test_a_call_whose_result_never_came_is_closed_and_the_true_result_takes_the_place(begin: Begin) -> None:
    chat = begin(user("u1"), calls("A", "B"), result("A", "a"), user("hello?"))
    messages = held(chat)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool", "user"]
    (stand_in,) = [m for m in messages if m.get("tool_call_id") == "B"]
    assert stand_in["content"] == "no result yet"
    before = chat.state()["act_no"] if chat.kind == "native" else None
    chat.append(result("B", "b at last"))
    messages = held(chat)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool", "user"]
    (late,) = [m for m in messages if m.get("tool_call_id") == "B"]
    assert late["content"] == "b at last"
    if before is not None:
        assert chat.state()["act_no"] > before, "earlier bytes changed: that is an act"


def test_stored_rows_are_not_touched_by_stand_ins(begin: Begin) -> None:
    chat = begin(user("u1"), calls("A"), user("hello?"))
    held(chat)
    assert [r["role"] for r in chat.rows("select role from pycontext.thread(%s)", chat.chat_id)] == [
        "user",
        "assistant",
        "user",
    ]


@pytest.mark.parametrize("order", ["AB", "BA"])
@pytest.mark.parametrize("budget", [300, 600, 1200, 2500, 10000])
def test_parallel_results_are_never_parted(begin: Begin, order: str, budget: int) -> None:
    texts = {"A": "long line of output " * 250, "B": "short " * 40}
    chat = begin(user("u1"), calls("A", "B"), *[result(i, texts[i]) for i in order], says("done"), user("u2"))
    messages = held(chat, budget)
    ids = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
    assert sorted(ids) in ([], ["A", "B"])


def test_ids_that_a_server_uses_again_are_matched_in_their_unit(begin: Begin) -> None:
    chat = begin(
        user("u1"), calls("call_0"), result("call_0", "first"),
        user("u2"), calls("call_0"), result("call_0", "second"),
        user("u3"), calls("call_0"), user("u4"),
    )  # fmt: skip
    results = [m["content"] for m in held(chat) if m["role"] == "tool"]
    assert results == ["first", "second", "no result yet"]


def test_an_id_used_again_while_its_first_call_still_waits(begin: Begin) -> None:
    chat = begin(
        user("u1"), calls("call_0"), user("u2"), calls("call_0"), result("call_0", "second"), user("u3")
    )
    assert [m["content"] for m in held(chat) if m["role"] == "tool"] == ["no result yet", "second"]


@pytest.mark.parametrize("where", ["first", "after the user", "after a closed unit", "twice"])
def test_a_result_without_its_call_is_a_note(begin: Begin, where: str) -> None:
    rows = {
        "first": [result("X", "stray"), user("u1")],
        "after the user": [user("u1"), result("X", "stray")],
        "after a closed unit": [
            user("u1"),
            calls("A"),
            result("A"),
            says("ok"),
            result("X", "stray"),
            user("u2"),
        ],
        "twice": [user("u1"), calls("A"), result("A", "once"), result("X", "stray"), user("u2")],
    }[where]
    messages = held(begin(*rows))
    (note,) = [m for m in messages if "stray" in str(m["content"])]
    assert note["role"] == "user"
    assert "tool_call_id" not in note


def test_a_user_message_while_calls_are_open_comes_after_their_results(begin: Begin) -> None:
    chat = begin(
        user("u1"), calls("A", "B"), result("A", "a"), user("are you there?"), result("B", "b"), says("yes")
    )
    assert shape(held(chat)) == [
        ("user", "u1"),
        ("assistant", None),
        ("tool", "A", "a"),
        ("tool", "B", "b"),
        ("user", "are you there?"),
        ("assistant", "yes"),
        ("user", "(continue)"),
    ]


def test_an_interim_result_gives_way_to_the_real_one(begin: Begin) -> None:
    waiting = {"pending": True}
    chat = begin(
        user("pay"), calls("P", metadata=waiting), result("P", "asked Ann", metadata=waiting), user("well?")
    )
    assert ("tool", "P", "asked Ann") in shape(held(chat))
    chat.append(result("P", "approved"))
    results = [m["content"] for m in held(chat) if m["role"] == "tool"]
    assert results == ["approved"]


def test_a_pending_call_is_not_summarized_away_and_is_answered_in_its_place(begin: Begin) -> None:
    waiting = {"pending": True}
    chat = begin(user("first"), says("hello " * 300), profile="small-8k")
    chat.append(
        user("pay"), calls("P", metadata=waiting), result("P", '{"status": "pending"}', metadata=waiting)
    )
    for number in range(10):
        chat.append(user(f"chat {number} " * 60), says(f"reply {number} " * 60))
    chat.play(Compact(3000))
    chat.append(result("P", "approved"))
    messages = held(chat)
    place = next(n for n, m in enumerate(messages) if m.get("tool_calls"))
    assert messages[place + 1] == {"role": "tool", "tool_call_id": "P", "content": "approved"}


@pytest.mark.parametrize("content", [None, "", " \n", [{"type": "text", "text": ""}], []])
@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
def test_no_empty_content_is_sent(begin: Begin, role: str, content: Any) -> None:
    row: Message = {"role": role, "content": content}
    if role == "tool":
        row["tool_call_id"] = "A"
    chat = begin(user("u1"), calls("A"), row, user("u2"))
    assert "(empty)" in [m["content"] for m in held(chat)]


def test_a_name_that_is_empty_is_not_sent(begin: Begin) -> None:
    chat = begin(user("hello", name=""), user("hello", name="Anna K."))
    assert [m.get("name") for m in held(chat)] == [None, "Anna_K."]


def test_a_call_without_words_keeps_null(begin: Begin) -> None:
    assert ("assistant", None) in shape(held(begin(user("u1"), calls("A"), result("A"))))


# --- token counting ---


def test_arguments_of_calls_are_counted(begin: Begin) -> None:
    arguments = json.dumps({"path": "a.py", "content": "value = compute(17)\n" * 2000})
    chat = begin(user("write it"), calls("A", arguments=arguments), result("A"))
    chat.play(Count(1000))
    window = {w["seq"]: w["tokens"] for w in chat.window(200000)}
    (tokens,) = [window[r.seq] for r in chat.thread.rows if r.tool_calls]
    assert tokens == 4 + 12 + count("look") + count(arguments)
    assert tokens > 8000


def test_system_prompt_and_tools_take_their_share(begin: Begin) -> None:
    chat = begin(prompt="Rules of the shop apply. " * 500, profile="small-8k")
    chat.append(*[m for n in range(20) for m in (user(f"question {n} " * 40), says(f"answer {n} " * 40))])
    budget = chat.rows("select token_budget from pycontext.window_status(%s)", chat.chat_id)[0][
        "token_budget"
    ]
    chat.refresh()
    assert 3 + sum(w["tokens"] for w in chat.window(None)) <= budget
    turn = chat.conn.execute(
        "select token_budget, window_tokens from pycontext.start_turn(%s, tool_tokens => 1500)",
        (chat.chat_id,),
    ).fetchone()
    assert turn is not None
    assert turn[0] == budget - 1500
    assert turn[1] <= turn[0]


def test_a_scale_divides_the_budget_and_no_count(begin: Begin) -> None:
    rows = [m for n in range(60) for m in (user(f"question {n} " * 20), says(f"answer {n} " * 20))]
    plain, scaled = begin(*rows), begin(*rows, profile="claude-200k")
    for budget in (500, 1200, 2400, 200000):
        held(scaled, budget)
        tokens = [sum(w["tokens"] for w in chat.window(budget)) for chat in (plain, scaled)]
        assert 3 + tokens[1] <= budget / 1.35
        assert tokens[0] == tokens[1] if budget == 200000 else tokens[0] > tokens[1]


BYTES = "QUJD" * 250000
DATA = f"data:image/png;base64,{BYTES}"
IMAGES = [
    {"type": "image_url", "image_url": {"url": DATA}},
    {"type": "input_image", "image_url": DATA},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BYTES}},
]
ATTACHED = [
    {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{BYTES}"}},
    {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{BYTES}"},
    {"type": "input_audio", "input_audio": {"format": "wav", "data": BYTES}},
    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": BYTES}},
]


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("part", [*IMAGES, *ATTACHED], ids=lambda part: part["type"])
def test_an_image_or_a_file_costs_a_flat_rate_whatever_its_bytes(begin: Begin, role: str, part: Any) -> None:
    parts = [{"type": "text", "text": "what is this?"}, part]
    first = [user(parts)] if role == "user" else [user("look"), calls("A"), result("A", parts)]
    chat = begin(*first)
    assert 1000 < sum(w["tokens"] for w in chat.window(100000)) < 1100
    chat.play(Count(10))
    window = chat.window(100000)
    assert 1000 < sum(w["tokens"] for w in window) < 1100
    if role == "user":
        assert window[0]["content"] == parts
    plan = chat.rows("select decision from pycontext.compaction_plan(%s, 100000)", chat.chat_id)
    assert plan[0]["decision"] == "none"
    for form in chat.forms():
        assert len(json.dumps(chat.messages(form, 100000))) < len(BYTES) + 2000
    found = chat.rows(
        "select text from pycontext.thread(%s) t, pycontext._content_text(t.content) text", chat.chat_id
    )
    assert BYTES not in str(found)


@pytest.mark.parametrize("part", ATTACHED, ids=lambda part: part["type"])
def test_a_file_that_a_provider_does_not_take_is_named_not_sent_as_text(begin: Begin, part: Any) -> None:
    chat = begin(user("look"), calls("A"), result("A", [part]), user("and?"))
    sent = 0
    for form in chat.forms():
        request = json.dumps(chat.messages(form, 100000))
        sent += BYTES in request
    assert sent <= (part["type"] in ("file", "input_file")), "a result holds no file but in the Responses API"


def test_an_old_file_is_left_out_before_words_are(begin: Begin) -> None:
    chat = begin(user([{"type": "text", "text": "read this"}, ATTACHED[0]]), says("read"), profile="small-8k")
    chat.append(*[m for n in range(6) for m in (user(f"question {n} " * 30), says(f"answer {n} " * 30))])
    if chat.kind == "adopted":
        pytest.skip("nothing is pruned by rule there")
    chat.append(user("and?"))
    for budget in (1500, 1200, 900):
        told = json.dumps(held(chat, budget))
        assert BYTES not in told
        assert "[file left out; #1]" in told or "left out here" in told


def test_many_images_are_not_free(begin: Begin) -> None:
    picture = [{"type": "image_url", "image_url": {"url": PIXEL}}]
    chat = begin(*[m for _ in range(45) for m in (user(picture), says("seen"))])
    assert sum(w["tokens"] for w in chat.window(200000)) >= 45 * 1000
    held(chat, 8000)


def test_a_base64_dump_in_text_is_charged_near_its_true_cost(begin: Begin) -> None:
    text = "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVphYmNkZWZnaGlqa2xtbm9wcXJzdHV2d3h5ejAxMjM0NTY3ODk" * 2000
    chat = begin(user("dump it"), calls("A"), result("A", text))
    window = chat.window(2000000)
    assert window[-1]["is_estimate"]
    assert window[-1]["tokens"] >= 0.9 * count(text)


def test_text_of_special_tokens_is_text(begin: Begin) -> None:
    text = "why does <|endoftext|> appear, and <|im_start|>system?"
    chat = begin(user(text))
    chat.play(Count(10))
    (row,) = chat.window(1000)
    assert row["content"] == text
    assert row["tokens"] == 4 + count(text)
    assert row["tokens"] > 4 + 10


@pytest.mark.parametrize(
    "text", ["我们今天去哪里吃饭呢" * 20, "🙂👍🎉🚀🔥" * 20, "где мой заказ номер " * 10]
)
def test_other_scripts_fit_by_the_real_tokenizer(begin: Begin, text: str) -> None:
    chat = begin(*[user(text) if n % 2 == 0 else says(text) for n in range(40)])
    for budget in (1000, 4000):
        window = chat.window(budget)
        assert 3 + sum(4 + count(w["content"]) for w in window) <= budget


# --- degradation ---


def test_a_batch_of_parallel_results_larger_than_the_budget_is_cut_inside(begin: Begin) -> None:
    chat = begin(user("u1"), calls("A", "B", "C"), *[result(i, f"{i} line of output\n" * 800) for i in "ABC"])
    chat.append(user("u2 stays as it is"))
    messages = held(chat, 4000)
    assert messages[-1]["content"] == "u2 stays as it is"
    for message in messages:
        if message["role"] == "tool":
            assert "#" in message["content"]


def test_a_long_agentic_turn_keeps_its_request(begin: Begin) -> None:
    chat = begin(user("hello"), says("hi"), user("the task: fix the parser"))
    for step in range(60):
        chat.append(calls(f"s{step}"), result(f"s{step}", f"output of step {step}\n" * 30))
    for budget in (500, 2000, 8000):
        assert ("user", "the task: fix the parser") in shape(held(chat, budget))


def test_broken_arguments_are_shortened_to_json(begin: Begin) -> None:
    chat = begin(user("u1"), calls("A", arguments='{"content": "' + "word " * 5000), result("A"), user("u2"))
    for message in held(chat, 800):
        for call in message.get("tool_calls") or []:
            assert validators.is_json(call["function"]["arguments"])


def test_a_cut_that_comes_out_larger_than_asked_is_made_room_for(begin: Begin) -> None:
    name = "Zq7_xK9-vB3_mW1-pL5_tR8-yH2_nC6-dF4_gJ0-sQ7_aX9-eV3_uM1-iP5_oT8k"
    arguments = json.dumps({"text": "the parcel left the hub and came back again " * 40})
    chat = begin(user("go"))
    for n in range(8):
        chat.append(calls(f"c{n}", name=name, arguments=arguments), result(f"c{n}"))
    for budget in range(600, 2000, 50):
        held(chat, budget)


def test_what_stands_before_the_first_request_is_marked(begin: Begin) -> None:
    chat = begin(
        user("注文はどこですか。" * 400, metadata={"injected": True}), user("go"), profile="small-8k"
    )
    chat.append(result("X", "line of output\n" * 300))
    window = chat.window(3000)
    first = chat.thread.rows[0].seq
    marked = [w for w in window if w["section"] == "omitted" and f"#{first} " in w["content"]]
    assert marked or first in {w["seq"] for w in window}


def test_no_plan_cuts_between_a_call_and_its_late_result(begin: Begin) -> None:
    chat = begin(user("begin"), *[says(f"early {n} " * 40) for n in range(30)], user("look"), calls("A"))
    chat.append(*[says(f"meanwhile {n} " * 40) for n in range(20)], result("A", "at last"))
    chat.append(*[says(f"later {n} " * 40) for n in range(10)], user("and?"))
    call = next(r.seq for r in chat.thread.rows if r.tool_calls)
    late = next(r.seq for r in chat.thread.rows if r.role == "tool")
    cuts = []
    for budget in range(1200, 12000, 300):
        plan = chat.rows("select to_seq from pycontext.compaction_plan(%s, %s)", chat.chat_id, budget)[0]
        cuts.append(plan["to_seq"])
    assert any(to is not None and to < call for to in cuts)
    assert any(to is not None and to >= late for to in cuts)
    assert not [to for to in cuts if to is not None and call <= to < late]


def test_cuts_of_tabs_a_few_messages_apart_are_at_one_place(begin: Begin) -> None:
    chat = begin(user("begin"), *[says(f"answer {n} " * 40) for n in range(60)], profile="small-8k")
    if chat.kind == "adopted":
        pytest.skip("a foreign row has no running total for a grid to stand on")
    cuts = set()
    for n in range(40):
        chat.append(says(f"more {n} " * 40))
        plan = chat.rows("select to_seq from pycontext.compaction_plan(%s)", chat.chat_id)[0]
        cuts.add(plan["to_seq"])
    assert len(cuts) <= 10, cuts


@pytest.mark.parametrize("size", [1, 400])
@pytest.mark.parametrize("budget", [700, 1200, 2400])
def test_a_late_answer_to_a_call_that_is_left_out_is_read(begin: Begin, budget: int, size: int) -> None:
    waiting = {"pending": True}
    chat = begin(user("pay"), calls("P", "Q"), result("Q", "900"), result("P", "asked Ann", metadata=waiting))
    for n in range(12):
        chat.append(user(f"chat {n} " * 60), says(f"reply {n} " * 60))
    chat.append(result("P", "approved by Ann. " + "Her reasons. " * size))
    told = held(chat, budget)[-1]
    assert told["role"] == "user"
    assert "approved by Ann" in told["content"]
    chat.append(calls("R"), result("R", "paid"), says("It is paid."))
    assert [m["role"] for m in held(chat, budget)[-5:]] == ["user", "assistant", "tool", "assistant", "user"]
    chat.append(user("thanks"), says("You are welcome. " * 1500), user("bye"))
    assert "approved by Ann" not in json.dumps(held(chat, budget))


def test_a_turn_goes_on_from_an_approval_that_came_after_its_reply(begin: Begin) -> None:
    chat = begin(user("pay"), calls("P"), result("P", "asked Ann", metadata={"pending": True}))
    chat.append(says("I wait for approval."))
    query = "select is_answered, reply from pycontext.start_turn(%s, request_id => %s)"
    request = chat.thread.rows[0].message_id
    for given in (None, request):
        assert chat.conn.execute(query, (chat.chat_id, given)).fetchone() == (True, "I wait for approval.")
    chat.append(result("P", "approved"))
    for given in (None, request):
        assert chat.conn.execute(query, (chat.chat_id, given)).fetchone() == (False, None)
    chat.append(says("It is paid."))
    for given in (None, request):
        assert chat.conn.execute(query, (chat.chat_id, given)).fetchone() == (True, "It is paid.")


def test_a_late_result_of_a_unit_that_is_left_out_is_marked(begin: Begin) -> None:
    chat = begin(user("begin"), says("begun"), user("look"), calls("A"))
    for n in range(30):
        chat.append(user(f"question {n} " * 12), says(f"answer {n} " * 12))
        if n == 26:
            chat.append(result("A", "it came late " * 10))
    for budget in range(500, 2000, 60):
        held(chat, budget)


# --- roles, system prompt, active task ---


def test_a_late_result_in_a_head_behind_what_is_left_out_is_marked(begin: Begin) -> None:
    chat = begin(says("before it all " * 900), calls("A"), user("begin"), result("A", "it came late " * 10))
    for n in range(12):
        chat.append(says(f"answer {n} " * 12), user(f"question {n} " * 12))
    for budget in range(500, 3000, 100):
        held(chat, budget)


def test_the_newest_request_is_never_joined_with_the_summary(begin: Begin) -> None:
    chat = begin(user("first"), profile="small-8k")
    chat.append(*[m for n in range(12) for m in (says(f"answer {n} " * 80), user(f"question {n} " * 80))])
    chat.append(says("fine"), user("now translate this"))
    chat.play(Compact(3000))
    assert chat.thread.lines
    messages = held(chat, 3000)
    assert messages[-1] == {"role": "user", "content": "now translate this"}
    assert sum("<chat-summary>" in str(m["content"]) for m in messages) == 1
    told = next(m for m in messages if "<chat-summary>" in str(m["content"]))
    assert told["role"] == "user"
    assert "ask for nothing" in told["content"]


def test_a_window_ends_on_the_users_side(begin: Begin) -> None:
    assert shape(held(begin(user("u1"), says("a1"))))[-1] == ("user", "(continue)")
    assert shape(held(begin(says("I begin"))))[-1] == ("user", "(continue)")


def test_a_chat_of_system_rows_alone_is_a_request(begin: Begin) -> None:
    chat = begin({"role": "system", "content": "note"}, prompt="Be brief.")
    assert [m["role"] for m in held(chat)] == ["system", "system", "user"]


@pytest.mark.parametrize("last", ["system", "assistant"])
def test_a_chat_that_is_a_line_and_nothing_else_is_a_request(begin: Begin, last: str) -> None:
    chat = begin(prompt="Be brief.")
    chat.append(*[{"role": "system", "content": f"note {n} " * 80} for n in range(4)])
    chat.append({"role": last, "content": "the last row " * 80})
    chat.conn.execute(
        "select pycontext.put_summary(%s, %s, %s)",
        (chat.chat_id, chat.thread.rows[-1].message_id, json.dumps({"facts": ["four notes"]})),
    )
    for form in chat.forms():
        request = chat.messages(form, 1000)
        {
            "openai_messages": validators.openai_chat,
            "anthropic_messages": validators.anthropic,
            "responses_input": validators.openai_responses,
        }[form](request)
    messages = chat.messages("openai_messages", 1000)
    assert [m["role"] for m in messages] == ["system", "user"]
    assert "four notes" in messages[1]["content"]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_only_the_snapshot_is_the_system_prompt(begin: Begin, role: str) -> None:
    chat = begin(user("first"), prompt="The one system prompt.", profile="small-8k")
    chat.append(*[m for n in range(10) for m in (says(f"a{n} " * 90), user(f"u{n} " * 90))])
    chat.append({"role": role, "content": "a note inside"}, says("ok"), user("last"))
    for budget in (500, 2500, 50000):
        messages = held(chat, budget)
        assert messages[0] == {"role": "system", "content": "The one system prompt."}
        assert sum(m["content"] == "The one system prompt." for m in messages) == 1
    place = [m["content"] for m in held(chat, 50000)].index("a note inside")
    assert held(chat, 50000)[place]["role"] == role
    anthropic = chat.messages("anthropic_messages", 50000)
    assert anthropic["system"] == "The one system prompt."
    assert "<system-note>" in json.dumps(anthropic["messages"])


@pytest.mark.parametrize("role", ["system", "developer"])
def test_under_strict_roles_no_row_but_the_prompt_is_the_systems(begin: Begin, role: str) -> None:
    chat = begin(prompt="The one system prompt.")
    chat.conn.execute("select pycontext.set_profile('strict', strict_roles => true)")
    chat.conn.execute("select pycontext.set_chat_profile(%s, 'strict')", (chat.chat_id,))
    chat.append(user("first"), says("ok"), {"role": role, "content": "a note inside"}, user("last"))
    messages = held(chat)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "user"]
    assert "<system-note>" in messages[3]["content"]
    items = chat.messages("responses_input", 100000)
    assert [i["role"] for i in items] == [m["role"] for m in messages]


def test_the_prompt_is_no_part_of_what_is_summarized(begin: Begin) -> None:
    chat = begin(user("first"), prompt="The one system prompt.", profile="small-8k")
    chat.append(*[m for n in range(12) for m in (says(f"a{n} " * 90), user(f"u{n} " * 90))])
    plan = chat.rows("select after_message_id from pycontext.compaction_plan(%s, 3000)", chat.chat_id)[0]
    rows = chat.rows(
        "select text from pycontext.compaction_source(%s, %s)", chat.chat_id, plan["after_message_id"]
    )
    assert rows
    assert not [r for r in rows if "one system prompt" in (r["text"] or "")]


def test_an_injected_block_is_neither_head_nor_request(begin: Begin) -> None:
    injected = {"metadata": {"injected": True}}
    chat = begin(
        user("files: a.py", **injected),
        user("the genuine first message"),
        says("ok " * 200),
        profile="small-8k",
    )
    chat.append(*[m for n in range(12) for m in (user(f"u{n} " * 90), says(f"a{n} " * 90))])
    chat.append(user("the newest request"), user("files: b.py " * 400, **injected))
    chat.play(Compact(3000))
    contents = [m["content"] for m in held(chat, 2500)]
    assert "the genuine first message" in contents
    assert "the newest request" in contents


def test_what_stood_before_a_reset_never_comes_back(begin: Begin) -> None:
    chat = begin(user("the secret plan"), says("noted"))
    chat.conn.execute("select pycontext.start_over(%s, 'a new subject')", (chat.chat_id,))
    chat.append(user("what did I say?"))
    for budget in (200, 1000, 100000):
        messages = chat.messages("openai_messages", budget)
        validators.openai_chat(messages)
        assert "secret" not in json.dumps(messages)
        assert messages[-1]["content"] == "what did I say?"


# --- cache stability, reasoning ---


def agent_turn(number: int) -> list[Message]:
    return [
        user(f"please do step {number}"),
        calls(f"c{number}", arguments=json.dumps({"path": f"src/{number}.py"})),
        result(f"c{number}", f"line of output {number}\n" * 40),
        says(f"step {number} is done"),
    ]


def test_thirty_turns_within_the_budget_keep_every_byte(begin: Begin) -> None:
    chat = begin(prompt="Be brief.")
    before: list[Message] = []
    for number in range(30):
        chat.append(*agent_turn(number)[:1])
        messages = chat.messages("openai_messages", 50000)
        assert messages[: len(before)] == before
        before = messages
        chat.append(*agent_turn(number)[1:])


def test_over_the_budget_the_prefix_moves_in_steps(begin: Begin) -> None:
    chat = begin(prompt="Be brief.", profile="small-8k")
    if chat.kind == "adopted":
        pytest.skip("a foreign row has no running total to stand on: only what fits whole is stable there")
    before: list[Message] = []
    kept = 0
    for number in range(60):
        chat.append(*agent_turn(number)[:1])
        messages = chat.messages("openai_messages", 4000)
        kept += messages[: len(before)] == before
        before = messages
        chat.append(*agent_turn(number)[1:])
    assert kept >= 36, f"{kept} of 60 requests began like the one before"


THINKING = {"type": "thinking", "thinking": "let me see " * 20, "signature": "c2lnbmF0dXJl"}


def test_reasoning_is_whole_in_the_unfinished_turn_and_gone_in_older_ones(begin: Begin) -> None:
    call = calls("A")
    call["content"] = [THINKING, {"type": "text", "text": "looking"}]
    chat = begin(user("u1"), call, result("A"))
    request = chat.messages("anthropic_messages", 50000)
    validators.anthropic(request)
    assert request["messages"][1]["content"][0] == THINKING
    chat.append(says("found"), user("u2"))
    request = chat.messages("anthropic_messages", 50000)
    validators.anthropic(request)
    assert "thinking" not in json.dumps(request)
    assert request["messages"][1]["content"][0] == {"type": "text", "text": "looking"}
    held(chat)


def test_a_summary_is_made_without_reasoning(begin: Begin) -> None:
    chat = begin(user("u1"), profile="small-8k")
    for number in range(12):
        call = calls(f"r{number}")
        call["content"] = [
            {**THINKING, "thinking": "hidden thoughts"},
            {"type": "text", "text": "looking " * 60},
        ]
        chat.append(call, result(f"r{number}", "output " * 60), user(f"go on {number}"))
    plan = chat.rows("select after_message_id from pycontext.compaction_plan(%s, 3000)", chat.chat_id)[0]
    rows = chat.rows(
        "select text, tool_calls from pycontext.compaction_source(%s, %s)",
        chat.chat_id,
        plan["after_message_id"],
    )
    assert "looking" in str(rows)
    assert "hidden thoughts" not in str(rows)


@pytest.mark.parametrize("budget", [300, 600, 1500])
def test_reasoning_is_never_sent_in_part(begin: Begin, budget: int) -> None:
    chat = begin(user("u1"))
    for number in range(6):
        call = calls(f"r{number}")
        call["content"] = [THINKING, {"type": "text", "text": "looking " * 30}]
        chat.append(call, result(f"r{number}", "output " * 200))
    request = chat.messages("anthropic_messages", budget)
    validators.anthropic(request)
    sent = [b for m in request["messages"] for b in m["content"] if b["type"] == "thinking"]
    assert all(block == THINKING for block in sent)


def test_a_better_count_moves_no_border(begin: Begin) -> None:
    chat = begin(*[m for n in range(40) for m in agent_turn(n)], user("and?"), profile="small-8k")
    if chat.kind == "adopted":
        pytest.skip("a foreign row has no running total to stand on")
    budgets = range(1000, 6000, 500)
    before = {budget: [w["seq"] for w in chat.window(budget)] for budget in budgets}
    chat.play(Count(1000))
    assert {budget: [w["seq"] for w in chat.window(budget)] for budget in budgets} == before
    for budget in budgets:
        held(chat, budget)


def test_a_window_read_twice_is_the_same(begin: Begin) -> None:
    chat = begin(*agent_turn(1), *agent_turn(2), user("and?"))
    chat.conn.execute(
        "update pycontext.message set created_at = created_at where chat_id = %s", (chat.chat_id,)
    )
    first = chat.window(700)
    assert all(chat.window(700) == first for _ in range(20))


# --- acts ---


def test_pins_in_the_tail_and_the_head_stay_whole_while_others_are_cut(begin: Begin) -> None:
    chat = begin(user("first " * 60), says("green " * 250), profile="small-8k")
    chat.append(user("u2"), says("blue " * 250), *[says(f"long {n} " * 300) for n in range(4)], user("go"))
    for row in (chat.thread.rows[1], chat.thread.rows[3]):
        chat.conn.execute("select pycontext.pin_message(%s, %s)", (chat.chat_id, row.message_id))
        chat.thread.pins.append(row.seq)
    for budget in (800, 900, 1300, 2000):
        contents = [m["content"] for m in held(chat, budget)]
        assert "green " * 250 in contents
        assert "blue " * 250 in contents


def test_a_pin_in_a_tail_that_is_cut_stays_whole(begin: Begin) -> None:
    chat = begin(user("first " * 200), prompt="Be brief. " * 200)
    chat.append(*[says(f"long {n} " * 100) for n in range(9)])
    chat.append(says("blue " * 80), says("green " * 80), user("go"))
    pinned = chat.thread.rows[-3]
    chat.conn.execute("select pycontext.pin_message(%s, %s)", (chat.chat_id, pinned.message_id))
    chat.thread.pins.append(pinned.seq)
    cut = 0
    for budget in range(720, 1300, 20):
        held(chat, budget)
        rows = {w["seq"]: w["is_shortened"] for w in chat.window(budget)}
        assert rows[pinned.seq] is False
        cut += rows.get(pinned.seq + 1) is True
    assert cut, "the row beside it is cut"


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_pinned_request_stays_where_the_tail_is_cut(begin: Begin, is_compacted: bool) -> None:
    chat = begin(user("first " * 60), says("begun"), user("blue " * 80), prompt="Be brief. " * 40)
    pinned = chat.thread.rows[-1]
    chat.conn.execute("select pycontext.pin_message(%s, %s)", (chat.chat_id, pinned.message_id))
    chat.thread.pins.append(pinned.seq)
    chat.append(*[says(f"long {n} " * 100) for n in range(9)])
    if is_compacted:
        chat.play(Compact(800))
        assert chat.thread.newest_line() is not None
    chat.append(says("green " * 60), user("go"))
    cut = 0
    for budget in range(300, 600, 10):
        held(chat, budget)
        rows = {w["seq"]: w["is_shortened"] for w in chat.window(budget) if w["section"] != "omitted"}
        assert rows[pinned.seq] is False
        cut += rows.get(chat.thread.rows[-2].seq) is True
    assert cut, "the row beside it is cut"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_pinned_unit_takes_the_results_that_come_late_and_no_other_unit(
    begin: Begin, is_late: bool
) -> None:
    chat = begin(user("begin " * 20), says("begun"), user("look"), calls("A", "B"), says("meanwhile"))
    if is_late:
        chat.append(result("A", "found a"), calls("C"), result("C"), result("B", "found b"))
    chat.play(Pin(len(chat.thread.rows) - 4))
    if not is_late:
        chat.append(result("A", "found a"), calls("C"), result("C"), result("B", "found b"))
    chat.append(*[says(f"long {n} " * 100) for n in range(9)], user("go"))
    for is_counted in (False, True):
        for budget in (400, 600, 1000):
            messages = held(chat, budget)
            assert [m["content"] for m in messages if m["role"] == "tool"] == ["found a", "found b"]
        if not is_counted:
            chat.play(Count())


def test_the_head_ends_before_a_call_that_waits(begin: Begin) -> None:
    """What it holds is whole: a result that comes later changes nothing at the front of every request."""
    chat = begin(
        user("u1"), says("let me see"), calls("A", "B"), result("A"), says("it takes a while"), user("u2")
    )
    chat.append(*[says(f"long {n} " * 100) for n in range(12)], user("u3"))
    held(chat, 800)
    sections = {w["seq"]: w["section"] for w in chat.window(800)}
    first = [r.seq for r in chat.thread.rows]
    assert [s for s in first if sections.get(s) == "head"] == first[:2]
    chat.play(Compact(2000))
    assert chat.thread.newest_line() is not None
    for text in ("b at last", "and again"):
        assert [w["seq"] for w in chat.window(8000) if w["section"] == "head"] == first[:2]
        before = held(chat, 8000)
        chat.append(result("B", text))
        assert held(chat, 8000)[: len(before)] == before


@pytest.mark.parametrize("width", [1, 3])
def test_a_long_first_turn_is_read_whole(begin: Begin, width: int) -> None:
    """The first rows of a product's table, and the newest, are read apart: inside an exchange, too."""
    chat = begin(user("u1"))
    for n in range(60 // width):
        names = [f"c{n}_{i}" for i in range(width)]
        chat.append(calls(*names), *[result(i, f"{i} " * 10) for i in names])
        if n == 30 // width:
            chat.append(user("u2"))
    for budget in range(1000, 3000, 250):
        held(chat, budget)


def test_a_marker_does_not_count_the_pins_among_what_it_marks(begin: Begin) -> None:
    chat = begin(user("u1"), user("u2"), says("left out " * 40), says("pinned " * 200))
    chat.play(Pin(0))
    chat.append(says("left out " * 40), says("pinned " * 200))
    chat.play(Pin(0))
    chat.append(user("u3"), *[says(f"long {n} " * 200) for n in range(4)])
    sizes = []
    for budget in range(1000, 2200, 150):
        held(chat, budget)
        window = chat.window(budget)
        shown = {w["seq"] for w in window if w["section"] != "omitted"}
        for w in window:
            if w["section"] == "omitted":
                low, high, size = chat.thread._marker(w)
                rows = [r.frozen for r in chat.thread.rows if low <= r.seq <= high and r.seq not in shown]
                # of a product's table it is told as far as it was read
                assert (0 if chat.kind == "adopted" else sum(rows) - 20) <= size <= sum(rows) + 20
                sizes.append(size)
    assert sizes


def test_a_late_result_between_the_rows_read_first_and_last_is_there_once(begin: Begin) -> None:
    for opening in ([], [user("u1")]):
        chat = begin(*opening, calls("A", "B"), says("meanwhile " * 60), result("A", "late " * 60))
        chat.play(Pin(0))
        chat.append(says("well " * 400))
        for budget in range(400, 1000, 50):
            held(chat, budget)


def test_an_id_called_again_after_the_first_turn_brings_nothing_along(begin: Begin) -> None:
    """The first rows are read apart, with the results of their calls, and not what lies before the tail."""
    chat = begin(user("u1"), calls("A"), user("u2"), says("pinned " * 20))
    chat.play(Pin(0))
    chat.append(says("between"), calls("A", "B"), result("A"), result("B"))
    chat.append(*[says(f"long {n} " * 60) for n in range(40)], user("go"))
    for budget in range(500, 3000, 250):
        held(chat, budget)
        assert any("pinned" in str(w["content"]) for w in chat.window(budget))


def test_a_late_result_of_what_stands_before_the_first_turn(begin: Begin) -> None:
    injected = {"metadata": {"injected": True}}
    for text in ("late", "late " * 600):
        chat = begin(user("context " * 500, **injected), calls("A", "B"), result("B", "b " * 60), user("go"))
        chat.append(result("A", text))
        for budget in (120, 300, 500, 900, 1500):
            held(chat, budget)


def test_a_late_and_large_result_of_what_stands_before_the_first_turn_does_not_come_with_it(
    begin: Begin,
) -> None:
    chat = begin(calls("A"), user("u " * 400), result("A", "out " * 4000))
    chat.append(*[m for n in range(3) for m in (calls(f"B{n}"), result(f"B{n}"))])
    held(chat, 3000)


def test_no_marker_stands_for_a_pinned_unit(begin: Begin) -> None:
    chat = begin(user("u1 " * 20))
    chat.play(Work(4, Words(17, 3)))
    chat.play(Work(2, Words(4, 50), 3))
    chat.append(user("more " * 170, metadata={"injected": True}))
    chat.play(Prune(3000))
    chat.play(Pin(8))
    for budget in range(2700, 3400, 100):
        held(chat, budget)


def test_where_pins_do_not_fit_the_oldest_pin_gives_way_first(begin: Begin) -> None:
    chat = begin(user("begin"), *[says(f"note {n} " * 40) for n in range(3)], user("go"))
    older, newer = chat.thread.rows[3], chat.thread.rows[1]  # by when they are pinned, not where they stand
    for row in (older, newer):
        chat.conn.execute("select pycontext.pin_message(%s, %s)", (chat.chat_id, row.message_id))
        chat.thread.pins.append(row.seq)
    seen = set()
    for budget in range(60, 500, 20):
        held(chat, budget)
        shown = {w["seq"] for w in chat.window(budget) if w["section"] != "omitted" and not w["is_shortened"]}
        seen.add((older.seq in shown, newer.seq in shown))
    assert seen == {(False, False), (False, True), (True, True)}


def test_a_marker_counts_nothing_twice(begin: Begin) -> None:
    """A pinned first turn that gives way at last: it was in the head, then apart, then behind the marker."""
    chat = begin(user("a long first message " * 150))
    chat.conn.execute("select pycontext.pin_message(%s, %s)", (chat.chat_id, chat.thread.rows[0].message_id))
    chat.thread.pins.append(chat.thread.rows[0].seq)
    chat.append(says("ok " * 40), user("go on"), says("ok " * 40), user("and now?"))
    for budget in (120, 200, 300, 450):
        held(chat, budget)


def test_a_compaction_after_a_reset_brings_no_request_back_from_before_it(begin: Begin) -> None:
    chat = begin(user("the secret plan " * 20), says("noted"))
    chat.conn.execute("select pycontext.start_over(%s)", (chat.chat_id,))
    chat.append(*[says(f"thinking aloud {n} " * 80) for n in range(12)])
    plan = chat.rows("select after_message_id from pycontext.compaction_plan(%s, 2000)", chat.chat_id)[0]
    summary = json.dumps({"resolved": ["thought aloud"]})
    chat.conn.execute(
        "select pycontext.put_summary(%s, %s, %s)", (chat.chat_id, plan["after_message_id"], summary)
    )
    for budget in (100, 200, 400, 1500, 20000):
        assert "secret" not in json.dumps(chat.messages("openai_messages", budget))


def test_a_pinned_unit_is_replayed_whole(begin: Begin) -> None:
    chat = begin(user("u1"), says("a1"), user("look"), calls("A"), result("A", "found it"), says("there"))
    chat.conn.execute("select pycontext.pin_message(%s, %s)", (chat.chat_id, chat.thread.rows[3].message_id))
    chat.append(
        *[m for n in range(8) for m in (user(f"u{n} " * 200), says(f"a{n} " * 200))], user("and now?")
    )
    name = chat.thread.rows[-1].message_id
    before = chat.messages("openai_messages", 2000)
    assert ("tool", "A", "found it") in shape(before)
    chat.append(says("well " * 50))
    assert chat.messages("openai_messages", 2000, name) == before


def test_a_replay_reads_the_line_that_was_dropped_since(begin: Begin) -> None:
    chat = begin(user("first"), *[says(f"answer {n} " * 80) for n in range(12)], user("and?"))
    chat.play(Compact(2000))
    assert chat.thread.newest_line() is not None
    chat.append(user("what now?"))
    asked = chat.thread.rows[-1].message_id
    read = chat.messages("openai_messages", 4000)
    chat.append(says("well " * 50))
    chat.play(Drop(0))
    assert chat.messages("openai_messages", 4000, asked) == read
    assert chat.messages("openai_messages", 4000) != read
    held(chat, 4000)


def test_a_replay_keeps_the_room_that_counts_above_the_totals_took(begin: Begin) -> None:
    """Counts that came before the turn were above the estimates that the chat's totals hold."""
    chat = begin()
    if chat.kind == "adopted":
        pytest.skip("an adopted chat has no totals to be above")
    chat.append(user("first"), *[says(f"answer {n} " * 40) for n in range(8)])
    chat.conn.execute(
        "select pycontext.cache_token_counts(%s, 'o200k_base', (select jsonb_agg(jsonb_build_object("
        "'seq', seq, 'tokens', frozen_tokens + 30)) from pycontext.message where chat_id = %s))",
        (chat.chat_id, chat.chat_id),
    )
    (total,) = chat.conn.execute(
        "select live_tokens from pycontext.chat where chat_id = %s", (chat.chat_id,)
    ).fetchone()  # type: ignore[misc]
    for budget in range(total - 150, total + 60, 30):
        name = f"asked {budget}"
        request = json.dumps({**user("and?"), "message_id": name})
        read = chat.conn.execute(
            "select messages from pycontext.start_turn(%s, %s, token_budget => %s)",
            (chat.chat_id, request, budget),
        ).fetchone()
        assert read is not None
        assert chat.messages("openai_messages", None, name) == read[0], budget


def test_a_pass_before_the_first_user_message_stays_as_it_was(begin: Begin) -> None:
    chat = begin(calls("A"), result("A", "line of output\n" * 600), calls("B"), result("B"), says("x " * 90))
    if chat.kind == "adopted":
        pytest.skip("results of an adopted chat are not pruned by a pass")
    chat.play(Prune(2000))
    before = held(chat, 2000)[:-1]  # less "(continue)"
    chat.append(user("hello"))
    assert held(chat, 2000)[: len(before)] == before
    chat.append(says("hi"), user("and?"))
    assert held(chat, 2000)[: len(before)] == before


@pytest.mark.parametrize("budget", [32000, 3000])
def test_a_pass_leaves_the_newest_request_whole_behind_what_stands_before_the_first_one(
    begin: Begin, budget: int
) -> None:
    chat = begin(calls("A", arguments=json.dumps({"content": "words " * 3000})), result("A"), user("u1"))
    picture = [{"type": "text", "text": "u2"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
    chat.append(user(picture), says("ok"))
    chat.play(Prune(800))
    assert chat.state()["is_pruned"] == (chat.kind == "native")
    read = [m["content"] for m in held(chat, budget)]
    assert read[-3:] == [picture, "ok", "(continue)"]
    # a pass is no reason to leave out what there is room for
    assert len(read) == 6 or budget == 3000


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_pass_leaves_out_no_late_result_that_there_is_room_for(begin: Begin, is_pinned: bool) -> None:
    chat = begin(calls("A", arguments=json.dumps({"content": "words " * 300})), user("look " * 200))
    chat.append(result("A", "line of output\n" * 900), says("ok"))
    if is_pinned:
        chat.play(Pin(0))
    chat.play(Prune(800))
    assert chat.state()["is_pruned"] == (chat.kind == "native")
    for budget in range(500, 4000, 500):
        held(chat, budget)
    window = chat.window(32000)
    assert [w["seq"] for w in window if w["seq"]] == [
        r.seq for r in sorted(chat.thread.rows, key=lambda r: (chat.thread.units()[r.seq], r.seq))
    ]


def test_a_cut_is_not_called_exact_in_a_replay(begin: Begin) -> None:
    chat = begin(user("first"), calls("A"), result("A", "line of output\n" * 400))
    request = {**user("and?"), "message_id": "asked"}
    if chat.kind == "adopted":
        pytest.skip("what an adopted chat was read under is not kept")
    chat.conn.execute(
        "select pycontext.start_turn(%s, %s, token_budget => 300)", (chat.chat_id, json.dumps(request))
    )
    window = chat.window(None, "asked")
    assert any(w["is_shortened"] for w in window)
    assert not any(w["is_exact"] for w in window)


def test_every_message_of_an_eventful_session_is_replayed(begin: Begin) -> None:
    """What was read right after each message, and is read as of it once all has happened."""
    chat = begin(prompt="Be brief.", profile="small-8k")
    long, short = Words(1, 30), Words(2, 4)
    talk = [Say(short), Reply(long), Work(3, long), Say(long), Reply(short)]
    events: list[list[Move]] = [
        [Pin(1)], [Compact(2500)], [Prompt(short)], [Compact(2500), Drop(0)], [Rewind(3)], [StartOver(True)],
        [Pin(2), Prompt(None)], [Compact(2500)], [Unpin(0)], [Reply(None, (short, short)), Result(0, long)],
        [Result(0, short)], [Prune(3000)], [Rewind(6), Prompt(long)], [Compact(2500)],
    ]  # fmt: skip
    budgets = (1500, 100000) if chat.kind == "native" else (1500,)
    read: dict[tuple[str, int], Any] = {}
    for happens in events:
        for move in [*talk, *happens]:
            before = len(chat.thread.rows)
            chat.play(move)
            if len(chat.thread.rows) > before:
                name = chat.thread.rows[-1].message_id
                read.update({(name, b): chat.messages("openai_messages", b) for b in budgets})
    assert len(chat.thread.lines) >= 2
    assert len({json.dumps(messages) for messages in read.values()}) > len(read) / 2
    live = {row.message_id for row in chat.thread.rows}
    for (name, budget), messages in read.items():
        if chat.kind == "native" or name in live:
            assert chat.messages("openai_messages", budget, name) == messages, (name, budget)


@pytest.mark.parametrize("when", ["asked afterwards", "answered afterwards"])
def test_calls_wait_in_a_replay_as_they_did(begin: Begin, when: str) -> None:
    """Room is kept for the stand-ins of what waited then, not of what waits now."""
    chat = begin(user("first"), *[m for _ in range(8) for m in (says("well " * 60), user("on " * 60))])
    if when == "answered afterwards":
        chat.append(calls("A", "B", "C"), user("and?"))
    asked = chat.thread.rows[-1].message_id
    total = sum(w["tokens"] for w in chat.window(100000)) + 3
    budgets = range(total - 60, total + 60, 6)
    read = {budget: chat.messages("openai_messages", budget) for budget in budgets}
    chat.append(*[result(i) for i in "ABC"] if when == "answered afterwards" else [calls("A", "B", "C")])
    assert {budget: chat.messages("openai_messages", budget, asked) for budget in budgets} == read


def test_a_count_above_the_estimate_of_the_head_is_made_room_for(begin: Begin) -> None:
    chat = begin(user("注文はどこですか。カタカナも。" * 32), says("word " * 3000), user("ok"))
    chat.play(Compact(2000))
    chat.play(Count(1000))
    for budget in range(430, 540, 5):
        held(chat, budget)


def test_a_first_message_that_was_cut_stays_cut_when_it_counts_for_less(begin: Begin) -> None:
    """Its estimate was over the head's own limit, its count is not: counting must not move the prefix."""
    chat = begin(user("0123456789 31337 " * 220), user("ok"), *[says("word " * 200) for _ in range(4)])
    chat.play(Compact(2000))
    chat.append(user("and now?"))
    read = chat.messages("openai_messages", 4000)
    chat.play(Count(1000))
    chat.refresh()
    first = chat.thread.rows[0]
    assert first.tokens < 2000
    assert chat.messages("openai_messages", 4000) == read
    assert chat.window(4000)[0]["is_shortened"]


def test_a_reset_outranks_a_compaction_of_its_place_in_a_replay_too(begin: Begin) -> None:
    chat = begin(user("hi"), says("hello"), user("the secret plan"))
    chat.append(*[says(f"thinking aloud {n} " * 40) for n in range(8)])
    last = chat.thread.rows[-1].message_id
    chat.conn.execute("select pycontext.start_over(%s)", (chat.chat_id,))
    summary = json.dumps({"resolved": ["thought aloud of the secret plan"]})
    chat.conn.execute("select pycontext.put_summary(%s, %s, %s)", (chat.chat_id, last, summary))
    chat.append(user("what did I say?"))
    name = chat.thread.rows[-1].message_id
    now = chat.messages("openai_messages", 5000)
    assert "secret" not in json.dumps(now)
    assert chat.messages("openai_messages", 5000, name) == now


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_pin_from_after_the_request_stands_after_it(begin: Begin, is_compacted: bool) -> None:
    chat = begin(user("begin " * 20), says("begun"), user("early pin"), says("kept"), user("the long job"))
    for n in range(24):
        chat.append(calls(f"c{n}"), result(f"c{n}", f"result {n} " * 60))
    for row in (chat.thread.rows[2], chat.thread.rows[9]):
        chat.conn.execute("select pycontext.pin_message(%s, %s)", (chat.chat_id, row.message_id))
        chat.thread.pins.append(row.seq)
    if is_compacted:
        chat.play(Compact(2500))
        assert chat.thread.newest_line() is not None
    for budget in (500, 800, 1200):
        held(chat, budget)
        sections = {w["seq"]: w["section"] for w in chat.window(budget)}
        assert sections[chat.thread.rows[2].seq] == "pinned"
        assert sections[chat.thread.rows[9].seq] == "pinned"
        assert sections[chat.thread.rows[4].seq] == "request"
