"""Day one: a product with a million messages adopts pycontext. How long each step takes, as a table.

    python tests/bench/day_one.py [--messages N]

It starts a server of its own, fills a table of a product's as it was before anybody thought of windows: chats
of 100 messages and one of a tenth of all. Then it adopts the table, reads the first window of chats that
nothing is known of, counts what windows read, and compacts the long chat, piece by piece.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg

import pycontext
from pycontext import install
from pycontext.embedded import VERSION, Server, binaries
from pycontext.source import Adoption, adopt

Connection = psycopg.Connection[Any]

SHORT = 100  # messages of a short chat
READ = 50  # short chats whose window is read


@dataclass(frozen=True)
class Step:
    """One line of the table."""

    what: str
    took: str
    note: str = ""


class Pieces(logging.Handler):
    """When each pass of a long compaction ended: the progress that whoever waits is told."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.ended: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        """A pass was reported."""
        if not record.getMessage().startswith("compaction of chat"):
            return
        self.ended.append(time.perf_counter())
        print(record.getMessage(), file=sys.stderr)


def fill(conn: Connection, messages: int) -> None:
    """The product's table; chat 0 is the long one, chats 1, 2, … have 100 messages."""
    conn.execute(
        """
        create schema app;
        create table app.message (
            id bigint generated always as identity primary key, conversation_id bigint not null,
            sender text not null, body text not null, created_at timestamptz not null);
        """
    )
    # Interleaved, as they come in; texts of 110 to 240 characters in two languages, no two the same.
    conn.execute(
        """
        insert into app.message (conversation_id, sender, body, created_at)
        select case when g %% 10 = 0 then 0 else 1 + (g / 10 * 9 + g %% 10 - 1) %% %(short)s end,
            case when g / 10 %% 2 = 0 then 'customer' else 'bot' end,
            case when g / 10 %% 12 = 0
                then format('Заказ QX-%%s: parcel %%s left on Friday. ', g, g * 7 %% 100003) else '' end
                || left(translate(md5(g::text) || md5((g + 1)::text), '0369', '    '), 40 + g %% 20)
                || repeat(' Где он? It should be here by now.', 2 + (g %% 4)::integer),
            now() - interval '90 days' + g * interval '5 seconds'
        from generate_series(0, %(messages)s - 1) g (g)
        """,
        {"messages": messages, "short": messages * 9 // 10 // SHORT},
    )
    conn.execute("create index on app.message (conversation_id, id)")
    conn.execute("vacuum analyze app.message")


def windows(conn: Connection, chats: Sequence[int]) -> tuple[str, str]:
    """Milliseconds of one window each: median, and worst; whether rows were estimated."""
    took, estimated = [], 0
    for chat in chats:
        begun = time.perf_counter()
        rows = conn.execute("select is_estimate from pycontext.working_window(%s)", [str(chat)]).fetchall()
        took.append((time.perf_counter() - begun) * 1000)
        estimated += sum(row[0] for row in rows)
    return f"{statistics.median(took):,.0f} ms", f"worst {max(took):,.0f} ms; {estimated:,} rows estimated"


def day_one(dsn: str, messages: int) -> Iterator[Step]:
    """Fills, adopts, reads, counts, compacts."""

    def step(what: str, begun: float, note: str = "") -> Step:
        return Step(what, f"{time.perf_counter() - begun:,.1f} s", note)

    with psycopg.connect(dsn, autocommit=True) as conn:
        fill(conn, messages)
        begun = time.perf_counter()
        install.install(conn)
        yield step("`pycontext install`", begun)
        begun = time.perf_counter()
        done = adopt(
            conn,
            Adoption(
                "app", "app.message", "conversation_id", role="sender", content="body", is_default=True,
                role_map={"customer": "user", "bot": "assistant"},
            ),
        )  # fmt: skip
        assert not done.has_problem, done.checks
        yield step("`pycontext adopt --yes`", begun, f"{messages:,} rows looked through, none copied")
        long, short = [0], list(range(1, READ + 1))
        yield Step(f"first window, {READ} chats of {SHORT}", *windows(conn, short))
        yield Step(f"first window, the chat of {messages // 10:,}", *windows(conn, long))
        with pycontext.connect(dsn) as memory:
            begun = time.perf_counter()
            counted = sum(memory.count_tokens(str(chat)) for chat in short)
            yield step(f"counting these {READ} chats", begun, f"{counted:,} rows")
            yield Step(f"window, {READ} chats of {SHORT}, counted", *windows(conn, short))
            pieces = Pieces()
            logger = logging.getLogger("pycontext")
            logger.addHandler(pieces)
            logger.setLevel(logging.INFO)
            begun = time.perf_counter()
            done_pass = memory.compact("0")
            yield step(
                f"first compaction of the chat of {messages // 10:,}",
                begun,
                f"{done_pass.outcome}, {len(pieces.ended)} pieces",
            )
            ends = [begun, *pieces.ended]
            lasted = [after - before for before, after in pairwise(ends)]
            yield Step(
                "one piece of it: what progress is told after",
                f"{statistics.median(lasted):,.1f} s",
                f"longest {max(lasted):,.1f} s",
            )
        yield Step(f"window of the chat of {messages // 10:,}, compacted", *windows(conn, long))
        kept = conn.execute(
            "select sum(pg_total_relation_size(c.oid)) / pg_total_relation_size('app.message')::numeric"
            " from pg_class c where c.relnamespace = 'pycontext'::regnamespace and c.relkind = 'r'"
        ).fetchone()
        assert kept is not None
        begun = time.perf_counter()
        conn.execute("select pycontext.forget_source('app')")
        yield step("`forget_source`", begun, f"schema pycontext had {kept[0]:.1%} of the table's size")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    chosen = parser.parse_args(arguments)
    root = Path(tempfile.mkdtemp(prefix="pycontext-day-one-", dir="/tmp"))
    server = Server(
        root,
        bin_path=binaries(VERSION),
        settings={"shared_buffers": "512MB", "max_wal_size": "4GB", "jit": "off"},
    )
    try:
        server.start()
        print("| step | took | |\n|---|--:|---|")
        for step in day_one(server.dsn(), chosen.messages):
            print(f"| {step.what} | {step.took} | {step.note} |", flush=True)
        print(
            f"\nPostgreSQL {VERSION} on {platform.machine()}, {os.cpu_count()} cores, Python"
            f" {platform.python_version()}."
        )
    finally:
        server.release()
        shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
