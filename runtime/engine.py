"""One step of serving, read top to bottom; and the engine as a Python API."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from runtime.api import (
    STEP_KINDS,
    STEP_PHASES,
    Accepted,
    CancelReason,
    Delta,
    EngineCore,
    EngineStats,
    ModelInfo,
    Rejected,
    RejectReason,
    Request,
    RequestError,
    StateError,
)
from runtime.auditor import Auditor
from runtime.counts import Observations
from runtime.outcome import read_back
from runtime.plan import Batch, Outcome
from runtime.queue import refuse_malformed
from runtime.runner import ModelRunner
from runtime.sampling.store import SamplingStore
from runtime.scheduler import Scheduler
from runtime.speculation.proposer import Placement, SpeculativeProposer
from runtime.speculation.verify import Verifier
from runtime.state.pool import StatePool, StateTxn
from runtime.step import ForwardBatch, Verdict

log = logging.getLogger("lockstep.engine")


@dataclass(slots=True, eq=False)
class _Flight:
    """A committed step that the host has not read yet. `drafting`: seconds spent on drafts so far."""

    txn: StateTxn
    fb: ForwardBatch
    verdict: Verdict
    hidden: torch.Tensor
    drafting: float = 0.0


class Engine(EngineCore):
    """schedule, begin, forward, judge, commit, extend, propose, settle. Build one with `runtime.build.build_engine`.

    `settle_lag` 1 lets a step start before the host has seen the previous one. `weight_bytes`: memory of parameters.
    """

    def __init__(
        self,
        *,
        info: ModelInfo,
        scheduler: Scheduler,
        states: StatePool,
        runner: ModelRunner,
        sampling: SamplingStore,
        verifier: Verifier,
        proposer: SpeculativeProposer | None,
        auditor: Auditor,
        settle_lag: int,
        weight_bytes: int,
    ) -> None:
        self.scheduler = scheduler
        self.states = states
        self.runner = runner
        self.proposer = proposer
        self.auditor = auditor
        self._info = info
        self._sampling = sampling
        self._verifier = verifier
        self._lag = settle_lag
        self._caches = states.ledger.cache is not None
        self._flights: deque[_Flight] = deque()
        self._bound: dict[int, int] = {}
        self._serial = 0
        self._last_step = time.time()
        self._steps = dict.fromkeys(STEP_KINDS, 0)
        self._seconds = dict.fromkeys(STEP_PHASES, 0.0)
        self._latest = dict.fromkeys(STEP_PHASES, 0.0)
        self._observed = Observations()
        self._memory = {
            "weights": weight_bytes,
            "kv": states.kv.num_bytes,
            "state": states.recurrent.num_bytes,
            "checkpoints": states.recurrent.num_checkpoint_bytes,
            "draft": 0 if proposer is None else proposer.num_bytes(),
        }
        self._draft_failures = 0
        self._non_finite = 0

    # --- the engine's door

    @property
    def info(self) -> ModelInfo:
        """What was resolved at start."""
        return self._info

    @property
    def has_work(self) -> bool:
        """Whether a request is alive or a step unsettled."""
        return self.scheduler.has_work

    def submit(self, request: Request) -> Accepted | Rejected:
        """Queues a request or says why not."""
        malformed = refuse_malformed(request, self._info.vocab_size)
        return malformed or self.scheduler.add(request, time.monotonic())

    def cancel(self, request_id: str, reason: CancelReason, keep: int) -> None:
        """Ends a request; its last delta comes with the next step."""
        self.scheduler.cancel(request_id, keep=keep, now=time.monotonic())

    def drain(self) -> None:
        """Rejects new requests from now on."""
        self.scheduler.drain()

    def stats(self) -> EngineStats:
        """The current counters and gauges."""
        stats = EngineStats(distributions=self._observed.snapshot())
        self.scheduler.fill(stats)
        stats.registries |= {
            "tables": self.states.num_tables,
            "sampling": len(self._bound),
            "steps": len(self._flights),
        }
        counts = self.states.counts
        stats.commits, stats.commits_missing, stats.aborted_steps = counts.commits, counts.missing, counts.aborted
        stats.commits_full, stats.commits_partial = counts.full, counts.partial
        stats.commits_bonus_only = counts.bonus_only
        stats.commit_rows = dict(counts.rows)
        stats.folds = self.states.backend.num_folds()
        stats.state_copies = {"commit": sum(counts.rows.values()) - stats.folds, "fold": stats.folds}
        stats.state_copies |= self.states.copies.counts
        stats.state_slot_bytes = self.states.recurrent.num_bytes // self.states.recurrent.num_slots
        stats.memory_bytes = self._memory | {"candidates": self.states.backend.num_bytes()}
        stats.audits_ok, stats.audits_mismatch = self.auditor.ok, self.auditor.mismatches
        stats.audits_skipped, stats.audit_worst = self.auditor.skipped, self.auditor.worst
        stats.steps, stats.step_seconds = dict(self._steps), dict(self._seconds)
        stats.last_step_time, stats.step_serial = self._last_step, self._serial
        stats.draft_failures, stats.non_finite_rows = self._draft_failures, self._non_finite
        return stats

    def generate(self, requests: Iterable[Request]) -> Iterator[Delta]:
        """Offline use: runs requests to their end and yields their deltas as they come.

        Raises RequestError for one that cannot be served, and then takes all of them back, as it does when the caller
        stops listening. Nothing else must be driving this engine meanwhile.
        """
        coming, alive = deque(requests), set[str]()
        try:
            while coming or alive:
                while coming:
                    answer = self.submit(coming[0])
                    if isinstance(answer, Rejected):
                        if answer.reason in (RejectReason.QUEUE_FULL, RejectReason.QUEUE_TOKENS) and alive:
                            break
                        raise RequestError(answer.message, param=answer.param, code=answer.code)
                    alive.add(coming.popleft().id)
                for delta in self.step():
                    if delta.finish is not None:
                        alive.discard(delta.request_id)
                    yield delta
        finally:
            for name in alive:
                self.cancel(name, CancelReason.CLIENT_GONE, 0)
            while alive and self.has_work:
                self.step()

    # --- the step

    def step(self) -> Seq[Delta]:
        """Runs one step and settles what is due; returns what that adds to requests."""
        began = time.perf_counter()
        deltas = self.scheduler.take_ended()
        with self._timed("schedule"):
            batch = self.scheduler.schedule(time.monotonic())
        if batch is not None:
            try:
                self._run(batch)
            except BaseException as error:
                log.exception("step %d failed", batch.serial)
                if isinstance(error, StateError) and not self.states.is_sound():
                    raise
                deltas += self.scheduler.fail(batch, "The engine failed on this request.", time.monotonic())
                if not isinstance(error, Exception):  # Ctrl-C: this step never happened, and the engine can go on
                    raise
            else:
                self._draft(self._flights[-1])
        while self._flights and (batch is None or len(self._flights) > self._lag or self.auditor.due):
            deltas += self._settle(self._flights[0])
        deltas += self.scheduler.take_ended()
        self._last_step = time.time()
        if batch is not None:
            self._observed.observe("step_seconds", time.perf_counter() - began)
        return deltas

    def _run(self, batch: Batch) -> None:
        """Forward, judge, commit; then the step is in flight. On any failure committed state is untouched."""
        with self._timed("prepare"):
            self._bind(batch)
            txn = self.states.begin(batch)
        try:
            with self._timed("prepare"):
                fb = self.runner.prepare(txn)
            with self._timed("forward"):
                hidden, logits = self.runner.forward(txn, fb)
            with self._timed("judge"):
                verdict = self._verifier.screen(fb, hidden, self._verifier.judge(fb, logits))
                self.runner.keep(fb, verdict)
            with self._timed("commit"):
                self.states.commit(txn, verdict)
                self._flights.append(_Flight(txn, fb, verdict, hidden))
        except BaseException:
            self.states.abort_if_open(txn)
            raise
        self._serial += 1
        self._steps[batch.kind] += 1
        self._observed.observe("step_tokens", batch.num_tokens)
        self._observed.observe("batch_size", len(batch.rows))
        self._observed.observe("commit_seconds", self._latest["commit"])
        if any(row.num_drafts for row in batch.rows):
            self._observed.observe("verify_seconds", self._latest["forward"] + self._latest["judge"])

    def _draft(self, flight: _Flight) -> None:
        """The drafter's own state follows every step; drafts of a device proposer stay on the device."""
        txn, fb, hidden, verdict = flight.txn, flight.fb, flight.hidden, flight.verdict
        if self.proposer is None or not (self._caches or any(row.seq.num_drafts for row in txn.batch.rows)):
            return  # with a prefix cache, whoever comes later may speculate on what this step computed
        wanted = tuple(row.want_drafts for row in txn.batch.rows)
        try:
            with self._timed("extend"):
                self.proposer.extend(txn, fb, hidden, verdict)
            flight.drafting += self._latest["extend"]
            if self.proposer.placement is Placement.HOST or not any(wanted):
                return
            with self._timed("propose"):
                drafts = self.proposer.propose(txn, fb, hidden, verdict, wanted)
                self.runner.keep_drafts(fb, drafts.tokens)
            flight.drafting += self._latest["propose"]
        except Exception as error:  # noqa: BLE001 - see _note_draft_failure
            self._note_draft_failure(error)

    def _settle(self, flight: _Flight) -> list[Delta]:
        """The host half: reads the verdict back, frees what ended, tells the scheduler.

        The oldest flight stays in the queue while only reading is done, so an interrupt there loses nothing.
        """
        with self._timed("settle"):
            outcome = read_back(flight.txn.batch, flight.verdict)
        outcome = self._host_drafts(flight, outcome)
        with self._timed("settle"):
            self._flights.popleft()
            self.states.settle(flight.txn, outcome)
            deltas = self.scheduler.update(flight.txn.batch, outcome, time.monotonic())
            self._non_finite += sum(error is not None for error in outcome.errors)
        if flight.drafting:
            self._observed.observe("draft_seconds", flight.drafting)
        self.auditor.after_step(flight.txn.batch, quiet=not self._flights)
        return deltas

    def _host_drafts(self, flight: _Flight, outcome: Outcome) -> Outcome:
        """Drafts of a host proposer join the outcome, since the scheduler plans with them."""
        wanted = tuple(row.want_drafts for row in flight.txn.batch.rows)
        if self.proposer is None or self.proposer.placement is not Placement.HOST or not any(wanted):
            return outcome
        try:
            with self._timed("propose"):
                drafts = self.proposer.propose(flight.txn, flight.fb, flight.hidden, flight.verdict, wanted)
            flight.drafting += self._latest["propose"]
            if len(drafts.lengths) != len(wanted):
                raise StateError(f"drafts for {len(drafts.lengths)} of {len(wanted)} rows")
            tokens = drafts.tokens.tolist()
            return outcome.with_drafts(tuple(tuple(tokens[i][:count]) for i, count in enumerate(drafts.lengths)))
        except Exception as error:  # noqa: BLE001 - see _note_draft_failure
            self._note_draft_failure(error)
            return outcome

    def _bind(self, batch: Batch) -> None:
        """Sampling data follows the leases: dropped with the old, written with the new."""
        for slot in self.states.sweep():
            if self._bound.pop(slot, None) is not None:
                self._sampling.release(slot)
        for row in batch.rows:
            lease, seq = row.lease, row.seq
            if self._bound.get(lease.slot) == lease.serial:
                continue
            self._bound[lease.slot] = lease.serial
            self._sampling.bind(
                lease.slot,
                seq.request.sampling,
                prompt=seq.request.prompt,
                output_tokens=seq.tokens[seq.prompt_len :],
                prompt_len=seq.prompt_len,
                max_total=seq.max_total,
                eos_ids=self._info.eos_ids,
            )

    def _note_draft_failure(self, error: Exception) -> None:
        """A drafter can cost speed, never an answer, since any draft is verified; unless it upset the books."""
        if isinstance(error, StateError) and not self.states.is_sound():
            raise error
        self._draft_failures += 1
        if self._draft_failures & (self._draft_failures - 1) == 0:  # 1st, 2nd, 4th, 8th ... : loud once, never a flood
            log.exception("the proposer failed (%d times so far); its requests go on undrafted", self._draft_failures)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._latest[phase] = time.perf_counter() - start
            self._seconds[phase] += self._latest[phase]
