"""What the device deals in: one step's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.plan import Batch, Mark, RowKind


@dataclass(frozen=True, slots=True, eq=False)
class StepPart:
    """The rows of one kind in one step; they are neighbours in the batch and in the flat token tensor.

    slots, lengths [n] int64: state slots, and tokens committed before this step. slot_ids, fed: slots and tokens fed
    per row, on the host. row_starts [n + 1] int64 relative to the part, positions [t] int64, block_table [n, blocks]
    int64 (padded with block 0), max_context: host upper bound of lengths + fed. `parents` is None for chains; for
    trees [n, max(fed)] int64, the index of each fed node's parent within its row (-1 for the root; parents first).
    `marks` by row of a PREFILL part: places whose states are kept, each with an offset and a checkpoint row.
    """

    kind: RowKind
    rows: slice
    tokens: slice
    slots: torch.Tensor
    slot_ids: tuple[int, ...]
    lengths: torch.Tensor
    fed: tuple[int, ...]
    row_starts: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    max_context: int
    parents: torch.Tensor | None = None
    marks: tuple[tuple[Mark, ...], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """Inputs of one forward.

    tokens, positions [T] int64; slots, lengths [R] int64; fed [R] int64; row_starts [R + 1] int64. `sample_at` [M]
    int64: rows of the flat batch whose logits are wanted - every fed token of DECODE and VERIFY rows, the last one of
    an emitting PREFILL row; `sample_starts`: host prefix sums of how many belong to each row (R + 1 entries).
    """

    batch: Batch
    parts: tuple[StepPart, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    fed: torch.Tensor
    row_starts: torch.Tensor
    sample_at: torch.Tensor
    sample_starts: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SampledLogprobs:
    """Of the model's own distribution, per sampled position [M]: alternatives [M, n] best first, with n >= 1.

    chosen [R, 1 + k] float32 (log-probability of each emitted token), top_tokens / top_values [R, 1 + k, n].
    """

    chosen: torch.Tensor
    top_tokens: torch.Tensor
    top_values: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What one step decided, on the device.

    kept [R] int32: how many of the tokens row i fed enter its state (0 is never legal for a live row).
    path [R, 1 + k] int32: the fed node at each accepted depth (a chain: 0..k).
    emitted [R, 1 + k] int64, num_emitted [R] int32: new tokens; the last emitted one is in no state.
    finish [R] int8: 0 goes on, 1 stop (EOS or stop id), 2 length, 3 failed (logits or state not finite).
    """

    kept: torch.Tensor
    path: torch.Tensor
    emitted: torch.Tensor
    num_emitted: torch.Tensor
    finish: torch.Tensor
    logprobs: SampledLogprobs | None = None
