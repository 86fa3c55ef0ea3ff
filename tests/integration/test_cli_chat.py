"""`pycontext chat`, as a process: over a pipe and over a terminal, with a model server."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import validators
from llm_server import Broken, LLMServer

import pycontext

PROGRAM = str(Path(sys.executable).parent / "pycontext")


@pytest.fixture
def model() -> Iterator[LLMServer]:
    with LLMServer(lambda request: "Understood. ") as server:
        yield server


@pytest.fixture
def environment(dsn: str, model: LLMServer) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYCONTEXT_", "OPENAI_"))
    }
    chat = {"PYCONTEXT_CHAT_MODEL": "test", "PYCONTEXT_CHAT_BASE_URL": model.url}
    return {**kept, **chat, "PYCONTEXT_DSN": dsn, "PYTHONIOENCODING": "utf-8"}


def talk(environment: dict[str, str], *options: str, lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, "chat", *options],
        input=lines,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
        env=environment,
        timeout=120,
        check=False,
    )


def test_a_conversation_over_a_pipe_and_all_that_can_be_asked_of_the_memory(
    environment: dict[str, str], model: LLMServer, memory: pycontext.Database
) -> None:
    memory.create_chat("old", owner="anna")
    memory.remember("old", "Anna drinks oolong tea.")
    long = "My parcel QX-4471 has not come. " * 30
    lines = [
        "Which tea do I like?",
        *(f"{n}. {long}" for n in range(14)),
        "/window",
        "/pin",
        "/pin #3",
        "/compact parcels",
        "/explain tea",
        "/memory",
        "/memory oolong",
        "/unpin #3",
        "/start-over She moved.",
        "А теперь?",
        "/nonsense",
        "/pin #999",
        "/help",
        "",
        "/quit",
        "never read",
    ]

    def reply(request: dict[str, Any]) -> str:
        memories = [
            m["content"] for m in request["messages"] if str(m["content"]).startswith("<memory-context>")
        ]
        return f"You like oolong. {''.join(memories)}\x1b[2JIt is \x07noted.\n" + "Really. " * 20

    model.default = reply
    options = ("c", "--owner", "anna", "--profile", "small-8k", "--system", "Be brief.")
    done = talk(environment, *options, lines="\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("chat c with test")
    assert done.stdout.count("You like oolong. ␛[2JIt is ␇noted.\nReally.") == 16
    assert "<memory-context>" not in done.stdout
    assert "\x1b" not in done.stdout
    assert "window of c" in done.stdout
    assert "#29 is pinned" in done.stdout
    assert "#3 is pinned" in done.stdout
    assert "summarized #" in done.stdout
    assert "Anna drinks oolong tea." in done.stdout
    assert "unpinned" in done.stdout
    assert "started over after #30" in done.stdout
    assert re.search(r"\] [\d,]+ of 6,\d{3} tokens, #32$", done.stdout, re.M)
    assert "summary up to #" in done.stdout
    assert "there is no /nonsense" in done.stderr
    assert "there is no such message" in done.stderr
    assert "never read" not in str(model.requests)
    assert any("Anna drinks oolong tea." in str(m["content"]) for m in model.requests[0]["messages"])
    for request in model.requests:
        validators.openai_chat(request["messages"])
        assert request["tools"] == memory.tools("c").schemas()
    assert [m["role"] for m in model.requests[-1]["messages"][:2]] == ["system", "user"]
    assert "She moved." in model.requests[-1]["messages"][1]["content"]
    thread = memory.thread("c", max_rows=100)
    assert [row.content for row in thread if row.role == "user" and row.kind == "message"][-1] == "А теперь?"
    again = talk(environment, "c", "--no-tools", lines="Still there?\n")
    assert again.returncode == 0
    assert "tools" not in model.requests[-1]


def test_the_model_calls_tools_and_then_answers(
    environment: dict[str, str], model: LLMServer, memory: pycontext.Database
) -> None:
    arguments = {"content": "The user lives in Mill Lane.", "subject": "user.home"}
    functions = [("c1", "remember", json.dumps(arguments)), ("c2", "run_sql", "{")]
    calls = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": given}}
        for i, name, given in functions
    ]
    model.script(
        lambda request: {"content": None, "tool_calls": calls},
        lambda request: f"Noted: {request['messages'][-2]['content']} {request['messages'][-1]['content']}",
    )
    done = talk(environment, "c", lines="I live in Mill Lane.\n")
    assert done.returncode == 0, done.stderr
    assert "→ remember" in done.stdout
    assert "Noted: Kept as fact_" in done.stdout
    assert "there is no tool 'run_sql'" in done.stdout
    assert [row.role for row in memory.thread("c")] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [row.content for row in memory.recall("c", "lane")] == ["The user lives in Mill Lane."]


def test_a_prompt_too_long_for_the_model_is_compacted_and_its_counts_are_learned(
    environment: dict[str, str], model: LLMServer, memory: pycontext.Database
) -> None:
    error = {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}

    def refuse(request: dict[str, Any]) -> tuple[int, Any]:
        return 400, {"error": error}

    memory.create_chat("c", profile="small-8k")
    memory.append("c", [{"role": ("user", "assistant")[n % 2], "content": "Word. " * 200} for n in range(24)])
    model.script(refuse)
    done = talk(environment, "c", lines="Still there?\n")
    assert done.returncode == 0, done.stderr
    assert "Understood." in done.stdout
    one, two = (len(json.dumps(request["messages"])) for request in model.requests)
    assert two < one
    assert memory.status("c").line_origin == "compaction"
    assert memory.thread("c")[-1].metadata == {"model": "test", "usage": {"prompt_tokens": 100}}
    model.script(refuse, refuse)
    done = talk(environment, "c", lines="And now?\n")
    assert "can't be made any smaller" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_goes_wrong_with_a_line_is_told_and_the_next_is_read(
    environment: dict[str, str], model: LLMServer, memory: pycontext.Database
) -> None:
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    def streamed(*choices: dict[str, Any], end: str = "[DONE]") -> Any:
        events = [json.dumps({**head, "choices": [{"index": 0, **choice}]}) for choice in choices]
        return lambda request: (200, "".join(f"data: {event}\n\n" for event in [*events, end]).encode())

    call = {"id": "c1", "type": "function", "function": {"name": "recall", "arguments": '{"query": "tea"}'}}
    model.script(
        "400",
        lambda request: "",
        "not_json",
        streamed({"delta": {"content": "Half of"}}, end='{"error": {"message": "overloaded"}}'),
        lambda request: (200, Broken(streamed({"delta": {"content": "A third"}}, end="")(request)[1])),
        lambda request: (200, Broken()),
        streamed({"finish_reason": None}, {"delta": {"content": "No delta."}}),
        streamed({"delta": {"refusal": "I will not."}}),
        *[lambda request: {"content": None, "tool_calls": [call]}] * 8,
        lambda request: "Here again.",
    )
    lines = ["one", "two", "three", "four", "four too", "four again", "/pin 99999999999999999999"]
    lines += ["five \udcff", "six", "seven", "eight"]
    done = talk(environment, "c", lines="\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert "Half of\n" in done.stdout
    assert "A third\n" in done.stdout
    assert "Here again." in done.stdout
    for told in ("status 400", "the model said nothing", "out of range", "called tools 8 times"):
        assert told in done.stderr
    assert done.stderr.count("error:") == 8
    assert done.stderr.count("kept as far as it came") == 2
    assert "Traceback" not in done.stderr
    said = [row.content for row in memory.thread("c") if row.role != "tool" and row.content]
    replies = ["five \ufffd", "No delta.", "six", "I will not.", "seven", "eight", "Here again."]
    kept = ["four", "Half of […]", "four too", "A third […]", "four again"]
    assert said == ["one", "two", "three", *kept, *replies]


def test_without_a_model_the_error_names_the_variables(environment: dict[str, str]) -> None:
    bare = {name: value for name, value in environment.items() if not name.startswith("PYCONTEXT_CHAT_")}
    done = talk(bare, "c", lines="hi\n")
    assert done.returncode == 1
    assert "no model to talk to" in done.stderr
    for name in ("PYCONTEXT_CHAT_MODEL", "PYCONTEXT_CHAT_BASE_URL", "OPENAI_API_KEY"):
        assert name in done.stderr
    keyless = talk({**bare, "PYCONTEXT_CHAT_MODEL": "gpt-4.1"}, "c", lines="hi\n")
    assert keyless.returncode == 1
    assert "OPENAI_API_KEY is not set" in keyless.stderr
    assert done.stdout == keyless.stdout == ""


def test_a_terminal_gets_a_prompt_and_ctrl_c_ends_a_reply_where_it_is(
    environment: dict[str, str], model: LLMServer, memory: pycontext.Database
) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [PROGRAM, "chat", "c"], stdin=slave, stdout=slave, stderr=slave, env={**environment, "TERM": "xterm"},
        start_new_session=True,
        # a suite started in the background ignores Ctrl-C, and so would what it starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    os.close(slave)
    screen = ""

    def read_until(text: str) -> None:
        nonlocal screen
        limit = time.monotonic() + 60
        while text not in screen:  # what was read before is done with
            assert time.monotonic() < limit, screen
            if select.select([master], [], [], 0.2)[0]:
                screen += os.read(master, 4096).decode(errors="replace")
        screen = screen.split(text, 1)[1]

    def interrupt(request: dict[str, Any]) -> str:
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(2)
        return "too late"

    try:
        read_until("> ")
        os.write(master, "Привет\n".encode())
        read_until("Understood.")
        read_until("tokens, #2")
        read_until("> ")
        model.script(interrupt)
        os.write(master, b"And now?\n")
        read_until("tokens, #4")
        read_until("> ")
        os.write(master, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(master)
    assert [row.content for row in memory.thread("c")] == ["Привет", "Understood. ", "And now?", " […]"]
