"""What the program and the image say of themselves: routes, settings, metrics, the Dockerfile's instructions."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass

from server.app import create_app
from server.inline_link import InlineLink
from server.metrics import PREFIX, TABLE
from server.service import Service
from server.settings import Settings
from tests.deploy.objects import ROOT
from tests.support.fake_engine import FakeEngine

GAUGES = frozenset(PREFIX + row.name for row in TABLE if row.kind == "gauge")
END_SECONDS = 15.0  # docs/operations.md: from the end of the wait to the exit


def routes() -> dict[str, frozenset[str]]:
    """Path -> methods of the real application."""
    app = create_app(Service(Settings(), InlineLink(FakeEngine())))
    return {route.path: frozenset(route.methods or ()) for route in app.routes}


@dataclass(frozen=True)
class Image:
    """The last stage of the Dockerfile."""

    environment: dict[str, str]
    user: str
    ports: tuple[int, ...]
    volumes: tuple[str, ...]
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    stop_signal: str
    health: tuple[str, ...]
    labels: dict[str, str]


def instructions() -> list[tuple[str, str]]:
    """(name, arguments) of every instruction, continuation lines joined, comments left out."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (name, rest.strip()) for name, _, rest in (line.strip().partition(" ") for line in text.splitlines()) if name
    ]


def image() -> Image:
    """The last stage, as a container sees it."""
    whole = instructions()
    start = max(index for index, (name, _) in enumerate(whole) if name == "FROM")
    stage = whole[start:]
    last = dict(stage)

    def pairs(name: str) -> dict[str, str]:
        words = [word for given, rest in stage if given == name for word in shlex.split(rest)]
        return {key: value for key, _, value in (word.partition("=") for word in words)}

    return Image(
        environment=pairs("ENV"),
        user=last["USER"],
        ports=tuple(int(rest) for name, rest in stage if name == "EXPOSE"),
        volumes=tuple(json.loads(last["VOLUME"])),
        entrypoint=tuple(json.loads(last["ENTRYPOINT"])),
        command=tuple(json.loads(last["CMD"])),
        stop_signal=last["STOPSIGNAL"],
        health=tuple(json.loads(last["HEALTHCHECK"].partition("CMD")[2])),
        labels=pairs("LABEL"),
    )
