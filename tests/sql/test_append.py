"""Appending from plain SQL: one row a message, in order, once, nothing on error, and whole units of it."""

from __future__ import annotations

import json
import threading
from typing import Any

import psycopg
import pytest

from pycontext.tokens import count

pytestmark = pytest.mark.core

Connection = psycopg.Connection[Any]


@pytest.fixture
def chat(db: Connection) -> Connection:
    db.execute("select pycontext.create_chat('c', 'Be brief.')")
    return db


def rows(db: Connection, columns: str = "seq, role, content") -> list[tuple[Any, ...]]:
    return db.execute(f"select {columns} from pycontext.thread('c')").fetchall()


def append(db: Connection, *messages: dict[str, Any]) -> list[tuple[Any, ...]]:
    return db.execute(
        "select seq, message_id, tokens, encoding from pycontext.append_messages('c', %s)",
        (json.dumps(messages),),
    ).fetchall()


def test_a_batch_shares_one_time_and_keeps_its_order(chat: Connection) -> None:
    batch = [{"role": ("user", "assistant")[n % 2], "content": f"row {n}"} for n in range(50)]
    append(chat, *batch)
    chat.execute("update pycontext.message set metadata = '{}' where chat_id = 'c' and seq % 3 = 0")
    first = rows(chat)
    assert [content for _, _, content in first] == [f"row {n}" for n in range(50)]
    assert all(rows(chat) == first for _ in range(20))


def test_the_clock_does_not_matter(chat: Connection) -> None:
    append(chat, {"role": "user", "content": "later", "created_at": "2030-01-01T00:00:00Z"})
    append(chat, {"role": "assistant", "content": "earlier", "created_at": "1999-01-01T00:00:00Z"})
    assert [content for _, _, content in rows(chat)] == ["later", "earlier"]
    assert [w[0] for w in chat.execute("select content from pycontext.working_window('c')").fetchall()] == [
        "Be brief.",
        "later",
        "earlier",
    ]


def test_a_retry_takes_no_seq_and_returns_the_row_that_is_there(chat: Connection) -> None:
    one = {"role": "user", "content": "hi", "message_id": "m1"}
    first = append(chat, one)
    assert append(chat, one) == first
    assert append(chat, one, {"role": "assistant", "content": "hello"}, one)[0] == first[0]
    assert [seq for seq, _, _ in rows(chat)] == [1, 2]


@pytest.mark.parametrize(
    "second",
    [
        {"role": "user", "content": "other", "message_id": "m1"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "message_id": "m1"},
        {"role": "user", "content": "hi", "name": "ann", "message_id": "m1"},
        {"role": "system", "content": "hi", "message_id": "m1"},
    ],
)
def test_an_id_with_another_body_stops_the_whole_batch(chat: Connection, second: dict[str, Any]) -> None:
    append(chat, {"role": "user", "content": "hi", "message_id": "m1"})
    with pytest.raises(psycopg.DatabaseError) as caught:
        append(chat, {"role": "assistant", "content": "before"}, second)
    assert caught.value.sqlstate == "PCX03"
    assert len(rows(chat)) == 1
    assert append(chat, {"role": "assistant", "content": "next"})[0][0] == 2


def test_metadata_and_time_are_no_part_of_the_body(chat: Connection) -> None:
    append(chat, {"role": "user", "content": "hi", "message_id": "m1", "metadata": {"n": 1}})
    again = {
        "role": "user",
        "content": "hi",
        "message_id": "m1",
        "created_at": "2026-01-01",
        "metadata": {"n": 2},
    }
    assert [r[0] for r in append(chat, again)] == [1]
    assert rows(chat, "metadata") == [({"n": 1},)]


def test_the_same_id_in_two_chats_is_two_messages(chat: Connection) -> None:
    chat.execute("select pycontext.create_chat('d')")
    append(chat, {"role": "user", "content": "hi", "message_id": "m1"})
    chat.execute("select pycontext.append_message('d', 'user', 'other', message_id => 'm1')")
    assert [r[2] for r in rows(chat)] == ["hi"]


def test_both_forms_of_one_message(chat: Connection) -> None:
    chat.execute("select pycontext.append_message('c', 'user', 'text')")
    chat.execute(
        """select pycontext.append_message('c', 'user', '[{"type": "text", "text": "parts"}]'::jsonb)"""
    )
    chat.execute("""select pycontext.append_message('c', 'assistant', tool_calls => '[{"id": "A",
        "type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": [2]}}}]')""")
    chat.execute("select pycontext.append_message('c', 'tool', 'done', tool_call_id => 'A', name => 'f')")
    found = rows(chat, "content, tool_calls, tool_call_id, name")
    assert found[0][0] == "text"
    assert found[1][0] == [{"type": "text", "text": "parts"}]
    assert found[2][0] is None
    assert json.loads(found[2][1][0]["function"]["arguments"]) == {"a": [2], "b": 1}
    assert found[3][2:] == ("A", "f")


