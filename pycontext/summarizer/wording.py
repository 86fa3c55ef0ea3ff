"""What the built-in summarizer knows of languages: labels it writes, and cues it reads. Everything else
is language-free."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Labels:
    """The few words the built-in summarizer writes by itself, all of them of the past."""

    asked: str
    replied: str
    assistant: str
    system: str
    cancelled: str
    asked_back: str
    answered: str
    no_result: str
    failed: str
    edited: str
    written: str
    deleted: str
    read: str
    lines: str
    items: str
    no_output: str
    open_quote: str
    close_quote: str


LABELS = {
    "en": Labels(
        "asked",
        "replied",
        "assistant",
        "system",
        "user cancelled",
        "assistant had asked",
        "user answered",
        "no result came",
        "failed",
        "edited",
        "written",
        "deleted",
        "read",
        "lines",
        "items",
        "no output",
        '"',
        '"',
    ),
    "ru": Labels(
        "просьба",
        "ответ",
        "ассистент",
        "система",
        "пользователь отменил",
        "ассистент спросил",
        "пользователь ответил",
        "результата не было",
        "ошибка",
        "изменён",
        "записан",
        "удалён",
        "прочитан",
        "строк",
        "шт.",
        "пустой вывод",
        "«",
        "»",
    ),
    "zh": Labels(
        "用户问",
        "答复",
        "助手",
        "系统",
        "用户已取消",
        "助手曾问",
        "用户回答",
        "没有结果",
        "失败",
        "已修改",
        "已写入",
        "已删除",
        "已读",
        "行",
        "项",
        "无输出",
        "“",
        "”",
    ),
    "ja": Labels(
        "依頼",
        "回答",
        "アシスタント",
        "システム",
        "ユーザーが取り消した",
        "アシスタントの質問",
        "ユーザーの返答",
        "結果なし",
        "失敗",
        "編集済み",
        "書き込み済み",
        "削除済み",
        "読んだ",
        "行",
        "件",
        "出力なし",
        "「",
        "」",
    ),
    "ko": Labels(
        "요청",
        "답변",
        "어시스턴트",
        "시스템",
        "사용자가 취소함",
        "어시스턴트의 질문",
        "사용자의 대답",
        "결과 없음",
        "실패",
        "수정됨",
        "작성됨",
        "삭제됨",
        "읽음",
        "줄",
        "개",
        "출력 없음",
        '"',
        '"',
    ),
}


def language(texts: Iterable[str]) -> str:
    """Which labels fit a chat, by the share of scripts in its texts: `en`, `ru`, `zh`, `ja` or `ko`."""
    seen = {"latin": 0, "ru": 0, "zh": 0, "kana": 0, "ko": 0}
    for text in texts:
        for char in text[:400]:
            code = ord(char)
            if code < 0x250:
                seen["latin"] += char.isalpha()
            elif 0x400 <= code < 0x530:
                seen["ru"] += 1
            elif 0x3040 <= code < 0x3100:
                seen["kana"] += 1
            elif 0x3400 <= code < 0xA000 or 0x20000 <= code < 0x32000:
                seen["zh"] += 1
            elif 0xAC00 <= code < 0xD7B0:
                seen["ko"] += 1
    if seen["kana"] * 10 > seen["kana"] + seen["zh"]:
        seen["ja"] = seen.pop("kana") + seen.pop("zh")
    # a Han, Kana or Hangul character carries what two or three letters do
    weight = {"zh": 3, "ja": 3, "ko": 3, "ru": 1.5}
    best = max(seen, key=lambda name: (seen[name] * weight.get(name, 1), name == "latin"))
    return best if best in LABELS and seen[best] else "en"


# A user's word that ends what was going on. It has to open a short message: "don't forget", "cancel my
# reservation" and "stop the server" are requests, not cancellations.
_CANCEL = re.compile(
    r"^\W*(?:(?:ok(?:ay)?|no|wait|actually|hey|sorry|please|нет|так|ой|ладно|всё|все|不|好的?"
    r"|いや)[\s,.!，。、…]+){0,2}"
    r"(?:stop(?=\W*$|[,.!;]|\s+(?:it|that|this|doing|working|everything|now|right)\b)|abort\b"
    r"|forget\s+(?:it|that|this|about|[A-Z]\b)"
    r"|forget\s+the\b|never\s?mind\b|cancel(?=\W*$|\s+(?:it|that|this|everything|the\s+(?:task|request|job"
    r"|refactor\w*))\b)"
    r"|drop\s+(?:it|that|this)\b|scrap\s+(?:it|that|this)\b|leave\s+it\b|don'?t\s+bother|no\s+longer\s+need"
    r"|i\s+changed\s+my\s+mind"
    r"|отмен(?:а|и|ить|яй|яем|яется)\b|забудь(?:те)?\b|стоп\b|хватит\b|прекрати(?:те)?\b"
    r"|(?:я\s+)?передумал[аи]?\b|не\s+надо\b"
    r"|не\s+нужно\b|больше\s+не\s+(?:надо|нужно)\b|оставь(?:те)?\s+(?:это|как\s+есть)|брось(?:те)?\b|отбой\b"
    r"|取消|算了|不用了|不需要了|别(?:做|弄|管|写|改)了|停(?:止|下|$)|忘(?:了|掉|记)(?:它|这|那|吧)|放弃"
    r"|やめて|やめ(?:よう|ます)|中止|キャンセル|忘れて|取り消し|もういい|취소|그만|됐어"
    r"|cancela(?:lo|r)?\b|olvíd\w*|olvida\w*|vergiss|abbrechen|stopp\b|annule\w*|oublie\w*|laisse\s+tomber"
    r"|annulla\b|lascia\s+perdere)",
    re.IGNORECASE,
)
_CANCEL_INSIDE = re.compile(
    r"[.!,;—-]\s+(?:stop[,.!]|forget\s+(?:it|that|about)|never\s?mind|забудь(?:те)?\s|отмена\b)|(?:，"
    r"|。)(?:取消吧|算了|不用了)",
    re.IGNORECASE,
)
_NOT_CANCEL = re.compile(r"не\s+забудь|don'?t\s+forget|别忘|忘れないで", re.IGNORECASE)


def is_cancellation(text: str) -> bool:
    """True where a user's short message takes back what was going on."""
    if len(text) > 160 or _NOT_CANCEL.search(text):
        return False
    return bool(_CANCEL.search(text) or _CANCEL_INSIDE.search(text))


