"""Verifying drafts emits exactly what judging one token at a time emits, whatever is drafted or asked for."""

from __future__ import annotations

import itertools

import pytest
import torch

from runtime.api import SamplingParams, StateError
from runtime.plan import RowKind
from runtime.sampling.store import Feature
from tests.runtime.sampling.oracle import shaped
from tests.runtime.sampling.toy import Bench, Item, ToyModel, forward_batch, logits_of, read, text

PROMPT = [1, 2, 3]
PATTERNS = [(k, accepted) for k in range(8) for accepted in range(k + 1)]
BASE: dict[str, object] = {"max_tokens": 32, "ignore_eos": True, "seed": 99}
ASKED: dict[str, dict[str, object]] = {
    "plain": {},
    "filters": {"top_k": 6, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.1},
    "encouraged": {"frequency_penalty": -2.0, "presence_penalty": -1.0},
    "bias": {"logit_bias": {0: 3.0, 5: -3.0}},
    "min_tokens": {"min_tokens": 30, "stop_ids": (2, 4), "ignore_eos": False},
    "all": {
        "min_tokens": 30,
        "stop_ids": (6,),
        "ignore_eos": False,
        "logit_bias": {3: 2.0},
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "top_k": 7,
        "top_p": 0.95,
        "min_p": 0.001,
        "logprobs": 2,
    },
}


def asked(name: str, temperature: float) -> SamplingParams:
    return SamplingParams(**{**BASE, **ASKED[name], "temperature": temperature})  # type: ignore[arg-type]


def wrong(token: int, vocab: int = 8) -> int:
    return (token + 1) % vocab


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ASKED)
def test_all_patterns_in_one_batch(name: str, temperature: float) -> None:
    """Rows of all 36 (k, accepted) patterns, at different places of the same text: each continues it exactly."""
    bench = Bench(ToyModel(seed=4))
    params = asked(name, temperature)
    expected = text(bench.generate(params, PROMPT))
    assert len(expected) > 25
    items = []
    for slot, (k, accepted) in enumerate(PATTERNS, start=1):
        done = 1 + slot % 12
        ahead = expected[done : done + k]
        drafts = ahead[:accepted] + [wrong(token) for token in ahead[accepted:]]
        bench.bind(slot, params, PROMPT, expected[:done])
        items.append(Item(slot, PROMPT + expected[:done], drafts))
    for item, told, (_, accepted) in zip(items, bench.judge(items), PATTERNS, strict=True):
        done = len(item.tokens) - len(PROMPT)
        assert told.emitted == expected[done : done + accepted + 1]
        assert told.kept == accepted + 1
        assert told.finish == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("errors", ["none", "third"])
def test_whole_generations(name: str, temperature: float, errors: str) -> None:
    bench = Bench(ToyModel(seed=5))
    params = asked(name, temperature)
    plain = bench.generate(params, PROMPT)
    expected = text(plain)
    misses = {"none": 99, "third": 3}[errors]
    for k in (2, 7):

        def draft(tokens: list[int], k: int = k) -> list[int]:
            ahead = expected[len(tokens) - len(PROMPT) :][:k]
            return [wrong(token) if i % misses == misses - 1 else token for i, token in enumerate(ahead)]

        story = bench.generate(params, PROMPT, draft)
        assert text(story) == expected
        assert story[-1].finish == plain[-1].finish
        if errors == "none":
            assert len(story) < len(plain)


@pytest.mark.parametrize("name", ASKED)
def test_greedy_follows_the_oracle(name: str) -> None:
    """Token by token against the float64 processors, so that in-block counts are right and not merely consistent."""
    bench = Bench(ToyModel(seed=6))
    params = asked(name, 0.0)
    expected = text(bench.generate(params, PROMPT, lambda tokens: [tokens[-1], 3, 1]))
    stops = (*params.stop_ids, *(() if params.ignore_eos else (7,)))
    for done, token in enumerate(expected):
        known = PROMPT + expected[:done]
        barred = stops if done < params.min_tokens else ()
        values = shaped(bench.model.logits(known).tolist(), params, PROMPT, expected[:done], barred)
        assert token == max(range(8), key=lambda t: (values[t], -t))


def test_bias_against_the_top_token_at_each_step() -> None:
    bench = Bench(ToyModel(seed=7))
    best = text(bench.generate(SamplingParams(**{**BASE, "temperature": 0.0}), PROMPT))  # type: ignore[arg-type]
    for token in set(best):
        params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logit_bias={token: -100.0})
        expected = text(bench.generate(params, PROMPT))
        assert token not in expected
        assert text(bench.generate(params, PROMPT, lambda tokens: best[len(tokens) - 3 :][:4])) == expected