def test_no_messages_are_no_change(chat: Connection) -> None:
    before = chat.execute("select last_seq, act_no from pycontext.chat where chat_id = 'c'").fetchone()
    assert append(chat) == []
    assert (
        chat.execute("select last_seq, act_no from pycontext.chat where chat_id = 'c'").fetchone() == before
    )


def test_a_given_count_is_taken_and_an_absurd_one_is_not(chat: Connection) -> None:
    text = "Where is my order QX-4471?"
    exact = 4 + count(text)
    stored = append(
        chat,
        {"role": "user", "content": text, "tokens": {"encoding": "o200k_base", "count": exact}},
        {"role": "user", "content": text, "tokens": {"encoding": "o200k_base", "count": 0}},
        {"role": "user", "content": text, "tokens": {"encoding": "cl100k_base", "count": exact}},
        {"role": "user", "content": text},
    )
    assert stored[0][2:] == (exact, "o200k_base")
    for row in stored[1:]:
        assert row[3] is None
        assert row[2] >= exact


def test_seqs_of_two_sessions_are_the_order_of_their_commits(chat: Connection, dsn: str) -> None:
    """A second append waits for the first one's transaction: no reader passes a row that commits later."""
    started, done = threading.Event(), threading.Event()

    def second() -> None:
        with psycopg.connect(dsn, autocommit=True) as other:
            started.set()
            other.execute("select pycontext.append_message('c', 'user', 'second')")
            done.set()

    with psycopg.connect(dsn) as first:
        first.execute("select pycontext.append_message('c', 'user', 'first')")
        thread = threading.Thread(target=second)
        thread.start()
        assert started.wait(10)
        assert not done.wait(0.3)
        assert rows(chat) == []
        first.commit()
    thread.join(20)
    assert [(seq, content) for seq, _, content in rows(chat)] == [(1, "first"), (2, "second")]


def test_a_rollback_gives_the_seq_back(chat: Connection, dsn: str) -> None:
    with psycopg.connect(dsn) as other:
        other.execute("select pycontext.append_message('c', 'user', 'gone')")
        other.rollback()
    assert append(chat, {"role": "user", "content": "kept"})[0][0] == 1


def test_many_sessions_at_once_lose_and_double_nothing(chat: Connection, dsn: str) -> None:
    barrier = threading.Barrier(6)

    def work(number: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as other:
            barrier.wait(20)
            for n in range(10):
                other.execute(
                    "select pycontext.append_message('c', 'user', %s, message_id => %s)",
                    (f"{number}/{n}", f"{number}-{n}"),
                )

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = chat.execute("select seq, content from pycontext.thread('c', max_rows => 100)").fetchall()
    assert [seq for seq, _ in found] == list(range(1, 61))
    assert {content for _, content in found} == {f"{a}/{b}" for a in range(6) for b in range(10)}
    totals = chat.execute(
        "select running_total - sum(frozen_tokens) over (order by seq)"
        " from pycontext.message where chat_id = 'c'"
    ).fetchall()
    assert {difference for (difference,) in totals} == {0}


@pytest.mark.parametrize("depth", [1_000, 10_000, 100_000])
def test_arguments_nested_deeper_than_the_stack_are_stored_as_they_came(chat: Connection, depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    append(chat, {"role": "user", "content": "go"})
    append(chat, {"role": "assistant", "tool_calls": [call]})
    append(chat, {"role": "tool", "tool_call_id": "c", "content": arguments})
    assert append(chat, {"role": "user", "content": "and then?"})
    stored = chat.execute(
        "select tool_calls #>> '{0,function,arguments}' from pycontext.thread('c') where seq = 2"
    )
    assert stored.fetchone() == (arguments,)
    row = chat.execute("select sum(tokens) <= 300 from pycontext.working_window('c', 300)").fetchone()
    assert row == (True,)
    for form in ("openai_messages", "anthropic_messages", "responses_input"):  # as a client reads them
        read = chat.execute(f"select pycontext.{form}('c', 1000000)").fetchone()
        assert read is not None
        assert json.dumps(arguments)[1:-1] in json.dumps(read[0])
    deep = {
        "role": "user",
        "content": [{"type": "text", "text": "x", "more": json.loads("[" * 300 + "]" * 300)}],
    }
    with pytest.raises(psycopg.Error, match="nested too deeply") as error:
        append(chat, deep)
    assert error.value.sqlstate == "PCX02"


def test_many_calls_of_one_row_cost_by_their_number(db: Connection) -> None:
    db.execute("select create_chat('c')")
    made = [
        {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(5000)
    ]
    # three seconds and more where the open calls are written anew for each
    db.execute("set statement_timeout = '2s'")
    db.execute("select append_message('c', 'assistant', null::text, tool_calls => %s)", (json.dumps(made),))
    row = db.execute("select count(*) from chat c, jsonb_object_keys(c.open_calls)").fetchone()
    assert row == (5000,)
