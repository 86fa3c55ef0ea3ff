"""One turn of a chat: read what the model is to see, add what it said, compact when the reply is out."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

import psycopg

from pycontext import compaction, embeddings, messages, operations, overflow, replies, tokens
from pycontext.async_connections import AsyncRunner
from pycontext.compaction import Flush, Job
from pycontext.connections import Runner
from pycontext.embeddings import Embedder
from pycontext.errors import AdoptedChat, BadEmbedding, BudgetTooSmall, ContextOverflow, PycontextError
from pycontext.messages import Element
from pycontext.operations import Encodings
from pycontext.rows import Message
from pycontext.steps import Call, Row, Steps, documented_as
from pycontext.summarizer import AnySummarizer

T = TypeVar("T")

COMPACT = ("after", "before", "off", None)
FORMATS = ("openai", "responses", "anthropic")

_TIGHTER = 0.75
"""What is left of a budget that was too large for the model, beside the share that the provider told."""

logger = logging.getLogger("pycontext")


@dataclass(frozen=True)
class TurnRequest:
    """What a turn was asked for."""

    chat_id: str
    element: Element | None = None
    message_id: str | None = None
    system_prompt: str | None = None
    profile: str | None = None
    tools: Sequence[Any] | None = None
    token_budget: int | None = None
    context: str | None = None
    recall: bool = False
    compact: str | None = "after"
    format: str = "openai"

    @classmethod
    def of(
        cls, chat_id: Any, message: Any, message_id: Any, *, compact: str | None, **options: Any
    ) -> TurnRequest:
        """Check what the caller gave."""
        if compact not in COMPACT:
            raise ValueError(f"compact must be 'after', 'before', 'off' or None, not {compact!r}")
        if options["format"] not in (*FORMATS, "all"):
            raise ValueError(f"format must be one of {', '.join(FORMATS)} or all, not {options['format']!r}")
        element = None if message is None else replies.request(message)
        if message_id is not None:
            message_id = messages.identity(message_id, "message_id")
            if element is not None:
                element["message_id"] = message_id
        for name in ("system_prompt", "context"):
            options[name] = messages.text(options[name])
        return cls(messages.identity(chat_id), element, message_id, compact=compact, **options)


class ChooseEmbedder(Protocol):
    """Gives the embedder, where there is one and a model may be asked."""

    def __call__(self, *, may_ask: bool) -> Embedder | None:
        """The embedder, or None."""
        ...


class TurnCore:
    """What a turn is, sync or async: its state, and its three acts as steps."""

    def __init__(
        self,
        request: TurnRequest,
        encodings: Encodings,
        choose: Callable[[], AnySummarizer],
        flush: Flush | None = None,
        choose_embedder: ChooseEmbedder | None = None,
    ) -> None:
        self.chat_id = request.chat_id
        #: Id and place of the user message that this turn answers.
        self.message_id: str | None = None
        self.seq: int | None = None
        #: Tokens that the window takes, and may take.
        self.window_tokens: int = 0
        self.token_budget: int = 0
        #: True where something was pruned, left out or shortened for this window to fit, beside what a
        #: pruning pass settled.
        self.is_degraded: bool = False
        #: True where this turn's message has its reply already: a retry that has nothing left to do.
        self.is_answered: bool = False
        #: What that reply says.
        self.reply: str | None = None
        #: True where the given system prompt is not the one the chat was created with (which stays).
        self.prompt_differs: bool = False
        #: What `compaction_plan` says of the chat, and why.
        self.decision: str | None = None
        self.reason: str | None = None
        self._request = request
        self._encodings = encodings
        self._choose = choose
        self._flush = flush
        self._choose_embedder = choose_embedder
        self._memory: str | None = None
        self._messages: list[dict[str, Any]] = []
        self._items: list[dict[str, Any]] = []
        self._anthropic: dict[str, Any] = {}
        self._token_budget = request.token_budget
        self._has_made_room = False
        self._read_seq: int = 0
        self._added: Counter[str] = Counter()
        self._state = "new"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What the model is to read, as messages of chat completions. The list grows in place."""
        return self._only("openai", self._messages)

    @property
    def responses_input(self) -> list[dict[str, Any]]:
        """What the model is to read, as input items of the Responses API; format='responses' of `turn`.

        Calls and outputs are paired, reasoning stands before the item it led to. The list grows in place.
        """
        return self._only("responses", self._items)

    @property
    def anthropic(self) -> dict[str, Any]:
        """`system` (where there is one) and `messages` for Anthropic; format='anthropic' of `turn`.

        `client.messages.create(…, **turn.anthropic)`. Up to four blocks carry `cache_control`, on bytes that
        stay the same from one request to the next. The dict changes in place.
        """
        return self._only("anthropic", self._anthropic)

    @property
    def prompt_cache_key(self) -> str:
        """What keeps a chat's requests together at OpenAI: the same in every process, and no name in it."""
        return "pycontext-" + hashlib.sha256(self.chat_id.encode()).hexdigest()[:32]

    def _only(self, format: str, found: T) -> T:
        if self._request.format not in (format, "all"):
            raise RuntimeError(f"this turn was read as {self._request.format}: db.turn(…, format={format!r})")
        return found

    def _enter(self, may_ask: Callable[[], bool]) -> Steps[None]:
        """One statement; with compact='before' and a plan that says so, a pass and a second look."""
        if self._state != "new":
            raise RuntimeError("a turn is entered once; begin another one with db.turn(…)")
        self._state = "open"
        yield from self._begin(self._request.element, may_ask)
        if self._request.compact == "before" and self.decision in ("summarize", "prune") and may_ask():
            yield from compaction.quietly(self._job(compaction.BEFORE_TURN), self._encodings)
            yield from self._start(None)

    def _add(self, reply: Any, may_ask: Callable[[], bool]) -> Steps[list[Message]]:
        """Store what is given, then read the window as a fresh process would."""
        if self._state != "open":
            raise RuntimeError("turn.add works inside the turn's with block")
        added = Counter(self._added)
        given = []
        for element in replies.elements(reply):
            if "message_id" not in element:
                base = messages.derived_id(f"{self.message_id}", element, 0)
                element["message_id"] = messages.derived_id(f"{self.message_id}", element, added[base])
                added[base] += 1
            given.append(element)
        try:
            stored = yield from operations.append(self.chat_id, given, self._encodings, self.message_id)
        except AdoptedChat as error:
            raise AdoptedChat(
                error.message,
                detail=error.detail,
                hint="insert the reply there, then turn.stored(reply): the turn goes on from it",
            ) from error
        self._added = added
        # of a reply that is added again the usage is an older window's
        is_new = bool(stored) and stored[-1].seq > self._read_seq
        yield from self._go_on(replies.usage(reply) if is_new else None, may_ask)
        return stored

    def _stored(self, reply: Any, may_ask: Callable[[], bool]) -> Steps[None]:
        """What the caller stored is there: its usage is learnt, and the window read."""
        if self._state != "open":
            raise RuntimeError("turn.stored works inside the turn's with block")
        yield from self._go_on(None if reply is None else replies.usage(reply), may_ask)

    def _go_on(self, usage: replies.Usage | None, may_ask: Callable[[], bool]) -> Steps[None]:
        """The window as it is after a reply, which has another try at making room."""
        self._has_made_room = False
        yield from self._learn(usage)
        yield from self._start(None)
        is_due = self.is_degraded and self.decision == "summarize" and not self.is_answered
        if is_due and self._request.compact in ("after", "before") and may_ask():
            # the model is asked again, and would not see all: the summary can't wait for the end of the turn
            yield from compaction.quietly(self._job(compaction.BEFORE_TURN), self._encodings)
            yield from self._start(None)

    def _learn(self, usage: replies.Usage | None) -> Steps[None]:
        """The provider's count of the window that was read last."""
        if usage is None:
            return
        try:
            yield Call(
                "record_usage",
                {
                    "chat_id": self.chat_id,
                    "model": messages.text(usage.model),
                    "prompt_tokens": usage.prompt_tokens,
                    "seq": self._read_seq,
                },
            )
        except PycontextError as error:  # the reply is stored: nothing else depends on it
            logger.warning("usage of chat %s was not recorded: %s", self.chat_id, error.message)

    def _make_room(self, error: BaseException, may_ask: Callable[[], bool]) -> Steps[bool]:
        """A tighter budget for the rest of the turn, a pass under it, and another look."""
        if self._state != "open":
            raise RuntimeError("turn.make_room works inside the turn's with block")
        if not overflow.is_overflow(error):
            return False
        before = self.window_tokens
        if self._has_made_room:
            raise _overflow(f"{before} tokens were too many after a compaction, too") from error
        self._has_made_room = True
        budget = int(min(before, self.token_budget) * (overflow.ratio(error) or 1.0) * _TIGHTER)
        self._token_budget, given = max(budget, 1), self._token_budget
        try:
            if self._request.compact in ("after", "before") and may_ask():
                yield from compaction.quietly(self._job(compaction.BEFORE_TURN), self._encodings)
            yield from self._start(None)
        except BudgetTooSmall as small:
            self._token_budget = given
            raise _overflow(small.message, small.detail) from error
        return True

    def _leave(self, may_ask: Callable[[], bool]) -> Steps[None]:
        """After the reply: compact if the plan says so. Nothing raised here reaches the caller."""
        self._state = "closed"
        if self._request.compact == "after" and may_ask():
            yield from compaction.quietly(self._job(compaction.AFTER_TURN), self._encodings)

    def _begin(self, element: Element | None, may_ask: Callable[[], bool]) -> Steps[None]:
        """The first look: with recall by meaning, too, where an embedder gives the request's embedding."""
        does_recall = self._request.recall
        choose = self._choose_embedder if does_recall else None
        embedder = None if choose is None else choose(may_ask=may_ask())
        vector: list[float] | None = None
        if embedder is not None:
            query = yield from self._asked(element)
            if query.strip():
                vector = yield from embeddings.query(query, embedder)
        if embedder is None or vector is None:
            yield from self._start(element, does_recall)
            return
        try:
            yield from self._start(element, does_recall, vector, embedder.name)
        except (psycopg.errors.FeatureNotSupported, BadEmbedding) as error:
            what = error.message if isinstance(error, BadEmbedding) else error.diag.message_primary
            logger.warning("recall goes by words alone: %s", what)
            yield from self._start(element, does_recall)

    def _asked(self, element: Element | None) -> Steps[str]:
        """What the turn answers, as text. Of a turn that is resumed it stands in the chat."""
        if element is not None:
            return _said(element)
        yield from self._start(None)
        if self.seq is None or self.is_answered:
            return ""
        rows = yield from operations.original(self.chat_id, self.seq)
        return "\n".join(_said({"content": row.content}) for row in rows)

    def _start(
        self,
        element: Element | None,
        recall: bool = False,
        vector: list[float] | None = None,
        embedding_model: str | None = None,
    ) -> Steps[None]:
        encoding = self._encodings.of(self.chat_id)
        row: Row = (
            yield Call(
                "start_turn",
                {
                    "chat_id": self.chat_id,
                    "message": None
                    if element is None
                    else messages.to_json(messages.counted(element, encoding)),
                    "token_budget": self._token_budget,
                    "tool_tokens": self._tool_tokens(encoding),
                    "system_prompt": self._request.system_prompt,
                    "profile": self._request.profile,
                    "context": self._request.context,
                    "format": self._request.format,
                    "memory": self._memory,
                    "query_embedding": vector,
                    "embedding_model": embedding_model,
                    "request_id": None
                    if element is not None
                    else self.message_id or self._request.message_id,
                    "recall": recall,
                },
                is_repeatable=element is None or "message_id" in element,
            )
        )[0]
        self._show(row["messages"])
        self._read_seq = row["read_seq"]
        self._memory = row["memory"]  # recalled once: the block stays as it is
        if self.message_id is None:
            self.message_id = row["message_id"]
            self.seq = row["seq"]
        self.window_tokens = row["window_tokens"]
        self.token_budget = row["token_budget"]
        self.is_degraded = row["is_degraded"]
        self.is_answered = row["is_answered"]
        self.reply = row["reply"]
        self.prompt_differs = bool(row["prompt_differs"])
        self.decision = row["decision"]
        self.reason = row["reason"]

    def _show(self, found: Any) -> None:
        forms = found if self._request.format == "all" else {self._request.format: found}
        self._messages[:] = forms.get("openai", ())
        self._items[:] = forms.get("responses", ())
        self._anthropic.clear()
        self._anthropic.update(forms.get("anthropic", {}))

    def _tool_tokens(self, encoding: str) -> int | None:
        if self._request.tools is None:
            return None
        return tokens.count(messages.to_json(self._request.tools), encoding) if self._request.tools else 0

    def _job(self, trigger: str) -> Job:
        return Job(self.chat_id, trigger, self._choose, self._token_budget, flush=self._flush)


