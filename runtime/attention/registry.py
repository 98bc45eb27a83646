"""The commit strategies by name, and how a pair of halves is built from two of them."""

from __future__ import annotations

from collections.abc import Callable

from runtime.api import ConfigError
from runtime.attention.full import FullAttention
from runtime.attention.hybrid import HybridAttnBackend
from runtime.attention.hybrid_linear import HybridLinearAttnBackend
from runtime.attention.linear import LinearAttention
from runtime.attention.replay import ReplayLinear
from runtime.attention.snapshot import SnapshotLinear
from runtime.state.paged import PagedStore
from runtime.state.recurrent import RecurrentStore

STRATEGIES: dict[str, Callable[[RecurrentStore, int], LinearAttention]] = {
    "snapshot": lambda store, _max_fed: SnapshotLinear(store),
    "replay": ReplayLinear,
}


def build_backend(
    prefill: str, decode: str, mode: str, *, kv: PagedStore, recurrent: RecurrentStore, max_fed: int
) -> HybridAttnBackend:
    """Two halves over the same pools, with scratch of their own even when they use the same strategy.

    `max_fed`: the most tokens a DECODE or VERIFY row feeds. Raises ConfigError for an unknown name.
    """
    halves = []
    for role, name in (("prefill", prefill), ("decode", decode)):
        if name not in STRATEGIES:
            raise ConfigError(f"unknown {role} backend {name!r}; there are {', '.join(sorted(STRATEGIES))}")
        linear = STRATEGIES[name](recurrent, max_fed)
        halves.append(HybridLinearAttnBackend(f"{role}:{name}", recurrent, FullAttention(kv), linear))
    return HybridAttnBackend(halves[0], halves[1], mode)
