"""Tenant isolation with real roles: an owner that installs, an application that may call everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pycontext import install

Connection = psycopg.Connection[Any]

OWNER, APP = "rls_owner", "rls_app"

TENANT_TABLES = """
    select c.relname from pg_class c
    join pg_attribute a on a.attrelid = c.oid and a.attname = 'tenant' and not a.attisdropped
    where c.relnamespace = 'pycontext'::regnamespace and c.relkind in ('r', 'p')
    order by 1
"""


@pytest.fixture
def isolated(empty_dsn: str) -> Iterator[str]:
    """A database whose schema belongs to a plain role, isolated, with tenants a and b in it."""
    with psycopg.connect(empty_dsn, autocommit=True) as root:
        for role in (OWNER, APP):
            root.execute(sql.SQL("create role {} login").format(sql.Identifier(role)))
        try:
            root.execute(sql.SQL("alter database bare owner to {}").format(sql.Identifier(OWNER)))
            with psycopg.connect(make_conninfo(empty_dsn, user=OWNER), autocommit=True) as owner:
                install.install(owner)
                for _ in range(2):
                    owner.execute(install.extra_sql("row_level_security"))
                # More than any application needs: what stops it must be the policies.
                for grant in (
                    "usage on schema pycontext",
                    "select, insert, update, delete on all tables in schema pycontext",
                    "execute on all functions in schema pycontext",
                ):
                    owner.execute(f"grant {grant} to {APP}")
            for tenant in ("a", "b"):
                with session(empty_dsn, tenant) as conn:
                    fill(conn, tenant)
            yield empty_dsn
        finally:
            root.execute("alter database bare owner to current_user")
            for role in (APP, OWNER):
                root.execute(sql.SQL("drop owned by {} cascade").format(sql.Identifier(role)))
                root.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


@contextmanager
def session(dsn: str, tenant: str | None, user: str = APP) -> Iterator[Connection]:
    with psycopg.connect(make_conninfo(dsn, user=user), autocommit=True) as conn:
        if tenant is not None:
            conn.execute("select set_config('pycontext.tenant', %s, false)", (tenant,))
        yield conn


def fill(conn: Connection, tenant: str) -> None:
    """One chat with a row in every table that chats have."""
    chat = f"chat_{tenant}"
    conn.execute(
        "select pycontext.create_chat(%s, system_prompt => %s, tenant => %s, owner => 'o')",
        (chat, f"prompt of {tenant}", tenant),
    )
    for n in range(3):
        conn.execute(
            "select pycontext.append_message(%s, 'user', %s::text, message_id => %s)",
            (chat, f"said by {tenant}", f"m{n}"),
        )
    conn.execute(
        """select pycontext.cache_token_counts(%s, 'cl100k_base', '[{"seq": 1, "tokens": 9}]')""", (chat,)
    )
    conn.execute("select pycontext.fail_compaction(%s, 'm0', 'skipped', 'small')", (chat,))
    conn.execute("select pycontext.remember(%s, %s)", (chat, f"a fact of {tenant}"))
    conn.execute("select pycontext.claim_compaction(%s, 'holder')", (chat,))
    conn.execute("select pycontext.pin_message(%s, 'm1')", (chat,))
    conn.execute("select pycontext.start_over(%s)", (chat,))


def relations(conn: Connection) -> list[str]:
    return [name for (name,) in conn.execute(TENANT_TABLES)] + ["compaction_history"]


def everything(conn: Connection) -> dict[str, list[Any]]:
    return {
        name: conn.execute(
            sql.SQL("select to_jsonb(t) from pycontext.{} t order by to_jsonb(t)::text").format(
                sql.Identifier(name)
            )
        ).fetchall()
        for name in relations(conn)
    }


def rows(conn: Connection, name: str) -> list[dict[str, Any]]:
    return [row for (row,) in everything(conn)[name]]


def test_every_table_with_a_tenant_is_bound(isolated: str) -> None:
    with psycopg.connect(isolated) as root:
        names = [name for (name,) in root.execute(TENANT_TABLES)]
        assert len(names) >= 8
        loose = root.execute(
            """
            select c.relname from pg_class c
            where c.relnamespace = 'pycontext'::regnamespace and c.relname = any(%s)
            and not (c.relrowsecurity and c.relforcerowsecurity
                and exists (
                    select from pg_policy p where p.polrelid = c.oid and p.polname = 'tenant_isolation'))
            """,
            (names,),
        ).fetchall()
        assert not loose
        # What every chat writes is there to be hidden.
        for name in relations(root):
            if name not in ("profile", "source", "compaction_history"):
                assert len(rows(root, name)) >= 2, name


@pytest.mark.parametrize("user", [APP, OWNER])
def test_a_tenant_sees_its_own_rows_only(isolated: str, user: str) -> None:
    for tenant in ("a", "b"):
        with session(isolated, tenant, user) as conn:
            for name, found in everything(conn).items():
                if name in ("profile", "source"):
                    continue
                assert found, name
                assert {row["chat_id"] for (row,) in found} == {f"chat_{tenant}"}, name
                assert name == "compaction_history" or {row["tenant"] for (row,) in found} == {tenant}, name


@pytest.mark.parametrize("user", [APP, OWNER])
@pytest.mark.parametrize("tenant", [None, "", "c", "A"])
def test_another_tenant_or_none_sees_nothing(isolated: str, tenant: str | None, user: str) -> None:
    with session(isolated, tenant, user) as conn:
        for name, found in everything(conn).items():
            assert name == "profile" or not found, name


CALLS = [
    "select pycontext.append_message('chat_a', 'user', 'intruder'::text)",
    """select pycontext.append_messages('chat_a', '[{"role": "user", "content": "intruder"}]')""",
    "select pycontext.start_over('chat_a')",
    "select pycontext.cache_token_counts('chat_a', 'o200k_base', '[]')",
    "select pycontext.fail_compaction('chat_a', 'm0', 'failed', 'x')",
    """select pycontext.put_summary('chat_a', 'm1', '{"notes": "mine now"}')""",
    "select pycontext.start_turn('chat_a')",
    "select pycontext.working_window('chat_a')",
    "select pycontext.openai_messages('chat_a')",
    "select pycontext.anthropic_messages('chat_a')",
    "select pycontext.thread('chat_a')",
    "select pycontext.window_status('chat_a')",
    "select pycontext.compaction_plan('chat_a')",
    "select pycontext.compaction_source('chat_a', 'm1')",
    "select pycontext.uncounted_messages('chat_a')",
    "select pycontext.message_original('chat_a', 1)",
    "select pycontext.search_thread('chat_a', 'said')",
    "select pycontext.set_system_prompt('chat_a', 'mine now')",
    "select pycontext.set_chat_profile('chat_a', 'long-1m')",
    "select pycontext.unpin_message('chat_a', 'm1')",
    "select pycontext.fork_chat('chat_a', 'chat_a2')",
    "select pycontext.redact_message('chat_a', 'm1')",
    "select pycontext.rewind_chat('chat_a', 'm0')",
    "select pycontext.pin_message('chat_a', 'm0')",
    "select pycontext.drop_summary('chat_a', 'm0')",
    "select pycontext.delete_chat('chat_a')",
]


def state_of(conn: Connection, call: str) -> str | None:
    """SQLSTATE of the error that a call ends in, None where it works."""
    try:
        conn.execute(call)
    except psycopg.Error as error:
        return error.sqlstate
    return None


def test_no_function_reaches_another_tenants_chat(isolated: str) -> None:
    with session(isolated, "a") as conn:
        before = everything(conn)
    with session(isolated, "b") as conn:
        assert {call: state_of(conn, call) for call in CALLS} == dict.fromkeys(CALLS, "PCX01")
    with session(isolated, "a") as conn:
        # The same calls work for who may: they failed for the tenant, not for a slip in the call.
        assert everything(conn) == before
        states = [state_of(conn, call) for call in CALLS]
        assert "PCX01" not in states
        assert states.count(None) >= len(CALLS) - 2


def test_no_function_reaches_it_where_a_source_answers(isolated: str) -> None:
    # To tenant b the chat has no row, and so is the source's; its id is taken nevertheless.
    with session(isolated, "", OWNER) as conn:
        conn.execute(
            """
            create schema shop;
            create view shop.post as select 'chat_a' as chat_id, n as seq, n as message_id, 'user' as role,
                'said in the shop' as content, now() as created_at from generate_series(1, 3) n;
            select pycontext.register_source('shop', 'shop.post', true);
            """
        )
        conn.execute(
            sql.SQL("grant usage on schema shop to {0}; grant select on shop.post to {0}").format(
                sql.Identifier(APP)
            )
        )
    with session(isolated, "a") as conn:
        before = everything(conn)
    with session(isolated, "b") as conn:
        states = {state_of(conn, call) for call in (*CALLS, "select pycontext.start_over('chat_a')")}
        assert "PCX10" in states
        assert {state for state in states if state} <= {"PCX01", "PCX02", "PCX07", "PCX09", "PCX10"}
    with session(isolated, "a") as conn:
        assert everything(conn) == before


def test_an_owner_of_another_tenant_is_not_forgotten(isolated: str) -> None:
    with session(isolated, "a") as conn:
        before = everything(conn)
    with session(isolated, "b") as conn:
        gone = conn.execute("select sum(rows) from pycontext.forget_owner('o', 'a')").fetchone()
        assert gone == (0,)
        gone = conn.execute("select sum(rows) from pycontext.forget_owner('o')").fetchone()
        assert gone is not None
        assert gone[0] > 0
    with session(isolated, "a") as conn:
        assert everything(conn) == before


@pytest.mark.parametrize("call", ["set_profile('default', context_window => 64000)", "set_profile('theirs')"])
def test_profiles_of_others_are_not_altered(isolated: str, call: str) -> None:
    with session(isolated, "a") as conn:
        conn.execute("select pycontext.set_profile('theirs', context_window => 32000)")
        before = rows(conn, "profile")
    with session(isolated, "b") as conn:
        assert state_of(conn, f"select pycontext.{call}") == "PCX10"
        conn.execute("select pycontext.set_profile('ours', context_window => 32000)")
        conn.execute("select pycontext.set_chat_profile('chat_b', 'ours')")
    with session(isolated, "a") as conn:
        assert rows(conn, "profile") == before


def test_tables_can_not_be_written_for_another_tenant(isolated: str) -> None:
    with session(isolated, "a") as conn:
        before = everything(conn)
    with session(isolated, "b") as conn:
        for name in before:
            if name != "compaction_history":
                table = sql.Identifier(name)
                change = "update pycontext.{} set tenant = 'b' where tenant <> 'b'"
                assert conn.execute(sql.SQL(change).format(table)).rowcount == 0, name
                remove = "delete from pycontext.{} where tenant <> 'b'"
                assert conn.execute(sql.SQL(remove).format(table)).rowcount == 0, name
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    conn.execute(sql.SQL("insert into pycontext.{} (tenant) values ('a')").format(table))
    with session(isolated, "a") as conn:
        assert everything(conn) == before


def test_a_chat_is_not_made_for_another_tenant(isolated: str) -> None:
    with session(isolated, "b") as conn:
        with pytest.raises(psycopg.Error):
            conn.execute("select pycontext.create_chat('chat_new', tenant => 'a')")
        assert [row["chat_id"] for row in rows(conn, "chat")] == ["chat_b"]
    with session(isolated, "a") as conn:
        assert [row["chat_id"] for row in rows(conn, "chat")] == ["chat_a"]


@pytest.mark.parametrize(
    "call",
    [
        "select pycontext.create_chat('chat_new', tenant => 'a')",
        "select pycontext.create_chat('chat_a', tenant => 'b')",
        "select pycontext.create_chat('chat_a')",
    ],
)
def test_a_chat_of_another_tenant_is_refused_by_name(isolated: str, call: str) -> None:
    with session(isolated, "b") as conn, pytest.raises(psycopg.Error) as caught:
        conn.execute(call)
    assert caught.value.sqlstate == "PCX10"


@pytest.mark.parametrize(
    "call",
    ["select pycontext.create_chat('chat_new')", """select pycontext.start_turn('chat_new', '"hello"')"""],
)
def test_a_chat_belongs_to_the_tenant_that_the_session_named(isolated: str, call: str) -> None:
    with session(isolated, "b") as conn:
        conn.execute(call)
        assert {row["tenant"] for row in rows(conn, "chat") if row["chat_id"] == "chat_new"} == {"b"}


def test_shared_profiles_are_read_by_all_and_changed_by_none(isolated: str) -> None:
    with session(isolated, "a") as conn:
        shared = rows(conn, "profile")
        assert {row["profile"] for row in shared} >= {"default", "small-8k"}
        assert conn.execute("update pycontext.profile set head_tokens = 1").rowcount == 0
        conn.execute("insert into pycontext.profile (profile, tenant) values ('mine', 'a')")
        conn.execute("select pycontext.create_chat('chat_a2', profile => 'mine', tenant => 'a')")
    with session(isolated, "b") as conn:
        assert rows(conn, "profile") == shared


def test_an_owner_that_no_policy_binds_is_refused(db: Connection) -> None:
    # The schema of this database was installed by a superuser.
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
        db.execute(install.extra_sql("row_level_security"))
    assert caught.value.diag.message_hint
    assert db.execute("select count(*) from pg_policy").fetchone() == (0,)
