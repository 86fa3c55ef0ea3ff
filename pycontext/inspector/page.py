"""The page as HTML: what the template shows, worked out from what was read."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import BaseLoader, Environment, StrictUndefined
from markupsafe import Markup

from pycontext.inspector import drawing, text
from pycontext.inspector.reading import MAX_LOGGED, REQUEST_TOKENS, Reading
from pycontext.inspector.text import Piece, one_line, shown
from pycontext.rows import Explained, ThreadRow, WindowRow

#: Characters of stored text on one page, and the limits of one row that are tried for it, in this order.
TEXT_ON_PAGE = 3_000_000
ROW_LIMITS = (20_000, 8_000, 4_000, 2_000, 1_000, 500)
_FOLDED = 600  # characters from which on a text is folded
_FOLDED_LINES = 9
_SENT_LIMIT = 20_000

_PASSES = ("summarized", "pruned")

FATES = {
    "system": "the system prompt",
    "head": "the first turn, verbatim",
    "summary": "the summary in their place",
    "pinned": "kept by a pin",
    "request": "the newest request, verbatim",
    "kept": "verbatim",
    "marker": "stands for what is left out",
    "stand-in": "for a result that has not come",
    "pruned": "in one line",
    "shortened": "cut to fit",
    "summarized": "told by a summary",
    "merged": "summaries told on in a later one",
    "left out": "no room, behind a marker",
    "replaced": "a later result stands for it",
    "set aside": "rewound, or from before a new start",
    "not used": "summaries that came too late",
    "dropped line": "summaries taken back",
}


@dataclass(frozen=True)
class Body:
    """The text of a row: what is shown at once, what is unfolded, and how much is not on the page."""

    beginning: Sequence[Piece]
    whole: Sequence[Piece]
    length: int
    left_out: int

    @property
    def is_folded(self) -> bool:
        return bool(self.whole)


@dataclass(frozen=True)
class Item:
    """One entry of the thread: a message, a line, or what only the window has."""

    anchor: str
    kind: str
    seq: int | None
    role: str
    name: str | None
    at: datetime | None
    fate: str
    reason: str
    by: str | None
    by_anchor: str | None
    section: str | None
    tokens: int
    stored: int | None
    is_estimate: bool
    body: Body
    sent: Body | None = None
    title: str = ""
    is_newest_line: bool = False
    is_day_start: bool = False

    @property
    def is_sent(self) -> bool:
        return self.section is not None


@dataclass(frozen=True)
class Notice:
    """Something that whoever looks should know, and what to do about it."""

    severity: str
    text: str
    way_out: str = ""


@dataclass
class _Anchors:
    lines: dict[str, str] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)

    def of(self, by: str | None) -> str | None:
        """Where on the page it stands whose doing a fate is."""
        if by is None:
            return None
        if by in self.lines:
            return self.lines[by]
        match = re.fullmatch(r"(pass|act) (\d+)|#(\d+)", by)
        if match is None:
            return None
        anchor = f"{match.group(1)}-{match.group(2)}" if match.group(1) else f"s{match.group(3)}"
        return anchor if anchor in self.known else None


def render(reading: Reading) -> str:
    """The page as one HTML document."""
    items = _items(reading)
    environment = _environment()
    style = _source("inspector.css")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.from_string(_source("inspector.html.j2")).render(
        r=reading,
        style=Markup(style),
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        items=items,
        fates=_fates(items),
        notices=_notices(reading, items),
        bar=drawing.bar(_sums(reading.window), reading.token_budget),
        free=max(reading.token_budget - reading.window_tokens, 0),
        sections=[("every request", REQUEST_TOKENS), *_sums(reading.window)],
        strip=drawing.strip(_kinds(items)),
        life=_life(reading),
        prompt=_prompt(reading, items),
        acts=_other_acts(reading),
        newest_line=next((item.anchor for item in reversed(items) if item.is_newest_line), None),
        max_logged=MAX_LOGGED,
        on_page={item.seq for item in items if item.kind == "message"},
        messages=sum(item.kind == "message" for item in items),
        read_messages=sum(item.kind == "message" and item.is_sent for item in items),
    )


@cache
def _source(name: str) -> str:
    return (files("pycontext") / "templates" / name).read_text(encoding="utf-8")


def _environment() -> Environment:
    environment = Environment(
        loader=BaseLoader(), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        shown=shown,
        number=lambda value: "–" if value is None else f"{value:,}",
        moment=lambda at: "–" if at is None else at.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        clock=lambda at: at.astimezone(timezone.utc).strftime("%H:%M"),
        day=_day,
        iso=lambda at: at.astimezone(timezone.utc).isoformat(timespec="seconds"),
        literal=_literal,
        slug=lambda name: name.replace(" ", "-"),
        fate_text=lambda fate: FATES.get(fate, ""),
    )
    return environment


def _day(at: datetime) -> str:
    at = at.astimezone(timezone.utc)
    return f"{at:%A}, {at.day} {at:%B %Y}"


def _other_acts(reading: Reading) -> list[dict[str, Any]]:
    return [act for act in reading.acts if act["act"] not in _PASSES]


def _literal(value: str) -> str:
    """A string as SQL takes it."""
    return "'" + value.replace("'", "''") + "'"


def _sums(window: Sequence[WindowRow]) -> list[tuple[str, int]]:
    sums: dict[str, int] = {}
    for row in window:
        sums[row.section] = sums.get(row.section, 0) + row.tokens
    return drawing.section_sums(sums)


def _items(reading: Reading) -> list[Item]:
    window = {(row.kind, row.message_id): row for row in reading.window if row.message_id is not None}
    only_sent = {
        "system": [row for row in reading.window if row.section == "system"],
        "marker": [row for row in reading.window if row.section == "omitted"],
        "stand-in": [row for row in reading.window if row.seq is None and row.role == "tool"],
    }
    anchors = _Anchors()
    anchors.known.update(f"pass-{done['pass_no']}" for done in reading.passes)
    anchors.known.update(f"act-{act['act_no']}" for act in _other_acts(reading))
    places: list[str] = []
    for number, row in enumerate(reading.rows):
        is_line = row.message_id is not None and _is_line(reading, row)
        place = f"l{number}" if is_line else f"s{row.seq}" if row.seq is not None else f"w{number}"
        if is_line and row.message_id is not None:
            anchors.lines[row.message_id] = place
        anchors.known.add(place)
        places.append(place)
    stored_pieces = [_stored_pieces(reading, row) for row in reading.rows]
    limit = _row_limit([text.length(found) for found in stored_pieces])
    line_id = next((row.message_id for row in reading.window if row.kind == "summary"), None)
    items = []
    day = None
    for place, row, found in zip(places, reading.rows, stored_pieces, strict=True):
        stored = _stored(reading, row)
        if row.message_id is not None:
            sent = window.get(("summary" if place.startswith("l") else "message", row.message_id))
        else:
            sent = only_sent[row.fate].pop(0) if only_sent.get(row.fate) else None
        is_line = place.startswith("l")
        sent_pieces = text.pieces(sent.content, sent.tool_calls) if sent is not None else []
        if row.message_id is None:
            found, sent_pieces = sent_pieces, []
        at = stored.created_at if stored is not None else sent.created_at if sent is not None else None
        this_day = None if at is None or is_line else at.astimezone(timezone.utc).date()
        items.append(
            Item(
                anchor=place,
                kind="line" if is_line else "message" if row.message_id is not None else "window",
                seq=row.seq,
                role=row.role or "",
                name=stored.name if stored is not None else None,
                at=at,
                fate=row.fate,
                reason=row.reason,
                by=row.by,
                by_anchor=anchors.of(row.by),
                section=row.section,
                tokens=row.tokens,
                stored=row.stored,
                is_estimate=stored.is_estimate if stored is not None else False,
                body=_body(found, limit),
                sent=_body(sent_pieces, _SENT_LIMIT) if sent_pieces != found and sent_pieces else None,
                title=_line_title(row, stored) if is_line else "",
                is_newest_line=is_line and row.message_id == line_id,
                is_day_start=this_day is not None and this_day != day,
            )
        )
        day = this_day or day
    return items


def _stored(reading: Reading, row: Explained) -> ThreadRow | None:
    if row.seq is None or row.message_id is None:
        return None
    return reading.stored.get((row.seq, row.message_id))


def _is_line(reading: Reading, row: Explained) -> bool:
    stored = _stored(reading, row)
    if stored is not None:
        return stored.kind == "summary"
    # of what left the thread only lines have these fates
    return row.fate in ("dropped line", "merged", "not used", "summary")


def _stored_pieces(reading: Reading, row: Explained) -> list[Piece]:
    stored = _stored(reading, row)
    if stored is None:
        if row.message_id is None:
            return []
        return [
            Piece("text", "", row.preview),
            Piece("note", "", "only its beginning: it is no longer in the thread"),
        ]
    return text.pieces(stored.content, stored.tool_calls)


def _row_limit(lengths: Sequence[int]) -> int:
    """The most characters of one row with which all rows fit the page."""
    for limit in ROW_LIMITS:
        if sum(min(length, limit) for length in lengths) <= TEXT_ON_PAGE:
            return limit
    return ROW_LIMITS[-1]


def _body(found: Sequence[Piece], limit: int) -> Body:
    length = text.length(found)
    if length <= _FOLDED and sum(piece.text.count("\n") for piece in found) <= _FOLDED_LINES:
        return Body(found, (), length, 0)
    beginning = []
    lines = _FOLDED_LINES
    for piece in text.cut(found, _FOLDED * 2 // 3):
        kept = piece.text.split("\n")[:lines]
        beginning.append(Piece(piece.kind, piece.label, "\n".join(kept)))
        lines -= len(kept)
        if lines <= 0:
            break
    return Body(beginning, text.cut(found, limit), length, max(length - limit, 0))


def _line_title(row: Explained, stored: ThreadRow | None) -> str:
    if stored is None:
        return f"a line at #{row.seq}"
    if stored.origin == "reset":
        return "the user started over here"
    covers: Mapping[str, Any] = (stored.summary or {}).get("covers") or {}
    first = covers.get("from_seq")
    return f"summary of #{first} to #{stored.seq}" if first is not None else f"summary up to #{stored.seq}"


def _kinds(items: Sequence[Item]) -> list[tuple[str, int]]:
    """Each message as the strip draws it, with its size as stored."""
    return [(_kind(item), max(item.stored or 0, 1)) for item in items if item.kind == "message"]


def _kind(item: Item) -> str:
    if item.is_sent:
        return "cut" if item.fate in ("pruned", "shortened") else item.section or "tail"
    return {"summarized": "summarized", "left out": "left-out"}.get(item.fate, "gone")


def _fates(items: Sequence[Item]) -> list[tuple[str, bool, int, int, int]]:
    """A row a fate: rows, tokens as stored, tokens in the window; what is sent first, the largest first."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.fate, []).append(item)
    table = [
        (
            fate,
            any(item.is_sent for item in of),
            len(of),
            sum(i.stored or 0 for i in of),
            sum(i.tokens for i in of),
        )
        for fate, of in found.items()
    ]
    order = list(FATES)
    return sorted(table, key=lambda row: (not row[1], order.index(row[0]) if row[0] in order else len(order)))


