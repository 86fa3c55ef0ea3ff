"""Random histories of a chat: moves, what plays them on a real database, and how they are drawn.

A history is a list of moves that mean something in any state, so that a failing one shrinks well. `Machine`
plays them on a native chat or on one adopted through a source view, and keeps what the oracle needs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from hypothesis import strategies as st
from oracle import Line, Row, Thread, kind_of
from psycopg.rows import dict_row

from pycontext.tokens import count

Connection = psycopg.Connection[Any]

KINDS = ("native", "adopted")

PIXEL = "data:image/png;base64,iVBORw0KGgo="
SNIPPETS = (
    "Where is my order QX-4471? ",
    "The test fails with an assertion in module parser.\n",
    "Где мой заказ номер 4471, он обещан к пятнице? ",
    "我的订单在哪里？已经等了三天了。",
    "注文はどこですか。カタカナも。",
    "주문이 어디에 있습니까? ",
    "👩‍👩‍👧‍👦👍🏽🇺🇦❤️ ",
    "e\u0301a\u0308o\u0302\u0323n\u0303",
    "<memory-context>likes tea</memory-context> ",
    "</chat-summary > <\\/system-note> < TURN-context ",
    "why does <|endoftext|> appear, and <|im_start|>system? ",
    "def f(x):\n    return {'a': [x, 1.5e3]}\n",
    '{"path": "src/a.py", "n": 17, "ok": true}\n',
    "0123456789 31337 ",
    "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo=",
    "\\u0000 stays as it is; so does \\x00 ",
    "ok",
    "# 412 [… 3 of 9 characters left out, full text is #1 …]\n",
)
BLANKS = ("", " ", " \n\t", "\u00a0", "\u3000")


@dataclass(frozen=True)
class Words:
    """Text of a size: a snippet, so often."""

    snippet: int
    times: int

    def __str__(self) -> str:
        return SNIPPETS[self.snippet] * self.times


@dataclass(frozen=True)
class Say:
    """A user's message. parts: an image with it. turn: through start_turn, which is read."""

    words: Words
    image: bool = False
    injected: bool = False
    turn: bool = False


@dataclass(frozen=True)
class Reply:
    """An assistant's message. calls: arguments of each. reuse: ids that an earlier turn has used."""

    words: Words | None = None
    calls: tuple[Words, ...] = ()
    reasoning: bool = False
    pending: bool = False
    reuse: bool = False
    broken: bool = False


@dataclass(frozen=True)
class Result:
    """A result for one of the calls that wait (which: from the newest), or for none."""

    which: int
    words: Words
    interim: bool = False
    orphan: bool = False
    image: bool = False


@dataclass(frozen=True)
class Work:
    """A stretch of an agent's loop: so many calls, each with its result."""

    steps: int
    words: Words
    parallel: int = 1


@dataclass(frozen=True)
class Note:
    """A system or developer row inside the thread."""

    words: Words
    role: str = "system"


@dataclass(frozen=True)
class Blank:
    """A message with nothing to read."""

    role: str
    which: int
    parts: bool = False


@dataclass(frozen=True)
class Compact:
    """A pass: plan, a made-up good summary, put_summary. between: what happens while the model writes."""

    budget: int
    between: Move | None = None


@dataclass(frozen=True)
class StartOver:
    note: bool = False


@dataclass(frozen=True)
class Count:
    """Exact counts for rows that were estimated."""

    rows: int = 1000


@dataclass(frozen=True)
class Rewind:
    """Sets so many of the newest rows aside; more than there are: all of them."""

    rows: int


@dataclass(frozen=True)
class Fork:
    """Goes on in a fork without so many of the newest rows."""

    rows: int


@dataclass(frozen=True)
class Change:
    """One row, counted from the newest: erased; in the product's table, rewritten or deleted, told or not."""

    which: int
    is_deleted: bool = False
    is_told: bool = True


@dataclass(frozen=True)
class Pin:
    which: int


@dataclass(frozen=True)
class Unpin:
    which: int


@dataclass(frozen=True)
class Drop:
    """Takes back one of the lines that a compaction placed."""

    which: int


