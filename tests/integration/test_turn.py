"""The turn handler: what the model reads, what is durable when, and what a retry does."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage

import pycontext
from pycontext.summarizer import SummarizerFailed, SummaryRequest, SummaryResult

pytestmark = pytest.mark.runners("sync", "async", "pooled")

Fill = Callable[..., list[pycontext.Message]]
Connection = psycopg.Connection[Any]

ASSISTANT = {"role": "assistant", "content": "On its way."}


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def fresh(dsn: str, chat_id: str, **options: Any) -> list[dict[str, Any]]:
    """What a process that knows nothing would read now."""
    with pycontext.connect(dsn) as memory, memory.turn(chat_id, compact="off", **options) as turn:
        return list(turn.messages)


def test_a_turn_reads_adds_and_is_read_by_the_next(memory: pycontext.Database) -> None:
    with memory.turn("a", "Where is my order?", system_prompt="Be brief.") as turn:
        assert turn.messages == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Where is my order?"},
        ]
        assert (turn.seq, turn.is_degraded, turn.is_answered, turn.decision) == (1, False, False, "none")
        assert 0 < turn.window_tokens < turn.token_budget
        (stored,) = turn.add(ChatCompletionMessage(role="assistant", content="On its way."))
        assert (stored.seq, stored.role) == (2, "assistant")
    with memory.turn("a", "When?") as turn:
        assert [row["content"] for row in turn.messages] == [
            "Be brief.",
            "Where is my order?",
            "On its way.",
            "When?",
        ]


def test_entering_is_one_round_trip(dsn: str, memory: pycontext.Database, tmp_path: Path) -> None:
    trace = tmp_path / "protocol"
    with psycopg.connect(dsn, autocommit=True) as conn, trace.open("w") as file:
        turn = pycontext.connect(connection=conn).turn("a", "hi", compact="off")
        conn.pgconn.trace(file.fileno())
        with turn:
            conn.pgconn.untrace()
            assert turn.messages == [{"role": "user", "content": "hi"}]
    sent = re.findall(r"\tF\t\d+\t(\w+)", trace.read_text())
    assert sent == ["Parse", "Bind", "Describe", "Execute", "Sync"]
    assert "pycontext.start_turn" in trace.read_text()


def test_a_reply_to_a_request_that_was_taken_back_is_not_stored(memory: pycontext.Database) -> None:
    memory.create_chat("c")
    with memory.turn("c", "Where is it?", message_id="u1") as turn:
        memory.rewind("c", "")
        memory.append("c", {"role": "user", "content": "Where is mine?", "message_id": "u2"})
        with pytest.raises(pycontext.BadMessage, match="no such request"):
            turn.add({"role": "assistant", "content": "In hub 7."})
    assert [row.content for row in memory.thread("c")] == ["Where is mine?"]


def test_what_was_added_is_seen_by_a_second_connection_at_once(
    memory: pycontext.Database, db: Connection
) -> None:
    def last() -> Any:
        return db.execute("select content #>> '{}' from thread('a') order by seq desc limit 1").fetchone()

    with memory.turn("a", "Where?") as turn:
        assert last() == ("Where?",)
        turn.add(ASSISTANT)
        assert last() == ("On its way.",)


def test_an_exception_in_the_block_loses_nothing_already_added(
    memory: pycontext.Database, watched: Any
) -> None:
    def fails() -> None:
        with memory.turn("a", "Where?") as turn:
            turn.add({"role": "assistant", "tool_calls": [call("c1")]})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert [row.role for row in memory.thread("a")] == ["user", "assistant"]
    assert watched.requests == []
    with memory.turn("a") as turn:
        turn.add({"role": "tool", "tool_call_id": "c1", "content": "found"})
        turn.add(ASSISTANT)
    assert [row.role for row in memory.thread("a")] == ["user", "assistant", "tool", "assistant"]


def test_a_retried_request_stores_its_message_once(memory: pycontext.Database) -> None:
    with memory.turn("a", "Where?", message_id="req-1") as turn:
        assert turn.message_id == "req-1"
        first = list(turn.messages)
    with memory.turn("a", "Where?", message_id="req-1") as turn:
        assert turn.messages == first
        assert not turn.is_answered
        turn.add(ASSISTANT)
    with memory.turn("a", "Where?", message_id="req-1") as turn:
        assert turn.is_answered
        assert turn.seq == 1
    assert len(memory.thread("a")) == 2
    with pytest.raises(pycontext.MessageIdReused):
        memory.turn("a", "Something else", message_id="req-1").__enter__()


def test_the_same_add_twice_is_one_row_and_equal_ones_of_one_process_are_two(
    memory: pycontext.Database, dsn: str
) -> None:
    steps: list[Any] = [
        {"role": "assistant", "tool_calls": [call("c1")]},
        {"role": "tool", "tool_call_id": "c1", "content": "nothing yet"},
        {"role": "assistant", "content": "Looking again.", "tool_calls": [call("c2")]},
        {"role": "tool", "tool_call_id": "c2", "content": "nothing yet"},
    ]
    with memory.turn("a", "Where?", message_id="req-1") as turn:
        for step in steps[:3]:
            turn.add(step)
    with pycontext.connect(dsn) as other, other.turn("a", "Where?", message_id="req-1") as turn:
        for step in steps:  # it does not know how far the first one came
            turn.add(step)
        turn.add(ASSISTANT)
        turn.add(ASSISTANT)
    thread = memory.thread("a")
    assert [row.role for row in thread] == ["user", *["assistant", "tool"] * 2, "assistant", "assistant"]
    with pycontext.connect(dsn) as third, third.turn("a") as turn:
        turn.add(steps[3])  # only the last one again
        turn.add({"role": "assistant", "content": "Something new."})
    assert [row.seq for row in memory.thread("a")] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_an_id_of_the_messages_own_is_kept(memory: pycontext.Database) -> None:
    with memory.turn("a", {"role": "user", "content": "Where?", "message_id": "u1"}) as turn:
        assert turn.message_id == "u1"
        assert turn.add({**ASSISTANT, "message_id": "m2"})[0].message_id == "m2"
        assert turn.add({"role": "assistant", "content": "More.", "id": "m3"})[0].message_id == "m3"
        turn.add({**ASSISTANT, "message_id": "m2"})
        with pytest.raises(pycontext.MessageIdReused):
            turn.add({"role": "assistant", "content": "Other.", "id": "m3"})
    assert [row.message_id for row in memory.thread("a")] == ["u1", "m2", "m3"]


def test_completions_that_say_the_same_are_told_apart_by_their_id(memory: pycontext.Database) -> None:
    def completion(identity: str) -> ChatCompletion:
        choice = {"index": 0, "finish_reason": "stop", "message": ASSISTANT}
        return ChatCompletion.model_validate(
            {"id": identity, "created": 1, "model": "m", "object": "chat.completion", "choices": [choice]}
        )

    with memory.turn("a", "Where?", message_id="u1") as turn:
        turn.add(completion("one"))
    with memory.turn("a", "Where?", message_id="u1") as turn:
        turn.add(completion("one"))
        turn.add(completion("two"))
    assert [row.role for row in memory.thread("a")] == ["user", "assistant", "assistant"]


def test_an_add_of_an_unknown_type_says_what_is_accepted(memory: pycontext.Database) -> None:
    with memory.turn("a", "Where?") as turn:
        for wrong in (object(), None, 7, {"content": "no role"}):
            with pytest.raises(TypeError, match=r"(?s)dict.*ChatCompletion.*Response.*Anthropic"):
                turn.add(wrong)
    assert len(memory.thread("a")) == 1


def test_a_turn_is_entered_once_and_added_to_inside_its_block(memory: pycontext.Database) -> None:
    turn = memory.turn("a", "Where?")
    with pytest.raises(RuntimeError, match="with block"):
        turn.add(ASSISTANT)
    with turn:
        pass
    with pytest.raises(RuntimeError, match="with block"):
        turn.add(ASSISTANT)
    with pytest.raises(RuntimeError, match="entered once"), turn:
        pass
    with pytest.raises(ValueError, match="'after', 'before', 'off'"):
        memory.turn("a", "Where?", compact="later")
    with pytest.raises(pycontext.BadMessage, match="no such request"):
        memory.turn("a", message_id="m1").__enter__()


def test_parts_dicts_and_text_are_messages(memory: pycontext.Database) -> None:
    parts = [{"type": "text", "text": "what is this?"}]
    with memory.turn("a", parts) as turn:
        assert turn.messages == [{"role": "user", "content": parts}]
    with memory.turn("a", {"role": "user", "content": "well?", "metadata": {"tab": 2}}) as turn:
        assert turn.messages[-1] == {"role": "user", "content": "well?"}
    assert memory.thread("a")[-1].metadata == {"tab": 2}


def test_messages_equal_at_every_step_what_a_fresh_process_reads(
    memory: pycontext.Database, dsn: str
) -> None:
    with memory.turn("a", "Find it.", system_prompt="Be brief.", profile="small-8k") as turn:
        held = turn.messages
        assert held == fresh(dsn, "a")
        for number in range(6):
            turn.add(
                {"role": "assistant", "tool_calls": [call(f"a{number}"), call(f"b{number}", '{"n": 1}')]}
            )
            assert turn.messages == fresh(dsn, "a")
            for name in ("b", "a"):
                turn.add(
                    {"role": "tool", "tool_call_id": f"{name}{number}", "content": f"{name} {number} " * 60}
                )
                assert turn.messages == fresh(dsn, "a")
        turn.add(ASSISTANT)
        assert turn.messages == fresh(dsn, "a")
        assert turn.is_answered
        assert held is turn.messages


def test_a_long_tool_loop_stays_within_the_budget(memory: pycontext.Database, dsn: str) -> None:
    with memory.turn("a", "Find it.", profile="small-8k", compact="off") as turn:
        for number in range(30):
            turn.add({"role": "assistant", "tool_calls": [call(f"c{number}")]})
            turn.add({"role": "tool", "tool_call_id": f"c{number}", "content": f"result {number} " * 150})
            assert turn.window_tokens <= turn.token_budget
            assert {"role": "user", "content": "Find it."} in turn.messages
        assert "; shortened" in json.dumps(turn.messages)
        assert turn.messages == fresh(dsn, "a")


def test_tools_and_a_token_budget_leave_less_for_the_window(memory: pycontext.Database) -> None:
    tools = [
        {"type": "function", "function": {"name": f"tool_{n}", "description": "Looks things up. " * 40}}
        for n in range(5)
    ]
    with memory.turn("a", "Where?", compact="off") as turn:
        without = turn.token_budget
    with memory.turn("a", "Where?", tools=tools, compact="off") as turn:
        assert turn.token_budget == without - pycontext.tokens.count(json.dumps(tools, separators=(",", ":")))
    with memory.turn("a", "Where? " * 300, token_budget=3000, compact="off") as turn:
        assert turn.token_budget == 3000
        for number in range(4):  # a resumed turn keeps to it
            turn.add({"role": "assistant", "content": f"Look {number}. " * 400})
            assert turn.window_tokens <= 3000


def test_context_is_for_this_turn_only(memory: pycontext.Database) -> None:
    with memory.turn("a", "Where?", context="It is 9 o'clock.\x00") as turn:
        assert "It is 9 o'clock.\ufffd" in json.dumps(turn.messages, ensure_ascii=False)
        assert turn.messages[-1] == {"role": "user", "content": "Where?"}
        turn.add({"role": "assistant", "tool_calls": [call("c1")]})
        assert sum("9 o'clock" in json.dumps(row) for row in turn.messages) == 1
        turn.add({"role": "tool", "tool_call_id": "c1", "content": "there"})
        turn.add(ASSISTANT)
    with memory.turn("a", "And now?") as turn:
        assert "9 o'clock" not in json.dumps(turn.messages)
    assert [row.role for row in memory.thread("a")] == ["user", "assistant", "tool", "assistant", "user"]


def test_another_system_prompt_is_told_and_not_taken(memory: pycontext.Database) -> None:
    with memory.turn("a", "Where?", system_prompt="Be brief.") as turn:
        assert not turn.prompt_differs
        turn.add(ASSISTANT)
    with memory.turn("a", "When?", system_prompt="Be long.") as turn:
        assert turn.prompt_differs
        assert turn.messages[0] == {"role": "system", "content": "Be brief."}


def test_a_turn_of_a_chat_in_a_table_of_yours(memory: pycontext.Database, db: Connection) -> None:
    db.execute(
        """
        create table post (id bigserial primary key, ticket int, who text, body text, calls jsonb,
            call_id text, at timestamptz default now() - interval '1 hour');
        create index on post (ticket, id);
        create view posts as select ticket as chat_id, id as seq, id as message_id, who as role,
            body as content, calls as tool_calls, call_id as tool_call_id, at as created_at from post;
        select register_source('shop', 'posts');
        select create_chat('7', source => 'shop')
        """
    )

    def post(who: str, body: str | None, calls: Any = None, call_id: str | None = None) -> int:
        row = db.execute(
            "insert into post (ticket, who, body, calls, call_id) values (7, %s, %s, %s, %s) returning id",
            (who, body, json.dumps(calls) if calls else None, call_id),
        ).fetchone()
        assert row is not None
        return int(row[0])

    question = "Where is it? " * 400
    asked = post("user", question)
    # with a message it is refused before a model is paid
    with pytest.raises(pycontext.AdoptedChat, match="start_turn"), memory.turn(7, "Where is it?"):
        pytest.fail("entered")
    with pytest.raises(pycontext.BadMessage, match="no such request"), memory.turn(7, message_id=asked + 1):
        pytest.fail("entered")
    with memory.turn(7, message_id=asked) as turn:
        assert (turn.message_id, turn.is_answered) == (str(asked), False)
        assert turn.messages == [{"role": "user", "content": question}]
        with pytest.raises(pycontext.AdoptedChat, match=r"turn\.stored"):
            turn.add({"role": "assistant", "content": "In Riga."})
        post("assistant", None, [call("c1")])
        post("tool", "in Riga", call_id="c1")
        turn.stored()
        assert [m["role"] for m in turn.messages] == ["user", "assistant", "tool"]
        post("assistant", "In Riga.")
        turn.stored({"model": "m", "usage": {"prompt_tokens": turn.window_tokens * 2}})
        assert turn.is_answered
    assert db.execute("select (scales ->> 'm')::numeric from chat").fetchone() == (2,)
    post("user", "And when does it come?")
    with memory.turn(7, message_id=asked) as again:  # sent twice
        assert again.is_answered
        assert again.reply == "In Riga."
    with pytest.raises(RuntimeError, match="with block"):
        again.stored()


def test_the_first_turn_of_a_chat_of_the_default_source_gives_it_its_prompt(
    memory: pycontext.Database, db: Connection
) -> None:
    db.execute(
        """
        create table post (id int primary key, ticket int, who text, body text, at timestamptz default now());
        create index on post (ticket, id);
        create view posts as select ticket as chat_id, id as seq, id as message_id, who as role,
            body as content, at as created_at from post;
        select register_source('shop', 'posts', true);
        insert into post values (1, 7, 'user', 'Where is it?'), (2, 8, 'user', 'And mine?')
        """
    )
    with memory.turn(7, message_id=1, system_prompt="Be brief.", profile="small-8k") as turn:
        assert turn.messages[0] == {"role": "system", "content": "Be brief."}
        assert not turn.prompt_differs
        assert turn.token_budget < 8192
    with memory.turn(8) as turn:
        assert [m["role"] for m in turn.messages] == ["user"]
    with pytest.raises(pycontext.NoSuchChat, match="insert its first message there"):
        memory.turn(9, system_prompt="Be brief.").__enter__()
    with pytest.raises(pycontext.AdoptedChat):
        memory.turn(9, "Where is it?", system_prompt="Be brief.").__enter__()
    assert db.execute("select chat_id, source from chat order by 1").fetchall()[0] == ("7", "shop")
    assert not db.execute("select from chat where chat_id = '9'").fetchall()


def test_resuming_a_chat_that_is_not_there_is_an_error(memory: pycontext.Database) -> None:
    with pytest.raises(pycontext.NoSuchChat):
        memory.turn("nowhere").__enter__()


def test_bad_input_leaves_the_chat_as_it_was(memory: pycontext.Database) -> None:
    with memory.turn("a", "Where?") as turn:
        with pytest.raises(pycontext.ToolResultWithoutId):
            turn.add({"role": "tool", "content": "x"})
        with pytest.raises(pycontext.BadMessage):
            turn.add([ASSISTANT, {"role": "nobody", "content": "x"}])
    with pytest.raises(pycontext.BadProfile):
        memory.turn("b", "Where?", profile="no-such").__enter__()
    assert [row.content for row in memory.thread("a")] == ["Where?"]
    with pytest.raises(pycontext.NoSuchChat):
        memory.status("b")


def test_two_turns_on_one_chat_lose_nothing(memory: pycontext.Database, dsn: str) -> None:
    with (
        pycontext.connect(dsn) as other,
        memory.turn("a", "first tab") as one,
        other.turn("a", "second tab") as two,
    ):
        one.add({"role": "assistant", "content": "to the first"})
        two.add({"role": "assistant", "content": "to the second"})
        one.add({"role": "assistant", "content": "more to the first"})
    assert [row.content for row in memory.thread("a")] == [
        "first tab",
        "second tab",
        "to the first",
        "to the second",
        "more to the first",
    ]


def test_a_long_chat_is_compacted_after_the_reply(
    memory: pycontext.Database, fill: Fill, watched: Any
) -> None:
    fill("a", 25)
    with memory.turn("a", "Anything new?") as turn:
        assert turn.decision == "summarize"
        assert watched.requests == []
        turn.add(ASSISTANT)
        assert watched.requests == []
    assert len(watched.requests) == 1
    status = memory.status("a")
    assert status.line_origin == "compaction"
    assert status.window_tokens < status.trigger_tokens
    with memory.turn("a", "And now?") as turn:
        assert turn.decision == "none"
        assert "chat-summary" in json.dumps(turn.messages)
        assert turn.messages[-1] == {"role": "user", "content": "And now?"}
    assert len(watched.requests) == 1


def test_before_compacts_before_the_block_and_off_never(
    memory: pycontext.Database, fill: Fill, watched: Any
) -> None:
    fill("a", 25)
    for off in ("off", None):
        with memory.turn("a", "Anything new?", message_id="u1", compact=off) as turn:
            assert turn.decision == "summarize"
    assert watched.requests == []
    with memory.turn("a", "Anything new?", message_id="u1", compact="before") as turn:
        assert len(watched.requests) == 1
        assert turn.decision == "none"
        assert turn.messages[-1] == {"role": "user", "content": "Anything new?"}
        assert "chat-summary" in json.dumps(turn.messages)


def test_a_tool_loop_is_compacted_only_where_its_window_would_leave_something_out(
    memory: pycontext.Database, watched: Any, db: Connection
) -> None:
    """Neither what a pruning pass settled nor a window over its trigger, which still fits, is a reason."""
    seen: Counter[str] = Counter()
    with memory.turn("a", "Find it.", profile="small-8k") as turn:
        for number in range(60):
            turn.add({"role": "assistant", "content": "a step " * 40, "tool_calls": [call(f"c{number}")]})
            content = f"result {number} " * (500 if number < 6 else 20)
            turn.add({"role": "tool", "tool_call_id": f"c{number}", "content": content})
            assert not turn.is_degraded
            if watched.requests:
                break
            seen[str(turn.decision)] += 1
        assert len(watched.requests) == 1
    assert {"none", "prune", "summarize"} <= set(seen)
    passes = db.execute("select outcome, trigger from pycontext.pass order by pass_no").fetchall()
    assert passes == [("pruned", None)] * (len(passes) - 1) + [("summarized", "before")]


def test_a_failing_summarizer_is_not_the_users_problem(
    dsn: str, fill: Fill, caplog: pytest.LogCaptureFixture, db: Connection
) -> None:
    class Broken:
        name = "broken"

        def summarize(self, request: SummaryRequest) -> SummaryResult:
            raise SummarizerFailed("503 from the model", calls=2)

    fill("a", 25)
    for how in ("after", "before"):
        db.execute("update pycontext.lease set retry_at = null")  # else the second one would wait
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, "pycontext"),
            pycontext.connect(dsn, summarizer=Broken()) as memory,
            memory.turn("a", "Anything new?", compact=how) as turn,
        ):
            assert turn.window_tokens <= turn.token_budget
            turn.add(ASSISTANT)
        assert any(record.name == "pycontext" for record in caplog.records)
    passes = db.execute(
        "select outcome, reason, calls, trigger from pycontext.pass order by pass_no"
    ).fetchall()
    assert passes == [("failed", "503 from the model", 2, how) for how in ("after", "before")]
    assert db.execute("select count(*) from pycontext.message where kind = 'summary'").fetchone() == (0,)


SECOND_PROCESS = """
import json, sys
import pycontext
from pycontext.summarizer.extractive import ExtractiveSummarizer

