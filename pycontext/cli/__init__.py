"""The command line, extra `cli`: `pycontext --help` lists its commands."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; returns its exit code: 0 done, 1 an error, 2 wrong usage."""
    try:
        import rich
        import typer  # noqa: F401
    except ImportError as error:
        if sys.argv[1:] == ["sql"]:  # the one command that needs nothing: for whoever installs by other means
            from pycontext.install import build_sql

            sys.stdout.write(build_sql())
            return 0
        print(
            f"pycontext: the command line needs {error.name}: pip install 'pycontext-pg[cli]'",
            file=sys.stderr,
        )
        return 2
    from pycontext.cli.app import run

    del rich
    return run()