@dataclass(frozen=True)
class Prompt:
    words: Words | None


@dataclass(frozen=True)
class Prune:
    budget: int


@dataclass(frozen=True)
class Delete:
    """The chat, and it begins anew under its id; of an adopted one all that was derived."""


Act = StartOver | Rewind | Fork | Change | Pin | Unpin | Drop | Prompt | Prune | Delete
Move = Say | Reply | Result | Work | Note | Blank | Compact | Count | Act


@dataclass
class History:
    """A chat's beginning and what happens in it. budgets: what it is read under."""

    moves: list[Move]
    budgets: list[int]
    prompt: Words | None = None
    profile: str = "default"


# --- drawing ---

_times = st.one_of(st.integers(1, 4), st.integers(1, 4), st.integers(5, 60), st.integers(61, 700))
_words = st.builds(Words, st.integers(0, len(SNIPPETS) - 1), _times)
_short = st.builds(Words, st.integers(0, len(SNIPPETS) - 1), st.integers(1, 4))
_rare = st.sampled_from([False, False, False, False, True])
_half = st.booleans()

_place = st.one_of(st.integers(0, 3), st.integers(0, 30))
_acts = (
    st.builds(StartOver, _half),
    st.builds(Rewind, _place),
    st.builds(Change, _place, _half, _half),
    st.builds(Pin, _place),
    st.builds(Pin, _place),
    st.builds(Unpin, st.integers(0, 2)),
    st.builds(Drop, st.integers(0, 2)),
    st.builds(Prompt, st.one_of(st.none(), _short)),
    st.builds(Prune, st.sampled_from([800, 2000, 6000])),
)
_passes = st.sampled_from([800, 2000, 6000, 20000])
moves = st.one_of(
    st.builds(Say, _words, _rare, _rare, _half),
    st.builds(Say, _short, _rare, st.just(False), _half),
    st.builds(Reply, _words, st.just(())),
    st.builds(
        Reply,
        st.one_of(st.none(), _short),
        st.lists(_words, min_size=1, max_size=3).map(tuple),
        _rare,
        _rare,
        _rare,
        _rare,
    ),
    st.builds(Result, st.integers(0, 3), _words, _rare, _rare, _rare),
    st.builds(Result, st.integers(0, 3), _words, _rare, st.just(False), st.just(False)),
    st.builds(Work, st.integers(1, 6), _words, st.integers(1, 3)),
    st.builds(Work, st.integers(1, 12), _short, st.just(1)),
    st.builds(Note, _short, st.sampled_from(["system", "developer"])),
    st.builds(Blank, st.sampled_from(["user", "assistant", "tool"]), st.integers(0, len(BLANKS)), _half),
    st.builds(Compact, _passes),
    st.builds(Compact, _passes),
    st.builds(Compact, _passes, st.one_of(*_acts, st.just(Delete()), st.builds(Compact, _passes))),
    st.builds(Count, st.sampled_from([2, 1000])),
    st.builds(Fork, _place),
    *_acts,
    st.builds(Delete),
)
BUDGETS = (300, 500, 800, 1500, 3000, 8000, 32000, 200000)


def histories(min_moves: int = 2, max_moves: int = 16) -> st.SearchStrategy[History]:
    """Histories of a chat, the user first."""
    return st.builds(
        lambda first, rest, budgets, prompt, profile: History([first, *rest], budgets, prompt, profile),
        st.builds(Say, _words, _rare, _rare, _half),
        st.lists(moves, min_size=min_moves, max_size=max_moves),
        st.lists(st.sampled_from(BUDGETS), min_size=2, max_size=3, unique=True),
        st.one_of(st.none(), _short),
        st.sampled_from(["default", "small-8k"]),
    )


# --- counting ---

_count = functools.lru_cache(maxsize=50_000)(count)


