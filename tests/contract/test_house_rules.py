"""What the code may not do, checked on its syntax tree: nothing optional, nothing dynamic, nothing upwards."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DYNAMIC = {"hasattr", "getattr", "setattr", "delattr", "eval", "exec", "globals", "locals", "__import__"}
EXEMPT: set[tuple[str, str]] = set()  # nothing so far: registries look names up in vars(module)
MAX_LINES = 600


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def violations(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in DYNAMIC:
            if (name_of(path), node.func.id) not in EXEMPT:
                yield f"{node.lineno}: {node.func.id}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if node.args.vararg or node.args.kwarg:
                yield f"{node.lineno}: star parameters"
        elif isinstance(node, ast.Global | ast.Nonlocal):
            yield f"{node.lineno}: global or nonlocal"
        elif isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield f"{node.lineno}: star import"


@pytest.mark.parametrize("path", sources("runtime", "kernels"), ids=name_of)
def test_nothing_dynamic(path: Path) -> None:
    assert not list(violations(path))


def test_exemptions_are_used() -> None:
    for where, name in EXEMPT:
        assert f"{name}(" in (ROOT / where).read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["hasattr(a, 'b')", "def f(*a): 0", "f = lambda **a: 0", "def f():\n global x"])
def test_the_rule_sees(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.contract.test_house_rules.ROOT", tmp_path)
    (tmp_path / "x.py").write_text(text)
    assert list(violations(tmp_path / "x.py"))


def test_the_commit_has_one_caller() -> None:
    """Only the pool calls it, and a composite passes it on once; there is no second way around the pool."""
    calls = [
        name_of(path)
        for path in sources("runtime", "server")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "update_mamba_state_after_mtp_verify"
    ]
    assert calls == ["runtime/attention/hybrid.py", "runtime/state/pool.py"]


@pytest.mark.parametrize("path", sources("server", "runtime", "kernels"), ids=name_of)
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            inside = "." in node.module
            yield from [node.module] if inside else [f"{node.module}.{alias.name}" for alias in node.names]


def test_packages_depend_downwards() -> None:
    for path in sources("server"):
        below = {name for name in imports(path) if name.split(".")[0] in {"runtime", "kernels", "torch", "triton"}}
        assert below <= {"runtime", "runtime.api"}, name_of(path)
    for path in sources("runtime"):
        assert not {name.split(".")[0] for name in imports(path)} & {"server", "fastapi", "pydantic", "transformers"}
    for path in sources("kernels"):
        allowed = {"kernels", "torch", "triton", *sys.stdlib_module_names}
        assert {name.split(".")[0] for name in imports(path)} <= allowed, name_of(path)


def test_planning_needs_no_torch() -> None:
    """Nor does the HTTP process, whatever it imports on the way."""
    code = "import sys, runtime.api, runtime.plan, runtime.scheduler, server.__main__; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
