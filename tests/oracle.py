"""What a window must be: an oracle in plain Python, written from DESIGN and not from the SQL.

Given the rows of a thread, its lines, the prompt and a budget it knows the window row by row where everything
fits, and where it does not, the promises that hold all the same. No SQL, and no code shared with the product.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FENCES = ("memory-context", "chat-summary", "turn-context", "system-note")
_FENCE = re.compile(r"<(?=[\\/\s]*(?:" + "|".join(FENCES) + "))", re.IGNORECASE)
_TEXTS = ("text", "input_text", "output_text")
_IMAGES = ("image_url", "image", "input_image")
_FILES = ("file", "input_file", "input_audio")
_REASONING = ("thinking", "redacted_thinking", "reasoning")
#: A call without its result is closed in the window by a row of at most this cost.
STAND_IN_TOKENS = 16


class Broken(AssertionError):
    """A promise does not hold."""


def _hold(condition: bool, promise: str, *evidence: object) -> None:
    if not condition:
        raise Broken(promise + "".join(f"\n    {str(item)[:700]}" for item in evidence))


@dataclass
class Row:
    """A row of the thread. frozen: its cost when it was stored; tokens: as it is counted now."""

    seq: int
    message_id: str
    role: str
    content: Any = None
    tool_calls: Any = None
    tool_call_id: str | None = None
    name: str | None = None
    metadata: Mapping[str, Any] | None = None
    frozen: int = 0
    tokens: int = 0
    line_at_arrival: int = -(2**62)

    @property
    def is_pending(self) -> bool:
        return bool(self.metadata) and self.metadata.get("pending") is True  # type: ignore[union-attr]

    @property
    def is_user(self) -> bool:
        injected = bool(self.metadata) and self.metadata.get("injected") is True  # type: ignore[union-attr]
        return self.role == "user" and not injected


@dataclass
class Line:
    """A summary row, standing after message seq."""

    seq: int
    origin: str
    message_id: str
    summary: Mapping[str, Any] | None = None
    tokens: int = 0
    frozen: int = 0
    #: the place of the line before it when it was made
    after: int = -(2**62)
    #: seqs of the first turn as it was then
    head: frozenset[int] | None = None
    #: what the first turn and the request took when it was made, which it holds for them
    kept: int = 0


@dataclass
class Shown:
    """A row that the window must hold. seq None: the stand-in of a missing result, or the system prompt."""

    section: str
    role: str
    seq: int | None
    row: Row | None = None
    tool_call_id: str | None = None


@dataclass
class Thread:
    """A chat as it stands: rows by seq, and every line that was placed and still counts."""

    rows: list[Row] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    #: seqs of pinned rows, the oldest pin first
    pins: list[int] = field(default_factory=list)
    prompt: str | None = None
    prompt_tokens: int = 0
    prompt_frozen: int = 0
    head_tokens: int = 2000
    image_tokens: int = 1000
    token_scale: float = 1.0
    #: the rows live in the product's own table, which keeps no memory of the lines there were
    is_adopted: bool = False

    # --- structure ---

    def units(self) -> dict[int, int]:
        """For each row the seq its unit starts with: a result belongs to the newest call of its id."""
        unit: dict[int, int] = {}
        newest: dict[str, Row] = {}
        answered: set[tuple[int, str]] = set()
        for row in self.rows:
            unit[row.seq] = row.seq
            if row.role == "tool" and row.tool_call_id is not None:
                call = newest.get(row.tool_call_id)
                line = row.line_at_arrival
                if call is not None and self.is_adopted:
                    line = max((x.seq for x in self.lines if x.seq < row.seq), default=-(2**62))
                if call is None or call.seq <= line:
                    if call is not None and self.is_adopted:
                        newest.pop(row.tool_call_id)  # of ours it waits again where the line is dropped
                    continue
                key = (call.seq, row.tool_call_id)
                if key in answered:
                    continue
                unit[row.seq] = call.seq
                if not row.is_pending:
                    answered.add(key)
            for call_ in row.tool_calls or []:
                newest[call_["id"]] = row
        return unit

    def newest_line(self) -> Line | None:
        """By place; at one place a reset outranks a compaction."""
        if not self.lines:
            return None
        return max(self.lines, key=lambda line: (line.seq, line.origin == "reset"))

    def reset_seq(self) -> int:
        return max((line.seq for line in self.lines if line.origin == "reset"), default=-(2**62))

    def superseded(self, unit: Mapping[int, int]) -> set[int]:
        """Interim results that a later one of the same call replaced."""
        gone: set[int] = set()
        seen: dict[tuple[int, str | None], int] = {}
        for row in self.rows:
            if row.role == "tool" and unit[row.seq] != row.seq:
                key = (unit[row.seq], row.tool_call_id)
                if key in seen:
                    gone.add(seen[key])
                seen[key] = row.seq
        return gone

    def newest_request(self) -> Row | None:
        reset = self.reset_seq()
        users = [row for row in self.rows if row.is_user and row.seq > reset]
        return users[-1] if users else None

    def pinned(self) -> list[list[Row]]:
        """Units with a pin, the oldest pin first; none from before a reset."""
        unit = self.units()
        here = {row.seq for row in self.rows}
        reset = self.reset_seq()
        starts = dict.fromkeys(unit[seq] for seq in self.pins if seq in here)
        return [[r for r in self.rows if unit[r.seq] == start] for start in starts if start > reset]

    def head(self) -> list[Row]:
        """The first turn since the last reset, within its limit, the request itself always.

        It ends where every call so far had its result: nothing comes into it later.
        """
        unit = self.units()
        reset = self.reset_seq()
        first = next((r for r in self.rows if r.is_user and r.seq > reset), None)
        if first is None:
            return []
        end = first.seq
        total = first.frozen
        open_calls: list[tuple[int, str]] = []
        for row in self.rows:
            if row.seq <= first.seq or (self.is_adopted and unit[row.seq] < first.seq):
                continue
            total += row.frozen
            if row.is_user or total > self.head_tokens:
                break
            open_calls += [(row.seq, call["id"]) for call in row.tool_calls or []]
            answered = (unit[row.seq], row.tool_call_id)
            if row.role == "tool" and not row.is_pending and answered in open_calls:
                open_calls.remove(answered)
            if not open_calls:
                end = row.seq
        return [r for r in self.rows if first.seq <= unit[r.seq] <= end]

    # --- rendering ---

    def render(self, row: Row, unit: Mapping[int, int]) -> Any:
        """Content as it is sent. A result whose call is not in view is no result: see `note_of`."""
        request = self.newest_request()
        content = escaped(row.content)
        if isinstance(content, list):
            old = request is not None and row.seq < request.seq
            parts = [p for p in content if kind_of(p) != "text" or not blank(text_of(p))]
            if old:
                parts = [p for p in parts if kind_of(p) != "reasoning"]
            content = parts or None
        if content is None or (isinstance(content, str) and blank(content)):
            return None if row.tool_calls else "(empty)"
        return content

    # --- the window ---

    def full(self) -> list[Shown]:
        """The window where everything fits: what stands in it and in which order."""
        unit = self.units()
        gone = self.superseded(unit)
        line = self.newest_line()
        shown: list[Shown] = []
        if self.prompt is not None:
            shown.append(Shown("system", "system", None))
        after = -(2**62)
        if line is not None:
            after = line.seq
            if line.origin == "compaction":
                before = Thread(**{**self.__dict__, "rows": [r for r in self.rows if r.seq <= line.seq]})
                before.lines = [x for x in self.lines if x.origin == "reset"]
                head = before.head()
                if line.head is not None:
                    head = [r for r in before.rows if r.seq in line.head]
                shown += self._rows("head", head, unit, gone)
                request = before.newest_request()
                apart = {r.seq for r in head} | ({request.seq} if request else set())
                pins = [r for rows in self.pinned() for r in rows]
                pins = [r for r in pins if unit[r.seq] <= line.seq and unit[r.seq] not in apart]
                late: list[Row] = []  # pinned after the request that stands apart
                if request is not None and request.seq not in {r.seq for r in head}:
                    late = [r for r in pins if unit[r.seq] > request.seq]
                    pins = [r for r in pins if unit[r.seq] < request.seq]
                shown += self._rows("pinned", pins, unit, gone)
                shown.append(Shown("summary", "user", line.seq))
                if request is not None and request.seq not in {r.seq for r in head}:
                    shown += self._rows("request", [request], unit, gone)
                shown += self._rows("pinned", late, unit, gone)
            else:
                shown.append(Shown("summary", "user", line.seq))
        shown += self._rows("tail", [r for r in self.rows if unit[r.seq] > after], unit, gone)
        return shown

    def _rows(
        self, section: str, rows: Sequence[Row], unit: Mapping[int, int], gone: set[int]
    ) -> list[Shown]:
        out: list[Shown] = []
        answers = {(unit[r.seq], r.tool_call_id) for r in rows if r.role == "tool" and unit[r.seq] != r.seq}
        waiting: list[Shown] = []  # stand-ins follow the results that are there
        ordered = sorted(rows, key=lambda r: (unit[r.seq], r.seq))
        for n, row in enumerate(ordered):
            if row.seq not in gone:
                is_note = row.role == "tool" and unit[row.seq] == row.seq
                out.append(Shown(section, "user" if is_note else row.role, row.seq, row))
                waiting += [
                    Shown(section, "tool", None, row, call["id"])
                    for call in row.tool_calls or []
                    if (row.seq, call["id"]) not in answers
                ]
            if n + 1 == len(ordered) or unit[ordered[n + 1].seq] != unit[row.seq]:
                out += waiting
                waiting = []
        return out

    def kept(self) -> int:
        """Tokens of the first turn and the request that stand before what follows the line."""
        rows = [s.row for s in self.full() if s.section in ("head", "request") and s.tool_call_id is None]
        return sum(max(row.frozen, row.tokens) for row in rows if row is not None)

    def must_be_full(self, budget: int) -> bool:
        """Whether everything fits by either count, what was stored and what is known now."""
        unit = self.units()
        line = self.newest_line()
        after = line.seq if line else -(2**62)
        shown = self.full()
        total = 3 + (max(self.prompt_tokens, self.prompt_frozen) if self.prompt is not None else 0)
        total += max(line.tokens, line.frozen) if line else 0
        total += max(self.kept(), line.kept if line else 0)
        pins = {s.seq for s in shown if s.section == "pinned"}
        total += sum(max(r.frozen, r.tokens) for r in self.rows if unit[r.seq] > after or r.seq in pins)
        total += STAND_IN_TOKENS * sum(s.tool_call_id is not None for s in shown)
        return total <= int(budget / self.token_scale)

    def needed(self) -> int:
        """Tokens of the system prompt and the newest request: below that no window is possible."""
        request = self.newest_request()
        return 3 + (self.prompt_tokens if self.prompt is not None else 0) + (request.tokens if request else 0)

    # --- checking a window ---

    def check_full(self, window: Sequence[Mapping[str, Any]]) -> None:
        """Equality, row by row."""
        unit = self.units()
        expected = self.full()
        line = self.newest_line()
        key = [
            (w["section"], w["role"], w["seq"], w["tool_call_id"] if w["role"] == "tool" else None)
            for w in window
        ]
        want = [
            (
                s.section,
                s.role,
                s.seq,
                (s.tool_call_id or (s.row.tool_call_id if s.row else None)) if s.role == "tool" else None,
            )
            for s in expected
        ]
        # which part of an uncut thread is called head is not promised
        if line is None or line.origin == "reset":
            key = [("tail" if k[0] == "head" else k[0], *k[1:]) for k in key]
        _hold(key == want, "the window is everything that is live, in order", f"got  {key}", f"want {want}")
        for shown, w in zip(expected, window, strict=True):
            if shown.section == "head" and w["is_shortened"]:
                continue  # a first message over the head's own limit
            if shown.row is not None and shown.tool_call_id is None:
                _hold(not w["is_shortened"], "nothing is shortened where everything fits", w)
                self.check_verbatim(shown.row, w, unit)
                has_reasoning = isinstance(shown.row.content, list) and any(
                    kind_of(p) == "reasoning" for p in shown.row.content
                )
                is_note = shown.row.role == "tool" and unit[shown.row.seq] == shown.row.seq
                if not has_reasoning and not is_note:
                    _hold(w["tokens"] == shown.row.tokens, "one count", w, shown.row)

    def check_verbatim(self, row: Row, w: Mapping[str, Any], unit: Mapping[int, int]) -> None:
        """A row that is not flagged equals what was stored, but for the fence tags."""
        if row.role == "tool" and unit[row.seq] == row.seq:
            text = json.dumps(w["content"], ensure_ascii=False)
            _hold(w["role"] == "user" and w["tool_call_id"] is None, "no result without its call", w)
            for piece in texts_of(escaped(row.content)):
                _hold(
                    json.dumps(piece, ensure_ascii=False)[1:-1] in text,
                    "a stray result is told whole",
                    w,
                    row,
                )
            return
        want = self.render(row, unit)
        _hold(w["content"] == want, "verbatim", f"got  {w['content']!r}", f"want {want!r}")
        _hold((w["tool_calls"] or None) == (row.tool_calls or None), "calls are the exact ones", w, row)
        _hold((w["role"], w["name"]) == (row.role, row.name), "role and name", w, row)

    def check(self, window: Sequence[Mapping[str, Any]], budget: int) -> None:
        """The promises, whatever had to be left out."""
        unit = self.units()
        gone = self.superseded(unit)
        by_seq = {row.seq: row for row in self.rows}
        line = self.newest_line()
        reset = self.reset_seq()
        _hold([w["ordinal"] for w in window] == list(range(1, len(window) + 1)), "ordinals", window)
        total = 3 + sum(w["tokens"] for w in window)
        _hold(
            total <= int(budget / self.token_scale),
            "1 fits",
            f"{total} > {budget}",
            [dict(w) for w in window],
        )
        if self.prompt is not None:
            _hold(
                bool(window) and window[0]["section"] == "system", "the system prompt comes first", window[:1]
            )
            _hold(window[0]["content"] == self.prompt, "the system prompt is whole", window[0])
        _hold(
            sum(w["section"] == "system" for w in window) == (self.prompt is not None), "system prompt once"
        )
        rows = [w for w in window if w["section"] not in ("system", "omitted") and w["kind"] == "message"]
        seqs = [w["seq"] for w in rows if w["seq"] is not None]
        _hold(len(seqs) == len(set(seqs)), "no row twice", seqs)
        _hold(set(seqs) <= set(by_seq), "rows of this chat only", seqs)
        # a late result whose call is left out is told as a note in its own place
        for w in rows:
            row = by_seq.get(w["seq"])
            if row is not None and (row.role, w["role"]) == ("tool", "user") and unit[row.seq] not in seqs:
                unit[row.seq] = row.seq
        order = [
            (unit[w["seq"]], w["seq"]) for w in rows if w["seq"] is not None and w["section"] != "pinned"
        ]
        _hold(order == sorted(order), "in order of (unit, seq)", order)
        order = [
            (unit[w["seq"]], w["seq"])
            for w in rows
            if w["seq"] is not None and w["section"] in ("pinned", "request")
        ]
        _hold(order == sorted(order), "pins and requests in order of (unit, seq)", order)

        # 3 cut
        _hold(all(s > reset for s in seqs), "3 nothing from before a reset", seqs, reset)
        if line is not None:
            shown_full = {s.seq for s in self.full() if s.row is not None}
            stray = [s for s in seqs if unit[s] <= line.seq and s not in shown_full]
            _hold(not stray, "3 nothing from before the line", stray)
        lines = [w for w in window if w["kind"] == "summary"]
        _hold(len(lines) <= 1, "one line", lines)
        for w in lines:
            self._check_line(w, line)

        # 4 newest request
        request = self.newest_request()
        if request is not None:
            found = [w for w in rows if w["seq"] == request.seq]
            _hold(len(found) == 1, "4 the newest request is there", request, seqs)
            _hold(not found[0]["is_shortened"], "4 the newest request is never shortened", found)
            self.check_verbatim(request, found[0], unit)

        self._check_pins(rows, budget, gone)

        # 5 and 6: every row is whole, or flagged with its number, or inside a marker, or above the line
        for w in rows:
            row = by_seq.get(w["seq"])
            if row is None:
                _hold(w["role"] == "tool", "only a missing result has no number", w)
                continue
            _hold(row.seq not in gone, "an interim result that was replaced is not shown", w)
            if w["is_shortened"]:
                self._check_shortened(row, w, unit)
            else:
                self.check_verbatim(row, w, unit)
            _hold(bool(w["is_escaped"]) == has_fence(row.content), "is_escaped", w)
        markers = [w for w in window if w["section"] == "omitted"]
        ranges = [self._marker(w) for w in markers]
        whole = {s.seq for s in self.full() if s.row is not None}
        for row in self.rows:
            if row.seq in seqs or row.seq in gone or row.seq <= reset:
                continue
            above = line is not None and line.origin == "compaction" and unit[row.seq] <= line.seq
            if above and row.seq not in whole and (lines or not markers):
                continue
            named = any(low <= row.seq <= high for low, high, _ in ranges)
            _hold(
                named or (not markers and budget - total < 80),
                "6 nothing is lost without a mark",
                row,
                ranges,
                seqs,
            )
        for low, high, tokens in ranges:
            inside = [r for r in self.rows if low <= r.seq <= high and r.seq not in gone]
            missing = [r.seq for r in inside if r.seq not in seqs]
            _hold(bool(missing), "6 a marker marks something", (low, high), seqs)
            _hold(
                low == min(r.seq for r in inside) or low > reset,
                "6 a marker starts where something is missing",
            )
            size = sum(r.frozen for r in self.rows if low <= r.seq <= high)
            least = sum(min(r.frozen, r.tokens) for r in inside if r.seq not in seqs) - 200
            # "about": what is shown of the range is taken off by its count, the range is told by estimates
            least -= sum(max(r.tokens - r.frozen, 0) for r in inside if r.seq in seqs)
            _hold(
                least <= tokens or self.is_adopted,
                "6 a marker tells the size",
                tokens,
                size,
                least,
            )
            if line is None:
                _hold(tokens <= 1.5 * size + 200, "6 a marker tells the size", tokens, size)

    def _check_pins(self, rows: Sequence[Mapping[str, Any]], budget: int, gone: set[int]) -> None:
        """12: whole units; where they do not all fit, the oldest pin gives way first."""
        whole = {w["seq"] for w in rows if not w["is_shortened"]}
        request = self.newest_request()
        pinned = [unit for unit in self.pinned() if request not in unit]  # it is there in any case
        pins = [{r.seq for r in unit} - gone for unit in pinned]
        missing = [n for n, unit in enumerate(pins) if not unit <= whole]
        if not missing:
            return
        _hold(missing == list(range(len(missing))), "12 the oldest pin gives way first", pins, rows)
        need = self.needed() + 60
        for r in itertools.chain.from_iterable(pinned):
            need += max(r.tokens, r.frozen) + STAND_IN_TOKENS * len(r.tool_calls or [])
        _hold(need > int(budget / self.token_scale), "12 pins that fit stay", need, budget, pins, rows)

    def _check_line(self, w: Mapping[str, Any], line: Line | None) -> None:
        _hold(line is not None, "a line of this chat", w)
        assert line is not None
        text = w["content"]
        _hold(w["seq"] == line.seq and w["message_id"] == line.message_id, "the newest line", w, line)
        _hold(w["role"] == "user" and isinstance(text, str), "a line is a user message of its own", w)
        _hold(
            text.startswith("<chat-summary>") and text.endswith("</chat-summary>"), "a line is fenced", text
        )
        fences = [f for f in _FENCE.finditer(text) if text[f.end() : f.end() + 1] != "\\"]
        _hold(len(fences) == 2, "no fence inside a line", text)
        if line.origin == "compaction" and not w["is_shortened"]:
            for key in ("resolved", "pending", "decisions", "facts", "artifacts"):
                for item in (line.summary or {}).get(key) or []:
                    _hold(item in text, "a line tells its summary", item, text)

    def _marker(self, w: Mapping[str, Any]) -> tuple[int, int, int]:
        numbers = [int(n) for n in re.findall(r"#(-?\d+)", w["content"])]
        size = re.search(r"(?:about|over) (\d+) tokens", w["content"])
        _hold(
            len(numbers) in (1, 2) and size is not None and w["role"] == "user",
            "a marker says what and how much",
            w,
        )
        assert size is not None
        return numbers[0], numbers[-1], int(size[1])

    def _check_shortened(self, row: Row, w: Mapping[str, Any], unit: Mapping[int, int]) -> None:
        told = json.dumps([w["content"], w["tool_calls"]], ensure_ascii=False)
        if isinstance(row.content, list) and any(kind_of(p) == "reasoning" for p in row.content):
            # reasoning goes whole and without a word, as in older turns
            same = texts_of(w["content"]) == texts_of(escaped(row.content))
            if same and (w["tool_calls"] or None) == (row.tool_calls or None):
                return
        _hold(f"#{row.seq}" in told, "6 a shortened row says where the whole is", w)
        whole = self.render(row, unit)
        is_note = row.role == "tool" and unit[row.seq] == row.seq
        if not is_note:
            changed = w["content"] != whole or (w["tool_calls"] or None) != (row.tool_calls or None)
            _hold(changed, "flagged rows differ from what was stored", w)
            _hold(w["role"] == row.role and w["tool_call_id"] == row.tool_call_id, "role and id stay", w)
        _hold(w["content"] not in ("", []), "no empty content", w)
        stored, sent = row.tool_calls or [], w["tool_calls"] or []
        for a, b in zip(stored, sent, strict=True):
            same = (a["id"], a["function"]["name"]) == (b["id"], b["function"]["name"])
            _hold(same, "calls keep id and name", a, b)
            check_arguments(a["function"]["arguments"], b["function"]["arguments"], row.seq)
        if isinstance(w["content"], str) and isinstance(whole, str) and w["content"] != whole and not is_note:
            check_text(whole, w["content"], row.seq)


def check_arguments(stored: str, sent: str, seq: int) -> None:
    """Shortened inside the JSON: it parses, its keys stay."""
    if sent == stored:
        return
    _hold(f"#{seq}" in sent, "6 shortened arguments say where the whole is", sent)
    try:
        value = json.loads(sent)
    except ValueError:
        raise Broken(f"5 broken arguments\n    {sent[:500]}") from None
    try:
        was = json.loads(stored)
    except ValueError:
        return
    if isinstance(was, dict) and isinstance(value, dict) and set(value) != {"shortened"}:
        _hold(list(value) == list(was), "keys and their order stay", sent, stored)


_CUT = re.compile(r"\n\[… (\d+) of (\d+) characters left out, full text is #(-?\d+) …\]\n")


def check_text(whole: str, sent: str, seq: int) -> None:
    """Head and tail of the text, and how much is between them; never half a character."""
    found = list(_CUT.finditer(sent))
    if not found:
        return  # one line instead of it
    cut = found[len(found) // 2]
    head, tail = sent[: cut.start()], sent[cut.end() :]
    _hold(whole.startswith(head) and whole.endswith(tail), "head and tail of the text", sent, whole)
    _hold(int(cut[1]) == len(whole) - len(head) - len(tail), "how much is missing", cut[0])
    _hold(int(cut[2]) == len(whole) and int(cut[3]) == seq, "how long it was and where it is", cut[0])
    after = whole[len(head) : len(head) + 1]
    _hold(
        not joins(after) and not head.endswith("\u200d"),
        "no half character before the cut",
        head[-12:],
        after,
    )
    if tail and len(tail) < len(whole):
        before = whole[len(whole) - len(tail) - 1]
        _hold(not joins(tail[0]) and before != "\u200d", "no half character after the cut", before, tail[:12])


def joins(character: str) -> bool:
    """Whether a character belongs to the one before it."""
    if not character:
        return False
    code = ord(character)
    return (
        unicodedata.combining(character) != 0
        or unicodedata.category(character) in ("Mn", "Me", "Mc")
        or code in (0x200D, 0xFE0E, 0xFE0F)
        or 0x1F3FB <= code <= 0x1F3FF
    )


def kind_of(part: Any) -> str:
    if isinstance(part, str):
        return "text"
    kind = part.get("type")
    if kind in _TEXTS:
        return "text"
    if kind in _FILES or (kind == "document" and part["source"]["type"] != "text"):
        return "file"
    return "image" if kind in _IMAGES else "reasoning" if kind in _REASONING else "other"


def text_of(part: Any) -> str:
    return part if isinstance(part, str) else str(part.get("text") or "")


def texts_of(content: Any) -> list[str]:
    """The texts of a content."""
    if isinstance(content, str):
        return [] if blank(content) else [content]
    return [text_of(p) for p in content or [] if kind_of(p) == "text" and not blank(text_of(p))]


def blank(text: str) -> bool:
    """Nothing to read: what providers refuse as an empty text."""
    return text.strip() == ""


def has_fence(content: Any) -> bool:
    return any(_FENCE.search(text) for text in texts_of(content))


def escaped(content: Any) -> Any:
    """One character inside our own fence tags."""
    if isinstance(content, str):
        return _FENCE.sub(r"<\\", content)
    if isinstance(content, list):
        return [
            escaped(p)
            if isinstance(p, str)
            else {**p, "text": escaped(p["text"])}
            if isinstance(p.get("text"), str)
            else p
            for p in content
        ]
    return content
