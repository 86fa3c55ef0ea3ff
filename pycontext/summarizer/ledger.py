"""What a chat touched, read by code from its tool calls: files, ids, URLs, and how each call came out.

Models lose exactly these, so no model is asked for them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pycontext.summarizer.wording import Labels
from pycontext.summary import SourceMessage, clip, one_line

_HEAD, _TAIL = 3000, 1500
"""Characters of a result that are looked at from its start and its end."""

_PATH_KEYS = frozenset(
    [
        "path",
        "paths",
        "file",
        "files",
        "filepath",
        "filepaths",
        "filename",
        "filenames",
        "targetfile",
        "notebookpath",
        "absolutepath",
        "relativepath",
        "targetpath",
        "outputpath",
        "outputfile",
        "inputfile",
        "newpath",
        "oldpath",
        "destinationpath",
        "sourcepath",
    ]
)
_PERHAPS_PATH_KEYS = frozenset(
    ["destination", "dest", "dst", "source", "src", "target", "to", "from", "input", "output"]
)
_COMMAND_KEYS = ("command", "cmd", "script", "code", "shellcommand", "commandline", "bash", "keystrokes")
_URL_KEYS = frozenset(["url", "urls", "uri", "href", "link", "endpoint", "website"])
_CONTENT_KEYS = frozenset(
    [
        "content",
        "contents",
        "text",
        "filetext",
        "newtext",
        "newstr",
        "newstring",
        "newcontent",
        "codeedit",
        "patch",
        "diff",
        "edits",
        "insert",
        "replacement",
    ]
)
_MAIN_KEYS = (
    "query",
    "q",
    "pattern",
    "regex",
    "search",
    "searchterm",
    "question",
    "expression",
    "symbol",
    "name",
    "title",
    "city",
    "location",
    "subject",
    "topic",
    "keyword",
    "word",
    "prompt",
    "message",
    "thought",
    "description",
    "text",
    "key",
)
_ID_KEY = re.compile(
    r"(?:^|_|[a-z])(?:id|ids|uuid|guid|number|ref|reference|code|sku|ticket|isbn|vin|email|iban)$",
    re.IGNORECASE,
)
_NO_ID = frozenset(
    [
        "code",
        "number",
        "reference",
        "line_number",
        "linenumber",
        "page_number",
        "page_id",
        "country_code",
        "currency_code",
        "zip_code",
        "language_code",
        "status_code",
        "tool_call_id",
    ]
)
_ACTS = {  # the acts of one-tool editors, named by their argument `command`
    "view": "read",
    "create": "written",
    "str_replace": "edited",
    "insert": "edited",
    "undo_edit": "edited",
    "delete": "deleted",
    "write": "written",
    "read": "read",
    "append": "edited",
    "rename": "written",
}
_VERBS = (
    ("deleted", re.compile(r"delete|remove|unlink|trash|(?:^|_)rm(?:_|$)", re.I)),
    ("edited", re.compile(r"edit|replace|patch|update|modify|refactor|insert|append|apply", re.I)),
    (
        "written",
        re.compile(
            r"write|create|save|put|upload|generate|export|download|move|rename|copy|mkdir|touch", re.I
        ),
    ),
    (
        "read",
        re.compile(
            r"read|open|view|cat|get|fetch|load|list|ls|find|grep|search|glob|stat|show|look|browse", re.I
        ),
    ),
)
_LOOKS_PATH = re.compile(r"(?:~|\.{1,2}|[A-Za-z]:)?[/\\]\S|[\w.-]+/[\w./-]+$|[\w.-]+\.\w{1,5}$")
_PATCH_FILE = re.compile(
    r"^\*\*\* (Add|Update|Delete) File: (.{1,300})$|^\+\+\+ (?:b/)?([^\s]{1,300})", re.MULTILINE
)
_LOOSE = re.compile(r'["\']([A-Za-z_]{1,30})["\']\s*:\s*"((?:[^"\\]|\\.){1,4000})"?')
_PATH_CHARS = r"[^\s;|&<>()\"'$`]{1,300}"
_SHELL_WRITES = (
    ("written", re.compile(rf"(?<![0-9&<>=-])>>?\s*['\"]?({_PATH_CHARS})")),
    ("written", re.compile(rf"\btee\s+(?:-a\s+)?['\"]?({_PATH_CHARS})")),
    (
        "written",
        re.compile(
            rf"(?:^|[;&|]\s*)(?:touch|cp"
            rf"|mv)\s+(?:-\w+\s+)*(?:[^\s;|&]+\s+)*?['\"]?({_PATH_CHARS})['\"]?\s*(?=$|[;&|\n])",
            re.M,
        ),
    ),
    (
        "edited",
        re.compile(
            rf"\bsed\s+(?:-[A-Za-z]+\s+)*-i(?:\.\w+)?(?:\s+''|\s+\"\")?\s+(?:-e\s+)?(?:'[^']*'|\"[^\"]*\""
            rf"|\S+)\s+['\"]?({_PATH_CHARS})"
        ),
    ),
    (
        "deleted",
        re.compile(rf"(?:^|[;&|]\s*|sudo\s+)(?:rm|unlink)\s+(?:-\w+\s+)*['\"]?({_PATH_CHARS})", re.M),
    ),
)
_SHELL_READS = re.compile(
    rf"(?:^|[;&|]\s*)(?:cat|head|tail|less|wc)\s+(?:-\w+\s+|-n\s+\d+\s+|\d+\s+)*['\"]?({_PATH_CHARS})", re.M
)
_URL = re.compile(r"https?://[^\s\"'<>\\)\]}]{3,300}")

_EXIT = re.compile(
    r"(?:exit(?:ed)?|return(?:ed)?|finished|completed|process"
    r"|command)[ _-]?(?:with )?[ _-]?(?:exit[ _-]?)?(?:code|status)\"?['\"]?\s*[:=]?\s*(-?\d{1,3})\b"
    r"|\"(?:exit_?code|returncode|status_?code)\"\s*:\s*(-?\d{1,3})",
    re.IGNORECASE,
)
_ERROR = re.compile(
    r"^\W{0,8}(?:fatal|error|err!|npm err|exception|traceback|panic|failed|failure|cannot|could not|can'?t"
    r"|unable|invalid|no such|not found|permission denied|access denied|command aborted"
    r"|aborted|timed? ?out|ran into|ошибка|не удалось|отказано|错误|失败|无法|异常|エラー|失敗|できません)"
    r"|^[\w./-]{0,120}:\s(?:fatal|error|no such|not found|cannot|permission denied|command not found)"
    r"|(?:^|[\s:])(?:[A-Z][A-Za-z]*(?:Error|Exception))(?::|$)|\berror(?: TS\d+|\[E\d+\])?:"
    r"|\bcommand not found\b|\bNo such file or directory\b"
    r"|^\s*(?:FAIL(?:ED)?|✗|✖|×)\b|\b[1-9]\d* (?:failed|failures?|errors?)\b",
    re.IGNORECASE,
)
_TALLY = re.compile(
    r"\b\d+ (?:tests? )?(?:passed|failed|passing|failing|skipped|errors?|warnings?|files? changed"
    r"|insertions?|deletions?|results?|matches|items?|rows?)\b"
    r"(?:[,;| (]+\d+ (?:tests? )?(?:passed|failed|passing|failing|skipped|pending|errors?|warnings?"
    r"|insertions?|deletions?)\b\(?[+-]?\)?)*"
    r"|\b(?:found|найдено|找到了?|共)\s*\d+\s*\w*|(?:pass|fail)\s+\d+(?=\s|$)",
    re.IGNORECASE,
)
_STEERS = re.compile(  # a line of a result that speaks to the model is no outcome
    r"</?\w[\w-]*>|^\W*(?:system|assistant|user|developer|human|ai)\s*[:>]|ignore (?:all |any |the "
    r"|your )*(?:previous|above|prior)|disregard (?:all|any|the|your)"
    r"|from now on|you must|you are now|summary (?:must|should)|new instructions?|(?:отныне|с этого момента"
    r"|игнорируй)|(?:从现在(?:开始|起)|忽略(?:以上|之前))",
    re.IGNORECASE,
)


@dataclass
class Call:
    """One tool call with its result, if one came."""

    seq: int
    id: str
    tool: str
    arguments: Any
    raw: str
    result: str | None = None
    result_seq: int = 0
    outcome: str = ""
    is_error: bool = False

    @property
    def fields(self) -> list[tuple[str, str]]:
        """Every scalar argument at any depth, as (key in lower case letters only, text)."""
        return list(_walk(self.arguments))


@dataclass
class Touched:
    """A file, URL or id, and what was last done to it."""

    name: str
    act: str
    seq: int
    is_failed: bool = False
    changes: int = 0


@dataclass
class Ledger:
    """What the calls of a range touched, by name, oldest touch first."""

    calls: list[Call] = field(default_factory=list)
    files: dict[str, Touched] = field(default_factory=dict)
    urls: dict[str, Touched] = field(default_factory=dict)
    ids: dict[str, Touched] = field(default_factory=dict)


def read(messages: Sequence[SourceMessage]) -> Ledger:
    """The ledger of `messages`: rows that are not told (head, request) are left out, their calls are not."""
    ledger = Ledger(calls=_calls(messages))
    noise = _noise(call.result for call in ledger.calls if call.result)
    for call in ledger.calls:
        _judge(call, noise)
        for name, act in _files(call):
            _touch(ledger.files, name, act, call)
        for key, text in call.fields:
            if key in _URL_KEYS or text.startswith(("http://", "https://")):
                for url in _URL.findall(text[:2000]):
                    _touch(ledger.urls, url.rstrip(".,;"), "read", call)
            elif key in _COMMAND_KEYS:
                for url in _URL.findall(text[:4000]):
                    _touch(ledger.urls, url.rstrip(".,;"), "read", call)
        for raw_key, text in _pairs(call.arguments):
            if _ID_KEY.search(raw_key) and 2 <= len(text) <= 80 and raw_key.lower() not in _NO_ID:
                _touch(ledger.ids, f"{raw_key}={text}", "read", call)
        for raw_key, text in _made(call):
            _touch(ledger.ids, f"{raw_key}={text}", "read", call)
    return ledger


def arguments(raw: object) -> Any:
    """Arguments as data: JSON text, JSON text inside JSON text, a mapping, or what can be saved of a
    broken text."""
    value = raw
    for _ in range(2):
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value, strict=False)
        except (ValueError, RecursionError):
            break
    if isinstance(value, (Mapping, list)):
        return value
    text = value if isinstance(value, str) else ""
    found: dict[str, str] = {}
    for match in _LOOSE.finditer(text[:200_000]):
        found.setdefault(
            match[1],
            match[2].replace("\\n", "\n").replace('\\"', '"').replace("\\/", "/").replace("\\\\", "\\"),
        )
    return found or ({"input": text} if text.strip() else {})


def main_argument(call: Call, limit: int = 100) -> str:
    """The argument that says what a call was about: its command, path, query, else its first short values."""
    fields = [(key, text) for key, text in call.fields if text.strip()]
    by_key: dict[str, str] = {}
    for key, text in fields:
        by_key.setdefault(key, text)
    path = next((text for key, text in fields if key in _PATH_KEYS), "")
    for key in _COMMAND_KEYS:
        if key in by_key and not (by_key[key] in _ACTS and path):
            return clip(_command(by_key[key]), limit)
    for text in (path, next((text for key, text in fields if key in _URL_KEYS), "")):
        if text:
            return clip(one_line(text), limit)
    for key in _MAIN_KEYS:
        if key in by_key:
            return clip(one_line(by_key[key][:400]), limit)
    return clip(", ".join(one_line(text[:60]) for _, text in fields[:4]), limit)


def outcome_line(call: Call, labels: Labels, limit: int = 100) -> str:
    """One line that still tells a call: tool, main argument, how it came out, where."""
    result = labels.no_result if call.result is None else call.outcome
    if call.is_error and not result.lower().startswith(("exit", labels.failed)):
        result = f"{labels.failed}: {result}" if result else labels.failed
    elif not result and call.result is not None:
        count = call.result.count("\n") + bool(call.result.strip())
        result = f"{count} {labels.lines}" if count else labels.no_output
    result = re.sub(
        r"@(lines|items)\b", lambda found: labels.lines if found[1] == "lines" else labels.items, result
    )
    argument = main_argument(call, limit)
    return f"{call.tool}{' ' if argument else ''}{argument} → {clip(result, limit)} (#{call.seq})"


def file_line(file: Touched, labels: Labels, is_cited: bool = True) -> str:
    """One file: what was done to it and, cited, where."""
    act = {"edited": labels.edited, "written": labels.written, "deleted": labels.deleted}.get(
        file.act, labels.read
    )
    if file.is_failed:
        act = f"{act}: {labels.failed}"
    return f"{file.name} — {act}" + (f" (#{file.seq})" if is_cited else "")


def _calls(messages: Sequence[SourceMessage]) -> list[Call]:
    """Calls with their results. Ids are matched inside their unit: servers use one id again across turns."""
    calls: list[Call] = []
    waiting: dict[str, list[Call]] = {}
    unit: list[Call] = []
    for row in messages:
        if row.kind != "message":
            continue
        if row.role == "tool":
            match = next((call for call in unit if call.id == row.tool_call_id and call.result is None), None)
            if match is None:
                late = waiting.get(row.tool_call_id or "", [])
                match = next((call for call in reversed(late) if call.result is None), None)
            if match is not None:
                match.result, match.result_seq = row.text, row.seq
            elif row.is_told:
                calls.append(
                    Call(row.seq, row.tool_call_id or "", row.name or "tool", {}, "", row.text, row.seq)
                )
            continue
        made = [_call(row.seq, value) for value in row.tool_calls or () if isinstance(value, Mapping)]
        if made:
            unit = made
            for call in made:
                waiting.setdefault(call.id, []).append(call)
            if row.is_told:
                calls += made
    return calls


def _call(seq: int, value: Mapping[str, Any]) -> Call:
    inner = value.get("function") or value.get("custom")
    inner = inner if isinstance(inner, Mapping) else value
    raw = next((inner[key] for key in ("arguments", "input", "args") if inner.get(key) is not None), "")
    text = raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False, default=str)
    return Call(
        seq, str(value.get("id") or ""), one_line(str(inner.get("name") or "tool")), arguments(raw), text
    )


def _plain_key(key: object) -> str:
    return re.sub(r"[^a-z]", "", str(key).lower())


def _walk(value: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    for raw, text in _pairs(value, key, depth):
        yield _plain_key(raw), text


def _pairs(value: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """(key, text) of every scalar, the key of a list being the key of its elements."""
    if depth > 8:
        return
    if isinstance(value, Mapping):
        for name, part in list(value.items())[:200]:
            yield from _pairs(part, str(name), depth + 1)
    elif isinstance(value, list):
        for part in value[:200]:
            yield from _pairs(part, key, depth + 1)
    elif isinstance(value, str):
        yield key, value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield key, str(value)


def _files(call: Call) -> Iterator[tuple[str, str]]:
    """(path, act) of every file a call names."""
    fields = call.fields
    keys = {key for key, _ in fields}
    named = dict(reversed(fields))
    act = _ACTS.get(named.get("command", "").strip().lower(), "") if keys & _PATH_KEYS else ""
    if not act:
        act = next((verb for verb, pattern in _VERBS if pattern.search(call.tool)), "")
    if not act or (act == "read" and keys & _CONTENT_KEYS and not keys & {"query", "pattern", "search"}):
        act = "written" if keys & _CONTENT_KEYS else act or "read"
    for key, text in fields:
        if (
            key in _PATH_KEYS or (key in _PERHAPS_PATH_KEYS and _LOOKS_PATH.match(text.strip()))
        ) and _is_path(text):
            yield text.strip(), act
        if "*** " in text[:20_000] or "+++ " in text[:20_000]:
            for match in _PATCH_FILE.finditer(text[:200_000]):
                acts = {"Add": "written", "Update": "edited", "Delete": "deleted"}
                name = (match[2] or match[3]).strip()
                if name != "/dev/null":
                    yield name, acts.get(match[1] or "", "edited")
        if key in _COMMAND_KEYS and not (text.strip().lower() in _ACTS and keys & _PATH_KEYS):
            yield from _shell_files(text)


def _shell_files(command: str) -> Iterator[tuple[str, str]]:
    text = re.sub(r"<<-?\s*['\"]?(\w+)['\"]?([^\n]*)\n[\s\S]*?(?:\n\1\b|\Z)", r" \2\n", command[:20_000])
    for act, pattern in _SHELL_WRITES:
        for match in pattern.finditer(text):
            name = match[1].rstrip(",")
            if _is_path(name) and not name.startswith(("/dev/", "&", "-")) and re.search(r"[./]", name):
                yield name, act
    for match in _SHELL_READS.finditer(text):
        if _is_path(match[1]) and re.search(r"\.\w", match[1]) and not match[1].startswith(("/dev/", "-")):
            yield match[1], "read"


def _is_path(text: str) -> bool:
    text = text.strip()
    return (
        bool(text)
        and len(text) <= 300
        and "\n" not in text
        and "://" not in text
        and any(ch.isalnum() for ch in text)
    )


def _touch(table: dict[str, Touched], name: str, act: str, call: Call) -> None:
    name = one_line(name)
    was = table.pop(name, None)
    changed = act != "read"
    if was and was.act != "read" and not changed:
        table[name] = Touched(name, was.act, was.seq, was.is_failed, was.changes)
        return
    good = changed and not call.is_error
    failed = changed and call.is_error and not (was and was.changes)
    if was and was.changes and changed and call.is_error:  # a failed change on top of one that worked
        table[name] = was
        return
    table[name] = Touched(name, act, call.seq, failed, (was.changes if was else 0) + good)


def _made(call: Call) -> Iterator[tuple[str, str]]:
    """Ids that a JSON result gives at its top: what the call made or found."""
    text = (call.result or "").lstrip()
    if call.is_error or text[:1] != "{" or len(text) > 20_000:
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(value, dict):
        return
    for name, part in list(value.items())[:40]:
        if isinstance(part, (str, int)) and not isinstance(part, bool) and _ID_KEY.search(str(name)):
            shown = str(part)
            if "@" in shown:
                continue  # somebody's address, looked up
            if 3 <= len(shown) <= 80 and any(ch.isdigit() or ch.isupper() for ch in shown):
                yield str(name), shown


def _command(text: str) -> str:
    """A command on one line, without the change of directory before it and without the body of a
    here-document."""
    text = re.sub(r"(<<-?\s*['\"]?\w+['\"]?[^\n]*)\n[\s\S]*", r"\1 …", text[:4000])
    text = re.sub(r"^\s*cd\s+\S+\s*(?:&&|;)\s*", "", text)
    return one_line(text)


def _edges(text: str) -> list[str]:
    """The lines of a result worth looking at: its first and its last ones."""
    if len(text) > _HEAD + _TAIL:
        return [*text[:_HEAD].split("\n")[:40], *text[-_TAIL:].split("\n")[-15:]]
    lines = text.split("\n")
    return lines if len(lines) <= 60 else [*lines[:40], *lines[-20:]]


def _noise(results: Iterable[str]) -> frozenset[str]:
    """Lines that many results share say nothing about any of them."""
    seen: Counter[str] = Counter()
    total = 0
    for text in results:
        total += 1
        seen.update({line.strip() for line in _edges(text) if line.strip()})
    floor = max(4, total // 20)
    return frozenset(line for line, times in seen.items() if times >= floor)


def _judge(call: Call, noise: frozenset[str]) -> None:
    """Set `outcome` and `is_error` from the result's edges."""
    if call.result is None:
        return
    text = call.result
    found = _structured(text)
    if found is not None:
        call.outcome, call.is_error = found
        return
    lines = [line for line in (one_line(line[:400]) for line in _edges(text)) if line and line not in noise]
    told = [line for line in lines if any(ch.isalnum() for ch in line) and not _STEERS.search(line)]
    exits = [match for line in _edges(text)[-20:] for match in _EXIT.finditer(line[:400])]
    status = next((int(match[1] or match[2]) for match in reversed(exits)), None)
    reads = call.tool.lower().startswith(("read", "view", "open", "cat", "get_file", "fetch"))
    where = told[:2] if reads or len(text) > _HEAD else [*told[:12], *told[-8:]]
    error = next((line for line in where if _ERROR.search(line)), "")
    if error.lower().startswith("traceback"):
        error = next(
            (
                line
                for line in reversed(told)
                if re.match(r"[\w.]+(?:Error|Exception|Exit|Interrupt)\b", line)
            ),
            error,
        )
    if error.endswith(":") and error in told[:-1]:
        error = f"{error} {told[told.index(error) + 1]}"
    call.is_error = status not in (None, 0) or (
        bool(error) and status is None and (not reads or len(text) < 600)
    )
    parts = [f"exit {status}"] if status is not None else []
    tally = "" if reads else next((m[0] for line in reversed(told) if (m := _TALLY.search(line))), "")
    if call.is_error and error and not _EXIT.search(error):
        parts.append(error)
    elif tally:
        parts.append(tally)
    elif not reads:
        first = next((line for line in told if not _EXIT.search(line)), "")
        size = text.count("\n") + 1
        if size > 15:
            parts.append(f"{size} @lines")
        if first:
            parts.append(first)
    else:
        size = text.count("\n") + 1
        parts.append(f"{size} @lines" if size > 3 or not told else told[0])
    call.outcome = ", ".join(parts)


