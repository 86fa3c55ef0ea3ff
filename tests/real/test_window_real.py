"""The window on every real conversation, at many cuts and budgets; and how much of a prompt stays."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest
import validators
from histories import KINDS, Compact, Count, Machine, exact, prepare_adopted

from pycontext.clean import clean

pytestmark = pytest.mark.real

Connection = psycopg.Connection[Any]
Message = dict[str, Any]

FILES = (
    "beam_100k",
    "llamafactory_mllm_demo",
    "llamafactory_toolcall_zh",
    "memorybank_zh_en",
    "openhands_sdk_fixtures",
    "pi_coding_agent_sessions",
    "pydantic_ai_cassettes",
    "ru_arena_long",
    "ru_multiwoz_long",
    "swe_agent_demos",
    "tau_bench_airline_gpt4o",
    "webvoyager_screenshots",
)
BUDGETS = (300, 700, 1500, 3000, 6000, 12000, 24000, 48000, 100000)

VALID: dict[str, Callable[[Any], None]] = {
    "openai_messages": validators.openai_chat,
    "anthropic_messages": validators.anthropic,
    "responses_input": validators.openai_responses,
}

_numbers = itertools.count(1)


def conversations(folder: Path, name: str) -> list[tuple[str | None, list[Message]]]:
    """System prompt and messages of each conversation of a file."""
    found = []
    for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        rows = [
            {
                k: m[k]
                for k in ("role", "content", "tool_calls", "tool_call_id", "name")
                if m.get(k) is not None
            }
            for m in clean(json.loads(line)["messages"])
        ]
        prompt = None
        if rows and rows[0]["role"] == "system":
            content = rows.pop(0)["content"]
            prompt = content if isinstance(content, str) else "\n\n".join(p["text"] for p in content)
        found.append((prompt, rows))
    return found


Begin = Callable[[str, str | None], Machine]


@pytest.fixture
def begin(db: Connection, dsn: str) -> Iterator[Begin]:
    """Creates a chat of a kind; its reader may not write."""
    prepare_adopted(db)
    options = "-c default_transaction_read_only=on -c search_path=pycontext"
    with psycopg.connect(dsn, autocommit=True, options=options) as reader:

        def create(kind: str, prompt: str | None) -> Machine:
            machine = Machine(db, reader, str(next(_numbers)), kind, prompt=prompt)
            machine.create()
            return machine

        yield create


def look(machine: Machine, budget: int, forms: Sequence[str]) -> None:
    """One read, held to every promise, and what is sent of it in each of these forms."""
    thread = machine.thread
    try:
        window = machine.window(budget)
    except psycopg.DatabaseError as error:
        if error.sqlstate != "PCX05" or thread.needed() <= budget:
            raise
        return
    assert thread.needed() <= budget
    if thread.must_be_full(budget):
        thread.check_full(window)
    thread.check(window, budget)
    told = 3 + sum(w["tokens"] for w in window)
    counted = 3 + sum(exact(w, thread.image_tokens) for w in window)
    assert counted <= budget, f"{counted} counted, {told} told, budget {budget}"
    for form in forms:
        request = machine.messages(form, budget)
        VALID[form](request)
        if form == "openai_messages":
            rows = request[: len(window)]  # without a closing (continue), which is the format's
            sent = 3 + sum(exact(m, thread.image_tokens) for m in rows)
            assert sent <= counted, "what is sent is counted"


def cuts(messages: Sequence[Message], most: int) -> list[int]:
    """Ends of prefixes: places spread over the conversation, inside units too, and its end."""
    step = max(len(messages) / most, 1)
    return sorted({min(len(messages), round(step * n)) for n in range(1, most + 1)} - {0})


def walk(
    machine: Machine,
    messages: Sequence[Message],
    most: int,
    budgets: Callable[[int], Sequence[int]],
    is_dense: bool = False,
) -> int:
    """Appends the conversation piece by piece and looks after each; every other piece is counted first.

    A dense walk reads every form of every window, and compacts on its way.
    """
    done = looked = 0
    forms = machine.forms()
    for number, end in enumerate(cuts(messages, most)):
        machine.append(*messages[done:end])
        done = end
        if number % 2 == 0:
            machine.play(Count(100000))
        if is_dense and number % 11 == 10:
            machine.play(Compact(BUDGETS[number % 5 + 1]))
        machine.refresh()
        for budget in budgets(number):
            look(machine, budget, forms if is_dense else [forms[looked % len(forms)]])
            looked += 1
    return looked


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_conversation(begin: Begin, shared_data: Path, name: str, kind: str) -> None:
    found = conversations(shared_data, name)
    assert found
    if kind == "adopted":
        found = found[: max(3, len(found) // 10)]
    long = len(found) < 4
    looked = 0
    for number, (prompt, messages) in enumerate(found):
        machine = begin(kind, prompt)
        looked += walk(
            machine,
            messages,
            7 if long else 2,
            lambda n, number=number: (  # type: ignore[misc]
                BUDGETS[(n + number) % len(BUDGETS)],
                BUDGETS[(n + number + 4) % len(BUDGETS)],
            ),
        )
    assert looked >= 2 * len(found)


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_conversation_at_a_dense_grid(begin: Begin, shared_data: Path, name: str, kind: str) -> None:
    budgets = sorted({int(300 * 1.35**n) for n in range(20)})
    for prompt, messages in conversations(shared_data, name):
        walk(begin(kind, prompt), messages, 60, lambda n: budgets, is_dense=True)


def common_bytes(before: str, after: str) -> int:
    """How many bytes the two begin with alike."""
    low, high = 0, min(len(before), len(after))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if before[:middle] == after[:middle] else (low, middle - 1)
    return len(after[:low].encode())


def replay(machine: Machine, messages: Sequence[Message], budget: int) -> tuple[int, int, int, int]:
    """Requests before each reply: bytes sent, bytes that begin the request before, requests, and how
    many do not begin with the whole of it.
    """
    sent = same = requests = broken = 0
    before = ""
    done = 0
    for end, message in enumerate(messages):
        if message["role"] != "assistant" or end == 0:
            continue
        machine.append(*messages[done:end])
        machine.play(Count(100000))
        done = end
        request = json.dumps(machine.messages("openai_messages", budget), ensure_ascii=False)[:-1]
        if before:
            sent += len(request.encode())
            same += common_bytes(before, request)
            broken += not request.startswith(before)
        before = request
        requests += 1
    return sent, same, requests, broken


SESSIONS = ("pi_coding_agent_sessions", "tau_bench_airline_gpt4o", "swe_agent_demos")


@pytest.mark.parametrize(("budget", "least"), [(32000, 0.92), (8000, 0.80)])
@pytest.mark.parametrize("name", SESSIONS)
def test_requests_of_an_agent_session_begin_like_the_one_before(
    begin: Begin,
    shared_data: Path,
    name: str,
    budget: int,
    least: float,
    record_property: Callable[[str, object], None],
) -> None:
    """No compaction, SELECTs only: borders move in steps, so most of a prompt is a prefix of the next.

    Short sessions are played on in one chat, one after the other: each alone has no border to move.
    """
    found = conversations(shared_data, name)
    messages = [message for _, rows in found for message in rows]
    sent, same, requests, broken = replay(begin("native", found[0][0]), messages, budget)
    share = same / sent
    record_property("prefix share", share)
    print(
        f"\n{name}, {budget} tokens: {share:.1%} of {sent:,} bytes as before, {broken} of {requests} changed"
    )
    assert broken, "it has to leave something out"
    assert share >= least


@pytest.mark.parametrize("name", SESSIONS[1:])
def test_requests_of_a_session_that_fits_whole_begin_with_the_one_before(
    begin: Begin, shared_data: Path, name: str
) -> None:
    """What is no prefix of the request before is new: 91% of a short session's bytes are all that can be."""
    for prompt, messages in conversations(shared_data, name)[:12]:
        _, _, requests, broken = replay(begin("native", prompt), messages, 1_000_000)
        assert requests
        assert not broken
