"""Engines with tiny pools over tiny models, requests for them, and what they said; POISON, CANARY and CONSERVE.

Every engine built here is remembered until `forget`, so that `check_idle` can look at all of them after every test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from runtime.api import Accepted, Delta, EngineConfig, FinishReason, Request, SamplingParams
from runtime.build import build_engine
from runtime.engine import Engine
from runtime.plan import Batch
from tests.support.tiny import VOCAB, tiny

NAN = float("nan")
ASSET = Path(__file__).parents[2] / "runtime" / "assets" / "model"
PAIRS = tuple(itertools.product(("snapshot", "replay"), repeat=2))
MODES = ("decode", "prefill")

_built: list[Engine] = []


def directory(name: str) -> Path:
    """A tiny model, or the embedded one as "asset"."""
    return ASSET if name == "asset" else tiny(name)


def engine_of(name: str = "qwen", *, poison: float | None = NAN, **settings: Any) -> Engine:
    """An engine over a tiny model: blocks of 4 tokens, six sequences, and freed memory poisoned."""
    chosen: dict[str, Any] = {
        "model_dir": str(directory(name)),
        "threads": 1,
        "block_size": 4,
        "max_num_seqs": 6,
        "max_model_len": 128,
        "max_num_batched_tokens": 64,
        **settings,
    }
    engine = build_engine(EngineConfig(**chosen), poison=poison)
    _built.append(engine)
    return engine


def pair(prefill: str, decode: str, mode: str = "decode") -> dict[str, str]:
    """The settings that choose both halves and who verifies."""
    return {"prefill_backend": prefill, "decode_backend": decode, "speculative_attention_mode": mode}


def forget(engine: Engine) -> None:
    """A test broke this engine on purpose: `check_idle` need not look at it."""
    _built.remove(engine)


def tokens_of(seed: int, length: int, vocab: int = VOCAB) -> tuple[int, ...]:
    """Random tokens, without the special ids 0..2."""
    return tuple(torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def greedy(
    name: str, prompt: Sequence[int], max_tokens: int = 16, *, num_drafts: int | None = None, **sampling: Any
) -> Request:
    """A greedy request that goes on until `max_tokens`, unless told otherwise."""
    chosen = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **sampling}
    return Request(id=name, prompt=tuple(prompt), sampling=SamplingParams(**chosen), num_drafts=num_drafts)


@dataclass
class Story:
    """What an engine said about one request."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    drafted: int = 0
    accepted: int = 0
    cached: int = 0

    def add(self, delta: Delta) -> None:
        assert self.finish is None, "a delta after the last one"
        self.tokens += delta.tokens
        self.finish, self.error = delta.finish, delta.error
        self.drafted, self.accepted = delta.drafted, delta.accepted
        self.cached = max(self.cached, delta.cached_tokens)


def run(engine: Engine, requests: Iterable[Request], after_step: Callable[[], None] = lambda: None) -> dict[str, Story]:
    """Submits all requests, steps until the engine is idle, and returns every request's story."""
    stories = submit(engine, requests)
    while engine.has_work:
        collect(engine, stories)
        after_step()
    return stories


def submit(engine: Engine, requests: Iterable[Request]) -> dict[str, Story]:
    """Submits all requests; every one must be accepted."""
    stories = {}
    for request in requests:
        answer = engine.submit(request)
        assert isinstance(answer, Accepted), answer
        stories[request.id] = Story()
    return stories


def collect(engine: Engine, stories: dict[str, Story]) -> None:
    """One step, added to the stories."""
    for delta in engine.step():
        stories[delta.request_id].add(delta)


def texts(stories: dict[str, Story]) -> dict[str, list[int]]:
    """The tokens alone."""
    return {name: story.tokens for name, story in stories.items()}


# --- CONSERVE -------------------------------------------------------------------------------------------------------


def check_all_idle() -> None:
    """Every engine that was built and not forgotten holds nothing."""
    for engine in _built:
        check_idle(engine)


def check_idle(engine: Engine) -> None:
    """All slots are free, blocks are free or cached, and no table remembers a request."""
    assert not engine.has_work
    states, scheduler, ledger = engine.states, engine.scheduler, engine.scheduler.ledger
    ledger.check()
    assert (ledger.free_slots, ledger.used_blocks) == (ledger.total_slots, 0)
    if ledger.cache is not None:
        assert not ledger.cache.num_claimed
        assert not any(each.pins for each in ledger.cache._checkpoints)
    remembered = (scheduler._live, scheduler._waiting, scheduler._running, scheduler._ended, scheduler._unsettled)
    assert not any(remembered), remembered
    assert not engine._flights
    engine._bind(Batch(0, ()))
    assert not engine._bound
    assert states.is_sound()
    assert not states._unsettled
    assert not states._written
    assert not any(states.backend.has_pending(slot) for slot in range(states.recurrent.num_slots))


# --- CANARY ---------------------------------------------------------------------------------------------------------


def paint(engine: Engine, slots: Sequence[int], blocks: Sequence[int]) -> Callable[[], None]:
    """Fills slots and blocks nobody may touch with a pattern; the answer checks that every bit is still there."""
    states = engine.states
    states.recurrent.fill(list(slots), 12345.678)
    states.kv.fill(list(blocks), -876.54321)
    before = _copies(engine, slots, blocks)

    def check() -> None:
        assert all(torch.equal(a, b) for a, b in zip(before, _copies(engine, slots, blocks), strict=True))

    return check


def _copies(engine: Engine, slots: Sequence[int], blocks: Sequence[int]) -> list[torch.Tensor]:
    recurrent, kv = engine.states.recurrent, engine.states.kv
    found = [tensor[list(slots)].clone() for tensor in (*recurrent.conv.values(), *recurrent.state.values())]
    return found + [tensor[list(blocks)].clone() for tensor in (*kv.keys.values(), *kv.values.values())]