def _structured(text: str) -> tuple[str, bool] | None:
    """The outcome of a JSON result: how many, or its telling top values."""
    head = text.lstrip()[:1]
    if head not in ("{", "[") or len(text) > 300_000:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, list):
        return f"{len(value)} @items", False
    if not isinstance(value, dict):
        return None
    error = value.get("error") or value.get("errors")
    status = value.get("exit_code", value.get("returncode"))
    if error:
        return one_line(error if isinstance(error, str) else json.dumps(error, ensure_ascii=False))[
            :200
        ], True
    parts = []
    for name, part in value.items():
        if isinstance(part, str) and part.strip() and not _STEERS.search(part):
            parts.append(f"{name}: {clip(one_line(part[:200]), 60)}")
        elif isinstance(part, (bool, int, float)):
            parts.append(f"{name}: {json.dumps(part)}")
        elif isinstance(part, list):
            parts.append(f"{name}: {len(part)} @items")
    first = ("status", "state", "result", "error", "message", "total", "count")
    parts.sort(
        key=lambda part: next((at for at, name in enumerate(first) if name in part.split(":")[0].lower()), 9)
    )
    failed = isinstance(status, int) and not isinstance(status, bool) and status != 0
    return ", ".join(parts[:4]) or f"{len(value)} @items", failed or value.get(
        "success"
    ) is False or value.get("ok") is False
