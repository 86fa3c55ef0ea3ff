"""The roles of sql/extras/roles.sql: a reader reads, a writer acts but not on the tables, an admin may."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pycontext import install

Connection = psycopg.Connection[Any]

pytestmark = pytest.mark.core

ROLES = ("pycontext_reader", "pycontext_writer", "pycontext_admin")


@pytest.fixture
def roles(db: Connection) -> Iterator[Connection]:
    for _ in range(2):  # twice is once
        db.execute(install.extra_sql("roles").encode())
    yield db
    db.execute("reset role")
    for role in reversed(ROLES):
        db.execute(f"drop owned by {role}")
        db.execute(f"drop role {role}")


def test_a_writer_acts_through_functions_only(roles: Connection) -> None:
    roles.execute("set role pycontext_writer")
    roles.execute("select pycontext.create_chat('a')")
    roles.execute("select pycontext.append_message('a', 'user', 'hello')")
    assert roles.execute("select content from pycontext.working_window('a')").fetchone() == ("hello",)
    roles.execute("select pycontext.append_message('a', 'user', 'again', message_id => 'm')")
    for call in (
        "set_system_prompt('a', 'Be brief.')",
        "set_chat_profile('a', 'small-8k')",
        "pin_message('a', 'm')",
        "unpin_message('a', 'm')",
        "fork_chat('a', 'b')",
        "redact_message('a', 'm')",
        "rewind_chat('a', 'm')",
        "delete_chat('b')",
        "forget_owner('ann')",
    ):
        roles.execute(f"select pycontext.{call}")
    for act in (
        "delete from pycontext.message",
        "update pycontext.message set role = 'user'",
        "select pycontext.set_profile('mine', context_window => 64000)",
        "select pycontext.register_source('mine', 'pg_catalog.pg_class')",
        "select pycontext.forget_source('mine')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            roles.execute(act)


def test_a_writers_temporary_types_never_run_as_the_installer(roles: Connection, dsn: str) -> None:
    # Temporary types are looked up before all others unless the path says otherwise: a domain in the place of
    # a type that a function names would run its check with the rights of the function's owner.
    types = [
        name
        for (name,) in roles.execute(
            """
            select t.typname from pg_type t
            where t.typnamespace = 'pg_catalog'::regnamespace and t.typtype in ('b', 'm', 'r')
            and t.typname !~ '^_' and t.typname = any (regexp_split_to_array((
                select string_agg(f.prosrc, ' ') from pg_proc f
                where f.pronamespace = 'pycontext'::regnamespace), '\\W+'))
            """
        )
    ]
    assert {"text", "jsonb", "timestamptz", "regclass"} <= set(types)
    with psycopg.connect(dsn, autocommit=True) as writer:
        for name in types:
            check = "current_user = 'pycontext_writer'"
            writer.execute(f"create domain pg_temp.{name} as pg_catalog.{name} check ({check})".encode())
        writer.execute("set role pycontext_writer")
        long = "to_jsonb(repeat('hello ', 500))"
        for call in (
            "create_chat('a', 'Be brief.')",
            f"append_message('a', 'assistant', {long}, message_id => 'm', created_at => now())",
            """start_turn('a', '{"role": "user", "content": "again"}')""",
            """put_summary('a', 'm', '{"facts": ["a fact"]}')""",
            "set_system_prompt('a', 'Be quick.')",
            "pin_message('a', 'm')",
            "remember('a', 'a fact')",
            "prune_chat('a')",
            "fork_chat('a', 'b')",
            "redact_message('a', 'm')",
            "delete_chat('b')",
        ):
            writer.execute(f"select pycontext.{call}".encode())


def test_a_type_of_a_writers_becomes_text_with_his_rights(roles: Connection) -> None:
    """Functions take a chat id of any type, also of one whose cast to text is a function of the caller's."""
    roles.execute("create schema his authorization pycontext_writer")
    roles.execute("set role pycontext_writer")
    roles.execute("create type his.id as (n integer)")
    roles.execute(
        "create function his.who(his.id) returns text language sql as $$ select current_user::text $$"
    )
    roles.execute("create cast (his.id as text) with function his.who(his.id)")
    for call in (
        "create_chat(row(1)::his.id, 'Be brief.')",
        "append_message(row(1)::his.id, 'user', 'hello')",
        "start_over(row(1)::his.id)",
        "delete_chat(row(1)::his.id)",
    ):
        roles.execute(f"select pycontext.{call}".encode())
        chats = roles.execute("select distinct chat_id from pycontext.chat").fetchall()
        assert chats in ([("pycontext_writer",)], []), call
    assert chats == []
    roles.execute("drop schema his cascade")


