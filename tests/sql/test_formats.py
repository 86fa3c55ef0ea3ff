"""The three forms of a request: parts of every provider, ids, reasoning, memory, Anthropic's cache marks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
import validators
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import ResponseInputParam
from pydantic import TypeAdapter

Connection = psycopg.Connection[Any]
Message = dict[str, Any]

PIXEL = "iVBORw0KGgo="
SIGNED = {"type": "thinking", "thinking": "let me see", "signature": "c2lnbmF0dXJl"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "c2VjcmV0"}
CHAT = TypeAdapter(list[ChatCompletionMessageParam])
RESPONSES = TypeAdapter(ResponseInputParam)
VALID: dict[str, Callable[[Any], None]] = {
    "openai": validators.openai_chat,
    "anthropic": validators.anthropic,
    "responses": validators.openai_responses,
}


def user(text: Any, **more: Any) -> Message:
    return {"role": "user", "content": text, **more}


def says(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def calls(*ids: str, content: Any = None) -> Message:
    made = [{"id": i, "type": "function", "function": {"name": "look", "arguments": '{"q":1}'}} for i in ids]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(call: str, text: Any = "done", **more: Any) -> Message:
    return {"role": "tool", "tool_call_id": call, "content": text, **more}


def begin(db: Connection, *messages: Message, prompt: str | None = "Be brief.", chat_id: str = "c") -> None:
    db.execute("select create_chat(%s, %s)", (chat_id, prompt))
    db.execute("select append_messages(%s, %s)", (chat_id, json.dumps(messages)))


def turn(db: Connection, message: Any = None, chat_id: str = "c", **given: Any) -> dict[str, Any]:
    """All three forms of what start_turn returns, each valid."""
    names = ", ".join(f"{name} => %s" for name in given)
    row = db.execute(
        f"select messages from start_turn(%s, %s, format => 'all'{', ' if names else ''}{names})",
        (chat_id, None if message is None else json.dumps(message), *given.values()),
    ).fetchone()
    assert row is not None
    for form, valid in VALID.items():
        valid(row[0][form])
    CHAT.validate_python(row[0]["openai"])
    RESPONSES.validate_python(row[0]["responses"])
    found: dict[str, Any] = row[0]
    return found


def blocks(request: Any) -> list[Any]:
    """Anthropic's blocks in order, the system prompt first, without their marks; each with its side."""
    system = request.get("system") or []
    sides = [("system", system if isinstance(system, list) else [{"type": "text", "text": system}])]
    sides += [(m["role"], m["content"]) for m in request["messages"]]
    return [
        (side, {k: v for k, v in b.items() if k != "cache_control"})
        for side, content in sides
        for b in content
    ]


def marked(request: Any) -> list[int]:
    """Places of the marked blocks in `blocks`."""
    system = request.get("system")
    every = list(system) if isinstance(system, list) else [system] if system else []
    every += [b for m in request["messages"] for b in m["content"]]
    return [n for n, b in enumerate(every) if isinstance(b, dict) and "cache_control" in b]


@pytest.mark.core
def test_responses_input_tells_the_same_conversation(db: Connection) -> None:
    begin(
        db,
        user("Where is it?"),
        calls("A", "B", content="I look."),
        result("B", "in B"),
        result("A", "in A"),
        says("There."),
        {"role": "developer", "content": "Be kind."},
        user(
            [
                {"type": "text", "text": "And this?"},
                {"type": "image_url", "image_url": {"url": "https://x.org/a"}},
            ]
        ),
    )
    assert db.execute("select responses_input('c')").fetchone() == (
        [
            {"type": "message", "role": "system", "content": "Be brief."},
            {"type": "message", "role": "user", "content": "Where is it?"},
            {"type": "message", "role": "assistant", "content": "I look."},
            {"type": "function_call", "call_id": "A", "name": "look", "arguments": '{"q":1}'},
            {"type": "function_call", "call_id": "B", "name": "look", "arguments": '{"q":1}'},
            {"type": "function_call_output", "call_id": "B", "output": "in B"},
            {"type": "function_call_output", "call_id": "A", "output": "in A"},
            {"type": "message", "role": "assistant", "content": "There."},
            {"type": "message", "role": "developer", "content": "Be kind."},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "And this?"},
                    {"type": "input_image", "image_url": "https://x.org/a", "detail": "auto"},
                ],
            },
        ],
    )
    assert turn(db)["responses"] == db.execute("select responses_input('c')").fetchone()[0]  # type: ignore[index]


