"""A row is judged as if it were alone: whatever sits beside it, whatever was in its slot before."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from runtime.api import SamplingParams, StateError
from runtime.plan import RowKind
from runtime.sampling.positions import Positions
from runtime.sampling.processors import PROCESSORS
from runtime.sampling.store import Feature
from runtime.speculation.verify import Verifier
from tests.runtime.sampling.test_blocks import ASKED, asked
from tests.runtime.sampling.toy import Bench, Item, ToyModel, forward_batch, logits_of, read, text

PROMPT = [1, 2, 3]
FAILED = 3


class Wide(ToyModel):
    """A vocabulary wide enough for vectorised and blocked code, with ties everywhere."""

    def __init__(self) -> None:
        super().__init__(vocab=8)
        self.vocab = 1000
        self.rows = (torch.randn(64, 1000, generator=torch.Generator().manual_seed(1)) * 8).round() / 8

    def logits(self, tokens: list[int]) -> torch.Tensor:  # type: ignore[override]
        return self.rows[(tokens[-1] * 7 + len(tokens)) % 64]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_alone_or_in_a_crowd(temperature: float) -> None:
    """Each kind of request alone in a batch and among all others, in two orders: same bits."""
    model = Wide()
    names = list(ASKED)
    bench = Bench(model)
    items = []
    for slot, name in enumerate(names):
        bench.bind(slot, replace(asked(name, temperature), logprobs=3), PROMPT, [9, 10])
        items.append(Item(slot, [*PROMPT, 9, 10], [slot, 3, 3, 4][: slot % 5]))
    odd = SamplingParams(max_tokens=5, temperature=1.7, seed=1, top_k=500, top_p=0.3, logprobs=20)
    bench.bind(20, odd, PROMPT)
    bench.bind(21, SamplingParams(max_tokens=5, temperature=0.0), PROMPT)
    crowd = [
        Item(20, [5, 6], kind=RowKind.PREFILL, num_fed=2, emits=False),
        Item(21, [5, 6], kind=RowKind.PREFILL, num_fed=2),
        *items,
    ]
    alone = []
    for item in items:
        clean = Bench(model)
        params = replace(asked(names[item.slot], temperature), logprobs=3)
        clean.bind(item.slot, params, PROMPT, [9, 10])
        alone += clean.judge([item])
    together = bench.judge(crowd)[2:]
    for one, other in zip(alone, together, strict=True):
        assert (one.kept, one.emitted, one.finish) == (other.kept, other.emitted, other.finish)
        for (chosen, tokens, values), mine in zip(one.logprobs, other.logprobs, strict=True):
            assert chosen == mine[0]
            assert tokens == mine[1][: len(tokens)] and values == mine[2][: len(values)]


def test_seed_alone_decides() -> None:
    bench = Bench(ToyModel())
    stories = {}
    for seed in (0, 1, -1, 2**63, 2**64 + 1):
        params = SamplingParams(max_tokens=30, seed=seed, ignore_eos=True)
        stories[seed] = text(bench.generate(params, PROMPT, slot=1))
        assert text(bench.generate(params, PROMPT, lambda tokens: [1, 2], slot=5)) == stories[seed]
    assert stories[1] == stories[2**64 + 1]
    assert len({tuple(story) for story in stories.values()}) == 4


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_resume_goes_on_as_if_nothing_had_happened(name: str, temperature: float) -> None:
    bench = Bench(ToyModel(seed=5))
    params = asked(name, temperature)
    expected = text(bench.generate(params, PROMPT))
    bench.bind(1, params, PROMPT)
    bench.judge([Item(1, PROMPT, expected[:4])])
    before = None if bench.store.output_counts is None else bench.store.output_counts[1].clone()
    bench.store.release(1)
    bench.bind(2, SamplingParams(max_tokens=9, frequency_penalty=1.0, logit_bias={0: 9.0}), [4, 4], [4])
    bench.store.release(2)
    bench.bind(2, params, PROMPT, expected[:5])
    if before is not None and bench.store.output_counts is not None:
        assert torch.equal(bench.store.output_counts[2], before) or not before.any()
    resumed = Item(2, PROMPT + expected[:5], kind=RowKind.PREFILL, num_fed=8)
    (told,) = bench.judge([resumed])
    assert told.emitted == expected[5:6] and told.kept == 8
    (told,) = bench.judge([Item(2, PROMPT + expected[:6], expected[6:9])])
    assert told.emitted == expected[6:10]


@pytest.mark.parametrize("poison", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_rows_fail_alone(poison: str, temperature: float) -> None:
    bench = Bench(ToyModel(), k_max=3)
    params = SamplingParams(max_tokens=30, temperature=temperature, ignore_eos=True, seed=3, presence_penalty=0.2)
    best = text(bench.generate(params, PROMPT))
    items = [Item(1, PROMPT, kind=RowKind.PREFILL, num_fed=3)]
    items += [Item(slot, PROMPT, best[:3]) for slot in range(2, 6)]
    items += [Item(6, PROMPT, [(best[0] + 1) % 8, 0, 0])]
    for item in items:
        bench.bind(item.slot, params, PROMPT)
    logits = logits_of(bench.model, items)
    bad = logits.clone()
    for row in (
        0,
        1,
        5 + 1,
        9 + 3,
        17 + 1,
        17 + 3,
    ):  # the prefill row; depths 0, 1, 3 of rows 1, 2, 3; rejected ones of row 5
        if poison == "-inf":
            bad[row] = -torch.inf
        else:
            bad[row, row % 8] = float(poison)
    told = read(bench.verifier.judge(forward_batch(items), bad))
    assert [row.finish for row in told] == [FAILED, FAILED, FAILED, FAILED, 0, 0]
    assert [row.kept for row in told] == [3, 1, 1, 1, 4, 1]
    assert [row.emitted for row in told] == [[], [], [], [], best[:4], best[:1]]
    assert bench.store.output_counts is not None
    assert bench.store.output_counts[1:5].sum() == 0


def test_partly_barred_logits_are_fine() -> None:
    """A model may rule tokens out by -inf; that alone is no failure."""
    bench = Bench(ToyModel())
    bench.model.table[:, :, :6] = -torch.inf
    for params in (
        SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=20, ignore_eos=True, top_k=3, top_p=0.99, min_p=0.01, repetition_penalty=1.1),
    ):
        story = bench.generate(params, PROMPT, lambda tokens: [6, 7])
        assert set(text(story)) <= {6, 7} and len(text(story)) == 20


def test_ties_go_to_the_lowest_id() -> None:
    bench = Bench(ToyModel())
    bench.model.table[:] = 0.0
    bench.model.table[:, :, 0] = -0.0
    assert set(text(bench.generate(SamplingParams(max_tokens=20, temperature=0.0), PROMPT))) == {0}
    for filters in ({"top_k": 3}, {"top_p": 0.3}, {"top_p": 0.375}):
        params = SamplingParams(max_tokens=60, ignore_eos=True, **filters)  # type: ignore[arg-type]
        assert set(text(bench.generate(params, PROMPT))) == {0, 1, 2}


def test_extreme_settings_leave_one_token() -> None:
    bench = Bench(ToyModel())
    best = text(bench.generate(SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), PROMPT))
    for narrow in (
        {"top_k": 1},
        {"top_p": 1e-9},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"temperature": 1e-5},
        {"temperature": 1e-30},
        {"temperature": 1e-3, "top_k": 10**6},
    ):
        params = SamplingParams(max_tokens=20, ignore_eos=True, seed=8, **narrow)  # type: ignore[arg-type]
        assert text(bench.generate(params, PROMPT)) == best


def test_tables_exist_once_needed() -> None:
    bench = Bench(ToyModel())
    bench.bind(1, SamplingParams(max_tokens=9, top_k=3, min_tokens=2), PROMPT)
    assert bench.store.bias is None and bench.store.output_counts is None and bench.store.in_prompt is None
    bench.bind(2, SamplingParams(max_tokens=9, logit_bias={1: 1.0}), PROMPT)
    assert bench.store.bias is not None and bench.store.output_counts is None
    bench.bind(3, SamplingParams(max_tokens=9, repetition_penalty=1.1), PROMPT)
    assert bench.store.output_counts is not None


def test_slots_are_bound_once_and_released_once() -> None:
    bench = Bench(ToyModel())
    params = SamplingParams(max_tokens=9)
    bench.bind(1, params, PROMPT)
    with pytest.raises(StateError, match="still bound"):
        bench.bind(1, params, PROMPT)
    bench.store.release(1)
    with pytest.raises(StateError, match="not bound"):
        bench.store.release(1)


def test_a_new_request_inherits_nothing() -> None:
    bench = Bench(ToyModel(seed=9))
    plain = SamplingParams(max_tokens=20, temperature=0.0)
    penalised = SamplingParams(max_tokens=20, temperature=0.0, presence_penalty=1.0)
    expected = [text(bench.generate(params, PROMPT, slot=1)) for params in (plain, penalised)]
    loaded = SamplingParams(
        max_tokens=40, min_tokens=30, stop_ids=(0, 1, 2, 3, 4), logit_bias={0: 50.0}, frequency_penalty=2.0, top_k=1
    )
    neighbour = SamplingParams(max_tokens=9, min_tokens=2, logit_bias={0: 50.0}, frequency_penalty=1.0)
    bench.bind(2, neighbour, PROMPT)  # keeps every processor in the batch
    for params, wanted in zip((plain, penalised), expected, strict=True):
        bench.generate(loaded, PROMPT, slot=3)
        bench.bind(3, params, PROMPT)
        told = bench.judge([Item(2, PROMPT), Item(3, PROMPT, wanted[:3])])[1]
        assert told.emitted == wanted[:4]
        bench.store.release(3)


def test_verifier_holds_no_request() -> None:
    """Two judges over one store agree: what there is to remember is in the store."""
    bench = Bench(ToyModel())
    params = SamplingParams(max_tokens=20, seed=2, ignore_eos=True, presence_penalty=0.5)
    expected = text(bench.generate(params, PROMPT))
    bench.bind(1, params, PROMPT)
    tokens = list(PROMPT)
    for step in range(5):
        bench.verifier = Verifier(bench.store, 7)
        (told,) = bench.judge([Item(1, tokens, [step])])
        tokens += told.emitted
    assert tokens[3:] == expected[: len(tokens) - 3]


@pytest.mark.parametrize("feature", PROCESSORS)
def test_processors_leave_the_others_as_they_are(feature: Feature) -> None:
    """Bit for bit, also where logits lie so far apart that the last ones have no measurable probability."""
    bench = Bench(ToyModel(), num_slots=3)
    bench.bind(1, replace(asked("all", 1.0), top_k=3), PROMPT)
    bench.bind(2, SamplingParams(max_tokens=9), PROMPT)
    logits = torch.tensor([[0.0, 90.0, -torch.inf, 3.25, -200.0, 90.0, -1e-30, 7.0]] * 2)
    drafts = torch.tensor([[1, 2]] * 2)
    at = Positions(torch.tensor([1, 2]), torch.tensor([4, 4]), drafts, max_top_k=7, all_top_k=False)
    processed = PROCESSORS[feature].apply(logits, at, store=bench.store)
    assert torch.equal(processed[1], logits[1])
    assert not torch.equal(processed[0], logits[0]) or feature is Feature.TEMPERATURE
