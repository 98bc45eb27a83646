"""The soak, short: the same program and the same requirements, for as long as CI can wait."""

from __future__ import annotations

import random

import pytest

from tests.soak.run import Report, _judge, soak
from tests.soak.watch import Page, Watch, slope
from tests.soak.work import Judge, answered, make_items

SECONDS = 12.0


@pytest.mark.timeout(900)
def test_a_short_soak(capsys: pytest.CaptureFixture[str]) -> None:
    items = answered(make_items(16, seed=1))
    report = soak("mtp:3, replay, lag 1", SECONDS, items, seed=1, say=lambda _text: None)
    with capsys.disabled():
        print(f"\nsoak: {dict(report.counts)}, {'; '.join(report.facts)}")
    assert not report.failures, report.failures[:5]
    assert report.counts["left"] > 0
    assert report.counts["right"] > 0


# --- the soak itself can fail


def test_a_wrong_answer_a_leak_and_a_near_tie_are_told_apart() -> None:
    items = answered(make_items(4, seed=2))
    judge = Judge(items)
    item = next(item for item in items if len(item.answer) > 1)
    other = next(each for each in items if each is not item)
    assert judge.verdict(item, list(item.answer), "", whole=True) == "right"
    assert judge.verdict(item, list(item.answer[:1]), "", whole=False) == "right"
    assert judge.verdict(item, list(item.answer[:1]), "", whole=True) == "wrong"
    assert judge.verdict(item, [5, *item.answer[1:]], "", whole=True) == "wrong"
    assert judge.verdict(item, list(item.answer), f"so {other.secret}", whole=True) == "leak"
    assert judge.verdict(item, list(item.answer), f"so {item.secret}", whole=True) == "right"


@pytest.mark.parametrize("leak", [0.0, 500.0, 5000.0])
def test_a_leak_is_seen_through_noise(leak: float) -> None:
    dice = random.Random(3)
    points = [(100.0 * i, 9e7 + leak * 100.0 * i + dice.uniform(-4e6, 4e6)) for i in range(300)]
    assert slope(points) == pytest.approx(leak, abs=60.0)


PAGE = """
lockstep_kv_blocks{state="used"} 0
lockstep_kv_blocks{state="free"} 2
lockstep_kv_blocks{state="cached"} 98
lockstep_state_slots{state="used"} 0
lockstep_state_slots{state="free"} 0
lockstep_state_slots{state="cached"} 16
lockstep_state_audit_total{result="ok"} 9
lockstep_state_audit_total{result="mismatch"} 0
lockstep_spec_accepted_tokens_total{method="mtp"} 9
lockstep_prefix_cache_hit_tokens_total{source="device"} 9
"""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({'lockstep_kv_blocks{state="used"}': 1}, "blocks in use at the end: 1"),
        ({"lockstep_requests_running": 2}, "requests running at the end: 2"),
        ({'lockstep_engine_registry_entries{registry="leases"}': 1}, "engine's leases at the end: 1"),
        ({'lockstep_server_registry_entries{registry="inside"}': 1}, "server tables at the end: 1"),
        ({"lockstep_state_commit_missing_total": 1}, "state_commit_missing_total is 1"),
        ({"lockstep_requests_stuck_total": 1}, "requests_stuck_total is 1"),
        ({'lockstep_state_audit_total{result="mismatch"}': 1}, "an audit found another state"),
        ({'lockstep_spec_accepted_tokens_total{method="mtp"}': 0}, "spec_accepted_tokens_total is 0"),
    ],
)
def test_every_requirement_can_fail(changes: dict[str, float], words: str) -> None:
    page = Page(PAGE)
    page.samples |= changes
    watch = Watch("", 0, 0, blocks=[0.98] * 20, slots=[1.0] * 20, series=[7] * 20, tables=[3.0] * 20)
    for name in ("server", "engine"):
        watch.memory[name] = [(100.0 * i, 9e7) for i in range(20)]
    report = Report("x", seconds=300.0)
    report.counts["answered"] = 100
    _judge(report, watch, page)
    assert report.failures == ([words] if words else [])


def test_growth_emptiness_and_new_series_fail_too() -> None:
    watch = Watch("", 0, 0, blocks=[0.5] * 20, slots=[1.0] * 20, series=[7] * 19 + [8], tables=[3.0] * 20)
    watch.memory["server"] = [(1e4 * i, 9e7 + 2e7 * i) for i in range(20)]
    watch.memory["engine"] = [(1e4 * i, 9e7) for i in range(20)]
    report = Report("x", seconds=300.0)
    report.counts.update({"answered": 100, "near tie": 5})
    _judge(report, watch, Page(PAGE))
    text = "\n".join(report.failures)
    for words in ("5 near ties", "only 50.0% of the blocks", "7 to 8 series", "the server process grows by 2000 bytes"):
        assert words in text
    assert "engine process" not in text
