"""A turn that recalls: by words in its one statement, by meaning after one embedding; a model may fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from llm_server import LLMServer

import pycontext
from pycontext.embeddings import OpenAIEmbedder
from pycontext.install import extra_sql

pytestmark = pytest.mark.runners("sync", "pooled", long="pooled")

Connection = psycopg.Connection[Any]
CATS, BOATS = [1.0, 0.01, 0.1], [0.01, 1.0, 0.1]  # what the server says of them


@pytest.fixture
def embedder(llm: LLMServer) -> OpenAIEmbedder:
    return OpenAIEmbedder("tiny", base_url=llm.url, timeout=2, max_retries=0)


@pytest.fixture
def database(dsn: str, db: Connection, embedder: OpenAIEmbedder, llm: LLMServer) -> Iterator[Any]:
    db.execute(extra_sql("embeddings"))
    with pycontext.connect(dsn, embedder=embedder) as found:
        tell(found)
        found.embed("a")
        llm.clear()
        yield found


def tell(database: pycontext.Database) -> None:
    database.create_chat("a", owner="o")
    pairs = [("my cat sleeps", "let it"), ("the boat leaks", "mend it")]
    for asked, said in pairs:
        database.append("a", [{"role": "user", "content": asked}, {"role": "assistant", "content": said}])
    database.remember("a", "Her boat is called Anna", subject="boat.name")
    database.create_chat("b", owner="o")


def blocks(messages: Any) -> list[str]:
    return [row["content"] for row in messages if "<memory-context>" in str(row["content"])]


def test_recalled_by_words_in_the_one_statement_and_the_same_at_every_step(dsn: str, db: Connection) -> None:
    with pycontext.connect(dsn) as memory:
        tell(memory)
        told = pycontext.memory_text(memory.recall("b", "How is the boat?"))
        assert "Anna" in told
        assert "the boat leaks" in told
        assert "[#4 assistant] mend it" in told
        with memory.turn("b", "How is the boat?", context="It is Monday.", recall=True) as turn:
            (block,) = blocks(turn.messages)
            assert block == f"<memory-context>\n{told}\n\nIt is Monday.\n</memory-context>"
            memory.append("a", "the boat sank")  # what is known now is not what this turn began with
            call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            turn.add({"role": "assistant", "tool_calls": [call]})
            turn.add({"role": "tool", "tool_call_id": "c1", "content": "afloat"})
            assert blocks(turn.messages) == [block]
        with memory.turn("b", recall=True) as resumed:
            assert "the boat sank" in blocks(resumed.messages)[0]
        with memory.turn("b", "And now?") as turn:
            assert blocks(turn.messages) == []
    stored = db.execute("select content from pycontext.message where chat_id = 'b'").fetchall()
    assert "memory-context" not in json.dumps(stored)


def test_what_stands_around_a_row_is_told_as_memory_text_tells_it(dsn: str) -> None:
    with pycontext.connect(dsn) as memory:
        memory.create_chat("a", owner="o")
        for n in range(14):
            for role, said in (("user", "the lion eats"), ("assistant", "it eats")):
                memory.append("a", {"role": role, "content": f"{said} {n}"})
        memory.create_chat("b", owner="o")
        rows = memory.recall("b", "What of the lion?")
        assert any(row.also for row in rows)
        with memory.turn("b", "What of the lion?", recall=True) as turn:
            told = pycontext.memory_text(rows)
            assert blocks(turn.messages) == [f"<memory-context>\n{told}\n</memory-context>"]


def test_by_meaning_after_one_embedding(database: pycontext.Database, llm: LLMServer) -> None:
    with database.turn("b", "cats?", recall=True) as turn:
        turn.add({"role": "assistant", "content": "what of them?"})
        assert "my cat sleeps" in blocks(turn.messages)[0]
    assert [request["input"] for request in llm.requests] == [["cats?"]]
    with database.turn("b", [{"type": "text", "text": "a boatswain?"}], recall=True) as turn:
        assert "the boat leaks" in blocks(turn.messages)[0]
    assert len(llm.requests) == 2


def test_a_resumed_turn_recalls_by_meaning(database: pycontext.Database, llm: LLMServer) -> None:
    database.append("b", [{"role": "user", "content": "cats?"}, {"role": "user", "content": "by the way"}])
    database.append("b", [{"role": "user", "content": "cats?"}])
    with database.turn("b", recall=True) as turn:
        assert "my cat sleeps" in blocks(turn.messages)[0]
        turn.add({"role": "assistant", "content": "what of them?"})
        assert "my cat sleeps" in blocks(turn.messages)[0]
    assert [request["input"] for request in llm.requests] == [["cats?"]]
    with database.turn("b", recall=True) as turn:  # there is nothing left to ask
        assert turn.is_answered
    assert len(llm.requests) == 1
    with pytest.raises(pycontext.NoSuchChat), database.turn("nowhere", recall=True):
        pass


def test_a_chat_of_the_products_own_recalls_what_its_window_leaves_out(dsn: str, db: Connection) -> None:
    """Nothing of ours is there yet, no row and no line: what does not fit the window is found by words."""
    db.execute("""
        create table said (id bigint primary key, chat bigint not null, role text, body text);
        insert into said
        select n, 7, (array['user', 'assistant'])[2 - n % 2], case n
            when 501 then 'My lucky fish is called Анчоус'
            when 1203 then 'What is my fish called?'
            else 'Parcel ' || n || ' ' || repeat('is on its way ', 60) end
        from generate_series(1, 1203) n;
        create view said_rows as
        select chat as chat_id, id as seq, id as message_id, role, body as content, now() as created_at
        from said;
        select pycontext.register_source('shop', 'said_rows', true);
    """)
    with pycontext.connect(dsn) as memory:
        (found, *_) = memory.recall(7, "What is my fish called?")
        assert (found.seq, found.role) == (501, "user")
        shown = memory.recall(7, "Where is parcel 1201?")
        assert not any(row.content.startswith("Parcel 1201 ") for row in shown)
        with memory.turn(7, recall=True, compact="off") as turn:
            assert "Анчоус" in blocks(turn.messages)[0]
            assert "Анчоус" not in json.dumps(turn.messages[:-2], ensure_ascii=False)


def test_an_async_turn_recalls_by_meaning(database: Any, dsn: str, embedder: OpenAIEmbedder) -> None:
    async def found() -> str:
        async with (
            pycontext.aconnect(dsn, embedder=embedder) as memory,
            memory.turn("b", "cats?", recall=True) as turn,
        ):
            return blocks(turn.messages)[0]

    assert "my cat sleeps" in asyncio.run(found())


@pytest.mark.parametrize("fault", ["500", "not_json", "another model", "not installed"])
def test_what_fails_leaves_the_words_and_a_line_in_the_log(
    database: pycontext.Database,
    dsn: str,
    db: Connection,
    llm: LLMServer,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    name = "other" if fault == "another model" else "tiny"
    if fault == "not installed":
        db.execute("drop table pycontext.embedding cascade")
    elif fault != "another model":  # whose embeddings are as long
        llm.script(fault)
    other = OpenAIEmbedder(name, base_url=llm.url, timeout=2, max_retries=0)
    with (
        pycontext.connect(dsn, embedder=other) as memory,
        memory.turn("b", "the boat?", message_id="u1", recall=True) as turn,
    ):
        assert "the boat leaks" in blocks(turn.messages)[0]
    assert "by words alone" in caplog.text
    assert len(llm.requests) == 1
    assert len(database.thread("b")) == 1


def test_start_turn_takes_an_embedding(database: pycontext.Database, db: Connection) -> None:
    start = (
        "select messages, memory from pycontext.start_turn('b', '\"Well?\"', query_embedding => %s::real[])"
    )
    for vector, found in ((CATS, "my cat sleeps"), (BOATS, "the boat leaks")):
        messages, memory = db.execute(start, (vector,)).fetchone()  # type: ignore[misc]
        assert found in memory
        assert blocks(messages) == [f"<memory-context>\n{memory}\n</memory-context>"]
    rows = len(database.thread("b"))
    of_model = start.replace("real[])", "real[], embedding_model => 'other')")
    for statement, wrong in ((start, [1.0]), (start, [1.0] * 4), (of_model, CATS)):
        with pytest.raises(psycopg.Error) as error:
            db.execute(statement, (wrong,))
        assert error.value.sqlstate == "PCX13"
    db.execute("drop table pycontext.embedding cascade")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="not installed"):
        db.execute(start, (CATS,))
    assert len(database.thread("b")) == rows
