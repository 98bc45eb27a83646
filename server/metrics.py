"""What /metrics shows: one table of metrics, each with its labels' fixed values, its buckets and its source.

Rows with a source are read from the engine's newest snapshot when somebody scrapes; `Meter` keeps the others. Labels
never come from a request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from runtime.api import MAX_DRAFTS, STEP_KINDS, STEP_PHASES, EngineStats

PREFIX = "lockstep_"

TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0),
)
ITL = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
    5.0,
)
LATENCY = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0),
)
HTTP = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))

FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("queue_full", "draining", "too_long", "invalid", "auth")
POSITIONS = tuple(map(str, range(MAX_DRAFTS)))
START_PHASES = ("import", "load", "alloc", "warmup", "selftest", "total")
ROUTES: dict[str, str] = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/embeddings": "POST",
    "/v1/models": "GET",
    "/v1/models/{id}": "GET",
    "/live": "GET",
    "/ready": "GET",
    "/health": "GET",
    "/metrics": "GET",
    "other": "other",
}
METHODS = ("GET", "HEAD", "POST", "other")
CODES = ("200", "400", "401", "404", "405", "413", "415", "429", "500", "503", "other")

Values = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class Row:
    """One metric. `source` reads an engine snapshot; rows without one are kept by the HTTP process.

    `labels` maps each label to all values it can ever have; `children` narrows their product where that is too wide.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    source: Callable[[EngineStats], Values] | None = None
    children: tuple[tuple[str, ...], ...] | None = None

    def combinations(self) -> tuple[tuple[str, ...], ...]:
        """The label values to create at start."""
        return self.children if self.children is not None else tuple(itertools.product(*self.labels.values()))


def one(read: Callable[[EngineStats], float]) -> Callable[[EngineStats], Values]:
    """A source with no labels of its own."""
    return lambda stats: [((), read(stats))]


def several(
    read: Callable[[EngineStats], Mapping[str, float]], names: Iterable[str]
) -> Callable[[EngineStats], Values]:
    """A source with one label, always with all its values."""
    order = tuple(names)

    def values(stats: EngineStats) -> Values:
        current = read(stats)
        return [((name,), current.get(name, 0.0)) for name in order]

    return values


def ratio(used: float, total: float) -> float:
    """A share; 0 of nothing is 0."""
    return used / total if total else 0.0


_HTTP_CHILDREN = tuple((route, method, code) for route, method in ROUTES.items() for code in CODES)
_KV = ("used", "free", "cached")
_WAITING = ("capacity_kv", "capacity_state", "capacity_seqs")
_COMMITS = ("full", "partial", "bonus_only")

