"""The statements of queries.sql by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

_MARK = "-- name:"
_TYPED = re.compile(r"%\((\w+)\)s::(\w+)")


@cache
def queries() -> Mapping[str, str]:
    """Every statement, read once."""
    text = files("pycontext").joinpath("queries.sql").read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(_MARK):
            name = line.removeprefix(_MARK).strip()
            if name in found:
                raise ValueError(f"queries.sql names {name} twice")
            lines = found.setdefault(name, [])
        elif line.strip() and not line.lstrip().startswith("--"):
            lines.append(line)
    return MappingProxyType({name: "\n".join(body).rstrip(";") for name, body in found.items()})


def query(name: str) -> str:
    """The statement of that name."""
    return queries()[name]


@cache
def parameter_types(name: str) -> Mapping[str, str]:
    """Which type each parameter of that statement is sent as."""
    return MappingProxyType(dict(_TYPED.findall(query(name))))
