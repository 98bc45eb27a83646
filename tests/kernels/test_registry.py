from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import timeit
from pathlib import Path

import pytest
import torch

import kernels
from kernels.mamba2 import reference
from kernels.registry import IMPLEMENTATIONS, PREFERENCE, implementation, load
from kernels.tree import ancestors
from tests.kernels.checks import paths


def nothing() -> None:
    """Stands in for a type."""


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_every_implementation_has_its_ops_signature(op: str) -> None:
    module, function = op.split(".")
    public = inspect.signature(getattr(importlib.import_module(f"kernels.{module}"), function))
    for name in IMPLEMENTATIONS[op]:
        own = inspect.signature(load(op, name, nothing))
        assert list(own.parameters) == list(public.parameters)
        assert own.return_annotation == public.return_annotation
    assert "reference" in IMPLEMENTATIONS[op]


def test_every_public_op_is_registered() -> None:
    root = Path(kernels.__file__).parent
    public = {
        f"{folder.parent.name}.{node.name}"
        for folder in root.glob("*/__init__.py")
        for node in ast.parse(folder.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert public == set(IMPLEMENTATIONS)


def test_every_op_has_cases() -> None:
    root = Path(kernels.__file__).parent
    folders = {path.parent.name for path in root.glob("*/__init__.py")}
    assert folders == {path.parent.name for path in root.glob("*/cases.py")}


def test_the_package_itself_is_a_docstring() -> None:
    body = ast.parse(Path(kernels.__file__).read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


def test_every_device_falls_back_to_the_reference() -> None:
    for preferred in PREFERENCE.values():
        assert preferred[-1] == "reference"
    assert implementation("mamba2.scan", "meta", reference.scan) is reference.scan


def test_choosing_costs_less_than_a_microsecond() -> None:
    x = torch.empty(1)
    best = min(timeit.repeat(lambda: implementation("mamba2.scan", x.device.type, reference.scan), number=1000))
    assert best / 1000 < 2e-6  # a lambda's call included, on a busy machine


def test_kernels_import_torch_and_the_standard_library_only() -> None:
    ops = sorted({op.split(".")[0] for op in IMPLEMENTATIONS})
    code = (
        f"import sys, torch; before = set(sys.modules); import {', '.join(f'kernels.{op}' for op in ops)}; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'kernels', 'torch', 'triton'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("T", [0, 1, 2, 3, 4, 5, 8, 9, 17])
def test_ancestors_are_the_nodes_of_the_path(T: int) -> None:
    parents = torch.tensor([[int(torch.randint(-1, t, ())) if t else -1 for t in range(T)] for _ in range(4)]).view(
        4, T
    )
    got = ancestors(parents.long())
    for row, ways in enumerate(paths(parents)):
        for node, way in enumerate(ways):
            assert got[row, node].nonzero().flatten().tolist() == way
            assert got[row, node].sum() == len(way)
