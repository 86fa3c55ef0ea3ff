"""Real sessions at one chat: what one has open the others wait for, and nothing is lost or doubled."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

Connection = psycopg.Connection[Any]
Row = dict[str, Any]
Open = Callable[[], Connection]

MORE = " ".join(["the parcel left hub B and nobody was at home"] * 12)


def act(db: Connection, call: str, *values: Any) -> list[Row]:
    """Rows of a function."""
    with db.cursor(row_factory=dict_row) as cursor:
        cursor.execute(f"select * from pycontext.{call}".encode(), values)
        return cursor.fetchall()


def one(db: Connection, query: str) -> Any:
    record = db.execute(query.encode()).fetchone()
    assert record is not None
    return record[0]


def append(db: Connection, name: str, text: str = MORE, role: str = "user") -> Row:
    return act(db, "append_message('c', %s, %s::text, message_id => %s)", role, text, name)[0]


def put(db: Connection, after: str, edit_no: int | None = None, fact: str = "so it was") -> Row:
    return act(db, "put_summary('c', %s, %s, null, %s)", after, json.dumps({"facts": [fact]}), edit_no)[0]


def seqs(db: Connection) -> list[int]:
    query = "select seq from pycontext.message where chat_id = 'c' and line_no = 0 order by seq"
    return [row[0] for row in db.execute(query.encode())]


@pytest.fixture
def opened(dsn: str) -> Iterator[Open]:
    """Opens sessions of their own, each in autocommit."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(psycopg.connect(dsn, autocommit=True))


@pytest.fixture
def c(db: Connection) -> Connection:
    """A chat `c` of eight rows, m1 … m8."""
    act(db, "create_chat('c', 'Be brief.')")
    for n in range(1, 9):
        append(db, f"m{n}", f"{n}: {MORE}", "assistant" if n % 2 == 0 else "user")
    return db


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(24) as made:
        yield made


def at_once(
    pool: ThreadPoolExecutor, opened: Open, count: int, work: Callable[[Connection, int], Any]
) -> list[Any]:
    """The work in so many sessions, all let go at the same moment; what each returned or raised."""
    barrier = threading.Barrier(count)
    sessions = [opened() for _ in range(count)]

    def run(n: int) -> Any:
        barrier.wait(30)
        try:
            return work(sessions[n], n)
        except psycopg.Error as error:
            return error

    return list(pool.map(run, range(count)))


def waiting(watch: Connection, session: Connection, work: Future[Any]) -> None:
    """Returns once that session waits for a lock that another one holds."""
    pid = session.info.backend_pid
    for _ in range(3000):
        if work.done():
            raise AssertionError(f"it did not wait: {work.exception() or work.result()}")
        if watch.execute("select cardinality(pg_blocking_pids(%s)) > 0", (pid,)).fetchone() == (True,):
            return
        time.sleep(0.01)
    raise AssertionError("it neither waited nor ended")


# Appends


def test_appends_from_many_sessions_have_no_gap_and_no_double(
    c: Connection, opened: Open, pool: ThreadPoolExecutor
) -> None:
    seen: list[tuple[int, int]] = []
    done = threading.Event()

    def watch(session: Connection) -> None:
        while not done.is_set():
            record = session.execute("select count(*), max(seq) from pycontext.message").fetchone()
            assert record is not None
            seen.append(record)

    watcher = pool.submit(watch, opened())
    made = at_once(
        pool, opened, 8, lambda db, n: [append(db, f"s{n}-{k}", f"{n} {k}")["seq"] for k in range(20)]
    )
    done.set()
    watcher.result()
    taken = [seq for own in made for seq in own]
    assert sorted(taken) == list(range(9, 169))
    assert all(own == sorted(own) for own in made)
    assert seqs(c) == list(range(1, 169))
    assert all(rows == highest for rows, highest in seen), "a row was seen before one of a smaller seq"
    wrong = """
        select count(*) from (
            select running_total, sum(frozen_tokens) over (order by seq) as total from pycontext.message) m
        where running_total <> total
        """
    assert one(c, wrong) == 0
    newest = one(c, "select max(running_total) from pycontext.message")
    assert one(c, "select total_tokens from pycontext.chat") == newest


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_an_append_waits_for_the_one_that_is_open(
    c: Connection, opened: Open, pool: ThreadPoolExecutor, ends: str
) -> None:
    first, second = opened(), opened()
    first.autocommit = False
    append(first, "first")
    later = pool.submit(append, second, "second")
    waiting(c, second, later)
    assert seqs(c) == list(range(1, 9))
    plan = act(c, "compaction_plan('c')")[0]
    assert (plan["to_seq"] or 0) <= 8
    getattr(first, ends)()
    assert later.result(30)["seq"] == (10 if ends == "commit" else 9)
    assert seqs(c) == list(range(1, 11 if ends == "commit" else 10))


