"""Read conversations from JSONL and check them, before anything is written. No database, no terminal.

A line is an object {"id"?, "messages": [...], ...}; the messages are OpenAI chat-completion messages, each
with optional created_at, message_id, metadata and any other key. `read_conversations` yields, line by line,
a `Conversation` ready for append_messages, or the `ImportProblem` that keeps it out, with line and field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from math import isinf
from typing import Any, NoReturn

from pycontext.clean import clean

ROLES = ("system", "developer", "user", "assistant", "tool")
_PROMPT_ROLES = ("system", "developer")
_CHAT_KEYS = frozenset({"id", "messages"})
_MESSAGE_KEYS = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "name"}
    | {"message_id", "created_at", "metadata", "tokens"}
)
_BOM = b"\xef\xbb\xbf"


class ImportProblem(ValueError):
    """What is wrong with one line. field: a path such as messages[3].role; None is the line as a whole."""

    def __init__(self, line: int, field: str | None, message: str, hint: str | None = None) -> None:
        self.line = line
        self.field = field
        self.message = message
        self.hint = hint
        super().__init__(f"line {line}, {field}: {message}" if field else f"line {line}: {message}")


@dataclass(frozen=True)
class Conversation:
    """One checked conversation: messages are elements for append_messages, without token counts."""

    line: int
    chat_id: str
    system_prompt: str | None
    messages: tuple[dict[str, Any], ...]
    metadata: dict[str, Any]


class _Invalid(Exception):
    def __init__(self, field: str | None, message: str, hint: str | None = None) -> None:
        self.field = field
        self.message = message
        self.hint = hint
        super().__init__(message)


def read_conversations(
    lines: Iterable[bytes], *, default_id: str, chat_id: str | None = None, prefix: str = ""
) -> Iterator[Conversation | ImportProblem]:
    """Yield each non-blank line as a Conversation, or as the ImportProblem that keeps it out.

    The chat id is prefix + the line's "id", else prefix + default_id + "-" + the line number. chat_id names
    the only conversation of the lines; a second one is a problem. Two lines with one id are a problem too.
    """
    taken: dict[str, int] = {}
    for number, raw in enumerate(lines, 1):
        if number == 1:
            raw = raw.removeprefix(_BOM)
        if not raw.strip():
            continue
        try:
            fields = _parse(raw)
            identity = _chat_id(fields, f"{default_id}-{number}", chat_id, prefix)
            if identity in taken:
                if chat_id is not None:
                    raise _Invalid(None, "--chat-id is for one conversation, and this is a second one")
                raise _Invalid("id", f"{identity!r} is already the id of line {taken[identity]}")
            taken[identity] = number
            yield _conversation(number, identity, fields)
        except _Invalid as error:
            yield ImportProblem(number, error.field, error.message, error.hint)
        except RecursionError:
            yield ImportProblem(number, None, "nested too deeply")


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Invalid(None, f"not UTF-8 (byte {error.start + 1} of the line)") from None
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_float)
    except json.JSONDecodeError as error:
        hint = "the file must be JSONL: one whole conversation on each line"
        raise _Invalid(None, f"not JSON: {error.msg} (column {error.colno})", hint) from None
    except ValueError as error:
        raise _Invalid(None, f"not JSON: {error}") from None
    value = clean(value)
    if not isinstance(value, dict):
        raise _Invalid(None, f"must be an object with messages, not {_kind(value)}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise ValueError(f"number out of range: {text[:40]}")
    return value


def _chat_id(fields: dict[str, Any], default: str, chat_id: str | None, prefix: str) -> str:
    if chat_id is not None:
        return chat_id
    given = fields.get("id")
    if given is None:
        return prefix + default
    if isinstance(given, str) and given.strip():
        return prefix + given
    if isinstance(given, int) and not isinstance(given, bool):
        return f"{prefix}{given}"
    shown = _kind(given) if given else repr(given)
    raise _Invalid("id", f"must be a non-empty string or a whole number, not {shown}")


def _conversation(line: int, chat_id: str, fields: dict[str, Any]) -> Conversation:
    if fields.get("messages") is None:
        raise _Invalid("messages", "missing")
    messages = fields["messages"]
    if not isinstance(messages, list):
        raise _Invalid("messages", f"must be a list, not {_kind(messages)}")
    if not messages:
        raise _Invalid("messages", "is empty")
    metadata = {key: value for key, value in fields.items() if key not in _CHAT_KEYS}
    prompts: list[str] = []
    rows: list[dict[str, Any]] = []
    ids: dict[str, int] = {}
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        row = _message(at, index, message)
        if row["message_id"] in ids:
            taken = f"{row['message_id']!r} is already the id of messages[{ids[row['message_id']]}]"
            raise _Invalid(f"{at}.message_id", taken)
        ids[row["message_id"]] = index
        if row["role"] in _PROMPT_ROLES and not rows:
            prompts.append(_prompt_text(at, row["content"]))
            if "metadata" in row:
                metadata.setdefault("system_prompt", []).append(row["metadata"])
        else:
            rows.append(row)
    prompt = "\n\n".join(text for text in prompts if text)
    return Conversation(line, chat_id, prompt or None, tuple(rows), metadata)


def _message(at: str, index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _Invalid(at, f"must be an object, not {_kind(message)}")
    role = message.get("role")
    if role is None:
        raise _Invalid(f"{at}.role", "missing")
    if role not in ROLES:
        raise _Invalid(f"{at}.role", f"{_shown(role)} is none of {', '.join(ROLES)}")
    row: dict[str, Any] = {
        "role": role,
        "content": _content(f"{at}.content", role, message.get("content")),
        "message_id": _message_id(f"{at}.message_id", message.get("message_id"), index),
    }
    extra = {key: value for key, value in message.items() if key not in _MESSAGE_KEYS}
    calls = _tool_calls(f"{at}.tool_calls", role, message.get("tool_calls"))
    if calls:
        row["tool_calls"] = calls
    call_id = message.get("tool_call_id")
    if role == "tool":
        row["tool_call_id"] = _text(f"{at}.tool_call_id", call_id, "missing: a tool result names its call")
    elif call_id is not None:
        extra["tool_call_id"] = call_id
    if message.get("name") is not None:
        row["name"] = _text(f"{at}.name", message["name"])
    if message.get("created_at") is not None:
        row["created_at"] = _time(f"{at}.created_at", message["created_at"])
    given = message.get("metadata")
    if given is not None and not isinstance(given, dict):
        raise _Invalid(f"{at}.metadata", f"must be an object, not {_kind(given)}")
    if extra or given:
        row["metadata"] = {**extra, **(given or {})}
    return row


def _content(at: str, role: str, content: Any) -> Any:
    if isinstance(content, str):
        return content
    if content is None:
        if role in ("assistant", "tool"):
            return None
        raise _Invalid(at, "missing")
    if not isinstance(content, list):
        raise _Invalid(at, f"must be a string, a list of parts or null, not {_kind(content)}")
    for index, part in enumerate(content):
        here = f"{at}[{index}]"
        if not isinstance(part, dict):
            raise _Invalid(here, f"must be an object, not {_kind(part)}")
        kind = _text(f"{here}.type", part.get("type"))
        if kind == "text" and not isinstance(part.get("text"), str):
            raise _Invalid(f"{here}.text", _wrong("a string", part.get("text")))
        if kind == "image_url":
            image = part.get("image_url")
            if not isinstance(image, dict):
                raise _Invalid(f"{here}.image_url", _wrong("an object with url", image))
            _text(f"{here}.image_url.url", image.get("url"))
    return content


def _prompt_text(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part["type"] != "text":
            raise _Invalid(
                f"{at}.content[{index}].type", f"a system prompt is text, not {_shown(part['type'])}"
            )
    return "\n\n".join(part["text"] for part in content)


def _tool_calls(at: str, role: str, calls: Any) -> list[dict[str, Any]]:
    if calls is None or calls == []:
        return []
    if not isinstance(calls, list):
        raise _Invalid(at, f"must be a list, not {_kind(calls)}")
    if role != "assistant":
        raise _Invalid(at, f"only an assistant message has tool calls, not one of role {role}")
    ids: dict[str, int] = {}
    for index, call in enumerate(calls):
        here = f"{at}[{index}]"
        if not isinstance(call, dict):
            raise _Invalid(here, f"must be an object, not {_kind(call)}")
        _text(f"{here}.id", call.get("id"))
        if call.get("type", "function") != "function":
            raise _Invalid(f"{here}.type", f"must be 'function', not {_shown(call['type'])}")
        function = call.get("function")
        if not isinstance(function, dict):
            raise _Invalid(f"{here}.function", _wrong("an object with name and arguments", function))
        _text(f"{here}.function.name", function.get("name"))
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, (str, dict)):
            raise _Invalid(
                f"{here}.function.arguments", _wrong("a string (the JSON text as it came)", arguments)
            )
        if call["id"] in ids:
            raise _Invalid(f"{here}.id", f"{call['id']!r} is already the id of tool_calls[{ids[call['id']]}]")
        ids[call["id"]] = index
    return calls


def _message_id(at: str, given: Any, index: int) -> str:
    if given is None:
        return f"import-{index}"
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given)
    return _text(at, given)


def _time(at: str, value: Any) -> str:
    """created_at as ISO text with an offset: ISO 8601 (no offset = UTC) or seconds since 1970."""
    try:
        if isinstance(value, str):
            moment = datetime.fromisoformat(_as_python_310(value.strip()))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            moment = datetime.fromtimestamp(value, timezone.utc)
        else:
            raise _Invalid(at, f"must be an ISO 8601 time or seconds since 1970, not {_kind(value)}")
    except (ValueError, OverflowError, OSError):
        raise _Invalid(at, f"{_shown(value)} is not a time (ISO 8601 or seconds since 1970)") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.isoformat()


def _as_python_310(text: str) -> str:
    """ISO text as datetime.fromisoformat of Python 3.10 reads it: no Z, and a fraction of six digits."""
    if text[-1:] in ("Z", "z"):
        text = text[:-1] + "+00:00"
    head, dot, rest = text.partition(".")
    if not dot:
        return text
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return f"{head}.{digits[:6].ljust(6, '0')}{rest[len(digits) :]}"


def _text(at: str, value: Any, missing: str = "missing") -> str:
    if value is None:
        raise _Invalid(at, missing)
    if not isinstance(value, str):
        raise _Invalid(at, f"must be a string, not {_kind(value)}")
    if not value:
        raise _Invalid(at, "is empty")
    return value


def _wrong(wanted: str, value: Any) -> str:
    return "missing" if value is None else f"must be {wanted}, not {_kind(value)}"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    kinds = ((str, "a string"), ((int, float), "a number"), (list, "a list"), (dict, "an object"))
    return next(name for types, name in kinds if isinstance(value, types))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
