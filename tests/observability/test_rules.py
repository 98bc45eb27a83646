"""The rules as Prometheus itself judges them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.observability.stack import ROOT, absent

FOLDER = ROOT / "deploy/prometheus"
pytestmark = [pytest.mark.observability, pytest.mark.timeout(600), pytest.mark.skipif(bool(absent()), reason=absent())]


def promtool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Each case has a database of its own, which it syncs to the disk: in memory it takes a tenth of the time.
    memory = {"TMPDIR": "/dev/shm"} if os.access("/dev/shm", os.W_OK) else {}
    return subprocess.run(
        ["promtool", *arguments], cwd=folder, capture_output=True, text=True, env=os.environ | memory, check=False
    )


def test_rules_are_well_formed() -> None:
    done = promtool(FOLDER, "check", "rules", "rules.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_scrape_configuration_is_well_formed(tmp_path: Path) -> None:
    text = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    shutil.copy(FOLDER / "rules.yml", tmp_path)
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/rules.yml", "rules.yml"), encoding="utf-8")
    done = promtool(tmp_path, "check", "config", "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(1800)
def test_every_alert_fires_when_it_must_and_only_then() -> None:
    done = promtool(FOLDER, "test", "rules", "rules_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("expression", ["vector(0) > 1", "vector(1)"])
def test_the_cases_can_fail(expression: str, tmp_path: Path) -> None:
    """An alert that never fires, or always does, is caught."""
    rules = "groups: [{name: g, rules: [{alert: LockstepStateCommitMissing, expr: '" + expression + "'}]}]\n"
    (tmp_path / "rules.yml").write_text(rules, encoding="utf-8")
    head, _, cases = (FOLDER / "rules_test.yml").read_text(encoding="utf-8").partition("tests:\n")
    mine = cases.split("- name: ")[1:3]
    (tmp_path / "rules_test.yml").write_text(head + "tests:\n" + "".join("- name: " + case for case in mine))
    done = promtool(tmp_path, "test", "rules", "rules_test.yml")
    assert done.returncode == 1
    wrong = "fires" if expression == "vector(0) > 1" else "stays quiet"
    assert f"LockstepStateCommitMissing {wrong}" in done.stdout + done.stderr
