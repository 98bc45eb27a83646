"""Scheduler and memory: what requests wait for, what a step costs, which pool is full."""

from __future__ import annotations

from deploy.observability.board import Board, Section
from deploy.observability.events import ANNOTATIONS
from deploy.observability.panels import FILLING, Panel, Query, quantiles
from deploy.observability.promql import BOARD

QUEUE = Section(
    "Queue",
    [
        Panel(
            title="Waiting",
            kind="timeseries",
            queries=[Query(BOARD.gauge("requests_waiting", "reason"), "{{reason}}")],
            unit="short",
            stack=True,
            why="By what they wait for. `capacity_seqs`: --max-num-seqs is reached. `capacity_kv`: no KV blocks. "
            "`capacity_state`: no state slot. `deferred`: the step has no tokens to spare (--max-num-batched-tokens).",
            width=6,
        ),
        Panel(
            title="Waiting prompt tokens",
            kind="timeseries",
            queries=[Query(BOARD.gauge("requests_waiting_tokens", "pod"), "{{pod}}")],
            unit="suffix: tok",
            why="The work that waits, by replica: ten long prompts are more than a hundred short ones. Bounded by "
            "--max-queued-tokens.",
            width=6,
        ),
        Panel(
            title="Running",
            kind="timeseries",
            queries=[Query(BOARD.gauge("requests_running", "pod"), "{{pod}}")],
            unit="short",
            why="Generations in the batches, by replica.",
            width=6,
        ),
        Panel(
            title="Time in the queue",
            kind="timeseries",
            queries=quantiles("request_queue_seconds"),
            unit="s",
            why="From submission until first scheduled, of requests that ended.",
            width=6,
        ),
        Panel(
            title="Preemptions",
            kind="timeseries",
            queries=[Query(BOARD.rate("request_preemptions_total", "reason"), "{{reason}}")],
            unit="ops",
            stack=True,
            why="Running generations set back for room, by the pool that lacked it. They go on later, from their last "
            "checkpoint or from the start: work done twice.",
        ),
        Panel(
            title="Work that was not delivered",
            kind="timeseries",
            queries=[
                Query(BOARD.rate("engine_tokens_discarded_total"), "emitted, then taken back"),
                Query(BOARD.rate("preemption_resumed_tokens_total"), "saved by a checkpoint after preemption"),
            ],
            unit="suffix: tok/s",
            why="Tokens emitted after their client left or a stop string ended them; and tokens that preempted "
            "generations did not have to compute again.",
        ),
        Panel(
            title="Prompt tokens",
            kind="timeseries",
            queries=[
                Query(BOARD.rate("prompt_tokens_total"), "asked"),
                Query(BOARD.rate("prompt_tokens_computed_total"), "computed"),
            ],
            unit="suffix: tok/s",
            why="Computed below asked: the prefix cache saves the difference. Above: preemption computes again.",
        ),
    ],
)

STEPS = Section(
    "Steps",
    [
        Panel(
            title="Steps",
            kind="timeseries",
            queries=[Query(BOARD.rate("scheduler_steps_total", "kind"), "{{kind}}")],
            unit="ops",
            stack=True,
            why="By what they compute. `mixed` steps hold prompt chunks and generations.",
        ),
        Panel(
            title="Step duration",
            kind="timeseries",
            queries=quantiles("scheduler_step_duration_seconds"),
            unit="s",
            why="One step, from planning to settled: the least time between two emissions. Long steps are prompt "
            "chunks (--max-num-batched-tokens) or large batches.",
        ),
        Panel(
            title="Where the engine's time goes",
            kind="timeseries",
            queries=[Query(BOARD.rate("scheduler_step_seconds_total", "phase", how="avg"), "{{phase}}")],
            unit="percentunit",
            stack=True,
            why="Share of the time, per replica. The rest to 100 % is idle. `forward` should be most of it.",
        ),
        Panel(
            title="Batch size",
            kind="timeseries",
            queries=[
                Query(BOARD.mean("scheduler_batch_size"), "mean"),
                Query(BOARD.quantile(0.95, "scheduler_batch_size"), "p95"),
            ],
            unit="short",
            why="Requests with a row in a step. At --max-num-seqs with a queue: more replicas.",
        ),
        Panel(
            title="Tokens per step",
            kind="timeseries",
            queries=[
                Query(BOARD.mean("scheduler_step_tokens"), "mean"),
                Query(BOARD.quantile(0.95, "scheduler_step_tokens"), "p95"),
            ],
            unit="short",
            why="Tokens fed in a step, drafts included.",
        ),
        Panel(
            title="Age of the last step",
            kind="timeseries",
            queries=[
                Query(f"max by (pod) (time() - {BOARD.series('scheduler_last_step_timestamp_seconds')})", "{{pod}}")
            ],
            unit="s",
            minimum=None,
            thresholds=((None, "green"), (60.0, "red")),
            lines=True,
            why="Grows while there is nothing to do, too: only with requests running does it mean a stall. Clocks of "
            "Prometheus and the replica are compared.",
        ),
        Panel(
            title="Waits for a step to settle",
            kind="timeseries",
            queries=[Query(BOARD.rate("scheduler_settle_waits_total"), "rows")],
            unit="ops",
            why="Rows not planned because the step before had not settled (--settle-lag 1 with a proposer that needs "
            "the host's tokens).",
        ),
        Panel(
            title="Engine output",
            kind="timeseries",
            queries=[
                Query(BOARD.rate("engine_tokens_emitted_total"), "emitted"),
                Query(BOARD.rate("generation_tokens_total"), "delivered"),
            ],
            unit="suffix: tok/s",
            why="The engine may run ahead of its clients; a lasting gap is output nobody reads.",
        ),
        Panel(
            title="Step duration, all steps",
            kind="heatmap",
            queries=[Query(BOARD.increase("scheduler_step_duration_seconds", "le", part="_bucket"), "{{le}}")],
            unit="s",
            why="Steps by how long they took.",
        ),
    ],
)

