"""How many blocks and slots the pools get: what was asked for, or what requests need, cut by the memory there is."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.api import MAX_DRAFTS, ConfigError, EngineConfig
from runtime.machine import available_memory
from runtime.spec import LayerSpec, ModelSpec
from runtime.state.paged import KVShape
from runtime.state.recurrent import RecurrentShape

KV_SHARE = 0.5
CHECKPOINT_SHARE = 0.125
CHECKPOINTS_PER_SEQ = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of the pools; padding (block 0, slot 0) included."""

    max_model_len: int
    num_blocks: int
    num_slots: int
    max_blocks: int
    num_checkpoints: int = 0


def kv_shapes(layers: tuple[LayerSpec, ...]) -> dict[int, KVShape]:
    """The attention layers' caches by layer index."""
    return {
        i: KVShape(layer.attention.num_kv_heads, layer.attention.head_dim, layer.attention.v_dim)
        for i, layer in enumerate(layers)
        if layer.attention is not None
    }


def recurrent_shapes(layers: tuple[LayerSpec, ...]) -> dict[int, RecurrentShape]:
    """The recurrent layers' states by layer index."""
    out = {}
    for i, layer in enumerate(layers):
        if layer.recurrent is not None:
            r = layer.recurrent
            out[i] = RecurrentShape(r.conv_channels, r.conv_width, r.heads, r.v_dim, r.k_dim, r.groups)
    return out


def slot_bytes(spec: ModelSpec) -> int:
    """One sequence's recurrent state, of all layers."""
    shapes = recurrent_shapes(spec.layers).values()
    return 4 * sum(s.conv_channels * (s.conv_width - 1) + s.heads * s.v_dim * s.k_dim for s in shapes)


def plan_checkpoints(config: EngineConfig, spec: ModelSpec, left: int) -> int:
    """States the prefix cache keeps: what was asked for, or a few for every sequence within a share of `left` bytes."""
    if not config.prefix_cache:
        return 0
    affordable = int(left * CHECKPOINT_SHARE) // max(1, slot_bytes(spec) + 4 * spec.hidden_size)
    return config.num_checkpoints or max(1, min(CHECKPOINTS_PER_SEQ * config.max_num_seqs, affordable))


def state_bytes(config: EngineConfig, spec: ModelSpec, num_slots: int, k_max: int) -> int:
    """What recurrent states take when every sequence runs: the pool, prefill's end states, snapshots of drafts."""
    one = slot_bytes(spec)
    halves = {config.decode_backend}
    if config.speculative_attention_mode == "prefill":
        halves.add(config.prefill_backend)
    snapshots = 1 + k_max if "snapshot" in halves else 0
    return one * (num_slots + config.max_num_seqs * (1 + snapshots))


def plan_memory(config: EngineConfig, spec: ModelSpec, kv_bytes_per_token: int, k_max: int) -> MemoryPlan:
    """Resolves the zeros of `config`. Raises ConfigError when a given size cannot work."""
    max_model_len = config.max_model_len or spec.max_position_embeddings
    if max_model_len > spec.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {max_model_len} is beyond the model's {spec.max_position_embeddings} positions"
        )
    # Behind a request's last token lie rows planned before its end was known, and throw-away drafts.
    slack = (2 + config.settle_lag) * (1 + MAX_DRAFTS)
    per_seq = -(-(max_model_len + slack) // config.block_size)
    num_slots = config.num_slots or config.max_num_seqs + 1
    checkpoints = plan_checkpoints(config, spec, available_memory())
    if config.num_blocks:
        return MemoryPlan(max_model_len, config.num_blocks, num_slots, per_seq, checkpoints)
    wanted = per_seq * config.max_num_seqs + 1
    block_bytes = max(1, kv_bytes_per_token * config.block_size)
    left = available_memory() - state_bytes(config, spec, num_slots, k_max) - checkpoints * slot_bytes(spec)
    if left <= 0:
        raise ConfigError(
            f"the states of {config.max_num_seqs} sequences need {-left >> 20} MiB more than there is; "
            "lower --max-num-seqs"
        )
    affordable = int(left * KV_SHARE) // block_bytes
    if affordable < per_seq + 1:
        raise ConfigError(
            f"one request of {max_model_len} tokens needs {per_seq * block_bytes >> 20} MiB of KV cache, and "
            f"{affordable * block_bytes >> 20} MiB can be had; lower --max-model-len"
        )
    return MemoryPlan(max_model_len, min(wanted, affordable), num_slots, per_seq, checkpoints)
