"""Whose words a note is in: an instruction from a tool's output must not become what the user wanted."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

from pycontext.summarizer.transcript import ATTACHED, without_attached
from pycontext.summarizer.wording import is_answer
from pycontext.summary import SourceMessage

_CITED = re.compile(r"#([0-4]?\d{1,18})")
_USER = re.compile(
    r"\b(?:user|customer|client|пользовател|клиент|заказчик)\w*|用户|客户|ユーザー|사용자", re.IGNORECASE
)
_WISH = re.compile(
    r"\b(?:ask|want|wish|need|request|requir|prefer|demand|instruct|told|tell|like|insist|agree|approv|authori|allow"
    r"|permi|consent)\w*"
    r"|\b(?:по|за)?(?:прос|прош|хоч|хот|треб|вел|приказ|поруч|жела|нуж|надо|предпоч|наста|указ|разреш|соглас|одобр"
    r"|позвол)\w*"
    r"|要求|请求|希望|需要|同意|允许|想|让|依頼|求め|たい|요청|요구|원[하했]",
    re.IGNORECASE,
)
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|[^\W_]+")
_RUN = 4
"""So many words in a row are a quotation."""


def tells_a_wish(text: str) -> bool:
    """True where a note speaks of a user and of asking, wanting or allowing, whoever asks whom."""
    return bool(_USER.search(text) and _WISH.search(text))


def places(text: str) -> set[int]:
    """The `#seq`s a text names."""
    return set(map(int, _CITED.findall(text)))


class Sources:
    """The rows that notes are made of, and what was told before them."""

    def __init__(self, rows: Iterable[SourceMessage], told: Sequence[str] = ()) -> None:
        self._rows = {row.seq: row for row in rows if row.kind == "message"}
        self._told = told

    def is_forged(self, note: str, cited: Collection[int] = (), *, is_wish: bool = False) -> bool:
        """True for a wish of the user's that is not his.

        That is one that quotes a tool's output, or the assistant where no user agreed, or that cites tools
        alone. cited: places beside those in the note. is_wish: whatever the note says is a wish.
        """
        if not is_wish and not tells_a_wish(note):
            return False
        rows = [self._rows[seq] for seq in {*cited, *places(note)} if seq in self._rows]
        roles = {row.role for row in rows}
        text = _WISH.sub(" ", _USER.sub(" ", _CITED.sub(" ", note)))
        runs = set(_runs(text))
        own = len(runs & self._own_runs)
        if len(runs & self._foreign_runs) > own or (roles and not roles & {"user", "assistant"}):
            return True
        if any(len(word) > 3 or ord(word[0]) > 0x2E80 for word in {*_words(text)} & self._own_words):
            return False
        if "user" not in roles and (is_wish or roles):
            return True
        has_agreed = any(row.role == "user" and is_answer(without_attached(row.text)) for row in rows)
        return not has_agreed and len(runs & self._replied_runs) > own

    @cached_property
    def _own(self) -> list[str]:
        said = [without_attached(row.text) for row in self._rows.values() if row.role == "user"]
        return [*said, *self._told]

    @cached_property
    def _own_runs(self) -> frozenset[str]:
        return _all_runs(self._own)

    @cached_property
    def _own_words(self) -> frozenset[str]:
        return frozenset(word for text in self._own for word in _words(text))

    @cached_property
    def _foreign_runs(self) -> frozenset[str]:
        """Of tools' output, of what the product put in and of attached files, but not in the user's words."""
        rows = self._rows.values()
        texts = [row.text for row in rows if row.role not in ("user", "assistant")]
        attached = [match[0] for row in rows if row.role == "user" for match in ATTACHED.finditer(row.text)]
        return _all_runs([*texts, *attached]) - self._own_runs

    @cached_property
    def _replied_runs(self) -> frozenset[str]:
        return _all_runs(row.text for row in self._rows.values() if row.role == "assistant") - self._own_runs


def _words(text: str) -> list[str]:
    """Beginnings of words, since endings change; of scripts without spaces, pairs of characters."""
    found: list[str] = []
    for word in _WORD.findall(text.casefold()):
        if ord(word[0]) > 0x2E80:
            found += [word[at : at + 2] for at in range(max(1, len(word) - 1))]
        else:
            found.append(word[:5])
    return found


def _runs(text: str) -> list[str]:
    words = _words(text)
    return [" ".join(words[at : at + _RUN]) for at in range(len(words) - _RUN + 1)]


def _all_runs(texts: Iterable[str]) -> frozenset[str]:
    return frozenset(run for text in texts for run in _runs(text))
