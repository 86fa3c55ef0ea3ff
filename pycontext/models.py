"""What clients of model servers share: set-up, what a server turned out to understand, reading its answers.

Any server that speaks OpenAI's protocol will do. Needs the extra `openai`.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pycontext.summarizer.wording import without_thinking
from pycontext.summary import tidy

if TYPE_CHECKING:
    import openai as client_library

FORMS = ("json_schema", "json_object", "plain")
"""How structured output is asked for; a server that refuses one form gets the next."""

_TOO_LARGE = (
    "context length",
    "context size",
    "context_length",
    "context window",
    "too long",
    "too many tokens",
)
_SAMPLING = ("temperature", "frequency_penalty")
_LIMITS = ("max_tokens", "max_completion_tokens")


class ModelFailed(Exception):
    """The server gave no answer; `reason` is one line without chat content."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TooLarge(Exception):
    """The server says the request is larger than its window."""


class Unusable(Exception):
    """The answer can't be used; `reason` is told to the model once and then to the log."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Spent:
    """What the requests have cost so far."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, answer: Any) -> None:
        """Count the tokens of one answer."""
        usage = getattr(answer, "usage", None)
        self.prompt_tokens += getattr(usage, "prompt_tokens", None) or 0
        self.completion_tokens += getattr(usage, "completion_tokens", None) or 0


@dataclass
class Dialect:
    """What the server turned out to understand; learnt from its refusals, kept for the life of the client."""

    form: int = 0
    limit_name: str = "max_completion_tokens"
    has_sampling: bool = True
    is_limit_settled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def learn(self, error: client_library.APIStatusError, form: int) -> bool:
        """True where the request is worth repeating in the way the refusal asks for; raises TooLarge."""
        if error.status_code not in (400, 404, 405, 413, 415, 422, 501):
            return False
        told = f"{error.message} {error.body}".lower()
        if error.status_code == 413 or any(word in told for word in _TOO_LARGE):
            raise TooLarge
        with self.lock:
            if any(name in told for name in _LIMITS) and not self.is_limit_settled:
                self.is_limit_settled = True
                self.limit_name = next(name for name in _LIMITS if name != self.limit_name)
                return True
            if self.has_sampling and any(name in told for name in _SAMPLING):
                self.has_sampling = False
                return True
            is_about_form = error.status_code != 404 and self.form < len(FORMS) - 1
            if is_about_form and self.form == form:
                self.form += 1
            return is_about_form


