"""One conversation, stored natively and in a product's table: its windows are equal. And what a source alone has."""

# ruff: noqa: E501

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import psycopg
import pytest
import validators

Connection = psycopg.Connection[Any]

SHOWN = (
    "w.ordinal, w.section, w.message_id, w.kind, w.role, w.content, w.tool_calls, w.tool_call_id, w.name, w.tokens, "
    "w.is_escaped"
)


def call(call_id: str, arguments: str = '{"path": "a.py"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def user(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def assistant(text: Any = None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


def result(call_id: str, text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id, **more}


CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [user("hello"), assistant("hi"), user("and now?"), assistant("now too")],
    "parallel": [user("go"), assistant(None, call("A"), call("B")), result("B", "b"), result("A", "a"), assistant("done")],
    "late": [user("go"), assistant(None, call("A")), user("still there?"), assistant("yes"), result("A", "late"), user("ok")],
    "never": [user("go"), assistant("on it", call("A"), call("B")), result("A", "a"), user("hello?")],
    "reused ids": [user("1"), assistant(None, call("A")), result("A", "one"), user("2"), assistant(None, call("A")), result("A", "two")],
    "twice": [user("1"), assistant(None, call("A")), result("A", "one"), result("A", "again"), user("2")],
    "interim": [
        user("pay"), assistant(None, call("P")), result("P", "waiting", metadata={"pending": True}), user("well?"),
        result("P", "approved"), assistant("paid"),
    ],
    "orphan": [user("x"), result("Z", "who asked?"), assistant("nobody"), result("Z", "")],
    "fence": [user("what is <memory-context> or </chat-summary>?"), assistant([{"type": "text", "text": "<system-note>"}])],
    "blank": [user(""), assistant("  "), user([{"type": "text", "text": ""}, {"type": "text", "text": "x"}]), assistant(None)],
    "reasoning": [
        user("think"), assistant([{"type": "thinking", "thinking": "hm " * 50, "signature": "s"}, {"type": "text", "text": "so"}]),
        user("more"), assistant([{"type": "thinking", "thinking": "ah " * 50, "signature": "t"}], call("A")), result("A", "a"),
    ],
    "image": [user([{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])],
    "roles": [{"role": "system", "content": "be kind"}, user("a", name="ann"), {"role": "developer", "content": "b"}, assistant("c")],
    "injected": [user("mine"), assistant("ok"), user("time is 9:00", metadata={"injected": True}), assistant("so it is")],
    "scripts": [user("строка 文字 🙂"), assistant("да")],
}  # fmt: skip


@pytest.fixture
def posts(db: Connection) -> Connection:
    db.execute(
        """
        create table post (
            id bigint primary key, chat text not null, external text not null, role text not null, content jsonb,
            tool_calls jsonb, tool_call_id text, name text, metadata jsonb, created_at timestamptz not null);
        create unique index post_external_ix on post (chat, external);
        create index post_chat_ix on post (chat, id);
        create view source_post as select chat as chat_id, id as seq, external as message_id, role, content, tool_calls,
            tool_call_id, name, metadata, created_at from post;
        select register_source('posts', 'source_post', true);
        """
    )
    return db


def store(db: Connection, chat: str, messages: list[dict[str, Any]]) -> None:
    """The same messages in both homes, places 1, 2, 3 …; the native chat is called native:…"""
    db.execute("select create_chat(%s)", ("native:" + chat,))
    first = db.execute("select coalesce(max(id), 0) from post where chat = %s", (chat,)).fetchone()
    assert first is not None
    for n, message in enumerate(messages, first[0] + 1):
        element = {**message, "message_id": f"m{n}", "created_at": "2025-01-01T00:00:00Z"}
        db.execute("select append_messages(%s, %s)", ("native:" + chat, json.dumps([element])))
        columns = [message.get(k) for k in ("content", "tool_calls", "metadata")]
        db.execute(
            "insert into post values (%s, %s, %s, %s, %s, %s, %s, %s, %s, '2025-01-01T00:00:00Z')",
            (n, chat, f"m{n}", message["role"], *(None if c is None else json.dumps(c) for c in columns[:2]),
             message.get("tool_call_id"), message.get("name"), None if columns[2] is None else json.dumps(columns[2])),
        )  # fmt: skip


def windows(db: Connection, chat: str, budget: int | None = None) -> tuple[list[Any], list[Any]]:
    query = f"select {SHOWN} from working_window(%s, %s) w order by w.ordinal"
    native = db.execute(query, ("native:" + chat, budget)).fetchall()
    return native, db.execute(query, (chat, budget)).fetchall()


@pytest.fixture
def primary_key_per_chat(posts: Connection) -> Connection:
    posts.execute("alter table post drop constraint post_pkey")
    return posts


@pytest.mark.core
@pytest.mark.parametrize("name", CHATS)
def test_the_window_is_that_of_a_native_chat(primary_key_per_chat: Connection, name: str) -> None:
    db = primary_key_per_chat
    for n in range(1, len(CHATS[name]) + 1):  # after every message
        store(db, name, CHATS[name][n - 1 : n])
        native, adopted = windows(db, name)
        assert adopted == native
    for format in ("openai", "anthropic"):
        both = [
            db.execute(f"select {format}_messages(%s)", (chat,)).fetchone()
            for chat in (name, "native:" + name)
        ]
        assert both[0] == both[1]


def random_chat(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    open_calls: list[str] = []
    made: list[dict[str, Any]] = []
    for n in range(rng.randint(10, 60)):
        kind = rng.random()
        if open_calls and kind < 0.4:
            call_id = rng.choice(open_calls)
            pending = rng.random() < 0.2
            made.append(
                result(
                    call_id,
                    f"result {n} " * rng.randint(1, 9),
                    **({"metadata": {"pending": True}} if pending else {}),
                )
            )
            if not pending:
                open_calls.remove(call_id)
        elif kind < 0.6:
            ids = [f"c{rng.randint(1, 6)}" for _ in range(rng.randint(1, 3))]
            ids = list(dict.fromkeys(ids))
            made.append(assistant(rng.choice([None, "let me see"]), *(call(i) for i in ids)))
            open_calls = [c for c in open_calls if c not in ids] + ids
        elif kind < 0.8:
            made.append(user(f"question {n} " * rng.randint(1, 20)))
        elif kind < 0.85:
            made.append(result(f"x{n}", "nobody asked"))
        else:
            made.append(assistant(f"answer {n} " * rng.randint(1, 20)))
    return made


def answered_chat(seed: int) -> list[dict[str, Any]]:
    """Turns whose calls are answered at once, in any order."""
    rng = random.Random(seed)
    made: list[dict[str, Any]] = []
    for n in range(12):
        made.append(user(f"question {n} " * rng.randint(1, 9)))
        for _ in range(rng.randint(0, 2)):
            ids = [f"c{k}" for k in range(rng.randint(1, 3))]
            made.append(assistant(None, *(call(i) for i in ids)))
            rng.shuffle(ids)
            made.extend(result(i, f"result {n} " * rng.randint(1, 9)) for i in ids)
        made.append(assistant(f"answer {n} " * rng.randint(1, 9)))
    return made


@pytest.mark.core
@pytest.mark.parametrize("seed", range(12))
def test_random_chats_are_equal(primary_key_per_chat: Connection, seed: int) -> None:
    store(primary_key_per_chat, "r", [user("begin"), *random_chat(seed)])
    native, adopted = windows(primary_key_per_chat, "r")
    assert adopted == native


@pytest.mark.core
@pytest.mark.parametrize("seed", range(4))
def test_lines_make_equal_windows(primary_key_per_chat: Connection, seed: int) -> None:
    db = primary_key_per_chat
    made = answered_chat(seed)
    store(db, "r", made)
    summary = json.dumps({"facts": ["a"]})
    placed = 0
    for n in range(8, len(made) - 4, 5):
        if made[n]["role"] == "tool":  # m{n} is followed by a result of its own unit
            with pytest.raises(psycopg.Error) as error:
                db.execute("select put_summary('r', %s, %s)", (f"m{n}", summary))
            assert error.value.sqlstate == "PCX07"
            continue
        outcomes = []
        for chat in ("native:r", "r"):
            try:
                db.execute("select put_summary(%s, %s, %s)", (chat, f"m{n}", summary))
                outcomes.append(None)
            except psycopg.Error as refused:
                outcomes.append(refused.diag.message_primary)
        assert outcomes[0] == outcomes[1]
        placed += outcomes[0] is None
        native, adopted = windows(db, "r")
        adopted = [tuple("sum" if str(v).startswith("sum_") else v for v in row) for row in adopted]
        native = [tuple("sum" if str(v).startswith("sum_") else v for v in row) for row in native]
        assert adopted == native, n
    assert placed >= 2
    for chat in ("native:r", "r"):
        db.execute("select start_over(%s, 'note')", (chat,))
    native, adopted = windows(db, "r")
    assert [row[1:2] + row[3:] for row in adopted] == [row[1:2] + row[3:] for row in native]


SCRIPTS = {
    "latin": "the parcel is late again and nobody knows why ",
    "cyrillic": "посылка снова опаздывает и никто не знает почему ",
    "han": "包裹又迟到了没有人知道为什么",
    "base64": "QWxhZGRpbjpvcGVuIHNlc2FtZQ8fK2",
    "emoji": "🚚📦⏳",
}


@pytest.mark.parametrize("said", SCRIPTS)
def test_a_line_of_any_size_makes_the_window_smaller_or_is_refused(
    primary_key_per_chat: Connection, said: str
) -> None:
    db = primary_key_per_chat
    read = "select sum(tokens), (select count(*) from pass where chat_id = %s) from working_window(%s)"
    seen: set[str | None] = set()
    for size, told in itertools.product((1, 4, 12), SCRIPTS):
        chat = f"{told} {size}"
        store(db, chat, [(user, assistant)[n % 2](f"{n}: {SCRIPTS[said] * size}") for n in range(8)])
        for home in (chat, "native:" + chat):
            for times in (64, 16, 8, 4, 2, 1):  # until one is small enough
                before = db.execute(read, (home, home)).fetchone()
                summary = json.dumps({"notes": SCRIPTS[told] * times})
                outcome = None
                try:
                    db.execute("select put_summary(%s, 'm6', %s)", (home, summary))
                except psycopg.Error as refused:
                    outcome = f"{refused.sqlstate}: {refused.diag.message_hint}"
                after = db.execute(read, (home, home)).fetchone()
                assert before is not None
                assert after is not None
                seen.add(outcome)
                if outcome is None:
                    assert after[0] < before[0]
                    break
                assert after == before
    assert seen == {None, "PCX07: make it shorter; nothing was stored"}


@pytest.mark.core
@pytest.mark.parametrize("seed", range(6))
def test_any_budget_fits_and_pairs(primary_key_per_chat: Connection, seed: int) -> None:
    db = primary_key_per_chat
    store(db, "r", [user("begin"), *random_chat(seed + 100), user("the newest request")])
    for budget in (150, 300, 600, 1200):
        rows = db.execute(
            "select role, content, tool_calls, tool_call_id, tokens from working_window('r', %s) order by ordinal",
            (budget,),
        ).fetchall()
        assert 3 + sum(r[4] for r in rows) <= budget
        assert any(r[1] == "the newest request" for r in rows)
        waiting: list[str] = []
        for role, _, calls, call_id, _ in rows:
            if role == "tool":
                waiting.remove(call_id)
                continue
            assert not waiting
            waiting = [c["id"] for c in calls or ()]
        assert not waiting


def test_a_result_finds_its_call_across_the_edge_of_a_range(primary_key_per_chat: Connection) -> None:
    db = primary_key_per_chat
    store(
        db,
        "e",
        [user("go"), assistant(None, call("A")), user("b"), assistant("c"), result("A", "late"), user("d")],
    )

    def rows(low: int, high: int) -> list[tuple[int, int]]:
        return db.execute(
            "select seq, unit_seq from pycontext._thread_rows('e', 'posts', array[%s]::bigint[], array[%s]::bigint[]) order by seq",
            (low, high),
        ).fetchall()

    assert rows(1, 3) == [(1, 1), (2, 2), (3, 3), (5, 2)]  # the unit comes whole
    assert rows(3, 6) == [(3, 3), (4, 4), (6, 6)]  # and goes whole
    assert rows(2, 2) == [(2, 2), (5, 2)]
    assert rows(5, 5) == []


def test_a_second_answer_belongs_to_no_call_wherever_reading_begins(
    primary_key_per_chat: Connection,
) -> None:
    db = primary_key_per_chat
    store(db, "e", [user("go"), assistant(None, call("A")), result("A", "done"), result("A", "again")])
    rows = "select seq, unit_seq from pycontext._thread_rows('e', 'posts', array[%s]::bigint[], array[4]::bigint[])"
    assert db.execute(rows + " order by seq", (1,)).fetchall() == [(1, 1), (2, 2), (3, 2), (4, 4)]
    assert db.execute(rows, (4,)).fetchall() == [(4, 4)]
    # it is pinned by itself
    pin = db.execute("select unit_seq, to_seq from pin_message('e', 'm4')").fetchone()
    assert pin == (4, 4)


def test_a_result_after_a_cut_answers_the_newest_call_of_its_id(primary_key_per_chat: Connection) -> None:
    db = primary_key_per_chat
    waits = assistant(None, call("P"), metadata={"pending": True})
    calls = [
        assistant(None, call("A")),
        assistant("word " * 400),
        waits,
        assistant(None, call("A"), call("P")),
    ]
    store(db, "e", [user("go"), *calls, result("A", "done"), result("P", "done"), user("and?")])
    rows = "select seq, unit_seq from pycontext._thread_rows('e', 'posts', array[1]::bigint[], array[2]::bigint[])"
    assert db.execute(rows + " order by seq").fetchall() == [(1, 1), (2, 2)]
    put = "select seq from put_summary('e', %s, '{\"facts\": [\"a word\"]}')"
    with pytest.raises(psycopg.Error, match="waits for a person"):
        db.execute(put, ("m4",))
    assert db.execute(put, ("m3",)).fetchone() == (3,)


def test_no_cut_takes_in_a_row_that_may_still_have_an_older_neighbour(posts: Connection) -> None:
    exchange = [assistant(None, call("A")), result("A", "found " * 30)]
    made = [m for n in range(12) for m in (user(f"{n} " * 30), *exchange, assistant("so it is " * 30))]
    store(posts, "a", made)
    plan = "select to_seq from compaction_plan('a', 1500)"
    whole = posts.execute(plan).fetchone()
    assert whole is not None
    for young in range(8, whole[0] + 1):
        posts.execute("update post set created_at = now() where id = %s", (young,))
        before = young - (2 if young % 4 == 3 else 1)  # a result stays with its call
        assert posts.execute(plan).fetchone() == (before,), young
        posts.execute("update post set created_at = now() - interval '2 minutes' where id = %s", (young,))
        assert posts.execute(plan).fetchone() == whole


def test_a_pinned_result_stays_where_its_call_was_deleted(posts: Connection) -> None:
    store(
        posts,
        "a",
        [user("go"), assistant(None, call("A"), call("B")), result("A", "one"), result("B", "two")],
    )
    store(posts, "a", [assistant("word " * 400)])
    for name in ("m3", "m4"):
        posts.execute("select pin_message('a', %s)", (name,))
    shown = "select seq, section, is_shortened from working_window('a', 300) where seq < 5"
    assert [r[0] for r in posts.execute(shown).fetchall() if r[1] == "pinned" and not r[2]] == [2, 3, 4]
    posts.execute("delete from post where chat = 'a' and id = 2")
    assert [r[0] for r in posts.execute(shown).fetchall() if r[1] == "pinned" and not r[2]] == [3, 4]
    posts.execute("delete from post where chat = 'a' and id = 3")
    assert [r[0] for r in posts.execute(shown).fetchall() if r[1] == "pinned" and not r[2]] == [4]


def test_what_a_read_ends_with_is_marked_though_it_was_no_more_than_asked_for(posts: Connection) -> None:
    store(posts, "a", [user("before")])
    posts.execute("select start_over('a')")
    # as many rows as the first read of this budget asks for, all of them counted
    store(posts, "a", [assistant("word " * 2400), user("go"), user("and?"), *[assistant("word")] * 29])
    posts.execute(
        "select cache_token_counts('a', 'o200k_base', (select jsonb_agg(jsonb_build_object('seq', u.seq, 'tokens',"
        " case u.seq when 2 then 2404 else 20 end)) from uncounted_messages('a') u where u.line_no = 0))"
    )
    omitted = posts.execute(
        "select content from working_window('a', 320) where section = 'omitted'"
    ).fetchone()
    assert omitted is not None
    assert omitted[0].startswith("[Messages #2 to #")


@pytest.mark.parametrize("is_compacted", [False, True])
def test_all_that_a_window_reads_is_counted(posts: Connection, is_compacted: bool) -> None:
    """However long the chat: its first turn, a pin and the request lie far before the newest rows."""
    rows = [user("go"), assistant("on my way"), user("and then?")]
    rows += [assistant(f"step {n} " + "word " * 40) for n in range(600)]
    posts.execute("create temp table t (place bigint, role text, content jsonb)")
    with posts.cursor().copy("copy t from stdin") as copy:
        for place, row in enumerate(rows, 1):
            copy.write_row((place, row["role"], json.dumps(row["content"])))
    posts.execute(
        "insert into post (id, chat, external, role, content, created_at)"
        " select place, 'a', 'm' || place, role, content, now() from t"
    )
    posts.execute("select create_chat('a', source => 'posts', profile => 'small-8k')")
    posts.execute("select pin_message('a', 'm20')")
    if is_compacted:
        compact = "select put_summary('a', 'm590', %s)"
        posts.execute(compact, (json.dumps({"resolved": ["some hundred steps were taken"]}),))
    count = (
        "select cache_token_counts('a', 'o200k_base',"
        " jsonb_agg(jsonb_build_object('seq', u.seq, 'line_no', u.line_no, 'tokens', 50))), array_agg(u.seq)"
        " from uncounted_messages('a', max_rows => 40) u having count(*) > 0"
    )
    seen = []
    while told := posts.execute(count).fetchone():
        assert told[0] == len(told[1])
        seen += told[1]
    assert {1, 3, 20, 603} < set(seen)
    assert len(seen) < 250
    query = "select distinct section from working_window('a') where %s and section <> 'omitted'"
    assert posts.execute(query % "is_estimate").fetchall() == []
    assert ("pinned",) in posts.execute(query % "true").fetchall()


@pytest.mark.parametrize("is_told", [False, True])
def test_a_summary_of_what_is_gone_meanwhile_is_stale(posts: Connection, is_told: bool) -> None:
    store(posts, "a", [user("first"), assistant("word " * 400), user("second"), assistant("sure")])
    plan = posts.execute("select edit_no from compaction_plan('a', 300)").fetchone()
    assert plan is not None
    if is_told:
        # something changed, it is not said what
        posts.execute("update post set content = to_jsonb('x'::text) where chat = 'a' and id = 2")
        posts.execute("select source_changed('a')")
    else:
        posts.execute("delete from post where chat = 'a' and id = 2")
    with pytest.raises(psycopg.Error, match="stale") as raised:
        posts.execute("select put_summary('a', 'm2', '{\"facts\": [\"a word\"]}', edit_no => %s)", plan)
    assert raised.value.sqlstate == "PCX07"
    with pytest.raises(psycopg.Error, match="no such message"):
        posts.execute("select put_summary('a', 'm9', '{\"facts\": [\"a word\"]}')")


def test_a_line_stays_in_the_thread_where_the_message_it_follows_was_deleted(posts: Connection) -> None:
    store(posts, "a", [user("first"), assistant("ok"), user("second"), assistant("sure")])
    posts.execute("select start_over('a', null)")
    store(posts, "a", [user(f"u{n}") for n in range(4)])

    def kinds(before: int | None = None, most: int = 50) -> list[tuple[str, int]]:
        return posts.execute(
            "select kind, seq from thread('a', %s, %s) order by seq, kind", (before, most)
        ).fetchall()

    rows = [("message", n) for n in range(5, 9)]
    posts.execute("delete from post where chat = 'a' and id = 4")
    assert kinds() == [("message", 1), ("message", 2), ("message", 3), ("summary", 4), *rows]
    posts.execute("delete from post where chat = 'a' and id < 4")
    assert kinds() == [("summary", 4), *rows]
    assert kinds(most=4) == rows
    assert kinds(before=5, most=4) == [("summary", 4)]
    posts.execute("delete from post where chat = 'a'")
    assert kinds() == [("summary", 4)]


def test_past_the_edge_of_a_range_only_its_results_are_read(primary_key_per_chat: Connection) -> None:
    db = primary_key_per_chat
    store(
        db,
        "e",
        [
            user("go"),
            assistant(None, call("A")),
            user("b"),
            assistant(None, call("B")),
            result("B", "b"),
            result("A", "a"),
        ],
    )
    query = "select seq, unit_seq from pycontext._thread_rows('e', 'posts', array[1], array[99], null, 3) order by seq"
    assert db.execute(query).fetchall() == [
        (1, 1),
        (2, 2),
        (3, 3),
        (6, 2),
    ]  # 5 answers 4, which is not among them


KINDS = [
    "newest",
    "oldest",
    "newest user",
    "oldest user",
    "calls",
    "results",
    "newest places",
    "oldest places",
    "cut",
    "edge",
]


def kept(db: Connection, kind: str) -> Any:
    """What the statement kept for the source reads between places 2 and 5."""
    return db.execute(
        "select r.* from source s cross join lateral"
        " pycontext._read_relation('e', 2, 5, 2, null, null, null, 'o200k_base', s, %s) r",
        (kind,),
    ).fetchone()


def planned(db: Connection, kind: str) -> Any:
    """The same by the statement as it is made for one read."""
    record = db.execute("select pycontext._source_query(s, %s) from source s", (kind,)).fetchone()
    assert record
    query = record[0]
    for n, value in enumerate(("'e'", "2", "5", "2", "null", "null", "null", "'o200k_base'"), 1):
        query = query.replace(f"${n}", value)
    return db.execute(query).fetchone()


@pytest.mark.core
def test_a_source_has_its_statements_kept(posts: Connection) -> None:
    db = posts
    store(
        db,
        "e",
        [user("go"), assistant(None, call("A")), result("A", "a"), user("b"), assistant("c"), user("d")],
    )
    for kind in KINDS:
        assert kept(db, kind)[2]
        assert kept(db, kind) == planned(db, kind), kind
    # another shape: what was kept no longer holds, and nobody has to know
    db.execute("drop view source_post")
    db.execute(
        "create view source_post as select chat as chat_id, id as seq, id as message_id, role, content, created_at from post"
    )
    db.execute("select register_source('posts', 'source_post', true)")
    assert (
        db.execute("select message_id, is_shortened from working_window('e') where role = 'tool'").fetchall()
        == []
    )
    db.execute("update source set has_columns = '{name}'")
    assert kept(db, "newest") == (None,) * 6
    db.execute("select forget_source('posts')")
    bodies = db.execute("select prosrc from pg_proc where proname = '_read_relation'").fetchall()
    assert len(bodies) == 1
    assert "source_post" not in bodies[0][0]


@pytest.mark.core
def test_statements_kept_quote_what_they_name(db: Connection) -> None:
    names = ["it's", '"; drop table post; --', "$sql$ $q$ \\'", "%s %L {}"]
    db.execute("create table post (chat text, id bigint, primary key (chat, id))")
    db.execute("insert into post values ('e', 1), ('e', 2)")
    for name in names:
        view = psycopg.sql.Identifier(name)
        db.execute(
            psycopg.sql.SQL(
                "create view {} as select chat as chat_id, id as seq, id as message_id, 'user' as role, {} as content, now() as created_at from post"
            ).format(view, psycopg.sql.Literal(name))
        )
        db.execute("select register_source(%s, %s::regclass, true)", (name, view.as_string(db)))
        assert db.execute("select content from working_window('e')").fetchall() == [(name,)] * 2
    for name in names:
        db.execute("select create_chat(%s, source => %s)", (name, name))
    assert db.execute("select count(*) from post").fetchall() == [(2,)]


@pytest.mark.core
def test_who_may_not_replace_the_statements_kept_leaves_them(posts: Connection) -> None:
    db = posts
    body = "select oid, xmin, prosrc, proacl from pg_proc where proname = '_read_relation'"
    before = db.execute(body).fetchall()
    with db.transaction(force_rollback=True):
        db.execute("create role clerk")
        db.execute("grant usage on schema pycontext to clerk")
        db.execute("grant execute on function pycontext._compile_sources() to clerk")
        db.execute("set local role clerk")
        db.execute("select pycontext._compile_sources()")
        assert db.execute(body).fetchall() == before


@pytest.mark.core
def test_a_json_column_may_hold_what_jsonb_refuses(db: Connection) -> None:
    """NUL and lone surrogates, at every depth; every other character as it is."""
    db.execute(
        """
        create table loose (chat text, id bigint primary key, role text, content json, calls json, meta json, at timestamptz);
        create index on loose (chat, id);
        create view source_loose as select chat as chat_id, id as seq, id as message_id, role, content,
            calls as tool_calls, meta as metadata, at as created_at from loose;
        select register_source('loose', 'source_loose', true);
        """
    )
    told = {
        r"a\u0000b": "a\ufffdb",
        r"\u0000\u0000": "\ufffd\ufffd",
        r"ok \ud83d tail": "ok \ufffd tail",
        r"x\uDC97": "x\ufffd",
        r"\ud83d\ud83d\ude00\ude00": "\ufffd\U0001f600\ufffd",
        r"\uD83D\uDE00 \\u0000 \\ud83d": "\U0001f600 \\u0000 \\ud83d",
        r"\\\u0000 \\\\u0000 \"\\\ude00": '\\\ufffd \\\\u0000 "\\\ufffd',
        r"\\ud83d\ude00": "\\ud83d\ufffd",
    }
    for n, (text, want) in enumerate(told.items()):
        chat = f"loose {n}"
        parts = f'[{{"type": "text", "text": "{text}", "k{text}": ["{text}"]}}]'
        call = f'[{{"id": "A", "type": "function", "function": {{"name": "f", "arguments": "{text}"}}}}]'
        rows = (("user", f'"{text}"', None), ("assistant", parts, call), ("user", '"go"', None))
        for m, (role, content, calls) in enumerate(rows):
            db.execute(
                "insert into loose values (%s, %s, %s, %s, %s, %s, now())",
                (chat, 10 * n + m, role, content, calls, f'{{"k": "{text}"}}'),
            )
        window = db.execute(
            "select content, tool_calls from working_window(%s) order by ordinal", (chat,)
        ).fetchall()
        assert window[0][0] == want
        assert window[1][0] == [{"type": "text", "text": want, f"k{want}": [want]}]
        assert window[1][1][0]["function"]["arguments"] == want
        thread = db.execute("select content, metadata from thread(%s) order by seq", (chat,)).fetchall()
        assert thread[0] == (want, {"k": want})
        assert db.execute("select content from message_original(%s, %s)", (chat, 10 * n)).fetchone() == (
            want,
        )


NO_CALLS: list[Any] = [
    [{"id": "A", "type": "default", "apiName": "look", "identifier": "shop", "arguments": "{}"}],
    [{"type": "function", "function": {"name": "look", "arguments": "{}"}}],
    [{"id": "A", "type": "function", "function": {"arguments": "{}"}}],
    [{"id": "A", "function": "look"}],
    [{"id": 7, "function": {"name": "look", "arguments": "{}"}}],
    [{"id": "", "function": {"name": "look", "arguments": "{}"}}],
    [[call("A")]],
    [call("B"), {"id": "B", "function": {"name": "look", "arguments": "{}"}}],
    [call("B"), None, "look"],
    {"a": 1},
    "look()",
]


@pytest.mark.core
def test_what_is_no_call_never_reaches_a_provider_as_one(posts: Connection) -> None:
    """It is told as text, its results as those of a call that is not there, in valid requests."""
    db = posts
    seq = itertools.count()
    for n, calls in enumerate(NO_CALLS):
        contents = (None, "", "I look.", [{"type": "text", "text": "I look."}])
        for content in contents if n == 0 else contents[n % 4 :][:1]:
            chat = f"chat {n} {content}"
            called = [e["id"] for e in calls if e and e != "look"][:1] if n in (7, 8) else []
            messages = [
                user("go"), {**assistant(content), "tool_calls": calls}, result("A", "hub 7"), *(result(i, "b") for i in called),
                {"role": "tool", "content": "hub 8"}, assistant("In hub 7."), user("and now?"),
            ]  # fmt: skip
            for place, message in enumerate(messages, 1):
                columns = [
                    None if message.get(k) is None else json.dumps(message[k])
                    for k in ("content", "tool_calls")
                ]
                db.execute(
                    "insert into post values (%s, %s, %s, %s, %s, %s, %s, null, null, now())",
                    (next(seq), chat, f"m{place}", message["role"], *columns, message.get("tool_call_id")),
                )  # fmt: skip
            query = "select openai_messages(%(c)s), anthropic_messages(%(c)s), responses_input(%(c)s), start_turn(%(c)s) is null"
            row = db.execute(query, {"c": chat}).fetchone()
            assert row is not None
            validators.openai_chat(row[0])
            validators.anthropic(row[1])
            validators.openai_responses(row[2])
            spoken = row[0][1]
            assert [e["id"] for e in spoken.get("tool_calls", [])] == called
            said = spoken["content"] if isinstance(spoken["content"], str) else spoken["content"][-1]["text"]
            assert "[tool call " in said
            assert ("I look." in json.dumps(spoken)) == ("I look." in str(content))
            for told in ("hub 7", "hub 8", "In hub 7."):
                assert told in json.dumps(row[0])
            assert "[result of tool call, which is not in view]" in json.dumps(row[0])
            count = (
                "select cache_token_counts(%(c)s, 'o200k_base', (select jsonb_agg(jsonb_build_object('seq', u.seq, 'tokens', 90))"
                " from uncounted_messages(%(c)s) u))"
            )
            assert db.execute(count, {"c": chat}).fetchone() == (len(messages),)
            assert db.execute("select openai_messages(%s)", (chat,)).fetchone() == (row[0],)


@pytest.mark.core
def test_acts_that_belong_to_the_product_are_refused(posts: Connection) -> None:
    store(posts, "a", CHATS["plain"])
    for act in (
        "append_message('a', 'user', 'x')",
        "rewind_chat('a', 'm1')",
        "redact_message('a', 'm1')",
    ):
        with pytest.raises(psycopg.Error) as error:
            posts.execute(f"select {act}")
        assert error.value.sqlstate == "PCX09", act
        assert error.value.diag.message_hint
    with pytest.raises(psycopg.Error) as error:
        posts.execute("select source_changed('native:a', 'm1')")
    assert error.value.sqlstate == "PCX02"


@pytest.mark.core
def test_views_look_with_the_rights_of_whoever_asks(db: Connection) -> None:
    views = db.execute(
        "select c.relname, c.reloptions from pg_class c where c.relnamespace = 'pycontext'::regnamespace and c.relkind = 'v' "
        "and c.relname in ('summary_line', 'chat_overview', 'token_count_coverage', 'compaction_history')"
    ).fetchall()
    assert len(views) == 4
    assert all("security_invoker=true" in (options or ()) for _, options in views)


@pytest.mark.core
def test_findings_and_views(posts: Connection) -> None:
    db = posts
    db.execute("select create_chat('big', profile => 'small-8k')")
    db.execute(
        "select append_message('big', 'user', repeat('tell me about it. ', 200)) from generate_series(1, 30)"
    )
    found = dict(db.execute("select finding, hint from status()").fetchall())
    assert "pycontext compact" in found["chats over budget"]
    assert "expired leases" not in found
    db.execute("select claim_compaction('big', 'me', 1)")
    db.execute("update pycontext.lease set expires_at = now() - interval '1 minute'")
    assert "expired leases" in dict(db.execute("select finding, hint from status()").fetchall())
    overview = db.execute(
        "select messages, live_tokens > token_budget, line_seq from chat_overview where chat_id = 'big'"
    )
    assert overview.fetchall() == [(30, True, None)]
    coverage = db.execute(
        "select rows, counted, estimated, percent from token_count_coverage where chat_id = 'big'"
    )
    assert coverage.fetchall() == [(30, 0, 30, 0)]
    db.execute("select start_over('big', 'again')")
    lines = db.execute(
        "select seq, origin, text, is_newest from summary_line where chat_id = 'big'"
    ).fetchall()
    assert lines == [(30, "reset", "again", True)]


def test_a_chat_without_a_line_has_no_summary_to_ask_about(posts: Connection) -> None:
    store(posts, "a", [user("order QX-4471"), assistant("yes")])
    for chat, state in (("a", "PCX02"), ("native:a", "PCX02"), ("nobody", "PCX01")):
        if chat == "nobody":
            posts.execute("select forget_source('posts')")
        with pytest.raises(psycopg.Error) as raised:
            posts.execute("select lost_values(%s, 'sum_none')", (chat,))
        assert raised.value.sqlstate == state, raised.value


@pytest.mark.core
def test_a_turn_resumed_by_its_request_tells_its_own_reply(posts: Connection) -> None:
    """Of both homes alike: not the newest reply of the chat, and none where another request came first."""
    said = [
        ("user", "one"),
        ("assistant", "1"),
        ("user", "two"),
        ("user", "three"),
        ("assistant", "3"),
        ("user", "four"),
    ]
    store(posts, "a", [{"role": role, "content": content} for role, content in said])
    for chat in ("a", "native:a"):
        told = [
            posts.execute(
                "select is_answered, reply from start_turn(%s, request_id => %s)", (chat, f"m{n}")
            ).fetchone()
            for n in (1, 3, 4, 6)
        ]
        assert told == [(True, "1"), (False, None), (True, "3"), (False, None)], chat


def test_an_answered_request_reads_the_same_in_both_homes(posts: Connection) -> None:
    store(posts, "a", [user("one"), assistant("1"), user("two"), assistant("2"), user("three")])
    for n in (1, 3):
        native = posts.execute(
            "select is_answered, messages from start_turn('native:a', %s)",
            (json.dumps({**user(("one", "two")[n // 2]), "message_id": f"m{n}"}),),
        ).fetchone()
        adopted = posts.execute(
            "select is_answered, messages from start_turn('a', request_id => %s)", (f"m{n}",)
        ).fetchone()
        assert native is not None
        assert native[0]
        assert adopted == native
        assert "three" not in str(native)


@pytest.mark.core
def test_a_request_that_the_chat_does_not_have_is_refused(posts: Connection) -> None:
    """Never the newest turn in its place; with a message it is that message's id."""
    store(posts, "a", [user("one"), assistant("1"), user("two")])
    for chat in ("a", "native:a"):
        with pytest.raises(psycopg.Error) as error:
            posts.execute("select start_turn(%s, request_id => 'm9')", (chat,))
        assert error.value.sqlstate == "PCX02", chat
        assert "m9" in (error.value.diag.message_detail or "")
        assert error.value.diag.message_hint
    for _ in range(2):  # sent again it is the same turn
        started = posts.execute(
            'select message_id, seq from start_turn(\'native:a\', \'{"role": "user", "content": "three"}\', request_id => \'m9\')'
        ).fetchone()
        assert started == ("m9", 4)
    assert posts.execute("select seq from start_turn('native:a', request_id => 'm9')").fetchone() == (4,)
    own = "select message_id from start_turn('native:a', %s, request_id => 'm10')"
    assert posts.execute(own, ('{"role": "user", "content": "x", "message_id": "mine"}',)).fetchone() == (
        "mine",
    )

    assert posts.execute(own, ('{"role": "user", "content": "x", "message_id": "mine"}',)).fetchone() == (
        "mine",
    )


@pytest.mark.core
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("drop view source_post", "source_post is gone"),
        (
            "drop view source_post; create view source_post as "
            "select chat as chat_id, id as seq, external as message_id, role, content from post",
            "no column created_at, no column tool_calls",
        ),
        (
            "drop view source_post; create view source_post as select id as chat_id, id as seq, id as message_id, role, content, "
            "tool_calls, tool_call_id, name, metadata, created_at from post",
            "chat_id is bigint, was text, message_id is bigint, was text",
        ),
    ],
)
def test_a_source_that_is_broken_is_named(posts: Connection, change: str, told: str) -> None:
    store(posts, "77", [user("one"), assistant("1")])
    posts.execute("select * from working_window('77')")  # planned while it was whole
    posts.execute(change)
    for read in (
        "working_window('77')",
        "start_turn('77')",
        "thread('77')",
        "compaction_plan('77')",
        "explain_window('77')",
    ):
        with pytest.raises(psycopg.Error) as error:
            posts.execute(f"select * from {read}")
        assert error.value.sqlstate == "PCX12", (read, error.value)
        assert "'posts'" in (error.value.diag.message_primary or "")
        assert told in (error.value.diag.message_detail or "")
        assert "register_source" in (error.value.diag.message_hint or "")
    # no chat of it has a row here, and it is told all the same
    found = posts.execute("select severity, detail from status() where finding = 'broken source'").fetchall()
    assert len(found) == 1
    assert found[0][0] == "error"
    assert told in found[0][1]
    posts.execute(
        "drop view if exists source_post; create view source_post as select chat as chat_id, id as seq, external as message_id, "
        "role, content, created_at from post; select register_source('posts', 'source_post', true)"
    )
    assert posts.execute("select content from working_window('77')").fetchall() == [("one",), ("1",)]
    assert not posts.execute("select from status() where finding = 'broken source'").fetchall()


@pytest.mark.core
def test_a_moment_that_the_chat_does_not_have_is_refused(posts: Connection) -> None:
    """Null is now, as everywhere; an id of nobody's, and an empty one, are errors in both homes."""
    store(posts, "a", [user("one"), assistant("1")])
    for chat in ("a", "native:a"):
        for moment in ("m9", ""):
            for read in ("working_window", "explain_window", "openai_messages"):
                with pytest.raises(psycopg.Error) as error:
                    posts.execute(f"select {read}(%s, as_of => %s)", (chat, moment))
                assert error.value.sqlstate == "PCX02", (read, chat, moment)
        now = posts.execute("select count(*) from working_window(%s, as_of => null)", (chat,)).fetchone()
        assert now == (2,)


IDS = {"bigint": "100000 + n", "uuid": "md5(n::text)::uuid", "text": "'p' || n"}
GONE = {
    "hard": "delete from shop.post where seq = 1",
    "soft": "update shop.post set deleted_at = now() where seq = 1",
    "edit": "update shop.post set body = 'My name is Kai.' where seq = 1",
}


def shop_with_facts(db: Connection, id_type: str = "bigint") -> str:
    """A chat of which a fact was taken and one kept on purpose; returns the id of its first message."""
    db.execute(
        f"""
        create schema shop;
        create table shop.post (id {id_type} primary key, seq bigint not null, chat bigint not null, who text,
            body text, deleted_at timestamptz);
        create index on shop.post (chat, seq);
        create view shop.m as select p.chat as chat_id, p.seq, p.id as message_id, p.who as role, p.body as content,
            now() - interval '1 day' as created_at from shop.post p where deleted_at is null;
        insert into shop.post select {IDS[id_type]}, n, 7, case n % 2 when 1 then 'user' else 'assistant' end,
            case n when 1 then 'My card is 4111.' when 3 then 'The boat is red.' else repeat('Well, and what of it? ', 20) || n end
        from generate_series(1, 9) n;
        select register_source('shop', 'shop.m');
        select create_chat('7', source => 'shop', owner => 'anna');
        select create_chat('other', owner => 'anna');
        """
    )
    first, fourth = (
        str(db.execute("select id from shop.post where seq = %s", (seq,)).fetchone()[0])  # type: ignore[index]
        for seq in (1, 4)
    )
    facts = [
        {"seq": 1, "content": "The card is 4111", "subject": "user.card"},
        {"seq": 3, "content": "The boat is red"},
    ]
    db.execute("select flush_facts('7', %s, %s)", (fourth, json.dumps(facts)))
    db.execute(
        'select cache_token_counts(\'7\', \'o200k_base\', \'[{"seq": 1, "tokens": 9}, {"seq": 3, "tokens": 9}]\')'
    )
    db.execute("select remember('7', 'Prefers tea')")
    return first


def recalled(db: Connection, chat: str, query: str | None = None) -> set[str]:
    return {row[0] for row in db.execute("select content from recall(%s, %s)", (chat, query)).fetchall()}


@pytest.mark.parametrize(
    ("id_type", "how", "is_named"),
    [("uuid", "hard", True), ("text", "soft", True), *itertools.product(["bigint"], GONE, [True, False])],
)
def test_a_fact_goes_with_the_row_it_cites(db: Connection, id_type: str, how: str, is_named: bool) -> None:
    first = shop_with_facts(db, id_type)
    assert "The card is 4111" in recalled(db, "7")
    db.execute(GONE[how])
    # nobody has said so yet, and it is told no more: not there, nor in the owner's other chats, by words or without
    for chat in ("7", "other"):
        assert recalled(db, chat) == {"The boat is red", "Prefers tea"}
        assert not [text for text in recalled(db, chat, "card 4111") if "4111" in text]
    db.execute("select source_changed('7', %s)", (first if is_named else None,))
    assert {row[0] for row in db.execute("select content from fact").fetchall()} == {
        "The boat is red",
        "Prefers tea",
    }
    if how != "edit":
        assert db.execute("select seq from token_count where line_no = 0").fetchall() == [(3,)]


@pytest.mark.parametrize("how", GONE)
def test_a_compaction_drops_facts_whose_rows_are_gone(db: Connection, how: str) -> None:
    shop_with_facts(db)
    db.execute("select forget('7', query => 'boat')")
    db.execute(GONE[how])
    db.execute("select claim_compaction('7', 'me')")
    assert db.execute("select content from fact where gone_at is null").fetchall() == [("Prefers tea",)]
    assert db.execute("select count(*) from fact where gone_by = 'forgotten'").fetchone() == (1,)


def test_a_fact_whose_row_cannot_be_looked_at_is_not_told_and_breaks_nothing(db: Connection) -> None:
    shop_with_facts(db)
    db.execute("select remember('other', 'Lives in Riga')")
    assert len(recalled(db, "other")) == 4
    db.execute("alter view shop.m rename to n")
    assert recalled(db, "other") == {"Lives in Riga"}
    db.execute("alter view shop.n rename to m")
    assert len(recalled(db, "other")) == 4


def test_a_source_that_reads_otherwise_loses_what_was_made_of_other_rows(db: Connection) -> None:
    shop_with_facts(db)
    db.execute(
        "insert into shop.post select 200 + n, n, 8, 'user', repeat('Chat 8 goes on. ', 20) || n from generate_series(1, 9) n"
    )
    db.execute("select create_chat('8', source => 'shop')")
    for chat, last in (("7", "100006"), ("8", "206")):
        db.execute('select put_summary(%s, %s, \'{"facts": ["A card was named"]}\')', (chat, last))
    warned: list[str] = []
    db.add_notice_handler(lambda notice: warned.append(str(notice.message_primary)))

    def lines() -> list[str]:
        return [row[0] for row in db.execute("select chat_id from summary_line order by 1").fetchall()]

    def flushed() -> Any:
        return db.execute("select flushed_seq from chat where chat_id = '7'").fetchone()[0]  # type: ignore[index]

    # the same rows, by another view: nothing is lost
    db.execute("create view shop.n as select * from shop.m")
    db.execute("select register_source('shop', 'shop.n'); select register_source('shop', 'shop.m')")
    assert (lines(), warned, flushed()) == (["7", "8"], [], 4)
    # other rows at the same places of one chat; the other one's stay
    db.execute("create or replace view shop.m as select p.chat as chat_id, p.seq, p.id as message_id, p.who as role,"
               " case when p.chat = 7 and p.seq < 3 then 'Something else' else p.body end as content,"
               " now() - interval '1 day' as created_at from shop.post p")  # fmt: skip
    db.execute("select register_source('shop', 'shop.m')")
    assert lines() == ["8"]
    assert "was named" not in str(db.execute("select content from working_window('7')").fetchall())
    assert recalled(db, "7") == {"The boat is red", "Prefers tea"}
    assert warned == [
        "source shop reads otherwise now: 1 line and 1 fact made of rows that are not there any more were dropped"
    ]
    assert flushed() < 1, "what is there now has its facts taken"
    # places of another kind cannot be compared
    db.execute("create view shop.timed as select chat_id, 1000 * seq as seq, message_id, role, content, created_at,"
               " created_at as order_at from shop.m")  # fmt: skip
    with pytest.raises(psycopg.Error, match="counts its places otherwise") as raised:
        db.execute("select register_source('shop', 'shop.timed')")
    assert raised.value.sqlstate == "PCX12"
    assert "forget_source('shop')" in str(raised.value.diag.message_hint)
    assert lines() == ["8"]
