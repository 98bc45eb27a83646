"""`lockstep bench overload` and `bench stall` with `lockstep serve` around scripted engines, as processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.bench import overload, stall
from server.bench.load import Run
from server.bench.overload import Seen
from server.bench.sample import Sample
from tests.server.bench.fake_bench import serve

ROOT = Path(__file__).parents[3]


def sample(number: int, status: int = 200, retry_after: int | None = None) -> Sample:
    return Sample(
        prompt=number,
        started=float(number),
        ended=number + 0.5,
        completion_tokens=4,
        error=None if status == 200 else f"HTTP {status}: no",
        status=status,
        retry_after=retry_after,
    )


def test_what_was_refused_and_what_failed_are_told_apart() -> None:
    base, more = Seen("capacity"), Seen("2 x capacity")
    for _ in range(2):
        base.add(Run(tuple(sample(i) for i in range(10)), 5.0, 0.1))
        more.add(
            Run((*(sample(i) for i in range(9)), sample(9, 429, 3), sample(10, 429, None), sample(11, 500)), 5.0, 0.1)
        )
    found = more.figures(base)
    assert (found["answered"], found["refused"], found["failed"]) == (18, 4, 2)
    assert found["held"] == pytest.approx(0.9)
    assert (found["retry_after_s"], found["refused_without_retry_after"]) == ([3, 3], 2)
    assert found["refusal_ms"]["p50"] == pytest.approx(500.0)
    assert base.figures(base)["held"] == 1.0
    text = overload.table([base.figures(base), found])
    assert "90%" in text and "2 x capacity" in text


def test_overload_of_a_real_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    file = tmp_path / "result.json"
    arguments = ["--seats", "2", "--queue", "1", "--rounds", "1", "--seconds", "0.5", "--factor", "1,3"]
    assert overload.main([*arguments, "--json", str(file)], command=serve("ok")) == 0
    out = capsys.readouterr().out
    assert "3 x capacity" in out
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["load"] for row in rows] == ["capacity", "1 x capacity", "3 x capacity"]
    assert all(row["answered"] and not row["failed"] for row in rows)
    assert all(row["refused_without_retry_after"] == 0 for row in rows)


def test_stall_of_a_real_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    file = tmp_path / "result.json"
    arguments = ["--clients", "2", "--rounds", "1", "--seconds", "0.3", "--long", "200", "--max-prefill-tokens", "0,32"]
    assert stall.main([*arguments, "--json", str(file)], command=serve("ok")) == 0
    assert "long prompts" in capsys.readouterr().out
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [(row["max_prefill_tokens"], row["load"]) for row in rows] == [
        ("0", "alone"),
        ("0", "long prompts"),
        ("32", "alone"),
        ("32", "long prompts"),
    ]
    assert all(row["streams"] for row in rows)
    assert [bool(row["long_prompts"]) for row in rows] == [False, True, False, True]


@pytest.mark.parametrize("main", [overload.main, stall.main])
def test_a_server_that_cannot_start_is_one_sentence(
    main: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([], command=serve("config")) == 2  # type: ignore[operator]
    assert "ended at start: lockstep serve: This combination cannot work." in capsys.readouterr().err
