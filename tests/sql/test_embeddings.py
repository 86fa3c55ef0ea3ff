"""Recall by meaning: of one model, found whatever the number of owners, erased with what it is of."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from pycontext.install import extra_sql

Connection = psycopg.Connection[Any]


@pytest.fixture
def db(db: Connection) -> Connection:
    db.execute(extra_sql("embeddings"))
    db.execute(extra_sql("embeddings"))  # again is harmless
    db.execute("select pycontext.use_embedding_model('tiny', 3)")
    return db


def say(db: Connection, chat: str, *texts: str, owner: str | None = None) -> None:
    db.execute("select pycontext.create_chat(%s, owner => %s)", (chat, owner))
    for at, text in enumerate(texts):
        role = "assistant" if at % 2 else "user"
        db.execute("select pycontext.append_message(%s, %s, %s)", (chat, role, text))


def vector(text: str) -> list[float]:
    """A model of two subjects: cats, and boats."""
    return [1.0 if "cat" in text else 0.01, 1.0 if "boat" in text else 0.01, 0.1]


def embed(db: Connection, chat: str) -> int:
    rows = db.execute(
        "select seq, fact_id, part_no, from_char, text from pycontext.unembedded(%s)", (chat,)
    ).fetchall()
    elements = [
        {"seq": s, "fact_id": f, "part_no": p, "from_char": c, "embedding": vector(t)}
        for s, f, p, c, t in rows
    ]
    return cache(db, chat, elements)


def cache(db: Connection, chat: str, elements: list[dict[str, Any]], model: str = "tiny") -> int:
    row = db.execute(
        "select pycontext.cache_embeddings(%s, %s, %s)", (chat, model, json.dumps(elements))
    ).fetchone()
    return row[0]  # type: ignore[index,no-any-return]


def recall(db: Connection, chat: str, query: str | None, about: str) -> list[tuple[str, str, str]]:
    return db.execute(
        "select kind, chat_id, content from pycontext.recall(%s, %s, %s::real[], max_tokens => 100000)",
        (chat, query, vector(about)),
    ).fetchall()


def kept(db: Connection, chat: str) -> list[tuple[int, bool]]:
    return db.execute(
        "select seq, fact_id <> '' from pycontext.embedding where chat_id = %s order by 1, 2", (chat,)
    ).fetchall()


def due(db: Connection) -> set[str]:
    return {row[0] for row in db.execute("select chat_id from pycontext.chats_unembedded")}


@pytest.mark.core
def test_meaning_finds_what_words_do_not_and_both_are_fused(pg: int, request: pytest.FixtureRequest) -> None:
    if pg == 15:
        pytest.skip("no pgvector for Debian's PostgreSQL 15 here")
    db: Connection = request.getfixturevalue("db")
    say(db, "a", "my cat sleeps", "ok", "the boat leaks", "ok", "nothing of note", "ok", owner="o")
    say(db, "b", "hi", owner="o")
    assert embed(db, "a") == 6
    assert embed(db, "a") == 0, "once"
    (first, *_) = recall(db, "b", None, "cat")
    assert first == ("message", "a", "my cat sleeps")
    found = [content for _, _, content in recall(db, "b", "leaks", "cat")]
    assert found[:2] in (["my cat sleeps", "the boat leaks"], ["the boat leaks", "my cat sleeps"])


@pytest.mark.parametrize(
    ("wrong", "state"),
    [
        ({"embedding": [1, 0]}, "PCX13"),
        ({"embedding": [0, 0, 0]}, "PCX13"),
        ({"embedding": []}, "PCX13"),
        ({"embedding": ["1", 0, 0]}, "PCX02"),
        ({"embedding": None}, "PCX02"),
        ({}, "PCX02"),
        ({"embedding": [1, 0, 0], "seq": "x"}, "PCX02"),
    ],
)
def test_one_wrong_embedding_and_none_is_stored(db: Connection, wrong: dict[str, Any], state: str) -> None:
    say(db, "a", "my cat", "ok")
    good = {"seq": 1, "embedding": [1, 0, 0]}
    with pytest.raises(psycopg.Error) as raised:
        cache(db, "a", [good, {"seq": 2, **wrong}])
    assert raised.value.sqlstate == state
    assert raised.value.diag.message_hint
    assert kept(db, "a") == []
    assert cache(db, "a", [good]) == 1


def test_another_model_or_dimension_is_refused_everywhere(db: Connection) -> None:
    say(db, "a", "my cat")
    for statement in (
        "select pycontext.use_embedding_model('other', 3)",
        "select pycontext.use_embedding_model('tiny', 4)",
        "select pycontext.cache_embeddings('a', 'other', '[{\"seq\": 1, \"embedding\": [1, 0, 0]}]')",
        "select * from pycontext.recall('a', 'x', array[1, 0]::real[])",
        "select * from pycontext.recall('a', 'x', array[1, 0, 0]::real[], embedding_model => 'other')",
    ):
        with pytest.raises(psycopg.Error) as raised:
            db.execute(statement)
        assert raised.value.sqlstate == "PCX13", statement
    db.execute("select pycontext.use_embedding_model('tiny', 3)")
    with pytest.raises(psycopg.Error) as raised:
        cache(db, "nowhere", [])
    assert raised.value.sqlstate == "PCX01"


def test_no_owner_is_found_short_among_many(db: Connection) -> None:
    """The index knows no owners: what it finds nearest may all be somebody else's."""
    db.execute(
        "select pycontext.create_chat('c' || n, owner => 'o' || n % 300) from generate_series(1, 600) n"
    )
    db.execute("select pycontext.create_chat('big', owner => 'big')")
    # 300 small owners far from the query's direction but for a few, and one large owner all around it
    db.execute(
        """
        insert into pycontext.embedding (
            chat_id, seq, fact_id, part_no, owner, is_user, from_char, stated_at, embedding)
        select 'big', n, '', 0, 'big', true, 1, now(), array[1, sin(n) / 50, cos(n) / 50]::real[]::vector
        from generate_series(1, 12000) n
        union all
        select 'c' || n, i, '', 0, 'o' || n % 300, true, 1, now(),
            array[-1, sin(n * i), cos(n)]::real[]::vector
        from generate_series(1, 600) n, generate_series(1, 12) i
        """
    )
    db.execute("analyze pycontext.embedding")
    hit = """
        select count(*) from pycontext.chat c, pycontext._nearest(c, '{}', array[1, 0, 0]::real[], 24)
        where c.chat_id = %s
    """
    for chat in ("c7", "c299", "c600"):
        assert db.execute(hit, (chat,)).fetchone() == (24,)
    assert db.execute(hit, ("big",)).fetchone() == (24,)
    # a large owner far away: the index comes back short, and all are compared
    db.execute("update pycontext.embedding set owner = 'o7' where owner like 'o%'")
    assert db.execute(hit, ("c7",)).fetchone() == (24,)


