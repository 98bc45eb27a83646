"""The arithmetic, on numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.bench.client import Ask, Target
from server.bench.load import Amount, Level, Run
from server.bench.measure import SPREAD_EVENLY, TOKEN_IDS, percentile, ratio, spread, summarize, within
from server.bench.prompts import IdPrompts
from server.bench.rounds import Plan, compare_answers, rows_of
from server.bench.sample import Sample
from tests.server.bench.samples import sample

POSITIVE = st.floats(0.001, 1000)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([7], 0.5, 7),
        ([1, 2], 0.5, 1),
        ([1, 2, 3], 0.5, 2),
        (range(1, 101), 0.5, 50),
        (range(1, 101), 0.9, 90),
        (range(1, 101), 0.99, 99),
        (range(1, 11), 0.99, 10),
        ([3, 1, 2], 1.0, 3),
    ],
)
def test_percentiles_of_equal_weights(values: list[float], share: float, expected: float) -> None:
    assert percentile([(value, 1.0) for value in values], share) == expected


@given(st.lists(st.tuples(POSITIVE, st.integers(1, 8)), min_size=1, max_size=40), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_weight_is_a_repetition(pairs: list[tuple[float, int]], share: float) -> None:
    repeated = [value for value, weight in pairs for _ in range(weight)]
    assert percentile(pairs, share) == np.quantile(repeated, share, method="inverted_cdf")


def test_spread_is_milliseconds() -> None:
    figures = spread([0.001, 0.002, 0.003, 0.010])
    assert figures == {"p50": 2.0, "p90": 10.0, "p99": 10.0, "mean": 4.0, "max": 10.0}
    assert spread([]) is None
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)


def test_times_of_one_request() -> None:
    one = sample((1.5, 1), (1.9, 4), (2.0, 2), started=1.0, ended=2.1, accepted=4, drafted=6)
    assert one.ttft == pytest.approx(0.5)
    assert one.e2e == pytest.approx(1.1)
    assert one.tpot == pytest.approx(0.5 / 6)
    assert one.itls() == [(pytest.approx(0.1), 4), (pytest.approx(0.05), 2)]
    assert one.gaps() == [pytest.approx(0.4), pytest.approx(0.1)]
    assert one.verifications == 2


def test_a_flush_without_tokens_is_no_emission_of_tokens() -> None:
    one = sample((0.1, 1), (0.2, 0), (0.4, 3))
    assert one.itls() == [(pytest.approx(0.1), 3)]


def test_unknown_tokens_are_spread_by_usage_and_never_counted_by_chunks() -> None:
    one = sample((0.1, None), (0.5, None), completion_tokens=8)
    assert one.itls() == [(pytest.approx(0.1), 4)]
    unknown = sample((0.1, None), (0.5, None), completion_tokens=None)
    assert unknown.itls() == []
    assert unknown.gaps() == [pytest.approx(0.4)]
    assert unknown.tpot is None
    figures = summarize([unknown], seconds=1)
    assert figures.output_tokens is None
    assert figures.output_tokens_per_s is None
    assert figures.itl_ms is None
    assert summarize([one], seconds=1).tokens_of_emissions == SPREAD_EVENLY


def test_summary() -> None:
    samples = [
        sample((0.1, 1), (0.2, 4), (0.3, 4), drafted=6, accepted=6, ended=0.4),
        sample((0.3, 1), (0.4, 1), drafted=3, accepted=0, ended=0.5),
        sample(error="HTTP 500: no"),
        sample(error="HTTP 500: no"),
    ]
    figures = summarize(samples, seconds=2.0, client_cpu=0.25)
    assert figures.requests == 4
    assert figures.succeeded == 2
    assert figures.errors == {"HTTP 500: no": 2}
    assert figures.output_tokens == 11
    assert figures.output_tokens_per_s == 5.5
    assert figures.requests_per_s == 1.0
    assert figures.prompt_tokens == 20
    assert figures.acceptance == pytest.approx(6 / 9)
    assert figures.tokens_per_verification == pytest.approx(9 / 3)
    assert figures.ttft_ms is not None
    assert figures.ttft_ms["p50"] == 100
    assert figures.itl_ms is not None
    assert figures.itl_ms["p50"] == 25  # eight tokens of 25 ms, one of 100
    assert figures.itl_ms["p90"] == pytest.approx(100)
    assert figures.tokens_of_emissions == TOKEN_IDS
    assert figures.goodput_per_s is None
    assert figures.figure("ttft_ms.p50") == 100
    assert figures.figure("acceptance") == pytest.approx(6 / 9)


def test_a_server_that_does_not_speculate() -> None:
    figures = summarize([sample((0.1, 1), (0.2, 1), (0.3, 1), drafted=0, accepted=0)], seconds=1)
    assert figures.acceptance is None
    assert figures.tokens_per_verification == 1
    silent = summarize([sample((0.1, 1), (0.2, 1))], seconds=1)
    assert silent.tokens_per_verification is None
    assert silent.figure("acceptance") is None


def test_nothing_succeeded() -> None:
    figures = summarize([sample(error="x")], seconds=1)
    assert figures.ttft_ms is figures.e2e_ms is figures.output_tokens is None
    assert figures.figure("ttft_ms.p50") is None


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ({"ttft": 0.1}, True),
        ({"ttft": 0.099}, False),
        ({"itl": 0.05}, True),
        ({"itl": 0.049}, False),
        ({"tpot": 0.031}, True),
        ({"tpot": 0.029}, False),
        ({"e2e": 0.3}, True),
        ({"e2e": 0.2}, False),
        ({"ttft": 0.1, "e2e": 0.2}, False),
    ],
)
def test_slo(slo: dict[str, float], good: bool) -> None:
    assert within(sample((0.1, 1), (0.15, 1), (0.22, 3), ended=0.25), slo) is good
    assert not within(sample(error="x"), slo)


def test_slo_of_one_token_and_of_the_unknown() -> None:
    assert within(sample((0.1, 1)), {"itl": 0.01, "tpot": 0.01})
    assert not within(sample((0.1, None), (0.2, None), completion_tokens=None), {"itl": 10})


def test_goodput() -> None:
    samples = [sample((at, 1)) for at in (0.1, 0.2, 0.3, 0.4)] + [sample(error="x")]
    figures = summarize(samples, seconds=2, slo={"ttft": 0.3})
    assert figures.good_requests == 3
    assert figures.goodput_per_s == 1.5


def test_ratio_is_round_by_round() -> None:
    found = ratio([2.0, 6.0, 9.0], [1.0, 4.0, 3.0])
    assert found is not None
    assert found.as_dict() == {"median": 2.0, "min": 1.5, "max": 3.0, "rounds": [2.0, 1.5, 3.0]}
    partly = ratio([None, 6.0, 8.0], [1.0, None, 4.0])
    assert partly is not None
    assert partly.rounds == (2.0,)
    assert ratio([1.0], [0.0]) is None


PLAN = Plan(
    levels=(Level(concurrency=1), Level(rate=2.0)),
    amount=Amount(requests=2),
    rounds=2,
    warmup=0,
    prompts=IdPrompts(length=4, vocab=100),
    ask=Ask(output_tokens=4),
)
TARGETS = [Target(label="a", url="http://a"), Target(label="b", url="http://b")]


def run_of(*samples: Sample, seconds: float = 1.0) -> Run:
    return Run(samples, seconds, 0.1)


def test_rows_pool_the_rounds_and_compare_within_them() -> None:
    def runs(tokens: int) -> list[Run]:
        return [run_of(sample((0.1, tokens))), run_of(sample((0.3, tokens)), seconds=3.0)]

    rows = rows_of(TARGETS, PLAN, {(0, 0): runs(10), (0, 1): runs(15), (1, 0): runs(2), (1, 1): runs(1)})
    assert [(str(row.level), row.target.label) for row in rows] == [
        ("c=1", "a"),
        ("c=1", "b"),
        ("2/s", "a"),
        ("2/s", "b"),
    ]
    assert rows[1].whole.output_tokens_per_s == 30 / 4
    assert rows[1].ratios["output_tokens_per_s"].rounds == (1.5, 1.5)
    assert rows[3].ratios["output_tokens_per_s"].rounds == (0.5, 0.5)
    assert rows[3].ratios["ttft_ms.p50"].median == 1.0
    assert rows[0].whole.ttft_ms is not None
    assert rows[0].whole.ttft_ms["max"] == 300
    assert "itl_ms.p50" not in rows[0].ratios


def test_answers_are_compared_with_the_first_targets_in_the_same_round() -> None:
    same = [run_of(sample((0.1, 1), prompt=number, text=f"answer {number}")) for number in range(2)]
    other = [
        run_of(sample((0.1, 1), prompt=0, text="answer 0"), sample((0.1, 1), prompt=5, text="not asked of a")),
        run_of(sample((0.1, 1), prompt=1, text="another")),
    ]
    cut = [run_of(sample((0.1, 1), prompt=0, text="answer 0", finish="length")), run_of(sample(prompt=1, error="x"))]
    rows = rows_of(TARGETS, PLAN, {(0, 0): same, (0, 1): other, (1, 0): same, (1, 1): cut})
    equality = compare_answers(rows)
    assert equality.compared == 3
    assert [(str(each.level), each.round, each.prompt) for each in equality.differences] == [
        ("c=1", 1, 1),
        ("2/s", 0, 0),
    ]
    assert equality.differences[0].text == "another"
    assert equality.differences[0].base_text == "answer 1"
