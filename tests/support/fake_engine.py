"""A deterministic engine without a model: says what a script tells it, several tokens per step as speculation does.

The default script repeats the prompt's own tokens and ends with EOS. Stop ids, EOS, limits, the queue bound, cancel and
the counters behave as the real engine's; `hold` freezes generation until `release`.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtime.api import (
    Accepted,
    CancelReason,
    Delta,
    EngineCore,
    EngineStats,
    FinishReason,
    ModelInfo,
    Rejected,
    RejectReason,
    Request,
    RequestTiming,
    TokenLogprobs,
)

ASSET = Path(__file__).parents[2] / "runtime" / "assets" / "model"
VOCAB: int = json.loads((ASSET / "config.json").read_text())["vocab_size"]  # the tokenizer is the real one
EOS_IDS: tuple[int, ...] = tuple(json.loads((ASSET / "generation_config.json").read_text())["eos_token_id"])
EOS = EOS_IDS[0]
BURSTS = (1, 3, 2, 4)
Script = Callable[[Request], Iterable[int]]


@dataclass
class Running:
    request: Request
    script: Iterator[int]
    bursts: Iterator[int]
    emitted: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0


class FakeEngine(EngineCore):
    def __init__(
        self,
        *,
        vocab_size: int = VOCAB,
        eos_ids: tuple[int, ...] = EOS_IDS,
        max_model_len: int = 2048,
        max_running: int = 64,
        max_queued: int = 64,
        script: Script | None = None,
        bursts: Sequence[int] = BURSTS,
        fail_after: int | None = None,
        freeze_after: int | None = None,
    ) -> None:
        self._info = ModelInfo(
            architecture="Fake",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_ids=eos_ids,
            max_drafts=7,
            choices={"fake": "yes", "block_size": "16", "kv_blocks": "64", "state_slots": "16"},
            startup_seconds={"load": 0.0, "selftest": 0.0},
            versions={"torch": "0"},
        )
        self.script: Script = script or (lambda request: request.prompt)
        self.bursts = tuple(bursts)
        self.max_running = max_running
        self.max_queued = max_queued
        self.fail_after = fail_after  # tokens after which a request ends with ERROR
        self.freeze_after = freeze_after  # holds by itself once a request has this many tokens
        self.crash = False  # step raises
        self.requests: list[Request] = []  # everything accepted
        self.cancels: list[tuple[str, CancelReason, int]] = []
        self.cancelled = threading.Event()
        self._running: dict[str, Running] = {}
        self._waiting: list[Request] = []
        self._ended: list[Delta] = []
        self._open = threading.Event()
        self._open.set()
        self._stats = EngineStats(kv_blocks_total=64, state_slots_total=16)

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    @property
    def info(self) -> ModelInfo:
        return self._info

    def submit(self, request: Request) -> Accepted | Rejected:
        if len(self._waiting) >= self.max_queued:
            return Rejected(request.id, RejectReason.QUEUE_FULL, "queue full")
        self.requests.append(request)
        self._waiting.append(request)
        return Accepted(request.id)

    def cancel(self, request_id: str, reason: CancelReason, keep: int) -> None:
        self.cancels.append((request_id, reason, keep))
        run = self._running.pop(request_id, None)
        waiting = [request for request in self._waiting if request.id == request_id]
        if run is not None or waiting:
            self._waiting = [request for request in self._waiting if request.id != request_id]
            if run is not None:
                self._stats.tokens_discarded += len(run.emitted) - keep
            self._ended.append(Delta(request_id=request_id, finish=FinishReason.ABORT))
        self.cancelled.set()

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._ended)

    def step(self) -> list[Delta]:
        if self.crash:
            raise RuntimeError("scripted crash at /secret/path 0x7fdeadbeef")
        deltas, self._ended = self._ended, []
        while self._waiting and len(self._running) < self.max_running:
            request = self._waiting.pop(0)
            self._stats.prompt_tokens_computed += len(request.prompt)
            script = itertools.chain(self.script(request), itertools.repeat(self._info.eos_ids[0]))
            self._running[request.id] = Running(request, script, itertools.cycle(self.bursts))
        if not self._open.wait(0.005):
            return deltas
        self._stats.step_serial += 1
        self._stats.last_step_time = time.time()
        self._stats.steps["verify"] = self._stats.steps.get("verify", 0) + 1
        for run in list(self._running.values()):
            delta = self._advance(run)
            deltas.append(delta)
            if delta.finish is not None:
                del self._running[run.request.id]
            if self.freeze_after is not None and len(run.emitted) >= self.freeze_after:
                self.hold()
        return deltas

    def _advance(self, run: Running) -> Delta:
        sampling = run.request.sampling
        limit = next(run.bursts)
        if run.request.num_drafts is not None:
            limit = min(limit, 1 + run.request.num_drafts)
        block: list[int] = []
        finish: FinishReason | None = None
        error: str | None = None
        while len(block) < limit and finish is None:
            if self.fail_after is not None and len(run.emitted) >= self.fail_after:
                finish, error = FinishReason.ERROR, "scripted failure at /secret/path"
                break
            token = next(run.script)
            stops = set(sampling.stop_ids) | (set() if sampling.ignore_eos else set(self._info.eos_ids))
            if token in stops and len(run.emitted) < sampling.min_tokens:
                token = 0
            block.append(token)
            run.emitted.append(token)
            if token in stops:
                finish = FinishReason.STOP
            elif len(run.emitted) >= sampling.max_tokens:
                finish = FinishReason.LENGTH
        if run.request.num_drafts != 0:
            run.drafted += 3
            run.accepted += max(len(block) - 1, 0)
            self._stats.spec_verifications += 1
            self._stats.spec_drafted += 3
            self._stats.spec_accepted += max(len(block) - 1, 0)
        self._stats.tokens_emitted += len(block)
        self._stats.commits += 1
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = tuple(
                TokenLogprobs(t, -0.5, tuple(((t + i) % VOCAB, -0.5 - i) for i in range(sampling.logprobs)))
                for t in block
            )
        return Delta(
            request_id=run.request.id,
            tokens=tuple(block),
            logprobs=logprobs,
            finish=finish,
            error=error,
            drafted=run.drafted,
            accepted=run.accepted,
            timing=RequestTiming(0.001, 0.002, 0.003) if finish is not None or run.emitted == block else None,
        )

    def stats(self) -> EngineStats:
        self._stats.running = len(self._running)
        self._stats.waiting_seqs = len(self._waiting)
        self._stats.waiting_tokens = sum(len(request.prompt) for request in self._waiting)
        self._stats.kv_blocks_used = len(self._running)
        self._stats.state_slots_used = len(self._running)
        return self._stats