class Counted:
    name, calls = "counted", 0
    def summarize(self, request):
        self.calls += 1
        return ExtractiveSummarizer().summarize(request)

counted = Counted()
with pycontext.connect(summarizer=counted) as memory:
    with memory.turn("a", sys.argv[1]) as turn:
        turn.add({"role": "assistant", "content": "fine"})
        print(json.dumps({"messages": turn.messages, "decision": turn.decision}), flush=True)
print(json.dumps(counted.calls))
"""


def test_the_next_processes_see_the_line_and_do_not_compute_it_again(
    memory: pycontext.Database, dsn: str, fill: Fill, watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C8, with processes of their own."""
    fill("a", 25)
    with memory.turn("a", "Anything new?") as turn:
        turn.add(ASSISTANT)
    assert len(watched.requests) == 1
    line = next(row for row in memory.window("a") if row.section == "summary")
    monkeypatch.setenv("PYCONTEXT_DSN", dsn)
    for number in range(4):
        done = subprocess.run(
            [sys.executable, "-c", SECOND_PROCESS, f"turn {number}"],
            capture_output=True,
            text=True,
            check=True,
        )
        seen, calls = (json.loads(text) for text in done.stdout.splitlines())
        assert {"role": "user", "content": line.content} in seen["messages"]
        assert calls == 0
    with memory.turn("a", "last") as turn:
        assert {"role": "user", "content": "turn 3"} in turn.messages
    assert len(watched.requests) == 1


