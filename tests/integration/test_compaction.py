"""The pass: what is stored, what two of them at once do, and that nothing is held while the model works."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

import pycontext
from pycontext.errors import PycontextError
from pycontext.summarizer import SummarizerFailed, SummaryRequest, SummaryResult
from pycontext.summary import Summary

pytestmark = pytest.mark.runners("sync", "async", "pooled")

Fill = Callable[..., list[pycontext.Message]]
Connection = psycopg.Connection[Any]

LINES = "select message_id, content #>> '{}' from pycontext.message where kind = 'summary' order by seq"
PASSES = "select * from pycontext.compaction_history order by pass_no"


class Says:
    """A summarizer that gives what it was made with."""

    name = "says"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def summarize(self, request: SummaryRequest) -> SummaryResult:
        if isinstance(self.answer, Exception):
            raise self.answer
        return (
            SummaryResult(self.answer, "says", 1, 10, 5) if isinstance(self.answer, Summary) else self.answer
        )


GOOD = Summary(resolved=("Parcels were looked up",), facts=("Order QX-4001",))


def test_a_pass_is_what_happened(memory: pycontext.Database, fill: Fill, db: Connection) -> None:
    fill("a", 25)
    memory.count_tokens("a")
    before = memory.plan("a")
    done = memory.compact("a", summarizer=Says(GOOD))
    after = memory.plan("a")
    status = memory.status("a")
    assert done.outcome == "summarized"
    assert done.summary_id == status.line_id
    assert (done.tokens_before, done.tokens_after) == (before.window_tokens, after.window_tokens)
    assert done.saved_tokens == before.window_tokens - after.window_tokens > 0
    assert (done.model, done.calls, done.prompt_tokens, done.completion_tokens) == ("says", 1, 10, 5)
    assert (done.from_seq, done.to_seq) == (1, status.line_seq)
    assert status.uncounted == 0
    with db.cursor(row_factory=dict_row) as cursor:
        (logged,) = cursor.execute(PASSES).fetchall()
    for name in ("outcome", "summary_id", "from_seq", "to_seq", "reason", "model", "calls", "prompt_tokens"):
        assert logged[name] == getattr(done, name), name
    assert logged["tokens_before"] == done.tokens_before
    assert logged["trigger"] == "demand"


def test_the_line_stands_in_the_thread_and_the_chat_goes_on(memory: pycontext.Database, fill: Fill) -> None:
    rows = fill("a", 25)
    done = memory.compact("a")
    thread = memory.thread("a", max_rows=100)
    assert len(thread) == len(rows) + 1
    place = next(n for n, row in enumerate(thread) if row.kind == "summary")
    assert thread[place - 1].seq == thread[place].seq == done.to_seq
    window = memory.window("a")
    assert [row.section for row in window][:2] == ["system", "head"]
    assert "summary" in [row.section for row in window]
    kept = [row.seq for row in window if row.section == "tail"]
    assert kept == list(range(done.to_seq + 1, len(rows) + 1))  # type: ignore[operator]


@pytest.mark.parametrize("turns_after", [0, 12])
def test_a_task_that_was_called_off_is_not_taken_up_again(
    memory: pycontext.Database, fill: Fill, turns_after: int
) -> None:
    fill("a", 12)
    memory.append("a", {"role": "user", "content": "refactor module A of the shop"})
    fill("a", 6, first=20)
    memory.append("a", {"role": "user", "content": "stop, forget A"})
    memory.append("a", {"role": "assistant", "content": "Stopped."})
    if turns_after:
        fill("a", turns_after, first=40)
    assert memory.compact("a", 4000).outcome == "summarized"
    memory.append("a", {"role": "user", "content": "hi"})
    messages = memory.messages("a", 4000)
    assert messages[-1] == {"role": "user", "content": "hi"}
    assert "stop, forget A" in str(messages)
    (line,) = [m["content"] for m in messages if "<chat-summary>" in str(m["content"])]
    assert "ask for nothing" in line
    doing = line.partition("What was being worked on at that time:")[2]
    assert "module A" not in doing


def test_on_demand_it_cuts_below_the_trigger_too(memory: pycontext.Database, fill: Fill) -> None:
    fill("a", 14)
    plan = memory.plan("a")
    assert plan.decision == "none"
    assert plan.after_message_id is not None
    assert memory.compact("a").outcome == "summarized"


def test_nothing_to_cut_is_skipped_with_a_reason(memory: pycontext.Database, watched: Any) -> None:
    memory.create_chat("empty")
    assert memory.compact("empty").outcome == "skipped"
    with memory.turn("a", "hello") as turn:
        turn.add({"role": "assistant", "content": "hi"})
    done = memory.compact("a")
    assert (done.outcome, done.summary_id, done.saved_tokens) == ("skipped", None, 0)
    assert "nothing can be cut" in (done.reason or "")
    assert watched.requests == []


def test_a_range_that_stays_in_sight_is_no_reason_for_a_pass(memory: pycontext.Database) -> None:
    """All that lies before the tail is the first turn and a long request, which a line would keep whole."""
    memory.create_chat("a")
    memory.append("a", [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": "Yes."}])
    memory.append("a", {"role": "user", "content": "Here is what I need. " * 300})
    for n in range(12):
        memory.append("a", {"role": "assistant", "content": f"Step {n}: " + "it was done as you said. " * 20})
    plan = memory.plan("a", 3000)
    assert plan.window_tokens > plan.trigger_tokens
    assert plan.covered_tokens is None or plan.covered_tokens < plan.window_tokens - 1500
    done = memory.compact("a", token_budget=3000)
    if done.outcome == "skipped":
        assert plan.decision == "skip"
        assert "nothing can be cut" in (done.reason or "")
    else:
        assert done.outcome == "summarized", done.reason
        assert done.tokens_after is not None
        assert plan.expected_tokens is not None
        assert done.tokens_after <= plan.expected_tokens


def long_stretch(db: Connection, chat: str, rows: int) -> None:
    """Many small messages, appended at once."""
    db.execute(
        "select from pycontext.append_messages(%s, (select jsonb_agg(jsonb_build_object("
        "'role', case when n %% 2 = 0 then 'assistant' else 'user' end,"
        " 'content', 'Parcel QX-' || n || ' is late.'))"
        " from generate_series(1, %s) n))",
        (chat, rows),
    )


def test_a_long_stretch_is_told_in_pieces(memory: pycontext.Database, db: Connection) -> None:
    """No pass takes in more than 2,000 messages; they leave no gap, and the window is small again."""
    memory.create_chat("a")
    long_stretch(db, "a", 5000)
    done = memory.compact("a", token_budget=4000)
    assert (done.outcome, done.from_seq) == ("summarized", 1), done.reason
    passes = db.execute(
        "select from_seq, to_seq from pycontext.pass where outcome = 'summarized' order by pass_no"
    ).fetchall()
    assert len(passes) >= 3
    assert all(to_seq - from_seq < 2000 for from_seq, to_seq in passes)
    assert [one[1] + 1 for one in passes[:-1]] == [one[0] for one in passes[1:]]
    assert passes[-1][1] == done.to_seq
    after = memory.plan("a", 4000)
    assert after.decision == "none"
    assert done.tokens_after == after.window_tokens
    row = db.execute(
        "select c.live_tokens, (select sum(m.tokens) from pycontext.message m"
        " where m.seq > c.line_seq and m.line_no = 0) from pycontext.chat c"
    ).fetchone()
    assert row is not None
    assert row[0] == row[1], "the figures on the chat's row are those of its tail"


def test_a_long_stretch_of_an_adopted_chat_is_told_in_pieces(
    memory: pycontext.Database, db: Connection
) -> None:
    db.execute(
        "create table post"
        " (chat_id bigint, seq bigint primary key, role text, content text, created_at timestamptz)"
    )
    db.execute(
        "insert into post select 7, n, case when n % 2 = 0 then 'assistant' else 'user' end,"
        " 'Parcel QX-' || n || ' is late.', now() - interval '1 day' from generate_series(1, 4500) n"
    )
    db.execute("create view chat_message as select *, seq as message_id from post")
    db.execute("select pycontext.register_source('posts', 'chat_message', is_default => true)")
    done = memory.compact(7, token_budget=4000)
    assert done.outcome == "summarized", done.reason
    passes = db.execute(
        "select to_seq from pycontext.pass where outcome = 'summarized' order by pass_no"
    ).fetchall()
    assert [one[0] for one in passes][:2] == [2000, 4000]
    assert len(passes) == 3
    assert memory.plan(7, 4000).decision == "none"
    assert memory.compact(7, token_budget=4000).outcome == "skipped", "nothing is left to cut"


def test_what_a_product_changes_while_the_model_works_makes_the_summary_stale(
    memory: pycontext.Database, db: Connection, watched: Any
) -> None:
    """C3: whether or not it says so, and the next pass tells of what stands there now."""
    db.execute("create table post (chat_id int, seq numeric, role text, content text, created_at timestamp)")
    db.execute(
        "insert into post select c, n, case when n % 2 = 0 then 'assistant' else 'user' end,"
        " 'The budget is 500, said ' || n || repeat(', as we know', 20), now() - interval '1 day'"
        " from generate_series(1, 60) n, generate_series(1, 4) c"
    )
    db.execute(
        "create view chat_message as select chat_id, (seq * 2)::bigint as seq, seq * 2 as message_id, role,"
        " content, created_at from post"
    )
    db.execute("select pycontext.register_source('posts', 'chat_message', is_default => true)")
    edit = "update post set content = 'The budget is 900.' where seq = 4 and chat_id = "
    late = "insert into post select {}, 3.5, 'user', 'The budget is 900.', now() - interval '1 day'"
    changes = [edit + "1", "delete from post where seq = 4 and chat_id = 2", late.format(3)]
    changes.append(edit + "4; select pycontext.source_changed('4', '8')")
    for chat_id, change in enumerate(changes, 1):
        watched.requests.clear()
        watched.meanwhile = lambda request, change=change: db.execute(change.encode())
        done = memory.compact(chat_id, token_budget=2500)
        assert (done.outcome, str(done.reason)[:5]) == ("failed", "stale"), change
        assert not [row for row in memory.window(chat_id) if row.section == "summary"]
        watched.meanwhile = lambda request: None
        assert memory.compact(chat_id, token_budget=2500).outcome == "summarized"
        first, second = (str(request.messages) for request in watched.requests)
        assert "said 4," in first
        assert ("said 4," in second) == (chat_id == 3)
        assert ("budget is 900" in second) == (chat_id != 2)


def test_an_unchanged_chat_is_not_compacted_twice(
    memory: pycontext.Database, fill: Fill, watched: Any
) -> None:
    fill("a", 25)
    assert memory.compact("a").outcome == "summarized"
    read = memory.messages("a")
    again = memory.compact("a")
    assert again.outcome == "skipped"
    assert len(watched.requests) == 1
    assert memory.messages("a") == read


def test_the_next_pass_gets_the_previous_summary_and_original_rows_only(
    memory: pycontext.Database, fill: Fill, watched: Any
) -> None:
    fill("a", 25)
    first = memory.compact("a")
    fill("a", 25, first=26)
    second = memory.compact("a", focus="parcels")
    assert second.outcome == "summarized"
    one, two = watched.requests
    assert one.previous is None
    assert two.previous is not None
    assert two.previous.facts or two.previous.notes or two.previous.resolved
    assert two.focus == "parcels"
    assert [row.seq for row in one.messages] == list(range(1, first.to_seq + 1))  # type: ignore[operator]
    told = [row.seq for row in two.messages]
    # the request that the first line left in the window as a row of its own is told by the second
    request = next(row.seq for row in one.messages if row.is_request)
    assert told == [request, *range(first.to_seq + 1, second.to_seq + 1)]  # type: ignore[operator]
    assert all(row.kind == "message" for row in two.messages)
    assert [row.seq for row in one.messages if row.is_head] == [1, 2]
    assert sum(row.is_request for row in two.messages) == 1
    sections = [row.section for row in memory.window("a")]
    assert sections.count("summary") == 1


def test_a_message_that_lands_while_the_model_works_is_in_the_next_window(
    memory: pycontext.Database, dsn: str, fill: Fill, watched: Any
) -> None:
    """C1."""
    fill("a", 25)

    def other_tab(request: SummaryRequest) -> None:
        with pycontext.connect(dsn) as other:
            other.append("a", "I am new here")

    watched.meanwhile = other_tab
    done = memory.compact("a")
    assert done.outcome == "summarized"
    window = memory.window("a")
    tail = [row.seq for row in window if row.section == "tail"]
    assert tail == list(range(done.to_seq + 1, 52))  # type: ignore[operator]
    assert window[-1].content == "I am new here"


PUT = """
    select m.message_id from pycontext.compaction_plan('a') p
    cross join lateral pycontext.put_summary('a', p.after_message_id, '{"notes": "Parcels were looked up"}') m