TABLE: tuple[Row, ...] = (
    # requests
    Row("requests_total", "counter", "Generations ended, by reason.", {"finish_reason": FINISH_REASONS}),
    Row("requests_rejected_total", "counter", "Requests refused, by reason.", {"reason": REJECTIONS}),
    Row("requests_running", "gauge", "Generations being computed.", source=one(lambda s: s.running)),
    Row(
        "requests_waiting",
        "gauge",
        "Generations waiting, by what they wait for.",
        {"reason": _WAITING},
        source=several(
            lambda s: dict(zip(_WAITING, (s.waiting_kv, s.waiting_state, s.waiting_seqs), strict=True)), _WAITING
        ),
    ),
    Row(
        "request_preemptions_total",
        "counter",
        "Running generations set back, by what was missing.",
        {"reason": ("kv", "state")},
        source=several(lambda s: {"kv": s.preemptions_kv, "state": s.preemptions_state}, ("kv", "state")),
    ),
    Row(
        "http_requests_total",
        "counter",
        "HTTP requests answered.",
        {"route": tuple(ROUTES), "method": METHODS, "code": CODES},
        children=_HTTP_CHILDREN,
    ),
    Row(
        "http_request_duration_seconds",
        "histogram",
        "Time from the request's headers to the end of its response.",
        {"route": tuple(ROUTES)},
        HTTP,
    ),
    Row("http_requests_in_progress", "gauge", "HTTP requests being answered."),
    # latency
    Row("time_to_first_token_seconds", "histogram", "From submission to the first token.", buckets=TTFT),
    Row(
        "inter_token_latency_seconds",
        "histogram",
        "Gap between two emissions divided by the tokens of the second, counted once per token.",
        buckets=ITL,
    ),
    Row("emission_gap_seconds", "histogram", "Gap between two emissions of one generation.", buckets=ITL),
    Row("e2e_request_latency_seconds", "histogram", "From submission to the last token.", buckets=LATENCY),
    Row(
        "request_time_per_output_token_seconds",
        "histogram",
        "Time after the first emission divided by the tokens after it.",
        buckets=ITL,
    ),
    Row("request_queue_seconds", "histogram", "Waiting before first scheduled.", buckets=LATENCY),
    Row("request_prefill_seconds", "histogram", "Computing the prompt.", buckets=LATENCY),
    Row("request_decode_seconds", "histogram", "Generating.", buckets=LATENCY),
    # tokens
    Row("prompt_tokens_total", "counter", "Prompt tokens of accepted requests; grows by exactly usage.prompt_tokens."),
    Row("generation_tokens_total", "counter", "Tokens delivered; grows by exactly usage.completion_tokens."),
    Row("request_prompt_tokens", "histogram", "Prompt length.", buckets=TOKENS),
    Row("request_generation_tokens", "histogram", "Tokens delivered per generation.", buckets=TOKENS),
    Row("request_max_tokens", "histogram", "Token limit per generation.", buckets=TOKENS),
    Row(
        "prompt_tokens_computed_total",
        "counter",
        "Prompt tokens the engine computed (cache hits are not).",
        source=one(lambda s: s.prompt_tokens_computed),
    ),
    Row(
        "engine_tokens_emitted_total",
        "counter",
        "Tokens the engine emitted, discarded ones included.",
        source=one(lambda s: s.tokens_emitted),
    ),
    Row(
        "engine_tokens_discarded_total",
        "counter",
        "Tokens emitted after their request was taken back.",
        source=one(lambda s: s.tokens_discarded),
    ),
    # scheduler
    Row(
        "scheduler_steps_total",
        "counter",
        "Engine steps, by what they computed.",
        {"kind": STEP_KINDS},
        source=several(lambda s: s.steps, STEP_KINDS),
    ),
    Row(
        "scheduler_step_seconds_total",
        "counter",
        "Time in each phase of the step.",
        {"phase": STEP_PHASES},
        source=several(lambda s: s.step_seconds, STEP_PHASES),
    ),
    Row("scheduler_step_tokens_total", "counter", "Tokens fed in all steps.", source=one(lambda s: s.step_tokens)),
    Row(
        "scheduler_last_step_timestamp_seconds",
        "gauge",
        "When the last step ended, as Unix time.",
        source=one(lambda s: s.last_step_time),
    ),
    Row(
        "scheduler_settle_waits_total",
        "counter",
        "Rows not planned because an earlier step had not settled.",
        source=one(lambda s: s.settle_waits),
    ),
    # KV blocks and state slots
    Row(
        "kv_blocks",
        "gauge",
        "KV blocks.",
        {"state": _KV},
        source=several(
            lambda s: {
                "used": s.kv_blocks_used,
                "free": s.kv_blocks_total - s.kv_blocks_used - s.kv_blocks_cached,
                "cached": s.kv_blocks_cached,
            },
            _KV,
        ),
    ),
    Row(
        "kv_cache_usage_ratio",
        "gauge",
        "Share of KV blocks in use.",
        source=one(lambda s: ratio(s.kv_blocks_used, s.kv_blocks_total)),
    ),
    Row(
        "state_slots",
        "gauge",
        "Recurrent state slots.",
        {"state": _KV},
        source=several(
            lambda s: {
                "used": s.state_slots_used,
                "free": s.state_slots_total - s.state_slots_used - s.state_slots_cached,
                "cached": s.state_slots_cached,
            },
            _KV,
        ),
    ),
    Row(
        "state_slot_usage_ratio",
        "gauge",
        "Share of recurrent state slots in use.",
        source=one(lambda s: ratio(s.state_slots_used, s.state_slots_total)),
    ),
    # the commit
    Row(
        "state_commits_total",
        "counter",
        "State commits after verification, by how many drafts were accepted.",
        {"outcome": _COMMITS},
        source=several(
            lambda s: dict(zip(_COMMITS, (s.commits_full, s.commits_partial, s.commits_bonus_only), strict=True)),
            _COMMITS,
        ),
    ),
    Row("state_commit_rows_total", "counter", "State commits of all kinds.", source=one(lambda s: s.commits)),
    Row(
        "state_commit_missing_total",
        "counter",
        "Steps whose backend committed nothing. Must be 0.",
        source=one(lambda s: s.commits_missing),
    ),
    Row("state_aborted_steps_total", "counter", "Steps rolled back.", source=one(lambda s: s.aborted_steps)),
    Row("state_folds_total", "counter", "Pending inputs folded into states.", source=one(lambda s: s.folds)),
    Row(
        "state_audit_total",
        "counter",
        "States recomputed from nothing and compared.",
        {"result": ("ok", "mismatch")},
        source=several(lambda s: {"ok": s.audits_ok, "mismatch": s.audits_mismatch}, ("ok", "mismatch")),
    ),
    Row(
        "non_finite_rows_total",
        "counter",
        "Rows whose logits were not finite.",
        source=one(lambda s: s.non_finite_rows),
    ),
    # speculation; these also carry the label `method`
    Row("spec_drafts_total", "counter", "Verifications.", source=one(lambda s: s.spec_verifications)),
    Row("spec_draft_tokens_total", "counter", "Tokens drafted.", source=one(lambda s: s.spec_drafted)),
    Row("spec_accepted_tokens_total", "counter", "Drafted tokens accepted.", source=one(lambda s: s.spec_accepted)),
    Row("spec_emitted_tokens_total", "counter", "Accepted plus bonus tokens.", source=one(lambda s: s.spec_emitted)),
    Row(
        "spec_draft_tokens_per_pos_total",
        "counter",
        "Tokens drafted, by position in the draft.",
        {"position": POSITIONS},
        source=several(lambda s: dict(zip(POSITIONS, s.spec_drafted_at, strict=False)), POSITIONS),
    ),
    Row(
        "spec_accepted_tokens_per_pos_total",
        "counter",
        "Drafted tokens accepted, by position in the draft.",
        {"position": POSITIONS},
        source=several(lambda s: dict(zip(POSITIONS, s.spec_accepted_at, strict=False)), POSITIONS),
    ),
    Row("spec_draft_failures_total", "counter", "Drafts that failed.", source=one(lambda s: s.draft_failures)),
    # the service
    Row("draining", "gauge", "1 while the server is shutting down."),
    Row("engine_up", "gauge", "1 while the engine is ready and makes progress."),
    Row("startup_seconds", "gauge", "Start-up time, by phase.", {"phase": START_PHASES}),
)
