from __future__ import annotations

import pickle
from typing import Any

import psycopg
import pytest

from pycontext import errors

CODES = {
    "PCX01": errors.NoSuchChat,
    "PCX02": errors.BadMessage,
    "PCX03": errors.MessageIdReused,
    "PCX04": errors.ToolResultWithoutId,
    "PCX05": errors.BudgetTooSmall,
    "PCX06": errors.BadProfile,
    "PCX07": errors.SummaryRefused,
    "PCX08": errors.LeaseHeld,
    "PCX09": errors.AdoptedChat,
    "PCX10": errors.NotYourTenant,
    "PCX11": errors.SchemaTooNew,
    "PCX12": errors.BadSource,
    "PCX13": errors.BadEmbedding,
}


@pytest.mark.parametrize("code", CODES)
def test_each_sqlstate_has_its_class(db: psycopg.Connection[Any], code: str) -> None:
    with pytest.raises(CODES[code]) as caught, errors.translate():
        db.execute(
            "do $$ begin raise exception 'it is so' "
            f"using errcode = '{code}', detail = 'n=1', hint = 'do that'; end $$"
        )
    error = caught.value
    assert (error.sqlstate, error.message, error.detail, error.hint) == (code, "it is so", "n=1", "do that")
    assert str(error) == "it is so\ndetail: n=1\nhint: do that"
    assert isinstance(error.__cause__, psycopg.Error)
    assert type(error) is CODES[code]


def test_a_code_of_tomorrow_is_still_ours(db: psycopg.Connection[Any]) -> None:
    with pytest.raises(errors.PycontextError) as caught, errors.translate():
        db.execute("do $$ begin raise exception 'new' using errcode = 'PCX77'; end $$")
    assert caught.value.sqlstate == "PCX77"


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("select pycontext.working_window('a')", "3F000"),
        ("select * from pycontext.chat", "42P01"),
    ],
)
def test_a_missing_schema_says_what_to_run(empty_dsn: str, query: str, code: str, pg: int) -> None:
    with (
        psycopg.connect(empty_dsn) as conn,
        pytest.raises(errors.SchemaMissing) as caught,
        errors.translate(),
    ):
        conn.execute(query)
    assert caught.value.sqlstate == code
    assert "pycontext install" in (caught.value.hint or "")


def test_an_older_schema_says_what_to_run(db: psycopg.Connection[Any]) -> None:
    with pytest.raises(errors.SchemaMissing) as caught, errors.translate():
        db.execute("select pycontext.function_of_tomorrow()")
    assert caught.value.sqlstate == "42883"


@pytest.mark.parametrize("query", ["select * from my_table", "select my_function()", "select 1 / 0"])
def test_the_callers_own_mistakes_stay_the_drivers(db: psycopg.Connection[Any], query: str) -> None:
    with pytest.raises(psycopg.Error), errors.translate():
        db.execute(query)


def test_errors_survive_a_process_border() -> None:
    error = errors.BudgetTooSmall("too small", detail="needs 10", hint="give more")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.BudgetTooSmall
    assert (str(copy), copy.sqlstate) == (str(error), "PCX05")
