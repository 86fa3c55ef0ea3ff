"""Adopting a product's own messages table: the view it is read through, and checks before registration."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from pycontext.errors import PycontextError

__all__ = ["Adoption", "BadAdoption", "Check", "Plan", "adopt", "plan"]

ROLES = ("user", "assistant", "tool", "system", "developer")
LEFT_OUT = "-"
ANY_OTHER = "*"
# More than so many rows are not looked through for what a sample tells as well.
MAX_SCANNED = 5_000_000
SAMPLE = 10_000  # rows whose parts are looked at

_INTEGERS = ("smallint", "integer", "bigint")
_TIMES = ("timestamp with time zone", "timestamp without time zone")
_TEXTS = ("text", "character varying", "character", "name", "USER-DEFINED", "jsonb", "json")
_JSON = ("tool_calls", "metadata")
_PLACES = 2000  # of one microsecond


class BadAdoption(PycontextError):
    """The options do not describe a table that can be adopted."""


@dataclass(frozen=True)
class Adoption:
    """How a table of messages reads as a source. `role_map` maps its roles, '*' all that it does
    not name; '-' leaves rows out.

    order: an integer column that grows, or a time and a column that breaks its ties; a time may be a
    number, of seconds, milliseconds … since 1970. where: SQL over the table's columns. from_view: a view
    written by hand instead of all this.
    """

    name: str
    table: str | None = None
    chat_id: str = "chat_id"
    message_id: str = "id"
    order: tuple[str, ...] = ("id",)
    role: str = "role"
    role_map: Mapping[str, str] = field(default_factory=dict)
    content: str = "content"
    created_at: str | None = None
    tool_calls: str | None = None
    tool_call_id: str | None = None
    speaker: str | None = None
    metadata: str | None = None
    where: str | None = None
    view: str | None = None
    from_view: str | None = None
    is_default: bool = False


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, with a way out.

    severity: ok, note (worth knowing), warning (works, at a price) or problem (nothing is done).
    lines: what shows it, such as a plan.
    """

    severity: Literal["ok", "note", "warning", "problem"]
    text: str
    way_out: str | None = None
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The statements that adopt a table, and what was found in it. index: what runs first, by itself."""

    statements: tuple[str, ...]
    checks: tuple[Check, ...]
    index: tuple[str, ...] = ()
    #: The chat of some row.
    chat_id: str | None = None

    @property
    def has_problem(self) -> bool:
        return any(check.severity == "problem" for check in self.checks)


@dataclass(frozen=True)
class _Relation:
    oid: int
    schema: str
    name: str
    rows: float
    types: Mapping[str, str]

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)


def plan(conn: psycopg.Connection[Any], adoption: Adoption) -> Plan:
    """The statements, and checks against the live table. Changes nothing.

    Raises BadAdoption where a relation or a column is not there, or the order can't be made one.
    """
    return _Planner(conn, adoption).plan()


def adopt(
    conn: psycopg.Connection[Any], adoption: Adoption, tell: Callable[[str], None] | None = None
) -> Plan:
    """Make the index, which blocks no writer, then run the statements in one transaction; not with a problem.

    conn: in autocommit, outside of a transaction. tell: called with what takes its time, before it begins.
    """
    found = plan(conn, adoption)
    if found.has_problem:
        return found
    for statement in found.index:
        if tell is not None:
            tell(statement)
        conn.execute(statement.encode())
    checks = found.checks
    name = adoption.from_view or _Planner(conn, adoption).view_text()
    warned: list[str] = []

    def hear(notice: psycopg.errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING" and notice.message_primary:
            warned.append(notice.message_primary)

    conn.add_notice_handler(hear)
    try:
        checks += _run(conn, adoption, found, name)
    finally:
        conn.remove_notice_handler(hear)
    return replace(found, checks=(*checks, *(Check("warning", text) for text in warned)))


def _run(conn: psycopg.Connection[Any], adoption: Adoption, found: Plan, name: str) -> tuple[Check, ...]:
    with conn.transaction():
        for statement in found.statements:
            try:
                # With arguments, even none, a text of several statements is refused.
                conn.execute(statement.replace("%", "%%").encode(), ())
            except psycopg.errors.InvalidTableDefinition as error:
                raise BadAdoption(
                    "a view of that name is there, with other columns",
                    detail=error.diag.message_primary,
                    hint=f"drop view {name}, then run this again; or name another: --view",
                ) from None
        if found.index:
            planner = _Planner(conn, adoption)
            view = planner.relation(name, "view")
            select = sql.SQL("select * from {}").format(view.identifier)
            return (planner.read_of_one_chat(select, view.types),)
    return ()


_ALL_THE_SAME = "; with --yes it is adopted all the same"


class _Planner:
    def __init__(self, conn: psycopg.Connection[Any], adoption: Adoption) -> None:
        self._conn = conn
        self._spec = adoption
        self._checks: list[Check] = []

    def plan(self) -> Plan:
        if self._spec.is_default:
            self._look_at_the_default()
        if self._spec.from_view is not None:
            self._refuse_what_a_view_says()
            return self._from_view(self.relation(self._spec.from_view, "view"))
        if self._spec.table is None:
            raise BadAdoption(
                "name the table, or a view", hint="--table app.message, or --from-view app.my_view"
            )
        table = self.relation(self._spec.table, "table")
        self._columns(table)
        select = self._select(table)
        body = select.as_string(self._conn)
        self._conn.execute(f"select * from ({body}) x limit 0".replace("%", "%%").encode(), ())
        index = self._index(table, select)
        if not index:
            self._checks.append(self.read_of_one_chat(select, None))
        view = self._view(table)
        statements = [
            sql.SQL("create or replace view {} with (security_invoker = true) as\n{}")
            .format(view, select)
            .as_string(self._conn)
        ]
        statements.extend(self._grants(table, view))
        statements.append(self._register(view.as_string(self._conn)))
        self._look_at_times(table)
        self._look_at(select, table.rows, table.types)
        return Plan(tuple(statements), tuple(self._checks), index, self._some_chat(body))

    def _refuse_what_a_view_says(self) -> None:
        plain = Adoption(self._spec.name)
        given = [
            "--" + {"speaker": "name"}.get(f.name, f.name).replace("_", "-")
            for f in fields(plain)
            if f.name not in ("name", "from_view", "is_default")
            and getattr(self._spec, f.name) != getattr(plain, f.name)
        ]
        if given:
            raise BadAdoption(
                f"beside --from-view there is nothing that {', '.join(given)} could change",
                hint="say it in the view, as its columns and its where; or leave out --from-view, to have a"
                " view made of --table",
            )

    def relation(self, text: str, what: str) -> _Relation:
        # As it stands in the catalog first, then as SQL has it; never one of ours, which may be on the path.
        query = """
            select k.oid, n.nspname, k.relname, k.reltuples from pg_catalog.pg_class k
            join pg_catalog.pg_namespace n on n.oid = k.relnamespace and n.nspname <> 'pycontext'
            where k.relkind in ('r', 'p', 'v', 'm', 'f') and """
        found = self._row(
            query + "(n.nspname || '.' || k.relname = %s"
            " or k.relname = %s and pg_catalog.pg_table_is_visible(k.oid))",
            (text, text),
        )
        if found is None:
            try:
                with self._conn.transaction():
                    found = self._row(query + "k.oid = pg_catalog.to_regclass(%s)", (text,))
            except psycopg.errors.InvalidName:
                pass  # PostgreSQL 15 refuses what 16 calls null
        if found is None:
            raise BadAdoption(f"no such {what}", detail=text, hint=f"name it with its schema: app.{what}")
        with self._conn.cursor(row_factory=tuple_row) as cursor:
            types = cursor.execute(
                """
                select a.attname, pg_catalog.format_type(
                    case when t.typtype = 'd' then t.typbasetype else t.oid end, null)
                from pg_catalog.pg_attribute a
                join pg_catalog.pg_type t on t.oid = a.atttypid
                where a.attrelid = %s and a.attnum > 0 and not a.attisdropped order by a.attnum
                """,
                (found[0],),
            ).fetchall()
        return _Relation(found[0], found[1], found[2], found[3], dict(types))

    def view_text(self) -> str:
        assert self._spec.table is not None
        return self._view(self.relation(self._spec.table, "table")).as_string(self._conn)

    def read_of_one_chat(self, select: sql.Composable, types: Mapping[str, str] | None) -> Check:
        """Whether a read of one chat's newest rows can use an index, however small the table still is."""
        timed = "order_at" in types if types is not None else self._is_timed
        query = (
            sql.SQL(
                "select * from ({}) x where x.chat_id = (select y.chat_id from ({}) y limit 1) and {} "
                "order by {} limit 64"
            )
            .format(
                select,
                select,
                sql.SQL(
                    "x.order_at > '2000-01-01'"
                    if timed
                    else "x.seq between -4611686018427387904 and 4611686018427387904"
                ),
                sql.SQL("x.order_at desc, x.seq desc" if timed else "x.seq desc"),
            )
            .as_string(self._conn)
        )
        with self._conn.transaction():
            settings = ("enable_seqscan", "enable_bitmapscan", "enable_sort")
            kept = [self._rows(f"select current_setting('{name}')")[0][0] for name in settings]
            for name in settings:  # as our reads have them
                self._conn.execute(f"set local {name} = off".encode())
            found = self._rows(f"explain (format json) {query}")[0][0][0]["Plan"]
            lines = tuple(line for (line,) in self._rows(f"explain (costs off) {query}"))
            for name, setting in zip(settings, kept, strict=True):
                self._conn.execute("select set_config(%s, %s, true)", (name, setting))
        whole = sorted(set(_read_whole(found)))
        if whole:
            return Check(
                "warning",
                f"every read of one chat goes through all of {', '.join(whole)}",
                "hand the chat's column through as it is, and index it" + _ALL_THE_SAME,
                lines,
            )
        if _sorts(found):
            return Check(
                "warning",
                "every read of a chat goes through all of it: slower as the chat grows",
                "hand the columns of chat and order through as they are, indexed together, or, where a row"
                " becomes several, a column order_at beside seq" + _ALL_THE_SAME,
                lines,
            )
        return Check("ok", "a read of one chat uses an index")

    @property
    def _is_timed(self) -> bool:
        return len(self._spec.order) == 2

    def _from_view(self, view: _Relation) -> Plan:
        for column in ("chat_id", "seq", "message_id", "role", "content", "created_at"):
            if column not in view.types:
                self._problem(
                    f"the view has no column {column}", "chat_id, seq, message_id, role, content, created_at"
                )
        if view.types.get("seq") not in (*_INTEGERS, None):
            self._problem(f"seq is {view.types['seq']}, not an integer", "give it a growing bigint")
        if view.types.get("created_at") not in (*_TIMES, None):
            self._problem(f"created_at is {view.types['created_at']}, not a time", "give it a timestamptz")
        if view.types.get("order_at") not in (*_TIMES, "date", None):
            self._problem(
                f"order_at is {view.types['order_at']}, not a time (timestamptz, timestamp or date)",
                "make it one, such as to_timestamp(order_at / 1000.0) of milliseconds, and index that;"
                " or leave it out, where seq itself is a column with an index",
            )
        for name in _JSON:
            if view.types.get(name) not in ("json", "jsonb", None):
                self._problem(f"{name} is {view.types[name]}, not JSON", f"cast it: {name}::jsonb")
        if view.types.get("created_at") == "timestamp without time zone":
            self._note(
                "created_at has no time zone: it is read in the time zone of each session",
                "say which it is: created_at at time zone 'UTC'",
            )
        select = sql.SQL("select * from {}").format(view.identifier)
        if not any(check.severity == "problem" for check in self._checks):
            self._look_at(select, 0, view.types)
            self._checks.append(self.read_of_one_chat(select, view.types))
        chat_id = None
        if not any(check.severity == "problem" for check in self._checks):
            chat_id = self._some_chat(select.as_string(self._conn))
        statement = self._register(view.identifier.as_string(self._conn))
        return Plan((statement,), tuple(self._checks), chat_id=chat_id)

    def _columns(self, table: _Relation) -> None:
        spec = self._spec
        named = {
            "--chat-id": spec.chat_id,
            "--message-id": spec.message_id,
            "--role": spec.role,
            "--content": spec.content,
            "--created-at": self._created_at(table),
            "--tool-calls": spec.tool_calls,
            "--tool-call-id": spec.tool_call_id,
            "--name": spec.speaker,
            "--metadata": spec.metadata,
            **{f"--order ({n})": column for n, column in enumerate(spec.order, 1)},
        }
        for option, column in named.items():
            if option == "--created-at" and spec.created_at is None and column not in table.types:
                raise BadAdoption(
                    "which column tells when a row was written?",
                    detail=f"there is no created_at; there are: {', '.join(table.types)}",
                    hint="--created-at COLUMN; where the order is a time, name it and the id: --order"
                    f" {'TIME' if spec.order[0] == spec.message_id else spec.order[0]},{spec.message_id}",
                )
            if column is not None and column not in table.types:
                raise BadAdoption(
                    f"the table has no column {column!r}",
                    detail=f"{option}; there are: {', '.join(table.types)}",
                    hint=f"name it as it stands in the catalog, without quotes: {option.split()[0]} COLUMN",
                )
        created_at = self._created_at(table)
        if table.types[created_at] not in (*_TIMES, *_INTEGERS):
            raise BadAdoption(
                f"{created_at} is {table.types[created_at]}, not a time",
                hint="name the column that tells when a row was written: --created-at COLUMN",
            )
        wrong = {column: role for column, role in spec.role_map.items() if role not in (*ROLES, LEFT_OUT)}
        if wrong:
            raise BadAdoption(
                f"no such role: {', '.join(map(repr, wrong.values()))}",
                hint=f"map to one of {', '.join(ROLES)}, or to {LEFT_OUT} to leave these rows out",
            )
        first = table.types[spec.order[0]]
        if len(spec.order) > 2:
            raise BadAdoption(
                f"{len(spec.order)} columns are no order: {', '.join(spec.order)}",
                detail="an order is an integer that grows, or a time and the column that breaks its ties",
                hint=f"--order {spec.order[0]},{spec.message_id}; or a view whose seq says it (--from-view)",
            )
        if len(spec.order) == 1 and first in _INTEGERS:
            return
        if len(spec.order) == 2 and first in (*_TIMES, *_INTEGERS):
            return
        if first in _TIMES:
            raise BadAdoption(
                f"{spec.order[0]} alone is no order: rows of one transaction share a time{self._ties(table)}",
                hint=f"break ties by the id: --order {spec.order[0]},{spec.message_id}",
            )
        raise BadAdoption(
            f"rows can't be put in order by {', '.join(spec.order)} ({first})",
            hint="use an integer that grows (an identity), or a time with the id: --order created_at,id",
        )

    def _ties(self, table: _Relation) -> str:
        if table.rows > MAX_SCANNED:
            return ""
        shared = self._rows(
            sql.SQL("select count(*) from (select from {} group by {}, {} having count(*) > 1) t")
            .format(table.identifier, sql.Identifier(self._spec.chat_id), sql.Identifier(self._spec.order[0]))
            .as_string(self._conn)
        )[0][0]
        return f"; here {shared} times are shared" if shared else ""

    def _created_at(self, table: _Relation) -> str:
        if self._spec.created_at is not None:
            return self._spec.created_at
        if self._is_timed or table.types.get(self._spec.order[0]) in _TIMES:
            return self._spec.order[0]
        return "created_at"

    def _at(self, table: _Relation, column: str, alias: str = "m.") -> sql.Composable:
        """A column as a time: of a number, its unit is told by its size."""
        at = sql.SQL(alias) + sql.Identifier(column)
        if table.types[column] not in _INTEGERS:
            return at
        newest = self._rows(
            sql.SQL("select max(s.at) from (select {} as at from {} m limit 1000) s")
            .format(sql.SQL("m.") + sql.Identifier(column), table.identifier)
            .as_string(self._conn)
        )[0][0]
        digits = len(str(newest or 0))
        unit = "1000.0" if newest is None else f"{10 ** max(0, (digits - 8) // 3 * 3)}.0"
        return sql.SQL("to_timestamp({} / {})").format(at, sql.SQL(unit))

    def _select(self, table: _Relation) -> sql.Composable:
        spec = self._spec

        def column(name: str) -> sql.Composable:
            return sql.SQL("m.{}").format(sql.Identifier(name))

        columns: list[tuple[sql.Composable, str]] = [(column(spec.chat_id), "chat_id")]
        if self._is_timed:
            columns.append((self._timed_seq(table), "seq"))
        else:
            columns.append((column(spec.order[0]), "seq"))
        columns.append((column(spec.message_id), "message_id"))
        columns.append((self._role(), "role"))
        cast = sql.SQL("{}::jsonb") if table.types[spec.content] == "json" else sql.SQL("{}")
        columns.append((cast.format(column(spec.content)), "content"))
        created_at = self._created_at(table)
        columns.append(
            (
                sql.SQL(
                    "{} at time zone 'UTC'"
                    if table.types[created_at] == "timestamp without time zone"
                    else "{}"
                ).format(self._at(table, created_at)),
                "created_at",
            )
        )
        if self._is_timed:
            columns.append((self._at(table, spec.order[0]), "order_at"))
        for name, given in (
            ("tool_calls", spec.tool_calls),
            ("tool_call_id", spec.tool_call_id),
            ("name", spec.speaker),
            ("metadata", spec.metadata),
        ):
            if given is not None:
                is_text = name in _JSON and table.types[given] in ("text", "character varying")
                cast = sql.SQL("nullif({}, '')::jsonb") if is_text else sql.SQL("{}")
                columns.append((cast.format(column(given)), name))
        listed = sql.SQL(",\n    ").join(
            sql.SQL("{} as {}").format(expression, sql.Identifier(name)) for expression, name in columns
        )
        where = [sql.SQL("({})").format(sql.SQL(spec.where))] if spec.where else []
        role = sql.SQL("{}::text").format(column(spec.role))
        roles = self._roles
        if spec.role_map.get(ANY_OTHER) == LEFT_OUT:
            where.append(sql.SQL("{} in ({})").format(role, _literals(roles)))
        left_out = [old for old, new in spec.role_map.items() if new == LEFT_OUT and old != ANY_OTHER]
        if left_out:
            where.append(sql.SQL("coalesce({}, '') not in ({})").format(role, _literals(left_out)))
        body = sql.SQL("select\n    {}\nfrom {} m").format(listed, table.identifier)
        if where:
            body = sql.SQL("{}\nwhere {}").format(body, sql.SQL(" and ").join(where))
        return body

    @property
    def _roles(self) -> dict[str, str]:
        """The roles that are read, in ours: those of the map, or ours where it maps none by name."""
        named = {old: new for old, new in self._spec.role_map.items() if old != ANY_OTHER and new != LEFT_OUT}
        return named or {role: role for role in ROLES if role not in self._spec.role_map}

    def _role(self) -> sql.Composable:
        role = sql.SQL("m.{}::text").format(sql.Identifier(self._spec.role))
        other = self._spec.role_map.get(ANY_OTHER, LEFT_OUT)
        roles = self._roles
        if other == LEFT_OUT and all(old == new for old, new in roles.items()):
            return role
        cases = sql.SQL(" ").join(
            sql.SQL("when {} then {}").format(sql.Literal(old), sql.Literal(new))
            for old, new in roles.items()
        )
        rest = sql.SQL("") if other == LEFT_OUT else sql.SQL(" else {}").format(sql.Literal(other))
        return sql.SQL("case {} {}{} end").format(role, cases, rest)

    def _timed_seq(self, table: _Relation) -> sql.Composable:
        """Microseconds since 2000, 2000 places each, plus how many rows of that very time stand before it."""
        time, tie = self._spec.order
        at = "{time}" if table.types[time] == "timestamp without time zone" else "{time} at time zone 'UTC'"
        return sql.SQL(
            "(extract(epoch from " + at + " - timestamp '2000-01-01') * 1000000)::bigint * "
            f"{_PLACES}\n        + (select count(*) from {{table}} t where t.{{chat}} = m.{{chat}} "
            "and {other} = {time} and t.{tie} < m.{tie})"
        ).format(
            time=self._at(table, time),
            other=self._at(table, time, "t."),
            tie=sql.Identifier(tie),
            chat=sql.Identifier(self._spec.chat_id),
            table=table.identifier,
        )

    def _index(self, table: _Relation, select: sql.Composable) -> tuple[str, ...]:
        """What makes the index where there is none that serves, after what an attempt that broke off left."""
        wanted = [self._spec.chat_id, *self._spec.order]
        with self._conn.cursor(row_factory=tuple_row) as cursor:
            found = cursor.execute(
                """
                select array_agg(a.attname::text order by k.n) from pg_catalog.pg_index i
                cross join lateral unnest(i.indkey) with ordinality k (attnum, n)
                join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
                where i.indrelid = %s and i.indisvalid and i.indpred is null
                group by i.indexrelid
                """,
                (table.oid,),
            ).fetchall()
        is_epoch = self._is_timed and table.types[self._spec.order[0]] in _INTEGERS
        is_there = any(row[0][: len(wanted)] == wanted for row in found)
        # a number is read by the time made of it
        if self.read_of_one_chat(select, None).severity == "ok" if is_epoch else is_there:
            return ()
        kind = self._rows(f"select relkind from pg_catalog.pg_class where oid = {table.oid}")[0][0]
        if kind not in ("r", "p", "m"):
            return ()
        if kind == "p":
            self._note(
                "the index of a partitioned table holds up its writers while it is made",
                "make it on each partition first, by create index concurrently",
            )
        name = f"{table.name[:40]}_pycontext_ix"
        how = sql.SQL("" if kind == "p" else "concurrently ")
        left = self._row(
            """
            select from pg_catalog.pg_index i join pg_catalog.pg_class k on k.oid = i.indexrelid
            where i.indrelid = %s and k.relname = %s and not i.indisvalid
            """,
            (table.oid, name),
        )
        drop = sql.SQL("drop index {}{}").format(how, sql.Identifier(table.schema, name))
        create = sql.SQL("create index {}{} on {} ({})").format(
            how,
            sql.Identifier(name),
            table.identifier,
            sql.SQL(", ").join(
                self._at(table, column, "") if is_epoch and n == 1 else sql.Identifier(column)
                for n, column in enumerate(wanted)
            ),
        )
        return tuple(text.as_string(self._conn) for text in ([create] if left is None else [drop, create]))

    def _view(self, table: _Relation) -> sql.Identifier:
        if self._spec.view is None:
            return sql.Identifier(table.schema, f"{table.name[:50]}_pycontext")
        schema, dot, name = self._spec.view.partition(".")
        return sql.Identifier(schema, name) if dot else sql.Identifier(table.schema, schema)

    def _grants(self, table: _Relation, view: sql.Identifier) -> list[str]:
        # Acts run as the role that owns the schema: it must be able to read. Readers use their own rights.
        owner = self._row(
            """
            select r.rolname, pg_catalog.has_table_privilege(r.oid, k.oid, 'select'),
                r.rolname = current_user, pg_catalog.has_schema_privilege(r.oid, k.relnamespace, 'usage')
            from pg_catalog.pg_class k, pg_catalog.pg_namespace n
            join pg_catalog.pg_roles r on r.oid = n.nspowner
            where n.nspname = 'pycontext' and k.oid = %s
            """,
            (table.oid,),
        )
        if owner is None:
            raise BadAdoption("schema pycontext is not installed here", hint="run: pycontext install")
        reader = self._row("select from pg_catalog.pg_roles r where r.rolname = 'pycontext_reader'")
        statements = []
        grant = sql.SQL("grant select on {} to {}")
        if not owner[3]:
            usage = sql.SQL("grant usage on schema {} to {}")
            statements.append(
                usage.format(sql.Identifier(table.schema), sql.Identifier(owner[0])).as_string(self._conn)
            )
        if not owner[1]:
            statements.append(grant.format(table.identifier, sql.Identifier(owner[0])).as_string(self._conn))
        if not owner[2]:
            statements.append(grant.format(view, sql.Identifier(owner[0])).as_string(self._conn))
        if reader is not None:
            statements.append(grant.format(view, sql.Identifier("pycontext_reader")).as_string(self._conn))
        return statements

    def _register(self, relation: str) -> str:
        return (
            sql.SQL("select pycontext.register_source({}, {}, is_default => {})")
            .format(sql.Literal(self._spec.name), sql.Literal(relation), sql.Literal(self._spec.is_default))
            .as_string(self._conn)
        )

    def _look_at(self, select: sql.Composable, rows: float, types: Mapping[str, str]) -> None:
        """What is in the rows: unknown roles, null content, places that are not one row's."""
        self._look_at_parts(select.as_string(self._conn))
        has_calls, has_ids = (
            name in types if self._spec.from_view is not None else given is not None
            for name, given in (
                ("tool_calls", self._spec.tool_calls),
                ("tool_call_id", self._spec.tool_call_id),
            )
        )
        self._look_at_calls(select.as_string(self._conn), rows, has_calls, has_ids)
        if rows > MAX_SCANNED:
            self._note(
                f"about {rows:,.0f} rows: what is in them was not looked at",
                "try the window of a chat you know",
            )
            return
        text = select.as_string(self._conn)
        column = "role" if self._spec.from_view is not None else None
        if ANY_OTHER in self._spec.role_map:
            unknown = []
        elif column is None:
            unknown = self._rows(self._unknown_roles(select))
        else:
            unknown = self._rows(
                f"select x.role::text, count(*) from ({text}) x where x.role is null or x.role::text not in "
                f"{ROLES!r} group by 1 order by 2 desc limit 10"
            )
        if unknown:
            listed = ", ".join(f"{role!r} ({count:,} rows)" for role, count in unknown)
            self._problem(
                f"roles that the map does not know: {listed}",
                "say in the view what each is: case … when 'bot' then 'assistant' else 'user' end"
                if self._spec.from_view is not None
                else "map each: --role-map 'customer=user,bot=assistant', with *=user for all others; to '-'"
                " to leave its rows out; or say it in a view of yours (--from-view)",
            )
        else:
            self._ok("every role is known")
        self._look_for_what_is_missing(text)
        no_calls = " and x.tool_calls is null" if has_calls else ""
        nulls = self._rows(f"select count(*) from ({text}) x where x.content is null{no_calls}")[0][0]
        if nulls:
            (column,) = self._row("select pg_catalog.quote_ident(%s)", (self._spec.content,)) or ("",)
            where = f"{f'({self._spec.where}) and ' if self._spec.where else ''}{column} is not null"
            self._note(
                f"{nulls:,} rows have no content; the model reads (empty)",
                "leave them out in the view: where … is not null"
                if self._spec.from_view is not None
                else f"--where {shlex.quote(where)} leaves them out",
            )
        else:
            self._ok("no row is without content")
        self._look_at_json(text)
        own = self._rows(
            "select c.chat_id from pycontext.chat c where c.source is null "
            f"and c.chat_id in (select x.chat_id::text from ({text}) x) order by 1 limit 4"
        )
        if own:
            ids = ", ".join(chat for (chat,) in own[:3]) + (" …" if len(own) > 3 else "")
            self._note(
                f"ids of chats that pycontext has messages of itself, and goes on reading there: {ids}",
                "where one was made by mistake: select pycontext.delete_chat(…)",
            )
        twice = self._rows(
            f"select x.chat_id::text, x.seq, count(*) from ({text}) x "
            "group by 1, 2 having count(*) > 1 limit 3"
        )
        if twice:
            self._problem(
                "two rows share a place: " + ", ".join(f"chat {chat}, seq {seq}" for chat, seq, _ in twice),
                "order by a column that is unique in the chat",
            )
        else:
            self._ok("each row has a place of its own")
        shared = self._rows(
            f"select x.chat_id::text, x.message_id::text from ({text}) x "
            "group by 1, 2 having count(*) > 1 or x.message_id::text is null limit 3"
        )
        if shared:
            self._problem(
                "an id is not one row's: "
                + ", ".join(f"chat {chat}, {identity}" for chat, identity in shared),
                "give each row an id of its own in its chat: id || '/' || n where a row becomes several",
            )
        if self._spec.from_view is not None and "order_at" in types:
            utc = " at time zone 'UTC'" if types["order_at"] == "timestamp with time zone" else ""
            astray = self._rows(
                f"select count(*) from ({text}) x where pycontext._time_at(x.seq) <> x.order_at{utc}"
            )[0][0]
            if astray:
                self._problem(
                    f"of {astray:,} rows seq is not made of order_at: they would not be found",
                    f"it is the microseconds since 2000 (UTC) times {_PLACES}, plus a rank below {_PLACES}",
                )

    def _look_at_the_default(self) -> None:
        for name, relation in self._rows(
            sql.SQL(
                "select s.source, s.relation from pycontext.source s where s.is_default and s.source <> {}"
            )
            .format(sql.Literal(self._spec.name))
            .as_string(self._conn)
        ):
            call = sql.SQL("select pycontext.register_source({}, {}, is_default => false)")
            other = call.format(sql.Literal(name), sql.Literal(relation)).as_string(self._conn)
            self._problem(
                f"source {name} is the default, and chats of it would be read from here",
                f"leave out --default, and attach chats by create_chat(…, source => …); or first: {other}",
            )

    def _some_chat(self, select: str) -> str | None:
        found = self._rows(f"select x.chat_id::text from ({select}) x where x.chat_id is not null limit 1")
        return str(found[0][0]) if found else None

    def _look_at_times(self, table: _Relation) -> None:
        """What is taken for granted of the order and of times."""
        spec = self._spec
        for column in dict.fromkeys((self._created_at(table), spec.order[0])):
            if table.types[column] == "timestamp without time zone":
                self._note(
                    f"{column} has no time zone: it is taken as UTC",
                    "where it is another, say so in a view of yours: created_at at time zone 'Europe/Riga'",
                )
        if not self._is_timed or table.rows > MAX_SCANNED:
            return
        time, tie = spec.order
        shared, roles = self._rows(
            sql.SQL(
                "select count(*), count(*) filter (where t.roles > 1) from ("
                "select count(distinct {}) as roles from {} group by {}, {} having count(*) > 1) t"
            )
            .format(
                sql.Identifier(spec.role),
                table.identifier,
                sql.Identifier(spec.chat_id),
                sql.Identifier(time),
            )
            .as_string(self._conn)
        )[0]
        if shared:
            self._note(
                f"{shared:,} times are shared by rows of one chat, {roles:,} of them by different roles:"
                f" there {tie} alone says the order",
                "an integer that grows would say it; or a view of yours, whose seq says more (--from-view)",
            )

    def _look_at_parts(self, select: str) -> None:
        """What the model would read as JSON text, or not at all, in some of the rows."""
        if self._row("select from pg_catalog.pg_namespace n where n.nspname = 'pycontext'") is None:
            return
        sample = (
            "with sample as materialized ("
            "select x.role::text as role, pycontext._jsonb(x.content) as content "
            f"from ({select}) x where x.content is not null limit {SAMPLE}) "
        )
        kinds = self._rows(
            sample + "select coalesce(e.value ->> 'type', 'without a type'), count(*) from sample s "
            "cross join lateral jsonb_array_elements("
            "case when jsonb_typeof(s.content) = 'array' then s.content end) e "
            "cross join lateral (select pycontext._openai_part(e.value, s.role) as told) t "
            "where pycontext._part_kind(e.value) not in ('text', 'reasoning') "
            "and t.told = jsonb_build_object('type', 'text', 'text', pycontext._part_json(e.value)) "
            "or t.told ->> 'type' = 'file' and not t.told ? 'file' "
            "or e.value ->> 'type' = 'text' and jsonb_typeof(e.value -> 'text') <> 'string' "
            "group by 1 order by 2 desc, 1 limit 12"
        )
        if kinds:
            listed = ", ".join(f"{kind} ({count:,})" for kind, count in kinds)
            self._checks.append(
                Check(
                    "warning",
                    f"parts that the model would read as JSON text: {listed}",
                    "tell them as text and tool_calls in a view of yours, and adopt that (--from-view):"
                    " sql/README.md has one for the messages of the Vercel AI SDK",
                )
            )
        texts, objects = self._rows(
            sample + "select count(*) filter (where s.role in ('user', 'assistant') "
            "and jsonb_typeof(s.content) = 'string' and s.content #>> '{}' ~ '^\\s*[[{]\\s*[\"{]'), "
            "count(*) filter (where jsonb_typeof(s.content) = 'object') from sample s"
        )[0]
        if texts:
            self._note(
                f"{texts:,} contents are JSON in a text column, which the model reads as it stands",
                "where it is parts, cast it in a view of yours (content::jsonb), and adopt that: --from-view",
            )
        if objects:
            self._checks.append(
                Check(
                    "warning",
                    f"{objects:,} contents are JSON objects, which the model reads as (empty)",
                    "take the text out of them in a view of yours, and adopt that: --from-view",
                )
            )

    def _look_for_what_is_missing(self, select: str) -> None:
        """A user, without whom no window has a request, and times."""
        rows, users, timeless = self._rows(
            "select count(*), count(*) filter (where x.role::text = 'user'), "
            f"count(*) filter (where x.created_at is null) from ({select}) x"
        )[0]
        if rows and not users:
            self._checks.append(
                Check(
                    "warning",
                    "no row is a user's: the window has no request",
                    "map the role of those who ask to user; where a row holds a question and its answer,"
                    " a view tells it as two rows: sql/README.md has one (--from-view)",
                )
            )
        if timeless:
            self._checks.append(
                Check(
                    "warning",
                    f"{timeless:,} rows have no created_at: when they came is not known, and a summary may"
                    " cover them at once",
                    "name a column that every row has (--created-at COLUMN), or a view (--from-view)",
                )
            )

    def _look_at_calls(self, select: str, rows: float, has_calls: bool, has_ids: bool) -> None:
        """Calls that no provider takes, and results that say of no call that they are its."""
        read = f"({select}{f' limit {SAMPLE}' if rows > MAX_SCANNED else ''}) x"
        if has_calls:
            try:
                with self._conn.transaction():
                    strange = self._rows(
                        "select x.chat_id::text, x.message_id::text, left(c.calls::text, 160),"
                        f" count(*) over () from {read} cross join lateral ("
                        "select pycontext._jsonb(x.tool_calls) as calls) c "
                        "where x.role::text = 'assistant' and c.calls not in ('null', '[]') "
                        "and not pycontext._are_calls(c.calls) limit 1"
                    )
            except psycopg.errors.InvalidTextRepresentation:
                strange = []  # said of its column
            for chat, identity, calls, count in strange:
                self._problem(
                    f"{count:,} rows have tool_calls that are not in OpenAI's form:"
                    f" chat {chat}, message {identity} has {calls}",
                    'tell them as [{"id": …, "type": "function", "function": {"name": …, "arguments": "…"}}]'
                    " in a view of yours, and adopt that (--from-view): sql/README.md has one for messages of"
                    " the Vercel AI SDK",
                )
        unclaimed = self._rows(
            f"select x.chat_id::text, x.message_id::text, count(*) over () from {read}"
            " where x.role::text = 'tool'"
            + (" and coalesce(x.tool_call_id::text, '') = ''" if has_ids else "")
            + " limit 1"
        )
        for chat, identity, count in unclaimed:
            self._checks.append(
                Check(
                    "problem" if has_calls else "warning",
                    f"{count:,} rows of role tool have no tool_call_id, and would be read as a user's text:"
                    f" chat {chat}, message {identity}",
                    "give each the id of the call that it answers: --tool-call-id COLUMN, or in a view of"
                    " yours that joins it (--from-view); or leave them out: --role-map tool=-",
                )
            )

    def _look_at_json(self, select: str) -> None:
        for name in (name for name in _JSON if f'as "{name}"' in select):
            try:
                with self._conn.transaction():
                    self._rows(f"select count(x.{name}) from ({select}) x")
            except psycopg.errors.InvalidTextRepresentation as error:
                self._problem(
                    f"{name} has text that is not JSON: {error.diag.message_detail}", "leave it out"
                )

    def _unknown_roles(self, select: sql.Composable) -> str:
        # The view shows null for a role that the map does not know: the raw value says which.
        spec = self._spec
        assert spec.table is not None
        table = self.relation(spec.table, "table")
        role = sql.SQL("m.{}::text").format(sql.Identifier(spec.role))
        where = sql.SQL(" and ({})").format(sql.SQL(spec.where)) if spec.where else sql.SQL("")
        return (
            sql.SQL(
                "select {role}, count(*) from {table} m "
                "where ({role} is null or {role} not in ({known})){where} group by 1 order by 2 desc limit 10"
            )
            .format(
                role=role,
                table=table.identifier,
                known=_literals((*self._roles, *spec.role_map)),
                where=where,
            )
            .as_string(self._conn)
        )

    def _row(self, query: str, arguments: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        with self._conn.cursor(row_factory=tuple_row) as cursor:
            return cursor.execute(query.encode(), arguments).fetchone()

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        with self._conn.cursor(row_factory=tuple_row) as cursor:
            return cursor.execute(query.replace("%", "%%").encode(), ()).fetchall()

    def _ok(self, text: str) -> None:
        self._checks.append(Check("ok", text))

    def _note(self, text: str, way_out: str) -> None:
        self._checks.append(Check("note", text, way_out))

    def _problem(self, text: str, way_out: str) -> None:
        self._checks.append(Check("problem", text, way_out))


def _literals(texts: Iterable[str]) -> sql.Composable:
    return sql.SQL(", ").join(map(sql.Literal, texts))


def _nodes(node: Mapping[str, Any], is_inner: bool = False) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """The nodes of a plan, and whether each is run for a row of another; sub-selects aside."""
    yield node, is_inner
    for child in node.get("Plans", ()):
        if child.get("Parent Relationship") not in ("InitPlan", "SubPlan"):
            is_of_a_row = node["Node Type"] == "Nested Loop" and child.get("Parent Relationship") == "Inner"
            yield from _nodes(child, is_inner or is_of_a_row)


def _read_whole(plan: Mapping[str, Any]) -> Iterator[str]:
    """The relations that a plan does not find its rows in by an index."""
    for node, _ in _nodes(plan):
        if "Relation Name" in node and not (node.get("Index Cond") or node.get("Recheck Cond")):
            yield node["Relation Name"]


def _sorts(plan: Mapping[str, Any]) -> bool:
    """Whether a plan reads all that it finds before it returns the first row."""
    return any(node["Node Type"] in _WHOLE and not is_inner for node, is_inner in _nodes(plan))


_WHOLE = ("Sort", "WindowAgg", "Aggregate")
