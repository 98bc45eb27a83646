"""Halves and strategies change from step to step on the same slot, in mixed batches; STATE holds after every step."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import pytest
import torch

from runtime.engine import Engine
from tests.support.engines import MODES, PAIRS, engine_of, pair, tokens_of
from tests.support.oracle import Look, check, ref, truth
from tests.support.steps import DECODE, PREFILL, VERIFY, Feed, Hand, Held

MODELS = ("qwen", "granite")
KINDS = (PREFILL, DECODE, VERIFY)
MAX_TOKENS = 48
WAYS = [(*halves, mode) for halves in PAIRS for mode in MODES]
TURNS = [(way, MODELS[(i + i // 4) % 2]) for i, way in enumerate(WAYS)]


@functools.cache
def engine(name: str, way: tuple[str, str, str]) -> Engine:
    return engine_of(name, speculative="ngram:7", num_blocks=400, max_num_seqs=10, **pair(*way))


@pytest.fixture
def hand(name: str, way: tuple[str, str, str]) -> Iterator[Hand]:
    hand = Hand(engine(name, way))
    yield hand
    hand.close()


def random_feed(held: Held, chance: random.Random) -> Feed:
    """Any kind of row at any moment; a lease's first row must be a prefill."""
    kind = chance.choice(KINDS) if held.tokens else PREFILL
    most = {PREFILL: 7, DECODE: 1, VERIFY: 8}[kind]
    return Feed(held, kind, tokens_of(chance.randrange(10**6), chance.randint(1, most)))


def random_kept(feed: Feed, chance: random.Random) -> int:
    return len(feed.tokens) if feed.kind is PREFILL else chance.randint(1, len(feed.tokens))


@pytest.mark.parametrize(("way", "name"), TURNS)
def test_any_kind_after_any_other(name: str, way: tuple[str, str, str], hand: Hand) -> None:
    chance = random.Random(repr((name, way)))
    helds = [hand.admit(f"h{i}", MAX_TOKENS + 16) for i in range(4)]
    looks: dict[Held, list[Look]] = {held: [] for held in helds}
    seen = set()
    for _ in range(24):
        ready = [held for held in helds if len(held.tokens) < MAX_TOKENS]
        if not ready:
            break
        feeds = [random_feed(held, chance) for held in chance.sample(ready, chance.randint(1, len(ready)))]
        feeds.sort(key=lambda feed: KINDS.index(feed.kind))
        hand.step(*feeds, kept=[random_kept(feed, chance) for feed in feeds])
        if chance.random() < 0.2:
            hand.pool.materialise([held.lease.slot for held in chance.sample(helds, 2)])
        for held in helds:  # also those that did not take part
            if held.tokens:
                looks[held].append(hand.look(held))
        seen |= {feed.kind for feed in feeds}
    assert seen == set(KINDS)
    for held in helds:
        assert check(name, held.tokens, looks[held], held.lease.owner) > 10


@pytest.mark.parametrize(("way", "name"), TURNS)
def test_logits_of_a_block_are_those_of_single_steps(name: str, way: tuple[str, str, str], hand: Hand) -> None:
    """At every verified position, behind rejected drafts too; ragged blocks of 1 to 8 tokens in one batch."""
    prompt = tokens_of(77, 9)
    helds = [hand.admit(f"h{i}", 40) for i in range(8)]
    single = hand.admit("single", 40)
    block = tokens_of(78, 8)
    hand.step(*(Feed(held, PREFILL, prompt) for held in (*helds, single)))
    hand.step(*(Feed(held, VERIFY, tokens_of(79, 5)) for held in (*helds, single)), kept=[3] * 9)
    start = len(single.tokens)
    in_blocks = hand.step(*(Feed(held, VERIFY, block[: i + 1]) for i, held in enumerate(helds)), kept=[1] * 8)
    one_by_one = torch.cat([hand.step(Feed(single, DECODE, (token,))) for token in block])
    exact = ref(name).logits(single.tokens)[start:]
    rough = ref(name, torch.float32).logits(single.tokens)[start:]
    allowed = max(1e-5 * exact.abs().max(), 3 * (rough - exact).abs().max())
    assert (one_by_one - exact).abs().max() <= allowed
    at = 0
    for i in range(8):
        rows = in_blocks[at : at + i + 1]
        at += i + 1
        assert (rows - exact[: i + 1]).abs().max() <= allowed
        assert (rows - one_by_one[: i + 1]).abs().max() <= 2 * allowed
    assert truth(name, tuple(single.tokens)).greedy[start:] == one_by_one.argmax(-1).tolist()


@pytest.mark.parametrize(("name", "way"), [("qwen", WAYS[2]), ("granite", WAYS[5])])
@pytest.mark.parametrize("sizes", [(1,), (3,), (31,), (32, 1), (33,), (64,), (65, 2), (2, 11, 1, 29)], ids=str)
def test_pieces_of_any_size(name: str, way: tuple[str, str, str], sizes: tuple[int, ...], hand: Hand) -> None:
    """Around the scan's chunk and the convolution's width: STATE at the end of every piece."""
    held, tokens, looks, piece = hand.admit("h", 80), tokens_of(80, 70), [], 0
    while len(held.tokens) < len(tokens):
        start = len(held.tokens)
        hand.step(Feed(held, PREFILL, tokens[start : start + sizes[piece % len(sizes)]]))
        looks.append(hand.look(held))
        piece += 1
    check(name, tokens, looks, "pieces")
