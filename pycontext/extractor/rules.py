"""The built-in extractor: no model, deterministic. It keeps what users stated, in their own words.

Of every message a user wrote: sentences that ask to be remembered, that speak of the user (name, home, work,
tastes, …), that set a rule, or that hold exact values (dates, amounts, ids, addresses); short answers with
the question they answer. English, Russian and Chinese are known best; exact values are language-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pycontext import values
from pycontext.extractor import ExtractorRequest, ExtractorResult, Fact
from pycontext.summarizer import wording
from pycontext.summary import SourceMessage, clip, key, one_line, plain

_LONG = 4000
"""Of a longer message the edges are read, the rest is taken for pasted material."""

_PER_MESSAGE = 12
_LENGTH = 300

_REMEMBER = re.compile(
    r"\b(?:(?:please\s+)?(?:remember|note|keep\s+in\s+mind|memori[sz]e|make\s+a\s+note|don'?t\s+forget|save)"
    r"(?=\W|\s+(?:that|this|my|our|to|the|down)\b)|for\s+(?:the\s+record|future\s+reference)|from\s+now\s+on)"
    r"|(?:запомни(?:те)?|запиши(?:те)?|учти(?:те)?|имей(?:те)?\s+в\s+виду|не\s+забудь(?:те)?|на\s+будущее|впредь)\b"
    r"|记住|记下|记一下|记得|请记|别忘|備忘|以后都|覚えて|忘れないで|기억해|잊지",
    re.IGNORECASE,
)

_PREFERENCE = re.compile(
    r"\bi(?:'d|\s+would)?\s+(?:really\s+|also\s+|much\s+|always\s+|usually\s+|never\s+|do\s?n[o']t\s+|can't\s+)*"
    r"(?:prefer|like|love|hate|enjoy|dislike|want\s+you\s+to|need\s+you\s+to|avoid|stand|eat|drink)\b"
    r"|\bmy\s+favou?rite\b|\bi'?m\s+(?:allergic|vegetarian|vegan|interested|into)\b"
    r"|\b(?:always|never)\s+(?:use|reply|answer|write|include|call|send|ask|add|show|put|format|explain)\b"
    r"|\bя\s+(?:очень\s+|больше\s+|не\s+)?(?:предпочитаю|люблю|обожаю|ненавижу|хочу,?\s+чтобы|не\s+ем|не\s+пью)"
    r"|\bмне\s+(?:больше\s+|очень\s+|не\s+)*нрав[ия]тся|\bу\s+меня\s+аллерги"
    r"|\b(?:мой|моя|моё|мое|мои)\s+любим|\b(?:всегда|никогда\s+не)\s+\w+(?:й|йте|ай|и|ите)\b"
    r"|我(?:更|最|很|也|不|特别|比较)*(?:喜欢|爱|讨厌|偏好|习惯|过敏|想要)|(?:が|は)(?:好き|嫌い|苦手)|좋아|싫어",
    re.IGNORECASE,
)

_THINGS = (
    r"wife|husband|partner|girlfriend|boyfriend|son|daughter|brother|sister|mother|mom|father|dad|boss|manager"
    r"|team|dog|cat|pet|car|bike|address|home address|timezone|time zone|language|native language|job|company"
    r"|profession|occupation|major|school|university|hobby|deadline|user id|account number|customer id"
    r"|zip code|postal code|phone model|goal|salary|age|height|weight|nickname"
)
_SUBJECTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (subject, re.compile(pattern, re.IGNORECASE))
    for subject, pattern in (
        (
            "user.name",
            r"\bmy\s+(?:full\s+|first\s+)?name(?:'s|\s+is)\b|\bcall\s+me\s+(?-i:[A-Z])|\bменя\s+зовут\b"
            r"|\bмо[её]\s+имя\b|\bзови(?:те)?\s+меня\b|\bмоя\s+фамилия\b|我(?:的名字)?叫|我的名字是|我姓"
            r"|私の名前は|제\s*이름은|\bme\s+llamo\b|\bich\s+heiße\b",
        ),
        (
            "user.email",
            r"\bmy\s+e-?mail(?:\s+address)?(?:'s|\s+is)\b"
            r"|\bмо[йяе]\s+(?:e-?mail|имейл|почта|электронная\s+почта)\b|我的(?:邮箱|电子邮件)",
        ),
        (
            "user.phone",
            r"\bmy\s+(?:phone|mobile|cell)(?:\s+number)?(?:'s|\s+is)\b"
            r"|\bмой\s+(?:телефон|номер(?:\s+телефона)?)\b|我的(?:电话|手机)(?:号码|号)?",
        ),
        (
            "user.home",
            r"\bi\s+(?:now\s+|currently\s+)?live\s+in\b|\bi(?:'ve|\s+have)?\s+moved\s+to\b"
            r"|\bi'?m\s+(?:based|living)\s+in\b|\bя\s+(?:сейчас\s+)?живу\s+(?:в|на)\b"
            r"|\bя\s+переехал[аи]?\s+в\b|我(?:现在)?住在|我搬到|に住んで",
        ),
        (
            "user.work",
            r"\bi\s+(?:now\s+|currently\s+)?work\s+(?:as|at|for|in)\b|\bя\s+(?:сейчас\s+)?работаю\b"
            r"|我(?:现在)?在.{1,20}(?:工作|上班)|で働いて",
        ),
        (
            "user.age",
            r"\bi'?m\s+\d{1,3}(?:\s+years?\s+old)?(?=\W*$|\s*[,.]|\s+years)|\bмне\s+\d{1,3}\s+(?:год|лет|года)\b"
            r"|我今年?\d{1,3}岁",
        ),
        (
            "user.birthday",
            r"\bmy\s+birthday\b|\bi\s+was\s+born\s+(?:on|in)\b|\bмой\s+день\s+рождения\b"
            r"|\bя\s+родил(?:ся|ась)\b|我的生日|我出生于",
        ),
        ("user.budget", r"\b(?:my|our)\s+budget\b|\b(?:мой|наш)\s+бюджет\b|我们?的?预算"),
        (
            "user.language",
            r"\b(?:answer|reply|respond|write|speak)\s+(?:to\s+me\s+)?(?:only\s+)?in\s+(?-i:[A-Z])\w+"
            r"|\b(?:отвечай|пиши)(?:те)?\s+(?:мне\s+)?(?:только\s+)?(?:на|по)[-\s]\w+"
            r"|用(?:中文|英文|日文|英语|日语|俄语)回答",
        ),
    )
)
_FAVOURITE = re.compile(
    r"\bmy\s+favou?rite\s+(?P<en>[\w'-]+(?:\s+[\w'-]+)?)\s+(?:is|are|was)\b"
    r"|\b(?:мой|моя|моё|мое|мои)\s+любим\w+\s+(?P<ru>[\w-]+)|我最喜欢的(?P<zh>[\u4e00-\u9fff]{1,6}?)是",
    re.IGNORECASE,
)
_THING = re.compile(
    rf"\bmy\s+(?P<thing>{_THINGS})(?:'s\s+name)?(?:\s+is|\s+are|'s|\s+was\s+changed|\s+has\s+changed)\b",
    re.IGNORECASE,
)

_ASKS_FOR = re.compile(
    r"\b(?:name|e-?mail|phone|number|address|date|when|how\s+many|how\s+much|which|where|what|user\s+id|zip|code|budget"
    r"|prefer|time|day|reason|birth)\b"
    r"|(?:имя|зовут|фамили|почт|телефон|номер|адрес|дат[ауы]|когда|сколько|какой|какая|какие|какое|где|куда|бюджет|предпочит|врем)"
    r"|名字|姓名|电话|邮箱|地址|日期|时间|什么|几|多少|哪|何|いつ|どこ|誰|いくつ",
    re.IGNORECASE,
)
_RELATIVE = re.compile(
    r"\b(?:today|tonight|tomorrow|yesterday|(?:next|last|this)\s+(?:week|month|year|monday|tuesday|wednesday|thursday|friday"
    r"|saturday|sunday|weekend)|(?:on\s+)?(?:monday|tuesday|wednesday|thursday|friday|saturday|sunday)|ago"
    r"|in\s+(?:a|two|three|\d+)\s+(?:days?|weeks?|months?))\b"
    r"|(?:сегодня|завтра|послезавтра|вчера|позавчера|на\s+(?:этой|прошлой|следующей)\s+неделе"
    r"|в\s+(?:прошлом|следующем|этом)\s+(?:году|месяце)|назад)\b|今天|明天|后天|昨天|前天|今晚|(?:上|下|这)(?:周|个?月|星期)|去年|明年|今日|明日|昨日",
    re.IGNORECASE,
)
_TIME = re.compile(r"(?<![\d:.])(?:[01]?\d|2[0-3]):[0-5]\d(?![\d:])")
_DIGIT = re.compile(r"\d")
_ASKS = re.compile(
    r"[?？]\W*$|(?:吗|呢|么)\W*$|^\W*(?:what|who|where|when|why|how|which|can|could|would|will|do|does|did|is|are|am|should|may"
    r"|как|что|кто|где|когда|почему|зачем|сколько|какой|какая|какие|можешь|можете|не\s+мог)\b|^\W*(?:什么|谁|哪|怎么|为什么|如何|请问)",
    re.IGNORECASE,
)
_INTERJECTION = re.compile(
    r"^(?:\W*\b(?:hi|hello|hey|привет|здравствуйте|你好)\b[\s,.!，。！]*)+", re.IGNORECASE
)


class RuleExtractor:
    """Takes facts by rules: the same messages give the same facts."""

    name = "rules"

    def extract(self, request: ExtractorRequest) -> ExtractorResult:
        """The facts users stated, oldest first; each names its message. Never raises."""
        found: dict[str, Fact] = {}
        question = ""
        for row in request.messages:
            if row.role == "assistant":
                question = _question(row)
            elif row.role == "user":
                for fact in _facts(row, question):
                    if not any(map(str.isalnum, fact.content)):
                        continue  # a tag of our own fences was all there was
                    found.setdefault(f"{fact.subject or ''}:{key(fact.content)}", fact)
                question = ""
        return ExtractorResult(sorted(found.values(), key=lambda fact: fact.seq), self.name)


def _facts(row: SourceMessage, question: str) -> Iterator[Fact]:
    """The facts of one message of a user, the tellings first that say most about him."""
    text = wording.without_code(row.text)
    if len(text) > _LONG:
        text = f"{text[: _LONG // 2]}\n{text[-_LONG // 2 :]}"
    sentences = wording.sentences(text)
    if question and len(sentences) == 1 and _is_answer(sentences[0]):
        yield _made(row, f"{question} — {sentences[0]}", "answer", _subject(f"{question} {sentences[0]}"))
        return
    told: list[tuple[int, int, Fact]] = []
    for at, sentence in enumerate(sentences):
        found = _judge(row, sentence)
        if found is not None:
            told.append((found[0], at, found[1]))
    kept = sorted(told, key=lambda item: item[:2])[:_PER_MESSAGE]
    for _, _, fact in sorted(kept, key=lambda item: item[1]):
        yield fact


def _judge(row: SourceMessage, sentence: str) -> tuple[int, Fact] | None:
    """How much a sentence matters (0 most) and the fact it is; None where it is none."""
    sentence = _INTERJECTION.sub("", sentence)
    if len(sentence) < 4 or wording.is_filler(sentence):
        return None
    asks = bool(_ASKS.search(sentence))
    if not asks or _REMEMBER.match(sentence.lstrip()):
        subject = _subject(sentence)
        if _REMEMBER.search(sentence):
            return 0, _made(row, sentence, "remembered", subject)
        if subject:
            kind = "preference" if subject.startswith("user.favourite") else "identity"
            return 1, _made(row, sentence, kind, subject)
        if _PREFERENCE.search(sentence):
            return 2, _made(row, sentence, "preference", None)
        if wording.is_about_self(sentence):
            return 3, _made(row, sentence, "about", None)
    exact = [value for value in values.find(sentence) if value.is_strong or _is_long(value)]
    if (
        exact
        or _TIME.search(sentence)
        or (not asks and _RELATIVE.search(sentence) and _DIGIT.search(sentence))
    ):
        return 4, _made(row, sentence, "value", None, exact)
    return None


def _is_long(value: values.Value) -> bool:
    """True for a bare number that nobody says in passing: the end of a card, a room, a year."""
    return value.kind == "number" and sum(map(str.isdigit, value.text)) >= 3


def _subject(sentence: str) -> str | None:
    for subject, pattern in _SUBJECTS:
        if pattern.search(sentence):
            return subject
    favourite = _FAVOURITE.search(sentence)
    if favourite:
        return "user.favourite." + "_".join((favourite[favourite.lastgroup or 0]).lower().split())
    thing = _THING.search(sentence)
    return "user." + "_".join(thing["thing"].lower().split()) if thing else None


def _made(
    row: SourceMessage, sentence: str, kind: str, subject: str | None, exact: Sequence[values.Value] = ()
) -> Fact:
    """The sentence as a fact, clipped around its values, with the day where it speaks of days relatively."""
    text = one_line(sentence)
    if len(text) > _LENGTH:
        found = exact or [value for value in values.find(text) if value.is_strong]
        text = clip(values.around(text, found, 60), _LENGTH * 2) if found else clip(text, _LENGTH)
    if row.created_at and _RELATIVE.search(text):
        text += f" ({row.created_at:%Y-%m-%d})"
    return Fact(row.seq, plain(text), subject, kind)


def _question(row: SourceMessage) -> str:
    """What the assistant asked last, where that asks for something to be stated."""
    sentences = wording.sentences(wording.without_code(row.text[-1200:]))
    last = sentences[-1] if sentences else ""
    return clip(last, 160) if last.rstrip().endswith(("?", "？")) and _ASKS_FOR.search(last) else ""


def _is_answer(sentence: str) -> bool:
    """A short statement that only says something together with its question."""
    return (
        len(sentence) <= 80
        and not wording.is_filler(sentence)
        and not _ASKS.search(sentence)
        and _subject(sentence) is None
    )
