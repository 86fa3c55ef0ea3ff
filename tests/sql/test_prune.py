"""The pass without a model: old results, long arguments and images in one line each, in steps, logged."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

pytestmark = pytest.mark.core

Connection = psycopg.Connection[Any]


def agent_turns(db: Connection, chat: str, turns: int, *, size: int = 3000) -> None:
    """Turns of an agent: a request, a call with long arguments, its long result, an answer."""
    for turn in range(turns):
        call = {
            "id": f"c{turn}",
            "type": "function",
            "function": {
                "name": "write_file",
                "arguments": json.dumps(
                    {"path": f"src/mod{turn}.py", "content": f"value = {turn}\n" * (size // 12)}
                ),
            },
        }
        rows = [
            {"role": "user", "content": f"make module {turn}"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {
                "role": "tool",
                "tool_call_id": f"c{turn}",
                "content": f"wrote mod{turn}\n" + "line of output\n" * (size // 15),
            },
            {"role": "assistant", "content": f"module {turn} is written"},
        ]
        db.execute("select from pycontext.append_messages(%s, %s)", (chat, json.dumps(rows)))


def window(db: Connection, chat: str, budget: int) -> list[tuple[Any, ...]]:
    return db.execute(
        "select seq, role, content, tool_calls, tokens, is_shortened from pycontext.working_window(%s, %s)",
        (chat, budget),
    ).fetchall()


def plan(db: Connection, chat: str, budget: int) -> tuple[str, int, int]:
    row = db.execute(
        "select decision, window_tokens, prune_tokens from pycontext.compaction_plan(%s, %s)", (chat, budget)
    ).fetchone()
    assert row is not None
    return row


@pytest.fixture
def chat(db: Connection) -> str:
    db.execute("select pycontext.create_chat('p', 'You write modules.')")
    agent_turns(db, "p", 8)
    return "p"


def test_a_pass_shortens_only_tool_output_and_arguments_and_keeps_the_tail(db: Connection, chat: str) -> None:
    budget = 14000
    before = {row[0]: row for row in window(db, chat, 100000)}
    assert plan(db, chat, budget)[0] == "prune"
    done = db.execute(
        "select outcome, tokens_before, tokens_after, to_seq from pycontext.prune_chat(%s, %s)",
        (chat, budget),
    )
    outcome, tokens_before, tokens_after, to_seq = done.fetchone()  # type: ignore[misc]
    after = window(db, chat, budget)
    assert outcome == "pruned"
    assert tokens_before - tokens_after >= budget / 10
    assert 3 + sum(row[4] for row in after) <= tokens_after  # what the pass log says is what is sent
    assert {row[0] for row in after} == set(before), "nothing is left out"
    for seq, role, content, calls, _, is_shortened in after:
        same = (role, content, calls) == before[seq][1:4]
        assert same or is_shortened
        if seq is not None and seq > to_seq:
            assert same, "after the border all is whole"
        if role == "user":
            assert same, "a user's text is never disposable"
        if is_shortened and role == "tool":
            assert f"#{seq}" in content
            assert "write_file src/mod" in content
        if is_shortened and calls:
            arguments = json.loads(calls[0]["function"]["arguments"])
            assert arguments["path"].startswith("src/mod")
            assert f"#{seq}" in arguments["content"]
    assert sum(row[5] for row in after) >= 6


def test_between_passes_the_prefix_stands_still(db: Connection, chat: str) -> None:
    db.execute("select from pycontext.prune_chat(%s, 14000)", (chat,))
    act = db.execute("select act_no from pycontext.chat where chat_id = %s", (chat,)).fetchone()
    before = [row[:4] for row in window(db, chat, 14000)]
    db.execute("select from pycontext.append_message(%s, 'user', 'and now?')", (chat,))
    after = [row[:4] for row in window(db, chat, 14000)]
    assert after[: len(before)] == before
    assert db.execute("select act_no from pycontext.chat where chat_id = %s", (chat,)).fetchone() == act


def test_a_small_win_is_not_worth_a_pass(db: Connection, chat: str) -> None:
    assert db.execute("select (pycontext.prune_chat(%s, 14000)).outcome", (chat,)).fetchone() == ("pruned",)
    assert db.execute("select (pycontext.prune_chat(%s, 14000)).outcome", (chat,)).fetchone() == (None,)
    passes = db.execute("select count(*) from pycontext.pass where chat_id = %s", (chat,)).fetchone()
    assert passes == (1,)


def test_a_gain_of_less_than_a_tenth_of_the_budget_is_left_alone(db: Connection) -> None:
    db.execute("select pycontext.create_chat('q')")
    talk = [{"role": ("user", "assistant")[n % 2], "content": f"word {n} " * 150} for n in range(40)]
    db.execute("select from pycontext.append_messages('q', %s)", (json.dumps(talk[:2]),))
    agent_turns(db, "q", 1, size=1200)
    db.execute("select from pycontext.append_messages('q', %s)", (json.dumps(talk[2:]),))
    gain = plan(db, "q", 10000)[2]
    assert 0 < gain < 1000
    assert db.execute("select (pycontext.prune_chat('q', 10000)).outcome").fetchone() == (None,)
    assert db.execute("select count(*) from pycontext.act where chat_id = 'q'").fetchone() == (0,)


def test_the_pass_is_an_act_and_can_be_replayed(db: Connection, chat: str) -> None:
    newest = db.execute(
        "select message_id from pycontext.message where chat_id = %s order by seq desc limit 1", (chat,)
    )
    (message_id,) = newest.fetchone()  # type: ignore[misc]
    before = window(db, chat, 30000)
    db.execute("select from pycontext.prune_chat(%s, 14000)", (chat,))
    assert window(db, chat, 30000) != before
    replayed = db.execute(
        "select seq, role, content, tool_calls, tokens, is_shortened"
        " from pycontext.working_window(%s, 30000, %s)",
        (chat, message_id),
    ).fetchall()
    assert replayed == before


def test_start_turn_runs_the_pass_itself(db: Connection, chat: str) -> None:
    row = db.execute(
        "select decision, window_tokens, is_degraded from pycontext.start_turn(%s, '\"go on\"', 14000)",
        (chat,),
    ).fetchone()
    assert row is not None
    decision, tokens, is_degraded = row
    assert decision == "prune"
    assert tokens <= 0.9 * 0.75 * 14000
    assert any(row[5] for row in window(db, chat, 14000))
    assert is_degraded is False, "what the pass settled is no emergency"
    status = db.execute("select is_degraded from pycontext.window_status(%s)", (chat,)).fetchone()
    assert status == (False,)
    cut = db.execute("select is_degraded from pycontext.start_turn(%s, null, 1200)", (chat,)).fetchone()
    assert cut == (True,)
    assert db.execute("select outcome from pycontext.pass where chat_id = %s", (chat,)).fetchall() == [
        ("pruned",)
    ]


def test_a_line_goes_past_the_pruned_part(db: Connection, chat: str) -> None:
    db.execute("select from pycontext.prune_chat(%s, 14000)", (chat,))
    agent_turns(db, chat, 4)
    budget = 8000
    after = db.execute(
        "select after_message_id from pycontext.compaction_plan(%s, %s)", (chat, budget)
    ).fetchone()
    assert after is not None
    db.execute(
        "select from pycontext.put_summary(%s, %s, %s, token_budget => %s)",
        (chat, after[0], json.dumps({"resolved": ["modules 0 to 9 were written"]}), budget),
    )
    rows = window(db, chat, budget)
    assert 3 + sum(row[4] for row in rows) <= budget
    assert not any(row[5] for row in rows)
    assert plan(db, chat, budget)[1] == 3 + sum(row[4] for row in rows)


def test_a_line_over_pruned_rows_replaces_what_is_shown_of_them(db: Connection) -> None:
    db.execute("select pycontext.create_chat('q')")
    agent_turns(db, "q", 20)
    db.execute("select from pycontext.prune_chat('q', 20000)")
    before = sum(row[4] for row in window(db, "q", 100000))
    place = db.execute("select t.message_id from pycontext.thread('q', max_rows => 100) t where t.seq = 16")
    (after,) = place.fetchone()  # type: ignore[misc]
    refused = []
    for words in (1200, 600, 300, 120, 40):
        try:
            summary = json.dumps({"notes": "word " * words})
            db.execute("select from pycontext.put_summary('q', %s, %s)", (after, summary))
            break
        except psycopg.Error as error:
            refused.append(error.sqlstate)
    assert refused == ["PCX07"] * 2
    assert sum(row[4] for row in window(db, "q", 100000)) < before


def test_the_plan_counts_the_images_of_the_request_that_the_pass_kept(db: Connection) -> None:
    pixel = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    db.execute("select pycontext.create_chat('i')")
    agent_turns(db, "i", 2)
    asked = [{"role": "user", "content": [{"type": "text", "text": "like this"}, pixel]}]
    db.execute("select from pycontext.append_messages('i', %s)", (json.dumps(asked),))
    for n in range(8):  # the request is old when the pass comes
        answer = [{"role": "assistant", "content": f"step {n} " + "of the work " * 40}]
        db.execute("select from pycontext.append_messages('i', %s)", (json.dumps(answer),))
    done = db.execute("select outcome, to_seq from pycontext.prune_chat('i', 5000)").fetchone()
    assert done is not None
    assert done[0] == "pruned"
    assert done[1] >= 9
    shown = window(db, "i", 100000)
    assert any("image_url" in json.dumps(row[1:3]) for row in shown if row[0] == 9)
    assert plan(db, "i", 100000)[1] == 3 + sum(row[4] for row in shown)


def test_old_images_are_told_in_words_and_newer_ones_stay(db: Connection) -> None:
    """Of a user's message only the picture goes, never a word."""
    db.execute("select pycontext.create_chat('i')")
    pixel = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    for turn in range(16):
        parts = [{"type": "text", "text": f"picture {turn}, взгляни"}, pixel]
        rows = [{"role": "user", "content": parts}, {"role": "assistant", "content": f"I see {turn}."}]
        db.execute("select from pycontext.append_messages('i', %s)", (json.dumps(rows),))
    assert plan(db, "i", 20000)[0] == "prune"
    done = db.execute("select outcome, to_seq from pycontext.prune_chat('i', 20000)").fetchone()
    assert done is not None
    assert done[0] == "pruned"
    seen = {row[0]: json.dumps(row[2], ensure_ascii=False) for row in window(db, "i", 20000)}
    for turn in range(16):
        assert f"picture {turn}, взгляни" in seen[2 * turn + 1]
    whole = [seq for seq, text in seen.items() if "base64" in text]
    request = max(seq for seq in range(1, 32, 2) if seq <= done[1])
    assert whole == [1, *range(request, 32, 2)], "the head, and from the newest request before the border on"
    assert all(f"[image left out; #{seq}]" in seen[seq] for seq in range(3, request, 2))
    assert 1 < request < 25


