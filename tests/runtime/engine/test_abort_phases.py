"""A request taken back at every seam of a step, in every phase: everything it held comes back, nobody else notices."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from runtime.api import CancelReason, FinishReason
from runtime.engine import Engine
from tests.runtime.engine.harness import (
    QWEN,
    Driver,
    Scripted,
    alone,
    assert_empty,
    build,
    prompts,
    request,
    texts_of,
)

PROPOSERS = ("none", "ngram:4", "mtp:3", "right:3", "right-host:4")
WAYS = list(itertools.product(PROPOSERS, ("snapshot", "replay"), (0, 1)))
IDS = ["-".join(map(str, way)) for way in WAYS]
PHASES = ("prefill", "decode")

# Where in a step the request is taken back: (owner, method, after it has run). Between steps is "" .
SEAMS: dict[str, tuple[str, str, bool] | None] = {
    "between steps": None,
    "begun": ("states", "begin", True),
    "forwarded": ("runner", "forward", True),
    "judged": ("_verifier", "judge", True),
    "about to commit": ("states", "commit", False),
    "committed": ("states", "commit", True),
    "extended": ("proposer", "extend", True),
    "drafted": ("proposer", "propose", True),
    "about to settle": ("states", "settle", False),
    "settled": ("states", "settle", True),
}

VICTIM = request("victim", prompts(1, [23], seed=3)[0], max_tokens=9, temperature=1.0, seed=9)
MATES = [request(f"m{i}", text, max_tokens=8, seed=i) for i, text in enumerate(prompts(2, [3, 9], seed=5))]
LATER = [request(f"l{i}", text, max_tokens=4) for i, text in enumerate(prompts(3, [1, 5, 13], seed=8))]
EVERYBODY = [VICTIM, *MATES, *LATER]


def make(speculative: str, decode: str, lag: int) -> Engine:
    prefill = "replay" if decode == "snapshot" else "snapshot"
    engine = build(
        QWEN,
        speculative=speculative,
        settle_lag=lag,
        decode_backend=decode,
        prefill_backend=prefill,
        num_slots=5,
        max_num_seqs=4,
        max_num_batched_tokens=8,
    )
    if isinstance(engine.proposer, Scripted):
        engine.proposer.texts = texts_of(EVERYBODY, alone(EVERYBODY))
        engine.proposer.right = lambda name, position: (len(name) + position) % 4
    return engine


class Trigger:
    """Calls back once at a seam, when told to."""

    def __init__(self, engine: Engine, seam: tuple[str, str, bool], call: Callable[[], None]) -> None:
        self.armed = False
        owner_name, self._method, after = seam
        self._owner = vars(engine)[owner_name]
        if self._owner is None:
            return
        real = getattr(self._owner, self._method)

        def wrapped(*args: Any) -> Any:
            if not after and self.armed:
                self.fire(call)
            out = real(*args)
            if after and self.armed:
                self.fire(call)
            return out

        setattr(self._owner, self._method, wrapped)

    def fire(self, call: Callable[[], None]) -> None:
        self.armed = False
        call()

    def remove(self) -> None:
        if self._owner is not None and self._method in vars(self._owner):
            delattr(self._owner, self._method)


def take_back(engine: Engine, seam: str, phase: str, wait: int) -> None:
    """Takes the victim back at a seam, `wait` steps into its phase."""
    expected = alone(EVERYBODY)
    driver = Driver(engine)
    driver.submit(*MATES, VICTIM)
    where = SEAMS[seam]
    trigger = None if where is None else Trigger(engine, where, lambda: driver.cancel("victim"))
    for _ in range(60):
        victim = engine.scheduler._live.get("victim")
        inside = victim is not None and victim.lease is not None and victim.lease.bound > 0
        if victim is None or (inside and victim.decoding is (phase == "decode")):
            wait -= 1
            if wait < 0:
                break
        driver.step()
    if trigger is None:
        driver.cancel("victim")
    else:
        trigger.armed = True
    driver.submit(*LATER)
    driver.finish()
    if trigger is not None:
        trigger.remove()
    result = driver.results["victim"]
    assert result.finish in (FinishReason.ABORT, FinishReason.LENGTH)
    assert result.tokens == expected["victim"].tokens[: len(result.tokens)]
    for made in (*MATES, *LATER):
        assert (driver.results[made.id].tokens, driver.results[made.id].finish) == (
            expected[made.id].tokens,
            expected[made.id].finish,
        ), f"{made.id}, {seam}, {phase}"
    assert driver.since("aborted_steps") == 0
    assert_empty(engine)


CASES = list(itertools.product(SEAMS, PHASES))


@pytest.mark.parametrize(("number", "way"), list(enumerate(WAYS)), ids=IDS)
def test_taken_back_at_a_seam(number: int, way: tuple[str, str, int]) -> None:
    """Four cases for every way; over all ways every case has its turn several times."""
    engine = make(*way)
    for case in range(4):
        take_back(engine, *CASES[(3 * number + 7 * case) % len(CASES)], wait=(number + case) % 3)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize("way", WAYS, ids=IDS)
def test_taken_back_at_every_seam(way: tuple[str, str, int], seam: str, phase: str) -> None:
    engine = make(*way)
    for wait in range(3):
        take_back(engine, seam, phase, wait)


@pytest.mark.parametrize("way", WAYS, ids=IDS)
def test_taken_back_before_the_first_step_and_after_the_last_token(way: tuple[str, str, int]) -> None:
    """In the queue nothing was computed; behind the last token there is nothing to take back, and it stays ended."""
    expected = alone(EVERYBODY)
    engine = make(*way)
    driver = Driver(engine)
    driver.submit(VICTIM, *MATES)
    driver.cancel("victim", keep=0)
    driver.cancel("victim", keep=0)
    driver.finish()
    assert (driver.results["victim"].tokens, driver.results["victim"].finish) == ([], FinishReason.ABORT)
    assert driver.since("prompt_tokens_computed") <= sum(len(mate.prompt) for mate in MATES)
    again = Driver(engine)
    again.submit(VICTIM)
    while engine.scheduler._live:
        again.step()
    before = again.results["victim"]
    for reason in CancelReason:
        engine.cancel("victim", reason, 0)
        for part in ("victi", "victim ", "v", ""):
            engine.cancel(part, reason, 0)
    again.finish()
    assert (before.tokens, before.finish) == (expected["victim"].tokens, FinishReason.LENGTH)
    assert_empty(engine)
    assert engine.stats().registries["requests"] == engine.stats().registries["leases"] == 0
