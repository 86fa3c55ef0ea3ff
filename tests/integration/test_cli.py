"""The command line on a real server: its commands, its output, its errors and exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pycontext
from pycontext import cli

DEMO = Path(pycontext.__file__).parent / "demo" / "conversation.jsonl"

# Enough of each to be over a small budget, in two languages.
QUESTION = "Проверь заказ номер {n} и скажи, когда он придёт. "
ANSWER = "Order {n} left the warehouse WH-{n} on 2025-03-{day:02d} and costs {n}.50 EUR. "


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(dsn: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run the command line in this process, on this test's database."""
    monkeypatch.setenv("PYCONTEXT_DSN", dsn)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("PYCONTEXT_SUMMARIZER_MODEL", raising=False)

    def run(*arguments: str | Path) -> Result:
        from pycontext.cli import terminal

        terminal.out.cache_clear()
        terminal.err.cache_clear()
        monkeypatch.setattr(sys, "argv", ["pycontext", *map(str, arguments)])
        capfd.readouterr()
        code = cli.main()
        return Result(code, *capfd.readouterr())

    return run


@pytest.fixture
def chat(dsn: str) -> str:
    """A chat of 60 messages."""
    with pycontext.connect(dsn) as db:
        db.create_chat("c", system_prompt="You sell things.")
        for n in range(30):
            db.append("c", {"role": "user", "content": QUESTION.format(n=n) * 4, "message_id": f"u{n}"})
            answer = ANSWER.format(n=n, day=n % 28 + 1) * 4
            db.append("c", {"role": "assistant", "content": answer, "message_id": f"a{n}"})
    return "c"


def write(path: Path, *lines: Any) -> Path:
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def rows_in(db: psycopg.Connection[Any], chat_id: str) -> int:
    found = db.execute("select count(*) from pycontext.message where chat_id = %s", (chat_id,)).fetchone()
    assert found is not None
    return int(found[0])


def test_help_lists_the_commands(run: Any) -> None:
    result = run("--help")
    assert result.code == 0
    names = "install sql status demo import chats thread window explain inspect compact start-over psql"
    for name in names.split(" "):
        assert re.search(rf"^  {name} ", result.out, re.MULTILINE), name


def test_what_never_uses_the_embedded_server_does_not_offer_it(run: Any) -> None:
    for command in ("install", "worker"):
        told = " ".join(run(command, "--help").out.split())
        assert "Default: PYCONTEXT_DSN, then DATABASE_URL." in told
        assert "Never uses the embedded server" in told


