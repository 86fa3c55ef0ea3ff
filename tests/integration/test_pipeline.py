"""The compaction pipeline: a model server with every fault, many processes at once."""

from __future__ import annotations

import json
import logging
import re
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
import pytest
from llm_server import GOOD, LLMServer

import pycontext
from pycontext import compaction, tokens
from pycontext.errors import BudgetTooSmall, PycontextError
from pycontext.summarizer import SummaryRequest, SummaryResult
from pycontext.summarizer.openai import OpenAISummarizer
from pycontext.summary import Summary

Fill = Callable[..., list[pycontext.Message]]
Connection = psycopg.Connection[Any]

LINES = "select count(*) from pycontext.message where chat_id = %s and kind = 'summary' and gone_act is null"
OUTCOMES = "select outcome from pycontext.compaction_history where chat_id = %s order by pass_no"
RETRY = "select failures, extract(epoch from retry_at - now())::float from pycontext.lease where chat_id = %s"
ASSISTANT = {"role": "assistant", "content": "Let me see."}


@pytest.fixture
def model(llm: LLMServer) -> OpenAISummarizer:
    return OpenAISummarizer("test", base_url=llm.url, timeout=5, max_retries=0)


def one(db: Connection, query: str, *values: Any) -> Any:
    row = db.execute(query.encode(), values or None).fetchone()
    assert row is not None
    return row[0] if len(row) == 1 else row


def column(db: Connection, query: str, *values: Any) -> list[Any]:
    return [row[0] for row in db.execute(query.encode(), values).fetchall()]


def lapse(db: Connection, chat_id: str) -> None:
    """Let the time of the chat's lease pass."""
    db.execute("update pycontext.lease set expires_at = now() - interval '1 s' where chat_id = %s", [chat_id])


def slowly(seconds: float) -> Callable[[dict[str, Any]], str]:
    def answer(request: dict[str, Any]) -> str:
        time.sleep(seconds)
        return json.dumps(GOOD)

    return answer


