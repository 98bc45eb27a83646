"""The overview's panels of single replicas: life, numbers side by side, versions, the server process."""

from __future__ import annotations

from deploy.observability.board import Section
from deploy.observability.panels import Panel, Query
from deploy.observability.promql import BOARD, share

REPLICA = "namespace, pod, model_name"

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
            why="The server starts a new engine process when the old one ended or stalled; requests in flight got an "
            "error.",
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
            height=6,
        ),
        Panel(
            title="What runs",
            kind="table",
            queries=[
                Query(f"max by (pod, version, revision, torch, cuda) ({BOARD.series('build_info')})"),
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
                    "revision",
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
            height=4,
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
