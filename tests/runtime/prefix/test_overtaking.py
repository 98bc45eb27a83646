"""Who waits for a sibling's prompt lets others pass; who waits for room does not."""

from __future__ import annotations

import pytest

from runtime.engine import Engine
from tests.runtime.engine.harness import QWEN, Driver, alone, assert_empty, build, prompts, request


def started(engine: Engine) -> list[str]:
    return [seq.request.id for seq in engine.scheduler._running]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("speculative", ["none", "mtp:3"])
def test_a_waiting_sibling_holds_nobody_up(speculative: str, lag: int) -> None:
    """A prompt of many chunks, its sibling, and somebody else's short one behind them."""
    text = prompts(1, [60], seed=3)[0]
    everybody = [
        request("first", text, max_tokens=6),
        request("sibling", text, max_tokens=6, temperature=1.0, seed=4),
        request("other", prompts(1, [5], seed=9)[0], max_tokens=6),
    ]
    expected = alone(everybody)
    # Enough for the rest of a chunk to go to somebody else.
    engine = build(QWEN, speculative=speculative, settle_lag=lag, max_num_batched_tokens=70, max_num_seqs=3)
    driver = Driver(engine)
    driver.submit(*everybody)
    driver.step()
    assert set(started(engine)) == {"first", "other"}
    driver.finish()
    for made in everybody:
        assert driver.results[made.id].tokens == expected[made.id].tokens
    last = driver.results["sibling"].last
    assert last is not None and last.cached_tokens >= 56
    assert_empty(engine)


def test_who_lacks_room_is_not_overtaken_by_who_would_fit() -> None:
    text, small = prompts(1, [40], seed=3)[0], prompts(2, [3], seed=4)
    engine = build(QWEN, num_blocks=17, max_model_len=50, max_num_seqs=3)
    driver = Driver(engine)
    driver.submit(
        request("first", text, max_tokens=8),
        request("large", prompts(1, [41], seed=8)[0], max_tokens=8),
        request("small", small[0], max_tokens=2),
    )
    driver.step()
    assert started(engine) == ["first"]
    driver.finish()
    assert_empty(engine)