def test_what_never_came_and_what_ends_on_a_reply(db: Connection) -> None:
    begin(db, user("u"), calls("A"), prompt=None)
    assert turn(db)["responses"][-1] == {
        "type": "function_call_output",
        "call_id": "A",
        "output": "no result yet",
    }
    begin(db, user("u"), says("a"), prompt=None, chat_id="d")
    assert turn(db, chat_id="d")["responses"][-1] == {
        "type": "message",
        "role": "user",
        "content": "(continue)",
    }


def test_ids_that_a_server_reuses_are_told_apart(db: Connection) -> None:
    long = "call:" + "x" * 90
    rows = [
        m
        for n in range(3)
        for m in (user(f"u{n}"), calls("A", "a:b", "a_b", long), *map(result, ["a_b", long, "A", "a:b"]))
    ]
    begin(db, *rows, user("A_8 is an id, too"), calls("A_8", "A"), result("A", "x"), result("A_8", "y"))
    forms = turn(db)
    items = forms["responses"]
    ids = [i["call_id"] for i in items if i["type"] == "function_call"]
    assert len(ids) == len(set(ids)) == 14
    assert ids[:3] == ["A", "a_b", "a_b_2"]  # two ids of row #2 read the same when cleaned
    assert {i["call_id"] for i in items if i["type"] == "function_call_output"} == set(ids)
    # each output still answers its own call
    outputs = {i["call_id"]: i["output"] for i in items if i["type"] == "function_call_output"}
    assert [outputs[i] for i in ids[-2:]] == ["y", "x"]


def test_reasoning_stays_with_its_item_in_the_unfinished_turn_and_is_gone_in_older_ones(
    db: Connection,
) -> None:
    reasons = [SIGNED, REASONING]
    begin(db, user("u1"), calls("A", content=[*reasons, {"type": "text", "text": "I look."}]), result("A"))
    forms = turn(db)
    items = forms["responses"]
    assert items[2:5] == [
        REASONING,
        {"type": "message", "role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "A", "name": "look", "arguments": '{"q":1}'},
    ]
    assert [b for side, b in blocks(forms["anthropic"]) if side == "assistant"][:2] == [
        SIGNED,
        {"type": "text", "text": "I look."},
    ]
    assert "thinking" not in json.dumps(forms["openai"])
    assert "secret" not in json.dumps(forms["openai"]) + json.dumps(forms["anthropic"])
    later = turn(db, "u2")
    assert all(i["type"] != "reasoning" for i in later["responses"])
    assert not {"thinking", "redacted_thinking"} & {b["type"] for _, b in blocks(later["anthropic"])}


WORDS = {"type": "text", "text": "so"}


@pytest.mark.parametrize(
    "which",
    [
        [SIGNED],
        [REASONING],
        [SIGNED, REASONING],
        [{**SIGNED, "signature": ""}],
        [WORDS, SIGNED],
        [WORDS, REASONING, SIGNED],
    ],
)
def test_reasoning_without_what_must_follow_it_is_not_sent_alone(db: Connection, which: list[Any]) -> None:
    begin(db, user("u1"), says(which))
    forms = turn(db)
    assert "reasoning" not in [i["type"] for i in forms["responses"]]
    begin(db, user("u1"), says(which), calls("A"), result("A"), chat_id="d")
    forms = turn(db, chat_id="d")
    assert [i for i in forms["responses"] if i["type"] == "reasoning"] == [p for p in which if p is REASONING]


EVERY_PART = [
    {"type": "text", "text": "a"},
    {"type": "input_text", "text": "b"},
    {"type": "output_text", "text": "c", "annotations": []},
    "d",
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}", "detail": "low"}},
    {"type": "input_image", "image_url": "https://x.org/b.png", "detail": "high"},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
    {"type": "image", "source": {"type": "url", "url": "https://x.org/c.png"}},
    {"type": "refusal", "refusal": "no"},
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    },
    {"type": "something_new", "x": 1},
]


