"""Replays long sessions turn by turn, as a stateless service would, and shows what became of them."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import pycontext
from pycontext import tokens
from pycontext.cli import show
from pycontext.cli.importing import import_conversation
from pycontext.cli.target import Target
from pycontext.cli.terminal import Failed, err, number, out, visible
from pycontext.importer import Conversation, ImportProblem, read_conversations
from pycontext.queries import query
from pycontext.summarizer import Summarizer, from_environment

_REAL = "pi_coding_agent_sessions.jsonl"
_REAL_BUDGET = 32_000
_THREAD_ROWS = 9
_SUMMARY_LINES = 30
_WINDOW_ROWS = 20
_SELECTED_ROWS = 12
_SMALLEST = 1500
"""Tokens that the prompt and the newest request of each conversation fit into."""


@dataclass(frozen=True)
class Turn:
    """A user's message and what followed it: replies, and the results of a reply's calls together."""

    message: dict[str, Any]
    steps: Sequence[list[dict[str, Any]]]


@dataclass
class Replay:
    """What a replay saw: how often the window was read, the largest it was, and the passes."""

    reads: int = 0
    largest: int = 0
    passes: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def saw(self, window_tokens: int) -> None:
        self.reads += 1
        self.largest = max(self.largest, window_tokens)


class Demo:
    """The demo on one database."""

    def __init__(
        self, target: Target, budget: int, data: Path | None = None, *, is_short: bool = False
    ) -> None:
        self._dsn = target.dsn
        self._is_embedded = target.data_dir is not None
        self._budget = budget
        self._data = data
        self._is_short = is_short
        self._summarizer: Summarizer = from_environment()

    def run(self) -> None:
        """Replay the demo's conversation, and the real session where it is; end in SQL."""
        out().print(f"summaries are made by: {self._made_by()}", style="bold")
        text = files("pycontext.demo").joinpath("conversation.jsonl").read_bytes()
        chat = self._replayed(_one(text), "demo-payout", self._budget)
        real = self._real_session()
        if real is not None:
            conversation = _one(real.read_bytes())
            imported = self._imported(conversation, "demo-coding-import")
            out().print(f"now the same {number(len(conversation.messages))} messages turn by turn:")
            self._replayed(conversation, "demo-coding", _REAL_BUDGET)
            out().print(f"(the whole import is still there to look at: pycontext thread {imported})")
        self._finish(chat)

    def _connect(self) -> psycopg.Connection[dict[str, Any]]:
        return psycopg.connect(self._dsn, autocommit=True, prepare_threshold=None, row_factory=dict_row)

    def _made_by(self) -> str:
        name = self._summarizer.name
        if os.environ.get("PYCONTEXT_SUMMARIZER_MODEL", "").strip():
            return visible(name)
        return f"{name} (built in, no model; set PYCONTEXT_SUMMARIZER_MODEL to use one)"

    def _real_session(self) -> Path | None:
        if self._is_short:
            return None
        if self._data is not None:
            if not (self._data / _REAL).is_file():
                raise Failed(f"no {_REAL} in {self._data}")
            return self._data / _REAL
        checkout = Path(pycontext.__file__).resolve().parent.parent
        for folder in (Path.cwd(), checkout):
            found = folder.parent / "shared" / "data" / _REAL
            if found.is_file():
                return found
        return None

    def _imported(self, conversation: Conversation, name: str) -> str:
        """Import the conversation whole, and read its window once before any compaction."""
        with self._connect() as conn:
            chat = _free_name(conn, name)
            _heading(f"{chat}: imported whole, then read at {number(_REAL_BUDGET)} tokens")
            started = time.monotonic()
            with pycontext.connect(connection=conn) as db:
                new = import_conversation(conn, db, _named(conversation, chat))
                took = time.monotonic() - started
                started = time.monotonic()
                rows = db.window(chat, _REAL_BUDGET)
                read = time.monotonic() - started
        used = show.window_tokens(rows)
        out().print(
            f"{number(new)} messages imported and counted in {took:.1f} s; "
            f"with no summary yet the window fits all the same: {number(used)} tokens in {read * 1000:.0f} ms"
        )
        return chat

    def _replayed(self, conversation: Conversation, name: str, budget: int) -> str:
        with self._connect() as conn:
            chat = _free_name(conn, name)
        turns = list(_turns(conversation.messages))
        _heading(
            f"{chat}: {number(len(conversation.messages))} messages in {number(len(turns))} turns, "
            f"a new connection each turn, {number(budget)} tokens"
        )
        replay = self._replay(chat, conversation.system_prompt, turns, budget)
        self._report(chat, conversation, turns, replay, budget)
        return chat

    def _replay(self, chat: str, prompt: str | None, turns: Sequence[Turn], budget: int) -> Replay:
        replay = Replay()
        started = time.monotonic()
        with _progress() as progress:
            task = progress.add_task(chat, total=len(turns))
            for turn in turns:
                # A fresh process would do no more than this: connect, one turn, disconnect.
                with pycontext.connect(self._dsn, summarizer=self._summarizer) as db:
                    message = dict(turn.message)
                    with db.turn(
                        chat,
                        message,
                        message_id=message["message_id"],
                        system_prompt=prompt,
                        token_budget=budget,
                    ) as current:
                        replay.saw(current.window_tokens)
                        for step in turn.steps:
                            current.add(step)
                            replay.saw(current.window_tokens)
                self._note_passes(chat, replay, current.seq or 0)
                progress.advance(task)
        replay.seconds = time.monotonic() - started
        return replay

    def _note_passes(self, chat: str, replay: Replay, turn_seq: int) -> None:
        """Print the passes that this turn left in the log."""
        with self._connect() as conn:
            newest = replay.passes[-1]["pass_no"] if replay.passes else 0
            found = conn.execute(query("passes"), {"chat_id": chat, "after": newest}).fetchall()
        for done in found:
            out().print(_pass_line(done, turn_seq), no_wrap=True, overflow="ellipsis")
        replay.passes.extend(found)

    def _report(
        self, chat: str, conversation: Conversation, turns: Sequence[Turn], replay: Replay, budget: int
    ) -> None:
        whole = _whole_tokens(conversation)
        lines = sum(done["outcome"] == "summarized" for done in replay.passes)
        out().print(
            f"{number(replay.reads)} windows read in {replay.seconds:.1f} s, the largest "
            f"{number(replay.largest)} of {number(budget)} tokens; {lines} summaries written"
        )
        out().print(
            f"(all {number(len(conversation.messages))} messages together are {number(whole)} tokens)"
        )
        self._stages(chat, budget)
        with pycontext.connect(self._dsn) as db:
            line_seq = db.status(chat).line_seq
            if line_seq is not None:
                out().print()
                out().print(f"the line in the thread (pycontext thread {chat}):", style="bold")
                show.thread(
                    out(), db.thread(chat, before_seq=line_seq + 5, max_rows=_THREAD_ROWS), _SUMMARY_LINES
                )
            out().print()
            out().print(f"the window now (pycontext window {chat} --budget {budget}):", style="bold")
            show.window(out(), db.window(chat, budget), budget, chat, _WINDOW_ROWS)

    def _stages(self, chat: str, budget: int) -> None:
        """What became of the chat, stage by stage, by the log; and what two more requests come to."""
        with pycontext.connect(self._dsn, summarizer=self._summarizer) as db:
            db.compact(chat, budget)  # whatever is still to be told
            skipped = db.compact(chat, budget)
            small = max(show.window_tokens(db.window(chat, budget)) * 2 // 3, _SMALLEST)
            degraded = db.window(chat, small)
        with self._connect() as conn:
            passes = conn.execute(query("passes"), {"chat_id": chat, "after": 0}).fetchall()
            facts = conn.execute(query("flushed"), {"chat_id": chat}).fetchone() or {}
            segments = conn.execute(
                query("line_segments"), {"chat_id": chat, "after_message_id": None}
            ).fetchall()
        pruned = [done for done in passes if done["outcome"] == "pruned"]
        told = [done for done in passes if done["outcome"] == "summarized"]
        line = sum(row.tokens for row in degraded if row.section == "summary")
        markers = sum(row.section == "omitted" for row in degraded)
        shortened = sum(row.is_shortened for row in degraded)
        stages = {
            "pre-pass": f"{_passes(pruned)}, no model: old results, arguments and images in one line each",
            "flush": f"facts taken before the summaries: {number(facts['facts'])}, from messages "
            f"#{facts['from_seq']}–#{facts['to_seq']}; flushed through #{facts['flushed_seq']}",
            "summary": f"{_passes(told)}, by {visible(self._summarizer.name)}",
            "merge": f"{len(segments)} segments, through #{segments[-1]['seq'] if segments else 0}, "
            f"in one line of {number(line)} tokens",
            "skip": f"asked once more: {visible(skipped.reason or '')}",
            "degrade": f"read at {number(small)} tokens, no model: {number(show.window_tokens(degraded))} "
            f"tokens, markers for what is left out: {markers}, rows shortened: {shortened}",
        }
        out().print()
        out().print(f"the stages (select * from compaction_history where chat_id = '{chat}'):", style="bold")
        for name, text in stages.items():
            out().print(f"  {name:<9} {text}", markup=False, highlight=False, soft_wrap=True)

    def _finish(self, chat: str) -> None:
        statement = f"SELECT * FROM working_window('{chat}')"
        _heading(statement)
        with self._connect() as conn:
            if not self._is_embedded:
                # On a server of yours the schema may not be on the search path.
                conn.execute("set search_path = public, pycontext")
            rows = conn.execute(statement).fetchall()
        columns = ("ordinal", "section", "seq", "role", "tokens")
        table = [
            [*(row[column] for column in columns), show.preview(row["content"], row["tool_calls"])]
            for row in rows
        ]
        if len(table) > _SELECTED_ROWS:
            left = len(table) - _SELECTED_ROWS
            table[_SELECTED_ROWS // 2 : -_SELECTED_ROWS // 2] = [["…", "", "", "", "", f"{left} more rows"]]
        show.table(out(), [*columns, "content"], table, right="r_r_r_")
        out().print()
        out().print("the same in psql:", style="bold")
        out().print(f"  {self._psql()}", soft_wrap=True)
        out().print(f"  pycontext=# {statement};")

    def _psql(self) -> str:
        """The command that opens psql on this database, as it can be pasted."""
        command = [os.path.relpath(sys.argv[0]) if os.path.exists(sys.argv[0]) else "pycontext", "psql"]
        if not self._is_embedded:
            shown = {
                key: str(value)
                for key, value in conninfo_to_dict(self._dsn).items()
                if value is not None and key != "password"
            }
            command += ["--dsn", make_conninfo(**shown)]
        place = os.environ.get("PYCONTEXT_DATA_DIR")
        setting = f"PYCONTEXT_DATA_DIR={shlex.quote(place)} " if place and self._is_embedded else ""
        return setting + shlex.join(command)


def _one(text: bytes) -> Conversation:
    found = next(read_conversations(text.splitlines(keepends=True), default_id="demo"))
    if isinstance(found, ImportProblem):
        raise Failed(str(found))
    return found


def _named(conversation: Conversation, chat: str) -> Conversation:
    return Conversation(conversation.line, chat, conversation.system_prompt, conversation.messages, {})


def _turns(messages: Sequence[dict[str, Any]]) -> Iterator[Turn]:
    """Each user message with what follows it. What stands before the first one is left out."""
    message: dict[str, Any] | None = None
    steps: list[list[dict[str, Any]]] = []
    for row in messages:
        if row["role"] == "user":
            if message is not None:
                yield Turn(message, steps)
            message, steps = row, []
        elif row["role"] == "tool" and steps and steps[-1][0]["role"] == "tool":
            steps[-1].append(row)
        else:
            steps.append([row])
    if message is not None:
        yield Turn(message, steps)


def _free_name(conn: psycopg.Connection[Any], name: str) -> str:
    """The name, or name-2, name-3 … where earlier runs of the demo left their chats."""
    chat, run = name, 1
    while conn.execute(query("newest_seq"), {"chat_id": chat}).fetchone() is not None:
        run += 1
        chat = f"{name}-{run}"
    return chat


def _whole_tokens(conversation: Conversation) -> int:
    total = show.REQUEST_TOKENS
    if conversation.system_prompt:
        total += 4 + tokens.count(conversation.system_prompt, "o200k_base")
    for message in conversation.messages:
        total += tokens.count_message(message, "o200k_base") or 0
    return total


def _passes(passes: Sequence[dict[str, Any]]) -> str:
    before = sum(done["tokens_before"] or 0 for done in passes)
    after = sum(done["tokens_after"] or 0 for done in passes)
    seconds = sum(done["seconds"] or 0 for done in passes)
    took = f" in {seconds:.1f} s" if seconds else ""
    return f"{len(passes)} passes, {number(before)} → {number(after)} tokens{took}"


def _pass_line(done: dict[str, Any], turn_seq: int) -> str:
    head = f"  turn at #{turn_seq}: {done['outcome']}"
    if done["outcome"] not in ("summarized", "pruned"):
        return f"{head}, {visible(done['reason'] or '')}"
    before, after = done["tokens_before"] or 0, done["tokens_after"] or 0
    saved = f" (−{1 - after / before:.0%})" if before else ""
    rows = (done["to_seq"] or 0) - (done["from_seq"] or 0) + 1
    tail = "" if done["model"] is None else f", {done['seconds'] or 0:.2f} s, {visible(done['model'])}"
    return (
        f"{head} #{done['from_seq']}–#{done['to_seq']} ({rows} rows), "
        f"{number(before)} → {number(after)} tokens{saved}{tail}"
    )


def _heading(text: str) -> None:
    out().print()
    out().rule(text, style="bold", align="left", characters="═" if out().encoding.startswith("utf") else "=")


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("turn {task.completed} of {task.total}", markup=False),
        TimeElapsedColumn(),
        console=err(),
        transient=True,
        disable=not err().is_terminal,
    )
