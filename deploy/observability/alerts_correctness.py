"""Alerts on what must never happen: text that may be wrong, steps that failed, holds that were not given back."""

from __future__ import annotations

from deploy.observability.alerts import DRAFTER, OTHER, REPLICA, Alert, Case, series

BOARD = "lockstep-state"
HERE = "{{ $labels.namespace }}/{{ $labels.pod }} ({{ $labels.model_name }})"

CORRECTNESS = (
    Alert(
        name="LockstepStateCommitMissing",
        expr="increase(lockstep_state_commit_missing_total[15m]) > 0",
        wait="0m",
        severity="critical",
        summary="A step's state was not committed",
        description=f"{HERE}: a step's backend committed nothing. Text of the requests in that step may be wrong.",
        board=BOARD,
        fires=Case({series("lockstep_state_commit_missing_total"): "0x10 1x20"}, "12m", REPLICA),
        quiet=Case({series("lockstep_state_commit_missing_total"): "1x40"}, "30m"),
    ),
    Alert(
        name="LockstepStateAuditMismatch",
        expr='increase(lockstep_state_audit_total{result="mismatch"}[15m]) > 0',
        wait="0m",
        severity="critical",
        summary="A recurrent state differs from one computed from nothing",
        description=f"{HERE}: an audit recomputed a running request's state and found another one.",
        board=BOARD,
        fires=Case(
            {series("lockstep_state_audit_total", result="mismatch"): "0x10 2x20"},
            "12m",
            {**REPLICA, "result": "mismatch"},
        ),
        quiet=Case(
            {
                series("lockstep_state_audit_total", result="mismatch"): "0x40",
                series("lockstep_state_audit_total", result="ok"): "0+5x40",
            },
            "30m",
        ),
    ),
    Alert(
        name="LockstepNonFiniteLogits",
        expr="increase(lockstep_non_finite_rows_total[15m]) > 0",
        wait="0m",
        severity="critical",
        summary="A model computed NaN or infinity",
        description=f'{HERE}: {{{{ $value | printf "%.0f" }}}} rows in 15 minutes; those requests ended with an error.',
        board=BOARD,
        fires=Case({series("lockstep_non_finite_rows_total"): "0+1x20"}, "20m", REPLICA, "15"),
        quiet=Case({series("lockstep_non_finite_rows_total"): "3x40"}, "30m"),
    ),
    Alert(
        name="LockstepStepsAborted",
        expr="increase(lockstep_state_aborted_steps_total[15m]) > 0",
        wait="0m",
        severity="warning",
        summary="Engine steps raised and were rolled back",
        description=f'{HERE}: {{{{ $value | printf "%.0f" }}}} steps in 15 minutes; their requests ended with an '
        "error.",
        board=BOARD,
        fires=Case({series("lockstep_state_aborted_steps_total"): "0+2x20"}, "20m", REPLICA, "30"),
        quiet=Case({series("lockstep_state_aborted_steps_total"): "7x40"}, "30m"),
    ),
    Alert(
        name="LockstepRequestsStuck",
        expr="increase(lockstep_requests_stuck_total[15m]) > 0",
        wait="0m",
        severity="warning",
        summary="Requests could not go on, and were ended",
        description=f'{HERE}: {{{{ $value | printf "%.0f" }}}} in 15 minutes; each ended with an error, the '
        "others went on.",
        board="lockstep-scheduler",
        fires=Case({series("lockstep_requests_stuck_total"): "0+1x20"}, "20m", REPLICA, "15"),
        quiet=Case({series("lockstep_requests_stuck_total"): "2x40"}, "30m"),
    ),
    Alert(
        name="LockstepDraftFailures",
        expr="increase(lockstep_spec_draft_failures_total[15m]) > 0",
        wait="0m",
        severity="warning",
        summary="The drafter raises",
        description=f'{HERE}, {{{{ $labels.method }}}}: {{{{ $value | printf "%.0f" }}}} failures in 15 minutes. '
        "Answers are right, and slower.",
        board="lockstep-speculation",
        fires=Case(
            {series("lockstep_spec_draft_failures_total", **DRAFTER): "0+1x20"}, "20m", {**REPLICA, **DRAFTER}, "15"
        ),
        quiet=Case({series("lockstep_spec_draft_failures_total", **DRAFTER): "4x40"}, "30m"),
    ),
    Alert(
        name="LockstepAuditsSkipped",
        expr='increase(lockstep_state_audit_total{result="skipped"}[1h]) > 20 '
        'unless ignoring(result) increase(lockstep_state_audit_total{result="ok"}[1h]) > 0',
        wait="15m",
        severity="warning",
        summary="Audits are due and none is done",
        description=f'{HERE}: {{{{ $value | printf "%.0f" }}}} skipped in an hour for lack of room. Nobody checks '
        "the states.",
        board=BOARD,
        fires=Case(
            {
                series("lockstep_state_audit_total", result="skipped"): "0+1x90",
                series("lockstep_state_audit_total", result="ok"): "7x90",
            },
            "85m",
            {**REPLICA, "result": "skipped"},
            "60",
        ),
        quiet=Case(
            {
                series("lockstep_state_audit_total", result="skipped"): "0+1x90",
                series("lockstep_state_audit_total", result="ok"): "0+1x90",
            },
            "85m",
        ),
    ),
    Alert(
        name="LockstepStateSlotsLeaked",
        expr='lockstep_state_slots{state="used"} > 0 and ignoring(state) lockstep_requests_running == 0',
        wait="15m",
        severity="warning",
        summary="State slots are held by no request",
        description=f"{HERE}: {{{{ $value }}}} slots in use for 15 minutes with nothing running.",
        board=BOARD,
        fires=Case(
            {series("lockstep_state_slots", state="used"): "2x40", series("lockstep_requests_running"): "0x40"},
            "20m",
            {**REPLICA, "state": "used"},
            "2",
        ),
        quiet=Case(
            {
                series("lockstep_state_slots", state="used"): "2x40",
                series("lockstep_requests_running"): "1x40",
                series("lockstep_state_slots", OTHER, state="used"): "0x40",
                series("lockstep_requests_running", OTHER): "0x40",
            },
            "30m",
        ),
    ),
    Alert(
        name="LockstepKVBlocksLeaked",
        expr='lockstep_kv_blocks{state="used"} > 0 and ignoring(state) lockstep_requests_running == 0',
        wait="15m",
        severity="warning",
        summary="KV blocks are held by no request",
        description=f"{HERE}: {{{{ $value }}}} blocks in use for 15 minutes with nothing running.",
        board=BOARD,
        fires=Case(
            {series("lockstep_kv_blocks", state="used"): "9x40", series("lockstep_requests_running"): "0x40"},
            "20m",
            {**REPLICA, "state": "used"},
            "9",
        ),
        quiet=Case(
            {
                series("lockstep_kv_blocks", state="used"): "9x10 0x30",
                series("lockstep_requests_running"): "0x40",
            },
            "30m",
        ),
    ),
)
