"""`lockstep serve` on the real engine, which spins inside a step once it was given the prompt `SPIN`.

usage: python -m tests.e2e.spinning_serve [serve's arguments]
       python -m tests.e2e.spinning_serve worker FD
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

SPIN = (13, 13, 13)


def worker_command(fd: int) -> list[str]:
    return [sys.executable, "-m", "tests.e2e.spinning_serve", "worker", str(fd)]


def worker(fd: int) -> int:
    from runtime import worker as real
    from runtime.api import Accepted, Delta, Rejected, Request
    from runtime.engine import Engine

    step, submit = Engine.step, Engine.submit
    seen: set[tuple[int, ...]] = set()

    def spinning_submit(engine: Engine, request: Request) -> Accepted | Rejected:
        seen.add(request.prompt)
        return submit(engine, request)

    def spinning_step(engine: Engine) -> Sequence[Delta]:
        while SPIN in seen:
            pass
        return step(engine)

    Engine.step, Engine.submit = spinning_step, spinning_submit
    return real.main(fd)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["worker"]:
        return worker(int(arguments[1]))
    from server.serve import main as serve

    return serve(arguments, worker=worker_command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
