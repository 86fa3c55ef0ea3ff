"""Every block of the READMEs runs as written: SQL in psql, shell in bash, Python with a model server.

A ```text block is the output of the ```sql block right before it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import psycopg
import pytest
import validators
from llm_server import LLMServer
from psycopg import sql
from psycopg.conninfo import make_conninfo

import pycontext
from pycontext.embedded import binaries

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
SQL_README = ROOT / "sql" / "README.md"
READMES = [README, SQL_README, ROOT / "tests" / "README.md"]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ADOPTING = "The messages table you already have"
_SHELL_SECTIONS = ("In the shell", "A database you have")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the heading it stands under."""

    language: str
    text: str
    heading: str


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    headings = [(found.start(), found.group(1)) for found in re.finditer(r"^#+ (.*)$", _masked(text), re.M)]
    return [
        Block(found.group(1), found.group(2), [name for start, name in headings if start < found.start()][-1])
        for found in _FENCE.finditer(text)
    ]


def _masked(text: str) -> str:
    """The text with its blocks blanked, so that a comment in one is not taken for a heading."""
    return _FENCE.sub(lambda found: " " * len(found.group(0)), text)


def with_output(found: list[Block]) -> list[tuple[str, str | None]]:
    """Each SQL block, and the output that is shown for it."""
    following = [*found[1:], Block("", "", "")]
    return [
        (block.text, after.text if after.language == "text" else None)
        for block, after in zip(found, following, strict=True)
        if block.language == "sql"
    ]


def psql(dsn: str, texts: list[str]) -> list[str]:
    """What one psql session prints for each text."""
    script = "".join(f"{text}\n\\echo =====\n" for text in texts)
    done = subprocess.run(
        [binaries() / "psql", dsn, "-X", "-v", "ON_ERROR_STOP=1"],
        input=script,
        capture_output=True,
        text=True,
        env={**os.environ, "PGCLIENTENCODING": "utf8"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    printed = done.stdout.split("=====\n")[:-1]
    assert len(printed) == len(texts)
    return printed


def compare(dsn: str, steps: list[tuple[str, str | None]]) -> None:
    """Run the blocks in one psql session and hold what it prints to what is shown."""
    for (text, shown), printed in zip(steps, psql(dsn, [text for text, _ in steps]), strict=True):
        if shown is not None:
            assert plain(printed) == plain(shown), text
        if text.startswith("explain"):
            assert "Index Cond: ((ticket_id = 7) AND (id >= 1) AND (id <= 1000))" in printed


def plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like the checkout to a shell block, and may be written to."""
    for name in ("sql", "pycontext"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run_shell(text: str, dsn: str, folder: Path) -> str:
    """Run a shell block as one script, with our commands and the wheel's psql on the path."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYCONTEXT_")},
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), str(binaries()), os.environ["PATH"]]),
        "PYCONTEXT_DSN": dsn,
        "DATABASE_URL": dsn,
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_is_of_a_kind_that_is_run(path: Path) -> None:
    found = blocks(path)
    assert {block.language for block in found} <= {"sh", "sql", "text", "python"}
    assert "```" not in _masked(path.read_text(encoding="utf-8")).replace("`````", "")
    for before, block in zip([None, *found], found, strict=False):
        if block.language == "text":
            assert before is not None
            assert before.language == "sql", f"output without a statement under {block.heading!r}"


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        assert "://" in target or (path.parent / target).exists(), target


def test_the_psql_session(dsn: str) -> None:
    first, *rest = with_output([block for block in blocks(README) if block.heading != _ADOPTING])
    # The statement above everything else reads the chat that the session makes.
    compare(dsn, [*rest, first])
    assert sum(shown is not None for _, shown in rest) >= 4


def test_adopting_as_written(dsn: str, checkout: Path) -> None:
    found = [block for block in blocks(README) if block.heading == _ADOPTING]
    for kind, group in groupby(found, lambda block: block.language == "sh"):
        if kind:
            assert "summarized" in "".join(run_shell(block.text, dsn, checkout) for block in group)
        else:
            compare(dsn, with_output(list(group)))


