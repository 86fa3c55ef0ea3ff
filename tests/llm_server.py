"""A real HTTP server that speaks OpenAI's chat completions, with the faults real ones have.

with LLMServer() as server:
    server.script("503", "ok")          # what the next requests get; after that, `server.default`
    OpenAISummarizer("test", base_url=server.url)
    server.requests                     # what came in, as parsed JSON
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
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
                "content": "The user asked for the report about ticket QX-4471 and it was sent on 2024-05-20."
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


def _handler(server: LLMServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if not self.path.endswith("/chat/completions"):
                status, answer = 404, {"error": {"message": f"no {self.path}"}}
            else:
                status, answer = server.answer(json.loads(body), headers)
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            try:
                self.send_response(status)
                self.send_header(
                    "Content-Type", "text/html" if isinstance(answer, str) else "application/json"
                )
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # the client gave up
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    return Handler
