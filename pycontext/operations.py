"""What a database can be asked, as steps that sync and async run alike."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeVar

import psycopg

from pycontext import embeddings, messages, replies, tokens
from pycontext.embeddings import Embedder
from pycontext.messages import Id, identity, optional_identity
from pycontext.rows import (
    Explained,
    Found,
    LostValue,
    Message,
    Pin,
    Plan,
    Recalled,
    Status,
    StoredFact,
    ThreadRow,
    WindowRow,
    as_row,
)
from pycontext.steps import Call, Row, Steps

T = TypeVar("T")

FORMATS = ("openai", "anthropic")
_COUNTED_AT_ONCE = 1000


class Encodings:
    """Which encoding a chat counts in, as far as seen. A wrong guess costs an estimate, never a fault."""

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._known: dict[str, str] = {}

    def of(self, chat_id: str) -> str:
        """The chat's encoding, or the default profile's."""
        return self._known.get(chat_id, tokens.DEFAULT_ENCODING)

    def is_known(self, chat_id: str) -> bool:
        """False while `of` is a guess."""
        return chat_id in self._known

    def learn(self, chat_id: str, encoding: str) -> None:
        """Keep what a row of the database said."""
        if len(self._known) >= self._limit:
            self._known.clear()
        self._known[chat_id] = encoding


def fetch(kind: type[T], call: Call) -> Steps[list[T]]:
    """The call's rows as dataclasses."""
    records = yield call
    return [as_row(kind, record) for record in records]


def fetch_one(kind: type[T], call: Call) -> Steps[T]:
    """The call's only row."""
    rows = yield from fetch(kind, call)
    return rows[0]


def create_chat(
    chat_id: Id,
    system_prompt: str | None,
    profile: str | None,
    tenant: str | None,
    owner: str | None,
    source: str | None,
    metadata: Any,
) -> Steps[str]:
    """Get or create; returns the chat's id."""
    records = yield Call(
        "create_chat",
        {
            "chat_id": identity(chat_id),
            "system_prompt": messages.text(system_prompt),
            "profile": profile,
            "tenant": tenant,
            "owner": owner,
            "source": source,
            "metadata": None if metadata is None else messages.to_json(metadata),
        },
    )
    created: str = records[0]["chat_id"]
    return created


def append(
    chat_id: Id, given: Any, encodings: Encodings, request_id: str | None = None
) -> Steps[list[Message]]:
    """Write the messages in one transaction, with their counts; rows that exist are returned as they are.

    request_id: the message that they answer; nothing is written where that was taken back.
    """
    chat_id, elements = identity(chat_id), replies.elements(given)
    encoding = encodings.of(chat_id)
    counted = [messages.counted(element, encoding) for element in elements]
    records = yield Call(
        "append_messages",
        {"chat_id": chat_id, "messages": messages.to_json(counted), "request_id": request_id},
        is_repeatable=all("message_id" in element for element in elements),
    )
    if not encodings.is_known(chat_id) and any(record["encoding"] is None for record in records):
        # The guess may have been wrong. A full count learns the encoding, once.
        yield from count_tokens(chat_id, encodings)
    return [as_row(Message, record) for record in records]


def window(chat_id: Id, token_budget: int | None, as_of: Id | None) -> Steps[list[WindowRow]]:
    """What the model would read."""
    given = {
        "chat_id": identity(chat_id),
        "token_budget": token_budget,
        "as_of": optional_identity(as_of, "as_of"),
    }
    return fetch(WindowRow, Call("working_window", given))


def window_items(chat_id: Id, token_budget: int | None) -> Steps[list[Row]]:
    """What the model would read, each row with what `items` needs to make its Responses items."""
    rows: list[Row] = yield Call("window_items", {"chat_id": identity(chat_id), "token_budget": token_budget})
    return rows


def explain(
    chat_id: Id,
    token_budget: int | None,
    as_of: Id | None,
    search: str | None,
    before_seq: int | None,
    max_rows: int,
) -> Steps[list[Explained]]:
    """What became of each row in that window."""
    parameters = {
        "chat_id": identity(chat_id),
        "token_budget": token_budget,
        "as_of": optional_identity(as_of, "as_of"),
        "search": messages.text(search),
        "before_seq": before_seq,
        "max_rows": max_rows,
    }
    return fetch(Explained, Call("explain_window", parameters))


def formatted(chat_id: Id, token_budget: int | None, format: str) -> Steps[Any]:
    """The window in a provider's form."""
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, not {format!r}")
    records = yield Call(f"{format}_messages", {"chat_id": identity(chat_id), "token_budget": token_budget})
    return records[0]["messages"]


