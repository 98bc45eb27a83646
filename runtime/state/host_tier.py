"""The second tier of the prefix cache: checkpoints that the device had no room for, with their KV, in host memory.

Books only. A host checkpoint is whole: its state, and every block of its text, which it shares with others of the same
beginning. Least recently used first, it is forgotten when the bytes run out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.api import StateError
from runtime.state.moves import Forgotten, Move


class Keys(Protocol):
    """Digests of the beginnings of a text, as `runtime.state.prefix.Chain` makes them."""

    def key(self, tokens: Sequence[int], num_blocks: int) -> bytes:
        """The digest of the first blocks."""


@dataclass(slots=True, eq=False)
class HostCheckpoint:
    """A state after `num_tokens` tokens in host row `row`. `keys` are the digests of its full blocks, one by one;
    `parent` is the last of them (or the digest of no block); `blocks` hold their KV and `tail_block` that of `tail`.
    """

    num_tokens: int
    parent: bytes
    tail: tuple[int, ...]
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    tail_block: int
    row: int
    pins: int = 0


class HostTier:
    """Host blocks and rows by number; numbers never repeat. With `max_bytes` 0 it takes nothing."""

    def __init__(self, max_bytes: int, block_bytes: int, state_bytes: int, moves: list[Move]) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._block_bytes = block_bytes
        self._state_bytes = state_bytes
        self._moves = moves
        self._blocks: dict[bytes, int] = {}
        self._holders: dict[bytes, int] = {}
        self._tails: dict[bytes, list[HostCheckpoint]] = {}
        self._recent: dict[int, HostCheckpoint] = {}  # by row, least recently used first
        self._next = 0

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints held."""
        return len(self._recent)

    @property
    def capacity(self) -> int:
        """Checkpoints of the shortest texts that would fit."""
        return self.max_bytes // (self._state_bytes + self._block_bytes)

    def find(
        self, chain: Keys, tokens: Sequence[int], *, limit: int, above: int, block_size: int
    ) -> HostCheckpoint | None:
        """The deepest checkpoint of `tokens` with more than `above` and at most `limit` tokens."""
        if not self._recent:
            return None
        for depth in range((limit - 1) // block_size, above // block_size - 1, -1):
            found: HostCheckpoint | None = None
            for each in self._tails.get(chain.key(tokens, depth), ()):
                n = each.num_tokens
                deeper = above < n <= limit and (found is None or n > found.num_tokens)
                if deeper and tuple(tokens[depth * block_size : n]) == each.tail:
                    found = each
            if found is not None:
                return found
        return None

    def touch(self, checkpoint: HostCheckpoint) -> None:
        """It was used."""
        if self._recent.pop(checkpoint.row, None) is not None:
            self._recent[checkpoint.row] = checkpoint

    def take(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        *,
        parent: bytes,
        tail: tuple[int, ...],
        tail_block: int,
        num_tokens: int,
    ) -> tuple[HostCheckpoint, tuple[tuple[int, int], ...]] | None:
        """Makes room for a checkpoint, and says which device blocks must be copied, as (device block, host block).

        None when it is here already, or can never fit.
        """
        if any(each.tail == tail for each in self._tails.get(parent, ())):
            return None
        if self._state_bytes + (len(keys) + 1) * self._block_bytes > self.max_bytes:
            return None
        while True:
            missing = [(key, block) for key, block in zip(keys, blocks, strict=True) if key not in self._blocks]
            needed = self._state_bytes + (len(missing) + 1) * self._block_bytes
            if self.used_bytes + needed <= self.max_bytes:
                break
            oldest = next((each for each in self._recent.values() if not each.pins), None)
            if oldest is None:
                return None
            self.forget(oldest)
        copies = []
        for key, block in missing:
            self._blocks[key] = self._number()
            copies.append((block, self._blocks[key]))
        for key in keys:
            self._holders[key] = self._holders.get(key, 0) + 1
        in_host = tuple(self._blocks[key] for key in keys)
        found = HostCheckpoint(num_tokens, parent, tail, tuple(keys), in_host, self._number(), self._number())
        copies.append((tail_block, found.tail_block))
        self.used_bytes += needed
        self._tails.setdefault(parent, []).append(found)
        self._recent[found.row] = found
        return found, tuple(copies)

    def forget(self, checkpoint: HostCheckpoint) -> None:
        """Lets go of a checkpoint, and of blocks that no other needs."""
        if self._recent.pop(checkpoint.row, None) is None:
            return
        siblings = self._tails[checkpoint.parent]
        siblings.remove(checkpoint)
        if not siblings:
            del self._tails[checkpoint.parent]
        gone = [checkpoint.tail_block]
        for key in checkpoint.keys:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                gone.append(self._blocks.pop(key))
        self.used_bytes -= self._state_bytes + len(gone) * self._block_bytes
        self._moves.append(Forgotten(tuple(gone), (checkpoint.row,)))

    def check(self) -> None:
        """Raises unless the bytes are those of what is held, and within the bound."""
        size = len(self._recent) * (self._state_bytes + self._block_bytes) + len(self._blocks) * self._block_bytes
        if size != self.used_bytes or size > self.max_bytes:
            raise StateError(f"host memory holds {size} bytes, counts {self.used_bytes} and may use {self.max_bytes}")
        if sum(self._holders.values()) != sum(len(each.keys) for each in self._recent.values()):
            raise StateError("host blocks leaked")

    def _number(self) -> int:
        self._next += 1
        return self._next
