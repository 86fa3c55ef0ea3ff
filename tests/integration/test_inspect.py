"""The page of a chat: whole, as SQL tells it, and nothing in it acts, whatever the chat says."""

# ruff: noqa: E501

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pycontext
from pycontext import cli, install
from pycontext.errors import BudgetTooSmall, NoSuchChat
from pycontext.inspector import inspect

Connection = psycopg.Connection[Any]

VOID = {"meta", "input", "br"}
_TAGS = """
    html head meta title style body header main footer nav section div p h1 h2 h3 a ul ol li dl dt dd table thead tbody
    tr th td details summary span strong small em b i code bdi data time label input br svg defs pattern rect path
"""
_ATTRIBUTES = """
    id class href lang charset name content http-equiv value datetime dir role tabindex scope type checked for viewbox
    preserveaspectratio width height x y d patternunits aria-label aria-labelledby aria-hidden data-tokens data-stored
"""
TAGS, ATTRIBUTES = set(_TAGS.split()), set(_ATTRIBUTES.split())
EVIL = (
    '</li></ol></script><script>alert(1)</script><img src=x onerror="alert(2)">"\'><a href="javascript:alert(3)">x</a>'
    "<style>*{display:none}</style> {{ 7 * 7 }} {% include 'x' %} <!-- ]]> &lt;b&gt; &#x3c; "
)
HIDDEN = "\u202egnp.exe\u202c \u2066x\u2069 \x07 \x1b[2J \x85 \U000e0041\U000e0042 \ufeff"