_DECISION_USER = re.compile(
    r"\b(?:let'?s\s+(?:use|go|keep|do|make|stick|call|take|have|put)|(?:i'?ll|we'?ll|i\s+will"
    r"|we\s+will)\s+(?:go\s+(?:with|for)|take\s+the|use|pay\s+(?:with|by)|stick\s+(?:with|to)|choose)"
    r"|(?:i|we)\s+(?:have\s+)?(?:decided?|choose|chose|agreed?|prefer|picked|confirm(?:ed)?|settled)"
    r"|go\s+(?:with|ahead)|instead\s+of|rather\s+than"
    r"|must(?:n'?t| not| never)?|should\s+(?:never|always)|(?:never|always)\s+(?:use|do|touch|change|delete"
    r"|write|ask|run|commit|push|answer|reply|keep|add|show)|only\s+use|do\s?n[o']?t\s+(?:use|want|do|add"
    r"|change|touch|need)|no\s+(?:more\s+)?\w+[!,]|should(?:n'?t)?\s+(?:be|use|not|never|return|stay)"
    r"|from\s+now\s+on|not\s+\w+\s+but|we\s+agreed|agreed|the\s+plan\s+is|final(?:ly)?\s+(?:answer|choice"
    r"|decision)|yes,?\s+(?:do|please|go)|sounds\s+good)\b"
    r"|(?:решил[аи]?|решено|договорил\w+|соглас(?:ен|на|ны|ова\w+)|выбира[юе]\w*|выбрал[аи]?"
    r"|остан[оа]в(?:имся|люсь)|будем\s+\w+|давай(?:те)?\s+\w+"
    r"|беру\b|берём|берем|пусть\s+будет|подтвержда\w+|утвержд\w+|только\s+не|никогда|всегда|обязательно"
    r"|вместо\s|не\s+(?:используй|делай|трогай|меняй|пиши)\w*"
    r"|нужно\s+чтобы|хочу,?\s+чтобы|забронируйте|закажите|предпочита\w+|меня\s+устро\w+)"
    r"|(?:决定|就(?:用|选|这样|它|定)|选择?(?:了|这|那|第)|同意|确认|确定|采用|改(?:成|为|用)|不要|必须|务必|千万|以后都|优先|宁可)"
    r"|(?:にします|にしよう|に決め|決定|採用|承知|了解しました|同意|必ず|しないで|ではなく|でお願いします|使わないで)"
    r"|(?:decidi\w+|acord\w+|elijo|prefiero|nunca|siempre|entschieden|einverstanden|nehmen\s+wir|niemals"
    r"|immer|décid\w+|d'accord|jamais|toujours)\b",
    re.IGNORECASE,
)
_DECISION_ASSISTANT = re.compile(
    r"\b(?:(?:we|i)\s+(?:have\s+)?(?:decided|agreed|chose|settled\s+on)|agreed\s+(?:to|on|that)"
    r"|the\s+decision\s+(?:is|was)|decision:|as\s+agreed|final\s+(?:plan|decision|choice)"
    r"|root\s+cause|the\s+(?:problem|issue|bug)\s+(?:is|was)\b|because\s+of\s+this,?\s+(?:i|we))"
    r"|(?:мы\s+решили|решено|решение:|договорились|итак,\s+выб|причина\s+(?:в\s+том|была|ошибки)"
    r"|окончательн\w+\s+(?:вариант|решени\w+))"
    r"|(?:我们决定|已决定|决定(?:采用|使用)|最终(?:方案|决定)|原因是|问题(?:在于|是))|(?:に決定しました|方針は|原因は|結論)",
    re.IGNORECASE,
)