def thread(chat_id: Id, before_seq: int | None, max_rows: int) -> Steps[list[ThreadRow]]:
    """What was stored, the newest rows, oldest first."""
    given = {"chat_id": identity(chat_id), "before_seq": before_seq, "max_rows": max_rows}
    return fetch(ThreadRow, Call("thread", given))


def plan(chat_id: Id, token_budget: int | None) -> Steps[Plan]:
    """What compaction would do, and the numbers behind it."""
    given = {"chat_id": identity(chat_id), "token_budget": token_budget}
    return fetch_one(Plan, Call("compaction_plan", given))


def status(chat_id: Id, encodings: Encodings) -> Steps[Status]:
    """The chat's figures."""
    found = yield from fetch_one(Status, Call("window_status", {"chat_id": identity(chat_id)}))
    encodings.learn(found.chat_id, found.encoding)
    return found


def start_over(chat_id: Id, note: str | None) -> Steps[Message]:
    """Place a reset line after the newest message."""
    given = {"chat_id": identity(chat_id), "note": messages.text(note)}
    return fetch_one(Message, Call("start_over", given, is_repeatable=False))


def rewind(chat_id: Id, to_message_id: Id) -> Steps[list[ThreadRow]]:
    """Set aside what follows a message, or everything where that is ''."""
    at = "" if to_message_id == "" else identity(to_message_id, "to_message_id")
    given = {"chat_id": identity(chat_id), "to_message_id": at}
    return fetch(ThreadRow, Call("rewind_chat", given, is_repeatable=False))


def take_back(chat_id: Id, to_message_id: str, kept: Any, encodings: Encodings) -> Steps[bool]:
    """Set aside what follows a message and store what is kept of it, in one transaction.

    False: nothing followed, and nothing is stored.
    """
    chat_id = identity(chat_id)
    counted = [messages.counted(element, encodings.of(chat_id)) for element in replies.elements(kept)]
    given = {"chat_id": chat_id, "to_message_id": to_message_id, "messages": messages.to_json(counted)}
    return bool((yield Call("take_back", given, is_repeatable=False)))


def fork(
    chat_id: Id, new_chat_id: Id | None, at_message_id: Id | None, owner: str | None, metadata: Any
) -> Steps[str]:
    """A new chat with the rows up to a message; returns its id."""
    given = {
        "chat_id": identity(chat_id),
        "new_chat_id": optional_identity(new_chat_id, "new_chat_id"),
        "at_message_id": optional_identity(at_message_id, "at_message_id"),
        "owner": owner,
        "metadata": None if metadata is None else messages.to_json(metadata),
    }
    records = yield Call("fork_chat", given, is_repeatable=new_chat_id is not None)
    made: str = records[0]["chat_id"]
    return made


def redact(chat_id: Id, message_id: Id) -> Steps[Message]:
    """Erase what a message said, wherever it went."""
    return fetch_one(Message, Call("redact_message", _message(chat_id, message_id)))


def drop_summary(chat_id: Id, summary_id: str) -> Steps[Message]:
    """Take a summary back."""
    return fetch_one(Message, Call("drop_summary", {"chat_id": identity(chat_id), "summary_id": summary_id}))


def pin(chat_id: Id, message_id: Id) -> Steps[Pin]:
    """Keep a message in every window."""
    return fetch_one(Pin, Call("pin_message", _message(chat_id, message_id)))


def unpin(chat_id: Id, message_id: Id) -> Steps[bool]:
    """Take a pin off; False where there was none."""
    records = yield Call("unpin_message", _message(chat_id, message_id))
    return bool(records)


def set_system_prompt(chat_id: Id, system_prompt: str | None) -> Steps[int]:
    """Another system prompt from now on; returns the act it holds from."""
    given = {"chat_id": identity(chat_id), "system_prompt": messages.text(system_prompt)}
    records = yield Call("set_system_prompt", given)
    act_no: int = records[0]["act_no"]
    return act_no


def set_chat_profile(chat_id: Id, profile: str) -> Steps[int]:
    """Other limits from now on; returns the act they hold from."""
    records = yield Call("set_chat_profile", {"chat_id": identity(chat_id), "profile": profile})
    act_no: int = records[0]["act_no"]
    return act_no


def delete_chat(chat_id: Id) -> Steps[dict[str, int]]:
    """Delete a chat; returns how many rows of which relation."""
    records = yield Call("delete_chat", {"chat_id": identity(chat_id)}, is_repeatable=False)
    return {record["relation"]: record["rows"] for record in records}


