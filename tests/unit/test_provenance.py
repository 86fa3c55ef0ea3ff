"""Whose words a note is in."""

from __future__ import annotations

import pytest

from pycontext.summarizer.provenance import Sources, places
from pycontext.summary import SourceMessage

OLD, TIMED = 7, 1_648_000_000_123_456_789
"""A place that is a number of the table's, and one that is made of a time."""


@pytest.mark.parametrize("seq", [OLD, TIMED])
def test_a_wish_that_cites_a_tool_alone_is_nobodys(seq: int) -> None:
    row = SourceMessage(seq, "m", role="tool", text="rows: 12")
    assert places(f"as #{seq} says") == {seq}
    assert Sources([row]).is_forged(f"The user wants the report sent (#{seq}).")
