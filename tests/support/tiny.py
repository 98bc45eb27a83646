"""TINY: random models of a few kilobytes, written by transformers, so that names and formats are the published ones.

`tiny(name)` builds a checkpoint once per session. Weights are scaled so that every layer matters to the output.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCAB = 300
LINEAR, FULL = "linear_attention", "full_attention"

QWEN: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "mtp_num_hidden_layers": 1,
    "layer_types": [LINEAR, FULL, LINEAR],
}

GRANITE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "shared_intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_head": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "position_embedding_type": "nope",
    "eos_token_id": 2,
    "pad_token_id": 0,
    "layer_types": [LINEAR, FULL, LINEAR],
}

# Every tiny model: the family's base and what differs from it.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen": ("qwen", {}),
    "qwen-attention-first": ("qwen", {"layer_types": [FULL, LINEAR]}),
    "qwen-all-linear": ("qwen", {"layer_types": [LINEAR, LINEAR]}),
    "qwen-all-attention": ("qwen", {"layer_types": [FULL, FULL]}),
    "qwen-one-linear": ("qwen", {"layer_types": [LINEAR]}),
    "qwen-one-attention": ("qwen", {"layer_types": [FULL]}),
    "qwen-ungrouped": ("qwen", {"linear_num_key_heads": 4, "num_key_value_heads": 4}),
    "qwen-one-group": ("qwen", {"linear_num_key_heads": 1, "num_key_value_heads": 1, "linear_conv_kernel_dim": 3}),
    "qwen-untied-bias": ("qwen", {"tie_word_embeddings": False, "attention_bias": True}),
    "qwen-long-context": ("qwen", {"layer_types": [FULL, LINEAR], "max_position_embeddings": 1 << 20}),
    "granite": ("granite", {}),
    "granite-attention-first": ("granite", {"layer_types": [FULL, LINEAR]}),
    "granite-all-mamba": ("granite", {"layer_types": [LINEAR, LINEAR]}),
    "granite-all-attention": ("granite", {"layer_types": [FULL, FULL]}),
    "granite-one-mamba": ("granite", {"layer_types": [LINEAR]}),
    "granite-groups-rope": ("granite", {"mamba_n_groups": 4, "position_embedding_type": "rope", "mamba_d_conv": 3}),
    "granite-untied-bias": (
        "granite",
        {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "logits_scaling": 0.6,
        },
    ),
    "granite-time-step-limit": ("granite", {"time_step_limit": [0.02, 0.06]}),
}


@functools.cache
def tiny(name: str) -> Path:
    """The directory of the tiny model `name`; only for reading."""
    path = _root() / name
    write(name, path)
    return path


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="lockstep-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def write(name: str, path: Path, *, max_shard_size: str = "1GB") -> None:
    """Writes the tiny model `name` to a new directory `path`, in float32; Qwen models get a random MTP head."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    family, changes = MODELS[name]
    settings = {**(QWEN if family == "qwen" else GRANITE), **changes}
    settings["num_hidden_layers"] = len(settings["layer_types"])
    if family == "qwen":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings))
    else:
        model = GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**settings))
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(_random(key, tuple(parameter.shape), generator, zero_centred=family == "qwen"))
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if family == "qwen":
        _add_mtp(path, settings, generator)


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator, *, zero_centred: bool) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return torch.log(0.5 + 15 * torch.rand(shape, generator=generator))
    if name.endswith("dt_bias"):
        low, high = math.log(0.001), math.log(0.1)
        dt = torch.exp(low + (high - low) * torch.rand(shape, generator=generator))
        return dt + torch.log(-torch.expm1(-dt))
    if name.endswith(".D"):
        return 0.25 + 0.1 * noise
    if name.endswith("embed_tokens.weight"):
        return 0.5 * noise if zero_centred else 0.04 * noise
    if "conv1d.weight" in name:
        return 0.5 * noise
    if "norm" in name:
        return 0.2 * noise + (0.0 if zero_centred and "linear_attn.norm" not in name else 1.0)
    if len(shape) == 2:
        return noise * (1.6 / math.sqrt(shape[1]))
    return 0.1 * noise


def _add_mtp(path: Path, settings: dict[str, Any], generator: torch.Generator) -> None:
    """Adds `mtp.*` to the checkpoint's last file (and to the index if there is one)."""
    hidden, inner, size = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    layer = "mtp.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.norm.weight": (hidden,),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (2 * heads * size, hidden),
        f"{layer}.self_attn.k_proj.weight": (kv_heads * size, hidden),
        f"{layer}.self_attn.v_proj.weight": (kv_heads * size, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, heads * size),
        f"{layer}.self_attn.q_norm.weight": (size,),
        f"{layer}.self_attn.k_norm.weight": (size,),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
    }
    if settings.get("attention_bias"):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{layer}.self_attn.{part}.bias"] = shapes[f"{layer}.self_attn.{part}.weight"][:1]
    head = {name: _random(name, shape, generator, zero_centred=True) for name, shape in shapes.items()}
    file = sorted(path.glob("*.safetensors"))[-1]
    save_file({**load_file(file), **head}, file, metadata={"format": "pt"})
    index = path / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text())
        content["weight_map"].update(dict.fromkeys(head, file.name))
        index.write_text(json.dumps(content))