def test_one_message_id_from_many_sessions_is_one_row(
    c: Connection, opened: Open, pool: ThreadPoolExecutor
) -> None:
    made = at_once(pool, opened, 10, lambda db, n: append(db, "same"))
    assert {row["seq"] for row in made} == {9}
    other = at_once(pool, opened, 6, lambda db, n: append(db, "differs", f"body {n}"))
    assert sorted(getattr(row, "sqlstate", "stored") for row in other) == ["PCX03"] * 5 + ["stored"]
    assert seqs(c) == list(range(1, 11))


def test_a_chat_made_by_many_sessions_is_one(db: Connection, opened: Open, pool: ThreadPoolExecutor) -> None:
    made = at_once(
        pool, opened, 12, lambda s, n: (act(s, "create_chat('c', %s)", f"prompt {n}"), append(s, f"m{n}"))
    )
    assert not [row for row in made if isinstance(row, psycopg.Error)]
    assert one(db, "select count(*) from pycontext.prompt") == 1
    assert seqs(db) == list(range(1, 13))


def test_a_repeatable_read_caller_is_told_to_try_again(c: Connection, opened: Open) -> None:
    caller = opened()
    caller.autocommit = False
    caller.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    assert one(caller, "select count(*) from pycontext.message") == 8
    append(c, "meanwhile")
    with pytest.raises(psycopg.errors.SerializationFailure):
        append(caller, "mine")
    caller.rollback()
    assert append(caller, "mine")["seq"] == 10
    caller.commit()
    assert seqs(c) == list(range(1, 11))


@pytest.mark.parametrize(
    "call",
    [
        "rewind_chat('c', 'm6')", "redact_message('c', 'm3')", "pin_message('c', 'm3')", "start_over('c')",
        "set_system_prompt('c', 'x')", "drop_summary('c', %s)", "fork_chat('c', 'f')",
        "put_summary('c', 'm6', '{\"facts\": [\"x\"]}')", "set_chat_profile('c', 'long-1m')",
    ],
)  # fmt: skip
def test_an_act_of_a_repeatable_read_caller_is_whole_or_told_to_try_again(
    c: Connection, opened: Open, call: str
) -> None:
    values = [put(c, "m4")["message_id"]] if "%s" in call else []
    caller = opened()
    caller.autocommit = False
    caller.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    one(caller, "select count(*) from pycontext.message")
    append(c, "meanwhile")
    acts = one(c, "select count(*) from pycontext.act")
    with pytest.raises(psycopg.errors.SerializationFailure):
        act(caller, call, *values)
    caller.rollback()
    assert one(c, "select count(*) from pycontext.act") == acts
    act(caller, call, *values)
    caller.commit()


# Compaction and what happens meanwhile


def test_twenty_summaries_at_once_are_one_row(c: Connection, opened: Open, pool: ThreadPoolExecutor) -> None:
    made = at_once(pool, opened, 20, lambda db, n: put(db, "m6", fact=f"told by {n}"))
    assert {row["message_id"] for row in made} == {made[0]["message_id"]}
    assert {row["content"] for row in made} == {made[0]["content"]}
    assert one(c, "select count(*) from pycontext.message where line_no > 0") == 1
    assert one(c, "select count(*) from pycontext.act") == 1
    assert one(c, "select count(*) from pycontext.pass") == 1


def test_summaries_at_two_places_are_both_stored_and_the_furthest_counts(
    c: Connection, opened: Open, pool: ThreadPoolExecutor
) -> None:
    made = at_once(pool, opened, 8, lambda db, n: put(db, "m6" if n % 2 else "m4", fact=f"told by {n}"))
    assert len({row["message_id"] for row in made}) == 2
    assert one(c, "select line_seq from pycontext.chat") == 6
    assert [row["seq"] for row in act(c, "working_window('c')") if row["section"] == "tail"] == [7, 8]


