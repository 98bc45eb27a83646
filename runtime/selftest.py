"""Before the first request: a commit on a dummy step must leave exactly the state that plain decoding leaves."""

from __future__ import annotations

from runtime.api import StateError
from runtime.plan import RowKind
from runtime.probe import Probe, largest_difference
from runtime.runner import ModelRunner
from runtime.state.pool import StatePool

TOLERANCE = 1e-4


def check_commit(pool: StatePool, runner: ModelRunner, *, vocab_size: int, k_max: int) -> None:
    """Verifies that a partly rejected draft leaves no trace. Raises StateError, naming the backend, when it does.

    One probe verifies a draft of which one token is kept (after a bonus), another decodes the same kept tokens one by
    one; the states must agree. A backend whose commit does nothing, or too much, cannot pass.
    """
    tokens = [(7 * i + 3) % vocab_size for i in range(12)]
    room = len(tokens) + 2 * (1 + k_max)
    drafts = tokens[5 : 5 + min(3, k_max)]
    speculating, plain = Probe(pool, runner, room, "selftest-a"), Probe(pool, runner, room, "selftest-b")
    try:
        speculating.prefill(tokens[:4])
        plain.prefill(tokens[:4])
        kept = min(2, 1 + len(drafts))
        speculating.feed([tokens[4], *drafts], kept)
        speculating.feed([tokens[9]], 1)
        for token in [*[tokens[4], *drafts][:kept], tokens[9]]:
            plain.feed([token], 1, RowKind.DECODE)
        before = plain.states()
        difference = largest_difference(speculating.states(), before)
    finally:
        speculating.close()
        plain.close()
    if not difference <= TOLERANCE:
        raise StateError(
            f"self-test: after verification {pool.backend.name} holds a state that differs from decoding's "
            f"by {difference:.3g}; it cannot start"
        )
