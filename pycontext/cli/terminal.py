"""What the command line prints on, how it reports errors, and how a chat's text is made safe to print."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Decimal
from functools import cache
from typing import Any

import psycopg
import typer
from rich.console import Console
from rich.text import Text

from pycontext.errors import PycontextError

WIDTH = 120

_SPACES = re.compile(r"\s+")
# Controls (C0, DEL, C1) can drive a terminal; direction marks can reorder what stands beside them.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Failed(PycontextError):
    """An error of the command itself, not of the database."""


@cache
def out() -> Console:
    """The console on stdout: at most 120 columns, exactly that many where it is no terminal."""
    return _console(is_stderr=False)


@cache
def err() -> Console:
    """The console on stderr."""
    return _console(is_stderr=True)


def _console(is_stderr: bool) -> Console:
    console = Console(stderr=is_stderr, highlight=False, markup=False, emoji=False, soft_wrap=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


def visible(text: str) -> str:
    """Text on one line, with nothing in it that a terminal would act on."""
    return _UNSAFE.sub(_picture, _SPACES.sub(" ", text)).strip()


def printable(text: str) -> str:
    """Text as it is, lines included, with nothing else in it that a terminal would act on."""
    return _UNSAFE.sub(lambda match: match.group() if match.group() in "\n\t" else _picture(match), text)


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    return chr(0x2400 + code) if code < 0x20 else "\N{REPLACEMENT CHARACTER}"


def number(value: int | None) -> str:
    """A count for people."""
    return "–" if value is None else f"{value:,}"


def print_json(value: Any) -> None:
    """Write a value to stdout as JSON, and nothing else."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


@contextmanager
def reported() -> Iterator[None]:
    """Turn an error of the user's, the database's or the machine's into a red line and exit code 1."""
    try:
        yield
    except PycontextError as error:
        report(error)
    except psycopg.Error as error:
        report(
            PycontextError(
                error.diag.message_primary or str(error).strip() or type(error).__name__,
                detail=error.diag.message_detail,
                hint=error.diag.message_hint or _way_out(error),
                sqlstate=error.sqlstate,
            )
        )
    except BrokenPipeError:
        raise
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        report(Failed(f"{name}{error.strerror or error}"))
    else:
        return
    raise typer.Exit(1)


def _way_out(error: psycopg.Error) -> str | None:
    if error.sqlstate == "42501":
        return (
            "of pycontext's: grant pycontext_reader (reads) or pycontext_writer (acts) to this role"
            " (sql/extras/roles.sql makes them); of a table of yours: grant select on it, and on its view, to"
            " this role and to the owner of schema pycontext, and usage on its schema"
        )
    if error.sqlstate is None and isinstance(error, (psycopg.OperationalError, psycopg.ProgrammingError)):
        return (
            "is it the right database? --dsn, PYCONTEXT_DSN or DATABASE_URL: postgresql://user@host:5432/name"
        )
    return None


def report(error: PycontextError, place: str = "") -> None:
    """Print an error on stderr: message and SQLSTATE in red, then DETAIL and HINT."""
    lines = Text()
    state = f" ({error.sqlstate})" if error.sqlstate else ""
    lines.append(f"error: {place}{visible(error.message)}{state}", style="bold red")
    for label, value in (("DETAIL", error.detail), ("HINT", error.hint)):
        if value:
            lines.append(f"\n{label}: {visible(value)}")
    err().print(lines)
