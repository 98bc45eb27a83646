"""What /metrics shows: one table of metrics, each with its labels' fixed values, its buckets and its source.

Rows with a source are read from the engine's newest snapshot when somebody scrapes; `Meter` keeps the others. Labels
never come from a request.
"""

from __future__ import annotations

from runtime.api import (
    CACHE_LOSSES,
    CACHE_TIERS,
    CHECKPOINT_TRIGGERS,
    DISTRIBUTIONS,
    MAX_DRAFTS,
    MEMORY_KINDS,
    REGISTRIES,
    ROW_KINDS,
    STATE_COPIES,
    STEP_KINDS,
    STEP_PHASES,
)
from server.link import RESTART_REASONS
from server.row import Row, distribution, one, ratio, several, told

__all__ = ["PREFIX", "TABLE", "Row"]

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

FINISH_REASONS = ("stop", "length", "abort", "deadline", "error")
REJECTIONS = ("queue_full", "queue_tokens", "deadline", "draining", "unavailable", "too_long", "invalid", "auth")
POSITIONS = tuple(map(str, range(MAX_DRAFTS)))
START_PHASES = ("import", "load", "alloc", "selftest", "total")
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
    "/metrics/router": "GET",
    "other": "other",
}
METHODS = ("GET", "HEAD", "POST", "other")
CODES = ("200", "400", "401", "404", "405", "413", "415", "429", "500", "503", "504", "other")

_HTTP_CHILDREN = tuple((route, method, code) for route, method in ROUTES.items() for code in CODES)
_KV = ("used", "free", "cached")
_WAITING = ("capacity_kv", "capacity_state", "capacity_seqs", "deferred")
_AUDITS = ("ok", "mismatch", "skipped")
_COMMITS = ("full", "partial", "bonus_only")

