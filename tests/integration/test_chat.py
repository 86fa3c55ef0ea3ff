"""The Database: connecting, appending, reading, and whose transaction it is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import psycopg
import psycopg_pool
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage

import pycontext

pytestmark = pytest.mark.runners("sync", "async", "pooled")

Fill = Callable[..., list[pycontext.Message]]
Bring = Callable[..., AbstractContextManager[tuple[Any, Any]]]
Connection = psycopg.Connection[Any]


def call(name: str, arguments: Any, call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_no_dsn_is_an_error_that_names_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYCONTEXT_DSN", raising=False)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    with pytest.raises(pycontext.NotConfigured) as raised:
        pycontext.connect()
    for name in ("PYCONTEXT_DSN", "DATABASE_URL", "embedded()"):
        assert name in str(raised.value)


def test_the_environment_names_the_database_own_variable_first(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", dsn)
    with pycontext.connect() as memory:
        assert memory.create_chat("a") == "a"
    monkeypatch.setenv("PYCONTEXT_DSN", dsn + " application_name=own")
    with pycontext.connect() as memory:
        assert memory.status("a").chat_id == "a"
        monkeypatch.setenv("PYCONTEXT_DSN", "host=/nowhere")
        with pytest.raises(psycopg.OperationalError):
            pycontext.connect()


EMBEDDED = """
import sys
import pycontext
for said in ("hello", "again"):
    with pycontext.embedded(sys.argv[1]) as memory, memory.turn("a", said) as turn:
        print([row["content"] for row in turn.messages])
