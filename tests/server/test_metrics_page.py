"""The page as Prometheus' own linter wants it, whose rules are also checked here, and within a budget."""

from __future__ import annotations

import random
import re
import shutil
import subprocess

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from server.metrics import PREFIX, TABLE, Row
from tests.server.live import CHAT, COMPLETIONS, LiveServer, live
from tests.support.fake_engine import FakeEngine

BUDGET = 900
TYPE_WORDS = {"gauge", "counter", "histogram", "summary", "untyped"}
# What is not a base unit, or an abbreviation of one.
OTHER_UNITS = {
    *("ms", "us", "ns", "s", "sec", "secs", "second", "minutes", "hours", "milliseconds", "microseconds"),
    *("byte", "kb", "mb", "gb", "kib", "mib", "gib", "kilobytes", "megabytes", "gigabytes", "bits"),
    *("percent", "percentage", "perc", "pct", "celsius_degrees"),
}
SUFFIXES = {"seconds": "seconds", "bytes": "bytes", "ratio": "ratio"}


@pytest.fixture(scope="module")
def page() -> str:
    with live() as server:
        server.chat()
        return server.http.get("/metrics").text


@pytest.fixture(scope="module")
def families(page: str) -> list[Metric]:
    return list(text_string_to_metric_families(page))


def words(name: str) -> list[str]:
    return name.removesuffix("_total").split("_")


def test_promtool_has_nothing_to_say(page: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    run = subprocess.run([promtool, "check", "metrics"], input=page, text=True, capture_output=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_names_are_in_base_units_and_say_no_type(families: list[Metric]) -> None:
    for family in families:
        exported = family.name + ("_total" if family.type == "counter" else "")
        assert re.fullmatch(r"[a-z][a-z0-9_]*", exported), exported
        assert family.documentation, exported
        used = words(exported)
        assert TYPE_WORDS.isdisjoint(used), exported
        assert OTHER_UNITS.isdisjoint(used), exported
        if family.type != "histogram":
            assert used[-1] not in {"bucket", "sum", "count"}, exported
        if family.type != "counter":
            assert not exported.endswith("_total")
        for sample in family.samples:
            reserved = {"le"} if sample.name.endswith("_bucket") else set()
            assert {"le", "quantile"} & set(sample.labels) == reserved
            assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in sample.labels)


def test_a_unit_stands_at_the_end(families: list[Metric]) -> None:
    for family in families:
        for unit in SUFFIXES:
            used = words(family.name)
            assert unit not in used or used[-1] == unit, family.name


@pytest.mark.parametrize("name", ["step_ms", "usage_percent", "cache_kb", "steps_gauge"])
def test_the_rules_see(name: str) -> None:
    assert not (TYPE_WORDS | OTHER_UNITS).isdisjoint(words(name))


def test_every_family_is_a_row_or_the_process_s_own(families: list[Metric]) -> None:
    rows = {(PREFIX + row.name).removesuffix("_total") for row in TABLE}
    assert {family.name for family in families if not family.name.startswith("process_")} == rows


def labels(row: Row) -> set[str]:
    return {label for label, values in row.labels.items() if not values}


def test_labels_are_of_fixed_sets(families: list[Metric]) -> None:
    """But for the model's name, the drafting method, and what the engine tells once."""
    rows = {(PREFIX + row.name).removesuffix("_total"): row for row in TABLE}
    for family in families:
        row = rows.get(family.name)
        if row is None:
            continue
        for sample in family.samples:
            own = {name: value for name, value in sample.labels.items() if name not in ("model_name", "method", "le")}
            if "method" in row.labels:
                own["method"] = sample.labels["method"]
            assert set(own) == set(row.labels), family.name
            for name, value in own.items():
                assert value in row.labels[name] or name in labels(row), (family.name, name, value)


def test_a_random_run_stays_within_the_budget_and_adds_no_series() -> None:
    rng = random.Random(0)
    engine = FakeEngine(max_running=3, max_queued=8)
    with live(engine, api_key=("k",), max_num_seqs=3, max_queued_requests=8) as server:
        server.http.headers["Authorization"] = "Bearer k"
        before = series(server)
        assert len(before) <= BUDGET
        for _ in range(250):
            disturb(server, rng)
        assert series(server) == before


def series(server: LiveServer) -> set[str]:
    return set(server.metrics())


def disturb(server: LiveServer, rng: random.Random) -> None:
    """One request as nobody would send it, or as anybody would."""
    junk = "".join(rng.choices('abcdef \u00fc\U0001f600"\\\n{}', k=rng.randrange(1, 40)))
    fields = {
        "model": rng.choice(["lockstep-tiny", "", junk]),
        "user": junk,
        "max_tokens": rng.choice([1, 3, 0, -1, 10**6]),
        "temperature": rng.choice([0, 1, 9]),
        "n": rng.choice([1, 2, 200]),
        "stream": rng.random() < 0.3,
        "stop": rng.choice([None, junk[:4], ["a", "b"]]),
        "metadata": {junk: junk},
    }
    match rng.randrange(6):
        case 0:
            server.http.post(CHAT, json={"messages": [{"role": "user", "content": junk}], **fields})
        case 1:
            server.http.post(COMPLETIONS, json={"prompt": junk, **fields})
        case 2:
            server.http.post(COMPLETIONS, content=junk.encode())
        case 3:
            server.http.request(rng.choice(["GET", "PUT", "BREW", "HEAD"]), f"/{rng.random()}/v1/models")
        case 4:
            server.http.get(f"/v1/models/{rng.randrange(10**9)}", headers={"X-Request-Id": f"r{rng.random()}"})
        case _:
            server.http.get("/v1/models", headers={"Authorization": f"Bearer {rng.random()}"})


def test_a_page_is_small_enough_to_be_scraped_often(page: str) -> None:
    assert len(page) < 256 * 1024
