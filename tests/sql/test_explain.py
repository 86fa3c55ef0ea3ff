"""explain_window: what it says of every row is what the window does, at any budget and time."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from pycontext.clean import clean
from pycontext.embedded import binaries

Connection = psycopg.Connection[Any]
Row = dict[str, Any]

NOT_SENT = {"summarized", "merged", "left out", "replaced", "set aside", "not used", "dropped line"}
SECTION_OF = {"kept": "tail", "system": "system", "summary": "summary", "marker": "omitted"}

FILES = ("tau_bench_airline_gpt4o", "pi_coding_agent_sessions", "ru_multiwoz_long", "webvoyager_screenshots")


def rows(db: Connection, statement: str, *arguments: Any) -> list[Row]:
    return db.cursor(row_factory=dict_row).execute(statement, arguments).fetchall()


def value(db: Connection, statement: str, *arguments: Any) -> Any:
    record = db.execute(statement, arguments).fetchone()
    return None if record is None else record[0]


def explain(db: Connection, chat_id: str = "c", **more: Any) -> list[Row]:
    named = "".join(f", {name} => %s" for name in more)
    return rows(db, f"select * from explain_window(%s{named})", chat_id, *more.values())


def append(db: Connection, *messages: Row, chat_id: str = "c") -> None:
    db.execute("select count(*) from append_messages(%s, %s)", [chat_id, json.dumps(messages)])


def said(number: int, role: str = "user", times: int = 30) -> Row:
    return {
        "role": role,
        "content": f"Number {number}. " + "The parcel is late again. " * times,
        "message_id": f"m{number}",
    }


def talk(db: Connection, turns: int = 20, profile: str = "small-8k", chat_id: str = "c") -> None:
    db.execute("select create_chat(%s, 'You answer for a bookshop.', %s)", [chat_id, profile])
    for n in range(turns):
        append(db, said(2 * n + 1), said(2 * n + 2, "assistant"), chat_id=chat_id)


def work(db: Connection, steps: int, first: int = 0, words: int = 300) -> None:
    for n in range(first, first + steps):
        call = {"name": "read_file", "arguments": json.dumps({"path": f"src/f{n}.py"})}
        append(
            db,
            {"role": "assistant", "tool_calls": [{"id": f"call_{n}", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": f"call_{n}", "content": f"line {n} of the file\n" * words},
        )


def compact(
    db: Connection, chat_id: str = "c", budget: int | None = None, says: str = "the parcel was late"
) -> str | None:
    """The line that the plan asks for; None where nothing can be cut."""
    after = value(db, "select after_message_id from compaction_plan(%s, %s)", chat_id, budget)
    if after is None:
        return None
    try:
        line: str = value(
            db,
            "select message_id from put_summary(%s, %s, %s, token_budget => %s)",
            chat_id,
            after,
            json.dumps({"resolved": [says]}),
            budget,
        )
    except psycopg.DatabaseError as error:
        if error.sqlstate != "PCX07":
            raise
        return None
    return line


def check(
    db: Connection, chat_id: str = "c", budget: int | None = None, as_of: str | None = None
) -> Counter[str] | None:
    """Holds the explanation against the window, row by row; returns its fates, None where no window fits."""
    try:
        window = rows(db, "select * from working_window(%s::text, %s, %s)", chat_id, budget, as_of)
    except psycopg.DatabaseError as error:
        if error.sqlstate != "PCX05":
            raise
        with pytest.raises(psycopg.DatabaseError) as same:
            explain(db, chat_id, token_budget=budget, as_of=as_of)
        assert same.value.sqlstate == "PCX05"
        return None
    told = explain(db, chat_id, token_budget=budget, as_of=as_of, max_rows=1_000_000)

    # every row of the window is told once, with its own section and cost, and nothing else is said to be sent
    def key(row: Row) -> tuple[Any, ...]:
        return (row["section"], None if row["section"] == "omitted" else row["seq"], row["tokens"])

    sent = [row for row in told if row["section"] is not None]
    assert Counter(map(key, sent)) == Counter(map(key, window))
    assert sum(row["tokens"] for row in told) == sum(row["tokens"] for row in window)
    shortened = {(w["seq"], w["kind"]) for w in window if w["is_shortened"] and w["section"] != "omitted"}
    line = next((w for w in window if w["kind"] == "summary"), None)
    marker = next((w for w in window if w["section"] == "omitted"), None)
    for row in told:
        context = (chat_id, budget, as_of, row)
        assert row["fate"] != "not shown", context
        assert (row["section"] is None) == (row["fate"] in NOT_SENT), context
        assert row["section"] is not None or row["tokens"] == 0, context
        assert row["reason"], context
        if row["fate"] in SECTION_OF:
            assert row["section"] == SECTION_OF[row["fate"]], context
        is_line = row["message_id"] is not None and row["message_id"].startswith("sum_")
        is_cut = (row["seq"], "summary" if is_line else "message") in shortened
        assert (row["fate"] in ("pruned", "shortened")) == is_cut, context
        if row["fate"] in NOT_SENT or is_cut:
            assert row["by"], context
        if row["fate"] == "summarized":
            # what is said to be told in a summary stands before the line that the window has
            assert line is not None, context
            assert row["seq"] <= line["seq"], context
            assert (
                value(
                    db,
                    "select origin from message where chat_id = %s and message_id = %s",
                    chat_id,
                    row["by"],
                )
                == "compaction"
            )
        if row["reason"] == "older, behind the marker":
            assert marker is not None, context
            assert row["seq"] <= marker["seq"], context
    # oldest first, and every stored row of the chat is there
    seqs = [row["seq"] for row in told if row["seq"] is not None]
    assert seqs == sorted(seqs)
    if as_of is None and value(db, "select source is null from chat where chat_id = %s", chat_id):
        stored = value(
            db, "select array_agg(message_id order by seq, line_no) from message where chat_id = %s", chat_id
        )
        assert [row["message_id"] for row in told if row["message_id"]] == stored
    return Counter(row["fate"] for row in told)


def fates(told: list[Row]) -> dict[int, str]:
    return {row["seq"]: row["fate"] for row in told if row["seq"] is not None and row["role"] != "summary"}


@pytest.mark.core
def test_a_short_chat_is_kept_whole(db: Connection) -> None:
    talk(db, 2)
    told = explain(db)
    assert [row["fate"] for row in told] == ["system", "kept", "kept", "kept", "kept"]
    assert {row["reason"] for row in told[1:]} == {"all of it fits"}
    assert told[1]["preview"].startswith("Number 1. The parcel")
    assert [row["message_id"] for row in told[1:]] == ["m1", "m2", "m3", "m4"]
    assert all(row["tokens"] == row["stored"] for row in told[1:])


@pytest.mark.core
def test_what_is_left_out_is_named_with_the_marker(db: Connection) -> None:
    talk(db, 20)
    told = explain(db, token_budget=2000)
    found = [row["fate"] for row in told]
    assert found[0] == "system"
    assert found[1] == "head"
    assert found.index("marker") == len(found) - 1 - found[::-1].index("left out") + 1
    assert found[-1] == "kept"
    left = [row for row in told if row["fate"] == "left out"]
    assert {(row["by"], row["reason"], row["tokens"]) for row in left} == {
        ("budget", "older, behind the marker", 0)
    }
    assert check(db, budget=2000)


@pytest.mark.core
def test_what_a_line_covers_is_summarized_by_it(db: Connection) -> None:
    talk(db, 20)
    first = compact(db)
    for n in range(20, 40):
        append(db, said(2 * n + 1), said(2 * n + 2, "assistant"))
    second = compact(db)
    assert first
    assert second
    assert first != second
    told = explain(db)
    by_line = Counter(row["by"] for row in told if row["fate"] == "summarized")
    assert set(by_line) == {second}, "the line that stands for it now"
    assert next(row for row in told if row["message_id"] == first)["fate"] == "merged"
    assert next(row for row in told if row["message_id"] == first)["by"] == second
    assert next(row for row in told if row["message_id"] == second)["fate"] == "summary"
    place = next(row["seq"] for row in told if row["message_id"] == first)
    reasons = {row["reason"]: row["seq"] for row in told if row["fate"] == "summarized"}
    newest = max(reasons.values())
    assert list(reasons) == [f"merged from the line at #{place}", f"before the line at #{newest}"]
    assert min(reasons.values()) == place
    check(db)
    db.execute("select drop_summary('c', %s)", [second])
    told = explain(db)
    dropped = next(row for row in told if row["message_id"] == second)
    assert (dropped["fate"], dropped["reason"]) == ("dropped line", "undone")
    assert dropped["by"].startswith("act ")
    assert next(row for row in told if row["message_id"] == first)["fate"] == "summary"
    check(db)


@pytest.mark.core
def test_search_names_the_line_that_dropped_it(db: Connection) -> None:
    talk(db, 10)
    append(db, {"role": "user", "content": "The locker is ЖУК-77, the shelf 12-B, the box 9-Z, the bin 4-Y."})
    told = ("жук-77, 12-B", "ЖУК-77, 9-Z", "ЖУК-77")
    places = []
    lines = []
    for stage, says in enumerate(told):
        for n in range(20 + 20 * stage, 40 + 20 * stage):
            append(db, said(2 * n + 1), said(2 * n + 2, "assistant"))
        lines.append(compact(db, says=says))
        places.append(value(db, "select max(seq) from message where line_no > 0"))
    assert len(set(lines)) == 3

    def why(words: str) -> str:
        row = next(r for r in explain(db, search=words) if r["seq"] == 21)
        assert (row["fate"], row["by"]) == ("summarized", lines[-1])
        return str(row["reason"])

    assert why("жук-77") == "the summary has the words"
    assert why("12-b") == f"lost in the line at #{places[1]}"
    assert why("4-y") == f"lost in the line at #{places[0]}"
    assert why("9-z") == f"lost in the line at #{places[2]}"
    db.execute("select drop_summary('c', %s)", [lines.pop()])
    assert why("9-z") == "the summary has the words"


def test_search_says_why_the_model_forgot_it(db: Connection) -> None:
    talk(db, 10)
    append(db, {"role": "user", "content": "My locker code is ЖУК-77, keep it.", "message_id": "code"})
    append(db, {"role": "user", "content": "And the shelf is 12-B.", "message_id": "shelf"})
    for n in range(10, 30):
        append(db, said(2 * n + 1), said(2 * n + 2, "assistant"))
    line = compact(db, says="the shelf is 12-b")
    assert line
    (found,) = explain(db, search="жук-77 LOCKER")
    assert (found["message_id"], found["fate"], found["by"], found["reason"]) == (
        "code", "summarized", line, "the summary lacks them",
    )  # fmt: skip
    assert "ЖУК-77" in found["preview"] or "locker" in found["preview"]
    kept = {row["message_id"]: row for row in explain(db, search="12-B")}
    assert kept["shelf"]["reason"] == "the summary has the words"
    assert kept[line]["fate"] == "summary"
    assert explain(db, search="nobody said this") == []
    assert len(explain(db, search="  ")) == len(explain(db))


def test_what_the_summary_lacks_and_a_fact_has_is_not_lost(db: Connection) -> None:
    """The two answers of "why did it forget?" agree."""
    talk(db, 10)
    append(
        db,
        {"role": "user", "content": "My locker is ЖУК-77, my shelf 12-B, my bin 9-Z.", "message_id": "code"},
    )
    for n in range(10, 30):
        append(db, said(2 * n + 1), said(2 * n + 2, "assistant"))
    db.execute("select remember('c', 'The locker is Жук-77'), create_chat('other')")
    db.execute("select remember('other', 'The bin is 9-Z')")
    lines = [compact(db)]
    for n in range(30, 50):
        append(db, said(2 * n + 1), said(2 * n + 2, "assistant"))
    for _ in range(2):
        lost = {
            row[0] for row in db.execute("select value from lost_values('c', %s)", [lines[-1]]).fetchall()
        }
        assert {"12-B", "9-Z"} <= lost
        assert "ЖУК-77" not in lost
        for words, has_fact in (("жук-77", True), ("12-B", False), ("9-Z", False)):
            (found,) = explain(db, search=words)
            assert found["fate"] == "summarized"
            assert str(found["reason"]).endswith(", a fact has them") is has_fact
        lines.append(compact(db))
    assert found["reason"].startswith("lost in the line")


def test_who_started_over(db: Connection) -> None:
    talk(db, 3)
    reset = value(db, "select message_id from start_over('c', 'new topic')")
    append(db, said(100))
    told = explain(db)
    assert [row["fate"] for row in told] == ["system", *["set aside"] * 6, "summary", "kept"]
    assert {row["by"] for row in told if row["fate"] == "set aside"} == {reset}
    assert {row["reason"] for row in told if row["fate"] == "set aside"} == {"started over at #6"}
    check(db)


def test_what_a_rewind_set_aside(db: Connection) -> None:
    talk(db, 3)
    db.execute("select rewind_chat('c', 'm2')")
    append(db, said(100))
    told = explain(db)
    assert fates(told) == {
        1: "kept",
        2: "kept",
        3: "set aside",
        4: "set aside",
        5: "set aside",
        6: "set aside",
        7: "kept",
    }
    assert {row["reason"] for row in told if row["fate"] == "set aside"} == {"rewound to #2"}
    check(db)
    # at the time the rows were there
    assert set(fates(explain(db, as_of="m6")).values()) == {"kept"}
    check(db, as_of="m6")


def test_a_pass_pruned_it(db: Connection) -> None:
    db.execute("select create_chat('c', null, 'small-8k')")
    append(db, said(1))
    work(db, 8)
    assert value(db, "select pass_no from prune_chat('c')") == 1
    told = explain(db)
    pruned = [row for row in told if row["fate"] == "pruned"]
    assert pruned
    assert {(row["by"], row["reason"]) for row in pruned} == {("pass 1", "an old result")}
    assert all(row["tokens"] < row["stored"] for row in pruned)
    check(db)
    # without a pass it is the budget's doing
    db.execute("select create_chat('d', null, 'small-8k')")
    assert check(db, budget=4000)
    append(db, said(1), chat_id="d")


def test_results_that_have_not_come_or_came_twice(db: Connection) -> None:
    db.execute("select create_chat('c')")
    append(db, said(1))
    work(db, 1, words=2)
    calls = [
        {"id": f"x{n}", "type": "function", "function": {"name": "pay", "arguments": "{}"}} for n in (1, 2)
    ]
    append(
        db,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "x1", "content": "asking", "metadata": {"pending": True}},
        {"role": "tool", "tool_call_id": "x1", "content": "paid"},
        {"role": "tool", "tool_call_id": "nobody", "content": "whose is this?"},
    )
    told = explain(db)
    assert [row["fate"] for row in told if row["seq"]] == ["kept"] * 4 + ["replaced", "kept", "kept"]
    (stand_in,) = (row for row in told if row["fate"] == "stand-in")
    assert stand_in["preview"] == "no result yet"
    assert next(row for row in told if row["fate"] == "replaced")["by"] == "#6"
    assert told[-1]["reason"] == "a result without its call"
    check(db)


def test_a_pin_and_a_shortened_tail(db: Connection) -> None:
    talk(db, 20)
    db.execute("select pin_message('c', 'm9')")
    told = explain(db, token_budget=3000)
    pin = next(row for row in told if row["message_id"] == "m9")
    assert (pin["fate"], pin["by"]) == ("pinned", "act 1")
    for budget in (400, 600, 900, 3000):
        check(db, budget=budget)
    work(db, 1, words=4000)
    told = explain(db, token_budget=3000)
    assert told[-1]["fate"] == "shortened"
    assert told[-1]["by"] == "budget"
    assert told[-1]["tokens"] < told[-1]["stored"]
    check(db, budget=3000)


def test_requests_are_told_apart(db: Connection) -> None:
    db.execute("select create_chat('c')")
    append(db, said(1), said(2, "assistant"), {"role": "user", "content": "the first job"})
    append(db, *[said(n, "assistant") for n in range(3, 40)])
    assert compact(db, budget=2000)
    append(db, {"role": "user", "content": "the second job"})
    append(db, *[said(n, "assistant") for n in range(40, 80)])
    told = {
        row["preview"]: row["reason"] for row in explain(db, token_budget=2000) if row["section"] == "request"
    }
    assert told == {"the first job": "the line's request", "the second job": "the newest request"}
    append(db, {"role": "user", "content": "thank you"})
    told = {
        row["preview"]: row["reason"] for row in explain(db, token_budget=2000) if row["section"] == "request"
    }
    assert told == {"the first job": "the line's request", "the second job": "the request of what follows"}
    check(db, budget=2000)


def test_pages(db: Connection) -> None:
    talk(db, 20)
    compact(db)
    whole = explain(db)
    assert whole[0]["fate"] == "system"
    pages: list[Row] = []
    before = None
    for _ in itertools.count():
        page = explain(db, before_seq=before, max_rows=7)
        more = [row for row in page if row["fate"] == "not shown"]
        pages = [row for row in page if row["fate"] != "not shown"] + pages
        if not more:
            break
        assert page[0] == more[0]
        before = int(more[0]["reason"].removeprefix("before_seq => "))
    assert pages == whole
    for search in ("7", "number 3"):
        assert [row for row in explain(db, search=search, max_rows=2) if row["fate"] != "not shown"][-2:] == (
            explain(db, search=search)[-2:]
        )


@pytest.mark.core
def test_errors_are_the_windows(db: Connection) -> None:
    for state, arguments in (
        ("PCX01", {"chat_id": "nobody"}),
        ("PCX05", {"token_budget": -1}),
        ("PCX02", {"as_of": "x"}),
    ):
        talk(db, 1, chat_id="c")
        with pytest.raises(psycopg.DatabaseError) as refused:
            explain(db, **arguments)  # type: ignore[arg-type]
        assert refused.value.sqlstate == state


def test_an_empty_chat(db: Connection) -> None:
    db.execute("select create_chat('c', 'Be brief.')")
    assert [row["fate"] for row in explain(db)] == ["system"]


def test_psql_shows_it_in_120_columns(db: Connection, dsn: str) -> None:
    db.execute("select create_chat('c', 'You answer for a bookshop, and for nobody else.', 'small-8k')")
    for n in range(20):
        append(db, {"role": "user", "content": "我的订单在哪里？已经等了三天了。" * 20}, said(n, "assistant"))
    line = compact(db)
    assert line
    db.execute("select drop_summary('c', %s)", [line])
    assert compact(db)
    work(db, 6)
    db.execute("select count(*) from prune_chat('c')")
    query = "select seq, preview, fate, by, reason, tokens from pycontext.explain_window('c')"
    program: Path = binaries(18) / "psql"
    shown = subprocess.run(
        [program, dsn, "-X", "-q", "-P", "pager=off", "-c", query], capture_output=True, text=True, check=True
    ).stdout
    from rich.cells import cell_len

    assert "sum_" in shown
    assert max(cell_len(line.rstrip()) for line in shown.splitlines()) <= 120


def live_ids(db: Connection, chat_id: str) -> list[str]:
    found: list[str] = value(
        db,
        "select array_agg(message_id order by seq) from message"
        " where chat_id = %s and line_no = 0 and gone_act is null",
        chat_id,
    )
    return found


def conversations(folder: Path, name: str) -> list[list[Row]]:
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    keys = ("role", "content", "tool_calls", "tool_call_id", "name")
    return [
        [
            {k: m[k] for k in keys if m.get(k) is not None}
            for m in clean(json.loads(line)["messages"])
            if m["role"] != "system"
        ]
        for line in lines
    ]


@pytest.mark.real
@pytest.mark.parametrize("name", FILES)
def test_it_never_contradicts_the_window(db: Connection, shared_data: Path, name: str) -> None:
    """Real conversations, with every act on the way, at many budgets and times."""
    found: Counter[str] = Counter()
    longest = sorted(conversations(shared_data, name), key=len)[-2:]
    for number, messages in enumerate(longest):
        chat_id = f"c{number}"
        db.execute("select create_chat(%s, 'Be brief.', 'small-8k')", [chat_id])
        step = max(len(messages) // 8, 2)
        for stage, start in enumerate(range(0, len(messages), step)):
            append(db, *messages[start : start + step], chat_id=chat_id)
            db.execute("select prune_chat(%s)", [chat_id])
            if stage % 2:
                compact(db, chat_id)
            if stage == 2:
                ids = live_ids(db, chat_id)
                db.execute("select pin_message(%s, %s)", [chat_id, ids[len(ids) // 3]])
            if stage == 4:
                ids = live_ids(db, chat_id)
                db.execute("select rewind_chat(%s, %s)", [chat_id, ids[-2]])
            if stage == 6 and number == 1:
                db.execute("select start_over(%s, 'another matter')", [chat_id])
            for budget in (300, 900, 2500, 4000, 6500, 40000):
                found += check(db, chat_id, budget) or Counter()
        ids = value(
            db, "select array_agg(message_id order by seq, line_no) from message where chat_id = %s", chat_id
        )
        for as_of in ids[:: max(len(ids) // 8, 1)]:
            for budget in (900, 4000):
                found += check(db, chat_id, budget, as_of) or Counter()
    for fate in ("head", "kept", "left out", "marker", "summarized", "set aside", "shortened"):
        assert found[fate], (fate, found)


def test_a_chat_in_a_table_of_the_products(db: Connection) -> None:
    db.execute(
        """
        create table post (
            ticket bigint, n bigint, who text, body text, sent timestamptz, primary key (ticket, n));
        create view ticket_message as
        select p.ticket as chat_id, p.n as seq, p.n as message_id, p.who as role, p.body as content,
            p.sent as created_at
        from post p;
        insert into post
        select 7, n, case when n % 2 = 1 then 'user' else 'assistant' end, format('Number %s. ', n)
            || repeat('The parcel is late again. ', 20), now() - interval '1 day'
        from generate_series(1, 60) n;
        select register_source('tickets', 'ticket_message', is_default => true);
        """
    )
    for budget in (400, 900, 2000, 4000, 100000):
        assert check(db, "7", budget)
    line = value(
        db,
        "select message_id from put_summary('7', '40', %s, token_budget => 4000)",
        json.dumps({"resolved": ["the parcel was late"]}),
    )
    for budget in (400, 900, 2000, 4000, 100000):
        assert check(db, "7", budget)
    told = explain(db, "7", token_budget=100000)
    assert {row["by"] for row in told if row["fate"] == "summarized"} == {line}
    later = value(
        db,
        "select message_id from put_summary('7', '50', %s, token_budget => 4000)",
        json.dumps({"resolved": ["Number 12 was the last"]}),
    )
    told = explain(db, "7", token_budget=100000)
    assert {row["by"] for row in told if row["fate"] == "summarized"} == {later}
    lost = rows(db, "select seq, value from lost_values('7', %s)", later)
    # those of the older line, too, without the newest request
    assert [row["seq"] for row in lost] == [n for n in range(10, 51) if n not in (12, 49)]
    assert [row["seq"] for row in explain(db, "7", before_seq=50, max_rows=3)] == [None, 47, 48, 49]


def test_python_and_the_command_line(db: Connection, dsn: str) -> None:
    import pycontext

    talk(db, 20)
    line = compact(db)
    with pycontext.connect(dsn) as database:
        told = database.explain("c", token_budget=2000, search="number 3.")
        assert [row.seq for row in told] == [3, 13, 23, 33]
        assert told[0].fate == "summarized"
        assert told[0].by == line
        whole = database.explain("c")
        assert sum(row.tokens for row in whole) + 3 == database.status("c").window_tokens
        assert database.explain("c", as_of="m3")[-1].message_id == "m3"
    command = [sys.executable, "-m", "pycontext.cli", "explain", "c", "--dsn", dsn]
    if not (Path(pycontext.__file__).parent / "cli" / "__main__.py").exists():
        command[1:3] = ["-c", "import sys; from pycontext.cli import main; sys.exit(main())"]
    as_json = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True).stdout)
    assert [row["seq"] for row in as_json["rows"]] == [row.seq for row in whole]
    shown = subprocess.run(
        [*command, "--search", "number 3.", "--limit", "5"], capture_output=True, text=True, check=True
    ).stdout
    assert "summarized" in shown
    assert "the summary lacks them" in shown
