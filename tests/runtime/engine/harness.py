"""Drives an engine in process: small pools, everything collected, every step checked for what must always hold."""

from __future__ import annotations

import functools
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from runtime.api import (
    Accepted,
    CancelReason,
    Delta,
    EngineConfig,
    EngineStats,
    FinishReason,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from runtime.build import build_engine
from runtime.engine import Engine
from runtime.speculation.proposer import Drafts, HiddenNeed, Placement, SpeculativeProposer
from runtime.speculation.registry import PROPOSERS, ProposerParts
from runtime.state.paged import PagedStore
from runtime.state.pool import StateTxn
from runtime.state.recurrent import SlotStore
from runtime.step import ForwardBatch, Verdict
from tests.support.ref import Ref
from tests.support.tiny import VOCAB, tiny

torch.set_num_threads(1)

ASSET = Path(__file__).parents[3] / "runtime" / "assets" / "model"
QWEN, GRANITE = "qwen-attention-first", "granite-attention-first"
GAUGES = {
    "running",
    "waiting_deferred",
    "waiting_tokens",
    "registries",
    "waiting_seqs",
    "waiting_kv",
    "waiting_state",
    "kv_blocks_used",
    "kv_blocks_cached",
    "state_slots_used",
    "state_slots_cached",
    "checkpoints",
    "checkpoints_total",
}

DEAD: set[Engine] = set()  # engines that a test killed on purpose: not asked to be empty

_UNDISTURBED: dict[tuple[str | Path, bytes], Result] = {}

# (speculative, settle_lag): what a behaviour that must not depend on either is tried with.
WAYS = [(speculative, lag) for speculative in ("none", "ngram:4", "mtp:3", "right:3", "right-host:4") for lag in (0, 1)]


def directory(model: str) -> Path:
    return ASSET if model == "asset" else tiny(model)


def build(model: str | Path = QWEN, poison: float | None = float("nan"), **changes: Any) -> Engine:
    """A new engine. `right:K` and `right-host:K` draft from `Scripted.texts`, on the device's side or the host's."""
    settings = {
        "max_model_len": 96,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "block_size": 4,
        "threads": 1,
        **changes,
    }
    path = model if isinstance(model, Path) else directory(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROPOSERS, "right", f"{__name__}:on_device")
        patch.setitem(PROPOSERS, "right-host", f"{__name__}:on_host")
        return build_engine(EngineConfig(model_dir=str(path), **settings), poison=poison)


@functools.cache
def shared(model: str | Path = QWEN, speculative: str = "none", settle_lag: int = 0, **changes: Any) -> Engine:
    """An engine for tests that leave nothing behind in it."""
    return build(model, speculative=speculative, settle_lag=settle_lag, **changes)


@functools.cache
def ref(model: str) -> Ref:
    return Ref(directory(model))


def with_eos(model: str, eos_ids: Iterable[int]) -> Path:
    """A copy of a model directory that declares other end-of-sequence tokens."""
    source, target = directory(model), Path(tempfile.mkdtemp(prefix="eos-", dir=directory(model).parent))
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            (target / path.name).symlink_to(path)
        elif path.name != "generation_config.json":
            shutil.copy(path, target)
    config = json.loads((target / "config.json").read_text())
    config["eos_token_id"] = list(eos_ids)
    (target / "config.json").write_text(json.dumps(config))
    return target


def on_device(parts: ProposerParts) -> Scripted:
    return Scripted(parts, Placement.DEVICE)


def on_host(parts: ProposerParts) -> Scripted:
    return Scripted(parts, Placement.HOST)


class Scripted(SpeculativeProposer):
    """Drafts each request's known text: `right(id, position)` true tokens, then wrong ones.

    `texts`: prompt and output by request id; a request without one gets wrong drafts only. `position` is the index of
    the last emitted token, behind which the drafts lie.
    """

    name = "scripted"
    needs = HiddenNeed.NONE

    def __init__(self, parts: ProposerParts, placement: Placement) -> None:
        self.placement = placement
        self.texts: dict[str, list[int]] = {}
        self.right: Callable[[str, int], int] = lambda _name, _position: 99
        self._pool = parts.pool
        self._vocab = parts.model.spec.vocab_size

    def num_bytes(self) -> int:
        return 0

    def paged_stores(self) -> tuple[PagedStore, ...]:
        return ()

    def slot_stores(self) -> tuple[SlotStore, ...]:
        return ()

    def extend(self, txn: StateTxn, fb: ForwardBatch, hidden: torch.Tensor, verdict: Verdict) -> None:
        pass

    def propose(
        self, txn: StateTxn, fb: ForwardBatch, hidden: torch.Tensor, verdict: Verdict, num_drafts: tuple[int, ...]
    ) -> Drafts:
        at = self._pool.lengths[fb.slots].tolist()
        out = torch.zeros(len(num_drafts), max(num_drafts), dtype=torch.long)
        for i, row in enumerate(txn.batch.rows):
            name = row.seq.request.id
            text, right = self.texts.get(name, []), self.right(name, at[i])
            for depth in range(num_drafts[i]):
                known = at[i] + 1 + depth < len(text)
                token = text[at[i] + 1 + depth] if known else 0
                out[i, depth] = token if known and depth < right else (token + 1) % self._vocab
        return Drafts(out, num_drafts)


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    last: Delta | None = None


class Driver:
    """Steps an engine and keeps what it says; after every step no counter may have fallen."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.results: dict[str, Result] = {}
        self.before = self.stats = engine.stats()

    def submit(self, *requests: Request) -> None:
        for request in requests:
            assert self.engine.submit(request) == Accepted(id=request.id)
            self.results[request.id] = Result()

    def cancel(self, name: str, keep: int | None = None) -> None:
        keep = len(self.results[name].tokens) if keep is None and name in self.results else keep or 0
        self.engine.cancel(name, CancelReason.CLIENT_GONE, keep)

    def step(self) -> None:
        for delta in self.engine.step():
            self._take(delta)
        stats = self.engine.stats()
        assert_not_fallen(self.stats, stats)
        self.stats = stats

    def finish(self, limit: int = 5000) -> dict[str, Result]:
        """Steps until nothing is left."""
        for _ in range(limit):
            if not self.engine.has_work:
                return self.results
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    def run(self, requests: Iterable[Request]) -> dict[str, Result]:
        self.submit(*requests)
        return self.finish()

    def since(self, name: str) -> int:
        """How much a counter rose since this driver began."""
        return int(getattr(self.stats, name) - getattr(self.before, name))

    def _take(self, delta: Delta) -> None:
        result = self.results[delta.request_id]
        assert result.finish is None, f"{delta} after the last delta"
        result.tokens += delta.tokens
        if delta.logprobs is not None:
            assert [entry.token for entry in delta.logprobs] == list(delta.tokens)
            result.logprobs += delta.logprobs
        assert delta.drafted >= result.drafted and delta.accepted >= result.accepted
        result.drafted, result.accepted = delta.drafted, delta.accepted
        result.finish, result.error = delta.finish, delta.error
        assert (delta.error is not None) == (delta.finish is FinishReason.ERROR)
        if delta.finish is not None:
            result.last = delta
            assert delta.timing is not None
            assert min(delta.timing.queued, delta.timing.prefill, delta.timing.decode) >= 0.0


def run(engine: Engine, requests: Iterable[Request]) -> dict[str, Result]:
    return Driver(engine).run(requests)


def alone(requests: Iterable[Request], model: str | Path = QWEN) -> dict[str, Result]:
    """What each request says undrafted and undisturbed, in a pool with room for all; remembered for the session.

    They share batches for speed; that company changes nothing is a test of its own.
    """
    keys = {request.id: (model, _key(request)) for request in requests}
    new = {key: msgspec.msgpack.decode(key[1], type=Request) for key in keys.values() if key not in _UNDISTURBED}
    renamed = {str(i): msgspec.structs.replace(request, id=str(i)) for i, request in enumerate(new.values())}
    results = run(shared(model, max_num_seqs=32, max_num_batched_tokens=512), renamed.values()) if renamed else {}
    _UNDISTURBED.update(zip(new, results.values(), strict=True))
    return {name: _UNDISTURBED[key] for name, key in keys.items()}


def texts_of(requests: Iterable[Request], results: dict[str, Result]) -> dict[str, list[int]]:
    """Prompt and output by id, for `Scripted`."""
    return {request.id: [*request.prompt, *results[request.id].tokens] for request in requests}


def request(
    name: str, prompt: Iterable[int], max_tokens: int = 12, num_drafts: int | None = None, **sampling: Any
) -> Request:
    """Greedy and deaf to EOS unless told otherwise."""
    params = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return Request(
        id=name,
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **params),
        num_drafts=num_drafts,
    )


def prompts(
    count: int, lengths: Iterable[int] = (1, 2, 3, 5, 9, 17), seed: int = 0, vocab: int = VOCAB
) -> list[tuple[int, ...]]:
    dice, sizes = random.Random(seed), list(lengths)
    return [tuple(dice.randrange(3, vocab) for _ in range(sizes[i % len(sizes)])) for i in range(count)]


def assert_not_fallen(before: EngineStats, after: EngineStats) -> None:
    for name in EngineStats.__struct_fields__:
        if name in GAUGES:
            continue
        old, new = getattr(before, name), getattr(after, name)
        if name == "distributions":
            for key, seen in old.items():
                assert new[key].total >= seen.total, key
                assert all(b >= a for a, b in zip(seen.counts, new[key].counts, strict=True)), key
        elif isinstance(old, dict):
            assert all(new[key] >= value for key, value in old.items()), name
        elif isinstance(old, list):
            assert all(b >= a for a, b in zip(old, new, strict=True)), name
        else:
            assert new >= old, name


def assert_empty(engine: Engine) -> None:
    """CONSERVE: nothing is held, open, in flight or remembered."""
    scheduler, states, ledger = engine.scheduler, engine.states, engine.states.ledger
    assert not engine.has_work
    assert not engine._flights
    assert not (scheduler._live or scheduler._waiting or scheduler._running or scheduler._ended)
    assert scheduler._unsettled == 0
    assert states.is_sound()
    states._leave()
    assert not (states._written or states._unsettled or ledger._leases or ledger._moves)
    assert (ledger.used_blocks, ledger.free_slots) == (0, ledger.total_slots)
    assert ledger.cache is None or not ledger.cache.num_claimed
    assert engine.stats().commits_missing == 0
    stats = engine.stats()
    assert (stats.running, stats.waiting_seqs, stats.waiting_kv, stats.waiting_state) == (0, 0, 0, 0)


def _key(request: Request) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(request, id="", num_drafts=None))