"""


def test_embedded_needs_no_server() -> None:
    # In a process of its own: the server is stopped when that exits.
    folder = tempfile.mkdtemp(prefix="pycontext-embedded-", dir="/tmp")
    try:
        command = [sys.executable, "-c", EMBEDDED, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.stdout.splitlines() == ["['hello']", "['hello', 'again']"]


def test_a_database_without_the_schema_says_what_to_run(empty_dsn: str) -> None:
    with pycontext.connect(empty_dsn) as memory:
        for act in (lambda: memory.create_chat("a"), lambda: memory.turn("a", "hi").__enter__()):
            with pytest.raises(pycontext.SchemaMissing, match="pycontext install"):
                act()


def test_a_closed_database_says_so(dsn: str) -> None:
    memory = pycontext.connect(dsn)
    memory.close()
    with pytest.raises(RuntimeError, match="closed"):
        memory.create_chat("a")


@pytest.mark.parametrize("chat_id", ["conv_9", 42, uuid.UUID(int=7)])
def test_ids_are_text_int_or_uuid(memory: pycontext.Database, chat_id: Any) -> None:
    memory.create_chat(chat_id)
    memory.append(chat_id, "hello")
    assert [row.content for row in memory.window(chat_id)] == ["hello"]
    assert memory.status(str(chat_id)).chat_id == str(chat_id)


@pytest.mark.parametrize("chat_id", [None, 1.5, True, b"x"])
def test_other_ids_are_a_type_error(memory: pycontext.Database, chat_id: Any) -> None:
    with pytest.raises(TypeError, match="chat_id must be str, int or UUID"):
        memory.create_chat(chat_id)


@pytest.mark.parametrize("chat_id", ["", "a\x00b", "\ud83d"])
def test_ids_that_postgres_would_change_are_refused(memory: pycontext.Database, chat_id: str) -> None:
    with pytest.raises(ValueError, match="chat_id"):
        memory.create_chat(chat_id)


def test_an_unknown_chat_is_a_typed_error_with_a_hint(memory: pycontext.Database) -> None:
    for read in (memory.window, memory.status, memory.plan, memory.thread, memory.messages, memory.compact):
        with pytest.raises(pycontext.NoSuchChat) as raised:
            read("nowhere")
        assert raised.value.sqlstate == "PCX01"
        assert "nowhere" in (raised.value.detail or "")
        assert raised.value.hint


def test_append_takes_text_dicts_and_openai_objects(memory: pycontext.Database) -> None:
    memory.create_chat("a")
    reply = ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": None, "tool_calls": [call("look", '{"id":  7}')]}
    )
    rows = memory.append(
        "a", ["hello", reply, {"role": "tool", "tool_call_id": "call_1", "content": "seven"}]
    )
    assert [(row.seq, row.role) for row in rows] == [(1, "user"), (2, "assistant"), (3, "tool")]
    assert memory.messages("a") == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call("look", '{"id":  7}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "seven"},
    ]


def test_append_says_what_it_accepts(memory: pycontext.Database) -> None:
    memory.create_chat("a")
    for wrong in (3, None, {"content": "x"}, [object()], {"choices": [{"delta": {}}]}):
        with pytest.raises(TypeError, match=r"text.*dict.*ChatCompletionMessage"):
            memory.append("a", wrong)
    assert memory.thread("a") == []


def test_a_list_is_stored_whole_or_not_at_all(memory: pycontext.Database) -> None:
    memory.create_chat("a")
    with pytest.raises(pycontext.BadMessage) as raised:
        memory.append("a", ["one", {"role": "nobody", "content": "two"}])
    assert raised.value.hint
    with pytest.raises(pycontext.ToolResultWithoutId):
        memory.append("a", ["one", {"role": "tool", "content": "two"}])
    assert memory.thread("a") == []


def test_a_message_id_is_stored_once_and_never_with_another_body(memory: pycontext.Database) -> None:
    memory.create_chat("a")
    first = memory.append("a", {"role": "user", "content": "one", "message_id": "m1"})
    again = memory.append("a", {"role": "user", "content": "one", "message_id": "m1"})
    assert first == again
    with pytest.raises(pycontext.MessageIdReused):
        memory.append("a", {"role": "user", "content": "two", "message_id": "m1"})
    assert [row.content for row in memory.thread("a")] == ["one"]


def test_arguments_given_as_an_object_keep_their_key_order(memory: pycontext.Database) -> None:
    memory.create_chat("a")
    exact = '{"path":1,"b":2,"b":9, "n":1.0e3}'
    memory.append(
        "a",
        [
            "go",
            {"role": "assistant", "tool_calls": [call("f", {"path": 1, "b": "ё", "content": 3}, "c1")]},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
            {"role": "assistant", "tool_calls": [call("f", exact, "c2"), call("f", None, "c3")]},
        ],
    )
    calls = [one for row in memory.thread("a") for one in row.tool_calls or ()]
    assert [one["function"]["arguments"] for one in calls] == ['{"path":1,"b":"ё","content":3}', exact, "{}"]


def test_what_postgres_cannot_store_is_replaced_at_every_depth(memory: pycontext.Database) -> None:
    memory.create_chat("a", system_prompt="sys\x00tem", metadata={"k\x00": ["\ud83d"]})
    memory.append(
        "a",
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "abc\x00def"}],
                "metadata": {"a\x00": "\udc97"},
            },
            {"role": "assistant", "tool_calls": [call("f\x00", {"k\x00": ["x\ud83d tail"]})]},
            {"role": "tool", "tool_call_id": "call_1", "content": "ok \ud83d tail"},
        ],
    )
    rows = memory.thread("a")
    assert rows[0].content == [{"type": "text", "text": "abc\ufffddef"}]
    assert rows[0].metadata == {"a\ufffd": "\ufffd"}
    assert rows[1].tool_calls is not None
    assert rows[1].tool_calls[0]["function"] == {
        "name": "f\ufffd",
        "arguments": '{"k\ufffd":["x\ufffd tail"]}',
    }
    assert rows[2].content == "ok \ufffd tail"
    assert memory.messages("a")[0] == {"role": "system", "content": "sys\ufffdtem"}


def test_keys_of_the_callers_own_stay_in_metadata(memory: pycontext.Database) -> None:
    memory.create_chat("a")
    memory.append("a", {"role": "user", "content": "hi", "lang": "en", "metadata": {"ip": "::1"}, "x": None})
    assert memory.thread("a")[0].metadata == {"lang": "en", "ip": "::1"}


def test_a_refusal_is_kept_as_its_part(memory: pycontext.Database) -> None:
    memory.create_chat("a")
    memory.append("a", ["do it", ChatCompletionMessage(role="assistant", refusal="I won't.")])
    assert memory.thread("a")[1].content == [{"type": "refusal", "refusal": "I won't."}]


def test_rows_are_counted_as_they_are_appended(memory: pycontext.Database) -> None:
    memory.create_chat("a")
    memory.append("a", ["hello there", {"role": "assistant", "content": "don't <|endoftext|>"}])
    window = memory.window("a")
    assert not any(row.is_estimate for row in window)
    assert window[0].tokens == 4 + 2
    assert memory.status("a").uncounted == 0


def test_rows_of_other_clients_are_estimated_until_counted(
    memory: pycontext.Database, db: Connection
) -> None:
    memory.create_chat("a")
    db.execute("select pycontext.append_message('a', 'user', 'hello there')")
    db.execute("select pycontext.append_message('a', 'user', 'a fence: <chat-summary>')")
    assert [row.is_estimate for row in memory.window("a")] == [True, True]
    assert memory.count_tokens("a") == 2
    assert [row.is_estimate for row in memory.window("a")] == [False, False]
    assert memory.window("a")[0].tokens == 4 + 2
    assert memory.count_tokens("a") == 0


def test_a_chat_of_another_encoding_is_counted_in_its_own(memory: pycontext.Database, db: Connection) -> None:
    db.execute("insert into pycontext.profile (profile, encoding) values ('old', 'cl100k_base')")
    memory.create_chat("a", profile="old")
    text = "Привет, как дела сегодня?"
    memory.append("a", text)
    memory.append("a", text)
    tokens = [row.tokens for row in memory.window("a")]
    assert tokens == [4 + pycontext.tokens.count(text, "cl100k_base")] * 2
    assert memory.status("a").uncounted == 0


def test_thread_pages_backwards(memory: pycontext.Database) -> None:
    memory.create_chat("a")
    memory.append("a", [f"m{n}" for n in range(1, 8)])
    assert [row.content for row in memory.thread("a", max_rows=3)] == ["m5", "m6", "m7"]
    assert [row.content for row in memory.thread("a", before_seq=5, max_rows=3)] == ["m2", "m3", "m4"]


def test_formats(memory: pycontext.Database) -> None:
    memory.create_chat("a", system_prompt="Be brief.")
    memory.append("a", "hello")
    assert memory.messages("a") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]
    anthropic = memory.messages("a", format="anthropic")
    assert set(anthropic) == {"system", "messages"}
    assert [row["role"] for row in anthropic["messages"]] == ["user"]
    with pytest.raises(ValueError, match="openai, anthropic"):
        memory.messages("a", format="gemini")  # type: ignore[call-overload]


def test_start_over_hides_what_was_before(memory: pycontext.Database) -> None:
    memory.create_chat("a", system_prompt="Be brief.")
    memory.append("a", ["my secret plan", {"role": "assistant", "content": "noted"}])
    line = memory.start_over("a", note="new\x00 topic")
    memory.append("a", "hello")
    assert line.kind == "summary"
    read = json.dumps(memory.messages("a"), ensure_ascii=False)
    assert "secret plan" not in read
    assert "new\ufffd topic" in read
    assert [row.kind for row in memory.thread("a")] == ["message", "message", "summary", "message"]


def test_a_budget_too_small_is_a_typed_error(memory: pycontext.Database) -> None:
    memory.create_chat("a")
    memory.append("a", "word " * 3000)
    with pytest.raises(pycontext.BudgetTooSmall) as raised:
        memory.window("a", token_budget=1000)
    assert raised.value.sqlstate == "PCX05"


@pytest.mark.parametrize("number", [2**31, 10**30, -(2**40)])
def test_a_number_beyond_the_databases_is_a_typed_error(memory: pycontext.Database, number: int) -> None:
    memory.create_chat("a")
    memory.append("a", "oolong")
    memory.remember("a", "Anna drinks oolong.")
    for read in (memory.window, memory.messages, memory.plan, memory.compact, memory.explain):
        with pytest.raises(pycontext.BudgetTooSmall, match="token_budget is out of range") as raised:
            read("a", token_budget=number)
        assert str(number) in (raised.value.detail or "")
        assert raised.value.hint
    with pytest.raises(pycontext.BudgetTooSmall), memory.turn("a", "more", token_budget=number):
        pass
    for read in (memory.recall, memory.thread):
        with pytest.raises(pycontext.PycontextError, match="max_rows is out of range"):
            read("a", max_rows=number)
        assert read("a", max_rows=-1) == []
        assert len(read("a", max_rows=2**31 - 1)) == 1


@pytest.mark.parametrize("wrong", [5, b"tea", ["tea"]])
def test_what_is_no_text_is_named(memory: pycontext.Database, wrong: Any) -> None:
    memory.create_chat("a")
    for use, name in ((memory.recall, "query"), (memory.remember, "content"), (memory.start_over, "note")):
        with pytest.raises(TypeError, match=f"{name} must be str, not {type(wrong).__name__}"):
            use("a", wrong)
    with pytest.raises(TypeError, match="max_rows must be int, not str"):
        memory.recall("a", max_rows="5")  # type: ignore[arg-type]


# the caller's own connection


def test_in_the_callers_transaction_nothing_is_ended(bring: Bring, db: Connection) -> None:
    with bring() as (conn, memory):
        memory.create_chat("a")
        memory.append("a", "one")
        assert db.execute("select count(*) from pycontext.chat").fetchone() == (0,)
        conn.rollback()
        with pytest.raises(pycontext.NoSuchChat):
            memory.status("a")
        conn.rollback()
        with memory.turn("a", "one", message_id="m1") as turn:
            turn.add({"role": "assistant", "content": "two"})
        assert db.execute("select count(*) from pycontext.message").fetchone() == (0,)
        conn.commit()
        assert db.execute("select count(*) from pycontext.message").fetchone() == (2,)
        assert memory.status("a").messages == 2
        memory.close()
        assert not conn.closed
        assert not conn.autocommit


def test_the_callers_autocommit_connection_is_durable_at_once(bring: Bring, db: Connection) -> None:
    with bring(autocommit=True) as (conn, memory):
        memory.create_chat("a")
        memory.append("a", "one")
        assert db.execute("select last_seq from pycontext.chat").fetchone() == (1,)
        with conn.transaction(force_rollback=True):
            memory.append("a", "two")
        assert [row.content for row in memory.thread("a")] == ["one"]
        assert conn.autocommit


def test_an_error_in_the_callers_transaction_is_his_to_end(bring: Bring, db: Connection) -> None:
    with bring() as (conn, memory):
        memory.create_chat("a")
        with pytest.raises(pycontext.BadMessage):
            memory.append("a", {"role": "nobody", "content": "x"})
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            memory.append("a", "one")
        conn.rollback()
        memory.create_chat("a")
        with pytest.raises(pycontext.BadMessage), conn.transaction():
            memory.append("a", {"role": "nobody", "content": "x"})
        memory.append("a", "one")
        conn.commit()
        assert [row.content for row in memory.thread("a")] == ["one"]


def test_compact_raises_in_the_callers_transaction_and_works_after_it(
    bring: Bring, fill: Fill, watched: Any
) -> None:
    fill("a", 20)
    with bring() as (conn, memory):
        memory.append("a", "one more")
        with pytest.raises(pycontext.InTransaction, match="commit first") as raised:
            memory.compact("a")
        assert "'a'" in (raised.value.detail or "")
        assert watched.requests == []
        conn.commit()
        assert memory.compact("a").outcome == "summarized"
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert not conn.autocommit


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_turn_in_the_callers_transaction_calls_no_model(
    bring: Bring, fill: Fill, watched: Any, db: Connection, runner: str, autocommit: bool
) -> None:
    """Nor is a second connection used: it would wait for the caller's own lock."""
    others = (
        "select pid from pg_stat_activity"
        " where datname = current_database() and backend_type = 'client backend'"
    )
    fill("a", 25)
    with bring(autocommit=autocommit) as (conn, memory), conn.transaction():
        connections = set(db.execute(others).fetchall())
        with memory.turn("a", "and now?", compact="before") as turn:
            turn.add({"role": "assistant", "content": "well"})
        with memory.turn("a", "and now?") as turn:
            assert turn.decision == "summarize"
            turn.add({"role": "assistant", "content": "well"})
        if runner != "pooled":  # where connections are the pooler's
            # one that was closed just before may end meanwhile; none begins
            assert set(db.execute(others).fetchall()) <= connections
    assert watched.requests == []


