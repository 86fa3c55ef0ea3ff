"""Whose words a note is in: an instruction from a tool's output must not become what the user wanted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

from pycontext.summarizer.transcript import ATTACHED, without_attached
from pycontext.summarizer.wording import is_answer
from pycontext.summary import SourceMessage
from pycontext.values import Value, find

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
_DOMAIN = re.compile(r"(?<![\w@.-])(?:[^\W_](?:[\w-]*[^\W_])?\.)+[^\W\d_]{2,}(?![\w-])")
_ADDRESS = frozenset({"url", "email", "phone", "money"})
"""Where something goes, and how much: the user's own words name it, or those that he agreed to."""
_COMMON_WORDS = """
about above after again all also always and any are assis back been befor being both but can could
does done down each for from full give given has have having here how into its just later made
make more most much must near not now off once one only other out over plea pleas same shall shoul
since some such than thank that the their them then there these they thing this those under until
use used using was were what when where which while who why will with would you your без был была
были было быть вас ваш весь вместе во вот все всё всего всех всю где для до его ее её если есть
еще ещё из или им ими их как каког какие какой когда котор кто лишь мне мой мы на над него нее неё
ней них но об один он она они оно от очень перед по под после потом почем при про сам самый свой
себя сейча со та так также такое такой там тем теперь тех то того тоже той толь тольк тот тут ты
уже хотя чего чем через что чтобы эта эти этим это этого этой этом этот эту
"""
_COMMON = frozenset(_COMMON_WORDS.split())
"""Beginnings of words that say nothing by themselves."""


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

        That is one that quotes a tool's output, or the assistant where no user agreed; that cites tools
        alone, or messages of his that say nothing of it; or that names an address he did not. cited: places
        beside those in the note. is_wish: whatever the note says is a wish.
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
        has_agreed = any(row.role == "user" and is_answer(without_attached(row.text)) for row in rows)
        if self._names_what_nobody_said(note, rows, has_agreed):
            return True
        if "user" in roles and not has_agreed and not self._are_about(text, rows):
            return True
        if any(len(word) > 3 or ord(word[0]) > 0x2E80 for word in {*_words(text)} & self._own_words):
            return False
        if "user" not in roles and (is_wish or roles):
            return True
        return not has_agreed and len(runs & self._replied_runs) > own

    def _names_what_nobody_said(self, note: str, rows: Iterable[SourceMessage], has_agreed: bool) -> bool:
        """True where a note names an address that the user neither wrote nor agreed to, a path or id that no
        assistant wrote either, or a host that tools alone name."""
        replied = self._replied if has_agreed else [_said(row) for row in rows if row.role == "assistant"]
        theirs = "\n".join([*self._own, *replied]).casefold()
        ours = "\n".join([theirs, *self._replied]).casefold()
        named = [value for value in find(_CITED.sub(" ", note)) if value.is_strong and value.kind != "date"]
        for value in named:
            if value.kind in ("money", "phone"):
                if _digits(value.text) not in _digits(theirs):
                    return True
            elif _bare(value) not in (theirs if value.kind in _ADDRESS else ours):
                return True
        hosts = {match[0].casefold() for match in _DOMAIN.finditer(note)}
        return any(host in self._foreign and host not in ours for host in hosts)

    def _are_about(self, text: str, rows: Iterable[SourceMessage]) -> bool:
        """True where what the user said in the rows shares a word with a note that says something, or is in
        another script."""
        said = _telling(" ".join(without_attached(row.text) for row in rows if row.role == "user"))
        noted = _telling(text)
        return not noted or bool(noted & said) or _script(noted) != _script(said)

    @cached_property
    def _replied(self) -> list[str]:
        return [_said(row) for row in self._rows.values() if row.role == "assistant"]

    @cached_property
    def _foreign(self) -> str:
        rows = self._rows.values()
        return "\n".join(row.text for row in rows if row.role not in ("user", "assistant")).casefold()

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


def _said(row: SourceMessage) -> str:
    """What an assistant wrote: words, and arguments of calls."""
    calls = [str(call.get("function", {}).get("arguments") or "") for call in row.tool_calls or ()]
    return "\n".join([row.text, *calls])


def _telling(text: str) -> set[str]:
    return {word for word in _words(text) if word not in _COMMON and (len(word) > 2 or not word.isascii())}


def _script(words: Iterable[str]) -> str:
    """The script that most of the words are in."""
    at = Counter(
        "latin" if ord(word[0]) < 0x250 else "cyrillic" if 0x400 <= ord(word[0]) < 0x530 else "other"
        for word in words
    )
    return max(at, key=at.__getitem__, default="")


def _digits(text: str) -> str:
    return re.sub(r"(?<=\d)[\s.,()-]+(?=\d)|[^\d\s]", "", text).strip()


def _bare(value: Value) -> str:
    """A value as it may stand elsewhere: of a path its last part, of an address all but its scheme."""
    text = value.text.casefold().rstrip("/\\")
    if value.kind in ("path", "quoted_path"):
        return re.split(r"[/\\]", text)[-1]
    return text.removeprefix("https://").removeprefix("http://").removeprefix("www.")


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
