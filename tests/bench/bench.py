"""How fast: ratios of times measured side by side in one run, over one connection, in interleaved rounds.

    python tests/bench/bench.py [--quick] [--json]

It starts a server of its own, fills it (a chat of a million messages; --quick: of ten thousand) and prints
the table that stands in tests/README.md. Ratios are of medians. Exit code 1: a target was missed (not with
--quick).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.string import TextLoader

from pycontext import install
from pycontext.embedded import VERSION, Server, binaries
from pycontext.tokens import count

Connection = psycopg.Connection[Any]
Call = Callable[[], Any]

BUDGET = 8000
PERIOD = 1000  # the long chat repeats so many messages
# fmt: off
WORDS = [
    "order", "parcel", "invoice", "address", "customer", "refund", "shelf", "library", "window",
    "branch", "reader", "module", "parser", "fixture", "request", "answer", "Friday", "morning",
    "evening", "number", "street", "corner", "weather", "garden", "kitchen", "bread", "coffee", "paper",
]
# fmt: on


@dataclass(frozen=True)
class Result:
    """One line of the table. Its ratio is `measured_us` ÷ `against_us`, at most the target."""

    name: str
    against: str
    measured_us: float
    against_us: float
    target: float | None
    at_least: bool = False

    @property
    def ratio(self) -> float:
        """How many times the one takes of the other; of a rate, the inverse."""
        if self.at_least:
            return self.against_us / self.measured_us
        return self.measured_us / self.against_us

    @property
    def is_met(self) -> bool:
        """Whether the target is."""
        if self.target is None:
            return True
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target


class Bench:
    """A filled database and what is measured on it."""

    def __init__(self, conn: Connection, big: int, rounds: int, seconds: float = 10) -> None:
        self.conn = conn
        self.big = big
        self.rounds = rounds
        self.seconds = seconds  # a line of the table takes no longer, whatever is slow
        self.results: list[Result] = []
        # Rows are fetched as they come over the wire: what the client makes of JSON is in no ratio.
        conn.adapters.register_loader("jsonb", TextLoader)
        conn.execute("set synchronous_commit = off")

    # What the database is filled with.

    def fill(self) -> None:
        """Chats of 1,000 and of many messages, an agent's session, and both in a table of the product's."""
        self.append("small", talk(PERIOD))
        self.append("big", talk(PERIOD))
        self.repeat("big", self.big // PERIOD)
        self.append("agent", session(150))
        self.product()
        self.conn.execute("vacuum analyze")
        self.conn.execute("checkpoint")

    def append(self, chat_id: str, messages: Sequence[dict[str, Any]]) -> None:
        """Creates the chat and appends, a thousand at a time, as a product does."""
        self.conn.execute(
            "select pycontext.create_chat(%s, system_prompt => 'You answer for a bookshop, briefly.')",
            [chat_id],
        )
        for start in range(0, len(messages), 1000):
            self.conn.execute(
                "select count(*) from pycontext.append_messages(%s, %s)",
                [chat_id, json.dumps(messages[start : start + 1000])],
            )

    def repeat(self, chat_id: str, times: int) -> None:
        """Repeats the chat's first period, with the figures that append_messages gives (`check_repeat`)."""
        columns = [
            row[0]
            for row in self.conn.execute(
                "select attname from pg_attribute where attrelid = 'pycontext.message'::regclass"
                " and attnum > 0 and not attisdropped order by attnum"
            )
        ]
        moved = {
            "seq": f"m.seq + g.n * {PERIOD}",
            "unit_seq": f"m.unit_seq + g.n * {PERIOD}",
            "after_user": f"case when m.seq = 1 then c.request_seq + (g.n - 1) * {PERIOD}"
            f" else m.after_user + g.n * {PERIOD} end",
            "running_total": "m.running_total + g.n * c.total_tokens",
            "running_stub": "m.running_stub + g.n * c.stub_total",
            "message_id": "gen_random_uuid()::text",
        }
        values = sql.SQL(", ").join(
            sql.SQL(moved[column]) if column in moved else sql.SQL("m.") + sql.Identifier(column)
            for column in columns
        )
        with self.conn.transaction():
            self.conn.execute("set local session_replication_role = replica")
            for start in range(1, times, 100):
                self.conn.execute(
                    sql.SQL(
                        "insert into pycontext.message ({columns}) select {values} from pycontext.chat c"
                        " join pycontext.message m on m.chat_id = c.chat_id and m.seq <= {period}"
                        " cross join generate_series({start}, {stop}) g (n) where c.chat_id = {chat}"
                        " order by g.n, m.seq"
                    ).format(
                        columns=sql.SQL(", ").join(map(sql.Identifier, columns)),
                        values=values,
                        period=PERIOD,
                        start=start,
                        stop=min(start + 99, times - 1),
                        chat=chat_id,
                    )
                )
            self.conn.execute(
                "update pycontext.chat c set last_seq = last_seq * %(n)s,"
                " total_tokens = total_tokens * %(n)s, stub_total = stub_total * %(n)s,"
                " live_tokens = live_tokens * %(n)s,"
                " request_seq = request_seq + (%(n)s - 1) * %(period)s,"
                " last_unit = last_unit + (%(n)s - 1) * %(period)s where chat_id = %(chat)s",
                {"n": times, "period": PERIOD, "chat": chat_id},
            )

    def check_repeat(self) -> None:
        """Whether a repeated chat is, row by row, what appending gives."""
        self.append("appended", talk(PERIOD) * 3 + talk(5))
        self.append("repeated", talk(PERIOD))
        self.repeat("repeated", 3)
        self.append("repeated", talk(5))
        kept = "'chat_id,message_id,created_at,updated_at,edit_no'"  # edit_no begins at the clock
        for table, key in (("message", "seq"), ("chat", "last_seq")):
            differing = self.conn.execute(
                f"select a.{key} from pycontext.{table} a full join pycontext.{table} b"
                f" on a.{key} = b.{key} and b.chat_id = 'repeated' where a.chat_id = 'appended'"
                f" and to_jsonb(a) - string_to_array({kept}, ',')"
                f" is distinct from to_jsonb(b) - string_to_array({kept}, ',') limit 1"
            ).fetchall()
            if differing:
                raise AssertionError(f"{table} of a repeated chat differs at {differing}")
        self.conn.execute("select pycontext.delete_chat('appended'), pycontext.delete_chat('repeated')")

    def product(self) -> None:
        """The same conversations in a table of a product's own: ids 1 (1,000 rows) and 2 (many)."""
        texts = [message["content"] for message in talk(PERIOD)]
        self.conn.execute(
            """
            create schema product;
            create table product.post (
                conversation bigint not null, n bigint not null, role text not null, body text not null,
                sent_at timestamptz not null, constraint post_pk primary key (conversation, n));
            create view product.message as
            select p.conversation as chat_id, p.n as seq, p.n as message_id, p.role, p.body as content,
                p.sent_at as created_at
            from product.post p
            """
        )
        self.conn.execute("create temp table t (n bigint, body text)")
        with self.conn.cursor().copy("copy t from stdin") as copy:
            for n, text in enumerate(texts, 1):
                copy.write_row((n, text))
        for conversation, times in ((1, 1), (2, self.big // PERIOD)):
            self.conn.execute(
                "insert into product.post select %s, t.n + g.n * %s,"
                " case when t.n %% 2 = 1 then 'user' else 'assistant' end, t.body, now() - interval '1 day'"
                " from generate_series(0, %s) g (n) cross join t order by g.n, t.n",
                [conversation, PERIOD, times - 1],
            )
        self.conn.execute(
            "select pycontext.register_source('product', 'product.message', is_default => true)"
        )
        for conversation in (1, 2):
            # no tokenizer has counted these: every read estimates the rows it looks at
            self.conn.execute("select pycontext.create_chat(%s, source => 'product')", [str(conversation)])

    # What is measured.

    def statement(self, query: str, *arguments: Any) -> Call:
        """One prepared statement, rows fetched."""
        return lambda: self.conn.execute(query, arguments, prepare=True).fetchall()

    def times(self, calls: Sequence[Call], rounds: int | None = None) -> list[float]:
        """Median microseconds of each, taken in turns."""
        taken: list[list[float]] = [[] for _ in calls]
        until = time.perf_counter() + self.seconds
        for number in range(-max(3, self.rounds // 20), rounds or self.rounds):
            if time.perf_counter() > until and taken[0]:
                break
            if time.perf_counter() > until and number < 0:
                continue
            order = range(len(calls)) if number % 2 else reversed(range(len(calls)))
            for place in order:
                begun = time.perf_counter()
                calls[place]()
                if number >= 0:
                    taken[place].append(time.perf_counter() - begun)
        return [statistics.median(times) * 1e6 for times in taken]

    def compare(self, name: str, against: str, target: float | None, measured: Call, other: Call) -> None:
        """Adds a line: the one ÷ the other."""
        first, second = self.times([measured, other])
        self.add(Result(name, against, first, second, target))

    def add(self, result: Result) -> None:
        """Keeps a line, and tells it to who waits."""
        self.results.append(result)
        print(f"{result.ratio:8.2f}  {result.name}", file=sys.stderr, flush=True)

    def window(self, chat_id: str, budget: int = BUDGET) -> Call:
        """The whole window, as anybody reads it."""
        return self.statement("select * from pycontext.working_window(%s::text, %s)", chat_id, budget)

    def plain(self, chat_id: str, budget: int = BUDGET) -> Call:
        """The stored rows that the window returns, straight out of the table by its key."""
        seqs = [
            row[0]
            for row in self.conn.execute(
                "select w.seq from pycontext.working_window(%s::text, %s) w"
                " where w.seq is not null and w.section <> 'omitted' and w.kind = 'message' order by w.seq",
                [chat_id, budget],
            )
        ]
        runs: list[tuple[int, int]] = []
        for seq in seqs:
            if runs and seq == runs[-1][1] + 1:
                runs[-1] = (runs[-1][0], seq)
            else:
                runs.append((seq, seq))
        if chat_id.isdigit():
            one = (
                "select m.seq, m.message_id, m.role, m.content, m.created_at from product.message m"
                " where m.chat_id = %s and m.seq between %s and %s"
            )
        else:
            one = (
                "select m.seq, m.message_id, m.kind, m.role, m.content, m.tool_calls, m.tool_call_id, m.name,"
                " m.tokens, m.created_at from pycontext.message m"
                " where m.chat_id = %s and m.seq between %s and %s and m.line_no = 0"
            )
        place = int(chat_id) if chat_id.isdigit() else chat_id
        arguments = [value for low, high in runs for value in (place, low, high)]
        return self.statement(" union all ".join([one] * len(runs)) + " order by 1", *arguments)

    def run(self) -> None:
        """Every line of the table."""
        self.overhead()
        self.flat("")
        self.foreign()
        self.draw_lines()
        self.flat(", with a line")
        self.rate()

    def overhead(self) -> None:
        """A window beside the rows that are in it."""
        say = "plain SELECT of its rows"
        for chat_id, budget, what in (
            ("small", BUDGET, "messages of 80 tokens, 8,000-token budget"),
            ("agent", BUDGET, "agent session, results of 2,000 tokens, 8,000-token budget"),
            ("agent", 4 * BUDGET, "agent session, results of 2,000 tokens, 32,000-token budget"),
        ):
            self.compare(
                f"`working_window`, {what}",
                say,
                2.0,
                self.window(chat_id, budget),
                self.plain(chat_id, budget),
            )

    def calls(self, chat_id: str) -> dict[str, Call]:
        """What is done with a chat, each as one statement and one transaction."""
        text = json.dumps(talk(1)[0])
        return {
            "working_window": self.window(chat_id),
            "compaction_plan": self.statement(
                "select * from pycontext.compaction_plan(%s, %s)", chat_id, BUDGET
            ),
            "thread": self.statement("select * from pycontext.thread(%s)", chat_id),
            "start_turn": self.statement(
                "select * from pycontext.start_turn(%s, %s, token_budget => %s)", chat_id, text, BUDGET
            ),
            "append_message": self.statement(
                "select seq from pycontext.append_message(%s, 'user', %s::text)",
                chat_id,
                talk(1)[0]["content"],
            ),
        }

    def flat(self, suffix: str) -> None:
        """The long chat beside the short one."""
        self.conn.execute("vacuum pycontext.message, pycontext.chat")
        small, big = self.calls("small"), self.calls("big")
        for name in small:
            self.compare(
                f"`{name}`, chat of {self.big:,} messages{suffix}",
                f"chat of {PERIOD:,}",
                1.3,
                big[name],
                small[name],
            )

    def draw_lines(self) -> None:
        """Both chats start over, and what came after that is summarized but for the tail."""
        for chat_id in ("small", "big"):
            self.conn.execute("select pycontext.start_over(%s)", [chat_id])
            self.append(chat_id, talk(300))
            self.conn.execute(
                "select pycontext.put_summary(%(chat)s, p.after_message_id, %(summary)s,"
                " token_budget => %(budget)s) from pycontext.compaction_plan(%(chat)s, %(budget)s) p",
                {
                    "chat": chat_id,
                    "budget": BUDGET,
                    "summary": json.dumps({"resolved": [f"parcel {n} was sent" for n in range(40)]}),
                },
            )

    def foreign(self) -> None:
        """Chats in a table of the product's, as estimated; then the windows once more, counted."""
        for what in ("", ", counted"):
            if what:
                for chat_id in ("1", "2"):
                    self.count(chat_id)
            for chat_id, size in (("1", PERIOD), ("2", self.big)):
                self.compare(
                    f"`working_window`, the product's own table, {size:,} messages{what}",
                    "plain SELECT of its rows",
                    4.0,
                    self.window(chat_id),
                    self.plain(chat_id),
                )
        for name in ("working_window", "compaction_plan", "thread"):
            self.compare(
                f"`{name}`, the product's own table, {self.big:,} messages",
                f"chat of {PERIOD:,}",
                1.3,
                self.calls("2")[name],
                self.calls("1")[name],
            )

    def count(self, chat_id: str) -> None:
        """Counts an adopted chat as the Python client does: its newest rows and its first turn."""
        while rows := self.conn.execute(
            "select u.seq, u.overhead, u.texts from pycontext.uncounted_messages(%s) u", [chat_id]
        ).fetchall():
            counts = [
                {"seq": seq, "tokens": overhead + sum(count(text, "o200k_base") for text in texts)}
                for seq, overhead, texts in rows
            ]
            self.conn.execute(
                "select pycontext.cache_token_counts(%s, 'o200k_base', %s)", [chat_id, json.dumps(counts)]
            )

    def rate(self) -> None:
        """Single appends beside raw inserts of the same rows, each its own transaction."""
        self.append("rate", talk(100))
        content = talk(1)[0]["content"]
        place = 10_000_000

        def insert() -> None:
            nonlocal place
            place += 1
            self.conn.execute(
                "insert into pycontext.message (chat_id, seq, line_no, kind, role, unit_seq, tokens,"
                " frozen_tokens, stub_tokens, reasoning_tokens, running_total, running_stub, images, calls,"
                " is_user, is_plain, has_fence, at_act, digest, tenant, message_id, created_at, content)"
                " values ('raw', %(seq)s, 0, 'message', 'user', %(seq)s, 84, 84, 84, 0, %(seq)s, %(seq)s, 0,"
                " 0, true, true, false, 0, '\\x00112233445566778899aabbccddeeff', '', gen_random_uuid(),"
                " clock_timestamp(), to_jsonb(%(content)s::text))",
                {"seq": place, "content": content},
                prepare=True,
            )

        def append() -> None:
            self.conn.execute(
                "select seq from pycontext.append_message('rate', 'user', %s::text)", [content], prepare=True
            )

        self.conn.execute("select pycontext.create_chat('raw')")
        for setting, what in (("on", "durable commits"), ("off", "`synchronous_commit` off")):
            self.conn.execute(sql.SQL("set synchronous_commit = {}").format(setting))
            first, second = self.times([append, insert], rounds=3 * self.rounds)
            # what a product waits for is the durable one; the other shows the work alone
            target = 0.6 if setting == "on" else None
            self.add(
                Result(
                    f"rate of `append_message`, {what}", "raw INSERT", first, second, target, at_least=True
                )
            )

    def table(self) -> str:
        """The results in markdown."""
        lines = [
            "| measured | against | µs | µs | ratio | target | |",
            "|---|---|--:|--:|--:|--:|---|",
        ]
        for result in self.results:
            target = "" if result.target is None else f"{'≥' if result.at_least else '≤'} {result.target:.1f}"
            lines.append(
                f"| {result.name} | {result.against} | {result.measured_us:,.0f} | {result.against_us:,.0f}"
                f" | {result.ratio:.2f} | {target} | {'' if result.is_met else '**missed**'} |"
            )
        return "\n".join(lines)


def talk(messages: int) -> list[dict[str, Any]]:
    """User and assistant in turns, about 80 tokens each, counted as the Python client does."""
    rng = random.Random(7)
    made = []
    for n in range(messages):
        text = f"Message {n} about the {rng.choice(WORDS)}:"
        while len(text) < 440:
            text += f" {rng.choice(WORDS)}"
            if rng.random() < 0.1:
                text += f" {rng.randint(1, 999)},"
        made.append(
            {
                "role": "user" if n % 2 == 0 else "assistant",
                "content": text,
                "tokens": {"encoding": "o200k_base", "count": 4 + count(text, "o200k_base")},
            }
        )
    return made


def session(steps: int) -> list[dict[str, Any]]:
    """An agent at work on one request: so many calls, each with a result of about 2,000 tokens."""
    rng = random.Random(11)
    made: list[dict[str, Any]] = [
        {"role": "user", "content": "The parser test fails. Find out why, and mend it."}
    ]
    for n in range(steps):
        call = {"name": "read_file", "arguments": json.dumps({"path": f"src/module_{n}.py", "from": n})}
        made.append(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"call_{n}", "type": "function", "function": call}],
            }
        )
        text = "\n".join(
            f"{line:4} {' '.join(rng.choice(WORDS) for _ in range(9))} = {rng.randint(1, 9999)}"
            for line in range(110)
        )
        made.append(
            {
                "role": "tool",
                "tool_call_id": f"call_{n}",
                "content": text,
                "tokens": {"encoding": "o200k_base", "count": 12 + count(text, "o200k_base")},
            }
        )
    return made


def measure(dsn: str, big: int, rounds: int) -> Bench:
    """Fills the database of that name, where nothing is yet, and measures."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        install.install(conn)
        bench = Bench(conn, big, rounds, 1 if rounds < 10 else 10)
        bench.check_repeat()
        bench.fill()
        bench.run()
        return bench


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="10,000 messages, few rounds: does it run")
    parser.add_argument("--messages", type=int, help="size of the long chat (default 1,000,000)")
    parser.add_argument("--json", action="store_true", dest="as_json", help="JSON in place of the table")
    chosen = parser.parse_args(arguments)
    big = chosen.messages or (10 * PERIOD if chosen.quick else 1000 * PERIOD)
    root = Path(tempfile.mkdtemp(prefix="pycontext-bench-", dir="/tmp"))
    server = Server(
        root,
        bin_path=binaries(VERSION),
        settings={"shared_buffers": "512MB", "max_wal_size": "4GB", "autovacuum": "off", "jit": "off"},
    )
    try:
        server.start()
        begun = time.perf_counter()
        bench = measure(server.dsn(), big, 5 if chosen.quick else 200)
        if chosen.as_json:
            print(
                json.dumps([asdict(result) | {"ratio": result.ratio} for result in bench.results], indent=2)
            )
        else:
            print(bench.table())
            print(
                f"\nPostgreSQL {VERSION} on {platform.machine()}, {os.cpu_count()} cores, Python"
                f" {platform.python_version()}; {time.perf_counter() - begun:.0f} s with the filling."
            )
    finally:
        server.release()
        shutil.rmtree(root, ignore_errors=True)
    return 0 if chosen.quick or all(result.is_met for result in bench.results) else 1


if __name__ == "__main__":
    sys.exit(main())
