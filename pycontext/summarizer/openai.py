"""A summarizer behind any server that speaks OpenAI's chat completions. Needs the extra `openai`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pycontext.masking import mask
from pycontext.models import FORMS, ModelClient, ModelFailed, Spent, TooLarge, Unusable, rendered, text_of
from pycontext.summarizer import SummarizerFailed, SummaryRequest, SummaryResult, reply, wording
from pycontext.summarizer.extractive import carried, is_called_off
from pycontext.summarizer.provenance import Sources
from pycontext.summarizer.transcript import Piece, new_marker, pieces
from pycontext.summary import Count, Summary, clip, merge, one_line

_LANGUAGES = {"ru": "Russian", "zh": "Chinese", "ja": "Japanese", "ko": "Korean"}
_KNOWN_SHARE = 8
"""At most an eighth of the window goes to what is known from before."""


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
        self.window_tokens = window_tokens
        self._client = ModelClient(
            "summarizer",
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

    def summarize(self, request: SummaryRequest) -> SummaryResult:
        """The segment of the request's messages, within `request.max_tokens`.

        Exact values and the ledger of what tools touched are carried by code beside the model's words. Raises
        `SummarizerFailed`: a faulty answer is asked for once more with the reason, then given up.
        """
        spent = Spent()
        try:
            segment = self._segment(request, spent)
        except (Unusable, ModelFailed) as error:
            raise _failed(error.reason, spent) from error
        except TooLarge as error:
            raise _failed("the model's window is too small for a piece of the chat", spent) from error
        return SummaryResult(segment, self.model, spent.calls, spent.prompt_tokens, spent.completion_tokens)

    def _segment(self, request: SummaryRequest, spent: Spent) -> Summary:
        known = _known(request, self._window(request) // _KNOWN_SHARE)
        parts = pieces(request.messages, self._room(request, known), request.count)
        if not parts:
            raise SummarizerFailed("there is nothing to summarize")
        sources = Sources(request.messages, request.previous.texts() if request.previous else ())
        told = Summary()
        for at, part in enumerate(parts, 1):
            told = self._fold(request, known, part, (at, len(parts)), told, sources, spent)
        kept = carried(request, told)
        if is_called_off(request.messages):
            told = replace(told, active_task=None)
        elif told.active_task and sources.is_forged(told.active_task, is_wish=True):
            told = replace(told, active_task=kept.active_task)
        return merge(kept, told, request.max_tokens, request.count, request.ledger_tokens)

    def _fold(
        self,
        request: SummaryRequest,
        known: Sequence[str],
        part: Piece,
        place: tuple[int, int],
        told: Summary,
        sources: Sources,
        spent: Spent,
    ) -> Summary:
        """`told` with one piece more. A piece the server finds too large is halved, down to a sixteenth."""
        waiting = [(part, 0)]
        while waiting:
            piece, depth = waiting.pop(0)
            before = [*known, *_brief(told, self._window(request) // _KNOWN_SHARE, request.count)]
            try:
                found = self._ask(request, before, piece, place, sources, spent)
            except TooLarge:
                if depth == 4:
                    raise
                waiting[:0] = [(half, depth + 1) for half in _halves(piece)]
                continue
            told = merge(told, found, request.max_tokens, request.count, request.ledger_tokens)
        return told

    def _room(self, request: SummaryRequest, known: Sequence[str]) -> int:
        """Tokens of transcript one request takes: the window less prompt, answer, and a tenth for other
        tokenizers."""
        prompts = _prompts(request, known, Piece("", ()), (1, 2), "x" * 400, FORMS[-1])
        prompt = request.count("\n".join(message["content"] for message in prompts))
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
        sources: Sources,
        spent: Spent,
    ) -> Summary:
        """One piece, asked at most twice for a usable answer."""
        complaint = request.complaint
        expected = wording.language(row.text for row in request.messages if row.role == "user")
        for attempt in (1, 2):
            form = self._client.form
            choice = self._complete(request, known, piece, place, complaint, spent)
            try:
                found = reply.parse(text_of(choice), takes_prose=form == "plain" or attempt == 2)
                found = reply.check_wishes(found, sources)
                if attempt == 1:
                    reply.check_language(found, expected)
            except Unusable as error:
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
        spent: Spent,
    ) -> Any:
        return self._client.complete(
            lambda form: _prompts(request, known, piece, place, complaint, form),
            name="summary",
            schema=reply.SCHEMA,
            max_tokens=self._reserve(request),
            spent=spent,
            is_again=bool(complaint),
        )


def _failed(reason: str, spent: Spent) -> SummarizerFailed:
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
    form: str,
) -> list[dict[str, str]]:
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
        "plain": form == "plain",
        "known": known,
        "part": place[0],
        "parts": place[1],
        "transcript": piece.text,
        "focus": clip(focus, 1000),
        "complaint": complaint,
    }
    return rendered("summarizer", values)


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