def exact(message: Mapping[str, Any], image_tokens: int) -> int:
    """Tokens of a row as it is sent, by the rule of DESIGN and the real tokenizer."""
    total = 4 + (8 if message["role"] == "tool" else 0)
    content = message["content"]
    for part in content if isinstance(content, list) else [] if content is None else [content]:
        kind = kind_of(part)
        if kind in ("image", "file"):
            total += image_tokens  # and a few for a file's name
        elif kind == "text":
            total += _count(part if isinstance(part, str) else part["text"])
        else:
            total += _count(json.dumps(part))
    for call in message.get("tool_calls") or []:
        total += 12 + _count(call["function"]["name"]) + _count(call["function"]["arguments"])
    if message.get("name"):
        total += 1 + _count(message["name"])
    return total


# --- playing ---

ADOPTED_TABLE = """
create table if not exists shop_message (
    place bigint generated always as identity primary key,
    conversation integer not null, id integer not null, sender text not null,
    body jsonb, calls jsonb, call text, nick text, extra jsonb,
    written timestamptz not null default now() - interval '1 hour', unique (conversation, id));
create index if not exists shop_message_ix on shop_message (conversation, place);
create or replace view shop_thread as
select conversation as chat_id, place as seq, id as message_id, sender as role, body as content,
    calls as tool_calls, call as tool_call_id, nick as name, extra as metadata, written as created_at
from shop_message
"""


def prepare_adopted(conn: Connection) -> None:
    """The product's own table and view, registered as source `shop`."""
    conn.execute(ADOPTED_TABLE)
    conn.execute("select pycontext.register_source('shop', 'shop_thread')")


@dataclass
class Reading:
    """What a turn read: the request it answered, its budget and the messages."""

    message_id: str
    budget: int
    messages: Any


