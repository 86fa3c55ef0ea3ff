"""Real small models behind real servers: what nobody scripted meets the checks, real embeddings find it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from small_models import MISSING, NAME, embedding_server, has_embeddings, has_model, model_server

import pycontext
from pycontext.embeddings import OpenAIEmbedder
from pycontext.install import extra_sql
from pycontext.summarizer.openai import OpenAISummarizer

pytestmark = pytest.mark.long

Connection = psycopg.Connection[Any]


@pytest.mark.real
@pytest.mark.skipif(not has_model(), reason=MISSING)
def test_what_a_real_model_writes_is_a_line_or_a_reason(dsn: str, db: Connection, shared_data: Path) -> None:
    with (shared_data / "tau_bench_airline_gpt4o.jsonl").open(encoding="utf-8") as lines:
        rows = [row for row in json.loads(next(lines))["messages"] if row["role"] != "system"][:16]
    keys = ("role", "content", "tool_calls", "tool_call_id", "name")
    with model_server() as url:
        model = OpenAISummarizer(NAME, base_url=url, window_tokens=4000, timeout=600, max_retries=0)
        with pycontext.connect(dsn, summarizer=model) as database:
            database.create_chat("a")
            database.append("a", [{k: row[k] for k in keys if row.get(k) is not None} for row in rows])
            before = database.window("a")
            done = database.compact("a", 2500)
            assert done.calls
            after = database.window("a")
    lines_stored = db.execute("select count(*) from pycontext.message where kind = 'summary'").fetchone()
    if done.outcome == "summarized":
        assert lines_stored == (1,)
        assert sum(row.tokens for row in after) < sum(row.tokens for row in before)
    else:
        assert done.outcome == "failed"
        assert done.reason
        assert lines_stored == (0,)
        assert after == before


@pytest.mark.skipif(not has_embeddings(), reason=MISSING)
def test_real_embeddings_find_what_shares_no_word(dsn: str, db: Connection) -> None:
    db.execute(extra_sql("embeddings"))
    said = [
        "Мой рейс в Хельсинки перенесли на девятое июля",
        "I am allergic to peanuts, please remember",
        "我的猫叫小黑，今年三岁",
        "Die Rechnung habe ich am Montag bezahlt",
    ]
    with embedding_server() as url:
        model = OpenAIEmbedder("multilingual-e5-small", base_url=url, input_types=("query", "passage"))
        with pycontext.connect(dsn, embedder=model) as database:
            database.create_chat("a", owner="o")
            database.append("a", said)
            database.create_chat("b", owner="o")
            assert database.embed("a") == 4
            for question, answer in (
                ("Когда самолёт в Финляндию?", said[0]),
                ("Which food must be avoided?", said[1]),
                ("宠物多大了？", said[2]),
                ("Wann wurde das Geld überwiesen?", said[3]),
            ):
                assert database.recall("b", question)[0].content == answer, question