# Labels that the engine tells under another name (`ModelInfo.choices`).
CHOICES = {
    "num_blocks": "kv_blocks",
    "prefill": "prefill_backend",
    "decode": "decode_backend",
    "verify": "verify_by",
}

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
            lambda s: dict(
                zip(_WAITING, (s.waiting_kv, s.waiting_state, s.waiting_seqs, s.waiting_deferred), strict=True)
            ),
            _WAITING,
        ),
    ),
    Row(
        "requests_waiting_tokens",
        "gauge",
        "Prompt tokens of waiting generations.",
        source=one(lambda s: s.waiting_tokens),
    ),
    Row(
        "engine_registry_entries",
        "gauge",
        "Entries of the engine's tables of requests.",
        {"registry": REGISTRIES},
        source=several(lambda s: s.registries, REGISTRIES),
    ),
    Row(
        "server_registry_entries",
        "gauge",
        "Entries of this process's tables of requests.",
        {"registry": ("inside", "submitted")},
    ),
    Row(
        "requests_stuck_total",
        "counter",
        "Generations ended because nothing could go on. Must be 0.",
        source=one(lambda s: s.stuck_requests),
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
    Row("request_queue_seconds", "histogram", "Waiting before first scheduled.", buckets=TTFT),
    Row("request_prefill_seconds", "histogram", "Computing the prompt.", buckets=TTFT),
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
    Row(
        "scheduler_step_duration_seconds",
        "histogram",
        "One engine step, from planning to settled.",
        buckets=DISTRIBUTIONS["step_seconds"],
        source=distribution("step_seconds"),
    ),
    Row(
        "scheduler_step_tokens",
        "histogram",
        "Tokens fed in one step.",
        buckets=DISTRIBUTIONS["step_tokens"],
        source=distribution("step_tokens"),
    ),
    Row(
        "scheduler_batch_size",
        "histogram",
        "Requests with a row in one step.",
        buckets=DISTRIBUTIONS["batch_size"],
        source=distribution("batch_size"),
    ),
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
    Row(
        "memory_bytes",
        "gauge",
        "Memory the engine holds: weights, KV blocks, recurrent states, cached ones, candidates, the drafter's store.",
        {"kind": MEMORY_KINDS},
        source=several(lambda s: s.memory_bytes, MEMORY_KINDS),
    ),
    Row(
        "cache_config_info",
        "gauge",
        "Capacities.",
        told("block_size", "num_blocks", "state_slots", "checkpoint_interval", "dtype", "state_dtype"),
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
    Row(
        "state_commit_rows_total",
        "counter",
        "Rows whose state a commit moved, by what they are.",
        {"kind": ROW_KINDS},
        source=several(lambda s: s.commit_rows, ROW_KINDS),
    ),
    Row(
        "state_commit_steps_total",
        "counter",
        "Steps committed, those of self-test and audits included.",
        source=one(lambda s: s.commits),
    ),
    Row(
        "state_commit_seconds",
        "histogram",
        "The commit of one step, as the host sees it.",
        buckets=DISTRIBUTIONS["commit_seconds"],
        source=distribution("commit_seconds"),
    ),
    Row(
        "state_commit_missing_total",
        "counter",
        "Steps whose backend committed nothing. Must be 0.",
        source=one(lambda s: s.commits_missing),
    ),
    Row("state_aborted_steps_total", "counter", "Steps rolled back.", source=one(lambda s: s.aborted_steps)),
    Row(
        "state_copies_total",
        "counter",
        "States written: by a commit, or when pending inputs are folded.",
        {"kind": STATE_COPIES},
        source=several(lambda s: s.state_copies, STATE_COPIES),
    ),
    Row(
        "state_copy_bytes_total",
        "counter",
        "Bytes of the states written.",
        source=one(lambda s: sum(s.state_copies.values()) * s.state_slot_bytes),
    ),
    Row(
        "state_audit_total",
        "counter",
        "Audits: states recomputed from nothing and compared, or skipped for lack of room.",
        {"result": _AUDITS},
        source=several(
            lambda s: dict(zip(_AUDITS, (s.audits_ok, s.audits_mismatch, s.audits_skipped), strict=True)), _AUDITS
        ),
    ),
    Row(
        "state_audit_max_error_ratio",
        "gauge",
        "Largest difference an audit found, relative to the largest value of its tensor.",
        source=one(lambda s: s.audit_worst),
    ),
    Row(
        "non_finite_rows_total",
        "counter",
        "Rows whose logits or state were not finite.",
        source=one(lambda s: s.non_finite_rows),
    ),
    # the prefix cache
    Row(
        "prefix_cache_query_tokens_total",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        source=one(lambda s: s.cache_query_tokens),
    ),
    Row(
        "prefix_cache_hit_tokens_total",
        "counter",
        "Prompt tokens not computed because a checkpoint covered them, by where it lay.",
        {"source": CACHE_TIERS},
        source=several(lambda s: s.cache_hit_tokens, CACHE_TIERS),
    ),
    Row(
        "prefix_cache_lost_tokens_total",
        "counter",
        "Prompt tokens whose KV was cached, computed all the same for lack of a state checkpoint.",
        {"reason": CACHE_LOSSES},
        source=several(lambda s: s.cache_lost_tokens, CACHE_LOSSES),
    ),
    Row(
        "preemption_resumed_tokens_total",
        "counter",
        "Tokens that a preempted generation did not have to compute again.",
        source=one(lambda s: s.resumed_tokens),
    ),
    Row(
        "state_checkpoints",
        "gauge",
        "State checkpoints held, by where they lie.",
        {"tier": CACHE_TIERS},
        source=several(lambda s: s.checkpoints, CACHE_TIERS),
    ),
    Row(
        "state_checkpoints_capacity",
        "gauge",
        "State checkpoints there is room for, by where they lie.",
        {"tier": CACHE_TIERS},
        source=several(lambda s: s.checkpoints_total, CACHE_TIERS),
    ),
    Row(
        "state_checkpoints_written_total",
        "counter",
        "State checkpoints taken, by occasion.",
        {"trigger": CHECKPOINT_TRIGGERS},
        source=several(lambda s: s.checkpoints_written, CHECKPOINT_TRIGGERS),
    ),
    Row(
        "state_checkpoint_evictions_total",
        "counter",
        "State checkpoints given up for room.",
        source=one(lambda s: s.checkpoint_evictions),
    ),
    Row(
        "kv_evicted_blocks_total",
        "counter",
        "Cached KV blocks given up for room.",
        source=one(lambda s: s.kv_evicted_blocks),
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
    Row(
        "spec_accepted_length",
        "histogram",
        "Drafted tokens accepted in one verification.",
        buckets=DISTRIBUTIONS["accepted_length"],
        source=distribution("accepted_length"),
    ),
    Row(
        "spec_draft_seconds",
        "histogram",
        "Drafting in one step.",
        buckets=DISTRIBUTIONS["draft_seconds"],
        source=distribution("draft_seconds"),
    ),
    Row(
        "spec_verify_seconds",
        "histogram",
        "Forward and judgement of one step that verifies drafts.",
        buckets=DISTRIBUTIONS["verify_seconds"],
        source=distribution("verify_seconds"),
    ),
    Row("spec_num_tokens", "gauge", "Tokens drafted for a request that does not say."),
    Row("spec_draft_failures_total", "counter", "Drafts that failed.", source=one(lambda s: s.draft_failures)),
    # the service
    Row("draining", "gauge", "1 while the server is shutting down."),
    Row("engine_up", "gauge", "1 while the engine is ready and makes progress."),
    Row(
        "engine_restarts_total",
        "counter",
        "Starts of a new engine process, by what became of the one before.",
        {"reason": RESTART_REASONS},
    ),
    Row("startup_seconds", "gauge", "Start-up time, by phase.", {"phase": START_PHASES}),
    Row("build_info", "gauge", "Versions.", told("version", "revision", "python", "torch", "cuda", "triton")),
    Row(
        "backend_info",
        "gauge",
        "Resolved choices of the engine.",
        told("prefill", "decode", "verify", "speculative", "dtype", "device"),
    ),
)
