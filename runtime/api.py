"""The door: everything the HTTP process and the engine process say to each other, and the errors both know.

Plain `msgspec` structs (encoded as MessagePack on the wire, never pickle) and the standard library; importing this
module imports neither torch nor a web framework. Text does not exist here: prompts and outputs are token ids.

Errors::

    EngineError
    ├── ConfigError       a setting or model directory that cannot work; ends start-up with exit code 2
    ├── CapabilityError   a combination that cannot be exact (model x proposer x device) and is therefore refused
    ├── RequestError      this request cannot be served (carries the field and a machine-readable code)
    ├── CapacityError     no room now; the caller may try again later
    └── StateError        the state contract was broken: always a bug, never the client's fault
"""

from __future__ import annotations

import enum
import struct
from abc import abstractmethod
from collections.abc import Sequence as Seq
from typing import Protocol

import msgspec

MAX_LOGPROBS = 20
MAX_DRAFTS = 7
MAX_PRIORITY = 100


class EngineError(Exception):
    """Base of everything the runtime raises on purpose."""


class ConfigError(EngineError):
    """A setting, a model directory or a checkpoint that cannot work. The message is one clear sentence."""


class CapabilityError(EngineError):
    """The combination of model, proposer, backend and device cannot be exact, so it is refused."""