def _prompt(reading: Reading, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The rows of the window in its own order, each with the place of the thread it comes from."""
    by_id = {(item.kind, item.seq): item.anchor for item in items if item.seq is not None}
    lists = {
        "system": [i for i in items if i.fate == "system"],
        "omitted": [i for i in items if i.fate == "marker"],
    }
    newest = next((item.anchor for item in reversed(items) if item.is_newest_line), None)
    listed = []
    for row in reading.window:
        anchor = None
        if row.kind == "summary":
            anchor = newest
        elif row.section in lists:
            anchor = lists[row.section].pop(0).anchor if lists[row.section] else None
        elif row.seq is not None:
            anchor = by_id.get(("message", row.seq))
        found = text.pieces(row.content, row.tool_calls)
        words = "  ".join(f"→ {p.label}({p.text})" if p.kind == "call" else p.text for p in found)
        listed.append({"row": row, "anchor": anchor, "words": one_line(words, 90)})
    return listed


def _life(reading: Reading) -> drawing.Life | None:
    live = [row for row in reading.rows if row.message_id is not None and _live_place(reading, row)]
    place_of = {row.seq: place for place, row in enumerate(live)}
    passes = []
    for done in reversed(reading.passes):
        place = place_of.get(done["at_seq"])
        if place is not None and done["outcome"] != "skipped":
            sizes = (
                f": {done['tokens_before']:,} → {done['tokens_after']:,} tokens"
                if done["tokens_after"]
                else ""
            )
            passes.append((done["outcome"], place, f"pass {done['pass_no']}, {done['outcome']}{sizes}"))
    return drawing.life(reading.moments, passes, reading.token_budget, len(live) - 1)


def _live_place(reading: Reading, row: Explained) -> bool:
    stored = _stored(reading, row)
    return stored is not None and stored.kind == "message"


def _notices(reading: Reading, items: Sequence[Item]) -> list[Notice]:
    found = []
    chat = _literal(reading.chat_id)
    if reading.passes and reading.passes[0]["outcome"] == "failed":
        last = reading.passes[0]
        found.append(
            Notice(
                "error",
                f"The last pass failed: {last['reason']}",
                f"select * from pycontext.compaction_history where chat_id = {chat} order by pass_no desc",
            )
        )
    if reading.chat["flush_error"]:
        found.append(Notice("error", f"Facts could not be taken: {reading.chat['flush_error']}"))
    degraded = [item for item in items if item.fate in ("left out", "marker")]
    if degraded:
        left = [item for item in degraded if item.fate == "left out" and item.kind == "message"]
        tokens = sum(item.stored or 0 for item in left)
        found.append(
            Notice(
                "warning",
                f"The chat is over its budget: {len(left):,} messages ({tokens:,} tokens) are left out, "
                "and no summary tells them.",
                "compact it: pycontext compact CHAT, or run the worker",
            )
        )
    if any(item.fate == "shortened" and item.section == "tail" for item in items):
        found.append(Notice("warning", "Even the newest messages do not fit whole: some are shortened."))
    plan = reading.plan
    if plan is not None and reading.as_of is None and plan.decision in ("summarize", "prune"):
        found.append(Notice("info", f"A pass is due ({plan.decision}): {plan.reason}."))
    read_under = [moment.token_budget for moment in reading.moments if moment.token_budget is not None]
    if read_under and read_under[-1] != reading.token_budget and reading.as_of is None:
        found.append(
            Notice(
                "info",
                f"The newest turns read in a budget of {read_under[-1]:,} tokens, "
                f"not the {reading.token_budget:,} shown here.",
                f"see it as they did: pycontext inspect … --token-budget {read_under[-1]}",
            )
        )
    estimated = sum(item.is_estimate for item in items)
    if estimated:
        found.append(
            Notice(
                "info",
                f"{estimated:,} rows are estimated, not counted; estimates are on the high side.",
                "the worker counts them; or db.count_tokens(chat_id)",
            )
        )
    return found
