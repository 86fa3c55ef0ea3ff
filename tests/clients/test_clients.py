"""Services that know only SQL: Node.js with npm's `pg`, and plain psql, on native and on adopted chats."""

# ruff: noqa: E501

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

Connection = psycopg.Connection[Any]
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The service in a folder of its own, with what its package.json asks for really installed."""
    npm = shutil.which("npm")
    if shutil.which("node") is None or npm is None:
        pytest.skip("no node or no npm here")
    folder = tmp_path_factory.mktemp("node")
    for file in (HERE / "node").iterdir():
        shutil.copy(file, folder)
    done = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--silent"],
        cwd=folder,
        capture_output=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"npm could not install pg: {done.stderr.decode(errors='replace')[-300:]}")
    return folder


def environment(dsn: str) -> dict[str, str]:
    parts = conninfo_to_dict(dsn)
    return {
        **os.environ,
        "PGHOST": str(parts["host"]),
        "PGPORT": str(parts["port"]),
        "PGUSER": str(parts["user"]),
        "PGDATABASE": str(parts["dbname"]),
        "PSQLRC": os.devnull,
    }


@pytest.fixture
def shop(db: Connection) -> Connection:
    db.execute(
        """
        create schema app;
        create table app.message (id bigint generated always as identity primary key, conversation_id bigint not null,
            sender text not null, body text not null, created_at timestamptz not null default now());
        create index on app.message (conversation_id, id);
        create view app.messages as select conversation_id as chat_id, id as seq, id as message_id, body as content,
            created_at, case sender when 'customer' then 'user' else 'assistant' end as role from app.message;
        select register_source('shop', 'app.messages', true);
        """
    )
    return db


def serve(node: Path, dsn: str, *arguments: str) -> Any:
    done = subprocess.run(
        ["node", "service.js", *arguments],
        cwd=node,
        env=environment(dsn),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_node_on_a_native_chat(node: Path, db: Connection, dsn: str) -> None:
    first = serve(node, dsn, "native", "n1", "Where is my order?")
    assert first["answer"] == "You said: Where is my order?"
    assert first["messages"] == 1
    assert first["refused"]["code"] == "PCX01"
    assert "create_chat" in first["refused"]["hint"]
    second = serve(node, dsn, "native", "n1", "And now?")
    assert second["messages"] == 3
    assert 0 < first["window_tokens"] < second["window_tokens"] <= second["token_budget"]
    rows = db.execute("select role, content, is_estimate from thread('n1')").fetchall()
    assert [r[0] for r in rows] == ["user", "assistant"] * 2
    assert rows[3][1] == "You said: And now?"
    assert all(r[2] for r in rows)  # estimated until somebody counts


def test_node_on_an_adopted_chat(node: Path, shop: Connection, dsn: str) -> None:
    assert serve(node, dsn, "adopted", "42", "Where is my order?")["messages"] == 1
    second = serve(node, dsn, "adopted", "42", "And now?")
    assert second["messages"] == 3
    assert second["refused"]["code"] == "PCX09"
    assert "then start_turn(chat_id) without a message" in second["refused"]["hint"]
    assert shop.execute("select count(*) from pycontext.message").fetchone() == (0,)
    assert (
        shop.execute("select sender from app.message order by id").fetchall() == [("customer",), ("bot",)] * 2
    )


PITFALLS = """
import pg from "pg";
const client = new pg.Client();
await client.connect();
const turn = "select seq from pycontext.start_turn('n3', $1::jsonb)";
const told = [];
for (const message of [[{ role: "user", content: "Hello" }], "Hello"]) {
  told.push(await client.query(turn, [message]).catch((error) => error.code));
}
told.push((await client.query(turn, [JSON.stringify("Hello")])).rows[0].seq);
console.log(JSON.stringify(told));
await client.end();
"""


def test_what_the_readme_says_of_node_is_so(node: Path, db: Connection, dsn: str) -> None:
    (node / "pitfalls.js").write_text(PITFALLS)
    done = subprocess.run(
        ["node", "pitfalls.js"], cwd=node, env=environment(dsn), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == ["22P02", "22P02", "1"]


def psql(dsn: str, script: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("psql")
    if program is None:
        pytest.skip("no psql here")
    return subprocess.run(
        [program, "-XAt", "-v", "VERBOSITY=verbose", "-f", "-"],
        input=script, env=environment(dsn), capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_same_session_in_psql(shop: Connection, dsn: str) -> None:
    shop.execute("select create_chat('n2', 'Be brief.')")
    native = psql(
        dsn,
        """
        select messages from pycontext.start_turn('n2', '"Where is my order?"');
        select role from pycontext.append_message('n2', 'assistant', 'In hub 7.');
        select string_agg(role, ' ' order by ordinal) from pycontext.working_window('n2');
        select pycontext.append_message('n2', 'nobody', 'x');
        """,
    )
    lines = native.stdout.splitlines()
    assert [m["role"] for m in json.loads(lines[0])] == ["system", "user"]
    assert lines[1:] == ["assistant", "system user assistant"]
    assert "ERROR:  PCX02" in native.stderr
    adopted = psql(
        dsn,
        """
        insert into app.message (conversation_id, sender, body) values (7, 'customer', 'Where is my order?');
        select messages from pycontext.start_turn('7');
        insert into app.message (conversation_id, sender, body) values (7, 'bot', 'In hub 7.');
        select string_agg(role, ' ' order by ordinal) from pycontext.working_window(7);
        select pycontext.append_message('7', 'user', 'x');
        """,
    )
    lines = [line for line in adopted.stdout.splitlines() if not line.startswith("INSERT")]
    assert json.loads(lines[0]) == [{"role": "user", "content": "Where is my order?"}]
    assert lines[1] == "user assistant"
    assert "ERROR:  PCX09" in adopted.stderr
    assert "HINT:" in adopted.stderr


def test_psql_opens_with_aliases(db: Connection, dsn: str, tmp_path: Path) -> None:
    db.execute("select create_chat('o''neil'), append_message('o''neil', 'user', repeat('long words ', 40))")
    (tmp_path / "own").write_text("\\set mine 'select 4711'\n")
    done = subprocess.run(
        [sys.executable, "-c", "from pycontext.cli import main; raise SystemExit(main())", "psql"],
        input="".join(f":{alias} ('o''neil');\n" for alias in ("window", "thread", "explain", "history")) + ":mine;\n",
        env={**environment(dsn), "PYCONTEXT_DSN": dsn, "PSQLRC": str(tmp_path / "own")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.strip() == ""
    assert done.stdout.count("(1 row)") == 4  # window, thread, explain, and the user's own
    assert "pass_no" in done.stdout
    assert "4711" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
