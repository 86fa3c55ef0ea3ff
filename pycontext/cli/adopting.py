"""`pycontext adopt`: the view of a product's messages table, checked against the table, printed or run."""

from __future__ import annotations

import sys
from typing import Annotated

import psycopg
import typer

from pycontext.cli import target
from pycontext.cli.terminal import Failed, err, out, printable, reported, visible
from pycontext.errors import translate
from pycontext.source import Adoption, Check, Plan, adopt, plan

_STYLES = {"ok": "green", "note": "yellow", "warning": "bold yellow", "problem": "bold red"}


def adopt_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the source is called.")],
    dsn: Annotated[
        str | None, typer.Option("--dsn", metavar="DSN", help="The database.", show_default=False)
    ] = None,
    table: Annotated[
        str | None, typer.Option("--table", metavar="TABLE", help="The product's messages table.")
    ] = None,
    chat_id: Annotated[
        str, typer.Option("--chat-id", metavar="COLUMN", help="Which chat a row is of.")
    ] = "chat_id",
    message_id: Annotated[str, typer.Option("--message-id", metavar="COLUMN", help="The row's id.")] = "id",
    order: Annotated[
        str,
        typer.Option(
            "--order", metavar="COLUMN[,COLUMN]", help="A growing integer; or a time and what breaks ties."
        ),
    ] = "id",
    role: Annotated[str, typer.Option("--role", metavar="COLUMN", help="Who speaks.")] = "role",
    role_map: Annotated[
        str | None,
        typer.Option(
            "--role-map",
            metavar="A=assistant,*=user",
            help="Its roles in ours; * is all others, - leaves out. In quotes.",
            show_default=False,
        ),
    ] = None,
    content: Annotated[
        str, typer.Option("--content", metavar="COLUMN", help="Text, or parts as JSON.")
    ] = "content",
    created_at: Annotated[
        str | None,
        typer.Option("--created-at", metavar="COLUMN", help="Default: the time of --order, else created_at."),
    ] = None,
    tool_calls: Annotated[
        str | None, typer.Option("--tool-calls", metavar="COLUMN", help="OpenAI tool calls.")
    ] = None,
    tool_call_id: Annotated[
        str | None, typer.Option("--tool-call-id", metavar="COLUMN", help="The call that a result answers.")
    ] = None,
    speaker: Annotated[
        str | None, typer.Option("--name", metavar="COLUMN", help="Name of speaker or tool.")
    ] = None,
    metadata: Annotated[
        str | None, typer.Option("--metadata", metavar="COLUMN", help="A JSON object.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="Such as: deleted_at is null."),
    ] = None,
    view: Annotated[
        str | None, typer.Option("--view", metavar="VIEW", help="Name of the view. Default: TABLE_pycontext.")
    ] = None,
    from_view: Annotated[
        str | None,
        typer.Option("--from-view", metavar="VIEW", help="One written by hand, not --table."),
    ] = None,
    is_default: Annotated[
        bool, typer.Option("--default", help="The home of every chat id that pycontext does not know.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Run it: the index by itself, the rest in one transaction.")
    ] = False,
) -> None:
    """Read chats from a messages table of yours.

    Prints view, index and registration, and what was found in the rows; runs them with --yes.
    """
    with reported():
        spec = Adoption(
            name=name,
            table=table,
            chat_id=chat_id,
            message_id=message_id,
            order=tuple(part.strip() for part in order.split(",")),
            role=role,
            role_map={} if role_map is None else _role_map(role_map),
            content=content,
            created_at=created_at,
            tool_calls=tool_calls,
            tool_call_id=tool_call_id,
            speaker=speaker,
            metadata=metadata,
            where=where,
            view=view,
            from_view=from_view,
            is_default=is_default,
        )
        with (
            translate(),
            psycopg.connect(
                target.find(dsn).dsn, autocommit=True, prepare_threshold=None, client_encoding="utf8"
            ) as conn,
        ):
            try:
                found = adopt(conn, spec, _tell) if yes else plan(conn, spec)
            except psycopg.errors.InsufficientPrivilege as error:
                raise Failed(
                    error.diag.message_primary or "no right to do this",
                    hint="adopt as a role that owns the table or is a member of its owner, and is a member of"
                    " pycontext_admin (sql/extras/roles.sql) or of the owner of schema pycontext",
                    sqlstate=error.sqlstate,
                ) from None
        _print(found, spec, is_done=yes)
        if found.has_problem:
            raise typer.Exit(1)


def _role_map(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        old, _, new = (part.strip() for part in pair.rpartition("="))
        if not old:
            raise Failed(f"--role-map: {pair!r} is no pair", hint=_MAPS)
        if pairs.setdefault(old, new) != new:
            raise Failed(f"--role-map: two roles for {old!r}: {pairs[old]} and {new}", hint=_MAPS)
    if not pairs:
        raise Failed("--role-map maps nothing", hint=f"{_MAPS}; or leave it out")
    return pairs


_MAPS = "--role-map 'customer=user,bot=assistant', with *=user for all others"


def _print(found: Plan, spec: Adoption, *, is_done: bool) -> None:
    for check in found.checks:
        err().print(f"{check.severity}: {visible(check.text)}", style=_STYLES[check.severity])
        if check.way_out:
            err().print(f"    {visible(check.way_out)}")
        for line in check.lines:
            err().print(f"      {printable(line)}", soft_wrap=True)
    if found.has_problem:
        err().print("nothing was changed" if is_done else "not yet: see above", style="bold red")
    if not is_done or found.has_problem:
        statements = (*found.index, "begin", *found.statements, "commit")
        sys.stdout.write("".join(f"{statement};\n\n" for statement in statements))
    else:
        chat = _literal(found.chat_id or "7")
        out().print("adopted; try, with the id of a chat:", soft_wrap=True)
        if not spec.is_default:
            attach = f"select pycontext.create_chat({chat}, source => {_literal(spec.name)});"
            out().print(f"  {attach}", soft_wrap=True)
        out().print(f"  select * from pycontext.working_window({chat});", soft_wrap=True)


def _tell(statement: str) -> None:
    err().print(f"{visible(statement)} … (waits for transactions that are open now)", style="dim")


def _literal(text: str) -> str:
    return "'" + printable(text).replace("'", "''") + "'"


__all__ = ["Check", "adopt_command"]