def test_a_turn_outside_a_transaction_compacts_on_the_callers_connection(
    bring: Bring, fill: Fill, watched: Any
) -> None:
    fill("a", 25)
    with bring(autocommit=True) as (conn, memory):
        watched.meanwhile = lambda request: seen.append(conn.info.transaction_status)
        seen: list[Any] = []
        with memory.turn("a", "and now?") as turn:
            turn.add({"role": "assistant", "content": "well"})
        assert seen == [psycopg.pq.TransactionStatus.IDLE]
        assert memory.status("a").line_origin == "compaction"


SETTINGS: list[dict[str, Any]] = [
    {"row_factory": psycopg.rows.tuple_row},
    {"row_factory": psycopg.rows.dict_row, "prepare_threshold": 0},
    {"row_factory": psycopg.rows.scalar_row, "prepare_threshold": None},
    {"cursor_factory": (psycopg.ClientCursor, psycopg.AsyncClientCursor)},
    {"cursor_factory": (psycopg.RawCursor, psycopg.AsyncRawCursor)},
]


def test_how_the_callers_connection_is_set_does_not_matter(bring: Bring, runner: str) -> None:
    for case, settings in enumerate(SETTINGS):
        pick = {k: v[runner == "async"] if isinstance(v, tuple) else v for k, v in settings.items()}
        with bring(autocommit=case % 2 == 0, **pick) as (conn, memory):
            own = getattr(conn, "_subject", conn)
            psycopg.types.json.set_json_loads(lambda text: "mine", own)
            cursor = conn.cursor(binary="cursor_factory" not in pick, row_factory=psycopg.rows.tuple_row)
            cursor.execute("select n, 'null'::jsonb from generate_series(1, 3) n")
            for number in range(6):
                with memory.turn(case, f"hello {number}", compact="off") as turn:
                    turn.add({"role": "assistant", "content": [{"type": "text", "text": "hi"}]})
            assert memory.messages(case)[:2] == [
                {"role": "user", "content": "hello 0"},
                {"role": "assistant", "content": [{"type": "text", "text": "hi"}]},
            ]
            assert memory.status(case).messages == 12
            assert cursor.fetchall() == [(n, "mine") for n in (1, 2, 3)]
            for name, value in pick.items():
                assert getattr(own, name) == value


