"""The named acts: what each sets aside, erases or keeps; a chat's figures are those of its live rows."""

from __future__ import annotations

import json
import random
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

Connection = psycopg.Connection[Any]
Row = dict[str, Any]

TEXT = "the parcel left hub on Friday and nobody was at home so it went back to the shop"
WORDS = TEXT.split(" ")


def rows(db: Connection, query: str, *values: Any) -> list[Row]:
    with db.cursor(row_factory=dict_row) as cursor:
        cursor.execute(query.encode(), values)
        return cursor.fetchall()


def one(db: Connection, query: str, *values: Any) -> Any:
    record = db.execute(query.encode(), values).fetchone()
    assert record is not None
    return record[0]


def act(db: Connection, call: str, *values: Any) -> list[Row]:
    """Rows of a function."""
    return rows(db, f"select * from pycontext.{call}", *values)


def append(db: Connection, chat_id: str, *messages: Row) -> list[Row]:
    return act(db, "append_messages(%s, %s)", chat_id, json.dumps(messages))


def user(text: str, **more: Any) -> Row:
    return {"role": "user", "content": text, **more}


def assistant(text: str | None, *calls: str, arguments: str = '{"path": "a.txt"}', **more: Any) -> Row:
    message: Row = {"role": "assistant", "content": text, **more}
    if calls:
        message["tool_calls"] = [
            {"id": call, "type": "function", "function": {"name": "read_file", "arguments": arguments}}
            for call in calls
        ]
    return message


def tool(call: str, text: str, **more: Any) -> Row:
    return {"role": "tool", "tool_call_id": call, "content": text, **more}


def window(db: Connection, chat_id: str, budget: int | None = None, as_of: str | None = None) -> list[Row]:
    return act(db, "working_window(%s, %s, %s)", chat_id, budget, as_of)


def texts(db: Connection, chat_id: str, as_of: str | None = None) -> list[Any]:
    return [row["content"] for row in window(db, chat_id, as_of=as_of)]


def chat(db: Connection, chat_id: str) -> Row:
    return rows(db, "select * from pycontext.chat where chat_id = %s", chat_id)[0]


def summarize(db: Connection, chat_id: str, after: str, segment: Row, merged: Row | None = None) -> Row:
    """A summary after a message, as a client makes it."""
    summary, part = json.dumps(merged or segment), json.dumps(segment)
    return act(db, "put_summary(%s, %s, %s, %s)", chat_id, after, summary, part)[0]


def exchanges(count: int, first: int = 1) -> list[Row]:
    """Turns of two messages, u1 a1 u2 a2 …, of about 60 tokens each."""
    found = []
    for n in range(first, first + count):
        more = " ".join(WORDS * 3)
        found.append(user(f"question {n}: where is order QX-{4000 + n}? {more}", message_id=f"u{n}"))
        found.append(assistant(f"answer {n}: it is in hub B-{n}. {more}", message_id=f"a{n}"))
    return found


@pytest.fixture
def c(db: Connection) -> Connection:
    """A chat `c` of six turns."""
    act(db, "create_chat('c', 'Be brief.', owner => 'ann')")
    append(db, "c", *exchanges(6))
    return db


def refused(db: Connection, state: str, call: str, *values: Any) -> psycopg.errors.Diagnostic:
    """The call fails with that SQLSTATE, says detail and hint, and writes nothing."""
    before = snapshot(db)
    with pytest.raises(psycopg.Error) as raised:
        act(db, call, *values)
    assert raised.value.sqlstate == state, raised.value
    assert raised.value.diag.message_detail
    assert raised.value.diag.message_hint
    assert snapshot(db) == before
    return raised.value.diag


TABLES = ("chat", "message", "prompt", "act", "pass", "pin", "token_count", "fact", "profile")


def snapshot(db: Connection) -> list[Any]:
    query = "select coalesce(jsonb_agg(to_jsonb(t) - 'updated_at' order by t::text), '[]') from pycontext."
    return [one(db, f"{query}{table} t") for table in TABLES]


# Rewind


def test_rewind_sets_rows_and_lines_aside(c: Connection) -> None:
    summarize(c, "c", "a2", {"facts": ["early"]})
    late = summarize(c, "c", "a4", {"facts": ["late"]})
    gone = act(c, "rewind_chat('c', 'a3')")
    assert [row["message_id"] for row in gone] == ["u4", "a4", late["message_id"], "u5", "a5", "u6", "a6"]
    shown = texts(c, "c")
    assert shown[-1].startswith("answer 3")
    assert any("early" in str(text) for text in shown)
    assert not any("late" in str(text) for text in shown)
    assert [row["message_id"] for row in act(c, "thread('c')") if row["kind"] == "message"][-1] == "a3"
    append(c, "c", user("instead", message_id="u4b"))
    assert [row["content"] for row in window(c, "c")][-1] == "instead"
    assert one(c, "select seq from pycontext.message where message_id = 'u4b'") == 13


@pytest.mark.parametrize("budget", [200, 300, 400])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_replay_has_the_first_turn_of_its_time(c: Connection, budget: int, goes_on: bool) -> None:
    shown = window(c, "c", budget)
    assert [row["section"] for row in shown[:3]] == ["system", "head", "head"]
    before = [row["content"] for row in shown]
    act(c, "rewind_chat('c', 'u1')")
    if goes_on:
        append(c, "c", user("instead", message_id="n"))
    assert [row["content"] for row in window(c, "c", budget, as_of="a6")] == before


def test_a_line_replaces_nothing_of_what_is_pinned(c: Connection) -> None:
    """The pinned rows stay in sight beside it: with most of them pinned it would make the window larger."""
    for name in ("u2", "a2", "u3", "a3"):
        act(c, "pin_message('c', %s)", name)
    size = sum(row["tokens"] for row in window(c, "c", 100000))
    assert one(c, "select after_message_id from pycontext.compaction_plan('c', 700)") != "a3"
    told = refused(c, "PCX07", "put_summary('c', 'a3', %s)", json.dumps({"resolved": ["parcels " * 8]}))
    assert "larger" in str(told.message_primary)
    summarize(c, "c", "a5", {"resolved": ["parcels " * 8]})
    assert sum(row["tokens"] for row in window(c, "c", 100000)) < size