def test_parts_of_one_provider_go_to_every_other(db: Connection) -> None:
    rows = []
    for part in EVERY_PART:
        rows += [
            user([part]),
            says([part]),
            calls("A"),
            result("A", [part]),
            {"role": "system", "content": [part]},
        ]
    begin(db, *rows, user("now?"))
    forms = turn(db)
    images = [b for _, b in blocks(forms["anthropic"]) if b["type"] == "image"]
    assert [b["source"]["type"] for b in images] == ["base64", "url", "base64", "url"]
    sent = [p for i in forms["responses"] if isinstance(i.get("content"), list) for p in i["content"]]
    pictures = [p for p in sent if p["type"] == "input_image"]
    assert [p["detail"] for p in pictures] == ["low", "high", "auto", "auto"]
    outputs = [p for i in forms["responses"] if i["type"] == "function_call_output" for p in i["output"]]
    assert sum(p["type"] == "input_image" for p in outputs) == 4


def test_calls_of_built_in_tools_are_items_while_their_turn_is_open(db: Connection) -> None:
    search = EVERY_PART[-2]
    begin(
        db,
        user("u1"),
        calls("A", content=[REASONING, search, {"type": "text", "text": "Found it."}]),
        result("A"),
    )
    assert turn(db)["responses"][2:4] == [REASONING, search]
    later = turn(db, "u2")["responses"]
    assert search not in later
    assert "web_search_call" in json.dumps(later)


def malformed(part: Any) -> list[Any]:
    """A part with each of its fields left out, and of each wrong kind; such as the database takes."""
    found: list[Any] = []
    for place in ((), *([key] for key, field in part.items() if isinstance(field, dict))):
        inner = part[place[0]] if place else part
        for key in inner:
            others = {name: field for name, field in inner.items() if name != key}
            for made in (others, *({**others, key: wrong} for wrong in (None, "", "\u00a0", 5, [], {}))):
                found.append({**part, place[0]: made} if place else made)
    return [p for p in found if isinstance(p.get("type"), str) and isinstance(p.get("text", ""), str)]


def test_parts_that_are_not_whole_are_sent_as_providers_take_them(db: Connection) -> None:
    whole = [part for part in EVERY_PART[:-2] if isinstance(part, dict)]
    whole += [SIGNED, {"type": "redacted_thinking", "data": "x"}, {"type": "reasoning", "id": "r"}]
    parts = ["\u00a0", " \u3000\u2003\n", *(made for part in whole for made in malformed(part))]
    assert len(parts) > 150
    rows = [user(parts), says(parts), calls("A"), result("A", parts), {"role": "system", "content": parts}]
    begin(db, *rows, user("\u00a0"), says("\u2003"))
    turn(db, context="\u00a0", memory="\u2003")
    begin(db, user("go"), calls("A", content=parts), result("A", "\u00a0"), prompt="\u00a0", chat_id="d")
    turn(db, chat_id="d")


