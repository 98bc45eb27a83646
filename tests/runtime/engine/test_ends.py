"""Stop ids, EOS, lengths and minimum lengths at every offset of an accepted block, whichever comes first."""

from __future__ import annotations

import msgspec
import pytest

from runtime.api import FinishReason, Request
from tests.runtime.engine.harness import (
    QWEN,
    WAYS,
    Driver,
    Result,
    Scripted,
    alone,
    build,
    prompts,
    request,
    run,
    shared,
    texts_of,
    with_eos,
)

WARM = {"temperature": 1.0, "seed": 11}


def distinct(num_tokens: int, **sampling: object) -> tuple[Request, list[int]]:
    """A request whose first `num_tokens` output tokens all differ, and those tokens."""
    for prompt in prompts(40, lengths=[5], seed=5):
        found = request("text", prompt, max_tokens=num_tokens, **sampling)
        tokens = alone([found])["text"].tokens
        if len(set(tokens)) == num_tokens:
            return found, tokens
    raise AssertionError("no such text")


def variant(base: Request, name: str, **changes: object) -> Request:
    sampling = msgspec.structs.replace(base.sampling, **changes)
    return msgspec.structs.replace(base, id=name, sampling=sampling)


def teach(engine: object, requests: list[Request], text: list[int]) -> None:
    proposer = engine.proposer  # type: ignore[attr-defined]
    if isinstance(proposer, Scripted):
        proposer.texts = {r.id: [*r.prompt, *text] for r in requests}


@pytest.mark.parametrize(("speculative", "lag"), [*WAYS, ("right:7", 0), ("right:7", 1), ("mtp:0", 0), ("ngram:0", 1)])
def test_the_first_of_stop_and_length_wins_and_a_tie_is_a_stop(speculative: str, lag: int) -> None:
    k = int(speculative.partition(":")[2] or 0)
    base, text = distinct(2 * k + 4, **WARM)
    requests, expected = [], {}
    for length in range(1, 2 * k + 4):
        for stop in range(2 * k + 4):
            made = variant(base, f"{length}-{stop}", max_tokens=length, stop_ids=(text[stop],))
            requests.append(made)
            end = min(length, stop + 1)
            expected[made.id] = (text[:end], FinishReason.STOP if stop < length else FinishReason.LENGTH)
    engine = shared(QWEN, speculative, lag, max_num_seqs=64, max_num_batched_tokens=640)
    teach(engine, requests, text)
    driver = Driver(engine)
    results = driver.run(requests)
    assert {name: (r.tokens, r.finish) for name, r in results.items()} == expected
    assert driver.since("tokens_emitted") == sum(len(tokens) for tokens, _ in expected.values())
    if speculative.startswith("right"):
        assert driver.since("spec_accepted") > 0.4 * driver.since("tokens_emitted")


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("speculative", ["none", "right:3", "right-host:3"])
def test_eos_ends_at_every_offset_and_can_be_ignored(speculative: str, lag: int) -> None:
    base, text = distinct(10, **WARM)
    for offset in range(10):
        engine = build(with_eos(QWEN, [7, text[offset]]), speculative=speculative, settle_lag=lag)
        requests = [variant(base, f"eos{m}", max_tokens=m, ignore_eos=False) for m in {max(offset, 1), offset + 1, 10}]
        deaf = [variant(base, f"deaf{m}", max_tokens=m) for m in {1, offset + 1, 10}]
        teach(engine, [*requests, *deaf], text)
        results = run(engine, [*requests, *deaf])
        for made in requests:
            length = made.sampling.max_tokens
            stopped = offset < length
            finish = FinishReason.STOP if stopped else FinishReason.LENGTH
            assert (results[made.id].tokens, results[made.id].finish) == (text[: min(length, offset + 1)], finish)
        for made in deaf:
            length = made.sampling.max_tokens
            assert (results[made.id].tokens, results[made.id].finish) == (text[:length], FinishReason.LENGTH)


@pytest.mark.parametrize(("speculative", "lag"), WAYS)
def test_before_min_tokens_nothing_stops_and_behind_it_everything_does(speculative: str, lag: int) -> None:
    base, text = distinct(10, **WARM)
    requests = [
        variant(base, f"{least}-{stop}", min_tokens=least, stop_ids=(text[stop],), max_tokens=14)
        for least in (0, 1, 2, 4, 5, 9, 14, 20)
        for stop in (0, 1, 3, 4, 8)
    ]
    expected = alone(requests)
    engine = shared(QWEN, speculative, lag, max_num_seqs=64, max_num_batched_tokens=640)
    if isinstance(engine.proposer, Scripted):
        engine.proposer.texts = texts_of(requests, expected)
    results = run(engine, requests)
    for made in requests:
        result, (stop,) = results[made.id], made.sampling.stop_ids
        assert same(result, expected[made.id]), made.id
        early = result.tokens[: min(made.sampling.min_tokens, 14)]
        assert stop not in early
        assert len(result.tokens) == 14 or result.tokens.index(stop) == len(result.tokens) - 1
        assert (result.finish is FinishReason.STOP) == (result.tokens[-1] == stop and stop not in early)


@pytest.mark.parametrize("lag", [0, 1])
def test_draft_lengths_of_all_sizes_share_a_batch(lag: int) -> None:
    requests = [
        request(f"{drafts}-{length}", prompt, max_tokens=length, num_drafts=drafts)
        for drafts in (0, 1, 2, 7, 50, None)
        for length, prompt in zip((1, 2, 9, 16), prompts(4, lengths=[1, 4, 1, 7]), strict=True)
    ]
    expected = alone(requests)
    for speculative in ("right:7", "right-host:7", "mtp:7"):
        engine = shared(QWEN, speculative, lag, max_num_seqs=64, max_num_batched_tokens=640)
        if isinstance(engine.proposer, Scripted):
            engine.proposer.texts = texts_of(requests, expected)
        results = run(engine, requests)
        for made in requests:
            result = results[made.id]
            assert same(result, expected[made.id]), (speculative, made.id)
            if made.num_drafts == 0:
                assert result.drafted == 0
            if speculative.startswith("right"):
                # All that can be of use is accepted, so the rows are as few as they can be.
                width = 1 + min(7 if made.num_drafts is None else made.num_drafts, 7)
                behind_first = made.sampling.max_tokens - 1
                assert result.accepted == behind_first - -(-behind_first // width)
                assert 0 <= result.drafted - result.accepted < width


def test_a_request_is_cut_at_the_context_and_refused_beyond_it() -> None:
    engine = shared(QWEN, "mtp:3", 0, max_model_len=32)
    results = run(engine, [request(f"p{n}", prompts(1, [n])[0], max_tokens=1000) for n in (1, 17, 30, 31)])
    assert {name: len(r.tokens) for name, r in results.items()} == {"p1": 31, "p17": 15, "p30": 2, "p31": 1}
    assert all(r.finish is FinishReason.LENGTH for r in results.values())
    for length in (32, 33, 320):
        answer = engine.submit(request("long", prompts(1, [length])[0]))
        assert "32" in answer.message and str(length) in answer.message  # type: ignore[union-attr]
        assert answer.code == "context_length_exceeded"  # type: ignore[union-attr]


def same(found: Result, expected: Result) -> bool:
    return (found.tokens, found.finish) == (expected.tokens, expected.finish)