def test_passes_that_save_little_are_not_repeated_until_the_chat_has_grown(db: Connection) -> None:
    """Judged by what recent passes freed, before anything is paid; and said, not silent."""
    db.execute("select pycontext.create_chat('t', profile => 'small-8k')")

    def talk(turns: int) -> None:
        rows = [
            {"role": role, "content": "word " * 200} for _ in range(turns) for role in ("user", "assistant")
        ]
        db.execute("select from pycontext.append_messages('t', %s)", (json.dumps(rows),))

    talk(16)
    decided = "select decision, reason from pycontext.compaction_plan('t')"
    assert db.execute(decided).fetchone()[0] == "summarize"  # type: ignore[index]
    db.execute("""
        insert into pycontext.pass
            (chat_id, pass_no, at_seq, outcome, token_budget, tokens_before, tokens_after)
        select 't', n, 32, outcome, 6000, 6000, 6000 - saved
        from (values (1, 'pruned', 300), (2, 'summarized', 200)) v (n, outcome, saved)
    """)
    decision, reason = db.execute(decided).fetchone()  # type: ignore[misc]
    assert decision == "skip"
    assert "the last two passes freed only 300 and 200 tokens" in reason
    talk(2)
    assert db.execute(decided).fetchone()[0] == "summarize"  # type: ignore[index]


