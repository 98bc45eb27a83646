from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import mamba2
from kernels.mamba2.cases import SHAPES, Case, Shape, make
from kernels.mamba2.reference import block, scan, steps
from kernels.registry import IMPLEMENTATIONS, load
from kernels.state_fold import fold
from tests.kernels import oracles
from tests.kernels.checks import assert_exact, path_table, strided

SCANS = tuple(IMPLEMENTATIONS["mamba2.scan"])
STEPS = tuple(IMPLEMENTATIONS["mamba2.steps"])
BLOCKS = tuple(IMPLEMENTATIONS["mamba2.block"])


def run_scan(name: str, case: Case, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    run = load("mamba2.scan", name, scan)
    return run(case.x, case.dt, case.A, case.B, case.C, case.D, case.state, chunk)


def run_steps(name: str, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    run = load("mamba2.steps", name, steps)
    return run(case.x, case.dt, case.A, case.B, case.C, case.D, case.state, case.parents, None)


def run_block(name: str, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    run = load("mamba2.block", name, block)
    return run(case.x, case.dt, case.A, case.B, case.C, case.D, case.state, case.parents)


def part(case: Case, start: int, stop: int, state: torch.Tensor) -> Case:
    span = slice(start, stop)
    return replace(
        case, x=case.x[:, span], dt=case.dt[:, span], B=case.B[:, span], C=case.C[:, span], state=state, parents=None
    )


def assert_end(end: torch.Tensor, case: Case) -> None:
    exact, rough = (oracles.mamba2(case, dtype)[1] for dtype in (torch.float64, torch.float32))
    if case.x.shape[1] == 0:
        assert torch.equal(end, case.state)
    else:
        assert_exact(end, exact[:, -1], rough[:, -1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCANS)
def test_scan_is_the_recurrence(name: str, shape: str) -> None:
    case = make(SHAPES[shape])
    y, end = run_scan(name, case, 8)
    assert_exact(y, oracles.mamba2(case)[0], oracles.mamba2(case, torch.float32)[0])
    assert_end(end, case)


@pytest.mark.parametrize("chunk", [1, 5, 8])
@pytest.mark.parametrize("name", SCANS)
def test_scan_of_every_length_up_to_three_chunks(name: str, chunk: int) -> None:
    whole = make(Shape(2, 3 * chunk + 1, 2, 3, 1, 4), padded=False, seed=chunk)
    exact, rough = oracles.mamba2(whole), oracles.mamba2(whole, torch.float32)
    for T in range(1, 3 * chunk + 2):
        y, end = run_scan(name, part(whole, 0, T, whole.state), chunk)
        assert_exact(y, exact[0][:, :T], rough[0][:, :T])
        assert_exact(end, exact[1][:, T - 1], rough[1][:, T - 1])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", SCANS)
def test_scan_in_pieces_is_the_scan(name: str, seed: int) -> None:
    case = make(Shape(2, 29, 4, 5, 2, 6), seed=seed)
    cuts = sorted(torch.randint(0, 30, (3,), generator=torch.Generator().manual_seed(seed)).tolist())
    state, outputs = case.state, []
    for start, stop in zip([0, *cuts], [*cuts, 29], strict=True):
        y, state = run_scan(name, part(case, start, stop, state), 8)
        outputs.append(y)
    assert_exact(torch.cat(outputs, 1), oracles.mamba2(case)[0], run_scan(name, case, 8)[0])
    assert_end(state, case)


@pytest.mark.parametrize("name", SCANS)
def test_chunk_decays_are_differences_of_large_sums(name: str) -> None:
    """A token with a huge decay early in a chunk must not cost the later ones their precision."""
    case = make(Shape(1, 64, 2, 4, 1, 8), padded=False)
    dt = case.dt.clamp(max=0.01)
    dt[:, 3] = 3e4
    case = replace(case, dt=dt, A=torch.full((2,), -1.0))
    y, end = run_scan(name, case, 64)
    assert_exact(y[:, 4:], oracles.mamba2(case)[0][:, 4:])
    assert_end(end, case)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_the_recurrence(name: str, shape: str, tree: bool) -> None:
    case = make(SHAPES[shape], tree=tree)
    (y, states), rough = oracles.mamba2(case), oracles.mamba2(case, torch.float32)
    got = run_steps(name, case)
    assert_exact(got[0], y, rough[0])
    assert_exact(got[1], states, rough[1])


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BLOCKS)
def test_block_and_fold_are_the_recurrence(name: str, shape: str, tree: bool) -> None:
    case = make(SHAPES[shape], tree=tree)
    (y, states), rough = oracles.mamba2(case), oracles.mamba2(case, torch.float32)
    got, log_decay, u, k = run_block(name, case)
    assert_exact(got, y, rough[0])
    n, T = case.x.shape[:2]
    parents = torch.arange(-1, T - 1).expand(n, T) if case.parents is None else case.parents
    for t in range(min(T, 8)):
        path, count = path_table(parents, t)
        assert_exact(fold(case.state, log_decay, u, k, path, count), states[:, t], rough[1][:, t])


@pytest.mark.parametrize("name", BLOCKS)
def test_a_tree_that_is_a_chain_is_the_chain(name: str) -> None:
    case = make(Shape(3, 6))
    chain = replace(case, parents=torch.arange(-1, 5).repeat(3, 1))
    for got, want in zip(run_block(name, chain), run_block(name, case), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for got, want in zip(run_steps(STEPS[0], chain), run_steps(STEPS[0], case), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("tree", [False, True])
def test_states_go_where_the_caller_wants_them(tree: bool) -> None:
    case = make(Shape(3, 5), tree=tree)
    y, states = run_steps("reference", case)
    scratch = torch.empty(4, 7, *case.state.shape[1:])
    again, out = mamba2.steps(
        case.x, case.dt, case.A, case.B, case.C, case.D, case.state, case.parents, scratch[1:, :5]
    )
    assert torch.equal(again, y)
    assert torch.equal(scratch[1:, :5], states)
    assert out.data_ptr() == scratch[1:].data_ptr()


def test_padded_tokens_leave_the_state_alone() -> None:
    case = make(Shape(4, 9), seed=3)
    _, end = run_scan("reference", case, 4)
    for i, length in enumerate(case.lengths.tolist()):
        row = replace(part(case, 0, length, case.state[i : i + 1]), A=case.A)
        alone = replace(row, **{f: getattr(row, f)[i : i + 1] for f in ("x", "dt", "B", "C")})
        torch.testing.assert_close(end[i : i + 1], run_scan("reference", alone, 4)[1], rtol=1e-5, atol=1e-6)


def test_nothing_is_written_and_strides_do_not_matter() -> None:
    case = make(Shape(2, 6, 4, 5, 2, 6), tree=True)
    odd = replace(case, **{f: strided(getattr(case, f)) for f in ("x", "dt", "B", "C", "state")})
    before = case.state.clone()
    for run in (run_block, run_steps):
        for got, want in zip(run("reference", odd), run("reference", case), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for got, want in zip(run_scan("reference", odd, 4), run_scan("reference", case, 4), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(case.state, before)


def test_half_precision_inputs_keep_a_float32_state() -> None:
    case = make(Shape(2, 6))
    half = [each.bfloat16() for each in (case.x, case.dt, case.A, case.B, case.C, case.D)]
    x, dt, A, B, C, D = half
    y, end = mamba2.scan(x, dt, A, B, C, D, case.state, 4)
    assert (y.dtype, end.dtype) == (torch.bfloat16, torch.float32)
    same, states = mamba2.steps(x, dt, A, B, C, D, case.state)
    torch.testing.assert_close(end, states[:, -1])
    torch.testing.assert_close(same, y, rtol=1e-2, atol=1e-2)
    out, _, u, k = mamba2.block(x, dt, A, B, C, D, case.state)
    assert (out.dtype, u.dtype, k.dtype) == (torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.parametrize("T", [1, 7, 16, 40])
def test_transformers_agrees(T: int) -> None:
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    case = make(Shape(2, T, 4, 8, 2, 16), padded=False)
    want = modeling.mamba2_chunk_scan(
        case.x, case.dt, case.A, case.B, case.C, 16, D=case.D, initial_states=case.state, return_final_states=True
    )
    got = mamba2.scan(case.x, case.dt, case.A, case.B, case.C, case.D, case.state, 16)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