EDITS = ["rewind_chat('c', 'm7')", "redact_message('c', 'm2')", "drop_summary('c', %s)"]
OTHERS = [
    "pin_message('c', 'm2')", "set_system_prompt('c', 'x')", "fork_chat('c', 'f', 'm3')",
    "set_chat_profile('c', 'long-1m')", "append_message('c', 'user', 'more')",
]  # fmt: skip


@pytest.mark.parametrize("call", [*EDITS, *OTHERS])
def test_what_happens_between_reading_and_storing(c: Connection, opened: Open, call: str) -> None:
    compactor = opened()
    line = put(c, "m4")["message_id"]
    read = act(compactor, "compaction_source('c', 'm6')")[0]["edit_no"]
    act(c, call, *([line] if "%s" in call else []))
    if call in OTHERS:
        assert put(compactor, "m6", read)["seq"] == 6
        return
    lines = one(c, "select count(*) from pycontext.message where line_no > 0")
    with pytest.raises(psycopg.Error, match="stale") as raised:
        put(compactor, "m6", read)
    assert raised.value.sqlstate == "PCX07"
    assert one(c, "select count(*) from pycontext.message where line_no > 0") == lines
    again = act(compactor, "compaction_source('c', 'm6')")[0]["edit_no"]
    assert put(compactor, "m6", again)["gone_act"] is None


def test_a_summary_of_a_chat_that_was_made_again_meanwhile_is_refused(c: Connection, opened: Open) -> None:
    compactor = opened()
    read = act(compactor, "compaction_source('c', 'm6')")[0]["edit_no"]
    act(c, "delete_chat('c')")
    act(c, "create_chat('c', 'Be brief.')")
    for n in range(1, 9):
        append(c, f"m{n}", f"other words {n}: {MORE}", "assistant" if n % 2 == 0 else "user")
    with pytest.raises(psycopg.Error, match="stale") as raised:
        put(compactor, "m6", read)
    assert raised.value.sqlstate == "PCX07"


@pytest.mark.parametrize("call", EDITS)
def test_a_summary_waits_for_an_edit_that_is_open(
    c: Connection, opened: Open, pool: ThreadPoolExecutor, call: str
) -> None:
    compactor, editor = opened(), opened()
    line = put(c, "m4")["message_id"]
    read = act(compactor, "compaction_source('c', 'm6')")[0]["edit_no"]
    editor.autocommit = False
    act(editor, call, *([line] if "%s" in call else []))
    storing = pool.submit(put, compactor, "m6", read)
    waiting(c, compactor, storing)
    editor.commit()
    error = storing.exception(30)
    assert isinstance(error, psycopg.Error)
    assert error.sqlstate == "PCX07"


def test_a_summary_stored_while_its_messages_are_set_aside_goes_with_them(
    c: Connection, opened: Open, pool: ThreadPoolExecutor
) -> None:
    compactor, editor = opened(), opened()
    compactor.autocommit = False
    line = put(compactor, "m6")
    rewinding = pool.submit(act, editor, "rewind_chat('c', 'm5')")
    waiting(c, editor, rewinding)
    compactor.commit()
    gone = [row["message_id"] for row in rewinding.result(30)]
    assert gone == ["m6", line["message_id"], "m7", "m8"]
    assert one(c, "select line_seq from pycontext.chat") is None


def test_a_secret_redacted_while_the_summary_is_stored_is_not_in_it(
    c: Connection, opened: Open, pool: ThreadPoolExecutor
) -> None:
    compactor, editor = opened(), opened()
    compactor.autocommit = False
    put(compactor, "m6", fact="zebra-7319")
    redacting = pool.submit(act, editor, "redact_message('c', 'm3')")
    waiting(c, editor, redacting)
    compactor.commit()
    redacting.result(30)
    assert "zebra" not in str(c.execute("select * from pycontext.message").fetchall())


def test_a_message_that_arrives_while_the_model_writes_is_after_the_line(c: Connection, opened: Open) -> None:
    compactor = opened()
    read = act(compactor, "compaction_source('c', 'm8')")[0]["edit_no"]
    append(c, "late", "late one")
    put(compactor, "m8", read)
    assert [row["content"] for row in act(c, "working_window('c')")][-1] == "late one"


