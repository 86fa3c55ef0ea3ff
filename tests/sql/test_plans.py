"""Plans of the hot paths: indexes only, a bounded number of buffers, no content of a row that is not sent."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

Connection = psycopg.Connection[Any]
Plan = dict[str, Any]

LONG = 6000
SHORT = 600
BUDGET = 4000

HOT = {
    "working_window": "select * from working_window(%(chat)s::text, %(budget)s)",
    "working_window as of": "select * from working_window(%(chat)s::text, %(budget)s, %(id)s)",
    "compaction_plan": "select * from compaction_plan(%(chat)s, %(budget)s)",
    "thread": "select * from thread(%(chat)s)",
    "start_turn": """select * from start_turn(%(chat)s, '"Where is it?"', token_budget => %(budget)s)""",
    "append_message": "select seq from append_message(%(chat)s, 'user', 'Where is it?'::text)",
}
#: Buffers that a statement may touch, nested statements and all: about twice what it takes today.
MOST = {
    "working_window": 700,
    "working_window as of": 1400,
    "compaction_plan": 700,
    "thread": 300,
    "start_turn": 2500,
    "append_message": 400,
}
#: The table that is large here. Those of a few rows (profile, chat, act) the planner may read as it likes.
LARGE = {"message"}


class Plans:
    """Runs a statement; collects the plan of it and of every statement inside it."""

    def __init__(self, conn: Connection) -> None:
        self.conn = conn
        self.found: list[Plan] = []
        conn.execute("load 'auto_explain'")
        for name, value in {
            "log_min_duration": "0",
            "log_nested_statements": "on",
            "log_analyze": "on",
            "log_buffers": "on",
            "log_timing": "off",
            "log_format": "json",
            "log_level": "notice",
        }.items():
            conn.execute(f"set auto_explain.{name} = {value}")
        conn.execute("set client_min_messages = notice")
        conn.add_notice_handler(self.take)

    def take(self, notice: psycopg.errors.Diagnostic) -> None:
        text = notice.message_primary or ""
        if "plan:" in text:
            self.found.append(json.loads(text[text.index("{") :]))

    def of(self, statement: str, arguments: dict[str, Any]) -> list[Plan]:
        """Plans of a call, the outermost last. The first calls fill the caches of plans and catalogs."""
        with self.conn.transaction(force_rollback=True):
            for _ in range(2):
                self.conn.execute(statement, arguments).fetchall()
        self.found = []
        with self.conn.transaction(force_rollback=True):
            self.conn.execute(statement, arguments).fetchall()
        return self.found


def nodes(plan: Plan) -> Iterator[Plan]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def buffers(plan: Plan) -> int:
    top = plan["Plan"]
    return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])


def message(number: int) -> dict[str, Any]:
    role = "user" if number % 2 else "assistant"
    return {"role": role, "content": f"Number {number}. " + "The parcel is late again. " * 8}


def fill(db: Connection, long: int) -> None:
    """A long chat and a short one of the same messages, each without and with a line."""
    for chat_id, size in (("long", long), ("short", SHORT), ("long line", long), ("short line", SHORT)):
        db.execute("select create_chat(%s, 'You answer for a bookshop.')", [chat_id])
        for start in range(0, size, 1000):
            made = [message(n) for n in range(start, min(start + 1000, size))]
            db.execute("select count(*) from append_messages(%s, %s)", [chat_id, json.dumps(made)])
    for chat_id in ("long line", "short line"):
        given = {
            "chat": chat_id,
            "summary": json.dumps({"resolved": ["the parcel was late"]}),
            "budget": BUDGET,
        }
        while db.execute(
            "select put_summary(%(chat)s, p.after_message_id, %(summary)s, token_budget => %(budget)s)"
            " from compaction_plan(%(chat)s, %(budget)s) p where p.decision = 'summarize'",
            given,
        ).fetchall():
            pass  # a long stretch is told in pieces
    db.execute("vacuum analyze")


@pytest.fixture
def chats15(request: pytest.FixtureRequest) -> Iterator[Connection]:
    """Filled chats on Debian's server, the one that has auto_explain."""
    clone: Connection = request.getfixturevalue("clone15")
    clone.autocommit = True
    clone.execute("set search_path = public, pycontext")
    fill(clone, LONG)
    yield clone
    clone.close()


