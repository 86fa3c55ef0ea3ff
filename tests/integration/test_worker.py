"""The worker: a process beside the product, several at once, stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from llm_server import GOOD, LLMServer

import pycontext
from pycontext.extractor import ExtractorFailed, ExtractorRequest, ExtractorResult
from pycontext.summarizer import SummaryRequest, SummaryResult
from pycontext.summarizer.extractive import ExtractiveSummarizer
from pycontext.worker import Worker

pytestmark = pytest.mark.runners("sync", "pooled", long="pooled")

Fill = Callable[..., list[pycontext.Message]]
Connection = psycopg.Connection[Any]

DUE = "select chat_id from pycontext.chats_due order by chat_id"
LINES = "select chat_id from pycontext.message where kind = 'summary' order by chat_id"
PLANS = """
    select c.chat_id, p.decision from pycontext.chat c
    cross join lateral pycontext.compaction_plan(c.chat_id) p order by c.chat_id
"""
HOLDER = "select holder from pycontext.lease where chat_id = 'a'"
COMMAND = [sys.executable, "-c", "import sys; from pycontext.cli import main; sys.exit(main())"]


def column(db: Connection, query: str) -> list[Any]:
    return [row[0] for row in db.execute(query.encode()).fetchall()]


def until(what: Callable[[], Any], seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def environment(dsn: str | None, llm: LLMServer | None = None) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("PYCONTEXT_")}
    found.pop("DATABASE_URL", None)
    if dsn is not None:
        found["PYCONTEXT_DSN"] = dsn
    if llm is not None:
        found["PYCONTEXT_SUMMARIZER_MODEL"] = "test"
        found["PYCONTEXT_SUMMARIZER_BASE_URL"] = llm.url
    return found


def worker(dsn: str | None, *options: str, llm: LLMServer | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "worker", *options],
        env=environment(dsn, llm),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def slowly(seconds: float) -> Callable[[dict[str, Any]], str]:
    def answer(request: dict[str, Any]) -> str:
        if "durable facts" in str(request["messages"]):  # the memory flush asks the same server
            return json.dumps({"facts": []})
        time.sleep(seconds)
        return json.dumps(GOOD)

    return answer


def test_once_compacts_what_is_due_and_counts_what_is_not_counted(
    dsn: str, fill: Fill, db: Connection
) -> None:
    fill("due", 25)
    fill("small", 2)
    db.execute("select pycontext.append_message('small', 'user', 'written in SQL')")
    assert column(db, DUE) == ["due"]
    assert "small" in column(db, "select chat_id from pycontext.chats_uncounted")
    process = worker(dsn, "--once")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "extractive" in out
    assert "due summarized: " in out
    assert column(db, LINES) == ["due"]
    assert column(db, DUE) == []
    assert column(db, "select chat_id from pycontext.chats_uncounted") == []
    assert column(db, "select distinct trigger from pycontext.pass") == ["worker"]


def test_every_adopted_chat_has_its_turn(dsn: str, db: Connection) -> None:
    """More than are read at one look; one that is not due is read again after a while only."""
    db.execute(
        "create table post (chat_id text, seq bigint, role text, content text, created_at timestamptz)"
    )
    db.execute(
        "insert into post select 'c' || c, n, case when n % 2 = 0 then 'assistant' else 'user' end,"
        " repeat('Parcel QX-' || n || ' is late. ', 30), now() - interval '1 day'"
        " from generate_series(1, 22) c, generate_series(1, case when c = 9 then 60 else 2 end) n"
    )
    db.execute("create view chat_message as select *, seq::text as message_id from post")
    db.execute("select pycontext.register_source('posts', 'chat_message', is_default => true)")
    db.execute(
        "select pycontext.create_chat('c' || n, profile => 'small-8k', source => 'posts')"
        " from generate_series(1, 22) n"
    )
    with pycontext.connect(dsn, summarizer=ExtractiveSummarizer()) as database:
        worker = Worker(database)
        done = [worker.run(once=True).passes for _ in range(3)]
    assert done == [0, 1, 1]
    assert column(db, LINES) == ["c9"]
    assert column(db, "select outcome from pycontext.pass") == ["summarized"]


def test_facts_of_what_start_over_set_aside_are_taken(dsn: str, db: Connection) -> None:
    """Whether or not the chat will ever be compacted; an extractor that fails is not asked again at once."""
    asked: list[str] = []

    def fails(request: ExtractorRequest) -> ExtractorResult:
        asked.append(request.messages[0].text)
        raise ExtractorFailed("no answer")

    with pycontext.connect(dsn, extractor=fails) as database:
        for chat in ("a", "b"):
            database.create_chat(chat)
            database.append(chat, [{"role": "user", "content": "My name is Anna."}])
        database.start_over("a")
        assert asked == []
        for _ in range(2):
            Worker(database).run(once=True)
        assert asked == ["My name is Anna."]
        assert db.execute("select flush_error from pycontext.chat where chat_id = 'a'").fetchone() == (
            "no answer",
        )
    db.execute("update pycontext.chat set flush_failed_at = now() - interval '6 minutes' where chat_id = 'a'")
    with pycontext.connect(dsn) as database:
        assert Worker(database).run(once=True).facts == 1
        assert [fact.content for fact in database.recall("a", "name")] == ["My name is Anna"]
        assert column(db, "select chat_id from pycontext.chats_unflushed") == []
        assert Worker(database).run(once=True).facts == 0


def test_it_never_falls_back_to_the_embedded_server(empty_dsn: str, tmp_path: Any) -> None:
    process = worker(None, "--once")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "PYCONTEXT_DSN" in err
    process = worker(empty_dsn, "--once")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "pycontext install" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_it_stops_at_once(dsn: str, number: signal.Signals) -> None:
    process = worker(dsn, "--interval", "60")
    assert process.stdout is not None
    assert "worker:" in process.stdout.readline()
    time.sleep(0.5)
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 0, err
    assert "worker ended" in out


def test_in_the_middle_of_a_pass_it_ends_the_pass(
    dsn: str, fill: Fill, db: Connection, llm: LLMServer
) -> None:
    for chat_id in ("a", "b"):
        fill(chat_id, 25)
    llm.default = slowly(1.5)
    process = worker(dsn, llm=llm)
    until(lambda: llm.requests and column(db, DUE) == ["b"])
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "1 passes" in out
    assert column(db, LINES) == ["a"]
    assert column(db, HOLDER) == [None]
    assert column(db, DUE) == ["b"]


GRACELESS = """
import sys
import pycontext
from pycontext.worker import Worker

