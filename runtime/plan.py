"""What the scheduler deals in: sequences, leases, the batch it plans, the outcome it is told. No tensors, no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from runtime.api import FinishReason, Request, StateError, TokenLogprobs
from runtime.state.host_tier import HostCheckpoint
from runtime.state.prefix import Chain, Checkpoint


class RowKind(enum.Enum):
    """What a row of a step is. Said by the scheduler, never guessed from a length.

    PREFILL computes known tokens (prompt, chunk, resume). VERIFY belongs to a request that speculates, also when it has
    no drafts at the moment. DECODE belongs to one that does not. PADDING is added by the runner for fixed shapes.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    PADDING = "padding"


@dataclass(slots=True, eq=False)
class Restore:
    """What a new lease's first step copies from the cache, before anything is computed.

    The state of `source`; then the KV of its tail from device block `tail` (None: of host blocks) to the lease's block
    number `index`, or `loads`: (host block, number of the lease's block) of what lies in host memory. `pinned` until
    the first step begins: so long, nothing of it is evicted.
    """

    source: Checkpoint | HostCheckpoint
    index: int
    tail: int | None
    loads: tuple[tuple[int, int], ...] = ()
    pinned: bool = True


@dataclass(frozen=True, slots=True)
class Heritage:
    """What an ending lease may leave to the prefix cache: the state of `tokens`, or of a beginning of them."""

    chain: Chain
    tokens: tuple[int, ...]
    trigger: str


@dataclass(slots=True, eq=False)
class StateLease:
    """One request's hold on a state slot and KV blocks. Owned by the ledger; everybody else reads.

    `origin`: tokens whose state was restored from the prefix cache when the lease began, by `restore`; `heritage`: what
    it leaves there. `computed`: tokens whose state is committed (settled). `bound`: `computed` plus all tokens fed by
    steps that are not settled yet, an upper bound of the length on the device. `in_flight`: number of such steps.
    `serial` never repeats, so an outcome that arrives after the lease ended is recognised and dropped.
    """

    serial: int
    owner: str
    slot: int
    blocks: list[int]
    origin: int = 0
    restore: Restore | None = None
    heritage: Heritage | None = None
    computed: int = 0
    bound: int = 0
    in_flight: int = 0
    closing: bool = False
    closed: bool = False


