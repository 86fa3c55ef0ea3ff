"""Secrets are masked, ordinary text is not, and nothing is ever raised."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycontext.masking import MASK, mask

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
PRIVATE = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA7\nabcdef\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("API_KEY=sk-test-0000000000000000", "sk-test-0000000000000000"),
        ("key sk-proj-AbCdEf0123456789_xyz ok", "sk-proj-AbCdEf0123456789_xyz"),
        ("sk-ant-api03-AAAAbbbbCCCC", "sk-ant-api03-AAAAbbbbCCCC"),
        ("aws AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalrXUtnFEMI"),
        ("ghp_0123456789abcdefghijABCDEFGHIJ012345", "ghp_0123456789"),
        ("github_pat_11ABCDEFG0abcdefghijkl_mnopqrs", "github_pat_11"),
        ("xoxb-1234567890-abcdefghijkl", "xoxb-1234567890"),
        ("https://hooks.slack.com/services/T000/B000/XXXXXXXX", "T000/B000"),
        ("Authorization: Bearer abcdef0123456789abcdef", "abcdef0123456789"),
        ("curl -H 'Authorization: Basic dXNlcjpwYXNzd29yZA=='", "dXNlcjpwYXNzd29yZA"),
        (f"token {JWT}", "eyJzdWIiOiIxMjM0NTY3ODkwIn0"),
        ("postgres://u:pw@h/db", "pw@"),
        ("see https://user:s3cr3t!@example.com/x", "s3cr3t"),
        ("redis://:hunter2@localhost", "hunter2"),
        ("password=hunter2", "hunter2"),
        ("PGPASSWORD=hunter2 psql", "hunter2"),
        ('{"password": "correct horse battery"}', "correct horse"),
        ('{\\"api_key\\": \\"abcd1234efgh\\"}', "abcd1234efgh"),
        ("db_password: 'p@ss word'", "p@ss word"),
        ("client_secret => zzz-999-yyy", "zzz-999-yyy"),
        ("mysql --password=abc123 -u root", "abc123"),
        ("пароль: qwerty123", "qwerty123"),
        ("мой пароль это qwerty123!", "qwerty123"),
        ("пароль от почты: Tiger2024", "Tiger2024"),
        ("токен: abcd1234efgh", "abcd1234efgh"),
        ("ключ API: 9f8e7d6c5b4a", "9f8e7d6c5b4a"),
        ("API-ключ = 9f8e7d6c5b4a", "9f8e7d6c5b4a"),
        ("секретный ключ: x9y8z7w6", "x9y8z7w6"),
        ("postgres://u:p@ss9@h/db", "ss9"),
        ("密码是 abc12345", "abc12345"),
        (PRIVATE, "MIIEowIBAAKCAQEA7"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA", "b3BlbnNzaC1rZXktdjEA"),
    ],
)
def test_secret_is_masked(text: str, secret: str) -> None:
    masked = mask(text)
    assert secret not in masked
    assert MASK in masked
    assert mask(masked) == masked, "masking twice changes nothing"


@pytest.mark.parametrize(
    "text",
    [
        "The token budget is 4000 tokens and the password field is required.",
        "https://example.com/a/b?x=1#frag and mail to a@b.example",
        "time 12:30:45, ratio 1:2, path /etc/passwd, task-skeleton, risk-averse",
        "def get_token(self): return self.token",
        "Я забыл пароль и хочу его сменить",
        "Мой секрет: терпение. Ключ: под ковриком, токен у Анны",
        "密码不能为空",
        "commit 0f3c2b1a9d8e7f6a5b4c3d2e1f0a9b8c7d6e5f4a",
        "user_id: mia_li_3668, ticket QX-4471, b-17",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert mask(text) == text


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec=None), max_size=400))
def test_never_raises(text: str) -> None:
    assert isinstance(mask(text), str)


def test_takes_anything() -> None:
    assert mask(None) == ""  # type: ignore[arg-type]
    assert mask("\ud83d password=hunter2 \x00") == f"\ud83d password={MASK} \x00"


@pytest.mark.parametrize(
    "unit", ["a", "-----BEGIN PRIVATE KEY-----", "password=", "://a:", "eyJ", " ", "sk-", "\n", "Bearer "]
)
def test_hostile_text_costs_little(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    started = time.process_time()
    mask(text)
    assert time.process_time() - started < 5


def test_long_text_is_masked_to_its_end() -> None:
    text = ("x" * 99 + "\n") * 10_000 + "password=hunter2"
    assert "hunter2" not in mask(text)
