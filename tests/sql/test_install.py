"""Installing: the same catalog whichever way and however often, and a newer database is refused."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pycontext import install
from pycontext.embedded import binaries
from pycontext.errors import SchemaTooNew

Connection = psycopg.Connection[Any]

pytestmark = pytest.mark.core

# Everything the schema holds, as text without oids, owners' names replaced: two equal lists are one schema.
CATALOG = """
    with mine as (select 'pycontext'::regnamespace as oid)
    select 'schema', n.nspname::text, obj_description(n.oid, 'pg_namespace'), n.nspacl::text
    from pg_namespace n, mine where n.oid = mine.oid
    union all
    select 'relation ' || c.relkind::text, c.relname::text, obj_description(c.oid, 'pg_class'),
        concat_ws(' | ', c.relacl::text, c.relrowsecurity, c.relforcerowsecurity, c.reloptions::text,
        case when c.relkind in ('v', 'm') then pg_get_viewdef(c.oid) end,
        case when c.relkind = 'i' then pg_get_indexdef(c.oid) end)
    from pg_class c, mine where c.relnamespace = mine.oid
    union all
    select 'column', c.relname || '.' || a.attname, col_description(c.oid, a.attnum),
        concat_ws(' | ', a.attnum, format_type(a.atttypid, a.atttypmod), a.attnotnull,
            a.attcollation::regcollation::text, a.attacl::text, pg_get_expr(d.adbin, d.adrelid))
    from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
    left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum, mine
    where c.relnamespace = mine.oid and c.relkind in ('r', 'p', 'v')
    union all
    select 'constraint', k.conrelid::regclass::text || ' ' || k.conname,
        obj_description(k.oid, 'pg_constraint'), pg_get_constraintdef(k.oid)
    from pg_constraint k, mine where k.connamespace = mine.oid
    union all
    select 'function', f.oid::regprocedure::text, obj_description(f.oid, 'pg_proc'),
        concat_ws(' | ', f.proacl::text, pg_get_functiondef(f.oid))
    from pg_proc f, mine where f.pronamespace = mine.oid and f.prokind in ('f', 'p')
    union all
    select 'migration', m.name, null, m.sha256 from pycontext.migration m
    order by 1, 2, 4
