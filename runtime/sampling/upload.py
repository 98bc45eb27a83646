"""Host integers to the device without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch


def upload(values: Seq[int], device: torch.device) -> torch.Tensor:
    """`values` as an int64 tensor [n] on `device`; from pinned memory where a plain copy would wait for the stream."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int64)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
