"""Gumbel noise as a counter function: a pure function of (seed, position, token id), whatever the batch or draw order.

Adding it to log-probabilities and taking the argmax samples from them, and the same position of the same request gets
the same sample with speculation and without.
"""

from __future__ import annotations

import torch

from kernels.gumbel import reference
from kernels.registry import implementation


def counter_gumbel(
    seeds: torch.Tensor, positions: torch.Tensor, vocab: int, device: torch.device | None = None
) -> torch.Tensor:
    """Standard Gumbel noise [m, vocab] float32 for token ids 0 .. vocab - 1; seeds, positions [m] int64.

    `device` is where the noise is wanted; None for the device of `seeds`.
    """
    device = device or seeds.device
    run = implementation("gumbel.counter_gumbel", device.type, reference.counter_gumbel)
    return run(seeds, positions, vocab, device)


def counter_gumbel_at(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The same noise at chosen token ids only: tokens [m, c] int64 >= 0 gives [m, c] float32."""
    run = implementation("gumbel.counter_gumbel_at", tokens.device.type, reference.counter_gumbel_at)
    return run(seeds, positions, tokens)
