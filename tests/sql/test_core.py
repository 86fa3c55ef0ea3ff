"""The core on every PostgreSQL it is promised for: append, window, line, turn, counts, a foreign chat.

What each promise means in every corner is tested elsewhere, on the newest server; here each stands once.
"""

from __future__ import annotations

import json
import threading
import uuid
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from pycontext import install, tokens

Connection = psycopg.Connection[Any]
Row = dict[str, Any]

pytestmark = pytest.mark.core

PROMPT = "You are the support desk of a bookshop."


def rows(db: Connection, statement: str, *arguments: Any) -> list[Row]:
    with db.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement.encode(), arguments).fetchall()


def value(db: Connection, statement: str, *arguments: Any) -> Any:
    return next(iter(rows(db, statement, *arguments)[0].values()))


def append(db: Connection, chat_id: str, *messages: Row) -> list[Row]:
    return rows(db, "select * from pycontext.append_messages(%s, %s)", chat_id, json.dumps(messages))


def window(
    db: Connection, chat_id: Any, token_budget: int | None = None, as_of: str | None = None
) -> list[Row]:
    return rows(db, "select * from pycontext.working_window(%s, %s, %s)", chat_id, token_budget, as_of)


def text_message(role: str, number: int) -> Row:
    text = {
        "user": f"Where is parcel {number}? " + "I ordered it last month. " * 6,
        "assistant": f"Parcel {number} is in hub B-{number}. " + "It comes on Friday. " * 6,
    }[role]
    return {"role": role, "content": text, "message_id": f"{role[0]}{number}"}


def called(number: int) -> list[Row]:
    """A request, an assistant with two calls, their results in the other order, and the reply."""
    calls = [
        {
            "id": f"call_{number}_{n}",
            "type": "function",
            "function": {"name": "find_parcel", "arguments": json.dumps({"parcel": number, "part": n})},
        }
        for n in (1, 2)
    ]
    results = [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": f"parcel {number}: " + "scanned at the hub, " * 20,
            "message_id": f"r{call['id']}",
        }
        for call in reversed(calls)
    ]
    asked = {"role": "assistant", "content": None, "tool_calls": calls, "message_id": f"c{number}"}
    return [text_message("user", number), asked, *results, text_message("assistant", number)]


def chat(db: Connection, chat_id: str = "c", turns: int = 20, profile: str = "small-8k") -> str:
    rows(db, "select pycontext.create_chat(%s, %s, %s)", chat_id, PROMPT, profile)
    messages = [m for number in range(1, turns + 1) for m in called(number)]
    append(db, chat_id, *messages)
    return chat_id


def split_units(window_rows: list[Row]) -> list[str]:
    """Ids of calls without their result right after them, and of results without their call."""
    found, open_calls = [], set()
    for row in window_rows:
        if row["role"] == "tool":
            if row["tool_call_id"] not in open_calls:
                found.append(row["tool_call_id"])
            open_calls.discard(row["tool_call_id"])
            continue
        found += open_calls
        open_calls = {call["id"] for call in row["tool_calls"] or ()}
    return found + list(open_calls)


def refused(db: Connection, state: str, statement: str, *arguments: Any) -> psycopg.Error:
    with pytest.raises(psycopg.Error) as caught:
        rows(db, statement, *arguments)
    assert caught.value.sqlstate == state, str(caught.value)
    assert caught.value.diag.message_detail
    assert caught.value.diag.message_hint
    return caught.value


# append


def test_a_chat_is_created_once(db: Connection) -> None:
    for prompt in (PROMPT, "Another one."):
        assert value(db, "select pycontext.create_chat('c', %s)", prompt) == "c"
    assert [row["content"] for row in window(db, "c")] == [PROMPT]


def test_messages_are_kept_in_order_as_they_came(db: Connection) -> None:
    given = called(1)
    given[0]["content"] = [
        {"type": "text", "text": "Где посылка? 在哪里 🚚"},
        {"type": "image_url", "image_url": {"url": "https://example.com/label.png"}},
    ]
    given[0]["created_at"] = "2025-03-01T08:00:00+00:00"
    rows(db, "select pycontext.create_chat('c')")
    stored = append(db, "c", *given)
    assert [row["seq"] for row in stored] == [1, 2, 3, 4, 5]
    thread = rows(db, "select * from pycontext.thread('c')")
    for sent, row in zip(given, thread, strict=True):
        for key in ("message_id", "role", "content", "tool_calls", "tool_call_id"):
            assert row[key] == sent.get(key), key
    assert thread[0]["created_at"].isoformat() == "2025-03-01T08:00:00+00:00"


