"""STATE: after every step each running request's slot and KV equal REF's, of exactly the committed tokens.

`Watch.look` copies what the pool holds; `Watch.check` compares all copies with REF once the texts are known. Equal is
max|s - s64| <= max(1e-5 max|s64|, 3 x the error of a one-shot float32 pass), for every tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.engine import Engine
from runtime.plan import Sequence as Running
from runtime.plan import StateLease
from runtime.state.pool import StatePool
from tests.support.engines import directory
from tests.support.ref import Ref

Tensor = torch.Tensor
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Expected:
    """One tensor at several lengths: exact [T + 1, ...] float64, allowed [T + 1]."""

    exact: Tensor
    allowed: Tensor

    def at(self, lengths: Sequence[int], found: Tensor) -> Tensor:
        """By how much found [m, ...] exceeds what is allowed at those lengths; 0 or less is equal."""
        error = (found.double() - self.exact[list(lengths)]).flatten(1).abs().amax(1)
        return error.nan_to_num(nan=torch.inf) - self.allowed[list(lengths)]


@dataclass(frozen=True)
class Truth:
    """REF on one text: states by (layer, 0: window, 1: state) after each number of tokens; KV by (layer, 0: k, 1: v).

    A KV entry's `exact` is [T, ...] by position, its `allowed` [T + 1] counts for all positions before.
    """

    states: dict[tuple[int, int], Expected]
    kv: dict[tuple[int, int], Expected]
    greedy: list[int]


@functools.cache
def ref(name: str, dtype: torch.dtype = torch.float64) -> Ref:
    """The oracle of a model."""
    return Ref(directory(name), dtype)


@functools.lru_cache(maxsize=256)
def truth(name: str, tokens: tuple[int, ...]) -> Truth:
    """Everything REF says about a text: states and KV of every prefix, and the next tokens."""
    marks = range(len(tokens) + 1)
    exact, rough = (ref(name, dtype).trace(tokens, marks) for dtype in (torch.float64, torch.float32))
    states = {}
    for layer in exact.states[0]:
        pairs = [[(t.states[n][layer].window, t.states[n][layer].state) for n in marks] for t in (exact, rough)]
        for part in (0, 1):
            states[layer, part] = _expected(*(torch.stack([pair[part] for pair in side]) for side in pairs))
    kv = {}
    for layer, found in exact.kv.items():
        other = rough.kv[layer]
        for part, (wide, narrow) in enumerate(((found.k, other.k), (found.v, other.v))):
            each = _expected(wide, narrow)
            size = wide.flatten(1).abs().amax(1)
            error = (narrow.double() - wide).flatten(1).abs().amax(1)
            allowed = torch.maximum(1e-5 * size.cummax(0).values, 3 * error.cummax(0).values)
            kv[layer, part] = Expected(each.exact, torch.cat([allowed.new_zeros(1), allowed]))
    return Truth(states, kv, ref(name).head(exact.hidden).argmax(-1).tolist())


def _expected(exact: Tensor, rough: Tensor) -> Expected:
    error = (rough.double() - exact).flatten(1).abs().amax(1)
    return Expected(exact, torch.maximum(1e-5 * exact.flatten(1).abs().amax(1), 3 * error))


@dataclass(frozen=True)
class Look:
    """What the pool held of one lease after one step: states at the device's length, KV of the settled one."""

    length: int
    states: dict[int, tuple[Tensor, Tensor]]
    computed: int
    kv: dict[int, tuple[Tensor, Tensor]]


def look_at(states: StatePool, lease: StateLease) -> Look:
    """Copies of everything."""
    kv = {layer: states.peek_kv(lease, layer) for layer in states.kv.keys}
    return Look(int(states.lengths[lease.slot]), states.peek(lease.slot), lease.computed, kv)


def check(name: str, tokens: Sequence[int], looks: Sequence[Look], label: str = "") -> int:
    """Compares looks at a lease of model `name` with REF's states and KV of tokens[:length]; how many tensors."""
    expected, lengths, count = truth(name, tuple(tokens)), [look.length for look in looks], 0
    for (layer, part), each in expected.states.items():
        excess = each.at(lengths, torch.stack([look.states[layer][part] for look in looks]))
        worst = int(excess.argmax())
        assert excess[worst] <= 0, f"{label}: layer {layer} part {part} after {lengths[worst]} tokens"
        count += len(looks)
    for look in looks:
        assert look.length >= look.computed
        for (layer, part), each in expected.kv.items():
            found = look.kv[layer][part]
            assert found.shape[0] == look.computed
            if look.computed:
                error = (found.double() - each.exact[: look.computed]).abs().max()
                assert error <= each.allowed[look.computed], f"{label}: KV of layer {layer}, {look.computed} tokens"
                count += 1
    return count


class Watch:
    """Looks at every running request after every (n-th) step: pass `look` to `engines.run`, then `check`."""

    def __init__(self, engine: Engine, name: str, every: int = 1) -> None:
        self._engine = engine
        self._name = name
        self._every = every
        self._steps = 0
        self._looks: dict[Running, list[Look]] = {}
        self.num_checked = 0

    def look(self) -> None:
        self._steps += 1
        if self._steps % self._every:
            return
        for seq in self._engine.scheduler._running:
            waits = seq.lease is None or (seq.lease.restore is not None and seq.lease.restore.pinned)
            if seq.lease is not None and seq.lease.bound and not waits:
                self._looks.setdefault(seq, []).append(look_at(self._engine.states, seq.lease))

    def check(self) -> None:
        """Compares everything seen so far, with the texts as they are now. Looks beyond an ended text are dropped."""
        for seq, looks in self._looks.items():
            mine = [look for look in looks if look.length <= len(seq.tokens)]
            self.num_checked += check(self._name, seq.tokens, mine, seq.request.id)
        self._looks.clear()


def assert_greedy(name: str, prompt: Sequence[int], output: Sequence[int]) -> None:
    """The output is REF's own greedy text, but for choices REF itself finds to be within 1e-4 of each other."""
    logits = ref(name).logits([*prompt, *output])[len(prompt) - 1 : -1]
    best = logits.topk(2)
    for at, token in enumerate(output):
        first, second = best.values[at].tolist()
        assert token in best.indices[at].tolist(), (at, token)
        assert token == int(best.indices[at, 0]) or first - second < NEAR_TIE, (at, token, first - second)
