"""What the docs say exists, exists; what is made from code says what the code says."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from kernels.registry import IMPLEMENTATIONS
from runtime import support
from runtime.api import EngineStats
from runtime.attention.registry import STRATEGIES
from runtime.models.registry import FAMILIES
from runtime.sampling.processors import PROCESSORS
from runtime.speculation.registry import PROPOSERS
from server import docs
from server.__main__ import COMMANDS
from server.meter import Meter

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PACKAGES = ("server", "runtime", "kernels")
TOPS = (*PACKAGES, "tests", "docs", "deploy")

CODE = re.compile(r"`([^`\n]+)`")
FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PLACE = re.compile(rf"(?<![\w/.:@-])((?:{'|'.join(TOPS)})/[\w/.<>*-]*\w)(?::(\w+(?:\.\w+)*))?")
MODULE = re.compile(rf"(?<![\w/.-])((?:{'|'.join(PACKAGES)})(?:\.\w+)+):(\w+)")
MAKE = re.compile(r"(?:`|^\s*\$? ?)make ([a-z][\w-]*)", re.MULTILINE)
METRIC = re.compile(r"\blockstep_[a-z0-9_]*[a-z0-9]\b")
ELSEWHERE = re.compile(r"(?<![\w.:/])/(?:work|tmp|home|root|mnt|Users)/")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def files() -> frozenset[str]:
    """Every file and folder a page may name, from the root."""
    found = [path for top in TOPS if (ROOT / top).is_dir() for path in (ROOT / top).rglob("*")]
    return frozenset(name_of(path) for path in found if "__pycache__" not in path.parts)


def exists(name: str) -> bool:
    """A file, a folder, a module without .py, or a number without its title (docs/adr/0007). `<x>` may be anything."""
    known = re.split(r"[<*]", name, maxsplit=1)[0]
    if known != name:
        known = known.rpartition("/")[0]
    return (ROOT / known).exists() or any(path.startswith((f"{known}.", f"{known}-")) for path in files())


def has_symbol(path: Path, symbol: str) -> bool:
    body: list[ast.stmt] = ast.parse(read(path)).body
    for name in symbol.split("."):
        found = [node for node in body if name in names_of(node)]
        if not found:
            return False
        body = found[0].body if isinstance(found[0], ast.ClassDef) else []
    return True


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def unknown(text: str, folder: Path) -> Iterator[str]:
    """Names in a page that nothing answers to."""
    for name, symbol in PLACE.findall(text):
        if not exists(name) and not (folder / name).exists():
            yield name
        elif symbol and name.endswith(".py") and not has_symbol(ROOT / name, symbol):
            yield f"{name}:{symbol}"
    for module, symbol in MODULE.findall(text):
        path = ROOT / (module.replace(".", "/") + ".py")
        if not path.is_file() or not has_symbol(path, symbol):
            yield f"{module}:{symbol}"
    for name in CODE.findall(FENCED.sub("", text)):
        if re.fullmatch(r"[\w/.-]+\.py|[\w-]+(?:/[\w-]+)+", name) and not named_below(name, folder):
            yield name


def named_below(name: str, folder: Path) -> bool:
    """`step.py` or `state/ledger`: a file somewhere in the repository, or beside the page. Else no path is meant."""
    first = name.partition("/")[0]
    if not name.endswith(".py") and not any((ROOT / package / first).is_dir() for package in PACKAGES):
        return True
    return (folder / name).exists() or any(
        path.endswith((f"/{name}", f"/{name}.py")) or path == name for path in files()
    )


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead(text: str, folder: Path, here: str) -> Iterator[str]:
    """Relative links that lead nowhere."""
    for link in LINK.findall(FENCED.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = folder / path
        missing = path and not target.exists()
        if missing or (anchor and anchor not in anchors(read(target) if path else here)):
            yield link


@pytest.mark.parametrize("page", docs.PAGES)
def test_generated_pages_say_what_the_code_says(page: str) -> None:
    assert read(ROOT / page) == docs.PAGES[page](), "run `python -m server.docs`"


def test_the_support_page_says_what_the_registries_say() -> None:
    assert read(ROOT / "docs/support.md") == support.markdown(), "run `lockstep support --markdown > docs/support.md`"


def test_support_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "server", "support"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == support.text()
    assert not done.stderr


def test_drift_is_noticed_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["--check"], tmp_path) == 2
    (tmp_path / "docs").mkdir()
    assert docs.main(["--check"], tmp_path) == 1
    assert docs.main([], tmp_path) == 0
    assert docs.main(["--check"], tmp_path) == 0
    (tmp_path / "docs" / "metrics.md").write_text("old")
    assert docs.main(["--check"], tmp_path) == 1
    assert capsys.readouterr().err.count("docs/metrics.md") == 2


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_names_exists(page: Path) -> None:
    assert not list(unknown(read(page), page.parent))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert not list(dead(read(page), page.parent, read(page)))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", read(ROOT / "Makefile"), re.MULTILINE))
    assert set(MAKE.findall(read(page))) <= targets


@functools.cache
def series() -> frozenset[str]:
    """Every name on a page of metrics, at start."""
    meter = Meter("model", "none", EngineStats)
    text = meter.text().decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    return frozenset(names | {re.split(r"[ {]", line)[0] for line in text.splitlines() if not line.startswith("#")})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_metrics_in_docs_exist(page: Path) -> None:
    for name in METRIC.findall(read(page)):
        assert name in series() or any(each.startswith(f"{name}_") for each in series()), name


def test_every_metric_is_documented() -> None:
    page = read(ROOT / "docs/metrics.md")
    assert {name for name in series() if name.startswith("lockstep_") and name not in page} <= {
        name for name in series() if re.search(r"_(?:bucket|sum|count)$", name)
    }


def test_every_registry_entry_is_named() -> None:
    pages = read(ROOT / "docs/support.md") + read(ROOT / "CONTRIBUTING.md")
    features = [feature.name or "" for feature in PROCESSORS]
    for name in (*FAMILIES, *(f"{name}:K" for name in PROPOSERS), *STRATEGIES, *IMPLEMENTATIONS, *features):
        assert f"`{name}`" in pages, name


def test_every_command_and_target_is_named() -> None:
    for command in COMMANDS:
        assert f"`lockstep {command}`" in read(ROOT / "docs/configuration.md")
    described = re.findall(r"^([a-z][\w-]*):.*##", read(ROOT / "Makefile"), re.MULTILINE)
    for target in described:
        assert f"`make {target}`" in read(ROOT / "CONTRIBUTING.md")


@pytest.mark.parametrize(
    "text",
    [
        "see docs/none.md",
        "docs/adr/00",
        "`runtime/none.py`",
        "`runtime/engine.py:None_`",
        "`runtime/engine.py:Engine.none`",
        "runtime.models.none:FAMILY",
        "`none.py`",
        "`state/none`",
        "tests/none/<x>.py",
    ],
)
def test_the_names_are_looked_up(text: str) -> None:
    assert list(unknown(text, ROOT))


@pytest.mark.parametrize(
    "text",
    [
        "docs/adr/0007",
        "`runtime/engine.py:Engine.step`",
        "runtime.models.qwen3_5:FAMILY",
        "`step.py`",
        "`state/ledger`",
        "`runtime/models/<family>.py`",
        "`POST/GET`",
        "https://example.org/docs/none.md",
    ],
)
def test_what_exists_or_is_no_name_is_let_pass(text: str) -> None:
    assert not list(unknown(text, ROOT))


def test_links_are_followed() -> None:
    assert list(dead("[a](docs/none.md) [b](docs/state.md#none) [c](#none)", ROOT, "# Here")) == [
        "docs/none.md",
        "docs/state.md#none",
        "#none",
    ]
    assert not list(dead("[a](docs/state.md#the-example) [b](#here) [c](https://example.org)", ROOT, "# Here"))


def test_docs_name_no_place_on_somebodys_machine() -> None:
    texts = [path for path in (ROOT / "docs").rglob("*") if path.suffix in {".md", ".py", ".json", ".toml", ".jinja"}]
    for path in {*texts, *PAGES}:
        assert not ELSEWHERE.search(read(path)), name_of(path)


# --- ADR 0007, and what the wheel holds -----------------------------------------------------------------------------


def test_the_wheel_holds_every_package_and_the_model() -> None:
    setuptools = tomllib.loads(read(ROOT / "pyproject.toml"))["tool"]["setuptools"]
    included = setuptools["packages"]["find"]["include"]
    for package in PACKAGES:
        for folder in {path.parent for path in (ROOT / package).rglob("*.py")}:
            assert (folder / "__init__.py").is_file(), folder
            assert any(fnmatch(name_of(folder).replace("/", "."), pattern) for pattern in included)
    assert not any(fnmatch(other, pattern) for other in ("tests", "docs", "deploy") for pattern in included)
    assets = ROOT / "runtime" / "assets"
    packed = {path for pattern in setuptools["package-data"]["runtime"] for path in (ROOT / "runtime").glob(pattern)}
    assert {path for path in assets.rglob("*") if path.is_file()} <= packed
    needed = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json")
    assert {assets / "model" / name for name in needed} <= packed


def test_nobody_mistakes_us_for_another_package() -> None:
    assert not tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["version"].startswith("0.18")
    body = ast.parse(read(ROOT / "kernels" / "__init__.py")).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)
