"""A real coding session, turn by turn, compacted as it goes: no thrash, and a window that always fits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pycontext
from pycontext.importer import Conversation, read_conversations
from pycontext.summarizer.extractive import ExtractiveSummarizer

pytestmark = pytest.mark.real

Connection = psycopg.Connection[Any]
PASSES = """
    select h.outcome, h.saved_tokens, h.token_budget, h.reason from pycontext.compaction_history h
    where h.chat_id = 'a' order by h.pass_no
"""
MESSAGES = 900


def session(folder: Path) -> Conversation:
    path = folder / "pi_coding_agent_sessions.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path.name}")
    with path.open("rb") as lines:
        found = next(iter(read_conversations(lines, default_id="a")))
    assert isinstance(found, Conversation)
    return found


@pytest.mark.parametrize("budget", [8000, 32000])
def test_a_coding_session_is_never_compacted_twice_in_vain(
    dsn: str, db: Connection, shared_data: Path, budget: int
) -> None:
    turns: list[list[dict[str, Any]]] = []
    for message in session(shared_data).messages[:MESSAGES]:
        if message["role"] == "user" or not turns:
            turns.append([])
        turns[-1].append(dict(message))
    with pycontext.connect(dsn, summarizer=ExtractiveSummarizer()) as memory:
        for first, *rest in turns:
            with memory.turn("a", first, token_budget=budget) as turn:
                assert turn.window_tokens <= budget
                turn.add(rest)
                assert turn.window_tokens <= budget
        memory.compact("a", budget)
        unchanged = memory.messages("a", budget)
        assert memory.compact("a", budget).outcome == "skipped", "an unchanged chat"
        assert memory.messages("a", budget) == unchanged
    passes = db.execute(PASSES.encode()).fetchall()
    stored = [saved / limit for outcome, saved, limit, _ in passes if outcome in ("summarized", "pruned")]
    assert stored
    assert not [outcome for outcome, *_ in passes if outcome == "failed"], passes
    mean = sum(stored) / len(stored)
    print(f"{budget} tokens: {len(turns)} turns, {len(stored)} passes, saving {mean:.0%} of it on average")
    assert [both for both in pairwise(stored) if max(both) < 0.1] == []