def test_rewind_keeps_what_was_set_aside_for_replay(c: Connection) -> None:
    before = texts(c, "c", as_of="a6")
    act(c, "rewind_chat('c', 'a2')")
    append(c, "c", user("instead", message_id="n"))
    assert texts(c, "c", as_of="a6") == before
    assert texts(c, "c", as_of="n") == texts(c, "c")
    again = append(c, "c", exchanges(6)[-1])[0]
    assert again["message_id"] == "a6"
    assert again["gone_act"] is not None
    assert texts(c, "c")[-1] == "instead", "an id that was set aside is never restored"


def test_counts_of_what_was_set_aside_change_no_figure(c: Connection) -> None:
    act(c, "rewind_chat('c', 'a3')")
    before = chat(c, "c")
    counts = json.dumps([{"seq": seq, "tokens": 500} for seq in range(7, 13)])
    assert one(c, "select pycontext.cache_token_counts('c', 'o200k_base', %s)", counts) == 6
    after = chat(c, "c")
    assert after["live_tokens"] == before["live_tokens"]
    assert after["excess_tokens"] == before["excess_tokens"]


def test_rewind_to_nothing_and_to_the_newest(c: Connection) -> None:
    assert act(c, "rewind_chat('c', 'a6')") == []
    assert chat(c, "c")["act_no"] == 0
    assert len(act(c, "rewind_chat('c', '')")) == 12
    figures = chat(c, "c")
    assert (figures["total_tokens"], figures["live_tokens"]) == (0, 0)
    assert (figures["request_seq"], figures["head_seq"]) == (None, None)
    append(c, "c", user("afresh"))
    assert texts(c, "c") == ["Be brief.", "afresh"]


def test_rewind_into_a_unit_opens_its_calls_again(db: Connection) -> None:
    act(db, "create_chat('c')")
    append(
        db, "c", user("go"), assistant(None, "A", "B", message_id="call"),
        tool("A", "one", message_id="first"), tool("B", "two"), assistant("done"),
    )  # fmt: skip
    assert len(act(db, "rewind_chat('c', 'first')")) == 2
    assert sorted(row["content"] for row in window(db, "c")[-2:]) == ["no result yet", "one"]
    assert list(chat(db, "c")["open_calls"]) == ["B"]
    append(db, "c", tool("B", "another"))
    assert texts(db, "c") == ["go", None, "one", "another"]


def test_rewind_below_a_true_result_shows_the_interim_one(db: Connection) -> None:
    act(db, "create_chat('c')")
    append(
        db, "c", user("pay"), assistant(None, "P", message_id="call"),
        tool("P", "waiting", metadata={"pending": True}, message_id="interim"), user("and?", message_id="u2"),
        tool("P", "approved"),
    )  # fmt: skip
    assert "approved" in texts(db, "c")
    assert "waiting" not in texts(db, "c")
    act(db, "rewind_chat('c', 'u2')")
    assert "waiting" in texts(db, "c")
    assert "approved" not in texts(db, "c")
    append(db, "c", tool("P", "refused"))
    assert "refused" in texts(db, "c")
    assert "waiting" not in texts(db, "c")


def test_rewind_past_a_reset_takes_it_along(c: Connection) -> None:
    act(c, "start_over('c', 'enough')")
    append(c, "c", user("new", message_id="n1"), assistant("yes", message_id="n2"))
    assert not any("question" in str(text) for text in texts(c, "c"))
    act(c, "rewind_chat('c', 'n1')")
    assert not any("question" in str(text) for text in texts(c, "c")), "the reset stands before n1"
    act(c, "rewind_chat('c', 'a6')")
    assert not any("question" in str(text) for text in texts(c, "c")), "it stands right after a6"
    act(c, "rewind_chat('c', 'u6')")
    assert texts(c, "c")[1].startswith("question 1")


def test_rewind_takes_the_facts_of_what_it_sets_aside(c: Connection) -> None:
    c.execute("update pycontext.chat set flushed_seq = 12 where chat_id = 'c'")
    c.execute(
        """
        insert into pycontext.fact (chat_id, fact_id, owner, seq, role, source, content, digest, stated_at)
        select 'c', 'f' || n, 'ann', n, 'user', 'flush', 'so', '', now() from unnest(array[4, 9]) n
        """
    )
    act(c, "rewind_chat('c', 'a3')")
    assert one(c, "select flushed_seq from pycontext.chat") == 6
    assert one(c, "select string_agg(fact_id, ',') from pycontext.fact where gone_at is null") == "f4"


@pytest.mark.parametrize("name", ["nobody", None, "s"])
def test_rewind_to_what_is_not_a_message(c: Connection, name: str | None) -> None:
    summary = summarize(c, "c", "a4", {"facts": ["x"]})["message_id"]
    refused(c, "PCX02", "rewind_chat('c', %s)", summary if name == "s" else name)


# System prompt


def test_a_new_prompt_is_an_act_and_replays_as_it_was(c: Connection) -> None:
    edits = chat(c, "c")["edit_no"]
    assert one(c, "select pycontext.set_system_prompt('c', 'Be long.')") == 1
    assert one(c, "select pycontext.set_system_prompt('c', 'Be long.')") == 1, "the same again is no act"
    append(c, "c", user("more", message_id="n"))
    assert texts(c, "c")[0] == "Be long."
    assert texts(c, "c", as_of="a6")[0] == "Be brief."
    assert texts(c, "c", as_of="n")[0] == "Be long."
    assert chat(c, "c")["act_no"] == 1
    assert chat(c, "c")["edit_no"] == edits


