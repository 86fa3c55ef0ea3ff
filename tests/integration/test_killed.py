"""A process killed between any two of its steps, and run again: the end is as if nothing had been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import pycontext

Fill = Callable[..., list[pycontext.Message]]
Connection = psycopg.Connection[Any]

# Each job is done by a process of its own, killed after so many steps of all its operations; 0: not at all.
PROGRAM = """
import json, os, signal, sys, traceback
import pycontext
from pycontext import compaction, memory as flushes, steps, tokens
from pycontext.worker import Worker

flushes._ROWS_AT_ONCE = 30

def demand(memory, chat_id):
    memory.compact(chat_id)

def after(memory, chat_id):
    with memory.turn(chat_id, "Anything new?", message_id="u") as turn:
        if not turn.is_answered:
            turn.add({"role": "assistant", "content": "Let me see."})

def inside(memory, chat_id):
    with memory.turn(chat_id, "Find it.", message_id="u", profile="small-8k") as turn:
        for number in [] if turn.is_answered else range(3):
            function = {"name": "look", "arguments": json.dumps({"path": f"src/f{number}.py"})}
            call = {"id": f"c{number}", "type": "function", "function": function}
            turn.add({"role": "assistant", "content": "a step " * 400, "tool_calls": [call]})
            turn.add({"role": "tool", "tool_call_id": f"c{number}", "content": f"found {number} " * 160})
        if not turn.is_answered:
            turn.add({"role": "assistant", "content": "Found."})

def worker(memory, chat_id):
    Worker(memory).run(once=True)

real, tokens_ready = steps.run, tokens.count("ready", "o200k_base")
job = globals()[sys.argv[1]]

def work(chat_id, limit):
    done = []
    def run(operation, perform):
        def counted(step):
            answer = perform(step)
            done.append(getattr(step, "query", type(step).__name__))
            if len(done) == limit:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer
        return real(operation, counted)
    with pycontext.connect() as memory:
        steps.run = run
        job(memory, chat_id)
    return done

for line in sys.stdin:
    chat_id, limit = json.loads(line)
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(into, json.dumps(work(chat_id, limit)).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as told:
        done = told.read()
    print(json.dumps([os.waitpid(pid, 0)[1], json.loads(done or "[]")]), flush=True)
"""


class Jobs:
    """Processes that do one kind of job, one after the other."""

    def __init__(self, job: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def do(self, chat_id: str, limit: int = 0) -> list[str] | None:
        """The steps it took; None where it was killed after `limit` of them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([chat_id, limit]) + "\n")
        self._process.stdin.flush()
        status, steps = json.loads(self._process.stdout.readline())
        assert status in (0, signal.SIGKILL)
        return None if status else steps

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def jobs(request: pytest.FixtureRequest, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    monkeypatch.setenv("PYCONTEXT_DSN", dsn)
    made = Jobs(request.param)
    yield made
    made.close()


def in_pieces(db: Connection, rows: int) -> None:
    """Lets a pass take in so many rows, not 2,000."""
    (plan,) = db.execute(
        "select pg_get_functiondef('pycontext.compaction_plan(text, integer)'::regprocedure)"
    ).fetchone() or ("",)
    assert "c_piece constant integer := 2000" in plan
    db.execute(plan.replace("c_piece constant integer := 2000", f"c_piece constant integer := {rows}"))


def state(db: Connection, memory: pycontext.Database, chat_id: str) -> Any:
    """All that a chat has become, but for times and ids."""
    thread = [
        (row.seq, row.kind, row.role, row.content, row.tool_calls, row.is_estimate)
        for row in memory.thread(chat_id, max_rows=999)
    ]
    facts = db.execute(
        "select seq, role, content from pycontext.fact where chat_id = %s order by seq, content", [chat_id]
    ).fetchall()
    figures = db.execute(
        "select flushed_seq, live_tokens, request_seq, line_seq, prune_unit, act_no, flush_error"
        " from pycontext.chat where chat_id = %s",
        [chat_id],
    ).fetchone()
    lines = db.execute(
        "select seq, covers_from, summary, segment from pycontext.message"
        " where chat_id = %s and line_no > 0 order by seq",
        [chat_id],
    ).fetchall()
    passes = db.execute(
        "select outcome, from_seq, to_seq from pycontext.pass"
        " where chat_id = %s and outcome <> 'skipped' order by pass_no",
        [chat_id],
    ).fetchall()
    return thread, facts, figures, lines, passes, memory.messages(chat_id)


JOBS = {
    "a line": ("demand", 25, 0),
    "several lines": ("demand", 30, 20),
    "several lines by a worker": ("worker", 35, 20),
    "after a turn": ("after", 25, 0),
    "inside a turn": ("inside", 14, 0),
    "a flush owed": ("worker", 12, 0),
    "a flush owed, and a line": ("demand", 25, 0),
}
WRITES = {
    "append_messages",
    "start_turn",
    "cache_token_counts",
    "claim_compaction",
    "flush_facts",
    "put_summary",
}
READS = {
    *("chats_due", "chats_adopted", "chats_unflushed", "chats_uncounted", "uncounted_messages"),
    *("compaction_plan", "compaction_source", "line_segments", "flush_source", "Learn", "Ask"),
}


@pytest.mark.parametrize(
    ("case", "jobs"), [(case, job) for case, (job, *_) in JOBS.items()], indirect=["jobs"]
)
def test_killed_between_any_two_steps_and_run_again_the_end_is_the_same(
    memory: pycontext.Database, fill: Fill, db: Connection, jobs: Jobs, case: str
) -> None:
    _, turns, piece = JOBS[case]
    if piece:
        in_pieces(db, piece)

    def prepare(chat_id: str) -> None:
        if turns:
            fill(chat_id, turns)
        if case.startswith("a flush owed"):
            memory.start_over(chat_id, "another matter")
        if case == "a flush owed, and a line":
            fill(chat_id, turns, first=turns + 1)

    prepare("whole")
    steps = jobs.do("whole")
    assert steps is not None
    expected = state(db, memory, "whole")
    assert set(steps) <= WRITES | READS
    lines = steps.count("put_summary")
    assert lines == 0 if case == "a flush owed" else lines > 1 if piece else lines == 1
    if case == "inside a turn":
        assert steps.index("put_summary") < len(steps) - 5, "the turn goes on"
    # of a turn's own, from the append that made it due
    first = max(steps.index("claim_compaction") - 5, 1) if case == "inside a turn" else 1
    for limit in range(first, len(steps)):
        if steps[limit - 1] in READS:
            continue  # it leaves what the step before it left
        chat_id = f"killed-{limit}"
        prepare(chat_id)
        assert jobs.do(chat_id, limit) is None
        if memory.thread(chat_id):
            assert memory.window(chat_id)
        db.execute("update pycontext.lease set expires_at = now() where holder is not null")
        assert jobs.do(chat_id) is not None
        assert state(db, memory, chat_id) == expected, (limit, steps[limit - 1])
        holders = "select holder from pycontext.lease where chat_id = %s"
        assert db.execute(holders, [chat_id]).fetchone() in (None, (None,))