def _said(element: Element) -> str:
    content = element.get("content")
    parts = [content] if isinstance(content, str) else content or ()
    texts = (part if isinstance(part, str) else part.get("text") for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))


def _overflow(what: str, detail: str | None = None) -> ContextOverflow:
    return ContextOverflow(
        "the provider refuses the prompt as too long, and the window can't be made any smaller",
        detail=f"{what} ({detail})" if detail else what,
        hint="what always stands (system prompt, pins, the newest message, tools, context) is too long for"
        " this model: shorten it, or give the chat a profile of the model's own context_window (set_profile)",
    )


class Turn(TurnCore, AbstractContextManager["Turn"]):
    """A turn as a context manager; made by `Database.turn`.

    Messages added are stored at once, each `add` in its own transaction, so that nothing is lost if the block
    fails later. `turn.messages` (or `responses_input`, or `anthropic`) is at every step what a fresh process
    would read from the database.
    """

    def __init__(
        self,
        runner: Runner,
        request: TurnRequest,
        encodings: Encodings,
        choose: Callable[[], AnySummarizer],
        flush: Flush | None = None,
        choose_embedder: ChooseEmbedder | None = None,
    ) -> None:
        super().__init__(request, encodings, choose, flush, choose_embedder)
        self._runner = runner
        self._lock = threading.RLock()  # results of tools may be added by threads of their own

    def __enter__(self) -> Turn:
        self._runner.run(self._enter(lambda: self._runner.may_ask))
        return self

    def add(self, reply: Any) -> list[Message]:
        """Store a reply or a tool result, durable when this returns.

        reply: a ChatCompletion of one choice or its message, a Response of the Responses API or its items, a
        Message of Anthropic's; results of tools in the form of any of these; a message dict with 'role'; or a
        list of these, which is stored whole or not at all. Other types are UnknownMessageType, which says so.
        What the reply says of its usage goes to record_usage, for the budget to fit the model's tokens.
        Where a window in a tool loop would leave something out, and the turn may compact, it does so here.

        A message without an id of its own (`message_id` or `id`) gets one derived from the turn's message id
        and the message's body (of a provider's object its id, too): adding the same again, here after an
        error or in a process that resumed the turn, writes nothing twice. Two equal messages added in one
        turn by one process are two rows. Where a server reuses tool_call_ids within a turn, give message_ids.

        Raises BadMessage, MessageIdReused, ToolResultWithoutId; AdoptedChat where the messages live in a
        table of yours: insert the reply there, and call `stored`.
        SQL: append_messages, record_usage, start_turn.
        """
        with self._lock:
            return self._runner.run(self._add(reply, lambda: self._runner.may_ask))

    def stored(self, reply: Any = None) -> None:
        """Go on from what you stored yourself: in the table of an adopted chat, where `add` can't.

        reply: what the model returned, for its usage to be learnt; or None, as after results of tools. The
        window is read anew, from what is there by then. SQL: record_usage, start_turn.
        """
        with self._lock:
            self._runner.run(self._stored(reply, lambda: self._runner.may_ask))

    def make_room(self, error: BaseException) -> bool:
        """After a provider's error: True where the window is smaller now, and the request may be sent again.

        False for any error but one that says that the prompt is too long for the model (see
        `pycontext.is_overflow`): raise it. Such a one is answered by a tighter budget for the rest of the
        turn, and one compaction under it (with compact='off' none: messages are left out). Raises
        ContextOverflow where that can't help: at the second time without an `add` in between, and where
        system prompt, pins and newest message alone are too long. SQL: compaction_plan, put_summary,
        start_turn.
        """
        with self._lock:
            return self._runner.run(self._make_room(error, lambda: self._runner.may_ask))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._runner.run(self._leave(lambda: self._runner.may_ask), is_alone=True)
        self._state = "closed"


