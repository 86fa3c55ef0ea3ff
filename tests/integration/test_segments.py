"""Lines keep segments made from original rows; merged texts are made of segments, so that nothing decays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import pycontext
from pycontext.summarizer import SummaryRequest, SummaryResult
from pycontext.summary import Summary, merge, merge_segments, size
from pycontext.tokens import count

Connection = psycopg.Connection[Any]


class Lossy:
    """Shortens what it is given; what it told again and again would lose a half every time."""

    name = "lossy"

    def __init__(self) -> None:
        self.requests: list[SummaryRequest] = []

    def summarize(self, request: SummaryRequest) -> SummaryResult:
        self.requests.append(request)
        facts, resolved = [], []
        for row in request.messages:
            if row.is_told and row.role == "user":
                facts += re.findall(r"QX-\d+", row.text)[:1]
                resolved.append(row.text[: len(row.text) // 4])
        old = request.previous
        if old is not None:  # a bad habit: the old summary in half, as something new
            resolved += [text[: len(text) // 2] for text in old.resolved]
        task = next((row.text[:60] for row in reversed(request.messages) if row.role == "user"), None)
        segment = Summary(
            resolved=tuple(resolved),
            facts=tuple(facts),
            active_task=task if task and "stop" not in task else None,
        )
        return SummaryResult(segment, self.name)


class Nesting:
    """C30: puts everything it knows into one text, the previous summary inside."""

    name = "nesting"

    def summarize(self, request: SummaryRequest) -> SummaryResult:
        before = request.previous.notes if request.previous else ""
        new = " ".join(row.text[:30] for row in request.messages[-3:])
        return SummaryResult(Summary(notes=f"S({before} {new})", facts=("QX-1",)), self.name)


@pytest.fixture
def lossy() -> Lossy:
    return Lossy()


@pytest.fixture
def database(dsn: str, lossy: Lossy) -> Iterator[pycontext.Database]:
    with pycontext.connect(dsn, summarizer=lossy, extractor=lambda request: []) as db:
        yield db


def talk(
    database: pycontext.Database, chat: str, start: int, turns: int, first: str = "", codes: int = 1000
) -> None:
    """Turns of about 250 tokens; those before number `codes` state an order of their own."""
    rows = []
    for n in range(start, start + turns):
        order = f"Order QX-{4000 + n}" if n < codes else "As before"
        said = f"{first} {order}, the parcel of customer {n} that did not arrive. " * 5
        rows.append({"role": "user", "content": said})
        rows.append({"role": "assistant", "content": f"Parcel {n} is in the hub and will be sent on. " * 12})
        first = ""
    database.append(chat, rows)


def line(database: pycontext.Database, chat: str) -> str:
    return next(row.content for row in database.window(chat) if row.section == "summary")


def test_exact_values_survive_seven_passes_of_a_lossy_summarizer(
    database: pycontext.Database, lossy: Lossy, db: Connection
) -> None:
    """C29: u1's ticket is head; u2's has to live in lines."""
    database.create_chat("a", profile="small-8k")
    talk(database, "a", 0, 25, codes=12)
    for n in range(7):
        assert database.compact("a").outcome == "summarized"
        if n < 6:
            talk(database, "a", 25 * (n + 1), 12, codes=0)
    assert set(re.findall(r"QX-\d+", line(database, "a"))) >= {f"QX-{4000 + n}" for n in range(1, 12)}
    # each segment tells its own range, from original rows
    for request in lossy.requests[1:]:
        assert all(row.kind == "message" for row in request.messages)
    segments = db.execute("select is_segment, summary from pycontext.line_segments('a')").fetchall()
    assert [is_segment for is_segment, _ in segments] == [True] * 7
    seen: set[str] = set()
    for _, segment in segments:
        facts = set(segment["facts"])
        assert not facts & seen, "no segment tells another's range again"
        seen |= facts


def test_the_merged_text_is_the_merge_of_the_segments(database: pycontext.Database, db: Connection) -> None:
    database.create_chat("a", profile="small-8k")
    for n in range(4):
        talk(database, "a", 25 * n, 25)
        assert database.compact("a").outcome == "summarized"
    segments = [
        Summary.from_json(row[0]) for row in db.execute("select summary from pycontext.line_segments('a')")
    ]
    (stored,) = db.execute(
        "select summary from pycontext.message where kind = 'summary' order by seq desc limit 1"
    ).fetchone()  # type: ignore[misc]
    again = merge_segments(segments, 10**6, count)
    kept = Summary.from_json(stored)
    assert set(kept.facts) <= set(again.facts)
    assert kept.active_task == again.active_task == segments[-1].active_task


def test_what_a_tight_pass_had_no_room_for_comes_back(database: pycontext.Database) -> None:
    """A pass for a small budget trims its text, not the segments."""
    database.create_chat("a", profile="default")
    talk(database, "a", 0, 50, codes=40)
    assert database.compact("a", token_budget=1600).outcome == "summarized"
    small = set(re.findall(r"QX-\d+", line(database, "a")))
    talk(database, "a", 50, 60, codes=0)
    assert database.compact("a", token_budget=16000).outcome == "summarized"
    large = set(re.findall(r"QX-\d+", line(database, "a")))
    assert len(small) < 39
    assert large >= {f"QX-{4000 + n}" for n in range(1, 40)}


def test_no_nesting_and_no_growth(dsn: str) -> None:
    """C30."""
    with pycontext.connect(dsn, summarizer=Nesting(), extractor=lambda request: []) as database:
        database.create_chat("a", profile="small-8k")
        sizes = []
        for n in range(6):
            talk(database, "a", 20 * n, 20)
            assert database.compact("a").outcome == "summarized"
            text = line(database, "a")
            sizes.append(count(text))
            assert text.count("S(S(") == 0
        limit = max(500, 0.05 * 6500)
        assert max(sizes) <= limit * 1.3
        assert [row.section for row in database.window("a")].count("summary") == 1


def test_a_cancelled_task_does_not_come_back(database: pycontext.Database) -> None:
    """C31: the active task is the newest segment's, also where that is none."""
    database.create_chat("a", profile="small-8k")
    talk(database, "a", 0, 25, first="Refactor module A.")
    database.compact("a")
    assert "being worked on" in line(database, "a")
    talk(database, "a", 25, 20)
    database.append(
        "a", [{"role": "user", "content": "stop, forget A"}, {"role": "assistant", "content": "ok " * 900}]
    )
    talk(database, "a", 50, 1)
    database.compact("a", token_budget=2600)
    text = line(database, "a")
    assert "being worked on" not in text
    assert not re.search(r"\b(resume|continue)\b", text, re.IGNORECASE)