def test_what_is_given_is_one_thing_and_of_its_kind(dsn: str, loop: Any) -> None:
    pool = psycopg_pool.ConnectionPool(dsn, open=False)

    async def of_async() -> Any:
        async with (
            await psycopg.AsyncConnection.connect(dsn) as conn,
            psycopg_pool.AsyncConnectionPool(dsn, open=False) as async_pool,
        ):
            for wrong in ({"connection": conn}, {"pool": async_pool}):
                with pytest.raises(TypeError, match="must be a psycopg"):
                    pycontext.connect(**wrong)

    with psycopg.connect(dsn) as conn:
        for connect in (pycontext.connect, pycontext.aconnect):
            for two in ({"connection": conn}, {"pool": pool}):
                with pytest.raises(ValueError, match="not both"):
                    connect(dsn, **two)
            with pytest.raises(TypeError, match="psycopg"):
                connect(connection=dsn)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="connection=… or pool=…"):
                connect(conn)  # type: ignore[arg-type]
        for wrong in ({"connection": conn}, {"pool": pool}):
            with pytest.raises(TypeError, match=r"must be a psycopg\S*\.Async"):
                pycontext.aconnect(**wrong)  # type: ignore[arg-type]
    loop.run(of_async())


def test_no_session_state_is_left(direct_dsn: str, fill: Fill) -> None:
    """What a transaction pooler would lose or hand to somebody else: C46."""
    with psycopg.connect(direct_dsn, autocommit=True) as conn:
        state = """
            select (select jsonb_object_agg(name, setting) from pg_settings where source = 'session'),
                (select count(*) from pg_prepared_statements),
                (select count(*) from pg_locks where locktype = 'advisory'),
                (select count(*) from pg_listening_channels()),
                (select count(*) from pg_class where relpersistence = 't')
            """
        before = conn.execute(state).fetchone()
        memory = pycontext.connect(connection=conn)
        fill("a", 25)
        for number in range(8):
            with memory.turn("a", f"more {number}") as turn:
                turn.add({"role": "assistant", "content": "well"})
        memory.compact("a")
        assert conn.execute(state).fetchone() == before


