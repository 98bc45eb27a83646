"""Judging never makes the host wait for the device: no value is read, no shape depends on data."""

from __future__ import annotations

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.plan import RowKind
from tests.runtime.sampling.test_blocks import ASKED, asked
from tests.runtime.sampling.toy import Bench, Item, ToyModel, forward_batch, logits_of

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor", "equal")


class Watch(TorchDispatchMode):
    """Counts calls, and fails on those that need a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # asked to skip it, torch imports all of its compiler first

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = str(func).removeprefix("aten.")
        assert not any(name.startswith(wait) for wait in WAITS), name
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ASKED)
def test_nothing_waits(name: str, temperature: float) -> None:
    bench = Bench(ToyModel())
    for slot in range(1, 5):
        bench.bind(slot, asked(name, temperature if slot % 2 else 0.0), [1, 2])
    items = [
        Item(1, [1, 2], kind=RowKind.PREFILL, num_fed=2, emits=False),
        Item(2, [1, 2], kind=RowKind.PREFILL, num_fed=2),
        Item(3, [1, 2], [1, 2, 3]),
        Item(4, [1, 2], [1]),
    ]
    for some in (items, items[2:3], items[:1]):
        fb, logits = forward_batch(some), logits_of(bench.model, some)
        with Watch():
            bench.verifier.judge(fb, logits)


@pytest.mark.parametrize(("num_drafts", "budget"), [(0, 45), (3, 60)])
def test_plain_greedy_stays_cheap(num_drafts: int, budget: int) -> None:
    bench = Bench(ToyModel(), k_max=num_drafts)
    for slot in (1, 2):
        bench.bind(slot, asked("plain", 0.0), [1, 2])
    items = [Item(slot, [1, 2], [0] * num_drafts) for slot in (1, 2)]
    fb, logits = forward_batch(items), logits_of(bench.model, items)
    with Watch() as watch:
        bench.verifier.judge(fb, logits)
    assert watch.num_calls <= budget
