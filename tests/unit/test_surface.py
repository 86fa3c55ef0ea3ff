"""Sync and async have one surface: the same names, parameters, defaults, types and docstrings, awaited."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pycontext
from pycontext.tools import AsyncTools, Tools

PAIRS = [
    (pycontext.Database, pycontext.AsyncDatabase),
    (pycontext.Turn, pycontext.AsyncTurn),
    (Tools, AsyncTools),
]
AWAITED = {"__enter__": "__aenter__", "__exit__": "__aexit__"}

#: What stands on the async side for a type of the sync side.
TYPES = {
    "psycopg.Connection": "psycopg.AsyncConnection",
    "GivenExtractor": "GivenExtractor | GivenAsyncExtractor",
    "Summarizer": "AnySummarizer",
    **{name: f"Async{name}" for name in ("ConnectionPool", "Database", "Link", "Runner", "Turn", "Tools")},
}
_TYPES = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in TYPES))


def public(kind: type) -> Iterator[str]:
    """Names of what the class itself and our bases of it define for callers."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("pycontext")]
    for name in sorted({name for base in own for name in vars(base)}):
        if not name.startswith("_") or name in (*AWAITED, *AWAITED.values(), "__init__", "__contains__"):
            yield name


def signature(function: Callable[..., Any], *, translated: bool) -> list[tuple[str, Any, Any, str]]:
    """Parameters with kind, default and annotation, and what is returned, in the words of the async side."""
    found = inspect.signature(function)

    def typed(annotation: Any) -> str:
        text = str(annotation)
        return _TYPES.sub(lambda name: TYPES[name.group()], text) if translated else text

    rows = [(p.name, p.kind, p.default, typed(p.annotation)) for p in found.parameters.values()]
    return [*rows, ("return", None, None, typed(found.return_annotation))]


@pytest.mark.parametrize(("sync", "other"), PAIRS, ids=lambda kind: kind.__name__)
def test_the_names_are_the_same(sync: type, other: type) -> None:
    assert [
        AWAITED.get(name, name) for name in sorted(public(sync), key=lambda n: AWAITED.get(n, n))
    ] == list(public(other))


METHODS = [(sync, other, name) for sync, other in PAIRS for name in public(sync)]


@pytest.mark.parametrize(("sync", "other", "name"), METHODS, ids=lambda x: getattr(x, "__name__", x))
def test_a_method_is_the_same_awaited(sync: type, other: type, name: str) -> None:
    one, two = getattr(sync, name), getattr(other, AWAITED.get(name, name))
    if one is two:  # what does not touch the database is inherited by both
        return
    assert signature(two, translated=False) == signature(one, translated=True)
    makes = (
        re.search(r"\b(Turn|Tools)\b", str(inspect.signature(one).return_annotation)) or name == "__init__"
    )
    assert inspect.iscoroutinefunction(two) == (name == "__enter__" or not makes)
    if not name.startswith("__"):
        assert one.__doc__
        assert two.__doc__ == one.__doc__


def test_connect_and_aconnect_take_the_same() -> None:
    one, two = pycontext.connect, pycontext.aconnect
    assert signature(two, translated=False) == signature(one, translated=True)
