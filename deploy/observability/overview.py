"""Overview: is it up, is it right, is it fast, and where to look next."""

from __future__ import annotations

from deploy.observability.board import Board, Section
from deploy.observability.events import ALERTS, ANNOTATIONS
from deploy.observability.panels import FILLING, ZERO_IS_GOOD, Panel, Query, Step, quantiles
from deploy.observability.promql import BOARD, share
from deploy.observability.slo import OBJECTIVES, PERIOD, Objective

RANGE = BOARD.over("$__range")
GENERATE = 'route=~"/v1/(chat/)?completions"'
MISMATCH = 'result="mismatch"'
REPLICA = "namespace, pod, model_name"


def attainment(objective: Objective) -> Panel:
    """The share of good events in the time shown."""
    steps: tuple[Step, ...] = (
        (None, "red"),
        (round(1 - 2 * objective.budget, 9), "orange"),
        (objective.target, "green"),
    )
    return Panel(
        title=f"{objective.title}: good",
        kind="stat",
        queries=[Query(objective.good_ratio(BOARD, "$__range", by=""))],
        unit="percentunit",
        decimals=2,
        maximum=1.0,
        thresholds=steps,
        instant=True,
        why=f"Share of good events in the time shown; the objective is {objective.target:.4g}. Good are "
        f"{objective.says}.",
        width=4,
        height=4,
    )


def budget(objective: Objective) -> Panel:
    """What is left of the month's budget."""
    return Panel(
        title=f"{objective.title}: budget left",
        kind="stat",
        queries=[Query(f"1 - ({objective.bad_ratio(BOARD, PERIOD, by='')}) / {objective.budget:g}")],
        unit="percentunit",
        decimals=0,
        minimum=None,
        thresholds=((None, "red"), (0.0, "orange"), (0.25, "green")),
        instant=True,
        why=f"Of the {objective.budget:.4g} of all events that may be bad in {PERIOD}, the share not yet used up. "
        "Below 0 the objective is missed.",
        width=4,
        height=4,
    )


