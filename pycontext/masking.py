"""Secrets are masked before text goes to a summarizer and before what came back is stored. Never raises."""

from __future__ import annotations

import re

MASK = "[masked]"

_KEY_NAME = (
    r"(?:[A-Za-z0-9_.-]{0,40}(?:passw(?:or)?d|passphrase|passwd|secret|api[_-]?key|apikey|access[_-]?key"
    r"|private[_-]?key"
    r"|auth[_-]?token|access[_-]?token|refresh[_-]?token|client[_-]?secret|credentials?)[A-Za-z0-9_-]{0,20}"
    r"|pwd|pass|token|пароль(?:\s(?:от|для|к)\s\S{1,40})?|токен|секретный\sключ|секрет|ключ\sapi"
    r"|(?:api|апи)[\s-]?ключ|密码|密碼|パスワード)"
)

_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    # keys known by their shape
    (re.compile(r"(?<![A-Za-z0-9])sk-(?:ant-|proj-|or-|live-|test-|svcacct-)?[A-Za-z0-9_-]{8,}"), MASK),
    (re.compile(r"(?<![A-Za-z0-9])(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{8,}"), MASK),
    (re.compile(r"(?<![A-Za-z0-9])(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,20}(?![A-Za-z0-9])"), MASK),
    (
        re.compile(
            r"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}"
            r"|glpat-[A-Za-z0-9_-]{16,})"
        ),
        MASK,
    ),
    (re.compile(r"(?<![A-Za-z0-9])xox[abeoprs]-[A-Za-z0-9-]{8,}"), MASK),
    (re.compile(r"(?<![A-Za-z0-9])xapp-[A-Za-z0-9-]{8,}"), MASK),
    (re.compile(r"(?<=hooks\.slack\.com/services/)[A-Za-z0-9/]{8,}"), MASK),
    (re.compile(r"(?<![A-Za-z0-9])AIza[A-Za-z0-9_-]{30,}"), MASK),
    (re.compile(r"(?<![A-Za-z0-9])(?:npm_|hf_|pypi-|dop_v1_|sntrys_|r8_)[A-Za-z0-9_-]{16,}"), MASK),
    (re.compile(r"(?<![A-Za-z0-9])(?:bot)?\d{8,10}:AA[A-Za-z0-9_-]{30,}"), MASK),
    (re.compile(r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]{6,}(?:\.[A-Za-z0-9_-]*)?"), MASK),
    # user:password@ in any URL
    (
        re.compile(r"(?P<head>[A-Za-z][A-Za-z0-9+.-]{1,30}://[^\s/:@'\"<>]{0,200}:)[^\s/'\"<>]{1,300}(?=@)"),
        f"\\g<head>{MASK}",
    ),
    # headers
    (
        re.compile(
            r"(?P<head>\b(?:bearer|basic"
            r"|token)\s+)(?=[A-Za-z0-9._~+/=-]*[0-9._~+/=-])[A-Za-z0-9._~+/=-]{12,}",
            re.I,
        ),
        f"\\g<head>{MASK}",
    ),
    (
        re.compile(
            r"(?P<head>\b(?:authorization|x-api-key|cookie|set-cookie)[\"']?\s*[:=]\s*[\"']?(?:bearer "
            r"|basic )?)(?!\[masked)[^\s\"',;]{6,}",
            re.I,
        ),
        f"\\g<head>{MASK}",
    ),
    # name = value, "name": "value", --name value
    (
        re.compile(
            rf"(?P<head>(?<![A-Za-z0-9]){_KEY_NAME}\\?[\"']?\s*(?:=|:|：|=>)\s*)"
            r"(?P<open>\\?[\"'])(?!\[masked)(?P<value>(?:(?!(?P=open))[^\n]){1,400}?)(?P=open)",
            re.I,
        ),
        f"\\g<head>\\g<open>{MASK}\\g<open>",
    ),
    (
        re.compile(
            rf"(?P<head>(?<![A-Za-z0-9]){_KEY_NAME}[\"']?\s*(?:=|：|=>)\s*"
            rf"|(?<![A-Za-z0-9])--{_KEY_NAME}[ =]\s*"
            rf"|(?<![A-Za-z0-9]){_KEY_NAME}[\"']?\s*:\s*(?=\S{{0,80}}[0-9!@#$%^&*_-]))"
            r"(?![\"'\[<({$]|null\b|none\b|true\b|false\b|undefined\b)[^\s\"',;&<>()\\]{3,}",
            re.I,
        ),
        f"\\g<head>{MASK}",
    ),
    (
        re.compile(
            r"(?P<head>\b(?:password|passphrase|api key|secret key|пароль|密码|密碼|パスワード)"
            r"\s*(?:is|это|—|-|是|は|为)\s*)"
            r"(?=\S{0,60}[0-9!@#$%^&*_])[^\s\"',;，。]{4,}",
            re.I,
        ),
        f"\\g<head>{MASK}",
    ),
)

_PRIVATE_KEY = re.compile(r"-----BEGIN ([A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?)-----")
_KEY_SIZE = 20_000

_CHUNK = 200_000


def mask(text: str) -> str:
    """`text` with secrets replaced by `[masked]`; whatever goes wrong, text comes back and nothing is
    raised."""
    if not text or not isinstance(text, str):
        return text if isinstance(text, str) else ""
    parts = []
    while len(text) > _CHUNK:
        cut = text.rfind("\n", _CHUNK // 2, _CHUNK) + 1 or _CHUNK
        parts.append(_masked(text[:cut]))
        text = text[cut:]
    return "".join((*parts, _masked(text)))


def _without_private_keys(text: str) -> str:
    """`text` with the bodies of private keys masked, also of keys whose end is missing."""
    parts = []
    start = 0
    for begin in _PRIVATE_KEY.finditer(text):
        if begin.start() < start:
            continue
        end_line = f"-----END {begin[1]}-----"
        end = text.find(end_line, begin.end(), begin.end() + _KEY_SIZE)
        if end < 0:
            blank = text.find("\n\n", begin.end(), begin.end() + _KEY_SIZE)
            following = text.find("-----BEGIN ", begin.end(), begin.end() + _KEY_SIZE)
            end = min((at for at in (blank, following) if at >= 0), default=begin.end() + _KEY_SIZE)
        else:
            end += len(end_line)
        parts += [text[start : begin.end()], f" {MASK}"]
        start = end
    return "".join((*parts, text[start:])) if parts else text


def _masked(text: str) -> str:
    if "PRIVATE KEY" in text:
        text = _without_private_keys(text)
    for pattern, replacement in _PATTERNS:
        try:
            text = pattern.sub(replacement, text)
        except Exception:  # noqa: BLE001  masking must never stop a pass
            continue
    return text