def test_the_index_serves_a_large_owner(db: Connection) -> None:
    db.execute("select pycontext.create_chat('big', owner => 'big')")
    db.execute(
        """
        insert into pycontext.embedding (
            chat_id, seq, fact_id, part_no, owner, is_user, from_char, stated_at, embedding)
        select 'big', n, '', 0, 'big', true, 1, now(), array[sin(n), cos(n), sin(n / 7.0)]::real[]::vector
        from generate_series(1, 8000) n
        """
    )
    db.execute("analyze pycontext.embedding")
    db.execute("select from pycontext.chat c, pycontext._nearest(c, '{}', array[1, 0, 0]::real[], 50)")
    db.execute("select pg_stat_force_next_flush()")
    row = db.execute(
        "select idx_scan from pg_stat_user_indexes where indexrelname = 'embedding_ann_ix'"
    ).fetchone()
    assert row is not None
    assert row[0] >= 1


def test_nothing_of_another_owner_tenant_or_chat(db: Connection) -> None:
    for chat, owner in (
        ("anna1", "anna"),
        ("anna2", "anna"),
        ("bob", "bob"),
        ("none1", None),
        ("none2", None),
    ):
        say(db, chat, f"the cat of {chat}", "ok", "boat", owner=owner)
        embed(db, chat)
    db.execute("select pycontext.create_chat('anna_t', owner => 'anna', tenant => 'other')")
    db.execute("select pycontext.append_message('anna_t', 'user', 'the cat of anna_t')")
    embed(db, "anna_t")
    assert {chat for _, chat, _ in recall(db, "anna1", "cat", "cat")} == {"anna2"}
    assert {chat for _, chat, _ in recall(db, "bob", "cat", "cat")} == set(), "its window shows them all"
    assert recall(db, "none1", "cat", "cat") == []
    assert recall(db, "anna_t", "cat", "cat") == []