def burn(objective: Objective) -> Panel:
    """How fast the budget burns."""
    return Panel(
        title=f"{objective.title}: burn rate",
        kind="timeseries",
        queries=[
            Query(f"({objective.bad_ratio(BOARD, window, by='')}) / {objective.budget:g}", window)
            for window in ("5m", "1h", "6h")
        ],
        unit="suffix:x",
        decimals=1,
        thresholds=((None, "green"), (1.0, "orange"), (6.0, "red")),
        lines=True,
        why=f"1 uses up the budget in exactly {PERIOD}. The fast alert fires at 14.4 over one hour or 6 over six "
        "hours, "
        "the slow one at 3 over a day or 1 over three.",
        height=6,
    )


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
            why="Missing state commits, audits that found another state, and rows with NaN, in the time shown. "
            "Must be 0; if not, open Hybrid state.",
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
            "gateway "
            "routes by the same number.",
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
            "normal "
            "for seconds; the others are the client's.",
        ),
        Panel(
            title="HTTP answers",
            kind="timeseries",
            queries=[Query(BOARD.rate("http_requests_total", "code", GENERATE) + " > 0", "{{code}}")],
            unit="reqps",
            stack=True,
            why="Answers of the generating routes by status. A stream that breaks off later was a 200: see Generations "
            "ended.",
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
            "hits "
            "that are missing. Generation: long answers, large batches, drafts that are rejected.",
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

REPLICAS = Section(
    "Replicas",
    [
        Panel(
            title="Life",
            kind="state-timeline",
            queries=[
                Query(
                    f"max by (pod) ({BOARD.series('engine_up')} + 2 * {BOARD.series('draining')})",
                    "{{pod}}",
                )
            ],
            unit="short",
            values=(
                (0.0, "not ready", "red"),
                (1.0, "ready", "green"),
                (2.0, "draining, engine gone", "purple"),
                (3.0, "draining", "orange"),
            ),
            why="Loading, failed or silent is `not ready`. A gap: not scraped.",
            width=12,
            height=6,
        ),
        Panel(
            title="Engine restarts",
            kind="timeseries",
            queries=[Query(BOARD.increase("engine_restarts_total", "pod, reason"), "{{pod}} {{reason}}")],
            unit="short",
            bars=True,
            why="The server starts a new engine process when the old one ended or stalled; requests in flight got "
            "an error.",
            width=12,
            height=6,
        ),
        Panel(
            title="Replicas",
            kind="table",
            queries=[
                Query(BOARD.gauge("requests_running", REPLICA)),
                Query(BOARD.gauge("requests_waiting", REPLICA)),
                Query(BOARD.gauge("kv_cache_usage_ratio", REPLICA, how="max")),
                Query(BOARD.gauge("state_slot_usage_ratio", REPLICA, how="max")),
                Query(BOARD.rate("generation_tokens_total", REPLICA)),
                Query(BOARD.quantile(0.95, "time_to_first_token_seconds", REPLICA)),
                Query(BOARD.quantile(0.95, "inter_token_latency_seconds", REPLICA)),
            ],
            unit="short",
            columns=(
                ("namespace", "namespace"),
                ("pod", "pod"),
                ("model_name", "model"),
                ("Value #A", "running"),
                ("Value #B", "waiting"),
                ("Value #C", "KV"),
                ("Value #D", "state slots"),
                ("Value #E", "output"),
                ("Value #F", "first token p95"),
                ("Value #G", "token p95"),
            ),
            units=(
                ("KV", "percentunit"),
                ("state slots", "percentunit"),
                ("output", "suffix: tok/s"),
                ("first token p95", "s"),
                ("token p95", "s"),
            ),
            decimals=2,
            why="One line per replica: the odd one out is the one to look at.",
            width=24,
            height=7,
        ),
        Panel(
            title="What runs",
            kind="table",
            queries=[
                Query(f"max by (pod, version, python, torch, cuda) ({BOARD.series('build_info')})"),
                Query(
                    "max by (pod, prefill, decode, verify, speculative, dtype, device) "
                    f"({BOARD.series('backend_info')})"
                ),
            ],
            unit="short",
            columns=tuple(
                (name, name)
                for name in (
                    "pod",
                    "version",
                    "python",
                    "torch",
                    "cuda",
                    "prefill",
                    "decode",
                    "verify",
                    "speculative",
                    "dtype",
                    "device",
                )
            ),
            why="Versions and resolved choices of every replica. They should be the same.",
            width=24,
            height=5,
        ),
        Panel(
            title="CPU of the server process",
            kind="timeseries",
            queries=[Query(BOARD.rate("process_cpu_seconds_total", "pod"), "{{pod}}")],
            unit="percentunit",
            why="1 is one core: the server's own limit, whatever the engine could do. The engine is another process.",
        ),
        Panel(
            title="Memory of the server process",
            kind="timeseries",
            queries=[Query(BOARD.gauge("process_resident_memory_bytes", "pod"), "{{pod}}")],
            unit="bytes",
            why="Resident memory. Steady growth is a leak.",
        ),
        Panel(
            title="Open files of the server process",
            kind="timeseries",
            queries=[
                Query(share(BOARD.gauge("process_open_fds", "pod"), BOARD.gauge("process_max_fds", "pod")), "{{pod}}")
            ],
            unit="percentunit",
            thresholds=((None, "green"), (0.8, "red")),
            lines=True,
            why="Share of the allowed file descriptors: every connection takes one.",
        ),
    ],
)

OVERVIEW = Board(
    uid="lockstep-overview",
    title="Lockstep / Overview",
    about="Is it up, is it right, is it fast. Objectives over 30 days; then traffic, latency, replicas.",
    sections=(
        NOW,
        Section(
            "Objectives",
            [panel for objective in OBJECTIVES for panel in (attainment(objective), budget(objective))]
            + [burn(objective) for objective in OBJECTIVES],
        ),
        TRAFFIC,
        LATENCY,
        REPLICAS,
    ),
    annotations=ANNOTATIONS,
)