"""


def test_the_second_one_uses_the_winners_text(
    memory: pycontext.Database, db: Connection, fill: Fill, watched: Any
) -> None:
    """C4: two tabs cut at the same message; the one that stores second gets nothing from DO NOTHING."""
    fill("a", 25)
    winner: list[Any] = []
    # somebody who claims nothing
    watched.meanwhile = lambda request: winner.append(db.execute(PUT).fetchone())
    loser = memory.compact("a")
    assert loser.outcome == "skipped"
    assert (loser.summary_id,) == winner[0]
    assert "Parcels were looked up" in json.dumps(memory.messages("a"))
    assert len([row for row in memory.thread("a", max_rows=100) if row.kind == "summary"]) == 1


COMPACTOR = """
import json, sys
import pycontext
from pycontext.summarizer.extractive import ExtractiveSummarizer

class Waiting:
    name = "waiting"
    def summarize(self, request):
        print("asked", flush=True)
        sys.stdin.readline()
        return ExtractiveSummarizer().summarize(request)

with pycontext.connect(summarizer=Waiting()) as memory:
    done = memory.compact("a")
    line = [row.content for row in memory.window("a") if row.section == "summary"]
    print(json.dumps([done.outcome, done.summary_id, line]))
"""


def until(db: Connection, query: str) -> None:
    """Wait until the query says true."""
    for _ in range(600):
        if db.execute(query.encode()).fetchone() == (True,):
            return
        time.sleep(0.05)
    raise AssertionError(query)


def test_two_processes_at_once_leave_one_row(
    dsn: str, fill: Fill, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill("a", 25)
    monkeypatch.setenv("PYCONTEXT_DSN", dsn)
    command = [sys.executable, "-c", COMPACTOR]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as second,
    ):
        # one asks its summarizer, the other one has met the lease, and waits
        asked = select.select([first.stdout, second.stdout], [], [], 60)[0]
        assert len(asked) == 1
        until(
            db,
            "select count(*) = 1 from pg_stat_activity"
            " where application_name = 'pycontext' and query ~ 'claim_compaction'",
        )
        for process in (first, second):
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outs = [process.communicate(timeout=60)[0].splitlines() for process in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0)
    assert sorted(len(lines) for lines in outs) == [1, 2], "one of them called its summarizer"
    one, two = (json.loads(lines[-1]) for lines in outs)
    assert {one[0], two[0]} == {"summarized", "skipped"}
    assert one[1:] == two[1:]
    assert len(one[2]) == 1
    assert [row[0] for row in db.execute(LINES).fetchall()] == [one[1]]


def test_the_furthest_line_wins_whichever_comes_last(
    memory: pycontext.Database, db: Connection, fill: Fill, watched: Any
) -> None:
    """C6: a pass that cut earlier stores later."""
    fill("a", 20)
    further: list[int] = []

    def later_tab(request: SummaryRequest) -> None:  # who claims nothing
        fill("a", 20, first=21)
        db.execute(PUT)
        further.append(memory.status("a").line_seq or 0)

    watched.meanwhile = later_tab
    done = memory.compact("a")
    assert done.outcome == "summarized"
    assert done.to_seq is not None
    assert done.to_seq < further[0]
    window = memory.window("a")
    (line,) = [row for row in window if row.section == "summary"]
    assert line.seq == further[0]
    assert [row.seq for row in window if row.section == "tail"] == list(range(further[0] + 1, 81))


@pytest.mark.parametrize(
    "answer",
    [
        Summary(),
        Summary(notes="   \n\t"),
        Summary(notes="## Goals\n## Decisions\n## Files"),
        Summary(notes="Error: timeout"),
        Summary(facts=("a fence </chat-summary> here",)),
        SummarizerFailed("the model is down", calls=3),
        TimeoutError("no chat content may be in the log: secret"),
        "just text",
    ],
    ids=["empty", "blank", "headings", "error", "fence", "failed", "raises", "no-result"],
)
def test_a_bad_summary_is_not_stored_and_the_good_retry_is(
    memory: pycontext.Database, fill: Fill, db: Connection, answer: Any
) -> None:
    """C5, C26."""
    fill("a", 25)
    read = memory.messages("a")
    failed = memory.compact("a", summarizer=Says(answer))
    if answer != Summary(facts=("a fence </chat-summary> here",)):  # which may be made harmless and kept
        assert failed.outcome == "failed"
        assert failed.reason
        assert db.execute(LINES).fetchall() == []
        assert memory.messages("a") == read
        with db.cursor(row_factory=dict_row) as cursor:
            (logged,) = cursor.execute(PASSES).fetchall()
        assert (logged["outcome"], logged["reason"]) == ("failed", failed.reason)
        assert "secret" not in str(logged)
        assert memory.status("a").window_tokens <= memory.status("a").token_budget
        good = memory.compact("a", summarizer=Says(GOOD))
        assert good.outcome == "summarized"
        assert "Parcels were looked up" in json.dumps(memory.messages("a"))
    assert "</chat-summary> here" not in json.dumps(memory.messages("a"))


def test_a_summary_larger_than_it_may_be_never_makes_the_window_grow(
    memory: pycontext.Database, fill: Fill
) -> None:
    """C11."""
    fill("a", 25)
    before = memory.status("a").window_tokens
    facts = tuple(f"Order QX-{number} was due on day {number} at hub B-{number}" for number in range(500))
    done = memory.compact("a", summarizer=Says(Summary(facts=facts)))
    after = memory.status("a").window_tokens
    assert after < before or (done.outcome == "failed" and after == before)


def test_secrets_reach_neither_summarizer_nor_line(
    memory: pycontext.Database, fill: Fill, watched: Any
) -> None:
    """C44."""
    fill("a", 3)
    secret = "sk-test-0123456789abcdefghij"
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({"api_key": secret})},
    }
    memory.append(
        "a",
        [
            {"role": "assistant", "tool_calls": [call]},
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": f"API_KEY={secret}; postgres://u:hunter22@h/db",
            },
        ],
    )
    fill("a", 22, first=4)
    memory.compact("a", summarizer=Says(Summary(facts=(f"the key is {secret}",), resolved=("done",))))
    seen: list[SummaryRequest] = watched.requests
    fill("a", 25, first=30)
    memory.create_chat("b", profile="small-8k")
    memory.append(
        "b", [{"role": "user", "content": f"my key is {secret}"}, {"role": "assistant", "content": "ok"}]
    )
    fill("b", 25)
    memory.compact("b")
    assert len(seen) == 1
    told = str(seen[0])
    assert secret not in told
    assert "hunter22" not in told
    lines = [row for row in memory.window("a") if row.section == "summary"]
    assert lines
    assert secret not in str(lines)


def test_no_transaction_and_no_lock_is_held_while_the_model_works(
    memory: pycontext.Database, db: Connection, fill: Fill, watched: Any
) -> None:
    """C45: seen from another connection during the call."""
    fill("a", 25)
    seen: list[Any] = []

    def look(request: SummaryRequest) -> None:
        seen.extend(
            db.execute(
                """
                select a.state, a.xact_start, a.backend_xmin, (
                    select count(*) from pg_locks l where l.pid = a.pid)
                from pg_stat_activity a
                where a.application_name = 'pycontext' and a.datname = current_database()
                """
            ).fetchall()
        )

    watched.meanwhile = look
    with memory.turn("a", "Anything new?") as turn:
        turn.add({"role": "assistant", "content": "no"})
    memory.compact("a")
    assert watched.requests
    assert set(seen) == {("idle", None, None, 0)}


def test_a_slow_model_survives_the_servers_idle_in_transaction_timeout(
    direct_dsn: str, fill: Fill, watched: Any
) -> None:
    """C45: many chats at once, each slower than the server lets a transaction idle."""
    slow = threading.Event()
    watched.meanwhile = lambda request: slow.wait(0.5)
    chats = [f"chat-{number}" for number in range(4)]
    for chat_id in chats:
        fill(chat_id, 25)
    outcomes: dict[str, Any] = {}

    def compact(chat_id: str) -> None:
        url = direct_dsn.replace("options='", "options='-c idle_in_transaction_session_timeout=100 ")
        assert url != direct_dsn
        with pycontext.connect(url, summarizer=watched) as own:
            outcomes[chat_id] = own.compact(chat_id).outcome

    threads = [threading.Thread(target=compact, args=(chat_id,)) for chat_id in chats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == dict.fromkeys(chats, "summarized")


def test_ten_fresh_turns_after_a_pass_make_no_other(dsn: str, fill: Fill, watched: Any) -> None:
    """C8: small growth, a new connection every turn."""
    fill("a", 25)
    for number in range(10):
        with pycontext.connect(dsn, summarizer=watched) as fresh, fresh.turn("a", f"turn {number}") as turn:
            turn.add({"role": "assistant", "content": "fine"})
    assert len(watched.requests) == 1


def test_a_smaller_budget_compacts_for_that_budget(memory: pycontext.Database, fill: Fill) -> None:
    """C13: the line that is there is used again, not thrown away."""
    fill("a", 25)
    first = memory.compact("a")
    done = memory.compact("a", token_budget=2500)
    assert done.outcome == "summarized"
    assert done.to_seq is not None
    assert first.to_seq is not None
    assert done.to_seq > first.to_seq
    used = sum(row.tokens for row in memory.window("a", token_budget=2500)) + 3
    assert used <= 2500


def test_compact_of_an_unknown_chat(memory: pycontext.Database) -> None:
    with pytest.raises(PycontextError) as raised:
        memory.compact("nowhere")
    assert raised.value.sqlstate == "PCX01"
