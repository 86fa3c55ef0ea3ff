"""The import command: files to chats, a conversation at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import tuple_row
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import pycontext
from pycontext.chat import Database
from pycontext.cli.target import Target
from pycontext.cli.terminal import err, number, out, report, visible
from pycontext.errors import PycontextError, translate
from pycontext.importer import Conversation, ImportProblem, read_conversations
from pycontext.queries import query

_BATCH = 200


@dataclass
class Counts:
    """What became of a file."""

    conversations: int = 0
    messages: int = 0
    new: int = 0
    problems: int = 0


def import_files(
    files: Sequence[Path], target: Target, *, chat_id: str | None, prefix: str, profile: str | None
) -> int:
    """Import every file and say what became of it; returns how many conversations could not be imported."""
    problems = 0
    with (
        psycopg.connect(target.dsn, autocommit=True, prepare_threshold=None, client_encoding="utf8") as conn,
        pycontext.connect(connection=conn) as db,
    ):
        for path in files:
            job = _Job(conn, db, path, profile)
            counts = job.run(chat_id, prefix)
            problems += counts.problems
            left_out = f", {number(counts.problems)} not imported" if counts.problems else ""
            out().print(
                f"{visible(job.name)}: {_of(counts.conversations, 'conversation')}, "
                f"{_of(counts.messages, 'message')} ({number(counts.new)} new){left_out}"
            )
    return problems


def import_conversation(
    conn: psycopg.Connection[Any],
    db: Database,
    conversation: Conversation,
    *,
    profile: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Write one conversation in one transaction, with its token counts; returns how many messages are new."""
    new = 0
    with translate(), conn.transaction():
        db.create_chat(
            conversation.chat_id,
            system_prompt=conversation.system_prompt,
            profile=profile,
            metadata=conversation.metadata or None,
        )
        with conn.cursor(row_factory=tuple_row) as cursor:
            row = cursor.execute(query("newest_seq"), {"chat_id": conversation.chat_id}).fetchone()
        newest = row[0] if row else 0
        for start in range(0, len(conversation.messages), _BATCH):
            batch = conversation.messages[start : start + _BATCH]
            stored = db.append(conversation.chat_id, list(batch))
            new += sum(message.seq > newest for message in stored)
            progress(len(batch))
        db.count_tokens(conversation.chat_id)
    return new


@dataclass
class _Job:
    conn: psycopg.Connection[Any]
    db: Database
    path: Path
    profile: str | None
    counts: Counts = field(default_factory=Counts)

    @property
    def name(self) -> str:
        return "stdin" if self.path == Path("-") else self.path.name

    def run(self, chat_id: str | None, prefix: str) -> Counts:
        with ExitStack() as stack:
            if self.path == Path("-"):
                source: Iterable[bytes] = sys.stdin.buffer
                size = None
            else:
                opened = stack.enter_context(self.path.open("rb"))
                source = opened
                size = self.path.stat().st_size
            progress = stack.enter_context(_progress())
            task = progress.add_task(visible(self.name), total=size)
            bar = _Bar(progress, task)
            default_id = "stdin" if self.path == Path("-") else self.path.stem
            for item in read_conversations(
                bar.read(source), default_id=default_id, chat_id=chat_id, prefix=prefix
            ):
                if isinstance(item, ImportProblem):
                    self._problem(item.line, PycontextError(_said(item), hint=item.hint))
                else:
                    self._write(item, bar)
        return self.counts

    def _write(self, item: Conversation, bar: _Bar) -> None:
        try:
            new = import_conversation(
                self.conn, self.db, item, profile=self.profile, progress=bar.share_of(len(item.messages))
            )
        except PycontextError as error:
            self._problem(item.line, error)
            return
        self.counts.conversations += 1
        self.counts.messages += len(item.messages)
        self.counts.new += new

    def _problem(self, line: int, error: PycontextError) -> None:
        self.counts.problems += 1
        report(error, place=f"{visible(self.name)} line {line}: ")


class _Bar:
    """A bar in bytes of the file; a long conversation moves it within its line."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._before = 0.0
        self._line = 0

    def read(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            self._line = len(line)
            yield line
            self._before += len(line)
            self._progress.update(self._task, completed=self._before)

    def share_of(self, messages: int) -> Callable[[int], None]:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            self._progress.update(self._task, completed=self._before + self._line * done / messages)

        return advance


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%", markup=False),
        TimeElapsedColumn(),
        console=err(),
        transient=True,
        disable=not err().is_terminal,
    )


def _said(problem: ImportProblem) -> str:
    return f"{problem.field}: {problem.message}" if problem.field else problem.message


def _of(count: int, what: str) -> str:
    return f"{number(count)} {what}" + ("" if count == 1 else "s")
