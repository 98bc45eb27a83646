"""Alerts on the engine's pace and room: a loop that stands, queues, full pools, preemption, drafts for nothing."""

from __future__ import annotations

from deploy.observability.alerts import DRAFTER, OTHER, REPLICA, SERVICE_LABELS, Alert, Case, series
from deploy.observability.promql import SERVICE

BOARD = "lockstep-scheduler"
HERE = "{{ $labels.namespace }}/{{ $labels.pod }} ({{ $labels.model_name }})"
WHOLE = "{{ $labels.namespace }}, {{ $labels.model_name }}"
REPLICA_BY = f"{SERVICE}, pod, instance"


def full(pool: str, usage: str, reason: str, name: str, remedy: str) -> Alert:
    """A pool that is full while somebody waits for it."""
    return Alert(
        name=name,
        expr=f'{usage} > 0.95 and ignoring(reason) lockstep_requests_waiting{{reason="{reason}"}} > 0',
        wait="5m",
        severity="warning",
        summary=f"{pool} are used up, and requests wait for them",
        description=f"{HERE}: {{{{ $value | humanizePercentage }}}} in use for 5 minutes. {remedy}",
        board=BOARD,
        fires=Case(
            {series(usage): "1x20", series("lockstep_requests_waiting", reason=reason): "3x20"}, "10m", REPLICA, "100%"
        ),
        quiet=Case(
            {
                series(usage): "1x20",
                series("lockstep_requests_waiting", reason=reason): "0x20",
                series(usage, OTHER): "0.9x20",
                series("lockstep_requests_waiting", OTHER, reason=reason): "3x20",
            },
            "10m",
        ),
    )