# Acts at once


def test_a_rewind_takes_the_append_it_waited_for(
    c: Connection, opened: Open, pool: ThreadPoolExecutor
) -> None:
    writer, editor = opened(), opened()
    writer.autocommit = False
    append(writer, "late")
    rewinding = pool.submit(act, editor, "rewind_chat('c', 'm7')")
    waiting(c, editor, rewinding)
    writer.commit()
    assert [row["message_id"] for row in rewinding.result(30)] == ["m8", "late"]


def test_the_same_act_from_many_sessions_happens_once(
    c: Connection, opened: Open, pool: ThreadPoolExecutor
) -> None:
    def same(call: str, values: list[str], session: Connection, n: int) -> list[Row]:
        return act(session, call, *values)

    line = put(c, "m4")["message_id"]
    acts = one(c, "select act_no from pycontext.chat")
    for call, values in (
        ("pin_message('c', 'm7')", []),
        ("set_system_prompt('c', 'x')", []),
        ("redact_message('c', 'm2')", []),
        ("drop_summary('c', %s)", [line]),
        ("unpin_message('c', 'm7')", []),
        ("rewind_chat('c', 'm6')", []),
    ):
        made = at_once(pool, opened, 8, partial(same, call, values))
        assert not [row for row in made if isinstance(row, psycopg.Error)], call
        acts += 1
        assert one(c, "select act_no from pycontext.chat") == acts, call
    assert one(c, "select count(*) from pycontext.act") == acts
    made = at_once(pool, opened, 8, lambda db, n: act(db, "fork_chat('c', 'f', 'm5')")[0]["fork_chat"])
    assert made == ["f"] * 8
    assert one(c, "select count(*) from pycontext.message where chat_id = 'f'") == 5


def test_what_waits_for_a_deleted_chat_finds_none(
    c: Connection, opened: Open, pool: ThreadPoolExecutor
) -> None:
    killer, writer = opened(), opened()
    killer.autocommit = False
    act(killer, "delete_chat('c')")
    writing = pool.submit(append, writer, "late")
    waiting(c, writer, writing)
    killer.commit()
    error = writing.exception(30)
    assert isinstance(error, psycopg.Error)
    assert error.sqlstate == "PCX01"
    assert one(c, "select count(*) from pycontext.message") == 0


def test_owners_are_forgotten_while_their_chats_are_written(
    db: Connection, opened: Open, pool: ThreadPoolExecutor
) -> None:
    for n in range(6):
        act(db, "create_chat(%s, owner => 'ann')", f"c{n}")

    def work(session: Connection, n: int) -> Any:
        if n < 2:
            return act(session, "forget_owner('ann')")
        for k in range(10):
            act(session, "append_message(%s, 'user', %s::text)", f"c{n - 2}", f"said {k}")
        return None

    made = at_once(pool, opened, 8, work)
    states = {error.sqlstate for error in made if isinstance(error, psycopg.Error)}
    assert states <= {"PCX01"}, "no deadlock"
    act(db, "forget_owner('ann')")
    assert one(db, "select count(*) from pycontext.message") == 0


def test_random_acts_from_many_sessions_leave_the_figures_right(
    c: Connection, opened: Open, pool: ThreadPoolExecutor
) -> None:
    def work(session: Connection, n: int) -> None:
        for k in range(8):
            append(session, f"x{n}-{k}", MORE)
            if n == 0:
                act(session, "rewind_chat('c', 'm8')")
            elif n == 1:
                act(session, "redact_message('c', %s)", f"x{n}-{k}")
            elif n == 2 and k % 3 == 0:
                act(session, "pin_message('c', 'm8')")
                act(session, "unpin_message('c', 'm8')")

    made = at_once(pool, opened, 5, work)
    assert made == [None] * 5
    figures = "total_tokens, stub_total, live_tokens, excess_tokens, request_seq, last_unit, head_to, pins"
    before = c.execute(f"select {figures} from pycontext.chat".encode()).fetchone()
    c.execute("select pycontext._refresh_chat('c')")
    assert c.execute(f"select {figures} from pycontext.chat".encode()).fetchone() == before
    acts = [row[0] for row in c.execute("select act_no from pycontext.act order by act_no")]
    assert acts == list(range(1, len(acts) + 1))
    assert seqs(c) == list(range(1, 49))
