"""How many bytes everything takes: arithmetic on shapes, done before anything is allocated and printed at start.

What lives as long as the engine is exact. Temporaries of a step are bounded, generously: they depend on what the ops do
inside, and tests hold what was measured against the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.api import EngineConfig
from runtime.plan import RowKind
from runtime.spec import AttentionSpec, ModelSpec, RecurrentSpec

FLOAT = 4
INT = 8
MOST_STOPS = 80  # stop and end-of-sequence ids of one request
SAMPLING_TABLES = FLOAT + 4 + 1  # per token of the vocabulary: bias, output counts, in the prompt
SAMPLING_COLUMNS = 96  # per slot: temperature, seed and so on
PER_LOGIT = 80  # bytes of all processors' temporaries per logit: float32 copies, int64 keys, sums
SCAN_CHUNK = 64  # tokens of a row that a scan relates to each other
QUERY_TILE = 256  # queries of a long row at a time
SHORT_ROW = 16  # rows up to so many tokens are computed side by side
GATHERED = 1 << 19  # keys and values gathered at a time, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The largest step: tokens fed, rows, tokens of a verified row, and positions of the longest context."""

    tokens: int
    rows: int
    width: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes. `slot`: all that there is once per slot: state, kept inputs, sampling, tables. `block`: KV of the target
    and the drafter. `checkpoint`: one row of the prefix cache. `scratch`: candidates of the largest step. `workspace`:
    a bound on what a step allocates and frees again.
    """

    weights: int
    slot: int
    block: int
    checkpoint: int
    scratch: int
    workspace: int

    def fixed(self, num_slots: int, num_checkpoints: int) -> int:
        """Everything but weights and blocks."""
        return num_slots * self.slot + num_checkpoints * self.checkpoint + self.scratch + self.workspace

    def total(self, num_slots: int, num_checkpoints: int, num_blocks: int) -> int:
        """Everything."""
        return self.weights + self.fixed(num_slots, num_checkpoints) + num_blocks * self.block


def state_size(spec: ModelSpec) -> int:
    """One sequence's recurrent state, of all layers."""
    return FLOAT * sum(
        r.conv_channels * (r.conv_width - 1) + r.heads * r.v_dim * r.k_dim for r in recurrent_layers(spec)
    )


def size_of(
    config: EngineConfig, spec: ModelSpec, step: Step, *, weights: int, kv_token: int, widest: int, drafter: bool
) -> Sizes:
    """The sizes of an engine. `kv_token`: KV bytes of one token; `widest`: rows of the largest matrix of a layer."""
    state = state_size(spec)
    halves = kinds_of_halves(config, step.width)
    kept = sum(strategy == "replay" for strategy, _ in halves)
    blocks = -(-step.context // config.block_size)
    sampling = SAMPLING_TABLES * spec.vocab_size + SAMPLING_COLUMNS + INT * MOST_STOPS
    tables = INT * (blocks + 2 + step.width)
    return Sizes(
        weights=weights,
        slot=state + kept * _inputs(spec, step.width) + sampling + tables,
        block=kv_token * config.block_size,
        checkpoint=state + (FLOAT * spec.hidden_size if drafter else 0),
        scratch=sum(state * _candidates(strategy, kinds, step) for strategy, kinds in halves),
        workspace=workspace(spec, step, widest),
    )


def kinds_of_halves(config: EngineConfig, width: int) -> list[tuple[str, frozenset[RowKind]]]:
    """The prefill and the decode half: strategy, and the kinds of rows it runs."""
    verifies = config.speculative_attention_mode == "prefill"
    verify = {RowKind.VERIFY} if width > 1 else set()
    return [
        (config.prefill_backend, frozenset({RowKind.PREFILL} | (verify if verifies else set()))),
        (config.decode_backend, frozenset({RowKind.DECODE} | (set() if verifies else verify))),
    ]


def workspace(spec: ModelSpec, step: Step, widest: int) -> int:
    """A bound on a step's temporaries: what flows from layer to layer, and the larger of a layer's and the judge's."""
    flow = FLOAT * step.tokens * (8 * spec.hidden_size + 3 * widest)
    layers = [_attention(a, step) for a in attention_layers(spec)] + [
        _recurrent(r, step) for r in recurrent_layers(spec)
    ]
    sampled = min(step.tokens, step.rows * step.width)
    return flow + max([PER_LOGIT * sampled * spec.vocab_size, *layers])


def attention_layers(spec: ModelSpec) -> Iterator[AttentionSpec]:
    """Of the target."""
    return (layer.attention for layer in spec.layers if layer.attention is not None)


def recurrent_layers(spec: ModelSpec) -> Iterator[RecurrentSpec]:
    """Of the target."""
    return (layer.recurrent for layer in spec.layers if layer.recurrent is not None)


def _inputs(spec: ModelSpec, width: int) -> int:
    """What one slot keeps for the replay strategy: two halves of inputs, and their counts."""
    layers = list(recurrent_layers(spec))
    values = sum(r.conv_channels + r.heads + r.heads * r.v_dim + r.groups * r.k_dim for r in layers)
    return 2 * FLOAT * width * values + INT * (len(layers) + width + 1)


def _candidates(strategy: str, kinds: frozenset[RowKind], step: Step) -> int:
    """States in a half's scratch: one per prefill row, and for snapshots one per token of the other rows."""
    states = step.rows if RowKind.PREFILL in kinds else 0
    if strategy == "snapshot" and kinds != {RowKind.PREFILL}:
        states += step.rows * (step.width if RowKind.VERIFY in kinds else 1)
    return states


def _attention(a: AttentionSpec, step: Step) -> int:
    """Fused projections; gathered keys and values; scores, masks and cells of the context."""
    repeat = a.num_heads // a.num_kv_heads
    projected = 2 * a.num_heads * a.head_dim + a.num_kv_heads * (a.head_dim + a.v_dim)
    flow = 4 * FLOAT * step.tokens * projected
    gathered = 4 * FLOAT * max(GATHERED, step.context * a.num_kv_heads * max(a.head_dim, a.v_dim))
    side_by_side = min(step.tokens, step.rows * SHORT_ROW)
    masks = (1 + FLOAT) * repeat * max(side_by_side, min(step.tokens, QUERY_TILE)) * step.context
    scores = 3 * FLOAT * a.num_heads * max(SHORT_ROW, min(step.tokens, QUERY_TILE)) * step.context
    return flow + gathered + masks + scores + 4 * INT * step.rows * step.context


def _recurrent(r: RecurrentSpec, step: Step) -> int:
    """Projections and convolution; pairs of a chunk; copies of the rows' states, and states per verified token."""
    state = r.heads * r.v_dim * r.k_dim
    tokens = 2 * step.tokens  # rows are padded to rectangles
    values = 6 * r.conv_channels + 8 * r.heads * r.v_dim + 6 * r.groups * r.k_dim + 8 * r.heads
    pairs = 4 * tokens * r.heads * SCAN_CHUNK
    states = step.rows * (4 * state + 2 * r.conv_channels * r.conv_width) + step.rows * step.width * state
    return FLOAT * (tokens * values + pairs + states)
