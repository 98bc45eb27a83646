from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cases import generator, random_parents
from kernels.registry import IMPLEMENTATIONS, load
from kernels.state_fold.cases import SHAPES, Case, Shape, make
from kernels.state_fold.reference import fold, unroll
from tests.kernels.checks import assert_exact, path_table, strided

NAMES = tuple(IMPLEMENTATIONS["state_fold.fold"])


def run(name: str, case: Case) -> torch.Tensor:
    return load("state_fold.fold", name, fold)(case.state, case.log_decay, case.u, case.k, case.path, case.count)


def folded(case: Case, dtype: torch.dtype) -> torch.Tensor:
    state = case.state.to(dtype).clone()
    share = state.shape[1] // case.k.shape[2]
    for i, count in enumerate(case.count.tolist()):
        for node in case.path[i, :count].tolist():
            for h in range(state.shape[1]):
                update = torch.outer(case.u[i, node, h].to(dtype), case.k[i, node, h // share].to(dtype))
                state[i, h] = torch.exp(case.log_decay[i, node, h].to(dtype)) * state[i, h] + update
    return state


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_fold_is_the_recurrence_along_the_path(name: str, shape: str, seed: int) -> None:
    case = make(SHAPES[shape], seed=seed)
    before = case.state.clone()
    assert_exact(run(name, case), folded(case, torch.float64), folded(case, torch.float32))
    assert torch.equal(case.state, before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_fold_changes_nothing(name: str, shape: str) -> None:
    case = make(SHAPES[shape])
    case = replace(case, count=0 * case.count.int())
    got = run(name, case)
    assert torch.equal(got, case.state)
    assert got.untyped_storage().data_ptr() != case.state.untyped_storage().data_ptr() or got.numel() == 0


@pytest.mark.parametrize("name", NAMES)
def test_nodes_off_the_path_have_no_influence(name: str) -> None:
    case = make(Shape(4, 7, 4), seed=1)
    used = torch.zeros(4, 7, dtype=torch.bool)
    for i, count in enumerate(case.count.tolist()):
        used[i, case.path[i, :count]] = True
    poisoned = replace(
        case,
        log_decay=case.log_decay.masked_fill(~used[:, :, None], float("nan")),
        u=case.u.masked_fill(~used[:, :, None, None], float("inf")),
        k=case.k.masked_fill(~used[:, :, None, None], float("nan")),
    )
    assert torch.equal(run(name, poisoned), run(name, case))


@pytest.mark.parametrize("name", NAMES)
def test_two_folds_are_one(name: str) -> None:
    case = make(Shape(3, 8, 8), seed=2)
    case = replace(case, path=torch.arange(8).repeat(3, 1), count=torch.full((3,), 8))
    for cut in range(9):
        first = run(name, replace(case, count=torch.full((3,), cut)))
        second = replace(case, state=first, path=case.path[:, cut:], count=torch.full((3,), 8 - cut))
        assert_exact(run(name, second), folded(case, torch.float64), folded(case, torch.float32))


@pytest.mark.parametrize("name", NAMES)
def test_strides_do_not_matter(name: str) -> None:
    case = make(Shape(3, 5, 4))
    odd = replace(case, **{f: strided(getattr(case, f)) for f in ("state", "log_decay", "u", "k", "path")})
    assert torch.equal(run(name, odd), run(name, case))


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_needs_no_path(name: str) -> None:
    case = make(Shape(5, 6, 6), seed=4)
    case = replace(case, path=torch.arange(6).repeat(5, 1), u=case.u.clone(), k=case.k.clone())
    for i, count in enumerate(case.count.tolist()):
        case.u[i, count:] = float("nan")
        case.k[i, count:] = float("inf")
    run_fold = load("state_fold.fold", name, fold)
    got = run_fold(case.state, case.log_decay, case.u, case.k, None, case.count)
    assert_exact(got, folded(case, torch.float64), folded(case, torch.float32))


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", tuple(IMPLEMENTATIONS["state_fold.unroll"]))
def test_unrolled_states_are_folds_to_every_node(name: str, shape: str, tree: bool) -> None:
    case = make(SHAPES[shape])
    n, T = case.u.shape[:2]
    parents = random_parents(n, T, generator(5)) if tree else torch.arange(-1, T - 1).repeat(n, 1)
    run_unroll = load("state_fold.unroll", name, unroll)
    args = (case.state, case.log_decay, case.u, case.k, parents if tree else None)
    got = run_unroll(*args, None)
    for node in range(T):
        path, count = path_table(parents, node)
        each = replace(case, path=path, count=count)
        assert_exact(got[:, node], folded(each, torch.float64), folded(each, torch.float32))
    wide = torch.full((n + 2, T + 1, *case.state.shape[1:]), float("nan"))
    out = wide[1 : n + 1, :T]
    assert run_unroll(*args, out) is out
    assert torch.equal(out, got)
    assert bool(wide[:1].isnan().all() and wide[n + 1 :].isnan().all() and wide[:, T:].isnan().all())
