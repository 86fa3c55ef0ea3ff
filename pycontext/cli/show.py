"""How a thread, a window, a pass and a list of chats look in a terminal."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from pycontext.cli.terminal import number, visible
from pycontext.rows import Explained, Pass, ThreadRow, WindowRow

_NARROW = 90

# The counting rule: 3 tokens once per request.
REQUEST_TOKENS = 3
_ROLE_STYLES = {"user": "bold green", "assistant": "cyan", "tool": "yellow", "system": "magenta"}


@dataclass(frozen=True)
class Section:
    """How a section of the window is drawn: a glyph where the terminal has it, else a letter."""

    glyph: str
    letter: str
    style: str


SECTIONS: Mapping[str, Section] = {
    "system": Section("█", "S", "magenta"),
    "head": Section("▓", "H", "blue"),
    "summary": Section("▒", "L", "bright_yellow"),
    "request": Section("◆", "R", "bright_green"),
    "pinned": Section("●", "P", "bright_magenta"),
    "omitted": Section("┄", "O", "red"),
    "tail": Section("■", "T", "cyan"),
}
_OTHER = Section("□", "X", "white")
_FREE = Section("·", ".", "bright_black")


def preview(content: Any, tool_calls: Sequence[Mapping[str, Any]] | None = None, limit: int = 400) -> str:
    """One line that says what a message is: its text, its images by size, its calls with their arguments."""
    pieces = []
    if isinstance(content, str):
        pieces.append(content[:limit])
    elif isinstance(content, list):
        pieces.extend(_part(part, limit) for part in content)
    elif content is not None:
        pieces.append(json.dumps(content, ensure_ascii=False)[:limit])
    for call in tool_calls or ():
        function = call.get("function") or {}
        pieces.append(f"→ {function.get('name')}({str(function.get('arguments') or '')[:limit]})")
    return visible("  ".join(piece for piece in pieces if piece))


def _part(part: Any, limit: int) -> str:
    if not isinstance(part, Mapping):
        return str(part)[:limit]
    if isinstance(part.get("text"), str):
        return str(part["text"])[:limit]
    return f"[{part.get('type', 'part')}, {len(json.dumps(part)):,} characters]"


def line_text(row: ThreadRow) -> str:
    """What stands on the rule across a thread."""
    if row.origin == "reset":
        return "started over here"
    covers = (row.summary or {}).get("covers") or {}
    first, last = covers.get("from_seq"), covers.get("to_seq") or row.seq
    return f"summary of #{first}–#{last}" if first is not None else f"summary up to #{last}"


def thread(console: Console, rows: Sequence[ThreadRow], summary_lines: int = 8) -> None:
    """A conversation as a person scrolls it, newest last, each line drawn as a rule across it.

    summary_lines: how much of a summary's text is shown under its rule.
    """
    width = max((len(f"#{row.seq}") for row in rows), default=2)
    for row in rows:
        if row.kind == "summary":
            style = "bold red" if row.origin == "reset" else "bold yellow"
            console.print(_rule(console, line_text(row), style))
            _summary_text(console, row.content, summary_lines)
            continue
        line = Text()
        line.append(f"#{row.seq}".rjust(width), style="bold")
        line.append(f" {row.role:<9}", style=_ROLE_STYLES.get(row.role, ""))
        if console.width >= _NARROW:
            line.append(f" {moment(row.created_at)}", style="bright_black")
        line.append(f" {_tokens(row.tokens, row.is_estimate):>8}", style="bright_black")
        line.append("  " + preview(row.content, row.tool_calls))
        console.print(line, no_wrap=True, overflow="ellipsis")


def _summary_text(console: Console, content: Any, limit: int) -> None:
    text = content if isinstance(content, str) else preview(content)
    lines = [visible(line) for line in text.splitlines() if line.strip()]
    for line in lines[:limit]:
        console.print(Text(f"  {line}", style="yellow"), no_wrap=True, overflow="ellipsis")
    if len(lines) > limit:
        console.print(f"  … {number(len(lines) - limit)} more lines", style="bright_black")


def window(
    console: Console, rows: Sequence[WindowRow], token_budget: int, title: str, max_rows: int | None = None
) -> None:
    """What the model reads: a bar of the sections against the budget, then the rows (the outer max_rows)."""
    used = window_tokens(rows)
    console.print(Text(visible(title), style="bold"), no_wrap=True, overflow="ellipsis")
    share = f"{used / token_budget:.0%}" if token_budget else "–"
    console.print(f"{number(used)} of {number(token_budget)} tokens ({share}), {number(len(rows))} rows")
    budget_bar(console, rows, token_budget)
    width = max((len(f"#{row.seq}") for row in rows if row.seq is not None), default=2)
    hidden = _hidden(len(rows), max_rows)
    previous = None
    for index, row in enumerate(rows):
        if index in hidden:
            if index == hidden.start:
                console.print(f"{'':<8} … {number(len(hidden))} more rows", style="bright_black")
            continue
        section = SECTIONS.get(row.section, _OTHER)
        line = Text()
        line.append(f"{row.section if row.section != previous else '':<8}", style=section.style)
        line.append(f" {'' if row.seq is None else f'#{row.seq}':>{width}}", style="bold")
        line.append(f" {row.role:<9}", style=_ROLE_STYLES.get(row.role, ""))
        line.append(f" {_tokens(row.tokens, row.is_estimate):>8}", style="bright_black")
        flags = [name for name in ("shortened", "escaped") if getattr(row, f"is_{name}")]
        if flags:
            line.append(f" ({', '.join(flags)})", style="red")
        line.append("  " + preview(row.content, row.tool_calls))
        console.print(line, no_wrap=True, overflow="ellipsis")
        previous = row.section


def explanation(console: Console, rows: Sequence[Explained]) -> None:
    """What became of each row, a line for each: place, fate, tokens sent of stored, whose doing and why."""
    width = max((len(f"#{row.seq}") for row in rows if row.seq is not None), default=2)
    styles = {
        "kept": "cyan",
        "left out": "red",
        "set aside": "red",
        "shortened": "yellow",
        "pruned": "yellow",
    }
    for row in rows:
        if row.fate == "not shown":
            console.print(
                f"… older rows: {row.reason.replace('before_seq =>', '--before')}", style="bright_black"
            )
            continue
        line = Text()
        line.append(f"{'' if row.seq is None else f'#{row.seq}':>{width}}", style="bold")
        line.append(f" {row.fate:<12}", style=styles.get(row.fate, "bright_black"))
        cost = number(row.tokens)
        if row.stored is not None and row.stored != row.tokens:
            cost += f" of {number(row.stored)}"
        line.append(f" {cost:>15}", style="bright_black")
        line.append("  " + visible(row.reason + (f" ({row.by})" if row.by else "")))
        line.append(f"  {visible(row.preview)}", style=_ROLE_STYLES.get(row.role or "", ""))
        console.print(line, no_wrap=True, overflow="ellipsis")


def _hidden(count: int, max_rows: int | None) -> range:
    """Which rows are left out, from the middle, so that max_rows remain."""
    if max_rows is None or count <= max_rows:
        return range(0)
    return range(max_rows // 2, count - (max_rows - max_rows // 2))


def budget_bar(console: Console, rows: Sequence[WindowRow], token_budget: int) -> None:
    """One bar of the budget, a section after the other, and under it what each takes."""
    sums = section_tokens(rows)
    console.print(bar(console, rows, token_budget, max(20, console.width - 2)), no_wrap=True, overflow="crop")
    legend = [(name, tokens, SECTIONS.get(name, _OTHER)) for name, tokens in sums.items()]
    legend.append(("free", max(0, token_budget - window_tokens(rows)), _FREE))
    is_plain = _is_plain(console)
    lines = Text(" ")
    used = 1
    for name, tokens, section in legend:
        entry = f"{section.letter if is_plain else section.glyph} {name} {number(tokens)}   "
        if used + cell_len(entry) > console.width:
            lines.append("\n ")
            used = 1
        lines.append(entry, style=section.style)
        used += cell_len(entry)
    console.print(lines)


def bar(console: Console, rows: Sequence[WindowRow], token_budget: int, cells: int) -> Text:
    """The budget in that many cells, a section after the other, in brackets."""
    sums = section_tokens(rows)
    is_plain = _is_plain(console)
    scale = max(token_budget, sum(sums.values()), 1)
    drawn = Text("[")
    start = 0
    done = 0
    for name, tokens in sums.items():
        section = SECTIONS.get(name, _OTHER)
        done += tokens
        end = min(cells, max(round(done * cells / scale), start + (1 if tokens else 0)))
        drawn.append((section.letter if is_plain else section.glyph) * (end - start), style=section.style)
        start = end
    drawn.append((_FREE.letter if is_plain else _FREE.glyph) * (cells - start), style=_FREE.style)
    drawn.append("]")
    return drawn


def window_tokens(rows: Sequence[WindowRow]) -> int:
    """What a request of these rows takes: their tokens, and those that every request takes."""
    return REQUEST_TOKENS + sum(row.tokens for row in rows)


def section_tokens(rows: Sequence[WindowRow]) -> dict[str, int]:
    """Tokens by section, in the order of the window."""
    sums: dict[str, int] = {}
    for row in rows:
        sums[row.section] = sums.get(row.section, 0) + row.tokens
    return sums


def a_pass(console: Console, done: Pass) -> None:
    """One compaction attempt: what was saved, or why nothing was."""
    if done.outcome != "summarized":
        style = "red" if done.outcome == "failed" else "yellow"
        console.print(Text(f"{done.outcome}: {visible(done.reason or 'nothing to cut')}", style=style))
        return
    before, after = done.tokens_before or 0, done.tokens_after or 0
    first = "up to " if done.from_seq is None else f"#{done.from_seq}–"
    saved = f", {1 - after / before:.0%} saved" if before else ""
    console.print(
        Text.assemble(
            ("summarized ", "green"),
            f"{first}#{done.to_seq}: {number(before)} → {number(after)} tokens{saved}, ",
            f"{done.seconds:.2f} s, {visible(done.model or '')}",
        )
    )
    if done.calls:
        calls = f"{number(done.calls)} model call{'' if done.calls == 1 else 's'}"
        sizes = f"{number(done.prompt_tokens)} tokens read, {number(done.completion_tokens)} written"
        console.print(f"{calls}, {sizes}", style="bright_black")


class _Pieces(logging.Handler):
    """Says what a pass took in once it is known that another one follows."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console
        self._last = ""

    def emit(self, record: logging.LogRecord) -> None:
        done = getattr(record, "compaction", {})
        if done.get("outcome") != "summarized":
            return
        if self._last:
            self._console.print(self._last, style="bright_black")
        self._last = f"#{done['from_seq']}–#{done['to_seq']} summarized, {done['seconds']:.2f} s"


