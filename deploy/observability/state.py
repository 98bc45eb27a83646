"""Hybrid state: is it committed everywhere, is it right, and what do checkpoints save."""

from __future__ import annotations

from deploy.observability.board import Board, Section
from deploy.observability.events import ANNOTATIONS
from deploy.observability.panels import ZERO_IS_GOOD, Panel, Query, quantiles
from deploy.observability.promql import BOARD, share

RANGE = BOARD.over("$__range")


def must_be_zero(title: str, name: str, why: str, where: str = "") -> Panel:
    """A counter that must not move."""
    return Panel(
        title=title,
        kind="stat",
        queries=[Query(RANGE.increase(name, where=where))],
        unit="short",
        decimals=0,
        instant=True,
        background=True,
        thresholds=ZERO_IS_GOOD,
        why=f"{why} In the time shown; must be 0.",
        width=3,
        height=4,
    )


ZERO = Section(
    "Must be 0",
    [
        must_be_zero(
            "Commits missing",
            "state_commit_missing_total",
            "Steps whose backend committed nothing: KV and recurrent state part ways, and text goes wrong silently.",
        ),
        must_be_zero(
            "Audits that differ",
            "state_audit_total",
            "A running request's state was recomputed from nothing and is another one.",
            'result="mismatch"',
        ),
        must_be_zero(
            "Rows not finite", "non_finite_rows_total", "The model computed NaN or infinity; the request ended."
        ),
        must_be_zero(
            "Steps rolled back", "state_aborted_steps_total", "A step raised; its requests ended with an error."
        ),
        must_be_zero(
            "Requests stuck", "requests_stuck_total", "A request could not go on although it ran alone, and was ended."
        ),
        Panel(
            title="Audits done",
            kind="stat",
            queries=[Query(RANGE.increase("state_audit_total", where='result="ok"'))],
            unit="short",
            decimals=0,
            instant=True,
            thresholds=((None, "orange"), (1.0, "green")),
            why="States that were recomputed and found right, in the time shown. 0: audits are off "
            "(--audit-interval), or there is no traffic, and nobody checks.",
            width=4,
            height=4,
        ),
        Panel(
            title="Largest difference",
            kind="stat",
            queries=[Query(BOARD.gauge("state_audit_max_error_ratio", how="max"))],
            unit="sci",
            thresholds=((None, "green"), (1e-4, "orange"), (1e-3, "red")),
            why="Of any audit since start, relative to the largest value of its tensor. Rounding is about 1e-6; at "
            "1e-3 a float32 audit fails.",
            width=5,
            height=4,
        ),
    ],
)

COMMITS = Section(
    "Commits",
    [
        Panel(
            title="Verified rows, by outcome",
            kind="timeseries",
            queries=[Query(BOARD.rate("state_commits_total", "outcome"), "{{outcome}}")],
            unit="ops",
            stack=True,
            why="`full`: all drafts kept. `partial`: some, the case in which a state has to stop in the middle. "
            "`bonus_only`: none.",
        ),
        Panel(
            title="Two counts of the same thing",
            kind="timeseries",
            queries=[
                Query(BOARD.rate("state_commits_total"), "the pool: states committed"),
                Query(BOARD.rate("spec_drafts_total"), "the scheduler: drafts judged"),
            ],
            unit="ops",
            why="The lines lie on each other but for requests that were taken back meanwhile. A gap that lasts: a "
            "path does not commit.",
        ),
        Panel(
            title="Rows committed, by kind",
            kind="timeseries",
            queries=[Query(BOARD.rate("state_commit_rows_total", "kind"), "{{kind}}")],
            unit="ops",
            stack=True,
            why="Every row of every step commits, whatever it computes.",
        ),
        Panel(
            title="Commit of a step",
            kind="timeseries",
            queries=quantiles("state_commit_seconds"),
            unit="s",
            why="As the host sees it.",
        ),
        Panel(
            title="Steps",
            kind="timeseries",
            queries=[
                Query(BOARD.rate("state_commit_steps_total"), "committed"),
                Query(BOARD.rate("state_aborted_steps_total"), "rolled back"),
            ],
            unit="ops",
            why="Committed steps include those of audits. A rolled back step left committed state untouched.",
        ),
        Panel(
            title="States written",
            kind="timeseries",
            queries=[Query(BOARD.rate("state_copies_total", "kind"), "{{kind}}")],
            unit="ops",
            stack=True,
            why="`commit` by the snapshot strategy, `fold` by replay, the others by the prefix cache.",
        ),
        Panel(
            title="Bytes of states written",
            kind="timeseries",
            queries=[Query(BOARD.rate("state_copy_bytes_total"), "bytes")],
            unit="Bps",
            why="What keeping state costs in memory traffic.",
        ),
        Panel(
            title="Audits",
            kind="timeseries",
            queries=[Query(BOARD.rate("state_audit_total", "result"), "{{result}}")],
            unit="ops",
            stack=True,
            why="`skipped`: the pool had no room for a second copy of the state.",
        ),
        Panel(
            title="Largest difference, by replica",
            kind="timeseries",
            queries=[Query(BOARD.gauge("state_audit_max_error_ratio", "pod", how="max"), "{{pod}}")],
            unit="sci",
            thresholds=((None, "green"), (1e-3, "red")),
            lines=True,
            why="A step upwards on one replica alone points to its hardware.",
        ),
    ],
)

