"""An extractor behind any server that speaks OpenAI's chat completions. Needs the extra `openai`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pycontext import values
from pycontext.extractor import ExtractorFailed, ExtractorRequest, ExtractorResult, Fact
from pycontext.masking import mask
from pycontext.models import ModelClient, ModelFailed, Spent, TooLarge, Unusable, json_in, rendered, text_of
from pycontext.summarizer.provenance import Sources
from pycontext.summarizer.transcript import Piece, new_marker, pieces
from pycontext.summary import SourceMessage, plain

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
        self._client = ModelClient(
            "extractor",
            model,
            base_url=base_url,
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
        )

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
        spent = Spent()
        rows = {row.seq: row for row in request.messages}
        room = int((self.window_tokens - _ANSWER_TOKENS - 1500) * 0.9)
        facts: list[Fact] = []
        try:
            for piece in pieces(request.messages, room, request.count):
                facts += self._ask(piece, {seq: rows[seq] for seq in piece.seqs}, spent)
        except (Unusable, ModelFailed) as error:
            raise _failed(error.reason, spent) from error
        except TooLarge as error:
            raise _failed("the model's window is too small for a piece of the chat", spent) from error
        return ExtractorResult(facts, self.model, spent.calls, spent.prompt_tokens, spent.completion_tokens)

    def _ask(self, piece: Piece, rows: Mapping[int, SourceMessage], spent: Spent) -> list[Fact]:
        complaint = ""
        for attempt in (1, 2):
            choice = self._complete(piece, complaint, spent)
            try:
                return _kept(_parsed(text_of(choice), set(rows)), rows)
            except Unusable as error:
                if attempt == 2:
                    raise
                complaint = error.reason
        raise AssertionError

    def _complete(self, piece: Piece, complaint: str, spent: Spent) -> Any:
        return self._client.complete(
            lambda _: _prompts(piece, complaint),
            name="facts",
            schema=SCHEMA,
            max_tokens=_ANSWER_TOKENS,
            spent=spent,
            is_again=bool(complaint),
        )


def _failed(reason: str, spent: Spent) -> ExtractorFailed:
    return ExtractorFailed(
        reason,
        calls=spent.calls,
        prompt_tokens=spent.prompt_tokens,
        completion_tokens=spent.completion_tokens,
    )


def _prompts(piece: Piece, complaint: str) -> list[dict[str, str]]:
    told = {"marker": new_marker(piece.text), "transcript": piece.text, "complaint": complaint}
    return rendered("extractor", told)


def _parsed(text: str, seqs: set[int]) -> list[Fact]:
    """The facts of an answer; raises Unusable where it is not what was asked for, or one fact is faulty."""
    value = json_in(text)
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
    if isinstance(seq, str) and re.fullmatch(r"#?[0-4]?\d{1,18}", seq):
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
    """Facts that somebody in the chat said: each cites the message that holds its values, and no tool's.

    A wish of the user's is one he uttered.
    """
    kept = []
    sources = Sources(rows.values())
    for fact in facts:
        strong = [value for value in values.find(fact.content) if value.is_strong and value.kind != "date"]
        exact = [
            value.text.casefold() for value in strong
        ]  # dates are written in full, not as they were said
        row = _source(fact.seq, exact, rows)
        if (
            row is not None
            and row.role in ("user", "assistant")
            and not sources.is_forged(fact.content, [row.seq])
        ):
            kept.append(Fact(row.seq, fact.content, fact.subject, fact.kind))
    return kept


def _source(seq: int, exact: Sequence[str], rows: Mapping[int, SourceMessage]) -> SourceMessage | None:
    """The cited message where it holds one of the values, or says anything and there are none; else the first
    that does."""
    cited = rows[seq]
    if not exact:
        return cited if cited.text.strip() else None
    if any(value in _said(cited) for value in exact):
        return cited
    return next((row for row in rows.values() if any(value in _said(row) for value in exact)), None)


def _said(row: SourceMessage) -> str:
    return row.text.casefold()
