"""The worker: compacts chats that are due, off every user's path, takes facts that are owed, counts, embeds.

Several may run: each pass is under the chat's lease. None holds a transaction while a model works.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import psycopg

from pycontext import compaction, embeddings, memory, operations
from pycontext.chat import Database
from pycontext.compaction import Job
from pycontext.embeddings import Embedder, EmbedderFailed
from pycontext.errors import PoolExhausted, PycontextError, StatementCanceled
from pycontext.rows import DueChat, Pass
from pycontext.steps import Call, Row, Steps

__all__ = ["Worker", "WorkDone", "Stopped"]

logger = logging.getLogger("pycontext")

_AT_ONCE = 10_000
_ADOPTED_AT_ONCE = 20
_REMEMBERED = 100_000
_LOOK_AGAIN = 60.0
"""A chat that was due and was not compacted is looked at again when it changed, or after these seconds."""


class Stopped(KeyboardInterrupt):
    """The worker was told to stop, and the pass it was at did not end in time."""


@dataclass
class WorkDone:
    """What a worker did."""

    passes: int = 0
    failed: int = 0
    saved_tokens: int = 0
    counted: int = 0
    facts: int = 0
    embedded: int = 0


class Worker:
    """Compacts what is due on one database.

    database: a Database over a connection of its own. interval: seconds between two looks. grace: seconds
    that a pass may still take after SIGTERM or SIGINT; after that, or on a second signal, it is given up and
    its lease given back. tell: called with the chat's id and each pass that did something.
    """

    def __init__(
        self,
        database: Database,
        *,
        interval: float = 5.0,
        grace: float = 20.0,
        lease_seconds: int = compaction.LEASE_SECONDS,
        tell: Callable[[str, Pass], None] | None = None,
    ) -> None:
        self._database = database
        self._interval = interval
        self._grace = grace
        self._lease_seconds = lease_seconds
        self._tell = tell
        self._stop = threading.Event()
        self._left: dict[str, tuple[int, int, float]] = {}
        self._adopted_after = ""
        self._embed_after = 0.0
        self._unembeddable: dict[str, float] = {}
        self.done = WorkDone()

    def stop(self) -> None:
        """Let `run` end after the pass it is at. Any thread may call it."""
        self._stop.set()

    def run(self, *, once: bool = False) -> WorkDone:
        """Work until told to stop by `stop`, SIGTERM or SIGINT (signals: in the main thread only).

        once: one look over all chats, then return. A connection that is lost is opened anew at the next look;
        with once its error is raised.
        """
        with self._signals():
            try:
                while not self._stop.is_set():
                    try:
                        self._look()
                    except (psycopg.OperationalError, StatementCanceled, PoolExhausted) as error:
                        if once:
                            raise
                        logger.warning("no answer from the database (%s); trying again", type(error).__name__)
                    if once:
                        break
                    self._stop.wait(self._interval)
            except Stopped:
                logger.warning("stopped in the middle of a pass; its lease was given back")
        return self.done

    def _look(self) -> None:
        runner = self._database._runner
        now = time.monotonic()
        due = runner.run(operations.fetch(DueChat, Call("chats_due", {"max_rows": _AT_ONCE})))
        for chat in [*due, *self._adopted()]:
            if self._stop.is_set():
                return
            if not self._is_left(chat, now):
                while self._compact(chat) and not self._stop.is_set():
                    pass  # a long stretch is told in several passes
        self._take_facts()
        for row in runner.run(_rows("chats_uncounted")):
            if self._stop.is_set():
                return
            self.done.counted += runner.run(
                operations.count_tokens(row["chat_id"], self._database._encodings)
            )
        embedder = self._database._choose_embedder(may_ask=True)
        if embedder is not None and now >= self._embed_after:
            self._embed(embedder)

    def _adopted(self) -> list[DueChat]:
        """The next adopted chats. Whether one is due is not known without reading it: each has its turn."""
        parameters = {"after": self._adopted_after, "max_rows": _ADOPTED_AT_ONCE}
        rows = self._database._runner.run(operations.fetch(DueChat, Call("chats_adopted", parameters)))
        self._adopted_after = rows[-1].chat_id if len(rows) == _ADOPTED_AT_ONCE else ""
        return rows

    def _take_facts(self) -> None:
        """Facts that no pass will take soon, as of what a user who started over set aside."""
        database = self._database
        if database._has_own_flush:
            return  # it runs in passes alone
        for row in database._runner.run(_rows("chats_unflushed")):
            if self._stop.is_set():
                return
            if row["message_id"] is None:
                continue
            steps = memory.flush(row["chat_id"], row["message_id"], database._choose_extractor)
            try:
                self.done.facts += database._runner.run(steps).facts
            except Exception as error:  # one chat never stops the worker
                if _is_lost(error):
                    raise
                compaction.report_error(row["chat_id"], error)

    def _embed(self, embedder: Embedder) -> None:
        """Embed what is not. A chat that fails is left for a while; two in a row, and it is the model."""
        runner = self._database._runner
        has_failed = False
        try:
            for row in runner.run(_rows("chats_unembedded")):
                chat_id = row["chat_id"]
                if self._stop.is_set():
                    return
                if time.monotonic() < self._unembeddable.get(chat_id, 0.0):
                    continue
                try:
                    steps = embeddings.fill(chat_id, embedder, should_stop=self._stop.is_set)
                    self.done.embedded += runner.run(steps)
                    has_failed = False
                except EmbedderFailed as error:
                    if len(self._unembeddable) >= _REMEMBERED:
                        self._unembeddable.clear()
                    self._unembeddable[chat_id] = time.monotonic() + 10 * _LOOK_AGAIN
                    logger.warning("chat %s is not embedded for now: %s", chat_id, error.reason)
                    if has_failed:
                        raise
                    has_failed = True
        except (EmbedderFailed, PycontextError) as error:
            reason = error.reason if isinstance(error, EmbedderFailed) else error.message
            logger.warning("nothing is embedded for %g s: %s", _LOOK_AGAIN, reason)
            self._embed_after = time.monotonic() + _LOOK_AGAIN

    def _compact(self, chat: DueChat) -> bool:
        """One pass; true where it stored a line, and there may be more to tell."""
        database = self._database
        job = Job(
            chat.chat_id,
            compaction.BY_WORKER,
            database._choose,
            chat.token_budget,
            flush=database._flush,
            lease_seconds=self._lease_seconds,
        )
        try:
            done = database._runner.run(compaction.compact(job, database._encodings))
        except Exception as error:  # one chat never stops the worker
            if _is_lost(error):
                raise
            compaction.report_error(chat.chat_id, error)
            done = None
        if done is None or done.outcome == "skipped":
            if len(self._left) >= _REMEMBERED:
                self._left.clear()
            self._left[chat.chat_id] = (chat.last_seq, chat.act_no, time.monotonic() + _LOOK_AGAIN)
            return False
        self._left.pop(chat.chat_id, None)
        self.done.passes += done.outcome != "failed"
        self.done.failed += done.outcome == "failed"
        self.done.saved_tokens += done.saved_tokens or 0
        if self._tell is not None:
            self._tell(chat.chat_id, done)
        return done.outcome == "summarized"

    def _is_left(self, chat: DueChat, now: float) -> bool:
        last_seq, act_no, until = self._left.get(chat.chat_id, (None, None, 0.0))
        return (last_seq, act_no) == (chat.last_seq, chat.act_no) and now < until

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def asked(number: int, frame: FrameType | None) -> None:
            if self._stop.is_set():
                raise Stopped
            self._stop.set()
            signal.setitimer(signal.ITIMER_REAL, self._grace)

        def overdue(number: int, frame: FrameType | None) -> None:
            raise Stopped

        handlers = {signal.SIGTERM: asked, signal.SIGINT: asked, signal.SIGALRM: overdue}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)


def _is_lost(error: Exception) -> bool:
    """True where the connection is gone, not a statement refused."""
    state = error.sqlstate if isinstance(error, psycopg.OperationalError) else ""
    return state is None or state.startswith(("08", "57P"))


def _rows(query: str) -> Steps[list[Row]]:
    rows: list[Row] = yield Call(query, {"max_rows": _AT_ONCE})
    return rows
