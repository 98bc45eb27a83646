"""NaN and infinity in one request's state, KV or logits: it fails alone and early, and nothing of it stays behind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from runtime.api import FinishReason, Request
from runtime.engine import Engine
from runtime.plan import Sequence
from tests.runtime.engine.harness import (
    QWEN,
    Driver,
    Result,
    Scripted,
    alone,
    assert_empty,
    build,
    prompts,
    request,
    texts_of,
)
from tests.runtime.engine.test_failures import toxic

__all__ = ["toxic"]  # a fixture

WAYS = list(itertools.product(("none", "ngram:4", "mtp:3", "right:3", "right-host:4"), ("snapshot", "replay"), (0, 1)))
EVERY_WAY = pytest.mark.parametrize(("speculative", "decode", "lag"), WAYS)
VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def make(speculative: str, decode: str, lag: int, model: str | Path = QWEN, **changes: Any) -> Engine:
    # The half that prefills has the other strategy, so that each is seen doing either.
    prefill = "replay" if decode == "snapshot" else "snapshot"
    settings = {"num_slots": 5, "max_num_batched_tokens": 12, "max_num_seqs": 4, **changes}
    return build(
        model, None, speculative=speculative, settle_lag=lag, decode_backend=decode, prefill_backend=prefill, **settings
    )


def teach(engine: Engine, requests: list[Request], expected: dict[str, Result]) -> None:
    if isinstance(engine.proposer, Scripted):
        engine.proposer.texts = texts_of(requests, expected)
        engine.proposer.right = lambda name, position: (len(name) + position) % 4


def spoil_state(engine: Engine, seq: Sequence, value: float) -> None:
    """One number of one layer's recurrent state, and what the pending inputs will be folded into."""
    assert seq.lease is not None
    state = next(iter(engine.states.recurrent.state.values()))
    state[seq.lease.slot].view(-1)[3] = value


def spoil_conv(engine: Engine, seq: Sequence, value: float) -> None:
    assert seq.lease is not None
    conv = list(engine.states.recurrent.conv.values())[-1]
    conv[seq.lease.slot].view(-1)[1] = value


def spoil_kv(engine: Engine, seq: Sequence, value: float) -> None:
    assert seq.lease is not None and seq.lease.computed
    values = next(iter(engine.states.kv.values.values()))
    values[seq.lease.blocks[0], 0] = value


def assert_clean(engine: Engine) -> None:
    """No number in any pool is NaN or infinite, padding aside."""
    states = engine.states
    for tensor in (*states.recurrent.conv.values(), *states.recurrent.state.values()):
        assert torch.isfinite(tensor[1:]).all()
    for tensor in (*states.kv.keys.values(), *states.kv.values.values()):
        assert torch.isfinite(tensor[1:]).all()


Spoil = Callable[[Engine, Sequence, float], None]
SPOILS: list[Spoil] = [spoil_state, spoil_conv, spoil_kv]
CASES = [(s, p, v) for s in SPOILS for p in ("prefill", "decode") for v in VALUES]

VICTIM = request("victim", prompts(1, [61], seed=3)[0], max_tokens=6, temperature=1.0, seed=9)
MATES = [request(f"m{i}", text, max_tokens=9, seed=i) for i, text in enumerate(prompts(2, [3, 9], seed=5))]
LATER = [request(f"l{i}", text, max_tokens=4) for i, text in enumerate(prompts(4, [1, 2, 5, 13], seed=8))]


def spoil_once(engine: Engine, spoil: Spoil, phase: str, value: str, *, wait: int) -> None:
    """Spoils the victim `wait` steps into its phase; the others, later ones and its own second try are right."""
    expected = alone([VICTIM, *MATES, *LATER])
    teach(engine, [VICTIM, *MATES, *LATER], expected)
    driver = Driver(engine)
    salted = msgspec.structs.replace(
        VICTIM, cache_salt=f"{spoil.__name__}{phase}{value}{wait}"
    )  # its blocks are its own
    driver.submit(*MATES, salted)
    while True:
        driver.step()
        victim = engine.scheduler._live["victim"]
        if victim.lease is not None and victim.lease.computed and victim.decoding is (phase == "decode"):
            wait -= 1
            if wait < 0:
                break
    spoil(engine, victim, VALUES[value])
    driver.submit(*LATER)
    driver.finish()
    result = driver.results["victim"]
    assert result.tokens == expected["victim"].tokens[: len(result.tokens)]
    if spoil is spoil_conv and result.finish is not FinishReason.ERROR:
        # A window's input may touch two outputs alone, which nobody reads; then nothing is wrong with the text.
        assert len(result.tokens) == len(expected["victim"].tokens)
    else:
        assert result.finish is FinishReason.ERROR
        assert result.error and "finite" in result.error
        assert driver.since("non_finite_rows") >= 1
    for made in (*MATES, *LATER):
        assert driver.results[made.id].tokens == expected[made.id].tokens, made.id
    assert_empty(engine)
    assert_clean(engine)
    assert Driver(engine).run([salted])["victim"].tokens == expected["victim"].tokens, "its second try is its own text"


@pytest.mark.parametrize(("number", "way"), list(enumerate(WAYS)), ids=["-".join(map(str, way)) for way in WAYS])
def test_a_spoilt_request_fails_alone(number: int, way: tuple[str, str, int]) -> None:
    """Three cases for every way; over all ways every case has its turn."""
    engine = make(*way)
    for case in range(3):
        spoil_once(engine, *CASES[(7 * number + 5 * case) % len(CASES)], wait=number % 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[f"{spoil.__name__}-{phase}-{value}" for spoil, phase, value in CASES])
@pytest.mark.parametrize("way", WAYS, ids=["-".join(map(str, way)) for way in WAYS])
def test_every_case_in_every_way(way: tuple[str, str, int], case: tuple[Spoil, str, str]) -> None:
    engine = make(*way)
    for wait in range(2):
        spoil_once(engine, *case, wait=wait)


@EVERY_WAY
def test_a_prompt_that_is_not_finite_ends_at_its_first_bad_chunk(
    toxic: Path, speculative: str, decode: str, lag: int
) -> None:
    """Not after all of it was computed, kept and perhaps cached."""
    text = list(prompts(1, [80], seed=3, vocab=299)[0])
    text[14] = 299
    mate = request("mate", prompts(1, [5], seed=4, vocab=299)[0], max_tokens=4)
    expected = alone([mate], "qwen-untied-bias")
    engine = make(speculative, decode, lag, toxic)
    driver = Driver(engine)
    driver.submit(request("sick", text), mate)
    driver.finish()
    sick = driver.results["sick"]
    assert (sick.finish, sick.tokens) == (FinishReason.ERROR, [])
    assert driver.since("prompt_tokens_computed") < 5 + 12 * 2
    assert driver.results["mate"].tokens == expected["mate"].tokens
    assert_empty(engine)
    assert_clean(engine)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_drafter_that_is_not_finite_costs_drafts_only(value: float, lag: int) -> None:
    engine = build(QWEN, None, speculative="mtp:3", settle_lag=lag, max_num_seqs=4)
    requests = [request(f"{i}", text, max_tokens=9, seed=i) for i, text in enumerate(prompts(6, [1, 4, 9], seed=6))]
    expected = alone(requests)
    store = engine.proposer._store  # type: ignore[union-attr]
    driver = Driver(engine)
    driver.submit(*requests)
    while engine.has_work:
        for tensor in (*store.keys.values(), *store.values.values()):
            tensor[1:] = value
        driver.step()
    for made in requests:
        assert driver.results[made.id].tokens == expected[made.id].tokens
    assert driver.since("non_finite_rows") == 0
