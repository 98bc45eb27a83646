from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.causal_conv1d.cases import SHAPES, Shape, make
from kernels.causal_conv1d.reference import conv_block, conv_window, conv_windows_all
from kernels.registry import IMPLEMENTATIONS, load
from tests.kernels import oracles
from tests.kernels.checks import assert_exact, path_table, strided

BLOCKS = tuple(IMPLEMENTATIONS["causal_conv1d.conv_block"])
WINDOWS = tuple(IMPLEMENTATIONS["causal_conv1d.conv_window"])
ALL = tuple(IMPLEMENTATIONS["causal_conv1d.conv_windows_all"])


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BLOCKS)
def test_block_is_the_definition(name: str, shape: str, tree: bool) -> None:
    case = make(SHAPES[shape], tree=tree)
    before = case.window.clone()
    run = load("causal_conv1d.conv_block", name, conv_block)
    assert_exact(run(case.x, case.window, case.weight, case.bias, case.parents), oracles.convolution(case)[0])
    assert torch.equal(case.window, before)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ALL)
def test_windows_after_every_node(name: str, shape: str, tree: bool) -> None:
    case = make(SHAPES[shape], tree=tree)
    got = load("causal_conv1d.conv_windows_all", name, conv_windows_all)(case.x, case.window, case.parents)
    assert got.is_contiguous()
    assert torch.equal(got, oracles.convolution(case)[1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", WINDOWS)
def test_window_after_a_prefix(name: str, shape: str) -> None:
    case = make(SHAPES[shape])
    run = load("causal_conv1d.conv_window", name, conv_window)
    windows = oracles.convolution(case)[1]
    got = run(case.x, case.window, case.path, case.count.int())
    for i, count in enumerate(case.count.tolist()):
        assert torch.equal(got[i], case.window[i] if count == 0 else windows[i, count - 1])
    assert torch.equal(run(case.x, case.window, case.path, 0 * case.count), case.window)
    assert torch.equal(run(case.x, case.window, case.path[:, :0], 0 * case.count), case.window)
    assert torch.equal(run(case.x, case.window, None, case.count), got)


@pytest.mark.parametrize("name", WINDOWS)
def test_window_along_a_tree_path(name: str) -> None:
    case = make(Shape(4, 9), tree=True)
    assert case.parents is not None
    run = load("causal_conv1d.conv_window", name, conv_window)
    for node in range(9):
        path, count = path_table(case.parents, node)
        got = run(case.x, case.window, path, count)
        assert torch.equal(got, conv_windows_all(case.x, case.window, case.parents)[:, node])


def test_window_ignores_what_lies_behind_count() -> None:
    case = make(Shape(2, 4))
    path = torch.tensor([[0, 1, 99, -5], [-1, 77, 88, 99]])
    count = torch.tensor([2, 0])
    x = case.x.clone()
    x[:, 2:] = float("nan")
    got = conv_window(x, case.window, path, count)
    assert torch.equal(got[1], case.window[1])
    assert torch.equal(got[0], torch.cat([case.window[0, :, 2:], case.x[0, :2].T], 1))


@pytest.mark.parametrize("cut", range(12))
def test_two_blocks_are_one(cut: int) -> None:
    case = make(Shape(3, 11))
    whole = conv_block(case.x, case.window, case.weight, case.bias, None)
    first, second = case.x[:, :cut], case.x[:, cut:]
    window = conv_window(first, case.window, case.path[:, :cut], torch.full((3,), cut))
    pieces = [conv_block(each, w, case.weight, case.bias, None) for each, w in ((first, case.window), (second, window))]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tree", [False, True])
def test_strides_do_not_matter(tree: bool) -> None:
    case = make(Shape(3, 6), tree=tree)
    odd = replace(case, x=strided(case.x), window=strided(case.window), weight=strided(case.weight))
    args = (case.x, case.window), (odd.x, odd.window)
    assert torch.equal(*(conv_block(*each, case.weight, case.bias, case.parents) for each in args))
    assert torch.equal(*(conv_window(*each, case.path, case.count) for each in args))
    assert torch.equal(*(conv_windows_all(*each, case.parents) for each in args))


def test_half_precision_is_summed_in_float32() -> None:
    case = make(Shape(2, 5))
    assert case.bias is not None
    half = replace(
        case,
        x=case.x.bfloat16(),
        weight=case.weight.bfloat16(),
        bias=case.bias.bfloat16(),
        window=case.window.bfloat16(),
    )
    got = conv_block(half.x, half.window, half.weight, half.bias, None)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, oracles.convolution(half)[0].bfloat16())
