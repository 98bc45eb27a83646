"""Proposers by name. One file and one line each; imported only when asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

from runtime.api import MAX_DRAFTS, ConfigError
from runtime.models.base import HybridModel, MtpHead
from runtime.speculation.proposer import SpeculativeProposer
from runtime.state.pool import StatePool


@dataclass(frozen=True, slots=True)
class ProposerParts:
    """What a proposer may be built from. `head` is None when the checkpoint has none or it was not loaded."""

    model: HybridModel
    head: MtpHead | None
    pool: StatePool
    device: torch.device


PROPOSERS: dict[str, str] = {
    "mtp": "runtime.speculation.mtp:build",
    "ngram": "runtime.speculation.ngram:build",
}


def parse(text: str) -> tuple[str, int]:
    """`none` -> ("none", 0), `mtp:3` -> ("mtp", 3). Raises ConfigError with the reason."""
    if text == "none":
        return "none", 0
    method, colon, count = text.partition(":")
    if method not in PROPOSERS:
        raise ConfigError(f"unknown speculative method {method!r}; there are none, {', '.join(sorted(PROPOSERS))}")
    if not colon or not count.isascii() or not count.isdigit() or int(count) > MAX_DRAFTS:
        raise ConfigError(f"--speculative {method}:K needs a number of drafts K from 0 to {MAX_DRAFTS}, not {text!r}")
    return method, int(count)


def build_proposer(method: str, parts: ProposerParts) -> SpeculativeProposer:
    """Builds the proposer of a known method. Raises CapabilityError when the model lacks what it needs."""
    module, _, attribute = PROPOSERS[method].partition(":")
    build: Callable[[ProposerParts], SpeculativeProposer] = vars(import_module(module))[attribute]
    return build(parts)
