from __future__ import annotations

import pytest
import torch

from kernels.registry import IMPLEMENTATIONS, load
from kernels.rotary.cases import SHAPES, Case, make
from kernels.rotary.reference import apply_rotary
from kernels.rotary.tables import full_width, partners
from tests.kernels.checks import assert_exact

NAMES = tuple(IMPLEMENTATIONS["rotary.apply_rotary"])


def run(name: str, case: Case, x: torch.Tensor) -> torch.Tensor:
    dim = x.shape[2]
    cos, sin = full_width(case.cos, case.sin, dim)
    return load("rotary.apply_rotary", name, apply_rotary)(x, cos, sin, partners(case.cos.shape[1], dim))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_pairs_turn_as_complex_numbers(name: str, shape: str) -> None:
    case = make(SHAPES[shape])
    x, r = case.x, case.cos.shape[1]
    turn = torch.complex(case.cos.double(), case.sin.double()).unsqueeze(1)
    turned = torch.complex(x[..., :r].double(), x[..., r : 2 * r].double()) * turn
    assert_exact(run(name, case, x), torch.cat([turned.real, turned.imag, x[..., 2 * r :].double()], 2))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_rotated_passes_bit_by_bit(name: str) -> None:
    case = make(SHAPES["partial"])
    r = case.cos.shape[1]
    assert torch.equal(run(name, case, case.x)[..., 2 * r :], case.x[..., 2 * r :])


def test_half_precision_stays_half() -> None:
    case = make(SHAPES["partial"])
    assert run("reference", case, case.x.bfloat16()).dtype == torch.bfloat16


def test_transformers_agrees() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    case = make(SHAPES["partial"])
    cos, sin = (torch.cat([table, table], 1) for table in (case.cos, case.sin))
    want, _ = modeling.apply_rotary_pos_emb(case.x, case.x, cos, sin)
    torch.testing.assert_close(run("reference", case, case.x), want)
