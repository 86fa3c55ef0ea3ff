"""The commands. Each one opens a database, asks it one thing and prints the answer."""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer

import pycontext
from pycontext import install as installer
from pycontext.cli import show, target
from pycontext.cli.adopting import adopt_command
from pycontext.cli.chat import chat_command
from pycontext.cli.terminal import Failed, err, number, out, print_json, reported, visible
from pycontext.messages import identity
from pycontext.queries import query
from pycontext.rows import WindowRow

app = typer.Typer(
    help="Short-term memory for LLM chats in Postgres: the window is a SELECT, the summary is a row.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def run() -> int:
    """Run the command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal without a character prints '?' instead of ending the command.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    # What the library logs of a failed pass, a command prints itself.
    logging.getLogger("pycontext").addHandler(logging.NullHandler())
    try:
        app(prog_name="pycontext")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def _id(value: str | None) -> str | None:
    if value is None:
        return None
    try:
        return identity(value)
    except ValueError as error:
        raise typer.BadParameter("must not be empty, and hold no NUL and no lone surrogate") from error


Dsn = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        metavar="DSN",
        help="The database. Default: PYCONTEXT_DSN, then DATABASE_URL, else the embedded server.",
        show_default=False,
    ),
]
OwnDsn = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        metavar="DSN",
        help="The database. Default: PYCONTEXT_DSN, then DATABASE_URL.",
        show_default=False,
    ),
]
Chat = Annotated[str, typer.Argument(metavar="CHAT", help="The chat's id.", callback=_id)]
Budget = Annotated[
    int | None,
    typer.Option(
        "--budget",
        min=1,
        metavar="TOKENS",
        help="The token budget. Default: the profile's.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]


class SummarizerName(str, Enum):
    """The summarizers that can be chosen by name."""

    extractive = "extractive"
    openai = "openai"


@app.command()
def install(
    dsn: OwnDsn = None,
    search_path_of: Annotated[
        str | None,
        typer.Option(
            "--search-path-of",
            metavar="ROLE",
            help="Append the schema to this role's search path, so that working_window(…) needs no prefix.",
        ),
    ] = None,
) -> None:
    """Install or upgrade schema pycontext. Twice is harmless. Never uses the embedded server."""
    with reported():
        found = target.find(dsn, may_embed=False)
        with psycopg.connect(found.dsn, autocommit=True) as conn:
            before = installer.schema_state(conn)
            installer.install(conn)
            version = installer.schema_version(conn)
            done = (
                "is up to date"
                if before == "current"
                else "is installed"
                if before == "absent"
                else "is upgraded"
            )
            out().print(f"schema pycontext {done}: {version}")
            if search_path_of is not None:
                path = installer.extend_search_path(conn, role=search_path_of)
                out().print(f"search path of {visible(search_path_of)}: {visible(path)}")


@app.command()
def sql() -> None:
    """Print the SQL text that installs the schema. It is for psql, or any migration tool."""
    with reported():
        sys.stdout.write(installer.build_sql())


@app.command()
def status(dsn: Dsn = None, as_json: Json = False) -> None:
    """Say what is wrong, and what to do about each finding. Of the embedded server also where it is."""
    with reported(), _connection((found := target.find(dsn)).dsn) as conn:
        version = installer.schema_version(conn)
        findings = _rows(conn, "status")
        if as_json:
            print_json({"schema_version": version, "findings": findings})
            return
        if found.data_dir is not None:
            out().print("for other programs, while one of pycontext's runs (such as pycontext psql):")
            out().print(f"    {found.dsn}", soft_wrap=True)
        out().print(f"schema {version}, PostgreSQL {conn.info.server_version // 10000}")
        for finding in findings:
            style = {"error": "bold red", "warning": "yellow"}.get(finding["severity"], "")
            out().print(f"{finding['severity']}: {visible(finding['finding'])}", style=style)
            for label in ("detail", "hint"):
                if finding[label]:
                    out().print(f"    {label}: {visible(finding[label])}")
        if not findings:
            out().print("nothing to report")


@app.command()
def chats(
    dsn: Dsn = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many chats, the newest.")] = 50,
    as_json: Json = False,
) -> None:
    """List the newest chats, and which are over budget."""
    with reported(), _connection(target.find(dsn).dsn) as conn:
        rows = _rows(conn, "chats", max_rows=limit)
        if as_json:
            print_json(rows)
            return
        if not rows:
            out().print("no chats yet: pycontext import FILE.jsonl, or pycontext demo")
            return
        show.table(
            out(),
            ("chat", "messages", "window", "budget", "line", "state", "updated"),
            [
                (
                    row["chat_id"],
                    number(row["messages"]),
                    number(row["window_tokens"]),
                    number(row["token_budget"]),
                    "–" if row["line_seq"] is None else f"#{row['line_seq']} {row['line_origin']}",
                    row["state"],
                    show.moment(row["updated_at"]),
                )
                for row in rows
            ],
            right="_rrr",
        )


@app.command()
def thread(
    chat: Chat,
    dsn: Dsn = None,
    before: Annotated[
        int | None,
        typer.Option("--before", metavar="SEQ", help="Only what stands before #SEQ.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many rows, the newest.")] = 50,
    as_json: Json = False,
) -> None:
    """Show a conversation and the lines across it, newest last."""
    with reported(), pycontext.connect(target.find(dsn).dsn) as db:
        rows = db.thread(chat, before_seq=before, max_rows=limit)
        if as_json:
            print_json({"chat_id": chat, "rows": [asdict(row) for row in rows]})
            return
        first = min((row.seq for row in rows), default=0)
        if first > 1:
            out().print(f"… older: pycontext thread {visible(chat)} --before {first}", style="bright_black")
        if not rows:
            out().print("no messages here")
        show.thread(out(), rows)


@app.command()
def window(
    chat: Chat,
    dsn: Dsn = None,
    budget: Budget = None,
    as_of: Annotated[
        str | None,
        typer.Option(
            "--as-of", metavar="MESSAGE_ID", help="The window as it was at this message.", callback=_id
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what the model reads, and a bar of it against the budget."""
    with reported(), pycontext.connect(target.find(dsn).dsn) as db:
        rows = db.window(chat, budget, as_of)
        limit = budget if budget is not None else db.status(chat).token_budget
        if as_json:
            print_json(window_json(chat, rows, limit, as_of))
            return
        show.window(out(), rows, limit, f"window of {chat}" + (f" as of {as_of}" if as_of else ""))


@app.command()
def explain(
    chat: Chat,
    dsn: Dsn = None,
    budget: Budget = None,
    as_of: Annotated[
        str | None,
        typer.Option(
            "--as-of", metavar="MESSAGE_ID", help="The window as it was at this message.", callback=_id
        ),
    ] = None,
    search: Annotated[
        str | None, typer.Option("--search", metavar="TEXT", help="Only rows that hold all these words.")
    ] = None,
    before: Annotated[
        int | None,
        typer.Option("--before", metavar="SEQ", help="Only what stands before #SEQ.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many rows, the newest.")] = 1000,
    as_json: Json = False,
) -> None:
    """Say of every row whether the model reads it, and why (not)."""
    with reported(), pycontext.connect(target.find(dsn).dsn) as db:
        rows = db.explain(chat, budget, as_of, search, before, limit)
        if as_json:
            print_json({"chat_id": chat, "as_of": as_of, "rows": [asdict(row) for row in rows]})
            return
        if not any(row.fate != "not shown" for row in rows):
            out().print("no such rows" if search else "no messages here")
        show.explanation(out(), rows)


@app.command()
def inspect(
    chat: Chat,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The page, as HTML; - is stdout.")
    ],
    dsn: Dsn = None,
    budget: Annotated[
        int | None,
        typer.Option(
            "--token-budget",
            "--budget",
            min=1,
            metavar="TOKENS",
            help="The token budget. Default: the profile's.",
            show_default=False,
        ),
    ] = None,
    as_of: Annotated[
        str | None,
        typer.Option(
            "--as-of", metavar="MESSAGE_ID", help="The window as it was at this message.", callback=_id
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="At most so many rows of the thread, the newest.")
    ] = 10_000,
) -> None:
    """Write an HTML page of a chat: what the model reads, and why. It loads nothing."""
    from pycontext.inspector import inspect as page

    with reported():
        with psycopg.connect(
            target.find(dsn).dsn, autocommit=True, prepare_threshold=None, client_encoding="utf8"
        ) as conn:
            text = page(conn, chat, budget, as_of, limit)
        if str(output) == "-":
            sys.stdout.buffer.write(text.encode())
            return
        output.write_text(text, encoding="utf-8", newline="\n")
        out().print(f"{visible(str(output))}: {number(len(text.encode()))} bytes; open it in a browser")