def test_a_reader_reads_only(roles: Connection) -> None:
    roles.execute("select pycontext.create_chat('a')")
    roles.execute("select pycontext.append_message('a', 'user', 'hello')")
    roles.execute("set role pycontext_reader")
    for read in (
        "working_window('a')",
        "thread('a')",
        "window_status('a')",
        "compaction_plan('a')",
        "message_original('a', 1)",
        "search_thread('a', 'hello')",
        "status()",
    ):
        roles.execute(f"select * from pycontext.{read}")
    roles.execute("select pycontext.openai_messages('a'), pycontext.anthropic_messages('a')")
    for act in (
        "select pycontext.create_chat('b')",
        "select pycontext.append_message('a', 'user', 'x')",
        "select pycontext.rewind_chat('a', '')",
        "select pycontext.delete_chat('a')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            roles.execute(act)


def test_every_public_function_has_its_role(roles: Connection) -> None:
    without = roles.execute(
        """
        select f.proname, has_function_privilege('pycontext_admin', f.oid, 'execute') from pg_proc f
        where f.pronamespace = 'pycontext'::regnamespace and f.proname !~ '^_'
        and not has_function_privilege('pycontext_writer', f.oid, 'execute')
        order by 1
        """
    ).fetchall()
    assert without == [("forget_source", True), ("register_source", True), ("set_profile", True)]


def test_an_admin_may_change_tables(roles: Connection) -> None:
    roles.execute("set role pycontext_admin")
    roles.execute("update pycontext.profile set settle_seconds = settle_seconds")
    roles.execute("select pycontext.set_profile('mine', context_window => 64000)")


def test_an_admin_registers_what_is_his_and_takes_it_back(roles: Connection) -> None:
    roles.execute(
        """
        create schema app;
        grant usage, create on schema app to pycontext_admin;
        set role pycontext_admin;
        create table app.said (id bigint primary key, chat text, body text);
        create index on app.said (chat, id);
        insert into app.said values (1, 'a', 'hello');
        create view app.said_view with (security_invoker = true) as
        select chat as chat_id, id as seq, id as message_id, 'user' as role, body as content,
            now() as created_at from app.said;
        select pycontext.register_source('said', 'app.said_view', true);
        """
    )
    assert roles.execute("select content from pycontext.working_window('a')").fetchall() == [("hello",)]
    # a writer reads what he may read, and no more: in a turn, too
    roles.execute("reset role; set role pycontext_writer")
    assert ("said reads app.said_view, for every chat id without a row of its own",) in roles.execute(
        "select detail from pycontext.status()"
    ).fetchall()
    for read in ("working_window('a')", "start_turn('a')", "thread('a')"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as refused:
            roles.execute(f"select * from pycontext.{read}")
        assert "app" in str(refused.value), read
    roles.execute("reset role; grant usage on schema app to pycontext_writer")
    for view, table in ((True, False), (False, True), (True, True)):
        roles.execute("reset role; revoke select on app.said, app.said_view from pycontext_writer")
        for name in ["app.said_view"] * view + ["app.said"] * table:
            roles.execute(f"grant select on {name} to pycontext_writer")
        roles.execute("set role pycontext_writer")
        for read in ("working_window('a')", "start_turn('a')"):
            if view and table:
                assert roles.execute(f"select * from pycontext.{read}").fetchall()
            else:
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    roles.execute(f"select * from pycontext.{read}")
    roles.execute("reset role; set role pycontext_admin; select pycontext.forget_source('said'); reset role")
    assert not roles.execute("select from pycontext.source").fetchall()
    roles.execute("drop schema app cascade")


def test_an_unknown_extra_names_the_known_ones() -> None:
    with pytest.raises(Exception, match="roles"):
        install.extra_sql("no_such_thing")