def test_the_same_message_twice_is_one_row(db: Connection) -> None:
    rows(db, "select pycontext.create_chat('c')")
    first = append(db, "c", text_message("user", 1))
    assert append(db, "c", text_message("user", 1)) == first
    again = append(db, "c", text_message("user", 1), text_message("assistant", 1))
    assert [row["seq"] for row in again] == [1, 2]
    other = {**text_message("user", 1), "content": "another body"}
    refused(db, "PCX03", "select pycontext.append_messages('c', %s)", json.dumps([other]))
    assert len(rows(db, "select * from pycontext.thread('c')")) == 2


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("PCX02", "just text"),
        ("PCX02", {"role": "robot", "content": "x"}),
        ("PCX02", {"role": "user", "content": 7}),
        ("PCX02", {"role": "user", "content": "x", "tool_calls": [{"id": "a"}]}),
        ("PCX04", {"role": "tool", "content": "x"}),
    ],
)
def test_a_bad_message_leaves_nothing_behind(db: Connection, state: str, message: Any) -> None:
    rows(db, "select pycontext.create_chat('c')")
    both = json.dumps([text_message("user", 1), message])
    refused(db, state, "select pycontext.append_messages('c', %s)", both)
    assert rows(db, "select * from pycontext.thread('c')") == []
    assert append(db, "c", text_message("user", 1))[0]["seq"] == 1


def test_no_such_chat(db: Connection) -> None:
    for read in ("working_window('x')", "thread('x')", "window_status('x')", "compaction_plan('x')"):
        refused(db, "PCX01", f"select * from pycontext.{read}")
    refused(db, "PCX01", "select pycontext.append_message('x', 'user', 'hello')")