class Page(HTMLParser):
    """A page taken apart: every element has an end, and what is on it."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.html = html
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.texts: dict[str, str] = {}
        self.elements: dict[str, dict[str, str]] = {}
        self.data: dict[str, str] = {}
        self.code: list[str] = []
        self._open: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in given.items()]
        if "id" in given:
            self.ids.append(given["id"])
            self.elements[given["id"]] = given
        if tag == "data" and "class" in given:
            self.data.setdefault(given["class"], given["value"])
        if tag == "code":
            self.code.append("")
        if tag not in VOID:
            self._open.append((tag, given.get("id")))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for tag, identity in self._open:
            if identity is not None:
                self.texts[identity] = self.texts.get(identity, "") + data
            if tag == "code":
                self.code[-1] += data

    def of(self, seq: int) -> str:
        return self.texts[f"s{seq}"]


def page(db: Connection, chat_id: str, *arguments: Any, **more: Any) -> Page:
    return Page(inspect(db, chat_id, *arguments, **more))


def value(db: Connection, statement: str, *arguments: Any) -> Any:
    record = db.execute(statement, arguments).fetchone()
    return None if record is None else record[0]


def is_inert(found: Page) -> None:
    """Nothing is loaded, nothing runs, nothing is sent, whatever a browser makes of it."""
    assert set(found.tags) <= TAGS, set(found.tags) - TAGS
    assert {name for _, name, _ in found.attributes} <= ATTRIBUTES
    for tag, name, given in found.attributes:
        if name == "href":
            assert tag == "a"
            assert re.fullmatch(r"#[a-z]+-?\d*", given), given
    policies = [
        {n: v for _, n, v in found.attributes[at : at + 2]}
        for at, (_, name, given) in enumerate(found.attributes)
        if (name, given) == ("http-equiv", "Content-Security-Policy")
    ]
    (style,) = re.findall(r"<style>(.*?)</style>", found.html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policies[0]["content"].split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{digest}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert {given for _, name, given in found.attributes if name == "http-equiv"} == {
        "Content-Security-Policy"
    }
    assert "url(" not in style.replace("url(#hatch)", "")
    assert "@import" not in style
    assert not re.search(
        "[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f]", found.html
    )


def as_sql_says(
    db: Connection, chat_id: str, found: Page, budget: int | None = None, as_of: str | None = None
) -> None:
    """Each figure and each row of the page against the functions that it tells of."""
    asked = (chat_id, budget, as_of)
    window = value(db, "select 3 + sum(tokens) from working_window(%s, %s, %s)", *asked)
    assert int(found.data["window-tokens"]) == window
    told = db.execute(
        "select seq, message_id, fate, reason, tokens, stored, section from explain_window(%s, %s, %s, max_rows => 10000)",
        asked,
    ).fetchall()
    lines = {
        row[0]
        for row in db.execute("select message_id from message where chat_id = %s and line_no > 0", [chat_id])
    }
    messages = [row for row in told if row[1] is not None and row[1] not in lines]
    assert [i for i in found.ids if re.fullmatch(r"s\d+", i)] == [f"s{row[0]}" for row in messages]
    for seq, _, fate, reason, tokens, stored, section in messages:
        element = found.elements[f"s{seq}"]
        assert (int(element["data-tokens"]), int(element["data-stored"])) == (tokens, stored)
        assert f"{fate} {reason}" in found.of(seq)
        assert ("in" if section else "out") in element["class"].split()
    drawn = [found.elements[i] for i in found.ids if re.fullmatch(r"l\d+", i)]
    assert [int(e["data-tokens"]) for e in drawn] == [row[4] for row in told if row[1] in lines]
    assert sum("newest" in e["class"].split() for e in drawn) == value(
        db, "select count(*) from working_window(%s, %s, %s) where kind = 'summary'", *asked
    )
    sections = db.execute(
        "select section, sum(tokens) from working_window(%s, %s, %s) group by 1", asked
    ).fetchall()
    for section, tokens in sections:
        assert f'</i>{section}</th><td class="r"><data value="{tokens}">' in found.html


def is_whole(found: Page) -> None:
    assert len(set(found.ids)) == len(found.ids)
    targets = {given[1:] for _, name, given in found.attributes if name == "href"}
    assert targets <= set(found.ids)


@pytest.fixture
def varied(db: Connection, memory: pycontext.Database, fill: Any) -> str:
    """A chat with passes, a pin, a late result, a rewound end, a dropped line and facts."""
    memory.create_chat("varied", system_prompt="You answer for a bookshop.", profile="small-8k", owner="anna")
    fill("varied", 10)
    for number in range(20):
        with memory.turn(
            "varied", f"Где посылка {number}? " + "Прошло две недели. " * 20, message_id=f"q{number}"
        ) as turn:
            call = {
                "id": "c1",
                "type": "function",
                "function": {"name": "find", "arguments": f'{{"n": {number}}}'},
            }
            turn.add({"role": "assistant", "tool_calls": [call]})
            turn.add({"role": "tool", "tool_call_id": "c1", "content": f"hub B-{number} " * 150})
            turn.add({"role": "assistant", "content": f"Посылка {number} в пути. " * 10})
    memory.pin("varied", "q1")
    memory.compact("varied")
    memory.rewind("varied", "q18")
    memory.append("varied", "And now?")
    memory.remember("varied", "Anna lives in Riga", subject="user.city")
    return "varied"


def test_every_row_and_figure_is_what_sql_says(db: Connection, varied: str) -> None:
    for budget in (None, 4000, 1500):
        found = page(db, varied, budget)
        as_sql_says(db, varied, found, budget)
        assert int(found.data["token-budget"]) == (
            budget or value(db, "select token_budget from window_status(%s)", varied)
        )
        is_inert(found)
        is_whole(found)
    found = page(db, varied)
    passes = value(db, "select count(*) from compaction_history where chat_id = %s", varied)
    assert sum(i.startswith("pass-") for i in found.ids) == passes >= 2
    assert "<td>rewound</td>" in found.html
    assert "<td>pinned</td>" in found.html
    assert "Anna lives in Riga" in found.texts["facts"]
    fates = {row[0] for row in db.execute("select fate from explain_window(%s)", [varied])}
    assert {"summarized", "set aside", "pinned", "head", "summary", "kept"} <= fates


def test_a_row_that_is_read_otherwise_is_shown_both_ways(db: Connection, memory: pycontext.Database) -> None:
    memory.create_chat("c")
    memory.append("c", ["Please look.", {"role": "assistant", "content": "I will."}, "Go on."])
    for number in range(12):
        call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
        memory.append("c", {"role": "assistant", "tool_calls": [call]})
        memory.append("c", {"role": "tool", "tool_call_id": "c1", "content": f"hub B-{number} " * 100})
    found = page(db, "c", 2500)
    as_sql_says(db, "c", found, 2500)
    read = db.execute(
        "select w.seq, w.content #>> '{}' from working_window('c', 2500) w where w.is_shortened and w.role = 'tool'"
    ).fetchall()
    assert len(read) > 3
    for seq, content in read:
        stored, _, sent = found.of(seq).partition("as the model reads it")
        assert content in sent
        assert content not in stored
        assert "characters" in stored


def test_its_life_is_the_windows_of_its_day(db: Connection, varied: str) -> None:
    found = page(db, varied)
    rows = re.findall(
        r'<tr><td><a href="#s(\d+)">.*?value="(\d+)".*?class="r">([\d,]+)</td><td>(yes)?</td></tr>',
        found.html,
    )
    assert len(rows) > 30
    exact = 0
    for seq, tokens, budget, is_exact in rows:
        if is_exact:
            exact += 1
            read = db.execute(
                "select 3 + sum(w.tokens), bool_and(w.is_exact), max(m.read_budget) from message m, "
                "working_window(m.chat_id, as_of => m.message_id) w where m.chat_id = %s and m.seq = %s and m.line_no = 0",
                [varied, int(seq)],
            ).fetchone()
            assert read == (int(tokens), True, int(budget.replace(",", "")))
        assert int(tokens) <= int(budget.replace(",", ""))
    assert exact >= 15
    assert found.tags["path"] > 40


def test_as_of_a_message(db: Connection, varied: str) -> None:
    found = page(db, varied, None, "q9")
    as_sql_says(db, varied, found, None, "q9")
    is_inert(found)
    is_whole(found)
    assert int(found.data["token-budget"]) == value(
        db, "select read_budget from message where chat_id = %s and message_id = 'q9'", varied
    )
    assert "as of message q9" in found.html.replace('<bdi class="id">', "")


def test_hostile_content_is_inert(db: Connection, memory: pycontext.Database) -> None:
    chat = f"chat {EVIL}{HIDDEN}"
    memory.create_chat(chat, system_prompt=EVIL + HIDDEN, owner=EVIL, metadata={"x": EVIL})
    call = {
        "id": EVIL,
        "type": "function",
        "function": {"name": EVIL, "arguments": json.dumps({EVIL: EVIL + HIDDEN})},
    }
    image = {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64," + "QUJD" * 500}}
    rows = [
        {"role": "user", "content": EVIL + HIDDEN, "message_id": EVIL, "name": "eve<b>"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": EVIL, "content": EVIL * 100},
        {"role": "assistant", "content": "\n" * 500 + "א" * 100_000},
        {"role": "user", "content": [{"type": "text", "text": HIDDEN}, image, {"type": EVIL, "x": EVIL}]},
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "https://evil.example/x.png"}}],
        },
        {"role": "assistant", "content": "Z" + "\u0337" * 3000 + " 👨‍👩‍👧 <chat-summary>"},
        {
            "role": "assistant",
            "content": [{"type": "image_generation_call", "result": "QUJD" * 500}, "There"],
        },
    ]
    memory.append(chat, rows)
    memory.remember(chat, EVIL, subject=EVIL)
    memory.pin(chat, EVIL)
    memory.start_over(chat, EVIL + HIDDEN)
    memory.append(chat, EVIL)
    for budget in (None, 1200):
        found = page(db, chat, budget)
        is_inert(found)
        is_whole(found)
        as_sql_says(db, chat, found, budget)
    found = page(db, chat)
    assert "alert(1)</script><img src=x" in found.of(1)
    assert "U+202E" in found.of(1)
    assert "U+E0041 U+E0042" in found.of(1)
    assert "{{ 7 * 7 }}" in found.of(1)
    assert "→" not in found.of(2)  # drawn by the style, not in the text
    assert "QUJD" not in found.html
    assert "image/svg+xml, 2,026 characters of data, not loaded" in found.of(5)
    assert "not loaded: https://evil.example/x.png" in found.of(6)
    assert "image, 2,000 characters of data, not loaded" in found.of(8)


def test_a_long_row_is_cut_with_a_note_that_brings_it_back(
    db: Connection, memory: pycontext.Database
) -> None:
    memory.create_chat("it's")
    memory.append("it's", "слово " * 9_000)
    found = page(db, "it's")
    assert "34,000 of 54,000 characters are not on this page" in found.of(1)
    (statement,) = [code for code in found.code if "message_original" in code]
    assert value(db, statement) == "слово " * 9_000


def test_an_adopted_chat(db: Connection, memory: pycontext.Database) -> None:
    db.execute(
        """
        create table public.post (id bigserial primary key, ticket int, who text, body text, at timestamptz);
        create index on public.post (ticket, id);
        insert into public.post (ticket, who, body, at)
        select 7, case n % 2 when 0 then 'user' else 'assistant' end, 'Letter ' || n || repeat(' about the parcel', 30),
            now() - interval '1 day' + n * interval '1 minute' from generate_series(0, 99) n;
        create view public.posts as select ticket as chat_id, id as seq, id as message_id, who as role, body as content,
            at as created_at from public.post;
        select register_source('post', 'public.posts', true);
        """
    )
    found = page(db, "7", 3000)
    as_sql_says(db, "7", found, 3000)
    memory.compact("7", token_budget=3000)
    memory.start_over("7", "Only Riga matters")
    found = page(db, "7", 3000)
    as_sql_says(db, "7", found, 3000)
    is_inert(found)
    is_whole(found)
    assert "source post" in found.texts["window"]
    assert "the user started over here" in found.texts["thread"]
    assert found.texts["life"]


def test_the_newest_rows_of_a_long_chat(db: Connection, memory: pycontext.Database) -> None:
    memory.create_chat("long", profile="small-8k")
    for start in range(0, 2000, 500):
        memory.append(
            "long",
            [
                {
                    "role": "user" if n % 2 else "assistant",
                    "content": f"Message {n}. " + "Где посылка? " * (n % 90),
                }
                for n in range(start, start + 500)
            ],
        )
    found = page(db, "long")
    assert sum(bool(re.fullmatch(r"s\d+", i)) for i in found.ids) == 2000
    assert len(found.html.encode()) < 4_500_000
    is_whole(found)
    few = page(db, "long", max_rows=100)
    assert [i for i in few.ids if re.fullmatch(r"s\d+", i)] == [f"s{n}" for n in range(1901, 2001)]
    assert "Rows before #1901 are not on this page" in few.texts["thread"]
    (statement,) = [code for code in few.code if "before_seq" in code]
    assert db.execute(statement.encode()).fetchall()
    is_whole(few)


def test_a_page_costs_a_bounded_number_of_statements(
    dsn: str, varied: str, memory: pycontext.Database
) -> None:
    class Counting(psycopg.Cursor[Any]):
        statements = 0

        def execute(self, *arguments: Any, **more: Any) -> Any:
            Counting.statements += 1
            return super().execute(*arguments, **more)

    with psycopg.connect(dsn, autocommit=True, cursor_factory=Counting) as conn:
        memory.append("varied", [{"role": "user", "content": f"And {n}?"} for n in range(1000)])
        inspect(conn, varied)
    assert Counting.statements < 150


def test_an_empty_chat_and_one_that_is_not_there(db: Connection, memory: pycontext.Database) -> None:
    memory.create_chat("empty", system_prompt="You answer for a bookshop.")
    found = page(db, "empty")
    is_inert(found)
    is_whole(found)
    assert "You answer for a bookshop." in found.texts["thread"]
    with pytest.raises(NoSuchChat):
        inspect(db, "nobody")
    memory.append("empty", "word " * 2000)
    with pytest.raises(BudgetTooSmall):
        inspect(db, "empty", 100)


def test_whoever_may_read_may_make_a_page(db: Connection, varied: str) -> None:
    """One read-only snapshot; a reader's rights are enough."""
    db.execute(install.extra_sql("roles").encode())
    try:
        db.execute("set role pycontext_reader")
        as_sql_says(db, varied, page(db, varied))
    finally:
        # roles are the server's, and other tests make them anew
        db.execute("reset role")
        for role in ("pycontext_admin", "pycontext_writer", "pycontext_reader"):
            db.execute(f"drop owned by {role}")
            db.execute(f"drop role {role}")
    assert value(db, "show transaction_read_only") == "off"


def test_the_command(
    dsn: str, varied: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from pycontext.cli import terminal

    def run(*arguments: str) -> int:
        terminal.out.cache_clear()
        terminal.err.cache_clear()
        monkeypatch.setattr(sys, "argv", ["pycontext", "inspect", *arguments, "--dsn", dsn])
        capfd.readouterr()
        return cli.main()

    target = tmp_path / "page.html"
    assert run(varied, "-o", str(target), "--token-budget", "4000", "--as-of", "q12") == 0
    written = Page(target.read_text(encoding="utf-8"))
    assert written.data["token-budget"] == "4000"
    assert "s1" in written.ids
    assert run(varied, "--output", "-") == 0
    assert Page(capfd.readouterr().out).data["window-tokens"]
    assert run("nobody", "-o", str(target)) == 1
    assert "PCX01" in capfd.readouterr().err