def arguments(db: Connection, chat_id: str) -> dict[str, Any]:
    record = db.execute(
        "select message_id from message where chat_id = %s and line_no = 0 order by seq desc limit 1",
        [chat_id],
    ).fetchone()
    return {"chat": chat_id, "budget": BUDGET, "id": record[0] if record else None}


@pytest.mark.parametrize("line", ["", " line"])
def test_plans_of_hot_paths(chats15: Connection, line: str) -> None:
    plans = Plans(chats15)
    for name, statement in HOT.items():
        taken = {}
        for length in ("long", "short"):
            found = plans.of(statement, arguments(chats15, length + line))
            assert len(found) > 1, f"{name}: no nested plans, so nothing was looked at"
            for plan in found:
                for node in nodes(plan["Plan"]):
                    context = (name, length, plan["Query Text"], node)
                    if node.get("Relation Name") not in LARGE or node["Node Type"] == "ModifyTable":
                        continue
                    assert node["Node Type"] in ("Index Scan", "Index Only Scan", "Bitmap Heap Scan"), context
                    condition = node.get("Index Cond", node.get("Recheck Cond", ""))
                    assert "chat_id" in condition, context
                    # rows that a scan reads and throws away are work that grows with the chat
                    assert node.get("Rows Removed by Filter", 0) <= 100, context
            taken[length] = buffers(found[-1])
            assert taken[length] <= MOST[name], (name, length, taken)
        assert taken["long"] <= 1.3 * taken["short"] + 20, (name, taken)


def adopt(db: Connection, long: int) -> None:
    """The same messages in a table of a product's own, interleaved: chats 1 (long) and 2 (short)."""
    db.execute(
        """
        create table post (
            id bigint primary key, chat bigint not null, role text not null, content text not null,
            created_at timestamptz not null default now() - interval '1 day');
        create index post_chat_ix on post (chat, id);
        create view source_post as
        select chat as chat_id, id as seq, id as message_id, role, content, created_at from post;
        """
    )
    with db.cursor().copy("copy post (id, chat, role, content) from stdin") as copy:
        for n in range(long):
            for chat in (1, 2) if n < SHORT else (1,):
                copy.write_row((2 * n + chat, chat, message(n)["role"], message(n)["content"]))
    db.execute("select register_source('posts', 'source_post', is_default => true)")
    db.execute("vacuum analyze")


def count_rows(db: Connection, chat_id: str) -> None:
    """Every row counted, as estimated."""
    db.execute(
        "select cache_token_counts(%(chat)s, 'o200k_base', (select jsonb_agg(jsonb_build_object("
        "'seq', u.seq, 'tokens', 80)) from uncounted_messages(%(chat)s, max_rows => 100000) u"
        " where u.seq > 0))",
        {"chat": chat_id},
    )


#: Buffers of the same for a chat in the product's own table.
MOST_ADOPTED = {"working_window": 600, "compaction_plan": 1200, "thread": 300}


@pytest.fixture
def adopted15(request: pytest.FixtureRequest) -> Iterator[Connection]:
    """Chats in a product's table, on the server that has auto_explain."""
    clone: Connection = request.getfixturevalue("clone15")
    clone.autocommit = True
    clone.execute("set search_path = public, pycontext")
    adopt(clone, LONG)
    yield clone
    clone.close()


@pytest.mark.parametrize("counted", [False, True])
def test_plans_over_a_products_table(adopted15: Connection, counted: bool) -> None:
    if counted:
        for chat_id in ("1", "2"):
            count_rows(adopted15, chat_id)
        adopted15.execute("vacuum analyze")
    plans = Plans(adopted15)
    for name, most in MOST_ADOPTED.items():
        taken = {}
        for chat_id in ("1", "2"):
            found = plans.of(HOT[name], {"chat": chat_id, "budget": BUDGET})
            looked = set()
            for plan in found:
                for node in nodes(plan["Plan"]):
                    context = (name, chat_id, plan["Query Text"], node)
                    relation = node.get("Relation Name")
                    looked.add(relation)
                    if relation not in ("post", "token_count"):
                        continue
                    assert node["Node Type"] in ("Index Scan", "Index Only Scan"), context
                    assert "chat" in node["Index Cond"], context
                    assert node.get("Rows Removed by Filter", 0) <= 100, context
            assert {"post", "token_count"} <= looked, (name, looked)
            taken[chat_id] = buffers(found[-1])
            assert taken[chat_id] <= most, (name, taken)
        # of a long chat a piece is cut: where its 2,000 rows end is found by walking an index
        assert taken["1"] <= 1.3 * taken["2"] + (60 if name == "compaction_plan" else 20), (name, taken)