def test_an_image_that_no_provider_takes_ends_no_chat(db: Connection) -> None:
    data = f"base64,{PIXEL}"
    taken = [f"data:image/jpg;{data}", f" DATA:image/JPEG;name=a.jpg;base64,{PIXEL[:6]}\r\n{PIXEL[6:]}\n"]
    not_taken = [
        *(f"data:{kind};{data}" for kind in ("image/svg+xml", "image/heic", "application/pdf", "")),
        "data:image/svg+xml;utf8,<svg/>",
        "data:image/png;base64,",
        "file:///tmp/a.png",
        "blob:https://x.org/1",
        "https://x.org/a b.png",
    ]
    parts: list[Any] = []
    for url in taken + not_taken:
        parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "input_image", "image_url": url}]
        parts.append({"type": "image", "source": {"type": "url", "url": url}})
    for kind in ("image/jpg", "image/svg+xml", "image/heic", "x"):
        source = {"type": "base64", "media_type": kind, "data": PIXEL}
        parts += [{"type": "image", "source": source}, {"type": "image", "mimeType": kind, "data": PIXEL}]
    begin(db, user(parts), calls("A"), result("A", parts), user("now?"))
    forms = turn(db)
    sent = [b for _, b in blocks(forms["anthropic"]) if b["type"] == "image"]
    sent += [
        b for _, block in blocks(forms["anthropic"]) for b in block.get("content", []) if b["type"] == "image"
    ]
    jpeg = {"type": "base64", "media_type": "image/jpeg", "data": PIXEL}
    assert [b["source"] for b in sent] == [jpeg] * 2 * (3 * len(taken) + 2)
    pictures = [p for m in forms["openai"] if isinstance(m["content"], list) for p in m["content"]]
    assert [p["image_url"]["url"] for p in pictures if p["type"] == "image_url"] == [
        f"data:image/jpeg;base64,{PIXEL}"
    ] * len(sent)


# --- memory and context ---


USE = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "hub"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}


def test_a_reply_paused_at_a_tool_of_anthropics_goes_on_where_it_is(db: Connection) -> None:
    begin(db, user("go"), says([SIGNED, USE], message_id="m2"))
    paused = turn(db)["anthropic"]["messages"]
    assert [message["role"] for message in paused] == ["user", "assistant"]
    assert blocks(turn(db)["anthropic"])[-1] == ("assistant", USE)
    answer = says([FOUND, {"type": "text", "text": "Here."}])
    db.execute("select append_messages('c', %s)", (json.dumps([answer]),))
    assert [block for _, block in blocks(turn(db, user("next"))["anthropic"])][-4:-2] == [USE, FOUND]


@pytest.mark.parametrize("said", [[USE], [USE, FOUND], "Still looking."], ids=["call", "found", "text"])
def test_a_request_is_not_answered_by_a_reply_that_anthropic_paused(db: Connection, said: Any) -> None:
    def start() -> tuple[bool, str | None]:
        row = db.execute(
            "select is_answered, reply from start_turn('c', %s)", (json.dumps(request),)
        ).fetchone()
        assert row is not None
        return row[0], row[1]

    request = user("go", message_id="u1")
    paused = says(said, metadata={} if said == [USE] else {"stop_reason": "pause_turn"})
    begin(db, request, paused, prompt=None)
    assert start() == (False, None)
    answer = says([*([FOUND] if said == [USE] else []), {"type": "text", "text": "Here."}])
    db.execute("select append_messages('c', %s)", (json.dumps([answer]),))
    is_answered, reply = start()
    assert is_answered
    assert str(reply).endswith("Here.")


@pytest.mark.parametrize("left", [USE, FOUND], ids=["call", "result"])
def test_a_tool_of_anthropics_that_stands_alone_is_told_as_words(db: Connection, left: Any) -> None:
    begin(db, user("go"), says([left, {"type": "text", "text": "Here."}]))
    request = turn(db, user("next"))["anthropic"]
    assert {block["type"] for _, block in blocks(request)} == {"text"}
    assert "srvtoolu_1" in json.dumps(request)


def test_a_call_that_is_none_is_told_as_words(db: Connection) -> None:
    wrong = {"type": "function_call", "call_id": "A", "name": "look", "arguments": {"q": 1}}
    answer = {"type": "function_call_output", "output": "nobody asked"}
    begin(db, user("go"), says([wrong, answer]))
    forms = turn(db)
    assert [item["type"] for item in forms["responses"]] == ["message"] * 5
    assert "nobody asked" in json.dumps(forms["responses"])


