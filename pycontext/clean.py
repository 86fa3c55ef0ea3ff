"""The one place where text that Postgres can't store is made storable."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

REPLACEMENT = "\ufffd"

# A surrogate pair that was decoded in two halves, a half without its other, or NUL.
_UNSTORABLE = re.compile(r"([\ud800-\udbff][\udc00-\udfff])|[\ud800-\udfff]|\x00")


def _mend(match: re.Match[str]) -> str:
    pair = match.group(1)
    if pair is None:
        return REPLACEMENT
    return pair.encode("utf-16-le", "surrogatepass").decode("utf-16-le")


def clean_text(text: str) -> str:
    """Return text with NUL and lone surrogates as U+FFFD; pairs in two halves become their character."""
    if text.isascii() and "\x00" not in text:
        return text
    return _UNSTORABLE.sub(_mend, text)


def clean(value: Any) -> Any:
    """Return value (anything json.dumps takes) as Postgres can store it, cleaned at every depth, keys too.

    NUL and lone surrogates become U+FFFD. Numbers that JSON does not have (nan, inf) become None.
    Mappings become dicts, lists and tuples become lists; any other object is returned as it is. Keys that
    differ only in characters that are replaced fall together: the last one stays.
    """
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        return {clean_text(key) if isinstance(key, str) else key: clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value
