"""A forward that fails anywhere leaves every committed state as it was, bit by bit, and the step can be done again."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from runtime.engine import Engine
from runtime.state.pool import StateTxn
from tests.contract.test_tickets import WAYS, assert_same
from tests.support.engines import check_idle, collect, engine_of, forget, greedy, pair, submit, tokens_of
from tests.support.oracle import check
from tests.support.steps import DECODE, PREFILL, VERIFY, Feed, Hand
from tests.support.undisturbed import prompts, undisturbed

MODELS = ("qwen", "granite")
NUM_LAYERS = 3
TOKENS = tokens_of(9, 40)


class Broken(RuntimeError):
    """What the layer raises."""


@functools.cache
def engine(name: str, way: tuple[str, str, str]) -> Engine:
    return engine_of(name, speculative="ngram:7", **pair(*way))


@pytest.fixture
def hand(name: str, way: tuple[str, str, str]) -> Iterator[Hand]:
    hand = Hand(engine(name, way))
    yield hand
    hand.close()


class Fuse:
    """Breaks the n-th call of a layer to the step's state, before or after the work is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.late = False
        for method in ("attend", "mix"):
            self._wrap(monkeypatch, method)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        original = vars(StateTxn)[method]

        def wrapped(txn: StateTxn, *args: object) -> torch.Tensor:
            self.left -= 1
            if self.left == 0 and not self.late:
                raise Broken
            y = original(txn, *args)
            if self.left == 0:
                raise Broken
            return y

        monkeypatch.setattr(StateTxn, method, wrapped)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_abort_in_every_layer(
    name: str, way: tuple[str, str, str], late: bool, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixed step over rows with and without pending inputs fails in layer 1, 2, 3, is aborted, and then succeeds."""
    fuse = Fuse(monkeypatch)
    fuse.late = late
    new, chunk, plain, spec = (hand.admit(each) for each in ("new", "chunk", "plain", "spec"))
    for held in (chunk, plain, spec):
        hand.step(Feed(held, PREFILL, TOKENS[:6]))
    hand.step(Feed(spec, VERIFY, TOKENS[6:11]), kept=[3])
    looks = []
    for i in range(NUM_LAYERS + 1):
        hand.step(Feed(plain, DECODE, (TOKENS[20 + i],)), Feed(spec, VERIFY, TOKENS[i : i + 4]), kept=[1, 1 + i % 4])
        feeds = [
            Feed(new, PREFILL, TOKENS[i : i + 5]),
            Feed(chunk, PREFILL, TOKENS[i : i + 2]),
            Feed(plain, DECODE, (TOKENS[30],)),
            Feed(spec, VERIFY, TOKENS[i : i + 6]),
        ]
        before = [hand.look(held) for held in (chunk, plain, spec)]
        txn = hand.begin(*feeds)
        if i < NUM_LAYERS:
            fuse.left = i + 1
            with pytest.raises(Broken):
                hand.forward(txn)
        else:
            hand.forward(txn)  # nothing failed; the judge might have
        hand.pool.abort(txn)
        for held, old in zip((chunk, plain, spec), before, strict=True):
            now = hand.look(held)
            assert (now.length, now.computed, held.lease.in_flight) == (old.length, old.computed, 0)
            assert_same([t for both in old.states.values() for t in both], [t for b in now.states.values() for t in b])
            assert_same([t for both in old.kv.values() for t in both], [t for b in now.kv.values() for t in b])
        looks.append(before[-1])
    assert hand.pool.counts.aborted >= NUM_LAYERS + 1
    hand.step(*feeds, kept=[5, 2, 1, 4])
    assert check(name, spec.tokens, [*looks, hand.look(spec)], "spec")
    for held in (new, chunk, plain):
        check(name, held.tokens, [hand.look(held)], held.lease.owner)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("where", ["begin", "mix", "attend", "commit"])
@pytest.mark.parametrize("speculative", ["none", "mtp:3", "ngram:3"])
def test_a_failed_step_costs_its_own_requests_only(
    speculative: str, where: str, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests of the broken step end with an error; whoever comes later is right, and nothing leaks."""
    expected = undisturbed("qwen")
    serving = engine_of("qwen", speculative=speculative, settle_lag=lag)
    stories = submit(serving, [greedy(name, prompts()[name], 12) for name in ("r4", "r5", "r6")])
    for _ in range(3):
        collect(serving, stories)

    def broken(*_args: object) -> None:
        raise Broken

    target = StateTxn if where in {"mix", "attend"} else type(serving.states)
    with monkeypatch.context() as patch:
        patch.setattr(target, where, broken)
        while not any(story.error for story in stories.values()):
            collect(serving, stories)
    stories |= submit(serving, [greedy("r8", prompts()["r8"], 12)])
    while serving.has_work:
        collect(serving, stories)
    for name, story in stories.items():
        assert story.tokens == expected[name][: len(story.tokens)]
        assert bool(story.error) == (len(story.tokens) < 12)
    assert len(stories["r8"].tokens) == 12
    forget(serving)
    check_idle(serving)