def test_an_approval_that_does_not_parse_is_told_as_words(db: Connection) -> None:
    asked = calls("A")
    asked["tool_calls"][0]["type"] = "mcp_approval_request"
    begin(db, user("go"), asked, result("A", '{"approve":true, as he said'))
    assert "as he said" in json.dumps(turn(db)["responses"])


def test_ids_of_other_servers_are_cut_to_what_chat_completions_take(db: Connection) -> None:
    long = [f"mcpr_682d498e3bd4819196a0ce1664f8e77b04ad1e533afccb_{n}" for n in range(2)]
    begin(
        db,
        user("u1", name="x" * 80),
        calls(*long, "short"),
        *(result(i, f"of {i}") for i in [*long, "short"]),
        user("u2"),
    )
    sent = turn(db)["openai"]
    (ids,) = ([call["id"] for call in m["tool_calls"]] for m in sent if m.get("tool_calls"))
    assert len(set(ids)) == 3
    assert ids[2] == "short"
    told = {m["tool_call_id"]: m["content"] for m in sent if m["role"] == "tool"}
    assert [told[i] for i in ids] == [f"of {i}" for i in [*long, "short"]]
    assert [w for (w,) in db.execute("select tool_call_id from working_window('c') where role = 'tool'")] == [
        *long,
        "short",
    ]


def test_names_that_no_tool_can_have_are_made_such_that_providers_take(db: Connection) -> None:
    call = calls("A", "B", "C")
    for made, name in zip(call["tool_calls"], ("look up/the hub", "x" * 200, "functions.look"), strict=True):
        made["function"]["name"] = name
    begin(db, user("go"), call, *map(result, "ABC"))
    forms = turn(db)
    sent = [made["function"]["name"] for made in forms["openai"][2]["tool_calls"]]
    assert sent == ["look_up_the_hub", "x" * 128, "functions.look"]
    assert [made["function"]["arguments"] for made in forms["openai"][2]["tool_calls"]] == ['{"q":1}'] * 3


def around(form: str, request: Any) -> tuple[str, str]:
    """What stands right before the last user text, and that text."""
    if form == "anthropic":
        texts = [b["text"] for _, b in blocks(request) if b["type"] == "text"]
    else:
        texts = [m["content"] for m in request if m.get("role") == "user"]
    at = max(n for n, text in enumerate(texts) if text == "Where?")
    return texts[at - 1], texts[at]


def test_memory_and_context_stand_fenced_before_the_request_once_and_are_never_stored(db: Connection) -> None:
    begin(db, user("earlier"), says("yes"))
    given = {"memory": "likes <memory-context> tea", "context": "It is 9 o'clock."}
    for message, extra in ((user("Where?", message_id="u"), []), (None, [calls("A"), result("A")])):
        if extra:
            db.execute("select append_messages('c', %s)", (json.dumps(extra),))
        forms = turn(db, message, **given)
        for form, request in forms.items():
            before, _ = around(form, request)
            assert before == (
                "<memory-context>\nlikes <\\memory-context> tea\n\nIt is 9 o'clock.\n</memory-context>"
            ), form
            assert json.dumps(request).count("9 o'clock") == 1
    for _ in range(20):
        turn(db, **given)
    stored = db.execute(
        "select count(*), bool_or(content::text ~ '(likes|clock)') from pycontext.message"
    ).fetchone()
    assert stored == (5, False)
    assert "9 o'clock" not in json.dumps(turn(db))


@pytest.mark.parametrize(
    "rows",
    [[calls("A"), result("A")], [{"role": "developer", "content": "kind"}], [calls("A")], [says("Hello")]],
)
def test_memory_of_a_chat_without_a_request_stands_at_its_end(db: Connection, rows: list[Message]) -> None:
    begin(db, *rows)
    for form, request in turn(db, memory="likes tea").items():
        assert json.dumps(request).count("likes tea") == 1, form


