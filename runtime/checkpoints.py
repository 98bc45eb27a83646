"""Which states of a sequence are kept, and from which cached one it goes on: the scheduler's use of the prefix cache.

Checkpoints are taken at the last block boundary that leaves the prompt a token to feed, where another text was seen to
part from it, every `interval` tokens, and when a request ends or is preempted. What a request generated is kept only as
far as it was delivered.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.api import EngineStats, FinishReason, Request
from runtime.plan import Heritage, Mark, Outcome, Row, RowKind, Sequence, StateLease, Text
from runtime.state.host_tier import HostCheckpoint
from runtime.state.ledger import Ledger, Shortage

Offered = list[tuple[int, str]]


class Checkpoints:
    """With a ledger that has no prefix cache, all of this does nothing."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._cache = ledger.cache

    def text_of(self, request: Request) -> Text | None:
        """How a new request is known to the cache."""
        return None if self._cache is None else Text(self._cache.chain(request.cache_salt))

    def waits(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether somebody is about to compute the very prompt of `seq`: then it goes on from their state, instead of
        computing it beside them. That is how siblings of one request (n > 1) share their prompt.

        Never longer than until that prompt is computed, whether or not a state of it could be kept.
        """
        cache, size = self._cache, self._ledger.block_size
        depth = (seq.prompt_len - 1) // size
        if cache is None or seq.text is None or not depth or seq.first_scheduled is not None:
            return False
        key = seq.text.chain.key(seq.tokens, depth)
        ahead = any(
            other.text is not None
            and other.lease is not None
            and other.lease.computed < depth * size <= len(other.tokens)
            and other.text.chain.key(other.tokens, depth) == key
            for other in running
        )
        return ahead and cache.match(seq.text.chain, seq.tokens).deepest < depth * size

    def admit(self, seq: Sequence, num_tokens: int) -> StateLease | Shortage:
        """A lease of `num_tokens` tokens that goes on from the deepest cached state, and counts what that saves."""
        cache, text = self._cache, seq.text
        if cache is None or text is None:
            return self._ledger.admit(seq.request.id, num_tokens)
        match = cache.match(text.chain, seq.tokens)
        lease = self._ledger.admit(seq.request.id, num_tokens, match)
        if isinstance(lease, Shortage):
            return lease
        source = None if lease.restore is None else lease.restore.source
        if source is not None:
            cache.hit(source)
            text.sources.append(source)
        if seq.first_scheduled is not None:
            cache.resumed_tokens += lease.origin
            return lease
        text.cached = min(lease.origin, seq.prompt_len)
        cache.query_tokens += seq.prompt_len
        cache.hit_tokens["host" if isinstance(source, HostCheckpoint) else "device"] += text.cached
        if match.num_kv > lease.origin:
            text.fork_at = match.num_kv
            cache.lost_tokens[match.loss] += match.num_kv - lease.origin
        return lease

    def mark_prefill(self, seq: Sequence, start: int, end: int) -> tuple[Mark, ...]:
        """Claims rows for the states that tokens start..end - 1 pass and that are worth keeping."""
        if self._cache is None or seq.text is None:
            return ()
        size, interval = self._ledger.block_size, self._cache.settings.interval
        wanted = dict.fromkeys(range(end - end % interval, start, -interval), "interval")
        wanted |= {(seq.prompt_len - 1) // size * size: "prompt", seq.text.fork_at: "fork"}
        marks = []
        for place in sorted((n for n in wanted if start < n <= end), key=lambda n: (wanted[n] == "interval", -n)):
            row = self._cache.claim(modest=wanted[place] == "interval")
            if row is None:
                break
            marks.append(Mark(place - start, row, wanted[place]))
        return tuple(sorted(marks, key=lambda mark: mark.offset))

    def mark_decode(self, lease: StateLease, num_fed: int) -> tuple[Mark, ...]:
        """Claims a row when the step could reach the next interval; whether it did is known once it has settled."""
        if self._cache is None:
            return ()
        interval = self._cache.settings.interval
        if (lease.computed + lease.in_flight) // interval == (lease.bound + num_fed) // interval:
            return ()
        row = self._cache.claim(modest=True)
        return () if row is None else (Mark(0, row, "interval"),)

    def settle(self, row: Row, outcome: Outcome, i: int) -> None:
        """A row's marks become checkpoints, or come free when the request is over, or did not get there."""
        cache, seq, lease = self._cache, row.seq, row.lease
        if not row.marks or cache is None or seq.text is None:
            return
        before, after = lease.computed - outcome.kept[i], lease.computed
        usable = row.live and not lease.closed and outcome.finish[i] is not FinishReason.ERROR
        tokens = seq.tokens if row.kind is RowKind.PREFILL else [*seq.tokens, *outcome.emitted[i]]
        for mark in row.marks:
            place = after if mark.offset == 0 else row.start + mark.offset
            crossed = mark.offset > 0 or before // cache.settings.interval < after // cache.settings.interval
            if not (usable and crossed):
                cache.unclaim(mark.row)
                continue
            found = cache.publish(seq.text.chain, tokens, place, lease.blocks, mark.row, mark.trigger)
            if found is not None:
                seq.text.made.append(found)

    def drop(self, row: Row) -> None:
        """The row's step failed: nothing was written to its marks."""
        if self._cache is not None:
            for mark in row.marks:
                self._cache.unclaim(mark.row)

    def preempted(self, seq: Sequence) -> Heritage | None:
        """What a preempted sequence leaves, to find it again when it resumes. Its last token must be left to be fed."""
        return None if seq.text is None else Heritage(seq.text.chain, tuple(seq.tokens[:-1]), "preemption")

    def ended(self, seq: Sequence, finish: FinishReason, delivered: int) -> Heritage | None:
        """What a request leaves whose client has seen `delivered` generated tokens.

        A failed one leaves nothing, since nobody knows since when it was wrong.
        """
        if seq.text is None or self._cache is None:
            return None
        if finish is FinishReason.ERROR:
            for each in (*seq.text.made, *seq.text.sources):
                self._cache.distrust(each)
            return None
        known = seq.prompt_len + delivered
        for checkpoint in seq.text.made:
            if checkpoint.num_tokens > known:
                self._cache.discard(checkpoint)
        return Heritage(seq.text.chain, tuple(seq.tokens[:known]), "end")

    def fill(self, stats: EngineStats) -> None:
        """Writes what the cache counts."""
        if self._cache is not None:
            self._cache.fill(stats)
