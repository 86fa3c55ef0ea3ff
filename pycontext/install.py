"""Puts schema pycontext into a database: one SQL text, the same for psql and for `install`.

The text takes an advisory lock, refuses a database newer than this code (PCX11), runs each migration once
(its row first, then its body) and then all of api/*.sql. Running it twice, or twenty at once, is harmless.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from pycontext import errors

__all__ = [
    "Migration",
    "build_id",
    "build_sql",
    "extend_search_path",
    "extra_sql",
    "install",
    "known_migrations",
    "schema_state",
    "schema_version",
    "sql_dir",
    "uninstall",
]

DISTRIBUTION = "pycontext-pg"

# Holds installers apart, whatever their version: never change it.
LOCK_KEY = 7_234_015_113_000_001

SchemaState = Literal["absent", "older", "current", "newer", "changed"]


@dataclass(frozen=True)
class Migration:
    """One file of sql/migrations: its name without suffix, its text and the sha256 of the text."""

    name: str
    sha256: str
    text: str


def sql_dir() -> Path:
    """The folder of the SQL files: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "sql", here.parent / "sql"):
        if (folder / "migrations").is_dir():
            return folder
    raise errors.PycontextError(
        "the SQL files of pycontext are missing",
        detail=f"looked for sql/migrations in {here} and {here.parent}",
        hint=f"reinstall {DISTRIBUTION}",
    )


class SchemaNotReplaceable(errors.PycontextError):
    """Views or functions of a development version are there that `create or replace` can't change."""


def known_migrations(folder: Path | None = None) -> tuple[Migration, ...]:
    """The migrations this code knows, in the order in which they run."""
    found = []
    for path in sorted(((folder or sql_dir()) / "migrations").glob("*.sql")):
        text = _read(path)
        found.append(Migration(path.stem, hashlib.sha256(text.encode()).hexdigest(), text))
    return tuple(found)


def build_id(folder: Path | None = None) -> str:
    """Twelve hex digits over all that `build_sql` installs; the database keeps those of its last install."""
    folder = folder or sql_dir()
    digest = hashlib.sha256()
    for migration in known_migrations(folder):
        digest.update(f"{migration.name} {migration.sha256}\n".encode())
    for path in _api_files(folder):
        digest.update(f"{path.name}\n{_read(path)}".encode())
    return digest.hexdigest()[:12]


def build_sql(folder: Path | None = None, *, transaction: bool = True) -> str:
    """The SQL text that installs or upgrades the schema.

    transaction: with `begin` and `commit` around it; without, for a migration tool that opens its own.
    """
    folder = folder or sql_dir()
    migrations = known_migrations(folder)
    parts = [_header()]
    if transaction:
        parts.append("begin isolation level read committed;\n")
    parts.append(_prologue(migrations))
    parts.extend(_migration_block(migration) for migration in migrations)
    for path in _api_files(folder):
        parts.append(f"-- {path.parent.name}/{path.name}\n\n{_read(path).rstrip()}\n")
    parts.append(_epilogue(build_id(folder)))
    if transaction:
        parts.append("commit;\n")
    return "\n".join(parts)


def install(conn: psycopg.Connection[Any], folder: Path | None = None) -> None:
    """Installs or upgrades the schema: runs `build_sql` on this connection.

    In a transaction of the caller's it becomes part of it (and must be READ COMMITTED); otherwise it commits.
    Raises SchemaTooNew where the database holds a migration that this code does not know, and
    SchemaNotReplaceable where a development version's views or functions are in the way.
    """
    try:
        _install(conn, build_sql(folder, transaction=False))
    except (psycopg.errors.InvalidTableDefinition, psycopg.errors.InvalidFunctionDefinition) as error:
        # A view or function can't be replaced by any other; released ones only change as they can.
        raise SchemaNotReplaceable(
            "the database was made by a development version whose views or functions have changed since",
            detail=error.diag.message_primary,
            hint="export what you need, run sql/uninstall.sql and install again",
        ) from error


def _install(conn: psycopg.Connection[Any], text: str) -> None:
    idle = conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    with errors.translate(missing=False), conn.transaction():
        if idle:
            conn.execute("set transaction isolation level read committed")
        kept = [
            (name, _value(conn, "select current_setting(%s)", (name,)))
            for name in ("search_path", "client_min_messages", "check_function_bodies")
        ]
        _execute_text(conn, text)
        # What the text sets locally would last until the end of the caller's transaction.
        for name, value in kept:
            conn.execute("select pg_catalog.set_config(%s, %s, true)", (name, value))