class ModelClient:
    """One model at one server. what: the client's name in the hint that the extra is missing.

    base_url: None = the client library's own default. api_key: None = OPENAI_API_KEY; none is needed where
    base_url is given. timeout: seconds for one request. max_retries: how often the client library repeats a
    request that failed on the way (connection, 429, 5xx).
    """

    def __init__(
        self,
        what: str,
        model: str,
        *,
        base_url: str | None,
        api_key: str | None,
        timeout: float,
        max_retries: int,
    ) -> None:
        self.model = model
        self.base_url = base_url
        self.timeout = timeout
        self.dialect = Dialect(limit_name="max_tokens" if base_url else "max_completion_tokens")
        self._what = what
        self._api_key = api_key
        self._max_retries = max_retries
        self._client: client_library.OpenAI | None = None

    @property
    def form(self) -> str:
        """How structured output is asked for as things stand."""
        return FORMS[self.dialect.form]

    def open(self) -> client_library.OpenAI:
        """The library's client. Raises ModelFailed where the library or a key is missing."""
        if self._client is None:
            openai = self._library()
            key = self._api_key or os.environ.get("OPENAI_API_KEY") or ("none" if self.base_url else None)
            if key is None:
                raise ModelFailed("OPENAI_API_KEY is not set, and no base URL of another server is given")
            self._client = openai.OpenAI(
                api_key=key, base_url=self.base_url, timeout=self.timeout, max_retries=self._max_retries
            )
        return self._client

    @contextmanager
    def asking(self) -> Iterator[client_library.OpenAI]:
        """The library's client; what its calls raise becomes ModelFailed, but for a status, which stays."""
        openai = self._library()
        client = self.open()
        try:
            yield client
        except openai.APITimeoutError as error:
            raise ModelFailed(f"the model server gave no answer within {self.timeout:g} s") from error
        except openai.APIConnectionError as error:
            raise ModelFailed("the model server could not be reached") from error
        except openai.APIStatusError:
            raise
        except openai.OpenAIError as error:
            raise ModelFailed(f"the model client failed ({type(error).__name__})") from error
        except ValueError as error:  # not JSON
            raise ModelFailed("the model server's answer could not be read") from error
        except Exception as error:
            if not type(error).__module__.startswith("httpx"):  # openai before 3 lets these out of a stream
                raise
            raise ModelFailed("the model server's answer broke off") from error

    def complete(
        self,
        prompts: Callable[[str], list[Any]],
        *,
        name: str,
        schema: Mapping[str, Any],
        max_tokens: int,
        spent: Spent,
        is_again: bool = False,
    ) -> Any:
        """The first choice of an answer in the form of `schema`, None where it has none.

        prompts: the messages for one of FORMS. is_again: the answer before this one was no use; a model that
        says one thing over and over at temperature 0 would do so again. What the server does not know is left
        out and not tried again. Raises ModelFailed, TooLarge.
        """
        openai = self._library()
        for _ in range(6):
            form = self.dialect.form
            messages: Any = prompts(FORMS[form])
            options: Any = self._options(form, name, schema, max_tokens, is_again)
            try:
                with self.asking() as client:
                    spent.calls += 1
                    answer: Any = client.chat.completions.create(**options, messages=messages)
            except openai.APIStatusError as error:
                if not self.dialect.learn(error, form):
                    raise refused(error) from error
                continue
            spent.add(answer)
            choices = getattr(answer, "choices", None)
            return choices[0] if choices else None
        raise ModelFailed("the model server refuses every form of the request")

    def _options(
        self, form: int, name: str, schema: Mapping[str, Any], max_tokens: int, is_again: bool
    ) -> dict[str, Any]:
        options: dict[str, Any] = {"model": self.model, self.dialect.limit_name: max_tokens}
        if self.dialect.has_sampling:
            options |= {"temperature": 0.5, "frequency_penalty": 0.5} if is_again else {"temperature": 0}
        if FORMS[form] == "json_schema":
            asked = {"name": name, "strict": True, "schema": schema}
            options["response_format"] = {"type": "json_schema", "json_schema": asked}
        elif FORMS[form] == "json_object":
            options["response_format"] = {"type": "json_object"}
        return options

    def _library(self) -> Any:
        try:
            import openai
        except ImportError as error:
            hint = f"the {self._what} model needs the extra 'openai': pip install 'pycontext-pg[openai]'"
            raise ModelFailed(hint) from error
        return openai


def refused(error: client_library.APIStatusError) -> ModelFailed:
    """A status that nothing can be learnt from."""
    return ModelFailed(f"the model server answered with status {error.status_code}")


def text_of(choice: Any) -> str:
    """The content of a choice; raises `Unusable` for anything that is not a whole answer."""
    message = getattr(choice, "message", None)
    if message is None:
        raise Unusable("the answer holds no message")
    reason = getattr(choice, "finish_reason", None)
    if reason == "length":
        raise Unusable("the answer was cut off at the length limit")
    if reason == "content_filter" or getattr(message, "refusal", None):
        raise Unusable("the model refused to answer")
    content = getattr(message, "content", None)
    if not isinstance(content, str):
        content = ""
    content = without_thinking(tidy(content)).strip()
    if content:
        return content
    if getattr(message, "tool_calls", None) or getattr(message, "function_call", None):
        raise Unusable("the answer is a tool call, not a text")
    extra = getattr(message, "model_extra", None) or {}
    if any(extra.get(key) for key in ("reasoning", "reasoning_content", "thinking")):
        raise Unusable("the answer holds reasoning only")
    raise Unusable("the answer is empty")


def json_in(text: str) -> Any:
    """The JSON object or array that a text is or holds, fenced or not; None where there is none."""
    fenced = re.search(r"```(?:json)?\s*([\s\S]*?)```", text)
    for part in (text, fenced[1] if fenced else "", text[text.find("{") : text.rfind("}") + 1]):
        if part.strip()[:1] in ("{", "["):
            try:
                return json.loads(part, strict=False)
            except (ValueError, RecursionError):
                continue
    return None


def rendered(name: str, values: Mapping[str, Any]) -> list[dict[str, str]]:
    """The system and the user message that templates/NAME.….j2 make of the values."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=False, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    folder = importlib.resources.files("pycontext") / "templates"
    return [
        {
            "role": role,
            "content": environment.from_string((folder / f"{name}.{role}.j2").read_text(encoding="utf-8"))
            .render(values)
            .strip(),
        }
        for role in ("system", "user")
    ]