def test_what_the_window_shows_and_what_a_reset_set_aside_is_not_recalled(db: Connection) -> None:
    long = "as was told at length. " * 40
    say(db, "a", *[f"the cat {n}, {long}" for n in range(12)], owner="o")
    embed(db, "a")
    say(db, "b", "hi", owner="o")
    assert recall(db, "a", "cat", "cat") == []
    ids = [
        row[0]
        for row in db.execute("select message_id from pycontext.message where chat_id = 'a' order by seq")
    ]
    db.execute("select pycontext.put_summary('a', %s, %s)", (ids[7], json.dumps({"facts": ["cats"]})))
    shown = {
        row[0]
        for row in db.execute(
            "select seq from pycontext.working_window('a') where kind = 'message' and seq > 0"
        )
    }
    rows = db.execute(
        "select seq, beside_seq from pycontext.recall('a', 'cat', %s::real[], max_tokens => 9000)",
        (vector("cat"),),
    ).fetchall()
    told = {seq for row in rows for seq in row if seq is not None}
    assert told
    assert not told & shown
    db.execute("select pycontext.remember('a', 'the cat is fed')")
    embed(db, "a")
    db.execute("select pycontext.start_over('a')")
    for chat in "ab":
        assert {kind for kind, _, _ in recall(db, chat, "cat", "cat")} == {"fact"}
    # and what is after the border, but left out of a window too small for it, is recalled
    db.execute("select pycontext.create_chat('c')")
    say(db, "c", *[f"the boat {n}, {long}" for n in range(40)], owner=None)
    embed(db, "c")
    db.execute("select pycontext.set_chat_profile('c', 'small-8k')")
    left_out = db.execute(
        "select count(*) from pycontext.working_window('c') where section = 'omitted'"
    ).fetchone()
    assert left_out == (1,)
    assert recall(db, "c", "boat", "boat")


def test_contradicting_facts_the_newest_wins_by_meaning_too(db: Connection) -> None:
    say(db, "a", "hi", owner="o")
    db.execute("select pycontext.remember('a', 'the cat is called Tom', 'cat.name')")
    db.execute("select pycontext.remember('a', 'the cat is called Tim', 'cat.name')")
    embed(db, "a")
    assert [c for k, _, c in recall(db, "a", None, "cat") if k == "fact"] == ["the cat is called Tim"]


def test_erased_with_what_they_are_of(db: Connection) -> None:
    say(db, "a", "my cat", "ok", "my boat", "ok", owner="o")
    db.execute("select pycontext.remember('a', 'cat number one')")
    db.execute("select pycontext.remember('a', 'boat number two')")
    embed(db, "a")
    assert kept(db, "a") == [(1, False), (2, False), (3, False), (4, False), (4, True), (4, True)]
    db.execute("select pycontext.forget('a', query => 'boat two')")
    assert kept(db, "a") == [(1, False), (2, False), (3, False), (4, False), (4, True)]
    ids = [
        row[0]
        for row in db.execute("select message_id from pycontext.message where chat_id = 'a' order by seq")
    ]
    db.execute("select pycontext.redact_message('a', %s)", (ids[0],))
    assert kept(db, "a") == [(2, False), (3, False), (4, False), (4, True)]
    assert embed(db, "a") == 0, "what is redacted has no text"
    db.execute("select pycontext.rewind_chat('a', %s)", (ids[2],))
    assert kept(db, "a") == [(2, False), (3, False)]
    db.execute("select pycontext.append_message('a', 'assistant', 'another cat')")
    assert due(db) == {"a"}
    assert embed(db, "a") == 1
    assert due(db) == set()
    say(db, "b", "cat", owner="o")
    embed(db, "b")
    db.execute("select pycontext.delete_chat('b')")
    assert kept(db, "b") == []
    db.execute("select pycontext.forget_owner('o')")
    assert db.execute("select count(*) from pycontext.embedding").fetchone() == (0,)
    assert db.execute("select count(*) from pycontext.embedded_chat").fetchone() == (0,)