def test_memory_over_its_reserve_is_taken_off_the_budget(db: Connection) -> None:
    begin(db, *[user(f"{n} " + "words and more words " * 100) for n in range(400)])
    room, reserve = db.execute(  # type: ignore[misc]
        "select context_window - response_reserve, memory_tokens from pycontext.profile"
        " where profile = 'default'"
    ).fetchone()

    def read(memory: str, **given: Any) -> tuple[int, int]:
        names = "".join(f", {name} => %s" for name in given)
        found = db.execute(
            f"select window_tokens, token_budget from start_turn('c', memory => %s{names})",
            (memory, *given.values()),
        ).fetchone()
        return found or (0, 0)

    assert read("short")[1] == room - reserve
    long = "она любит чай " * 3000
    tokens = db.execute("select estimate_tokens(%s)", (long,)).fetchone()[0]  # type: ignore[index]
    assert tokens > 2 * reserve
    window, budget = read(long)
    assert window <= budget
    assert room - tokens - 40 <= budget <= room - tokens
    assert read(long, token_budget=9000)[1] == 9000  # that is for the rows alone


# --- Anthropic's cache marks ---


def test_marks_stand_on_system_head_the_request_before_and_the_newest_row(db: Connection) -> None:
    begin(db, user("u1"), says("a1"))
    forms = turn(db, user("u2"))
    assert [blocks(forms["anthropic"])[n][1]["text"] for n in marked(forms["anthropic"])] == [
        "Be brief.",
        "u1",
        "u2",
    ]
    db.execute("select append_messages('c', %s)", (json.dumps([calls("A", "B"), result("A", "r")]),))
    forms = turn(db)
    found = [blocks(forms["anthropic"])[n][1] for n in marked(forms["anthropic"])]
    assert [b.get("text", b.get("tool_use_id")) for b in found] == ["Be brief.", "u2", "A"]  # no stand-in
    assert "cache_control" not in json.dumps(db.execute("select anthropic_messages('c')").fetchone())


def test_marks_after_a_line_hold_the_head(db: Connection) -> None:
    rows = [
        m
        for n in range(12)
        for m in (user(f"u{n} " + "word " * 60, message_id=f"u{n}"), says(f"a{n}", message_id=f"a{n}"))
    ]
    begin(db, *rows)
    db.execute("select put_summary('c', 'a8', '{\"notes\": \"Eight things were asked.\"}')")
    request = turn(db, user("now"))["anthropic"]
    found = [blocks(request)[n][1]["text"].split()[0] for n in marked(request)]
    assert found == ["Be", "a0", "u11", "now"]


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("memory", [lambda n: None, lambda n: f"memory of turn {n}"], ids=["bare", "memory"])
def test_the_furthest_mark_that_can_hit_is_set_again(
    db: Connection, memory: Callable[[int], str | None], thinks: bool
) -> None:
    """A conversation of tool loops, request by request: each marks bytes that the one before it marked."""
    old: list[Any] = []
    old_places: list[int] = []
    hits = []
    begin(db)
    for number in range(5):
        message: Any = user(f"question {number}")
        for step in range(4):
            request = turn(db, message, memory=memory(number))["anthropic"]
            message = None
            every, places = blocks(request), marked(request)
            assert places[-1] == len(every) - 1
            same = next(
                (n for n, (x, y) in enumerate(zip(every, old, strict=False)) if x != y),
                min(len(every), len(old)),
            )
            if old:
                best = max(n for n in old_places if n < same)
                assert best in places, (number, step, places, old_places, same)
                # and what is new: the newest row, and of a new turn with memory the row before that
                assert len([n for n in places if n >= same]) <= (2 if memory(0) and step == 0 else 1)
                hits.append(best / len(every))
            old, old_places = every, places
            content = [SIGNED] if thinks else None
            reply = says([SIGNED, {"type": "text", "text": "answer"}] if thinks else "answer")
            rows = (
                [reply]
                if step == 3
                else [calls(f"c{number}{step}", content=content), result(f"c{number}{step}")]
            )
            db.execute("select append_messages('c', %s)", (json.dumps(rows),))
    assert sum(hits) / len(hits) > 0.4


# --- what the provider counted ---


