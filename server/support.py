"""`lockstep support`: what the engine can run, asked of the engine itself in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from server.settings import worker_environment


def main(arguments: list[str]) -> int:
    """Runs the engine's own command and returns its exit code."""
    command = [sys.executable, "-m", "runtime", "support", *arguments]
    return subprocess.run(command, env=worker_environment(os.environ), check=False).returncode  # noqa: S603 - ours
