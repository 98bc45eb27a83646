"""The model directory's tokenizer: text to ids, ids to bytes, and which strings are control markers.

Everything is read from `tokenizer.json`; no code of a model directory is ever executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from runtime.api import ConfigError

MARKER = re.compile(r"[<\[|].*[>\]|]", re.DOTALL)


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: printable Latin-1 as itself, the rest from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


class TextTokenizer:
    """Owns the tokenizer of one model. Safe to use from several threads."""

    def __init__(self, data: str) -> None:
        self._spec: dict[str, Any] = json.loads(data)
        self._full = Tokenizer.from_str(data)
        self.vocab_size: int = self._full.get_vocab_size(with_added_tokens=True)
        added: list[dict[str, Any]] = self._spec.get("added_tokens", [])
        self.special_ids = frozenset(int(token["id"]) for token in added if token.get("special"))
        # Strings that steer the model when the template writes them, and must stay text when a user does.
        self.markers: dict[str, int] = {
            token["content"]: int(token["id"])
            for token in added
            if token["content"].strip() and (token.get("special") or MARKER.fullmatch(token["content"]))
        }
        self.max_token_chars = max((len(token) for token in self._full.get_vocab()), default=1)

    @classmethod
    def load(cls, model_dir: Path) -> TextTokenizer:
        """Reads `tokenizer.json`; raises ConfigError with one sentence."""
        path = model_dir / "tokenizer.json"
        try:
            return cls(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ConfigError(f"{path} is not a tokenizer file.") from error

    def warm(self) -> None:
        """Computes the tables a request would otherwise wait for."""
        _ = self.marker_pattern, self.token_bytes

    @cached_property
    def marker_pattern(self) -> re.Pattern[str] | None:
        """Finds markers, the longest first; None when the model has none."""
        if not self.markers:
            return None
        return re.compile("|".join(re.escape(text) for text in sorted(self.markers, key=len, reverse=True)))

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same tokenizer, blind to markers: what they are made of, as ordinary text."""
        spec = dict(self._spec)
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in self.markers]
        spec["post_processor"] = None
        return Tokenizer.from_str(json.dumps(spec))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to ids; markers in the text are control tokens."""
        ids: list[int] = self._full.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_as_text(self, text: str) -> list[int]:
        """Text to ids; markers in the text stay text."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if self._marker_ids.isdisjoint(ids):
            return ids
        # A vocabulary that also holds the marker as an ordinary word: take it apart.
        return [id_ for char in text for id_ in self._plain.encode(char, add_special_tokens=False).ids]

    @cached_property
    def _marker_ids(self) -> frozenset[int]:
        return frozenset(self.markers.values())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The library's own decoding of a whole sequence."""
        text: str = self._full.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...] | None:
        """The bytes of every token, when decoding is byte-level; None for other kinds of decoder."""
        decoder = self._spec.get("decoder") or {}
        steps = decoder.get("decoders", [decoder])
        if [step.get("type") for step in steps] != ["ByteLevel"]:
            return None
        alphabet = byte_alphabet()
        table = [b""] * (1 + max(self._full.get_vocab(with_added_tokens=True).values(), default=0))
        for token, id_ in self._full.get_vocab(with_added_tokens=True).items():
            try:
                table[id_] = bytes([alphabet[char] for char in token])
            except KeyError:
                table[id_] = token.encode()
        return tuple(table)

    def piece_bytes(self, id_: int) -> bytes:
        """One token's bytes, as good as the decoder allows."""
        table = self.token_bytes
        if table is None:
            return self.decode([id_], skip_special_tokens=False).encode()
        return table[id_] if id_ < len(table) else b""
