"""Every test of the runtime ends with empty pools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.engines import check_all_idle

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def conserve() -> Iterator[None]:
    """CONSERVE: whatever the test did, every engine gave everything back."""
    yield
    check_all_idle()