CAPACITY = (
    Alert(
        name="LockstepSchedulerStalled",
        expr="time() - lockstep_scheduler_last_step_timestamp_seconds > 60 and lockstep_requests_running > 0",
        wait="1m",
        severity="critical",
        summary="The engine loop stands still with requests in it",
        description=f"{HERE}: the last step was {{{{ $value | humanizeDuration }}}} ago.",
        board=BOARD,
        fires=Case(
            {
                series("lockstep_scheduler_last_step_timestamp_seconds"): "0x20",
                series("lockstep_requests_running"): "2x20",
            },
            "10m",
            REPLICA,
            "10m 0s",
        ),
        quiet=Case(
            {
                series("lockstep_scheduler_last_step_timestamp_seconds"): "0x20",
                series("lockstep_requests_running"): "0x20",
                series("lockstep_scheduler_last_step_timestamp_seconds", OTHER): "0+60x20",
                series("lockstep_requests_running", OTHER): "2x20",
            },
            "10m",
        ),
    ),
    Alert(
        name="LockstepNoProgress",
        expr="lockstep_requests_running > 0 "
        "and rate(lockstep_engine_tokens_emitted_total[5m]) + rate(lockstep_prompt_tokens_computed_total[5m]) == 0",
        wait="5m",
        severity="critical",
        summary="Requests run, and no token comes of it",
        description=f"{HERE}: {{{{ $value }}}} requests, and neither a prompt token computed nor one generated in 5 "
        "minutes.",
        board=BOARD,
        fires=Case(
            {
                series("lockstep_requests_running"): "2x30",
                series("lockstep_engine_tokens_emitted_total"): "0+100x10 1000x20",
                series("lockstep_prompt_tokens_computed_total"): "500x30",
            },
            "25m",
            REPLICA,
            "2",
        ),
        quiet=Case(
            {
                series("lockstep_requests_running"): "2x30",
                series("lockstep_engine_tokens_emitted_total"): "1000x30",
                series("lockstep_prompt_tokens_computed_total"): "0+512x30",
            },
            "25m",
        ),
    ),
    Alert(
        name="LockstepQueueBacklog",
        expr=f"sum by ({SERVICE}) (lockstep_requests_waiting) / (sum by ({SERVICE}) (lockstep_engine_up) > 0) > 10",
        wait="10m",
        severity="warning",
        summary="Requests queue up",
        description=f'{WHOLE}: {{{{ $value | printf "%.0f" }}}} requests wait per replica.',
        board=BOARD,
        fires=Case(
            {
                series("lockstep_requests_waiting", reason="capacity_seqs"): "30x30",
                series("lockstep_requests_waiting", OTHER, reason="capacity_kv"): "30x30",
                series("lockstep_engine_up"): "1x30",
                series("lockstep_engine_up", OTHER): "1x30",
            },
            "15m",
            SERVICE_LABELS,
            "30",
        ),
        quiet=Case(
            {
                series("lockstep_requests_waiting", reason="capacity_seqs"): "30x5 0x25",
                series("lockstep_requests_waiting", OTHER, reason="capacity_seqs"): "8x30",
                series("lockstep_engine_up"): "1x30",
                series("lockstep_engine_up", OTHER): "1x30",
            },
            "15m",
        ),
    ),
    full(
        "Recurrent state slots",
        "lockstep_state_slot_usage_ratio",
        "capacity_state",
        "LockstepStateSlotsExhausted",
        "More KV memory would not help.",
    ),
    full(
        "KV blocks",
        "lockstep_kv_cache_usage_ratio",
        "capacity_kv",
        "LockstepKVCacheExhausted",
        "More state slots would not help.",
    ),
    Alert(
        name="LockstepPreemptionStorm",
        expr=f"sum by ({REPLICA_BY}) (rate(lockstep_request_preemptions_total[10m])) "
        f"> 0.2 * sum by ({REPLICA_BY}) (rate(lockstep_requests_total[10m])) "
        f"and sum by ({REPLICA_BY}) (increase(lockstep_request_preemptions_total[10m])) > 10",
        wait="5m",
        severity="warning",
        summary="Running requests are set back again and again",
        description=f"{HERE}: {{{{ $value | humanize }}}} preemptions a second; what was computed is computed again.",
        board=BOARD,
        fires=Case(
            {
                series("lockstep_request_preemptions_total", reason="kv"): "0+60x30",
                series("lockstep_requests_total", finish_reason="stop"): "0+60x30",
            },
            "25m",
            REPLICA,
            "1",
        ),
        quiet=Case(
            {
                series("lockstep_request_preemptions_total", reason="kv"): "0+6x30",
                series("lockstep_requests_total", finish_reason="stop"): "0+60x30",
            },
            "25m",
        ),
    ),
    Alert(
        name="LockstepSpecAcceptanceCollapse",
        expr=f"sum by ({SERVICE}, method) (rate(lockstep_spec_emitted_tokens_total[10m])) "
        f"/ (sum by ({SERVICE}, method) (rate(lockstep_spec_drafts_total[10m])) > 0) < 1.1 "
        f"and sum by ({SERVICE}, method) (increase(lockstep_spec_drafts_total[10m])) > 100",
        wait="10m",
        severity="warning",
        summary="Drafts are rejected: speculation costs and gives nothing",
        description=f"{WHOLE}, {{{{ $labels.method }}}}: {{{{ $value | humanize }}}} tokens per verification; 1 is "
        "none accepted.",
        board="lockstep-speculation",
        fires=Case(
            {
                series("lockstep_spec_emitted_tokens_total", **DRAFTER): "0+105x40",
                series("lockstep_spec_drafts_total", **DRAFTER): "0+100x40",
            },
            "30m",
            {**SERVICE_LABELS, **DRAFTER},
            "1.05",
        ),
        quiet=Case(
            {
                series("lockstep_spec_emitted_tokens_total", **DRAFTER): "0+150x40",
                series("lockstep_spec_drafts_total", **DRAFTER): "0+100x40",
                series("lockstep_spec_emitted_tokens_total", {**REPLICA, "model_name": "n"}, method="ngram"): "0+1x40",
                series("lockstep_spec_drafts_total", {**REPLICA, "model_name": "n"}, method="ngram"): "0+1x40",
            },
            "30m",
        ),
    ),
    Alert(
        name="LockstepPrefixCacheCheckpointLoss",
        expr=f"sum by ({SERVICE}) (rate(lockstep_prefix_cache_lost_tokens_total[30m])) "
        f"/ ((sum by ({SERVICE}) (rate(lockstep_prefix_cache_lost_tokens_total[30m])) "
        f"+ sum by ({SERVICE}) (rate(lockstep_prefix_cache_hit_tokens_total[30m]))) > 0) > 0.5 "
        f"and sum by ({SERVICE}) (increase(lockstep_prefix_cache_lost_tokens_total[30m])) > 10000",
        wait="15m",
        severity="warning",
        summary="Cached prompts are computed again for lack of a state checkpoint",
        description=f"{WHOLE}: {{{{ $value | humanizePercentage }}}} of the tokens whose KV was cached were computed "
        "again.",
        board="lockstep-state",
        fires=Case(
            {
                series("lockstep_prefix_cache_lost_tokens_total", reason="no_checkpoint"): "0+3000x60",
                series("lockstep_prefix_cache_hit_tokens_total", source="device"): "0+1000x60",
            },
            "55m",
            SERVICE_LABELS,
            "75%",
        ),
        quiet=Case(
            {
                series("lockstep_prefix_cache_lost_tokens_total", reason="no_checkpoint"): "0+1000x60",
                series("lockstep_prefix_cache_hit_tokens_total", source="device"): "0+3000x60",
            },
            "55m",
        ),
    ),
)