def test_statements_may_go_to_another_server_connection_each(dsn: str, fill: Fill) -> None:
    """C46: two server connections, swapped at every statement as a transaction pooler may."""
    from pycontext.chat import Database
    from pycontext.connections import CallersLink

    fill("a", 25)
    with psycopg.connect(dsn, autocommit=True) as one, psycopg.connect(dsn, autocommit=True) as two:

        class Swapped(CallersLink):
            def execute(self, *args: Any, **options: Any) -> list[dict[str, Any]]:
                self._connection = two if self._connection is one else one
                return super().execute(*args, **options)

        memory = Database(Swapped(one))
        for number in range(8):
            with memory.turn("a", f"more {number}") as turn:
                turn.add({"role": "assistant", "content": "well"})
        assert memory.compact("a").outcome == "summarized"
        assert memory.thread("a")[-1].content == "well"


KILL = """
    select count(pg_terminate_backend(pid, 5000)) from pg_stat_activity
    where application_name = 'pycontext' and datname = current_database()
    """


def test_a_connection_that_died_idle_is_opened_anew(memory: pycontext.Database, db: Connection) -> None:
    memory.create_chat("a")
    memory.append("a", "one")
    assert db.execute(KILL).fetchone() != (0,)
    assert [row.content for row in memory.thread("a")] == ["one"]
    with memory.turn("a", "two", message_id="m2") as turn:
        db.execute(KILL)
        turn.add(ChatCompletionMessage(role="assistant", content="2"))
    db.execute(KILL)
    memory.append("a", "three")  # it has no id, but nothing had been sent yet
    assert [row.content for row in memory.thread("a")] == ["one", "two", "2", "three"]


