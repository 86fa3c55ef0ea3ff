"""An extractor behind any server that speaks OpenAI's chat completions. Needs the extra `openai`."""

from __future__ import annotations

import importlib.resources
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pycontext import values
from pycontext.extractor import ExtractorFailed, ExtractorRequest, ExtractorResult, Fact
from pycontext.masking import mask
from pycontext.summarizer.reply import Unusable, text_of
from pycontext.summarizer.transcript import Piece, new_marker, pieces
from pycontext.summary import SourceMessage, plain

_MODES = ("json_schema", "json_object", "plain")
_ANSWER_TOKENS = 2000
_MAX_LENGTH = 500

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "facts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "seq": {"type": "integer"},
                    "content": {"type": "string"},
                    "subject": {"type": ["string", "null"]},
                    "kind": {"type": "string"},
                },
                "required": ["seq", "content", "subject", "kind"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["facts"],
    "additionalProperties": False,
}


@dataclass
class _Spent:
    """What an extraction has cost so far."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def failed(self, reason: str) -> ExtractorFailed:
        return ExtractorFailed(
            reason,
            calls=self.calls,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
        )


@dataclass
class _Dialect:
    """What the server turned out to understand, learnt from its refusals."""

    mode: int = 0
    limit_name: str = "max_completion_tokens"
    has_temperature: bool = True
    seen: set[str] = field(default_factory=set)

    def learn(self, told: str) -> bool:
        """True where the request is worth repeating in another form."""
        if "max_tokens" in told and "limit" not in self.seen:
            self.seen.add("limit")
            other = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
            self.limit_name = other[self.limit_name]
            return True
        if "temperature" in told and self.has_temperature:
            self.has_temperature = False
            return True
        if self.mode < len(_MODES) - 1:
            self.mode += 1
            return True
        return False


class OpenAIExtractor:
    """Asks a model for the facts, in structured output.

    model: its name at the server. base_url: the server, None = the client library's own default. api_key:
    None = OPENAI_API_KEY; none is needed where base_url is given. window_tokens: the model's context window;
    what is larger is read in pieces, each message in at least one. timeout: seconds for one request.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        window_tokens: int = 32000,
        timeout: float = 30.0,
        max_retries: int = 1,
    ) -> None:
        if window_tokens < 4000:
            raise ValueError("window_tokens must be at least 4000")
        self.model = model
        self.window_tokens = window_tokens
        self.timeout = timeout
        self._base_url = base_url
        self._api_key = api_key
        self._max_retries = max_retries
        self._client: Any = None
        self._dialect = _Dialect(limit_name="max_tokens" if base_url else "max_completion_tokens")

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model

    def extract(self, request: ExtractorRequest) -> ExtractorResult:
        """The facts of the request's messages, each citing one of them.

        Raises `ExtractorFailed`: an answer with one faulty fact is asked for once more with the reason, then
        given up whole. A fact whose values no message of the piece holds is left out, and so is what only a
        tool said.
        """
        spent = _Spent()
        rows = {row.seq: row for row in request.messages}
        room = int((self.window_tokens - _ANSWER_TOKENS - 1500) * 0.9)
        facts: list[Fact] = []
        for piece in pieces(request.messages, room, request.count):
            facts += self._ask(piece, {seq: rows[seq] for seq in piece.seqs}, spent)
        return ExtractorResult(facts, self.model, spent.calls, spent.prompt_tokens, spent.completion_tokens)

    def _ask(self, piece: Piece, rows: Mapping[int, SourceMessage], spent: _Spent) -> list[Fact]:
        complaint = ""
        for attempt in (1, 2):
            try:
                return _kept(_parsed(text_of(self._complete(piece, complaint, spent)), set(rows)), rows)
            except Unusable as error:
                if attempt == 2:
                    raise spent.failed(error.reason) from error
                complaint = error.reason
        raise AssertionError

    def _complete(self, piece: Piece, complaint: str, spent: _Spent) -> Any:
        """One answer of the server; parameters it does not know are left out and not tried again."""
        openai = _library()
        client = self._open(openai)
        for _ in range(6):
            try:
                spent.calls += 1
                answer = client.chat.completions.create(
                    **self._options(), messages=_prompts(piece, complaint)
                )
            except openai.APITimeoutError as error:
                raise spent.failed(f"the model server gave no answer within {self.timeout:g} s") from error
            except openai.APIConnectionError as error:
                raise spent.failed("the model server could not be reached") from error
            except openai.APIStatusError as error:
                told = f"{error.message} {error.body}".lower()
                if error.status_code not in (400, 405, 415, 422, 501) or not self._dialect.learn(told):
                    raise spent.failed(
                        f"the model server answered with status {error.status_code}"
                    ) from error
                continue
            except openai.OpenAIError as error:
                raise spent.failed(f"the model client failed ({type(error).__name__})") from error
            except ValueError as error:  # not JSON
                raise spent.failed("the model server's answer could not be read") from error
            usage = getattr(answer, "usage", None)
            spent.prompt_tokens += getattr(usage, "prompt_tokens", None) or 0
            spent.completion_tokens += getattr(usage, "completion_tokens", None) or 0
            choices = getattr(answer, "choices", None)
            return choices[0] if choices else None
        raise spent.failed("the model server refuses every form of the request")

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"model": self.model, self._dialect.limit_name: _ANSWER_TOKENS}
        if self._dialect.has_temperature:
            options["temperature"] = 0
        mode = _MODES[self._dialect.mode]
        if mode == "json_schema":
            schema = {"name": "facts", "strict": True, "schema": SCHEMA}
            options["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif mode == "json_object":
            options["response_format"] = {"type": "json_object"}
        return options

    def _open(self, openai: Any) -> Any:
        if self._client is None:
            key = self._api_key or os.environ.get("OPENAI_API_KEY") or ("none" if self._base_url else None)
            if key is None:
                raise ExtractorFailed("OPENAI_API_KEY is not set, and no base URL of another server is given")
            self._client = openai.OpenAI(
                api_key=key, base_url=self._base_url, timeout=self.timeout, max_retries=self._max_retries
            )
        return self._client


def _library() -> Any:
    try:
        import openai
    except ImportError as error:
        hint = "the extractor model needs the extra 'openai': pip install 'pycontext-pg[openai]'"
        raise ExtractorFailed(hint) from error
    return openai


def _prompts(piece: Piece, complaint: str) -> list[dict[str, str]]:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=False, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    folder = importlib.resources.files("pycontext") / "templates"
    told = {"marker": new_marker(piece.text), "transcript": piece.text, "complaint": complaint}
    return [
        {
            "role": role,
            "content": environment.from_string((folder / f"extractor.{role}.j2").read_text(encoding="utf-8"))
            .render(told)
            .strip(),
        }
        for role in ("system", "user")
    ]


def _parsed(text: str, seqs: set[int]) -> list[Fact]:
    """The facts of an answer; raises Unusable where it is not what was asked for, or one fact is faulty."""
    fenced = re.search(r"```(?:json)?\s*([\s\S]*?)```", text)
    value: Any = None
    for part in (text, fenced[1] if fenced else "", text[text.find("{") : text.rfind("}") + 1]):
        try:
            value = json.loads(part, strict=False)
            break
        except (ValueError, RecursionError):
            continue
    found = value.get("facts") if isinstance(value, dict) else value
    if not isinstance(found, list):
        raise Unusable('the answer is not the JSON object {"facts": [...]} that was asked for')
    facts = []
    wrong = 0
    for item in found:
        fact = _fact(item)
        if fact is None or fact.seq not in seqs:
            wrong += 1
        else:
            facts.append(fact)
    if wrong:
        raise Unusable(f"{wrong} of {len(found)} facts cite no line of this part, or say nothing")
    return facts


def _fact(item: Any) -> Fact | None:
    if not isinstance(item, dict):
        return None
    seq = item.get("seq")
    if isinstance(seq, str) and re.fullmatch(r"#?\d{1,18}", seq):
        seq = int(seq.lstrip("#"))
    content = item.get("content")
    if isinstance(seq, bool) or not isinstance(seq, int) or not isinstance(content, str):
        return None
    content = mask(plain(content))
    if not any(map(str.isalnum, content)) or len(content) > _MAX_LENGTH:
        return None
    subject = item.get("subject")
    subject = plain(subject).casefold()[:200] if isinstance(subject, str) else None
    kind = item.get("kind")
    return Fact(seq, content, subject or None, plain(kind)[:60] if isinstance(kind, str) and kind else "fact")


def _kept(facts: Sequence[Fact], rows: Mapping[int, SourceMessage]) -> list[Fact]:
    """Facts that somebody in the chat said: each cites the message that holds its values, and no tool's."""
    kept = []
    for fact in facts:
        strong = [value for value in values.find(fact.content) if value.is_strong and value.kind != "date"]
        exact = [
            value.text.casefold() for value in strong
        ]  # dates are written in full, not as they were said
        row = _source(fact.seq, exact, rows)
        if row is not None and row.role in ("user", "assistant"):
            kept.append(Fact(row.seq, fact.content, fact.subject, fact.kind))
    return kept


def _source(seq: int, exact: Sequence[str], rows: Mapping[int, SourceMessage]) -> SourceMessage | None:
    """The cited message where it holds one of the values or there are none, else the first that does."""
    cited = rows[seq]
    if not exact or any(value in _said(cited) for value in exact):
        return cited
    return next((row for row in rows.values() if any(value in _said(row) for value in exact)), None)


def _said(row: SourceMessage) -> str:
    return row.text.casefold()
