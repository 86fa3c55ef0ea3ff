"""Recall by meaning from Python: the embedding client at a faulty server, the back-fill, doing without."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest
from llm_server import LLMServer

import pycontext
from pycontext import embeddings
from pycontext.embeddings import EmbedderFailed, OpenAIEmbedder
from pycontext.install import extra_sql
from pycontext.summarizer.extractive import ExtractiveSummarizer
from pycontext.worker import Worker

pytestmark = pytest.mark.runners("sync", "pooled", long="pooled")

Connection = psycopg.Connection[Any]


@pytest.fixture
def embedder(llm: LLMServer) -> OpenAIEmbedder:
    return OpenAIEmbedder("tiny", base_url=llm.url, timeout=2, max_retries=1)


@pytest.fixture
def database(dsn: str, db: Connection, embedder: OpenAIEmbedder) -> Iterator[pycontext.Database]:
    db.execute(extra_sql("embeddings"))
    with pycontext.connect(dsn, summarizer=ExtractiveSummarizer(), embedder=embedder) as found:
        yield found


def tell(database: pycontext.Database) -> None:
    database.create_chat("a", owner="o")
    database.append(
        "a",
        [
            {"role": "user", "content": "my cat sleeps"},
            {"role": "assistant", "content": "let it"},
            {"role": "user", "content": "the boat leaks"},
            {"role": "assistant", "content": "mend it"},
        ],
    )
    database.create_chat("b", owner="o")
    database.append("b", "hi")


def test_a_chat_is_embedded_once_and_recalled_by_meaning(
    database: pycontext.Database, llm: LLMServer
) -> None:
    tell(database)
    database.remember("a", "a cat is called Tom")
    assert database.embed("a") == 5
    assert database.embed("a") == 0
    sent = [text for request in llm.requests for text in request["input"]]
    assert sorted(sent) == sorted(
        ["a cat is called Tom", "my cat sleeps", "let it", "the boat leaks", "mend it"]
    )
    rows = database.recall("b", "feline cat?")
    assert llm.requests[-1]["input"] == ["feline cat?"]
    assert {row.content for row in rows[:2]} == {"my cat sleeps", "a cat is called Tom"}
    (said,) = [row for row in rows if row.content == "my cat sleeps"]
    assert (said.beside_seq, said.beside) == (2, "let it")
    text = pycontext.memory_text(rows)
    assert "my cat sleeps" in text
    assert "[#2 assistant] let it" in text


def test_what_stands_around_what_is_recalled_is_told_in_order(database: pycontext.Database) -> None:
    tell(database)
    (row,) = database.recall("b", "boat? cat?", max_rows=1)
    assert (row.seq, row.beside_seq) == (3, 4)
    assert row.also == [
        {"seq": 1, "role": "user", "content": "my cat sleeps"},
        {"seq": 2, "role": "assistant", "content": "let it"},
    ]
    assert pycontext.memory_text([row]).splitlines() == [
        "[#1 user] my cat sleeps",
        "[#2 assistant] let it",
        f"[{row.stated_at:%Y-%m-%d} #3 user] the boat leaks",
        "[#4 assistant] mend it",
    ]


def test_prefixes_input_types_and_batches(llm: LLMServer) -> None:
    model = OpenAIEmbedder(
        "e5",
        base_url=llm.url,
        query_prefix="query: ",
        passage_prefix="passage: ",
        input_types=("query", "document"),
        batch=2,
    )
    found = model.embed(["cat", "boat", "dog"], is_query=False, seconds=5)
    assert [round(vector[0], 2) for vector in found] == [1.0, 0.01, 0.01], "in the order of the texts"
    assert [request["input"] for request in llm.requests] == [
        ["passage: cat", "passage: boat"],
        ["passage: dog"],
    ]
    assert {request["input_type"] for request in llm.requests} == {"document"}
    model.embed(["cat"], is_query=True, seconds=5)
    assert (llm.requests[-1]["input"], llm.requests[-1]["input_type"]) == (["query: cat"], "query")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("400", "status 400"),
        ("401", "status 401"),
        ("timeout", "no answer within"),
        ("not_json", "no embeddings"),
        (lambda _: (200, {"object": "list", "data": [], "model": "x"}), "0 embeddings for 1"),
        (lambda _: (200, {"object": "list", "model": "x"}), "no embeddings"),
        (lambda _: (200, {"data": [{"index": 0, "embedding": None}]}), "no embeddings"),
    ],
)
def test_a_fault_is_no_answer_and_recall_goes_by_words(
    database: pycontext.Database,
    llm: LLMServer,
    fault: Any,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tell(database)
    llm.script(fault)
    started = time.monotonic()
    rows = database.recall("b", "boat")
    assert time.monotonic() - started < 6
    assert [row.content for row in rows] == ["the boat leaks"]
    assert reason in caplog.text
    assert "boat" not in caplog.text, "the log holds no content"
    llm.script(fault, fault)  # messages are tried again, a question is not
    with pytest.raises(EmbedderFailed):
        database.embed("a")
    llm.clear()
    assert database.embed("a") == 4, "and the next time it goes on"


def test_the_client_repeats_what_failed_on_the_way(database: pycontext.Database, llm: LLMServer) -> None:
    tell(database)
    llm.script("503")
    assert database.embed("a") == 4


def test_another_dimension_is_a_typed_error_and_changes_nothing(
    database: pycontext.Database, llm: LLMServer, db: Connection
) -> None:
    tell(database)
    database.embed("a")
    database.append("a", "one more cat")
    llm.script(lambda request: (200, {"data": [{"index": 0, "embedding": [1.0, 2.0]}], "model": "x"}))
    with pytest.raises(pycontext.BadEmbedding) as raised:
        database.embed("a")
    assert raised.value.hint
    assert db.execute("select count(*) from pycontext.embedding").fetchone() == (4,)
    with pytest.raises(pycontext.BadEmbedding):
        database.recall("b", "cat", query_embedding=[1.0])


def test_a_changed_model_is_refused_until_its_owner_clears_the_old_ones(
    database: pycontext.Database,
    dsn: str,
    llm: LLMServer,
    db: Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of the same dimension: nothing is mixed; after the header's statements all is embedded anew."""
    tell(database)
    database.embed("a")
    other = OpenAIEmbedder("other", base_url=llm.url, timeout=2, max_retries=1)
    with pycontext.connect(dsn, summarizer=ExtractiveSummarizer(), embedder=other) as changed:
        changed.append("a", "one more cat")
        for refused in (lambda: changed.embed("a"), lambda: changed.recall("b", "cat")):
            with pytest.raises(pycontext.BadEmbedding) as raised:
                refused()
            assert raised.value.hint
            assert "other" in (raised.value.detail or "")
        assert Worker(changed).run(once=True).embedded == 0
        assert "nothing is embedded" in caplog.text
        (header,) = re.findall(r"later means: (truncate .*?)\. Everything", _flat(extra_sql("embeddings")))
        for statement in header.split("; "):
            db.execute(statement)
        assert Worker(changed).run(once=True).embedded == 6, "the facts and messages of every chat"
        assert changed.recall("b", "cat")[0].chat_id == "a"
        with pytest.raises(pycontext.BadEmbedding):
            database.recall("b", "cat")


