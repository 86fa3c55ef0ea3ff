"""What a page shows, read from the database in one snapshot."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from math import ceil
from typing import Any

import psycopg
from psycopg.rows import dict_row

from pycontext.errors import BudgetTooSmall, NoSuchChat, translate
from pycontext.queries import query
from pycontext.rows import Explained, Plan, StoredFact, ThreadRow, WindowRow, as_row

#: Windows of the past that are read for the drawing of the chat's life, at most.
MAX_MOMENTS = 120
_PASSES_WITH_MOMENTS = 24
_MOMENTS_ADOPTED = 24  # a window of rows that are only estimated takes many times as long
#: The log is shown as far back as this.
MAX_LOGGED = 200
_MAX_FACTS = 200

#: 3 tokens once a request: the counting rule.
REQUEST_TOKENS = 3

Row = dict[str, Any]


@dataclass(frozen=True)
class Moment:
    """The window as it was at one message: `place` counts the rows shown, tokens are by section."""

    place: int
    seq: int
    at: datetime
    sections: dict[str, int]
    token_budget: int | None
    is_exact: bool

    @property
    def tokens(self) -> int:
        return REQUEST_TOKENS + sum(self.sections.values())


@dataclass(frozen=True)
class Reading:
    """One chat at one time. `token_budget` is in the encoding's own tokens, as all counts are."""

    chat_id: str
    as_of: str | None
    made_at: datetime
    chat: Row
    token_budget: int
    is_given_budget: bool
    plan: Plan | None
    window: Sequence[WindowRow]
    rows: Sequence[Explained]
    stored: dict[tuple[int, str], ThreadRow]
    older_than: int | None
    passes: Sequence[Row]
    acts: Sequence[Row]
    facts: Sequence[StoredFact]
    moments: Sequence[Moment] = field(default=())

    @property
    def window_tokens(self) -> int:
        return REQUEST_TOKENS + sum(row.tokens for row in self.window)


def read(
    connection: psycopg.Connection[Any],
    chat_id: str,
    token_budget: int | None,
    as_of: str | None,
    max_rows: int,
) -> Reading:
    """Read it all in one read-only snapshot; see `pycontext.inspector.inspect`."""
    with translate(), connection.transaction():
        connection.execute("set transaction isolation level repeatable read, read only")
        return _Reader(connection, chat_id, token_budget, as_of).read(max_rows)