MEMORY = Section(
    "Memory",
    [
        Panel(
            title="Which pool limits",
            kind="timeseries",
            queries=[
                Query(BOARD.gauge("kv_cache_usage_ratio", how="max"), "KV blocks"),
                Query(BOARD.gauge("state_slot_usage_ratio", how="max"), "state slots"),
            ],
            unit="percentunit",
            maximum=1.0,
            thresholds=FILLING,
            lines=True,
            why="Of the fullest replica. A hybrid model needs both: many short requests use up state slots, few long "
            "ones KV blocks.",
        ),
        Panel(
            title="KV blocks",
            kind="timeseries",
            queries=[Query(BOARD.gauge("kv_blocks", "state"), "{{state}}")],
            unit="short",
            stack=True,
            why="`cached` blocks are given up when a request needs room.",
        ),
        Panel(
            title="State slots",
            kind="timeseries",
            queries=[Query(BOARD.gauge("state_slots", "state"), "{{state}}")],
            unit="short",
            stack=True,
            why="One per running request. Checkpoints have slots of their own: see Hybrid state.",
        ),
        Panel(
            title="Memory by purpose",
            kind="timeseries",
            queries=[Query(BOARD.gauge("memory_bytes", "kind"), "{{kind}}")],
            unit="bytes",
            stack=True,
            why="What the engine allocated at start. `candidates`: states of drafted tokens until the commit. "
            "`draft`: the drafter's own store.",
        ),
        Panel(
            title="Cached KV blocks given up",
            kind="timeseries",
            queries=[Query(BOARD.rate("kv_evicted_blocks_total"), "blocks")],
            unit="ops",
            why="Room for running requests comes first. Much of it with a low hit ratio: the cache is too small.",
        ),
        Panel(
            title="Capacities",
            kind="table",
            queries=[
                Query(
                    "max by (pod, block_size, num_blocks, state_slots, dtype, state_dtype) "
                    f"({BOARD.series('cache_config_info')})"
                )
            ],
            unit="short",
            columns=(
                ("pod", "pod"),
                ("block_size", "block size"),
                ("num_blocks", "KV blocks"),
                ("state_slots", "state slots"),
                ("dtype", "dtype"),
                ("state_dtype", "state dtype"),
            ),
            why="What every replica has. `block_size` in tokens.",
        ),
    ],
)

REQUESTS = Section(
    "Requests",
    [
        Panel(
            title="Prompt length",
            kind="timeseries",
            queries=quantiles("request_prompt_tokens"),
            unit="suffix: tok",
            why="Tokens of the prompt of accepted requests.",
        ),
        Panel(
            title="Answer length",
            kind="timeseries",
            queries=quantiles("request_generation_tokens"),
            unit="suffix: tok",
            why="Tokens delivered per generation.",
        ),
        Panel(
            title="Token limit",
            kind="timeseries",
            queries=quantiles("request_max_tokens"),
            unit="suffix: tok",
            why="What requests allow. Answers that reach it end with `length`.",
        ),
        Panel(
            title="Computing the prompt",
            kind="timeseries",
            queries=quantiles("request_prefill_seconds"),
            unit="s",
            why="From first scheduled to the first token.",
        ),
        Panel(
            title="Generating",
            kind="timeseries",
            queries=quantiles("request_decode_seconds"),
            unit="s",
            why="From the first token to the last.",
        ),
        Panel(
            title="HTTP requests in progress",
            kind="timeseries",
            queries=[Query(BOARD.gauge("http_requests_in_progress", "pod"), "{{pod}}")],
            unit="short",
            why="Connections that are being answered, streams included.",
        ),
        Panel(
            title="HTTP duration, p95",
            kind="timeseries",
            queries=[Query(BOARD.quantile(0.95, "http_request_duration_seconds", "route"), "{{route}}")],
            unit="s",
            log=True,
            minimum=None,
            why="From headers to the end of the response, by route. /metrics and the probes must stay at milliseconds "
            "whatever the load.",
            width=16,
        ),
        Panel(
            title="Start-up",
            kind="bargauge",
            queries=[Query(BOARD.gauge("startup_seconds", "phase", how="max"), "{{phase}}")],
            unit="s",
            why="Of the slowest replica. `total` is from process start to ready: the time scaling out takes.",
        ),
    ],
)

SCHEDULER = Board(
    uid="lockstep-scheduler",
    title="Lockstep / Scheduler and memory",
    about="What requests wait for, what a step costs, which pool is full.",
    sections=(QUEUE, STEPS, MEMORY, REQUESTS),
    annotations=ANNOTATIONS,
)