def _flat(sql: str) -> str:
    return " ".join(line.removeprefix("-- ") for line in sql.splitlines())


def test_the_back_fill_goes_on_where_it_broke_off(
    database: pycontext.Database, llm: LLMServer, db: Connection
) -> None:
    database.create_chat("long", owner="o")
    database.append("long", [{"role": "user", "content": f"message {n}"} for n in range(25)])
    kept = []
    for _ in range(3):
        llm.script("ok", "400")  # one batch comes, then none
        Worker(database).run(once=True)
        kept.append(db.execute("select count(*) from pycontext.embedding").fetchone()[0])  # type: ignore[index]
    assert kept == [10, 20, 25], "each batch is kept"
    assert Worker(database).run(once=True).embedded == 0


def test_the_worker_fills_in_what_is_missing(
    database: pycontext.Database, db: Connection, llm: LLMServer, caplog: pytest.LogCaptureFixture
) -> None:
    tell(database)
    llm.script("400", "400")
    worker = Worker(database)
    assert worker.run(once=True).embedded == 0
    assert "nothing is embedded" in caplog.text
    assert Worker(database).run(once=True).embedded == 5
    assert Worker(database).run(once=True).embedded == 0


def test_a_chat_that_cannot_be_embedded_holds_up_no_other(
    database: pycontext.Database, db: Connection, llm: LLMServer, caplog: pytest.LogCaptureFixture
) -> None:
    tell(database)
    llm.script("400")
    worker = Worker(database)
    worker.run(once=True)
    left = db.execute("select chat_id from pycontext.chats_unembedded").fetchall()
    assert len(left) == 1
    assert f"chat {left[0][0]} is not embedded for now" in caplog.text
    worker.run(once=True)
    assert db.execute("select chat_id from pycontext.chats_unembedded").fetchall() == left, "tried at once"
    Worker(database).run(once=True)
    assert not db.execute("select from pycontext.chats_unembedded").fetchall()


def test_without_the_extra_everything_goes_on_by_words(
    dsn: str, embedder: OpenAIEmbedder, caplog: pytest.LogCaptureFixture
) -> None:
    with pycontext.connect(dsn, summarizer=ExtractiveSummarizer(), embedder=embedder) as database:
        tell(database)
        assert [row.content for row in database.recall("b", "boat")] == ["the boat leaks"]
        assert "not installed" in caplog.text
        assert Worker(database).run(once=True).embedded == 0


def test_no_embedding_is_made_where_a_turn_starts_or_a_transaction_is_open(
    database: pycontext.Database, dsn: str, embedder: OpenAIEmbedder, llm: LLMServer
) -> None:
    tell(database)
    with database.turn("b", "and my cat?") as turn:
        turn.add({"role": "assistant", "content": "it sleeps"})
    assert llm.requests == []
    with (
        psycopg.connect(dsn) as connection,
        pycontext.connect(connection=connection, embedder=embedder) as own,
    ):
        connection.execute("select 1")
        assert [row.content for row in own.recall("b", "boat")] == ["the boat leaks"]
        with pytest.raises(pycontext.InTransaction):
            own.embed("a")
    assert llm.requests == []


