"""The provider says that the prompt is too long: the window shrinks, and the request goes through."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import psycopg
import pytest
from llm_server import LLMServer
from openai import OpenAI

import pycontext
from pycontext import overflow

pytestmark = pytest.mark.runners("sync", "async", "pooled", long="pooled")

Fill = Callable[..., list[pycontext.Message]]
Connection = psycopg.Connection[Any]
JSON = dict[str, Any]


def model(limit: int) -> Callable[[JSON], Any]:
    """A model that refuses what is longer than so many characters, in OpenAI's words."""

    def answer(request: JSON) -> Any:
        size = len(json.dumps(request["messages"], ensure_ascii=False)) // 4
        if size <= limit:
            return "It is in hub 7."
        said = f"This model's maximum context length is {limit} tokens. However, your messages resulted in"
        error = {"message": f"{said} {size} tokens.", "type": "invalid_request_error", "param": "messages"}
        return 400, {"error": {**error, "code": "context_length_exceeded"}}

    return answer


def reply(client: OpenAI, turn: Any) -> Any:
    while True:
        try:
            return client.chat.completions.create(model="m", messages=turn.messages)
        except openai.BadRequestError as error:
            if not turn.make_room(error):
                raise


@pytest.fixture
def server() -> Any:
    with LLMServer() as running:
        yield running


@pytest.fixture
def client(server: LLMServer) -> OpenAI:
    return OpenAI(base_url=server.url, api_key="none", max_retries=0)


def test_an_overflow_is_compacted_once_and_the_retry_fits(
    memory: pycontext.Database, fill: Fill, watched: Any, server: LLMServer, client: OpenAI
) -> None:
    fill("a", 20)
    server.default = model(3000)
    with memory.turn("a", "Where is it?") as turn:
        assert turn.decision == "none"  # as far as the profile knows there is room
        before = turn.window_tokens
        turn.add(reply(client, turn))
        assert turn.window_tokens <= turn.token_budget < before
    assert len(server.requests) == 2
    assert len(watched.requests) == 1
    assert server.requests[1]["messages"][-1] == {"role": "user", "content": "Where is it?"}
    assert memory.status("a").line_origin == "compaction"
    server.clear()
    with memory.turn("a", "And now?") as turn:  # what was compacted stays so
        turn.add(reply(client, turn))
    assert len(server.requests) == 1


def test_without_compaction_messages_are_left_out(
    memory: pycontext.Database, fill: Fill, watched: Any, server: LLMServer, client: OpenAI
) -> None:
    fill("a", 20)
    server.default = model(3000)
    with memory.turn("a", "Where is it?", compact="off") as turn:
        turn.add(reply(client, turn))
        assert turn.is_degraded
    assert (len(server.requests), watched.requests) == (2, [])


def test_where_it_cannot_help_the_error_says_why(
    memory: pycontext.Database, fill: Fill, server: LLMServer, client: OpenAI
) -> None:
    fill("a", 20)
    server.default = model(10)
    for message in ("Where is it?", "Where is it? " * 500):
        with memory.turn("a", message, compact="off") as turn:
            with pytest.raises(pycontext.ContextOverflow, match="set_profile") as error:
                reply(client, turn)
            assert isinstance(error.value.__cause__, openai.BadRequestError)
            assert pycontext.is_overflow(error.value)
            turn.add({"role": "assistant", "content": "I can't."})
    assert [row.role for row in memory.thread("a")[-2:]] == ["user", "assistant"]


def test_another_error_is_the_callers(
    memory: pycontext.Database, server: LLMServer, client: OpenAI, watched: Any
) -> None:
    server.script("400", "429", "500")
    with memory.turn("a", "Where is it?") as turn:
        budget = turn.token_budget
        for kind in (openai.BadRequestError, openai.RateLimitError, openai.InternalServerError):
            with pytest.raises(kind) as error:
                client.chat.completions.create(model="m", messages=turn.messages)
            assert turn.make_room(error.value) is False
        assert turn.token_budget == budget
    with pytest.raises(RuntimeError, match="with block"):
        turn.make_room(error.value)


class Refused(Exception):
    """An error as client libraries raise it."""

    def __init__(self, text: str, status: int = 400, body: Any = None) -> None:
        super().__init__(text)
        self.status_code, self.body = status, body


TOLD: list[tuple[Exception, float | None]] = [
    (Refused("prompt is too long: 250000 tokens > 200000 maximum"), 0.8),
    (
        Refused("input length and `max_tokens` exceed context limit: 190000 + 60000 > 200000, decrease it"),
        0.8,
    ),
    (
        Refused(
            "This model's maximum context length is 8,000 tokens. However, you requested 10,000 tokens"
            " (9000 in the messages, 1000 in the completion)."
        ),
        0.8,
    ),
    (
        Refused("request (10000 tokens) exceeds the available context size (8000 tokens), try increasing it"),
        0.8,
    ),
    (Refused("The decoder prompt (length 10000) is longer than the maximum model length of 8000."), 0.8),
    (Refused("Prompt length of 10000 is longer than the maximum model length of 8000."), 0.8),
    (Refused("The input token count (10000) exceeds the maximum number of tokens allowed (8000)."), 0.8),
    (Refused("This model's maximum prompt length is 8000 but the request contains 10000 tokens."), 0.8),
    (Refused("Input is too long for requested model."), None),
    (Refused("Your input exceeds the context window of this model."), None),
    (Refused("bad", body={"error": {"code": "context_length_exceeded"}}), None),
    (Refused("bad", body={"type": "exceed_context_size_error"}), None),
]


@pytest.mark.parametrize(("error", "share"), TOLD, ids=lambda given: str(given)[:30])
def test_what_providers_say_is_recognised(error: Exception, share: float | None) -> None:
    assert pycontext.is_overflow(error)
    assert overflow.ratio(error) == share


@pytest.mark.parametrize(
    "error",
    [
        Refused("Request too large: prompt is too long for your tokens per minute", 429),
        Refused("max_tokens must be at least 1"),
        Refused("the context of your request is not allowed"),
        ValueError("8000 tokens > 7000"),
    ],
)
def test_other_words_are_no_overflow(error: Exception) -> None:
    assert not pycontext.is_overflow(error)
