"""Overview: is it up, is it right, is it fast, and where to look next."""

from __future__ import annotations

from deploy.observability.board import Board, Section
from deploy.observability.events import ALERTS, ANNOTATIONS
from deploy.observability.objectives import OBJECTIVES_SECTION
from deploy.observability.panels import FILLING, ZERO_IS_GOOD, Panel, Query, quantiles
from deploy.observability.promql import BOARD, share
from deploy.observability.replicas import REPLICAS

RANGE = BOARD.over("$__range")
GENERATE = 'route=~"/v1/(chat/)?completions"'
MISMATCH = 'result="mismatch"'


NOW = Section(
    "Now",
    [
        Panel(
            title="Ready replicas",
            kind="stat",
            queries=[Query(f"sum({BOARD.series('engine_up')} * (1 - {BOARD.series('draining')}))")],
            unit="short",
            thresholds=((None, "red"), (1.0, "green")),
            background=True,
            why="Replicas that take new requests: the engine answers and the server is not draining.",
            width=3,
            height=4,
        ),
        Panel(
            title="Firing alerts",
            kind="stat",
            queries=[Query(f"count({ALERTS}) or vector(0)")],
            unit="short",
            thresholds=((None, "green"), (1.0, "red")),
            background=True,
            why="Lockstep's alerts that fire now. Each has a paragraph in docs/runbook.md.",
            width=3,
            height=4,
        ),
        Panel(
            title="Signs of wrong text",
            kind="stat",
            queries=[
                Query(
                    f"{RANGE.increase('state_commit_missing_total')}"
                    f" + {RANGE.increase('state_audit_total', where=MISMATCH)}"
                    f" + {RANGE.increase('non_finite_rows_total')}"
                )
            ],
            unit="short",
            decimals=0,
            thresholds=ZERO_IS_GOOD,
            instant=True,
            background=True,
            why="Missing state commits, audits that found another state, and rows with NaN, in the time shown. Must "
            "be 0; if not, open Hybrid state.",
            width=3,
            height=4,
        ),
        Panel(
            title="Errors",
            kind="stat",
            queries=[
                Query(
                    share(
                        BOARD.rate("requests_total", where='finish_reason="error"'),
                        BOARD.rate("requests_total"),
                    )
                )
            ],
            unit="percentunit",
            thresholds=((None, "green"), (0.001, "orange"), (0.05, "red")),
            background=True,
            why="Share of the generations that ended with an error.",
            width=3,
            height=4,
        ),
        Panel(
            title="Output",
            kind="stat",
            queries=[Query(BOARD.rate("generation_tokens_total"))],
            unit="suffix: tok/s",
            decimals=0,
            why="Tokens delivered to clients per second.",
            width=3,
            height=4,
        ),
        Panel(
            title="Running",
            kind="stat",
            queries=[Query(BOARD.gauge("requests_running"))],
            unit="short",
            why="Generations in the engine's batches now.",
            width=3,
            height=4,
        ),
        Panel(
            title="Waiting",
            kind="stat",
            queries=[Query(BOARD.gauge("requests_waiting"))],
            unit="short",
            thresholds=((None, "green"), (1.0, "orange"), (20.0, "red")),
            why="Generations that have no place yet. What they wait for is on Scheduler and memory.",
            width=3,
            height=4,
        ),
        Panel(
            title="Fullest pool",
            kind="stat",
            queries=[
                Query(
                    f"{BOARD.gauge('kv_cache_usage_ratio', how='max')} "
                    f"> {BOARD.gauge('state_slot_usage_ratio', how='max')} "
                    f"or {BOARD.gauge('state_slot_usage_ratio', how='max')}"
                )
            ],
            unit="percentunit",
            maximum=1.0,
            thresholds=FILLING,
            why="A request needs KV blocks and a state slot: the fuller pool of the fullest replica limits. The "
            "gateway routes by the same number.",
            width=3,
            height=4,
        ),
    ],
)

