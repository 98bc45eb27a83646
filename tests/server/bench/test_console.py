"""The progress line, the recorded command line, and what a benchmark does not import."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from server.bench.client import BenchError
from server.bench.console import ProgressLine, guarded
from server.bench.machine import command_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_is_written_over_and_cleared() -> None:
    stream = Terminal()
    say = ProgressLine(stream)
    say("a long text")
    say("too soon")
    say.clear()
    assert stream.getvalue() == "\ra long text\r" + " " * 11 + "\r"


def test_elsewhere_it_is_a_line_now_and_then() -> None:
    stream = io.StringIO()
    say = ProgressLine(stream)
    say("one")
    say("too soon")
    say.clear()
    assert stream.getvalue() == "one\n"


@pytest.mark.parametrize("given", [["--api-key", "k1", "--seed", "3"], ["--api-key=k1", "--seed", "3"]])
def test_the_recorded_command_has_no_key(given: list[str]) -> None:
    shown = command_line("serve", given)
    assert "k1" not in " ".join(shown)
    assert shown[:3] == ["lockstep", "bench", "serve"]
    assert shown[-2:] == ["--seed", "3"]


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise BenchError("no.")

    def interrupted() -> int:
        raise KeyboardInterrupt

    assert guarded("x", lambda: 1) == 1
    assert guarded("x", fails) == 2
    assert guarded("x", interrupted) == 130
    assert capsys.readouterr().err == "x: no.\nx: interrupted\n"


def test_a_benchmark_imports_neither_torch_nor_the_web_framework() -> None:
    code = (
        "import sys, server.bench.serve, server.bench.speculation\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'fastapi', 'transformers')))"
    )
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
