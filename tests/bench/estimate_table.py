"""Measures `pycontext.estimate_tokens` against the tokenizer, script by script, and prints a markdown table.

    python tests/bench/estimate_table.py [--dsn DSN] [--data DIR] [--encoding o200k_base] [--all]

Real messages come from DIR (`../shared/data` beside the checkout), translations from this machine's own
message catalogs, the rest is made here. The weights were fitted on texts whose sha256 starts with an even
byte; without --all only the others are measured.
"""

from __future__ import annotations

import argparse
import base64
import gettext
import hashlib
import json
import random
import string
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from pycontext.embedded import start as start_server
from pycontext.tokens import count

ROOT = Path(__file__).resolve().parents[2]
LONG_ENOUGH = 50  # tokens; a shorter text is held to "at most 2 tokens + 10% under" instead
CATALOGS = Path("/usr/share/locale")
CATALOG_LANGUAGES = "ja ko zh_CN zh_TW ru uk bg ar he th hi el de fr es pl tr vi it nl fi ga cy uz eu"

Sample = tuple[str, str]  # class, text


@dataclass(frozen=True)
class Row:
    """What the estimate did on one class of texts; shares and errors are parts of 1."""

    name: str
    texts: int
    under: float  # share of texts estimated under the count by more than 5%
    over: float  # how far over the count, on average
    worst: float  # the lowest estimate / count
    short_slack: float  # short texts: the least of estimate - (0.9 × count - 2), negative is too low
    microseconds: float  # per 1,000 characters


def is_held_out(text: str) -> bool:
    """Whether the weights were fitted without this text."""
    return hashlib.sha256(text.encode()).digest()[0] % 2 == 1


# Texts

SENTENCES: dict[str, list[str]] = {
    "japanese": [
        "昨日の会議で決まったことをもう一度まとめてください。",
        "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
        "エラーが出たので、ログを確認してから再起動しました。",
        "来週の金曜日までに見積書を送っていただけますか？",
        "この関数は引数を二つ取り、結果をリストで返します。",
        "申し訳ありませんが、その商品は現在在庫切れとなっております。",
        "東京から京都まで新幹線で二時間半くらいかかります。",
        "データベースの接続が切れた場合は、自動的に再接続されます。",
        "天気がいいから、散歩に行こうと思っています。",
        "パスワードを忘れた方は、こちらのリンクをクリックしてください。",
        "テストは全部通りましたが、カバレッジがまだ足りません。",
        "お客様のご注文番号を教えていただけますでしょうか。",
    ],
    "korean": [
        "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
        "어제 회의에서 결정된 내용을 다시 한번 정리해 주세요.",
        "오류가 발생해서 로그를 확인한 다음 다시 시작했습니다.",
        "다음 주 금요일까지 견적서를 보내 주실 수 있나요?",
        "비밀번호를 잊으셨다면 아래 링크를 눌러 주세요.",
        "데이터베이스 연결이 끊어지면 자동으로 다시 연결됩니다.",
        "날씨가 좋아서 산책을 하려고 합니다.",
    ],
    "arabic": [
        "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق.",
        "من فضلك لخص لي ما تم الاتفاق عليه في اجتماع الأمس.",
        "حدث خطأ في الاتصال بقاعدة البيانات، حاول مرة أخرى لاحقا.",
        "هل يمكنك إرسال الفاتورة قبل نهاية الأسبوع؟",
    ],
    "hebrew": [
        "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.",
        "אנא סכם בבקשה את מה שהוחלט בפגישה של אתמול.",
        "אירעה שגיאה בחיבור למסד הנתונים, נסה שוב מאוחר יותר.",
    ],
    "hindi": [
        "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
        "कृपया कल की बैठक में जो तय हुआ उसका सारांश बताइए।",
        "डेटाबेस से जुड़ने में समस्या आई, कृपया बाद में फिर कोशिश करें।",
    ],
    "thai": [
        "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
        "กรุณาสรุปสิ่งที่ตกลงกันในการประชุมเมื่อวานนี้",
        "เกิดข้อผิดพลาดในการเชื่อมต่อฐานข้อมูล โปรดลองอีกครั้งภายหลัง",
    ],
    "greek": [
        "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
        "Παρακαλώ κάνε μου μια περίληψη όσων αποφασίστηκαν στη χθεσινή συνάντηση.",
    ],
    "georgian": [
        "ყველა ადამიანი იბადება თავისუფალი და თანასწორი თავისი ღირსებითა და უფლებებით.",
        "გთხოვთ, შემიჯამოთ რა გადაწყდა გუშინდელ შეხვედრაზე.",
    ],
    "armenian": [
        "Բոլոր մարդիկ ծնվում են ազատ ու հավասար իրենց արժանապատվությամբ ու իրավունքներով։",
        "Խնդրում եմ ամփոփել, թե ինչ որոշվեց երեկվա հանդիպմանը։",
    ],
    "ukrainian": [
        "Всі люди народжуються вільними і рівними у своїй гідності та правах.",
        "Будь ласка, підсумуй, що ми вирішили на вчорашній зустрічі.",
        "Сталася помилка під час з'єднання з базою даних, спробуйте ще раз пізніше.",
    ],
    "german": [
        "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
        "Bitte fasse zusammen, was wir in der gestrigen Besprechung beschlossen haben.",
        "Beim Verbindungsaufbau zur Datenbank ist ein Fehler aufgetreten, bitte später erneut versuchen.",
    ],
    "vietnamese": [
        "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi.",
        "Vui lòng tóm tắt những gì đã được quyết định trong cuộc họp hôm qua.",
    ],
}
SENTENCE = (
    "the release went out today and every test is green please look at these numbers before you answer "
    "because we need to know what changed in this order and why it was late so that our customer can decide"
)
WORDS = SENTENCE.split()
EMOJI = list("😂❤🤣👍😭🙏😘🥰😍😊🎉😁💕🥺😅🔥🤦♥🤷🙄😆🤗😉🎂🤔👏🙂😳🥳😎👌💜😔💪✨💖👀😋😏😢👉")
SEQUENCES = ["👨\u200d👩\u200d👧\u200d👦", "🏳️\u200d🌈", "👩🏽\u200d💻", "🤦🏿\u200d♂️", "🇩🇪", "🇯🇵", "1️⃣", "❤️"]
BOX = "─│┌┐└┘├┤┬┴┼═║╔╗╚╝░▒▓█▀▄"
CHEROKEE = [chr(point) for point in range(0x13A0, 0x13F4)]
TIBETAN = [chr(point) for point in range(0x0F40, 0x0F6C)]


