"""KV tensors in blocks. Block 0 is padding: padded rows write there, nobody reads it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVShape:
    """One attention layer's cache: heads, and the width of a key and of a value."""

    kv_heads: int
    k_dim: int
    v_dim: int


class PagedStore:
    """Keys and values of some attention layers, each [num_blocks, block_size, kv_heads, dim].

    A draft head has a store of its own with the same block numbers, so one block table serves both.
    """

    def __init__(
        self,
        layers: Mapping[int, KVShape],
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.dtype = dtype
        self.num_blocks = num_blocks
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        for layer, shape in layers.items():
            lead = (num_blocks, block_size, shape.kv_heads)
            self.keys[layer] = torch.zeros(*lead, shape.k_dim, dtype=dtype, device=device)
            self.values[layer] = torch.zeros(*lead, shape.v_dim, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return sum(t.numel() * t.element_size() for t in (*self.keys.values(), *self.values.values()))

    def clear(self) -> None:
        """All blocks become 0, padding included."""
        for tensor in (*self.keys.values(), *self.values.values()):
            tensor.zero_()

    def fill(self, blocks: list[int], value: float) -> None:
        """Overwrites whole blocks (tests poison freed ones, so that a stale read shows)."""
        index = torch.tensor(blocks, dtype=torch.long)
        for tensor in (*self.keys.values(), *self.values.values()):
            tensor[index.to(tensor.device)] = value

    def copy(self, sources: Seq[int], targets: Seq[int]) -> None:
        """Copies whole blocks. No target is also a source."""
        for tensor in (*self.keys.values(), *self.values.values()):
            tensor[list(targets)] = tensor[list(sources)]

    def take_out(self, block: int) -> list[torch.Tensor]:
        """Copies of one block in host memory."""
        return [tensor[block].to("cpu", copy=True) for tensor in (*self.keys.values(), *self.values.values())]

    def put_in(self, block: int, saved: list[torch.Tensor]) -> None:
        """Makes what `take_out` gave the content of a block."""
        for tensor, each in zip((*self.keys.values(), *self.values.values()), saved, strict=True):
            tensor[block] = each.to(tensor.device)
