"""A pool over one recurrent and one attention layer whose contents can be told by counting; no model, no torch oracle.

A token is a small whole number. The recurrent state is the sum of token x (place + 1), its window holds the last three
tokens, and key and value of a place are its token: all whole numbers, exact in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.attention.backend import Recurrence, StateUpdates
from runtime.attention.registry import build_backend
from runtime.state.ledger import Ledger
from runtime.state.paged import KVShape, PagedStore
from runtime.state.pool import StatePool, StateTxn
from runtime.state.prefix import CacheSettings
from runtime.state.recurrent import RecurrentShape, RecurrentStore

WIDTH = 4
RECURRENT, ATTENTION = 0, 1
CPU = torch.device("cpu")


class Counting(Recurrence):
    """S_t = S_{t-1} + u_t with u in the gates; what the convolution makes of x is not used."""

    @property
    def conv_weight(self) -> torch.Tensor:
        return torch.ones(1, WIDTH)

    @property
    def conv_bias(self) -> torch.Tensor | None:
        return None

    def scan(self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, states = self.steps(x, gates, state, None)
        return y, states[:, -1].clone()

    def steps(
        self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, parents: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = state[:, None] + gates.cumsum(1)[..., None]
        return states[..., 0], states

    def block(
        self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, parents: torch.Tensor | None
    ) -> tuple[torch.Tensor, StateUpdates]:
        y, _ = self.steps(x, gates, state, parents)
        return y, StateUpdates(torch.zeros_like(gates[..., 0]), gates, torch.ones_like(gates))


def toy_pool(
    prefill: str,
    decode: str,
    mode: str,
    *,
    num_slots: int,
    num_blocks: int,
    block_size: int,
    k_max: int,
    cache: CacheSettings | None = None,
) -> StatePool:
    """A poisoned pool of that size."""
    kv = PagedStore({ATTENTION: KVShape(1, 1, 1)}, num_blocks, block_size, dtype=torch.float32, device=CPU)
    num_checkpoints = 0 if cache is None else cache.num_checkpoints
    shapes = {RECURRENT: RecurrentShape(1, WIDTH, 1, 1, 1, 1)}
    recurrent = RecurrentStore(shapes, num_slots, device=CPU, num_checkpoints=num_checkpoints)
    backend = build_backend(prefill, decode, mode, kv=kv, recurrent=recurrent, max_fed=1 + k_max)
    ledger = Ledger(num_blocks=num_blocks, block_size=block_size, num_slots=num_slots, cache=cache)
    return StatePool(
        ledger, kv, recurrent, backend, max_blocks=num_blocks, reserve_ahead=k_max, device=CPU, poison=float("nan")
    )


def forward(txn: StateTxn, tokens: Sequence[Sequence[int]]) -> tuple[list[list[float]], list[list[float]]]:
    """Feeds each row's tokens. By row and position: the recurrent sum, and the mean of all tokens so far."""
    flat = torch.tensor([float(token) for row in tokens for token in row])
    places = torch.cat([part.positions for part in txn.parts])
    sums = txn.mix(RECURRENT, Counting(), flat[:, None], (flat * (places + 1))[:, None, None])
    q = torch.zeros(flat.shape[0], 1, 1)
    means = txn.attend(ATTENTION, q, flat[:, None, None], flat[:, None, None], 1.0)
    sizes = [len(row) for row in tokens]
    return tuple([part.flatten().tolist() for part in side.split(sizes)] for side in (sums, means))