def made(r: random.Random) -> dict[str, Callable[[int], str]]:
    """Makers of texts of about n tokens, by class; the same seed gives the same texts."""

    def chars(alphabet: Iterable[str]) -> Callable[[int], str]:
        pool = list(alphabet)
        return lambda n: "".join(r.choice(pool) for _ in range(n))

    def span(first: int, last: int) -> Callable[[int], str]:
        return lambda n: "".join(chr(r.randrange(first, last + 1)) for _ in range(n))

    def lines(line: Callable[[int], str], tokens: int) -> Callable[[int], str]:
        return lambda n: "\n".join(line(i) for i in range(max(2, n // tokens)))

    def prose(name: str) -> Callable[[int], str]:
        return lambda n: " ".join(r.choice(SENTENCES[name]) for _ in range(max(3, n // 18)))

    def words(n: int) -> list[str]:
        return [r.choice(WORDS) for _ in range(n)]

    def hexdump(i: int) -> str:
        data = r.randbytes(16)
        shown = "".join(chr(b) if 32 <= b < 127 else "." for b in data)
        return f"{i * 16:08x}  {data.hex(' ')}  |{shown}|"

    def records(n: int) -> str:
        rows = [
            {
                "id": str(uuid.UUID(bytes=r.randbytes(16))),
                "price": r.randrange(9999) / 100,
                "name": " ".join(words(3)),
            }
            for _ in range(max(2, n // 45))
        ]
        return json.dumps(rows, indent=r.choice([None, 2]))

    def minified(n: int) -> str:
        names = [r.choice(string.ascii_letters) + r.choice(["", "e", "t", "1"]) for _ in range(n // 14 + 2)]
        bodies = (f"return {r.choice(WORDS)}.{name}&&!{name}[{r.randrange(99)}]" for name in names)
        return "".join(f"function {name}(e,t){{{body}}}" for name, body in zip(names, bodies, strict=True))

    def row(_: int) -> str:
        return ",".join(f"{r.uniform(-1e3, 1e5):.{r.choice([0, 2, 5])}f}" for _ in range(8))

    def cells(_: int) -> str:
        return "| " + " | ".join(f"{r.uniform(0, 9999):10.3f}" for _ in range(5)) + " |"

    def log(i: int) -> str:
        when = f"2024-03-1{i % 10}T12:{r.randrange(10, 60)}:00Z"
        return f"{when} INFO {r.choice(WORDS)} took {r.randrange(9999)}ms"

    def zalgo(n: int) -> str:
        marks = span(0x300, 0x36F)
        return "".join(r.choice("texting") + marks(r.randrange(1, 9)) for _ in range(n // 6 + 1))

    return {
        **{name: prose(name) for name in SENTENCES},
        "emoji": lambda n: " ".join(w + (r.choice(EMOJI) if r.random() < 0.4 else "") for w in words(n)),
        "emoji alone": chars(EMOJI),
        "emoji sequences": lambda n: "".join(r.choice(SEQUENCES) for _ in range(n // 4)),
        "base64": lambda n: base64.b64encode(r.randbytes(n)).decode(),
        "base64 lines": lambda n: base64.encodebytes(r.randbytes(n)).decode(),
        "base32": lambda n: base64.b32encode(r.randbytes(n)).decode(),
        "hex": lambda n: r.randbytes(n).hex(),
        "hex dump": lines(hexdump, 60),
        "sha256 sums": lines(lambda i: f"{r.randbytes(32).hex()}  file{i}.txt", 45),
        "UUIDs": lines(lambda _: str(uuid.UUID(bytes=r.randbytes(16))), 24),
        "digits": chars(string.digits),
        "CSV numbers": lines(row, 40),
        "table": lines(cells, 35),
        "log": lines(log, 24),
        "JSON records": records,
        "minified code": minified,
        "box drawing": lines(lambda _: "│ " + " ".join(words(4)).ljust(36) + " │", 8),
        "box pieces": chars(BOX),
        "ASCII art": lines(lambda _: "".join(r.choice("/\\|_-() oO*.") for _ in range(40)), 25),
        "punctuation": chars(string.punctuation),
        "random ASCII": chars(string.printable[:95]),
        "random letters": chars(string.ascii_lowercase),
        "random capitals": chars(string.ascii_uppercase),
        "capitals": lambda n: " ".join(words(n)).upper(),
        "long digits and words": lambda n: " ".join(f"{w}{r.randrange(10**6)}" for w in words(n // 3 + 2)),
        "Zalgo": zalgo,
        "rare Han": span(0x4E00, 0x9FFF),
        "rarer Han": span(0x20000, 0x2A6DF),
        "rare Hangul": span(0xAC00, 0xD7A3),
        "random Unicode": span(0xA0, 0xD7FF),
        "private use": span(0xE000, 0xF8FF),
        "beyond the BMP": span(0x10000, 0x1FFFF),
        "mathematical letters": span(0x1D400, 0x1D7CB),
        "Cherokee": chars(CHEROKEE),
        "Tibetan": chars(TIBETAN),
        "Ethiopic": span(0x1200, 0x1248),
        "one letter again and again": lambda n: r.choice("^=-#*aA0") * n,
    }


def generated(texts: int = 30, seed: int = 1) -> Iterator[Sample]:
    """Texts made here: `texts` of each class, from 15 to 1,500 tokens or so."""
    r = random.Random(seed)
    for name, make in made(r).items():
        for _ in range(texts):
            yield name, make(r.choice([15, 70, 70, 200, 1500]))


def unpromised(texts: int = 30, seed: int = 1) -> Iterator[Sample]:
    """Letters in no order that makes a word: here the estimate is low, and only how low is held."""
    r = random.Random(seed)
    alphabets = {
        "kana": (0x3041, 0x30FA),
        "Thai": (0x0E01, 0x0E3A),
        "Hebrew": (0x05D0, 0x05EA),
        "Arabic": (0x0621, 0x064A),
        "Devanagari": (0x0905, 0x0939),
        "Georgian": (0x10D0, 0x10F0),
        "Armenian": (0x0561, 0x0586),
        "Greek": (0x03B1, 0x03C9),
        "full-width": (0xFF01, 0xFF5E),
    }
    for name, (first, last) in alphabets.items():
        for _ in range(texts):
            words = (
                "".join(chr(r.randrange(first, last)) for _ in range(r.randrange(2, 10))) for _ in range(40)
            )
            yield f"not promised: random {name}", " ".join(words)


def stdlib_code(files: int = 300, seed: int = 1) -> Iterator[Sample]:
    """Pieces of Python's own library."""
    r = random.Random(seed)
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for _ in range(files):
        text = r.choice(paths).read_text(encoding="utf-8", errors="replace")
        size = r.choice([300, 1000, 3000, 10000, 40000])
        start = r.randrange(max(1, len(text) - size))
        yield "code (Python)", text[start : start + size]


def translations(seed: int = 1) -> Iterator[Sample]:
    """Message catalogs installed on this machine, some messages at a time; none where there are none."""
    r = random.Random(seed)
    for language in CATALOG_LANGUAGES.split():
        messages: list[str] = []
        for path in sorted(CATALOGS.glob(f"{language}/LC_MESSAGES/*.mo")):
            try:
                catalog = vars(gettext.GNUTranslations(path.open("rb")))["_catalog"]
            except (OSError, UnicodeDecodeError):
                continue
            messages += [
                translated
                for original, translated in catalog.items()
                if isinstance(translated, str)
                and translated != original
                and original
                and 8 < len(translated) < 2000
            ]
        r.shuffle(messages)
        for start in range(0, min(len(messages), 1500), 10):
            yield f"catalog {language}", "\n".join(messages[start : start + 10])


def _texts(message: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    content = message.get("content")
    for part in [{"text": content}] if isinstance(content, str) else content or []:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"], False
    for call in message.get("tool_calls") or []:
        arguments = (call.get("function") or call).get("arguments")
        if arguments is not None:
            yield arguments if isinstance(arguments, str) else json.dumps(arguments), True


def _kind(text: str, role: str, is_arguments: bool) -> str:
    han = sum("\u4e00" <= c <= "\u9fff" for c in text) / len(text)
    cyrillic = sum("\u0400" <= c <= "\u04ff" for c in text) / len(text)
    trimmed = text.strip()
    if is_arguments or (trimmed[:1] in "{[" and trimmed[-1:] in "}]"):
        return "JSON"
    if han > 0.25:
        return "Chinese"
    if cyrillic > 0.35:
        return "Russian"
    if role == "tool":
        return "tool results"
    return "mixed markdown" if "```" in text or "\n|" in text or "\n- " in text else "English"


def real(data: Path) -> Iterator[Sample]:
    """Messages of the real conversations in a folder, sorted by what they are."""
    seen: set[str] = set()
    for path in sorted(data.glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            for line in file:
                for message in json.loads(line)["messages"]:
                    for text, is_arguments in _texts(message):
                        if text.strip() and "\0" not in text and text not in seen:
                            seen.add(text)
                            yield _kind(text, message["role"], is_arguments), text


# Measuring


def estimate(conn: psycopg.Connection[Any], texts: list[str]) -> list[int]:
    """The database's estimate of each text."""
    found = conn.execute(
        "select pycontext.estimate_tokens(t.body)"
        " from unnest(%s::text[]) with ordinality t (body, place) order by t.place",
        [texts],
    )
    return [row[0] for row in found]


def measure(
    conn: psycopg.Connection[Any], samples: Iterable[Sample], encoding: str = "o200k_base"
) -> list[Row]:
    """One row for each class, in the order the classes come."""
    classes: dict[str, list[str]] = {}
    for name, text in samples:
        classes.setdefault(name, []).append(text)
    rows = []
    for name, texts in classes.items():
        estimate(conn, texts[:3])
        started = time.perf_counter()
        estimates = estimate(conn, texts)
        seconds = time.perf_counter() - started
        pairs = [(guess, count(text, encoding)) for guess, text in zip(estimates, texts, strict=True)]
        ratios = [guess / exact for guess, exact in pairs if exact >= LONG_ENOUGH]
        rows.append(
            Row(
                name=name,
                texts=len(ratios),
                under=sum(ratio < 0.95 for ratio in ratios) / max(len(ratios), 1),
                over=sum(ratios) / max(len(ratios), 1) - 1,
                worst=min(ratios, default=float("nan")),
                short_slack=min(
                    (guess - (0.9 * exact - 2) for guess, exact in pairs if exact < LONG_ENOUGH),
                    default=float("nan"),
                ),
                microseconds=seconds * 1e9 / sum(map(len, texts)),
            )
        )
    return rows


def markdown(rows: Iterable[Row]) -> Iterator[str]:
    """The lines of the table."""
    yield "| texts of 50 tokens up | number | under by >5% | over, mean | worst | µs per 1,000 chars |"
    yield "|---|---:|---:|---:|---:|---:|"
    for row in rows:
        if row.texts:
            yield (
                f"| {row.name} | {row.texts} | {row.under:.1%} | {row.over:+.0%} | {row.worst:.2f} "
                f"| {row.microseconds:.0f} |"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dsn", help="a database with the schema installed (default: the embedded server's)")
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of real conversations"
    )
    parser.add_argument("--encoding", default="o200k_base")
    parser.add_argument("--all", action="store_true", help="also the texts the weights were fitted on")
    args = parser.parse_args()
    samples = [*real(args.data), *stdlib_code(), *generated(), *translations(), *unpromised()]
    kept = [(name, text) for name, text in samples if args.all or is_held_out(text)]
    with psycopg.connect(args.dsn or start_server().dsn, autocommit=True) as conn:
        for line in markdown(measure(conn, kept, args.encoding)):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
