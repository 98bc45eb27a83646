"""A real Prometheus beside a real server: what it scraped, what it answers."""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.observability.lint import substitute

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0


def absent() -> str:
    """Why no Prometheus can be started here; empty when one can."""
    missing = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not installed (Debian: apt install prometheus)" if missing else ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API says of one expression. `series` are label sets with (time, value) points."""

    error: str
    warnings: tuple[str, ...]
    series: tuple[tuple[dict[str, str], list[tuple[float, float]]], ...]

    @property
    def has_data(self) -> bool:
        return any(not math.isnan(value) for _, points in self.series for _, value in points)


class Prometheus:
    """The deployed configuration and rules, with a scrape and an evaluation every second."""

    def __init__(self, folder: Path, target: str) -> None:
        self.config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
        self.config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        self.config["rule_files"] = [str(ROOT / "deploy/prometheus/rules.yml")]
        (scrape,) = self.config["scrape_configs"]
        scrape["static_configs"] = [{"targets": [target]}]
        path = folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(self.config), encoding="utf-8")
        port = free_port()
        self.log = (folder / "prometheus.log").open("wb")
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={path}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE)
        self._until(lambda: self.http.get("/-/ready").status_code == 200)

    def _until(self, condition: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                if condition():
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, "Prometheus did not get there; see its log"
            time.sleep(0.1)

    def stop(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait(PATIENCE)
        self.log.close()

    def wait_for(self, expression: str) -> None:
        """Until an expression has a result."""
        self._until(lambda: self.http.get("/api/v1/query", params={"query": expression}).json()["data"]["result"])

    def get(self, path: str, **parameters: Any) -> Any:
        answer = self.http.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def instant(self, expression: str, at: float) -> Answer:
        body = self.http.post("/api/v1/query", data={"query": expression, "time": str(at)}).json()
        return self._answer(body)

    def range(self, expression: str, start: float, end: float, step: float) -> Answer:
        body = self.http.post(
            "/api/v1/query_range",
            data={"query": expression, "start": str(start), "end": str(end), "step": str(step)},
        ).json()
        return self._answer(body)

    def _answer(self, body: dict[str, Any]) -> Answer:
        if body["status"] != "success":
            return Answer(body["error"], (), ())
        data = body["data"]
        if data["resultType"] in ("scalar", "string"):
            results = [({}, [data["result"]])]
        else:
            results = [
                (each["metric"], each["values"] if "values" in each else [each["value"]]) for each in data["result"]
            ]
        series = tuple((labels, [(float(t), float(v)) for t, v in points]) for labels, points in results)
        return Answer("", tuple(body.get("warnings", ())), series)


@dataclass(frozen=True, slots=True)
class Observed:
    """A load and the Prometheus that watched it, from `start` to `end` (Unix seconds); last answers came after that."""

    prometheus: Prometheus
    page: str
    start: float
    end: float

    @property
    def variables(self) -> dict[str, str]:
        """What Grafana would put in: everything, at this scrape interval."""
        jobs = "|".join(self.prometheus.get("label/job/values", **{"match[]": "lockstep_engine_up"}))
        seconds = math.ceil(self.end - self.start)
        return {
            "$__rate_interval": f"{max(15, seconds // 3)}s",  # on a slow machine things happen more rarely
            "$__interval": "5s",
            "$__range": f"{seconds}s",
            "$job": jobs,
            "$namespace": ".*",
            "$model_name": ".*",
            "$pod": ".*",
        }

    def ask(self, expression: str, *, instant: bool = False, step: float = 5.0) -> Answer:
        """One expression with Grafana's variables, over the last three quarters of the load, or at its end."""
        text = substitute(expression, self.variables)
        if instant:
            return self.prometheus.instant(text, self.end)
        return self.prometheus.range(text, self.start + (self.end - self.start) / 4, self.end, step)
