"""The geometry of the page's drawings: numbers for SVG paths, on a canvas of 1000 by 1000 that stretches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from pycontext.inspector.reading import Moment

#: The sections of a window, in the order in which they are stacked.
SECTIONS = ("system", "head", "summary", "omitted", "pinned", "request", "tail")
SIZE = 1000


@dataclass(frozen=True)
class Segment:
    """A part of a bar."""

    name: str
    tokens: int
    x: float
    width: float


@dataclass(frozen=True)
class Mark:
    """A place on the drawing of a life, with what it says."""

    kind: str
    x: float
    y: float
    text: str
    path: str


@dataclass(frozen=True)
class Life:
    """Window tokens over the chat: an area for each section, the budget, marks for moments and passes."""

    top: int
    areas: Sequence[tuple[str, str]]
    budget: str
    is_budget_above: bool
    moments: Sequence[Mark]
    passes: Sequence[Mark]


def bar(parts: Iterable[tuple[str, int]], whole: int) -> list[Segment]:
    """Parts of a whole one after the other; a part that is there is never thinner than can be seen."""
    given = [(name, tokens) for name, tokens in parts if tokens > 0]
    scale = SIZE / max(whole, sum(tokens for _, tokens in given), 1)
    segments = []
    x = 0.0
    for name, tokens in given:
        width = min(max(tokens * scale, 3.0), SIZE - x)
        segments.append(Segment(name, tokens, round(x, 2), round(width, 2)))
        x += width
    return segments


def strip(rows: Sequence[tuple[str, int]]) -> dict[str, str]:
    """The whole thread as one bar: a path for each kind of row, in it a rectangle for each run."""
    scale = SIZE / max(sum(tokens for _, tokens in rows), 1)
    paths: dict[str, list[str]] = {}
    done = 0
    for kind, run in groupby(rows, key=lambda row: row[0]):
        tokens = sum(size for _, size in run)
        width = max(tokens * scale, 0.6)
        paths.setdefault(kind, []).append(f"M{done * scale:.1f} 0h{width:.1f}v{SIZE}h{-width:.1f}z")
        done += tokens
    return {kind: "".join(path) for kind, path in paths.items()}


def life(
    moments: Sequence[Moment], passes: Sequence[tuple[str, int, str]], token_budget: int, last_place: int
) -> Life | None:
    """The drawing, or None where there are not two moments. passes: kind, place among the rows, text."""
    if len(moments) < 2:
        return None
    budgets = [token_budget if m.token_budget is None else m.token_budget for m in moments]
    peak = max(m.tokens for m in moments)
    # A budget far above would flatten the drawing.
    is_above = min(budgets) > 4 * peak
    top = _rounded(peak * 1.1 if is_above else max(peak, *budgets) * 1.04)
    across = SIZE / max(last_place, 1)

    def x(place: int) -> float:
        return round(place * across, 1)

    def y(tokens: float) -> float:
        return round(SIZE - tokens * SIZE / top, 1)

    areas = []
    floor = [0] * len(moments)
    for name in SECTIONS:
        roof = [low + m.sections.get(name, 0) for low, m in zip(floor, moments, strict=True)]
        if roof != floor:
            there = [(x(m.place), y(high)) for m, high in zip(moments, roof, strict=True)]
            back = [(x(m.place), y(low)) for m, low in zip(moments, floor, strict=True)]
            areas.append((name, _polygon([*there, *reversed(back)])))
        floor = roof
    steps = [f"M{x(moments[0].place)} {y(budgets[0])}"]
    for moment, budget in zip(moments[1:], budgets[1:], strict=True):
        steps.append(f"H{x(moment.place)}V{y(budget)}")
    marks = [
        Mark(
            "exact" if m.is_exact else "derived",
            x(m.place),
            y(m.tokens),
            _moment_text(m, budget),
            f"M{x(m.place)} {y(m.tokens)}h0",
        )
        for m, budget in zip(moments, budgets, strict=True)
    ]
    lines = [Mark(kind, x(place), 0, text, f"M{x(place)} 0V{SIZE}") for kind, place, text in passes]
    return Life(top, areas, "" if is_above else "".join(steps), is_above, marks, lines)


def _moment_text(moment: Moment, budget: int) -> str:
    kind = "as the turn read it" if moment.is_exact else "replayed"
    return f"#{moment.seq}: {moment.tokens:,} of {budget:,} tokens, {kind}"


def _polygon(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in points) + "z"


def _rounded(value: float) -> int:
    """The next number that is easy to halve and to read."""
    digits = 10 ** (len(str(int(max(value, 10)))) - 1)
    for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10):
        if step * digits >= value:
            return int(step * digits)
    return int(10 * digits)


def section_sums(sections: Mapping[str, int]) -> list[tuple[str, int]]:
    """Sections in the order of the window, unknown ones last."""
    known = [(name, sections[name]) for name in SECTIONS if name in sections]
    return known + [(name, tokens) for name, tokens in sections.items() if name not in SECTIONS]