@pytest.mark.parametrize("message_id", [None, "m1"])
def test_a_connection_that_dies_under_a_statement(
    memory: pycontext.Database, direct_dsn: str, db: Connection, message_id: str | None
) -> None:
    """Whether it was stored nobody knows: it is sent again where the message has an id."""
    memory.create_chat("a")
    waiting = (
        "select 1 from pg_stat_activity where wait_event_type = 'Lock' and application_name = 'pycontext'"
    )
    with psycopg.connect(direct_dsn) as holder, ThreadPoolExecutor() as pool:
        holder.execute("select from pycontext.chat where chat_id = 'a' for update")
        append = pool.submit(memory.append, "a", {"role": "user", "content": "x", "message_id": message_id})
        while db.execute(waiting).fetchone() is None:
            time.sleep(0.01)
        db.execute(KILL)
        holder.rollback()
        if message_id is None:
            with pytest.raises(psycopg.OperationalError):
                append.result()
        else:
            append.result()
    assert [row.message_id for row in memory.thread("a")] == ([message_id] if message_id else [])


def test_a_completion_of_one_choice_is_its_message(memory: pycontext.Database) -> None:
    memory.create_chat("a")
    message = {"role": "assistant", "content": "hi"}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    whole = {"id": "cmpl-1", "created": 1, "model": "m", "object": "chat.completion", "choices": [choice]}
    memory.append("a", ["hello", ChatCompletion.model_validate(whole)])
    assert memory.thread("a")[1].content == "hi"
    with pytest.raises(pycontext.errors.BadMessage, match="several choices"):
        memory.append("a", ChatCompletion.model_validate({**whole, "choices": [choice, choice]}))
