"""Prints pyproject.toml's dependencies, one a line, so that they can be installed before the sources are copied.

`python3 requirements.py VARIANT`, in the directory of pyproject.toml; `cuda` adds the extra of that name.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(project: dict[str, object], variant: str) -> list[str]:
    """The dependencies of one image variant, from the `[project]` table."""
    table = project["project"]
    assert isinstance(table, dict)
    extra = table["optional-dependencies"]["cuda"] if variant == "cuda" else []
    return [*table["dependencies"], *extra]


if __name__ == "__main__":
    with Path("pyproject.toml").open("rb") as file:
        sys.stdout.write("\n".join(requirements(tomllib.load(file), sys.argv[1])) + "\n")