def usage(db: Connection, tokens: int, model: str = "m", seq: int | None = None) -> tuple[float, bool, str]:
    row = db.execute("select * from record_usage('c', %s, %s, %s)", (model, tokens, seq)).fetchone()
    assert row is not None
    return float(row[2]), row[3], row[4]


def read(db: Connection) -> tuple[int, int]:
    row = db.execute("select window_tokens, read_seq from start_turn('c')").fetchone()
    assert row is not None
    return row


def test_usage_moves_the_scale_up_at_once_and_down_slowly_and_a_pass_takes_it_over(db: Connection) -> None:
    begin(
        db,
        *[
            m
            for n in range(30)
            for m in (user(f"u{n} " + "word " * 60, message_id=f"u{n}"), says("a", message_id=f"a{n}"))
        ],
    )

    def status() -> tuple[float, Any, Any, int]:
        row = db.execute(
            "select token_scale, next_token_scale, model, token_budget from window_status('c')"
        ).fetchone()
        assert row is not None
        return float(row[0]), None if row[1] is None else float(row[1]), row[2], row[3]

    assert usage(db, 5000) == (1.0, False, "no window was counted yet: start_turn does")
    tokens, seq = read(db)
    budget = status()[3]
    assert usage(db, round(tokens * 1.3), seq=seq)[:2] == (pytest.approx(1.3, abs=0.001), True)
    assert usage(db, tokens)[:2] == (pytest.approx(1.27, abs=0.001), True)
    assert status() == (1.0, pytest.approx(1.27, abs=0.001), "m", budget)  # nothing moves before a pass
    assert read(db)[0] == tokens
    db.execute("select put_summary('c', 'a20', '{\"notes\": \"Many things were asked.\"}')")
    assert status() == (pytest.approx(1.27, abs=0.001),) * 2 + ("m", pytest.approx(budget / 1.27, rel=0.001))
    read(db)
    db.execute(
        "select set_chat_profile('c', 'long-1m')"
    )  # other limits: what was learned under the old ones goes
    assert status()[:2] == (1.0, None)


def test_usage_is_bounded_and_kept_by_model(db: Connection) -> None:
    begin(db, user("word " * 2000))
    tokens, _ = read(db)
    assert usage(db, round(tokens * 2.9))[:2] == (2.0, True)
    assert usage(db, tokens * 4)[1:] == (
        False,
        f"{tokens * 4} tokens can't be of the {tokens} that were counted",
    )
    for _ in range(100):
        low = usage(db, round(tokens * 0.4), "other")[0]
    assert low == 0.75
    assert db.execute("select scales from pycontext.chat").fetchone() == ({"m": 2.0, "other": 0.75},)


def test_usage_of_another_window_teaches_nothing(db: Connection) -> None:
    begin(db, *[m for n in range(30) for m in (user(f"u{n} " + "word " * 60), says("a", message_id=f"a{n}"))])
    tokens, seq = read(db)
    assert usage(db, tokens, seq=seq - 1)[1] is False
    db.execute("select put_summary('c', 'a20', '{\"notes\": \"Many things were asked.\"}')")
    assert usage(db, tokens * 2, seq=seq) == (
        1.0,
        False,
        "of another window: an act has changed the chat since",
    )
    begin(db, user("short"), chat_id="d")
    db.execute("select start_turn('d')")
    row = db.execute("select is_taken from record_usage('d', 'm', 30)").fetchone()
    assert row == (False,)


@pytest.mark.parametrize(
    ("model", "tokens"), [("", 10), (None, 10), ("m", 0), ("m", -1), ("m", None), ("m" * 300, 10)]
)
def test_usage_that_says_nothing_is_refused(db: Connection, model: Any, tokens: Any) -> None:
    begin(db, user("u"))
    with pytest.raises(psycopg.DatabaseError) as caught:
        db.execute("select record_usage('c', %s, %s)", (model, tokens))
    assert caught.value.sqlstate == "PCX02"
    with pytest.raises(psycopg.DatabaseError) as caught:
        db.execute("select record_usage('nowhere', 'm', 10)")
    assert caught.value.sqlstate == "PCX01"