def test_an_adopted_chat_is_embedded_where_it_lives(db: Connection) -> None:
    db.execute("create schema shop")
    db.execute("create table shop.post (id bigint primary key, chat bigint, who text, body text)")
    db.execute("create index on shop.post (chat, id)")
    db.execute(
        "create view shop.m as select p.chat as chat_id, p.id as seq, p.id as message_id, p.who as role,"
        " p.body as content, now() - interval '1 day' as created_at from shop.post p"
    )
    db.execute(
        "insert into shop.post values (1, 7, 'user', 'my cat'), (2, 7, 'assistant', 'ok'),"
        " (3, 7, 'user', 'boat')"
    )
    db.execute("select pycontext.register_source('shop', 'shop.m')")
    db.execute("select pycontext.create_chat('7', source => 'shop', owner => 'o')")
    say(db, "b", "hi", owner="o")
    assert embed(db, "7") == 3
    assert recall(db, "b", None, "cat")[0] == ("message", "7", "my cat")
    db.execute("update shop.post set body = 'my boat' where id = 1")
    db.execute("select pycontext.source_changed('7', '1')")
    assert kept(db, "7") == [(2, False), (3, False)]
    assert embed(db, "7") == 1
    db.execute("delete from shop.post where id = 3")
    db.execute("select pycontext.source_changed('7', '3')")
    assert kept(db, "7") == [(1, False), (2, False)]
    db.execute("delete from shop.post where id = 1")
    db.execute("select pycontext.source_changed('7')")
    assert kept(db, "7") == [(2, False)]


def test_long_messages_are_embedded_in_parts_and_recalled_where_they_fit(db: Connection) -> None:
    filler = "Слово за слово, и разговор идёт дальше. " * 60
    say(db, "a", filler + "Here my cat is told of. " + filler, "喵" * 3000, owner="o")
    say(db, "b", "hi", owner="o")
    rows = db.execute("select seq, part_no, from_char, text from pycontext.unembedded('a')").fetchall()
    bodies = dict(
        db.execute("select seq, content #>> '{}' from pycontext.message where chat_id = 'a'").fetchall()
    )
    for seq, _, at, text in rows:
        assert bodies[seq][at - 1 : at - 1 + len(text)] == text
        assert len(text) <= (1000 if seq == 1 else 400)
    for seq, body in bodies.items():
        assert "".join(text for s, _, _, text in rows if s == seq) == body
    embed(db, "a")
    (_, _, content) = recall(db, "b", None, "cat")[0]
    assert "my cat" in content
    assert len(content) <= 802


def test_facts_and_messages_are_due_until_they_are_embedded(db: Connection) -> None:
    say(db, "a", "my cat")
    assert due(db) == {"a"}
    embed(db, "a")
    assert due(db) == set()
    db.execute("select pycontext.remember('a', 'a boat')")
    assert due(db) == {"a"}
    embed(db, "a")
    assert due(db) == set()
    db.execute("select pycontext.append_message('a', 'assistant', '')")
    assert embed(db, "a") == 0
    assert due(db) == set(), "what has no text is not due for ever"


def test_no_secret_goes_to_the_model(db: Connection) -> None:
    say(db, "a", "the cat's key is sk-test-000011112222")
    ((text,),) = db.execute("select text from pycontext.unembedded('a')").fetchall()
    assert "sk-test" not in text


def test_without_the_extra_recall_by_embedding_says_so(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as plain:
        plain.execute("select pycontext.create_chat('a')")
        with pytest.raises(psycopg.errors.FeatureNotSupported) as raised:
            plain.execute("select * from pycontext.recall('a', 'x', array[1]::real[])")
        assert "embeddings.sql" in (raised.value.diag.message_hint or "")
