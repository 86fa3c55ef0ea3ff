"""The transcript that models read: in pieces that fit, and nothing of it is left out."""

from __future__ import annotations

import json

import pytest

from pycontext import tokens
from pycontext.summarizer.transcript import pieces
from pycontext.summary import SourceMessage

FILLS = ("lorem ipsum ", "包裹又迟到了没有人知道为什么", "QWxhZGRpbjpv", "🚚📦⏳", "a\n", "\u200b\u0301")


def count(text: str) -> int:
    return tokens.count(text, "o200k_base")


def call(number: int, **arguments: str) -> SourceMessage:
    function = {"name": "write", "arguments": json.dumps(arguments, ensure_ascii=False)}
    made = [{"id": f"c{number}", "type": "function", "function": function}]
    return SourceMessage(2 * number, f"m{number}", role="assistant", text="", tool_calls=made)


def result(number: int, text: str) -> SourceMessage:
    return SourceMessage(2 * number + 1, f"r{number}", role="tool", text=text, tool_call_id=f"c{number}")


@pytest.mark.parametrize("kind", ["user", "assistant", "system", "tool", "arguments"])
@pytest.mark.parametrize("fill", FILLS)
def test_every_row_is_whole_in_pieces_that_fit(kind: str, fill: str) -> None:
    """C9, C28: whoever said it, in whatever script, however much larger than a piece it is."""
    rows: list[SourceMessage] = []
    for number in range(1, 5):
        text = f"ZX{number}Q {fill * 250} ZY{number}Q"
        if kind == "arguments":
            rows += [call(number, path=f"f{number}", content=text), result(number, "ok")]
        elif kind == "tool":
            rows += [call(number), result(number, text)]
        else:
            rows.append(SourceMessage(number, f"m{number}", role=kind, text=text))
    for room in (256, 4000):
        parts = pieces(rows, room, count)
        assert max(count(part.text) for part in parts) <= room
        told = "\n".join(part.text for part in parts)
        assert [n for n in range(1, 5) if f"ZX{n}Q" not in told or f"ZY{n}Q" not in told] == []
