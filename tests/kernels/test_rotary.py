from __future__ import annotations

import pytest
import torch

from kernels.registry import IMPLEMENTATIONS, load
from kernels.rotary.cases import SHAPES, make
from kernels.rotary.reference import apply_rotary
from tests.kernels.checks import assert_exact

NAMES = tuple(IMPLEMENTATIONS["rotary.apply_rotary"])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_pairs_turn_as_complex_numbers(name: str, shape: str) -> None:
    case = make(SHAPES[shape])
    r = case.cos.shape[1]
    turn = torch.complex(case.cos.double(), case.sin.double()).unsqueeze(1)
    for got, x in zip(
        load("rotary.apply_rotary", name, apply_rotary)(case.q, case.k, case.cos, case.sin),
        (case.q, case.k),
        strict=True,
    ):
        turned = torch.complex(x[..., :r].double(), x[..., r : 2 * r].double()) * turn
        assert_exact(got, torch.cat([turned.real, turned.imag, x[..., 2 * r :].double()], 2))


def test_half_precision_stays_half() -> None:
    case = make(SHAPES["partial"])
    q, k = apply_rotary(case.q.bfloat16(), case.k.bfloat16(), case.cos, case.sin)
    assert (q.dtype, k.dtype) == (torch.bfloat16, torch.bfloat16)


def test_transformers_agrees() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    case = make(SHAPES["partial"])
    cos, sin = (torch.cat([table, table], 1) for table in (case.cos, case.sin))
    want = modeling.apply_rotary_pos_emb(case.q, case.k, cos, sin)
    for mine, theirs in zip(apply_rotary(case.q, case.k, case.cos, case.sin), want, strict=True):
        torch.testing.assert_close(mine, theirs)