def test_a_request_sent_again_reads_what_it_read_though_another_tab_came_after(
    memory: pycontext.Database, dsn: str
) -> None:
    with (
        pycontext.connect(dsn) as other,
        memory.turn("a", "Where is my order?", message_id="tab1") as one,
        other.turn("a", "And my invoice?", message_id="tab2") as two,
    ):
        first = list(one.messages)
        assert [row["content"] for row in first] == ["Where is my order?"]
        # the second tab reads all that was stored before
        assert [row["content"] for row in two.messages] == ["Where is my order?", "And my invoice?"]
        with memory.turn("a", "Where is my order?", message_id="tab1") as again:
            assert (again.messages, again.is_answered, again.reply) == (first, False, None)
        two.add({"role": "assistant", "content": "It is paid."})
        with memory.turn("a", "Where is my order?", message_id="tab1") as again:
            assert (again.messages, again.is_answered) == (first, False)
            again.add({"role": "assistant", "content": "In hub 7."})
    for identity, text, reply in (
        ("tab1", "Where is my order?", "In hub 7."),
        ("tab2", "And my invoice?", "It is paid."),
    ):
        with memory.turn("a", text, message_id=identity) as again:
            assert (again.is_answered, again.reply) == (True, reply)
    said = ["Where is my order?", "And my invoice?", "It is paid.", "In hub 7."]
    assert [row.content for row in memory.thread("a")] == said