HOLDS = Section(
    "Who holds what",
    [
        Panel(
            title="Slots in use and requests running",
            kind="timeseries",
            queries=[
                Query(BOARD.gauge("state_slots", where='state="used"'), "slots in use"),
                Query(BOARD.gauge("requests_running"), "running"),
            ],
            unit="short",
            why="One slot each; audits take one for moments. Slots that stay in use while nothing runs have leaked.",
            width=6,
        ),
        Panel(
            title="KV blocks per running request",
            kind="timeseries",
            queries=[
                Query(share(BOARD.gauge("kv_blocks", where='state="used"'), BOARD.gauge("requests_running")), "blocks")
            ],
            unit="short",
            why="Grows with the length of sequences.",
            width=6,
        ),
        Panel(
            title="Slots and blocks there are",
            kind="timeseries",
            queries=[
                Query(BOARD.gauge("state_slots"), "state slots"),
                Query(BOARD.gauge("kv_blocks"), "KV blocks"),
            ],
            unit="short",
            why="Used, free and cached together: constant while the same replicas are up.",
            width=6,
        ),
        Panel(
            title="Entries of tables",
            kind="timeseries",
            queries=[
                Query(BOARD.gauge("engine_registry_entries", "registry"), "engine: {{registry}}"),
                Query(BOARD.gauge("server_registry_entries", "registry"), "server: {{registry}}"),
            ],
            unit="short",
            why="Tables that know requests. They follow the load; what stays after it, or grows day by day, leaks.",
            width=6,
        ),
    ],
)

PREFIX = Section(
    "Prefix cache and checkpoints",
    [
        Panel(
            title="Prompt tokens saved",
            kind="timeseries",
            queries=[
                Query(
                    share(BOARD.rate("prefix_cache_hit_tokens_total"), BOARD.rate("prefix_cache_query_tokens_total")),
                    "hit",
                ),
                Query(
                    share(BOARD.rate("prefix_cache_lost_tokens_total"), BOARD.rate("prefix_cache_query_tokens_total")),
                    "lost",
                ),
            ],
            unit="percentunit",
            maximum=1.0,
            why="Of the prompt tokens looked up. `lost`: their KV was cached, but no state checkpoint, so they were "
            "computed again. Only a hybrid model loses like this.",
        ),
        Panel(
            title="Hits, by where they lay",
            kind="timeseries",
            queries=[Query(BOARD.rate("prefix_cache_hit_tokens_total", "source"), "{{source}}")],
            unit="suffix: tok/s",
            stack=True,
            why="Prompt tokens that a checkpoint covered.",
        ),
        Panel(
            title="Losses, by reason",
            kind="timeseries",
            queries=[Query(BOARD.rate("prefix_cache_lost_tokens_total", "reason"), "{{reason}}")],
            unit="suffix: tok/s",
            stack=True,
            why="`no_checkpoint`: none was taken there; a smaller --checkpoint-interval helps. `evicted`: there was "
            "one; a larger --num-checkpoints helps.",
        ),
        Panel(
            title="Checkpoints held",
            kind="timeseries",
            queries=[
                Query(BOARD.gauge("state_checkpoints", "tier"), "{{tier}}"),
                Query(BOARD.gauge("state_checkpoints_capacity", "tier"), "{{tier}}, at most"),
            ],
            unit="short",
            why="And how many there is room for.",
        ),
        Panel(
            title="Checkpoints taken",
            kind="timeseries",
            queries=[Query(BOARD.rate("state_checkpoints_written_total", "trigger"), "{{trigger}}")],
            unit="ops",
            stack=True,
            why="By occasion: end of the prompt, every interval, where requests were seen to part, end of the "
            "request, preemption.",
        ),
        Panel(
            title="Checkpoints given up",
            kind="timeseries",
            queries=[Query(BOARD.rate("state_checkpoint_evictions_total"), "evicted")],
            unit="ops",
            why="For room. As many as are taken: each lives too short to be found.",
        ),
    ],
)

STATE = Board(
    uid="lockstep-state",
    title="Lockstep / Hybrid state",
    about="KV cache and recurrent state advance together on every path: here one can check. Then what checkpoints "
    "save.",
    sections=(ZERO, COMMITS, HOLDS, PREFIX),
    annotations=ANNOTATIONS,
)
