"""A toy model and the shortest engine that can drive the judge: no states, no scheduler, rows written out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from runtime.api import Request, SamplingParams
from runtime.plan import Batch, Row, RowKind, StateLease
from runtime.plan import Sequence as Seq
from runtime.sampling.store import SamplingStore
from runtime.speculation.verify import Verifier
from runtime.step import ForwardBatch, Verdict

torch.set_num_threads(1)

EOS = 7
CPU = torch.device("cpu")


class ToyModel:
    """Logits are a fixed random function of the last two tokens."""

    def __init__(self, vocab: int = 8, seed: int = 0, scale: float = 2.0) -> None:
        self.vocab = vocab
        self.table = torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed)) * scale

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.table[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]]


@dataclass
class Item:
    """One row to judge: `tokens` are known (prompt and all output so far), `drafts` are guesses behind them."""

    slot: int
    tokens: Sequence[int]
    drafts: Sequence[int] = ()
    kind: RowKind = RowKind.VERIFY
    num_fed: int = 1
    emits: bool = True

    @property
    def fed(self) -> list[int]:
        if self.kind is RowKind.PREFILL:
            return list(self.tokens[len(self.tokens) - self.num_fed :])
        return [self.tokens[-1], *self.drafts]

    @property
    def start(self) -> int:
        return len(self.tokens) - (self.num_fed if self.kind is RowKind.PREFILL else 1)

    @property
    def num_logits(self) -> int:
        return len(self.fed) if self.kind is not RowKind.PREFILL else int(self.emits)


def forward_batch(items: Sequence[Item]) -> ForwardBatch:
    rows, tokens, positions, sample_at, starts = [], [], [], [], [0]
    for item in items:
        request = Request(id=str(item.slot), prompt=(0,), sampling=SamplingParams(max_tokens=1))
        seq = Seq(request=request, tokens=list(item.tokens), num_drafts=0, arrived=0.0)
        lease = StateLease(serial=1, owner=request.id, slot=item.slot, blocks=[])
        rows.append(Row(seq, lease, item.kind, len(item.fed), item.emits, num_drafts=len(item.drafts)))
        tokens += item.fed
        positions += range(item.start, item.start + len(item.fed))
        sample_at += range(len(tokens) - item.num_logits, len(tokens))
        starts.append(len(sample_at))
    fed = torch.tensor([len(item.fed) for item in items])
    return ForwardBatch(
        batch=Batch(1, tuple(rows)),
        parts=(),
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        slots=torch.tensor([item.slot for item in items]),
        lengths=torch.tensor([item.start for item in items]),
        fed=fed,
        row_starts=torch.cat([torch.zeros(1, dtype=torch.int64), fed.cumsum(0)]),
        sample_at=torch.tensor(sample_at, dtype=torch.int64),
        sample_starts=tuple(starts),
    )


def logits_of(model: ToyModel, items: Sequence[Item]) -> torch.Tensor:
    rows = []
    for item in items:
        if item.kind is RowKind.PREFILL:
            rows += [model.logits(item.tokens)] * item.num_logits
        else:
            rows += [model.logits([*item.tokens, *item.drafts[:depth]]) for depth in range(item.num_logits)]
    return torch.stack(rows) if rows else torch.empty(0, model.vocab)


@dataclass
class Told:
    """A verdict's row, read back."""

    kept: int
    emitted: list[int]
    finish: int
    logprobs: list[tuple[float, list[int], list[float]]] = field(default_factory=list)


def read(verdict: Verdict) -> list[Told]:
    told = []
    for row in range(verdict.kept.shape[0]):
        num = int(verdict.num_emitted[row])
        told.append(Told(int(verdict.kept[row]), verdict.emitted[row, :num].tolist(), int(verdict.finish[row])))
        if verdict.logprobs is not None:
            found = verdict.logprobs
            told[-1].logprobs = [
                (float(found.chosen[row, i]), found.top_tokens[row, i].tolist(), found.top_values[row, i].tolist())
                for i in range(num)
            ]
    return told


class Bench:
    """A store and a judge over a toy model."""

    def __init__(self, model: ToyModel, *, num_slots: int = 64, k_max: int = 7) -> None:
        self.model = model
        self.store = SamplingStore(num_slots, model.vocab, CPU)
        self.verifier = Verifier(self.store, k_max)

    def bind(
        self,
        slot: int,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        max_total: int | None = None,
        eos: Sequence[int] = (EOS,),
    ) -> None:
        self.store.bind(
            slot,
            params,
            prompt=prompt,
            output_tokens=output,
            prompt_len=len(prompt),
            max_total=max_total or len(prompt) + params.max_tokens,
            eos_ids=eos,
        )

    def judge(self, items: Sequence[Item]) -> list[Told]:
        return read(self.verifier.judge(forward_batch(items), logits_of(self.model, items)))

    def generate(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        drafter: Callable[[list[int]], Sequence[int]] = lambda tokens: (),
        slot: int = 1,
    ) -> list[Told]:
        """One request alone, from its prompt's prefill to its end."""
        self.bind(slot, params, prompt)
        tokens = list(prompt)
        (told,) = self.judge([Item(slot, tokens, kind=RowKind.PREFILL, num_fed=len(prompt))])
        story = [told]
        tokens += told.emitted
        while told.finish == 0:
            (told,) = self.judge([Item(slot, tokens, drafter(tokens))])
            assert told.kept == len(told.emitted) > 0 or told.finish == 3
            story.append(told)
            tokens += told.emitted
        self.store.release(slot)
        return story


def text(story: Sequence[Told]) -> list[int]:
    return [token for told in story for token in told.emitted]