def uninstall(conn: psycopg.Connection[Any], folder: Path | None = None) -> None:
    """Runs sql/uninstall.sql: drops the schema with all chats in it. There is no way back."""
    with errors.translate(), conn.transaction():
        _execute_text(conn, _read((folder or sql_dir()) / "uninstall.sql"))


def extra_sql(name: str, folder: Path | None = None) -> str:
    """The text of one file of sql/extras, by its name without suffix."""
    path = (folder or sql_dir()) / "extras" / f"{name}.sql"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.sql"))) or "none"
        raise errors.PycontextError(f"no extra named {name}", detail=f"there are: {known}")
    return _read(path)


def schema_version(conn: psycopg.Connection[Any]) -> str | None:
    """The newest migration in this database, None where the schema is not installed."""
    if not _has_migration_table(conn):
        return None
    version = _value(conn, "select max(migration.name) from pycontext.migration")
    return None if version is None else str(version)


def schema_state(conn: psycopg.Connection[Any], folder: Path | None = None) -> SchemaState:
    """How the database's schema stands to this code.

    older: `install` would change it. newer: it holds a migration unknown here. changed: a development version
    ran a migration that reads otherwise now. `install` refuses the last two.
    """
    if not _has_migration_table(conn):
        return "absent"
    installed = _value(
        conn, "select coalesce(json_object_agg(m.name, m.sha256), '{}') from pycontext.migration m"
    )
    known = {migration.name: migration.sha256 for migration in known_migrations(folder)}
    if installed.keys() - known.keys():
        return "newer"
    if any(known[name] != digest for name, digest in installed.items()):
        return "changed"
    note = _value(
        conn, "select pg_catalog.obj_description('pycontext.migration'::pg_catalog.regclass, 'pg_class')"
    )
    same_build = f"build {build_id(folder)}" in str(note or "")
    return "current" if installed == known and same_build else "older"


def extend_search_path(
    conn: psycopg.Connection[Any], *, role: str | None = None, database: str | None = None
) -> str:
    """Appends pycontext to the search path of one role, or of one database, for new sessions; returns it."""
    if (role is None) == (database is None):
        raise ValueError("give either role or database")
    setting = _value(
        conn,
        """
        select pg_catalog.split_part(setting.pair, '=', 2)
        from pg_catalog.pg_db_role_setting s
        cross join lateral pg_catalog.unnest(s.setconfig) as setting (pair)
        where setting.pair like 'search\\_path=%%'
        and s.setrole = coalesce((select r.oid from pg_catalog.pg_roles r where r.rolname = %(role)s), 0)
        and s.setdatabase = coalesce(
            (select d.oid from pg_catalog.pg_database d where d.datname = %(database)s), 0)
        """,
        {"role": role, "database": database},
    )
    path = str(setting) if setting else '"$user", public'
    if "pycontext" in [name.strip().strip('"') for name in path.split(",")]:
        return path
    path = f"{path}, pycontext"
    # The path is a list of identifiers, already quoted as the server keeps them: not one literal.
    if role is not None:
        target = sql.SQL("alter role {} set search_path = ").format(sql.Identifier(role))
    else:
        assert database is not None
        target = sql.SQL("alter database {} set search_path = ").format(sql.Identifier(database))
    conn.execute(target + sql.SQL(path))
    return path


def _has_migration_table(conn: psycopg.Connection[Any]) -> bool:
    return bool(_value(conn, "select pg_catalog.to_regclass('pycontext.migration') is not null"))


def _value(conn: psycopg.Connection[Any], query: Any, arguments: Any = None) -> Any:
    cursor = psycopg.ClientCursor(conn, row_factory=tuple_row)
    row = cursor.execute(query, arguments).fetchone()
    return None if row is None else row[0]


def _execute_text(conn: psycopg.Connection[Any], text: str) -> None:
    # No arguments, so % stays as it is, and many statements go in one round trip.
    psycopg.ClientCursor(conn).execute(text.encode())


def _api_files(folder: Path) -> list[Path]:
    return sorted((folder / "api").glob("*.sql"))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _dollar(text: str, tag: str) -> str:
    while f"${tag}$" in text:
        tag += "_"
    return f"${tag}${text}${tag}$"


