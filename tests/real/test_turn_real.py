"""A long real agent session as one turn: at every step what a fresh process reads, in every form."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import validators
from test_window_real import conversations

import pycontext
from pycontext.summarizer.extractive import ExtractiveSummarizer

pytestmark = pytest.mark.real

VALID = {
    "messages": validators.openai_chat,
    "responses_input": validators.openai_responses,
    "anthropic": validators.anthropic,
}
STEPS = 120


def agent_session(folder: Path) -> tuple[str | None, list[dict[str, Any]]]:
    """The longest run of calls and results after one request, as one turn."""
    best: tuple[str | None, list[dict[str, Any]]] = (None, [])
    for name in ("openhands_sdk_fixtures", "pi_coding_agent_sessions", "swe_agent_demos"):
        for prompt, rows in conversations(folder, name):
            starts = [at for at, row in enumerate(rows) if row["role"] == "user"] + [len(rows)]
            for start, end in itertools.pairwise(starts):
                if end - start > len(best[1]):
                    best = (prompt, rows[start:end])
    return best


def marked(request: dict[str, Any]) -> set[str]:
    """The prefixes that end on a cache mark, without marks."""
    plain = [
        [{k: v for k, v in block.items() if k != "cache_control"} for block in row["content"]]
        for row in request["messages"]
    ]
    return {
        json.dumps([plain[:at], plain[at][: block + 1]])
        for at, row in enumerate(request["messages"])
        for block, given in enumerate(row["content"])
        if "cache_control" in given
    }


def test_a_real_session_reads_the_same_in_process_and_afresh(shared_data: Path, dsn: str) -> None:
    prompt, rows = agent_session(shared_data)
    request, steps = rows[0]["content"], rows[1 : STEPS + 1]
    assert len(steps) > 60
    moved = kept = compared = 0
    with (
        pycontext.connect(dsn, summarizer=ExtractiveSummarizer()) as memory,
        pycontext.connect(dsn) as other,
        memory.turn("a", request, system_prompt=prompt, profile="small-8k", format="all") as turn,
    ):
        before, act = marked(turn.anthropic), memory.status("a").act_no
        for step in steps:
            turn.add(step)
            with other.turn("a", compact="off", format="all") as fresh:
                for form, check in VALID.items():
                    found = getattr(turn, form)
                    assert json.dumps(found) == json.dumps(getattr(fresh, form))
                    check(found)
            assert turn.window_tokens <= turn.token_budget
            assert json.dumps(turn.messages).count(json.dumps(request)[1:60]) >= 1
            marks, now = marked(turn.anthropic), memory.status("a")
            moved += now.act_no != act  # by a line, or by a pruning pass
            if now.act_no == act and not now.is_degraded:
                compared += 1
                kept += bool(marks & before)
            before, act = marks, now.act_no
    print(f"{len(steps)} steps, moved by {moved} passes, marks kept in {kept} of {compared} requests")
    assert moved > 1
    assert kept == compared > 40