def test_a_rejected_draft_leaves_no_count() -> None:
    bench = Bench(ToyModel())
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, presence_penalty=0.1)
    bench.bind(1, params, PROMPT)
    counts = bench.store.output_counts
    assert counts is not None
    tokens = list(PROMPT)
    for _ in range(6):
        (told,) = bench.judge([Item(1, tokens, [5, 5, 6])])
        tokens += told.emitted
        assert counts[1].tolist() == [tokens[3:].count(token) for token in range(8)]


def test_counts_move_on_the_device() -> None:
    """The next step can be judged right although the host never saw the previous verdict."""
    bench = Bench(ToyModel(seed=8))
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, frequency_penalty=3.0)
    expected = text(bench.generate(params, PROMPT))
    bench.bind(1, params, PROMPT)
    for done in range(0, 24, 4):
        items = [Item(1, PROMPT + expected[:done], expected[done : done + 3])]
        verdict = bench.verifier.judge(forward_batch(items), logits_of(bench.model, items))
        assert verdict.emitted[0, :4].tolist() == expected[done : done + 4]


def test_prefill_rows_keep_all_and_emit_at_their_end() -> None:
    bench = Bench(ToyModel(), k_max=3)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    for slot in range(1, 5):
        bench.bind(slot, params, PROMPT)
    best = text(bench.generate(params, PROMPT, slot=9))
    chunk = Item(1, PROMPT, kind=RowKind.PREFILL, num_fed=2, emits=False)
    last = Item(2, PROMPT, kind=RowKind.PREFILL, num_fed=3)
    plain = Item(3, PROMPT, kind=RowKind.DECODE)
    verify = Item(4, PROMPT, best[:2])
    told = bench.judge([chunk, last, plain, verify])
    assert [row.kept for row in told] == [2, 3, 1, 3]
    assert [row.emitted for row in told] == [[], best[:1], best[:1], best[:3]]
    assert [row.finish for row in told] == [0, 0, 0, 0]
    assert [row.kept for row in bench.judge([chunk])] == [2]
    assert bench.judge([chunk])[0].emitted == []
    assert [row.emitted for row in bench.judge([last, plain])] == [best[:1], best[:1]]


def test_shapes_and_types() -> None:
    bench = Bench(ToyModel(), k_max=5)
    for slot in (1, 2):
        bench.bind(slot, SamplingParams(max_tokens=9), PROMPT)
    for items in ([Item(1, PROMPT, [1]), Item(2, PROMPT, [2])], [Item(1, PROMPT, [1, 2, 3]), Item(2, PROMPT)]):
        verdict = bench.verifier.judge(forward_batch(items), logits_of(bench.model, items))
        assert verdict.kept.dtype == verdict.num_emitted.dtype == verdict.path.dtype == torch.int32
        assert verdict.emitted.dtype == torch.int64 and verdict.finish.dtype == torch.int8
        assert verdict.emitted.shape == verdict.path.shape == (2, 6)
        assert verdict.path.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
        unused = torch.arange(6) >= verdict.num_emitted.unsqueeze(1)
        assert not verdict.emitted[unused].any()


def test_refuses_what_it_was_not_built_for() -> None:
    bench = Bench(ToyModel(), k_max=1)
    bench.bind(1, SamplingParams(max_tokens=9), PROMPT)
    with pytest.raises(StateError, match="built for 2"):
        bench.judge([Item(1, PROMPT, [1, 2])])
    with pytest.raises(StateError, match="no sampling parameters"):
        bench.judge([Item(2, PROMPT)])


def test_half_precision_logits() -> None:
    bench = Bench(ToyModel())
    bench.bind(1, SamplingParams(max_tokens=9, temperature=0.0, logprobs=3), PROMPT)
    items = [Item(1, PROMPT, [1])]
    logits = logits_of(bench.model, items).to(torch.bfloat16)
    (told,) = read(bench.verifier.judge(forward_batch(items), logits))
    assert told.emitted[0] == int(logits[0].float().argmax())
    assert told.logprobs[0][0] == pytest.approx(float(torch.log_softmax(logits[0].float(), 0).max()))


def test_every_feature_is_spoken_for() -> None:
    """Each pattern set above asks for each feature somewhere: a new feature must join."""
    bench = Bench(ToyModel())
    seen = Feature.NONE
    for slot, (name, temperature) in enumerate(itertools.product(ASKED, (0.0, 1.0))):
        bench.bind(slot, asked(name, temperature), PROMPT)
        seen |= bench.store.features([slot])
    assert seen == ~Feature.NONE
