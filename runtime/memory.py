"""How many blocks, slots and checkpoints the pools get: what was asked for, or what is needed, cut by the memory."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.api import MAX_DRAFTS, ConfigError, EngineConfig
from runtime.sizing import Sizes
from runtime.spec import LayerSpec, ModelSpec
from runtime.state.paged import KVShape
from runtime.state.recurrent import RecurrentShape

KV_SHARE = 0.5
CHECKPOINT_SHARE = 0.125
CHECKPOINTS_PER_SEQ = 4
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """What may still be allocated, in bytes. `flag`: what the operator said it with, None when it was found out.

    What was found out is there at the moment: half of it is left to others and to later.
    """

    left: int
    flag: str | None


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


def longest(config: EngineConfig, spec: ModelSpec) -> int:
    """The context length that is asked for. Raises ConfigError when the model has no such positions."""
    max_model_len = config.max_model_len or spec.max_position_embeddings
    if max_model_len > spec.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {max_model_len} is beyond the model's {spec.max_position_embeddings} positions"
        )
    return max_model_len


def held(config: EngineConfig, max_model_len: int) -> int:
    """Positions a request may occupy: behind its last token lie rows planned before its end was known, and drafts."""
    return max_model_len + (2 + config.settle_lag) * (1 + MAX_DRAFTS)


def plan_memory(config: EngineConfig, spec: ModelSpec, sizes: Sizes, memory: Memory) -> MemoryPlan:
    """Resolves the zeros of `config`. Raises ConfigError when a given size cannot work."""
    max_model_len = longest(config, spec)
    per_seq = -(-held(config, max_model_len) // config.block_size)
    num_slots = config.num_slots or config.max_num_seqs + 1
    checkpoints = _checkpoints(config, sizes, memory)
    left = memory.left - sizes.fixed(num_slots, checkpoints)
    if left <= 0:
        raise ConfigError(
            f"the states of {config.max_num_seqs} sequences need {-left // MIB + 1} MiB more than there is; "
            f"lower --max-num-seqs{_or_raise(memory)}"
        )
    if config.num_blocks:
        if memory.flag is not None and config.num_blocks * sizes.block > left:
            raise ConfigError(
                f"--num-blocks {config.num_blocks} needs {config.num_blocks * sizes.block // MIB} MiB, and "
                f"{left // MIB} MiB are left for it; lower it{_or_raise(memory)}"
            )
        return MemoryPlan(max_model_len, config.num_blocks, num_slots, per_seq, checkpoints)
    wanted = per_seq * config.max_num_seqs + 1
    affordable = int(left * (KV_SHARE if memory.flag is None else 1.0)) // max(1, sizes.block)
    if affordable < per_seq + 1:
        raise ConfigError(
            f"one request of {max_model_len} tokens needs {per_seq * sizes.block // MIB} MiB of KV cache, and "
            f"{affordable * sizes.block // MIB} MiB can be had; lower --max-model-len{_or_raise(memory)}"
        )
    return MemoryPlan(max_model_len, min(wanted, affordable), num_slots, per_seq, checkpoints)


def fitting(config: EngineConfig, plan: MemoryPlan, max_len: int, k_max: int) -> dict[int, int]:
    """How many sequences run at once without any giving way, by their length in tokens: the longest, its half, ..."""
    seats = min(config.max_num_seqs, plan.num_slots - 1)
    found: dict[int, int] = {}
    length = max_len
    while length >= 1 and len(found) < 5:
        blocks = -(-(length + 2 * k_max) // config.block_size)
        found[length] = min(seats, (plan.num_blocks - 1) // blocks)
        if found[length] == seats:
            break
        length //= 2
    return found


def _checkpoints(config: EngineConfig, sizes: Sizes, memory: Memory) -> int:
    """States the prefix cache keeps: what was asked for, or a few for every sequence within a share of the memory."""
    if not config.prefix_cache:
        return 0
    affordable = int(memory.left * CHECKPOINT_SHARE) // max(1, sizes.checkpoint)
    return config.num_checkpoints or max(1, min(CHECKPOINTS_PER_SEQ * config.max_num_seqs, affordable))


def _or_raise(memory: Memory) -> str:
    return "" if memory.flag is None else f" or raise {memory.flag}"
