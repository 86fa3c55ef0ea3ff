"""psql as the manual: aliases, views and findings are there, and fit 120 columns whatever the chats hold."""

# ruff: noqa: E501

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from rich.cells import cell_len

import pycontext

Connection = psycopg.Connection[Any]

ALIASES = ("window", "explain", "thread", "history")
VIEWS = {
    "chat_overview": "chat_id, messages, live_tokens, token_budget, line_seq, last_outcome",
    "compaction_history": "pass_no, outcome, from_seq, to_seq, tokens_before, tokens_after",
    "chats_due": "chat_id, window_tokens, trigger_tokens",
    "token_count_coverage": "chat_id, rows, counted, estimated, percent",
    "summary_line": "chat_id, seq, summary_id, origin, text, is_newest",
    "act_history": "chat_id, act_no, act, at_seq, details",
}


def psql(dsn: str, *statements: str, options: tuple[str, ...] = ()) -> str:
    """What `pycontext psql` prints."""
    done = subprocess.run(
        [Path(sys.executable).parent / "pycontext", "psql", "--dsn", dsn, "-v", "ON_ERROR_STOP=1", *options],
        input="\n".join(statements) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def widest(printed: str) -> str:
    return max(printed.splitlines(), key=cell_len)


def everything(chat_id: str) -> list[str]:
    quoted = chat_id.replace("'", "''")
    return [
        *(f":{alias} ('{quoted}');" for alias in ALIASES),
        *(f"select * from pycontext.{view};" for view in VIEWS),
        *(f"select {columns} from pycontext.{view};" for view, columns in VIEWS.items()),
        "select * from pycontext.status();",
        f"select * from pycontext.window_status('{quoted}');",
        f"select * from pycontext.compaction_plan('{quoted}');",
        f"select * from pycontext.thread('{quoted}', max_rows => 5);",
        f"select * from pycontext.working_window('{quoted}', 3000);",
        f"select * from pycontext.explain_window('{quoted}', 3000);",
    ]


def test_it_fits_120_columns(dsn: str, memory: pycontext.Database) -> None:
    chat = "发货问题-Посылка-9f8b2c1e-4d5a-4b7e-8f39-0a1b2c3d4e5f-" + "x" * 80
    memory.create_chat(
        chat, system_prompt="你是书店的客服。" * 20, profile="small-8k", owner="анна", tenant=None
    )
    for number in range(30):
        memory.append(
            chat,
            [
                f"包裹 QX-{number} 在哪里？🚚" + "我上个月订的。" * 20,
                {
                    "role": "assistant",
                    "content": f"Посылка QX-{number} в пути,\nследующий пункт:\tB-{number}. " * 20,
                },
            ],
        )
    memory.compact(chat)
    memory.start_over(chat, "她要搬家。" * 20)
    memory.append(chat, "y" * 5000)
    printed = psql(dsn, *everything(chat))
    assert cell_len(widest(printed)) <= 120, widest(printed)
    assert "compaction" in printed
    assert "set aside" in printed


@pytest.mark.real
@pytest.mark.parametrize(
    "name",
    ["ru_multiwoz_long", "tau_bench_airline_gpt4o", "llamafactory_toolcall_zh", "pydantic_ai_cassettes"],
)
def test_real_chats_fit_120_columns(
    dsn: str, memory: pycontext.Database, shared_data: Path, name: str
) -> None:
    from pycontext.importer import Conversation, read_conversations

    with (shared_data / f"{name}.jsonl").open("rb") as lines:
        conversation = next(found for found in read_conversations([next(lines)], default_id="c"))
    assert isinstance(conversation, Conversation)
    memory.create_chat(conversation.chat_id, system_prompt=conversation.system_prompt, profile="small-8k")
    memory.append(conversation.chat_id, list(conversation.messages[:120]))
    memory.compact(conversation.chat_id, 3000)
    printed = psql(dsn, *everything(conversation.chat_id))
    assert cell_len(widest(printed)) <= 120, widest(printed)


def test_each_alias_asks_for_what_it_is_named_after(dsn: str, memory: pycontext.Database, fill: Any) -> None:
    fill("it's", 20)
    memory.compact("it's")
    for alias, word in zip(ALIASES, ("summary", "summarized", "compaction", "summarized"), strict=True):
        assert word in psql(dsn, f":{alias} ('it''s');"), alias


def test_names_are_found_without_the_schema(dsn: str) -> None:
    shown = psql(dsn, "show search_path;", "select create_chat('c');")
    assert re.search(r"public.*pycontext", shown)
    assert psql(dsn, "select 1, 2;", options=("-At",)) == "1|2\n"
    once = f"{dsn} options='-c search_path=pycontext'" if "://" not in dsn else dsn
    assert psql(once, "show search_path;").count("pycontext") == 1


def test_an_error_is_message_detail_and_hint(dsn: str) -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "pycontext", "psql", "--dsn", dsn, "-c", "select start_turn('nowhere')"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line.split(":")[0] for line in done.stderr.splitlines()]
    assert lines == ["ERROR", "DETAIL", "HINT"]


