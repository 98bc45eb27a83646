"""The model's native multi-token-prediction head, applied recurrently.

Entry t of the head's KV is made of the embedding of token t + 1 and the target's hidden state at t; its output at t
predicts token t + 2, and deeper drafts feed the head its own output (DeepSeek-V3, arXiv:2412.19437, section 2.2).

So the last entry of a cached prefix was made of the token that followed where it was computed. Whoever goes on from the
prefix with another token makes this entry again, from the hidden state that the checkpoint holds, in its own copy of
the block.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from kernels.paged_attention import successive
from runtime.api import CapabilityError, StateError
from runtime.attention.backend import Recurrence, StepContext
from runtime.attention.full import FullAttention, FullPlan, cells_of
from runtime.memory import kv_shapes
from runtime.models.base import HybridModel, MtpHead
from runtime.plan import RowKind
from runtime.speculation.proposer import Drafts, HiddenNeed, Placement, SpeculativeProposer
from runtime.speculation.registry import ProposerParts
from runtime.state.paged import PagedStore
from runtime.state.pool import StatePool, StateTxn
from runtime.state.recurrent import SlotStore
from runtime.step import ForwardBatch, StepPart, Verdict


class _DraftContext(StepContext):
    """The head's way to its own KV. A head has no recurrent layers."""

    def __init__(self, full: FullAttention, plans: tuple[FullPlan, ...]) -> None:
        self._full = full
        self._plans = plans

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        if len(self._plans) == 1:
            return self._full.attend(layer, q, k, v, scale, self._plans[0])
        return torch.cat(
            [
                self._full.attend(layer, q[p.part.tokens], k[p.part.tokens], v[p.part.tokens], scale, p)
                for p in self._plans
            ]
        )

    def mix(self, layer: int, recurrence: Recurrence, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        raise StateError("an MTP head with recurrent layers is refused when the model is loaded")


class HiddenRows(SlotStore):
    """The target's hidden state at the last committed position, [slots, H], and of checkpoints, [checkpoints, H]."""

    def __init__(self, num_slots: int, num_checkpoints: int, width: int, device: torch.device) -> None:
        self.live = torch.zeros(num_slots, width, device=device)
        self.saved = torch.zeros(num_checkpoints, width, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return 4 * (self.live.numel() + self.saved.numel())

    def save(self, slots: Seq[int], rows: Seq[int]) -> None:
        """See SlotStore.save."""
        self.saved[list(rows)] = self.live[list(slots)]

    def restore(self, rows: Seq[int], slots: Seq[int]) -> None:
        """See SlotStore.restore."""
        self.live[list(slots)] = self.saved[list(rows)]

    def take_out(self, row: int) -> list[torch.Tensor]:
        """See SlotStore.take_out."""
        return [self.saved[row].to("cpu", copy=True)]

    def put_in(self, slot: int, saved: list[torch.Tensor]) -> None:
        """See SlotStore.put_in."""
        self.live[slot] = saved[0].to(self.live.device)

    def spoil(self, rows: Seq[int], value: float) -> None:
        """See SlotStore.spoil."""
        self.saved[list(rows)] = value


class MtpProposer(SpeculativeProposer):
    """Drafts on the device; k = 0..k_max. Its KV uses the target's block numbers, in a store of its own.

    Drafting writes entries behind the committed length. They are a throw-away: the next `extend` writes every entry up
    to the new committed length again, and nothing reads beyond it.
    """

    name = "mtp"
    placement = Placement.DEVICE
    needs = HiddenNeed.FINAL

    def __init__(self, model: HybridModel, head: MtpHead, pool: StatePool, store: PagedStore) -> None:
        self._model = model
        self._head = head
        self._pool = pool
        self._store = store
        self._full = FullAttention(store)
        recurrent = pool.recurrent
        self._hidden = HiddenRows(
            recurrent.num_slots, recurrent.num_checkpoints, model.spec.hidden_size, pool.lengths.device
        )
        self._last: torch.Tensor | None = None

    def num_bytes(self) -> int:
        """The head's KV, and a hidden state for each slot and checkpoint."""
        return self._store.num_bytes + self._hidden.num_bytes

    def paged_stores(self) -> tuple[PagedStore, ...]:
        """The head's KV."""
        return (self._store,)

    def slot_stores(self) -> tuple[SlotStore, ...]:
        """The target's last hidden states."""
        return (self._hidden,)

    def extend(self, txn: StateTxn, fb: ForwardBatch, hidden: torch.Tensor, verdict: Verdict) -> None:
        """Feeds every fed position; what lies behind the kept ones is overwritten by a later step.

        Inside a chunk, and inside an accepted block, token t + 1 is the next fed token; behind the last kept one it is
        the emitted token, or the prompt's next token when the chunk does not end the prompt.
        """
        if txn.restored:
            self._join(txn, fb, hidden.dtype)
        last = fb.row_starts[:-1] + verdict.kept.long() - 1
        self._hidden.live[fb.slots] = hidden[last].float()
        self._keep_marked(txn, fb, hidden, last)
        index = (verdict.num_emitted - 1).clamp(min=0).long()[:, None]
        emitted = verdict.emitted.gather(1, index)[:, 0]
        known = torch.tensor([row.next_token for row in txn.batch.rows], device=last.device)
        following = torch.cat([fb.tokens[1:], fb.tokens[:1]])
        following[last] = torch.where(verdict.num_emitted > 0, emitted, known).clamp(min=0)
        context = _DraftContext(self._full, tuple(self._full.plan(part) for part in fb.parts))
        self._last = self._head.forward(following, hidden, fb.positions, context)[last]

    def _join(self, txn: StateTxn, fb: ForwardBatch, dtype: torch.dtype) -> None:
        """Makes the last entry of a restored prefix again: the token behind it is known only now."""
        rows = torch.tensor(txn.restored, device=fb.slots.device)
        slots, places = fb.slots[rows], fb.lengths[rows] - 1
        first = fb.row_starts[rows]
        part = self._single_tokens(slots, places, max(txn.batch.rows[i].lease.bound for i in txn.restored))
        context = _DraftContext(self._full, (self._full.plan(part),))
        self._head.forward(fb.tokens[first], self._hidden.live[slots].to(dtype), places, context)

    def _keep_marked(self, txn: StateTxn, fb: ForwardBatch, hidden: torch.Tensor, last: torch.Tensor) -> None:
        """The hidden states that go with the step's checkpoints."""
        inside = [
            (i, mark.offset - 1, mark.row)
            for i, row in enumerate(txn.batch.rows)
            for mark in row.marks
            if mark.offset > 0
        ]
        behind = [(i, mark.row) for i, row in enumerate(txn.batch.rows) for mark in row.marks if mark.offset == 0]
        if inside:
            rows, offsets, kept = zip(*inside, strict=True)
            at = fb.row_starts[list(rows)] + torch.tensor(offsets, device=last.device)
            self._hidden.saved[list(kept)] = hidden[at].float()
        if behind:
            rows, kept = zip(*behind, strict=True)
            self._hidden.saved[list(kept)] = hidden[last[list(rows)]].float()

    def propose(
        self, txn: StateTxn, fb: ForwardBatch, hidden: torch.Tensor, verdict: Verdict, num_drafts: tuple[int, ...]
    ) -> Drafts:
        """Greedy drafts, one head pass per depth; the first needs none, its output is `extend`'s."""
        assert self._last is not None
        depth = max(num_drafts)
        rows = [i for i, count in enumerate(num_drafts) if count > 0]
        index = torch.tensor(rows, device=fb.slots.device)
        out = torch.zeros(len(num_drafts), depth, dtype=torch.long, device=fb.slots.device)
        state, slots = self._last[index], fb.slots[index]
        token = self._model.logits(state).argmax(-1)
        out[index, 0] = token
        if depth > 1:
            for step, plan in enumerate(self._plans(txn, rows, slots, depth - 1), 1):
                state = self._head.forward(token, state, plan.part.positions, _DraftContext(self._full, (plan,)))
                token = self._model.logits(state).argmax(-1)
                out[index, step] = token
        return Drafts(out, num_drafts)

    def _plans(self, txn: StateTxn, rows: list[int], slots: torch.Tensor, count: int) -> list[FullPlan]:
        """Where the entries of `count` throw-away steps lie, one token per row each, and what they attend to."""
        size, n = self._store.block_size, len(rows)
        lengths = self._pool.lengths[slots]
        context = max(txn.batch.rows[i].lease.bound for i in rows) + count
        table = self._pool.table_of(slots, context)
        starts = torch.arange(n + 1, device=slots.device)
        plans = []
        for step, seen in enumerate(successive(table, lengths, count, context, size)):
            places = lengths + step if step else lengths
            part = self._single_tokens(slots, places, context, table, starts)
            plans.append(FullPlan(part, cells_of(table, None if n == 1 else starts[:-1], places, size), seen))
        return plans

    def _single_tokens(
        self,
        slots: torch.Tensor,
        places: torch.Tensor,
        context: int,
        table: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> StepPart:
        """A part of one token for each slot, at `places` [n]."""
        n = slots.shape[0]
        return StepPart(
            kind=RowKind.DECODE,
            rows=slice(0, n),
            tokens=slice(0, n),
            slots=slots,
            slot_ids=(),
            lengths=places,
            fed=(1,) * n,
            row_starts=torch.arange(n + 1, device=slots.device) if starts is None else starts,
            positions=places,
            block_table=self._pool.table_of(slots, context) if table is None else table,
            max_context=context,
        )


def build(parts: ProposerParts) -> MtpProposer:
    """Needs a checkpoint with an MTP head, whose KV lies in the same blocks as the target's."""
    if parts.head is None:
        raise CapabilityError(f"--speculative mtp: {parts.model.spec.architecture} comes without an MTP head here")
    pool = parts.pool
    kv = pool.kv
    store = PagedStore(
        kv_shapes(parts.model.spec.mtp_layers), kv.num_blocks, kv.block_size, dtype=kv.dtype, device=parts.device
    )
    return MtpProposer(parts.model, parts.head, pool, store)