class CapacityError(EngineError):
    """No room at the moment: queue, slots or blocks. `retry_after` is in seconds, `reason` that of a full queue."""

    def __init__(self, message: str, retry_after: int = 1, reason: RejectReason | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.reason = reason


class RequestError(EngineError):
    """One request cannot be served. `param` names the field, `code` is OpenAI's error code where one exists."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class StateError(EngineError):
    """The state contract was broken: begin without commit, a reused ticket, `kept` out of range, a double free."""


class FinishReason(enum.Enum):
    """Why a request ended. STOP covers EOS and stop ids; ABORT is the caller's wish; ERROR carries `Delta.error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class CancelReason(enum.Enum):
    """Why the server takes a request back."""

    CLIENT_GONE = "client_gone"
    DEADLINE = "deadline"
    STOP_STRING = "stop_string"
    SHUTDOWN = "shutdown"


class RejectReason(enum.Enum):
    """Why the engine did not accept a request. QUEUE_FULL, QUEUE_TOKENS and DRAINING may be retried; others may not."""

    QUEUE_FULL = "queue_full"
    QUEUE_TOKENS = "queue_tokens"
    DRAINING = "draining"
    TOO_LONG = "too_long"
    INVALID = "invalid"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is sampled. All of it is applied at every verified position.

    `max_tokens` counts generated tokens and is >= 1. `temperature` 0 means greedy. `top_k` 0 and `min_p` 0 switch the
    filter off; `top_p` 1 likewise. `seed` fixes the sampling noise (a pure function of seed, position and token id).
    `stop_ids` end the request and are emitted; `eos_ids` do the same unless `ignore_eos`. Before `min_tokens` generated
    tokens neither can be sampled. `logprobs` is None (off) or the number 0..20 of alternatives per token; they are of
    the model's own distribution, before any processor.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `prompt` holds at least one token id.

    `num_drafts`: drafted tokens per verification for this request (None = the engine's default, 0 = do not speculate);
    the engine caps it at its own maximum. `priority`: lower goes first, within `MAX_PRIORITY` of 0 either way.
    `cache_salt`: requests share cached prefixes only with those of the same salt.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    num_drafts: int | None = None
    priority: int = 0
    cache_salt: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (natural log) of one emitted token, and of the most likely alternatives, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RequestTiming(msgspec.Struct, frozen=True, array_like=True):
    """Durations in seconds: waiting before first scheduled, prompt computation, token generation."""

    queued: float
    prefill: float
    decode: float


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one engine step adds to one request. `tokens` may hold several ids when drafts were accepted.

    On the last delta `finish` is set, with the request's totals; `timing` is on the last, and on the first with tokens.
    `drafted` and `accepted` count this request's draft tokens so far; `cached_tokens` prompt tokens were not computed
    again.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    error: str | None = None
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0
    timing: RequestTiming | None = None


class Distribution(msgspec.Struct, array_like=True):
    """Observations by size, of a name in `DISTRIBUTIONS`; never falling.

    `counts[i]` were at most the i-th bound and above the one before it, the last was above all; `total` is their sum.
    """

    counts: list[int]
    total: float = 0.0


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot of the engine's counters (never falling) and gauges, sent with every step and heartbeat.

    Per-position lists are indexed by draft position (0-based) and have `MAX_DRAFTS` entries. Dictionaries are keyed by
    fixed names: `steps` by `STEP_KINDS`, `step_seconds` by `STEP_PHASES`, `commit_rows` by `ROW_KINDS`, `state_copies`
    by `STATE_COPIES`, `memory_bytes` by `MEMORY_KINDS`, `distributions` by `DISTRIBUTIONS`; what is missing is 0.
    `registries`, by `REGISTRIES`, are the entries of tables that know requests; an idle engine must not have ever more.
    """

    # gauges
    running: int = 0
    waiting_deferred: int = 0
    waiting_seqs: int = 0
    waiting_kv: int = 0
    waiting_state: int = 0
    waiting_tokens: int = 0
    registries: dict[str, int] = {}
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_total: int = 0
    state_slots_used: int = 0
    state_slots_cached: int = 0
    state_slots_total: int = 0
    state_slot_bytes: int = 0
    memory_bytes: dict[str, int] = {}
    last_step_time: float = 0.0
    step_serial: int = 0
    # counters of steps and tokens
    steps: dict[str, int] = {}
    step_seconds: dict[str, float] = {}
    distributions: dict[str, Distribution] = {}
    step_tokens: int = 0
    prompt_tokens_computed: int = 0
    tokens_emitted: int = 0
    tokens_discarded: int = 0
    preemptions_kv: int = 0
    preemptions_state: int = 0
    settle_waits: int = 0
    stuck_requests: int = 0
    # counters: the commit
    commits: int = 0
    commit_rows: dict[str, int] = {}
    commits_full: int = 0
    commits_partial: int = 0
    commits_bonus_only: int = 0
    commits_missing: int = 0
    aborted_steps: int = 0
    folds: int = 0
    state_copies: dict[str, int] = {}
    audits_ok: int = 0
    audits_mismatch: int = 0
    audits_skipped: int = 0
    audit_worst: float = 0.0
    # counters of speculation
    spec_verifications: int = 0
    spec_drafted: int = 0
    spec_accepted: int = 0
    spec_emitted: int = 0
    spec_drafted_at: list[int] = msgspec.field(default_factory=lambda: [0] * MAX_DRAFTS)
    spec_accepted_at: list[int] = msgspec.field(default_factory=lambda: [0] * MAX_DRAFTS)
    draft_failures: int = 0
    non_finite_rows: int = 0
    # the prefix cache; dictionaries are keyed by CACHE_TIERS, CHECKPOINT_TRIGGERS and CACHE_LOSSES
    checkpoints: dict[str, int] = {}
    checkpoints_total: dict[str, int] = {}
    checkpoints_written: dict[str, int] = {}
    checkpoint_evictions: int = 0
    kv_evicted_blocks: int = 0
    cache_query_tokens: int = 0
    cache_hit_tokens: dict[str, int] = {}
    cache_lost_tokens: dict[str, int] = {}
    resumed_tokens: int = 0


STEP_KINDS = ("prefill", "decode", "verify", "mixed")
CACHE_TIERS = ("device", "host")
CHECKPOINT_TRIGGERS = ("prompt", "interval", "fork", "end", "preemption")
CACHE_LOSSES = ("no_checkpoint", "evicted")
STEP_PHASES = ("schedule", "prepare", "forward", "judge", "commit", "extend", "propose", "settle")
ROW_KINDS = ("prefill", "decode", "verify")
STATE_COPIES = ("commit", "fold", "checkpoint", "restore", "to_host", "from_host")
REGISTRIES = ("requests", "leases", "tables", "sampling", "steps")
MEMORY_KINDS = ("weights", "kv", "state", "checkpoints", "candidates", "draft")
DISTRIBUTIONS: dict[str, tuple[float, ...]] = {
    "step_tokens": tuple(float(2**e) for e in range(15)),
    "batch_size": tuple(float(2**e) for e in range(11)),
    "step_seconds": (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    "commit_seconds": (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0),
    "draft_seconds": (1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0),
    "verify_seconds": (1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0),
    "accepted_length": tuple(float(n) for n in range(MAX_DRAFTS + 1)),
}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine must be told. 0 for a capacity means: derive it from the model and the memory.

    `speculative` is `none` or `METHOD:K` (`mtp:3`, `ngram:4`); `prefill_backend` and `decode_backend` choose the commit
    strategy of each half (`snapshot` or `replay`); `speculative_attention_mode` says which half verifies
    (`decode` or `prefill`). `checkpoint_interval` is in tokens, `host_cache_gb` in GiB. `settle_lag` is 0 or 1 steps.
    `threads` 0 follows the CPU quota and affinity.
    """

    model_dir: str
    speculative: str = "none"
    prefill_backend: str = "snapshot"
    decode_backend: str = "replay"
    speculative_attention_mode: str = "decode"
    dtype: str = "float32"
    device: str = "cpu"
    max_model_len: int = 0
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_prefill_tokens: int = 0
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    priority_aging_tokens: int = 4096
    block_size: int = 16
    num_blocks: int = 0
    num_slots: int = 0
    prefix_cache: bool = True
    num_checkpoints: int = 0
    checkpoint_interval: int = 256
    host_cache_gb: float = 0.0
    memory_gb: float = 0.0
    gpu_memory_utilization: float = 0.9
    settle_lag: int = 0
    threads: int = 0
    audit_interval: int = 0
    log_format: str = "text"


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine says of itself once it is ready. `choices` are all resolved settings, in print order.

    `versions` of what it computes with: torch, cuda, triton.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    max_drafts: int
    choices: dict[str, str]
    startup_seconds: dict[str, float]
    versions: dict[str, str] = {}


# --- messages, server to engine -------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message of a worker's life: build this engine."""

    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Asks for a generation; answered with `Accepted` or `Rejected` before anything else about this id."""

    request: Request


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Ends request `id` (exact match). `keep` generated tokens were really delivered; the rest is discarded."""

    id: str
    reason: CancelReason
    keep: int = 0


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Ends the engine process at the next step boundary."""


# --- messages, engine to server -------------------------------------------------------------------------------------


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Start-up progress: `phase` is load, alloc, warmup or selftest; `done` is 0..1."""

    phase: str
    done: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine answered its self-test and takes requests."""

    info: ModelInfo


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot start or go on. `config` is true when a setting is to blame (exit code 2)."""

    message: str
    config: bool = False


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """Request `id` is queued; deltas follow."""

    id: str


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """Request `id` will not run. `param` names the field at fault."""

    id: str
    reason: RejectReason
    message: str
    param: str | None = None
    code: str | None = None


class Report(msgspec.Struct, frozen=True, tag="report"):
    """The one message of an engine step (or the idle heartbeat): answers to submissions, deltas, counters."""

    answers: tuple[Accepted | Rejected, ...]
    deltas: tuple[Delta, ...]
    stats: EngineStats


ToEngine = Start | Submit | Cancel | Shutdown
ToServer = Progress | Ready | Fatal | Report

# On the socket every message is a frame: its length as a 4-byte big-endian integer, then MessagePack.
FRAME_HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 256 * 1024 * 1024
_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | ToServer) -> bytes:
    """One message as it travels: header and body."""
    body = _encoder.encode(message)
    return FRAME_HEADER.pack(len(body)) + body


class EngineCore(Protocol):
    """The engine as its driver sees it: the worker process, the in-process link and the offline API drive this."""

    @property
    @abstractmethod
    def info(self) -> ModelInfo:
        """What the engine resolved at start."""

    @abstractmethod
    def submit(self, request: Request) -> Accepted | Rejected:
        """Queues a request or says why not. Never raises for bad requests."""

    @abstractmethod
    def cancel(self, request_id: str, reason: CancelReason, keep: int) -> None:
        """Ends a request at the next step boundary; unknown or finished ids are ignored. Its last delta is ABORT."""

    @abstractmethod
    def step(self) -> Seq[Delta]:
        """Runs one step and returns what it adds; an empty answer when there was nothing to do."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """The current snapshot."""