def _header() -> str:
    return f"""\
-- Installs or upgrades schema pycontext ({DISTRIBUTION} {_version()}). Generated; harmless to run again.
-- psql -v ON_ERROR_STOP=1 -f FILE
"""


def _prologue(migrations: tuple[Migration, ...]) -> str:
    known = ", ".join(f"({_literal(m.name)}, {_literal(m.sha256)})" for m in migrations)
    if not known:
        known = "(null, null)"
    body = f"""
declare
    v_names text;
begin
    if pg_catalog.current_setting('server_version_num')::int < 150000 then
        raise exception 'pycontext needs PostgreSQL 15 or newer'
            using errcode = '0A000', detail = pg_catalog.version();
    end if;
    if pg_catalog.current_setting('server_encoding') <> 'UTF8' then
        raise exception 'pycontext needs a database with encoding UTF8'
            using errcode = '0A000', detail = 'encoding is ' || pg_catalog.current_setting('server_encoding');
    end if;
    -- Until the end an overload of an earlier version stands beside its successor: a body can't be checked.
    if exists (
        select from pg_catalog.pg_proc p
        join pg_catalog.pg_namespace n on n.oid = p.pronamespace and n.nspname = 'pycontext') then
        set local check_function_bodies = off;
    end if;
    -- "if not exists" needs the right to create even where there is nothing to create: look first.
    if not exists (select from pg_catalog.pg_namespace n where n.nspname = 'pycontext') then
        create schema pycontext;
    end if;
    if pg_catalog.to_regclass('pycontext.migration') is null then
        create table pycontext.migration (
            name text collate "C" not null,
            sha256 text not null,
            installed_at timestamptz not null default pg_catalog.now(),
            constraint migration_pk primary key (name)
        );
        comment on column pycontext.migration.name is 'file name without suffix; they run in this order';
        comment on column pycontext.migration.sha256 is 'digest of the text that was run';
        comment on column pycontext.migration.installed_at is 'when it was run';
    end if;
    select pg_catalog.string_agg(m.name, ', ' order by m.name)
    into v_names
    from pycontext.migration m
    where not exists (select from (values {known}) as known (name, sha256) where known.name = m.name);
    if v_names is not null then
        raise exception 'the database holds a newer pycontext schema than this code knows'
            using errcode = 'PCX11', detail = 'unknown migrations: ' || v_names,
            hint = 'upgrade the Python package: pip install --upgrade {DISTRIBUTION}';
    end if;
    select pg_catalog.string_agg(m.name, ', ' order by m.name)
    into v_names
    from pycontext.migration m
    join (values {known}) as known (name, sha256) on known.name = m.name and known.sha256 <> m.sha256;
    if v_names is not null then
        raise exception 'the database was made by a development version whose migrations have changed since'
            using errcode = 'PCX11', detail = 'changed migrations: ' || v_names,
            hint = 'export what you need, run sql/uninstall.sql and install again';
    end if;
end
"""
    return f"""\
set local search_path = '';
set local client_min_messages = warning;

-- Before anything is looked at: installers wait for each other here.
do $pycontext$
begin
    perform pg_catalog.pg_advisory_xact_lock({LOCK_KEY});
end
$pycontext$;

do $pycontext${body}$pycontext$;
"""


def _migration_block(migration: Migration) -> str:
    body = f"""
begin
    insert into pycontext.migration (name, sha256)
    values ({_literal(migration.name)}, {_literal(migration.sha256)})
    on conflict on constraint migration_pk do nothing;
    if found then
        execute {_dollar(migration.text, "pycontext_sql")};
    end if;
end
"""
    return f"-- migrations/{migration.name}.sql\n\ndo {_dollar(body, 'pycontext')};\n"


def _epilogue(build: str) -> str:
    installed = f"{DISTRIBUTION} {_version()}, build {build}"
    return f"""\
comment on table pycontext.migration is
    {_literal(f"Migrations that were run in this database, each once. Last install: {installed}")};

do $pycontext$
begin
    -- A schema that somebody else made for us is theirs to comment.
    if (select pg_catalog.pg_has_role(n.nspowner, 'usage') from pg_catalog.pg_namespace n
        where n.nspname = 'pycontext') then
        comment on schema pycontext is
            'Short-term memory for LLM chats: select * from pycontext.working_window(chat_id)';
    end if;
end
$pycontext$;
"""
