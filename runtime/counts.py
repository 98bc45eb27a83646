"""The scheduler's counters: what was computed, emitted, thrown away, preempted and accepted."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from runtime.api import DISTRIBUTIONS, MAX_DRAFTS, Distribution, EngineStats
from runtime.state.ledger import Currency


class Observations:
    """How often a quantity lay where: the `DISTRIBUTIONS` of `EngineStats`."""

    def __init__(self) -> None:
        self._seen = {name: Distribution([0] * (len(bounds) + 1)) for name, bounds in DISTRIBUTIONS.items()}

    def observe(self, name: str, value: float) -> None:
        """One more value."""
        seen = self._seen[name]
        seen.counts[bisect_left(DISTRIBUTIONS[name], value)] += 1
        seen.total += value

    def snapshot(self) -> dict[str, Distribution]:
        """Copies."""
        return {name: Distribution(list(seen.counts), seen.total) for name, seen in self._seen.items()}


@dataclass(slots=True)
class Counts:
    """Counters that never fall; what each means is said in `EngineStats`.

    `prompt_tokens_computed` includes what is computed again after a preemption. The `spec_` counters are of
    verifications with at least one draft. `tokens_discarded`: sampled, but not part of any request's output. `stuck`:
    requests ended because nothing could be planned.
    """

    step_tokens: int = 0
    prompt_tokens_computed: int = 0
    tokens_emitted: int = 0
    tokens_discarded: int = 0
    preemptions: dict[Currency, int] = field(default_factory=lambda: dict.fromkeys(Currency, 0))
    settle_waits: int = 0
    stuck: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    spec_emitted: int = 0
    drafted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    accepted_lengths: list[int] = field(default_factory=lambda: [0] * (MAX_DRAFTS + 2))

    def count_verification(self, num_drafts: int, kept: int) -> None:
        """A row with drafts was judged."""
        self.verifications += 1
        self.drafted += num_drafts
        self.accepted += kept - 1
        self.spec_emitted += kept
        self.accepted_lengths[kept - 1] += 1
        for position in range(num_drafts):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < kept - 1

    def fill(self, stats: EngineStats) -> None:
        """Writes all of them."""
        stats.step_tokens = self.step_tokens
        stats.prompt_tokens_computed = self.prompt_tokens_computed
        stats.tokens_emitted = self.tokens_emitted
        stats.tokens_discarded = self.tokens_discarded
        stats.preemptions_kv = self.preemptions[Currency.KV]
        stats.preemptions_state = self.preemptions[Currency.STATE]
        stats.settle_waits = self.settle_waits
        stats.stuck_requests = self.stuck
        stats.spec_verifications = self.verifications
        stats.spec_drafted = self.drafted
        stats.spec_accepted = self.accepted
        stats.spec_emitted = self.spec_emitted
        stats.spec_drafted_at = list(self.drafted_at)
        stats.spec_accepted_at = list(self.accepted_at)
        stats.distributions["accepted_length"] = Distribution(list(self.accepted_lengths), float(self.accepted))
