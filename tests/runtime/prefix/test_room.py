"""Room that the cache promises can be made, whoever holds what together with whom."""

from __future__ import annotations

from collections import Counter

import pytest

from runtime.state.blocks import Blocks
from runtime.state.moves import Move
from runtime.state.prefix import CacheSettings, PrefixCache


@pytest.mark.parametrize("sharers", [0, 1, 2, 3])
def test_blocks_that_several_states_hold_together_come_free(sharers: int) -> None:
    """States of running requests hang below full blocks that nobody leases: none of them lets go of those alone."""
    moves: list[Move] = []
    blocks = Blocks(14)
    cache = PrefixCache(blocks, moves, 2, CacheSettings(num_checkpoints=8, interval=4))

    def publish(last: int, held: list[int]) -> None:
        row = cache.claim()
        assert row is not None
        assert cache.publish(cache.chain(""), [1, 2, 3, 4, last], 5, held, row, "prompt") is not None

    first = blocks.take(3)
    publish(5, first)
    tails = [blocks.take(1) for _ in range(sharers)]
    for i, tail in enumerate(tails):
        publish(6 + i, [*first[:2], *tail])
    for block in first:
        blocks.give(block)

    assert not cache.make_room(blocks.num_available + 1)
    assert cache.num_checkpoints == 1 + sharers
    wanted = blocks.num_available
    assert cache.make_room(wanted)
    assert blocks.num_free == wanted == 13 - sharers
    assert cache.evicted_blocks == 3
    cache.check()
    blocks.check(Counter(block for tail in tails for block in tail), cache.holdings())