@pytest.mark.parametrize("blank", [None, "", "  \n"])
def test_a_blank_prompt_is_none(c: Connection, blank: str | None) -> None:
    act(c, "set_system_prompt('c', %s)", blank)
    first = window(c, "c")[0]
    assert first["section"] != "system"
    assert first["content"].startswith("question 1")
    tokens = sum(row["tokens"] for row in window(c, "c"))
    assert tokens + 3 == act(c, "window_status('c')")[0]["window_tokens"]
    append(c, "c", user("more", message_id="n"))
    act(c, "set_system_prompt('c', 'Back.')")
    assert texts(c, "c")[0] == "Back."
    assert texts(c, "c", as_of="a6")[0] == "Be brief."
    assert texts(c, "c", as_of="n")[0].startswith("question 1")


# Profiles


@pytest.mark.parametrize("size", [4_000, 8_000, 32_000, 128_000, 200_000, 1_000_000, 2_000_000])
@pytest.mark.parametrize("scale", ["1", "1.35", "4"])
def test_a_profile_of_any_window_is_sane(db: Connection, size: int, scale: str) -> None:
    act(db, "set_profile('mine', context_window => %s, token_scale => %s::numeric)", size, scale)
    act(db, "create_chat('c', 'Be brief.', 'mine')")
    append(db, "c", user("hello"))
    plan = act(db, "compaction_plan('c')")[0]
    assert 0 < plan["token_budget"] <= size / float(scale)
    profile = rows(db, "select * from pycontext.profile where profile = 'mine'")[0]
    assert profile["head_tokens"] <= plan["token_budget"] / 8 + 1
    assert plan["target_tokens"] < plan["trigger_tokens"] <= plan["token_budget"]


def test_a_profile_is_altered_by_name(db: Connection) -> None:
    act(db, "set_profile('mine', context_window => 64000, trigger_tokens => 30000)")
    act(db, "set_profile('mine', compaction_mode => 'warn')")
    mine = rows(db, "select * from pycontext.profile where profile = 'mine'")[0]
    assert (mine["context_window"], mine["trigger_tokens"], mine["compaction_mode"]) == (64000, 30000, "warn")
    act(db, "set_profile('mine', trigger_tokens => 0)")
    assert one(db, "select trigger_tokens from pycontext.profile where profile = 'mine'") is None


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ("context_window => 128000, response_reserve => 127000, memory_tokens => 1000", "response_reserve"),
        ("context_window => 0", "context_window"),
        ("context_window => -5", "context_window"),
        ("token_scale => 0", "token_scale"),
        ("token_scale => 'NaN'", "token_scale"),
        ("token_scale => -1", "token_scale"),
        ("encoding => 'p50k_base'", "encoding"),
        ("response_reserve => -1", "response_reserve"),
        ("memory_tokens => -1", "memory_tokens"),
        ("head_tokens => 100000", "head_tokens"),
        ("tail_ratio => 0.5", "tail_ratio"),
        ("tail_ratio => 0", "tail_ratio"),
        ("summary_ratio => 0.9", "summary_ratio"),
        ("trigger_ratio => 0.3", "trigger_ratio"),
        ("trigger_ratio => 1.1", "trigger_ratio"),
        ("trigger_tokens => 10", "trigger_tokens"),
        ("trigger_tokens => -10", "trigger_tokens"),
        ("image_tokens => 0", "image_tokens"),
        ("compaction_mode => 'maybe'", "compaction_mode"),
        ("summarizer_window => 10", "summarizer_window"),
        ("settle_seconds => -1", "settle_seconds"),
        ("flush_mode => 'never'", "flush_mode"),
    ],
)
def test_a_profile_that_cannot_work_is_refused(db: Connection, limits: str, named: str) -> None:
    for profile in ("mine", "default"):
        assert named in str(refused(db, "PCX06", f"set_profile('{profile}', {limits})").message_detail)


def test_every_fault_of_a_profile_is_named_at_once(db: Connection) -> None:
    detail = refused(db, "PCX06", "set_profile('mine', tail_ratio => 0.9, image_tokens => 0)").message_detail
    assert detail
    assert "tail_ratio" in detail
    assert "image_tokens" in detail


def test_a_profile_in_use_keeps_its_counts_and_room_for_the_tools(db: Connection) -> None:
    act(db, "set_profile('mine', context_window => 64000)")
    act(db, "create_chat('c', profile => 'mine')")
    act(db, "start_turn('c', '\"hello\"', tool_tokens => 20000)")
    refused(db, "PCX06", "set_profile('mine', encoding => 'cl100k_base')")
    refused(db, "PCX06", "set_profile('mine', image_tokens => 500)")
    assert "tools" in str(
        refused(db, "PCX06", "set_profile('mine', context_window => 16000)").message_primary
    )
    act(db, "set_profile('mine', context_window => 48000)")