def test_a_reply_to_the_other_tab_is_no_reply_to_this_one(memory: pycontext.Database, dsn: str) -> None:
    with pycontext.connect(dsn) as other:
        with memory.turn("a", "one", message_id="u1") as one, other.turn("a", "two", message_id="u2"):
            one.add({"role": "assistant", "content": "to the first"})
        with other.turn("a", "two", message_id="u2") as two:
            assert (two.is_answered, two.reply) == (False, None)
        with other.turn("a") as resumed:
            assert not resumed.is_answered
            resumed.add({"role": "assistant", "content": "by its own id", "message_id": "r2"})
        with other.turn("a", "two", message_id="u2") as two:  # which belongs to it by its place
            assert (two.is_answered, two.reply) == (True, "by its own id")


def test_a_turn_broken_off_in_a_tool_loop_goes_on_where_it_was(memory: pycontext.Database, dsn: str) -> None:
    with memory.turn("a", "Where?", message_id="u1") as turn:
        turn.add({"role": "assistant", "tool_calls": [call("c1")]})
        turn.add({"role": "tool", "tool_call_id": "c1", "content": "hub 7"})
        read = list(turn.messages)
    with pycontext.connect(dsn) as other:
        with other.turn("a", "Where?", message_id="u1") as turn:
            assert turn.messages == read
        with other.turn("a", "When?", message_id="u2") as turn:
            turn.add(ASSISTANT)
        with other.turn("a", "Where?", message_id="u1") as turn:
            assert (turn.messages, turn.is_answered) == (read, False)