LOG = "".join(f"step {n} of the build went well\n" for n in range(120)) + "exit code 0"


def runs(db: Connection, chat: str, *results: tuple[str, str]) -> None:
    """A turn for each (tool, result)."""
    for tool, text in results:
        (n,) = db.execute("select last_seq from pycontext.chat where chat_id = %s", (chat,)).fetchone()  # type: ignore[misc]
        call = {
            "id": f"c{n}",
            "type": "function",
            "function": {"name": tool, "arguments": '{"path": "a.py"}'},
        }
        rows = [
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{n}", "content": text},
        ]
        db.execute("select from pycontext.append_messages(%s, %s)", (chat, json.dumps(rows)))


def results(db: Connection, chat: str, budget: int = 100000, as_of: str | None = None) -> dict[int, str]:
    rows = db.execute(
        "select seq, content #>> '{}' from pycontext.working_window(%s, %s, %s) where role = 'tool'",
        (chat, budget, as_of),
    )
    return dict(rows.fetchall())


def newest(db: Connection, chat: str) -> str:
    row = db.execute(
        "select message_id from pycontext.message where chat_id = %s order by seq desc limit 1", (chat,)
    ).fetchone()
    return row[0]  # type: ignore[index,no-any-return]


def test_a_result_that_came_before_is_told_by_its_place(db: Connection) -> None:
    """Twice, thrice, by another tool, across the border: once in words, each with its own number."""
    db.execute("select pycontext.create_chat('r')")
    other = LOG.replace("build", "tests")
    runs(db, "r", ("build", "ok"), ("build", LOG), ("look", other), ("build", LOG), ("see", LOG))
    runs(db, "r", ("build", other), *[("build", LOG.replace("step", f"s{n}")) for n in range(4)])
    runs(db, "r", ("build", LOG), ("build", "ok"))
    whole = results(db, "r")
    before, at = whole, newest(db, "r")
    (to_seq,) = db.execute("select to_seq from pycontext.prune_chat('r', 16000)").fetchone()  # type: ignore[misc]
    told = results(db, "r", 16000)
    assert 18 <= to_seq < 33
    assert f"{len(LOG)} characters, 121 lines, exit 0, " in told[6]
    for seq in (12, 15):
        tool = "build" if seq == 12 else "see"
        assert told[seq] == (
            f"[{tool} a.py: {len(LOG)} characters, exit 0, the same as #6; shortened, full text is #{seq}]"
        )
    assert "the same as #9;" in told[18]
    assert "the same as" not in told[6] + told[9]
    assert told[33] == LOG, "after the border it is whole"
    assert sum(len(told[seq]) for seq in (12, 15)) < len(told[6]) + 90
    # what a row reads like depends on nothing that came after it, and a replay is of its day
    runs(db, "r", ("build", LOG), ("look", other))
    after = results(db, "r", 16000)
    assert {seq: after[seq] for seq in told} == told
    assert results(db, "r", as_of=at) == before
    for seq, text in whole.items():
        original = db.execute("select content #>> '{}' from pycontext.message_original('r', %s)", (seq,))
        assert original.fetchone() == (text,)


