"""The embedded server as a user meets it: other processes, root and not, closed folders, crashes."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pycontext import install
from pycontext.embedded import Server, binaries, data_dir, psql, start
from pycontext.errors import EmbeddedUnavailable, SchemaTooNew

ROOT = Path(__file__).resolve().parents[2]
IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pycontext-embedded-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    for data in path.rglob("postmaster.pid"):  # a server that a failed test left behind
        os.kill(int(data.read_text().split()[0]), signal.SIGQUIT)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def once() -> Iterator[Path]:
    """A folder whose server was started before, to be copied: making one takes seconds."""
    path = Path(tempfile.mkdtemp(prefix="pycontext-once-", dir="/tmp"))
    path.chmod(0o755)
    out, err = run(path / "data").communicate(timeout=90)
    assert out, err
    yield path / "data"
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def data(folder: Path, once: Path) -> Path:
    subprocess.run(["cp", "-a", once, folder / "data"], check=True)
    return folder / "data"


PROGRAM = """
import sys
from pycontext.embedded import start
import psycopg
found = start()
with psycopg.connect(found.dsn) as conn:
    print(conn.execute("show search_path").fetchone()[0], conn.info.dbname)
sys.stdout.flush()
"""


def run(data: Path, program: str = PROGRAM, **arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYCONTEXT_DATA_DIR": str(data),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **arguments,  # type: ignore[call-overload]
    )


def running(data: Path) -> bool:
    return (data / "data" / "postmaster.pid").exists()


def test_one_command_gives_a_database_and_leaves_no_server(folder: Path) -> None:
    data = folder / "new" / "data"
    for _ in range(2):
        process = run(data)
        out, err = process.communicate(timeout=90)
        assert out == '"$user", public, pycontext pycontext\n', err
        assert not running(data)
    assert data.stat().st_mode & 0o077 == 0


def test_processes_at_once_share_one_server(folder: Path) -> None:
    data = folder / "shared"
    processes = [run(data) for _ in range(6)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert out.endswith(" pycontext\n"), err
    assert not running(data)


WAIT = PROGRAM + "sys.stdin.readline()\n"


def test_the_last_user_stops_the_server(data: Path) -> None:
    first = run(data, WAIT)
    assert first.stdout is not None
    first.stdout.readline()
    second = run(data, WAIT)
    assert second.stdout is not None
    second.stdout.readline()
    second.communicate("\n", timeout=60)
    assert running(data), "stopped under a process that uses it"
    first.communicate("\n", timeout=60)
    assert not running(data)


def test_a_killed_process_leaves_a_server_that_the_next_one_takes_over(data: Path) -> None:
    first = run(data, WAIT)
    assert first.stdout is not None
    first.stdout.readline()
    first.kill()
    first.communicate()
    assert running(data)
    out, err = run(data).communicate(timeout=60)
    assert out, err
    assert not running(data)


def test_a_killed_server_starts_again(data: Path) -> None:
    server = Server(data)
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute("create table kept as select 1 as n")
    os.kill(int((server.data / "postmaster.pid").read_text().split()[0]), signal.SIGQUIT)
    again = Server(data)
    again.start()
    try:
        with psycopg.connect(again.dsn()) as conn:
            assert conn.execute("select n from kept").fetchone() == (1,)
    finally:
        again.release()
        server.release()
    assert not running(data)


def test_a_path_too_long_for_a_socket(data: Path) -> None:
    with Server(data.rename(data.with_name(("long name " * 12).strip()))) as server:
        assert server.socket_dir != server.root
        psycopg.connect(server.dsn()).close()
    assert not server.socket_dir.exists()


def test_odd_characters_in_the_path(data: Path) -> None:
    with Server(data.rename(data.with_name("it's, 100% «ок» #1"))) as server:
        psycopg.connect(server.dsn()).close()
    assert not server.socket_dir.exists()


def test_a_start_that_fails_leaves_no_server(data: Path) -> None:
    def fail(server: Server) -> None:
        psycopg.connect(server.dsn()).close()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        Server(data).start(prepare=fail)
    assert not running(data)


def test_the_schema_is_brought_up_to_date(data: Path) -> None:
    found = start(data)
    with psycopg.connect(found.dsn, autocommit=True) as conn:
        assert install.schema_state(conn) == "current"
        assert conn.execute("select count(*) from migration").fetchone() != (0,)  # the search path is set
        conn.execute("comment on table pycontext.migration is 'another build'")
        assert install.schema_state(conn) == "older"
        assert start(data) == found
        assert install.schema_state(conn) == "current"


@pytest.mark.parametrize(
    "change",
    [
        "update pycontext.migration set sha256 = 'other'",
        "alter view pycontext.finding_row rename column detail to details",
        "drop function pycontext.schema_version();"
        "create function pycontext.schema_version() returns integer language sql as 'select 1'",
    ],
    ids=["migration", "view", "function"],
)
def test_a_development_versions_database_is_kept_aside(data: Path, change: str) -> None:
    found = start(data)
    with psycopg.connect(found.dsn, autocommit=True) as conn:
        conn.execute("create table public.precious as select 1 as n")
        conn.execute(change.encode())
        conn.execute("comment on table pycontext.migration is 'an earlier build'")
        with pytest.raises(EmbeddedUnavailable, match="in use"):
            start(data)
    with pytest.warns(UserWarning, match="kept as pycontext_until_"):
        assert start(data) == found
    with psycopg.connect(found.dsn, autocommit=True) as conn:
        assert install.schema_state(conn) == "current"
        row = conn.execute(
            "select datname from pg_database where datname like 'pycontext_until_%'"
        ).fetchone()
        assert row is not None
    with psycopg.connect(found.dsn.replace("/pycontext?", f"/{row[0]}?")) as conn:
        assert conn.execute("select n from precious").fetchone() == (1,)


def test_data_of_another_checkout_are_named_and_left_alone(data: Path) -> None:
    found = start(data)
    with psycopg.connect(found.dsn, autocommit=True) as conn:
        conn.execute("insert into pycontext.migration (name, sha256) values ('900_of_tomorrow', 'x')")
        with pytest.raises(SchemaTooNew, match="PYCONTEXT_DATA_DIR") as error:
            start(data)
        assert error.value.detail == f"they are in {data}"
        assert install.schema_state(conn) == "newer"


def test_status_tells_other_programs_where_it_is(data: Path) -> None:
    done = run(data, "import sys; from pycontext import cli; sys.argv = ['pycontext', 'status']; cli.main()")
    out, err = done.communicate(timeout=60)
    dsn = next(line.strip() for line in out.splitlines() if "postgresql://" in line)
    assert f"its data is in {data}" in " ".join(err.split())
    assert start(data).dsn == dsn
    with psycopg.connect(dsn) as conn:
        assert conn.execute("select pycontext.schema_version()").fetchone() is not None


def test_psql_is_in_the_wheel(data: Path) -> None:
    found = start(data)
    assert psql(["-X", "-c", "select 1"], dsn=found.dsn) == 0
    assert psql(["-X", "-v", "ON_ERROR_STOP=1", "-c", "select no"], dsn=found.dsn) != 0


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EmbeddedUnavailable) as caught:
        start(Path("/nowhere"))
    assert "pycontext-pg[embedded]" in str(caught.value)


def test_where_the_data_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYCONTEXT_DATA_DIR", str(tmp_path / "given"))
    assert data_dir() == tmp_path / "given"
    monkeypatch.delenv("PYCONTEXT_DATA_DIR")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert data_dir() == tmp_path / "xdg" / "pycontext"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_dir() == tmp_path / ".local" / "share" / "pycontext"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert data_dir() == Path("/var/lib/pycontext")


@needs_root
def test_root_is_told_about_a_closed_folder_and_nothing_is_opened(folder: Path) -> None:
    closed = folder / "home"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedUnavailable) as caught:
        start(closed / "data")
    assert str(closed) in (caught.value.detail or "")
    assert "PYCONTEXT_DATA_DIR" in (caught.value.hint or "")
    assert closed.stat().st_mode & 0o777 == 0o700


@needs_root
def test_root_with_programs_in_a_closed_folder(folder: Path, data: Path) -> None:
    """A checkout under /root: the server's account can't reach .venv there, and /root stays closed."""
    closed = folder / "home"
    closed.mkdir(mode=0o700)
    package = binaries().parents[1]
    for name in (f"{package.name}/pginstall18", f"{package.name}.libs"):
        if (package.parent / name).exists():
            shutil.copytree(package.parent / name, closed / name, symlinks=True)
    for _ in range(2):
        with Server(data, bin_path=closed / package.name / "pginstall18" / "bin") as server:
            psycopg.connect(server.dsn()).close()
    assert closed.stat().st_mode & 0o777 == 0o700
    assert len(list(data.glob("programs-*"))) == 1


@needs_root
def test_root_does_not_take_over_a_folder_of_files(folder: Path) -> None:
    (folder / "precious.txt").write_text("x")
    with pytest.raises(EmbeddedUnavailable):
        start(folder)
    assert folder.stat().st_uid == 0


@needs_root
def test_processes_at_once_make_one_account() -> None:
    name = f"pycontext-{os.getpid()}"
    program = (
        "import sys, pycontext.embedded; embedded = sys.modules['pycontext.embedded'];"
        f" embedded.ACCOUNT = {name!r}; print(embedded._account(0).uid)"
    )
    try:
        running = [
            subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        told = {int(process.communicate(timeout=60)[0]) for process in running}
        assert told == {pwd.getpwnam(name).pw_uid}
    finally:
        subprocess.run(["userdel", name], check=False, capture_output=True)


@needs_root
def test_somebody_who_is_not_root(folder: Path) -> None:
    account = pwd.getpwnam("nobody")
    home = folder / "home"
    home.mkdir()
    os.chown(home, account.pw_uid, account.pw_gid)
    as_nobody = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": [], "cwd": "/"}
    try:
        process = run(home / "data", **as_nobody)
    except PermissionError:
        pytest.skip("nobody can't run this Python")
    out, err = process.communicate(timeout=90)
    if "No module named" in err:
        pytest.skip("nobody can't read this checkout")
    assert out, err
    assert (home / "data").stat().st_uid == account.pw_uid