def test_starting_a_turn_is_one_statement_in_the_servers_log(
    direct_dsn: str, db: Connection, server: Any
) -> None:
    db.execute(
        "do $$ begin execute format('alter database %I set log_statement = ''all''',"
        " current_database()); end $$"
    )
    log = server.server.log
    ends = [0]

    def seen() -> list[str]:
        """The statements since the last look, by their first word that tells them apart."""
        text = log.read_bytes()[ends[-1] :].decode(errors="replace")
        ends.append(ends[-1] + len(text.encode()))
        told = re.findall(r"LOG:  (?:execute [^:]*|statement): (.*(?:\n\t.*)*)", text)
        return [found[1] if (found := re.search(r"pycontext\.(\w+)\(", one)) else one for one in told]

    reply = {**ASSISTANT, "model": "m", "usage": {"prompt_tokens": 2000}}
    with pycontext.connect(direct_dsn) as memory:
        memory.plan(memory.create_chat("warm"))
        seen()
        for number in range(2):  # a new chat, and one that is there
            with memory.turn("a", f"Where? {number}", recall=True, format="all", compact="off") as turn:
                assert seen() == ["start_turn"]
                turn.add(ASSISTANT)
                assert seen() == ["append_messages", "start_turn"]
                turn.add(reply)
                assert seen() == ["append_messages", "record_usage", "start_turn"]
            assert seen() == []

    async def turns() -> None:
        async with pycontext.aconnect(direct_dsn) as memory:
            await memory.plan("warm")
            seen()
            async with memory.turn("a", "And now?", compact="off"):
                assert seen() == ["start_turn"]

    asyncio.run(turns())


