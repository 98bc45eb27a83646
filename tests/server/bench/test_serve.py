"""`lockstep bench serve` against real servers around a scripted engine."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from server.__main__ import main
from server.bench.measure import DEFINITIONS
from tests.server.live import LiveServer, live
from tests.support.fake_engine import FakeEngine

IDS = ("--prompt-tokens", "12", "--vocab", "900", "--output-tokens", "9", "--ignore-eos")


def bench(*arguments: str) -> int:
    return main(["bench", "serve", *arguments])


def result(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def test_two_urls_in_rounds(server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    urls = ("--url", server.url, "--label", "one", "--url", server.url + "/v1/", "--api-key", "hidden key")
    load = ("--concurrency", "1,3", "--requests", "4", "--rounds", "2", "--warmup", "2", "--slo", "ttft:60000,itl:0")
    assert bench(*urls, *load, *IDS, "--shared-prefix", "5", "--json", str(file)) == 0
    printed = capsys.readouterr().out
    assert "one" in printed
    assert "ratios to one" in printed
    assert "definitions" not in printed
    assert DEFINITIONS["ITL"] in printed

    found = result(file)
    assert found["schema"] == 1
    assert found["bench"] == "serve"
    assert found["command"][:3] == ["lockstep", "bench", "serve"]
    assert "hidden key" not in file.read_text(encoding="utf-8")
    assert set(found["machine"]) >= {"cpu", "cores", "load_average", "load_average_after"}
    assert set(found["versions"]) >= {"python", "lockstep", "torch"}
    assert found["definitions"] == DEFINITIONS
    assert found["workload"]["prompts"] == {"type": "IdPrompts", "length": 12, "vocab": 900, "seed": 0, "shared": 5}
    assert [target["model"] for target in found["targets"]] == ["lockstep-tiny"] * 2
    rows = found["rows"]
    assert [(row["level"]["concurrency"], row["target"]) for row in rows] == [
        (level, label) for level in (1, 3) for label in ("one", server.url.removeprefix("http://"))
    ]
    for row in rows:
        summary = row["summary"]
        assert summary["requests"] == summary["succeeded"] == 8
        assert summary["errors"] == {}
        assert summary["output_tokens"] == 8 * 9
        assert summary["prompt_tokens"] == 8 * 12
        assert summary["tokens_of_emissions"] == "token ids"
        assert summary["drafted_tokens"] > 0
        assert summary["accepted_tokens"] == 8 * (9 - 4)  # bursts of 1, 3, 2, 3
        assert 0 < summary["ttft_ms"]["p50"] <= summary["ttft_ms"]["p99"] <= summary["e2e_ms"]["max"]
        assert summary["good_requests"] == 0
        assert [len(each["requests"]) for each in row["rounds"]] == [4, 4]
        assert len(row["ratios"]["output_tokens_per_s"]["rounds"]) == 2
        assert row["rounds"][0]["requests"][0]["completion_tokens"] == 9
    # the two probes and warm-ups, then A B A B at each level; both of a round get the same prompts
    asked = [request.prompt for request in server.engine.requests][2 + 4 :]
    assert len(asked) == 32
    assert sorted(asked[0:4]) == sorted(asked[4:8])
    assert not set(asked[0:4]) & set(asked[8:12])
    assert len({prompt[:5] for prompt in asked}) == 1


def test_chat_texts_at_a_rate(server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    load = ("--rate", "200,400", "--requests", "5", "--kinds", "json,tool", "--temperature", "0.5")
    assert bench("--url", server.url, *load, "--output-tokens", "6", "--json", str(file)) == 0
    assert "200/s" in capsys.readouterr().out
    rows = result(file)["rows"]
    assert [row["level"]["rate"] for row in rows] == [200, 400]
    assert all(row["summary"]["output_tokens"] == 30 for row in rows)
    assert {request.sampling.temperature for request in server.engine.requests} == {0.5}


def test_the_first_run_fixes_the_number_of_requests(server: LiveServer, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    urls = ("--url", server.url, "--url", server.url, "--endpoint", "completions")
    assert bench(*urls, "--seconds", "0.05", "--rounds", "2", "--output-tokens", "3", "--json", str(file)) == 0
    numbers = {row["rounds"][at]["summary"]["requests"] for row in result(file)["rows"] for at in range(2)}
    assert len(numbers) == 1


def test_failures_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    with live(FakeEngine(fail_after=4)) as server:
        code = bench("--url", server.url, "--requests", "3", *IDS, "--json", str(file), "--warmup", "0")
    assert code == 1
    out = capsys.readouterr().out
    assert "3 x in the stream: The engine failed" in out
    summary = result(file)["rows"][0]["summary"]
    assert sum(summary["errors"].values()) == summary["requests"] == 3
    assert summary["output_tokens"] is None


def test_some_failures_are_an_exit_code_of_zero(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    with live(FakeEngine(max_running=1), max_queued_requests=1) as server:
        load = ("--concurrency", "12", "--requests", "24", "--warmup", "0", "--json", str(file))
        assert bench("--url", server.url, *load, *IDS) == 0
    summary = result(file)["rows"][0]["summary"]
    assert summary["succeeded"] + sum(summary["errors"].values()) == 24
    assert all(error.startswith("HTTP 429") for error in summary["errors"])


def test_a_server_that_is_down_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert bench("--url", f"http://127.0.0.1:{port}") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("first request")]
    assert len(errors) == 1
    assert errors[0].startswith(f"lockstep bench serve: http://127.0.0.1:{port} cannot be reached (ConnectError")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--url"),
        (("--url", "127.0.0.1:8000"), "http://"),
        (("--url", "http://a:x"), "not an address"),
        (("--url", "http://a", "--label", "a", "--label", "b"), "more --label"),
        (("--url", "http://a", "--rate", "1", "--concurrency", "1"), "exclude"),
        (("--url", "http://a", "--requests", "1", "--seconds", "1"), "exclude"),
        (("--url", "http://a", "--prompt-tokens", "4", "--endpoint", "chat"), "completions only"),
        (("--url", "http://a", "--prompt-tokens", "4", "--kinds", "copy"), "exclude"),
        (("--url", "http://a", "--kinds", "poem"), "the kinds are copy"),
        (("--url", "http://a", "--concurrency", "0"), "an integer >= 1"),
        (("--url", "http://a", "--concurrency", "1,x"), "an integer >= 1"),
        (("--url", "http://a", "--rate", "nan"), "a number >="),
        (("--url", "http://a", "--slo", "latency:3"), "ttft, itl, tpot, e2e"),
        (("--url", "http://a", "--body", "[1]"), "JSON object"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    try:
        code = bench(*arguments)
    except SystemExit as left:
        code = int(str(left.code))
    assert code == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert errors.count("\n") == 1


def test_an_unwritable_file(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--url", server.url, "--requests", "1", *IDS, "--json", "/no/such/dir/x.json") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "speculation" in capsys.readouterr().out
    assert main(["bench"]) == 2
    assert main(["bench", "nonsense"]) == 2
    assert "no benchmark 'nonsense'" in capsys.readouterr().err
