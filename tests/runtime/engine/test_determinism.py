"""The same request gives the same bits on an idle engine, and the same tokens in any company."""

from __future__ import annotations

import pytest

from runtime.api import Request
from tests.runtime.engine.harness import (
    ASSET,
    GRANITE,
    QWEN,
    Driver,
    Result,
    alone,
    build,
    directory,
    prompts,
    ref,
    request,
    run,
    shared,
)
from tests.support.prompts import chat_prompts


@pytest.mark.parametrize(("speculative", "lag"), [("none", 0), ("mtp:3", 1)])
def test_an_idle_engine_repeats_itself_to_the_last_bit(speculative: str, lag: int) -> None:
    made = request("a", prompts(1, [9])[0], max_tokens=10, logprobs=5, temperature=0.8, seed=4)
    engine = shared(QWEN, speculative, lag, prefix_cache=False)  # a hit computes less, and rounds otherwise
    answers = {repr((r.tokens, r.logprobs)) for r in (run(engine, [made])["a"] for _ in range(20))}
    assert len(answers) == 1


@pytest.mark.parametrize("model", [QWEN, GRANITE, "asset"])
def test_alone_is_what_the_reference_says(model: str) -> None:
    made = [request(f"{i}", text, max_tokens=8) for i, text in enumerate(prompts(3, [1, 4, 19], seed=31))]
    engine = shared(model)
    for r in made:
        assert_greedy(model, r, run(engine, [r])[r.id])


def test_alone_is_what_it_is_in_company() -> None:
    """Sampled requests, too: this is what lets other tests compare with texts that were made in batches."""
    made = [
        request(f"{i}", text, max_tokens=8, temperature=(0.0, 0.7, 1.3)[i % 3], seed=i, presence_penalty=0.4 * (i % 2))
        for i, text in enumerate(prompts(12, [1, 2, 3, 8, 20], seed=32))
    ]
    together = alone(made)
    engine = shared(QWEN)
    for r in made:
        assert run(engine, [r])[r.id].tokens == together[r.id].tokens


@pytest.mark.parametrize(("speculative", "lag"), [("none", 0), ("ngram:3", 1), ("mtp:2", 1)])
def test_company_does_not_matter(speculative: str, lag: int) -> None:
    """The same prompt many times among others: all copies agree, up to ties of the float64 reference."""
    (text,) = prompts(1, [11], seed=41)
    copies = [request(f"copy{i}", text, max_tokens=14) for i in range(9)]
    others = [request(f"{i}", other, max_tokens=3 + i) for i, other in enumerate(prompts(7, [1, 2, 30], seed=42))]
    engine = build(QWEN, speculative=speculative, settle_lag=lag, max_num_batched_tokens=24)
    driver = Driver(engine)
    for copy, other in zip(copies, [*others, None, None], strict=True):
        driver.submit(*([copy] if other is None else [other, copy]))
        driver.step()
    results = driver.finish()
    for copy in copies:
        assert_greedy(QWEN, copy, results[copy.id])


def test_the_embedded_model_accepts_many_of_its_own_drafts() -> None:
    """What speculation is for, and a check that these tests see real acceptance by a real head."""
    made = [request(name, text, max_tokens=24, ignore_eos=False) for name, text in chat_prompts(7).items()]
    plain = run(build(ASSET, max_model_len=256), made)
    for speculative, least in (("mtp:3", 0.4), ("ngram:4", 0.05)):
        driver = Driver(build(ASSET, speculative=speculative, settle_lag=1, max_model_len=256))
        for name, result in driver.run(made).items():
            assert (result.tokens, result.finish) == (plain[name].tokens, plain[name].finish)
        assert driver.since("spec_accepted") > least * driver.since("spec_drafted")


def assert_greedy(model: str, made: Request, result: Result) -> None:
    """Every token is the reference's best at its place, or its second best by less than 1e-4."""
    assert len(result.tokens) == made.sampling.max_tokens
    logits = ref(model).logits([*made.prompt, *result.tokens[:-1]])[len(made.prompt) - 1 :]
    for row, token in zip(logits, result.tokens, strict=True):
        assert float(row.max() - row[token]) < 1e-4, (made.id, directory(model))