def test_without_typer_it_says_which_extra_to_install(tmp_path: Path) -> None:
    for missing in ("typer", "rich"):
        script = (
            f"import sys; sys.modules[{missing!r}] = None; from pycontext.cli import main; sys.exit(main())"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stdout == ""
        assert "pip install 'pycontext-pg[cli]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_install_and_sql(empty_dsn: str, run: Any) -> None:
    first = run("install", "--dsn", empty_dsn)
    assert (first.code, first.err) == (0, "")
    assert "is installed" in first.out
    second = run("install", "--dsn", empty_dsn)
    assert "is up to date" in second.out
    text = run("sql")
    assert text.code == 0
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(text.out.encode())
        assert conn.execute("select pycontext.schema_version()").fetchone() is not None


def test_install_never_falls_back_to_the_embedded_server(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYCONTEXT_DSN")
    result = run("install")
    assert result.code == 1
    assert result.out == ""
    assert "PYCONTEXT_DSN" in result.err
    assert "embedded server, its data is in" not in result.err


def test_a_database_without_the_schema_is_an_error_with_the_next_command(empty_dsn: str, run: Any) -> None:
    for arguments in (["thread", "c"], ["window", "c"], ["chats"], ["import", DEMO]):
        result = run(*arguments, "--dsn", empty_dsn)
        assert result.code == 1, arguments
        assert "HINT: run `pycontext install`" in result.err
        assert "Traceback" not in result.err


def test_dsn_wins_over_pycontext_dsn_wins_over_database_url(
    run: Any, chat: str, dsn: str, empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_dsn)
    assert run("thread", chat).code == 0
    assert run("thread", chat, "--dsn", empty_dsn).code == 1
    monkeypatch.delenv("PYCONTEXT_DSN")
    assert run("thread", chat).code == 1
    monkeypatch.setenv("DATABASE_URL", dsn)
    assert run("thread", chat).code == 0


def test_errors_name_what_where_and_what_next(run: Any) -> None:
    for command in ("thread", "window", "compact", "start-over"):
        result = run(command, "nobody")
        assert result.code == 1, command
        assert result.out == ""
        assert result.err.startswith("error: ")
        assert "(PCX01)" in result.err.splitlines()[0]
        assert "DETAIL: " in result.err
        assert "HINT: " in result.err


def test_no_server_is_an_error_not_a_traceback(run: Any) -> None:
    result = run("thread", "c", "--dsn", "host=/nonexistent dbname=x")
    assert result.code == 1
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err


def test_a_budget_too_small_is_an_error(run: Any, chat: str) -> None:
    result = run("window", chat, "--budget", "10")
    assert result.code == 1
    assert "(PCX05)" in result.err


def test_thread_shows_the_line_across_the_conversation(run: Any, chat: str) -> None:
    assert run("compact", chat, "--budget", "2000").code == 0
    result = run("thread", chat, "--limit", "200")
    assert result.code == 0
    lines = result.out.splitlines()
    rule = next(index for index, line in enumerate(lines) if "— summary of #" in line)
    found = re.search(r"summary of #(\d+)–#(\d+)", lines[rule])
    assert found is not None
    before = [line for line in lines[:rule] if line.lstrip().startswith(f"#{found.group(2)} ")]
    assert len(before) == 1
    assert any(line.lstrip().startswith(f"#{int(found.group(2)) + 1} ") for line in lines[rule:])
    assert all(len(line) <= 120 for line in lines)
    assert "Проверь заказ номер 29" in result.out


def test_thread_pages(run: Any, chat: str) -> None:
    newest = run("thread", chat, "--limit", "5")
    assert [line.split()[0] for line in newest.out.splitlines()[1:]] == ["#56", "#57", "#58", "#59", "#60"]
    assert "--before 56" in newest.out.splitlines()[0]
    older = run("thread", chat, "--limit", "5", "--before", "56")
    assert [line.split()[0] for line in older.out.splitlines()[1:]] == ["#51", "#52", "#53", "#54", "#55"]


def test_start_over_is_drawn_and_kept_from_the_model(run: Any, chat: str) -> None:
    result = run("start-over", chat, "--note", "мы продаём книги")
    assert result.code == 0
    assert "#60" in result.out
    shown = run("thread", chat)
    assert re.search(r"— started over here —", shown.out)
    read = run("window", chat, "--json").json
    assert {row["section"] for row in read["rows"]} <= {"system", "summary", "tail"}
    assert "мы продаём книги" in json.dumps(read, ensure_ascii=False)
    assert "заказ номер" not in json.dumps(read, ensure_ascii=False)


def test_json_is_all_there_is_on_stdout(run: Any, chat: str, dsn: str) -> None:
    run("compact", chat, "--budget", "2000")
    seen = run("thread", chat, "--json").json
    with pycontext.connect(dsn) as db:
        assert [row["message_id"] for row in seen["rows"]] == [row.message_id for row in db.thread(chat)]
        assert [row["content"] for row in seen["rows"]] == [row.content for row in db.thread(chat)]
        read = run("window", chat, "--budget", "3000", "--json").json
        rows = db.window(chat, 3000)
    assert read["token_budget"] == 3000
    assert read["window_tokens"] == 3 + sum(row.tokens for row in rows) <= 3000
    assert sum(read["sections"].values()) == sum(row.tokens for row in rows)
    assert [row["content"] for row in read["rows"]] == [row.content for row in rows]
    assert [row["chat_id"] for row in run("chats", "--json").json] == [chat]
    assert "findings" in run("status", "--json").json


def test_window_shows_sections_and_a_bar_of_the_budget(run: Any, chat: str) -> None:
    run("compact", chat, "--budget", "2000")
    result = run("window", chat, "--budget", "3000")
    assert result.code == 0
    lines = result.out.splitlines()
    bar = next(line for line in lines if line.startswith("[") and line.endswith("]"))
    assert len(bar) == 120
    for name in ("system", "head", "summary", "tail", "free"):
        assert re.search(rf"\b{name} [\d,]+", result.out), name
    assert "of 3,000 tokens" in result.out
    assert all(len(line) <= 120 for line in lines)


def test_window_as_of_a_message(run: Any, chat: str) -> None:
    read = run("window", chat, "--as-of", "a3", "--json").json
    assert read["as_of"] == "a3"
    assert read["rows"][-1]["message_id"] == "a3"


def test_compact_says_what_was_saved(run: Any, chat: str) -> None:
    result = run("compact", chat, "--budget", "2000", "--summarizer", "extractive", "--focus", "prices")
    assert result.code == 0
    assert re.search(r"summarized #\d+–#\d+: [\d,]+ → [\d,]+ tokens, \d+% saved", result.out)
    short = run("import", DEMO)
    assert short.code == 0
    assert run("compact", chat, "--summarizer", "openai").code == 1


def test_chats_and_status(run: Any, chat: str) -> None:
    listed = run("chats")
    assert listed.code == 0
    assert listed.out.splitlines()[0].split()[:2] == ["chat", "messages"]
    assert re.search(r"^c +60 ", listed.out, re.MULTILINE)
    assert run("status").code == 0


def test_nothing_that_drives_a_terminal_is_printed(run: Any, dsn: str) -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07 [bold red]:smile:[/] \u202eabc\r\nnext \x9b31m"
    with pycontext.connect(dsn) as db:
        db.create_chat("h\x1b[31m")
        db.append("h\x1b[31m", {"role": "user", "content": hostile, "name": "x"})
    for arguments in (["thread", "h\x1b[31m"], ["window", "h\x1b[31m"], ["chats"], ["thread", "no\x1b[31m"]):
        result = run(*arguments)
        for character in "\x1b\x07\x9b\u202e\r":
            assert character not in result.out + result.err, arguments
    assert "[bold red]:smile:[/]" in run("thread", "h\x1b[31m").out


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_lines_fit_the_terminal(run: Any, chat: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    run("compact", chat, "--budget", "2000")
    for arguments in (["thread", chat], ["window", chat, "--budget", "3000"], ["chats"]):
        text = run(*arguments).out
        assert "\x1b[" in text
        plain = re.sub(r"\x1b\[[\d;]*m", "", text)
        assert all(len(line) <= min(columns, 120) for line in plain.splitlines()), arguments


def test_an_ascii_terminal_gets_question_marks_not_a_traceback(dsn: str, chat: str) -> None:
    environment = {**os.environ, "PYCONTEXT_DSN": dsn, "PYTHONIOENCODING": "ascii"}
    script = "import sys; from pycontext.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, "window", chat], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"T tail" in done.stdout


def test_import_is_the_conversation_and_twice_is_harmless(
    run: Any, db: psycopg.Connection[Any], dsn: str
) -> None:
    first = run("import", DEMO)
    assert first.code == 0
    assert "1 conversation, 120 messages (120 new)" in first.out
    second = run("import", DEMO)
    assert "1 conversation, 120 messages (0 new)" in second.out
    given = json.loads(DEMO.read_text("utf-8"))
    messages = given["messages"][1:]
    with pycontext.connect(dsn) as chats:
        rows = chats.thread(given["id"], max_rows=1000)
        status = chats.status(given["id"])
        system = chats.window(given["id"])[0]
    assert (system.section, system.content) == ("system", given["messages"][0]["content"])
    assert [row.content for row in rows] == [message["content"] for message in messages]
    assert [row.tool_calls for row in rows] == [message.get("tool_calls") for message in messages]
    assert [row.created_at.isoformat(timespec="milliseconds").replace("+00:00", "Z") for row in rows] == [
        message["created_at"] for message in messages
    ]
    errors = [row.metadata for row in rows if row.metadata]
    assert errors == [{"is_error": True}] * sum("is_error" in message for message in messages)
    assert not any(row.is_estimate for row in rows)
    assert status.uncounted == 0


def test_import_is_all_or_nothing_per_conversation(
    run: Any, tmp_path: Path, db: psycopg.Connection[Any]
) -> None:
    good = {"id": "good", "messages": [{"role": "user", "content": "hi"}]}
    bad = {"id": "bad", "messages": [{"role": "user", "content": "hi"}, {"role": "bot", "content": "x"}]}
    other = {"id": "other", "messages": [{"role": "user", "content": "hi"}]}
    result = run("import", write(tmp_path / "x.jsonl", good, bad, b"{", other))
    assert result.code == 1
    assert "error: x.jsonl line 2: messages[1].role: 'bot' is none of" in result.err
    assert "error: x.jsonl line 3: not JSON" in result.err
    assert "2 conversations, 2 messages (2 new), 2 not imported" in result.out
    assert [rows_in(db, name) for name in ("good", "bad", "other")] == [1, 0, 1]


def test_an_error_of_the_database_leaves_nothing_of_the_conversation(
    run: Any, tmp_path: Path, db: psycopg.Connection[Any]
) -> None:
    messages = [{"role": "user", "content": f"m{n}"} for n in range(250)]
    assert run("import", write(tmp_path / "a.jsonl", {"id": "a", "messages": messages[:201]})).code == 0
    changed = [*messages[:200], {"role": "user", "content": "another"}, *messages[201:]]
    result = run("import", write(tmp_path / "b.jsonl", {"id": "a", "messages": changed}))
    assert result.code == 1
    assert "b.jsonl line 1: " in result.err
    assert "(PCX03)" in result.err
    assert rows_in(db, "a") == 201
    grown = run("import", write(tmp_path / "c.jsonl", {"id": "a", "messages": messages}))
    assert "250 messages (49 new)" in grown.out


def test_import_chat_id_prefix_and_stdin(
    run: Any, tmp_path: Path, db: psycopg.Connection[Any], dsn: str
) -> None:
    path = write(tmp_path / "x.jsonl", {"messages": [{"role": "user", "content": "hi \x00 \ud83d"}]})
    assert run("import", path, "--chat-id", "mine").code == 0
    assert run("import", path, "--prefix", "old/").code == 0
    assert [rows_in(db, name) for name in ("mine", "old/x-1")] == [1, 1]
    assert run("import", path, path, "--chat-id", "mine").code == 1
    script = "import sys; from pycontext.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, "import", "-", "--chat-id", "piped"],
        input=path.read_bytes(),
        env={**os.environ, "PYCONTEXT_DSN": dsn},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert rows_in(db, "piped") == 1
    content = db.execute("select content #>> '{}' from pycontext.message where chat_id = 'piped'").fetchone()
    assert content == ("hi \ufffd \ufffd",)


def test_import_of_a_missing_file_is_an_error(run: Any, tmp_path: Path) -> None:
    result = run("import", tmp_path / "none.jsonl")
    assert result.code == 1
    assert "none.jsonl: No such file or directory" in result.err


def test_psql_opens_on_the_database(dsn: str) -> None:
    script = "import sys; from pycontext.cli import main; sys.exit(main())"
    arguments = ["psql", "-X", "-A", "-t", "-c", "select pycontext.schema_version()"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYCONTEXT_DSN": dsn},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_embedded_server_is_named_on_stderr(tmp_path: Path) -> None:
    script = "import sys; from pycontext.cli import main; sys.exit(main())"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYCONTEXT_DSN", "DATABASE_URL")
    }
    folder = Path("/tmp") / f"pycontext-cli-{os.getpid()}"
    environment["PYCONTEXT_DATA_DIR"] = str(folder)
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, "chats", "--json"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == []
        assert done.stderr.splitlines() == [f"using the embedded server, its data is in {folder}"]
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.mark.real
def test_every_real_file_is_imported(run: Any, shared_data: Path, db: psycopg.Connection[Any]) -> None:
    files = sorted(shared_data.glob("*.jsonl"))
    result = run("import", *files)
    assert (result.code, result.err) == (0, "")
    expected = 0
    for path in files:
        for line in path.read_text("utf-8").split("\n"):
            if line.strip():
                roles = [message["role"] for message in json.loads(line)["messages"]]
                leading = next(index for index, role in enumerate(roles) if role != "system")
                expected += len(roles) - leading
    found = db.execute(
        "select count(*), count(*) filter (where kind <> 'message') from pycontext.message"
    ).fetchone()
    assert found == (expected, 0)


def test_the_demo_runs_twice_on_one_database(run: Any, db: psycopg.Connection[Any]) -> None:
    first = run("demo", "--short")
    assert first.code == 0, first.err
    assert "summaries written" in first.out
    assert "— summary of #" in first.out
    assert "SELECT * FROM working_window('demo-payout')" in first.out
    assert "psql" in first.out
    _stages_are_what_the_database_says(first.out, db)
    again = run("demo", "--short")
    assert again.code == 0, again.err
    assert "SELECT * FROM working_window('demo-payout-2')" in again.out
    both = [re.findall(r"summarized #.*tokens", result.out) for result in (first, again)]
    assert both[0] == both[1] != []


def _stages_are_what_the_database_says(out: str, db: psycopg.Connection[Any]) -> None:
    """Each stage by its name, with figures of the log."""
    told = dict(re.findall(r"^  (pre-pass|flush|summary|merge|skip|degrade) +(.+)$", out, re.MULTILINE))
    for stage, outcome in (("pre-pass", "pruned"), ("summary", "summarized")):
        passes, before, after = _one(
            db,
            "select count(*), sum(tokens_before), sum(tokens_after) from pycontext.compaction_history"
            " where outcome = %s",
            outcome,
        )
        assert passes > 0
        assert told[stage].startswith(f"{passes} passes, {before:,} → {after:,} tokens")
    facts, first, last = _one(
        db, "select count(*), min(seq), max(seq) from pycontext.fact where source = %s", "flush"
    )
    assert facts > 0
    flushed = _one(db, "select flushed_seq from pycontext.chat where chat_id = %s", "demo-payout")[0]
    assert told["flush"].endswith(f": {facts}, from messages #{first}–#{last}; flushed through #{flushed}")
    lines, place = _one(
        db,
        "select count(*), max(seq) from pycontext.message where kind = 'summary' and chat_id = %s",
        "demo-payout",
    )
    assert lines > 1
    tokens = _one(
        db, "select tokens from pycontext.working_window(%s, 8000) where section = 'summary'", "demo-payout"
    )[0]
    assert told["merge"] == f"{lines} segments, through #{place}, in one line of {tokens:,} tokens"
    reason = _one(
        db,
        "select reason from pycontext.compaction_history where outcome = %s order by pass_no desc limit 1",
        "skipped",
    )[0]
    assert told["skip"] == f"asked once more: {reason}"
    small = int(re.findall(r"read at ([\d,]+) tokens", told["degrade"])[0].replace(",", ""))
    used, markers, shortened = _one(
        db,
        "select 3 + sum(tokens), count(*) filter (where section = 'omitted'),"
        " count(*) filter (where is_shortened) from pycontext.working_window('demo-payout', %s)",
        small,
    )
    assert used <= small
    assert markers + shortened > 0
    figures = f"{used:,} tokens, markers for what is left out: {markers}, rows shortened: {shortened}"
    assert told["degrade"].endswith(figures)


def _one(db: psycopg.Connection[Any], query: str, *values: Any) -> Any:
    row = db.execute(query.encode(), values).fetchone()
    assert row is not None
    return row
