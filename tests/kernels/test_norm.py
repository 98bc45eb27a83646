from __future__ import annotations

import pytest
import torch

from kernels.norm.cases import SHAPES, make
from kernels.norm.reference import rms_norm, rms_norm_gated
from kernels.registry import IMPLEMENTATIONS, load
from tests.kernels.checks import assert_exact


def normed(x: torch.Tensor, size: int, eps: float) -> torch.Tensor:
    groups = x.double().reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return (groups / torch.sqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).reshape(x.shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", tuple(IMPLEMENTATIONS["norm.rms_norm"]))
def test_norm_is_the_definition(name: str, shape: str) -> None:
    case = make(SHAPES[shape])
    got = load("norm.rms_norm", name, rms_norm)(case.x, case.weight, case.eps)
    assert_exact(got, normed(case.x, case.x.shape[-1], case.eps) * case.weight.double())


@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", tuple(IMPLEMENTATIONS["norm.rms_norm_gated"]))
def test_gated_norm_is_the_definition(name: str, shape: str, norm_before_gate: bool) -> None:
    case = make(SHAPES[shape])
    run = load("norm.rms_norm_gated", name, rms_norm_gated)
    got = run(case.x, case.gate, case.weight, case.eps, norm_before_gate=norm_before_gate, group_size=case.group_size)
    gate, x, size = case.gate.double(), case.x.double(), case.group_size or case.x.shape[-1]
    opening = gate * torch.sigmoid(gate)
    want = normed(x, size, case.eps) * opening if norm_before_gate else normed(x * opening, size, case.eps)
    assert_exact(got, want * case.weight.double())


def test_half_precision_is_normed_in_float32() -> None:
    case = make(SHAPES["wide"])
    x = torch.where(case.x > 0, 1000.0, -400.0).half()  # squares of these overflow float16
    weight = case.weight.half()
    got = rms_norm(x, weight, case.eps)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.double(), normed(x, 768, case.eps) * weight.double(), rtol=2e-3, atol=1e-3)


def test_transformers_agrees() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    granite = pytest.importorskip("transformers.models.granitemoehybrid.modeling_granitemoehybrid")
    case = make(SHAPES["groups"])
    after = granite.GraniteMoeHybridRMSNormGated(24, 8, case.eps)
    before = qwen.Qwen3_5RMSNormGated(24, case.eps)
    centred = qwen.Qwen3_5RMSNorm(24, case.eps)
    with torch.no_grad():
        after.weight.copy_(case.weight)
        before.weight.copy_(case.weight)
        centred.weight.copy_(case.weight - 1)
        pairs = (
            (
                rms_norm_gated(case.x, case.gate, case.weight, case.eps, norm_before_gate=False, group_size=8),
                after(case.x, case.gate),
            ),
            (
                rms_norm_gated(case.x, case.gate, case.weight, case.eps, norm_before_gate=True, group_size=None),
                before(case.x, case.gate),
            ),
            (rms_norm(case.x, case.weight, case.eps), centred(case.x)),
        )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
