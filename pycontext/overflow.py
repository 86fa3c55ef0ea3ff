"""What providers say when a prompt does not fit their model; told apart by code and text, not by class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pycontext.errors import ContextOverflow

#: Codes and types of OpenAI (and of servers that speak its protocol), and of llama.cpp.
_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})

_WORDS = re.compile(
    r"context_length_exceeded|maximum context length|exceeds? (?:the|this model's) (?:context window"
    r"|available context size)|prompt is too long|input length and `?max_tokens`? exceed context limit"
    r"|is longer than the maximum model length|exceeds the maximum number of tokens allowed"
    r"|input is too long for requested model|maximum prompt length is",
    re.IGNORECASE,
)
_COUNTS = (
    # Anthropic: "prompt is too long: 210000 tokens > 200000 maximum", and "…: 190000 + 20000 > 200000"
    re.compile(r"(?P<asked>\d+)(?: \+ (?P<more>\d+))?(?: tokens)? > (?P<limit>\d+)"),
    # OpenAI: "maximum context length is 8192 tokens. However, you requested 10000 tokens (9000 in …"
    # xAI: "maximum prompt length is 131072 but the request contains 136973 tokens"
    re.compile(r"length is (?P<limit>\d+) \D+?(?P<asked>\d+)(?P<more>)"),
    # llama.cpp: "request (10000 tokens) exceeds the available context size (8192 tokens)"
    re.compile(r"request \((?P<asked>\d+) tokens\)(?P<more>)\D+(?P<limit>\d+)"),
    # vLLM: "The decoder prompt (length 10000) is longer than the maximum model length of 8192"
    re.compile(r"length (?:of )?(?P<asked>\d+)\)?(?P<more>) is longer than the maximum\D+(?P<limit>\d+)"),
    # Google: "The input token count (1200293) exceeds the maximum number of tokens allowed (1048576)"
    re.compile(r"count \((?P<asked>\d+)\)(?P<more>) exceeds the maximum\D+(?P<limit>\d+)"),
)


def is_overflow(error: BaseException) -> bool:
    """True where a provider's error says that the prompt is longer than its model's context.

    Known are OpenAI's, Anthropic's, Google's, Bedrock's, xAI's, vLLM's and llama.cpp's words; True for a
    ContextOverflow, too.
    """
    if isinstance(error, ContextOverflow):
        return True
    if getattr(error, "status_code", None) == 429:  # too many tokens a minute is another matter
        return False
    return not _CODES.isdisjoint(_codes(error)) or _WORDS.search(_text(error)) is not None


def ratio(error: BaseException) -> float | None:
    """Of what was asked for the share that the model has room for, where the error tells."""
    text = _text(error).replace(",", "")
    for pattern in _COUNTS:
        if found := pattern.search(text):
            asked = int(found["asked"]) + int(found["more"] or 0)
            share = int(found["limit"]) / asked if asked else 1.0
            return share if 0 < share < 1 else None
    return None


def _codes(error: BaseException) -> set[Any]:
    body = getattr(error, "body", None)
    inner = body.get("error", body) if isinstance(body, Mapping) else None
    found = [getattr(error, "code", None), getattr(error, "type", None)]
    if isinstance(inner, Mapping):
        found += [inner.get("code"), inner.get("type")]
    return {code for code in found if isinstance(code, str)}


def _text(error: BaseException) -> str:
    return f"{error} {getattr(error, 'body', None) or ''}"
