"""The database of chats: connect, and what can be asked of a chat."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import psycopg

from pycontext import compaction, embeddings, memory, operations
from pycontext.compaction import Flush, Job
from pycontext.connections import (
    CallersLink,
    Link,
    NotConfigured,
    OwnLink,
    PoolLink,
    Runner,
    check_given,
    conninfo_from,
)
from pycontext.embeddings import Embedder
from pycontext.errors import InTransaction
from pycontext.extractor import AnyExtractor
from pycontext.extractor import from_environment as extractor_from_environment
from pycontext.memory import GivenAsyncExtractor, GivenExtractor
from pycontext.messages import Id, identity
from pycontext.operations import Encodings
from pycontext.rows import (
    Explained,
    Found,
    LostValue,
    Message,
    Pass,
    Pin,
    Plan,
    Recalled,
    Status,
    StoredFact,
    ThreadRow,
    WindowRow,
)
from pycontext.steps import Steps
from pycontext.summarizer import AnySummarizer, Summarizer, from_environment
from pycontext.tools import Tools
from pycontext.turn import Turn, TurnRequest

if TYPE_CHECKING:
    from psycopg_pool import ConnectionPool

T = TypeVar("T")

logger = logging.getLogger("pycontext")


def connect(
    dsn: str | None = None,
    *,
    connection: psycopg.Connection[Any] | None = None,
    pool: ConnectionPool[Any] | None = None,
    summarizer: Summarizer | None = None,
    extractor: GivenExtractor | None = None,
    embedder: Embedder | None = None,
) -> Database:
    """Open a database of chats.

    dsn: a libpq connection string or URL; None means PYCONTEXT_DSN, then DATABASE_URL.
    connection: the caller's own psycopg connection in place of a dsn. Its transaction stays the caller's:
        nothing is committed or rolled back here, what is added is durable at the caller's commit (at once in
        autocommit), and no model is called while a transaction is open.
    pool: the caller's own psycopg_pool in place of both: each statement borrows a connection for a
        transaction of its own, none is held while a model works, and threads may share the Database.
    summarizer: what compaction calls; None means `pycontext.summarizer.from_environment()`.
    extractor: what takes durable facts before messages are summarized; a plain function from
        `pycontext.extractor.ExtractorRequest` to facts will do. None means
        `pycontext.extractor.from_environment()`.
    embedder: what embeds queries and messages for recall by meaning; None means
        `pycontext.embeddings.from_environment()`, which may be none at all: recall goes by words then.

    Raises NotConfigured where no database is named, psycopg.OperationalError where none answers. A database
    without the schema raises SchemaMissing at the first call.
    """
    link: Link
    check_given(dsn, connection, pool, psycopg.Connection, "ConnectionPool")
    if pool is not None:
        link = PoolLink(pool)
    elif connection is not None:
        link = CallersLink(connection)
    else:
        link = OwnLink(conninfo_from(dsn))
    return Database(link, summarizer=summarizer, extractor=extractor, embedder=embedder)


def embedded(
    path: str | Path | None = None,
    *,
    summarizer: Summarizer | None = None,
    extractor: GivenExtractor | None = None,
    embedder: Embedder | None = None,
) -> Database:
    """Open a database of chats on the embedded server: nothing to install or to run.

    path: the folder of its data; None means PYCONTEXT_DATA_DIR, else a folder of the user's.

    Raises EmbeddedUnavailable, with the reason and what to do.
    """
    from pycontext.embedded import start

    server = start(None if path is None else Path(path))
    return Database(OwnLink(server.dsn), summarizer=summarizer, extractor=extractor, embedder=embedder)


class DatabaseCore:
    """What a database is, sync or async: who summarizes, who takes facts, and what is known of its chats."""

    def __init__(
        self,
        summarizer: AnySummarizer | None,
        extractor: GivenExtractor | GivenAsyncExtractor | None,
        flush: Flush | None,
        embedder: Embedder | None = None,
    ) -> None:
        self._summarizer = summarizer
        self._embedder = embedder
        self._extractor = None if extractor is None else memory.as_extractor(extractor)
        self._has_own_flush = flush is not None
        self._flush = flush or memory.hook(self._choose_extractor)
        self._encodings = Encodings()

    def _compact(
        self,
        chat_id: Id,
        token_budget: int | None,
        focus: str | None,
        summarizer: AnySummarizer | None,
        *,
        may_ask: bool,
    ) -> Steps[Pass]:
        job = Job(
            identity(chat_id),
            compaction.ON_DEMAND,
            lambda: self._choose() if summarizer is None else summarizer,
            token_budget,
            focus,
            self._flush,
        )
        if not may_ask:
            raise InTransaction(
                "no model is called inside your transaction",
                detail=f"compact({job.chat_id!r}) on a connection with an open transaction",
                hint="commit first, or compact over a connection of its own: pycontext.connect(dsn)",
            )
        return compaction.compact(job, self._encodings)

    def _choose_embedder(self, *, may_ask: bool) -> Embedder | None:
        if self._embedder is None:
            self._embedder = embeddings.from_environment()
        return self._embedder if may_ask else None

    def _embed(self, chat_id: Id, *, may_ask: bool) -> Steps[int]:
        embedder = self._choose_embedder(may_ask=may_ask)
        if not may_ask:
            raise InTransaction(
                "no model is called inside your transaction",
                detail=f"embed({chat_id!r}) on a connection with an open transaction",
                hint="commit first, or embed over a connection of its own: pycontext.connect(dsn)",
            )
        if embedder is None:
            raise NotConfigured(
                "no embedding model",
                detail="no embedder was given, and PYCONTEXT_EMBEDDING_MODEL is not set",
                hint="set PYCONTEXT_EMBEDDING_MODEL, or pass embedder= to connect",
            )
        return embeddings.fill(chat_id, embedder)

    def _choose_extractor(self) -> AnyExtractor:
        if self._extractor is None:
            self._extractor = extractor_from_environment()
            logger.info("facts are taken by %s", self._extractor.name)
        return self._extractor

    def _choose(self) -> AnySummarizer:
        if self._summarizer is None:
            self._summarizer = from_environment()
            logger.info("compaction summarizes with %s", self._summarizer.name)
        return self._summarizer


class Database(DatabaseCore):
    """A database of chats, as a context manager. Made by `connect` or `embedded`.

    Every call is one short transaction, and none is open between two calls. Errors are classes of
    `pycontext.errors`, with the server's detail and hint.
    """

    def __init__(
        self,
        link: Link,
        *,
        summarizer: Summarizer | None = None,
        extractor: GivenExtractor | None = None,
        flush: Flush | None = None,
        embedder: Embedder | None = None,
    ) -> None:
        super().__init__(summarizer, extractor, flush, embedder)
        self._link = link
        self._runner = Runner(link)

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; one that the caller brought stays open."""
        self._link.close()

    def _run(self, steps: Steps[T]) -> T:
        return self._runner.run(steps)

    def create_chat(
        self,
        chat_id: Id,
        *,
        system_prompt: str | None = None,
        profile: str | None = None,
        tenant: str | None = None,
        owner: str | None = None,
        source: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """Create the chat if it isn't there; returns its id. A chat that exists keeps prompt and profile.

        Raises BadProfile, BadSource. SQL: create_chat.
        """
        return self._run(
            operations.create_chat(chat_id, system_prompt, profile, tenant, owner, source, metadata)
        )

    def append(self, chat_id: Id, message: Any) -> list[Message]:
        """Store one message or a list of them, in one transaction; returns the stored rows.

        message: text (a user message), a message dict with 'role' in OpenAI form and optionally message_id,
            created_at and metadata, an OpenAI ChatCompletionMessage, or a list of these. A message_id that
            exists with the same body is returned, not stored again.

        Raises NoSuchChat, BadMessage, MessageIdReused, ToolResultWithoutId, AdoptedChat; TypeError for other
        types.
        SQL: append_messages.
        """
        return self._run(operations.append(chat_id, message, self._encodings))

    def window(
        self, chat_id: Id, token_budget: int | None = None, as_of: Id | None = None
    ) -> list[WindowRow]:
        """What the model reads: at most token_budget tokens (None: the profile's).

        as_of: a message's id: the window as it was at that message. Raises NoSuchChat, BudgetTooSmall. SQL:
            working_window.
        """
        return self._run(operations.window(chat_id, token_budget, as_of))

    def explain(
        self,
        chat_id: Id,
        token_budget: int | None = None,
        as_of: Id | None = None,
        search: str | None = None,
        before_seq: int | None = None,
        max_rows: int = 1000,
    ) -> list[Explained]:
        """What became of each row of the chat in that window, by which line, pass or act, and why.

        search: only rows that hold all of its words, lines included. The newest max_rows before before_seq
            (None: all), oldest first; where older ones were not looked at, the first row says so.

        Raises NoSuchChat, BudgetTooSmall. SQL: explain_window.
        """
        return self._run(operations.explain(chat_id, token_budget, as_of, search, before_seq, max_rows))

    @overload
    def messages(
        self, chat_id: Id, token_budget: int | None = None, format: Literal["openai"] = "openai"
    ) -> list[dict[str, Any]]: ...

    @overload
    def messages(
        self, chat_id: Id, token_budget: int | None = None, *, format: Literal["anthropic"]
    ) -> dict[str, Any]: ...

    def messages(self, chat_id: Id, token_budget: int | None = None, format: str = "openai") -> Any:
        """The window as a provider takes it: 'openai' a list of messages, 'anthropic' {system, messages}.

        Raises NoSuchChat, BudgetTooSmall. SQL: openai_messages, anthropic_messages.
        """
        return self._run(operations.formatted(chat_id, token_budget, format))

    def thread(self, chat_id: Id, before_seq: int | None = None, max_rows: int = 50) -> list[ThreadRow]:
        """What was stored, lines included: the newest max_rows before before_seq (None: all), oldest first.

        Raises NoSuchChat. SQL: thread.
        """
        return self._run(operations.thread(chat_id, before_seq, max_rows))

    def status(self, chat_id: Id) -> Status:
        """The chat's profile, budget, window tokens, newest line. Raises NoSuchChat. SQL: window_status."""
        return self._run(operations.status(chat_id, self._encodings))

    def plan(self, chat_id: Id, token_budget: int | None = None) -> Plan:
        """What compaction would do, and the numbers behind it. Raises NoSuchChat. SQL: compaction_plan."""
        return self._run(operations.plan(chat_id, token_budget))

    def count_tokens(self, chat_id: Id) -> int:
        """Count the rows that only have an estimate; returns how many.

        SQL: uncounted_messages, cache_token_counts.
        """
        return self._run(operations.count_tokens(chat_id, self._encodings))

    def compact(
        self,
        chat_id: Id,
        token_budget: int | None = None,
        focus: str | None = None,
        summarizer: Summarizer | None = None,
    ) -> Pass:
        """Summarize what may be cut, now, whether or not the chat is over its trigger; returns the pass.

        token_budget: plan for this many tokens (None: the profile's). focus: what the summary should keep
            above all.
        summarizer: this one in place of the database's.

        Where nothing can be cut the outcome is 'skipped'; where the summarizer fails or its summary is
        refused it is 'failed', the reason says why, and the chat is as it was. Where another process is at
        it, that one's line is waited for, up to a minute, and its summary_id returned with 'skipped'.

        Raises NoSuchChat, and InTransaction inside a transaction of the caller's. SQL: compaction_plan,
        claim_compaction, compaction_source, put_summary.
        """
        steps = self._compact(chat_id, token_budget, focus, summarizer, may_ask=self._runner.may_ask)
        return self._runner.run(steps, is_alone=True)

    def remember(
        self, chat_id: Id, content: str, *, subject: str | None = None, kind: str | None = None
    ) -> StoredFact:
        """Keep a fact on purpose, for this chat and all chats of its owner; the same fact is stored once.

        subject: what it is about, such as 'user.name'; a newer fact about it supersedes this one. kind: a
        word of your own. Secrets are masked. Raises NoSuchChat, BadMessage. SQL: remember.
        """
        return self._run(operations.remember(chat_id, content, subject, kind))

    def recall(
        self,
        chat_id: Id,
        query: str | None = None,
        *,
        query_embedding: Sequence[float] | None = None,
        max_rows: int = 10,
        max_tokens: int | None = None,
    ) -> list[Recalled]:
        """Facts and past messages that fit the query, best first, of all chats of this chat's owner.

        A chat without an owner recalls itself alone. query: words in any script; None: the newest facts.
        Where there is an embedder the query is embedded (outside your transaction only; not in five seconds:
        words alone), or give its embedding. What the chat's window shows is left out.
        max_tokens: what all rows together may take (None: the profile's memory_tokens). Of facts that
        contradict each other only the newest is returned. Raises NoSuchChat, BadEmbedding. SQL: recall.
        """
        return self._run(
            operations.recall(
                chat_id,
                query,
                query_embedding,
                max_rows,
                max_tokens,
                self._choose_embedder(may_ask=self._runner.may_ask),
            )
        )

    def embed(self, chat_id: Id) -> int:
        """Embed the facts and messages of a chat that have no embedding yet; returns how many rows were new.

        `pycontext worker` does it by itself. Raises NoSuchChat, BadEmbedding, NotConfigured where there is no
        model, EmbedderFailed. SQL: unembedded, cache_embeddings.
        """
        return self._run(self._embed(chat_id, may_ask=self._runner.may_ask))

    def forget(self, chat_id: Id, fact_id: str | None = None, *, query: str | None = None) -> int:
        """Forget a fact by its id, or all facts with every word of the query; returns how many went.

        The chats of the chat's owner are looked through. Other tellings of a fact, and older facts about its
        subject, go with it; a later flush does not bring it back. Messages stay as they are. Raises
        NoSuchChat, BadMessage. SQL: forget.
        """
        return self._run(operations.forget(chat_id, fact_id, query))

    def memory_page(
        self,
        owner: str | None,
        *,
        tenant: str | None = None,
        chat_id: Id | None = None,
        before: datetime | None = None,
        max_rows: int = 100,
    ) -> list[StoredFact]:
        """What is remembered of an owner, newest first: the page to show him.

        chat_id: of that chat alone (its owner may be None). before: facts stated earlier than that, for the
        next page. SQL: memory_page.
        """
        return self._run(operations.memory_page(owner, tenant, chat_id, before, max_rows))

    def lost_values(self, chat_id: Id, summary_id: str) -> list[LostValue]:
        """Exact values of the messages a line covers that neither the line nor a fact names any more.

        Raises NoSuchChat, BadMessage. SQL: lost_values.
        """
        return self._run(operations.lost_values(chat_id, summary_id))

    def start_over(self, chat_id: Id, note: str | None = None) -> Message:
        """Draw a line: nothing above it reaches the model any more. The note is all it reads of it.

        Raises NoSuchChat. SQL: start_over.
        """
        return self._run(operations.start_over(chat_id, note))

    def rewind(self, chat_id: Id, to_message_id: Id) -> list[ThreadRow]:
        """Set aside every row after a message, and the lines placed after it; returns what was set aside.

        To edit or regenerate: rewind to the message before, then append. '' sets the whole thread aside.
        Raises NoSuchChat, BadMessage, AdoptedChat. SQL: rewind_chat.
        """
        return self._run(operations.rewind(chat_id, to_message_id))

    def fork(
        self,
        chat_id: Id,
        new_chat_id: Id | None = None,
        at_message_id: Id | None = None,
        *,
        owner: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """A new chat with the rows up to a message (None: all) and the lines wholly inside; returns its id.

        new_chat_id: None makes one. owner, metadata: None means those of the chat it comes from.

        Raises NoSuchChat, BadMessage, MessageIdReused where the chat id is taken. SQL: fork_chat.
        """
        return self._run(operations.fork(chat_id, new_chat_id, at_message_id, owner, metadata))

    def redact(self, chat_id: Id, message_id: Id) -> Message:
        """Erase for ever what a message said: its content, and all summaries, facts and counts it went into.

        The row stays, marked. Raises NoSuchChat, BadMessage, AdoptedChat. SQL: redact_message.
        """
        return self._run(operations.redact(chat_id, message_id))

    def drop_summary(self, chat_id: Id, summary_id: str) -> Message:
        """Take a summary back: the line before it counts again. A reset is never removed.

        Raises NoSuchChat, BadMessage. SQL: drop_summary.
        """
        return self._run(operations.drop_summary(chat_id, summary_id))

    def pin(self, chat_id: Id, message_id: Id) -> Pin:
        """Keep a message verbatim in every window, with its unit, until it is unpinned.

        Raises NoSuchChat, BadMessage, BudgetTooSmall where pins would leave no room. SQL: pin_message.
        """
        return self._run(operations.pin(chat_id, message_id))

    def unpin(self, chat_id: Id, message_id: Id) -> bool:
        """Take a pin off; False where the message is not pinned. Raises NoSuchChat. SQL: unpin_message."""
        return self._run(operations.unpin(chat_id, message_id))

    def set_system_prompt(self, chat_id: Id, system_prompt: str | None) -> int:
        """Give the chat another system prompt (None: none); returns the number of the act it holds from.

        Raises NoSuchChat. SQL: set_system_prompt.
        """
        return self._run(operations.set_system_prompt(chat_id, system_prompt))

    def set_chat_profile(self, chat_id: Id, profile: str) -> int:
        """Move the chat to another profile; returns the number of the act its limits hold from.

        Raises NoSuchChat, BadProfile. SQL: set_chat_profile.
        """
        return self._run(operations.set_chat_profile(chat_id, profile))

    def delete_chat(self, chat_id: Id) -> dict[str, int]:
        """Delete the chat and every row derived from it; returns how many rows of which relation.

        Raises NoSuchChat. SQL: delete_chat.
        """
        return self._run(operations.delete_chat(chat_id))

    def forget_owner(self, owner: str, tenant: str | None = None) -> dict[str, int]:
        """Delete all chats of an owner and every row kept for him; returns how many rows of which relation.

        tenant: None means the session's. SQL: forget_owner.
        """
        return self._run(operations.forget_owner(owner, tenant))

    def original(self, chat_id: Id, seq: int) -> list[ThreadRow]:
        """The message that the window calls #seq, whole, and the lines that stand right after it.

        Empty where the thread has none. Raises NoSuchChat. SQL: message_original.
        """
        return self._run(operations.original(chat_id, seq))

    def search(
        self, chat_id: Id, query: str, max_rows: int = 20, before_seq: int | None = None
    ) -> list[Found]:
        """Messages of the chat that hold every word of the query, in any case and script, newest first.

        max_rows: at most 200. before_seq: go on below that place (one call looks at 100,000 messages).

        Raises NoSuchChat, BadMessage. SQL: search_thread.
        """
        return self._run(operations.search(chat_id, query, max_rows, before_seq))

    def tools(self, chat_id: Id, max_tokens: int = 2000) -> Tools:
        """Tools for the model in this chat: remember, forget, recall, search_thread, message_original.

        max_tokens: the most that one result may take, counted in o200k_base.
        """
        return Tools(self._runner, chat_id, max_tokens)

    def turn(
        self,
        chat_id: Id,
        message: Any = None,
        *,
        message_id: Id | None = None,
        system_prompt: str | None = None,
        profile: str | None = None,
        tools: Sequence[Any] | None = None,
        token_budget: int | None = None,
        context: str | None = None,
        recall: bool = False,
        compact: str | None = "after",
        format: str = "openai",
    ) -> Turn:
        """A turn as a context manager: entering stores the message and reads the window, in one statement.

        chat_id: the chat, created if it isn't there.
        message: text, a list of content parts, a message dict, or None to resume the turn as it stands.
        message_id: makes a retried request harmless: the same id stores the message once. Without a message
            the one of this id is answered: a row of your own table, of an adopted chat.
        system_prompt, profile: used where the chat is created.
        tools: the tools the model is offered; their tokens are taken off the budget.
        token_budget: the most tokens turn.messages may take; None means the profile's.
        context: text for this turn only (time, open files); rendered before the message, never stored.
        recall: True puts what `recall` finds for the message before it, for this turn alone. Where there is
            an embedder the message is embedded first (outside your transaction only; not in five seconds:
            words alone).
        compact: 'after' compacts after the block, where the plan says so, and never raises there; 'before'
            does it before the block; 'off' or None never. Where a window in a tool loop would leave something
            out, both do it in turn.add, too.
        format: what the turn has: 'openai' turn.messages, 'responses' turn.responses_input, 'anthropic'
            turn.anthropic, 'all' the three.

        Entering raises BadMessage, MessageIdReused, BudgetTooSmall, BadProfile, and AdoptedChat for a message
        to a chat whose messages live in a table of yours. SQL: start_turn.
        """
        request = TurnRequest.of(
            chat_id,
            message,
            message_id,
            compact=compact,
            format=format,
            system_prompt=system_prompt,
            profile=profile,
            tools=tools,
            token_budget=token_budget,
            context=context,
            recall=recall,
        )
        return Turn(self._runner, request, self._encodings, self._choose, self._flush, self._choose_embedder)
