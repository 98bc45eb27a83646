"""What is deployed, as data: the overlays built by kustomize, the chart rendered by Helm, and the pods in both."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = tuple(sorted(path.name for path in (DEPLOY / "kustomize" / "overlays").iterdir()))
CHART = DEPLOY / "helm" / "lockstep"

Object = dict[str, Any]


def load(path: Path) -> list[Object]:
    """The documents of a YAML file."""
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def missing(what: str) -> None:
    """Skips, or fails where the tools were promised (`make manifests`)."""
    reason = f"{what} comes with the extra `deploy`: make manifests"
    if os.environ.get("LOCKSTEP_DEPLOY_TOOLS") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


def program(name: str) -> str:
    """The path of a command of the extra, beside this Python or on PATH."""
    found = shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if found is None:
        missing(name)
    assert found is not None
    return found


def module(name: str) -> ModuleType:
    """A module of the extra."""
    try:
        return __import__(name)
    except ImportError:
        missing(name)
        raise


@functools.cache
def _kustomize(folder: Path) -> tuple[Object, ...]:
    command = [program("kubectl"), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # deprecated fields are reported there
    return tuple(document for document in yaml.safe_load_all(done.stdout) if document)


def kustomize(overlay: str) -> list[Object]:
    """The objects of an overlay."""
    return list(_kustomize(DEPLOY / "kustomize" / "overlays" / overlay))


def weights_fill() -> list[Object]:
    """The objects that fill a claim."""
    return list(_kustomize(DEPLOY / "kustomize" / "weights-fill"))


def render(values: Object, release: str = "lockstep", namespace: str = "lockstep") -> list[Object]:
    """The chart's objects, its test included."""
    helm = module("helm_python")
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name=release, namespace=namespace)
    text = "\n---\n".join(text for name, text in sorted(files.items()) if not name.endswith(".txt"))
    return [document for document in yaml.safe_load_all(text) if document]


def values_of(overlay: str) -> Object:
    """The values file that says in Helm what the overlay says."""
    (values,) = load(CHART / "ci" / f"{overlay}-values.yaml") or [{}]
    return values


@functools.cache
def _chart(overlay: str) -> tuple[Object, ...]:
    return tuple(render(values_of(overlay)))


def chart(overlay: str) -> list[Object]:
    """The chart's objects for an overlay, without its test."""
    return [document for document in _chart(overlay) if not is_hook(document)]


def hooks(overlay: str) -> list[Object]:
    """The chart's test."""
    return [document for document in _chart(overlay) if is_hook(document)]


def is_hook(document: Object) -> bool:
    """Whether Helm runs it apart from the release."""
    return "helm.sh/hook" in document["metadata"].get("annotations", {})


@dataclass(frozen=True)
class Pod:
    """A pod template: whose it is, its labels, and its spec."""

    owner: str
    role: str
    labels: dict[str, str]
    spec: Object

    @property
    def containers(self) -> list[Object]:
        """All of them, init containers too."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def main(self) -> Object:
        """The one that serves or works."""
        (container,) = self.spec["containers"]
        return container

    def environment(self) -> dict[str, str]:
        """The literal variables of the main container."""
        return {entry["name"]: entry["value"] for entry in self.main.get("env", []) if "value" in entry}


def pods(documents: list[Object]) -> Iterator[Pod]:
    """Every pod template in some objects; role is `server` for what answers HTTP."""
    for document in documents:
        kind, name = document["kind"], document["metadata"]["name"]
        owner = f"{kind}/{name}"
        if kind == "Pod":
            yield Pod(owner, "client", document["metadata"]["labels"], document["spec"])
        elif kind in ("Deployment", "Job"):
            template = document["spec"]["template"]
            role = "server" if kind == "Deployment" else "job"
            yield Pod(owner, role, template.get("metadata", {}).get("labels", {}), template["spec"])
        elif kind == "LeaderWorkerSet":
            for key, role in (("leaderTemplate", "server"), ("workerTemplate", "worker")):
                template = document["spec"]["leaderWorkerTemplate"][key]
                yield Pod(owner, role, template.get("metadata", {}).get("labels", {}), template["spec"])


def named(documents: list[Object], kind: str) -> list[Object]:
    """The objects of a kind."""
    return [document for document in documents if document["kind"] == kind]


def canonical(value: Any) -> Any:
    """With lists whose order means nothing sorted: of things with a name, of peers and of ports."""
    if isinstance(value, dict):
        return {key: canonical(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        items = [canonical(item) for item in value]
        if items and all(isinstance(item, dict) and "name" in item for item in items):
            return sorted(items, key=lambda item: str(item["name"]))
        if items and all(isinstance(item, dict) and len(item) == 1 for item in items):
            return sorted(items, key=str)
        return items
    return value
