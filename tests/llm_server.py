"""A real HTTP server with real faults: OpenAI's chat completions and responses, Anthropic's messages.

with LLMServer() as server:
    server.script("503", "ok")          # what the next requests get; after that, `server.default`
    OpenAISummarizer("test", base_url=server.url)
    server.requests                     # what came in, as parsed JSON
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GOOD = {
    "resolved": ["The user asked for the report and got it (#2)"],
    "pending": [],
    "active_task": None,
    "decisions": ["The report was to be sent on 2024-05-20 (#3)"],
    "facts": ["Ticket QX-4471 (#2)"],
    "artifacts": [],
}

PLAIN = "RESOLVED\n- The report was made (#2)\n\nFACTS\n- Ticket QX-4471 (#2)"

Answer = str | Callable[[dict[str, Any]], Any]
"""A fault by name, or a function from the request to a content (str), a message (dict) or (status, body)."""


class Broken(bytes):
    """An answer that breaks off: more was promised, and the connection is closed."""


class LLMServer:
    """`script` lists what the next requests get; `requests` keeps what they were."""

    def __init__(self, default: Answer = "ok") -> None:
        self.default = default
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._script: list[Answer] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> LLMServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()

    def script(self, *answers: Answer) -> None:
        """What the next requests get, one each."""
        with self._lock:
            self._script[:] = answers

    def clear(self) -> None:
        """Forget requests and script."""
        with self._lock:
            self.requests.clear()
            self._script.clear()

    @property
    def prompts(self) -> list[str]:
        """All text of each request's messages."""
        return ["\n".join(message["content"] for message in request["messages"]) for request in self.requests]

    def answer(self, request: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
        """Status and body for one request."""
        with self._lock:
            self.requests.append(request)
            self.headers.append(headers)
            answer = self._script.pop(0) if self._script else self.default
        if callable(answer):
            made = answer(request)
            if isinstance(made, tuple):
                return made
            message = made if isinstance(made, dict) else {"role": "assistant", "content": made}
            return 200, _completion(request, message)
        return self._named(answer, request)

    def embed(self, request: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
        """Embeddings of two subjects, cats and boats, newest first; or the next answer of the script."""
        with self._lock:
            self.requests.append(request)
            self.headers.append(headers)
            answer = self._script.pop(0) if self._script else "ok"
        if callable(answer):
            made: tuple[int, Any] = answer(request)
            return made
        if answer == "timeout":
            self._stop.wait(20)
        elif answer == "not_json":
            return 200, "<html>proxy</html>"
        elif answer != "ok":
            return int(answer), {
                "error": {"message": f"status {answer}", "type": "server_error", "code": None}
            }
        data = [
            {
                "object": "embedding",
                "index": at,
                "embedding": [1.0 if "cat" in text else 0.01, 1.0 if "boat" in text else 0.01, 0.1],
            }
            for at, text in enumerate(request["input"])
        ]
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        return 200, {"object": "list", "data": data[::-1], "model": request["model"], "usage": usage}

    def _named(self, name: str, request: dict[str, Any]) -> tuple[int, Any]:
        if name.isdigit():
            return int(name), {"error": {"message": f"status {name}", "type": "server_error", "code": None}}
        if name == "timeout":
            self._stop.wait(20)
            return 200, _completion(request, {"content": json.dumps(GOOD)})
        if name == "slow":
            time.sleep(0.3)
            return 200, _completion(request, {"content": json.dumps(GOOD)})
        if name == "no_json_schema":
            return _refuses(request, "json_schema")
        if name == "no_response_format":
            return _refuses(request, "json_schema", "json_object")
        if name == "not_json":
            return 200, "<html>proxy</html>"
        if name == "no_choices":
            return 200, {**_completion(request, {}), "choices": []}
        contents: dict[str, dict[str, Any]] = {
            "ok": {"content": json.dumps(GOOD)},
            "empty": {"content": ""},
            "null": {"content": None},
            "whitespace": {"content": " \n\t "},
            "headings": {"content": "## Resolved\n\n## Pending\n\n**Decisions:**\n\n## Facts\n"},
            "empty_json": {"content": json.dumps({**GOOD, "resolved": [], "decisions": [], "facts": []})},
            "error_text": {"content": "Error: upstream timeout"},
            "error_json": {
                "content": json.dumps({**GOOD, "resolved": ["Error: 503"], "decisions": [], "facts": []})
            },
            "refusal": {"content": None, "refusal": "I can't help with that."},
            "reasoning": {"content": "", "reasoning_content": "Let me think about it"},
            "think_tag": {"content": "<think>The user wants …</think>"},
            "truncated": {"content": json.dumps(GOOD)[:60]},
            "prose": {
                "content": "The report about ticket QX-4471 was asked for, and was sent on 2024-05-20."
            },
            "plain": {"content": f"{PLAIN}\n\nACTIVE TASK\n- none"},
            "fenced": {"content": f"Here it is:\n```json\n{json.dumps(GOOD)}\n```"},
            "tool_call": {
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "send", "arguments": "{}"}}
                ],
            },
        }
        if name == "length":
            return 200, _completion(request, {"content": json.dumps(GOOD)}, "length")
        return 200, _completion(request, contents[name])