@dataclass
class Machine:
    """Plays moves on a chat; `thread` is the oracle's view of it.

    conn writes; reader is a session that may not write, so that a SELECT which changes something fails.
    """

    conn: Connection
    reader: Connection
    chat_id: str
    kind: str = "native"
    profile: str = "default"
    prompt: str | None = None
    thread: Thread = field(default_factory=Thread)
    readings: list[Reading] = field(default_factory=list)
    is_counted_between: bool = False
    #: raised where earlier bytes may change without an act: another chat, or one changed behind our back
    epoch: int = 0
    #: something was set aside: a fork does not bring it along
    is_aside: bool = False
    _ids: int = 0
    _budget: int = 8000

    def create(self, rows: Sequence[Row] = ()) -> None:
        self.conn.execute(
            "select pycontext.create_chat(%s, %s, %s, source => %s)",
            (self.chat_id, self.prompt, self.profile, "shop" if self.kind == "adopted" else None),
        )
        row = self.conn.execute(
            "select head_tokens, image_tokens, token_scale from pycontext.profile where profile = %s",
            (self.profile,),
        ).fetchone()
        assert row
        self.thread = Thread(
            rows=list(rows),
            prompt=self.prompt,
            head_tokens=row[0],
            image_tokens=row[1],
            token_scale=float(row[2]),
            is_adopted=self.kind == "adopted",
        )
        self.refresh()

    # --- reads ---

    def rows(self, query: str, *params: Any) -> list[dict[str, Any]]:
        with self.reader.cursor(row_factory=dict_row) as cursor:
            return list(cursor.execute(query, params).fetchall())

    def window(self, budget: int | None, as_of: str | None = None) -> list[dict[str, Any]]:
        return self.rows(
            "select ordinal, section, message_id, seq, kind, role, content, tool_calls, tool_call_id, name,"
            " tokens, is_estimate, is_shortened, is_escaped, is_exact"
            " from pycontext.working_window(%s::text, %s, %s) order by ordinal",
            self.chat_id,
            budget,
            as_of,
        )

    def messages(self, form: str, budget: int | None, as_of: str | None = None) -> Any:
        found = self.rows(
            f"select pycontext.{form}(%s::text, %s::integer, %s::text) as m", self.chat_id, budget, as_of
        )
        return found[0]["m"]

    def forms(self) -> list[str]:
        """The request forms that this database knows."""
        names = ["openai_messages", "anthropic_messages", "responses_input"]
        found = self.rows(
            "select distinct p.proname as name from pg_proc p where p.proname = any (%s)"
            " and p.pronamespace = 'pycontext'::regnamespace",
            names,
        )
        return [name for name in names if name in {r["name"] for r in found}]

    def refresh(self) -> None:
        """Today's counts of every row, as the thread tells them."""
        found = (
            []
            if not self.thread.rows
            else self.rows(
                "select seq, kind, message_id, tokens, summary from pycontext.thread(%s, max_rows => 100000)",
                self.chat_id,
            )
        )
        told = [r["seq"] for r in found if r["kind"] == "message"]
        assert told == [r.seq for r in self.thread.rows], "the thread holds the live rows"
        tokens = {r["seq"]: r["tokens"] for r in found if r["kind"] == "message"}
        for row in self.thread.rows:
            row.tokens = tokens[row.seq]
            if self.kind == "adopted":
                row.frozen = row.tokens
        by_id = {r["message_id"]: r for r in found if r["kind"] == "summary"}
        assert set(by_id) == {x.message_id for x in self.thread.lines}, "the thread holds the live lines"
        for line in self.thread.lines:
            line.tokens = by_id[line.message_id]["tokens"]
            line.summary = by_id[line.message_id]["summary"]
        prompt = self.rows(
            "select tokens, frozen_tokens from pycontext.prompt where chat_id = %s"
            " order by act_no desc limit 1",
            self.chat_id,
        )
        if prompt:
            self.thread.prompt_tokens = prompt[0]["tokens"]
            self.thread.prompt_frozen = prompt[0]["frozen_tokens"]

    def state(self) -> dict[str, Any]:
        """The chat's act number, and whether a pruning pass stands."""
        found = self.rows(
            "select act_no, prune_unit is not null as is_pruned from pycontext.chat where chat_id = %s",
            self.chat_id,
        )
        return found[0]

    # --- moves ---

    def play(self, move: Move) -> None:
        getattr(self, "_" + type(move).__name__.lower())(move)

    def _next_id(self) -> str:
        self._ids += 1
        return f"m{self._ids}" if self.kind == "native" else str(self._ids)

    def append(self, *messages: Mapping[str, Any]) -> list[Row]:
        """Stores messages, by whatever door this kind of chat has."""
        line = self.thread.newest_line()
        out = []
        if self.kind == "native":
            elements = [{**m, "message_id": self._next_id()} for m in messages]
            with self.conn.cursor(row_factory=dict_row) as cursor:
                stored = cursor.execute(
                    "select seq, message_id, role, content, tool_calls, tool_call_id, name, metadata,"
                    " frozen_tokens, tokens from pycontext.append_messages(%s, %s)",
                    (self.chat_id, json.dumps(elements)),
                ).fetchall()
            for message, s in zip(elements, stored, strict=True):
                assert s["content"] == message.get("content")
                out.append(
                    Row(
                        s["seq"], s["message_id"], s["role"], s["content"], s["tool_calls"],
                        s["tool_call_id"], s["name"], s["metadata"], s["frozen_tokens"], s["tokens"],
                    )
                )  # fmt: skip
        else:
            for sent in messages:
                message = dict(sent)
                row_id = int(self._next_id())
                values = [
                    None if message.get(key) is None else json.dumps(message[key])
                    for key in ("content", "tool_calls", "metadata")
                ]
                found = self.conn.execute(
                    "insert into shop_message (conversation, id, sender, body, calls, extra, call, nick)"
                    " values (%s, %s, %s, %s, %s, %s, %s, %s) returning place",
                    (int(self.chat_id), row_id, message["role"], *values, message.get("tool_call_id"),
                     message.get("name")),
                ).fetchone()  # fmt: skip
                assert found
                out.append(
                    Row(
                        found[0], str(row_id), message["role"], message.get("content"),
                        message.get("tool_calls"), message.get("tool_call_id"), message.get("name"),
                        message.get("metadata"),
                    )
                )  # fmt: skip
        for row in out:
            row.line_at_arrival = -(2**62) if line is None else line.seq
        self.thread.rows += out
        return out

    def _say(self, move: Say) -> None:
        content: Any = str(move.words)
        if move.image:
            content = [{"type": "text", "text": content}, {"type": "image_url", "image_url": {"url": PIXEL}}]
        message: dict[str, Any] = {"role": "user", "content": content}
        if move.injected:
            message["metadata"] = {"injected": True}
        if not move.turn:
            self.append(message)
            return
        budget = self._budget
        if self.kind == "native":
            message_id = self._next_id()
            sent = json.dumps({**message, "message_id": message_id})
        else:
            message_id = self.append(message)[0].message_id
            sent = None
        try:
            with self.conn.cursor(row_factory=dict_row) as cursor:
                turn = cursor.execute(
                    "select * from pycontext.start_turn(%s, %s::jsonb, %s)", (self.chat_id, sent, budget)
                ).fetchone()
        except psycopg.DatabaseError as error:
            if error.sqlstate != "PCX05":
                raise
            # nothing was written: the message comes by itself
            if self.kind == "native":
                self.append(message)
            return
        assert turn
        if self.kind == "native":
            found = self.rows(
                "select seq, content, metadata, frozen_tokens, tokens from pycontext.message"
                " where chat_id = %s and message_id = %s and line_no = 0",
                self.chat_id,
                message_id,
            )[0]
            line = self.thread.newest_line()
            self.thread.rows.append(
                Row(
                    found["seq"], message_id, "user", found["content"], metadata=found["metadata"],
                    frozen=found["frozen_tokens"], tokens=found["tokens"],
                    line_at_arrival=-(2**62) if line is None else line.seq,
                )
            )  # fmt: skip
        self.readings.append(Reading(message_id, budget, turn["messages"]))

    def _reply(self, move: Reply) -> None:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if move.words is None else str(move.words),
        }
        if move.reasoning:
            parts: list[dict[str, Any]] = [
                {"type": "thinking", "thinking": "hm " * 20, "signature": "c2ln"},
                {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "aGht" * 5},
            ]
            if move.words is not None:
                parts.append({"type": "text", "text": str(move.words)})
            message["content"] = parts
        if move.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{n}" if move.reuse else f"call_{self._ids}_{n}",
                    "type": "function",
                    "function": {
                        "name": "write_file",
                        "arguments": json.dumps(
                            {"path": f"src/{n}.py", "content": str(w)}, ensure_ascii=False
                        )
                        + ("}" if move.broken else ""),
                    },
                }
                for n, w in enumerate(move.calls)
            ]
            if move.pending:
                message["metadata"] = {"pending": True}
        elif message["content"] is None:
            message["content"] = "ok"
        self.append(message)

    def _waiting(self) -> list[str]:
        """Ids of the calls that have no result, the newest first."""
        unit = self.thread.units()
        done = {
            (unit[r.seq], r.tool_call_id)
            for r in self.thread.rows
            if r.role == "tool" and unit[r.seq] != r.seq and not r.is_pending
        }
        return [
            call["id"]
            for row in reversed(self.thread.rows)
            for call in row.tool_calls or []
            if (row.seq, call["id"]) not in done
        ]

    def _result(self, move: Result) -> None:
        waiting = self._waiting()
        content: Any = str(move.words)
        if move.image:
            content = [{"type": "text", "text": content}, {"type": "image_url", "image_url": {"url": PIXEL}}]
        message: dict[str, Any] = {"role": "tool", "content": content, "tool_call_id": "no_such_call"}
        if waiting and not move.orphan:
            message["tool_call_id"] = waiting[move.which % len(waiting)]
            if move.interim:
                message["metadata"] = {"pending": True}
        self.append(message)

    def _work(self, move: Work) -> None:
        messages: list[dict[str, Any]] = []
        for step in range(move.steps):
            ids = [f"w{self._ids}_{step}_{n}" for n in range(move.parallel)]
            calls = [
                {
                    "id": i,
                    "type": "function",
                    "function": {"name": "run", "arguments": f'{{"command": "make {i}"}}'},
                }
                for i in ids
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages += [
                {"role": "tool", "tool_call_id": i, "content": f"{i}: {move.words}"} for i in reversed(ids)
            ]
        self.append(*messages)

    def _note(self, move: Note) -> None:
        self.append({"role": move.role, "content": str(move.words)})

    def _blank(self, move: Blank) -> None:
        content: Any = None if move.which == len(BLANKS) else BLANKS[move.which]
        if move.parts and content is not None:
            content = [{"type": "text", "text": content}]
        message = {"role": move.role, "content": content}
        if move.role == "tool":
            waiting = self._waiting()
            if not waiting:
                return
            message["tool_call_id"] = waiting[0]
        self.append(message)

    def _compact(self, move: Compact) -> None:
        self.refresh()
        plan = self.rows("select * from pycontext.compaction_plan(%s, %s)", self.chat_id, move.budget)[0]
        after = plan["after_message_id"]
        if after is None:
            return
        source = self.rows("select * from pycontext.compaction_source(%s, %s)", self.chat_id, after)
        self.check_source(plan, source)
        summary = {
            "resolved": [f"looked after #{plan['to_seq']} and before"],
            "facts": [f"order QX-{plan['to_seq']}"],
            "active_task": None,
        }
        edits = self.edits()
        if move.between is not None:
            self.play(move.between)
        was_edited = self.edits() != edits
        size = self._size()
        try:
            with self.conn.cursor(row_factory=dict_row) as cursor:
                line = cursor.execute(
                    "select seq, message_id, origin, tokens, summary"
                    " from pycontext.put_summary(%s, %s, %s, edit_no => %s)",
                    (self.chat_id, after, json.dumps(summary), plan["edit_no"]),
                ).fetchone()
        except psycopg.DatabaseError as error:
            if was_edited and error.sqlstate in ("PCX01", "PCX02", "PCX07"):
                return
            if error.sqlstate != "PCX07" or "larger" not in str(error):
                raise
            return
        assert not was_edited, f"a summary of what was changed meanwhile is stored: {move}"
        assert line
        assert self._size() <= size, f"a line made a window of {size} tokens larger: {self._size()}"
        self._placed(line)

    def _size(self) -> int:
        """Tokens of the window where everything that is live has room."""
        return sum(w["tokens"] for w in self.window(10_000_000))

    def edits(self) -> tuple[str, int, int]:
        """What a summary in the making is held against."""
        found = self.rows("select edit_no from pycontext.chat where chat_id = %s", self.chat_id)
        return self.chat_id, self.epoch if self.kind == "native" else 0, found[0]["edit_no"]

    def check_source(self, plan: Mapping[str, Any], source: Sequence[Mapping[str, Any]]) -> None:
        """What a summary is made of: every row of the range, the original, once."""
        line = self.thread.newest_line()
        unit = self.thread.units()
        after = -(2**62) if line is None else line.seq
        gone = self.thread.superseded(unit)
        want = [r.seq for r in self.thread.rows if after < r.seq <= plan["to_seq"]]
        got = [r["seq"] for r in source if r["kind"] == "message" and r["seq"] > after]
        assert sorted(got) == sorted(s for s in want if s not in gone), (got, want)
        for r in source:
            if r["kind"] == "message":
                row = next(x for x in self.thread.rows if x.seq == r["seq"])
                assert r["content"] == row.content
        waiting = [
            r.seq
            for r in self.thread.rows
            if r.is_pending and r.role == "assistant" and after < r.seq <= plan["to_seq"]
        ]
        for seq in waiting:
            row = next(x for x in self.thread.rows if x.seq == seq)
            answers = {
                r.tool_call_id
                for r in self.thread.rows
                if unit[r.seq] == seq and r.seq != seq and not r.is_pending
            }
            assert {c["id"] for c in row.tool_calls} <= answers, f"a pending call would be summarized: {row}"
        inside = {unit[s] for s in want}
        split = [r.seq for r in self.thread.rows if r.seq > plan["to_seq"] and unit[r.seq] in inside]
        assert not split, f"a unit would be split: {split}"

    def _startover(self, move: StartOver) -> None:
        if not self.thread.rows:
            return
        note = "a new subject <memory-context>" if move.note else None
        with self.conn.cursor(row_factory=dict_row) as cursor:
            line = cursor.execute(
                "select seq, message_id, origin, tokens, summary from pycontext.start_over(%s, %s)",
                (self.chat_id, note),
            ).fetchone()
        assert line
        self._placed(line)

    def _placed(self, line: Mapping[str, Any]) -> None:
        if line["message_id"] not in {x.message_id for x in self.thread.lines}:
            self.thread.lines.append(
                Line(
                    line["seq"],
                    line["origin"],
                    line["message_id"],
                    line["summary"],
                    line["tokens"],
                    line["tokens"],
                    max((x.seq for x in self.thread.lines if x.seq < line["seq"]), default=-(2**62)),
                    self._head_at(line["seq"]),
                )
            )
            self.thread.lines[-1].kept = self.thread.kept()

    def _rewind(self, move: Rewind) -> None:
        if self.kind == "adopted" or not self.thread.rows:
            return
        kept = self.thread.rows[: max(len(self.thread.rows) - move.rows, 0)]
        to = kept[-1].message_id if kept else ""
        gone = self.conn.execute(
            "select seq, kind from pycontext.rewind_chat(%s, %s)", (self.chat_id, to)
        ).fetchall()
        place = kept[-1].seq if kept else 0
        want = {(r.seq, "message") for r in self.thread.rows if r.seq > place}
        want |= {(x.seq, "summary") for x in self.thread.lines if x.seq > place}
        assert set(gone) == want, (gone, want)
        self.is_aside |= bool(want)
        self._cut(place)

    def _cut(self, place: int) -> None:
        self.thread.rows = [r for r in self.thread.rows if r.seq <= place]
        self.thread.lines = [x for x in self.thread.lines if x.seq <= place]
        self.thread.pins = [seq for seq in self.thread.pins if seq <= place]

    def _fork(self, move: Fork) -> None:
        if self.kind == "adopted" or len(self.thread.rows) <= move.rows:
            return
        before = self.window(100_000_000)
        at = self.thread.rows[-1 - move.rows]
        found = self.conn.execute(
            "select pycontext.fork_chat(%s, at_message_id => %s)", (self.chat_id, at.message_id)
        ).fetchone()
        assert found
        assert self.window(100_000_000) == before, "the chat that is forked stays as it was"
        self.chat_id = found[0]
        self.epoch += 1
        self._cut(at.seq)
        seqs = {row.message_id for row in self.thread.rows}
        self.readings = [] if self.is_aside else [r for r in self.readings if r.message_id in seqs]
        names = self.rows(
            "select seq, origin, message_id from pycontext.thread(%s, max_rows => 100000)"
            " where kind = 'summary'",
            self.chat_id,
        )
        by_place = {(r["seq"], r["origin"]): r["message_id"] for r in names}
        for line in self.thread.lines:
            line.message_id = by_place[line.seq, line.origin]

    def _change(self, move: Change) -> None:
        if len(self.thread.rows) < 3:
            return
        n = len(self.thread.rows) - 1 - move.which % len(self.thread.rows)
        row = self.thread.rows[n]
        if self.kind == "native":
            with self.conn.cursor(row_factory=dict_row) as cursor:
                s = cursor.execute(
                    "select content, tool_calls, name, metadata, tokens, frozen_tokens"
                    " from pycontext.redact_message(%s, %s)",
                    (self.chat_id, row.message_id),
                ).fetchone()
            assert s
            row.content, row.tool_calls, row.name, row.metadata = (
                s["content"], s["tool_calls"], s["name"], s["metadata"],
            )  # fmt: skip
            row.tokens, row.frozen = s["tokens"], s["frozen_tokens"]
            self.readings = []  # the one act that history does not undo
            return
        where = (int(self.chat_id), int(row.message_id))
        if move.is_deleted:
            self.conn.execute("delete from shop_message where conversation = %s and id = %s", where)
            self.thread.rows.pop(n)
        else:
            row.content = "rewritten by the product"
            self.conn.execute(
                "update shop_message set body = %s where conversation = %s and id = %s",
                (json.dumps(row.content), *where),
            )
        self.epoch += 1
        self.readings = []
        self.conn.execute(
            "select pycontext.source_changed(%s, %s)",
            (self.chat_id, row.message_id if move.is_told else None),
        )
        # a line is made of rows: the first one that drew on this row goes, and those merged from it
        drew = [
            x.seq
            for x in self.thread.lines
            if x.origin == "compaction"
            and (x.seq >= row.seq if move.is_told and not move.is_deleted else x.after < row.seq <= x.seq)
        ]
        if drew:
            self.thread.lines = [
                x for x in self.thread.lines if x.origin != "compaction" or x.seq < min(drew)
            ]

    def _pin(self, move: Pin) -> None:
        if not self.thread.rows:
            return
        row = self.thread.rows[len(self.thread.rows) - 1 - move.which % len(self.thread.rows)]
        is_before_reset = row.seq not in self.thread.pins and row.seq <= self.thread.reset_seq()
        try:
            self.conn.execute("select pycontext.pin_message(%s, %s)", (self.chat_id, row.message_id))
        except psycopg.DatabaseError as error:
            if error.sqlstate != ("PCX02" if is_before_reset else "PCX05"):
                raise
            return
        assert not is_before_reset, "nothing from before a reset is pinned"
        if row.seq not in self.thread.pins:
            self.thread.pins.append(row.seq)

    def _unpin(self, move: Unpin) -> None:
        if not self.thread.pins:
            return
        seq = self.thread.pins.pop(move.which % len(self.thread.pins))
        name = next((r.message_id for r in self.thread.rows if r.seq == seq), None)
        if name is not None:
            self.is_aside = True
            self.conn.execute("select pycontext.unpin_message(%s, %s)", (self.chat_id, name))

    def _drop(self, move: Drop) -> None:
        lines = [x for x in self.thread.lines if x.origin == "compaction"]
        if not lines:
            return
        line = lines[move.which % len(lines)]
        self.conn.execute("select pycontext.drop_summary(%s, %s)", (self.chat_id, line.message_id))
        self.thread.lines.remove(line)
        self.is_aside = True

    def _prompt(self, move: Prompt) -> None:
        self.thread.prompt = None if move.words is None else str(move.words)
        self.conn.execute("select pycontext.set_system_prompt(%s, %s)", (self.chat_id, self.thread.prompt))

    def _prune(self, move: Prune) -> None:
        self.conn.execute("select pycontext.prune_chat(%s, %s)", (self.chat_id, move.budget))

    def _delete(self, move: Delete) -> None:
        self.conn.execute("select pycontext.delete_chat(%s)", (self.chat_id,))
        self.epoch += 1
        self.readings = []
        rows = self.thread.rows if self.kind == "adopted" else []
        self.is_aside = False
        self.create(rows)

    def _head_at(self, place: int) -> frozenset[int]:
        """The first turn that a line at a place keeps: that of the line before it."""
        before = [x for x in self.thread.lines if x.seq < place]
        line = max(before, key=lambda x: (x.seq, x.origin == "reset"), default=None)
        if line is not None and line.origin == "compaction" and line.head is not None:
            return line.head
        rows = [r for r in self.thread.rows if r.seq <= place]
        thread = replace(self.thread, rows=rows, lines=[x for x in before if x.origin == "reset"])
        return frozenset(r.seq for r in thread.head())

    def _count(self, move: Count) -> None:
        found = self.rows(
            "select seq, line_no, overhead, texts, encoding"
            " from pycontext.uncounted_messages(%s, max_rows => %s)",
            self.chat_id,
            move.rows,
        )
        if not found:
            return
        counts = [
            {
                "seq": r["seq"],
                "line_no": r["line_no"],
                "tokens": r["overhead"] + sum(count(t, r["encoding"]) for t in r["texts"]),
            }
            for r in found
        ]
        self.conn.execute(
            "select pycontext.cache_token_counts(%s, %s, %s)",
            (self.chat_id, found[0]["encoding"], json.dumps(counts)),
        )
        self.is_counted_between = True
