"""The structured summary a line carries, the rows it is made from, and how one is merged into the next.

Pure functions: no model, no database. SQL renders what is stored here and checks it once more.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pycontext import values
from pycontext.clean import clean_text
from pycontext.masking import mask
from pycontext.scrub import scrub

Count = Callable[[str], int]

LISTS = ("resolved", "pending", "decisions", "facts", "artifacts")
"""The list fields of a summary, in the order they are told."""

HEADING_TOKENS = 8
"""What a heading is taken to cost beside its items."""

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]")
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")
_FENCE = re.compile(
    r"[<＜][\\/\s]*(?:memory[-_ ]context|(?:conversation|context|chat|running)[-_ ]summary|turn[-_ ]context"
    r"|system[-_ ]note|transcript\b)[^<>＞]{0,200}[>＞]?",
    re.IGNORECASE,
)
_SEQ = re.compile(r"[(（\[]?#\d+(?:\s*[–—,-]\s*#\d+)*[)）\]]?:?")
_EDGE = re.compile(r"^(?:[-*•·‣]+|\d{1,3}[.)](?=\s))\s+|^[\s:;,.]+|[\s;,.。；，]+$")
_NOTHING = frozenset(
    [
        "none",
        "null",
        "nil",
        "n/a",
        "na",
        "no",
        "nothing",
        "-",
        "--",
        "—",
        "–",
        ".",
        "…",
        "нет",
        "ничего",
        "отсутствует",
        "не",
        "无",
        "無",
        "没有",
        "暂无",
        "なし",
        "特になし",
        "없음",
        "ninguno",
        "ninguna",
        "keine",
        "kein",
        "aucun",
        "aucune",
        "nessuno",
    ]
) | {"not applicable", "no active task", "none.", "(none)", "нет активной задачи"}
_EXACT = re.compile(r"\d|https?://|\S@\S+\.\S|[\w.-]+/[\w.-]+/|\b[\w-]+\.[a-z]{1,4}\b")
_SAID_BY = re.compile(r"#\d+ [^:\d]{1,29}:")
"""A fact that somebody else than the user stated: it names him."""
_QUOTES = ' "“”„«»「」'
_PLACE = re.compile(r"#\d+[^:\d]{0,30}:")
_SHARES = re.compile(r"((?:[^\s{},=]*/(?=[^/\s]))|[\w.-]+=)([^/\s{},=#]+)( — [^#→{}]+)?")
_FOLDED = re.compile(r"([^{}]*[/=])\{([^{}]+)\}( — [^{}]+)?")
_READ = frozenset({"read", "прочитан", "已读", "読んだ", "읽음"})
"""Words after ` — ` in an artifact that say the file was only looked at."""


@dataclass(frozen=True)
class Summary:
    """What a part of a chat came to. Every list is oldest first; `active_task` None means none."""

    resolved: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    active_task: str | None = None
    decisions: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    notes: str = ""

    @property
    def is_empty(self) -> bool:
        """True where nothing is told."""
        return not any(
            (
                self.resolved,
                self.pending,
                self.active_task,
                self.decisions,
                self.facts,
                self.artifacts,
                self.notes,
            )
        )

    def texts(self) -> list[str]:
        """Every text of the summary, in the order it is told."""
        found = [item for name in LISTS for item in self.items(name)]
        return [text for text in (*found, self.active_task or "", self.notes) if text]

    def items(self, name: str) -> tuple[str, ...]:
        """One list by its name."""
        value: tuple[str, ...] = getattr(self, name)
        return value

    def map(self, change: Callable[[str], str]) -> Summary:
        """The same summary with every text put through `change`; texts that become empty are left out."""
        lists = {name: tuple(text for text in map(change, self.items(name)) if text) for name in LISTS}
        task = change(self.active_task) if self.active_task else ""
        return Summary(**lists, active_task=task or None, notes=change(self.notes) if self.notes else "")

    def to_json(self) -> dict[str, Any]:
        """The value for `put_summary(summary => …)`: plain lists and strings that Postgres can store."""
        value: dict[str, Any] = {name: [tidy(item) for item in self.items(name)] for name in LISTS}
        value["active_task"] = tidy(self.active_task) if self.active_task else None
        value["notes"] = tidy(self.notes)
        return value

    @classmethod
    def from_json(cls, value: object) -> Summary:
        """Read a stored or a model-made value. Unknown keys are ignored, wrong shapes are made right."""
        if not isinstance(value, Mapping):
            return cls()
        task = _strings(value.get("active_task"))
        notes = value.get("notes")
        if isinstance(notes, (list, tuple)):
            notes = "\n".join(_strings(notes))
        text = tidy(notes).strip() if isinstance(notes, str) else ""
        return cls(
            **{name: _strings(value.get(name)) for name in LISTS},
            active_task="; ".join(task) or None,
            notes="" if text.casefold() in _NOTHING else text,
        )


@dataclass(frozen=True)
class SourceMessage:
    """One original row of `compaction_source`."""

    seq: int
    message_id: str
    kind: str = "message"
    role: str = "user"
    text: str = ""
    tool_calls: Sequence[Mapping[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    tokens: int | None = None
    created_at: datetime | None = None
    is_head: bool = False
    is_request: bool = False

    @property
    def is_told(self) -> bool:
        """False for rows the window keeps verbatim (head, request) and for lines: nothing retells those."""
        return self.kind == "message" and not self.is_head and not self.is_request


def tidy(text: str) -> str:
    """Text that Postgres can store and a person can read: no NUL, no half character, no terminal codes."""
    return _CONTROL.sub("", _ANSI.sub("", clean_text(text)))


def without_memory(text: str) -> str:
    """`text` less blocks of recalled memory, of context and of summaries: nobody said those."""
    return scrub(text) if "<" in text else text


def one_line(text: str) -> str:
    """`tidy` text on one line, with single spaces."""
    return " ".join(tidy(text).split())


def plain(text: str) -> str:
    """An item of a list: one line, without bullet, without any tag that could close or open a fence."""
    line = one_line(_strip_fences(text))
    for _ in range(3):
        line, before = _EDGE.sub("", line), line
        if line == before:
            break
    return line


def has_fence(text: str) -> bool:
    """True where text holds a tag that could be taken for a fence of the window."""
    return bool(_FENCE.search(text))


def clip(text: str, limit: int) -> str:
    """At most `limit` characters, cut between words where there are words, never inside a character."""
    if len(text) <= limit:
        return text
    if limit <= 1:
        return "…"[:limit]
    end = limit - 1
    space = text.rfind(" ", end * 2 // 3, end + 1)
    end = space if space > 0 else end
    while end > 1 and (
        unicodedata.combining(text[end]) or text[end] in "\u200d\ufe0f" or text[end - 1] == "\u200d"
    ):
        end -= 1
    return text[:end].rstrip(" ,;:，；：、") + "…"


def item_tokens(item: str, count: Count) -> int:
    """What one item costs in the rendered text."""
    return count("- " + item) + 1


def size(summary: Summary, count: Count) -> int:
    """Tokens of the summary as it will be rendered, the fence around it aside."""
    total = 0
    for name in LISTS:
        items = summary.items(name)
        total += HEADING_TOKENS * bool(items) + sum(item_tokens(item, count) for item in items)
    for text in (summary.active_task, summary.notes):
        total += HEADING_TOKENS + item_tokens(text, count) if text else 0
    return total


def key(item: str) -> str:
    """What two tellings of one thing have in common: case, width, spacing, quotes and `#seq` do not count."""
    text = unicodedata.normalize("NFKC", _SEQ.sub(" ", item)).casefold()
    return " ".join(
        "".join(ch if ch.isalnum() or ch in "#$%+@/.:_-\\" else " " for ch in text).split()
    ).strip(".:-")


def artifact_key(item: str) -> str:
    """An artifact is its name: what stands before ` — ` (what was done to it) or ` → ` (how it came out)."""
    return key(re.split(r" [—→] ", item, maxsplit=1)[0]) or key(item)


def foldable(item: str) -> tuple[str, str, str] | None:
    """An artifact as (what it may share with others, its own name, what was done to it), where it can share.

    `src/tui/footer.ts — edited` shares `src/tui/`, `order_id=A17` shares `order_id=`. One that cites a
    `#seq` does not.
    """
    match = _SHARES.fullmatch(item)
    return (match[1], match[2], match[3] or "") if match else None


def unfold(items: Iterable[str]) -> tuple[str, ...]:
    """Artifacts one by one again: `src/{a.py, b.py} — edited` is two."""
    found: list[str] = []
    for item in items:
        match = _FOLDED.fullmatch(item)
        if match:
            found += [f"{match[1]}{name}{match[3] or ''}" for name in match[2].split(", ")]
        else:
            found.append(item)
    return tuple(found)


def merge(
    previous: Summary | None, segment: Summary, max_tokens: int, count: Count, ledger_tokens: int = 0
) -> Summary:
    """Merge a segment into the summary before it, within `max_tokens` of `count`; artifacts may take
    `ledger_tokens` more.

    Lists are joined oldest first; of two tellings of one thing the newer stands; a pending item that the
    segment tells as resolved is pending no more; the active task is the segment's. What is over the limit
    goes in this order: oldest prose (notes, resolved, decisions, pending, then outcomes and files only
    read), items without exact values before those with them; then facts are told as their values alone, then
    the oldest facts and artifacts go. The newest changed files, up to two fifths of the limit, and the newest
    prose, up to a fifth, go last of all. Artifacts are told shorter before they go: without `#seq`, then with
    what they share told once. Secrets are masked, tags of fences taken out. Deterministic; never
    empty where the input was not.
    """
    before = _safe(previous or Summary())
    after = _safe(segment)
    if before.notes and before.notes in after.notes:
        after = replace(after, notes=_without(after.notes, before.notes))
    settled = [key(item) for item in after.resolved]
    pending = tuple(item for item in before.pending if not any(key(item) in done for done in settled))
    lists = {
        name: _join(before.items(name), after.items(name), key) for name in ("resolved", "decisions", "facts")
    }
    merged = Summary(
        **lists,
        pending=_join(pending, after.pending, key),
        artifacts=_join(before.artifacts, after.artifacts, artifact_key),
        active_task=after.active_task,
        notes="\n".join(_join(before.notes.split("\n"), after.notes.split("\n"), key)),
    )
    return fit(merged, max_tokens, count, ledger_tokens)


def merge_segments(segments: Sequence[Summary], max_tokens: int | None, count: Count) -> Summary:
    """What `merge` makes of a chain of segments, oldest first, trimmed once, at the end.

    So what an earlier merge had no room for is not lost to this one. max_tokens None trims nothing.
    """
    lists: dict[str, tuple[str, ...]] = dict.fromkeys(LISTS, ())
    notes: list[str] = []
    task: str | None = None
    for segment in map(_safe, segments):
        settled = [key(item) for item in segment.resolved]
        if settled:
            lists["pending"] = tuple(
                item for item in lists["pending"] if not any(key(item) in done for done in settled)
            )
        for name in LISTS:
            lists[name] += segment.items(name)
        if segment.notes:
            nested = [note for note in notes if note in segment.notes]
            notes.append(_without(segment.notes, nested[-1]) if nested else segment.notes)
        task = segment.active_task
    merged = Summary(
        **{
            name: _join((), items, artifact_key if name == "artifacts" else key)
            for name, items in lists.items()
        },
        active_task=task,
        notes="\n".join(_join((), "\n".join(notes).split("\n"), key)),
    )
    return merged if max_tokens is None else fit(merged, max_tokens, count)


def fit(summary: Summary, max_tokens: int, count: Count, ledger_tokens: int = 0) -> Summary:
    """`summary` within `max_tokens`, trimmed in the order `merge` states.

    Artifacts may take `ledger_tokens` more. Where they take more than their share, they are told shorter
    before anything goes.
    """
    trimmed = _Trimmed(_entries(summary, count), max_tokens, ledger_tokens, count)
    if trimmed.fits():
        return summary
    trimmed.shorten_artifacts()
    order, spared = trimmed.order()
    # the words come within their own limit first, so that no artifact goes for their sake
    for trimmed.is_words in (True, False):
        for place in order:
            if _rank(trimmed.entries[place]) < _FIRST_VALUE:
                trimmed.drop(place)
        for place in (*order, *spared):
            trimmed.shorten(place)
        for place in (*order, *spared):
            trimmed.drop(place)
    result = trimmed.summary()
    whole = max_tokens + ledger_tokens
    return result if size(result, count) <= whole else _cut(result, whole, count)


def validate(summary: Summary, max_tokens: int | None = None, count: Count | None = None) -> str | None:
    """Why `summary` must not be stored, or None where it may be: empty, headings only, an error text, a
    fence, too big.

    `put_summary` checks the same once more.
    """
    texts = [one_line(text) for text in summary.texts()]
    # without the places: `#503 …` is no status
    words = [text for text in (_SEQ.sub(" ", one).strip() for one in texts) if any(map(str.isalnum, text))]
    if not words:
        return "the summary is empty"
    if all(_HEADING.fullmatch(text) for text in words):
        return "the summary holds headings only"
    if all(_ERROR.match(text) and len(text) < 400 for text in words):
        return "the summary is an error text"
    if all(_REFUSAL.match(text) and len(text) < 400 for text in words):
        return "the summary is a refusal"
    if all(_PLACEHOLDER.fullmatch(text) for text in words):
        return "the summary is a placeholder"
    if any(has_fence(text) for text in texts):
        return "the summary holds a fence tag"
    if max_tokens is not None and count is not None and size(summary, count) > max_tokens:
        return f"the summary takes {size(summary, count)} tokens, more than the {max_tokens} it may"
    return None


_HEADING_WORDS = (
    r"resolved|done|completed|pending|open(?: items| questions)?|todo|active[ _]task|current task"
    r"|decisions?|key decisions"
    r"|facts?|artifacts?|files?|notes?|summary|conversation summary|goals?|progress|next steps"
    r"|critical context"
    r"|решено|сделано|в работе|ожидает|активная задача|решения|факты|артефакты|файлы|заметки|итог|сводка"
    r"|резюме"
    r"|已解决|已完成|待处理|待办|当前任务|决定|事实|文件|备注|总结|摘要|解決済み|保留|決定|事実|メモ|要約"
)
_HEADING = re.compile(rf"(?:[#*_=\-\s]*(?:{_HEADING_WORDS})[*_\s]*[:：]?[*_\s\-]*)+", re.IGNORECASE)
_ERROR = re.compile(
    r"\W*(?:(?:internal |api |server |unexpected )*error\b|traceback \(most recent|exception\b|\w+(?:error"
    r"|exception)\b:"
    r"|(?:http )?(?:4\d\d|5\d\d)\b[ :]|(?:request|connection|read|gateway)? ?time[d -]*out\b"
    r"|(?:bad gateway|service unavailable|too many requests|rate limit|unauthorized|forbidden"
    r"|internal server error)"
    r"|ошибка\b|превышено время|ошибка сервера|错误|出错|请求超时|エラー|タイムアウト"
    r"|\{\s*[\"']error[\"'])",
    re.IGNORECASE,
)
_REFUSAL = re.compile(
    r"\W*(?:(?:i'?m |i am )?(?:sorry|afraid)\b.{0,40}\b(?:can(?:no|')t|unable|not able)|i (?:can(?:no|')t"
    r"|am unable to)\b"
    r"|as an ai\b|(?:извините|к сожалению)\b.{0,40}\bне (?:могу|в состоянии)"
    r"|(?:抱歉|对不起).{0,20}(?:无法|不能)"
    r"|申し訳.{0,20}(?:できません))",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"\W*(?:\.{3}|…|string|text|summary here|todo|tbd|lorem ipsum.*|\[.{0,40}\]|<[^>]{0,40}>)\W*",
    re.IGNORECASE,
)


def _safe(summary: Summary) -> Summary:
    """A summary as it may be stored: masked, no fence tags; the lines of notes stay lines."""
    masked = summary.map(lambda text: mask(_strip_fences(tidy(text))))
    masked = replace(masked, artifacts=unfold(masked.artifacts))
    lines = (" ".join(line.split()) for line in masked.notes.split("\n"))
    return replace(masked.map(plain), notes="\n".join(line for line in lines if line))


@dataclass(frozen=True)
class _Entry:
    field: str
    text: str
    tokens: int
    age: float
    """0 oldest, 1 newest of its list."""
    group: tuple[str, str] | None = None
    """What it shares with others: what stands before the name, and after."""


_FIRST_VALUE = 11
"""The lowest rank of what is no prose: facts and artifacts."""


class _Trimmed:
    """Entries of a summary that give way one by one until the rest fits."""

    def __init__(self, entries: list[_Entry], max_tokens: int, ledger_tokens: int, count: Count) -> None:
        self.entries = entries
        self.max_tokens = max_tokens
        self.whole = max_tokens + ledger_tokens
        self.is_words = False
        self.named: str | None = None
        self.count = count
        self.kept = set(range(len(entries)))
        self.left = Counter(entry.field for entry in entries)
        self.members: Counter[tuple[str, str]] = Counter()
        self.artifacts = HEADING_TOKENS * bool(self.left["artifacts"])
        self.rest = HEADING_TOKENS * (len(self.left) - bool(self.left["artifacts"]))
        for entry in entries:
            self._add(entry, entry.tokens)

    def _add(self, entry: _Entry, tokens: int) -> None:
        if entry.field == "artifacts":
            self.artifacts += tokens
        else:
            self.rest += tokens

    def fits(self) -> bool:
        """True where all of it is within its limits."""
        return self.rest <= self.max_tokens and self.rest + self.artifacts <= self.whole

    def _stays(self, entry: _Entry) -> bool:
        """True where nothing is won by this entry."""
        if self.is_words:
            return entry.field == "artifacts" or self.rest <= self.max_tokens
        return self.rest + self.artifacts <= self.whole

    def shorten_artifacts(self) -> None:
        """Tell artifacts in fewer words where they take more than their share: without place, then folded."""
        share = max(self.max_tokens * 2 // 5, self.whole - self.max_tokens)
        places = [place for place, entry in enumerate(self.entries) if entry.field == "artifacts"]
        if self.artifacts <= share:
            return
        for place in places:
            self.shorten(place)
        if self.artifacts <= share or self.fits():
            return
        shared = {place: split for place in places if (split := foldable(self.entries[place].text))}
        self.members = Counter((before, after) for before, _, after in shared.values())
        for place, (before, name, after) in shared.items():
            if self.members[before, after] > 1:
                entry = self.entries[place]
                tokens = self.count(f" {name},")
                self._add(entry, tokens - entry.tokens)
                self.entries[place] = replace(entry, tokens=tokens, group=(before, after))
        self.members = Counter(entry.group for entry in self.entries if entry.group)
        self.artifacts += sum(self._shared(group) for group in self.members)

    def _shared(self, group: tuple[str, str]) -> int:
        return item_tokens(f"{group[0]}{{}}{group[1]}", self.count)

    def order(self) -> tuple[list[int], list[int]]:
        """What goes, in order; and what goes after all of that: the newest files and the newest prose."""
        places = range(len(self.entries))
        order = sorted(places, key=lambda at: (_rank(self.entries[at]), self.entries[at].age, at))
        files = [at for at in order if _is_changed_file(self.entries[at])]
        prose = [
            at
            for at in order
            if _rank(self.entries[at]) < _FIRST_VALUE and self.entries[at].field != "artifacts"
        ]
        spared = self._newest(files, self.whole * 2 // 5) | self._newest(prose, self.max_tokens // 5)
        return [at for at in order if at not in spared], [at for at in order if at in spared]

    def _newest(self, places: Sequence[int], room: int) -> set[int]:
        """The newest of `places` that fit into `room` tokens together, in their short form."""
        found: set[int] = set()
        paid: set[tuple[str, str]] = set()
        for at in sorted(places, key=lambda at: (-self.entries[at].age, -_rank(self.entries[at]), at)):
            entry = self.entries[at]
            if entry.group is None:
                room -= item_tokens(_shorter(entry), self.count)
            else:
                room -= entry.tokens + (0 if entry.group in paid else self._shared(entry.group))
                paid.add(entry.group)
            if room < 0:
                break
            found.add(at)
        return found

    def drop(self, place: int) -> None:
        """Leave an entry out, unless the rest fits or it is the last one."""
        entry = self.entries[place]
        if len(self.kept) == 1 or place not in self.kept or self._stays(entry):
            return
        self.kept.discard(place)
        self.left[entry.field] -= 1
        self._add(entry, -entry.tokens - (0 if self.left[entry.field] else HEADING_TOKENS))
        if entry.group is not None:
            self.members[entry.group] -= 1
            if not self.members[entry.group]:
                self._add(entry, -self._shared(entry.group))

    def shorten(self, place: int) -> None:
        """Tell a fact or an artifact in fewer words, unless the rest fits."""
        entry = self.entries[place]
        if (
            place not in self.kept
            or entry.group is not None
            or entry.field not in ("facts", "artifacts")
            or self._stays(entry)
        ):
            return
        text = _shorter(entry)
        if entry.field == "facts" and self._is_named(text):
            self.drop(place)
            return
        tokens = item_tokens(text, self.count)
        if tokens < entry.tokens:
            self._add(entry, tokens - entry.tokens)
            self.entries[place] = replace(entry, text=text, tokens=tokens)

    def _is_named(self, fact: str) -> bool:
        """True for a fact that is told as its values alone, and these stand among the artifacts too."""
        if self.named is None:
            self.named = "\n".join(entry.text for entry in self.entries if entry.field == "artifacts")
        told = _PLACE.sub("", fact, count=1).strip()
        found = values.find(told)
        return told == values.bare(found) and all(value.text in self.named for value in found)

    def summary(self) -> Summary:
        """What is left."""
        entries = [self.entries[place] for place in sorted(self.kept)]
        lists = {name: tuple(entry.text for entry in entries if entry.field == name) for name in LISTS}
        lists["artifacts"] = _folded([entry for entry in entries if entry.field == "artifacts"])
        task = next((entry.text for entry in entries if entry.field == "active_task"), None)
        return Summary(
            **lists,
            active_task=task,
            notes="\n".join(entry.text for entry in entries if entry.field == "notes"),
        )


def _entries(summary: Summary, count: Count) -> list[_Entry]:
    found = []
    for name in LISTS:
        items = summary.items(name)
        found += [
            _Entry(name, text, item_tokens(text, count), at / len(items)) for at, text in enumerate(items)
        ]
    notes = [line for line in summary.notes.split("\n") if line]
    found += [
        _Entry("notes", line, item_tokens(line, count), at / len(notes)) for at, line in enumerate(notes)
    ]
    if summary.active_task:
        found.append(_Entry("active_task", summary.active_task, item_tokens(summary.active_task, count), 1.0))
    return found


def _folded(entries: Sequence[_Entry]) -> tuple[str, ...]:
    """The texts of artifacts, those of a group in the place of its newest."""
    found: dict[object, list[str]] = {}
    for at, entry in enumerate(entries):
        split = foldable(entry.text) if entry.group else None
        name: object = entry.group if split else at
        told = found.pop(name, [])
        found[name] = [*told, split[1] if split else entry.text]
    return tuple(
        f"{name[0]}{{{', '.join(told)}}}{name[1]}"
        if isinstance(name, tuple) and len(told) > 1
        else f"{name[0]}{told[0]}{name[1]}"
        if isinstance(name, tuple)
        else told[0]
        for name, told in found.items()
    )


def _rank(entry: _Entry) -> int:
    """Lower goes first."""
    if entry.field == "active_task":
        return 20
    if entry.field == "artifacts":
        if " → " in entry.text:
            return 4
        return 5 if _is_read(entry.text) else 12
    exact = bool(_EXACT.search(_SEQ.sub("", entry.text)))
    if entry.field == "facts":
        return 12 if exact and not _SAID_BY.match(entry.text) else _FIRST_VALUE
    return {"notes": 0, "resolved": 1, "decisions": 2, "pending": 3}[entry.field] + (5 if exact else 0)


def _is_changed_file(entry: _Entry) -> bool:
    """True for an artifact that is neither an outcome, nor a file only read, nor an id or URL (`name=value`, `://`)."""
    name = entry.text.partition(" — ")[0]
    return entry.field == "artifacts" and _rank(entry) == 12 and "://" not in name and "=" not in name


def _shorter(entry: _Entry) -> str:
    """A fact as its place and its values alone; an artifact without its place, unless it is an outcome."""
    if entry.field == "artifacts":
        return entry.text if " → " in entry.text else re.sub(r" \(#\d+\)$", "", entry.text)
    place = _PLACE.match(entry.text)
    if entry.field != "facts" or place is None:
        return entry.text
    told = entry.text[place.end() :].strip(_QUOTES)  # quotes around it all would make it one value
    kept = [value for value in values.find(told) if value.is_strong or len(told) < 40]
    return f"{place[0]} {values.bare(kept)}" if kept else entry.text


def _cut(summary: Summary, max_tokens: int, count: Count) -> Summary:
    """The one text that is left, cut to what fits; the shortest cut where nothing does."""
    low, high = 1, max(len(text) for text in summary.texts())
    while low < high:
        middle = (low + high + 1) // 2
        cut = summary.map(lambda text, limit=middle: clip(text, limit))  # type: ignore[misc]
        low, high = (middle, high) if size(cut, count) <= max_tokens else (low, middle - 1)
    return summary.map(lambda text: clip(text, max(low, 2)))


def _join(older: Iterable[str], newer: Iterable[str], name: Callable[[str], str]) -> tuple[str, ...]:
    """Both lists, oldest first, each thing once: the newer telling, in the newer place."""
    found: dict[str, str] = {}
    for item in (*older, *newer):
        text = item.strip()
        if not text:
            continue
        this = name(text) or text
        was = found.pop(this, None)
        found[this] = was if was and _is_read(text) and not _is_read(was) and " → " not in text else text
    # what a newer item tells whole goes; a file is not told by a command that names it
    keys = [] if name is artifact_key else list(found)
    inside = {
        small
        for at, small in enumerate(keys)
        if len(small) >= 12
        and any(f" {small} " in f" {large} " for large in keys[at + 1 :] if len(large) > len(small))
    }
    return tuple(text for this, text in found.items() if this not in inside)


def _is_read(item: str) -> bool:
    return item.partition(" — ")[2].split(" (")[0].strip() in _READ


def _without(text: str, part: str) -> str:
    """`text` without a `part` it nests, and without the wrapper that is then left empty."""
    return re.sub(r"\w*\(\s*(?=\S)|\s*\)$", "", text.replace(part, " ")).strip() or text


def _strip_fences(text: str) -> str:
    """`text` without tags of fences, also those that come about when a tag inside one is taken out."""
    for _ in range(5):
        text, times = _FENCE.subn(" ", text)
        if not times:
            return text
    return text.replace("<", "‹").replace("＜", "‹")


def _strings(value: object) -> tuple[str, ...]:
    """A list of non-empty lines out of whatever a model or an older version wrote."""
    if value is None or isinstance(value, bool):
        return ()
    if isinstance(value, Mapping):
        value = [f"{name}: {_scalar(part)}" for name, part in value.items()]
    if not isinstance(value, (list, tuple)):
        value = [value]
    texts = (plain(_scalar(part)) for part in value)
    return tuple(text for text in texts if text and text.casefold() not in _NOTHING)


def _scalar(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ": ".join(_scalar(part) for part in value.values() if part not in (None, ""))
    return json.dumps(value, ensure_ascii=False, default=str)