@pytest.fixture
def keeper(server: Any) -> Iterator[str]:
    """Connection string of an empty database whose owner is no superuser, and may create roles."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute("create role keeper login createrole")
        conn.execute("create database kept owner keeper")
        yield make_conninfo(server.dsn("kept"), user="keeper")
        conn.execute("drop database kept with (force)")
        roles = conn.execute(
            "select rolname from pg_roles where rolname ~ '^(pycontext_|bookshop_)' order by 1 desc"
        ).fetchall()
        for (role,) in [*roles, ("keeper",)]:
            conn.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


@pytest.mark.core
def test_the_sql_readme_from_top_to_bottom(
    keeper: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Policies are switched on half way, so every session from there on names a tenant.
    monkeypatch.setenv("PGOPTIONS", "-c pycontext.tenant=")
    kinds = groupby(blocks(SQL_README), lambda block: block.language == "sh")
    *parts, last = [(is_shell, list(group)) for is_shell, group in kinds]
    for is_shell, group in parts:
        if is_shell:
            for block in group:
                run_shell(block.text, keeper, checkout)
        else:
            compare(keeper, with_output(group))
    assert (checkout / "pycontext.sql").stat().st_size > 100_000
    is_shell, (uninstall,) = last
    assert is_shell
    run_shell(uninstall.text, keeper, checkout)
    with psycopg.connect(keeper) as conn:
        assert conn.execute("select to_regnamespace('pycontext')").fetchone() == (None,)
        assert conn.execute("select count(*) from helpdesk.post").fetchone() == (201,)


_PARTS = "Messages made of parts: the Vercel AI SDK"


def test_the_view_of_parts_tells_every_kind_of_them(db: psycopg.Connection[Any], dsn: str) -> None:
    table, view = [b.text for b in blocks(SQL_README) if b.heading == _PARTS and b.text.startswith("create")]
    psql(dsn, [table, view])
    chat = "00000000-0000-4000-8000-0000000000ff"

    def add(role: str, *parts: dict[str, Any]) -> str:
        row = db.execute(
            "insert into ai.\"Message_v2\" select gen_random_uuid(), %s, %s, %s, timestamp '2026-01-01'"
            " + count(*) * interval '1 ms' from ai.\"Message_v2\" returning id::text",
            (chat, role, json.dumps(parts)),
        ).fetchone()
        assert row is not None
        return str(row[0])

    step = {"type": "step-start"}
    png = "https://shop.example/a.png"
    user = add(
        "user",
        {"type": "text", "text": "What is this?"},
        {"type": "file", "mediaType": "image/png", "filename": "a.png", "url": png},
        {"type": "file", "mediaType": "application/pdf", "filename": "b.pdf", "url": "data:,"},
    )
    add(
        "assistant",
        step,
        {"type": "text", "text": "Looking."},
        {"type": "tool-look", "toolCallId": "a", "input": {"q": 1}, "state": "output-available"}
        | {"output": "a boat"},
        {"type": "dynamic-tool", "toolName": "ask", "toolCallId": "b", "input": {}, "state": "output-error"}
        | {"errorText": "down"},
        step,
        {"type": "tool-look", "toolCallId": "c", "state": "input-available", "input": {"q": 2}},
        step,
        {"type": "reasoning", "text": "Hm."},
        {"type": "data-chart", "data": {}},
        step,
        {"type": "source-url", "sourceId": "s", "url": "https://shop.example"},
        {"type": "text", "text": "A boat."},
    )  # fmt: skip
    add("user", {"type": "text", "text": "Thanks"})
    db.execute("select register_source('ai', 'ai.chat_message'), create_chat(%s, source => 'ai')", (chat,))
    with pycontext.connect(dsn) as memory, memory.turn(chat, format="all") as turn:
        said = turn.messages
        validators.openai_chat(said)
        validators.anthropic(turn.anthropic)
        validators.openai_responses(turn.responses_input)
        assert '"is_error": true' in json.dumps(turn.anthropic)
    assert said[0]["content"] == [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": png}},
        {"type": "text", "text": "[file b.pdf]"},
    ]
    assert [(m["role"], m.get("tool_call_id")) for m in said] == [
        ("user", None), ("assistant", None), ("tool", "a"), ("tool", "b"), ("assistant", None), ("tool", "c"),
        ("assistant", None), ("user", None),
    ]  # fmt: skip
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in said[1]["tool_calls"]] == [
        ("look", '{"q": 1}'),
        ("ask", "{}"),
    ]
    assert [said[n]["content"] for n in (2, 3)] == ["a boat", "down"]
    assert [part["text"] for part in said[6]["content"]] == ["[source https://shop.example]", "A boat."]
    assert db.execute("select seq from thread(%s) where message_id = %s", (chat, user)).fetchone()
    assert db.execute(
        "select count(*) from working_window(%s) where content::text ~ 'Hm|chart|step-'", (chat,)
    ).fetchone() == (0,)


def test_why_did_it_forget_of_a_native_chat(db: psycopg.Connection[Any], dsn: str) -> None:
    """The two statements as written for an adopted chat, and what they answer there."""
    (_, _), (text, shown) = with_output([b for b in blocks(SQL_README) if b.heading == "Why did it forget?"])
    db.execute(
        """
        select append_messages('7', jsonb_agg(jsonb_build_object(
            'role', (array['user', 'assistant'])[1 + n % 2],
            'content', format('Parcel QX-%s: ', 100 + n) || repeat('It is late. ', 20),
            'created_at', timestamptz 'yesterday 12:00' + n * interval '1 minute') order by n))
        from generate_series(0, 199) n, create_chat('7');
        select put_summary('7', (select message_id from message_original('7', 180)),
            '{"facts": ["Parcels QX-100 to QX-279 are late"]}');
        select append_message('7', 'user', 'And what of QX-117?', created_at => 'yesterday 19:40');
        """
    )
    compare(dsn, [(text, shown)])


def test_the_commands(dsn: str, checkout: Path) -> None:
    for block in blocks(README):
        if block.language == "sh" and block.heading in _SHELL_SECTIONS:
            printed = run_shell(block.text, dsn, checkout)
            assert "pycontext" in block.text
            if "start-over" in block.text:
                assert "summary of #" in printed or "summarized" in printed
                assert "started over" in printed


def test_installing_as_written(empty_dsn: str, checkout: Path) -> None:
    text = next(b.text for b in blocks(README) if b.language == "sh" and b.heading == "A database you have")
    for command in text.strip().splitlines():
        with psycopg.connect(empty_dsn, autocommit=True) as conn:
            conn.execute("drop schema if exists pycontext cascade")
            run_shell(command, empty_dsn, checkout)
            assert conn.execute("select pycontext.schema_version()").fetchone() is not None


def test_make_has_the_targets_and_the_package_the_extras() -> None:
    shell = [block.text for block in blocks(README) if block.language == "sh"]
    targets = re.findall(r"\bmake ([a-z-]+)", README.read_text(encoding="utf-8"))
    assert {"demo", "test", "help", "psql"} <= set(targets)
    subprocess.run(["make", "-n", *sorted(set(targets))], cwd=ROOT, check=True, capture_output=True)
    extras = re.findall(r"pip install '\.\[([a-z,]+)\]'", "".join(shell))
    assert extras
    known = set(metadata.metadata("pycontext-pg").get_all("Provides-Extra") or ())
    assert set(extras[0].split(",")) <= known


# the turn handlers

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_parcel",
            "parameters": {"type": "object", "properties": {"order": {"type": "string"}}},
        },
    }
]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLMServer]:
    with LLMServer() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url.removesuffix("/v1"))
        for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.delenv("PYCONTEXT_SUMMARIZER_MODEL", raising=False)
        yield server


@pytest.fixture
def handlers(model: LLMServer, dsn: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the README's Python defines, run as written; tools are the reader's own."""
    pytest.importorskip("agents", reason="needs the Agents SDK: extra openai-agents")
    pytest.importorskip("anthropic", reason="needs the package anthropic: extra test")
    monkeypatch.setenv("PYCONTEXT_DSN", dsn)
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    names: dict[str, Any] = {"TOOLS": TOOLS, "run_tool": lambda function: "left hub B-7 on 3 March"}
    for block in blocks(README):
        if block.language == "python":
            exec(compile(block.text, str(README), "exec"), names)
    return names


