"""Rules for every SQL object and every SQL file: comments, rights, settings, nothing that Citus can't do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pycontext import install

Connection = psycopg.Connection[Any]

FUNCTIONS = """
    select f.oid::regprocedure::text as signature, f.proname as name, f.proacl, f.proconfig,
        l.lanname as language, f.provolatile as volatility, f.prosecdef as definer, f.prokind as kind,
        obj_description(f.oid, 'pg_proc') as comment, pg_get_functiondef(f.oid) as definition
    from pg_proc f
    join pg_language l on l.oid = f.prolang
    where f.pronamespace = 'pycontext'::regnamespace and f.prokind in ('f', 'p')
    order by 1
"""


@pytest.fixture(params=["core", "extras"])
def db(db: Connection, request: pytest.FixtureRequest) -> Connection:
    """The core alone, and with what may be added to it."""
    if request.param == "extras":
        if db.info.server_version < 160000:
            pytest.skip("no pgvector for Debian's PostgreSQL 15 here")
        db.execute(install.extra_sql("embeddings"))
        db.execute("select pycontext.use_embedding_model('tiny', 3)")
    return db


def rows(db: Connection, query: str) -> list[dict[str, Any]]:
    cursor = db.execute(query)
    names = [column.name for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def private(name: str) -> bool:
    return name.startswith("_")


@pytest.mark.core
def test_there_is_something_to_hold_to_the_rules(db: Connection) -> None:
    assert len(rows(db, FUNCTIONS)) >= 10
    assert not private("working_window")


def test_public_objects_are_commented(db: Connection) -> None:
    bare = [f["signature"] for f in rows(db, FUNCTIONS) if not private(f["name"]) and not f["comment"]]
    relations = rows(
        db,
        """
        select c.relname as name, c.relkind as kind, obj_description(c.oid, 'pg_class') as comment
        from pg_class c
        where c.relnamespace = 'pycontext'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'f')
        """,
    )
    bare += [r["name"] for r in relations if not private(r["name"]) and not r["comment"]]
    columns = rows(
        db,
        """
        select c.relname as name, a.attname as column, col_description(c.oid, a.attnum) as comment
        from pg_class c
        join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
        where c.relnamespace = 'pycontext'::regnamespace and c.relkind in ('r', 'p', 'v', 'm')
        """,
    )
    bare += [f"{c['name']}.{c['column']}" for c in columns if not private(c["name"]) and not c["comment"]]
    types = rows(
        db,
        """
        select t.typname as name from pg_type t
        where t.typnamespace = 'pycontext'::regnamespace and t.typtype in ('e', 'd')
        and obj_description(t.oid, 'pg_type') is null
        """,
    )
    bare += [t["name"] for t in types if not private(t["name"])]
    assert not bare, f"without COMMENT: {', '.join(sorted(bare))}"
    assert rows(db, "select obj_description('pycontext'::regnamespace, 'pg_namespace') as c")[0]["c"]


@pytest.mark.core
def test_nothing_is_granted_to_public(db: Connection) -> None:
    open_to_all = rows(
        db,
        """
        select f.oid::regprocedure::text as name from pg_proc f
        where f.pronamespace = 'pycontext'::regnamespace
        and (f.proacl is null
            or exists (select from aclexplode(f.proacl) g where g.grantee = 0))
        union all
        select c.relname from pg_class c, aclexplode(c.relacl) g
        where c.relnamespace = 'pycontext'::regnamespace and g.grantee = 0
        union all
        select 'schema pycontext' from pg_namespace n, aclexplode(n.nspacl) g
        where n.nspname = 'pycontext' and g.grantee = 0
        """,
    )
    assert not open_to_all, "open to PUBLIC: " + ", ".join(row["name"] for row in open_to_all)


@pytest.mark.core
def test_an_ungranted_role_can_do_nothing(db: Connection) -> None:
    db.execute("create role nobody_here")
    try:
        allowed = rows(
            db,
            """
            select f.oid::regprocedure::text as name from pg_proc f
            where f.pronamespace = 'pycontext'::regnamespace
            and has_function_privilege('nobody_here', f.oid, 'execute')
            union all
            select c.relname from pg_class c
            where c.relnamespace = 'pycontext'::regnamespace and c.relkind in ('r', 'p', 'v', 'm')
            and has_table_privilege('nobody_here', c.oid, 'select, insert, update, delete, truncate')
            """,
        )
        assert not allowed, "open to anybody: " + ", ".join(row["name"] for row in allowed)
        # And what the catalog says is what happens, even once the schema may be entered.
        db.execute("grant usage on schema pycontext to nobody_here")
        db.execute("set role nobody_here")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            db.execute("select pycontext.schema_version()")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            db.execute("select * from pycontext.migration")
    finally:
        db.execute("reset role")
        db.execute("drop owned by nobody_here")
        db.execute("drop role nobody_here")


def test_functions_fix_their_search_path(db: Connection) -> None:
    # Only functions without settings can be inlined. A private one runs under its caller's fixed path; a body
    # in standard form (return …) has no names left to look up.
    loose = [
        f["signature"]
        for f in rows(db, FUNCTIONS)
        if "search_path=pg_catalog, pg_temp" not in (f["proconfig"] or ())
        and not (
            f["language"] == "sql" and not f["definer"] and (private(f["name"]) or _parsed(f["definition"]))
        )
    ]
    assert not loose, "without set search_path = pg_catalog, pg_temp: " + ", ".join(loose)


def _parsed(definition: str) -> bool:
    """A body in standard form (return …, begin atomic …) holds object ids, not names."""
    return re.search(r"^\s*(return\b|begin atomic\b)", definition, re.IGNORECASE | re.MULTILINE) is not None


def test_acts_are_security_definer_and_reads_invoker(db: Connection) -> None:
    wrong = [
        f["signature"]
        for f in rows(db, FUNCTIONS)
        # registering a source takes the caller's rights, never the installer's; a turn reads with them, and
        # a chat id of any type becomes text with them
        if not private(f["name"])
        and f["definer"]
        != (
            f["volatility"] == "v"
            and f["name"] not in ("register_source", "start_turn")
            and "anyelement" not in f["signature"]
        )
    ]
    assert not wrong, "definer where it reads, or invoker where it acts: " + ", ".join(wrong)


def test_definers_fix_their_search_path(db: Connection) -> None:
    loose = [
        f["signature"]
        for f in rows(db, FUNCTIONS)
        if f["definer"] and "search_path=pg_catalog, pg_temp" not in (f["proconfig"] or ())
    ]
    assert not loose


def test_no_triggers_sequences_or_rules(db: Connection) -> None:
    found = rows(
        db,
        """
        select 'trigger ' || t.tgname as name from pg_trigger t
        join pg_class c on c.oid = t.tgrelid
        where c.relnamespace = 'pycontext'::regnamespace and not t.tgisinternal
        union all
        select 'sequence ' || c.relname from pg_class c
        where c.relnamespace = 'pycontext'::regnamespace and c.relkind = 'S'
        union all
        select 'identity ' || c.relname || '.' || a.attname from pg_attribute a
        join pg_class c on c.oid = a.attrelid
        where c.relnamespace = 'pycontext'::regnamespace and a.attidentity <> ''
        union all
        select 'extension ' || e.extname from pg_extension e where e.extname not in ('plpgsql', 'vector')
        """,
    )
    assert not found, ", ".join(row["name"] for row in found)


def test_chat_id_leads_every_key(db: Connection) -> None:
    wrong = rows(
        db,
        """
        select c.relname || ': ' || i.indexrelid::regclass::text as name
        from pg_index i
        join pg_class c on c.oid = i.indrelid
        join pg_attribute a on a.attrelid = c.oid and a.attname = 'chat_id' and not a.attisdropped
        where c.relnamespace = 'pycontext'::regnamespace and c.relkind in ('r', 'p')
        and (i.indisunique or i.indisprimary) and i.indkey[0] <> a.attnum
        """,
    )
    assert not wrong, "chat_id does not lead: " + ", ".join(row["name"] for row in wrong)
    assert not rows(
        db,
        """
        select from pg_attribute a
        join pg_class c on c.oid = a.attrelid
        join pg_collation k on k.oid = a.attcollation
        where c.relnamespace = 'pycontext'::regnamespace and c.relkind in ('r', 'p') and a.attname = 'chat_id'
        and k.collname <> 'C'
        """,
    ), "chat_id is text collate C"


def sql_files() -> list[Path]:
    return sorted(install.sql_dir().rglob("*.sql"))


@pytest.fixture(params=sql_files(), ids=lambda path: f"{path.parent.name}/{path.name}")
def sql_file(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def code(path: Path) -> str:
    """The file without its comments."""
    return re.sub(r"--[^\n]*|/\*.*?\*/", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)


FORBIDDEN = {
    "a trigger": r"\bcreate\s+(or\s+replace\s+)?(constraint\s+)?trigger\b",
    "a sequence": r"\bcreate\s+sequence\b|\bnextval\s*\(",
    "serial": r"\b(big|small)?serial\b",
    "identity": r"\bgenerated\s+(always|by\s+default)\s+as\s+identity\b",
    "on conflict without the constraint's name": r"\bon\s+conflict\b(?!\s+on\s+constraint\b)",
    "#variable_conflict": r"#variable_conflict\b",
    "create … if not exists, which needs the right even where there is nothing to create": (
        r"\bcreate\s+(schema|extension)\s+if\s+not\s+exists\b"
    ),
    "a session lock, setting or channel, which a pooler does not keep": (
        r"\bpg_(try_)?advisory_(un)?lock(_shared)?\s*\(|\blisten\b\s+\w|\bcreate\s+temp"
    ),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_files_keep_to_the_rules(sql_file: Path, what: str) -> None:
    found = re.search(FORBIDDEN[what], code(sql_file), re.IGNORECASE)
    assert found is None, f"{what}: {found.group()!r}"


def test_files_use_spaces_and_end_with_a_line(sql_file: Path) -> None:
    text = sql_file.read_text(encoding="utf-8")
    assert "\t" not in text
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def functions_in(path: Path) -> Iterator[tuple[str, str]]:
    """Name and head (up to the body) of each function a file makes."""
    for match in re.finditer(
        r"create\s+(?:or\s+replace\s+)?function\s+(pycontext\.\w+)(.*?)(?:\bas\s+\$|\breturn\b|\bbegin\s+atomic\b)",
        code(path),
        re.IGNORECASE | re.DOTALL,
    ):
        yield match.group(1), match.group(2)


def test_volatility_is_stated(sql_file: Path) -> None:
    # The catalog can't tell a stated `volatile` from a forgotten one.
    silent = [
        name
        for name, head in functions_in(sql_file)
        if not re.search(r"\b(volatile|stable|immutable)\b", head, re.IGNORECASE)
    ]
    assert not silent, f"no volatility: {', '.join(silent)}"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a trigger", "create or replace trigger x before insert on t"),
        ("serial", "id bigserial primary key"),
        ("identity", "seq bigint generated by default as identity"),
        ("on conflict without the constraint's name", "insert into t values (1) on conflict do nothing"),
        ("on conflict without the constraint's name", "insert into t values (1) on conflict (id) do nothing"),
        ("#variable_conflict", "#variable_conflict use_column"),
    ],
)
def test_the_rules_find_what_they_forbid(what: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.sql"
    path.write_text(text)
    with pytest.raises(AssertionError):
        test_files_keep_to_the_rules(path, what)
