"""The window's promises over random histories, held against an oracle that knows no SQL."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import validators
from histories import KINDS, Compact, Count, History, Machine, exact, histories, prepare_adopted
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from oracle import Broken, kind_of

Connection = psycopg.Connection[Any]

_numbers = itertools.count(1)

NORMAL = settings(
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)
LONG = settings(NORMAL, max_examples=2000, derandomize=False)

Play = Callable[[History, str], "Session"]


class Session:
    """A machine, and what is looked at after each of its moves."""

    def __init__(self, machine: Machine, budgets: list[int]) -> None:
        self.machine = machine
        self.budgets = budgets
        self.forms = machine.forms()
        self.last: list[dict[str, Any]] = []
        self.before: dict[int, tuple[tuple[int, int], list[Any], int | None]] = {}

    def check(self, budget: int, *, forms: bool) -> None:
        """Every promise that one read can be held to."""
        machine = self.machine
        machine.refresh()
        thread = machine.thread
        state = machine.state()
        try:
            window = self.last = machine.window(budget)
        except psycopg.DatabaseError as error:
            if error.sqlstate != "PCX05" or thread.needed() <= int(budget / thread.token_scale):
                raise
            return
        assert thread.needed() <= int(budget / thread.token_scale), "no window can fit, and here is one"
        full = not state["is_pruned"] and thread.must_be_full(budget)
        if full:
            thread.check_full(window)
        elif thread.must_be_full(budget):
            assert all(w["section"] != "omitted" for w in window), "a pass leaves out what there is room for"
        thread.check(window, budget)
        self.recount(window, budget)
        messages = machine.messages("openai_messages", budget)
        validators.openai_chat(messages)
        if forms:
            validators.anthropic(machine.messages("anthropic_messages", budget))
            if "responses_input" in self.forms:
                validators.openai_responses(machine.messages("responses_input", budget))
        self.prefix(budget, messages, (machine.epoch, state["act_no"]), full)

    def recount(self, window: list[dict[str, Any]], budget: int) -> None:
        """Counted rows say what the tokenizer says; the whole fits by its count."""
        total = 3
        estimated = False
        for w in window:
            estimated |= w["is_estimate"]
            counted = exact(w, self.machine.thread.image_tokens)
            if (
                not w["is_estimate"]
                and not has_reasoning(w)
                and w["seq"] is not None
                and w["kind"] == "message"
            ):
                assert w["tokens"] == counted, f"{w['tokens']} told, {counted} counted: {w}"
            total += counted
        # an estimate is on the safe side of real text; of a snippet repeated so often it may be under
        assert total <= budget * (1.3 if estimated else 1), f"{total} counted, budget {budget}"

    def prefix(self, budget: int, messages: list[Any], act_no: tuple[int, int], full: bool) -> None:
        """Promise 7, where both reads hold everything and no act lies between them."""
        if messages[-1] == {"role": "user", "content": "(continue)"}:
            messages = messages[:-1]
        seen = self.before.get(budget)
        if full:
            request = self.machine.thread.newest_request()
            number = request.seq if request else None
            if seen is not None and seen[0] == act_no:
                earlier = seen[1]
                # calls that are open at the end are closed by stand-ins: the open end of the window
                calls = [n for n, m in enumerate(earlier) if m.get("tool_calls")]
                if calls and all(m["role"] == "tool" for m in earlier[calls[-1] + 1 :]):
                    earlier = earlier[: calls[-1] + 1]
                if self.machine.kind == "adopted":
                    # a late result comes unannounced there, in place of a stand-in or of an interim result:
                    # nobody can log it
                    thread = self.machine.thread
                    interim = {
                        (r.tool_call_id, str(thread.render(r, thread.units())))
                        for r in thread.rows
                        if r.is_pending and r.role == "tool"
                    }
                    stop = next(
                        (
                            n
                            for n, m in enumerate(earlier)
                            if m["content"] in ("no result yet", "waiting for a person")
                            or (m.get("tool_call_id"), str(m["content"])) in interim
                        ),
                        None,
                    )
                    if stop is not None:
                        while earlier[stop]["role"] == "tool":
                            stop -= 1
                        earlier = earlier[:stop]
                if seen[2] != number:
                    # a new turn has begun: reasoning of the turn before it goes
                    stop = next((n for n, m in enumerate(earlier) if reasons(m)), len(earlier))
                    earlier = earlier[:stop]
                assert messages[: len(earlier)] == earlier, (
                    f"7 no act, but the prefix changed:\n{earlier}\n{messages[: len(earlier)]}"
                )
            self.before[budget] = (act_no, messages, number)
        else:
            self.before.pop(budget, None)

    def replays(self) -> None:
        """As of each message a turn began with: what that turn read."""
        for reading in self.machine.readings:
            budget = None if self.machine.kind == "native" else reading.budget
            try:
                window = self.machine.window(budget, reading.message_id)
            except psycopg.DatabaseError as error:
                # it is today's counts that are replayed: an estimate may have been lower
                thread = self.machine.thread
                tokens = [r.tokens for r in thread.rows if r.message_id == reading.message_id] or [
                    r["tokens"]  # a request that was set aside since
                    for r in self.machine.rows(
                        "select tokens from pycontext.message where chat_id = %s and message_id = %s",
                        self.machine.chat_id,
                        reading.message_id,
                    )
                ]
                least = (3 + thread.prompt_tokens + tokens[0]) * thread.token_scale
                if error.sqlstate != "PCX05" or least <= reading.budget:
                    raise
                continue
            got = self.machine.messages("openai_messages", budget, reading.message_id)
            if got != reading.messages and all(w["is_exact"] for w in window):
                raise Broken(
                    f"8 as of {reading.message_id}, budget {reading.budget}"
                    f"\n got  {got}\n read {reading.messages}"
                )
            assert sum(w["tokens"] for w in window) + 3 <= reading.budget


def reasons(message: Any) -> bool:
    content = message["content"]
    return isinstance(content, list) and any(kind_of(part) == "reasoning" for part in content)


def has_reasoning(w: dict[str, Any]) -> bool:
    return isinstance(w["content"], list) and any(kind_of(part) == "reasoning" for part in w["content"])


@pytest.fixture
def play(db: Connection, dsn: str) -> Iterator[Play]:
    """Plays a history and checks after every move."""
    prepare_adopted(db)
    with psycopg.connect(
        dsn, autocommit=True, options="-c default_transaction_read_only=on -c search_path=pycontext"
    ) as reader:

        def run(history: History, kind: str) -> Session:
            machine = Machine(
                db,
                reader,
                str(next(_numbers)),
                kind,
                history.profile,
                None if history.prompt is None else str(history.prompt),
            )
            machine.create()
            session = Session(machine, history.budgets)
            for number, move in enumerate(history.moves):
                machine._budget = history.budgets[number % len(history.budgets)]
                machine.play(move)
                if machine.thread.rows:
                    session.check(history.budgets[number % len(history.budgets)], forms=number % 2 == 0)
            for budget in history.budgets:
                session.check(budget, forms=True)
            session.replays()
            machine.play(Count(100000))
            for budget in history.budgets:
                session.check(budget, forms=False)
            return session

        yield run


# small groups, which the workers share; always the same histories, `make test-long` draws others
@pytest.mark.parametrize(
    ("kind", "group"), [("native", n) for n in range(16)] + [("adopted", n) for n in range(10)]
)
def test_the_promises_hold_after_every_move(play: Play, kind: str, group: int) -> None:
    # a foreign table costs several times as much
    @seed(group)
    @settings(NORMAL, max_examples=100 if kind == "native" else 50)
    @given(histories())
    def hold(history: History) -> None:
        note(repr(history))
        play(history, kind)

    hold()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_promises_hold_in_thousands_of_histories(play: Play, kind: str) -> None:
    @LONG
    @given(histories(max_moves=30))
    def hold(history: History) -> None:
        note(repr(history))
        play(history, kind)

    hold()


def test_histories_reach_what_they_are_for(play: Play) -> None:
    """Lines, windows that leave out, rows that are shortened: drawn often, or the suite proves little."""
    seen = {"line": 0, "omitted": 0, "shortened": 0, "replayed": 0, "histories": 0}

    @settings(NORMAL, max_examples=40)
    @given(histories(min_moves=6))
    def look(history: History) -> None:
        history.moves.append(Compact(800))
        session = play(history, "native")
        windows = []
        for budget in history.budgets:
            try:
                windows += session.machine.window(budget)
            except psycopg.DatabaseError:
                continue
        seen["histories"] += 1
        seen["line"] += bool(session.machine.thread.lines)
        seen["omitted"] += any(w["section"] == "omitted" for w in windows)
        seen["shortened"] += any(w["is_shortened"] and w["section"] != "omitted" for w in windows)
        seen["replayed"] += bool(session.machine.readings)

    look()
    assert all(times >= seen["histories"] / 8 for times in seen.values()), seen
