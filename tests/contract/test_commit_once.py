"""Every part of every step is planned, run and committed by one object, once: the one that `select` names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from runtime.attention import registry
from runtime.attention.backend import AttentionPlan, Recurrence, VerifyTicket
from runtime.attention.hybrid_linear import HalfPlan, HybridLinearAttnBackend
from runtime.plan import RowKind
from runtime.step import StepPart
from tests.support.engines import MODES, PAIRS, engine_of, forget, greedy, pair, run, texts
from tests.support.scripted import PATTERNS, Script, attach
from tests.support.undisturbed import prompts, undisturbed

NUM_TOKENS = 24
Event = tuple[str, RowKind, int]  # what happened, for rows of which kind, in which plan


class Spy(HybridLinearAttnBackend):
    """A half that notes what is asked of it."""

    def __init__(self, name: str, store: Any, full: Any, linear: Any) -> None:
        super().__init__(name, store, full, linear)
        self.events: list[Event] = []
        self._kept: list[AttentionPlan] = []  # alive, so that no two share an id

    def plan(self, part: StepPart, serial: int) -> HalfPlan:
        plan = super().plan(part, serial)
        self._kept.append(plan)
        self._note("plan", plan)
        return plan

    def ticket(self, plan: AttentionPlan, serial: int) -> VerifyTicket:
        self._note("ticket", plan)
        return super().ticket(plan, serial)

    def mix(
        self, layer: int, recurrence: Recurrence, x: torch.Tensor, gates: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        self._note("mix", plan)
        return super().mix(layer, recurrence, x, gates, plan)

    def update_mamba_state_after_mtp_verify(self, ticket: VerifyTicket, kept: torch.Tensor, path: torch.Tensor) -> None:
        self._note("commit", ticket.plan)
        super().update_mamba_state_after_mtp_verify(ticket, kept, path)

    def _note(self, what: str, plan: AttentionPlan) -> None:
        self.events.append((what, plan.part.kind, id(plan)))


def assert_one_commit_each(half: Spy, num_layers: int, kinds: Sequence[RowKind]) -> int:
    """Returns how many parts it ran."""
    counts = Counter(half.events)
    plans = {(kind, plan) for what, kind, plan in half.events if what == "plan"}
    assert {(kind, plan) for _, kind, plan in half.events} == plans
    for kind, plan in plans:
        assert kind in kinds
        found = [counts[what, kind, plan] for what in ("plan", "ticket", "mix", "commit")]
        assert found == [1, 1, num_layers, 1]
    return len(plans)


@pytest.mark.parametrize("speculative", ["none", "mtp:3", "ngram:3", "script"])
@pytest.mark.parametrize(("mode", "lag"), list(zip(MODES, (0, 1), strict=True)))
@pytest.mark.parametrize("halves", PAIRS, ids="-".join)
def test_every_step_commits_once(
    halves: tuple[str, str], mode: str, speculative: str, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With chunked prompts beside decoding rows, speculating or not."""
    expected = undisturbed("qwen")
    monkeypatch.setattr(registry, "HybridLinearAttnBackend", Spy)
    chosen = "ngram:7" if speculative == "script" else speculative
    engine = engine_of("qwen", speculative=chosen, settle_lag=lag, max_num_batched_tokens=11, **pair(*halves, mode))
    prefill, decode = engine.states.backend.halves
    assert isinstance(prefill, Spy)
    assert isinstance(decode, Spy)
    prefill.events.clear()
    decode.events.clear()
    before = engine.stats().commits
    if speculative == "script":
        attach(engine, Script(engine, expected, lambda name, step: PATTERNS[(3 * step + len(name)) % len(PATTERNS)]))
    names = [f"r{i}" for i in (4, 5, 6)]
    requests = [greedy(n, prompts()[n], 12, num_drafts=0 if n == "r5" else None) for n in names]
    stories = run(engine, requests)
    assert texts(stories) == {name: expected[name][:12] for name in names}

    verifier = [RowKind.VERIFY]
    parts = assert_one_commit_each(prefill, 2, [RowKind.PREFILL, *(verifier if mode == "prefill" else [])])
    parts += assert_one_commit_each(decode, 2, [RowKind.DECODE, *(verifier if mode == "decode" else [])])
    seen = {kind for half in (prefill, decode) for _, kind, _ in half.events}
    assert seen == {RowKind.PREFILL, RowKind.DECODE} | (set() if speculative == "none" else {RowKind.VERIFY})
    stats = engine.stats()
    assert stats.commits - before == sum(stats.steps.values())
    assert parts >= stats.commits - before
    assert stats.commits_missing == stats.aborted_steps == stats.draft_failures == 0
    forget(engine)
