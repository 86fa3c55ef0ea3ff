"""The built-in summarizer: no model, deterministic, any language.

It tells what a model that continues would miss most: what the user asked and how it came out, what was
decided or taken back, exact values word for word, and what tools touched. Everything is quoted or reported
in the past; each item cites its `#seq`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from pycontext import values
from pycontext.masking import mask
from pycontext.summarizer import SummarizerFailed, SummaryRequest, SummaryResult, ledger, wording
from pycontext.summarizer.transcript import without_attached
from pycontext.summary import (
    LISTS,
    Count,
    SourceMessage,
    Summary,
    artifact_key,
    clip,
    fit,
    foldable,
    item_tokens,
    key,
    one_line,
    plain,
)

_LONG = 2500
"""A message longer than this is taken for pasted material: only its edges are read for values."""

_SHARES = {"files": 0.40, "facts": 0.30, "decisions": 0.10, "turns": 0.16, "outcomes": 0.10}
"""How the limit is divided at first; what one leaves over, the others take in this order."""


@dataclass(frozen=True)
class _Item:
    field: str
    seq: int
    text: str
    order: int = 0


@dataclass
class _Turn:
    """A user message and the last words of the assistant before the next one."""

    user: SourceMessage | None
    reply: SourceMessage | None = None
    is_closed: bool = False
    calls: int = 0


@dataclass
class _Room:
    """Tokens that are left, and headings already paid for."""

    count: Count
    left: int
    paid: set[str] = field(default_factory=set)
    taken: dict[str, _Item] = field(default_factory=dict)

    def take(self, items: Iterable[_Item], limit: int) -> int:
        """Take items in order while they fit into `limit` and into what is left; tokens taken."""
        used = 0
        for item in items:
            name = f"{item.field}:{artifact_key(item.text) if item.field == 'artifacts' else key(item.text)}"
            if name in self.taken or not item.text:
                continue
            cost, shared = self._cost(item)
            if used + cost > limit or cost > self.left:
                if limit - used < 12:
                    break
                continue
            self.taken[name] = item
            self.paid.update((item.field, shared))
            self.left -= cost
            used += cost
        return used

    def _cost(self, item: _Item) -> tuple[int, str]:
        """Tokens of an item, and what it shares with those after it."""
        cost = 0 if item.field in self.paid else 8
        split = foldable(item.text) if item.field == "artifacts" else None
        if split is None:
            return cost + item_tokens(item.text, self.count), item.field
        shared = f"{split[0]}{{}}{split[2]}"
        if shared not in self.paid:
            cost += item_tokens(shared, self.count)
        return cost + self.count(f" {split[1]},"), shared


class ExtractiveSummarizer:
    """Tells a range of a chat without a model: 900 messages with 40,000-character results in about a
    second."""

    name = "extractive"
    is_deterministic = True

    def summarize(self, request: SummaryRequest) -> SummaryResult:
        """The segment, within `request.max_tokens`; raises `SummarizerFailed` where there is nothing to
        tell."""
        rows = [row for row in request.messages if row.kind == "message"]
        told = [row for row in rows if row.is_told]
        if not told:
            raise SummarizerFailed("there is nothing to summarize")
        segment = _Chat(rows, request).segment()
        if segment.is_empty:
            raise SummarizerFailed("nothing worth keeping was found")
        return SummaryResult(segment=segment, model=self.name)


class _Chat:
    """One request, taken apart."""

    def __init__(self, rows: Sequence[SourceMessage], request: SummaryRequest) -> None:
        self.rows = rows
        self.request = request
        self.text = {row.seq: mask(_speech(row)) for row in rows if row.role != "tool"}
        speech = [self.text[row.seq] for row in rows if row.role == "user"]
        speech += [self.text[row.seq] for row in rows if row.role == "assistant"][:50]
        self.labels = wording.LABELS[wording.language(speech)]
        self.focus = _focus_words(request.focus or "")
        self.turns = _turns(rows, self.text)
        self.ledger = ledger.read(rows)
        self.file_tails = {
            name[at:].lstrip("/")
            for name in self.ledger.files
            for at in (0, *(place for place, char in enumerate(name) if char == "/"))
        }

    def segment(self) -> Summary:
        """Candidates of every kind, chosen within the limit, put back in the order of the chat."""
        limit = self.request.max_tokens
        extra = self.request.ledger_tokens
        task = self._active_task()
        room = _Room(
            self.request.count, limit + extra - (item_tokens(task, self.request.count) + 8 if task else 0)
        )
        decisions = self._decisions()
        strong, weak = self._facts(int(limit * _SHARES["facts"]))
        files, reads = self._files(int(limit * _SHARES["files"]) + extra)
        room.take((item for item in decisions if item.order == 0), limit // 4)
        groups: dict[str, Sequence[_Item]] = {
            "files": self._focused(files),
            "facts": self._focused(strong),
            "decisions": self._focused(decisions),
        }
        for name, items in groups.items():
            used = room.take(items, int(limit * _SHARES[name]) + (extra if name == "files" else 0))
            if name == "facts":
                weak = list(self._focused(weak))
                room.take(weak, (int(limit * _SHARES[name]) - used) // 2)
        groups["turns"] = self._focused(
            self._turn_items({item.seq: item.text for item in room.taken.values()})
        )
        groups["outcomes"] = self._focused(self._outcomes())
        for name in ("turns", "outcomes"):
            room.take(groups[name], int(limit * _SHARES[name]))
        for items in (
            groups["facts"],
            groups["files"],
            weak,
            groups["decisions"],
            groups["turns"],
            groups["outcomes"],
            reads,
        ):
            room.take(items, room.left)
        return self._built(room.taken.values(), task)

    def carried(self, told: str) -> Summary:
        """Values of users that `told` does not name, artifacts and the task, in two fifths of the limit."""
        limit = self.request.max_tokens
        extra = self.request.ledger_tokens
        room = _Room(self.request.count, limit * 2 // 5 + extra)
        named = key(told)
        spoken = [
            (row, *self._values(row)) for row in reversed(self.rows) if row.is_told and row.role != "tool"
        ]
        facts = []
        for row, line, found in spoken:
            left = [value for value in found if value.is_strong and key(value.text) not in named]
            if left:
                facts.append(_Item("facts", row.seq, self._fact(row, line, left, 25)))
        files, _ = self._files(limit // 5 + extra)
        decisions = [item for item in self._decisions() if item.order == 0]
        room.take(decisions, limit // 10)
        room.take(files, limit // 5 + extra)
        room.take(facts, limit // 5)
        room.take([item for item in self._outcomes() if item.order == 1], room.left // 2)
        return self._lists(room.taken.values(), self._active_task())

    def _built(self, items: Iterable[_Item], task: str | None) -> Summary:
        summary = self._lists(items, task)
        if summary.is_empty:  # nothing fitted or nothing stood out: the freshest words
            row = next((row for row in reversed(self.rows) if row.is_told and self._any_text(row)), None)
            if row is None:
                return summary
            summary = Summary(resolved=(self._quoted(row, self._any_text(row), 400),))
        return fit(summary, self.request.max_tokens, self.request.count, self.request.ledger_tokens)

    def _lists(self, items: Iterable[_Item], task: str | None) -> Summary:
        chosen = sorted(items, key=lambda item: item.seq)
        lists = {name: tuple(item.text for item in chosen if item.field == name) for name in LISTS}
        return replace(Summary(**lists), active_task=task)  # type: ignore[arg-type]

    def _focused(self, items: Sequence[_Item]) -> Sequence[_Item]:
        if not self.focus:
            return items
        return sorted(items, key=lambda item: not any(word in key(item.text) for word in self.focus))

    def _any_text(self, row: SourceMessage) -> str:
        text = self.text.get(row.seq) or mask(row.text[:2000])
        return one_line(text) or ", ".join(call.tool for call in self.ledger.calls if call.seq == row.seq)

    def _quote(self, text: str, limit: int) -> str:
        text = clip(plain(text), limit)
        return f"{self.labels.open_quote}{text}{self.labels.close_quote}"

    def _quoted(self, row: SourceMessage, text: str, limit: int) -> str:
        if row.role == "user":
            return f"#{row.seq}: {self._quote(text, limit)}"
        label = {"assistant": self.labels.assistant, "tool": row.name or "tool"}.get(
            row.role, self.labels.system
        )
        return f"#{row.seq} {label}: {self._quote(text, limit)}"

    def _active_task(self) -> str | None:
        """What was going on where the range ends; None after a cancellation or a finished turn."""
        users = [row for row in self.rows if row.role == "user" and self.text[row.seq].strip()]
        if users and wording.is_cancellation(self.text[users[-1].seq].strip()):
            return None
        last = users[-1] if users else None
        request = last if last is not None and last.is_request else None
        told = [turn for turn in self.turns if turn.user is not None and turn.user.is_told]
        parts = []
        if request is not None and wording.is_continue(self.text[request.seq]):
            told = [turn for turn in told if turn.user is not request]
        elif request is not None:
            told = []
        open_turn = next((turn for turn in reversed(told) if not self._is_small(turn)), None)
        newest = told[-1] if told else None
        goes_on = request is not None or (
            newest is not None and (not newest.is_closed or self._is_continue(newest))
        )
        if open_turn is not None and open_turn.user is not None and goes_on:
            text = self.text[open_turn.user.seq]
            if not wording.is_cancellation(text):
                parts.append(f"{self.labels.asked} (#{open_turn.user.seq}): {self._quote(text, 220)}")
        question = self._open_question(request)
        if question:
            parts.append(question)
        return "; ".join(parts) or None

    def _is_small(self, turn: _Turn) -> bool:
        text = self.text[turn.user.seq] if turn.user else ""
        text = wording.without_filler(text[:2000]).strip()
        return (
            not text
            or wording.is_filler(text)
            or wording.is_continue(text)
            or (text.startswith("/") and len(text) < 20)
        )

    def _is_continue(self, turn: _Turn) -> bool:
        return turn.user is not None and not turn.is_closed and wording.is_continue(self.text[turn.user.seq])

    def _open_question(self, request: SourceMessage | None) -> str:
        """What the assistant had asked before the request that stays in sight: "yes" means nothing
        without it."""
        before: SourceMessage | None = None
        for row in self.rows:
            if row is request:
                break
            before = row if row.role in ("user", "assistant") and self.text[row.seq].strip() else before
        if before is None or before.role != "assistant" or not before.is_told:
            return ""
        asked = [
            part
            for part in wording.sentences(wording.without_code(self.text[before.seq]))
            if part.rstrip("*_ )”」").endswith(("?", "？"))
        ]
        if not asked:
            return ""
        return f"{self.labels.asked_back} (#{before.seq}): {self._quote(asked[-1], 200)}"

    def _decisions(self) -> list[_Item]:
        """Newest first; cancellations are of order 0."""
        found: list[_Item] = []
        asked = ""
        for row in self.rows:
            text = self.text.get(row.seq, "")
            if row.role == "assistant" and text.strip():
                parts = wording.sentences(wording.without_code(text))
                asked = next(
                    (part for part in reversed(parts) if part.rstrip("*_ )”」").endswith(("?", "？"))), ""
                )
                if row.is_told and row.role == "assistant":
                    chosen = next(
                        (
                            part
                            for part in parts
                            if wording.is_decision(part, "assistant")
                            and len(part) > 40
                            and part[-1] not in ":："
                        ),
                        "",
                    )
                    if chosen:
                        found.append(_Item("decisions", row.seq, self._quoted(row, chosen, 160), 2))
            if row.role != "user":
                continue
            if row.is_told and text.strip():
                found += self._user_decisions(row, text, asked)
            asked = ""
        return sorted(found, key=lambda item: (min(item.order, 1), -item.seq, item.order))

    def _user_decisions(self, row: SourceMessage, text: str, asked: str) -> list[_Item]:
        line = one_line(text)
        if wording.is_cancellation(line):
            return [
                _Item(
                    "decisions", row.seq, f"#{row.seq} {self.labels.cancelled}: {self._quote(line, 160)}", 0
                )
            ]
        if asked and wording.is_answer(line):
            told = f"#{row.seq} {self.labels.answered} {self._quote(line, 80)} ← {self._quote(asked, 110)}"
            return [_Item("decisions", row.seq, told, 1)]
        parts = wording.sentences(wording.without_code(text)) if len(text) <= _LONG else []
        chosen = [
            part for part in parts if wording.is_decision(part, "user") and not part.endswith(("?", "？"))
        ]
        if not chosen:
            return []
        return [_Item("decisions", row.seq, self._quoted(row, " ".join(chosen), 180), 1)]

    def _facts(self, share: int) -> tuple[list[_Item], list[_Item]]:
        """Values worth keeping by themselves, as short as they have to be, then lesser facts; newest
        first."""
        spoken = [
            (row, *self._values(row)) for row in reversed(self.rows) if row.is_told and row.role != "tool"
        ]
        strong: list[_Item] = []
        for newer, older in ((70, 70), (45, 45), (25, 25), (25, 12), (12, 12), (12, 0), (0, 0)):
            strong = []
            for at, (row, line, found) in enumerate(spoken):
                radius = newer if at * 2 < len(spoken) else older
                kept = [value for value in found if value.is_strong]
                if kept and row.role == "user" and len(line) <= 400:
                    kept = [
                        value for value in found if value.is_strong or (radius >= 25 and len(value.text) > 1)
                    ]
                if kept:
                    strong.append(_Item("facts", row.seq, self._fact(row, line, kept, radius)))
            if self._cost(strong, share) <= share:
                break
        strong.sort(key=lambda item: (self.labels.assistant in item.text[:20], -item.seq))
        return strong, self._weak(spoken)

    def _weak(self, spoken: Sequence[tuple[SourceMessage, str, list[values.Value]]]) -> list[_Item]:
        """Of messages without a strong value: what users said of themselves, the product, lesser values."""
        told: list[_Item] = []
        lesser: list[_Item] = []
        for row, line, found in spoken:
            if row.role == "assistant" or len(line) > _LONG or any(value.is_strong for value in found):
                continue
            if row.role != "user":
                told.append(_Item("facts", row.seq, self._quoted(row, line, 200)))
                continue
            parts = [
                part
                for part in wording.sentences(line)
                if wording.is_about_self(part) and part[-1] not in "?？"
            ]
            if parts:
                told.append(_Item("facts", row.seq, self._quoted(row, " ".join(parts[:3]), 140)))
            elif found:
                lesser.append(_Item("facts", row.seq, self._fact(row, line, found, 30)))
        return told + lesser

    def _values(self, row: SourceMessage) -> tuple[str, list[values.Value]]:
        text = self.text.get(row.seq, "")
        if row.role == "user":
            line = plain(text) if len(text) <= _LONG else plain(text[:900]) + " … " + plain(text[-600:])
            found = [value for value in values.find(line, 60) if not self._is_in_ledger(value)]
            if len(line) > 600:  # pasted material: its own values matter less than what was said about it
                found = [value for value in found if value.is_strong and value.kind != "number"][:6]
            return line, found[:30]
        line = plain(wording.without_code(text[:20_000]))
        kinds = {"email", "uuid", "phone", "id", "url"}
        found = [value for value in values.find(line, 60) if value.kind in kinds and _is_code(value)]
        return line, found[:6]

    def _is_in_ledger(self, value: values.Value) -> bool:
        """True for a path that the files of the range name anyway."""
        if not value.kind.endswith("path"):
            return False
        name = value.text.rstrip("/")
        tails = (name[at + 1 :] for at, char in enumerate(name) if char == "/")
        return name in self.file_tails or any(tail in self.ledger.files for tail in tails)

    def _fact(self, row: SourceMessage, line: str, found: Sequence[values.Value], radius: int) -> str:
        if not radius and len(line) > 40:
            label = "" if row.role == "user" else f" {self.labels.assistant}"
            return f"#{row.seq}{label}: {values.bare(found)}"
        whole = max(60, radius * 2)
        text = line if len(line) <= whole else values.around(line, found, radius)
        return self._quoted(row, text, 900)

    def _cost(self, items: Sequence[_Item], enough: int) -> int:
        total = 0
        for item in items:
            total += item_tokens(item.text, self.request.count)
            if total > enough:
                break
        return total

    def _turn_items(self, quoted: dict[int, str]) -> list[_Item]:
        """What was asked and how it was answered, newest first and the newest told longest.

        quoted: what is told of a message elsewhere; a message told whole there is not quoted again.
        """
        found: list[_Item] = []
        for turn in reversed(self.turns):
            asked_at, replied_at = (120, 150) if len(found) < 4 else (90, 80) if len(found) < 12 else (70, 50)
            user = (
                turn.user
                if turn.user is not None and turn.user.is_told and not self._is_small(turn)
                else None
            )
            reply = (
                self._telling(turn.reply, replied_at) if turn.reply is not None and turn.reply.is_told else ""
            )
            if user is None and not reply:
                continue
            told = ""
            if user is not None:
                text = one_line(
                    wording.without_filler(wording.without_code(self.text[user.seq])) or self.text[user.seq]
                )
                short = user.seq in quoted and len(quoted[user.seq]) - 8 >= len(text) * 0.7
                told = (
                    f"#{user.seq}"
                    if short
                    else f"#{user.seq} {self.labels.asked}: {self._quote(text, asked_at)}"
                )
                if short and not reply:
                    continue
            if reply and turn.reply is not None:
                where = f"#{turn.reply.seq} " if user is None else ""
                told += (
                    f"{' → ' if told else ''}{where}{self.labels.replied}: {self._quote(reply, replied_at)}"
                )
            seq = user.seq if user is not None else turn.reply.seq if turn.reply is not None else 0
            found.append(_Item("resolved", seq, told))
        return found

    def _telling(self, row: SourceMessage, limit: int) -> str:
        """The first words of a reply that say something, with the list they announce."""
        parts = wording.sentences(wording.without_code(self.text[row.seq])[:6000])
        told = ""
        for part in parts:
            if not told and (wording.is_filler(part) or len(part) < 3):
                continue
            if told and not told.endswith((":", "：", ";")) and len(told) >= 24:
                break
            joint = " " if not told or told[-1] in ":：.!?。！？" else "; "
            told = f"{told}{joint}{plain(part)}".strip()
            if told.endswith((":", "：")) or len(told) < limit:
                continue
            break
        return told

    def _files(self, share: int) -> tuple[list[_Item], list[_Item]]:
        """Files changed, then ids and URLs, newest first; and what was only read.

        Where there are more than `share` takes, they are named shorter rather than left out.
        """
        files = sorted(self.ledger.files.values(), key=lambda file: -file.seq)
        others = sorted(
            [*self.ledger.ids.values(), *self.ledger.urls.values()], key=lambda touched: -touched.seq
        )
        named: list[_Item] = []
        for is_cited in (True, False):
            named = [self._file(file, is_cited) for file in files if file.act != "read"]
            for one in others:
                place = f" (#{one.seq})" if is_cited else ""
                named.append(_Item("artifacts", one.seq, plain(mask(f"{clip(one.name, 160)}{place}"))))
            if self._cost(named, share) <= share:
                break
        return named, [self._file(file, True) for file in files if file.act == "read"]

    def _file(self, file: ledger.Touched, is_cited: bool) -> _Item:
        return _Item("artifacts", file.seq, plain(mask(ledger.file_line(file, self.labels, is_cited))))

    def _outcomes(self) -> list[_Item]:
        """Failed calls and calls without a result first, then the newest of each kind of call."""
        found: list[_Item] = []
        seen: set[str] = set()
        last_user = max((row.seq for row in self.rows if row.role == "user"), default=0)
        simple = ("read", "view", "open", "edit", "write", "str_replace")
        for at, call in enumerate(reversed(self.ledger.calls)):
            argument = ledger.main_argument(call)
            name = f"{call.tool} {argument}"
            if name in seen or (
                call.tool.lower().startswith(simple) and not call.is_error and call.result is not None
            ):
                continue
            seen.add(name)
            text = plain(mask(ledger.outcome_line(call, self.labels, 90)))
            if call.result is None:
                is_open = call.seq > last_user
                found.append(
                    _Item("pending" if is_open else "artifacts", call.seq, text, 0 if is_open else 2)
                )
            else:
                found.append(_Item("artifacts", call.seq, text, 1 if call.is_error and at < 40 else 2))
        return sorted(found, key=lambda item: (item.order, -item.seq))


def _focus_words(focus: str) -> frozenset[str]:
    """Words of the focus long enough to mean something; of scripts without spaces, pairs of characters."""
    words = key(focus).split()
    spaced = {word for word in words if len(word) > 3 and word.isascii()}
    other = [word for word in words if not word.isascii()]
    long = {word[:-1] if len(word) > 5 else word for word in other if ord(word[0]) < 0x2E80 and len(word) > 3}
    return frozenset(
        spaced
        | long
        | {word[at : at + 2] for word in other if ord(word[0]) >= 0x2E80 for at in range(len(word) - 1)}
    )


def _is_code(value: values.Value) -> bool:
    """True for an id the assistant gave that cannot be a word: `NJB87PAP`, `QX-4471`, but not `step2`."""
    if value.kind != "id":
        return True
    letters = [ch for ch in value.text if ch.isalpha()]
    return len(value.text) >= 5 and (
        all(ch.isupper() for ch in letters) or sum(ch.isdigit() for ch in value.text) >= 3
    )


def _speech(row: SourceMessage) -> str:
    text = row.text if len(row.text) <= 60_000 else row.text[:40_000] + "\n" + row.text[-20_000:]
    return wording.without_thinking(text) if row.role == "assistant" else without_attached(text)


def _turns(rows: Sequence[SourceMessage], text: dict[int, str]) -> list[_Turn]:
    turns = [_Turn(None)]
    for row in rows:
        if row.role == "user":
            turns.append(_Turn(row))
        elif row.role == "assistant":
            turn = turns[-1]
            calls = len(row.tool_calls or ())
            turn.calls += calls
            if text[row.seq].strip():
                turn.reply = row
                turn.is_closed = not calls
            elif calls:
                turn.is_closed = False
        elif row.role == "tool":
            turns[-1].is_closed = False
    return turns


def carried(request: SummaryRequest, told: Summary) -> Summary:
    """What code keeps beside a model's words, in two fifths of the limit: values it left out, the ledger."""
    rows = [row for row in request.messages if row.kind == "message"]
    return _Chat(rows, request).carried(" ".join(told.texts()))


def is_called_off(messages: Sequence[SourceMessage]) -> bool:
    """True where the newest word of the user takes back what was going on."""
    users = [row for row in messages if row.kind == "message" and row.role == "user" and row.text.strip()]
    return bool(users) and wording.is_cancellation(users[-1].text.strip())