def reply(request: dict[str, Any]) -> str:
    """An answer that tells what was read."""
    asked = [m["content"] for m in request["messages"] if m["role"] == "user"][-1]
    return f"{len(request['messages'])} messages read; asked: {asked}"


def test_the_handler(handlers: dict[str, Any], model: LLMServer, dsn: str) -> None:
    model.default = reply
    first = handlers["answer"]("conv_1", "Where is my parcel?", "r1")
    assert first == "2 messages read; asked: Where is my parcel?"
    assert handlers["answer"]("conv_1", "Where is my parcel?", "r1") == first  # sent twice, answered once
    assert len(model.requests) == 1
    assert handlers["answer"]("conv_1", "And now?", "r2") == "4 messages read; asked: And now?"
    assert model.requests[1]["messages"][:2] == model.requests[0]["messages"]
    with pycontext.connect(dsn) as db:
        assert [row.role for row in db.thread("conv_1")] == ["user", "assistant"] * 2


def test_the_handler_compacts_and_the_next_process_reads_the_line(
    handlers: dict[str, Any], model: LLMServer, dsn: str
) -> None:
    model.default = lambda request: "It is in hub B-7 and comes on Friday. " * 30
    with pycontext.connect(dsn) as db:
        db.create_chat("conv_2", system_prompt="You answer for a bookshop.", profile="small-8k")
    for number in range(12):
        handlers["answer"](
            "conv_2", f"Where is parcel QX-{4000 + number}? " + "I ordered it. " * 30, f"r{number}"
        )
    read = [len(str(request["messages"])) for request in model.requests]
    assert min(read[-2:]) < max(read[:-2])
    assert "<chat-summary>" in str(model.requests[-1]["messages"])
    with pycontext.connect(dsn) as db:
        assert db.status("conv_2").line_origin == "compaction"
        assert len([row for row in db.thread("conv_2", max_rows=200) if row.kind == "message"]) == 24


