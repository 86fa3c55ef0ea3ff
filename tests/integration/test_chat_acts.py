"""The acts through Python: what each returns, and the errors it raises."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

import pycontext
from pycontext.summarizer import SummaryRequest

Fill = Callable[..., list[pycontext.Message]]


@pytest.fixture
def names(fill: Fill) -> list[str]:
    """The ids of a chat `a` of 24 turns."""
    return [row.message_id for row in fill("a", 24)]


def last(memory: pycontext.Database, chat: str = "a") -> str:
    return str(memory.window(chat)[-1].content)


def test_regenerate_is_rewind_and_append(memory: pycontext.Database, names: list[str]) -> None:
    gone = memory.rewind("a", names[-2])
    assert [row.message_id for row in gone] == [names[-1]]
    memory.append("a", {"role": "assistant", "content": "another answer"})
    assert last(memory) == "another answer"
    assert memory.rewind("a", memory.thread("a")[-1].message_id) == []
    assert len(memory.rewind("a", "")) == len(names)
    memory.append("a", "afresh")
    assert last(memory) == "afresh"
    with pytest.raises(pycontext.BadMessage):
        memory.rewind("a", "nobody")


def test_a_rewind_while_the_model_writes_makes_the_summary_stale(
    memory: pycontext.Database, names: list[str], watched: object, dsn: str
) -> None:
    def meanwhile(request: SummaryRequest) -> None:
        with pycontext.connect(dsn) as other:
            other.rewind("a", names[-3])

    watched.meanwhile = meanwhile  # type: ignore[attr-defined]
    done = memory.compact("a")
    assert done.outcome == "failed"
    assert "stale" in str(done.reason)
    assert memory.status("a").line_id is None


def test_fork(memory: pycontext.Database, names: list[str]) -> None:
    new = uuid.uuid4()
    assert memory.fork("a", new, names[3]) == str(new)
    assert memory.fork("a", new, names[3]) == str(new)
    assert [row.message_id for row in memory.thread(new)] == names[:4]
    made = memory.fork("a", owner="ann", metadata={"why": "try"})
    assert memory.window(made)[-1].content == memory.window("a")[-1].content
    with pytest.raises(pycontext.MessageIdReused):
        memory.fork("a", made, names[2])


def test_redact_and_search_and_original(memory: pycontext.Database, names: list[str]) -> None:
    found = memory.search("a", "order qx-4003")
    assert [row.message_id for row in found] == [names[4]]
    assert "QX-4003" in found[0].preview
    assert "QX-4003" in memory.original("a", found[0].seq)[0].content
    assert memory.redact("a", names[4]).message_id == names[4]
    assert memory.search("a", "order qx-4003") == []
    assert memory.original("a", found[0].seq)[0].content == "[redacted]"
    assert [row.seq for row in memory.search("a", "parcel", 2)] == [48, 47]
    assert [row.seq for row in memory.search("a", "parcel", 2, before_seq=10)] == [9, 8]
    assert memory.original("a", 1000) == []


def test_drop_summary(memory: pycontext.Database, names: list[str]) -> None:
    done = memory.compact("a")
    assert done.summary_id is not None
    assert memory.drop_summary("a", done.summary_id).message_id == done.summary_id
    assert memory.status("a").line_id is None
    again = memory.compact("a")
    assert again.outcome == "summarized"
    assert again.summary_id != done.summary_id


def test_a_pin_stays_through_compaction(memory: pycontext.Database, names: list[str]) -> None:
    pin = memory.pin("a", names[6])
    assert (pin.seq, pin.unit_seq) == (7, 7)
    memory.compact("a")
    shown = {row.message_id: row for row in memory.window("a")}
    assert shown[names[6]].section == "pinned"
    assert shown[names[6]].content == memory.original("a", 7)[0].content
    assert memory.unpin("a", names[6]) is True
    assert memory.unpin("a", names[6]) is False
    assert names[6] not in {row.message_id for row in memory.window("a")}


def test_prompt_and_profile(memory: pycontext.Database, names: list[str]) -> None:
    assert memory.set_system_prompt("a", "Be kind.\x00") == 1
    assert memory.window("a")[0].content == "Be kind.�"
    assert memory.set_chat_profile("a", "long-1m") == 2
    assert memory.status("a").profile == "long-1m"
    memory.set_system_prompt("a", None)
    assert memory.window("a")[0].section != "system"
    with pytest.raises(pycontext.BadProfile):
        memory.set_chat_profile("a", "nobody")


def test_delete_and_forget(memory: pycontext.Database, names: list[str]) -> None:
    assert memory.delete_chat("a")["message"] == len(names)
    with pytest.raises(pycontext.NoSuchChat):
        memory.delete_chat("a")
    memory.create_chat("b", owner="ann")
    assert memory.forget_owner("ann")["chat"] == 1
    assert memory.forget_owner("ann")["chat"] == 0