"""


def catalog(dsn: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, options="-c search_path=") as conn:
        found = conn.execute(CATALOG).fetchall()
        # What migrations put into tables belongs to it.
        profiles = conn.execute("select 'profile', to_jsonb(p)::text from pycontext.profile p order by 2")
        found += profiles.fetchall()
        return found


def put(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        install.install(conn)


def psql(dsn: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "install.sql"
    path.write_text(text, encoding="utf-8")
    subprocess.run(
        [binaries() / "psql", dsn, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", path],
        check=True,
        capture_output=True,
        text=True,
    )


def test_what_cannot_be_replaced_is_said_clearly(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("alter view pycontext.finding_row rename column detail to details")
        with pytest.raises(install.SchemaNotReplaceable) as caught:
            install.install(conn)
        assert "details" in str(caught.value.detail)
        assert "uninstall.sql" in str(caught.value.hint)
        assert conn.execute("select count(*) from pycontext.profile").fetchone() is not None


def test_twice_is_once(dsn: str, empty_dsn: str) -> None:
    put(empty_dsn)
    once = catalog(empty_dsn)
    assert len(once) > 50
    put(empty_dsn)
    put(empty_dsn)
    assert catalog(empty_dsn) == once
    assert catalog(dsn) == once


def test_psql_runs_the_same_text(dsn: str, empty_dsn: str, tmp_path: Path) -> None:
    for _ in range(2):
        psql(empty_dsn, install.build_sql(), tmp_path)
        assert catalog(empty_dsn) == catalog(dsn)
    with psycopg.connect(empty_dsn) as conn:
        assert install.schema_state(conn) == "current"


@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
def test_twenty_at_once(dsn: str, empty_dsn: str, isolation: str) -> None:
    barrier = threading.Barrier(20)
    failures: list[BaseException] = []

    def one() -> None:
        try:
            options = f"-c default_transaction_isolation={isolation.replace(' ', chr(92) + ' ')}"
            with psycopg.connect(empty_dsn, options=options) as conn:
                barrier.wait(timeout=30)
                install.install(conn)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=one) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert catalog(empty_dsn) == catalog(dsn)


def test_a_newer_database_is_refused_and_left_alone(db: Connection, dsn: str) -> None:
    db.execute("insert into pycontext.migration (name, sha256) values ('999_tomorrow', 'x')")
    before = catalog(dsn)
    with pytest.raises(SchemaTooNew) as caught:
        install.install(db)
    assert caught.value.sqlstate == "PCX11"
    assert "999_tomorrow" in (caught.value.detail or "")
    assert "pycontext-pg" in (caught.value.hint or "")
    assert install.schema_state(db) == "newer"
    assert catalog(dsn) == before


def test_psql_refuses_a_newer_database_too(db: Connection, dsn: str, tmp_path: Path) -> None:
    db.execute("insert into pycontext.migration (name, sha256) values ('999_tomorrow', 'x')")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        psql(dsn, install.build_sql(), tmp_path)
    assert "999_tomorrow" in caught.value.stderr


def test_uninstall_leaves_nothing(db: Connection, empty_dsn: str) -> None:
    everything = """
        select 'namespace ' || nspname from pg_namespace where nspname !~ '^pg_(temp|toast_temp)'
        union all select 'class ' || c.oid::regclass::text from pg_class c where c.oid > 16383
        union all select 'function ' || oid::regprocedure::text from pg_proc where oid > 16383
        union all select 'type ' || oid::regtype::text from pg_type where oid > 16383
        union all select 'default acl' from pg_default_acl
        union all select 'setting' from pg_db_role_setting
        order by 1
    """
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        before = conn.execute(everything).fetchall()
        install.install(conn)
        assert conn.execute(everything).fetchall() != before
        install.uninstall(conn)
        assert conn.execute(everything).fetchall() == before
        install.uninstall(conn)
        install.install(conn)
        assert install.schema_state(conn) == "current"


@pytest.fixture
def plain_role(empty_dsn: str) -> Iterator[str]:
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("create role plain_installer login")
        yield "plain_installer"
        conn.execute("drop owned by plain_installer cascade")
        conn.execute("drop role plain_installer")


def test_no_superuser_is_needed(empty_dsn: str, plain_role: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as admin:
        admin.execute(f"grant create on database bare to {plain_role}")
        with psycopg.connect(empty_dsn, user=plain_role) as conn:
            install.install(conn)
            install.install(conn)
            assert install.schema_state(conn) == "current"
        # Again without the right to create schemas: there is one.
        admin.execute(f"revoke create on database bare from {plain_role}")
        with psycopg.connect(empty_dsn, user=plain_role) as conn:
            install.install(conn)


def test_a_schema_made_by_the_dba_is_used(empty_dsn: str, plain_role: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as admin:
        admin.execute("create schema pycontext")
        admin.execute(f"grant usage, create on schema pycontext to {plain_role}")
        with psycopg.connect(empty_dsn, user=plain_role) as conn:
            install.install(conn)
            assert install.schema_state(conn) == "current"


def test_the_callers_transaction_is_the_callers(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn) as conn:
        conn.execute("set local search_path = pg_catalog, public")
        install.install(conn)
        assert conn.execute("show search_path").fetchone() == ("pg_catalog, public",)
        conn.rollback()
        assert install.schema_state(conn) == "absent"


def test_search_path_is_appended_once(empty_dsn: str, plain_role: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        assert install.extend_search_path(conn, database="bare") == '"$user", public, pycontext'
        assert install.extend_search_path(conn, database="bare") == '"$user", public, pycontext'
        conn.execute(f'alter role {plain_role} set search_path = "My Shop", public')
        install.extend_search_path(conn, role=plain_role)
    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("show search_path").fetchone() == ('"$user", public, pycontext',)
    with psycopg.connect(empty_dsn, user=plain_role) as conn:
        assert conn.execute("show search_path").fetchone() == ('"My Shop", public, pycontext',)


# What the mechanism does with migrations, on small files of our own.


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = tmp_path / "sql"
    (folder / "migrations").mkdir(parents=True)
    (folder / "api").mkdir()
    (folder / "migrations" / "001_a.sql").write_text(
        "create table pycontext.t (n int);\n-- $pycontext_sql$ ' %s\n"
    )
    (folder / "api" / "010_f.sql").write_text(
        "create or replace function pycontext.f() returns int language sql stable return 1;\n"
    )
    return folder


def test_each_migration_runs_once_and_api_each_time(empty_dsn: str, small: Path) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        assert install.schema_state(conn, small) == "absent"
        install.install(conn, small)
        assert install.schema_state(conn, small) == "current"
        (small / "migrations" / "002_b.sql").write_text("insert into pycontext.t values (2);\n")
        (small / "api" / "010_f.sql").write_text(
            "create or replace function pycontext.f() returns int language sql stable return 2;\n"
        )
        assert install.schema_state(conn, small) == "older"
        install.install(conn, small)
        install.install(conn, small)
        assert install.schema_state(conn, small) == "current"
        assert conn.execute("select array_agg(n), pycontext.f() from pycontext.t").fetchone() == ([2], 2)
        assert install.schema_version(conn) == "002_b"


def test_a_failed_migration_leaves_nothing(empty_dsn: str, small: Path) -> None:
    (small / "migrations" / "002_b.sql").write_text("create table pycontext.u (n int); select 1 / 0;\n")
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        with pytest.raises(psycopg.errors.DivisionByZero):
            install.install(conn, small)
        assert install.schema_state(conn, small) == "absent"


def test_a_mistake_in_the_sql_is_told_as_it_is(empty_dsn: str, small: Path) -> None:
    (small / "api" / "010_f.sql").write_text("select pycontext.g();\n")
    with psycopg.connect(empty_dsn) as conn, pytest.raises(psycopg.errors.UndefinedFunction):
        install.install(conn, small)


def test_a_changed_migration_is_refused(empty_dsn: str, small: Path) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        install.install(conn, small)
        (small / "migrations" / "001_a.sql").write_text("create table pycontext.t (n bigint);\n")
        assert install.schema_state(conn, small) == "changed"
        with pytest.raises(SchemaTooNew) as caught:
            install.install(conn, small)
        assert "001_a" in (caught.value.detail or "")


def test_an_overload_of_an_earlier_version_goes(db: Connection) -> None:
    """A new parameter makes a new function: with the old one beside it a call would be ambiguous."""
    db.execute(
        "create function pycontext._thread_rows(chat_id text, source text, from_seq bigint[],"
        " to_seq bigint[], as_of_act bigint default null, more integer default null)"
        " returns integer language sql as 'select 1'"
    )
    db.execute("create function pycontext.of_the_product(n int) returns int language sql as 'select n'")
    install.install(db)
    found = db.execute(
        "select p.proname, count(*) from pg_proc p where p.pronamespace = 'pycontext'::regnamespace"
        " and p.proname in ('_thread_rows', 'of_the_product') group by 1 order by 1"
    ).fetchall()
    assert found == [("_thread_rows", 1), ("of_the_product", 1)]
    assert db.execute("show check_function_bodies").fetchone() == ("on",)
