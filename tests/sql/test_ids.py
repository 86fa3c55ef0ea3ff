"""A chat's id as the product has it: text, a number, a uuid, in every function of a chat."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

Connection = psycopg.Connection[Any]

pytestmark = pytest.mark.core

UUID = "7b0c1d8e-0000-4000-8000-000000000001"
WAYS = {
    "bigint": ("4::bigint", "4"),
    "integer": ("4", "4"),
    "uuid": (f"'{UUID}'::uuid", UUID),
    "text": ("'conv_9'::text", "conv_9"),
    "varchar": ("'conv_9'::varchar", "conv_9"),
    "literal": ("'conv_9'", "conv_9"),
}


def value(db: Connection, query: str) -> Any:
    row = db.execute(query).fetchone()
    assert row is not None
    return row[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_chat_is_named_by_an_id_of_its_own_type(db: Connection, way: str) -> None:
    chat, text = WAYS[way]
    asked = """'"Where is QX-4471?"'"""
    assert value(db, f"select seq from start_turn({chat}, {asked}, system_prompt => 'Be brief.')") == 1
    assert value(db, f"select chat_id from append_message({chat}, 'assistant', 'In hub 7.')") == text
    named = f"chat_id => {chat}, role => 'user', content => '[]'::jsonb"
    assert value(db, f"select seq from append_message({named})") == 3
    given = '[{"role": "user", "content": "and?", "message_id": "m"}]'
    assert value(db, f"select seq from append_messages({chat}, '{given}')") == 4
    for read in ("working_window", "thread", "explain_window", "window_status", "delete_chat"):
        assert db.execute(f"select * from {read}({chat})").fetchall(), read
        if read == "window_status":
            assert value(db, f"select openai_messages({chat}) #>> '{{0,content}}'") == "Be brief."
            assert value(db, f"select count(*) from search_thread({chat}, 'QX-4471')") == 1
            assert value(db, f"select count(*) from message_original({chat}, 1, for_model => true)") == 1
            assert value(db, f"select message_id from pin_message({chat}, 'm')") == "m"
            assert value(db, f"select prune_chat({chat}) is null")
            assert value(db, f"select origin from start_over({chat}, 'again')") == "reset"
            assert value(db, f"select content from remember({chat}, 'likes tea')") == "likes tea"
            assert value(db, f"select content from recall({chat}, 'tea')") == "likes tea"
    with pytest.raises(psycopg.Error) as error:
        db.execute(f"select * from working_window({chat})")
    assert error.value.sqlstate == "PCX01"


def test_every_function_of_a_chat_takes_any_id(db: Connection) -> None:
    named = db.execute(
        """
        select p.proname,
            count(*) filter (where p.proargtypes[0] = 'text'::regtype),
            count(*) filter (where p.proargtypes[0] = 'anyelement'::regtype),
            count(*)
        from pg_proc p
        where p.pronamespace = 'pycontext'::regnamespace and p.proname !~ '^_'
            and p.proargnames[1] = 'chat_id'
        group by 1
        """
    ).fetchall()
    assert len(named) > 30
    assert not [row for row in named if row[1] != row[2] or row[1] + row[2] != row[3]]
