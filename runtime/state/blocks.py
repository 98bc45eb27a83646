"""KV blocks: each is free, leased (by one request or by several), or cached: held by the prefix cache alone."""

from __future__ import annotations

from collections import Counter

from runtime.api import StateError


class Blocks:
    """Counts who holds blocks `1..num_blocks-1`. A block comes free when no lease and no cache entry holds it."""

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks - 1
        self.num_cached = 0
        self._free = list(range(num_blocks - 1, 0, -1))
        self._leased = [0] * num_blocks
        self._cached = [0] * num_blocks
        self._vacated: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks a lease can have: free ones, and those that only the cache holds."""
        return len(self._free) + self.num_cached

    def is_leased(self, block: int) -> bool:
        """Whether a request holds it, so that dropping cache entries does not free it."""
        return self._leased[block] > 0

    def take(self, count: int) -> list[int]:
        """Leases `count` free blocks."""
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._leased[block] = 1
        return taken

    def share(self, block: int) -> None:
        """One more lease holds a cached block."""
        if not self._cached[block]:
            raise StateError(f"block {block} is not cached, so it cannot be shared")
        self.num_cached -= not self._leased[block]
        self._leased[block] += 1

    def give(self, block: int) -> None:
        """One lease less."""
        if not self._leased[block]:
            raise StateError(f"block {block} is given back twice")
        self._leased[block] -= 1
        if not self._leased[block]:
            if self._cached[block]:
                self.num_cached += 1
            else:
                self._vacate(block)

    def keep(self, block: int) -> None:
        """One more cache entry holds a block that is in use already."""
        if not self._leased[block] and not self._cached[block]:
            raise StateError(f"block {block} is free, so there is nothing to cache")
        self._cached[block] += 1

    def drop(self, block: int) -> None:
        """One cache entry less."""
        if not self._cached[block]:
            raise StateError(f"block {block} is not cached")
        self._cached[block] -= 1
        if not self._cached[block] and not self._leased[block]:
            self.num_cached -= 1
            self._vacate(block)

    def drain_vacated(self) -> tuple[int, ...]:
        """Blocks that came free since the last call."""
        vacated, self._vacated = tuple(self._vacated), []
        return vacated

    def check(self, leased: Counter[int], cached: Counter[int]) -> None:
        """Raises unless the counts are these, and every block is free, leased or cached."""
        numbers = range(1, self.total + 1)
        free = set(self._free)
        if len(free) != len(self._free) or not free <= set(numbers):
            raise StateError("a block is free twice, or is none")
        for block in numbers:
            if self._leased[block] != leased[block] or self._cached[block] != cached[block]:
                raise StateError(
                    f"block {block} counts {self._leased[block]} leases and {self._cached[block]} cache entries, "
                    f"but {leased[block]} and {cached[block]} hold it"
                )
            if (block in free) is not (leased[block] == cached[block] == 0):
                raise StateError(f"block {block} leaked, or is free while it is held")
        only = sum(1 for block in numbers if cached[block] and not leased[block])
        if only != self.num_cached or leased[0] or cached[0]:
            raise StateError(f"{only} blocks are cached alone, not {self.num_cached}")

    def _vacate(self, block: int) -> None:
        self._free.append(block)
        self._vacated.append(block)
