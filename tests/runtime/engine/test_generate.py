"""The Python API for offline use."""

from __future__ import annotations

import pytest

from runtime.api import FinishReason, RequestError
from tests.runtime.engine.harness import QWEN, alone, assert_empty, build, prompts, request, shared


def test_generate_runs_requests_to_their_end() -> None:
    made = [request(f"{i}", text, max_tokens=3 + i) for i, text in enumerate(prompts(6))]
    expected = alone(made)
    found: dict[str, list[int]] = {r.id: [] for r in made}
    for delta in shared(QWEN, "mtp:3", 1).generate(made):
        found[delta.request_id] += delta.tokens
    assert found == {name: result.tokens for name, result in expected.items()}


def test_generate_takes_more_requests_than_the_queue_holds() -> None:
    engine = build(QWEN, max_queued_requests=3, max_num_seqs=2)
    made = [request(f"{i}", text, max_tokens=2) for i, text in enumerate(prompts(20, [2]))]
    finished = [delta.request_id for delta in engine.generate(iter(made)) if delta.finish is FinishReason.LENGTH]
    assert sorted(finished) == sorted(r.id for r in made)


def test_generate_refuses_before_it_starts_and_leaves_nothing_behind() -> None:
    engine = build(QWEN)
    made = [request("good", (5, 6)), request("bad", ())]
    with pytest.raises(RequestError, match="at least one token") as raised:
        list(engine.generate(made))
    assert raised.value.param == "prompt"
    assert_empty(engine)
    assert [d.request_id for d in engine.generate([request("next", (5,), max_tokens=1)])] == ["next"]


def test_a_generation_that_nobody_wants_any_more_ends() -> None:
    engine = build(QWEN, settle_lag=1)
    for delta in engine.generate([request("a", (5, 6)), request("b", (5, 7))]):
        assert delta.tokens
        break
    assert_empty(engine)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("place", ["forward", "propose"])
def test_ctrl_c_leaves_an_engine_that_goes_on(place: str, lag: int) -> None:
    engine = build(QWEN, speculative="mtp:3", settle_lag=lag)
    owner = engine.runner if place == "forward" else engine.proposer
    real, calls = getattr(owner, place), 0

    def interrupted(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(*args)

    setattr(owner, place, interrupted)
    made = [request(f"{i}", text) for i, text in enumerate(prompts(4))]
    with pytest.raises(KeyboardInterrupt):
        list(engine.generate(made))
    assert_empty(engine)
    expected = alone(made)
    found: dict[str, list[int]] = {r.id: [] for r in made}
    for delta in engine.generate(made):
        found[delta.request_id] += delta.tokens
    assert found == {name: result.tokens for name, result in expected.items()}
