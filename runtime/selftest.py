"""Before the first request: commits on dummy steps must leave exactly the state that plain decoding leaves."""

from __future__ import annotations

import torch

from runtime.api import StateError
from runtime.plan import RowKind
from runtime.probe import Probe, States, largest_difference, tolerance
from runtime.runner import ModelRunner
from runtime.state.pool import StatePool

NUM_TOKENS = 8
NUM_PROMPT = 4


def check_commit(pool: StatePool, runner: ModelRunner, *, vocab_size: int, k_max: int) -> None:
    """Verifies that rejected drafts leave no trace. Raises StateError, naming the backend, when they do.

    The same tokens go in three ways, one after the other (so one free slot is enough): by verifications that keep one
    token, then two of what they feed; by decoding; and by prefill alone. The states must agree, and every commit must
    have moved every layer: three ways that do nothing would agree as well.
    """
    text = [(7 * i + 3) % vocab_size for i in range(NUM_TOKENS)]
    wrong = [(7 * i + 6) % vocab_size for i in range(min(3, k_max))]
    feeds: list[tuple[list[int], int]] = [([text[4], *wrong], 1)]
    feeds += [([text[5], text[6], *wrong[1:]], 2)] if wrong else [([text[5]], 1), ([text[6]], 1)]
    feeds.append(([text[7]], 1))
    ends = [
        _feed(pool, runner, text[:NUM_PROMPT], feeds, RowKind.VERIFY),
        _feed(pool, runner, text[:NUM_PROMPT], [([token], 1) for token in text[NUM_PROMPT:]], RowKind.DECODE),
        _feed(pool, runner, text, [], RowKind.DECODE),
    ]
    difference = max(largest_difference(end, ends[1]) for end in ends)
    if not difference <= tolerance(pool.kv.dtype):
        raise StateError(
            f"self-test: after verification {pool.backend.name} holds a state that differs from decoding's "
            f"by {difference:.3g}; it cannot start"
        )


def _feed(
    pool: StatePool, runner: ModelRunner, prompt: list[int], feeds: list[tuple[list[int], int]], kind: RowKind
) -> States:
    """The states after a prompt, in two chunks, and `feeds` of (tokens, kept)."""
    probe = Probe(pool, runner, NUM_TOKENS + len(max((tokens for tokens, _ in feeds), key=len, default=())), "selftest")
    try:
        probe.prefill(prompt[:2])
        before = probe.states()
        probe.prefill(prompt[2:])
        after = probe.states()
        _require_moved(pool, before, after, RowKind.PREFILL)
        for tokens, kept in feeds:
            before = after
            probe.feed(tokens, kept, kind)
            after = probe.states()
            _require_moved(pool, before, after, kind)
    finally:
        probe.close()
    return after


def _require_moved(pool: StatePool, before: States, after: States, kind: RowKind) -> None:
    for layer, tensors in after.items():
        for name, old, new in zip(("convolution window", "state"), before[layer], tensors, strict=True):
            if new.numel() and torch.equal(old, new):
                raise StateError(
                    f"self-test: a commit of {kind.value} rows by {pool.backend.name} left the {name} of layer {layer} "
                    "as it was; it cannot start"
                )