TRAFFIC = Section(
    "Traffic",
    [
        Panel(
            title="Generations ended",
            kind="timeseries",
            queries=[Query(BOARD.rate("requests_total", "finish_reason"), "{{finish_reason}}")],
            unit="reqps",
            stack=True,
            why="By how they ended. `abort`: the client left or a deadline passed; `error`: our fault.",
        ),
        Panel(
            title="Refused",
            kind="timeseries",
            queries=[Query(BOARD.rate("requests_rejected_total", "reason"), "{{reason}}")],
            unit="reqps",
            stack=True,
            why="By reason. `queue_full` asks for more replicas; `draining` and `unavailable` after a rollout are "
            "normal for seconds; the others are the client's.",
        ),
        Panel(
            title="HTTP answers",
            kind="timeseries",
            queries=[Query(BOARD.rate("http_requests_total", "code", GENERATE) + " > 0", "{{code}}")],
            unit="reqps",
            stack=True,
            why="Answers of the generating routes by status. A stream that breaks off later was a 200: see "
            "Generations ended.",
        ),
        Panel(
            title="Tokens",
            kind="timeseries",
            queries=[
                Query(BOARD.rate("prompt_tokens_total"), "prompt, asked"),
                Query(BOARD.rate("generation_tokens_total"), "output, delivered"),
            ],
            unit="suffix: tok/s",
            why="Prompt tokens of accepted requests, and tokens delivered.",
            width=12,
        ),
        Panel(
            title="Output by replica",
            kind="timeseries",
            queries=[Query(BOARD.rate("generation_tokens_total", "pod"), "{{pod}}")],
            unit="suffix: tok/s",
            why="A replica far below the others is slow, starved by the router, or stuck.",
            width=12,
        ),
    ],
)

LATENCY = Section(
    "Latency",
    [
        Panel(
            title="Time to first token",
            kind="timeseries",
            queries=quantiles("time_to_first_token_seconds"),
            unit="s",
            thresholds=((None, "green"), (2.5, "red")),
            lines=True,
            why="From submission to the first token: queue and prompt. The line is the objective.",
        ),
        Panel(
            title="Inter-token latency",
            kind="timeseries",
            queries=quantiles("inter_token_latency_seconds"),
            unit="s",
            thresholds=((None, "green"), (0.2, "red")),
            lines=True,
            why="Gap between emissions divided by their tokens: comparable with a server that does not speculate.",
        ),
        Panel(
            title="Whole request",
            kind="timeseries",
            queries=quantiles("e2e_request_latency_seconds"),
            unit="s",
            why="From submission to the last token. Grows with the length of answers.",
        ),
        Panel(
            title="Where a request's time goes",
            kind="timeseries",
            queries=[
                Query(BOARD.mean("request_queue_seconds"), "queue"),
                Query(BOARD.mean("request_prefill_seconds"), "prompt"),
                Query(BOARD.mean("request_decode_seconds"), "generation"),
            ],
            unit="s",
            stack=True,
            why="Means of finished requests. Queue: more replicas or a larger pool. Prompt: long prompts, or cache "
            "hits that are missing. Generation: long answers, large batches, drafts that are rejected.",
        ),
        Panel(
            title="First token, all requests",
            kind="heatmap",
            queries=[
                Query(
                    BOARD.increase("time_to_first_token_seconds", "le", part="_bucket"),
                    "{{le}}",
                )
            ],
            unit="s",
            why="Two bands mean two kinds of requests (cached or not, short or long), which percentiles hide.",
        ),
        Panel(
            title="Time per output token",
            kind="timeseries",
            queries=quantiles("request_time_per_output_token_seconds"),
            unit="s",
            why="Per request: time after the first emission by the tokens after it. What one reader gets on average.",
        ),
    ],
)

OVERVIEW = Board(
    uid="lockstep-overview",
    title="Lockstep / Overview",
    about="Is it up, is it right, is it fast. Objectives over 30 days; then traffic, latency, replicas.",
    sections=(
        NOW,
        OBJECTIVES_SECTION,
        TRAFFIC,
        LATENCY,
        REPLICAS,
    ),
    annotations=ANNOTATIONS,
)
