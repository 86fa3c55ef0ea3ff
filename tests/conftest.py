"""A real server for every test: PostgreSQL 18 from the wheel; for the core also its 16, and Debian's 15.

One server a session, the schema installed once into a template database, a clone of it for each test.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from pytest_postgresql import factories

from pycontext import install
from pycontext.embedded import Server, binaries

ROOT = Path(__file__).resolve().parent.parent
DEBIAN_15 = Path("/usr/lib/postgresql/15/bin")

Connection = psycopg.Connection[Any]


@dataclass
class TestServer:
    """What pytest-postgresql asks of a server it did not start."""

    __test__ = False

    server: Server
    host: str
    port: int = 5432
    user: str = "postgres"
    password: str = ""
    options: str = ""
    maintenance_dbname: str = "postgres"
    template_dbname: str | None = None

    def dsn(self, database: str = "postgres") -> str:
        return make_conninfo(host=self.host, port=self.port, user=self.user, dbname=database)


def _roomy_memory() -> str | None:
    """A folder in memory with room for the servers: a clone is 330 files, a second on some disks."""
    folder = "/dev/shm"
    return folder if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > 6 * 1024**3 else None


def _serve(bin_path: Path) -> Iterator[TestServer]:
    # Not pytest's own temporary folder: only its owner may enter it, and the server may be somebody else.
    root = Path(tempfile.mkdtemp(prefix="pycontext-test-", dir=_roomy_memory() or "/tmp"))
    settings = {"max_connections": "150", "max_wal_size": "128MB"}
    server = Server(root, bin_path=bin_path, durable=False, settings=settings)
    try:
        server.start()
        yield TestServer(server, str(server.socket_dir))
    finally:
        server.release()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def server18() -> Iterator[TestServer]:
    yield from _serve(binaries(18))


@pytest.fixture(scope="session")
def server16() -> Iterator[TestServer]:
    yield from _serve(binaries(16))


@pytest.fixture(scope="session")
def server15() -> Iterator[TestServer]:
    if not (DEBIAN_15 / "postgres").exists():
        pytest.skip(f"no PostgreSQL 15 in {DEBIAN_15} (Debian: apt-get install postgresql-15)")
    yield from _serve(DEBIAN_15)


def _install(*, host: str, port: int, user: str, dbname: str, **_: Any) -> None:
    with psycopg.connect(host=host, port=port, user=user, dbname=dbname, autocommit=True) as conn:
        install.install(conn)
        if broken := os.environ.get("PYCONTEXT_BROKEN_SQL"):  # see bench/mutate.py
            conn.execute(Path(broken).read_bytes())


template18 = factories.postgresql_noproc(depends_on="server18", dbname="pycontext", load=[_install])
template16 = factories.postgresql_noproc(depends_on="server16", dbname="pycontext", load=[_install])
template15 = factories.postgresql_noproc(depends_on="server15", dbname="pycontext", load=[_install])
clone18 = factories.postgresql("template18")
clone16 = factories.postgresql("template16")
clone15 = factories.postgresql("template15")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # Tests marked `core` run on each major version, the others on the newest.
    if "pg" in metafunc.fixturenames:
        core = metafunc.definition.get_closest_marker("core") is not None
        majors = [18, 16, 15] if core else [18]
        metafunc.parametrize("pg", majors, ids=lambda major: f"pg{major}", indirect=True)


@pytest.fixture
def pg(request: pytest.FixtureRequest) -> int:
    """The major version this test runs on."""
    return int(request.param)


@pytest.fixture
def server(pg: int, request: pytest.FixtureRequest) -> TestServer:
    """The running server, for what is not inside one database: roles, other databases, a restart."""
    found: TestServer = request.getfixturevalue(f"server{pg}")
    return found


@pytest.fixture
def direct_dsn(pg: int, request: pytest.FixtureRequest) -> str:
    """`dsn`, also where that one leads through a pooler."""
    clone: Connection = request.getfixturevalue(f"clone{pg}")
    path = "-c search_path=public,pycontext"
    info = clone.info
    made = make_conninfo(host=info.host, port=info.port, user=info.user, dbname=info.dbname, options=path)
    clone.close()
    return made


@pytest.fixture
def dsn(direct_dsn: str) -> str:
    """Connection string of this test's own database, for second sessions and other processes."""
    return direct_dsn


@pytest.fixture
def db(direct_dsn: str) -> Iterator[Connection]:
    """A session on this test's own database: autocommit, pycontext on the search path."""
    with psycopg.connect(direct_dsn, autocommit=True) as conn:
        yield conn


@pytest.fixture
def empty_dsn(server: TestServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """Connection string of a database without the schema."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute("drop database if exists bare with (force)")
        conn.execute("create database bare")
        yield server.dsn("bare")
        conn.execute("drop database bare with (force)")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real conversations beside the checkout."""
    folder = Path(os.environ.get("PYCONTEXT_SHARED_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no real conversations in {folder}")
    return folder