def _refuses(request: dict[str, Any], *forms: str) -> tuple[int, Any]:
    form = (request.get("response_format") or {}).get("type")
    if form in forms:
        body = {"message": f"response_format type {form} is not supported", "type": "invalid_request_error"}
        return 400, {"error": body}
    content = json.dumps(GOOD) if form else PLAIN
    return 200, _completion(request, {"content": content})


def _completion(
    request: dict[str, Any], message: dict[str, Any], finish: str | None = None
) -> dict[str, Any]:
    finish = finish or ("tool_calls" if message.get("tool_calls") else "stop")
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1716200000,
        "model": request.get("model", "test"),
        "choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", **message}}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
    }


def _pieces(text: str, size: int = 5) -> list[str]:
    """Text as a model streams it, cut anywhere."""
    return [text[at : at + size] for at in range(0, len(text), size)]


def _chunks(completion: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A completion as the events of its stream."""
    choice = completion["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [
        {"role": "assistant"},
        *({"content": p} for p in _pieces(message.get("content") or "")),
    ]
    for index, call in enumerate(message.get("tool_calls") or ()):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    shared = {**completion, "object": "chat.completion.chunk", "usage": None}
    for delta in deltas:
        yield {**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**shared, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    yield {**shared, "choices": [], "usage": completion["usage"]}


def _response(request: dict[str, Any], completion: dict[str, Any]) -> dict[str, Any]:
    """A completion in the form of the Responses API. A message may bring `output` items of its own."""
    message = completion["choices"][0]["message"]
    output = message.get("output")
    if output is None:
        calls = message.get("tool_calls") or ()
        output = [
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "status": "completed",
                **call["function"],
            }
            for call in calls
        ]
        if message.get("content"):
            text = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
            output = [
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [text],
                },
                *output,
            ]
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": completion["created"],
        "model": completion["model"],
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": request.get("instructions"),
        "metadata": {},
        "output": output,
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": {
            "input_tokens": 100,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 20,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 120,
        },
    }


def _anthropic(completion: dict[str, Any]) -> dict[str, Any]:
    """A completion in the form of Anthropic's messages."""
    message = completion["choices"][0]["message"]
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in message.get("tool_calls") or ()
    ]
    text = [{"type": "text", "text": message["content"]}] if message.get("content") else []
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": [*text, *calls],
        "stop_reason": "tool_use" if calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 100, "output_tokens": 20},
    }


def _response_events(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A response as the events of its stream."""
    events: list[dict[str, Any]] = [{"type": "response.created", "response": {**response, "output": []}}]
    for index, item in enumerate(response["output"]):
        at = {"output_index": index, "item_id": item.get("id")}
        events.append({"type": "response.output_item.added", "output_index": index, "item": item})
        for number, part in enumerate(item["content"] if item["type"] == "message" else ()):
            for piece in _pieces(part["text"]):
                delta = {"content_index": number, "delta": piece, "logprobs": []}
                events.append({"type": "response.output_text.delta", **at, **delta})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": response})
    for number, event in enumerate(events):
        yield {**event, "sequence_number": number}


def _handler(server: LLMServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = json.loads(body)
            is_response, is_message = self.path.endswith("/responses"), self.path.endswith("/messages")
            if self.path.endswith("/embeddings"):
                status, answer = server.embed(request, headers)
            elif not (is_response or is_message or self.path.endswith("/chat/completions")):
                status, answer = 404, {"error": {"message": f"no {self.path}"}}
            else:
                status, answer = server.answer(request, headers)
            is_completion = status == 200 and isinstance(answer, dict) and bool(answer.get("choices"))
            if is_response and is_completion:
                answer = _response(request, answer)
            elif is_message and is_completion:
                answer = _anthropic(answer)
            kind = "text/html" if isinstance(answer, str) else "application/json"
            if request.get("stream") and is_completion:
                kind = "text/event-stream"
                events = _response_events(answer) if is_response else _chunks(answer)
                answer = "".join(
                    (f"event: {event['type']}\n" if is_response else "") + f"data: {json.dumps(event)}\n\n"
                    for event in events
                )
                answer += "" if is_response else "data: [DONE]\n\n"
            if isinstance(answer, bytes):  # of another server, as it came
                kind = "text/event-stream" if request.get("stream") else "application/json"
                data = answer
            else:
                data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data) + isinstance(data, Broken)))
                self.end_headers()
                self.wfile.write(data)
                self.close_connection = isinstance(data, Broken)
            except OSError:  # the client gave up
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    return Handler
