"""config.json: what it becomes, and every option that is refused is refused by name."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.api import CapabilityError, ConfigError
from runtime.models.registry import FAMILIES, read_spec
from runtime.spec import AttentionSpec, LayerKind, RecurrentSpec
from tests.support.tiny import GRANITE, QWEN

A, G, M = LayerKind.ATTENTION, LayerKind.GATED_DELTA, LayerKind.MAMBA2


def directory(tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], *drop: str) -> Path:
    config = {"model_type": "qwen3_5_text" if base is QWEN else "granitemoehybrid", **base}
    config["num_hidden_layers"] = len(config["layer_types"])
    config.update(changes)
    for key in drop:
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_qwen_spec(tmp_path: Path) -> None:
    spec = read_spec(directory(tmp_path, QWEN, {}))
    assert spec.architecture == "Qwen3_5ForCausalLM"
    assert [layer.kind for layer in spec.layers] == [G, A, G]
    assert spec.attention_layers == (1,)
    assert spec.recurrent_layers == (0, 2)
    assert spec.layers[1].attention == AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, v_dim=16)
    assert spec.layers[0].recurrent == RecurrentSpec(
        conv_channels=80, conv_width=4, heads=4, v_dim=12, k_dim=8, groups=2, gates=2
    )
    assert len(spec.mtp_layers) == 1
    assert spec.eos_ids == (2,)
    assert (spec.vocab_size, spec.hidden_size, spec.max_position_embeddings) == (300, 32, 512)
    assert spec.tie_word_embeddings


def test_granite_spec(tmp_path: Path) -> None:
    spec = read_spec(directory(tmp_path, GRANITE, {"layer_types": ["mamba", "attention", "mamba"]}))
    assert spec.architecture == "GraniteMoeHybridForCausalLM"
    assert [layer.kind for layer in spec.layers] == [M, A, M]
    assert spec.layers[0].recurrent == RecurrentSpec(
        conv_channels=96, conv_width=4, heads=8, v_dim=8, k_dim=16, groups=1, gates=1
    )
    assert spec.layers[1].attention == AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, v_dim=8)
    assert spec.mtp_layers == ()


@pytest.mark.parametrize(
    ("base", "changes", "drop", "kinds"),
    [
        (QWEN, {"full_attention_interval": 3, "num_hidden_layers": 6}, ("layer_types",), [G, G, A, G, G, A]),
        (QWEN, {"num_hidden_layers": 4}, ("layer_types",), [G, G, G, A]),
        (QWEN, {"full_attention_interval": 1, "num_hidden_layers": 2}, ("layer_types",), [A, A]),
        (GRANITE, {"layers_block_type": ["attention", "mamba"], "num_hidden_layers": 2}, ("layer_types",), [A, M]),
        (GRANITE, {"num_hidden_layers": 2}, ("layer_types",), [M, M]),
    ],
)
def test_layer_orders(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], drop: tuple[str, ...], kinds: list[LayerKind]
) -> None:
    assert [layer.kind for layer in read_spec(directory(tmp_path, base, changes, *drop)).layers] == kinds


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, {"eos_token_id": [7, 2, 7]}, (7, 2)),
        (2, {"eos_token_id": 9}, (9,)),
        (2, {"temperature": 1.0}, (2,)),
        (None, None, ()),
        (0, None, (0,)),
    ],
)
def test_eos_ids(tmp_path: Path, config: object, generation: object, expected: tuple[int, ...]) -> None:
    path = directory(tmp_path, QWEN, {"eos_token_id": config})
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    assert read_spec(path).eos_ids == expected


@pytest.mark.parametrize("eos", [300, -1, "2", [2, None], True])
def test_impossible_eos_ids(tmp_path: Path, eos: object) -> None:
    with pytest.raises(ConfigError, match="eos_token_id"):
        read_spec(directory(tmp_path, QWEN, {"eos_token_id": eos}))


@pytest.mark.parametrize(
    ("base", "changes", "word"),
    [
        (GRANITE, {"num_local_experts": 4}, "num_local_experts"),
        (GRANITE, {"hidden_act": "gelu"}, "hidden_act"),
        (GRANITE, {"normalization_function": "layernorm"}, "normalization_function"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type"),
        (
            GRANITE,
            {"position_embedding_type": "rope", "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling",
        ),
        (GRANITE, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (QWEN, {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (QWEN, {"hidden_act": "relu"}, "hidden_act"),
        (QWEN, {"attn_output_gate": False}, "attn_output_gate"),
        (QWEN, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(CapabilityError, match=word):
        read_spec(directory(tmp_path, base, changes))


def test_experts_are_the_default_of_the_published_config(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="num_local_experts"):
        read_spec(directory(tmp_path, GRANITE, {}, "num_local_experts"))


@pytest.mark.parametrize(
    ("base", "changes", "drop", "words"),
    [
        (QWEN, {"model_type": "llama"}, (), ["llama", "qwen3_5_text"]),
        (QWEN, {}, ("model_type",), ["no architecture"]),
        (QWEN, {"layer_types": ["sliding_attention"] * 3}, (), ["sliding_attention"]),
        (QWEN, {"num_hidden_layers": 5}, (), ["num_hidden_layers"]),
        (QWEN, {"num_key_value_heads": 3}, (), ["3 groups"]),
        (QWEN, {"linear_num_key_heads": 3}, (), ["3 groups"]),
        (QWEN, {}, ("hidden_size",), ["hidden_size"]),
        (QWEN, {"hidden_size": "32"}, (), ["hidden_size", "whole number of"]),
        (QWEN, {"vocab_size": 0}, (), ["vocab_size"]),
        (QWEN, {"vocab_size": 10**400}, (), ["vocab_size"]),
        (QWEN, {"tie_word_embeddings": "yes"}, (), ["tie_word_embeddings"]),
        (QWEN, {"layer_types": [1, 2, 3]}, (), ["layer_types"]),
        (GRANITE, {"mamba_n_heads": 7}, (), ["mamba_n_heads"]),
        (GRANITE, {"mamba_d_head": 9}, (), ["mamba_d_head"]),
        (GRANITE, {"mamba_n_groups": 3}, (), ["3 groups"]),
    ],
)
def test_impossible_configs(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], drop: tuple[str, ...], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_spec(directory(tmp_path, base, changes, *drop))
    assert all(word in str(caught.value) for word in words), caught.value


def test_missing_directory_and_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_spec(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_spec(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000])
def test_unreadable_config(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_spec(tmp_path)


def test_registry_names_exist() -> None:
    for target in FAMILIES.values():
        module, attribute = target.split(":")
        path = Path(runtime.__path__[0]).parent / f"{module.replace('.', '/')}.py"
        names = [
            name.id
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign)
            for name in node.targets
            if isinstance(name, ast.Name)
        ]
        assert attribute in names
