"""PgBouncer in front of a test server: transaction mode, few server connections, another one each time."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

PROGRAM = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"

SIZE = 3

# Round robin: two transactions in a row are on two server connections.
_SETTINGS = """
[databases]
* = host={host} port={port} user={user}

[pgbouncer]
listen_addr =
listen_port = 6432
unix_socket_dir = {folder}
logfile = {folder}/log
pidfile = {folder}/pid
auth_type = any
pool_mode = transaction
server_round_robin = 1
default_pool_size = {size}
max_client_conn = 300
server_login_retry = 0
query_wait_timeout = {wait}
"""


class Pooler:
    """A running PgBouncer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def dsn(self, direct: str) -> str:
        """The same database through the pooler, which knows no `options`."""
        given = conninfo_to_dict(direct)
        given.pop("options", None)
        made = make_conninfo(**{**given, "host": str(self.folder), "port": 6432})
        with ExitStack() as stack:  # all its server connections are open from now on
            for _ in range(SIZE):
                stack.enter_context(psycopg.connect(made)).execute("select 1")
        return made


@contextmanager
def serve(host: str, port: int, user: str, *, wait: int = 60) -> Iterator[Pooler]:
    """Start a pooler in front of that server; stop it at the end."""
    # As whoever owns the server's socket: PgBouncer does not run as root, and nobody else may connect.
    owner = pwd.getpwuid(os.stat(host).st_uid)
    folder = Path(tempfile.mkdtemp(prefix="pycontext-pooler-", dir="/tmp"))
    try:
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        settings = folder / "pgbouncer.ini"
        settings.write_text(
            _SETTINGS.format(host=host, port=port, user=user, folder=folder, size=SIZE, wait=wait)
        )
        settings.chmod(0o644)
        become = ["-u", owner.pw_name] if os.geteuid() == 0 else []
        process = subprocess.Popen([PROGRAM, "-q", *become, str(settings)], stderr=subprocess.DEVNULL)
        try:
            _wait(process, folder, user)
            yield Pooler(folder)
        finally:
            process.terminate()
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(process: subprocess.Popen[bytes], folder: Path, user: str) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            psycopg.connect(host=str(folder), port=6432, user=user, dbname="postgres").close()
        except psycopg.OperationalError:
            log = folder / "log"
            assert process.poll() is None, log.read_text() if log.exists() else "pgbouncer did not start"
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        else:
            return