def is_decision(text: str, role: str) -> bool:
    """True where a sentence decides, agrees, rules out or sets a rule."""
    return bool((_DECISION_USER if role == "user" else _DECISION_ASSISTANT).search(text))


_AGREES = re.compile(
    r"^\W*(?:y|yes|yep|yeah|yup|sure|ok|okay|confirm(?:ed)?|agreed?|correct|right|exactly|please do|do it"
    r"|go ahead|no|nope|[a-e]|option\s+\w+|the\s+(?:first|second|third|last)\b.*"
    r"|да|ага|угу|хорошо|ладно|конечно|верно|именно|согласен|согласна|подтверждаю|нет|не|давай(?:те)?"
    r"|первый|второй|третий|вариант\s+\S+"
    r"|是的?|好的?|对|可以|行|没错|确认|同意|嗯|不是?|不用|第[一二三四]\S{0,3}|はい|いいえ|お願いします|そうです|うん|ええ|네|예|아니요"
    r"|sí|si|vale|ja|nein|genau|oui|non|d'accord|\d{1,2})(?=\W|$)",
    re.IGNORECASE,
)


def is_answer(text: str) -> bool:
    """True where a short message only makes sense as the answer to a question."""
    return len(text) <= 120 and bool(_AGREES.search(text))


_ABOUT_SELF = re.compile(
    r"\b(?:(?:i'?m|i\s+am)\s+(?:an?\b|from\b|\d|allergic|vegetarian|vegan|based|called|(?-i:[A-Z]))"
    r"|my\s+\w+\s+(?:is|are|was|has)\b|my\s+name|call\s+me|remember\s+(?:that|my|this)"
    r"|i\s+(?:really\s+|also\s+)?(?:like|love|hate|live|work|own|use|study|prefer|enjoy|went|visited|bought"
    r"|met|watched)\b|i\s+have\s+(?:an?|two|three|\d)\b)"
    r"|\b(?:меня\s+зовут|запомни\w*|у\s+меня\s+\w+|мо[йяеи]\s+\w+|мы\s+с\s+\w+|я\s+(?:живу|работаю|люблю"
    r"|предпочитаю|ненавижу|учусь|родил\w+|купил\w*|езжу|ходил\w*|был[аи]?|вегетариан\w+))\b|нам\s+нужн\w+"
    r"|我(?:叫|姓|喜欢|很喜欢|爱|讨厌|住|家|是(?:一|个|做)|有(?:一|个|两)|的\S{1,6}是|去的是|今年|买了|看了|去了|养)|记住|(?:我们?的?名字)"
    r"|(?:私|僕|俺)は\S{1,20}(?:です|ます)|名前は|覚えて|(?:저는|제\s이름)"
    r"|\b(?:me\s+llamo|mi\s+\w+\s+es|vivo\s+en|ich\s+(?:heiße|wohne|arbeite|mag)|mein\w*\s+\w+\s+ist"
    r"|je\s+(?:m'appelle|suis\s+un)|j'(?:habite|aime))\b",
    re.IGNORECASE,
)


def is_about_self(text: str) -> bool:
    """True where users speak of themselves: names, tastes, what they have and want."""
    return bool(_ABOUT_SELF.search(text))