@documented_as(Turn)
class AsyncTurn(TurnCore, AbstractAsyncContextManager["AsyncTurn"]):
    """`Turn`, awaited: `async with`, and `await turn.add(reply)`. Made by `AsyncDatabase.turn`."""

    def __init__(
        self,
        runner: AsyncRunner,
        request: TurnRequest,
        encodings: Encodings,
        choose: Callable[[], AnySummarizer],
        flush: Flush | None = None,
        choose_embedder: ChooseEmbedder | None = None,
    ) -> None:
        super().__init__(request, encodings, choose, flush, choose_embedder)
        self._runner = runner
        self._lock = asyncio.Lock()  # results of tools may be added by tasks of their own

    async def __aenter__(self) -> AsyncTurn:
        await self._runner.run(self._enter(lambda: self._runner.may_ask))
        return self

    async def add(self, reply: Any) -> list[Message]:
        async with self._lock:
            return await self._runner.run(self._add(reply, lambda: self._runner.may_ask))

    async def stored(self, reply: Any = None) -> None:
        async with self._lock:
            await self._runner.run(self._stored(reply, lambda: self._runner.may_ask))

    async def make_room(self, error: BaseException) -> bool:
        async with self._lock:
            return await self._runner.run(self._make_room(error, lambda: self._runner.may_ask))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            await self._runner.run(self._leave(lambda: self._runner.may_ask), is_alone=True)
        self._state = "closed"
