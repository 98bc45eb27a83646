"""Where a block is cut: EOS, stop ids, length; the first wins, and on the same token stop does."""

from __future__ import annotations

import pytest
import torch

from runtime.api import SamplingParams
from tests.runtime.sampling.toy import EOS, Bench, Item, ToyModel, forward_batch, logits_of, text

PROMPT = [1, 2, 3]
GOES_ON, STOP, LENGTH = 0, 1, 2
K = 7


def free_text(bench: Bench, num: int = 12) -> list[int]:
    params = SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True)
    return text(bench.generate(params, PROMPT, slot=60))


class Varied(ToyModel):
    """The best token depends on the length alone: 0, 1, 2, ... from the prompt's end on."""

    def logits(self, tokens: list[int]) -> torch.Tensor:  # type: ignore[override]
        row = torch.zeros(self.vocab)
        row[(len(tokens) - len(PROMPT)) % self.vocab] = 9.0
        return row


@pytest.mark.parametrize("kind", ["eos", "stop_id"])
@pytest.mark.parametrize("num_drafts", range(K + 1))
def test_stop_and_length_at_every_offset(kind: str, num_drafts: int) -> None:
    """All rows of one batch: the stop token at offset i of the block, the last allowed position at offset j."""
    bench = Bench(Varied(vocab=16), num_slots=99)
    items, wanted = [], []
    drafts = list(range(num_drafts))
    for i in range(num_drafts + 2):
        for j in range(num_drafts + 2):
            slot = len(items)
            eos = (i,) if kind == "eos" else (15,)
            stop_ids = () if kind == "eos" else (i,)
            params = SamplingParams(max_tokens=j + 1, temperature=0.0, stop_ids=stop_ids)
            bench.bind(slot, params, PROMPT, eos=eos)
            items.append(Item(slot, PROMPT, drafts))
            num = min(i, j, num_drafts) + 1
            finish = STOP if num == i + 1 else LENGTH if num == j + 1 else GOES_ON
            wanted.append((list(range(num)), num, finish))
    told = bench.judge(items)
    assert [(row.emitted, row.kept, row.finish) for row in told] == wanted


def test_several_stop_ids_and_their_storage() -> None:
    bench = Bench(Varied(vocab=16), num_slots=9)
    bench.bind(1, SamplingParams(max_tokens=99, temperature=0.0), PROMPT, eos=(14, 15))
    bench.bind(2, SamplingParams(max_tokens=99, temperature=0.0, stop_ids=(13, 9, 11, 4, 12)), PROMPT, eos=(14, 15))
    bench.bind(3, SamplingParams(max_tokens=99, temperature=0.0, stop_ids=(5, 5, 1)), PROMPT, eos=(5,))
    told = bench.judge([Item(slot, PROMPT, list(range(K))) for slot in (1, 2, 3)])
    assert [(len(row.emitted), row.finish) for row in told] == [(8, GOES_ON), (5, STOP), (2, STOP)]


@pytest.mark.parametrize("max_tokens", range(1, 2 * K + 4))
def test_max_tokens_is_what_is_delivered(max_tokens: int) -> None:
    bench = Bench(Varied(vocab=32), num_slots=9)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for k in (0, 1, 2, K):
        story = bench.generate(params, PROMPT, lambda tokens, k=k: [len(tokens) - 3 + i for i in range(k)])
        assert text(story) == list(range(max_tokens))
        assert [told.finish for told in story] == [GOES_ON] * (len(story) - 1) + [LENGTH]


def test_ignore_eos_reaches_max_tokens() -> None:
    bench = Bench(ToyModel(seed=2))
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=50, temperature=temperature, ignore_eos=True, seed=4)
        story = bench.generate(params, PROMPT, lambda tokens: [7, 7, 7])
        assert len(text(story)) == 50
        assert EOS in text(story) or temperature == 0.0
        assert story[-1].finish == LENGTH


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5, 8, 9])
def test_min_tokens_bars_every_end(min_tokens: int) -> None:
    """The model wants a stop token everywhere; the first one comes right after the minimum, drafts or not."""
    bench = Bench(ToyModel(seed=3))
    bench.model.table[:, :, EOS] += 20.0
    bench.model.table[:, :, 2] += 19.0
    for k in (0, 3, 7):
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=30, min_tokens=min_tokens, temperature=temperature, stop_ids=(2,))
            story = bench.generate(params, PROMPT, lambda tokens, k=k: [EOS, 2, EOS, 2, EOS, 2, EOS][:k])
            assert len(text(story)) == min_tokens + 1
            assert text(story)[-1] in (EOS, 2) and story[-1].finish == STOP
            assert not {EOS, 2} & set(text(story)[:-1])


def test_min_tokens_never_bars_everything() -> None:
    bench = Bench(ToyModel())
    bench.model.table[:] = -torch.inf
    bench.model.table[:, :, EOS] = 0.0
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=9, min_tokens=4, temperature=temperature)
        (told,) = bench.generate(params, PROMPT)
        assert told.emitted == [EOS] and told.finish == STOP


def test_a_row_behind_its_end_still_keeps_one() -> None:
    """A step planned before the host learnt of the end is judged like any other; its outcome is dropped later."""
    bench = Bench(Varied(vocab=16))
    bench.bind(1, SamplingParams(max_tokens=2, temperature=0.0), PROMPT)
    for known in (PROMPT, [*PROMPT, 0], [*PROMPT, 0, 1], [*PROMPT, 0, 1, 2, 3]):
        for drafts in ([], [4, 5]):
            (told,) = bench.judge([Item(1, known, drafts)])
            assert told.kept == 1 and told.finish == (GOES_ON if known == PROMPT else LENGTH)


def test_penalty_counts_stop_at_the_cut() -> None:
    bench = Bench(Varied(vocab=16))
    bench.bind(1, SamplingParams(max_tokens=9, temperature=0.0, stop_ids=(2,), presence_penalty=0.1), PROMPT)
    items = [Item(1, PROMPT, [0, 1, 2, 3, 4])]
    bench.verifier.judge(forward_batch(items), logits_of(bench.model, items))
    assert bench.store.output_counts is not None
    assert bench.store.output_counts[1].tolist() == [1, 1, 1] + [0] * 13
