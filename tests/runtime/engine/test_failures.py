"""Things that break inside a step: who is hit ends with an error, everybody else never notices."""

from __future__ import annotations

import itertools
import json
import logging
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.api import FinishReason, StateError
from runtime.engine import Engine
from runtime.plan import Batch
from runtime.speculation.proposer import Drafts
from tests.runtime.engine.harness import (
    DEAD,
    QWEN,
    Driver,
    Scripted,
    alone,
    assert_empty,
    build,
    directory,
    prompts,
    request,
    texts_of,
)

PLACES = ["begin", "plan", "prepare", "forward", "half-forward", "judge", "commit", "half-commit", "keep"]


class Boom(Exception):
    """What the tests throw."""


class Fuse:
    """Wraps calls so that they raise when told to."""

    def __init__(self) -> None:
        self.lit = False
        self.blown = 0

    def guard(
        self, owner: Any, name: str, *, after: bool = False, error: type[Exception] = Boom, every: int = 1
    ) -> None:
        real, calls = getattr(owner, name), 0

        def guarded(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            out = real(*args, **kwargs) if after else None
            calls += 1
            if self.lit and calls % every == 0:
                self.lit = False
                self.blown += 1
                raise error("boom")
            return out if after else real(*args, **kwargs)

        setattr(owner, name, guarded)


def install(engine: Engine, place: str, fuse: Fuse, error: type[Exception] = Boom) -> None:
    backend = engine.states.backend
    match place:
        case "begin":
            fuse.guard(engine.states, "_enter", error=error, every=2)
        case "plan":
            fuse.guard(backend, "plan", error=error)
        case "prepare":
            fuse.guard(engine.runner, "prepare", error=error)
        case "forward":
            fuse.guard(engine.runner, "forward", error=error)
        case "half-forward":
            fuse.guard(backend, "mix", after=True, error=error)
        case "judge":
            fuse.guard(engine._verifier, "judge", after=True, error=error)
        case "commit":
            fuse.guard(engine.states, "commit", error=error)
        case "half-commit":
            fuse.guard(backend, "update_mamba_state_after_mtp_verify", after=True, error=error)
        case "keep":
            fuse.guard(engine.runner, "keep", error=error)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("speculative", "lag"), [("none", 0), ("mtp:3", 1)])
def test_a_step_that_fails_ends_its_own_requests_and_no_others(place: str, speculative: str, lag: int) -> None:
    dice = random.Random(place)
    requests = [
        request(f"{i}", text, max_tokens=8, temperature=float(i % 2), seed=i, frequency_penalty=0.5 * (i % 3))
        for i, text in enumerate(prompts(45, lengths=[1, 3, 9], seed=6))
    ]
    expected = alone(requests)
    engine = build(QWEN, speculative=speculative, settle_lag=lag, num_blocks=40, max_model_len=40, max_num_seqs=4)
    if isinstance(engine.proposer, Scripted):
        engine.proposer.texts = texts_of(requests, expected)
    fuse = Fuse()
    install(engine, place, fuse)
    batches: list[set[str]] = []
    schedule = engine.scheduler.schedule

    def noted(now: float) -> Batch | None:
        batch = schedule(now)
        batches.append(set() if batch is None else {row.seq.request.id for row in batch.rows})
        return batch

    engine.scheduler.schedule = noted  # type: ignore[method-assign]
    driver, left = Driver(engine), list(requests)
    failed: set[str] = set()
    while left or engine.has_work:
        for _ in range(min(len(left), dice.choice((0, 1, 2)))):
            driver.submit(left.pop(0))
        fuse.lit = fuse.lit or len(batches) % 23 == 9
        over = {name for name, result in driver.results.items() if result.finish is not None}
        blown = fuse.blown
        driver.step()
        now_failed = {name for name, result in driver.results.items() if result.finish is FinishReason.ERROR} - failed
        assert now_failed == (batches[-1] - over if fuse.blown > blown else set())
        failed |= now_failed
    assert fuse.blown >= 2
    assert len(failed) < 40
    for made in requests:
        result = driver.results[made.id]
        if made.id in failed:
            assert result.error and "boom" not in result.error
            assert result.tokens == expected[made.id].tokens[: len(result.tokens)]
        else:
            assert result.tokens == expected[made.id].tokens, made.id
    if place not in ("begin", "plan", "keep"):
        assert driver.since("aborted_steps") == fuse.blown
    assert_empty(engine)


