"""Exact values in text: what a summary must not paraphrase. Ids, numbers with units, dates, amounts,
addresses, paths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_EXT = (
    r"py|pyi|ipynb|js|mjs|cjs|jsx|ts|tsx|json5?|jsonl|ya?ml|toml|ini|cfg|conf|env|lock|md|mdx|rst|txt|csv"
    r"|tsv|parquet|xlsx?|docx?|pptx?|pdf|html?|css|scss|less|vue|svelte"
    r"|java|kt|kts|scala|go|rs|c|cc|cpp|cxx|h|hpp|cs|swift|m|mm|rb|php|pl|lua|r|jl|sql|sh|bash|zsh|ps1|bat"
    r"|db|sqlite3?|log|xml|svg|png|jpe?g|gif|webp|mp[34]|wav|zip|tar|gz|tgz|whl"
    r"|gradle|tf|proto|graphql|j2|tmpl|patch|diff|bak|pem|key|crt"
)
_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?"
    r"|январ[яьеё]|феврал[яье]|март[ае]?|апрел[яье]|ма[яйе]|июн[яье]|июл[яье]|август[ае]?|сентябр[яье]"
    r"|октябр[яье]|ноябр[яье]|декабр[яье])"
)
_UNIT = (
    r"%|‰|°[CF]?|(?:usd|eur|gbp|rub|cny|jpy|dollars?|euros?|руб(?:\.|л\w*)?|р\.|долл\w*|евро|тыс\.?|млн"
    r"|млрд|元|块|円|ドル|万|億|亿|kb|mb|gb|tb|kib|mib|gib|ms|sec(?:onds?)?|min(?:utes?)?"
    r"|hours?|hrs?|days?|weeks?|months?|years?|km|cm|mm|kg|mg|ml|px|pt|fps|tokens?|people|persons?|nights?"
    r"|tickets?|items?|files?|lines?|times?"
    r"|сек\w*|мин\w*|час\w*|дн\w*|день|дней|недел\w*|месяц\w*|лет|год\w*|человек\w*|шт\.?|км|кг|ночи|ночей"
    r"|раз[а]?|звезд\w*"
    r"|年|月|日|号|天|小时|分钟|秒|个|次|岁|人|页|公里|公斤|時間|分|回|枚|歳|名)(?![A-Za-zА-Яа-я])"
)
_VALUE = re.compile(
    r"(?P<url>(?<![A-Za-z])(?:https?|ftp|s3|gs|file|postgres(?:ql)?|redis"
    r"|mongodb(?:\+srv)?)://[^\s<>\"'«»“”`）】」。，、]{2,400})"
    r"|(?P<email>(?<![\w.+-])[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,5})"
    r"|(?P<uuid>(?<![\w-])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![\w-]))"
    r"|(?P<quoted_path>(?<=['\"])(?:~|[A-Za-z]:)?[/\\][^'\"\n]{2,250}(?=['\"]))"
    rf"|(?P<path>(?<![\w./\\~-])(?:(?:~|\.{{1,2}}"
    rf"|[A-Za-z]:)?[/\\](?:[\w.@+-]{{1,100}}[/\\]){{1,30}}[\w.@+-]{{0,100}}"
    rf"|(?:[\w.@+-]{{1,100}}/){{2,30}}[\w.@+-]{{0,100}}"
    rf"|(?:[A-Za-z0-9_.@+-]{{1,100}}/){{0,30}}[A-Za-z0-9_.-]{{1,100}}\.(?:{_EXT})(?![A-Za-z0-9])))"
    rf"|(?P<date>(?<![A-Za-z0-9])\d{{4}}-\d{{2}}-\d{{2}}(?:[T ]\d{{2}}:\d{{2}}(?::\d{{2}})?Z?)?(?![0-9])"
    rf"|(?<![\w.])\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}(?![\w])"
    rf"|(?:\d{{4}}\s?年\s?)?\d{{1,2}}\s?月\s?\d{{1,2}}\s?[日号]|(?<![A-Za-zА-Яа-я]){_MONTH}\.?\s\d{{1,2}}(?:st"
    rf"|nd|rd|th)?(?:,?\s\d{{4}})?(?![A-Za-z0-9])"
    rf"|(?<![A-Za-z0-9])\d{{1,2}}(?:st|nd|rd|th|-?го)?\s(?:of\s)?{_MONTH}(?:,?\s\d{{4}})?(?![A-Za-zА-Яа-я]))"
    r"|(?P<phone>(?<![\w+])\+\d[\d ()-]{7,18}\d(?!\d))"
    r"|(?P<money>[$€£¥₽₴₹]\s?\d+(?:[.,  ]\d{3})*(?:[.,]\d+)?(?:\s?(?:k|m|bn|млн|тыс)\b)?"
    r"|(?<![\w.])\d+(?:[.,  ]\d{3})*(?:[.,]\d+)?\s?[$€£¥₽₴₹])"
    r"|(?P<color>(?<![\w])#[0-9a-fA-F]{3,8}(?![\w]))"
    r"|(?P<id>(?<![A-Za-z0-9_-])(?=[A-Za-z_-]{0,60}\d)(?=[\d_-]{0,60}[A-Za-z])[A-Za-z0-9]{1,60}(?:[-_][A-Za-z0-9]{1,60}){0,8}(?![A-Za-z0-9_]))"
    rf"|(?P<number>(?<![A-Za-z0-9_.,])[-+−]?\d{{1,40}}(?:[.,:  ]\d{{1,20}}){{0,6}}(?:\s?(?:{_UNIT}))?)"
    r"|(?P<quoted>`[^`\n]{2,60}`|«[^«»\n]{2,60}»|《[^《》\n]{1,40}》|「[^「」\n]{1,40}」|『[^『』\n]{1,40}』"
    r"|“[^“”\n]{2,60}”|(?<!\w)\"[^\"\n]{2,60}\"(?!\w))",
    re.IGNORECASE,
)

STRONG = frozenset({"url", "email", "uuid", "path", "quoted_path", "date", "phone", "money", "color", "id"})
"""Kinds that mean something out of their context."""

_LIST_MARK = re.compile(r"^\s*(?:[-*•]\s*)?\d{1,2}[.)](?:\s|$)")
_QUANTITY = re.compile(
    r"(?i)^\d+(?:ms|s|m|h|d|k|g|px|pt|kb|mb|gb|tb|kg|km|cm|mm|am|pm|fps|hz|khz|mhz|ghz|w|kw|v)$"
)
_ORDINARY = re.compile(
    r"(?i)^(?:(?-i:[A-Z]?[a-z]{2,20}\d)|\d{1,2}(?:st|nd|rd|th|px|x|d)|[a-z]\d?|h[1-6]|utf-?8|mp[34]|k8s|i18n|l10n|2d|3d"
    r"|web3)$"
)


@dataclass(frozen=True)
class Value:
    """One exact value and where it stands in its text."""

    start: int
    end: int
    kind: str
    text: str

    @property
    def is_strong(self) -> bool:
        """True for a value that is worth keeping by itself; a bare short number is not."""
        if self.kind == "number":
            return (
                sum(ch.isdigit() for ch in self.text) >= 5
                or self.text[-1:] in "%‰"
                or any(map(str.isalpha, self.text))
            )
        return self.kind in STRONG


def find(text: str, limit: int = 60) -> list[Value]:
    """The first `limit` exact values of `text`, in order."""
    found: list[Value] = []
    for match in _VALUE.finditer(text):
        kind = match.lastgroup or "number"
        start, end = match.span()
        while (
            end > start + 1
            and text[end - 1] in ".,;:!?)]}'\"-"
            and kind in ("url", "path", "email", "number")
        ):
            end -= 1
        value = text[start:end]
        if kind == "number" and _LIST_MARK.match(text[max(0, text.rfind("\n", 0, start) + 1) : end + 2]):
            continue
        if kind == "id" and _QUANTITY.match(value):
            kind = "number"
        if kind == "id" and _ORDINARY.match(value):
            continue
        found.append(Value(start, end, kind, value))
        if len(found) >= limit:
            break
    return found


def around(text: str, values: Sequence[Value], radius: int) -> str:
    """The parts of `text` that hold `values`, each with up to `radius` characters of its sentence on both
    sides."""
    windows: list[list[int]] = []
    for value in values:
        start, end = _word_start(text, value.start, radius), _word_end(text, value.end, radius)
        if windows and start <= windows[-1][1] + 8:
            windows[-1][1] = max(windows[-1][1], end)
        else:
            windows.append([start, end])
    told = ""
    for at, (start, end) in enumerate(windows):
        is_whole = start == 0 or text[start - 1] in _STOP or text[start] in _STOP
        told += ("" if is_whole and not at else " … " if at else "…") + text[start:end].strip(" ,;:，；、")
    last = windows[-1][1] if windows else 0
    return told + ("" if last >= len(text) or text[last - 1] in _STOP else "…")


def bare(values: Iterable[Value]) -> str:
    """The values alone, each once."""
    return ", ".join(dict.fromkeys(value.text for value in values))


_STOP = ".!?。！？;；\n"


def _word_start(text: str, at: int, radius: int) -> int:
    low = max(0, at - radius)
    for place in range(at - 1, low - 1, -1):
        if text[place] in _STOP and (place + 1 < at) and (text[place] not in "." or text[place + 1] == " "):
            return place + 1
    if low == 0:
        return 0
    space = text.find(" ", low, at)
    return space + 1 if space >= 0 else low


def _word_end(text: str, at: int, radius: int) -> int:
    high = min(len(text), at + radius)
    for place in range(at, high):
        if text[place] in _STOP and (
            text[place] not in "." or place + 1 >= len(text) or text[place + 1] == " "
        ):
            return place + 1
    if high == len(text):
        return high
    space = text.rfind(" ", at, high)
    return space if space > at else high
