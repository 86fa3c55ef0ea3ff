"""The summarizer without a model over every real conversation: properties that hold for all of them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pycontext import values
from pycontext.summarizer import SummaryRequest, ledger
from pycontext.summarizer.extractive import ExtractiveSummarizer
from pycontext.summary import SourceMessage, Summary, merge, size, unfold, validate
from pycontext.tokens import count

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not DATA.is_dir(), reason="no real conversations in ../shared/data"),
]

FILES = sorted(path.name for path in DATA.glob("*.jsonl")) if DATA.is_dir() else ["none"]
PI = "pi_coding_agent_sessions.jsonl"


@cache
def conversations(file: str) -> list[dict[str, Any]]:
    with (DATA / file).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def text_of(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "[image]")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def rows_of(conversation: dict[str, Any]) -> list[SourceMessage]:
    """The rows a compaction of everything gets: the system prompt is no row, the newest request stays."""
    rows = [
        SourceMessage(
            seq=at,
            message_id=f"m{at}",
            role=message["role"],
            text=text_of(message.get("content")),
            tool_calls=message.get("tool_calls"),
            tool_call_id=message.get("tool_call_id"),
            name=message.get("name"),
        )
        for at, message in enumerate(conversation["messages"], 1)
        if message["role"] != "system"
    ]
    newest = max((row.seq for row in rows if row.role == "user"), default=0)
    return [replace(row, is_request=True) if row.seq == newest else row for row in rows]


def summarize(rows: list[SourceMessage], limit: int, previous: Summary | None = None) -> Summary:
    return ExtractiveSummarizer().summarize(SummaryRequest(rows, previous, limit, None, count)).segment


def passes(
    rows: list[SourceMessage], times: int, limit: int
) -> Iterator[tuple[list[SourceMessage], Summary]]:
    """The rows cut into `times` ranges, each summarized from originals and merged into what came before."""
    live: Summary | None = None
    step = -(-len(rows) // times)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        live = merge(live, summarize(part, limit, live), limit, count)
        yield part, live


def written(rows: list[SourceMessage]) -> set[str]:
    """Files whose new text was in a call's arguments, found without the code under test."""
    found = set()
    for row in rows:
        for call in row.tool_calls or ():
            arguments = json.loads(call["function"]["arguments"])
            if {"content", "newText", "file_text", "new_str"} & arguments.keys():
                found.add(arguments["path"])
    return found


def share(text: str, pattern: str) -> float:
    letters = sum(ch.isalpha() for ch in text) or 1
    return len(re.findall(pattern, text)) / letters


@pytest.mark.parametrize("limit", [200, 1000])
@pytest.mark.parametrize("file", FILES)
def test_every_conversation(file: str, limit: int) -> None:
    for conversation in conversations(file):
        rows = rows_of(conversation)
        if not any(row.is_told for row in rows):
            continue
        started = time.process_time()
        summary = summarize(rows, limit)
        assert time.process_time() - started < 5
        assert validate(summary, limit, count) is None
        assert summary == summarize(rows, limit), "deterministic"
        told = "\n".join(summary.texts())
        assert "#" in told
        for seq in map(int, re.findall(r"^#(\d+)", told, re.MULTILINE)):
            row = next(row for row in rows if row.seq == seq)
            assert row.is_told


@pytest.mark.parametrize("file", FILES)
def test_a_long_conversation_makes_a_dense_summary(file: str) -> None:
    for conversation in conversations(file):
        rows = [row for row in rows_of(conversation) if row.is_told]
        if sum(len(row.text) for row in rows) > 60_000:
            assert size(summarize(rows, 1000), count) > 500, conversation["id"]


def test_files_written_in_the_coding_session_are_named() -> None:
    rows = rows_of(conversations(PI)[0])
    files = written(rows)
    assert len(files) > 20
    told = "\n".join(unfold(summarize(rows, 1000).artifacts))
    named = {path for path in files if path in told}
    assert len(named) >= 0.95 * len(files), files - named


@pytest.mark.parametrize("times", [5, 12])
def test_files_are_still_named_after_many_passes(times: int) -> None:
    rows = rows_of(conversations(PI)[0])
    seen: set[str] = set()
    for part, live in passes(rows, times, 1000):
        seen |= written(part)
        assert size(live, count) <= 1000
        told = "\n".join(unfold(live.artifacts))
        named = {path for path in seen if path in told}
        assert len(named) >= 0.95 * len(seen), seen - named