def test_each_finding_says_what_to_do(db: Connection, memory: pycontext.Database, fill: Any) -> None:
    def findings() -> dict[str, tuple[str, str | None]]:
        rows = db.execute("select finding, detail, hint from status() where severity <> 'info'").fetchall()
        assert len({row[0] for row in rows}) == len(rows)
        return {finding: (detail, hint) for finding, detail, hint in rows}

    assert findings() == {}
    fill("c", 30)
    fill("d", 30)
    db.execute("select append_message('d', 'user', 'written in SQL')")
    assert "2 chats" in findings()["chats over budget"][0]
    assert "1 rows in 1 chats" in findings()["uncounted rows"][0]
    plan = memory.plan("c")
    db.execute("select fail_compaction('c', %s, 'failed', 'the model was down')", [plan.after_message_id])
    assert "the model was down" in findings()["failed compactions"][0]
    db.execute("select fail_flush('c', 'the extractor was down')")
    assert "the extractor was down" in findings()["failed flushes"][0]
    db.execute("select claim_compaction('d', 'somebody', 60)")
    db.execute("update lease set expires_at = now() - interval '1 hour' where chat_id = 'd'")
    assert "d" in findings()["expired leases"][0]
    db.execute(
        """
        create table public.post (id bigserial primary key, ticket int, who text, body text, at timestamptz);
        create index on public.post (ticket, id);
        insert into public.post (ticket, who, body, at)
        select 7, case n % 2 when 0 then 'user' else 'assistant' end, 'Letter ' || n || repeat(' about the parcel', 30),
            now() - interval '1 day' from generate_series(0, 99) n;
        create view public.posts as select ticket as chat_id, id as seq, id as message_id, who as role, body as content,
            at as created_at from public.post;
        select register_source('post', 'public.posts', true);
        """
    )
    memory.compact("7", token_budget=3000)
    # what an adopted chat's window holds is looked into as well
    db.execute("select create_chat('8', source => 'post', profile => 'small-8k')")
    db.execute(
        "insert into public.post (ticket, who, body, at) select 8, who, body, at from public.post cross join generate_series(1, 5)"
    )
    assert findings()["chats over budget"][0].startswith("3 chats")
    rows = db.execute("select count(*) from working_window('8') where section <> 'omitted'").fetchone()
    assert f"{rows[0] + 1} rows in 2 chats" in findings()["uncounted rows"][0]  # type: ignore[index]
    db.execute("update public.post set body = 'edited by somebody' where id = 10")
    assert "7" in findings()["stale lines"][0]
    found = findings()
    assert set(found) == {
        "uncounted rows", "failed compactions", "failed flushes", "chats over budget", "stale lines", "expired leases"
    }  # fmt: skip
    assert all(hint for _, hint in found.values())
    # what the hints say helps
    db.execute("select source_changed('7')")
    memory.count_tokens("d")
    memory.count_tokens("7")
    memory.count_tokens("8")
    assert "stale lines" not in findings()
    assert "uncounted rows" not in findings()
    # a view that broke hides nothing else
    db.execute(
        "create or replace view public.posts as select ticket as chat_id, id as seq, id as message_id, who as role, "
        "(1 / (id - id))::text as content, at as created_at from public.post"
    )
    assert "division by zero" in findings()["unreadable chats"][0]
    assert "2 chats" in findings()["chats over budget"][0]
