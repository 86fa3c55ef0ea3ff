"""What only the model was to read does not get out, whole or as a stream, and nothing else is touched."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pycontext
from pycontext import Scrubber, ascrub_stream, scrub, scrub_stream
from pycontext.scrub import NAMES

OPEN, CLOSE = "<memory-context>", "</memory-context>"
BLOCK = f"{OPEN}\nLikes tea.\n{CLOSE}"


def tag_at(text: str, at: int) -> tuple[tuple[str, bool], bool, int] | None:
    """Name and form, whether it closes, and end of the tag that begins at `at`: once more, by hand."""
    end = text.find(">", at, at + 128)
    if text[at : at + 1] != "<" or end < 0 or "<" in text[at + 1 : end]:
        return None
    body = text[at + 1 : end].lstrip(" \t\n\r\f\v\\")
    is_escaped = "\\" in text[at + 1 : end - len(body)]
    closes = body.startswith("/")
    if closes:
        body = body[1:].lstrip(" \t\n\r\f\v")
    for name in NAMES:
        if body[: len(name)].lower() == name and body[: len(name)].isascii():
            more = body[len(name) :]
            if not more or (more[0] in " \t\n\r\f\v" and not more.endswith("/")):
                return (name, is_escaped), closes, end + 1
    return None


def reference(text: str) -> str:
    """The rule, slowly: the first tag goes with all of its block, and so on until there is none."""
    at = 0
    while at < len(text):
        tag = tag_at(text, at)
        if tag is None:
            at += 1
            continue
        name, closes, end = tag
        depth = 0 if closes else 1
        while depth and end < len(text):
            inner = tag_at(text, end)
            if inner and inner[0] == name:
                depth += -1 if inner[1] else 1
            end = inner[2] if inner else end + 1
        text = text[:at] + (text[end:] if not depth else "")
        at = 0
    return text


PIECES = st.sampled_from(
    [
        *(f"<{slash}{name}{end}" for name in NAMES for slash in ("", "/") for end in (">", " >", " a='b'>")),
        *("< / memory-context\n>", "<MEMORY-CONTEXT>", "</Memory-Context>", "<memory-context/>"),
        *("<memory-contexts>", "<\\memory-context>", "<\\/memory-context>"),
        *("<memory-contex", "t>", "<mem", "ory-context>", "</mem"),
        *("<", ">", "/", "\\", " ", "\n", "<<", "a < b > c", "&lt;memory-context&gt;", "ſystem-note>"),
        *("Привет", "茶が好き", "🍵", "e\u0301", "\U0001f469\u200d\U0001f469", "text "),
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=12).map("".join)


def streamed(text: str, cuts: list[int]) -> str:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    scrubber = Scrubber()
    told = [scrubber.feed(text[a:b]) for a, b in pairwise(places)]
    return "".join(told) + scrubber.flush()


@given(TEXTS)
@example("<mem<memory-context></memory-context>ory-context>Likes tea")
@example("<mem</memory-context>ory-context>Likes tea</memory-context>.")
@example(f"a{OPEN}b{OPEN}c{CLOSE}d{CLOSE}e{CLOSE}f")
@settings(max_examples=400, deadline=None)
def test_the_rule_is_kept_and_no_tag_is_left(text: str) -> None:
    told = scrub(text)
    assert told == reference(text)
    assert scrub(told) == told
    assert not any(tag_at(told, at) for at in range(len(told)))


@given(TEXTS, st.lists(st.integers(0, 200), max_size=8))
@settings(max_examples=300, deadline=None)
def test_a_stream_cut_anywhere_is_the_whole_text(text: str, cuts: list[int]) -> None:
    whole = scrub(text)
    for cut in range(len(text) + 1):
        assert streamed(text, [cut]) == whole
    assert streamed(text, cuts) == whole
    assert streamed(text, list(range(len(text)))) == whole
    assert "".join(scrub_stream(list(text))) == whole


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"You like tea.{BLOCK} Shall I?", "You like tea. Shall I?"),
        (f"{BLOCK}{BLOCK}Hi", "Hi"),
        (f"a{OPEN}b{OPEN}c{CLOSE}d{CLOSE}e", "ae"),
        (f"a{OPEN}b</chat-summary>c{CLOSE}d", "ad"),
        (f"a{OPEN}b<\\/memory-context>c<\\memory-context>d{CLOSE}e", "ae"),
        (f"a<\\memory-context>b{CLOSE}c<\\/memory-context>d", "ad"),
        (f"a{OPEN}unterminated, to the end", "a"),
        (f"a{CLOSE}b", "ab"),
        ("a<chat-summary>\nNotes\n</chat-summary>b<SYSTEM-NOTE >n</ system-note>c", "abc"),
        ('a<memory-context source="recall">b</memory-context>c', "ac"),
        (f"Привет{OPEN}любит чай 🍵{CLOSE}, 茶", "Привет, 茶"),
    ],
)
def test_blocks_go(text: str, told: str) -> None:
    assert scrub(text) == told


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a < b, c > d, <<>>, </>",
        "<memory>, <memory-contexts>, <memory-context-2>, <amemory-context>, memory-context",
        "<memory-context",
        "x </memory-contex",
        "&lt;memory-context&gt;tea&lt;/memory-context&gt;",
        "<memory-context/> and <memory-context />",
        "<" + " " * 200 + "memory-context>",
        "if (a <b && c> d) { print('<div>') }",
    ],
)
def test_what_only_looks_like_a_tag_is_left_alone(text: str) -> None:
    assert scrub(text) == text
    assert streamed(text, list(range(len(text)))) == text


def test_text_is_told_as_soon_as_it_is_certain() -> None:
    scrubber = Scrubber()
    assert scrubber.feed("Hello ") == "Hello "
    assert scrubber.feed("a < b <mem") == "a < b "
    assert scrubber.feed("o>") == "<memo>"
    assert scrubber.feed(f"{OPEN}tea") == ""
    assert scrubber.feed(f"{CLOSE}, bye <") == ", bye "
    assert scrubber.flush() == "<"
    assert scrubber.removed == len(f"{OPEN}tea{CLOSE}")
    assert scrubber.feed("again") + scrubber.flush() == "again"


def test_an_async_stream() -> None:
    async def pieces() -> AsyncIterator[str | None]:
        for piece in ("Tea", None, "", "<memory-con", "text>likes", " tea</memory", "-context>", ".", "<"):
            yield piece

    async def told() -> list[str]:
        return [piece async for piece in ascrub_stream(pieces())]

    assert asyncio.run(told()) == ["Tea", ".", "<"]


def test_a_block_of_a_gigabyte_takes_no_room() -> None:
    chunk = "茶" * (1 << 20)
    dense = "<memory-contex<" * 10_000
    scrubber = Scrubber()
    assert scrubber.feed(f"a{OPEN}") == "a"
    tracemalloc.start()
    for _ in range(1024):
        assert scrubber.feed(chunk) == ""
    for _ in range(10):
        assert scrubber.feed(dense) == ""
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000
    assert scrubber.feed(f"{CLOSE}b") == "b"
    assert scrubber.removed == len(OPEN) + 1024 * len(chunk) + 10 * len(dense) + len(CLOSE)


def test_the_package_offers_it() -> None:
    assert pycontext.scrub(f"a{BLOCK}b") == "ab"
