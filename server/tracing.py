"""What a trace is told of a request, and the tracing that is off: it imports nothing and does nothing.

The other one is in server/otel.py, which is imported only when `--tracing` asks for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from runtime.api import ConfigError, RequestTiming

if TYPE_CHECKING:
    from starlette.requests import Request

    from server.job import Job


class Trace(Protocol):
    """One request. Methods are called in this order; those that do not apply are left out, `end` never is."""

    @property
    @abstractmethod
    def trace_id(self) -> str | None:
        """For the log line of the request; None when nobody will find it."""

    @abstractmethod
    def describe(self, job: Job) -> None:
        """The request was understood."""

    @abstractmethod
    def queue(self, submitted: int) -> None:
        """The engine took it; `submitted`: when it was asked, in Unix nanoseconds."""

    @abstractmethod
    def first_token(self, timing: RequestTiming | None) -> None:
        """Its first tokens are here; `timing` as the engine measured it until then."""

    @abstractmethod
    def use(self, *, prompt: int, cached: int, completion: int, drafted: int, accepted: int) -> None:
        """Tokens, over all choices."""

    @abstractmethod
    def finish(self, reasons: Sequence[str]) -> None:
        """Every choice ended by itself; why, in their order."""

    @abstractmethod
    def fail(self, kind: str, status: int | None) -> None:
        """It did not. `kind`: a name out of few; `status`: of the response, where it still had a choice."""

    @abstractmethod
    def end(self) -> None:
        """The response is complete, or nobody reads it any more. Ending twice is harmless."""


class Tracing(Protocol):
    """Makes traces."""

    @abstractmethod
    def begin(self, request: Request, operation: str) -> Trace:
        """A request came in. `operation`: chat or text_completion."""

    @abstractmethod
    def close(self) -> None:
        """Hands over what is still here, for a bounded time."""


class Untraced(Trace):
    """Nothing is told to anybody."""

    @property
    def trace_id(self) -> str | None:
        """None."""
        return None

    def describe(self, job: Job) -> None:
        """Nothing."""

    def queue(self, submitted: int) -> None:
        """Nothing."""

    def first_token(self, timing: RequestTiming | None) -> None:
        """Nothing."""

    def use(self, *, prompt: int, cached: int, completion: int, drafted: int, accepted: int) -> None:
        """Nothing."""

    def finish(self, reasons: Sequence[str]) -> None:
        """Nothing."""

    def fail(self, kind: str, status: int | None) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


UNTRACED = Untraced()


class NoTracing(Tracing):
    """Tracing is off."""

    def begin(self, request: Request, operation: str) -> Trace:
        """The one trace that nobody sees."""
        return UNTRACED

    def close(self) -> None:
        """Nothing."""


def tracing_of(kind: str) -> Tracing:
    """`off` or `otlp`; raises ConfigError with one sentence."""
    if kind == "off":
        return NoTracing()
    try:
        from server.otel import otlp
    except ImportError as error:
        raise ConfigError(
            "--tracing otlp needs OpenTelemetry, the extra 'otel': pip install 'lockstep[otel]'."
        ) from error
    try:
        return otlp()
    except ValueError as error:
        raise ConfigError(f"--tracing otlp: an OTEL_ variable cannot work: {error}") from error