def window_json(chat: str, rows: list[WindowRow], token_budget: int, as_of: str | None) -> dict[str, Any]:
    """The window as `pycontext window --json` prints it."""
    return {
        "chat_id": chat,
        "as_of": as_of,
        "token_budget": token_budget,
        "window_tokens": show.window_tokens(rows),
        "sections": show.section_tokens(rows),
        "rows": [asdict(row) for row in rows],
    }


@app.command()
def compact(
    chat: Chat,
    dsn: Dsn = None,
    budget: Budget = None,
    focus: Annotated[
        str | None, typer.Option("--focus", metavar="TEXT", help="What the summary should keep above all.")
    ] = None,
    summarizer: Annotated[
        SummarizerName | None,
        typer.Option(
            "--summarizer",
            help="Default: the model of PYCONTEXT_SUMMARIZER_MODEL, else the built-in extractive one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Summarize now what may be cut, and say what was saved."""
    with reported(), pycontext.connect(target.find(dsn).dsn) as db, show.pieces(err()):
        done = db.compact(chat, budget, focus, _summarizer(summarizer))
        show.a_pass(out(), done)
        if done.outcome == "failed":
            raise typer.Exit(1)


@app.command()
def worker(
    dsn: OwnDsn = None,
    once: Annotated[bool, typer.Option("--once", help="Look at all chats once, then end.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="Between two looks.")
    ] = 5.0,
    summarizer: Annotated[
        SummarizerName | None,
        typer.Option("--summarizer", help="Default: openai where PYCONTEXT_SUMMARIZER_MODEL is set."),
    ] = None,
) -> None:
    """Compact chats ahead of their next turn, and count tokens. Several may run.

    Never uses the embedded server. SIGTERM and SIGINT: the pass at hand is ended, or its lease given back.
    """
    from pycontext.summarizer import from_environment
    from pycontext.worker import Worker

    with reported():
        found = target.find(dsn, may_embed=False)
        chosen = _summarizer(summarizer) or from_environment()
        with pycontext.connect(found.dsn, summarizer=chosen) as db:
            out().print(f"worker: summaries are made by {visible(chosen.name)}")
            done = Worker(db, interval=interval, tell=_tell_pass).run(once=once)
            out().print(
                f"worker ended: {number(done.passes)} passes saved {number(done.saved_tokens)} tokens, "
                f"{number(done.failed)} failed, {number(done.counted)} rows counted, "
                f"{number(done.facts)} facts taken"
            )


def _tell_pass(chat: str, done: pycontext.Pass) -> None:
    if done.outcome == "failed":
        text = f"failed: {visible(done.reason or '')}"
    else:
        text = f"{done.outcome}: {number(done.tokens_before)} → {number(done.tokens_after)} tokens"
    out().print(f"{visible(chat)} {text}, {done.seconds:.1f} s")


@app.command(name="start-over")
def start_over(
    chat: Chat,
    dsn: Dsn = None,
    note: Annotated[
        str | None,
        typer.Option("--note", metavar="TEXT", help="All that the model will read of what is above."),
    ] = None,
) -> None:
    """Draw a line: the model reads nothing above it. Nothing is deleted."""
    with reported(), pycontext.connect(target.find(dsn).dsn) as db:
        line = db.start_over(chat, note)
        db.count_tokens(chat)
        out().print(f"started over after #{line.seq}; the thread still shows what is above")


app.command(name="adopt")(adopt_command)
app.command(name="chat")(chat_command)


@app.command(name="import")
def import_(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help='JSONL of {"id"?, "messages": […]}, - is stdin.')
    ],
    dsn: Dsn = None,
    chat_id: Annotated[
        str | None,
        typer.Option(
            "--chat-id", metavar="CHAT", help="The id of the only conversation in FILE.", callback=_id
        ),
    ] = None,
    prefix: Annotated[str, typer.Option("--prefix", metavar="TEXT", help="Put before each chat's id.")] = "",
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="NAME", help="The profile of chats that are new.")
    ] = None,
) -> None:
    """Import conversations in OpenAI chat format. Each comes whole or not at all; twice is harmless."""
    from pycontext.cli.importing import import_files

    with reported():
        if chat_id is not None and (prefix or len(files) > 1):
            raise Failed("--chat-id is for one file, and without --prefix")
        if import_files(files, target.find(dsn), chat_id=chat_id, prefix=prefix, profile=profile):
            raise typer.Exit(1)


