"""Continuous batching: which sequences feed which tokens in the next step, and what an outcome means for a request.

Pure host code. It asks the ledger for room, but never begins or settles a step there (the pool does), and it knows no
tensors. One order decides everything: who is admitted next, whose prompt is computed first, and who may take room from
whom. It is fixed when a request comes, so nobody can be overtaken for ever:

    rank = priority * aging_tokens + tokens planned so far, then order of arrival; the smallest rank goes first

A unit of priority is a head start of `aging_tokens` computed tokens: whoever comes later than that goes behind,
whatever its priority. Tokens, not seconds, because they pass only while the engine works.
"""

from __future__ import annotations

import logging
from bisect import insort
from itertools import islice

from runtime.api import (
    Accepted,
    ConfigError,
    Delta,
    EngineStats,
    FinishReason,
    Rejected,
    RejectReason,
    Request,
    RequestTiming,
    TokenLogprobs,
)
from runtime.checkpoints import Checkpoints
from runtime.counts import Counts
from runtime.plan import Batch, Heritage, Outcome, Pass, Row, RowKind, Sequence, StateLease
from runtime.queue import Drafting, Limits, WaitingQueue, cut_to_fit, rank_of, refusal, refuse_unfit
from runtime.state.ledger import Currency, Ledger, Shortage

__all__ = ["Drafting", "Limits", "Scheduler"]
log = logging.getLogger("lockstep.scheduler")
STUCK = "The engine had no room to go on with this request."


