"""The built-in extractor and lexical recall over real conversations: what users stated is kept and found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pycontext
from pycontext import values
from pycontext.extractor import ExtractorRequest, Fact
from pycontext.extractor.rules import RuleExtractor
from pycontext.masking import mask
from pycontext.memory import Learn
from pycontext.summarizer import wording
from pycontext.summary import SourceMessage

pytestmark = pytest.mark.real

FILES = [
    "beam_100k",
    "memorybank_zh_en",
    "ru_multiwoz_long",
    "ru_arena_long",
    "tau_bench_airline_gpt4o",
    "pi_coding_agent_sessions",
    "llamafactory_toolcall_zh",
]


def every_conversation(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(folder.glob("*.jsonl")):
        for conversation in conversations(folder, file.stem):
            yield file.stem, conversation


def conversations(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    with (folder / f"{name}.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content or () if isinstance(part, dict))


def rows_of(conversation: dict[str, Any]) -> list[SourceMessage]:
    return [
        SourceMessage(n, f"m{n}", role=message["role"], text=mask(text_of(message.get("content"))))
        for n, message in enumerate(conversation["messages"], 1)
    ]


def take(rows: list[SourceMessage]) -> list[Fact]:
    return list(RuleExtractor().extract(ExtractorRequest(rows, len)).facts)


@pytest.mark.parametrize("name", FILES)
def test_values_that_users_stated_are_in_facts(shared_data: Path, name: str) -> None:
    stated = kept = 0
    for conversation in conversations(shared_data, name):
        rows = rows_of(conversation)
        facts = take(rows)
        assert take(rows) == facts
        users = {row.seq for row in rows if row.role == "user"}
        assert {fact.seq for fact in facts} <= users
        told: dict[int, str] = {}
        for fact in facts:
            told[fact.seq] = told.get(fact.seq, "") + "\n" + fact.content
        everything = "\n".join(told.values())
        for row in rows:
            text = wording.without_code(row.text)
            if row.role != "user" or len(text) > 1500 or _is_pasted(text):
                continue
            for value in values.find(text, 500):
                if value.is_strong:
                    stated += 1
                    kept += value.text in everything
    assert kept >= 0.99 * stated, f"{name}: {kept} of {stated}"


def _is_pasted(text: str) -> bool:
    """Code or a stack trace without a fence around it: more marks than a person writes."""
    return sum(text.count(mark) for mark in "{}();=<>\\") > len(text) / 60


def test_evidence_of_probes_is_recalled(shared_data: Path, dsn: str) -> None:
    """Questions about a past chat, asked in another one of the owner: is the evidence among the first ten?

    Lexical only; a question that needs several messages counts as found with one.
    """
    hits: dict[str, list[bool]] = {}
    with pycontext.connect(dsn) as database:
        for at, conversation in enumerate(conversations(shared_data, "beam_100k")):
            owner = f"owner {at}"
            past = database.create_chat(f"{at}/past", owner=owner)
            now = database.create_chat(f"{at}/now", owner=owner)
            said = [
                {"role": message["role"], "content": text_of(message["content"]) or "."}
                for message in conversation["messages"]
            ]
            stored = [row.seq for row in database.append(past, said)]
            for probe in conversation["probes"]:
                wanted = {stored[index] for index in probe["evidence_message_indexes"]}
                if wanted:
                    found = database.recall(now, probe["question"], max_rows=10, max_tokens=6000)
                    hits.setdefault(probe["kind"], []).append(any(row.seq in wanted for row in found))
    every = [hit for found in hits.values() for hit in found]
    share = {kind: f"{sum(found)} of {len(found)}" for kind, found in hits.items()}
    print(f"evidence recalled: {sum(every)} of {len(every)}", share)
    # the others (instructions, orders of events, summaries) share no words with what answers them
    kinds = ("contradiction_resolution", "information_extraction", "knowledge_update", "temporal_reasoning")
    plain = [hit for kind in kinds for hit in hits[kind]]
    assert sum(plain) >= 0.85 * len(plain), share


def test_no_fact_of_any_real_chat_is_refused(shared_data: Path) -> None:
    """One fact that can't be kept would refuse them all, and with them the summary."""
    files = set()
    for name, conversation in every_conversation(shared_data):
        rows = rows_of(conversation)
        answer = Learn(RuleExtractor(), ExtractorRequest(rows, len), 60).answer()
        assert answer.model == "rules"
        files.add(name)
    assert len(files) >= len(FILES)
