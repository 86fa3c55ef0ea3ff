from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycontext.clean import clean

TEXT = st.text(alphabet=st.characters(codec=None, categories=None), max_size=20)  # type: ignore[arg-type]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("value", "cleaned"),
    [
        ("plain", "plain"),
        ("Привет 👋", "Привет 👋"),
        ("abc\x00def", "abc\ufffddef"),
        ("ok \ud83d tail", "ok \ufffd tail"),
        ("x\udc97", "x\ufffd"),
        ("\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        ("\udc00\ud800", "\ufffd\ufffd"),
        (
            {"a\x00": {"b": ["\udfff", {"c\ud800": "\x00"}]}},
            {"a\ufffd": {"b": ["\ufffd", {"c\ufffd": "\ufffd"}]}},
        ),
        (("a", "\x00"), ["a", "\ufffd"]),
        ([float("nan"), float("-inf"), 1.5, None, True], [None, None, 1.5, None, True]),
        ({1: "\x00"}, {1: "\ufffd"}),
    ],
)
def test_what_postgres_cannot_store_is_replaced_at_every_depth(value: Any, cleaned: Any) -> None:
    assert clean(value) == cleaned


def test_other_objects_are_left_alone() -> None:
    marker = object()
    assert clean([marker]) == [marker]


@given(JSON)
def test_anything_cleaned_is_storable_and_stays_as_it_is(value: Any) -> None:
    cleaned = clean(value)
    text = json.dumps(cleaned, ensure_ascii=False, allow_nan=False)
    text.encode("utf-8")
    assert "\\u0000" not in json.dumps(cleaned)
    assert clean(cleaned) == cleaned
