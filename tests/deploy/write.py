"""`python -m tests.deploy.write DIRECTORY`: every overlay, the chart for each, and the weights' Job.

As one YAML file for each source in DIRECTORY/yaml, and all in DIRECTORY/objects.json, by source.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

from tests.deploy.objects import OVERLAYS, chart, hooks, kustomize, weights_fill


def main(folder: Path) -> None:
    """Writes the files."""
    (folder / "yaml").mkdir(parents=True, exist_ok=True)
    sources = {"weights-fill": weights_fill()}
    for overlay in OVERLAYS:
        sources[f"kustomize-{overlay}"] = kustomize(overlay)
        sources[f"helm-{overlay}"] = [*chart(overlay), *hooks(overlay)]
    for name, documents in sources.items():
        text = yaml.safe_dump_all(documents, sort_keys=False)
        (folder / "yaml" / f"{name}.yaml").write_text(text, encoding="utf-8")
    (folder / "objects.json").write_text(json.dumps(sources), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
