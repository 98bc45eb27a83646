"""`lockstep bench speculation` with scripted engines.

usage: python -m tests.server.bench.fake_bench MODE [arguments]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from server.bench.speculation import main


def serve(mode: str) -> Callable[[Sequence[str]], list[str]]:
    """`lockstep serve` around a scripted engine."""
    return lambda arguments: [sys.executable, "-m", "tests.server.fake_serve", mode, *arguments]


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], command=serve(sys.argv[1])))