def test_a_chat_moves_to_another_profile(c: Connection) -> None:
    before = texts(c, "c")
    act(c, "set_chat_profile('c', 'claude-200k')")
    assert float(chat(c, "c")["token_scale"]) == 1.35
    assert chat(c, "c")["act_no"] == 1
    assert texts(c, "c") == before
    act(c, "set_chat_profile('c', 'claude-200k')")
    assert chat(c, "c")["act_no"] == 1, "the same again is no act"
    act(c, "set_profile('other', encoding => 'cl100k_base', image_tokens => 400)")
    append(c, "c", user("", content=[{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]))
    c.execute("update pycontext.message set encoding = 'o200k_base' where seq <= 12")
    tokens = one(c, "select tokens from pycontext.message where seq = 13")
    act(c, "set_chat_profile('c', 'other')")
    assert one(c, "select count(*) from pycontext.message where encoding is not null") == 0
    assert one(c, "select tokens from pycontext.message where seq = 13") == tokens - 600
    act(c, "set_chat_profile('c', 'default')")
    assert one(c, "select count(*) from pycontext.message where encoding = 'o200k_base'") == 12
    assert one(c, "select tokens from pycontext.message where seq = 13") == tokens
    refused(c, "PCX06", "set_chat_profile('c', 'nobody')")


# Fork


def test_a_fork_has_the_rows_up_to_there_and_the_lines_inside(c: Connection) -> None:
    inside = summarize(c, "c", "a2", {"facts": ["early"]})
    act(c, "pin_message('c', 'u1')")
    summarize(c, "c", "a5", {"facts": ["late"]}, {"facts": ["early", "late"]})
    before = snapshot(c)
    act(c, "fork_chat('c', 'f', 'a4')")
    shown = act(c, "thread('f')")
    assert [row["message_id"] for row in shown if row["kind"] == "message"][-1] == "a4"
    lines = [row for row in shown if row["kind"] == "summary"]
    assert len(lines) == 1
    assert lines[0]["seq"] == 4
    assert lines[0]["message_id"] != inside["message_id"]
    assert lines[0]["content"] == inside["content"]
    assert [row["seq"] for row in act(c, "_live_pins('f')")] == [1]
    act(c, "delete_chat('f')")
    assert snapshot(c) == before, "the chat it comes from is as it was"


def test_a_fork_goes_its_own_way(c: Connection) -> None:
    assert one(c, "select pycontext.fork_chat('c', 'f', 'a3')") == "f"
    append(c, "f", user("there"))
    append(c, "c", user("here"))
    assert texts(c, "f")[-1] == "there"
    assert texts(c, "c")[-1] == "here"
    assert texts(c, "f")[:-1] == texts(c, "c")[:7]
    assert one(c, "select owner from pycontext.chat where chat_id = 'f'") == "ann"
    made = one(c, "select pycontext.fork_chat('c')")
    assert texts(c, made) == texts(c, "c")


def test_a_fork_retried_is_the_same_and_a_taken_id_is_refused(c: Connection) -> None:
    act(c, "fork_chat('c', 'f', 'a3')")
    before = snapshot(c)
    act(c, "fork_chat('c', 'f', 'a3')")
    assert snapshot(c) == before
    refused(c, "PCX03", "fork_chat('c', 'f', 'a4')")
    act(c, "create_chat('g')")
    refused(c, "PCX03", "fork_chat('c', 'g')")
    refused(c, "PCX02", "fork_chat('c', 'c')")
    refused(c, "PCX02", "fork_chat('c', '')")
    refused(c, "PCX02", "fork_chat('c', 'h', 'nobody')")
    refused(c, "PCX01", "fork_chat('nobody', 'h')")


def test_a_fork_replays_as_the_chat_did(c: Connection) -> None:
    summarize(c, "c", "a2", {"facts": ["early"]})
    append(c, "c", *exchanges(2, 7))
    act(c, "set_system_prompt('c', 'Be long.')")
    append(c, "c", *exchanges(1, 9))
    act(c, "fork_chat('c', 'f')")
    for at in ("a1", "a6", "a8", "u9"):
        assert texts(c, "f", at) == texts(c, "c", at)


# Redaction


def everything(db: Connection) -> str:
    """All that is stored, as text."""
    return json.dumps(snapshot(db), default=str)


SECRET = "zebra-7319"


@pytest.fixture
def told(db: Connection) -> Connection:
    """A chat where a secret went everywhere: message, call, stub, two summaries, counts, facts."""
    act(db, "create_chat('c', 'Be brief.', owner => 'ann')")
    append(
        db, "c", *exchanges(2), user(f"the word is {SECRET} " + " ".join(WORDS * 4), message_id="s"),
        assistant("noted " + " ".join(WORDS), message_id="b"), *exchanges(1, 3),
        assistant(None, "A", arguments=json.dumps({"path": SECRET}), message_id="call"),
        tool("A", " ".join(WORDS * 12), message_id="result"), *exchanges(3, 5),
    )  # fmt: skip
    db.execute("select pycontext.cache_token_counts('c', 'cl100k_base', '[{\"seq\": 5, \"tokens\": 77}]')")
    summarize(db, "c", "a3", {"facts": [f"word {SECRET}"], "resolved": ["one"]})
    merged = {"facts": [f"word {SECRET}", "hub B-5"], "resolved": ["one", "two"], "artifacts": [SECRET]}
    summarize(db, "c", "a6", {"facts": ["hub B-5"], "resolved": ["two"], "artifacts": [SECRET]}, merged)
    db.execute(
        "insert into pycontext.fact (chat_id, fact_id, owner, seq, role, source, content, digest, stated_at) "
        f"values ('c', 'f', 'ann', 5, 'user', 'flush', '{SECRET}', '', now())"
    )
    return db


def test_a_redacted_message_is_nowhere(told: Connection) -> None:
    assert SECRET in everything(told)
    edits = chat(told, "c")["edit_no"]
    for name in ("s", "call"):
        row = act(told, "redact_message('c', %s)", name)[0]
        assert row["redacted_act"] is not None
    assert SECRET not in everything(told)
    assert chat(told, "c")["edit_no"] == edits + 2
    assert one(told, "select count(*) from pycontext.token_count where seq = 5") == 0
    assert one(told, "select length(digest) from pycontext.message where message_id = 's'") == 0
    kept = [row["message_id"] for row in act(told, "thread('c')") if row["kind"] == "message"]
    assert {"s", "call", "result"} <= set(kept)


def test_the_lines_stand_and_tell_what_the_other_segments_hold(told: Connection) -> None:
    act(told, "redact_message('c', 's')")
    first, second = rows(told, "select * from pycontext.message where line_no > 0 order by seq")
    assert first["gone_act"] is None
    assert first["segment"] is None
    assert second["segment"] is not None
    assert "erased" in first["content"]
    assert "hub B-5" in second["content"]
    assert "- two" in second["content"]
    assert "- one" not in second["content"]
    assert SECRET in second["content"], "its own segment still says what the call touched"
    act(told, "redact_message('c', 'call')")
    assert SECRET not in everything(told)
    status = act(told, "window_status('c')")[0]
    assert status["line_id"] == second["message_id"]


def test_a_line_before_the_redacted_message_keeps_its_text(told: Connection) -> None:
    before = rows(told, "select * from pycontext.message where line_no > 0 order by seq")
    act(told, "redact_message('c', 'call')")
    first, second = rows(told, "select * from pycontext.message where line_no > 0 order by seq")
    assert first == before[0]
    assert f"word {SECRET}" in second["content"], "merged from the line before"
    assert "- one" in second["content"]
    assert "hub B-5" not in second["content"]


def test_a_redacted_message_comes_back_flagged_never_restored(told: Connection) -> None:
    act(told, "redact_message('c', 's')")
    before = snapshot(told)
    for text in (f"the word is {SECRET}", "something else"):
        row = append(told, "c", user(text, message_id="s"))[0]
        assert row["redacted_act"] is not None
        assert row["content"] == "[redacted]"
    act(told, "redact_message('c', 's')")
    assert snapshot(told) == before, "again is once"
    assert act(told, "message_original('c', 5)")[0]["metadata"] == {"redacted": True}


def test_what_was_set_aside_can_be_redacted_too(c: Connection) -> None:
    append(c, "c", user(SECRET * 3, message_id="s"), assistant("so", message_id="t"))
    act(c, "rewind_chat('c', 'a6')")
    append(c, "c", *exchanges(1, 7))
    totals = rows(c, "select seq, running_total from pycontext.message where gone_act is null order by seq")
    act(c, "redact_message('c', 's')")
    assert SECRET not in everything(c)
    assert (
        rows(c, "select seq, running_total from pycontext.message where gone_act is null order by seq")
        == totals
    )
    assert window(c, "c", as_of="t")[-2]["content"] == "[redacted]"


def test_a_dropped_line_is_erased_as_well(told: Connection) -> None:
    for row in rows(told, "select message_id from pycontext.message where line_no > 0"):
        act(told, "drop_summary('c', %s)", row["message_id"])
    act(told, "redact_message('c', 's')")
    act(told, "redact_message('c', 'call')")
    assert SECRET not in everything(told)


def test_a_segment_after_a_reset_is_not_touched(told: Connection) -> None:
    act(told, "start_over('c')")
    append(told, "c", *exchanges(4, 9))
    line = summarize(told, "c", "a11", {"facts": ["clean"]})
    act(told, "redact_message('c', 's')")
    assert rows(told, "select content from pycontext.message where message_id = %s", line["message_id"])[
        0
    ] == {"content": line["content"]}


@pytest.mark.parametrize("name", ["nobody", None, ""])
def test_redaction_of_what_is_not_a_message(c: Connection, name: str | None) -> None:
    refused(c, "PCX02", "redact_message('c', %s)", name)


# Dropped lines


def test_a_dropped_line_gives_way_to_the_one_before(c: Connection) -> None:
    summarize(c, "c", "a2", {"facts": ["early"]})
    late = summarize(c, "c", "a4", {"facts": ["late"]}, {"facts": ["early", "late"]})
    edits = chat(c, "c")["edit_no"]
    gone = act(c, "drop_summary('c', %s)", late["message_id"])[0]
    assert gone["gone_act"] == chat(c, "c")["act_no"]
    assert chat(c, "c")["edit_no"] == edits + 1
    shown = [str(text) for text in texts(c, "c")]
    assert any("early" in text for text in shown)
    assert not any("late" in text for text in shown)
    act(c, "drop_summary('c', %s)", late["message_id"])
    assert chat(c, "c")["edit_no"] == edits + 1, "again is once"
    again = summarize(c, "c", "a4", {"facts": ["better"]})
    assert again["message_id"] != late["message_id"]
    assert any("better" in str(text) for text in texts(c, "c"))


def test_a_reset_is_never_removed(c: Connection) -> None:
    reset = act(c, "start_over('c')")[0]
    refused(c, "PCX02", "drop_summary('c', %s)", reset["message_id"])
    refused(c, "PCX02", "drop_summary('c', 'a1')")
    refused(c, "PCX02", "drop_summary('c', null)")


def test_a_call_whose_result_came_after_the_line_is_closed_when_the_line_goes(db: Connection) -> None:
    act(db, "create_chat('c')")
    append(db, "c", *exchanges(3), assistant("so", "A", message_id="call"), *exchanges(1, 4))
    line = summarize(db, "c", "a4", {"facts": ["x"]})
    append(db, "c", tool("A", "late"))
    act(db, "drop_summary('c', %s)", line["message_id"])
    calls = [row for row in window(db, "c") if row["tool_calls"]]
    results = [row for row in window(db, "c") if row["role"] == "tool"]
    assert (len(calls), len(results)) == (1, 1), "every call is followed by a result"


# Pins


def test_a_pin_is_an_act_and_again_is_once(c: Connection) -> None:
    pin = act(c, "pin_message('c', 'u2')")[0]
    assert (pin["seq"], pin["gone_act"]) == (3, None)
    assert chat(c, "c")["act_no"] == 1
    assert act(c, "pin_message('c', 'u2')")[0] == pin
    assert chat(c, "c")["act_no"] == 1
    assert chat(c, "c")["pins"] == 1
    assert [row["message_id"] for row in act(c, "_live_pins('c')")] == ["u2"]
    assert act(c, "unpin_message('c', 'u2')")[0]["gone_act"] == 2
    assert act(c, "unpin_message('c', 'u2')")[0]["seq"] is None
    assert chat(c, "c")["pins"] == 0
    assert act(c, "_live_pins('c')") == []
    assert [row["message_id"] for row in act(c, "_live_pins('c', 1)")] == ["u2"]
    act(c, "pin_message('c', 'u2')")
    assert chat(c, "c")["pins"] == 1


def test_a_pin_takes_its_unit(db: Connection) -> None:
    act(db, "create_chat('c')")
    append(
        db,
        "c",
        user("go"),
        assistant(None, "A", "B"),
        tool("A", "one", message_id="r"),
        tool("B", "two"),
        user("so"),
    )
    act(db, "pin_message('c', 'r')")
    pin = act(db, "_live_pins('c')")[0]
    assert (pin["unit_seq"], pin["to_seq"]) == (2, 4)
    assert pin["tokens"] == one(db, "select sum(tokens) from pycontext.message where unit_seq = 2")


def test_pins_leave_room_for_the_newest_turn(db: Connection) -> None:
    act(db, "create_chat('c', 'Be brief.', 'small-8k')")
    append(db, "c", *[user(" ".join(WORDS * 60), message_id=f"u{n}") for n in range(8)], user("so?"))
    budget = act(db, "compaction_plan('c')")[0]["token_budget"]
    pinned = int(budget / one(db, "select tokens from pycontext.message where seq = 1"))
    assert 2 <= pinned < 8
    for n in range(pinned):
        act(db, "pin_message('c', %s)", f"u{n}")
    assert str(budget) in str(refused(db, "PCX05", "pin_message('c', %s)", f"u{pinned}").message_detail)
    assert chat(db, "c")["pins"] == pinned
    assert sum(row["tokens"] for row in act(db, "_live_pins('c')")) < budget
    act(db, "unpin_message('c', 'u0')")
    act(db, "pin_message('c', %s)", f"u{pinned}")


def test_pins_go_with_their_message_and_stay_behind_a_reset(c: Connection) -> None:
    act(c, "pin_message('c', 'u2')")
    act(c, "pin_message('c', 'u5')")
    act(c, "rewind_chat('c', 'a3')")
    assert [row["message_id"] for row in act(c, "_live_pins('c')")] == ["u2"]
    assert chat(c, "c")["pins"] == 1
    act(c, "start_over('c')")
    assert act(c, "_live_pins('c')") == []
    refused(c, "PCX02", "pin_message('c', 'u1')")
    refused(c, "PCX02", "pin_message('c', 'u5')")
    refused(c, "PCX02", "pin_message('c', null)")


# Deletion


def test_delete_chat_leaves_no_row(told: Connection) -> None:
    act(told, "create_chat('other')")
    append(told, "other", user("hello"))
    act(told, "pin_message('c', 's')")
    counts = {row["relation"]: row["rows"] for row in act(told, "delete_chat('c')")}
    assert counts["chat"] == 1
    assert counts["message"] == 18
    assert counts["pin"] == 1
    assert counts["fact"] == 1
    for table in rows(
        told,
        "select k.oid::regclass::text as name from pg_class k join pg_attribute a on a.attrelid = k.oid "
        "where a.attname = 'chat_id' and k.relkind = 'r' and k.relnamespace = 'pycontext'::regnamespace",
    ):
        assert one(told, f"select count(*) from {table['name']} where chat_id = 'c'") == 0
        assert table["name"].split(".")[-1] in counts
    assert texts(told, "other") == ["hello"]
    refused(told, "PCX01", "delete_chat('c')")
    act(told, "create_chat('c')")
    assert append(told, "c", user("anew", message_id="u1"))[0]["seq"] == 1


def test_forget_owner_takes_all_of_one_owner(told: Connection) -> None:
    act(told, "create_chat('d', owner => 'ann')")
    act(told, "create_chat('e', owner => 'ann', tenant => 'acme')")
    act(told, "create_chat('f', owner => 'bob')")
    counts = {row["relation"]: row["rows"] for row in act(told, "forget_owner('ann')")}
    assert counts["chat"] == 2
    assert counts["fact"] == 1
    assert {row["chat_id"] for row in rows(told, "select chat_id from pycontext.chat")} == {"e", "f"}
    assert {row["relation"]: row["rows"] for row in act(told, "forget_owner('ann', 'acme')")}["chat"] == 1
    assert {row["rows"] for row in act(told, "forget_owner('nobody')")} == {0}
    refused(told, "PCX02", "forget_owner(null)")


# Originals and search


def test_the_original_is_what_was_stored(told: Connection) -> None:
    row = act(told, "message_original('c', 5)")[0]
    assert SECRET in row["content"]
    assert row["message_id"] == "s"
    assert act(told, "message_original('c', 999)") == []
    assert [row["kind"] for row in act(told, "message_original('c', 8)")] == ["message", "summary"]
    act(told, "start_over('c')")
    append(told, "c", user("new"))
    assert act(told, "message_original('c', 5)")
    assert not act(told, "message_original('c', 5, true)")
    assert act(told, "message_original('c', 17, for_model => true)")
    refused(told, "PCX01", "message_original('nobody', 1)")


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("Где мой заказ №77? Счёт ОПЛАЧЕН вчера", "счет оплачен"),
        ("Where is my ORDER? Refund it", "refund order"),
        ("我的订单在哪里？退款政策是什么", "退款政策"),
        ("请问　这个订单　可以退款吗", "订单　退款"),
        ("注文番号はどこですか", "注文番号"),
        ("100% of a_b \\ 'quoted'", "100% a_b \\ 'quoted'"),
        ("Ünïcode ÉTÉ", "été"),
    ],
)
def test_search_finds_words_of_any_script(c: Connection, text: str, query: str) -> None:
    append(c, "c", user(text, message_id="it"), assistant("well"))
    found = act(c, "search_thread('c', %s)", query)
    assert [row["message_id"] for row in found] == ["it"]
    assert found[0]["preview"]
    assert len(found[0]["preview"]) < 200


