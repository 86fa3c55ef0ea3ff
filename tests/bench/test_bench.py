"""The benchmark runs: a small one, whose ratios are noise and whose table is whole."""

from __future__ import annotations

import bench
import day_one
import pytest


def test_the_quick_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) >= 20
    for name in ("working_window", "start_turn", "compaction_plan", "append_message", "thread"):
        assert any(f"`{name}`, chat of" in line and "with a line" in line for line in table), name
    for result in (line.split("|") for line in table[2:]):
        assert float(result[3].replace(",", "")) > 0
        assert float(result[5]) > 0


@pytest.mark.long
def test_day_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert day_one.main(["--messages", "10000"]) == 0
    printed = capsys.readouterr().out
    assert "first window, the chat of 1,000" in printed
    assert "summarized, 1 piece" in printed