class _Reader:
    def __init__(
        self, connection: psycopg.Connection[Any], chat_id: str, token_budget: int | None, as_of: str | None
    ) -> None:
        self._connection = connection
        self._chat_id = chat_id
        self._token_budget = token_budget
        self._as_of = as_of

    def read(self, max_rows: int) -> Reading:
        asked = {"token_budget": self._token_budget, "as_of": self._as_of}
        window = [as_row(WindowRow, row) for row in self._rows("working_window", **asked)]
        told = [
            as_row(Explained, row)
            for row in self._rows("explain_window", **asked, search=None, before_seq=None, max_rows=max_rows)
        ]
        chat = next(iter(self._rows("inspected_chat")), None)
        if chat is None:
            raise NoSuchChat("no such chat", detail=f"chat_id is {self._chat_id!r}")
        rows = [row for row in told if row.fate != "not shown"]
        places = [row.seq for row in rows if row.seq is not None]
        oldest, newest = min(places, default=0), max(places, default=0)
        stored = [
            as_row(ThreadRow, row)
            for row in self._rows("thread", before_seq=newest + 1, max_rows=len(rows))
            if row["seq"] >= oldest
        ]
        passes = self._rows("newest_passes", max_rows=MAX_LOGGED)
        plan, budget = self._limits(chat)
        return Reading(
            chat_id=self._chat_id,
            as_of=self._as_of,
            made_at=datetime.now(timezone.utc),
            chat=chat,
            token_budget=budget,
            is_given_budget=self._token_budget is not None,
            plan=plan,
            window=window,
            rows=rows,
            stored={(row.seq, row.message_id): row for row in stored},
            older_than=oldest if len(rows) < len(told) else None,
            passes=passes,
            acts=self._rows("newest_acts", max_rows=MAX_LOGGED),
            facts=[
                as_row(StoredFact, row)
                for row in self._rows(
                    "memory_page",
                    owner=chat["owner"],
                    tenant=chat["tenant"],
                    before=None,
                    max_rows=_MAX_FACTS,
                )
            ],
            moments=self._moments(
                stored,
                passes,
                chat["token_scale"],
                MAX_MOMENTS if chat["source"] is None else _MOMENTS_ADOPTED,
            ),
        )

    def _limits(self, chat: Row) -> tuple[Plan | None, int]:
        """The plan for the window as it is now, and the budget of the window that is shown."""
        plan = None
        try:
            with translate(), self._connection.transaction():
                (found,) = self._rows("compaction_plan", token_budget=self._token_budget)
                plan = as_row(Plan, found)
        except BudgetTooSmall:
            pass  # of the profile; the window shown is of another time
        if self._token_budget is not None:
            return plan, int(self._token_budget / chat["token_scale"])
        if self._as_of is not None:
            kept = self._budgets([self._as_of])
            if kept:
                return plan, kept[self._as_of]
        return plan, plan.token_budget if plan is not None else 0

    def _moments(
        self, stored: Sequence[ThreadRow], passes: Sequence[Row], scale: float, most: int
    ) -> list[Moment]:
        """Windows of the past: around the newest passes, at the newest message, and spread over the turns."""
        live = [row for row in stored if row.kind == "message"]
        if not live:
            return []
        place_of = {row.seq: place for place, row in enumerate(live)}
        places = {len(live) - 1}
        for done in passes[: min(_PASSES_WITH_MOMENTS, most // 4)]:
            place = place_of.get(done["at_seq"])
            if place is not None:
                places.update((place, min(place + 1, len(live) - 1)))
        turns = [place for place, row in enumerate(live) if row.role == "user"]
        for candidates in (turns, list(range(len(live)))):
            room = most - len(places)
            step = max(1, -(-len(candidates) // max(room, 1)))
            if room > 0:
                places.update(candidates[::step][:room])
        chosen = [(place, live[place]) for place in sorted(places)]
        turn_of = {
            place: live[turns[at - 1]].message_id for place in places if (at := bisect_right(turns, place))
        }
        budgets = self._budgets(list(set(turn_of.values())))
        found = []
        for place, row in chosen:
            # A turn's rows were read under its budget; at its request that is kept, and the replay exact.
            budget = None if self._token_budget is not None else budgets.get(turn_of.get(place, ""))
            asked = self._token_budget
            if budget is not None and turn_of[place] != row.message_id:
                asked = ceil(budget * scale)
            sections = self._sections(row.message_id, asked)
            if sections:
                is_exact = all(section["is_exact"] for section in sections)
                sums = {section["section"]: section["tokens"] for section in sections}
                found.append(Moment(place, row.seq, row.created_at, sums, budget, is_exact))
        return found

    def _sections(self, message_id: str, token_budget: int | None) -> list[Row]:
        try:
            with translate(), self._connection.transaction():
                return self._rows("window_sections", token_budget=token_budget, as_of=message_id)
        except BudgetTooSmall:
            return []  # there was no window then, and the drawing has no point

    def _budgets(self, message_ids: list[str]) -> dict[str, int]:
        """What turns were read under, where `start_turn` kept it."""
        found = self._rows("read_budgets", message_ids=message_ids)
        return {row["message_id"]: row["read_budget"] for row in found}

    def _rows(self, name: str, **parameters: Any) -> list[Row]:
        with self._connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(query(name), {"chat_id": self._chat_id, **parameters}).fetchall()
