"""Torch implementation of the noise: a 64-bit key per row, then a 32-bit mix per token id, in wrapping arithmetic.

Torch shifts signed integers arithmetically; a logical shift is that, with the copies of the sign bit masked off.
"""

from __future__ import annotations

import torch

MIX64 = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1))  # the finaliser of splitmix64
MIX32 = ((16, 0x7FEB352D), (15, -0x7B935975), (16, 1))
GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, odd
ALMOST = (1 - 2**-23) * 2**-31  # takes 31 bits and a half into (0, 1), and never to 1


def counter_gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab: int, device: torch.device) -> torch.Tensor:
    """See `kernels.gumbel.counter_gumbel`."""
    tokens = torch.arange(vocab, device=device, dtype=torch.int32).unsqueeze(0)
    return _noise(seeds.to(device), positions.to(device), tokens)


def counter_gumbel_at(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """See `kernels.gumbel.counter_gumbel_at`."""
    return _noise(seeds, positions, tokens.to(torch.int32))


def _noise(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Noise [m, c] for tokens [1 or m, c] int32."""
    key = _mix(_mix(seeds + GOLDEN, MIX64, 64) + positions * GOLDEN, MIX64, 64).unsqueeze(1)
    factor = (key >> 32).to(torch.int32).bitwise_or_(1)
    word = _mix(_mix(tokens.clone(), MIX32, 32) * factor + key.to(torch.int32), MIX32, 32)
    uniform = word.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(ALMOST)
    # -log(-log(1 - uniform)): float32 is finest near 0, so this way round the large noise, which wins, is finest.
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(word: torch.Tensor, rounds: tuple[tuple[int, int], ...], bits: int) -> torch.Tensor:
    """A bijection of `bits`-bit words under which neighbours share nothing; in place."""
    for shift, factor in rounds:
        high = (word >> shift).bitwise_and_((1 << (bits - shift)) - 1)
        word.bitwise_xor_(high)
        if factor != 1:
            word.mul_(factor)
    return word
