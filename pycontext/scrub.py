"""Take out of a model's words the blocks that only the model was to read: memory, summaries, notes.

So go blocks in the form that the renderer gives to tags in stored text (`<\\memory-context>`). The two forms
do not end each other: in a block of memory, a tag that somebody once typed is text.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

__all__ = ["Scrubber", "ascrub_stream", "scrub", "scrub_stream"]

NAMES = ("memory-context", "chat-summary", "turn-context", "system-note")

# A longer thing is no tag: what may still become one is all that is ever held back.
_LONGEST = 128

# What is left is copied at every tag: a long text goes in pieces.
_AT_ONCE = 4096

_TAG = re.compile(
    rf"<(?P<escape>[\\\s]*)(?P<closing>/?)\s*(?P<name>{'|'.join(NAMES)})(?:\s[^<>]*(?<!/))?>",
    re.IGNORECASE | re.ASCII,
)


def _beginnings(name: str) -> str:
    """A pattern of all that a tag's name, and what follows it, may begin with."""
    pattern = r"(?:\s[^<>]*)?"
    for letter in reversed(name):
        pattern = f"(?:{letter}{pattern})?"
    return pattern


_BEGINNING = re.compile(rf"<[\\\s]*/?\s*(?:{'|'.join(map(_beginnings, NAMES))})", re.IGNORECASE | re.ASCII)


def _kind(tag: re.Match[str]) -> tuple[str, bool]:
    return tag["name"].lower(), "\\" in tag["escape"]


class Scrubber:
    """The same for a stream: `feed` every piece, then `flush`; together they return what `scrub` would.

    Pieces may be cut anywhere. At most a few hundred characters are kept between two calls, however long a
    block is. A block that is not closed goes to the end.
    """

    def __init__(self) -> None:
        #: How many characters were taken out so far.
        self.removed = 0
        self._reset()

    def _reset(self) -> None:
        self._rest = ""  # not decided yet: may be a tag, once more of it is there
        self._stem = ""  # text before the block; with what follows it, it could read as a tag
        self._kind = ("", False)  # of the block that is open: its tag, and in which form
        self._depth = 0

    def feed(self, text: str) -> str:
        """The text that is certain by now."""
        told: list[str] = []
        for at in range(0, len(text), _AT_ONCE):
            left = self._rest + text[at : at + _AT_ONCE]
            self._rest = ""
            while left:
                left = self._inside(left) if self._depth else self._outside(left, told)
        return "".join(told)

    def flush(self) -> str:
        """The end of the stream: the text that was held back. The scrubber can be used for another stream."""
        told = self._stem
        if self._depth:
            self.removed += len(self._rest)
        else:
            told += self._rest
        self._reset()
        return told

    def _outside(self, text: str, told: list[str]) -> str:
        """Tell text up to the first tag; returns what is to be read on after it."""
        start = at = text.find("<")
        while at >= 0:
            tag = _TAG.match(text, at, at + _LONGEST)
            if tag:
                told.append(text[:start])
                self.removed += tag.end() - at
                stem = text[start:at]
                if tag["closing"]:  # of nothing that was open
                    return stem + text[tag.end() :]
                self._stem, self._kind, self._depth = stem, _kind(tag), 1
                return text[tag.end() :]
            if len(text) - at < _LONGEST and _BEGINNING.fullmatch(text, at):
                told.append(text[:start])
                self._rest = text[start:]
                return ""
            before, at = at, text.find("<", at + 1)
            if at < 0 or at - before >= _LONGEST or not _BEGINNING.fullmatch(text, before, at):
                start = at
            else:
                start = before
        told.append(text)
        return ""

    def _inside(self, text: str) -> str:
        """Drop text up to the end of the block; returns what is to be read on after it."""
        at = text.find("<")
        while at >= 0:
            tag = _TAG.match(text, at, at + _LONGEST)
            if tag:
                if _kind(tag) == self._kind:
                    self._depth += -1 if tag["closing"] else 1
                at = tag.end()
                if not self._depth:
                    self.removed += at
                    stem, self._stem = self._stem, ""
                    return stem + text[at:]
            elif len(text) - at < _LONGEST and _BEGINNING.fullmatch(text, at):
                break
            else:
                at += 1
            at = text.find("<", at)
        else:
            at = len(text)
        self.removed += at
        self._rest = text[at:]
        return ""


_FENCE = re.compile(rf"<(?=[\\/\s]*(?:{'|'.join(NAMES)}))", re.IGNORECASE)


def escaped(text: str) -> str:
    """`text` with one character put into each of its tags, as the renderer does it. SQL: _escape_fences."""
    return _FENCE.sub(r"<\\", text)


def scrub(text: str) -> str:
    """`text` without what only the model was to read: `<memory-context>…</memory-context>`, summaries, notes.

    For what is shown to people and stored as the reply. Nested blocks go whole, one that is not closed goes
    to the end, a closing tag alone goes alone; all else stays as it is. For streams: `Scrubber`.
    """
    scrubber = Scrubber()
    return scrubber.feed(text) + scrubber.flush()


def scrub_stream(pieces: Iterable[str | None]) -> Iterator[str]:
    """The pieces of a stream, scrubbed; None and what comes to nothing are left out."""
    scrubber = Scrubber()
    for piece in pieces:
        if piece and (text := scrubber.feed(piece)):
            yield text
    if text := scrubber.flush():
        yield text


async def ascrub_stream(pieces: AsyncIterable[str | None]) -> AsyncIterator[str]:
    """`scrub_stream` for an async stream."""
    scrubber = Scrubber()
    async for piece in pieces:
        if piece and (text := scrubber.feed(piece)):
            yield text
    if text := scrubber.flush():
        yield text
