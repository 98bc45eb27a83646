"""`python -m tests.deploy.write DIRECTORY`: every overlay, the chart for each, and the weights' Job, as YAML files."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from tests.deploy.objects import OVERLAYS, chart, hooks, kustomize, weights_fill


def main(folder: Path) -> None:
    """Writes one file for each source."""
    sources = {"weights-fill": weights_fill()}
    for overlay in OVERLAYS:
        sources[f"kustomize-{overlay}"] = kustomize(overlay)
        sources[f"helm-{overlay}"] = [*chart(overlay), *hooks(overlay)]
    for name, documents in sources.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump_all(documents, sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
