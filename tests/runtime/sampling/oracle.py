"""What a request's next-token distribution must be, written down again in float64 and plain loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

from runtime.api import SamplingParams


def shaped(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    barred: Sequence[int] = (),
) -> list[float]:
    """Logits after bias, penalties and bars: what greedy takes the best of."""
    values = [float(value) for value in logits]
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token in range(len(values)):
        if token in prompt or token in output:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        count = list(output).count(token)
        values[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    for token in barred:
        values[token] = -math.inf
    return values


def softmax(values: Sequence[float]) -> list[float]:
    peak = max(values)
    weights = [math.exp(value - peak) for value in values]
    return [weight / sum(weights) for weight in weights]


def law(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    barred: Sequence[int] = (),
) -> list[float]:
    """The probabilities of the next token at a temperature above 0."""
    values = [value / params.temperature for value in shaped(logits, params, prompt, output, barred)]
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.top_k:
        for token in order[params.top_k :]:
            values[token] = -math.inf
    mass, probabilities = 0.0, softmax(values)
    for token in order:
        if mass >= params.top_p:
            values[token] = -math.inf
        mass += probabilities[token]
    floor = params.min_p * max(softmax(values))
    values = [value if p >= floor else -math.inf for value, p in zip(values, softmax(values), strict=True)]
    return softmax(values)
