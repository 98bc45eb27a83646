"""The self-test at start refuses every backend whose commit is wrong; and the gear notices it too."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from runtime.api import StateError
from runtime.attention.registry import STRATEGIES
from runtime.probe import largest_difference
from tests.contract.mutants import MUTANTS
from tests.support.engines import engine_of, forget, greedy, pair, run
from tests.support.oracle import Watch
from tests.support.scripted import Script, attach
from tests.support.undisturbed import NUM_TOKENS, prompts, undisturbed

ALL = [(name, mutant) for name, mutants in MUTANTS.items() for mutant in mutants]
ALL_IDS = [mutant.__name__ for _, mutant in ALL]
NEED_DRAFTS = ("OneTooMany", "EverythingFed", "ReplayEverythingFed")  # without drafts they have nothing to do wrong
CASES = [
    pytest.param(name, mutant, speculative, model, id=f"{mutant.__name__}-{speculative}-{model}")
    for name, mutant in ALL
    for speculative, model in (("none", "qwen"), ("ngram:1", "granite"), ("ngram:7", "qwen"))
    if speculative != "none" or mutant.__name__ not in NEED_DRAFTS
]
HALVES = [
    pytest.param(name, mutant, mode, id=f"{mutant.__name__}-{mode}")
    for name, mutant in ALL
    for mode in ("decode", "prefill")
    if mode == "prefill" or mutant.__name__ != "NoPrefillCommit"  # there the half that prefills is the right one
]


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, mutant: Any) -> None:
    build = mutant if name == "replay" else lambda store, _max_fed: mutant(store)
    monkeypatch.setitem(STRATEGIES, name, build)


@pytest.mark.parametrize(("name", "mutant", "speculative", "model"), CASES)
def test_a_wrong_commit_does_not_start(
    name: str, mutant: Any, speculative: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, name, mutant)
    with pytest.raises(StateError, match="self-test"):
        engine_of(model, speculative=speculative, **pair(name, name))


@pytest.mark.parametrize(("name", "mutant", "mode"), HALVES)
def test_one_wrong_half_is_enough(name: str, mutant: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other half is right; the wrong one runs all kinds but prefill, or prefill and verification."""
    spoil(monkeypatch, name, mutant)
    other = "replay" if name == "snapshot" else "snapshot"
    verifier, rest = (name, other) if mode == "prefill" else (other, name)
    with pytest.raises(StateError, match="self-test"):
        engine_of("qwen", speculative="ngram:4", **pair(verifier, rest, mode))


@pytest.mark.parametrize(("name", "mutant"), ALL, ids=ALL_IDS)
def test_the_oracle_notices_a_wrong_commit(name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """STATE is no decoration: with the self-test off, every mutant is found within one request."""
    expected = undisturbed("qwen")
    spoil(monkeypatch, name, mutant)
    monkeypatch.setattr("runtime.build.check_commit", lambda *_args, **_named: None)
    engine = engine_of("qwen", speculative="ngram:7", max_num_batched_tokens=4, **pair(name, name))
    attach(engine, Script(engine, expected, lambda _request, step: (3, step % 3)))
    watch = Watch(engine, "qwen")
    run(engine, [greedy("r5", prompts()["r5"], NUM_TOKENS)], watch.look)
    with pytest.raises(AssertionError, match="layer"):
        watch.check()
    forget(engine)


@pytest.mark.parametrize("model", ["qwen", "granite", "qwen-all-attention", "granite-all-mamba", "asset"])
def test_right_ones_start_in_time(model: str) -> None:
    for halves in (("snapshot", "replay"), ("replay", "snapshot")):
        engine = engine_of(model, speculative="ngram:7", **pair(*halves))
        assert engine.info.startup_seconds["selftest"] < 5  # a second, with room for a busy machine
        assert engine.stats().commits > 0
        forget(engine)


def test_one_sequence_is_enough_to_start() -> None:
    engine = engine_of("qwen", speculative="ngram:7", max_num_seqs=1)
    assert engine.scheduler.ledger.total_slots == 1
    forget(engine)


def test_a_difference_that_is_not_finite_is_a_difference() -> None:
    right = {0: (torch.ones(2), torch.ones(2))}
    for value in (float("nan"), float("inf")):
        wrong = {0: (torch.ones(2), torch.tensor([1.0, value]))}
        assert largest_difference(wrong, right) == float("inf")
        assert largest_difference(right, wrong) == float("inf")


def test_the_self_test_leaves_every_slot_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It borrows one slot and gives it back; with 16-bit weights it still tells right from wrong."""
    for dtype in ("float32", "bfloat16", "float16"):
        start = time.perf_counter()
        engine = engine_of("asset", speculative="ngram:7", dtype=dtype, poison=None)
        assert time.perf_counter() - start < 60
        touched = [
            slot
            for slot in range(engine.states.recurrent.num_slots)
            if any(bool(tensor[slot].any()) for tensor in engine.states.recurrent.state.values())
        ]
        assert len(touched) <= 1
        assert 0 not in touched
        forget(engine)
    spoil(monkeypatch, "replay", MUTANTS["replay"][1])
    with pytest.raises(StateError, match="self-test"):
        engine_of("asset", speculative="ngram:7", dtype="bfloat16")