def forget_owner(owner: str, tenant: str | None) -> Steps[dict[str, int]]:
    """Delete all that is an owner's; returns how many rows of which relation."""
    records = yield Call("forget_owner", {"owner": owner, "tenant": tenant}, is_repeatable=False)
    return {record["relation"]: record["rows"] for record in records}


def original(chat_id: Id, seq: int, for_model: bool = False) -> Steps[list[ThreadRow]]:
    """What was stored at a seq."""
    given = {"chat_id": identity(chat_id), "seq": seq, "for_model": for_model}
    return fetch(ThreadRow, Call("message_original", given))


def search(
    chat_id: Id, query: str, max_rows: int, before_seq: int | None, for_model: bool = False
) -> Steps[list[Found]]:
    """Messages that hold every word of the query."""
    given = {
        "chat_id": identity(chat_id),
        "query": messages.text(query),
        "max_rows": max_rows,
        "before_seq": before_seq,
        "for_model": for_model,
    }
    return fetch(Found, Call("search_thread", given))


def remember(chat_id: Id, content: str, subject: str | None, kind: str | None) -> Steps[StoredFact]:
    """Keep a fact on purpose."""
    given = {
        "content": messages.text(content),
        "subject": messages.text(subject),
        "kind": messages.text(kind),
    }
    return fetch_one(StoredFact, Call("remember", {"chat_id": identity(chat_id), **given}))


def recall(
    chat_id: Id,
    query: str | None,
    query_embedding: Sequence[float] | None,
    max_rows: int,
    max_tokens: int | None,
    embedder: Embedder | None = None,
) -> Steps[list[Recalled]]:
    """Facts and past messages that fit the query; embedder: what embeds it, where it comes without."""
    given: dict[str, Any] = {
        "chat_id": identity(chat_id),
        "query": messages.text(query),
        "query_embedding": None if query_embedding is None else embeddings.vector(query_embedding),
        "max_rows": max_rows,
        "max_tokens": max_tokens,
        "embedding_model": None,
    }
    if query_embedding is None and embedder is not None and (query or "").strip():
        given["query_embedding"] = yield from embeddings.query(given["query"], embedder)
        given["embedding_model"] = embedder.name
        try:
            return (yield from fetch(Recalled, Call("recall", given)))
        except psycopg.errors.FeatureNotSupported as error:
            embeddings.logger.warning("recall goes by words alone: %s", error.diag.message_primary)
            given["query_embedding"] = None
    return (yield from fetch(Recalled, Call("recall", given)))


def forget(chat_id: Id, fact_id: str | None, query: str | None) -> Steps[int]:
    """Forget one fact, or all that hold the query's words; returns how many went."""
    given = {
        "chat_id": identity(chat_id),
        "fact_id": messages.text(fact_id),
        "query": messages.text(query),
    }
    records = yield Call("forget", given)
    forgotten: int = records[0]["forgotten"]
    return forgotten


def memory_page(
    owner: str | None, tenant: str | None, chat_id: Id | None, before: datetime | None, max_rows: int
) -> Steps[list[StoredFact]]:
    """What is remembered of an owner."""
    given = {
        "owner": owner,
        "tenant": tenant,
        "chat_id": optional_identity(chat_id),
        "before": before,
        "max_rows": max_rows,
    }
    return fetch(StoredFact, Call("memory_page", given))


def lost_values(chat_id: Id, summary_id: str) -> Steps[list[LostValue]]:
    """What a line lost."""
    return fetch(LostValue, Call("lost_values", {"chat_id": identity(chat_id), "summary_id": summary_id}))


def count_tokens(chat_id: Id, encodings: Encodings) -> Steps[int]:
    """Count what no tokenizer has counted yet; returns how many rows."""
    chat_id = identity(chat_id)
    total = 0
    while True:
        records = yield Call("uncounted_messages", {"chat_id": chat_id, "max_rows": _COUNTED_AT_ONCE})
        if not records:
            return total
        encoding: str = records[0]["encoding"]
        encodings.learn(chat_id, encoding)
        if encoding not in tokens.known_encodings():  # left to the estimates
            return total
        counts = [
            {
                "seq": record["seq"],
                "line_no": record["line_no"],
                "tokens": record["overhead"] + sum(tokens.count(text, encoding) for text in record["texts"]),
            }
            for record in records
        ]
        parameters = {"chat_id": chat_id, "encoding": encoding, "counts": messages.to_json(counts)}
        updated: int = (yield Call("cache_token_counts", parameters))[0]["updated"]
        total += updated
        if not updated or len(records) < _COUNTED_AT_ONCE:
            return total


def _message(chat_id: Id, message_id: Id) -> dict[str, str]:
    return {"chat_id": identity(chat_id), "message_id": identity(message_id, "message_id")}