def counters(db: Connection) -> tuple[int, int]:
    """Sequential scans of the messages so far, and rows fetched by an index."""
    db.execute("select pg_stat_force_next_flush()")
    record = db.execute(
        "select t.seq_scan, t.idx_tup_fetch from pg_stat_all_tables t"
        " where t.relid = 'pycontext.message'::regclass"
    ).fetchone()
    assert record
    return int(record[0]), int(record[1])


@pytest.mark.core
@pytest.mark.parametrize("line", ["", " line"])
def test_hot_paths_fetch_what_the_window_holds(db: Connection, line: str) -> None:
    """On every version: no sequential scan, and as many rows of a long chat as of a short one."""
    fill(db, 3000)
    for name, statement in HOT.items():
        fetched = {}
        for length in ("long", "short"):
            given = arguments(db, length + line)
            db.execute(statement, given).fetchall()
            scans, before = counters(db)
            db.execute(statement, given).fetchall()
            more, after = counters(db)
            assert more == scans, f"{name} scans the messages of all chats"
            fetched[length] = after - before
        assert fetched["long"] <= 1.3 * fetched["short"] + 20, (name, fetched)
        assert fetched["long"] <= 600, (name, fetched)


def toast_blocks(db: Connection) -> int:
    """Blocks of the messages' out-of-line contents that were looked at so far."""
    db.execute("select pg_stat_force_next_flush()")
    record = db.execute(
        "select coalesce(toast_blks_hit, 0) + coalesce(toast_blks_read, 0) from pg_statio_all_tables"
        " where relid = 'pycontext.message'::regclass"
    ).fetchone()
    assert record
    return int(record[0])


@pytest.mark.core
def test_content_that_is_not_sent_is_never_read(db: Connection) -> None:
    """Results of 30,000 random characters lie out of line: to read one is to touch its blocks."""
    rng = random.Random(5)
    db.execute("select create_chat('c', null, 'small-8k')")
    made: list[dict[str, Any]] = [{"role": "user", "content": "Look through the files."}]
    for n in range(25):
        call = {"name": "read_file", "arguments": json.dumps({"path": f"f{n}.py"})}
        made += [
            {"role": "assistant", "tool_calls": [{"id": f"x{n}", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": f"x{n}", "content": rng.randbytes(15000).hex()},
        ]
    made += [message(n) for n in range(30)]
    db.execute("select count(*) from append_messages('c', %s)", [json.dumps(made)])

    def cost(statement: str) -> int:
        db.execute(statement).fetchall()
        before = toast_blocks(db)
        db.execute(statement).fetchall()
        return toast_blocks(db) - before

    assert cost("select * from message_original('c', 3)") > 0  # it can be seen
    sections = "select section, bool_or(is_shortened) from working_window('c'::text, {}) group by section"
    # behind a marker
    assert "omitted" in dict(db.execute(sections.format(2500)).fetchall())
    assert cost("select * from working_window('c'::text, 2500)") == 0
    # in one line each
    assert dict(db.execute(sections.format(6900)).fetchall())["tail"] is True
    assert cost("select * from working_window('c'::text, 6900)") == 0
    for budget in (2500, 6900, 1_000_000):
        assert cost(f"select * from compaction_plan('c', {budget})") == 0
    # what is sent is read
    assert cost("select * from working_window('c'::text, 1000000)") > 0
    assert cost("select * from openai_messages('c', 2500)") == 0
    assert cost("select * from prune_chat('c', 6900)") == 0
    assert cost("""select * from start_turn('c', '"And now?"', token_budget => 6900)""") == 0
    assert cost("select seq from append_message('c', 'user', 'And now?'::text)") == 0