@pytest.mark.parametrize("error", [Boom, StateError])
@pytest.mark.parametrize("method", ["extend", "propose"])
@pytest.mark.parametrize(("speculative", "lag"), [("mtp:3", 1), ("right-host:4", 1)])
def test_a_failing_drafter_costs_speed_and_nothing_else(
    method: str, speculative: str, lag: int, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    requests = [
        request(f"{i}", text, max_tokens=9, temperature=float(i % 2), seed=i)
        for i, text in enumerate(prompts(24, lengths=[1, 3, 9], seed=6))
    ]
    expected = alone(requests)
    engine = build(QWEN, speculative=speculative, settle_lag=lag, max_num_seqs=6)
    if isinstance(engine.proposer, Scripted):
        engine.proposer.texts = texts_of(requests, expected)
    fuse = Fuse()
    fuse.guard(engine.proposer, method, error=error)
    driver, dice = Driver(engine), random.Random(1)
    driver.submit(*requests)
    with caplog.at_level(logging.WARNING):
        while engine.has_work:
            fuse.lit = dice.random() < 0.6
            driver.step()
    for made in requests:
        result = driver.results[made.id]
        assert (result.tokens, result.finish, result.error) == (expected[made.id].tokens, FinishReason.LENGTH, None)
    assert driver.since("draft_failures") == fuse.blown >= 5
    assert len(caplog.records) <= 6, "a warning for each would drown the log"
    assert driver.since("aborted_steps") == 0


@pytest.mark.parametrize("speculative", ["right:3", "right-host:3"])
def test_a_drafter_that_answers_nonsense_costs_speed_only(speculative: str) -> None:
    requests = [request(f"{i}", text, max_tokens=9) for i, text in enumerate(prompts(4, lengths=[1, 3, 9], seed=6))]
    expected = alone(requests)
    engine = build(QWEN, speculative=speculative)
    answers = itertools.cycle(
        [
            Drafts(torch.zeros(1, 9, dtype=torch.long), (9,)),
            Drafts(torch.zeros(0, 0, dtype=torch.long), ()),
            Drafts(torch.full((4, 3), 5), (3, 3, 3)),
            Drafts(torch.full((4, 3), 5), (3, 0, 3, 2)),
        ]
    )
    engine.proposer.propose = lambda *_: next(answers)  # type: ignore[union-attr,method-assign]
    driver = Driver(engine)
    for name, result in driver.run(requests).items():
        assert (result.tokens, result.finish) == (expected[name].tokens, FinishReason.LENGTH)
    assert driver.since("draft_failures") > 0
    assert driver.since("aborted_steps") == 0


@pytest.fixture(scope="module")
def toxic() -> Path:
    """A model in which token 299 is not a number: every request that holds it gets nothing but NaN."""
    source = directory("qwen-untied-bias")
    target = Path(tempfile.mkdtemp(prefix="toxic-", dir=source.parent))
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target)
            continue
        weights = load_file(path)
        if "model.embed_tokens.weight" in weights:
            weights["model.embed_tokens.weight"][299] = float("nan")
        save_file(weights, target / path.name, metadata={"format": "pt"})
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] is False
    return target


