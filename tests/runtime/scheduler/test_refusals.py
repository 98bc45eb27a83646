"""What is not accepted, and what the refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.api import (
    Accepted,
    ConfigError,
    Rejected,
    RejectReason,
)
from tests.support.scheduling import (
    DRAFTS,
    World,
)


def reject(answer: Accepted | Rejected) -> Rejected:
    assert isinstance(answer, Rejected)
    return answer


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    world = World(max_len=16)
    answer = reject(world.add("a", 16))
    assert (answer.reason, answer.param, answer.code) == (RejectReason.TOO_LONG, "prompt", "context_length_exceeded")
    assert answer.message == "This model's maximum context length is 16 tokens, but the prompt holds 16 tokens."
    assert reject(world.add("b", 160)).reason is RejectReason.TOO_LONG
    assert isinstance(world.add("c", 15, 100), Accepted)
    assert world.asked["c"].max_total == 16
    world.finish()
    assert len(world.asked["c"].tokens) == 1


@DRAFTS
def test_what_can_never_fit_the_pool_is_refused(k: int) -> None:
    world = World(k=k, blocks=8, block_size=4, max_len=1000)
    assert world.scheduler.max_len == 32 - 2 * k
    answer = reject(world.add("a", 32 - 2 * k))
    assert (answer.reason, answer.code) == (RejectReason.TOO_LONG, "context_length_exceeded")
    assert isinstance(world.add("b", 31 - 2 * k, 100), Accepted)
    assert isinstance(world.add("c", 1, 1000), Accepted)
    world.finish()


def test_malformed_requests_are_refused() -> None:
    world = World()
    for answer, param in (
        (world.add("a", 0), "prompt"),
        (world.add("a", 1, 0), "max_tokens"),
        (world.add("a", 1, 1, -1), "num_drafts"),
    ):
        assert (reject(answer).reason, reject(answer).param) == (RejectReason.INVALID, param)
    assert not world.scheduler.has_work


def test_an_id_is_used_once_at_a_time() -> None:
    world = World()
    world.add("a", 1, 1)
    assert reject(world.add("a", 1)).reason is RejectReason.INVALID
    world.finish()
    assert isinstance(world.add("a", 1, 1), Accepted)
    world.finish()


def test_the_queue_is_bounded_beyond_the_free_seats() -> None:
    world = World(queued=1, num_seqs=1)
    assert isinstance(world.add("a", 1, 9), Accepted)
    assert isinstance(world.add("b", 1), Accepted)
    assert reject(world.add("c", 1)).reason is RejectReason.QUEUE_FULL
    world.step()
    assert reject(world.add("c", 1)).reason is RejectReason.QUEUE_FULL
    assert world.stats().waiting_seqs == 1
    world.finish()
    assert isinstance(world.add("c", 1), Accepted)
    world.finish()


def test_seats_without_room_are_no_free_seats() -> None:
    world = World(queued=2, num_seqs=4, slots=1)
    for name in "abc":
        assert isinstance(world.add(name, 1, 9), Accepted)
    world.step()
    assert (world.stats().running, world.stats().waiting_state) == (1, 2)
    assert reject(world.add("d", 1)).reason is RejectReason.QUEUE_FULL
    world.finish()


def test_waiting_tokens_are_bounded_but_one_request_may_be_longer() -> None:
    world = World(queued_tokens=10, num_seqs=1)
    assert isinstance(world.add("a", 30, 2), Accepted)
    refused = reject(world.add("b", 1))
    assert refused.reason is RejectReason.QUEUE_TOKENS
    assert "30 tokens" in refused.message and "at most 10" in refused.message
    world.step()
    assert world.stats().waiting_tokens == 0
    assert isinstance(world.add("b", 6), Accepted)
    assert isinstance(world.add("c", 4), Accepted)
    assert world.stats().waiting_tokens == 10
    assert reject(world.add("d", 1)).reason is RejectReason.QUEUE_TOKENS
    world.cancel("b")
    assert world.stats().waiting_tokens == 4
    assert isinstance(world.add("d", 6), Accepted)
    world.finish()
    assert world.stats().waiting_tokens == 0


def test_draining_takes_nobody_and_finishes_the_rest() -> None:
    world = World()
    world.add("a", 3)
    world.scheduler.drain()
    assert reject(world.add("b", 1)).reason is RejectReason.DRAINING
    world.finish()


@pytest.mark.parametrize(
    "kwargs",
    [{"budget": 0}, {"num_seqs": 0}, {"queued": 0}, {"max_len": 1}, {"k": 8}, {"lag": 2}, {"blocks": 0}, {"slots": 0}],
)
def test_limits_that_cannot_work_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        World(**kwargs)