class Scheduler:
    """Plans batches and turns outcomes into deltas. One `update` or `fail` answers each batch, in order.

    A request is waiting or running until it ends; then nothing here knows it any more. Preemption takes the lease and
    keeps the tokens, and what an unsettled step emitted for the lost lease is dropped and computed again.
    """

    def __init__(self, ledger: Ledger, limits: Limits, drafting: Drafting) -> None:
        # Behind the last token of a request lie, at most: a row planned before its end was known, and its drafts.
        self.max_len = min(limits.max_model_len, ledger.max_tokens_per_seq - 2 * limits.k_max)
        if self.max_len < 2 or not ledger.total_slots:
            raise ConfigError(
                f"{ledger.total_blocks} KV blocks of {ledger.block_size} tokens and {ledger.total_slots} state slots "
                f"with {limits.k_max} drafts cannot hold one request"
            )
        self.ledger = ledger
        self.checkpoints = Checkpoints(ledger)
        self.limits = limits
        self.drafting = drafting
        self.draining = False
        self._live: dict[str, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        self._ended: list[Delta] = []
        self._short: Currency | None = None
        self._next_serial = 1
        self._unsettled = 0
        self._arrivals = 0
        self._planned_tokens = 0
        self._counts = Counts()

    @property
    def has_work(self) -> bool:
        """Whether a request is alive, a batch is unanswered, or an end is not yet taken."""
        return bool(self._live or self._ended or self._unsettled)

    # --- requests come and go

    def add(self, request: Request, now: float) -> Accepted | Rejected:
        """Queues a request, or says why it will not run."""
        if self.draining:
            return refusal(request, RejectReason.DRAINING, "The engine is shutting down.")
        if request.id in self._live:
            return refusal(request, RejectReason.INVALID, f"The id {request.id!r} is in use.", param="id")
        unfit = refuse_unfit(request, self.max_len)
        if unfit is not None:
            return unfit
        free_seats = self.limits.max_num_seqs - len(self._running) if self._short is None else 0
        full = self._waiting.refuse(request, self.limits, max(0, free_seats))
        if full is not None:
            return full
        request = cut_to_fit(request, self.max_len)
        wanted = self.drafting.k if request.num_drafts is None else request.num_drafts
        num_drafts = min(wanted, self.limits.k_max, self.limits.max_num_batched_tokens - 1)
        self._arrivals += 1
        rank = (request.priority * self.limits.aging_tokens + self._planned_tokens, self._arrivals)
        text = self.checkpoints.text_of(request)
        seq = Sequence(request, list(request.prompt), num_drafts, now, rank=rank, text=text)
        self._live[request.id] = seq
        self._waiting.add(seq)
        return Accepted(id=request.id)

    def drain(self) -> None:
        """From now on every new request is rejected; those that are here run to their end."""
        self.draining = True

    def cancel(self, request_id: str, *, keep: int, now: float) -> bool:
        """Ends a request of which `keep` generated tokens were delivered; False when there is none of that name.

        Its last delta waits in `take_ended`.
        """
        seq = self._live.get(request_id)
        if seq is None:
            return False
        seq.cancelled = True
        self._counts.tokens_discarded += max(0, seq.num_output - keep)
        self._ended.append(self._end(seq, FinishReason.ABORT, now, keep=max(0, keep)))
        return True

    def take_ended(self) -> list[Delta]:
        """Last deltas of requests that were cancelled since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # --- a step is planned

    def schedule(self, now: float) -> Batch | None:
        """The next step, or None when everything that could run waits for a step to settle (or nothing is there)."""
        step = Pass(self._next_serial, self.limits.max_num_batched_tokens)
        self._plan_decodes(step)
        if step.all_rows and self.limits.max_prefill_tokens:
            step.budget = min(step.budget, self.limits.max_prefill_tokens)
        for seq in list(self._running):
            if not seq.decoding and seq.lease is not None and step.budget:
                self._plan_prefill(step, seq, seq.lease)
        self._admit(step, now)
        rows = step.all_rows
        if not rows:
            if self._live and not self._unsettled:
                self._end_stuck(now)
            return None
        self._next_serial += 1
        self._unsettled += 1
        batch = Batch(step.serial, rows)
        self._planned_tokens += batch.num_tokens
        return batch

    def update(self, batch: Batch, outcome: Outcome, now: float) -> list[Delta]:
        """What a settled step says about its requests. Rows whose lease ended meanwhile are dropped."""
        outcome.check(batch)
        self._unsettled -= 1
        self._counts.step_tokens += batch.num_tokens
        deltas = []
        for i, row in enumerate(batch.rows):
            self.checkpoints.settle(row, outcome, i)
            if not row.live:
                self._counts.tokens_discarded += len(outcome.emitted[i])
                continue
            delta = self._advance(row, outcome, i, now)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def fail(self, batch: Batch, message: str, now: float) -> list[Delta]:
        """Ends all requests of a batch that has no outcome."""
        self._unsettled -= 1
        for row in batch.rows:
            self.checkpoints.drop(row)
        return [self._end(row.seq, FinishReason.ERROR, now, error=message) for row in batch.rows if row.live]

    def fill(self, stats: EngineStats) -> None:
        """Writes the gauges and counters the scheduler and the ledger own.

        All who wait, wait for what the first of them lacks: room, a seat, or (deferred) a step with tokens to spare.
        """
        ledger = self.ledger
        stats.running = len(self._running)
        waiting = len(self._waiting)
        if self._short is Currency.KV:
            stats.waiting_kv = waiting
        elif self._short is Currency.STATE:
            stats.waiting_state = waiting
        elif len(self._running) >= self.limits.max_num_seqs:
            stats.waiting_seqs = waiting
        else:
            stats.waiting_deferred = waiting
        stats.waiting_tokens = self._waiting.num_tokens
        stats.registries |= {"requests": len(self._live), "leases": ledger.num_leases}
        stats.kv_blocks_used, stats.kv_blocks_total = ledger.used_blocks, ledger.total_blocks
        stats.state_slots_used, stats.state_slots_total = ledger.used_slots, ledger.total_slots
        self._counts.fill(stats)
        self.checkpoints.fill(stats)

    # --- admission

    def _admit(self, step: Pass, now: float) -> None:
        """By rank; room that a running sequence lacks is not given to a newcomer, nor is any that the first one lacks.

        Only who waits for a sibling's prompt, and so for no room, lets others pass: for as long as that takes.
        """
        self._short = Currency.KV if step.short else None
        for seq in list(islice(self._waiting, 2 * self.limits.max_num_seqs)):
            if not step.budget or self._short is not None or len(self._running) >= self.limits.max_num_seqs:
                return
            if self.checkpoints.waits(seq, self._running):
                continue
            steps_in_flight = (1 + self.limits.settle_lag) * (1 + self.limits.k_max)
            lease = self.checkpoints.admit(seq, self._capacity(seq, len(seq.tokens) + steps_in_flight))
            if isinstance(lease, Shortage):
                self._short = lease.currency
                return
            seq.lease, seq.planned = lease, lease.origin
            self._waiting.remove(seq)
            insort(self._running, seq, key=rank_of)
            if seq.first_scheduled is None:
                seq.first_scheduled = now
            self._plan_prefill(step, seq, lease)

    # --- rows

    def _plan_prefill(self, step: Pass, seq: Sequence, lease: StateLease) -> None:
        """The next chunk of known tokens, as long as the budget allows."""
        num_fed = min(step.budget, len(seq.tokens) - seq.planned)
        if lease.in_flight > self.limits.settle_lag or not self._grow(step, seq, lease, num_fed):
            return
        start, end = seq.planned, seq.planned + num_fed
        emits = end == len(seq.tokens)
        seq.planned, seq.decoding = end, emits
        row = Row(
            seq,
            lease,
            RowKind.PREFILL,
            num_fed,
            emits,
            tokens=tuple(seq.tokens[start:end]),
            start=start,
            next_token=-1 if emits else seq.tokens[end],
            want_drafts=self._ask(seq) if emits else 0,
            marks=self.checkpoints.mark_prefill(seq, start, end),
        )
        step.add(row)

    def _plan_decodes(self, step: Pass) -> None:
        """One row for every sequence that is past its known tokens. A scarce budget serves who waited longest.

        An eighth of it is for prompts when there are any, or newcomers would wait until others end.
        """
        ready = [seq for seq in self._running if seq.decoding and self._may_decode(seq)]
        kept_back = step.budget // 8 if self._has_prompts() else 0
        if sum(1 + self._num_drafts(seq) for seq in ready) > step.budget - kept_back:
            ready.sort(key=lambda seq: seq.last_step)
        for seq in ready:
            if seq.lease is None:
                continue  # preempted in this pass, to help an older one
            lease, num_drafts = seq.lease, self._num_drafts(seq)
            if 1 + num_drafts > step.budget - (kept_back if step.all_rows else 0):
                break  # next time it is among the first
            if not self._grow(step, seq, lease, 1 + num_drafts):
                continue
            row = Row(
                seq,
                lease,
                RowKind.VERIFY if seq.num_drafts else RowKind.DECODE,
                1 + num_drafts,
                emits=True,
                num_drafts=num_drafts,
                drafts=seq.drafts[:num_drafts] if self.drafting.host else None,
                want_drafts=self._ask(seq),
                marks=self.checkpoints.mark_decode(lease, 1 + num_drafts),
            )
            step.add(row)

    def _has_prompts(self) -> bool:
        """Whether known tokens could be computed in this step."""
        admits = self._waiting and self._short is None and len(self._running) < self.limits.max_num_seqs
        return bool(admits) or any(not seq.decoding for seq in self._running)

    def _may_decode(self, seq: Sequence) -> bool:
        assert seq.lease is not None
        if len(seq.tokens) + seq.pending >= seq.max_total or seq.lease.in_flight > self.limits.settle_lag:
            return False
        if self.drafting.host and seq.num_drafts and seq.lease.in_flight:
            self._counts.settle_waits += 1
            return False
        return True

    def _num_drafts(self, seq: Sequence) -> int:
        """Drafts the next row verifies. A block of d drafts emits up to d + 1 tokens: more is of no use."""
        if not self.drafting.host:
            return seq.asked
        return max(0, min(len(seq.drafts), seq.num_drafts, seq.max_total - len(seq.tokens) - 1))

    def _ask(self, seq: Sequence) -> int:
        """Counts one more emitting row, and says how many drafts to propose after it: those that could be of use."""
        seq.pending += 1
        at_least = len(seq.tokens) + seq.pending
        seq.asked = max(0, min(seq.num_drafts, seq.max_total - at_least - 1))
        return seq.asked

    # --- room

    def _capacity(self, seq: Sequence, end: int) -> int:
        """Tokens to hold for a step that may feed up to position `end`: throw-away drafts are written behind it."""
        return min(end + self.limits.k_max, seq.max_total + 2 * self.limits.k_max)

    def _grow(self, step: Pass, seq: Sequence, lease: StateLease, num_fed: int) -> bool:
        """Blocks for `num_fed` more tokens, from sequences of a higher rank if need be; False: not in this pass."""
        capacity = self._capacity(seq, lease.bound + num_fed)
        while not self.ledger.extend(lease, capacity):
            step.short = True
            returning = self.ledger.closing_blocks
            if returning and returning >= self.ledger.shortfall(lease, capacity):
                return False
            victim = self._running[-1]
            if victim is seq or victim.last_step == step.serial:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, seq: Sequence) -> None:
        assert seq is self._running[-1]
        self._counts.preemptions[Currency.KV] += 1
        self._let_go(seq, self.checkpoints.preempted(seq))
        self._running.pop()
        self._waiting.add(seq)
        seq.planned, seq.decoding, seq.drafts, seq.pending, seq.asked = 0, False, (), 0, 0

    def _end_stuck(self, now: float) -> None:
        """Nothing is in flight, and nothing can be planned: whoever is first fails, instead of all of them waiting.

        Never happens while the ledger has the room it promised at start (`max_len`); who ends is who needs it now.
        """
        seq = self._running[0] if self._running else self._waiting.head
        counts = len(self._running), len(self._waiting)
        log.error("no progress with %d running and %d waiting: %s fails", *counts, seq.request.id)
        self._counts.stuck += 1
        self._ended.append(self._end(seq, FinishReason.ERROR, now, error=STUCK))

    def _let_go(self, seq: Sequence, heritage: Heritage | None) -> None:
        if seq.lease is not None:
            self.ledger.release(seq.lease, heritage)
            seq.lease = None

    # --- outcomes

    def _advance(self, row: Row, outcome: Outcome, i: int, now: float) -> Delta | None:
        """One live row's outcome becomes part of its sequence."""
        seq, finish, kept = row.seq, outcome.finish[i], outcome.kept[i]
        if finish is FinishReason.ERROR:
            return self._end(seq, finish, now, error=outcome.errors[i] or "The request failed.")
        if row.kind is RowKind.PREFILL:
            self._counts.prompt_tokens_computed += row.num_fed
        if row.num_drafts:
            seq.drafted += row.num_drafts
            seq.accepted += kept - 1
            self._counts.count_verification(row.num_drafts, kept)
        if not row.emits:
            return None
        seq.pending -= 1
        emitted = outcome.emitted[i]
        seq.tokens.extend(emitted)
        seq.drafts = outcome.drafts[i] if outcome.drafts else ()
        self._counts.tokens_emitted += len(emitted)
        first = seq.first_token is None
        if first:
            seq.first_token = now
        logprobs = outcome.logprobs[i] if outcome.logprobs else None
        if finish is not None:
            return self._end(seq, finish, now, tokens=emitted, logprobs=logprobs)
        return Delta(
            request_id=seq.request.id,
            tokens=emitted,
            logprobs=logprobs,
            drafted=seq.drafted,
            accepted=seq.accepted,
            cached_tokens=0 if seq.text is None else seq.text.cached,
            timing=_timing(seq, now) if first else None,
        )

    def _end(
        self,
        seq: Sequence,
        finish: FinishReason,
        now: float,
        *,
        error: str | None = None,
        keep: int | None = None,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> Delta:
        """The request is over: what it held goes back, and nothing here remembers it."""
        seq.finished = True
        delivered = seq.num_output if keep is None else min(keep, seq.num_output)
        heritage = self.checkpoints.ended(seq, finish, delivered)
        if seq.lease is None:
            self._waiting.remove(seq)
        else:
            self._running.remove(seq)
            self._let_go(seq, heritage)
        del self._live[seq.request.id]
        if not self._live:
            self._short = None
        return Delta(
            request_id=seq.request.id,
            tokens=tokens,
            logprobs=logprobs,
            finish=finish,
            error=error,
            drafted=seq.drafted,
            accepted=seq.accepted,
            cached_tokens=0 if seq.text is None else seq.text.cached,
            timing=_timing(seq, now),
        )


def _timing(seq: Sequence, now: float) -> RequestTiming:
    """Where a request's time went until now."""
    scheduled = now if seq.first_scheduled is None else seq.first_scheduled
    first_token = now if seq.first_token is None else seq.first_token
    return RequestTiming(scheduled - seq.arrived, first_token - scheduled, now - first_token)
