"""Speculation: are drafts accepted, what do they cost, what do they bring."""

from __future__ import annotations

from deploy.observability.board import Board, Section
from deploy.observability.events import ANNOTATIONS
from deploy.observability.panels import ZERO_IS_GOOD, Panel, Query, Step, quantiles
from deploy.observability.promql import BOARD, Scope, share

RANGE = BOARD.over("$__range")
LENGTH_STEPS: tuple[Step, ...] = ((None, "red"), (1.1, "orange"), (1.5, "green"))


def length(scope: Scope, by: str = "") -> str:
    """Tokens per verification."""
    return share(scope.rate("spec_emitted_tokens_total", by), scope.rate("spec_drafts_total", by))


def acceptance(scope: Scope, by: str = "") -> str:
    """Share of drafted tokens that are accepted."""
    return share(scope.rate("spec_accepted_tokens_total", by), scope.rate("spec_draft_tokens_total", by))


def by_position(scope: Scope) -> str:
    """The same, by position in the draft."""
    accepted = scope.rate("spec_accepted_tokens_per_pos_total", "position")
    return share(accepted, scope.rate("spec_draft_tokens_per_pos_total", "position"))


def overhead() -> str:
    """Seconds of drafting for each second of verifying."""
    drafting = BOARD.rate("spec_draft_seconds", part="_sum")
    return share(drafting, BOARD.rate("spec_verify_seconds", part="_sum"))


NOW = Section(
    "Now",
    [
        Panel(
            title="Tokens per verification",
            kind="stat",
            queries=[Query(length(BOARD))],
            unit="short",
            decimals=2,
            thresholds=LENGTH_STEPS,
            why="1: no draft is accepted. 1 + k: all are.",
            width=4,
            height=4,
        ),
        Panel(
            title="Drafts accepted",
            kind="stat",
            queries=[Query(acceptance(BOARD))],
            unit="percentunit",
            decimals=0,
            maximum=1.0,
            why="Share of drafted tokens that became output.",
            width=4,
            height=4,
        ),
        Panel(
            title="Output from drafts",
            kind="stat",
            queries=[Query(share(BOARD.rate("spec_accepted_tokens_total"), BOARD.rate("engine_tokens_emitted_total")))],
            unit="percentunit",
            decimals=0,
            maximum=1.0,
            why="Share of all emitted tokens that were drafted. Low with high acceptance: many requests do not "
            "speculate.",
            width=4,
            height=4,
        ),
        Panel(
            title="Speed-up, at most",
            kind="stat",
            queries=[Query(f"{length(BOARD)} / (1 + {overhead()} > 0)")],
            unit="suffix:x",
            decimals=2,
            thresholds=((None, "red"), (1.0, "green")),
            why="Tokens per verification, divided by what drafting adds to a step. Reached when verifying costs as "
            "much as plain decoding; below 1 speculation certainly loses.",
            width=4,
            height=4,
        ),
        Panel(
            title="Draft length",
            kind="stat",
            queries=[Query(BOARD.gauge("spec_num_tokens", "method", how="max"), "{{method}}")],
            unit="short",
            why="Tokens drafted for a request that does not say (--speculative METHOD:K).",
            width=4,
            height=4,
        ),
        Panel(
            title="Drafter failures",
            kind="stat",
            queries=[Query(RANGE.increase("spec_draft_failures_total"))],
            unit="short",
            decimals=0,
            instant=True,
            background=True,
            thresholds=ZERO_IS_GOOD,
            why="In the time shown. A failure costs speed, never an answer; it is a bug all the same.",
            width=4,
            height=4,
        ),
    ],
)

