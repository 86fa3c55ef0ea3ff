"""The database of chats, awaited: what `chat` has, over psycopg's async connection and pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import psycopg

from pycontext import operations
from pycontext.async_connections import AsyncCallersLink, AsyncLink, AsyncOwnLink, AsyncPoolLink, AsyncRunner
from pycontext.chat import Database, DatabaseCore
from pycontext.compaction import Flush
from pycontext.connections import check_given, conninfo_from
from pycontext.embeddings import Embedder
from pycontext.memory import GivenAsyncExtractor, GivenExtractor
from pycontext.messages import Id
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
from pycontext.steps import Steps, documented_as
from pycontext.summarizer import AnySummarizer
from pycontext.tools import AsyncTools
from pycontext.turn import AsyncTurn, TurnRequest

if TYPE_CHECKING:
    from psycopg_pool import AsyncConnectionPool

T = TypeVar("T")


def aconnect(
    dsn: str | None = None,
    *,
    connection: psycopg.AsyncConnection[Any] | None = None,
    pool: AsyncConnectionPool[Any] | None = None,
    summarizer: AnySummarizer | None = None,
    extractor: GivenExtractor | GivenAsyncExtractor | None = None,
    embedder: Embedder | None = None,
) -> AsyncDatabase:
    """`connect` for asyncio: `async with pycontext.aconnect(…) as db`, and every call is awaited.

    Parameters are those of `connect`, connection and pool psycopg's async ones. A summarizer or an extractor
    that is async is awaited; others run in a thread, and the loop goes on. A connection of our own is opened
    by `async with`, or by the first call.
    """
    link: AsyncLink
    check_given(dsn, connection, pool, psycopg.AsyncConnection, "AsyncConnectionPool")
    if pool is not None:
        link = AsyncPoolLink(pool)
    elif connection is not None:
        link = AsyncCallersLink(connection)
    else:
        link = AsyncOwnLink(conninfo_from(dsn))
    return AsyncDatabase(link, summarizer=summarizer, extractor=extractor, embedder=embedder)


@documented_as(Database)
class AsyncDatabase(DatabaseCore):
    """`Database`, awaited. Made by `aconnect`. Tasks may share it.

    A call that is cancelled stores all or nothing, and gives back what it held: no lease and no connection
    stays taken.
    """

    def __init__(
        self,
        link: AsyncLink,
        *,
        summarizer: AnySummarizer | None = None,
        extractor: GivenExtractor | GivenAsyncExtractor | None = None,
        flush: Flush | None = None,
        embedder: Embedder | None = None,
    ) -> None:
        super().__init__(summarizer, extractor, flush, embedder)
        self._link = link
        self._runner = AsyncRunner(link)

    async def __aenter__(self) -> AsyncDatabase:
        await self._link.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._link.close()

    async def _run(self, steps: Steps[T]) -> T:
        return await self._runner.run(steps)

    async def create_chat(
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
        return await self._run(
            operations.create_chat(chat_id, system_prompt, profile, tenant, owner, source, metadata)
        )

    async def append(self, chat_id: Id, message: Any) -> list[Message]:
        return await self._run(operations.append(chat_id, message, self._encodings))

    async def window(
        self, chat_id: Id, token_budget: int | None = None, as_of: Id | None = None
    ) -> list[WindowRow]:
        return await self._run(operations.window(chat_id, token_budget, as_of))

    async def explain(
        self,
        chat_id: Id,
        token_budget: int | None = None,
        as_of: Id | None = None,
        search: str | None = None,
        before_seq: int | None = None,
        max_rows: int = 1000,
    ) -> list[Explained]:
        return await self._run(operations.explain(chat_id, token_budget, as_of, search, before_seq, max_rows))

    @overload
    async def messages(
        self, chat_id: Id, token_budget: int | None = None, format: Literal["openai"] = "openai"
    ) -> list[dict[str, Any]]: ...

    @overload
    async def messages(
        self, chat_id: Id, token_budget: int | None = None, *, format: Literal["anthropic"]
    ) -> dict[str, Any]: ...

    async def messages(self, chat_id: Id, token_budget: int | None = None, format: str = "openai") -> Any:
        return await self._run(operations.formatted(chat_id, token_budget, format))

    async def thread(self, chat_id: Id, before_seq: int | None = None, max_rows: int = 50) -> list[ThreadRow]:
        return await self._run(operations.thread(chat_id, before_seq, max_rows))

    async def status(self, chat_id: Id) -> Status:
        return await self._run(operations.status(chat_id, self._encodings))

    async def plan(self, chat_id: Id, token_budget: int | None = None) -> Plan:
        return await self._run(operations.plan(chat_id, token_budget))

    async def count_tokens(self, chat_id: Id) -> int:
        return await self._run(operations.count_tokens(chat_id, self._encodings))

    async def compact(
        self,
        chat_id: Id,
        token_budget: int | None = None,
        focus: str | None = None,
        summarizer: AnySummarizer | None = None,
    ) -> Pass:
        steps = self._compact(chat_id, token_budget, focus, summarizer, may_ask=self._runner.may_ask)
        return await self._runner.run(steps, is_alone=True)

    async def remember(
        self, chat_id: Id, content: str, *, subject: str | None = None, kind: str | None = None
    ) -> StoredFact:
        return await self._run(operations.remember(chat_id, content, subject, kind))

    async def recall(
        self,
        chat_id: Id,
        query: str | None = None,
        *,
        query_embedding: Sequence[float] | None = None,
        max_rows: int = 10,
        max_tokens: int | None = None,
    ) -> list[Recalled]:
        return await self._run(
            operations.recall(
                chat_id,
                query,
                query_embedding,
                max_rows,
                max_tokens,
                self._choose_embedder(may_ask=self._runner.may_ask),
            )
        )

    async def embed(self, chat_id: Id) -> int:
        return await self._run(self._embed(chat_id, may_ask=self._runner.may_ask))

    async def forget(self, chat_id: Id, fact_id: str | None = None, *, query: str | None = None) -> int:
        return await self._run(operations.forget(chat_id, fact_id, query))

    async def memory_page(
        self,
        owner: str | None,
        *,
        tenant: str | None = None,
        chat_id: Id | None = None,
        before: datetime | None = None,
        max_rows: int = 100,
    ) -> list[StoredFact]:
        return await self._run(operations.memory_page(owner, tenant, chat_id, before, max_rows))

    async def lost_values(self, chat_id: Id, summary_id: str) -> list[LostValue]:
        return await self._run(operations.lost_values(chat_id, summary_id))

    async def start_over(self, chat_id: Id, note: str | None = None) -> Message:
        return await self._run(operations.start_over(chat_id, note))

    async def rewind(self, chat_id: Id, to_message_id: Id) -> list[ThreadRow]:
        return await self._run(operations.rewind(chat_id, to_message_id))

    async def fork(
        self,
        chat_id: Id,
        new_chat_id: Id | None = None,
        at_message_id: Id | None = None,
        *,
        owner: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        return await self._run(operations.fork(chat_id, new_chat_id, at_message_id, owner, metadata))

    async def redact(self, chat_id: Id, message_id: Id) -> Message:
        return await self._run(operations.redact(chat_id, message_id))

    async def drop_summary(self, chat_id: Id, summary_id: str) -> Message:
        return await self._run(operations.drop_summary(chat_id, summary_id))

    async def pin(self, chat_id: Id, message_id: Id) -> Pin:
        return await self._run(operations.pin(chat_id, message_id))

    async def unpin(self, chat_id: Id, message_id: Id) -> bool:
        return await self._run(operations.unpin(chat_id, message_id))

    async def set_system_prompt(self, chat_id: Id, system_prompt: str | None) -> int:
        return await self._run(operations.set_system_prompt(chat_id, system_prompt))

    async def set_chat_profile(self, chat_id: Id, profile: str) -> int:
        return await self._run(operations.set_chat_profile(chat_id, profile))

    async def delete_chat(self, chat_id: Id) -> dict[str, int]:
        return await self._run(operations.delete_chat(chat_id))

    async def forget_owner(self, owner: str, tenant: str | None = None) -> dict[str, int]:
        return await self._run(operations.forget_owner(owner, tenant))

    async def original(self, chat_id: Id, seq: int) -> list[ThreadRow]:
        return await self._run(operations.original(chat_id, seq))

    async def search(
        self, chat_id: Id, query: str, max_rows: int = 20, before_seq: int | None = None
    ) -> list[Found]:
        return await self._run(operations.search(chat_id, query, max_rows, before_seq))

    def tools(self, chat_id: Id, max_tokens: int = 2000) -> AsyncTools:
        return AsyncTools(self._runner, chat_id, max_tokens)

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
    ) -> AsyncTurn:
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
        return AsyncTurn(
            self._runner, request, self._encodings, self._choose, self._flush, self._choose_embedder
        )
