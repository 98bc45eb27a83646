"""Samples with known figures."""

from __future__ import annotations

from typing import Any

from server.bench.sample import Emission, Sample


def sample(*emissions: tuple[float, int | None], started: float = 0.0, prompt: int = 0, **fields: Any) -> Sample:
    """A request whose emissions are (time, tokens)."""
    known = [tokens for _, tokens in emissions]
    defaults: dict[str, Any] = {
        "ended": emissions[-1][0] if emissions else started,
        "prompt_tokens": 10,
        "completion_tokens": sum(tokens or 0 for tokens in known),
        "finish": "stop",
    }
    return Sample(
        prompt=prompt, started=started, emissions=tuple(Emission(*each) for each in emissions), **(defaults | fields)
    )