def test_two_sessions_append_one_after_the_other(db: Connection, dsn: str) -> None:
    rows(db, "select pycontext.create_chat('c')")
    start = threading.Barrier(2)
    seen: list[list[int]] = []

    def write(name: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            start.wait(10)
            mine = [
                append(conn, "c", {"role": "user", "content": f"{name} {n}"})[0]["seq"] for n in range(20)
            ]
            seen.append(mine)

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(mine == sorted(mine) for mine in seen)
    assert sorted(seq for mine in seen for seq in mine) == list(range(1, 41))


# window


def test_the_window_of_a_short_chat_is_the_whole_chat(db: Connection) -> None:
    chat(db, turns=2)
    found = window(db, "c")
    assert [row["ordinal"] for row in found] == list(range(1, 12))
    assert [row["seq"] for row in found] == [None, *range(1, 11)]
    assert found[0]["section"] == "system"
    assert {row["section"] for row in found[1:]} <= {"head", "tail"}
    assert not any(row["is_shortened"] for row in found)


@pytest.mark.parametrize("step", [0, 1])
def test_it_fits_and_splits_no_unit_at_any_budget(db: Connection, step: int) -> None:
    chat(db, turns=12)
    if step:
        put_summary(db, "a6", "Parcels 1 to 6 are in their hubs.")
    newest = rows(db, "select content from pycontext.thread('c') where message_id = 'u12'")[0]["content"]
    with pytest.raises(psycopg.Error) as caught:
        window(db, "c", 10)
    assert caught.value.sqlstate == "PCX05"
    smallest = 3 + sum(4 + tokens.count(text, "o200k_base") for text in (PROMPT, newest))
    for token_budget in (*range(smallest + 60, 1000, 97), *range(1000, 6000, 601)):
        found = window(db, "c", token_budget)
        assert 3 + sum(row["tokens"] for row in found) <= token_budget
        assert split_units(found) == []
        assert [row["content"] for row in found if row["role"] == "user"].count(newest) == 1
        assert all("#" in row["content"] for row in found if row["section"] == "omitted")


def test_what_is_left_out_is_marked_and_the_sections_stand_in_their_order(db: Connection) -> None:
    chat(db)
    put_summary(db, "a5", "Parcels 1 to 5 are in their hubs.")
    found = window(db, "c", 2500)
    sections = list(dict.fromkeys(row["section"] for row in found))
    order = ["system", "head", "summary", "request", "pinned", "omitted", "tail"]
    assert sections == [name for name in order if name in sections]
    assert {"system", "summary", "omitted", "tail"} <= set(sections)


def test_ids_may_be_text_uuid_and_bigint(db: Connection) -> None:
    name = uuid.uuid4()
    for chat_id in ("42", str(name)):
        rows(db, "select pycontext.create_chat(%s)", chat_id)
        append(db, chat_id, text_message("user", 1))
    assert window(db, 42) == window(db, "42")
    assert window(db, name) == window(db, str(name))
    assert len(rows(db, "select * from working_window(42)")) == 1


def test_the_window_as_it_was(db: Connection) -> None:
    chat(db, turns=3)
    before = window(db, "c")
    append(db, "c", *called(4))
    put_summary(db, "a3", "Parcels 1 to 3 are in their hubs.")
    then = window(db, "c", as_of="a3")
    assert [(row["seq"], row["content"]) for row in then] == [(row["seq"], row["content"]) for row in before]


def test_messages_for_both_providers(db: Connection) -> None:
    chat(db, turns=2)
    openai = value(db, "select pycontext.openai_messages('c', memory => 'She moved to Mill Lane.')")
    assert [message["role"] for message in openai[:2]] == ["system", "user"]
    memory = next(n for n, message in enumerate(openai) if "<memory-context>" in str(message["content"]))
    assert openai[memory + 1]["content"] == text_message("user", 2)["content"]
    assert openai[-1] == {"role": "user", "content": "(continue)"}
    anthropic = value(db, "select pycontext.anthropic_messages('c')")
    assert anthropic["system"] == PROMPT
    sides = [message["role"] for message in anthropic["messages"]]
    assert sides == ["user", "assistant"] * (len(sides) // 2) + ["user"] * (len(sides) % 2)
    kinds = [block["type"] for message in anthropic["messages"] for block in message["content"]]
    assert kinds.count("tool_use") == kinds.count("tool_result") == 4


# the line


def put_summary(db: Connection, after: str, done: str, chat_id: str = "c", **more: Any) -> Row:
    return rows(
        db,
        "select * from pycontext.put_summary(%s, %s, %s, edit_no => %s)",
        chat_id,
        after,
        json.dumps({"resolved": [done]}),
        more.get("edit_no"),
    )[0]


def test_plan_source_and_summary(db: Connection) -> None:
    chat(db, turns=40)
    plan = rows(db, "select * from pycontext.compaction_plan('c', 6000)")[0]
    assert plan["decision"] in ("prune", "summarize")
    source = rows(db, "select * from pycontext.compaction_source('c', %s)", plan["after_message_id"])
    assert [row["seq"] for row in source] == list(range(plan["from_seq"], plan["to_seq"] + 1))
    before = sum(row["tokens"] for row in window(db, "c", 6000))
    line = put_summary(db, plan["after_message_id"], "Parcels are in their hubs.", edit_no=plan["edit_no"])
    assert (line["kind"], line["origin"], line["seq"]) == ("summary", "compaction", plan["to_seq"])
    found = window(db, "c", 6000)
    assert sum(row["tokens"] for row in found) < before
    assert [row["message_id"] for row in found if row["section"] == "summary"] == [line["message_id"]]
    assert all(row["seq"] > line["seq"] for row in found if row["section"] in ("tail", "omitted"))
    assert split_units(found) == []
    shown = rows(db, "select * from pycontext.thread('c', max_rows => 1000)")
    assert len(shown) == 201
    assert [row["seq"] for row in shown].count(line["seq"]) == 2
    passes = rows(db, "select * from pycontext.compaction_history where chat_id = 'c'")
    assert [row["outcome"] for row in passes] == ["summarized"]


def test_one_place_has_one_line_and_the_furthest_one_counts(db: Connection) -> None:
    chat(db)
    first = put_summary(db, "a8", "The first text.")
    second = put_summary(db, "a8", "The second text.")
    assert (second["message_id"], second["content"]) == (first["message_id"], first["content"])
    late = put_summary(db, "a4", "An older place, later.")
    assert late["message_id"] != first["message_id"]
    status = rows(db, "select * from pycontext.window_status('c')")[0]
    assert (status["line_id"], status["line_seq"]) == (first["message_id"], first["seq"])


def test_bad_summaries_are_refused(db: Connection) -> None:
    chat(db)
    for summary in ({}, {"resolved": [" "]}, {"resolved": ["x" * 200_000]}):
        refused(db, "PCX07", "select pycontext.put_summary('c', 'a8', %s)", json.dumps(summary))
    refused(
        db, "PCX07", "select pycontext.put_summary('c', 'a8', '{\"resolved\": [\"done\"]}', edit_no => 999)"
    )
    assert rows(db, "select * from pycontext.window_status('c')")[0]["line_id"] is None


def test_start_over(db: Connection) -> None:
    chat(db)
    put_summary(db, "a8", "Parcels 1 to 8 are in their hubs.")
    line = rows(db, "select * from pycontext.start_over('c', 'She is moving house.')")[0]
    assert (line["origin"], line["seq"]) == ("reset", 100)
    found = window(db, "c")
    assert [row["section"] for row in found] == ["system", "summary"]
    assert "She is moving house." in found[1]["content"]
    assert len(rows(db, "select * from pycontext.thread('c', max_rows => 1000)")) == 102
    append(db, "c", text_message("user", 99))
    assert [row["message_id"] for row in window(db, "c")][2:] == ["u99"]


# a turn, and counts


def test_a_turn_in_one_statement(db: Connection) -> None:
    statement = "select * from pycontext.start_turn('c', %s, system_prompt => %s, context => %s)"
    asked = json.dumps({"role": "user", "content": "Hello", "message_id": "m1"})
    for _ in range(2):  # a retried request changes nothing
        turn = rows(db, statement, asked, PROMPT, "It is Friday.")[0]
        assert (turn["message_id"], turn["seq"], turn["is_answered"]) == ("m1", 1, False)
        assert [message["role"] for message in turn["messages"]] == ["system", "user", "user"]
        assert "It is Friday." in turn["messages"][1]["content"]
        assert turn["messages"][2]["content"] == "Hello"
        assert turn["window_tokens"] <= turn["token_budget"]
    rows(db, "select pycontext.append_message('c', 'assistant', 'Good morning.')")
    resumed = rows(db, "select * from pycontext.start_turn('c')")[0]
    assert (resumed["message_id"], resumed["is_answered"]) == ("m1", True)
    assert "It is Friday." not in str(resumed["messages"])
    assert len(rows(db, "select * from pycontext.thread('c')")) == 2


def test_exact_counts_replace_estimates(db: Connection) -> None:
    chat(db, turns=3)
    assert all(row["is_estimate"] for row in window(db, "c"))
    uncounted = rows(db, "select * from pycontext.uncounted_messages('c')")
    counts = [
        {
            "seq": row["seq"],
            "line_no": row["line_no"],
            "tokens": row["overhead"] + sum(tokens.count(text, row["encoding"]) for text in row["texts"]),
        }
        for row in uncounted
    ]
    statement = "select pycontext.cache_token_counts('c', 'o200k_base', %s)"
    assert value(db, statement, json.dumps(counts)) == len(counts) == 16
    assert value(db, statement, json.dumps(counts)) == 0
    assert rows(db, "select * from pycontext.uncounted_messages('c')") == []
    found = window(db, "c")
    assert not any(row["is_estimate"] for row in found)
    by_seq = {count["seq"]: count["tokens"] for count in counts}
    assert [row["tokens"] for row in found] == [by_seq[row["seq"] or 0] for row in found]


def test_a_count_may_come_with_the_message(db: Connection) -> None:
    rows(db, "select pycontext.create_chat('c')")
    append(db, "c", {"role": "user", "content": "Hello", "tokens": {"encoding": "o200k_base", "count": 5}})
    assert [(row["tokens"], row["is_estimate"]) for row in window(db, "c")] == [(5, False)]


# a chat that lives in the product's own table

SHOP = """
    create schema shop;
    create table shop.post (
        post_no bigint generated always as identity primary key,
        ticket_no bigint not null,
        author text not null,
        body text not null,
        posted timestamptz not null default now()
    );
    create index on shop.post (ticket_no, post_no);
    create view shop.chat_message as
    select p.ticket_no as chat_id, p.post_no as seq, p.post_no as message_id,
        case p.author when 'bot' then 'assistant' else 'user' end as role, p.body as content,
        p.posted as created_at
    from shop.post p;
    insert into shop.post (ticket_no, author, body, posted)
    select t, case n % 2 when 0 then 'bot' else 'anna' end, format('post %s of ticket %s: ', n, t)
        || repeat('about the parcel, ', 10), now() - interval '1 day'
    from generate_series(1, 40) n, (values (7), (8)) v (t);
"""


@pytest.fixture
def shop(db: Connection) -> Connection:
    db.execute(SHOP.encode())
    db.execute("select pycontext.register_source('shop', 'shop.chat_message', is_default => true)")
    return db


def test_a_foreign_table_gives_a_window(shop: Connection) -> None:
    found = rows(shop, "select * from working_window(7)")
    posts = rows(shop, "select * from shop.chat_message where chat_id = 7 order by seq")
    assert [row["content"] for row in found] == [post["content"] for post in posts]
    assert [row["message_id"] for row in found] == [str(post["message_id"]) for post in posts]
    small = window(shop, 7, 600)
    assert 3 + sum(row["tokens"] for row in small) <= 600
    assert any(row["section"] == "omitted" for row in small)
    assert len(rows(shop, "select * from pycontext.thread('8')")) == 40


def test_a_foreign_table_gets_its_line_and_is_not_written(shop: Connection) -> None:
    before = rows(shop, "select * from shop.post order by post_no")
    plan = rows(shop, "select * from pycontext.compaction_plan('7', 1000)")[0]
    assert plan["decision"] == "summarize"
    line = put_summary(shop, plan["after_message_id"], "The parcel was discussed.", "7")
    assert line["seq"] == plan["to_seq"]
    found = window(shop, 7, 1000)
    assert [row["message_id"] for row in found if row["section"] == "summary"] == [line["message_id"]]
    assert all(row["seq"] > line["seq"] for row in found if row["section"] == "tail")
    shown = rows(shop, "select * from pycontext.thread('7', max_rows => 100)")
    assert [row["kind"] for row in shown].count("summary") == 1
    assert len(shown) == 41
    assert rows(shop, "select * from shop.post order by post_no") == before
    assert value(shop, "select count(*) from pycontext.message where kind = 'message'") == 0


def test_a_foreign_table_is_its_owners_to_write(shop: Connection) -> None:
    rows(shop, "select pycontext.create_chat('8', source => 'shop')")
    for chat_id in ("7", "8"):  # by default, and by name
        refused(shop, "PCX09", "select pycontext.append_message(%s, 'user', 'hello')", chat_id)
        refused(shop, "PCX09", "select * from pycontext.start_turn(%s, '\"hello\"')", chat_id)


def test_a_relation_that_is_no_source_is_refused(shop: Connection) -> None:
    refused(shop, "PCX12", "select pycontext.register_source('post', 'shop.post')")
    refused(shop, "PCX12", "select pycontext.create_chat('9', source => 'nowhere')")


# rights


def test_a_writer_does_all_of_it_without_a_right_on_the_tables(db: Connection) -> None:
    db.execute(install.extra_sql("roles").encode())
    try:
        db.execute("set role pycontext_writer")
        chat(db)
        put_summary(db, "a8", "Parcels 1 to 8 are in their hubs.")
        turn = rows(db, "select * from pycontext.start_turn('c', '\"Hello\"')")[0]
        assert turn["seq"] == 101
        rows(db, "select pycontext.cache_token_counts('c', 'o200k_base', '[]')")
        rows(db, "select pycontext.fail_compaction('c', 'a9', 'failed', 'the model was down')")
        rows(db, "select pycontext.start_over('c')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            db.execute("insert into pycontext.profile (profile) values ('mine')")
    finally:
        db.execute("reset role")
        for role in ("pycontext_admin", "pycontext_writer", "pycontext_reader"):
            db.execute(f"drop owned by {role}".encode())
            db.execute(f"drop role {role}".encode())
