"""Samples to figures: percentiles, throughput, acceptance, goodput, ratios. Pure arithmetic."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from server.bench.sample import Sample

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
TOKEN_IDS, SPREAD_EVENLY = "token ids", "usage spread evenly"
SLOS = ("ttft", "itl", "tpot", "e2e")

DEFINITIONS = {
    "percentile": "the smallest value that is not exceeded by that share of the values",
    "TTFT": "from sending a request to its first text or token",
    "ITL": "gap between two emissions (reads that bring tokens) divided by the tokens of the later one; each token"
    " counts once. Tokens of an emission are its token ids where the server sends them, else the request's usage spread"
    " evenly over its emissions",
    "gap": "gap between two emissions, undivided",
    "TPOT": "from a request's first emission to its last, per token after the first",
    "e2e": "from sending a request to the end of its stream",
    "output tokens/s": "completion tokens by the servers' usage over the time from the first request to the last end",
    "acceptance": "accepted / drafted tokens of the usage extension",
    "tokens per verification": "tokens after the first over steps, where every step emits its accepted drafts and one",
    "goodput": "requests per second that keep every SLO; a request's ITL here is its own p99",
    "ratio": "of each round to the first target's in the same round: median (min..max)",
}


def percentile(weighted: Iterable[tuple[float, float]], share: float) -> float:
    """The smallest value that `share` of the weight does not exceed; pairs are (value, weight)."""
    ordered = sorted(pair for pair in weighted if pair[1] > 0)
    total = sum(weight for _, weight in ordered)
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= share * total * (1 - 1e-12):
            return value
    raise ValueError("a percentile of nothing")


def spread(values: Iterable[float] | Iterable[tuple[float, float]]) -> dict[str, float] | None:
    """Percentiles, mean and maximum in milliseconds of seconds, weighted or not; None of nothing."""
    pairs = [value if isinstance(value, tuple) else (value, 1.0) for value in values]
    if not pairs:
        return None
    figures = {name: percentile(pairs, share) for name, share in QUANTILES.items()}
    figures["mean"] = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    figures["max"] = max(value for value, _ in pairs)
    return {name: round(value * 1e3, 4) for name, value in figures.items()}


def within(sample: Sample, slo: Mapping[str, float]) -> bool:
    """Whether a request kept every limit (seconds). One whose figure is unknown did not, unless it had one token."""
    if sample.error is not None:
        return False
    itls = sample.itls()
    single = sample.completion_tokens == 1
    figures = {
        "ttft": sample.ttft,
        "itl": percentile(itls, 0.99) if itls else 0.0 if single else None,
        "tpot": 0.0 if single else sample.tpot,
        "e2e": sample.e2e,
    }
    return all((figure := figures[name]) is not None and figure <= limit for name, limit in slo.items())


def total(values: Iterable[int | None]) -> int | None:
    """The sum of what is known; None when nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of one or more runs. Latencies are milliseconds; None means the server does not say."""

    requests: int
    succeeded: int
    errors: dict[str, int]
    seconds: float
    client_cpu: float
    prompt_tokens: int | None
    output_tokens: int | None
    output_tokens_per_s: float | None
    requests_per_s: float
    ttft_ms: dict[str, float] | None
    itl_ms: dict[str, float] | None
    gap_ms: dict[str, float] | None
    tpot_ms: dict[str, float] | None
    e2e_ms: dict[str, float] | None
    tokens_of_emissions: str | None
    drafted_tokens: int | None
    accepted_tokens: int | None
    acceptance: float | None
    tokens_per_verification: float | None
    good_requests: int | None
    goodput_per_s: float | None

    def figure(self, name: str) -> float | None:
        """A figure by name: `output_tokens_per_s`, or `ttft_ms.p50` inside a spread."""
        outer, _, inner = name.partition(".")
        value = vars(self)[outer]
        if inner:
            value = None if value is None else value[inner]
        return None if value is None else float(value)


def summarize(
    samples: Sequence[Sample], *, seconds: float, client_cpu: float = 0.0, slo: Mapping[str, float] | None = None
) -> Summary:
    """The figures of samples taken during `seconds`; failed requests count as errors and nowhere else."""
    done = [sample for sample in samples if sample.error is None]
    output = total(sample.completion_tokens for sample in done)
    speculating = [sample for sample in done if sample.verifications is not None]
    steps = sum(sample.verifications or 0 for sample in speculating)
    drafted = total(sample.drafted for sample in done)
    accepted = total(sample.accepted for sample in done)
    later = sum(max((sample.completion_tokens or 0) - 1, 0) for sample in speculating)
    good = sum(within(sample, slo) for sample in samples) if slo else None
    exact = {sample.exact for sample in done if sample.emissions}
    return Summary(
        requests=len(samples),
        succeeded=len(done),
        errors=dict(Counter(sample.error for sample in samples if sample.error is not None)),
        seconds=round(seconds, 4),
        client_cpu=round(client_cpu, 4),
        prompt_tokens=total(sample.prompt_tokens for sample in done),
        output_tokens=output,
        output_tokens_per_s=None if output is None else output / seconds,
        requests_per_s=len(done) / seconds,
        ttft_ms=spread(sample.ttft for sample in done if sample.ttft is not None),
        itl_ms=spread(itertools.chain.from_iterable(sample.itls() for sample in done)),
        gap_ms=spread(itertools.chain.from_iterable(sample.gaps() for sample in done)),
        tpot_ms=spread(sample.tpot for sample in done if sample.tpot is not None),
        e2e_ms=spread(sample.e2e for sample in done),
        tokens_of_emissions=None if not exact else TOKEN_IDS if exact == {True} else SPREAD_EVENLY,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        acceptance=accepted / drafted if accepted is not None and drafted else None,
        tokens_per_verification=later / steps if steps else None,
        good_requests=good,
        goodput_per_s=None if good is None else good / seconds,
    )


@dataclass(frozen=True)
class Ratio:
    """A figure relative to the first target's, round by round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Over the rounds."""
        return statistics.median(self.rounds)

    def as_dict(self) -> dict[str, float | list[float]]:
        """For the JSON file."""
        return {
            "median": self.median,
            "min": min(self.rounds),
            "max": max(self.rounds),
            "rounds": list(self.rounds),
        }


def ratio(figures: Sequence[float | None], base: Sequence[float | None]) -> Ratio | None:
    """Round by round; rounds in which either is unknown or the base is zero do not count."""
    pairs = zip(figures, base, strict=True)
    rounds = tuple(figure / other for figure, other in pairs if figure is not None and other)
    return Ratio(rounds) if rounds else None