def test_search_is_bounded_newest_first_and_for_one_chat(c: Connection) -> None:
    act(c, "create_chat('d')")
    append(c, "d", user("question QX-4001 of another chat"))
    assert [row["message_id"] for row in act(c, "search_thread('c', 'question', 2)")] == ["u6", "u5"]
    assert [row["message_id"] for row in act(c, "search_thread('c', 'question', 2, 9)")] == ["u4", "u3"]
    assert [row["message_id"] for row in act(c, "search_thread('c', 'qx-4001')")] == ["u1"]
    assert act(c, "search_thread('c', 'question nowhere')") == []
    append(c, "c", assistant(None, "A", arguments='{"path": "src/needle.py"}', message_id="call"))
    assert [row["message_id"] for row in act(c, "search_thread('c', 'needle.py')")] == ["call"]
    act(c, "rewind_chat('c', 'a5')")
    assert act(c, "search_thread('c', 'QX-4006')") == []
    act(c, "start_over('c')")
    assert act(c, "search_thread('c', 'QX-4001', for_model => true)") == []
    for blank in ("", "  ", None):
        refused(c, "PCX02", "search_thread('c', %s)", blank)
    refused(c, "PCX01", "search_thread('nobody', 'x')")


def test_search_goes_through_long_chats(db: Connection) -> None:
    act(db, "create_chat('c')")
    append(db, "c", user("needle", message_id="n"), *[user(f"hay {n}") for n in range(700)])
    assert [row["message_id"] for row in act(db, "search_thread('c', 'needle')")] == ["n"]