def test_what_a_line_or_a_reset_took_away_is_not_cited(db: Connection) -> None:
    for kind in ("line", "reset", "redacted", "rewound"):
        db.execute("select pycontext.create_chat(%s)", (kind,))
        runs(db, kind, ("build", "ok"))
        kept = newest(db, kind)
        runs(db, kind, ("build", LOG))
        if kind == "line":
            db.execute(
                "select pycontext.put_summary(%s, %s, %s)",
                (kind, newest(db, kind), '{"notes": "it was built"}'),
            )
        elif kind == "reset":
            db.execute("select pycontext.start_over(%s)", (kind,))
        elif kind == "redacted":
            db.execute("select pycontext.redact_message(%s, %s)", (kind, newest(db, kind)))
        else:
            db.execute("select pycontext.rewind_chat(%s, %s)", (kind, kept))
        runs(db, kind, ("build", LOG), ("build", LOG))
        stubs = db.execute(
            "select seq, stub from pycontext.message where chat_id = %s and stub is not null and line_no = 0"
            " and gone_act is null order by seq desc limit 2",
            (kind,),
        ).fetchall()
        (_, told), (first, whole) = stubs
        assert f"the same as #{first};" in told, kind
        assert "lines" in whole, kind


def test_a_result_that_is_not_worth_another_form_is_told_by_its_place_the_second_time(db: Connection) -> None:
    db.execute("select pycontext.create_chat('s')")
    text = "three of these orders were never paid: QX-1, QX-2 and QX-3; " * 3
    runs(db, "s", ("build", text), ("build", text))
    found = db.execute("select seq, stub from pycontext.message where role = 'tool' order by seq").fetchall()
    assert found[0][1] is None
    assert "the same as #3;" in found[1][1]


def test_near_the_budget_a_summary_that_frees_a_tenth_is_worth_it(db: Connection) -> None:
    """Elsewhere it frees a quarter. Over the budget, what is left out breaks the prefix as a pass does."""
    seen = set()
    for rules in (50, 200):
        chat = f"n{rules}"
        db.execute("select pycontext.create_chat(%s, %s)", (chat, "You know the rules. " * rules))
        for n in range(12):
            talk = [
                {"role": "user", "content": f"question {n} " * 150},
                {"role": "assistant", "content": f"{n}, that is "},
            ]
            db.execute("select from pycontext.append_messages(%s, %s)", (chat, json.dumps(talk)))
            row = db.execute(
                "select decision, window_tokens, window_tokens - expected_tokens"
                " from pycontext.compaction_plan(%s, 8000)",
                (chat,),
            ).fetchone()
            assert row is not None
            decision, tokens, freed = row
            if tokens > 6000 and freed is not None:
                share = "none" if freed < 800 else "little" if freed < 2000 else "much"
                is_near = tokens > 7200
                assert (decision == "summarize") == (share == "much" or (share == "little" and is_near)), row
                seen.add((share, is_near))
    assert seen >= {("little", False), ("little", True)}, seen