@contextmanager
def pieces(console: Console) -> Iterator[None]:
    """Inside it, each pass of a compaction that takes several is told on `console` as it ends."""
    handler = _Pieces(console)
    logger = logging.getLogger("pycontext")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def table(console: Console, headings: Sequence[str], rows: Sequence[Sequence[Any]], right: str = "") -> None:
    """Plain columns; the last one gives way where the terminal is narrow.

    right: a letter for each column, 'r' where it is aligned to the right.
    """
    shown = [[visible("" if cell is None else str(cell)) for cell in row] for row in rows]
    widths = [
        max([cell_len(heading), *(cell_len(row[index]) for row in shown)])
        for index, heading in enumerate(headings)
    ]
    widths[0] = min(widths[0], max(20, console.width // 2))
    for position, row in enumerate([list(headings), *shown]):
        line = Text(style="bold" if position == 0 else "")
        for index, cell in enumerate(row):
            if right[index : index + 1] == "r":
                cell = " " * (widths[index] - cell_len(cell)) + cell
            elif index < len(row) - 1:
                cell = set_cell_size(cell, widths[index])
            line.append(("" if index == 0 else "  ") + cell)
        console.print(line, no_wrap=True, overflow="ellipsis")


def moment(at: datetime | None) -> str:
    """A time as people read it here: UTC, to the minute."""
    return "" if at is None else at.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M")


def _tokens(tokens: int, is_estimate: bool) -> str:
    return ("~" if is_estimate else "") + number(tokens)


def _rule(console: Console, title: str, style: str) -> Rule:
    return Rule(Text(title, style=style), characters="-" if _is_plain(console) else "—", style=style)


def _is_plain(console: Console) -> bool:
    """Whether the terminal has no glyphs beyond ASCII."""
    return not (console.encoding or "").lower().startswith("utf")