# Adopted chats


@pytest.fixture
def adopted(db: Connection) -> Connection:
    """The product's own table as the home of chat 7."""
    db.execute(
        """
        create table public.said (id bigint primary key, chat_id bigint, role text, content text,
            tool_calls jsonb, tool_call_id text, created_at timestamptz default now() - interval '1 day');
        create view public.said_v as select chat_id, id as seq, id as message_id, role, content, tool_calls,
            tool_call_id, created_at from public.said;
        select pycontext.register_source('said', 'public.said_v', true)
        """
    )
    for n, message in enumerate([*exchanges(5), assistant(None, "A"), tool("A", "result"), user("so?")]):
        db.execute(
            "insert into public.said select %s, 7, role, content, tool_calls, tool_call_id "
            "from jsonb_populate_record(null::public.said, %s)",
            (101 + n, json.dumps(message)),
        )
    return db


def test_the_product_writes_its_own_table(adopted: Connection) -> None:
    for call in ("rewind_chat('7', '104')", "redact_message('7', '104')", "append_message('7', 'user', 'x')"):
        diagnostic = refused(adopted, "PCX09", call)
        assert "own table" in str(diagnostic.message_primary)


def test_every_other_act_works_on_adopted_chats(adopted: Connection) -> None:
    act(adopted, "set_system_prompt('7', 'Be brief.')")
    assert texts(adopted, "7")[0] == "Be brief."
    line = summarize(adopted, "7", "106", {"facts": ["early"]})
    act(adopted, "pin_message('7', '102')")
    act(adopted, "pin_message('7', '112')")
    pins = act(adopted, "_live_pins('7')")
    assert [(row["unit_seq"], row["to_seq"]) for row in pins] == [(102, 102), (111, 112)]
    assert all(row["tokens"] > 0 for row in pins)
    act(adopted, "unpin_message('7', '102')")
    act(adopted, "set_chat_profile('7', 'long-1m')")
    act(adopted, "fork_chat('7', 'mine')")
    mine, theirs = (
        [(row["role"], row["content"]) for row in window(adopted, name) if row["section"] != "summary"]
        for name in ("mine", "7")
    )
    assert mine == theirs
    assert any("early" in str(text) for text in texts(adopted, "mine"))
    assert [row["unit_seq"] for row in act(adopted, "_live_pins('mine')")] == [11]
    append(adopted, "mine", user("on"))
    assert [row["message_id"] for row in act(adopted, "search_thread('7', 'QX-4002')")] == ["103"]
    assert act(adopted, "message_original('7', 104)")[0]["content"].startswith("answer 2")
    act(adopted, "drop_summary('7', %s)", line["message_id"])
    assert not any("early" in str(text) for text in texts(adopted, "7"))
    assert {row["relation"]: row["rows"] for row in act(adopted, "delete_chat('7')")}["chat"] == 1
    assert len(texts(adopted, "7")) == 13
    assert one(adopted, "select count(*) from public.said") == 13


