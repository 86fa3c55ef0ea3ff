"""Which database a command works on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pycontext.cli.terminal import err, visible
from pycontext.connections import NotConfigured, conninfo_from


@dataclass(frozen=True)
class Target:
    """A database; data_dir is set where it is the embedded server's."""

    dsn: str
    data_dir: Path | None = None


def find(dsn: str | None, *, may_embed: bool = True) -> Target:
    """--dsn, then PYCONTEXT_DSN, then DATABASE_URL, else the embedded server, which is said on stderr."""
    try:
        return Target(conninfo_from(dsn))
    except NotConfigured as error:
        if not may_embed:
            raise NotConfigured(
                error.message,
                detail="Neither --dsn nor PYCONTEXT_DSN nor DATABASE_URL is given.",
                hint="Name the database. This command never uses the embedded server.",
            ) from None
    from pycontext.embedded import start

    server = start()
    err().print(f"using the embedded server, its data is in {visible(str(server.data_dir))}", style="dim")
    return Target(server.dsn, server.data_dir)
