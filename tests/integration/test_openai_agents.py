"""OpenAI's Agents SDK over a chat: what its own session tests check, and that a run reads a compacted window.

The SDK is the real one, its client too; the model is a local server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psycopg
import pytest

agents = pytest.importorskip("agents", reason="needs the Agents SDK: extra openai-agents")

import validators  # noqa: E402
from agents import Agent, RunConfig, Runner, SessionSettings, function_tool  # noqa: E402
from agents.models.openai_responses import OpenAIResponsesModel  # noqa: E402
from llm_server import LLMServer  # noqa: E402
from openai import AsyncOpenAI  # noqa: E402

import pycontext  # noqa: E402
from pycontext.integrations.openai_agents import ChatSession  # noqa: E402

pytestmark = pytest.mark.runners("sync", "pooled", long="pooled")

Item = dict[str, Any]
Open = Callable[..., ChatSession]

HISTORY: list[Any] = [
    {"role": "user", "content": "Message 1"},
    {"role": "assistant", "content": "Response 1"},
    {"role": "user", "content": "Message 2"},
    {"role": "assistant", "content": "Response 2"},
    {"role": "user", "content": "Message 3"},
    {"role": "assistant", "content": "Response 3"},
]


def user(text: str) -> Any:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def running() -> Iterator[LLMServer]:
    agents.set_tracing_disabled(True)
    with LLMServer("said") as server:
        yield server


@pytest.fixture
def server(running: LLMServer) -> LLMServer:
    running.clear()
    running.default = lambda request: f"Reply {len(running.requests)}"
    return running


@pytest.fixture
def agent(server: LLMServer) -> Agent[Any]:
    client = AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0)
    model = OpenAIResponsesModel(model="gpt-4.1", openai_client=client)
    return Agent(name="test", instructions="You answer for a bookshop.", model=model)


def with_session(dsn: str, use: Callable[[Open], Awaitable[None]]) -> None:
    """Run a coroutine that opens sessions on the database."""

    async def main() -> None:
        async with pycontext.aconnect(dsn) as db:
            await use(lambda session_id="s", **options: ChatSession(session_id, db, **options))

    asyncio.run(main())


async def run(way: str, agent: Agent[Any], text: Any, session: ChatSession, **options: Any) -> Any:
    if way == "streamed":
        result = Runner.run_streamed(agent, text, session=session, **options)
        async for _ in result.stream_events():
            pass
        return result
    return await Runner.run(agent, text, session=session, **options)


def contents(items: Any) -> list[Any]:
    return [item["content"] for item in items]


WAYS = pytest.mark.parametrize("way", ["run", "streamed"])


def test_it_is_what_the_sdk_calls_a_session(dsn: str) -> None:
    async def use(session: Open) -> None:
        assert isinstance(session(), agents.Session)
        assert session().session_settings == SessionSettings()
        assert session(7).session_id == "7"
        with pytest.raises(ValueError, match="compact"):
            session(compact="before")

    with_session(dsn, use)


def test_items_come_back_as_they_were_added(dsn: str) -> None:
    call = {"type": "function_call", "name": "look", "arguments": '{"q":  1}', "status": "completed"}
    summary = [{"type": "summary_text", "text": "Hm"}]
    text = {"type": "output_text", "text": "Rain.", "annotations": [], "logprobs": []}
    items: list[Any] = [
        user("こんにちは 😊👍 Привет"),
        {"role": "assistant", "content": "Robert'); DROP TABLE students;--"},
        user('"SELECT * FROM users WHERE name = "admin";" O\'Reilly'),
        {"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": "x"},
        {**call, "id": "fc_1", "call_id": "a"},
        {**call, "id": "fc_2", "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]},
    ]

    async def use(session: Open) -> None:
        one = session()
        assert await one.get_items() == []
        await one.add_items([])
        assert await one.get_items() == []
        for item in items[:3]:
            await one.add_items([item])
        await one.add_items(items[3:])
        assert await one.get_items() == items
        assert await session().get_items() == items
        for left in range(len(items) - 1, -1, -1):
            assert await one.pop_item() == items[left]
            assert await one.get_items() == items[:left]
        assert await one.pop_item() is None
        assert await session("other").pop_item() is None

    with_session(dsn, use)


def test_an_item_of_several_is_popped_in_one_transaction(dsn: str, db: psycopg.Connection[Any]) -> None:
    items = [
        user("Hi"),
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two."},
    ]

    async def use(session: Open) -> None:
        await session().add_items(items)
        assert await session().pop_item() == items[-1]
        assert await session().get_items() == items[:-1]

    with_session(dsn, use)
    stored = "select xmin from pycontext.message where gone_act is null and seq > 1"
    assert len(db.execute(f"select xmin from pycontext.act union {stored}").fetchall()) == 1


@pytest.mark.parametrize("wrong", [[5], "abc", [{}], [user("fine"), {"role": "wizard", "content": "x"}]])
def test_what_is_no_item_is_refused_and_nothing_is_stored(dsn: str, wrong: Any) -> None:
    async def use(session: Open) -> None:
        await session().add_items([user("Message 1")])
        with pytest.raises(pycontext.BadMessage) as raised:
            await session().add_items(wrong)
        assert raised.value.hint
        assert contents(await session().get_items()) == ["Message 1"]

    with_session(dsn, use)


def test_sessions_are_kept_apart_and_cleared(dsn: str, memory: pycontext.Database) -> None:
    async def use(session: Open) -> None:
        one, other = session("one", owner="anna"), session("other")
        await one.add_items([user("1.1")])
        await other.add_items([user("2.1"), user("2.2")])
        assert await other.pop_item() == user("2.2")
        assert (contents(await one.get_items()), contents(await other.get_items())) == (["1.1"], ["2.1"])
        await other.clear_session()
        await other.clear_session()
        assert await other.get_items() == []
        assert contents(await one.get_items()) == ["1.1"]
        await other.add_items([user("2.3")])
        assert contents(await other.get_items()) == ["2.3"]
        assert [row.content for row in memory.thread("other")] == ["2.3"]
        memory.redact("one", memory.thread("one")[0].message_id)
        assert "1.1" not in str(await one.get_items())
        memory.remember("one", "Anna likes tea.")
        assert [fact.content for fact in memory.memory_page("anna")] == ["Anna likes tea."]

    with_session(dsn, use)


def test_the_newest_items_alone(dsn: str) -> None:
    async def use(session: Open) -> None:
        one = session()
        await one.add_items(HISTORY)
        assert await one.get_items() == HISTORY
        for limit in (1, 2, 4, 6, 10):
            assert await one.get_items(limit=limit) == HISTORY[-limit:]
        for limit in (0, -1):
            assert await one.get_items(limit=limit) == []
        limited = session(session_settings=SessionSettings(limit=3))
        assert await limited.get_items() == HISTORY[-3:]
        assert await limited.get_items(limit=2) == HISTORY[-2:]

    with_session(dsn, use)


def test_items_popped_at_once_by_many_are_each_popped_once(dsn: str) -> None:
    async def use(session: Open) -> None:
        await session().add_items([user(f"Message {n}") for n in range(8)])
        popped = await asyncio.gather(*(session().pop_item() for _ in range(6)))
        assert sorted(contents(popped)) == [f"Message {n}" for n in range(2, 8)]
        assert contents(await session().get_items()) == ["Message 0", "Message 1"]

    with_session(dsn, use)


def test_items_added_at_once_by_many_are_all_there(dsn: str) -> None:
    async def use(session: Open) -> None:
        await asyncio.gather(*(session().add_items([user(f"Message {n}")]) for n in range(12)))
        assert sorted(contents(await session().get_items())) == sorted(f"Message {n}" for n in range(12))

    with_session(dsn, use)


@WAYS
def test_a_run_reads_the_session_and_adds_to_it(
    dsn: str, agent: Agent[Any], server: LLMServer, way: str
) -> None:
    async def use(session: Open) -> None:
        first = await run(way, agent, "What city is the Golden Gate Bridge in?", session())
        assert first.final_output == "Reply 1"
        second = await run(way, agent, [user("What state is it in?")], session())
        assert second.final_output == "Reply 2"
        sent = server.requests[-1]["input"]
        assert [item["role"] for item in sent] == ["user", "assistant", "user"]
        assert sent[1]["content"][0]["text"] == "Reply 1"
        assert await session().get_items() == [*sent, *second.to_input_list()[-1:]]
        await run(way, agent, "And you?", session("other"))
        assert contents(server.requests[-1]["input"]) == ["And you?"]
        await Runner.run(agent, "And without?")
        assert len(server.requests[-1]["input"]) == 1

    with_session(dsn, use)


@WAYS
def test_limits_and_a_callback_of_the_run(dsn: str, agent: Agent[Any], server: LLMServer, way: str) -> None:
    async def use(session: Open) -> None:
        one = session(session_settings=SessionSettings(limit=100))
        await one.add_items(HISTORY)
        for limit, expected in (
            (2, HISTORY[-2:]),
            (0, []),
            (None, [*HISTORY, user("New 0"), user("Reply 1")]),
        ):
            number = len(server.requests)
            config = RunConfig(session_settings=SessionSettings(limit=limit))
            await run(way, agent, f"New {number}", one, run_config=config)
            sent = server.requests[-1]["input"]
            assert sent[-1] == user(f"New {number}")
            if limit is not None:
                assert sent[:-1] == expected
            else:
                assert sent[: len(HISTORY)] == HISTORY
                assert len(sent) == len(HISTORY) + 5
        only_users = RunConfig(
            session_input_callback=lambda old, new: [i for i in old if i.get("role") == "user"] + new
        )
        await run(way, agent, "Last", one, run_config=only_users)
        assert {item["role"] for item in server.requests[-1]["input"]} == {"user"}
        assert len(await one.get_items()) == len(HISTORY) + 2 * len(server.requests)

    with_session(dsn, use)


def test_an_error_of_the_session_ends_a_streamed_run(dsn: str, agent: Agent[Any], server: LLMServer) -> None:
    async def use(session: Open) -> None:
        one = session(profile="no such profile")
        with pytest.raises(pycontext.BadProfile):
            await asyncio.wait_for(run("streamed", agent, "Hello", one), 10)

    with_session(dsn, use)


@function_tool
def look(order: str) -> str:
    """Look an order up."""
    return f"Order {order}: in hub B-7. " + "It was scanned. " * 60


def test_a_long_session_is_compacted_and_every_request_is_valid_and_fits(
    dsn: str, agent: Agent[Any], server: LLMServer, memory: pycontext.Database
) -> None:
    def reply(request: dict[str, Any]) -> Any:
        last = request["input"][-1]
        if last.get("type") == "function_call_output":
            return "It is in hub B-7. " * 20
        arguments = json.dumps({"order": last["content"].split()[1]})
        ids = [f"call_{len(server.requests)}_{n}" for n in range(2)]
        calls = [
            {"id": i, "type": "function", "function": {"name": "look", "arguments": arguments}} for i in ids
        ]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    server.default = reply
    memory.create_chat("s", profile="small-8k", owner="anna")
    budget = 4000

    async def use(session: Open) -> None:
        for number in range(24):
            text = f"Order QX-{4000 + number}: where is it?"
            await Runner.run(agent.clone(tools=[look]), text, session=session(token_budget=budget))
            await session(token_budget=budget).get_items()

    with_session(dsn, use)
    sizes = []
    for request in server.requests:
        validators.openai_responses(request["input"])
        sizes.append(
            sum(pycontext.tokens.count(json.dumps(item, ensure_ascii=False)) for item in request["input"])
        )
    assert max(sizes) < budget + 1500  # a turn grows in process, and JSON takes more than its text
    assert any("<chat-summary>" in str(item.get("content")) for item in server.requests[-1]["input"])
    thread = memory.thread("s", max_rows=1000)
    asked = [row.content for row in thread if row.kind == "message" and row.role == "user"]
    assert asked == [f"Order QX-{4000 + n}: where is it?" for n in range(24)]
    assert len([row for row in thread if row.kind == "message"]) == 24 * 5
    newest = server.requests[-1]["input"]
    assert newest[-5]["content"] == "Order QX-4023: where is it?"
    assert {"content": "Order QX-4022: where is it?", "role": "user"} in newest
    memory.start_over("s")

    async def after(session: Open) -> None:
        (line,) = await session().get_items()
        assert "started over" in line["content"]  # type: ignore[index,operator,typeddict-item]
        assert await session().pop_item() is None

    with_session(dsn, after)