@pytest.mark.parametrize(
    "call",
    [
        "rewind_chat('nobody', 'x')", "set_system_prompt('nobody', 'x')",
        "set_chat_profile('nobody', 'default')", "fork_chat('nobody')", "redact_message('nobody', 'x')",
        "drop_summary('nobody', 'x')", "pin_message('nobody', 'x')", "unpin_message('nobody', 'x')",
        "delete_chat('nobody')", "message_original('nobody', 1)", "search_thread('nobody', 'x')",
    ],
)  # fmt: skip
def test_an_unknown_chat_is_named(db: Connection, call: str) -> None:
    assert "nobody" in str(refused(db, "PCX01", call).message_detail)


# The chat's figures after random acts


class Moves:
    """A chat under random moves, and what a fresh replay of its live rows makes of them."""

    def __init__(self, db: Connection, seed: int, profile: str) -> None:
        self.db, self.random, self.n, self.profile = db, random.Random(seed), 0, profile
        act(db, "create_chat('c', 'Be brief.', %s)", profile)

    def text(self) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.choice([0, 3, 40, 80])))

    def step(self) -> str:
        names = ["talk"] * 8 + ["summarize", "rewind", "redact", "drop", "reset", "pin", "move", "prune"]
        name = self.random.choice(names)
        getattr(self, name)()
        return name

    def live(self) -> list[Row]:
        return rows(
            self.db,
            "select * from pycontext.message where chat_id = 'c' and gone_act is null order by seq, line_no",
        )

    def talk(self) -> None:
        self.n += 1
        figures = chat(self.db, "c")
        calls_open = [call for call in waiting(figures) if "#" not in call]
        name = {"message_id": f"m{self.n}"}
        choice = self.random.random()
        if calls_open and choice < 0.5:
            pending = {"metadata": {"pending": True}} if self.random.random() < 0.3 else {}
            append(self.db, "c", tool(self.random.choice(calls_open), self.text() * 3, **pending, **name))
        elif choice < 0.6:
            calls = self.random.sample(["A", "B", "C", "D"], self.random.randint(1, 3))
            arguments = json.dumps({"path": self.text()})
            append(self.db, "c", assistant(self.text() or None, *calls, arguments=arguments, **name))
        elif choice < 0.7:
            append(self.db, "c", tool("unknown", self.text(), **name))
        elif choice < 0.75:
            append(self.db, "c", user(self.text(), metadata={"injected": True}, **name))
        elif choice < 0.9:
            append(self.db, "c", user(self.text(), **name))
        else:
            append(self.db, "c", assistant(self.text(), **name))

    def summarize(self) -> None:
        plan = act(self.db, "compaction_plan('c')")[0]
        if plan["after_message_id"] and (plan["covered_tokens"] or 0) > 120:
            segment = {"facts": [f"fact {self.n}"], "notes": "so it was"}
            summarize(self.db, "c", plan["after_message_id"], segment)

    def rewind(self) -> None:
        found = [row for row in self.live() if row["line_no"] == 0]
        if found and self.random.random() < 0.7:
            at = found[max(len(found) - self.random.randint(1, 6), 0)]
            act(self.db, "rewind_chat('c', %s)", at["message_id"])

    def redact(self) -> None:
        found = rows(self.db, "select message_id from pycontext.message where line_no = 0 order by seq")
        if found:
            act(self.db, "redact_message('c', %s)", self.random.choice(found)["message_id"])

    def drop(self) -> None:
        found = [row for row in self.live() if row["origin"] == "compaction"]
        if found:
            act(self.db, "drop_summary('c', %s)", self.random.choice(found)["message_id"])

    def reset(self) -> None:
        if self.random.random() < 0.3 and any(row["line_no"] == 0 for row in self.live()):
            act(self.db, "start_over('c')")

    def pin(self) -> None:
        figures = chat(self.db, "c")
        found = [row for row in self.live() if row["line_no"] == 0 and row["seq"] > figures["reset_seq"]]
        if found:
            row = self.random.choice(found)
            act(self.db, f"{self.random.choice(['pin', 'unpin'])}_message('c', %s)", row["message_id"])

    def move(self) -> None:
        self.profile = self.random.choice(["default", "small-8k", "long-1m"])
        act(self.db, "set_chat_profile('c', %s)", self.profile)

    def prune(self) -> None:
        act(self.db, "prune_chat('c')")

    def check(self) -> None:
        """Append the live rows to a new chat, lines in their turn, and compare every figure."""
        db = self.db
        found = sorted(self.live(), key=lambda row: (row["at_act"], row["line_no"] == 0, row["seq"]))
        act(db, "create_chat('r', 'Be brief.', %s)", self.profile)
        place = {None: None, 0: 0}
        for row in found:
            if row["line_no"] > 0:
                if row["origin"] == "reset":
                    act(db, "start_over('r')")
                else:
                    after = act(db, "message_original('r', %s)", place[row["seq"]])[0]
                    summarize(db, "r", after["message_id"], {"notes": "x"})
                continue
            names = ("role", "content", "tool_calls", "tool_call_id", "name", "message_id", "metadata")
            made = append(db, "r", {name: row[name] for name in names})[0]
            place[row["seq"]] = made["seq"]
        query = "select * from pycontext.message where chat_id = 'r' and line_no = 0"
        copies = {row["seq"]: row for row in rows(db, query)}
        for row in found:
            if row["line_no"] == 0:
                copy = copies[place[row["seq"]]]
                for name in FIGURES:
                    assert row[name] == copy[name], (name, row["seq"])
                assert place[row["unit_seq"]] == copy["unit_seq"]
                if row["superseded_seq"] in place:  # else the better result was set aside
                    assert place[row["superseded_seq"]] == copy["superseded_seq"]
        mine, fresh = chat(db, "c"), chat(db, "r")
        for name in ("total_tokens", "stub_total", "live_tokens", "excess_tokens", "is_head_open"):
            assert mine[name] == fresh[name], name
        for name in ("line_seq", "reset_seq", "request_seq", "head_seq", "head_to", "last_unit"):
            assert place[mine[name]] == fresh[name], name
        if mine["head_seq"] is not None:
            assert mine["head_base"] == fresh["head_base"]
        opened = waiting(mine)
        for at in opened.values():
            at["seq"] = place[at["seq"]]
            if "interim" in at:
                at["interim"] = place[at["interim"]]
        again = {f"{call.split('#')[0]}#{at['seq']}": at for call, at in opened.items() if "#" in call}
        opened = {call: at for call, at in opened.items() if "#" not in call} | again
        assert opened == waiting(fresh)
        assert {place[seq] for seq in place if is_across(mine, seq)} == {
            n for n in copies if is_across(fresh, n)
        }
        assert mine["pins"] == one(db, "select count(*) from pycontext.pin where gone_act is null")
        status = act(db, "window_status('c')")[0]
        assert status["window_tokens"] <= status["token_budget"]
        act(db, "delete_chat('r')")


FIGURES = ("tokens", "frozen_tokens", "stub_tokens", "running_total", "running_stub", "is_user", "is_plain")


def waiting(figures: Row) -> Row:
    """The open calls after the newest line; earlier ones can't be answered any more."""
    line = figures["line_seq"] or 0
    return {call: at for call, at in figures["open_calls"].items() if at["seq"] > line}


def is_across(figures: Row, seq: int | None) -> bool:
    return seq is not None and any(span.lower <= seq < span.upper for span in figures["straddles"])


LONG = [pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 40)]


@pytest.mark.parametrize("profile", ["default", "small-8k"])
@pytest.mark.parametrize("seed", [*range(3), *LONG])
def test_figures_are_those_of_a_fresh_replay(db: Connection, seed: int, profile: str) -> None:
    moves = Moves(db, seed, profile)
    done: list[str] = []
    for n in range(60):
        done.append(moves.step())
        if done[-1] != "talk" or n % 10 == 9:
            try:
                moves.check()
            except (AssertionError, psycopg.Error) as error:
                raise AssertionError(f"after {' '.join(done)}") from error
