"""Chats in a product's own table: adopted by the command line, read like native ones, left as they were."""

# ruff: noqa: E501

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

import pycontext
from pycontext import cli, install
from pycontext.embedded import binaries
from pycontext.source import Adoption, BadAdoption, adopt, plan

pytestmark = pytest.mark.runners("sync", "pooled", long="pooled")

Connection = psycopg.Connection[Any]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def run(
    dsn: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    monkeypatch.setenv("PYCONTEXT_DSN", dsn)

    def run(*arguments: str) -> Result:
        from pycontext.cli import terminal

        terminal.out.cache_clear()
        terminal.err.cache_clear()
        monkeypatch.setattr(sys, "argv", ["pycontext", "adopt", *arguments])
        capfd.readouterr()
        code = cli.main()
        return Result(code, *capfd.readouterr())

    return run


@pytest.fixture
def shop(db: Connection) -> Connection:
    """Bigint ids, text bodies; 30 chats of 40 messages, the last hour's."""
    db.execute(
        """
        create schema app;
        create table app.message (
            id bigint generated always as identity primary key, conversation_id bigint not null, sender text not null,
            body text, deleted_at timestamptz, created_at timestamptz not null default now());
        insert into app.message (conversation_id, sender, body, created_at)
        select g % 30 + 1, case when g / 30 % 2 = 0 then 'customer' else 'bot' end,
            'Order QX-' || g || ' left hub B-' || g || ' on 3 March, please look where it is. ',
            now() - interval '1 hour' + g * interval '1 second'
        from generate_series(0, 1199) g;
        create index message_chat_ix on app.message (conversation_id, id);
        """
    )
    return db


SHOP = (
    "shop", "--table", "app.message", "--chat-id", "conversation_id", "--message-id", "id", "--order", "id", "--role",
    "sender", "--role-map", "customer=user,bot=assistant", "--content", "body", "--default",
)  # fmt: skip


def value(db: Connection, query: str, *arguments: Any) -> Any:
    row = db.execute(query, arguments).fetchone()
    assert row is not None
    return row[0]


def window(db: Connection, chat_id: str, budget: int | None = None) -> list[tuple[Any, ...]]:
    return db.execute(
        "select w.section, w.message_id, w.role, w.content, w.tokens from working_window(%s, %s) w order by w.ordinal",
        (chat_id, budget),
    ).fetchall()


def compact(db: Connection, chat_id: str, budget: int = 1200) -> str:
    """Place a line where the plan says; returns its id."""
    place, edit_no = db.execute(
        "select p.after_message_id, p.edit_no from compaction_plan(%s, %s) p", (chat_id, budget)
    ).fetchone() or (None, None)
    assert place is not None
    return str(
        value(
            db,
            "select message_id from put_summary(%s, %s, %s, edit_no => %s, token_budget => %s)",
            chat_id, place, json.dumps({"facts": ["Order QX-1"]}), edit_no, budget,
        )
    )  # fmt: skip


@pytest.mark.core
def test_bigint_ids_are_printed_first_then_run(run: Callable[..., Result], shop: Connection) -> None:
    dry = run(*SHOP)
    assert dry.code == 0, dry.err
    assert 'create or replace view "app"."message_pycontext"' in dry.out
    assert "pycontext.register_source('shop'" in dry.out
    assert "create index" not in dry.out
    assert "ok: a read of one chat uses an index" in dry.err
    assert value(shop, "select to_regclass('app.message_pycontext')") is None
    done = run(*SHOP, "--yes")
    assert done.code == 0, done.err
    rows = shop.execute("select seq, role, content from working_window(7)").fetchall()
    assert [r[1] for r in rows] == ["user", "assistant"] * 20
    assert value(shop, "select count(*) from message") == 0
    assert run(*SHOP, "--yes").code == 0  # twice is once
    shop.execute(
        f"begin; drop view app.message_pycontext; {dry.out.replace('begin;', '').replace('commit;', '')} rollback"
    )


def test_the_index_it_needs_is_made_and_blocks_no_writer(
    run: Callable[..., Result], shop: Connection
) -> None:
    shop.execute("drop index app.message_chat_ix")
    made = 'create index concurrently "message_pycontext_ix"'
    assert run(*SHOP).out.startswith(made)
    done = run(*SHOP, "--yes")
    assert done.code == 0
    assert done.err.startswith(made)  # said before it is waited for
    assert value(shop, "select to_regclass('app.message_pycontext_ix')") is not None
    assert "create index" not in run(*SHOP).out
    # one that broke off leaves an index that serves nobody
    shop.execute(
        "update pg_index set indisvalid = false where indexrelid = 'app.message_pycontext_ix'::regclass"
    )
    assert run(*SHOP).out.startswith('drop index concurrently "app"."message_pycontext_ix";\n\n' + made)
    assert "ok: a read of one chat uses an index" in run(*SHOP, "--yes").err


@pytest.mark.parametrize("is_default", [True, False])
def test_what_it_says_to_try_works(
    run: Callable[..., Result], shop: Connection, dsn: str, is_default: bool
) -> None:
    options = [option for option in SHOP if is_default or option != "--default"]
    shop.execute(
        "alter table app.message alter conversation_id type text using 'it''s chat ' || conversation_id"
    )
    said = run(*options, "--yes").out
    assert ("create_chat" in said) == (not is_default)
    statements = [line for line in said.splitlines() if line.startswith("  ")]
    assert "source => 'shop'" in statements[0] or is_default
    for statement in statements:
        rows = shop.execute(statement.encode()).fetchall()
    assert len(rows) == 40


def test_the_default_is_not_taken_from_another_source(run: Callable[..., Result], shop: Connection) -> None:
    assert run(*SHOP, "--yes").code == 0
    other = ("o'ther", *SHOP[1:], "--view", "other")
    taken = run(*other, "--yes")
    assert taken.code == 1
    assert "source shop is the default" in taken.err
    assert len(window(shop, "7")) == 40
    way_out = " ".join(taken.err.split()).split("or first: ")[1].split(" ok: ")[0]
    shop.execute(way_out.encode())
    assert run(*other, "--yes").code == 0
    assert value(shop, "select source from source where is_default") == "o'ther"
    warned: list[str] = []
    shop.add_notice_handler(lambda notice: warned.append(str(notice.message_primary)))
    shop.execute("select register_source('shop', 'app.message_pycontext', true)")
    assert warned == [
        "o'ther is no longer the default: chats of it without a row of their own are read from shop now"
    ]


def test_adopted_over_another_view_says_what_was_dropped(
    run: Callable[..., Result], shop: Connection
) -> None:
    assert run(*SHOP, "--yes").code == 0
    compact(shop, "7")
    assert "dropped" not in run(*SHOP, "--yes").err
    shop.execute("create table app.other as table app.message")
    shop.execute("update app.other set body = 'Of something else: ' || body where id < 300")
    shop.execute("alter table app.other add primary key (id)")
    done = run(*[option.replace("app.message", "app.other") for option in SHOP], "--yes")
    assert done.code == 0, done.err
    assert "warning: source shop reads otherwise now: 1 line and 0 facts made of rows" in " ".join(
        done.err.split()
    )
    assert [row[0] for row in window(shop, "7")].count("summary") == 0


def test_a_chat_that_is_not_there_is_told_by_where_it_would_be(shop: Connection) -> None:
    def hint(statement: str) -> str:
        with pytest.raises(psycopg.Error) as error:
            shop.execute(statement.encode())
        return f"{error.value.sqlstate} {error.value.diag.message_hint}"

    read = "select * from working_window('99')"
    assert "create it first: select pycontext.create_chat" in hint(read)
    adopt_shop(shop)
    for statement in (read, "select claim_compaction('99', 'me')", "select start_turn('99')"):
        assert hint(statement) == (
            "PCX01 app.message_pycontext has no row of it: insert its first message there"
        )
    assert hint("select append_message('99', 'user', 'hello')") == (
        "PCX09 insert the message there, then start_turn(chat_id) without a message; "
        "for a chat that is not in your table: create_chat first"
    )
    shop.execute("select create_chat('7', source => 'shop')")
    assert hint("select start_turn('7', '\"hello\"')") == (
        "PCX09 insert the message there, then start_turn(chat_id) without a message"
    )
    shop.execute("select register_source('shop', 'app.message_pycontext', false)")
    told = hint("select * from working_window('8')")
    assert told.startswith(
        "PCX01 if it is in app.message_pycontext: select pycontext.create_chat('8', source => 'shop')"
    )
    shop.execute(told.split(": ", 1)[1].split(";")[0].encode())
    assert len(window(shop, "8")) == 40


def test_a_whole_message_is_no_role(db: Connection) -> None:
    db.execute("select create_chat('c')")
    for statement in (
        'select append_message(\'c\', \'{"role": "user", "content": "hello"}\')',
        "select append_message('c', '[{\"role\": \"user\"}]', 'hello')",
    ):
        with pytest.raises(psycopg.Error) as error:
            db.execute(statement.encode())
        assert error.value.sqlstate == "PCX02"
        assert "append_messages takes [{" in str(error.value.diag.message_hint)


def test_an_order_that_needs_a_word_gets_it(run: Callable[..., Result], db: Connection) -> None:
    db.execute(
        """
        create table "Turn" (id uuid primary key default gen_random_uuid(), chat_id int, role text, content text, "createdAt" timestamp);
        insert into "Turn" (chat_id, role, content, "createdAt")
        select 1, (array['user', 'assistant'])[1 + g % 2], 'hello ' || g, '2026-01-01'::timestamp + g / 2 * interval '1 s'
        from generate_series(0, 9) g;
        insert into "Turn" (chat_id, role, content, "createdAt") values (1, 'user', 'and', '2026-01-02'), (1, 'user', 'more', '2026-01-02');
        create view said as select chat_id, row_number() over (order by "createdAt", role desc, id) as seq, id as message_id, role, content,
            "createdAt" as created_at from "Turn"
        """
    )
    three = run("chats", "--table", "Turn", "--order", "createdAt,role,id")
    assert three.code == 1
    assert "3 columns are no order: createdAt, role, id" in three.err
    assert "HINT: --order createdAt,id" in three.err
    alone = run("chats", "--table", "Turn", "--order", "createdAt")
    assert "6 times are shared" in alone.err
    told = " ".join(run("chats", "--table", "Turn", "--order", "createdAt,id", "--yes").err.split())
    assert (
        "6 times are shared by rows of one chat, 5 of them by different roles: there id alone says the order"
        in told
    )
    assert "note: createdAt has no time zone: it is taken as UTC" in told
    assert (
        "created_at has no time zone: it is read in the time zone of each session"
        in run("v", "--from-view", "said").err
    )


def test_roles_unknown_to_the_map_are_refused_with_a_way_out(
    run: Callable[..., Result], shop: Connection
) -> None:
    shop.execute(
        "insert into app.message (conversation_id, sender, body) values (1, 'notice', 'joined'), (2, 'x''y', '')"
    )
    done = run(*SHOP, "--yes")
    assert done.code == 1
    assert "'notice' (1 rows)" in done.err
    told = " ".join(done.err.split())
    assert "'-' to leave its rows out; or say it in a view of yours (--from-view)" in told
    assert "with *=user for all others" in told
    assert value(shop, "select count(*) from source") == 0
    mapped = [*SHOP]
    mapped[mapped.index("--role-map") + 1] += ",notice=-,x'y=user"
    assert run(*mapped, "--yes").code == 0
    assert value(shop, "select count(*) from working_window(1)") == 40


def test_a_role_map_may_have_a_word_for_all_others(run: Callable[..., Result], shop: Connection) -> None:
    shop.execute("alter table app.message alter sender drop not null; delete from app.message")
    shop.execute(
        "insert into app.message (conversation_id, sender, body) select 7, s, 'hello' "
        "from unnest(array['ann', 'bot', 'bob', 'assistant', null]) with ordinality s (s, n) order by n"
    )
    options = [*SHOP, "--yes"]
    for role_map, roles in {
        "bot=assistant,*=user": ["user", "assistant", "user", "user", "user"],
        " bot = assistant , * = user , ann=- ": ["assistant", "user", "user", "user"],
        "bot=assistant,ann=user,*=-": ["user", "assistant"],
        "*=user": ["user", "user", "user", "assistant", "user"],
        "*=-": ["assistant"],
        "*=-,assistant=-,ann=user": ["user"],
    }.items():
        options[options.index("--role-map") + 1] = role_map
        assert run(*options).code == 0
        assert [row[2] for row in window(shop, "7")] == roles


def test_a_role_map_that_says_nothing_or_two_things_is_refused(
    run: Callable[..., Result], shop: Connection
) -> None:
    options = [*SHOP, "--yes"]
    for role_map, told in {
        "": "--role-map maps nothing",
        " , ": "--role-map maps nothing",
        "=user": "'=user' is no pair",
        "bot": "'bot' is no pair",
        "bot=user,ann=user,bot=assistant": "two roles for 'bot': user and assistant",
        "bot=": "no such role: ''",
        "*=robot": "no such role: 'robot'",
    }.items():
        options[options.index("--role-map") + 1] = role_map
        refused = run(*options)
        assert refused.code == 1
        assert told in refused.err
        assert "HINT: " in refused.err
    assert value(shop, "select count(*) from source") == 0


def test_a_chat_of_its_own_under_an_id_of_the_table_is_told(
    run: Callable[..., Result], shop: Connection
) -> None:
    shop.execute("select start_turn('7', '\"made by mistake\"'), create_chat('99')")
    done = run(*SHOP, "--yes")
    assert "itself, and goes on reading there: 7\n" in done.err
    assert len(window(shop, "7")) == 1
    shop.execute("select delete_chat('7')")
    assert len(window(shop, "7")) == 40
    assert "itself, and" not in run(*SHOP).err


def test_other_kinds_of_table(run: Callable[..., Result], db: Connection) -> None:
    db.execute(
        """
        create type speaker as enum ('human', 'ai');
        create table told (id bigint generated always as identity, chat_id int, who speaker, content text,
            created_at timestamptz not null) partition by range (created_at);
        create table told_1 partition of told for values from ('2020-01-01') to ('2026-01-02');
        create table told_2 partition of told for values from ('2026-01-02') to ('2030-01-01');
        insert into told (chat_id, who, content, created_at)
        select g % 5, (array['human', 'ai'])[1 + g / 5 % 2]::speaker, 'x ' || g, '2026-01-01'::timestamptz + g * interval '1 h'
        from generate_series(0, 49) g;
        create view told_view as select * from told;
        create materialized view told_once as select * from told;
        """
    )
    for name, index in (
        ("told", "create index "),
        ("told_view", None),
        ("told_once", "create index concurrently "),
    ):
        done = run(
            f"s_{name}", "--table", name, "--role", "who", "--role-map", "human=user,ai=assistant", "--yes"
        )
        assert done.code == 0, done.err
        assert done.err.startswith(index or "ok: a read of one chat uses an index")
        assert ("holds up its writers" in done.err) == (name == "told")
        chat = str(("told", "told_view", "told_once").index(name))
        db.execute("select create_chat(%s, source => %s)", (chat, f"s_{name}"))
        assert len(window(db, chat)) == 10


@pytest.mark.core
def test_a_table_is_never_taken_for_one_of_ours(run: Callable[..., Result], db: Connection) -> None:
    told = run("libre", "--table", "message")
    assert "no such table" in told.err
    assert "name it with its schema" in told.err
    db.execute(
        """
        create table "Message" (id bigserial primary key, chat_id int, role text, content text, created_at timestamptz default now());
        insert into "Message" (chat_id, role, content) values (1, 'user', 'hello')
        """
    )
    for name in ("Message", '"Message"', "public.Message", 'public."Message"'):
        done = run("libre", "--table", name, "--default", "--yes")
        assert done.code == 0, done.err
        assert window(db, "1")[0][3] == "hello"


def test_null_content_is_told(run: Callable[..., Result], shop: Connection) -> None:
    shop.execute("update app.message set body = null where id = 5")
    done = run(*SHOP)
    assert done.code == 0
    assert "1 rows have no content" in done.err
    assert "--where 'body is not null'" in done.err
    assert "--where '(id > 1) and body is not null'" in run(*SHOP, "--where", "id > 1").err
    shop.execute('alter table app.message rename body to "the body"')
    named = ["the body" if option == "body" else option for option in SHOP]
    told = run(*named, "--where", "sender <> 'it''s'").err
    option, where = shlex.split(told[told.index("--where") : told.index(" leaves them out")])
    assert (option, where) == ("--where", """(sender <> 'it''s') and "the body" is not null""")
    assert "have no content" not in run(*named, option, where).err


@pytest.mark.core
def test_uuid_ids_by_time_with_parts_and_calls(run: Callable[..., Result], db: Connection, dsn: str) -> None:
    db.execute(
        """
        create table chat_message (
            id uuid primary key, conversation uuid not null, author text not null, parts jsonb, calls jsonb,
            call_id text, created_at timestamptz not null default now())
        """
    )
    chat = "7b0c1d8e-0000-4000-8000-000000000001"
    made = [
        ("user", [{"type": "text", "text": "Where is my order?"}], None, None),
        (
            "assistant",
            None,
            [{"id": "A", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
            None,
        ),
        ("tool", [{"type": "text", "text": "hub 7"}], None, "A"),
        ("assistant", [{"type": "text", "text": "In hub 7."}], None, None),
    ]
    for turn in range(30):
        with db.transaction():  # one transaction, one time: ids alone say the order
            for n, (role, parts, calls, call_id) in enumerate(made):
                db.execute(
                    "insert into chat_message values (%s, %s, %s, %s, %s, %s, now() - interval '1 hour')",
                    (f"00000000-0000-4000-{turn:04d}-{n:012d}", chat, role, parts and json.dumps(parts),
                     calls and json.dumps(calls), call_id),
                )  # fmt: skip
    options = (
        "chats", "--table", "chat_message", "--chat-id", "conversation", "--role", "author", "--content", "parts",
        "--tool-calls", "calls", "--tool-call-id", "call_id", "--default", "--yes",
    )  # fmt: skip
    for order in ("created_at", "id"):
        refused = run(*options, "--order", order)
        assert refused.code == 1
        assert "--order created_at,id" in refused.err
    done = run(*options, "--order", "created_at,id")
    assert done.code == 0, done.err
    assert "ok: a read of one chat uses an index" in done.err
    rows = db.execute(
        "select role, message_id, seq, tool_call_id from working_window(%s::uuid)", (chat,)
    ).fetchall()
    assert [r[0] for r in rows] == ["user", "assistant", "tool", "assistant"] * 30
    assert [r[1] for r in rows] == sorted(r[1] for r in rows)
    assert [r[2] for r in rows] == sorted({r[2] for r in rows})
    again = db.execute(
        "select m.role, m.message_id from message_original(%s, %s) m", (chat, rows[5][2])
    ).fetchall()
    assert again == [("assistant", rows[5][1])]
    # a line and a replay stand on these places as on any
    line = compact(db, chat)
    assert value(db, "select count(*) from working_window(%s) where section = 'summary'", chat) == 1
    assert value(db, "select seq from summary_line where summary_id = %s", line) in [r[2] for r in rows]
    with pycontext.connect(dsn) as memory:
        assert memory.count_tokens(chat) > 0
        # 33 tokens between the line and the tail are less than a line with its fence
        assert memory.compact(chat, 900).outcome == "skipped"
        assert memory.compact(chat, 500).outcome == "summarized"
    assert not any(r[0] for r in db.execute("select is_estimate from working_window(%s)", (chat,)).fetchall())


def test_types_that_will_not_do_are_told(run: Callable[..., Result], shop: Connection) -> None:
    shop.execute("alter table app.message add calls text, add told text default 'noon'")
    told = run(*SHOP, "--created-at", "told")
    assert told.code == 1
    assert "told is text, not a time" in told.err
    given = [*SHOP, "--tool-calls", "calls", "--yes"]
    assert run(*given).code == 0
    shop.execute(
        "update app.message set calls = "
        '\'[{"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}]\' where id = 31'
    )
    assert value(shop, "select tool_calls #>> '{0,function,name}' from thread('1') where seq = 31") == "look"
    again = run(*SHOP, "--yes")  # without calls
    assert again.code == 1
    assert "drop view" in again.err
    shop.execute("update app.message set calls = 'look()' where id = 31")
    assert "not JSON" in run(*given).err
    shop.execute(
        "create view app.by_hand as select conversation_id as chat_id, id as seq, id as message_id, "
        "'user' as role, body as content, told as created_at, calls as tool_calls from app.message"
    )
    by_hand = run("hand", "--from-view", "app.by_hand")
    assert by_hand.code == 1
    assert "created_at is text" in by_hand.err
    assert "tool_calls is text" in by_hand.err


@pytest.mark.core
def test_calls_in_a_form_of_their_own_are_refused(run: Callable[..., Result], db: Connection) -> None:
    db.execute(
        """
        create table lobe (id text primary key, topic_id text, role varchar(255), content text, tools jsonb, created_at timestamptz);
        create index on lobe (topic_id, created_at, id);
        create table lobe_plugin (id text primary key, tool_call_id text);
        insert into lobe
        select 'msg_' || n, 'tpc', (array['user', 'assistant', 'tool', 'assistant'])[n], nullif('said ' || n, 'said 2'),
            case n when 2 then '[{"id": "call_1", "type": "default", "apiName": "getOrder", "arguments": "{}", "identifier": "orders"}]'::jsonb end,
            now() - interval '1 hour' + n * interval '1 s'
        from generate_series(1, 4) n;
        insert into lobe_plugin values ('msg_3', 'call_1');
        """
    )
    options = ("lobe", "--table", "lobe", "--chat-id", "topic_id", "--order", "created_at,id", "--yes")
    refused = run(*options, "--tool-calls", "tools")
    told = " ".join(refused.err.split())
    assert refused.code == 1
    assert (
        "problem: 1 rows have tool_calls that are not in OpenAI's form: chat tpc, message msg_2 has "
        '[{"id": "call_1", "type": "default", "apiName": "getOrder",'
    ) in told
    assert (
        "problem: 1 rows of role tool have no tool_call_id, and would be read as a user's text: chat tpc, message msg_3"
        in told
    )
    for calls in ('{"a": 1}', '[{"id": 1}]', '"look"'):
        db.execute("update lobe set tools = %s where id = 'msg_4'", (calls,))
        assert (
            "2 rows have tool_calls that are not in OpenAI's form"
            in run(*options, "--tool-calls", "tools").err
        )
    db.execute("update lobe set tools = '[]' where id = 'msg_4'")
    assert value(db, "select count(*) from source") == 0
    assert "warning: 1 rows of role tool have no tool_call_id" in run(*options).err
    db.execute(
        """
        create view told as select v.chat_id, v.seq, v.message_id, v.role, v.content, v.created_at, v.order_at,
            (select jsonb_agg(jsonb_build_object('id', e ->> 'id', 'type', 'function', 'function',
                jsonb_build_object('name', e ->> 'apiName', 'arguments', e ->> 'arguments'))) from jsonb_array_elements(l.tools) e) as tool_calls,
            p.tool_call_id
        from lobe_pycontext v join lobe l on l.id = v.message_id left join lobe_plugin p on p.id = v.message_id
        """
    )
    view = run("lobe", "--from-view", "told", "--default", "--yes")
    assert view.code == 0, view.err
    assert "tool_call" not in view.err
    assert value(db, "select openai_messages('tpc') #>> '{1,tool_calls,0,function,name}'") == "getOrder"
    assert value(db, "select openai_messages('tpc') #>> '{2,tool_call_id}'") == "call_1"


@pytest.mark.parametrize("per_second", [1, 1_000, 1_000_000, 1_000_000_000])
def test_times_that_are_numbers(
    run: Callable[..., Result], db: Connection, dsn: str, per_second: int
) -> None:
    db.execute(
        f"""
        create table "Posts" (id text primary key, channel text not null, by text, said text, created bigint not null);
        insert into "Posts"
        select to_char(g, 'FM0000'), 'канал', case g % 2 when 0 then 'anna' else 'bot' end, 'Сборка ' || g || repeat(' красная', 20),
            (1700000000 + g / 3 * 60)::bigint * {per_second} from generate_series(0, 199) g
        """
    )
    options = ("posts", "--table", "Posts", "--chat-id", "channel", "--order", "created,id", "--role", "by", "--role-map",
               "anna=user,bot=assistant", "--content", "said", "--default", "--yes")  # fmt: skip
    done = run(*options)
    assert done.code == 0, done.err
    assert run(*options).code == 0
    assert value(db, "select count(*) from pg_indexes where tablename = 'Posts'") == 2
    read = db.execute("select message_id, created_at from working_window('канал')").fetchall()
    assert [r[0] for r in read] == [f"{n:04d}" for n in range(200)]
    assert {r[1].year for r in read} == {2023}
    with pycontext.connect(dsn) as memory:
        assert memory.compact("канал", 2000).outcome == "summarized"


@pytest.mark.core
def test_text_ids_soft_deletes_and_notices(run: Callable[..., Result], db: Connection) -> None:
    db.execute(
        """
        create table post (
            id varchar(20) primary key, room varchar(12) not null, kind char(9) not null, text text not null,
            position integer not null, deleted_at timestamptz, sent timestamp not null);
        insert into post
        select 'msg_' || g, 'conv_' || g % 3, (array['human', 'ai', 'notice'])[g / 3 % 3 + 1], 'text ' || g, g,
            case when g % 10 = 0 then now() end, now() at time zone 'UTC' - interval '2 hours' + g * interval '1 s'
        from generate_series(1, 300) g;
        """
    )
    options = (
        "posts", "--table", "post", "--chat-id", "room", "--order", "position", "--role", "kind", "--role-map",
        "human=user,ai=assistant,notice=-", "--content", "text", "--created-at", "sent", "--where",
        "deleted_at is null", "--default", "--yes",
    )  # fmt: skip
    done = run(*options)
    assert done.code == 0, done.err
    rows = db.execute("select message_id, role, content from working_window('conv_1')").fetchall()
    expected = db.execute(
        "select id, case kind when 'human' then 'user' else 'assistant' end, text from post "
        "where room = 'conv_1' and deleted_at is null and kind <> 'notice' order by position"
    ).fetchall()
    assert rows == expected
    with pytest.raises(psycopg.Error) as error:
        db.execute("select * from working_window('no such room')")
    assert error.value.sqlstate == "PCX01"


def test_from_view(run: Callable[..., Result], shop: Connection) -> None:
    shop.execute(
        """
        create view app.mine as select conversation_id as chat_id, id as seq, id as message_id, body as content, created_at,
            case sender when 'customer' then 'user' else sender end as role from app.message
        """
    )
    refused = run("shop", "--from-view", "app.mine", "--yes")
    assert refused.code == 1
    assert "'bot' (600 rows)" in refused.err
    shop.execute(
        """
        create or replace view app.mine as select conversation_id as chat_id, id as seq, id as message_id, body as content,
            created_at, case sender when 'customer' then 'user' else 'assistant' end as role from app.message
        """
    )
    for beside in (
        ("--where", "content is not null"), ("--table", "app.message"), ("--role-map", "bot=assistant"), ("--order", "seq"),
        ("--tool-calls", "calls"), ("--name", "sender"), ("--view", "other"),
    ):  # fmt: skip
        told = run("shop", "--from-view", "app.mine", "--yes", *beside)
        assert told.code == 1
        assert f"beside --from-view there is nothing that {beside[0]} could change" in told.err
        assert "HINT: say it in the view" in told.err
    assert value(shop, "select count(*) from source") == 0
    shop.execute("update app.message set body = null where id = 5")
    done = run("shop", "--from-view", "app.mine", "--yes", "--default")
    assert done.code == 0
    assert "leave them out in the view" in done.err
    assert "--where" not in done.err
    assert len(window(shop, "3")) == 40


UNNESTED = """
    create view app.part as select m.conversation_id as chat_id, m.id * 100 + p.n as seq, m.id || '/' || p.n as message_id,
        case m.sender when 'customer' then 'user' else 'assistant' end as role, p.part as content, m.created_at
    from app.message m cross join lateral jsonb_array_elements(jsonb_build_array('One:', m.body)) with ordinality p (part, n)
"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("", "goes through all of it: slower as the chat grows"),
        ("drop index app.message_chat_ix", "goes through all of message"),
        (UNNESTED.replace("m.conversation_id as", "m.conversation_id + 0 as").replace("view", "or replace view"),
         "goes through all of message"),
    ],
)  # fmt: skip
def test_a_view_that_makes_rows_of_a_row_is_slow_and_works(
    run: Callable[..., Result], shop: Connection, dsn: str, change: str, told: str
) -> None:
    shop.execute(UNNESTED)
    shop.execute(change or "select")
    options = ("parts", "--from-view", "app.part", "--default")
    dry = run(*options)
    assert dry.code == 0, dry.err
    assert "warning: every read of " in dry.err
    assert told in dry.err
    assert "Function Scan" in dry.err  # the plan
    assert value(shop, "select count(*) from source") == 0
    assert run(*options, "--yes").code == 0
    rows = window(shop, "7")
    assert [row[1:4] for row in rows[:3]] == [
        ("7/1", "user", "One:"),
        ("7/2", "user", "Order QX-6 left hub B-6 on 3 March, please look where it is. "),
        ("37/1", "assistant", "One:"),
    ]
    assert len(rows) == 80
    with pycontext.connect(dsn) as memory:
        assert memory.compact("7", 900).outcome == "summarized"


@pytest.mark.parametrize("kind", ["json", "jsonb", "text"])
def test_parts_that_no_model_knows_are_named(run: Callable[..., Result], db: Connection, kind: str) -> None:
    told = [
        {"type": "text", "text": "Is it warm?"},
        {"type": "reasoning", "text": "Look first."},
        {"type": "image_url", "image_url": {"url": "https://shop.example/a.png"}},
        {"type": "file", "file": {"file_id": "f1"}},
        "a bare text",
    ]
    other = [
        {"type": "step-start"},
        {"type": "file", "mediaType": "image/png", "url": "https://shop.example/a.png"},
        {
            "type": "tool-getWeather",
            "toolCallId": "c1",
            "state": "output-available",
            "input": {},
            "output": {},
        },
        {
            "type": "dynamic-tool",
            "toolName": "look",
            "toolCallId": "c2",
            "state": "input-available",
            "input": {},
        },
        {"type": "source-url", "sourceId": "s1", "url": "https://shop.example"},
        {"type": "step-start"},
        {"kind": "vague"},
        {"type": "text", "text": {"value": "an answer"}},
    ]
    db.execute(
        f"create table said (id bigserial primary key, chat_id int, role text, content {kind}, created_at timestamptz default now())"
    )
    db.execute("create index on said (chat_id, id)")
    options = ("said", "--table", "said", "--yes")
    db.execute(
        "insert into said (chat_id, role, content) values (1, 'user', %s), (1, 'tool', '[{\"a\": 1}]')",
        (json.dumps(told),),
    )
    clean = run(*options)
    assert clean.code == 0
    assert ("1 contents are JSON in a text column" in clean.err) == (kind == "text")
    assert (
        "would read" not in clean.err
        if kind == "text"
        else "would read as JSON text: without a type (1)\n" in clean.err
    )
    db.execute("delete from said where role = 'tool'")
    assert "would read" not in run(*options).err
    db.execute(
        "insert into said (chat_id, role, content) select 1, 'user', %s from generate_series(1, 3)",
        (json.dumps(other),),
    )
    done = run(*options)
    assert done.code == 0
    if kind == "text":
        assert "4 contents are JSON in a text column" in done.err
        return
    told_of = " ".join(done.err.split())
    assert (
        "step-start (6), dynamic-tool (3), file (3), source-url (3), text (3), tool-getWeather (3), without a type (3)"
        in told_of
    )
    assert "--from-view" in told_of
    db.execute("insert into said (chat_id, role, content) values (1, 'user', '{\"text\": \"hello\"}')")
    assert "1 contents are JSON objects, which the model reads as (empty)" in run(*options).err
    db.execute("select create_chat('1', source => 'said')")
    assert value(db, "select messages -> -1 ->> 'content' from start_turn('1')") == "(empty)"
    told_text = "select messages #> '{1,content,-1}' from start_turn('1')"
    assert value(db, told_text) == {"type": "text", "text": '{"value": "an answer"}'}


def test_a_view_with_order_at_makes_rows_of_a_row_by_the_index(
    run: Callable[..., Result], shop: Connection
) -> None:
    shop.execute("create index on app.message (conversation_id, created_at)")
    at = "(extract(epoch from m.created_at - '2000-01-01'::timestamptz) * 1000000)::bigint * 2000"
    shop.execute(
        UNNESTED.replace("m.id * 100", at).replace(
            "m.created_at\n", "m.created_at, m.created_at as order_at\n"
        )
    )
    done = run("parts", "--from-view", "app.part", "--default", "--yes")
    assert done.code == 0
    assert "ok: a read of one chat uses an index" in done.err
    assert len(window(shop, "7")) == 80
    # what can't work is refused: a place or an id that is not the row's own
    for wrong, told in (
        (at.replace("* 2000", "* 1000"), "of 2,400 rows seq is not made of order_at"),
        (at, "an id is not one row's: chat "),
    ):
        body = UNNESTED.replace("m.id * 100", wrong).replace(
            "m.created_at\n", "m.created_at, m.created_at as order_at\n"
        )
        if wrong == at:
            body = body.replace("m.id || '/' || p.n", "m.id::text")
        shop.execute(body.replace("view", "or replace view"))
        refused = run("parts", "--from-view", "app.part", "--default", "--yes")
        assert refused.code == 1
        assert told in refused.err


def test_what_is_missing_in_the_rows_is_told(run: Callable[..., Result], shop: Connection) -> None:
    no_user = [*SHOP]
    no_user[no_user.index("--role-map") + 1] = "*=assistant"
    told = run(*no_user)
    assert told.code == 0
    assert "warning: no row is a user's: the window has no request" in told.err
    fine = run(*SHOP)
    assert "no row is a user's" not in fine.err
    assert "no created_at" not in fine.err
    shop.execute(
        "alter table app.message alter created_at drop not null; update app.message set created_at = null"
    )
    assert "warning: 1,200 rows have no created_at" in run(*SHOP).err
    shop.execute("alter table app.message rename created_at to at")
    asked = run(*SHOP)
    assert asked.code == 1
    assert "error: which column tells when a row was written?" in asked.err
    assert "HINT: --created-at COLUMN; where the order is a time" in asked.err
    assert "--order id,id" not in asked.err
    asked = run(*("conversation_id" if option == "id" and before == "--order" else option
                  for before, option in zip(("", *SHOP), SHOP, strict=False)))  # fmt: skip
    assert "--order conversation_id,id" in asked.err


def test_order_at_is_a_time(run: Callable[..., Result], db: Connection) -> None:
    db.execute(
        """
        create domain millis as bigint;
        create table post (id text primary key, chan text, at bigint);
        insert into post select 'p' || n, 'a', 1793000000000 + n * 86400000::bigint from generate_series(1, 20) n;
        """
    )
    view = (
        "drop view if exists chat_message; create view chat_message as select chan as chat_id, (extract(epoch from {at} - '2000-01-01'"
        ") * 1000000)::bigint * 2000 as seq, id as message_id, 'user' as role, id as content, "
        "to_timestamp(at / 1000.0) as created_at, {order_at} as order_at from post"
    )
    at = "(to_timestamp(at / 1000.0) at time zone 'UTC')"
    for order_at, told in (("at", "bigint"), ("at::millis", "public.millis"), ("at::text", "text")):
        db.execute(view.format(at=at, order_at=order_at).encode())
        refused = run("posts", "--from-view", "chat_message", "--default", "--yes")
        assert refused.code == 1
        kind = told.replace("public.millis", "bigint")
        assert f"problem: order_at is {kind}, not a time (timestamptz, timestamp or date)" in refused.err
        assert "to_timestamp(order_at / 1000.0)" in refused.err
        with pytest.raises(psycopg.Error) as error:
            db.execute("select register_source('posts', 'chat_message')")
        assert (error.value.sqlstate, error.value.diag.message_primary) == (
            "PCX12",
            "order_at must be a time",
        )
        assert f"order_at of public.chat_message is {told}" == error.value.diag.message_detail
    db.execute("set timezone = 'Asia/Tokyo'")
    day = f"{at}::date"
    for sort, order_at in ((at, at), (at, "to_timestamp(at / 1000.0)"), (f"{day}::timestamp", day)):
        db.execute(view.format(at=sort, order_at=order_at).encode())
        done = run("posts", "--from-view", "chat_message", "--default", "--yes")
        assert done.code == 0, done.err
        rows = db.execute("select message_id from working_window('a')").fetchall()
        assert [r[0] for r in rows] == [f"p{n}" for n in range(1, 21)]


@pytest.mark.core
def test_names_that_are_hostile_stay_names(db: Connection) -> None:
    schema, table, column, name = (
        'a"b; drop table x',
        "t'); drop table x; --",
        'c"d %s {0}',
        "n'); drop table x; --",
    )
    quoted = psycopg.sql.Identifier
    db.execute("create table x (a int)")
    db.execute(psycopg.sql.SQL("create schema {}").format(quoted(schema)))
    db.execute(
        psycopg.sql.SQL(
            "create table {} (id bigint primary key, {} text, role text, {} text, created_at timestamptz default now())"
        ).format(quoted(schema, table), quoted(column), quoted("b' || pg_sleep(9) || '"))
    )
    db.execute(
        psycopg.sql.SQL("insert into {} values (1, %s, 'it''s', 'hello')").format(quoted(schema, table)),
        ("'; drop table x",),
    )
    spec = Adoption(
        name=name, table=f"{schema}.{table}", chat_id=column, content="b' || pg_sleep(9) || '",
        role_map={"it's": "user"}, is_default=True,
    )  # fmt: skip
    done = adopt(db, spec)
    assert not done.has_problem, done.checks
    assert db.execute("select content from working_window(%s)", ("'; drop table x",)).fetchall() == [
        ("hello",)
    ]
    assert value(db, "select count(*) from x") == 0
    assert value(db, "select forget_source(%s)", name) == 0
    with pytest.raises(psycopg.Error):
        plan(db, Adoption(name="s", table="x", chat_id="a", order=("a",), role="a", content="a", created_at="a",
                          message_id="a", where="true; drop table x"))  # fmt: skip
    assert value(db, "select count(*) from x") == 0
    with pytest.raises(BadAdoption):
        plan(db, Adoption(name="s", table="x", chat_id='a"; drop table x; --'))


@pytest.fixture
def adopted(shop: Connection) -> Connection:
    return adopt_shop(shop)


def adopt_shop(shop: Connection) -> Connection:
    assert not adopt(
        shop,
        Adoption("shop", "app.message", "conversation_id", role="sender", content="body", is_default=True,
                 role_map={"customer": "user", "bot": "assistant"}, where="deleted_at is null"),
    ).has_problem  # fmt: skip
    return shop


def dump(dsn: str) -> str:
    """The product's schema and rows, as pg_dump has them."""
    done = subprocess.run(
        [binaries() / "pg_dump", "--schema", "app", dsn], capture_output=True, text=True, check=True
    )
    return "".join(
        line for line in done.stdout.splitlines(True) if not line.startswith(("\\restrict", "\\unrestrict"))
    )


def checksum(db: Connection) -> Any:
    return db.execute(
        "select md5(string_agg(m::text || m.xmin || m.ctid, ',' order by m.id)), count(*) from app.message m"
    ).fetchall()


@pytest.mark.core
def test_forgetting_a_source_leaves_the_products_table_as_it_was(
    shop: Connection, dsn: str, direct_dsn: str
) -> None:
    dumped = dump(direct_dsn)
    before = checksum(shop)
    adopted = adopt_shop(shop)
    tables = [
        r[0] for r in adopted.execute(
            "select relname from pg_class where relnamespace = 'pycontext'::regnamespace and relkind = 'r' "
            "and relname not in ('migration', 'profile', 'source')"
        )
    ]  # fmt: skip
    with pycontext.connect(dsn) as memory:
        for chat in ("1", "2", "3"):
            memory.window(chat)
            memory.count_tokens(chat)
            memory.compact(chat, 1200)
        memory.start_over("4", "again")
    assert value(adopted, "select count(*) from summary_line") == 4
    adopted.execute("select pin_message('5', '5')")
    assert value(adopted, "select forget_source('shop')") == 5
    assert checksum(adopted) == before
    left = {t: value(adopted, f"select count(*) from pycontext.{t}") for t in tables}
    assert not any(left.values()), left
    assert value(adopted, "select count(*) from source") == 0
    with pytest.raises(psycopg.Error) as error:
        adopted.execute("select forget_source('shop')")
    assert error.value.sqlstate == "PCX12"
    adopted.execute("drop view app.message_pycontext")  # the one thing that stays
    assert dump(direct_dsn) == dumped


@pytest.mark.core
def test_a_changed_row_takes_the_lines_over_it_along(adopted: Connection) -> None:
    line = compact(adopted, "1")
    edit_no = value(adopted, "select edit_no from compaction_plan('1')")
    adopted.execute("update app.message set body = 'my budget is 900' where id = 31")
    assert value(adopted, "select source_changed('1', '31')") == 1
    assert value(adopted, "select edit_no from compaction_plan('1')") > edit_no
    assert value(adopted, "select count(*) from working_window('1') where section = 'summary'") == 0
    assert ("my budget is 900",) in adopted.execute("select content from working_window('1')").fetchall()
    assert value(adopted, "select act from act where chat_id = '1' order by act_no desc limit 1") == "stale"
    assert compact(adopted, "1") != line  # the same place can be summarized anew
    # a row that no line covers: nothing goes, but what is being written meanwhile is refused
    edit_no = value(adopted, "select edit_no from compaction_plan('1')")
    newest = value(adopted, "select max(id)::text from app.message where conversation_id = 1")
    assert value(adopted, "select source_changed('1', %s)", newest) == 0
    with pytest.raises(psycopg.Error) as error:
        adopted.execute("select put_summary('1', '31', '{\"facts\": [\"x\"]}', edit_no => %s)", (edit_no,))
    assert error.value.sqlstate == "PCX07"


@pytest.mark.core
@pytest.mark.parametrize("how", ["update", "delete", "soft delete", "insert"])
def test_unannounced_changes_are_found(adopted: Connection, how: str) -> None:
    compact(adopted, "2")
    assert not adopted.execute("select from status() where finding = 'stale lines'").fetchall()
    adopted.execute(
        {
            "update": "update app.message set body = body || '!' where id = 32",
            "delete": "delete from app.message where id = 32",
            "soft delete": "update app.message set deleted_at = now() where id = 32",
            "insert": "insert into app.message overriding system value values (-5, 2, 'customer', 'early', null, now() - interval '2 hours')",
        }[how]
    )
    assert adopted.execute("select severity from status() where finding = 'stale lines'").fetchall() == [
        ("warning",)
    ]
    adopted.execute("select claim_compaction('2', 'me')")
    assert value(adopted, "select count(*) from summary_line where chat_id = '2'") == 0
    assert not adopted.execute("select from status() where finding = 'stale lines'").fetchall()
    compact(adopted, "2")
    assert value(adopted, "select count(*) from summary_line where chat_id = '2'") == 1


def test_counts_follow_the_row(adopted: Connection, dsn: str) -> None:
    with pycontext.connect(dsn) as memory:
        assert memory.count_tokens("6") == 40
        assert memory.count_tokens("6") == 0
    assert not adopted.execute("select from working_window('6') where is_estimate").fetchall()
    adopted.execute("update app.message set body = repeat('слово ', 300) where id = 36")
    changed = adopted.execute(
        "select is_estimate, tokens from working_window('6') where message_id = '36'"
    ).fetchall()
    assert changed[0][0]
    assert changed[0][1] > 300
    with pycontext.connect(dsn) as memory:
        assert memory.count_tokens("6") == 1
    assert not adopted.execute("select from working_window('6') where is_estimate").fetchall()


def test_an_edit_of_a_counted_row_never_breaks_the_read(adopted: Connection, dsn: str) -> None:
    """Hashes of two texts may lie further apart than a bigint holds."""
    with pycontext.connect(dsn) as memory:
        memory.count_tokens("6")
    for n in range(30):
        adopted.execute("update app.message set body = %s where id = 36", (f"edit {n}",))
        assert (f"edit {n}",) in adopted.execute("select content from working_window('6')").fetchall()


@pytest.mark.core
@pytest.mark.parametrize(
    "moment", ["infinity", "-infinity", "0044-03-15 BC", "12026-01-01", "9999-12-31 23:59:59.999999"]
)
def test_a_time_that_no_client_can_read_breaks_nothing(adopted: Connection, dsn: str, moment: str) -> None:
    adopted.execute(
        "update app.message set created_at = %s::timestamptz where conversation_id = 6 and id < 1100",
        (moment,),
    )
    adopted.execute("set timezone = 'Pacific/Kiritimati'")
    assert len(adopted.execute("select * from working_window('6')").fetchall()) == 40
    with pycontext.connect(dsn) as memory:
        assert len(memory.window("6")) == 40
        assert len(memory.thread("6", max_rows=50)) == 40
        assert memory.compact("6", 1200).outcome == "summarized"
        with memory.turn("6") as turn:
            assert turn.messages
        assert memory.recall("6", "order hub") is not None


@pytest.mark.core
def test_a_late_commit_with_a_lower_id_reaches_the_model(adopted: Connection, dsn: str) -> None:
    with psycopg.connect(dsn) as slow:
        slow.execute(
            "insert into app.message (conversation_id, sender, body) values (8, 'customer', 'from the slow tab')"
        )
        adopted.execute(
            "insert into app.message (conversation_id, sender, body) select 8, case g % 2 when 0 then 'customer' else 'bot' end, "
            "repeat('tell me more of it ', 9) from generate_series(1, 60) g"
        )
        cut = value(adopted, "select to_seq from compaction_plan('8', 1200)")
        young = value(
            adopted, "select min(id) from app.message where conversation_id = 8 and body like 'tell%%'"
        )
        assert cut < young  # nothing that may still have an older neighbour
        compact(adopted, "8")
        slow.commit()
    rows = adopted.execute("select content from working_window('8', 100000)").fetchall()
    assert ("from the slow tab",) in rows
    # and where a line took it in unseen all the same, the line is found stale
    adopted.execute("update profile set settle_seconds = 0 where profile = 'default'")
    with psycopg.connect(dsn) as slow:
        slow.execute(
            "insert into app.message (conversation_id, sender, body) values (9, 'customer', 'from the slow tab')"
        )
        adopted.execute(
            "insert into app.message (conversation_id, sender, body) select 9, case g % 2 when 0 then 'customer' else 'bot' end, "
            "repeat('tell me more of it ', 9) from generate_series(1, 60) g"
        )
        compact(adopted, "9")
        slow.commit()
    for chat in ("9", "8"):
        seen = adopted.execute("select content from working_window(%s, 100000)", (chat,)).fetchall()
        assert ("from the slow tab",) in seen, "such a line is not used"
        assert value(adopted, "select count(*) from summary_line where chat_id = %s", chat) == 1
        adopted.execute("select start_turn(%s)", (chat,))
        # and a turn drops it, as a logged act
        assert value(adopted, "select count(*) from summary_line where chat_id = %s", chat) == (chat == "8")
    assert value(adopted, "select act from act where chat_id = '9' order by act_no desc limit 1") == "stale"


@pytest.fixture
def timed(db: Connection) -> Connection:
    """A product whose rows are ordered by a number that it gives them itself, and may hide."""
    db.execute(
        """
        create table said (id text primary key, chat int, place bigint, role text, body text, hidden boolean default false,
            at timestamptz default now() - interval '1 hour');
        create unique index on said (chat, place);
        create view said_view as select chat as chat_id, place as seq, id as message_id, role, body as content,
            at as created_at from said where not hidden;
        select register_source('said', 'said_view', true);
        insert into said
        select 'm' || g, c, g * 1000, case when g % 2 = 1 then 'user' else 'assistant' end,
            'Order QX-' || g || ' left hub B-' || g || ', please look where it is.'
        from generate_series(1, 400) g, generate_series(1, 1) c;
        """
    )
    return db


def told(db: Connection, budget: int = 100_000) -> list[str]:
    return [r[0] for r in db.execute("select content from working_window(1, %s)", (budget,)).fetchall()]


@pytest.mark.core
def test_a_branch_switch_leaves_a_line_of_the_other_branch_unused(timed: Connection) -> None:
    db = timed
    compact(db, "1", 2500)
    assert value(db, "select count(*) from working_window(1) where section = 'summary'") == 1
    # another answer is asked for at #30000; what stood after it is hidden, and its own rows go with a lower number
    db.execute("update said set hidden = true where place > 30000")
    db.execute("insert into said values ('new', 1, 30500, 'user', 'No, tell me of the other order.')")
    assert told(db)[-1] == "No, tell me of the other order."
    assert value(db, "select message_id from start_turn('1')") == "new"
    assert value(db, "select count(*) from summary_line") == 0
    assert value(db, "select at_seq from act where act = 'stale'") == 30500
    # back to the first branch, under a line made on the second
    db.execute(
        "insert into said select 'n' || g, 1, 30500 + g, 'assistant', repeat('So it is. ', 30) from generate_series(1, 80) g"
    )
    compact(db, "1", 1500)
    db.execute("update said set hidden = (place % 1000 <> 0)")
    assert "Order QX-400 left hub B-400, please look where it is." in told(db)
    assert value(db, "select count(*) from working_window(1) where section = 'summary'") == 0


@pytest.mark.core
def test_a_line_that_is_good_stays(timed: Connection) -> None:
    db = timed
    first = compact(db, "1", 2500)
    db.execute(
        "insert into said select 'x' || g, 1, 400000 + g * 1000, 'user', repeat('More of it. ', 20) from generate_series(1, 60) g"
    )
    second = compact(db, "1", 2500)
    assert value(db, "select message_id from working_window(1) where section = 'summary'") == second
    # in the second's stretch alone
    place = value(db, "select seq from summary_line where summary_id = %s", second)
    db.execute("insert into said values ('late', 1, %s, 'user', 'late')", (place - 5,))
    assert value(db, "select message_id from working_window(1) where section = 'summary'") == first
    assert "late" in told(db)
    value(db, "select start_turn('1')")
    assert db.execute("select summary_id, is_newest from summary_line").fetchall() == [(first, True)]
    # what is made next stands on the first
    assert compact(db, "1", 2500) != second
    assert value(db, "select count(*) from summary_line") == 2


@pytest.mark.core
def test_a_clock_far_behind_is_met_by_the_turn_that_names_its_message(timed: Connection) -> None:
    db = timed
    compact(db, "1", 2500)
    db.execute("insert into said values ('behind', 1, 6500, 'user', 'Where is it now?')")
    assert "Where is it now?" not in told(db)  # deep under the line: nothing is read there
    messages = value(db, "select messages from start_turn('1', request_id => 'behind', token_budget => 2500)")
    assert messages[-1]["content"] == "Where is it now?"
    assert value(db, "select count(*) from summary_line") == 0
    # an old request, asked again: the line knows it, and stays
    line = compact(db, "1", 2500)
    asked = db.execute("select messages, is_answered from start_turn('1', request_id => 'm41')").fetchone()
    assert asked
    assert "Order QX-41 left hub B-41, please look where it is." in [m["content"] for m in asked[0]]
    assert asked[1]
    assert value(db, "select summary_id from summary_line") == line


@pytest.mark.core
def test_a_summary_put_by_hand_never_stands_on_a_stale_line(timed: Connection) -> None:
    """Plan, source and put by SQL alone, without the lease that drops what is stale."""
    db = timed
    line = compact(db, "1", 2500)
    place = value(db, "select seq from summary_line")
    db.execute("insert into said values ('late', 1, %s, 'user', 'late')", (place - 5,))
    after = value(db, "select after_message_id from compaction_plan('1', 2500)")
    source = db.execute("select message_id, kind from compaction_source('1', %s)", (after,)).fetchall()
    assert ("late", "message") in source
    assert line not in [r[0] for r in source]
    assert compact(db, "1", 2500) != line
    assert value(db, "select count(*) from summary_line") == 1
    assert value(db, "select count(*) from working_window(1) where section = 'summary'") == 1


def test_rights_that_are_missing_are_granted_or_told(
    run: Callable[..., Result], shop: Connection, dsn: str
) -> None:
    shop.execute(
        "create role owner_of_app login; create role owner_of_ours login; alter schema app owner to owner_of_app; "
        "alter table app.message owner to owner_of_app; alter schema pycontext owner to owner_of_ours"
    )
    try:
        for role in ("owner_of_app", "owner_of_ours"):
            told = run(*SHOP, "--dsn", psycopg.conninfo.make_conninfo(dsn, user=role))
            assert told.code == 1
            assert "permission denied for" in told.err
            assert "HINT: adopt as a role that owns the table" in told.err
        granted = run(*SHOP).out
        assert 'grant usage on schema "app" to "owner_of_ours"' in granted
        assert 'grant select on "app"."message" to "owner_of_ours"' in granted
        assert run(*SHOP, "--yes").code == 0
        shop.execute("set role owner_of_ours")
        assert value(shop, "select count(*) from app.message_pycontext") == 1200
    finally:
        shop.execute(
            "reset role; alter schema pycontext owner to current_user; alter schema app owner to current_user"
        )
        shop.execute("drop owned by owner_of_ours; alter table app.message owner to current_user")
        shop.execute("drop role owner_of_app; drop role owner_of_ours")


def test_a_right_that_is_missing_is_told_with_who_gives_it(
    adopted: Connection, dsn: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from pycontext.cli import terminal

    adopted.execute(install.extra_sql("roles").encode())
    adopted.execute(
        "create role onlooker login; grant pycontext_reader to onlooker; create role stranger login"
    )
    try:
        for role, command, told in (
            ("stranger", "window", "permission denied for schema pycontext"),
            ("onlooker", "window", "permission denied for schema app"),
            ("onlooker", "compact", "permission denied for function"),
        ):
            if command == "compact":
                adopted.execute("grant usage on schema app to onlooker")
                adopted.execute("grant select on app.message, app.message_pycontext to onlooker")
            terminal.err.cache_clear()
            as_role = psycopg.conninfo.make_conninfo(dsn, user=role)
            monkeypatch.setattr(sys, "argv", ["pycontext", command, "7", "--dsn", as_role])
            capfd.readouterr()
            assert cli.main() == 1
            said = " ".join(capfd.readouterr().err.split())
            assert told in said
            assert "HINT: of pycontext's: grant pycontext_reader (reads) or pycontext_writer (acts)" in said
            assert "grant select on it, and on its view" in said
    finally:
        terminal.err.cache_clear()
        adopted.execute("drop owned by onlooker, stranger; drop role onlooker; drop role stranger")
        for role in ("pycontext_admin", "pycontext_writer", "pycontext_reader"):
            adopted.execute(f"drop owned by {role}; drop role {role}")


@pytest.mark.core
def test_the_products_role_needs_select_on_its_table_only(adopted: Connection) -> None:
    adopted.execute(install.extra_sql("roles").encode())
    adopted.execute(
        "create role web; grant pycontext_writer to web; grant usage on schema app to web; "
        "grant select on app.message, app.message_pycontext to web"
    )
    try:
        adopted.execute("set role web")
        assert len(window(adopted, "7")) == 40
        assert value(adopted, "select decision from start_turn('7')") is not None
        compact(adopted, "7")
        adopted.execute("select start_over('7')")
        for write in (
            "insert into app.message (conversation_id, sender) values (1, 'x')",
            "delete from app.message",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                adopted.execute(write)
        with pytest.raises(psycopg.Error) as error:
            adopted.execute("select append_message('7', 'user', 'hello')")
        assert error.value.sqlstate == "PCX09"
    finally:
        adopted.execute("reset role; drop owned by web; drop role web")
        for role in ("pycontext_admin", "pycontext_writer", "pycontext_reader"):
            adopted.execute(f"drop owned by {role}; drop role {role}")
