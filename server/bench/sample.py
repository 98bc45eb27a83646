"""What was seen of one request, and the times that follow from it. Knows no HTTP and no statistics."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Emission:
    """What arrived in one read: when, and how many tokens if the server sent their ids."""

    at: float
    tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request. Times are in seconds of one monotonic clock; token counts are the server's own usage.

    `status` is that of HTTP, 0 when there was none; `retry_after` is in seconds.
    """

    prompt: int
    started: float
    ended: float
    emissions: tuple[Emission, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    text: str = ""
    finish: str | None = None
    error: str | None = None
    status: int = 200
    retry_after: int | None = None

    @property
    def ttft(self) -> float | None:
        """Until the first text or token."""
        return self.emissions[0].at - self.started if self.emissions else None

    @property
    def e2e(self) -> float:
        """Until the stream's end."""
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """From the first emission to the last, per token after the first."""
        if not self.emissions or self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return (self.emissions[-1].at - self.emissions[0].at) / (self.completion_tokens - 1)

    @property
    def exact(self) -> bool:
        """Whether the tokens of every emission are known, not spread."""
        return bool(self.emissions) and all(emission.tokens is not None for emission in self.emissions)

    def counted(self) -> list[tuple[float, float]]:
        """Emissions as (time, tokens): by ids where the server sent them, else its usage spread evenly."""
        if self.exact:
            return [(emission.at, float(emission.tokens or 0)) for emission in self.emissions if emission.tokens]
        if self.completion_tokens is None or not self.emissions:
            return []
        share = self.completion_tokens / len(self.emissions)
        return [(emission.at, share) for emission in self.emissions]

    def itls(self) -> list[tuple[float, float]]:
        """(seconds per token, tokens) of every emission after the first: its gap divided by its tokens."""
        counted = self.counted()
        return [((at - before) / tokens, tokens) for (before, _), (at, tokens) in itertools.pairwise(counted)]

    def gaps(self) -> list[float]:
        """The waits between emissions, undivided."""
        counted = self.counted() or [(emission.at, 0.0) for emission in self.emissions]
        return [at - before for (before, _), (at, _) in itertools.pairwise(counted)]

    @property
    def verifications(self) -> int | None:
        """Steps after the first token: each emitted the drafts it accepted and one more token."""
        if self.accepted is None or self.completion_tokens is None:
            return None
        return max(self.completion_tokens - 1 - self.accepted, 0)

    def record(self) -> dict[str, Any]:
        """For the JSON file; no text."""
        return {
            "prompt": self.prompt,
            "started": round(self.started, 6),
            "ttft_ms": None if self.ttft is None else round(self.ttft * 1e3, 3),
            "tpot_ms": None if self.tpot is None else round(self.tpot * 1e3, 4),
            "e2e_ms": round(self.e2e * 1e3, 3),
            "emissions": len(self.emissions),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "finish": self.finish,
            "error": self.error,
            "status": self.status,
        }