def test_what_was_recalled_is_told_once_and_never_stored(
    database: pycontext.Database, db: Connection
) -> None:
    """C41, C42: rendered beside the new message; neither the thread nor what is embedded knows of it."""
    tell(database)
    database.embed("a")
    for n in range(5):
        memory = pycontext.memory_text(database.recall("b", "cat"))
        with database.turn("b", f"question {n} of my cat", context=memory) as turn:
            blocks = [row for row in turn.messages if "<memory-context>" in str(row["content"])]
            assert len(blocks) == 1
            assert "my cat sleeps" in blocks[0]["content"]
            turn.add({"role": "assistant", "content": f"answer {n}"})
    (count,) = db.execute("select count(*) from pycontext.message where chat_id = 'b'").fetchone()  # type: ignore[misc]
    assert count == 11
    assert "memory-context" not in str(db.execute("select content from pycontext.message").fetchall())
    database.embed("b")
    assert all(row.chat_id == "a" for row in database.recall("b", "cat"))
    # a model that repeats the block adds nothing to what is known
    database.create_chat("c", owner="o")
    database.append("c", {"role": "assistant", "content": f"<memory-context>\n{memory}\n</memory-context>"})
    database.append(
        "c", {"role": "assistant", "content": f"<memory-context>{memory}</memory-context> Yes, a tomcat."}
    )
    database.append("c", {"role": "assistant", "content": f"A boat. <memory-context>{memory}"})
    database.embed("c")
    embedded = db.execute("select seq from pycontext.embedding where chat_id = 'c' order by seq").fetchall()
    assert embedded == [(2,), (3,)]
    said = [row.content for row in database.recall("b", "cat, tomcat, boat") if row.chat_id == "c"]
    assert sorted(text.strip() for text in said) == ["A boat.", "Yes, a tomcat."]
    told = pycontext.memory_text(database.recall("b", "sleeps"))
    assert told.count("my cat sleeps") <= 1
    assert "memory-context" not in told


def test_an_embedder_of_ones_own(dsn: str, db: Connection) -> None:
    class Own:
        name = "own"

        def __init__(self) -> None:
            self.answer: Any = None

        def embed(self, texts: Sequence[str], *, is_query: bool, seconds: float) -> list[list[float]]:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer or [[1.0, 0.5] for _ in texts]

    db.execute(extra_sql("embeddings"))
    own = Own()
    with pycontext.connect(dsn, embedder=own) as database:
        tell(database)
        wrong: Any
        for wrong in (
            [[1.0]], [[1.0], [1.0, 2.0]] * 2, [[float("nan"), 1.0]] * 4, [[1e39, 1.0]] * 4,
            [1.0] * 4, [None] * 4, ["ab"] * 4, [[10**400, 1]] * 4, RuntimeError("cat"),
        ):  # fmt: skip
            own.answer = wrong
            with pytest.raises(EmbedderFailed):
                database.embed("a")
            with database.turn("b", "The cat?", recall=True) as turn:
                assert "cat" in str(turn.messages), "and by words it goes on"
        own.answer = [array("f", [1.0, 0.5])] * 4  # as libraries of numbers have it
        assert database.embed("a") == 4
        assert database.recall("b", "cat", query_embedding=[0, 1.5])
        for wrong in ([float("nan"), 1.0], [1e39, 0], "ab", [None, 1.0], [[1.0], [2.0]]):
            with pytest.raises(pycontext.BadEmbedding):
                database.recall("b", "cat", query_embedding=wrong)
        for told in ("{NaN,1}", "{1,-Infinity}", "{1,NULL}"):
            with pytest.raises(psycopg.Error) as raised:
                db.execute("select pycontext.recall('b', 'cat', %s)", (told,))
            assert raised.value.sqlstate == "PCX13"


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch, llm: LLMServer, dsn: str) -> None:
    for name in ("MODEL", "BASE_URL", "PREFIXES", "INPUT_TYPES"):
        monkeypatch.delenv(f"PYCONTEXT_EMBEDDING_{name}", raising=False)
    assert embeddings.from_environment() is None
    with (
        pycontext.connect(dsn) as database,
        pytest.raises(pycontext.PycontextError, match="no embedding model"),
    ):
        database.embed("a")
    monkeypatch.setenv("PYCONTEXT_EMBEDDING_MODEL", "small")
    monkeypatch.setenv("PYCONTEXT_EMBEDDING_BASE_URL", llm.url)
    monkeypatch.setenv("PYCONTEXT_EMBEDDING_PREFIXES", "query: |passage: ")
    model = embeddings.from_environment()
    assert model is not None
    model.embed(["cat"], is_query=True, seconds=5)
    assert llm.requests[-1]["model"] == "small"
    assert llm.requests[-1]["input"] == ["query: cat"]
    monkeypatch.setenv("PYCONTEXT_EMBEDDING_PREFIXES", "query: ")
    with pytest.raises(ValueError, match="PREFIXES"):
        embeddings.from_environment()
