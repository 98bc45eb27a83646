"""The audit recomputes running requests' states from nothing; here it watches every step of mixed runs."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

from runtime.state.pool import StateTxn
from runtime.step import ForwardBatch
from tests.runtime.engine.harness import (
    GRANITE,
    QWEN,
    Driver,
    Scripted,
    alone,
    build,
    prompts,
    request,
    texts_of,
)

STRATEGIES = ("snapshot", "replay")


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize(("prefill", "decode"), list(itertools.product(STRATEGIES, STRATEGIES)))
def test_no_audit_of_a_mixed_run_finds_anything(prefill: str, decode: str, mode: str) -> None:
    requests = [
        request(f"{i}", text, max_tokens=7 + i % 4, num_drafts=(None, 0, 1)[i % 3], temperature=float(i % 2), seed=i)
        for i, text in enumerate(prompts(9, lengths=[1, 2, 9, 21], seed=15))
    ]
    for model, speculative, lag in ((QWEN, "right:3", 1), (GRANITE, "right-host:4", 0)):
        expected = alone(requests, model)
        engine = build(
            model, speculative=speculative, settle_lag=lag, prefill_backend=prefill, decode_backend=decode,
            speculative_attention_mode=mode, audit_interval=1, max_num_batched_tokens=24, max_num_seqs=6, num_slots=9,
        )  # fmt: skip
        if isinstance(engine.proposer, Scripted):
            engine.proposer.texts = texts_of(requests, expected)
            engine.proposer.right = lambda name, position: (int(name) + position) % 5
        driver = Driver(engine)
        results = driver.run(requests)
        assert driver.stats.audits_mismatch == 0
        assert driver.stats.audits_ok >= 10
        assert engine.auditor.worst < 1e-4
        for made in requests:
            assert results[made.id].tokens == expected[made.id].tokens


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("decode", STRATEGIES)
def test_a_spoiled_slot_is_found(decode: str, lag: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = build(QWEN, speculative="mtp:2", settle_lag=lag, decode_backend=decode, audit_interval=1)
    driver = Driver(engine)
    driver.submit(request("a", (5, 6, 7, 8), max_tokens=20))
    for _ in range(5):
        driver.step()
    assert driver.stats.audits_ok > 0
    (running,) = engine.scheduler._running
    assert running.lease is not None
    for tensors in engine.states.recurrent.state.values():
        tensors[running.lease.slot] += 1.0
    with caplog.at_level(logging.ERROR, logger="lockstep.audit"):
        driver.finish()
    assert driver.stats.audits_mismatch > 0
    assert any("off by" in record.getMessage() for record in caplog.records)


def test_an_audit_without_room_is_left_out() -> None:
    engine = build(QWEN, audit_interval=1, num_slots=2)
    driver = Driver(engine)
    driver.run([request("a", (5, 6, 7)), request("b", (5, 6, 7))])
    assert (driver.stats.audits_ok, driver.stats.audits_mismatch) == (0, 0)


def test_an_audit_happens_every_so_many_steps() -> None:
    engine = build(QWEN, audit_interval=4)
    driver = Driver(engine)
    driver.run([request("a", (5, 6, 7), max_tokens=17)])
    assert driver.stats.audits_ok == 4


def test_an_audit_that_breaks_off_costs_nobody_anything(caplog: pytest.LogCaptureFixture) -> None:
    made = request("a", (5, 6, 7), max_tokens=6)
    engine = build(QWEN, audit_interval=2)
    forward = engine.runner.forward

    def fragile(txn: StateTxn, fb: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        if txn.batch.rows[0].lease.owner == "audit":
            raise MemoryError
        return forward(txn, fb)

    engine.runner.forward = fragile  # type: ignore[method-assign]
    driver = Driver(engine)
    with caplog.at_level(logging.ERROR, logger="lockstep.audit"):
        assert driver.run([made])["a"].tokens == alone([made])["a"].tokens
    assert (driver.stats.audits_ok, driver.stats.audits_mismatch) == (0, 0)
    assert any("broke off" in record.getMessage() for record in caplog.records)