@dataclass(slots=True, eq=False)
class Text:
    """A sequence as the prefix cache sees it: its digests, the prompt tokens that were cached when it was first
    admitted, where other texts were seen to part from it (0: nowhere), and the checkpoints it made and went on from.
    """

    chain: Chain
    cached: int = 0
    fork_at: int = 0
    made: list[Checkpoint] = field(default_factory=list)
    sources: list[Checkpoint | HostCheckpoint] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in flight. Written by the scheduler only.

    `tokens`: prompt and settled output. `lease` is None while waiting. `planned`: how many of `tokens` steps already
    planned will have computed (exact while prefilling). `drafts`: host-side drafts for the next step (proposers that
    run on the host). `num_drafts`: drafts per verification for this request, 0 when it does not speculate.
    `pending`: planned rows that emit and are not settled; each adds at least one token. `asked`: drafts that the last
    such row asked the proposer for. `last_step`: serial of the last batch with a row of this sequence. `rank`: who goes
    first, smallest first; unique, and fixed from arrival to end (see Scheduler). `text` is None without a prefix cache.

    `request.sampling.max_tokens` is already cut to what the context can hold, so `max_total` is the one length limit.
    """

    request: Request
    tokens: list[int]
    num_drafts: int
    arrived: float
    lease: StateLease | None = None
    planned: int = 0
    decoding: bool = False
    drafts: tuple[int, ...] = ()
    drafted: int = 0
    accepted: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    cancelled: bool = False
    finished: bool = False
    pending: int = 0
    asked: int = 0
    last_step: int = 0
    rank: tuple[int, int] = (0, 0)
    text: Text | None = None

    @property
    def max_total(self) -> int:
        """Tokens of prompt and output at which the request ends with LENGTH; `judge` cuts there."""
        return self.prompt_len + self.request.sampling.max_tokens

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        """Number of settled generated tokens."""
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Mark:
    """A place inside a row whose state is kept: after `offset` of its fed tokens, or (0) after the last kept one.

    `row` is the claimed checkpoint row it is written to; `trigger` says why, of `CHECKPOINT_TRIGGERS`.
    """

    offset: int
    row: int
    trigger: str


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """What one sequence feeds this step.

    PREFILL: `tokens` are fed, from position `start`; `emits` says that the last of them is the last known token, so
    the row samples one token; `next_token` is the known token behind the chunk, -1 when it is to be sampled.
    DECODE and VERIFY feed `[last emitted token, d1..dk]` with k = `num_drafts`; the emitted token comes from the
    device, as do drafts of a device proposer (`drafts` is None); a host proposer's drafts are in `drafts`.
    `want_drafts`: how many drafts to propose after this step. `lease` is the hold at planning time. `marks`, by offset:
    states to keep as checkpoints.
    """

    seq: Sequence
    lease: StateLease
    kind: RowKind
    num_fed: int
    emits: bool
    tokens: tuple[int, ...] = ()
    start: int = -1
    next_token: int = -1
    num_drafts: int = 0
    drafts: tuple[int, ...] | None = None
    want_drafts: int = 0
    marks: tuple[Mark, ...] = ()

    @property
    def live(self) -> bool:
        """Whether the request goes on and still holds the lease the row was planned with."""
        return not self.seq.finished and self.seq.lease is self.lease


@dataclass(slots=True, eq=False)
class Pass:
    """A step while it is planned: tokens it may still feed, its rows, and whether a running sequence lacked blocks."""

    serial: int
    budget: int
    rows: dict[RowKind, list[Row]] = field(
        default_factory=lambda: {RowKind.PREFILL: [], RowKind.DECODE: [], RowKind.VERIFY: []}
    )
    short: bool = False

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """In the order of a batch."""
        return tuple(row for kind in self.rows.values() for row in kind)

    def add(self, row: Row) -> None:
        """Plans a row."""
        self.budget -= row.num_fed
        self.rows[row.kind].append(row)
        row.seq.last_step = self.serial


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step: rows in the order PREFILL, DECODE, VERIFY, so that rows of one kind are neighbours."""

    serial: int
    rows: tuple[Row, ...]

    @property
    def kind(self) -> str:
        """The step's name among `runtime.api.STEP_KINDS`."""
        kinds = {row.kind for row in self.rows}
        return next(iter(kinds)).value if len(kinds) == 1 else "mixed"

    @property
    def num_tokens(self) -> int:
        """Tokens fed by all rows."""
        return sum(row.num_fed for row in self.rows)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict read back on the host, one entry per row of the batch.

    `kept`: fed tokens that entered the state. `emitted`: new tokens (as many as kept, for DECODE and VERIFY).
    `finish`: STOP or LENGTH when the row ended, ERROR when it failed (`errors` says why). `drafts`: what a proposer
    suggests for the next step (empty for device proposers whose drafts the host need not know).
    """

    kept: tuple[int, ...]
    emitted: tuple[tuple[int, ...], ...]
    finish: tuple[FinishReason | None, ...]
    errors: tuple[str | None, ...]
    drafts: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = field(default=())

    def with_drafts(self, drafts: tuple[tuple[int, ...], ...]) -> Outcome:
        """The same outcome, with what a host proposer suggests."""
        return replace(self, drafts=drafts)

    def check(self, batch: Batch) -> None:
        """Raises when this cannot be the outcome of `batch` (rows that are not live any more may say anything)."""
        size = len(batch.rows)
        if {len(self.kept), len(self.emitted), len(self.finish), len(self.errors)} != {size}:
            raise StateError(f"the outcome of step {batch.serial} does not have {size} rows")
        for row, kept, emitted, finish in zip(batch.rows, self.kept, self.emitted, self.finish, strict=True):
            if not row.live or finish is FinishReason.ERROR:
                continue
            if row.kind is RowKind.PREFILL:
                fits = kept == row.num_fed and len(emitted) == int(row.emits) and (row.emits or finish is None)
            else:
                fits = 1 <= kept <= row.num_fed and len(emitted) == kept
            total = len(row.seq.tokens) + len(emitted)
            if not fits or total > row.seq.max_total or (total == row.seq.max_total and finish is None):
                raise StateError(
                    f"{row.lease.owner}: a {row.kind.value} row of {row.num_fed} tokens kept {kept}, emitted "
                    f"{len(emitted)}, finish {finish}, with {len(row.seq.tokens)} of {row.seq.max_total} tokens"
                )
