"""Token ids to text as they come. Owns the bytes of a character that is not complete yet.

However the ids are cut into deltas, the pieces put together equal the tokenizer's decoding of the whole sequence, and
no piece holds half a character.
"""

from __future__ import annotations

import codecs
from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from server.tokenizer import TextTokenizer

REPLACEMENT = "\ufffd"
MOST_BYTES = 4  # of a character


class Detokenizer(Protocol):
    """Incremental decoding of one sequence."""

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> str:
        """The text these ids complete."""

    @abstractmethod
    def flush(self) -> str:
        """What is left at the end: U+FFFD where a character was never completed."""


class ByteDetokenizer(Detokenizer):
    """For byte-level vocabularies: a table of bytes and an incremental UTF-8 decoder."""

    def __init__(self, table: tuple[bytes, ...], hidden: frozenset[int]) -> None:
        self._table = table
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        """See `Detokenizer`. Ids past the vocabulary (padding rows of a model) have no text."""
        table, hidden = self._table, self._hidden
        size = len(table)
        return self._decoder.decode(b"".join([table[i] for i in ids if i not in hidden and i < size]))

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """For every other decoder: decodes a short window twice and releases the difference."""

    def __init__(self, tokenizer: TextTokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # where the window begins
        self._read = 0  # ids before this have been released

    def feed(self, ids: Sequence[int]) -> str:
        """See `Detokenizer`."""
        self._ids.extend(ids)
        return self._release(final=False)

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        before = self._decode(self._read)
        for cut in range(1 if final else MOST_BYTES):  # the ids behind the last whole character wait
            end = len(self._ids) - cut
            if end <= self._read:
                return ""
            after = self._decode(end)
            if final or not after.endswith(REPLACEMENT):
                return self._take(end, after[len(before) :])
        if len(self._ids) - self._read < 2 * MOST_BYTES:
            return ""
        end = len(self._ids)  # no character takes this many ids: it is broken for good
        return self._take(end, self._decode(end)[len(before) :])

    def _take(self, end: int, text: str) -> str:
        if text:
            self._start, self._read = self._read, end
        return text

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._start : end], skip_special_tokens=self._skip)


def detokenizer(tokenizer: TextTokenizer, *, skip_special_tokens: bool) -> Detokenizer:
    """The right one for this vocabulary."""
    if tokenizer.token_bytes is None:
        return WindowDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    return ByteDetokenizer(tokenizer.token_bytes, hidden)
