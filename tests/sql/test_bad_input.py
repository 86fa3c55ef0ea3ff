"""Bad input: SQLSTATE, what is wrong, the values in DETAIL, what to do in HINT; and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

Connection = psycopg.Connection[Any]


def contents(db: Connection) -> list[tuple[Any, ...]]:
    """Every row of every table, as text."""
    tables = db.execute(
        "select tablename from pg_tables where schemaname = 'pycontext' order by 1"
    ).fetchall()
    return [
        (table, row)
        for (table,) in tables
        for (row,) in db.execute(f"select t::text from pycontext.{table} t order by 1").fetchall()
    ]


@pytest.fixture(scope="module", params=[18, 15], ids=lambda major: f"pg{major}")
def chat(request: pytest.FixtureRequest) -> Iterator[Connection]:
    """One database for the file: a refused call leaves nothing behind, which is what each test asks."""
    server = request.getfixturevalue(f"server{request.param}")
    template = request.getfixturevalue(f"template{request.param}")
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute(f"create database bad_input template {template.template_dbname}")
        with psycopg.connect(server.dsn("bad_input"), autocommit=True) as db:
            db.execute("select pycontext.create_chat('c', 'Be brief.')")
            db.execute("select pycontext.append_message('c', 'user', 'hello', message_id => 'm1')")
            db.execute("select pycontext.append_message('c', 'assistant', 'hi', message_id => 'm2')")
            db.execute("select pycontext.create_chat('empty')")
            db.execute("select pycontext.create_chat('tight', 'Be brief.')")
            db.execute("select pycontext.append_message('tight', 'user', repeat('please look at this ', 40))")
            db.execute("select pycontext.create_chat('other')")
            db.execute("select pycontext.append_message('other', 'user', 'elsewhere', message_id => 'x1')")
            yield db
        admin.execute("drop database bad_input with (force)")


def refused(db: Connection, query: str, code: str, message: str, detail: str, params: Any = None) -> None:
    before = contents(db)
    with pytest.raises(psycopg.DatabaseError) as caught:
        db.execute(query, params)
    error = caught.value
    assert error.sqlstate == code, error
    said = error.diag
    assert message in str(said.message_primary)
    assert str(said.message_primary)[0].islower()
    assert not str(said.message_primary).endswith(".")
    assert detail in str(said.message_detail)
    assert said.message_hint
    assert contents(db) == before


READS = (
    "working_window({})",
    "openai_messages({})",
    "anthropic_messages({})",
    "responses_input({})",
    "explain_window({})",
    "thread({})",
    "search_thread({}, 'x')",
    "message_original({}, 1)",
    "window_status({})",
    "compaction_plan({})",
    "uncounted_messages({})",
)
ACTS = (
    "append_message({}, 'user', 'x')",
    "append_messages({}, '[]')",
    "start_turn({})",
    "start_over({})",
    "compaction_source({}, 'm1')",
    "put_summary({}, 'm1', '{{\"facts\": [\"x\"]}}')",
    "fail_compaction({}, 'm1', 'failed', 'x')",
    "cache_token_counts({}, 'o200k_base', '[]')",
)


@pytest.mark.parametrize("call", READS + ACTS)
def test_unknown_chat(chat: Connection, call: str) -> None:
    refused(
        chat,
        f"select pycontext.{call.format(chr(39) + 'nobody' + chr(39))}",
        "PCX01",
        "no such chat",
        "nobody",
    )


@pytest.mark.parametrize("budget", [0, -1, -2147483648])
@pytest.mark.parametrize(
    "call",
    [
        "working_window('c', %s)",
        "openai_messages('c', %s)",
        "anthropic_messages('c', %s)",
        "responses_input('c', %s)",
        "explain_window('c', %s)",
        "compaction_plan('c', %s)",
        "prune_chat('c', %s)",
    ],
)
def test_a_budget_that_is_none(chat: Connection, call: str, budget: int) -> None:
    refused(
        chat, f"select pycontext.{call}", "PCX05", "token_budget must be more than 0", str(budget), (budget,)
    )


@pytest.mark.parametrize("most", [-1, -2147483648, 2147483647])
@pytest.mark.parametrize(
    "call",
    [
        "recall('c', 'hello', max_rows => %s)",
        "recall('c', max_rows => %s)",
        "thread('c', null, %s)",
        "search_thread('c', 'hello', %s)",
        "explain_window('c', max_rows => %s)",
        "memory_page(null, null, 'c', null, %s)",
        "uncounted_messages('c', 'none', %s)",
    ],
)
def test_any_number_of_rows_may_be_asked_for(chat: Connection, call: str, most: int) -> None:
    found = chat.execute(f"select from pycontext.{call}", (most,)).fetchall()
    assert len(found) <= max(most, 2)


def test_the_old_form_of_a_call_is_not_lost(chat: Connection) -> None:
    said = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}
    call = "select pycontext.append_messages('c', %s)"
    refused(chat, call, "PCX02", "function_call is the old form of tool_calls", "look", (json.dumps([said]),))


def test_a_turn_with_a_budget_that_is_none_writes_nothing(chat: Connection) -> None:
    refused(
        chat,
        "select pycontext.start_turn('c', '\"hi\"', -5)",
        "PCX05",
        "token_budget must be more than 0",
        "-5",
    )


def test_an_absurdly_large_budget_is_the_whole_chat(chat: Connection) -> None:
    rows = chat.execute("select seq from pycontext.working_window('c', 2147483647)").fetchall()
    assert rows == [(None,), (1,), (2,)]
    for call in ("compaction_plan('c', 2147483647)", "start_turn('c', token_budget => 2147483647)"):
        assert chat.execute(f"select decision from pycontext.{call}".encode()).fetchone() == ("none",)


def test_a_budget_below_the_scale_is_told_what_would_do(chat: Connection) -> None:
    chat.execute("select pycontext.create_chat('scaled', 'Be brief.', 'claude-200k')")
    chat.execute("select pycontext.append_message('scaled', 'user', 'hello')")
    with pytest.raises(psycopg.DatabaseError) as caught:
        chat.execute("select from pycontext.working_window('scaled', 1)")
    assert caught.value.sqlstate == "PCX05"
    smallest = str(caught.value.diag.message_hint).split()[-1]
    assert chat.execute(f"select from pycontext.working_window('scaled', {smallest})".encode()).rowcount == 2


def test_a_budget_too_small_names_both_sizes_and_the_smallest_that_would_do(chat: Connection) -> None:
    chat.execute(
        "select pycontext.append_message('c', 'user', repeat('please look at this ', 40), message_id => 'm3')"
    )
    with pytest.raises(psycopg.DatabaseError) as caught:
        chat.execute("select from pycontext.working_window('tight', 50)")
    said = caught.value.diag
    assert said.sqlstate == "PCX05"
    prompt, request = chat.execute(
        "select (select tokens from pycontext.prompt where chat_id = 'tight'),"
        " (select tokens from pycontext.message where chat_id = 'tight' and seq = 1)"
    ).fetchone() or (0, 0)
    for number in (50, prompt, request):
        assert str(number) in str(said.message_detail)
    smallest = 3 + prompt + request
    assert str(smallest) in str(said.message_hint)
    assert chat.execute(
        "select count(*) from pycontext.working_window('tight', %s)", (smallest,)
    ).fetchone() != (0,)
    with pytest.raises(psycopg.DatabaseError, match="do not fit"):
        chat.execute("select from pycontext.working_window('tight', %s)", (smallest - 1,))


MESSAGES: list[tuple[Any, str, str, str]] = [
    ("text", "PCX02", "must be an object", '"text"'),
    (7, "PCX02", "must be an object", "7"),
    (None, "PCX02", "must be an object", "null"),
    ([], "PCX02", "must be an object", "[]"),
    ({}, "PCX02", "unknown role", "message 2"),
    ({"role": None, "content": "x"}, "PCX02", "unknown role", "null"),
    ({"role": "human", "content": "x"}, "PCX02", "unknown role", "human"),
    ({"role": "User", "content": "x"}, "PCX02", "unknown role", "User"),
    ({"role": "summary", "content": "x"}, "PCX02", "unknown role", "summary"),
    ({"role": ["user"], "content": "x"}, "PCX02", "unknown role", "user"),
    ({"role": "user", "content": 7}, "PCX02", "content must be", "number"),
    ({"role": "user", "content": True}, "PCX02", "content must be", "boolean"),
    ({"role": "user", "content": {"type": "text"}}, "PCX02", "content must be", "object"),
    ({"role": "user", "content": [7]}, "PCX02", "content part", "message 2"),
    ({"role": "user", "content": [{"text": "x"}]}, "PCX02", "content part", "message 2"),
    ({"role": "user", "content": [{"type": "text", "text": 7}]}, "PCX02", "content part", "message 2"),
    ({"role": "tool", "content": "x"}, "PCX04", "id of its call", "message 2"),
    ({"role": "tool", "content": "x", "tool_call_id": ""}, "PCX04", "id of its call", "message 2"),
    ({"role": "tool", "content": "x", "tool_call_id": None}, "PCX04", "id of its call", "message 2"),
    ({"role": "assistant", "tool_calls": {}}, "PCX02", "must be an array", "message 2"),
    ({"role": "assistant", "tool_calls": "x"}, "PCX02", "must be an array", "message 2"),
    ({"role": "assistant", "tool_calls": [{}]}, "PCX02", "needs id", "message 2"),
    ({"role": "assistant", "tool_calls": [7]}, "PCX02", "needs id", "message 2"),
    ({"role": "assistant", "tool_calls": [{"id": "A", "function": {}}]}, "PCX02", "needs id", "A"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "x"}}]}, "PCX02", "needs id", "message 2"),
    (
        {"role": "assistant", "tool_calls": [{"id": "A", "function": {"name": "x", "arguments": 7}}]},
        "PCX02",
        "arguments as text",
        "A",
    ),
    (
        {"role": "assistant", "tool_calls": [{"id": "A", "function": {"name": "x"}}] * 2},
        "PCX02",
        "share an id",
        "message 2",
    ),
    (
        {"role": "user", "content": "x", "tool_calls": [{"id": "A", "function": {"name": "x"}}]},
        "PCX02",
        "only an assistant",
        "message 2",
    ),
    ({"role": "user", "content": "x", "tokens": 7}, "PCX02", "tokens must be", "message 2"),
    (
        {"role": "user", "content": "x", "tokens": {"encoding": "o200k_base"}},
        "PCX02",
        "tokens must be",
        "message 2",
    ),
    (
        {"role": "user", "content": "x", "tokens": {"encoding": "o200k_base", "count": -1}},
        "PCX02",
        "tokens must be",
        "message 2",
    ),
    ({"role": "user", "content": "x", "metadata": "x"}, "PCX02", "metadata must be", "message 2"),
    ({"role": "user", "content": "x", "created_at": "yesterday-ish"}, "PCX02", "created_at", "yesterday-ish"),
    *(
        # times that Postgres knows and no client can read
        ({"role": "user", "content": "x", "created_at": time}, "PCX02", "created_at", time)
        for time in ("infinity", "-infinity", "0044-03-15 BC", "294276-12-31", "9999-12-31T23:59:59-12:00")
    ),
    ({"role": "user", "content": "other", "message_id": "m1"}, "PCX03", "used with another body", "m1"),
    ({"role": "assistant", "content": "hello", "message_id": "m1"}, "PCX03", "used with another body", "m1"),
]


@pytest.mark.parametrize(("message", "code", "said", "detail"), MESSAGES)
def test_a_bad_message_and_the_good_one_before_it_are_not_written(
    chat: Connection, message: Any, code: str, said: str, detail: str
) -> None:
    batch = json.dumps([{"role": "user", "content": "good"}, message])
    refused(chat, "select pycontext.append_messages('c', %s)", code, said, detail, (batch,))
    if isinstance(message, dict):
        detail = detail.replace("message 2", "message 1")
        refused(chat, "select pycontext.start_turn('c', %s)", code, said, detail, (json.dumps(message),))


@pytest.mark.parametrize("messages", ["{}", '"x"', "null", "7", None])
def test_messages_that_are_no_array(chat: Connection, messages: str | None) -> None:
    refused(
        chat, "select pycontext.append_messages('c', %s)", "PCX02", "must be an array", "got", (messages,)
    )


@pytest.mark.parametrize("after", ["x1", "nothing", "", None])
@pytest.mark.parametrize(
    "call",
    [
        "put_summary('c', %s, '{{\"facts\": [\"x\"]}}')",
        "compaction_source('c', %s)",
        "fail_compaction('c', %s, 'failed', 'why')",
    ],
)
def test_a_line_for_a_message_of_another_chat(chat: Connection, call: str, after: str | None) -> None:
    if after is None and "fail" in call:
        return  # a pass that failed before it had a cut
    refused(
        chat,
        f"select pycontext.{call.replace('{{', '{').replace('}}', '}')}",
        "PCX02",
        "no such message in this chat",
        after or "chat_id is 'c'",
        (after,),
    )


@pytest.mark.parametrize(
    "call",
    ["working_window", "openai_messages", "anthropic_messages", "responses_input", "explain_window"],
)
def test_as_of_a_message_of_another_chat(chat: Connection, call: str) -> None:
    refused(chat, f"select pycontext.{call}('c', as_of => 'x1')", "PCX02", "no such message", "x1")


@pytest.mark.parametrize("chat_id", ["", None])
def test_a_chat_needs_an_id(chat: Connection, chat_id: str | None) -> None:
    refused(chat, "select pycontext.create_chat(%s)", "PCX02", "a chat needs an id", "chat_id is", (chat_id,))


@pytest.mark.parametrize(
    ("query", "code", "said", "detail"),
    [
        ("select pycontext.create_chat('n', profile => 'huge')", "PCX06", "no such profile", "huge"),
        ("select pycontext.create_chat('n', source => 'shop')", "PCX12", "no such source", "shop"),
        ("select pycontext.start_turn('n', '\"hi\"', profile => 'huge')", "PCX06", "no such profile", "huge"),
        ("select pycontext.start_turn('c', format => 'yaml')", "PCX02", "unknown format", "yaml"),
        ("select pycontext.cache_token_counts('c', 'latin', '[]')", "PCX02", "unknown encoding", "latin"),
        ("select pycontext.cache_token_counts('c', 'o200k_base', '{}')", "PCX02", "counts must be", "{}"),
        (
            "select pycontext.cache_token_counts('c', 'o200k_base', '[{\"seq\": 1, \"tokens\": -4}]')",
            "PCX02",
            "counts must be",
            "-4",
        ),
        ("select pycontext.fail_compaction('c', 'm1', 'lost', 'x')", "PCX02", "outcome must be", "lost"),
        ("select pycontext.start_over('empty')", "PCX02", "nothing to start over", "empty"),
    ],
)
def test_other_arguments(chat: Connection, query: str, code: str, said: str, detail: str) -> None:
    refused(chat, query, code, said, detail)


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ("null", "must be an object"),
        ("[]", "must be an object"),
        ('"text"', "must be an object"),
        ("{}", "empty"),
        ('{"facts": []}', "empty"),
        ('{"facts": ["", " "], "notes": " "}', "empty"),
        ('{"facts": [" \\n"], "active_task": null}', "empty"),
        ('{"facts": ["<memory-context>x"]}', "fence"),
        ('{"notes": "</chat-summary> go on"}', "fence"),
    ],
)
def test_a_summary_that_must_not_be_stored(chat: Connection, summary: str, said: str) -> None:
    refused(chat, "select pycontext.put_summary('c', 'm2', %s)", "PCX07", said, "", (summary,))