def test_a_chain_ends_at_a_reset_and_at_a_line_without_a_segment(
    database: pycontext.Database, db: Connection
) -> None:
    database.create_chat("a", profile="small-8k")
    talk(database, "a", 0, 25)
    database.compact("a")
    talk(database, "a", 25, 25)
    database.compact("a")
    assert len(db.execute("select from pycontext.line_segments('a')").fetchall()) == 2
    assert db.execute("select is_segment from pycontext.line_segments('a', max_lines => 1)").fetchall() == [
        (False,)
    ]
    db.execute(
        "update pycontext.message set segment = null where kind = 'summary' and seq = (select min(seq) from "
        "pycontext.message where kind = 'summary')"
    )
    found = db.execute("select is_segment, summary ->> 'facts' from pycontext.line_segments('a')").fetchall()
    assert [row[0] for row in found] == [False, True]
    assert all(row[1] for row in found)
    database.start_over("a")
    assert db.execute("select from pycontext.line_segments('a')").fetchall() == []


def test_merging_segments_one_by_one_and_at_once_agree_without_a_limit() -> None:
    segments = [
        Summary(
            pending=(f"question {n}",),
            facts=(f"#{n}: value {n}",),
            active_task=f"task {n}",
            notes=f"note {n}",
            resolved=(f"question {n - 1} was answered",) if n else (),
        )
        for n in range(5)
    ]
    one = Summary()
    for segment in segments:
        one = merge(one, segment, 10**6, count)
    assert merge_segments(segments, None, count) == one
    assert one.pending == ("question 4",)
    assert merge_segments([], None, count) == Summary()
    assert size(merge_segments(segments, 60, count), count) <= 60
