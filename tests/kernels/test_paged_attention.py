from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from kernels.paged_attention.cases import SHAPES, Case, Shape, make
from kernels.paged_attention.reference import attend, kv_write, layout, move_cells, successive
from kernels.registry import IMPLEMENTATIONS, load
from tests.kernels import oracles
from tests.kernels.checks import assert_exact, strided

NAMES = tuple(IMPLEMENTATIONS["paged_attention.attend"])
TREES = tuple(name for name, shape in SHAPES.items() if max(shape.fed, default=0) <= 32)


def run(name: str, case: Case) -> torch.Tensor:
    size = case.k_cache.shape[1]
    made = load("paged_attention.layout", name, layout)(
        case.block_table, case.lengths, case.fed, case.max_context, size, case.parents
    )
    return load("paged_attention.attend", name, attend)(case.q, case.k_cache, case.v_cache, made, case.scale)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_attention_is_the_definition_over_a_poisoned_pool(name: str, shape: str) -> None:
    case = make(SHAPES[shape])
    assert_exact(run(name, case), oracles.attention(case))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("name", NAMES)
def test_trees_see_their_ancestors_only(name: str, shape: str, seed: int) -> None:
    case = make(SHAPES[shape], tree=True, seed=seed)
    assert_exact(run(name, case), oracles.attention(case))


@pytest.mark.parametrize("shape", ["verify", "ragged verify", "decode"])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_its_neighbours(name: str, shape: str) -> None:
    case = make(SHAPES[shape])
    whole = run(name, case)
    for i, (start, count) in enumerate(zip(accumulate(case.fed, initial=0), case.fed, strict=False)):
        alone = replace(
            case,
            q=case.q[start : start + count],
            block_table=case.block_table[i : i + 1],
            lengths=case.lengths[i : i + 1],
            fed=(count,),
        )
        torch.testing.assert_close(run(name, alone), whole[start : start + count], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_one_long_prefill_is_many_short_ones(name: str) -> None:
    case = make(Shape((0,), (41,), 4, 2, 8, 4))
    whole = run(name, case)
    for cut in (1, 7, 16, 17, 40):
        for start in range(0, 41, cut):
            stop = min(start + cut, 41)
            piece = replace(case, q=case.q[start:stop], lengths=torch.tensor([start]), fed=(stop - start,))
            torch.testing.assert_close(run(name, piece), whole[start:stop], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", ["verify", "ragged verify", "prefill"])
@pytest.mark.parametrize("name", NAMES)
def test_the_bound_on_the_context_only_bounds(name: str, shape: str) -> None:
    case = make(SHAPES[shape])
    tight = max(int(length) + count for length, count in zip(case.lengths, case.fed, strict=True))
    for bound in (tight, 1000):
        got = run(name, replace(case, max_context=bound))
        torch.testing.assert_close(got, run(name, case), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_padding_rows_do_no_harm(name: str) -> None:
    """They sit on block 0 with length 0, and whatever they compute stays with them."""
    case = make(Shape((5, 0, 9), (1, 1, 1)))
    table = case.block_table.clone()
    table[1] = 0
    got = run(name, replace(case, block_table=table))
    want = oracles.attention(case)
    assert_exact(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("lengths", [(0,), (5,), (5, 16, 3), (0, 9)])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", tuple(IMPLEMENTATIONS["paged_attention.successive"]))
def test_successive_steps_are_laid_out_like_single_ones(name: str, count: int, lengths: tuple[int, ...]) -> None:
    case = make(Shape(lengths, (count,) * len(lengths)))
    size, queries = case.k_cache.shape[1], case.q.view(len(lengths), count, *case.q.shape[1:])
    run_successive = load("paged_attention.successive", name, successive)
    for bound in (case.max_context, max(lengths) + count):
        made = run_successive(case.block_table, case.lengths, count, bound, size)
        for step, seen in enumerate(made):
            got = load("paged_attention.attend", name, attend)(
                queries[:, step], case.k_cache, case.v_cache, seen, case.scale
            )
            single = replace(case, q=queries[:, step], lengths=case.lengths + step, fed=(1,) * len(lengths))
            torch.testing.assert_close(got, run(name, single), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_gathering_in_groups_of_rows_changes_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(Shape(tuple(range(40)), (2,) * 40))
    whole = run("reference", case)
    monkeypatch.setattr("kernels.paged_attention.reference.GATHER", rows * case.max_context * 2 * 16)
    torch.testing.assert_close(run("reference", case), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ["verify", "ragged verify", "prefill"])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision(name: str, shape: str, dtype: torch.dtype) -> None:
    case = make(SHAPES[shape])
    half = replace(case, q=case.q.to(dtype), k_cache=case.k_cache.to(dtype), v_cache=case.v_cache.to(dtype))
    got = run(name, half)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), oracles.attention(half), rtol=2e-2, atol=2e-2)
    mixed = run(name, replace(half, q=case.q))
    assert mixed.dtype == torch.float32
    assert_exact(mixed, oracles.attention(replace(half, q=case.q)))


@pytest.mark.parametrize("shape", ["verify", "ragged verify", "prefill"])
@pytest.mark.parametrize("name", NAMES)
def test_strides_of_q_do_not_matter(name: str, shape: str) -> None:
    case = make(SHAPES[shape])
    torch.testing.assert_close(run(name, replace(case, q=strided(case.q))), run(name, case), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", tuple(IMPLEMENTATIONS["paged_attention.kv_write"]))
def test_write_touches_its_cells_and_nothing_else(name: str) -> None:
    k_cache, v_cache = torch.randn(5, 4, 2, 3), torch.randn(5, 4, 2, 3).bfloat16()
    k, v = torch.randn(3, 2, 3), torch.randn(3, 2, 3)
    want_k, want_v = k_cache.clone(), v_cache.clone()
    cells = torch.tensor([4, 19, 7])
    for i, cell in enumerate(cells.tolist()):
        want_k[cell // 4, cell % 4], want_v[cell // 4, cell % 4] = k[i], v[i]
    run_write = load("paged_attention.kv_write", name, kv_write)
    run_write(k_cache, v_cache, k, v, cells)
    assert torch.equal(k_cache, want_k)
    assert torch.equal(v_cache, want_v)
    run_write(k_cache, v_cache, k[:0], v[:0], cells[:0])
    assert torch.equal(k_cache, want_k)


@pytest.mark.parametrize("name", tuple(IMPLEMENTATIONS["paged_attention.move_cells"]))
def test_moves_read_everything_first(name: str) -> None:
    k_cache, v_cache = torch.randn(5, 4, 2, 3), torch.randn(5, 4, 2, 3)
    before_k, before_v = k_cache.flatten(0, 1).clone(), v_cache.flatten(0, 1).clone()
    source, target = torch.tensor([6, 7, 9, 4]), torch.tensor([5, 6, 7, 4])
    load("paged_attention.move_cells", name, move_cells)(k_cache, v_cache, source, target)
    for cache, before in ((k_cache, before_k), (v_cache, before_v)):
        want = before.clone()
        want[target] = before[source]
        assert torch.equal(cache.flatten(0, 1), want)
