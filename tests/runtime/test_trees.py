"""A commit along a path that is not the identity: draft trees, on both strategies, in the backends' own hands.

The state, the convolution window and the KV afterwards are those of the accepted path alone.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import pytest
import torch

from runtime.engine import Engine
from tests.support.engines import engine_of, pair, tokens_of
from tests.support.oracle import check, ref
from tests.support.steps import DECODE, PREFILL, VERIFY, Feed, Hand, Held

MODELS = ("qwen", "granite")
WAYS = [("snapshot", "replay", "decode"), ("replay", "snapshot", "decode"), ("replay", "snapshot", "prefill")]


@functools.cache
def engine(name: str, way: tuple[str, str, str]) -> Engine:
    return engine_of(name, speculative="ngram:7", num_blocks=400, max_num_seqs=10, **pair(*way))


@pytest.fixture
def hand(name: str, way: tuple[str, str, str]) -> Iterator[Hand]:
    hand = Hand(engine(name, way))
    yield hand
    hand.close()


def random_tree(held: Held, chance: random.Random, most: int = 8) -> tuple[Feed, list[int]]:
    """A row whose nodes hang anywhere under the first, and a path from there down to some node."""
    size = chance.randint(1, most)
    parents = (-1, *(chance.randrange(node) for node in range(1, size)))
    node, path = chance.randrange(size), []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return Feed(held, VERIFY, tokens_of(chance.randrange(10**6), size), parents), path


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_random_trees(name: str, way: tuple[str, str, str], hand: Hand) -> None:
    """Several rows of different shapes in a step; trees, chains, decoding and prefill take turns."""
    chance = random.Random(repr((name, way)))
    helds = [hand.admit(f"h{i}", 100) for i in range(4)]
    hand.step(*(Feed(held, PREFILL, tokens_of(i, 1 + 3 * i)) for i, held in enumerate(helds)))
    looks = {held: [hand.look(held)] for held in helds}
    bent = 0
    for step in range(10):
        trees = [random_tree(held, chance) for held in helds]
        kept = [len(path) for _, path in trees]
        paths = [path + [0] * (8 - len(path)) for _, path in trees]
        bent += sum(path != list(range(len(path))) for _, path in trees)
        hand.step(*(feed for feed, _ in trees), kept=kept, paths=paths)
        if step % 3 == 1:
            hand.step(*(Feed(held, DECODE, tokens_of(step, 1)) for held in helds))
        if step % 3 == 2:
            hand.step(*(Feed(held, VERIFY, tokens_of(step, 5)) for held in helds), kept=[1, 2, 4, 5])
        if step % 5 == 4:
            hand.step(Feed(helds[0], PREFILL, tokens_of(step, 3)))
        for held in helds:
            looks[held].append(hand.look(held))
    assert bent > 8
    for held in helds:
        check(name, held.tokens, looks[held], held.lease.owner)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_every_node_of_a_tree_can_be_the_last(name: str, way: tuple[str, str, str], hand: Hand) -> None:
    """0          and what each node sees is its own path: its logits are those of that text.
      1     2
    3   4  5 6
             7
    """
    parents = (-1, 0, 0, 1, 1, 2, 2, 6)
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 2, 6], [0, 2, 6, 7]]
    prompt, nodes = tokens_of(3, 6), tokens_of(4, 8)
    helds = [hand.admit(f"h{i}", 32) for i in range(len(paths))]
    hand.step(*(Feed(held, PREFILL, prompt) for held in helds))
    feeds = [Feed(held, VERIFY, nodes, parents) for held in helds]
    logits = hand.step(
        *feeds, kept=[len(path) for path in paths], paths=[path + [0] * (8 - len(path)) for path in paths]
    )
    for node, path in enumerate(paths):
        exact = ref(name).logits([*prompt, *(nodes[each] for each in path)])[-1]
        assert (logits.view(8, 8, -1)[:, node] - exact).abs().max() <= 3e-5 * exact.abs().max()
    looks = [hand.look(held) for held in helds]
    hand.step(*(Feed(held, DECODE, (9,)) for held in helds))
    for held, look in zip(helds, looks, strict=True):
        check(name, held.tokens, [look, hand.look(held)], held.lease.owner)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_chain_given_as_a_tree_is_a_chain(name: str, way: tuple[str, str, str], hand: Hand) -> None:
    chain, tree = hand.admit("chain"), hand.admit("tree")
    block = tokens_of(6, 6)
    for held in (chain, tree):
        hand.step(Feed(held, PREFILL, tokens_of(5, 5)))
    logits = hand.step(Feed(chain, VERIFY, block), kept=[4])
    same = hand.step(Feed(tree, VERIFY, block, tuple(range(-1, 5))), kept=[4])
    assert torch.allclose(logits, same, rtol=0, atol=2e-5 * float(logits.abs().max()))
    for held in (chain, tree):
        check(name, held.tokens, [hand.look(held)], held.lease.owner)