_FILLER = re.compile(
    r"^\W*(?:(?:ok(?:ay)?|sure|great|perfect|excellent|done|certainly|of\s+course|absolutely|hi|hello|hey"
    r"|thanks?|thank\s+you|you'?re\s+(?:right|welcome)|got\s+it|good|nice|cool|bye|goodbye|see\s+you"
    r"|i\s+see|alright|yes|no|understood|continue|go\s+on|well|good\s+(?:morning|day|evening)"
    r"|хорошо|ладно|отлично|конечно|готово|привет|здравствуйте|(?:большое\s+"
    r"|огромное\s+)?спасибо(?:\s+(?:большое|огромное|тебе|вам))?|до\s+свидания|пока|пожалуйста|понятно|ясно"
    r"|да|нет|продолжай(?:те)?|дальше|отличный\s+вопрос|добрый\s+(?:день|вечер)|доброе\s+утро"
    r"|好的?|谢谢你?|当然(?:可以|了)?|没问题|明白了?|你好啊?|嗨|继续|不客气|可以|嗯|是的|はい|ありがとう(?:ございます)?|了解(?:です)?|もちろん|続けて|こんにちは"
    r"|承知しました|네|감사합니다|계속)"
    r"[\s,.!?…，。！？、~～-]*)+$",
    re.IGNORECASE,
)


def is_filler(text: str) -> bool:
    """True for greetings, thanks and "go on": text that tells nothing."""
    return not any(ch.isalnum() for ch in text) or (bool(_FILLER.match(text[:80])) and len(text) <= 80)


_COURTESY = re.compile(
    r"\b(?:thanks?|thank\s+you|bye|appreciate|have\s+a\s+(?:great|nice|good)|спасибо|благодарю"
    r"|до\s+свидания|всего\s+доброго|хорошего\s+дня)\b|谢谢|再见|感谢|ありがとう|감사",
    re.IGNORECASE,
)


def without_filler(text: str) -> str:
    """`text` less its greetings and thanks; empty where nothing else is there."""
    parts = sentences(text)
    kept = [part for part in parts if not is_filler(part) and not (len(part) < 60 and _COURTESY.search(part))]
    return text if len(kept) == len(parts) else " ".join(kept)


# "continue", "go on": the newest request says nothing by itself, the one before it is what was going on
_CONTINUES = re.compile(
    r"^\W*(?:please\s+)?(?:continue|go\s+on|keep\s+going|proceed|resume|carry\s+on|next|продолжай(?:те)?"
    r"|дальше|давай\s+дальше|继续|接着|続けて|続き|계속|sigue|weiter)\b.{0,12}$",
    re.IGNORECASE,
)


def is_continue(text: str) -> bool:
    """True for "go on" in several languages."""
    return bool(_CONTINUES.match(text.strip()))


_THINKING = re.compile(
    r"<(think|thinking|reasoning|reflection|scratchpad)>[\s\S]*?(?:</\1>|\Z)", re.IGNORECASE
)
_CODE = re.compile(r"```[\s\S]*?(?:```|\Z)|~~~[\s\S]*?(?:~~~|\Z)")
_MARKDOWN = re.compile(
    r"^\s{0,3}(?:#{1,6}\s+|>\s?|\|)|\*\*|__(?=\w)|(?<=\w)__|^\s*[-*_=]{3,}\s*$", re.MULTILINE
)
_SPLIT = re.compile(r"(?<=[。！？；｡])[”」』）)]?\s*|(?<=[.!?…])[\"»”')\]]?\s+(?=[^\W_a-zа-яё]|[\"«“(\[]|$)")


def without_thinking(text: str) -> str:
    """`text` less the reasoning some models leave inside it."""
    return _THINKING.sub(" ", text) if "<" in text else text


def without_code(text: str) -> str:
    """Prose only: fenced code and the marks of headings and emphasis are left out."""
    return _MARKDOWN.sub("", _CODE.sub(" ", text))


_MARK = re.compile(r"^\s*(?:[-*+•·‣]\s+|\[[ xX]\]\s+|\d{1,3}[.)]\s+)+")


def sentences(text: str) -> list[str]:
    """Sentences of `text` in any script, each on one line, bullets and list numbers left out.

    A full stop ends a sentence only before a capital, a digit, a quote or another script: not in "5 руб. за
    штуку".
    """
    lines = (_MARK.sub("", line) for line in text.split("\n"))
    found = (" ".join(part.split()) for line in lines for part in _SPLIT.split(line) if part)
    return [
        part
        for part in found
        if any(not unicodedata.category(ch).startswith(("P", "S", "Z", "C")) for ch in part)
    ]