@pytest.mark.parametrize(
    ("speculative", "lag", "backends"),
    [
        ("none", 0, ("snapshot", "replay")),
        ("mtp:3", 1, ("replay", "snapshot")),
        ("mtp:3", 1, ("snapshot", "replay")),
        ("right-host:4", 1, ("snapshot", "replay")),
    ],
)
def test_a_request_that_is_not_finite_fails_alone_and_leaves_a_clean_slot(
    toxic: Path, speculative: str, lag: int, backends: tuple[str, str]
) -> None:
    everything: dict[str, Any] = {
        "temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "logprobs": 3,
        "logit_bias": {5: 1.0}, "min_tokens": 3, "ignore_eos": False,
    }  # fmt: skip
    requests = []
    for i, text in enumerate(prompts(40, lengths=[1, 3, 9, 14], seed=6, vocab=299)):
        extra = everything if i % 2 else {}
        sick = i % 5 == 2
        where = (0, len(text) // 2, len(text) - 1)[i % 3]
        spoiled = [299 if sick and j == where else token for j, token in enumerate(text)]
        requests.append(request(f"{i}{'-sick' * sick}", spoiled, max_tokens=7, seed=i, **extra))
    # Nobody may pick the token by itself.
    well = alone([r for r in requests if "sick" not in r.id], "qwen-untied-bias")
    expected = {name: result for name, result in well.items() if 299 not in result.tokens}
    requests = [r for r in requests if "sick" in r.id or r.id in expected]
    engine = build(
        toxic, None, speculative=speculative, settle_lag=lag, num_slots=4, num_blocks=40, max_model_len=40,
        prefill_backend=backends[0], decode_backend=backends[1],
    )  # fmt: skip
    if isinstance(engine.proposer, Scripted):
        engine.proposer.texts = texts_of([r for r in requests if r.id in expected], expected)
    driver = Driver(engine)
    driver.run(requests)
    for name, result in driver.results.items():
        if "sick" in name:
            assert result.finish is FinishReason.ERROR and result.tokens == []
            assert result.error is not None and "finite" in result.error
        else:
            assert (result.tokens, result.finish) == (expected[name].tokens, expected[name].finish)
    assert driver.since("non_finite_rows") >= 8
    assert driver.since("draft_failures") == 0


@pytest.mark.parametrize(("speculative", "lag"), [("none", 0), ("right:3", 1), ("right-host:4", 1)])
def test_a_request_that_stops_being_finite_keeps_what_it_said(speculative: str, lag: int) -> None:
    """Its state is spoiled in mid-text: it ends with an error, and the next owner of the slot finds nothing of it."""
    requests = [request(f"{i}", text, max_tokens=12, seed=i) for i, text in enumerate(prompts(9, [2, 5], seed=4))]
    expected = alone(requests)
    engine = build(QWEN, None, speculative=speculative, settle_lag=lag, num_slots=4)
    if isinstance(engine.proposer, Scripted):
        engine.proposer.texts = texts_of(requests, expected)
        engine.proposer.right = lambda _name, _position: 1
    driver = Driver(engine)
    driver.submit(*requests)
    for _ in range(4):
        driver.step()
    victim = engine.scheduler._running[1]
    assert victim.lease is not None
    engine.states.recurrent.fill([victim.lease.slot], float("nan"))
    driver.finish()
    for made in requests:
        result = driver.results[made.id]
        if made.id == victim.request.id:
            assert result.finish is FinishReason.ERROR
            assert 0 < len(result.tokens) < 12
            assert result.tokens == expected[made.id].tokens[: len(result.tokens)]
        else:
            assert result.tokens == expected[made.id].tokens
    for tensors in engine.states.recurrent.state.values():
        engine.states.recurrent.fill([0], 0.0)
        assert torch.isfinite(tensors[1:]).all()
    assert driver.since("non_finite_rows") >= 1


def test_books_that_do_not_balance_end_the_engine() -> None:
    engine = build(QWEN)
    driver = Driver(engine)
    driver.submit(request("a", (5, 6, 7)))
    driver.step()
    engine.states.ledger._blocks._free.append(1)

    def fail(*_: object) -> None:
        raise StateError("boom")

    engine.runner.forward = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(StateError, match="boom"):
        engine.step()
    DEAD.add(engine)
