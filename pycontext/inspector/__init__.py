"""The page of one chat: its thread, what the model reads of it, and why. One HTML file that loads nothing."""

from __future__ import annotations

from typing import Any

import psycopg

from pycontext.inspector.page import render
from pycontext.inspector.reading import read

__all__ = ["inspect"]


def inspect(
    connection: psycopg.Connection[Any],
    chat_id: str,
    token_budget: int | None = None,
    as_of: str | None = None,
    max_rows: int = 10_000,
) -> str:
    """The chat as a self-contained HTML page, read from one snapshot.

    token_budget: the window in so many tokens; None means the profile's. as_of: a message's id: the window as
    it was at that message. max_rows: the newest rows of the thread that are shown. The connection must be in
    no transaction; nothing is written.

    Raises NoSuchChat, BudgetTooSmall. SQL: working_window, explain_window, thread, compaction_history.
    """
    return render(read(connection, chat_id, token_budget, as_of, max_rows))