def at_once(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run them in threads that start together; their results."""
    barrier = threading.Barrier(len(jobs))
    results: list[Any] = [None] * len(jobs)

    def work(number: int) -> None:
        barrier.wait(60)
        results[number] = jobs[number]()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


# Races


def test_sixteen_compactors_make_one_call_and_one_row(
    dsn: str, fill: Fill, db: Connection, llm: LLMServer
) -> None:
    fill("a", 25)
    llm.default = slowly(1.5)

    def compact() -> tuple[pycontext.Pass, str]:
        with pycontext.connect(
            dsn, summarizer=OpenAISummarizer("test", base_url=llm.url, max_retries=0)
        ) as own:
            done = own.compact("a")
            return done, str([row.content for row in own.window("a") if row.section == "summary"])

    results = at_once([compact] * 16)
    passes = [done for done, _ in results]
    assert len(llm.requests) == 1
    assert one(db, LINES, "a") == 1
    assert sorted(done.outcome for done in passes) == ["skipped"] * 15 + ["summarized"]
    assert len({done.summary_id for done in passes} - {None}) == 1
    assert sum(done.summary_id is not None for done in passes) >= 2, "who waited got the winner's line"
    assert len({text for _, text in results}) == 1
    assert one(db, "select holder from pycontext.lease") is None


def test_after_a_turn_nobody_waits_for_another_pass(
    dsn: str, fill: Fill, memory: pycontext.Database, watched: Any, llm: LLMServer
) -> None:
    fill("a", 25)
    seconds: list[float] = []

    def other_turn(request: SummaryRequest) -> None:
        with pycontext.connect(dsn, summarizer=OpenAISummarizer("test", base_url=llm.url)) as other:
            started = time.monotonic()
            with other.turn("a", "And I?") as turn:
                turn.add(ASSISTANT)
            seconds.append(time.monotonic() - started)

    watched.meanwhile = other_turn
    assert memory.compact("a").outcome == "summarized"
    assert llm.requests == []
    assert seconds[0] < 5


def test_the_lower_seq_never_commits_last(dsn: str, fill: Fill, db: Connection) -> None:
    """C2: an append holds its chat until its transaction ends, so the next one waits for it."""
    fill("a", 2)
    with psycopg.connect(dsn) as slow:
        slow.execute("select pycontext.append_message('a', 'user', 'first')")
        db.execute("set lock_timeout = '200ms'")
        for act in (
            "select pycontext.append_message('a', 'user', 'second')",
            "select * from pycontext.claim_compaction('a', 'me')",
        ):
            with pytest.raises(psycopg.errors.LockNotAvailable):
                db.execute(act.encode())
        slow.commit()
    db.execute("select pycontext.append_message('a', 'user', 'second')")
    told = column(db, "select content #>> '{}' from pycontext.thread(%s) order by seq desc limit 2", "a")
    assert told == ["second", "first"]


@pytest.mark.parametrize("act", ["redact_message", "rewind_chat"])
def test_what_is_erased_while_the_model_works_does_not_come_back(
    memory: pycontext.Database, db: Connection, fill: Fill, watched: Any, act: str
) -> None:
    """C3: the line that drew on it is refused; the next pass does not see it."""
    rows = fill("a", 25)
    place = rows[4].message_id if act == "redact_message" else rows[43].message_id
    watched.meanwhile = lambda request: db.execute(
        f"select * from pycontext.{act}('a', %s)".encode(), [place]
    )
    failed = memory.compact("a")
    assert failed.outcome == "failed"
    assert "stale" in (failed.reason or "")
    assert one(db, LINES, "a") == 0
    watched.meanwhile = lambda request: None
    assert memory.compact("a").outcome == "summarized"
    assert "QX-4003" in str(watched.requests[0])
    if act == "redact_message":
        assert "QX-4003: please" not in str(watched.requests[-1])
        assert "QX-4003" not in json.dumps(memory.messages("a"))


def test_rows_of_one_transaction_keep_their_order(memory: pycontext.Database, db: Connection) -> None:
    """C7: one timestamp, tuples moved about."""
    memory.create_chat("a")
    memory.append("a", [{"role": "user", "content": str(number)} for number in range(40)])
    for number in (3, 30, 11):
        db.execute("update pycontext.message set name = 'x' where seq = %s", [number])
    db.execute("vacuum full pycontext.message")
    assert [row.content for row in memory.window("a")] == [str(number) for number in range(40)]


def test_an_expired_lease_that_nobody_took_is_good(
    memory: pycontext.Database, fill: Fill, db: Connection, watched: Any
) -> None:
    fill("a", 25)
    watched.meanwhile = lambda request: lapse(db, "a")
    assert memory.compact("a").outcome == "summarized"


def test_a_lease_that_was_taken_over_is_lost(
    memory: pycontext.Database, dsn: str, fill: Fill, db: Connection, watched: Any, model: OpenAISummarizer
) -> None:
    fill("a", 25)
    others: list[pycontext.Pass] = []

    def taken(request: SummaryRequest) -> None:
        lapse(db, "a")
        fill("a", 20, first=26)
        with pycontext.connect(dsn, summarizer=model) as other:
            others.append(other.compact("a"))

    watched.meanwhile = taken
    done = memory.compact("a")
    assert others[0].outcome == "summarized"
    assert done.outcome == "skipped"
    assert "lease is held by another" in (done.reason or "")
    assert done.summary_id == others[0].summary_id
    assert one(db, LINES, "a") == 1
    assert column(db, OUTCOMES, "a") == ["summarized", "skipped"]


def test_the_lease_in_sql(db: Connection, fill: Fill) -> None:
    fill("a", 2)
    claim = "select is_claimed, holder from pycontext.claim_compaction('a', %s, %s)"
    assert one(db, claim, "x", 60) == (True, "x")
    assert one(db, claim, "x", 60) == (True, "x"), "once more for who has it"
    assert one(db, claim, "y", 60) == (False, "x")
    assert one(db, "select pycontext.release_compaction('a', 'y')") is False
    assert one(db, claim, "y", 60) == (False, "x")
    lapse(db, "a")
    assert one(db, claim, "y", 100) == (True, "y")
    left = one(db, "select extract(epoch from expires_at - clock_timestamp())::float from pycontext.lease")
    assert 190 < left <= 200, "one that ran out lasts twice as long the next time"
    assert one(db, "select pycontext.release_compaction('a', 'y')") is True
    assert one(db, claim, "x", 100) == (True, "x")
    left = one(db, "select extract(epoch from expires_at - clock_timestamp())::float from pycontext.lease")
    assert left <= 100
    for holder, seconds in (("", 60), (None, 60), ("x", 0), ("x", None)):
        with pytest.raises(psycopg.Error) as raised:
            db.execute(claim.encode(), [holder, seconds])
        assert raised.value.sqlstate == "PCX02"
    with pytest.raises(psycopg.Error) as raised:
        db.execute("select * from pycontext.claim_compaction('nowhere', 'x')")
    assert raised.value.sqlstate == "PCX01"
    with pytest.raises(psycopg.Error) as raised:
        db.execute(
            "select * from pycontext.put_summary('a', (select t.message_id from pycontext.thread('a') t "
            "limit 1), '{\"notes\": \"x\"}', holder => 'z')"
        )
    assert raised.value.sqlstate == "PCX08"


def test_only_one_of_many_sessions_gets_the_lease(dsn: str, fill: Fill, db: Connection) -> None:
    fill("a", 2)

    def claim(name: str) -> bool:
        with psycopg.connect(dsn, autocommit=True) as own:
            return bool(one(own, "select is_claimed from pycontext.claim_compaction('a', %s)", name))

    for round_ in range(3):
        taken = at_once([partial(claim, f"{round_}-{n}") for n in range(12)])
        assert sorted(taken) == [False] * 11 + [True]
        lapse(db, "a")


# Budget, progress, thrash


def test_every_request_fits_the_window_that_the_profile_names(
    memory: pycontext.Database, llm: LLMServer, db: Connection
) -> None:
    """C9, C28: 60k tokens in the middle, one message of 20k, a model of 8k; every row is told."""
    db.execute(
        "insert into pycontext.profile (profile, context_window, response_reserve, summarizer_window) "
        "values ('narrow', 200000, 1000, 8000)"
    )
    memory.create_chat("a", profile="narrow")
    rows: list[dict[str, Any]] = []
    for number in range(300):
        text = f"The code of row {number} is ZX{number:04}Q. " + "It was looked into, and put down. " * 18
        if number == 150:
            text += "A long report follows, line after line, of what was seen. " * 1700
        rows.append({"role": "user" if number % 2 == 0 else "assistant", "content": text})
    memory.append("a", rows)
    model = OpenAISummarizer("test", base_url=llm.url, window_tokens=100_000, max_retries=0)
    done = memory.compact("a", token_budget=30_000, summarizer=model)
    assert done.outcome == "summarized", done
    assert done.to_seq is not None
    assert done.calls == len(llm.requests) > 5
    for request, prompt in zip(llm.requests, llm.prompts, strict=True):
        assert tokens.count(prompt, "o200k_base") + request["max_tokens"] <= 8000
        assert "tools" not in request
        assert "tool_choice" not in request
    told = "\n".join(llm.prompts)
    missing = [n for n in range(2, done.to_seq - 1) if f"ZX{n:04}Q" not in told]
    assert missing == []
    assert memory.status("a").window_tokens <= memory.status("a").token_budget


def test_a_tail_that_is_too_large_alone_ends_in_a_skip_not_in_a_loop(
    memory: pycontext.Database, db: Connection, watched: Any
) -> None:
    """C10, C12: over the trigger, nothing to cut: said, and logged once."""
    memory.create_chat("a", profile="small-8k")
    calls = [
        {"id": name, "type": "function", "function": {"name": "read", "arguments": "{}"}} for name in "ABC"
    ]
    memory.append("a", "Compare the three files.")
    memory.append("a", {"role": "assistant", "tool_calls": calls})
    for name in "ABC":
        memory.append("a", {"role": "tool", "tool_call_id": name, "content": "line of the file\n" * 800})
    for number in range(3):
        with memory.turn("a", f"And? {number}", token_budget=4000) as turn:
            assert turn.window_tokens <= 4000
            assert turn.messages[-1]["content"] == f"And? {number}"
            assert turn.decision in ("skip", "none", "prune")
    assert watched.requests == []
    with pytest.raises(BudgetTooSmall), memory.turn("a", "word " * 10_000, token_budget=4000):
        pass


def test_over_the_trigger_with_nothing_to_do_is_said_and_logged_once(
    memory: pycontext.Database, db: Connection, watched: Any
) -> None:
    """C12."""
    with memory.turn("a", "word " * 5200, profile="small-8k") as turn:
        assert turn.decision == "skip"
        turn.add(ASSISTANT)
    for number in range(3):
        with memory.turn("a", f"more {number}") as turn:
            turn.add(ASSISTANT)
    assert watched.requests == []
    history = db.execute("select outcome, trigger, reason from pycontext.compaction_history").fetchall()
    assert len(history) == 1
    assert history[0][:2] == ("skipped", "after")
    assert "over the trigger" in history[0][2]


def test_trigger_cut_and_window_use_one_count(memory: pycontext.Database, fill: Fill) -> None:
    """C12."""
    fill("a", 14)
    memory.count_tokens("a")
    plan = memory.plan("a")
    assert plan.window_tokens == 3 + sum(row.tokens for row in memory.window("a"))
    assert plan.window_tokens == memory.status("a").window_tokens
    done = memory.compact("a")
    after = memory.plan("a")
    assert done.tokens_after == after.window_tokens == 3 + sum(row.tokens for row in memory.window("a"))


def test_the_plan_tells_the_tokens_of_the_window(memory: pycontext.Database, db: Connection) -> None:
    """C12: of rows counted since they came, with what they were estimated at where that decides."""
    memory.create_chat("a", profile="small-8k")
    said = "Посмотрите, пожалуйста, где посылка, её ждут уже третий день. " * 8
    over = set()
    for number in range(40):
        db.execute("select pycontext.append_message('a', 'user', %s)", [f"{number}: {said}"])
        memory.count_tokens("a")
        plan = memory.plan("a")
        told = plan.window_tokens, plan.trigger_tokens
        assert [int(n) for n in re.findall(r"^\d+|(?<=trigger of )\d+", plan.reason or "")] == [*told][:2]
        over.add((plan.decision == "none", "first estimated" in (plan.reason or "")))
        if plan.decision != "none" and "first estimated" not in (plan.reason or ""):
            assert plan.window_tokens > plan.trigger_tokens
    assert over == {(True, False), (False, True), (False, False)}


def test_a_summary_is_never_larger_than_what_it_replaces(
    memory: pycontext.Database, llm: LLMServer, model: OpenAISummarizer
) -> None:
    """C11: five short turns, 2000 tokens of summary."""
    memory.create_chat("a", profile="small-8k")
    llm.default = lambda request: json.dumps({**GOOD, "resolved": [f"Step {n} was done" for n in range(400)]})
    for number in range(6):
        memory.append("a", [{"role": "user", "content": f"short {number} " * 20}, ASSISTANT])
    before = memory.status("a").window_tokens
    for _ in range(3):
        memory.compact("a", token_budget=1000, summarizer=model)
        assert memory.status("a").window_tokens <= before


def test_a_turn_starts_at_once_while_the_model_sleeps(
    memory: pycontext.Database, dsn: str, fill: Fill, llm: LLMServer
) -> None:
    """Also of a chat that is over its trigger: the window fits without the summary, and comes as fast as that
    of a chat that nobody compacts."""
    for chat in ("a", "b"):
        fill(chat, 40)
    llm.default = slowly(4)
    in_background = threading.Thread(target=_compact, args=(dsn, llm.url, "a"))
    in_background.start()
    while not llm.requests:
        time.sleep(0.02)
    times: dict[str, list[float]] = {"a": [], "b": []}
    for number in range(9):
        for chat in times:
            with pycontext.connect(dsn) as fresh:
                turn = fresh.turn(chat, f"turn {number}", compact="off")
                started = time.monotonic()
                with turn:
                    times[chat].append(time.monotonic() - started)
                    assert turn.window_tokens <= turn.token_budget
                    assert turn.is_degraded
    assert in_background.is_alive(), "all turns started while the model was at it"
    in_background.join(60)
    best, middle = ({chat: of(seen) for chat, seen in times.items()} for of in (min, statistics.median))
    print(f"turn start beside a model: {best['a'] * 1000:.0f} ms at best, median {middle['a'] * 1000:.0f}")
    assert best["a"] < max(0.1, 1.5 * best["b"]), "where other work slows all of them, as slow as the others"
    assert middle["a"] < 2 * middle["b"] + 0.05
    assert memory.status("a").line_id is not None


def _compact(dsn: str, url: str, chat_id: str) -> None:
    with pycontext.connect(dsn, summarizer=OpenAISummarizer("test", base_url=url)) as own:
        own.compact(chat_id)


# Summary quality and failure

BROKEN = [
    "503", "429", "400", "timeout", "not_json", "no_choices", "empty", "null", "whitespace", "headings",
    "empty_json", "error_text", "error_json", "refusal", "reasoning", "think_tag", "truncated", "tool_call",
    "length",
]  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_model_that_fails_costs_nothing_but_the_wait(
    memory: pycontext.Database, dsn: str, fill: Fill, db: Connection, llm: LLMServer, fault: str
) -> None:
    """C5, C26, C27: no row, a window that fits, one failed pass, no call storm; the good retry is stored."""
    fill("a", 25)
    model = OpenAISummarizer("test", base_url=llm.url, timeout=0.5, max_retries=0)
    llm.default = fault
    with pycontext.connect(dsn, summarizer=model) as own, own.turn("a", "Anything new?") as turn:
        turn.add(ASSISTANT)
    assert column(db, OUTCOMES, "a") == ["failed"]
    assert one(db, LINES, "a") == 0
    calls = len(llm.requests)
    assert 1 <= calls <= 3
    assert "tools" not in str(llm.requests[0].keys())
    # a fresh process waits, in a window that fits and says that it is degraded
    message = "And now?" + " really?" * 1500
    with pycontext.connect(dsn, summarizer=model) as fresh, fresh.turn("a", message) as turn:
        assert turn.decision == "skip"
        assert "failed" in (turn.reason or "")
        assert turn.window_tokens <= turn.token_budget
        assert turn.is_degraded
        turn.add(ASSISTANT)
    assert len(llm.requests) == calls
    assert column(db, OUTCOMES, "a") == ["failed"]
    # later it is tried again
    llm.default = "ok"
    db.execute("update pycontext.lease set retry_at = now() - interval '1 s'")
    with pycontext.connect(dsn, summarizer=model) as fresh, fresh.turn("a", "And later?") as turn:
        assert turn.decision == "summarize"
        turn.add(ASSISTANT)
    assert column(db, OUTCOMES, "a") == ["failed", "summarized"]
    assert one(db, RETRY, "a") == (0, None)
    assert one(db, LINES, "a") == 1


@pytest.mark.parametrize(
    "fault", ["no_json_schema", "no_response_format", "prose", "plain", "fenced", "slow"]
)
def test_answers_in_other_forms_are_taken(
    memory: pycontext.Database, fill: Fill, llm: LLMServer, model: OpenAISummarizer, fault: str
) -> None:
    fill("a", 25)
    llm.default = fault
    done = memory.compact("a", summarizer=model)
    assert done.outcome == "summarized", done
    assert done.calls == len(llm.requests)


def test_failures_in_a_row_wait_longer_each_time(
    memory: pycontext.Database, fill: Fill, db: Connection, llm: LLMServer, model: OpenAISummarizer
) -> None:
    fill("a", 25)
    llm.default = "503"
    waits = []
    for number in range(1, 10):
        assert memory.compact("a", summarizer=model).outcome == "failed", "on demand nothing waits"
        failures, wait = one(db, RETRY, "a")
        assert failures == number
        waits.append(round(wait / 30))
    assert waits == [1, 2, 4, 8, 16, 32, 64, 120, 120]


def test_a_refused_summary_is_asked_for_once_more_with_the_reason(
    memory: pycontext.Database, fill: Fill
) -> None:
    class Learns:
        name = "learns"
        complaints: list[str] = []  # noqa: RUF012

        def summarize(self, request: SummaryRequest) -> SummaryResult:
            self.complaints.append(request.complaint)
            text = "Parcels were looked up" if request.complaint else "Error: timeout"
            return SummaryResult(Summary(resolved=(text,)), "learns", 1, 10, 5)

    fill("a", 25)
    done = memory.compact("a", summarizer=Learns())
    assert done.outcome == "summarized"
    assert Learns.complaints == ["", "the summary is an error text"]
    assert (done.calls, done.prompt_tokens, done.completion_tokens) == (2, 20, 10)


def test_exact_values_live_through_five_lossy_passes(
    memory: pycontext.Database, fill: Fill, db: Connection, llm: LLMServer, model: OpenAISummarizer
) -> None:
    """C29."""
    memory.create_chat("a", profile="small-8k")
    memory.append("a", [{"role": "user", "content": "Hello, I have a question about my orders."}, ASSISTANT])
    memory.append(
        "a", [{"role": "user", "content": "It is ticket QX-4471, deadline 3 March, bucket b-17."}, ASSISTANT]
    )
    lossy = {**GOOD, "resolved": ["Something was done"], "decisions": [], "facts": []}
    llm.default = lambda request: json.dumps(lossy)
    for number in range(5):
        fill("a", 25, first=1 + 25 * number)
        done = memory.compact("a", summarizer=model)
        assert done.outcome == "summarized", done
    assert one(db, LINES, "a") == 5
    sections = [row for row in memory.window("a") if row.section == "summary"]
    assert len(sections) == 1
    facts = column(db, "select content from pycontext.fact where chat_id = %s", "a")
    kept = f"{sections[0].content} {facts}"
    for value in ("QX-4471", "3 March", "b-17"):
        assert value in kept, value


def test_a_model_that_nests_its_summaries_does_not_make_them_grow(
    memory: pycontext.Database, fill: Fill, llm: LLMServer, model: OpenAISummarizer
) -> None:
    """C30: the model answers with all it was shown, wrapped."""
    llm.default = lambda request: json.dumps(
        {**GOOD, "resolved": ["S(" + " ".join(str(m["content"]) for m in request["messages"])[-6000:] + ")"]}
    )
    sizes = []
    for number in range(6):
        fill("a", 25, first=1 + 25 * number)
        done = memory.compact("a", summarizer=model)
        assert done.outcome == "summarized", done
        (line,) = [row for row in memory.window("a") if row.section == "summary"]
        sizes.append(line.tokens)
        assert str(line.content).count("<chat-summary") == 1
    assert max(sizes) <= 900, sizes


def test_a_flush_that_fails_leaves_everything_as_it_was(
    memory: pycontext.Database, fill: Fill, db: Connection, watched: Any
) -> None:
    """C38: the range is flushed before it is summarized, from its original rows, or it is not summarized."""
    seen: list[compaction.FlushRequest] = []

    def flush(request: compaction.FlushRequest) -> Any:
        seen.append(request)
        if len(seen) == 1:
            raise compaction.FlushFailed("no answer", calls=2, prompt_tokens=7)
        return
        yield

    rows = fill("a", 25)
    memory._flush = flush
    failed = memory.compact("a")
    assert (failed.outcome, failed.reason) == ("failed", "the memory flush failed: no answer")
    assert (failed.calls, failed.prompt_tokens) == (2, 7)
    assert watched.requests == []
    assert one(db, LINES, "a") == 0
    done = memory.compact("a")
    assert done.outcome == "summarized"
    assert done.to_seq is not None
    assert [row.seq for row in seen[1].messages] == [row.seq for row in rows[: done.to_seq]]
    assert seen[1].after_message_id == rows[done.to_seq - 1].message_id
    assert seen[1].window_tokens == 8000


def test_the_log_has_the_figures_and_nothing_of_the_chat(
    memory: pycontext.Database, fill: Fill, db: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    class Leaks:
        name = "leaks"

        def summarize(self, request: SummaryRequest) -> SummaryResult:
            raise ValueError(f"could not tell {request.messages[0].text}")

    fill("a", 25)
    with caplog.at_level(logging.DEBUG, "pycontext"):
        memory.compact("a", summarizer=Leaks())
        memory.compact("a")
    failed, done = [record for record in caplog.records if hasattr(record, "compaction")]
    assert failed.levelno == logging.WARNING
    fields = done.__dict__["compaction"]
    assert fields["chat_id"] == "a"
    for name in (
        "trigger", "from_seq", "to_seq", "tokens_before", "tokens_after", "saved_tokens", "calls",
        "prompt_tokens", "completion_tokens", "seconds", "model", "outcome", "reason",
    ):  # fmt: skip
        assert fields[name] is not None, name
    text = caplog.text + str([record.__dict__ for record in caplog.records])
    assert "QX-4" not in text
    assert "parcel" not in text
    assert "QX-4" not in str(db.execute("select * from pycontext.compaction_history").fetchall())


# Postgres operations


def test_ten_chats_over_two_connections(
    dsn: str, fill: Fill, db: Connection, llm: LLMServer, model: OpenAISummarizer
) -> None:
    """C45: none is held while the model works, so two serve ten; idle transactions would be killed."""
    from psycopg_pool import ConnectionPool

    chats = [f"chat-{number}" for number in range(10)]
    for chat_id in chats:
        fill(chat_id, 25)
    llm.default = slowly(2)
    options = dsn.replace("options='", "options='-c idle_in_transaction_session_timeout=1s ")
    assert options != dsn
    started = time.monotonic()
    with ConnectionPool(options, min_size=2, max_size=2, timeout=60) as pool:
        database = pycontext.connect(pool=pool, summarizer=model)
        passes = at_once([partial(database.compact, chat_id) for chat_id in chats])
    took = time.monotonic() - started
    assert [done.outcome for done in passes] == ["summarized"] * 10
    assert len(llm.requests) == 10
    print(f"ten passes of a two-second model over two connections: {took:.1f} s")
    assert took < 15, "they waited for each other's model"


def test_inside_the_callers_transaction_it_is_left_to_the_worker(
    dsn: str, fill: Fill, db: Connection, watched: Any
) -> None:
    fill("a", 25)
    with psycopg.connect(dsn) as conn, conn.transaction():
        own = pycontext.connect(connection=conn, summarizer=watched)
        with own.turn("a", "Anything new?") as turn:
            turn.add(ASSISTANT)
        with pytest.raises(PycontextError):
            own.compact("a")
    assert watched.requests == []
    assert column(db, "select chat_id from pycontext.chats_due") == ["a"]