KILLED = """
import json, os, signal, sys
import pycontext
with pycontext.connect() as memory:
    with memory.turn("a", "Where is the boat?", message_id="u1", recall=True, format="all") as turn:
        for step in json.loads(sys.argv[1]):
            turn.add(step)
        print(json.dumps([turn.messages, turn.responses_input, turn.anthropic]), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_turn_killed_in_a_tool_loop_goes_on_in_another_process_byte_for_byte(
    direct_dsn: str, monkeypatch: pytest.MonkeyPatch, fill: Fill
) -> None:
    fill("a", 12)
    with pycontext.connect(direct_dsn) as memory:
        memory.remember("a", "Her boat is called Anna")
        monkeypatch.setenv("PYCONTEXT_DSN", direct_dsn)
        steps = [
            {"role": "assistant", "tool_calls": [call("c1")]},
            {"role": "tool", "tool_call_id": "c1", "content": "in the harbour " * 50},
            {"role": "assistant", "content": "Looking on.", "tool_calls": [call("c2")]},
        ]
        program = [sys.executable, "-c", KILLED, json.dumps(steps)]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        assert done.returncode == -9
        before = json.loads(done.stdout)
        memory.remember("a", "Her boat was sold")  # what is recalled is another thing now
        with memory.turn("a", "Where is the boat?", message_id="u1", recall=True, format="all") as turn:
            after = [turn.messages, turn.responses_input, turn.anthropic]
            for one, two in zip(before, after, strict=True):
                texts = [json.dumps(sent, ensure_ascii=False) for sent in (one, two)]
                (head, tail), (same, rest) = (text.split("<memory-context>") for text in texts)
                assert head == same
                assert "sold" not in tail
                assert "sold" in rest
                assert tail.split("</memory-context>")[1] == rest.split("</memory-context>")[1]
            turn.add({"role": "tool", "tool_call_id": "c2", "content": "sold"})
            turn.add(ASSISTANT)
        assert [row.role for row in memory.thread("a")[-6:]] == [
            "user",
            *["assistant", "tool"] * 2,
            "assistant",
        ]
