"""Alerts on what clients notice: nobody answers, answers fail, requests are refused; and replicas that do not live."""

from __future__ import annotations

from deploy.observability.alerts import OTHER, REPLICA, SERVICE_LABELS, TARGET, Alert, Case, series
from deploy.observability.promql import SERVICE

BOARD = "lockstep-overview"
HERE = "{{ $labels.namespace }}/{{ $labels.pod }} ({{ $labels.model_name }})"
WHOLE = "{{ $labels.namespace }}, {{ $labels.model_name }}"
PROCESS = "job, instance, namespace, pod"

SERVING = (
    Alert(
        name="LockstepNoReadyReplica",
        expr=f"max by ({SERVICE}) (max_over_time(lockstep_engine_up[1h])) > 0 "
        f"unless max by ({SERVICE}) (lockstep_engine_up * (1 - lockstep_draining)) > 0",
        wait="2m",
        severity="critical",
        summary="No replica answers",
        description=f"{WHOLE}: within the last hour there was a replica that took requests; now there is none.",
        board=BOARD,
        fires=Case(
            {
                series("lockstep_engine_up"): "1x10 0x20",
                series("lockstep_draining"): "0x30",
                series("lockstep_engine_up", OTHER): "1x10 _x20",
                series("lockstep_draining", OTHER): "0x10 _x20",
            },
            "19m",
            SERVICE_LABELS,
        ),
        quiet=Case(
            {
                series("lockstep_engine_up"): "1x10 0x20",
                series("lockstep_draining"): "0x30",
                series("lockstep_engine_up", OTHER): "1x30",
                series("lockstep_draining", OTHER): "0x30",
            },
            "19m",
        ),
    ),
    Alert(
        name="LockstepReplicaDown",
        expr="lockstep_engine_up == 0 and lockstep_draining == 0",
        wait="15m",
        severity="warning",
        summary="A replica's engine is not ready",
        description=f"{HERE}: loading, failed or silent for 15 minutes.",
        board=BOARD,
        fires=Case({series("lockstep_engine_up"): "0x30", series("lockstep_draining"): "0x30"}, "20m", REPLICA),
        quiet=Case(
            {
                series("lockstep_engine_up"): "0x10 1x30",
                series("lockstep_draining"): "0x40",
                series("lockstep_engine_up", OTHER): "0x40",
                series("lockstep_draining", OTHER): "1x40",
            },
            "20m",
        ),
    ),
    Alert(
        name="LockstepTargetDown",
        expr="up == 0 and on (job, instance) last_over_time(lockstep_engine_up[1h])",
        wait="5m",
        severity="warning",
        summary="A replica cannot be scraped",
        description="{{ $labels.namespace }}/{{ $labels.pod }} ({{ $labels.instance }}) gave metrics within the last "
        "hour, and gives none now.",
        board=BOARD,
        fires=Case({series("up", TARGET): "1x10 0x20", series("lockstep_engine_up"): "1x10 _x20"}, "19m", TARGET),
        quiet=Case(
            {
                series("up", TARGET): "1x10 0x2 1x20",
                series("lockstep_engine_up"): "1x10 _x2 1x20",
                series("up", {"job": "other", "instance": "b:1"}): "0x40",
            },
            "19m",
        ),
    ),
    Alert(
        name="LockstepEngineRestarting",
        expr=f"sum by ({SERVICE}, pod) (increase(lockstep_engine_restarts_total[15m])) > 0",
        wait="0m",
        severity="warning",
        summary="An engine process ended and was started anew",
        description=f'{HERE}: {{{{ $value | printf "%.0f" }}}} times in 15 minutes; what was in flight ended with '
        "an error.",
        board=BOARD,
        fires=Case(
            {series("lockstep_engine_restarts_total", reason="crash"): "0+1x30"},
            "20m",
            {**SERVICE_LABELS, "pod": "a"},
            "15",
        ),
        quiet=Case({series("lockstep_engine_restarts_total", reason="crash"): "2x30"}, "20m"),
    ),
    Alert(
        name="LockstepServerRestarting",
        expr=f"changes(process_start_time_seconds[1h]) > 2 and on ({PROCESS}) lockstep_engine_up",
        wait="0m",
        severity="warning",
        summary="A server process starts again and again",
        description="{{ $labels.namespace }}/{{ $labels.pod }} ({{ $labels.instance }}): {{ $value }} starts in an "
        "hour.",
        board=BOARD,
        fires=Case(
            {
                series("process_start_time_seconds", TARGET): "100x9 700x9 1300x9 1900x9",
                series("lockstep_engine_up"): "1x40",
            },
            "35m",
            TARGET,
            "3",
        ),
        quiet=Case(
            {
                series("process_start_time_seconds", TARGET): "100x9 700x30",
                series("lockstep_engine_up"): "1x40",
                series("process_start_time_seconds", {"job": "other", "instance": "b:1"}): "1+60x40",
            },
            "35m",
        ),
    ),
    Alert(
        name="LockstepDrainStuck",
        expr="lockstep_draining == 1",
        wait="10m",
        severity="warning",
        summary="A replica does not end",
        description=f"{HERE}: shutting down for 10 minutes, longer than any drain may take.",
        board=BOARD,
        fires=Case({series("lockstep_draining"): "0x5 1x30"}, "20m", REPLICA),
        quiet=Case({series("lockstep_draining"): "0x5 1x6 _x30"}, "20m"),
    ),
    Alert(
        name="LockstepHighErrorRatio",
        expr=f'sum by ({SERVICE}, pod) (rate(lockstep_requests_total{{finish_reason="error"}}[5m])) '
        f"/ (sum by ({SERVICE}, pod) (rate(lockstep_requests_total[5m])) > 0) > 0.05",
        wait="5m",
        severity="critical",
        summary="Generations end with errors",
        description=f"{HERE}: {{{{ $value | humanizePercentage }}}} of the generations that ended in the last 5 "
        "minutes.",
        board=BOARD,
        fires=Case(
            {
                series("lockstep_requests_total", finish_reason="error"): "0+10x30",
                series("lockstep_requests_total", finish_reason="stop"): "0+90x30",
            },
            "20m",
            {**SERVICE_LABELS, "pod": "a"},
            "10%",
        ),
        quiet=Case(
            {
                series("lockstep_requests_total", finish_reason="error"): "0+1x30",
                series("lockstep_requests_total", finish_reason="stop"): "0+90x30",
                series("lockstep_requests_total", finish_reason="abort"): "0+90x30",
            },
            "20m",
        ),
    ),
    Alert(
        name="LockstepInternalErrors",
        expr=f'sum by ({SERVICE}, pod, route) (increase(lockstep_http_requests_total{{code="500"}}[15m])) > 0',
        wait="0m",
        severity="warning",
        summary="The server answers 500",
        description=f'{HERE}, {{{{ $labels.route }}}}: {{{{ $value | printf "%.0f" }}}} times in 15 minutes. A 500 '
        "is a bug.",
        board=BOARD,
        fires=Case(
            {series("lockstep_http_requests_total", route="/v1/models", method="GET", code="500"): "0+1x30"},
            "20m",
            {**SERVICE_LABELS, "pod": "a", "route": "/v1/models"},
            "15",
        ),
        quiet=Case(
            {
                series("lockstep_http_requests_total", route="/v1/models", method="GET", code="500"): "2x30",
                series("lockstep_http_requests_total", route="/v1/models", method="GET", code="503"): "0+3x30",
            },
            "20m",
        ),
    ),
    Alert(
        name="LockstepOverloaded",
        expr=f'sum by ({SERVICE}) (rate(lockstep_requests_rejected_total{{reason=~"queue_.+"}}[5m])) '
        f"/ ((sum by ({SERVICE}) (rate(lockstep_requests_total[5m])) "
        f'+ sum by ({SERVICE}) (rate(lockstep_requests_rejected_total{{reason=~"queue_.+"}}[5m]))) > 0) > 0.01',
        wait="5m",
        severity="warning",
        summary="Requests are refused because the queue is full",
        description=f"{WHOLE}: {{{{ $value | humanizePercentage }}}} of the requests get 429.",
        board="lockstep-scheduler",
        fires=Case(
            {
                series("lockstep_requests_rejected_total", reason="queue_full"): "0+20x30",
                series("lockstep_requests_total", finish_reason="stop"): "0+80x30",
            },
            "20m",
            SERVICE_LABELS,
            "20%",
        ),
        quiet=Case(
            {
                series("lockstep_requests_rejected_total", reason="queue_full"): "0x30",
                series("lockstep_requests_rejected_total", reason="invalid"): "0+20x30",
                series("lockstep_requests_total", finish_reason="stop"): "0+80x30",
            },
            "20m",
        ),
    ),
    Alert(
        name="LockstepFileDescriptors",
        expr=f"process_open_fds / (process_max_fds > 0) > 0.8 and on ({PROCESS}) lockstep_engine_up",
        wait="5m",
        severity="warning",
        summary="A server runs out of file descriptors",
        description="{{ $labels.namespace }}/{{ $labels.pod }} ({{ $labels.instance }}): "
        "{{ $value | humanizePercentage }} of its descriptors are open; every connection takes one.",
        board=BOARD,
        fires=Case(
            {
                series("process_open_fds", TARGET): "900x20",
                series("process_max_fds", TARGET): "1000x20",
                series("lockstep_engine_up"): "1x20",
            },
            "10m",
            TARGET,
            "90%",
        ),
        quiet=Case(
            {
                series("process_open_fds", TARGET): "700x20",
                series("process_max_fds", TARGET): "1000x20",
                series("lockstep_engine_up"): "1x20",
            },
            "10m",
        ),
    ),
    Alert(
        name="LockstepVersionsMixed",
        expr=f"count by ({SERVICE}) (count by ({SERVICE}, version) (lockstep_build_info)) > 1",
        wait="1h",
        severity="warning",
        summary="Replicas run different versions",
        description=f"{WHOLE}: {{{{ $value }}}} versions for an hour. A rollout is stuck.",
        board=BOARD,
        fires=Case(
            {
                series("lockstep_build_info", version="1"): "1x90",
                series("lockstep_build_info", OTHER, version="2"): "1x90",
            },
            "75m",
            SERVICE_LABELS,
            "2",
        ),
        quiet=Case(
            {
                series("lockstep_build_info", version="1"): "1x30 _x60",
                series("lockstep_build_info", OTHER, version="2"): "1x90",
            },
            "75m",
        ),
    ),
)
