"""A summarizer behind any server that speaks OpenAI's chat completions. Needs the extra `openai`."""

from __future__ import annotations

import importlib.resources
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pycontext.masking import mask
from pycontext.summarizer import SummarizerFailed, SummaryRequest, SummaryResult, reply, wording
from pycontext.summarizer.extractive import carried, is_called_off
from pycontext.summarizer.transcript import Piece, new_marker, pieces
from pycontext.summary import Count, Summary, clip, merge, one_line

if TYPE_CHECKING:
    import openai as client_library
    from jinja2 import Template

_MODES = ("json_schema", "json_object", "plain")
_LANGUAGES = {"ru": "Russian", "zh": "Chinese", "ja": "Japanese", "ko": "Korean"}
_KNOWN_SHARE = 8
"""At most an eighth of the window goes to what is known from before."""


@dataclass
class _Spent:
    """What a summary has cost so far."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class _Dialect:
    """What the server turned out to understand; learnt from its refusals, kept for the life of the
    summarizer."""

    mode: int = 0
    limit_name: str = "max_completion_tokens"
    has_temperature: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)


class _TooLarge(Exception):
    """The server says the piece is larger than its window."""


class OpenAISummarizer:
    """Asks a model for the summary.

    model: its name at the server. base_url: the server, null = the client library's own default. api_key:
    null = OPENAI_API_KEY, and none is needed where base_url is given. window_tokens: the model's context
    window; input that is larger is folded in pieces. timeout: seconds for one request. max_retries: how
    often the client library repeats a request that failed on the way (connection, 429, 5xx).
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        window_tokens: int = 32000,
        timeout: float = 60.0,
        max_retries: int = 1,
    ) -> None:
        if window_tokens < 2000:
            raise ValueError("window_tokens must be at least 2000")
        self.model = model
        self.base_url = base_url
        self.window_tokens = window_tokens
        self.timeout = timeout
        self._api_key = api_key
        self._max_retries = max_retries
        self._client: client_library.OpenAI | None = None
        self._dialect = _Dialect(limit_name="max_tokens" if base_url else "max_completion_tokens")

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model

    def summarize(self, request: SummaryRequest) -> SummaryResult:
        """The segment of the request's messages, within `request.max_tokens`.

        Exact values and the ledger of what tools touched are carried by code beside the model's words. Raises
        `SummarizerFailed`: a faulty answer is asked for once more with the reason, then given up.
        """
        spent = _Spent()
        try:
            segment = self._segment(request, spent)
        except reply.Unusable as error:
            raise _failed(error.reason, spent) from error
        except _TooLarge as error:
            raise _failed("the model's window is too small for a piece of the chat", spent) from error
        return SummaryResult(segment, self.model, spent.calls, spent.prompt_tokens, spent.completion_tokens)

    def _segment(self, request: SummaryRequest, spent: _Spent) -> Summary:
        known = _known(request, self._window(request) // _KNOWN_SHARE)
        parts = pieces(request.messages, self._room(request, known), request.count)
        if not parts:
            raise SummarizerFailed("there is nothing to summarize")
        told = Summary()
        for at, part in enumerate(parts, 1):
            told = self._fold(request, known, part, (at, len(parts)), told, spent)
        if is_called_off(request.messages):
            told = replace(told, active_task=None)
        return merge(carried(request, told), told, request.max_tokens, request.count)

    def _fold(
        self,
        request: SummaryRequest,
        known: Sequence[str],
        part: Piece,
        place: tuple[int, int],
        told: Summary,
        spent: _Spent,
    ) -> Summary:
        """`told` with one piece more. A piece the server finds too large is halved, down to a sixteenth."""
        waiting = [(part, 0)]
        while waiting:
            piece, depth = waiting.pop(0)
            before = [*known, *_brief(told, self._window(request) // _KNOWN_SHARE, request.count)]
            try:
                found = self._ask(request, before, piece, place, spent)
            except _TooLarge:
                if depth == 4:
                    raise
                waiting[:0] = [(half, depth + 1) for half in _halves(piece)]
                continue
            told = merge(told, found, request.max_tokens, request.count)
        return told

    def _room(self, request: SummaryRequest, known: Sequence[str]) -> int:
        """Tokens of transcript one request takes: the window less prompt, answer, and a tenth for other
        tokenizers."""
        prompt = request.count(
            "\n".join(_prompts(request, known, Piece("", ()), (1, 2), "x" * 400, _MODES[2]))
        )
        window = self._window(request)
        before = window // _KNOWN_SHARE
        return max(256, int((window - self._reserve(request) - prompt - before) * 0.9))

    def _reserve(self, request: SummaryRequest) -> int:
        return min(max(1024, request.max_tokens * 2), self._window(request) // 3)

    def _window(self, request: SummaryRequest) -> int:
        """The model's window, or what the chat's profile says of it where that is less."""
        return max(2000, min(self.window_tokens, request.window_tokens or self.window_tokens))

    def _ask(
        self,
        request: SummaryRequest,
        known: Sequence[str],
        piece: Piece,
        place: tuple[int, int],
        spent: _Spent,
    ) -> Summary:
        """One piece, asked at most twice for a usable answer."""
        complaint = request.complaint
        expected = wording.language(row.text for row in request.messages if row.role == "user")
        for attempt in (1, 2):
            mode = _MODES[self._dialect.mode]
            choice = self._complete(request, known, piece, place, complaint, spent)
            try:
                found = reply.parse(reply.text_of(choice), takes_prose=mode == "plain" or attempt == 2)
                if attempt == 1:
                    reply.check_language(found, expected)
            except reply.Unusable as error:
                if attempt == 2:
                    raise
                complaint = error.reason
                continue
            return found.map(mask)
        raise AssertionError

    def _complete(
        self,
        request: SummaryRequest,
        known: Sequence[str],
        piece: Piece,
        place: tuple[int, int],
        complaint: str,
        spent: _Spent,
    ) -> Any:
        """One answer of the server; parameters it does not know are left out and not tried again."""
        openai = _library()
        client = self._open(openai)
        for _ in range(6):
            mode = _MODES[self._dialect.mode]
            system, user = _prompts(request, known, piece, place, complaint, mode)
            messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            try:
                spent.calls += 1
                answer: Any = client.chat.completions.create(
                    **self._options(request, mode), messages=messages
                )
            except openai.APITimeoutError as error:
                raise _failed(f"the model server gave no answer within {self.timeout:g} s", spent) from error
            except openai.APIConnectionError as error:
                raise _failed("the model server could not be reached", spent) from error
            except openai.APIStatusError as error:
                if not self._learn(error, mode):
                    raise _failed(
                        f"the model server answered with status {error.status_code}", spent
                    ) from error
                continue
            except openai.OpenAIError as error:
                raise _failed(f"the model client failed ({type(error).__name__})", spent) from error
            except ValueError as error:  # not JSON
                raise _failed("the model server's answer could not be read", spent) from error
            return _first_choice(answer, spent)
        raise _failed("the model server refuses every form of the request", spent)

    def _options(self, request: SummaryRequest, mode: str) -> dict[str, Any]:
        options: dict[str, Any] = {"model": self.model, self._dialect.limit_name: self._reserve(request)}
        if self._dialect.has_temperature:
            options["temperature"] = 0
        if mode == "json_schema":
            schema = {"name": "summary", "strict": True, "schema": reply.SCHEMA}
            options["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif mode == "json_object":
            options["response_format"] = {"type": "json_object"}
        return options

    def _learn(self, error: client_library.APIStatusError, mode: str) -> bool:
        """True where the request is worth repeating in the form the server's refusal asks for."""
        if error.status_code not in (400, 404, 405, 413, 415, 422, 501):
            return False
        told = f"{error.message} {error.body}".lower()
        if error.status_code == 413 or any(
            word in told
            for word in (
                "context length",
                "context size",
                "context_length",
                "too long",
                "too many tokens",
                "context window",
            )
        ):
            raise _TooLarge
        dialect = self._dialect
        with dialect.lock:
            if "max_tokens" in told or "max_completion_tokens" in told:
                other = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
                dialect.limit_name = other[dialect.limit_name]
                return True
            if "temperature" in told and dialect.has_temperature:
                dialect.has_temperature = False
                return True
            is_about_form = error.status_code != 404 and dialect.mode < len(_MODES) - 1
            if is_about_form and _MODES[dialect.mode] == mode:
                dialect.mode += 1
            return is_about_form

    def _open(self, openai: Any) -> client_library.OpenAI:
        if self._client is None:
            key = self._api_key or os.environ.get("OPENAI_API_KEY") or ("none" if self.base_url else None)
            if key is None:
                raise SummarizerFailed(
                    "OPENAI_API_KEY is not set, and no base URL of another server is given"
                )
            self._client = openai.OpenAI(
                api_key=key, base_url=self.base_url, timeout=self.timeout, max_retries=self._max_retries
            )
        return self._client


def _library() -> Any:
    try:
        import openai
    except ImportError as error:
        hint = "the summarizer model needs the extra 'openai': pip install 'pycontext-pg[openai]'"
        raise SummarizerFailed(hint) from error
    return openai


def _first_choice(answer: Any, spent: _Spent) -> Any:
    usage = getattr(answer, "usage", None)
    spent.prompt_tokens += getattr(usage, "prompt_tokens", None) or 0
    spent.completion_tokens += getattr(usage, "completion_tokens", None) or 0
    choices = getattr(answer, "choices", None)
    return choices[0] if choices else None


def _failed(reason: str, spent: _Spent) -> SummarizerFailed:
    return SummarizerFailed(
        reason,
        calls=spent.calls,
        prompt_tokens=spent.prompt_tokens,
        completion_tokens=spent.completion_tokens,
    )


def _prompts(
    request: SummaryRequest,
    known: Sequence[str],
    piece: Piece,
    place: tuple[int, int],
    complaint: str,
    mode: str,
) -> tuple[str, str]:
    """The system and the user message of one request."""
    users = [row.text for row in request.messages if row.role == "user"]
    dates = [row.created_at for row in request.messages if row.created_at]
    focus = one_line(mask(request.focus or ""))
    marker = new_marker("\n".join((piece.text, focus, *known)))
    values = {
        "marker": marker,
        "language": _LANGUAGES.get(wording.language(users), ""),
        "today": max(dates).strftime("%Y-%m-%d") if dates else "",
        "words": max(60, request.max_tokens * 6 // 10),
        "plain": mode == "plain",
        "known": known,
        "part": place[0],
        "parts": place[1],
        "transcript": piece.text,
        "focus": clip(focus, 1000),
        "complaint": complaint,
    }
    return _template("summarizer.system.j2").render(values).strip(), _template("summarizer.user.j2").render(
        values
    ).strip()


def _template(name: str) -> Template:
    from jinja2 import Environment, StrictUndefined

    source = (importlib.resources.files("pycontext") / "templates" / name).read_text(encoding="utf-8")
    environment = Environment(
        autoescape=False, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source)


def _known(request: SummaryRequest, limit: int) -> list[str]:
    """What the model may know and must not tell: rows that stay as they are, and the summary so far."""
    lines = [
        f"#{row.seq} {row.role} (stays in sight as it is): {clip(one_line(mask(row.text)), 300)}"
        for row in request.messages
        if row.kind == "message"
        and not row.is_told
        and row.role in ("user", "assistant")
        and row.text.strip()
    ][-4:]
    return lines + _brief(request.previous, limit, request.count)


def _brief(summary: Summary | None, limit: int, count: Count) -> list[str]:
    """What is pending first, then the newest of the rest, within `limit` tokens."""
    if summary is None:
        return []
    found: list[str] = []
    for label, text in _newest_first(summary):
        line = f"{label}: {clip(one_line(mask(text)), 300)}"
        limit -= count(line) + 3
        if limit < 0:
            break
        found.append(line)
    return found


def _newest_first(summary: Summary) -> Iterator[tuple[str, str]]:
    yield from (("pending", text) for text in reversed(summary.pending))
    if summary.active_task:
        yield "task", summary.active_task
    yield from (("decided", text) for text in reversed(summary.decisions))
    yield from (("resolved", text) for text in reversed(summary.resolved))
    if summary.notes:
        yield "notes", summary.notes


def _halves(piece: Piece) -> list[Piece]:
    middle = piece.text.find("\n", len(piece.text) // 2)
    middle = middle if middle > 0 else len(piece.text) // 2
    return [Piece(piece.text[:middle], piece.seqs), Piece(piece.text[middle:].lstrip("\n"), piece.seqs)]
