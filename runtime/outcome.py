"""The one device-to-host copy of a step: a verdict becomes an outcome."""

from __future__ import annotations

from runtime.api import FinishReason, TokenLogprobs
from runtime.plan import Batch, Outcome
from runtime.step import SampledLogprobs, Verdict

FINISH = (None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR)
NOT_FINITE = "The model's output for this request was not finite."


def read_back(batch: Batch, verdict: Verdict) -> Outcome:
    """Waits for the step and copies what the host needs of it."""
    kept, counts, codes = verdict.kept.tolist(), verdict.num_emitted.tolist(), verdict.finish.tolist()
    tokens = verdict.emitted.tolist()
    emitted = tuple(tuple(tokens[i][:count]) for i, count in enumerate(counts))
    return Outcome(
        kept=tuple(kept),
        emitted=emitted,
        finish=tuple(FINISH[code] for code in codes),
        errors=tuple(NOT_FINITE if FINISH[code] is FinishReason.ERROR else None for code in codes),
        logprobs=() if verdict.logprobs is None else _logprobs(batch, verdict.logprobs, emitted),
    )


def _logprobs(
    batch: Batch, found: SampledLogprobs, emitted: tuple[tuple[int, ...], ...]
) -> tuple[tuple[TokenLogprobs, ...] | None, ...]:
    chosen, tops, values = found.chosen.tolist(), found.top_tokens.tolist(), found.top_values.tolist()
    out: list[tuple[TokenLogprobs, ...] | None] = []
    for i, row in enumerate(batch.rows):
        wanted = row.seq.request.sampling.logprobs
        if wanted is None:
            out.append(None)
            continue
        out.append(
            tuple(
                TokenLogprobs(
                    token=token,
                    logprob=chosen[i][j],
                    top=tuple(zip(tops[i][j][:wanted], values[i][j][:wanted], strict=True)),
                )
                for j, token in enumerate(emitted[i])
            )
        )
    return tuple(out)
