"""`python -m deploy.observability [--check]`: writes the dashboards and the Prometheus rules."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from deploy.observability import rules
from deploy.observability.board import Board
from deploy.observability.overview import OVERVIEW
from deploy.observability.scheduler import SCHEDULER
from deploy.observability.speculation import SPECULATION
from deploy.observability.state import STATE

ROOT = Path(__file__).parents[2]
BOARDS = (OVERVIEW, SCHEDULER, SPECULATION, STATE)


def dashboard(board: Board) -> str:
    """A dashboard's file."""
    return json.dumps(board.json(), indent=1, ensure_ascii=False) + "\n"


def path_of(board: Board) -> str:
    """Where it lies, from the root of the repository."""
    return f"deploy/grafana/dashboards/{board.uid}.json"


FILES: dict[str, Callable[[], str]] = {
    **{path_of(board): lambda board=board: dashboard(board) for board in BOARDS},  # type: ignore[misc]
    "deploy/prometheus/rules.yml": rules.rules,
    "deploy/prometheus/rules_test.yml": rules.rules_test,
}


def drifted(root: Path) -> list[str]:
    """Files that do not say what the program says, and dashboards that no program makes."""
    stale = [
        name
        for name, make in FILES.items()
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != make()
    ]
    found = {path.relative_to(root).as_posix() for path in (root / "deploy/grafana/dashboards").glob("*.json")}
    return stale + sorted(found - set(FILES))


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Writes what has changed, or says what has."""
    parser = argparse.ArgumentParser(prog="python -m deploy.observability", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a file is out of date")
    check: bool = parser.parse_args(arguments).check
    stale = drifted(root)
    for name in stale:
        if check or name not in FILES:
            sys.stderr.write(f"{name} is out of date: run `python -m deploy.observability`, or delete it.\n")
            continue
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(FILES[name](), encoding="utf-8")
        sys.stdout.write(f"wrote {name}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