ACCEPTANCE = Section(
    "Acceptance",
    [
        Panel(
            title="Tokens per verification",
            kind="timeseries",
            queries=[Query(length(BOARD, "method"), "{{method}}")],
            unit="short",
            minimum=1.0,
            why="By method. A fall without a new release: other prompts, higher temperature, or a drafter whose state "
            "is wrong (Hybrid state shows audits).",
        ),
        Panel(
            title="Accepted, by position",
            kind="timeseries",
            queries=[Query(by_position(BOARD), "{{position}}")],
            unit="percentunit",
            maximum=1.0,
            why="Of the tokens drafted at a position (0 first), the share accepted. Falls from left to right; where "
            "it is low, a smaller k pays.",
        ),
        Panel(
            title="Accepted, by position, in the time shown",
            kind="bargauge",
            queries=[Query(by_position(RANGE), "{{position}}")],
            unit="percentunit",
            maximum=1.0,
            why="The same over the whole time shown.",
        ),
        Panel(
            title="Tokens per verification, by replica",
            kind="timeseries",
            queries=[Query(length(BOARD, "pod"), "{{pod}}")],
            unit="short",
            minimum=1.0,
            why="Replicas with the same traffic draft equally well; one that does not is worth a look.",
        ),
        Panel(
            title="Accepted per verification",
            kind="heatmap",
            queries=[Query(BOARD.increase("spec_accepted_length", "le", part="_bucket"), "{{le}}")],
            unit="short",
            why="Verifications by how many drafted tokens they accepted. Weight at both ends: some text drafts well "
            "and some not at all, and a draft length per request would help.",
        ),
        Panel(
            title="Drafted tokens",
            kind="timeseries",
            queries=[
                Query(BOARD.rate("spec_accepted_tokens_total"), "accepted"),
                Query(
                    f"{BOARD.rate('spec_draft_tokens_total')} - {BOARD.rate('spec_accepted_tokens_total')}", "rejected"
                ),
            ],
            unit="suffix: tok/s",
            stack=True,
            why="Rejected tokens are work for nothing: worth it while the machine has room.",
        ),
    ],
)

COST = Section(
    "Cost and gain",
    [
        Panel(
            title="Drafting, per step",
            kind="timeseries",
            queries=quantiles("spec_draft_seconds"),
            unit="s",
            why="Bringing the drafter's state up to date, and drafting.",
        ),
        Panel(
            title="Verifying, per step",
            kind="timeseries",
            queries=quantiles("spec_verify_seconds"),
            unit="s",
            why="Forward and judgement of steps that verify drafts.",
        ),
        Panel(
            title="Share of the step that speculation takes",
            kind="timeseries",
            queries=[
                Query(
                    share(
                        BOARD.rate("scheduler_step_seconds_total", where='phase=~"extend|propose"'),
                        BOARD.rate("scheduler_step_seconds_total"),
                    ),
                    "extend, propose",
                ),
            ],
            unit="percentunit",
            maximum=1.0,
            why="Of all time in steps. Without speculation this is 0.",
        ),
        Panel(
            title="Speed-up, at most",
            kind="timeseries",
            queries=[Query(f"{length(BOARD)} / (1 + {overhead()} > 0)", "tokens per step, drafting paid")],
            unit="suffix:x",
            decimals=2,
            thresholds=((None, "red"), (1.0, "green")),
            lines=True,
            why="Tokens per verification, divided by what drafting adds to a step.",
        ),
        Panel(
            title="Per token, and as a reader sees it",
            kind="timeseries",
            queries=[
                Query(BOARD.quantile(0.5, "inter_token_latency_seconds"), "per token p50"),
                Query(BOARD.quantile(0.95, "inter_token_latency_seconds"), "per token p95"),
                Query(BOARD.quantile(0.5, "emission_gap_seconds"), "gap p50"),
                Query(BOARD.quantile(0.95, "emission_gap_seconds"), "gap p95"),
            ],
            unit="s",
            why="A verification emits several tokens at once. The gap is the pause a reader sees; per token it is "
            "shared by the tokens that follow it.",
        ),
        Panel(
            title="Drafter failures",
            kind="timeseries",
            queries=[Query(BOARD.rate("spec_draft_failures_total", "pod"), "{{pod}}")],
            unit="ops",
            why="The log says why, at the 1st, 2nd, 4th, 8th failure.",
        ),
    ],
)

SPECULATION = Board(
    uid="lockstep-speculation",
    title="Lockstep / Speculation",
    about="Are drafts accepted, what do they cost, what do they bring. Empty when the server does not speculate.",
    sections=(NOW, ACCEPTANCE, COST),
    annotations=ANNOTATIONS,
)