def test_the_handler_under_asyncio(handlers: dict[str, Any], model: LLMServer, dsn: str) -> None:
    model.default = reply
    said = asyncio.run(handlers["answer_async"]("conv_6", "Where is my parcel?", "r1"))
    assert said == "1 messages read; asked: Where is my parcel?"
    with pycontext.connect(dsn) as db:
        assert [row.content for row in db.thread("conv_6")] == ["Where is my parcel?", said]


def test_the_handler_of_a_table_of_yours(
    handlers: dict[str, Any], model: LLMServer, dsn: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in blocks(README):
        if block.heading == _ADOPTING and block.language == "sh":
            run_shell(block.text, dsn, checkout)
        elif block.heading == _ADOPTING and block.text.startswith("create"):
            psql(dsn, [block.text])
    monkeypatch.setenv("DATABASE_URL", dsn)
    model.default = reply
    said = handlers["answer_ticket"](7, "Where is my parcel?")
    assert said.endswith("messages read; asked: Where is my parcel?")
    assert "<chat-summary>" in str(model.requests[0]["messages"])
    with psycopg.connect(dsn) as conn:
        rows = conn.execute("select author, body from shop.post order by id desc limit 2").fetchall()
    assert rows == [("bot", said), ("anna", "Where is my parcel?")]


def test_the_handler_with_tools(handlers: dict[str, Any], model: LLMServer, dsn: str) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "find_parcel", "arguments": '{"order": "QX-4471"}'},
    }
    model.script(lambda request: {"content": None, "tool_calls": [call]}, lambda request: "It left hub B-7.")
    assert handlers["answer_with_tools"]("conv_3", "Where is QX-4471?", "r1") == "It left hub B-7."
    second = model.requests[1]["messages"]
    assert [message["role"] for message in second[-2:]] == ["assistant", "tool"]
    assert second[-1] == {"role": "tool", "tool_call_id": "call_1", "content": "left hub B-7 on 3 March"}
    assert model.requests[1]["tools"] == TOOLS
    with pycontext.connect(dsn) as db:
        assert [row.role for row in db.thread("conv_3")] == ["user", "assistant", "tool", "assistant"]


def test_the_handlers_of_the_other_apis(handlers: dict[str, Any], model: LLMServer, dsn: str) -> None:
    model.default = lambda request: f"{len(request.get('input') or request['messages'])} read"
    for number, name in enumerate(("answer_by_responses", "answer_by_anthropic")):
        said = [handlers[name](f"conv_7{number}", text, text) for text in ("Where?", "And now?")]
        assert said == ["1 read", "3 read"]
    one, two = model.requests[:2]
    assert one["prompt_cache_key"] == two["prompt_cache_key"]
    assert two["input"][: len(one["input"])] == one["input"]
    assert "cache_control" in str(model.requests[3]["messages"])
    with pycontext.connect(dsn) as db:
        for number in range(2):
            assert [row.role for row in db.thread(f"conv_7{number}")] == ["user", "assistant"] * 2


def test_the_handler_that_streams(handlers: dict[str, Any], model: LLMServer, dsn: str) -> None:
    model.default = lambda request: "It left <memory-context>\nAnna waits.\n</memory-context>hub B-7."
    told = list(handlers["stream"]("conv_4", "Where is QX-4471?", "r1"))
    assert len(told) > 3
    assert "".join(told) == "It left hub B-7."
    with pycontext.connect(dsn) as db:
        assert [row.content for row in db.thread("conv_4")] == ["Where is QX-4471?", "It left hub B-7."]


def test_the_session(handlers: dict[str, Any], model: LLMServer, dsn: str) -> None:
    model.default = lambda request: f"{len(request['input'])} items read"

    async def both() -> list[str]:  # in one loop: the SDK keeps its client
        return [await handlers["run"]("conv_5", text) for text in ("Where is my parcel?", "And now?")]

    assert asyncio.run(both()) == ["1 items read", "3 items read"]
    with pycontext.connect(dsn) as db:
        assert [row.role for row in db.thread("conv_5")] == ["user", "assistant"] * 2
