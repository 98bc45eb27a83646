from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import gated_delta
from kernels.gated_delta.cases import SHAPES, Case, Shape, make
from kernels.gated_delta.reference import block, scan, steps
from kernels.registry import IMPLEMENTATIONS, load
from kernels.state_fold import fold
from tests.kernels import oracles
from tests.kernels.checks import assert_exact, path_table, strided

SCANS = tuple(IMPLEMENTATIONS["gated_delta.scan"])
STEPS = tuple(IMPLEMENTATIONS["gated_delta.steps"])
BLOCKS = tuple(IMPLEMENTATIONS["gated_delta.block"])
TOKENS = ("q", "k", "v", "g", "beta")


def run_scan(name: str, case: Case, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    return load("gated_delta.scan", name, scan)(case.q, case.k, case.v, case.g, case.beta, case.state, chunk)


def run_steps(name: str, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    run = load("gated_delta.steps", name, steps)
    return run(case.q, case.k, case.v, case.g, case.beta, case.state, case.parents, None)


def run_block(name: str, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    run = load("gated_delta.block", name, block)
    return run(case.q, case.k, case.v, case.g, case.beta, case.state, case.parents)


def part(case: Case, start: int, stop: int, state: torch.Tensor) -> Case:
    return replace(case, **{f: getattr(case, f)[:, start:stop] for f in TOKENS}, state=state, parents=None)


def assert_end(end: torch.Tensor, case: Case) -> None:
    exact, rough = (oracles.gated_delta(case, dtype)[1] for dtype in (torch.float64, torch.float32))
    if case.v.shape[1] == 0:
        assert torch.equal(end, case.state)
    else:
        assert_exact(end, exact[:, -1], rough[:, -1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCANS)
def test_scan_is_the_recurrence(name: str, shape: str) -> None:
    case = make(SHAPES[shape])
    y, end = run_scan(name, case, 8)
    assert_exact(y, oracles.gated_delta(case)[0], oracles.gated_delta(case, torch.float32)[0])
    assert_end(end, case)


@pytest.mark.parametrize("chunk", [1, 5, 8])
@pytest.mark.parametrize("name", SCANS)
def test_scan_of_every_length_up_to_three_chunks(name: str, chunk: int) -> None:
    whole = make(Shape(2, 3 * chunk + 1, 2, 3, 1, 4), padded=False, seed=chunk)
    exact, rough = oracles.gated_delta(whole), oracles.gated_delta(whole, torch.float32)
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
    assert_exact(torch.cat(outputs, 1), oracles.gated_delta(case)[0], run_scan(name, case, 8)[0])
    assert_end(state, case)


@pytest.mark.parametrize("name", SCANS)
def test_a_chunk_of_equal_keys(name: str) -> None:
    """The triangular system of a chunk is at its worst when every key is the same and beta is 1."""
    case = make(Shape(1, 64, 2, 4, 1, 8), padded=False)
    case = replace(case, k=case.k[:, :1].expand(-1, 64, -1, -1), beta=torch.ones_like(case.beta), g=case.g * 1e-3)
    y, end = run_scan(name, case, 64)
    assert_exact(y, oracles.gated_delta(case)[0])
    assert_end(end, case)


@pytest.mark.parametrize("name", SCANS)
def test_chunk_decays_are_differences_of_large_sums(name: str) -> None:
    """A token with a huge decay early in a chunk must not cost the later ones their precision."""
    case = make(Shape(1, 64, 2, 4, 1, 8), padded=False)
    g = case.g.clamp(min=-0.01)
    g[:, 3] = -3e4
    case = replace(case, g=g)
    y, end = run_scan(name, case, 64)
    assert_exact(y, oracles.gated_delta(case)[0])
    assert_end(end, case)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_the_recurrence(name: str, shape: str, tree: bool) -> None:
    case = make(SHAPES[shape], tree=tree)
    (y, states), rough = oracles.gated_delta(case), oracles.gated_delta(case, torch.float32)
    got = run_steps(name, case)
    assert_exact(got[0], y, rough[0])
    assert_exact(got[1], states, rough[1])


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BLOCKS)
def test_block_and_fold_are_the_recurrence(name: str, shape: str, tree: bool) -> None:
    case = make(SHAPES[shape], tree=tree)
    (y, states), rough = oracles.gated_delta(case), oracles.gated_delta(case, torch.float32)
    got, log_decay, u, k = run_block(name, case)
    assert_exact(got, y, rough[0])
    n, T = case.v.shape[:2]
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
    again, out = gated_delta.steps(case.q, case.k, case.v, case.g, case.beta, case.state, case.parents, scratch[1:, :5])
    assert torch.equal(again, y)
    assert torch.equal(scratch[1:, :5], states)
    assert out.data_ptr() == scratch[1:].data_ptr()


def test_padded_tokens_leave_the_state_alone() -> None:
    case = make(Shape(4, 9), seed=3)
    _, end = run_scan("reference", case, 4)
    for i, length in enumerate(case.lengths.tolist()):
        row = part(case, 0, length, case.state[i : i + 1])
        alone = replace(row, **{f: getattr(row, f)[i : i + 1] for f in TOKENS})
        torch.testing.assert_close(end[i : i + 1], run_scan("reference", alone, 4)[1], rtol=1e-5, atol=1e-6)


def test_nothing_is_written_and_strides_do_not_matter() -> None:
    case = make(Shape(2, 6, 4, 5, 2, 6), tree=True)
    odd = replace(case, **{f: strided(getattr(case, f)) for f in (*TOKENS, "state")})
    before = case.state.clone()
    for run in (run_block, run_steps):
        for got, want in zip(run("reference", odd), run("reference", case), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for got, want in zip(run_scan("reference", odd, 4), run_scan("reference", case, 4), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(case.state, before)


def test_half_precision_inputs_keep_a_float32_state() -> None:
    case = make(Shape(2, 6))
    q, k, v, g, beta = (getattr(case, f).bfloat16() for f in TOKENS)
    y, end = gated_delta.scan(q, k, v, g, beta, case.state, 4)
    assert (y.dtype, end.dtype) == (torch.bfloat16, torch.float32)
    same, states = gated_delta.steps(q, k, v, g, beta, case.state)
    torch.testing.assert_close(end, states[:, -1])
    torch.testing.assert_close(same, y, rtol=1e-2, atol=1e-2)
    out, log_decay, u, key = gated_delta.block(q, k, v, g, beta, case.state)
    assert out.dtype == torch.bfloat16
    assert {each.dtype for each in (log_decay, u, key)} == {torch.float32}


@pytest.mark.parametrize("T", [1, 7, 64, 150])
def test_transformers_agrees(T: int) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    case = make(Shape(2, T, 4, 8, 2, 16), padded=False)
    want, end = modeling.torch_chunk_gated_delta_rule(
        case.q,
        case.k,
        case.v,
        case.g,
        case.beta,
        initial_state=case.state.transpose(2, 3),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    y, state = gated_delta.scan(case.q, case.k, case.v, case.g, case.beta, case.state)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, end.transpose(2, 3), rtol=1e-4, atol=1e-5)
