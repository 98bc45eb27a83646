"""`lockstep serve` with a scripted engine process. usage: python -m tests.server.fake_serve MODE [serve's arguments]"""

from __future__ import annotations

import sys

from server.serve import main


def worker(fd: int) -> list[str]:
    return [sys.executable, "-m", "tests.server.fake_worker", str(fd), sys.argv[1]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], worker=worker))
