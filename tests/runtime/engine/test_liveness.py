"""Pools too small for everybody at once, and requests as large as what there is: all end, none with an error."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from runtime.api import FinishReason, Rejected, RejectReason, Request
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

WAYS = list(itertools.product(("none", "ngram:4", "mtp:3", "right:3", "right-host:4"), ("snapshot", "replay"), (0, 1)))
EVERY_WAY = pytest.mark.parametrize(("speculative", "decode", "lag"), WAYS, ids=["-".join(map(str, w)) for w in WAYS])


def make(speculative: str, decode: str, lag: int, requests: list[Request], **changes: Any) -> Engine:
    engine = build(QWEN, speculative=speculative, settle_lag=lag, decode_backend=decode, **changes)
    if isinstance(engine.proposer, Scripted):
        engine.proposer.texts = texts_of(requests, alone(requests))
        engine.proposer.right = lambda name, position: (len(name) + position) % 5
    return engine


@EVERY_WAY
def test_two_slots_serve_fifty(speculative: str, decode: str, lag: int) -> None:
    """With the cache on, prompts shared, and states for two texts only."""
    common = prompts(1, [9], seed=1)[0]
    requests = [
        request(
            f"{i}", (*common, *text) if i % 2 else text, max_tokens=1 + i % 5, seed=i, temperature=float(i % 3 == 0)
        )
        for i, text in enumerate(prompts(50, [1, 2, 6], seed=6))
    ]
    expected = alone(requests)
    engine = make(speculative, decode, lag, requests, num_slots=3, num_checkpoints=2, max_num_seqs=8, num_blocks=24,
                  max_model_len=40)  # fmt: skip
    driver = Driver(engine)
    driver.run(requests)
    for made in requests:
        result = driver.results[made.id]
        assert (result.tokens, result.finish) == (expected[made.id].tokens, expected[made.id].finish), made.id
    assert driver.since("stuck_requests") == 0
    assert_empty(engine)


@EVERY_WAY
def test_two_that_need_most_of_the_pool_both_finish(speculative: str, decode: str, lag: int) -> None:
    """Each needs six tenths of all blocks; their prompts alone would let both in."""
    requests = [request(f"{i}", text, max_tokens=40, seed=i) for i, text in enumerate(prompts(2, [16], seed=2))]
    expected = alone(requests)
    engine = make(speculative, decode, lag, requests, num_blocks=26, max_model_len=64, max_num_seqs=2)
    assert engine.info.max_model_len >= 56
    driver = Driver(engine)
    driver.run(requests)
    for made in requests:
        assert driver.results[made.id].tokens == expected[made.id].tokens
    assert driver.since("stuck_requests") == 0
    assert_empty(engine)


@EVERY_WAY
def test_lengths_around_the_limit(speculative: str, decode: str, lag: int) -> None:
    """The limit is what was really allocated. A prompt below it is answered, any other refused with both numbers."""
    engine = make(speculative, decode, lag, [], num_blocks=12, max_model_len=96, max_num_seqs=2)
    limit = engine.info.max_model_len
    assert limit < 96, "the pool is the limit here"
    for length in (limit - 2, limit - 1):
        driver = Driver(engine)
        made = request("a", prompts(1, [length], seed=length)[0], max_tokens=50)
        assert driver.run([made])["a"].finish is FinishReason.LENGTH
        assert len(driver.results["a"].tokens) == limit - length
    for length in (limit, limit + 1, 10 * limit):
        answer = engine.submit(request("a", prompts(1, [length], seed=length)[0], max_tokens=50))
        assert isinstance(answer, Rejected)
        assert (answer.reason, answer.code) == (RejectReason.TOO_LONG, "context_length_exceeded")
        assert f"{limit} tokens" in answer.message and f"{length} tokens" in answer.message
    assert_empty(engine)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("speculative", ["none", "mtp:3"])
def test_priorities_change_who_is_first_and_no_text(speculative: str, lag: int) -> None:
    requests = [request(f"{i}", text, max_tokens=8, seed=i) for i, text in enumerate(prompts(9, [3, 7, 14], seed=6))]
    expected = alone(requests)
    engine = build(QWEN, speculative=speculative, settle_lag=lag, num_blocks=14, max_model_len=30, max_num_seqs=3)
    urgent = [Request(**{f: getattr(made, f) for f in made.__struct_fields__} | {"priority": 50 - 10 * i})
              for i, made in enumerate(requests)]  # fmt: skip
    driver = Driver(engine)
    driver.submit(*urgent)
    ended: list[str] = []
    while engine.has_work:
        driver.step()
        ended += [name for name, result in driver.results.items() if result.finish and name not in ended]
    assert {name: driver.results[name].tokens for name in expected} == {n: r.tokens for n, r in expected.items()}
    assert ended.index("8") < ended.index("0")
    assert_empty(engine)