with pycontext.connect() as db:
    print("ready", flush=True)
    Worker(db, grace=float(sys.argv[1])).run()
print("ended", flush=True)
"""


@pytest.mark.parametrize("grace", [0.3, 60])
def test_a_pass_that_does_not_end_is_given_up_and_the_lease_given_back(
    dsn: str, fill: Fill, db: Connection, llm: LLMServer, grace: float
) -> None:
    fill("a", 25)
    llm.default = "timeout"
    process = subprocess.Popen(
        [sys.executable, "-c", GRACELESS, str(grace)],
        env=environment(dsn, llm),
        stdout=subprocess.PIPE,
        text=True,
    )
    until(lambda: any("role" in str(request) for request in llm.requests) and column(db, HOLDER) != [None])
    process.send_signal(signal.SIGTERM)
    if grace == 60:
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)  # a second one does not wait
    out, _ = process.communicate(timeout=15)
    assert process.returncode == 0
    assert out.endswith("ended\n")
    assert column(db, HOLDER) == [None]
    assert column(db, LINES) == []
    assert column(db, DUE) == ["a"]


@pytest.mark.runners("sync", "pooled")
def test_several_workers_share_the_work(dsn: str, fill: Fill, db: Connection, llm: LLMServer) -> None:
    chats = [f"chat-{number}" for number in range(8)]
    for chat_id in chats:
        fill(chat_id, 25)
    llm.default = slowly(0.5)
    processes = [worker(dsn, "--interval", "0.2", llm=llm) for _ in range(3)]
    until(lambda: column(db, LINES) == chats)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    outs = [process.communicate(timeout=30)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum(out.count(" summarized: ") for out in outs) == 8
    assert column(db, "select outcome from pycontext.pass") == ["summarized"] * 8
    # facts are asked for apart; summaries are the requests that the pass log counts
    assert column(db, "select count(*) from pycontext.pass where calls >= 1") == [8]


def test_killed_in_a_pass_the_next_worker_does_it(
    dsn: str, fill: Fill, db: Connection, llm: LLMServer
) -> None:
    fill("a", 25)
    llm.default = slowly(3)
    process = worker(dsn, llm=llm)
    until(lambda: llm.requests and column(db, DUE) == [])
    process.kill()
    process.communicate()
    assert column(db, LINES) == []
    assert column(db, HOLDER) != [None]
    llm.default = slowly(0)
    again = worker(dsn, "--once", llm=llm)
    assert "0 passes" in again.communicate(timeout=30)[0], "the lease is still held"
    db.execute("update pycontext.lease set expires_at = now()")
    again = worker(dsn, "--once", llm=llm)
    assert "1 passes" in again.communicate(timeout=30)[0]
    assert column(db, LINES) == ["a"]


class FailsOn:
    """The built-in summarizer, but of one chat."""

    name = "fails-on"

    def __init__(self, word: str) -> None:
        self.word = word
        self.calls = 0

    def summarize(self, request: SummaryRequest) -> SummaryResult:
        self.calls += 1
        if self.word in request.messages[0].text:
            raise RuntimeError("no")
        return ExtractiveSummarizer().summarize(request)


def test_one_chat_that_fails_stops_nobody(dsn: str, fill: Fill, db: Connection) -> None:
    fill("a", 25)
    fill("b", 25, first=500)
    summarizer = FailsOn("QX-4001")
    with pycontext.connect(dsn, summarizer=summarizer) as own:
        work = Worker(own)
        for _ in range(5):
            work.run(once=True)
    assert column(db, LINES) == ["b"]
    assert (work.done.passes, work.done.failed) == (1, 1)
    assert summarizer.calls <= 3, "a chat that failed waits"


def test_a_chat_that_can_not_be_compacted_is_left_until_it_changes(
    dsn: str, memory: pycontext.Database, db: Connection
) -> None:
    memory.create_chat("a", profile="small-8k")
    memory.append("a", "word " * 5200)
    with pycontext.connect(dsn) as own:
        work = Worker(own)
        work.run(once=True)
        assert column(db, DUE) == ["a"]
        assert column(db, "select outcome from pycontext.pass") == ["skipped"]
        db.execute("delete from pycontext.pass")
        work.run(once=True)
        assert column(db, "select outcome from pycontext.pass") == [], "it did not look again"
        memory.append("a", "more")
        work.run(once=True)
        assert column(db, "select outcome from pycontext.pass") == ["skipped"]


def test_a_lost_connection_is_opened_anew(dsn: str, fill: Fill, db: Connection) -> None:
    with pycontext.connect(dsn, summarizer=ExtractiveSummarizer()) as own:
        work = Worker(own, interval=0.1)
        thread = threading.Thread(target=work.run)
        thread.start()
        db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'pycontext' "
            "and datname = current_database()"
        )
        with pycontext.connect(dsn) as other:
            other.create_chat("a", profile="small-8k")
            other.append("a", [{"role": "user", "content": "Where is parcel 7? " * 60}] * 1)
            for number in range(30):
                other.append("a", [{"role": "user", "content": f"Where is {number}? " * 60}])
        until(lambda: column(db, LINES) == ["a"])
        work.stop()
        thread.join(20)
        assert not thread.is_alive()


def test_due_is_what_the_plan_would_do(
    memory: pycontext.Database, fill: Fill, db: Connection, watched: Any
) -> None:
    for number, turns in enumerate((1, 10, 14, 18, 22, 30, 60)):
        fill(f"c{number}", turns)
    db.execute(
        "insert into pycontext.profile (profile, context_window, compaction_mode) values ('w', 8192, 'warn')"
    )
    memory.create_chat("warns", profile="w")
    memory.append("warns", [{"role": "user", "content": f"Question {n}. " * 100} for n in range(40)])
    memory.create_chat("empty")

    def agree() -> list[str]:
        due = column(db, DUE)
        plans = db.execute(PLANS.encode()).fetchall()
        assert due == [chat for chat, decision in plans if decision in ("summarize", "prune")]
        return due

    assert agree() == ["c4", "c5", "c6"]
    for chat_id in ("c4", "c6"):
        assert memory.compact(chat_id).outcome == "summarized"
    memory.count_tokens("c5")
    assert agree() == ["c5"]
    fill("c4", 20, first=31)
    assert agree() == ["c4", "c5"]
    memory.start_over("c5")
    assert agree() == ["c4"]
    db.execute("select pycontext.fail_compaction('c4', null, 'failed', 'no answer')")
    assert agree() == []
    db.execute("update pycontext.lease set retry_at = null where chat_id = 'c4'")
    assert agree() == ["c4"]
    db.execute("select * from pycontext.claim_compaction('c4', 'me')")
    assert column(db, DUE) == []


def test_due_goes_by_what_the_newest_turn_read_under(
    memory: pycontext.Database, db: Connection, fill: Fill
) -> None:
    fill("a", 14)
    assert column(db, DUE) == []
    with memory.turn("a", "And?", token_budget=3000, compact="off") as turn:
        assert turn.decision == "summarize"
    assert db.execute("select chat_id, token_budget from pycontext.chats_due").fetchall() == [("a", 3000)]
    Worker(memory).run(once=True)
    assert column(db, DUE) == []
    assert column(db, LINES) == ["a"]


def test_due_walks_no_thread(db: Connection, fill: Fill) -> None:
    for number in range(3):
        fill(f"c{number}", 25)
    db.execute("analyze")
    plan = "\n".join(column(db, "explain select * from pycontext.chats_due"))
    assert "Seq Scan on message" not in plan
    assert plan.count("Limit") >= 4
    plan = "\n".join(column(db, "explain (costs off) select * from pycontext.chats_uncounted"))
    assert "Sort" not in plan