def test_failed_and_aborted_calls_of_the_coding_session_are_told_as_such() -> None:
    rows = rows_of(conversations(PI)[0])
    calls = ledger.read(rows).calls
    aborted = [call for call in calls if call.result == "Command aborted"]
    assert aborted
    assert all(call.is_error for call in aborted)
    exits = [call for call in calls if re.search(r"exited with code [1-9]", (call.result or "")[-200:])]
    assert exits
    assert all(call.is_error and "exit" in call.outcome for call in exits)
    edits = [call for call in calls if (call.result or "").startswith("Successfully replaced")]
    assert edits
    assert not any(call.is_error for call in edits)


def test_values_that_users_stated_are_kept() -> None:
    """Colours of the coding session, user ids of the airline dialogues, whole where the limit allows."""
    rows = rows_of(conversations(PI)[0])
    stated = {
        value.text
        for row in rows
        if row.role == "user" and row.is_told and len(row.text) <= 400
        for value in values.find(row.text)
        if value.kind == "color"
    }
    assert len(stated) >= 3
    told = "\n".join(summarize(rows, 2000).texts())
    assert stated <= set(re.findall(r"#[0-9a-fA-F]{6}", told))
    for conversation in conversations("tau_bench_airline_gpt4o.jsonl"):
        rows = rows_of(conversation)
        said = "\n".join(row.text for row in rows if row.role == "user" and row.is_told)
        ids = set(re.findall(r"\b[a-z]+_[a-z]+_\d{4}\b", said))
        told = "\n".join(summarize(rows, 500).texts())
        assert all(one in told for one in ids), conversation["id"]


def test_reference_numbers_of_the_russian_chat_survive_its_passes() -> None:
    conversation = conversations("ru_multiwoz_long.jsonl")[0]
    facts = {fact["message_index"] + 1: fact["value"] for fact in conversation["facts"]}
    rows = rows_of(conversation)
    seen: set[str] = set()
    for part, live in passes(rows, 8, 4000):
        seen |= {facts[row.seq] for row in part if row.seq in facts and row.is_told}
        told = "\n".join(live.texts())
        kept = {value for value in seen if value in told}
        assert len(kept) >= 0.95 * len(seen), seen - kept
    assert len(seen) > 30


@pytest.mark.parametrize(
    ("file", "script"),
    [
        ("ru_multiwoz_long.jsonl", "[а-яё]"),
        ("ru_arena_long.jsonl", "[а-яё]"),
        ("memorybank_zh_en.jsonl", "[\u4e00-\u9fff]"),
        ("llamafactory_toolcall_zh.jsonl", "[\u4e00-\u9fff]"),
    ],
)
def test_the_language_of_the_chat_is_kept(file: str, script: str) -> None:
    """A summary is as much in the script of its chat as the chat is, and no other labels creep in."""
    for conversation in conversations(file):
        rows = rows_of(conversation)
        spoken = " ".join(row.text for row in rows if row.role in ("user", "assistant") and row.is_told)
        summary = summarize(rows, 800) if any(row.is_told for row in rows) else Summary()
        told = " ".join((*summary.resolved, *summary.decisions, *summary.facts, summary.active_task or ""))
        if not told or not spoken:
            continue
        of_chat, of_told = share(spoken.lower(), script), share(told.lower(), script)
        if of_chat > 0.8:
            assert of_told > 0.5, (conversation["id"], told)
            assert "asked" not in told.split('"')[0]
        elif of_chat < 0.05:
            assert of_told < 0.2, (conversation["id"], told)


def test_what_users_of_the_chinese_chats_named_is_kept() -> None:
    """Titles in 《》 are how these chats name books and films: exact, and asked for later."""
    kept = total = 0
    for conversation in conversations("memorybank_zh_en.jsonl"):
        rows = rows_of(conversation)
        titles = set(
            re.findall(
                r"《[^》]{1,30}》", " ".join(row.text for row in rows if row.role == "user" and row.is_told)
            )
        )
        told = "\n".join(summarize(rows, 1500).texts())
        kept += sum(title in told for title in titles)
        total += len(titles)
    assert total > 10
    assert kept >= 0.9 * total, (kept, total)