@app.command()
def demo(
    dsn: Dsn = None,
    budget: Annotated[
        int, typer.Option("--budget", min=4000, metavar="TOKENS", help="Of the first conversation.")
    ] = 8000,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            help="Where the real session is. Default: ../shared/data, if it is there.",
        ),
    ] = None,
    is_short: Annotated[bool, typer.Option("--short", help="Without the real session.")] = False,
) -> None:
    """Replay a long agent session turn by turn, and compact it. It ends in its window, as SQL."""
    from pycontext.demo.run import Demo

    with reported():
        Demo(target.find(dsn), budget, data, is_short=is_short).run()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def psql(context: typer.Context, dsn: Dsn = None) -> None:
    """Open psql on the database. What follows goes to psql: pycontext psql -c 'select …'.

    Rows too wide for the screen are printed a column a line (\\x auto); \\x off prints them as a table.
    """
    from pycontext.embedded import psql as open_psql

    with reported():
        found = target.find(dsn)
        raise typer.Exit(open_psql(context.args, dsn=found.dsn))


def _summarizer(name: SummarizerName | None) -> Any:
    if name is None:
        return None
    if name is SummarizerName.extractive:
        from pycontext.summarizer.extractive import ExtractiveSummarizer

        return ExtractiveSummarizer()
    from pycontext.summarizer import from_environment

    chosen = from_environment()
    if chosen.name == SummarizerName.extractive.value:
        raise Failed(
            "no summarizer model is configured",
            hint="set PYCONTEXT_SUMMARIZER_MODEL, with PYCONTEXT_SUMMARIZER_BASE_URL or OPENAI_API_KEY",
        )
    return chosen


def _connection(dsn: str) -> psycopg.Connection[dict[str, Any]]:
    return psycopg.connect(
        dsn,
        autocommit=True,
        prepare_threshold=None,
        client_encoding="utf8",
        row_factory=psycopg.rows.dict_row,
    )


def _rows(conn: psycopg.Connection[dict[str, Any]], name: str, **parameters: Any) -> list[dict[str, Any]]:
    from pycontext.errors import translate

    with translate():
        return conn.execute(query(name), parameters).fetchall()
