"""Tools for the model: keep and drop facts, fetch what the window left out. Schemas, and what runs a call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from pycontext import messages, operations, tokens
from pycontext.async_connections import AsyncRunner
from pycontext.connections import Runner
from pycontext.errors import BadMessage
from pycontext.messages import Id, identity
from pycontext.rows import Found, Recalled, ThreadRow
from pycontext.scrub import escaped
from pycontext.steps import Steps, documented_as

__all__ = ["FORMATS", "NAMES", "AsyncTools", "Tools", "call", "schemas"]

FORMATS = ("openai", "responses", "anthropic")

_SEQ = {"type": "integer", "description": "The number after #, as in #412."}
_WORDS = {"type": "string", "description": "A few words, in the language of what is looked for."}
_TOOLS: Mapping[str, tuple[str, dict[str, Any], list[str]]] = {
    "remember": (
        "Keep a fact about the user or his work for good, for later conversations too: what he is called,"
        " likes, decided, is working on. Not for what matters only now, and never for passwords or keys.",
        {
            "content": {"type": "string", "description": "The fact, in one sentence that stands alone."},
            "subject": {
                "type": "string",
                "description": "What it is about, as one name such as user.city; a newer fact about the same"
                " subject takes the place of the older one.",
            },
        },
        ["content"],
    ),
    "forget": (
        "Forget facts that were kept: the one with this id, or all that hold every word of the query. Use it"
        " when the user asks for it, or when a fact turned out to be wrong.",
        {
            "fact_id": {"type": "string", "description": "The id of a fact, as recall shows it."},
            "query": {"type": "string", "description": "Words that all have to be in a fact."},
        },
        [],
    ),
    "recall": (
        "Look up what is known from earlier conversations with this user, and from the part of this one that"
        " is only summarized here: facts and passages that fit the query.",
        {"query": _WORDS},
        ["query"],
    ),
    "search_thread": (
        "Find messages of this conversation, also those that are no longer shown here, by words that they"
        " hold. Returns their numbers, newest first, with a line of each.",
        {
            "query": {"type": "string", "description": "Words that all have to be in a message."},
            "before_seq": {**_SEQ, "description": "Only messages before this number, to see older ones."},
        },
        ["query"],
    ),
    "message_original": (
        "Read a message of this conversation in full by its number, such as one that was shortened or left"
        " out here (#412).",
        {
            "seq": _SEQ,
            "offset": {
                "type": "integer",
                "description": "Where to read on in a long message, in characters.",
            },
        },
        ["seq"],
    ),
}

#: The tools there are.
NAMES = tuple(_TOOLS)

_MAX_ROWS = 10


def schemas(format: str = "openai", names: Sequence[str] = NAMES) -> list[dict[str, Any]]:
    """The tools as a request takes them.

    format: 'openai' (chat completions), 'responses' or 'anthropic'. names: only these. ValueError for others.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, not {format!r}")
    unknown = [name for name in names if name not in _TOOLS]
    if unknown:
        raise ValueError(f"no such tools: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return [_schema(name, format) for name in names]


def _schema(name: str, format: str) -> dict[str, Any]:
    description, properties, required = _TOOLS[name]
    parameters = {
        "type": "object",
        "properties": json.loads(json.dumps(properties)),
        "required": list(required),
        "additionalProperties": False,
    }
    if format == "anthropic":
        return {"name": name, "description": description, "input_schema": parameters}
    function = {"name": name, "description": description, "parameters": parameters}
    if format == "responses":
        return {"type": "function", **function, "strict": False}
    return {"type": "function", "function": function}


class ToolsCore:
    """The tools of one chat, sync or async."""

    def __init__(self, chat_id: Id, max_tokens: int) -> None:
        self._chat_id = identity(chat_id)
        self._max_tokens = max_tokens

    def __contains__(self, name: object) -> bool:
        """Whether a call of that name is for these tools."""
        return name in _TOOLS

    def schemas(self, format: str = "openai", names: Sequence[str] = NAMES) -> list[dict[str, Any]]:
        """As `pycontext.tools.schemas`."""
        return schemas(format, names)


class Tools(ToolsCore):
    """The tools of one chat; made by `Database.tools`.

    What they return is text for the model, of at most max_tokens tokens, and so is what is wrong with a call:
    arguments that do not fit never raise. They reach this chat after its newest reset, and what is remembered
    of its owner, nothing else.
    """

    def __init__(self, runner: Runner, chat_id: Id, max_tokens: int = 2000) -> None:
        super().__init__(chat_id, max_tokens)
        self._runner = runner

    def call(self, name: str, arguments: str | Mapping[str, Any] | None) -> str:
        """Run a call and return the text of its result.

        arguments: as the model wrote them, JSON text or an object. A failing database raises, and NoSuchChat.
        SQL: remember, forget, recall, search_thread, message_original.
        """
        return self._runner.run(call(self._chat_id, name, arguments, self._max_tokens))


@documented_as(Tools)
class AsyncTools(ToolsCore):
    """`Tools`, awaited. Made by `AsyncDatabase.tools`."""

    def __init__(self, runner: AsyncRunner, chat_id: Id, max_tokens: int = 2000) -> None:
        super().__init__(chat_id, max_tokens)
        self._runner = runner

    async def call(self, name: str, arguments: str | Mapping[str, Any] | None) -> str:
        return await self._runner.run(call(self._chat_id, name, arguments, self._max_tokens))


class _Wrong(Exception):
    """A call that can't be run; the text is for the model."""


def call(chat_id: str, name: str, arguments: Any, max_tokens: int = 2000) -> Steps[str]:
    """The result of one call, as steps."""
    try:
        told = yield from _run(chat_id, name, _Arguments(name, arguments), max_tokens)
    except _Wrong as error:
        told = f"error: {error}"
    except BadMessage as error:
        # a hint may be for who writes SQL
        hint = f"; {error.hint}" if error.hint and "pycontext." not in error.hint else ""
        told = f"error: {error.message}{hint}"
    return _fitted(told, max_tokens)


def _run(chat_id: str, name: str, given: _Arguments, max_tokens: int) -> Steps[str]:
    if name == "remember":
        content, subject = given.text("content"), given.text("subject", is_needed=False)
        fact = yield from operations.remember(chat_id, content or "", subject, None)
        return f"Kept as {fact.fact_id}: {fact.content}"
    if name == "forget":
        fact_id, query = given.text("fact_id", is_needed=False), given.text("query", is_needed=False)
        if (fact_id is None) == (query is None):
            raise _Wrong("give either fact_id or query; recall shows the ids")
        count = yield from operations.forget(chat_id, fact_id, query)
        return (
            f"Forgot {count} facts."
            if count
            else "Nothing was forgotten: no such fact. recall shows what is kept."
        )
    if name == "recall":
        query = given.text("query")
        found = yield from operations.recall(chat_id, query, None, _MAX_ROWS, max_tokens // 2)
        return _recalled(found)
    if name == "search_thread":
        query, before = given.text("query"), given.integer("before_seq", is_needed=False)
        rows = yield from operations.search(chat_id, query or "", _MAX_ROWS, before, for_model=True)
        return _found(rows)
    seq, offset = given.integer("seq"), given.integer("offset", is_needed=False)
    stored = yield from operations.original(chat_id, seq or 0, for_model=True)
    return _original(seq or 0, stored, offset or 0, max_tokens)


class _Arguments:
    """What the model gave, checked field by field; what is wrong is told in words it can act on."""

    def __init__(self, name: str, given: Any) -> None:
        if name not in _TOOLS:
            raise _Wrong(f"there is no tool {name!r}; there are {', '.join(NAMES)}")
        self._form = f"{name} takes {json.dumps(_TOOLS[name][1], ensure_ascii=False)}"
        if isinstance(given, str):
            try:
                given = json.loads(given) if given.strip() else {}
            except (ValueError, RecursionError):
                raise _Wrong(f"the arguments are not JSON; {self._form}") from None
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            raise _Wrong(f"the arguments must be an object; {self._form}")
        self._given = given

    def text(self, key: str, is_needed: bool = True) -> str | None:
        value = self._given.get(key)
        if value is None or (isinstance(value, str) and not value.strip()):
            if is_needed:
                raise _Wrong(f"{key} is missing; {self._form}")
            return None
        if not isinstance(value, str):
            raise _Wrong(f"{key} must be text; {self._form}")
        return value

    def integer(self, key: str, is_needed: bool = True) -> int | None:
        value = self._given.get(key)
        if value is None and not is_needed:
            return None
        if isinstance(value, str) and value.strip().removeprefix("#").isdecimal():
            value = int(value.strip().removeprefix("#"))
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
            raise _Wrong(f"{key} must be a whole number; {self._form}")
        return value


def _recalled(rows: Sequence[Recalled]) -> str:
    if not rows:
        return "Nothing that is remembered fits. Other words may find more."
    lines = []
    for row in rows:
        if row.kind == "fact":
            subject = f"{row.subject}: " if row.subject else ""
            lines.append(f"- {row.fact_id}, {_day(row.stated_at)}: {subject}{row.content}")
        else:
            lines.append(
                f"- {row.role} said, {_day(row.stated_at)}, #{row.seq} of chat {row.chat_id}: {row.content}"
            )
            lines += [f"  {near['role']}, #{near['seq']}: {near['content']}" for near in row.also or ()]
    # the fence keeps it out of summaries, and from being learnt again
    return "\n".join(["<memory-context>", *map(escaped, lines), "</memory-context>"])


def _found(rows: Sequence[Found]) -> str:
    if not rows:
        return "No message here holds all of these words. Try fewer words, or their stems."
    lines = [
        f"#{row.seq} {row.role}, {_day(row.created_at)}, {row.tokens} tokens: {row.preview}" for row in rows
    ]
    if len(rows) == _MAX_ROWS:
        lines.append(f"There may be more: before_seq {rows[-1].seq}. message_original reads one in full.")
    return "\n".join(lines)


def _original(seq: int, rows: Sequence[ThreadRow], offset: int, max_tokens: int) -> str:
    message = next((row for row in rows if row.kind == "message"), None)
    if message is None:
        return f"error: there is no message #{seq} to be read; search_thread finds messages by their words"
    text = _readable(message)
    part = _cut(text[offset:], max_tokens - 60)
    if not part:
        return f"error: message #{seq} has {len(text)} characters; offset must be less"
    told = f"#{seq} {message.role}, {_day(message.created_at)}:\n{part}"
    end = offset + len(part)
    if offset or end < len(text):
        told += f"\n[characters {offset} to {end} of {len(text)}" + (
            f"; go on with offset {end}]" if end < len(text) else "]"
        )
    return told


def _readable(row: ThreadRow) -> str:
    parts = row.content if isinstance(row.content, list) else [row.content]
    told = [_part(part) for part in parts if part is not None]
    for tool_call in row.tool_calls or ():
        function = tool_call.get("function") or {}
        told.append(f"calls {function.get('name')}({function.get('arguments')})")
    return "\n".join(filter(None, told)) or "(empty)"


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        kind = part.get("type")
        if kind in tokens.IMAGE_TYPES:
            return "[image]"
        if kind in tokens.REASONING_TYPES:
            return ""
        if isinstance(part.get("text"), str):
            return str(part["text"])
    return messages.to_json(part)


def _day(at: datetime) -> str:
    return at.astimezone(timezone.utc).strftime("%Y-%m-%d")


def _fitted(text: str, max_tokens: int) -> str:
    part = _cut(text, max_tokens)
    return part if len(part) == len(text) else _cut(text, max_tokens - 4) + " […]"


def _cut(text: str, max_tokens: int) -> str:
    """The beginning of text, at most max_tokens of it."""
    size = 6 * max_tokens
    while size > 0:
        part = text[:size]
        count = tokens.count(part)
        if count <= max_tokens:
            return part
        size = min(len(part) * max_tokens // count, len(part) - 1)
    return ""
