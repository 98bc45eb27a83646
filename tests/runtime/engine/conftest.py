from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from runtime.engine import Engine
from tests.runtime.engine import harness


@pytest.fixture(autouse=True)
def _conserve(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every test all engines it built or stepped are empty."""
    used: dict[int, Engine] = {}
    step = Engine.step

    def noted(engine: Engine) -> Any:
        used[id(engine)] = engine
        return step(engine)

    monkeypatch.setattr(Engine, "step", noted)
    yield
    for engine in used.values():
        if engine not in harness.DEAD:
            harness.assert_empty(engine)
