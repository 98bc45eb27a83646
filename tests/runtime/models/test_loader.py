"""A checkpoint that cannot work is refused in one sentence that names what is wrong; variants of a good one load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.api import ConfigError
from runtime.models.base import HybridModel
from runtime.models.registry import load_model
from tests.runtime.models.common import CPU, assert_equal_logits, loaded, prompt, run
from tests.support.dense import RefContext
from tests.support.tiny import tiny, write

INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        shutil.copytree(tiny(name), tmp_path / name)
        return tmp_path / name

    return make


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded") / "qwen"
    write("qwen", path, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    return path


def load(path: Path, *, with_mtp: bool = False, dtype: torch.dtype = torch.float32) -> HybridModel:
    return load_model(path, dtype, CPU, with_mtp=with_mtp).model


def same_as(model: HybridModel, name: str) -> None:
    tokens = prompt(name)[:20]
    expected = loaded(name).model
    a, b = (m.logits(run(m, tokens, RefContext(m.spec.layers))) for m in (model, expected))
    assert torch.equal(a, b)


def change(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def drop(tensors: dict[str, torch.Tensor], part: str) -> None:
    for name in [name for name in tensors if part in name]:
        del tensors[name]


def refuse(path: Path, *words: str, with_mtp: bool = False) -> None:
    with pytest.raises(ConfigError) as caught:
        load(path, with_mtp=with_mtp)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


# --- what loads ----------------------------------------------------------------------------------------------------


def test_sharded_checkpoint_equals_the_single_file(sharded: Path) -> None:
    same_as(load(sharded, with_mtp=True), "qwen")


def test_multimodal_names_and_vision_tower(copy: Callable[[str], Path]) -> None:
    path = copy("qwen")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.startswith("model."):
                tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(2, 2)

    change(path, rename)
    config = json.loads((path / "config.json").read_text())
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": config,
        "vision_config": {},
    }
    (path / "config.json").write_text(json.dumps(whole))
    same_as(load(path, with_mtp=True), "qwen")


def test_tied_model_may_store_its_head_too(copy: Callable[[str], Path]) -> None:
    path = copy("granite")
    change(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    same_as(load(path), "granite")


def test_mtp_tensors_may_be_missing_unless_wanted(copy: Callable[[str], Path]) -> None:
    path = copy("qwen")
    change(path, lambda t: drop(t, "mtp."))
    same_as(load(path), "qwen")
    refuse(path, "lacks", "mtp.fc.weight", with_mtp=True)


def test_progress_rises_to_one() -> None:
    seen: list[float] = []
    load_model(tiny("qwen"), torch.float32, CPU, with_mtp=True, progress=seen.append)
    assert seen == sorted(seen)
    assert len(seen) > 10
    assert seen[-1] == 1.0


@pytest.mark.parametrize("name", ["qwen", "granite"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_stay_close_and_answer_in_float32(name: str, dtype: torch.dtype) -> None:
    model = load(tiny(name), dtype=dtype)
    ctx = RefContext(model.spec.layers)
    logits = model.logits(run(model, prompt(name)[:20], ctx))
    assert logits.dtype == torch.float32
    assert all(state.dtype == torch.float32 for state in ctx.states.values())
    reference = loaded(name).model
    expected = reference.logits(run(reference, prompt(name)[:20], RefContext(reference.spec.layers)))
    assert 0 < (logits - expected).abs().max() < 0.15 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_checkpoint_is_converted(copy: Callable[[str], Path], dtype: torch.dtype) -> None:
    path = copy("granite")
    change(path, lambda t: t.update({name: tensor.to(dtype) for name, tensor in t.items()}))
    model = load(path)
    change(path, lambda t: t.update({name: tensor.float() for name, tensor in t.items()}))
    wide = load(path)
    tokens = prompt("granite")[:20]
    a, b = (m.logits(run(m, tokens, RefContext(m.spec.layers))) for m in (model, wide))
    assert_equal_logits(a, b)


def test_no_code_of_the_directory_runs(copy: Callable[[str], Path], tmp_path: Path) -> None:
    path = copy("qwen")
    trap = f"open({str(tmp_path / 'sprung')!r}, 'w').close()\n"
    for file in ("modeling_trap.py", "configuration_trap.py", "__init__.py"):
        (path / file).write_text(trap)
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_trap.Trap", "AutoModelForCausalLM": "modeling_trap.Trap"}
    (path / "config.json").write_text(json.dumps(config))
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch sprung'\ntR.")
    same_as(load(path), "qwen")
    assert not (tmp_path / "sprung").exists()


# --- what does not -------------------------------------------------------------------------------------------------


def test_missing_tensors_are_named(copy: Callable[[str], Path]) -> None:
    path = copy("granite")
    change(path, lambda t: drop(t, "dt_bias"))
    refuse(path, "lacks", "model.layers.0.mamba.dt_bias")


def test_many_missing_tensors_are_counted(copy: Callable[[str], Path]) -> None:
    path = copy("granite")
    change(path, lambda t: drop(t, ".0."))
    refuse(path, "lacks", "more")


def test_left_over_tensors_are_named(copy: Callable[[str], Path]) -> None:
    path = copy("qwen")
    change(path, lambda t: t.update({"model.layers.9.surprise.weight": torch.zeros(1)}))
    refuse(path, "does not have", "model.layers.9.surprise.weight")


def test_wrong_shape(copy: Callable[[str], Path]) -> None:
    path = copy("qwen")
    change(path, lambda t: t.update({"model.norm.weight": torch.zeros(31)}))
    refuse(path, "model.norm.weight", "[31]", "[32]")


def test_same_number_of_values_in_another_shape(copy: Callable[[str], Path]) -> None:
    path = copy("granite")
    change(path, lambda t: t.update({"model.layers.0.mamba.conv1d.weight": torch.zeros(96, 4, 1)}))
    refuse(path, "conv1d.weight", "[96, 4, 1]", "[96, 1, 4]")


def test_integer_weights(copy: Callable[[str], Path]) -> None:
    path = copy("qwen")
    change(path, lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int64)}))
    refuse(path, "model.norm.weight", "int64")


def test_float8_weights(copy: Callable[[str], Path]) -> None:
    path = copy("qwen")
    change(path, lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.float8_e4m3fn)}))
    refuse(path, "model.norm.weight", "float8")


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 64, b'{"a": 1}'])
def test_corrupt_file(copy: Callable[[str], Path], content: bytes) -> None:
    path = copy("qwen")
    (path / "model.safetensors").write_bytes(content)
    refuse(path, "model.safetensors", "not a readable safetensors file")


def test_truncated_file(copy: Callable[[str], Path]) -> None:
    path = copy("qwen")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refuse(path, "not a readable safetensors file")


def test_only_pickled_weights(copy: Callable[[str], Path]) -> None:
    path = copy("qwen")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refuse(path, "safetensors only")


def test_no_weights(copy: Callable[[str], Path]) -> None:
    path = copy("qwen")
    (path / "model.safetensors").unlink()
    refuse(path, "neither model.safetensors nor")


def test_missing_shard(sharded: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(sharded, tmp_path / "x"))
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    refuse(path, "does not exist", shard.name)


def test_shard_without_its_tensor(sharded: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(sharded, tmp_path / "x"))
    shard = sorted(path.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    gone = sorted(tensors)[0]
    del tensors[gone]
    save_file({**tensors, "other": torch.zeros(1)}, shard)
    refuse(path, shard.name, gone)


def test_tensor_in_two_shards(sharded: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(sharded, tmp_path / "x"))
    first, second = sorted(path.glob("*.safetensors"))[:2]
    tensors = load_file(first)
    doubled = sorted(tensors)[0]
    save_file({**load_file(second), doubled: tensors[doubled]}, second)
    refuse(path, "a second time", doubled)


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/outside.safetensors", "sub/x.safetensors", "a\\b.safetensors", "x.bin"]
)
def test_shard_outside_the_directory(sharded: Path, tmp_path: Path, shard: str) -> None:
    path = Path(shutil.copytree(sharded, tmp_path / "x"))
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "outside.safetensors")
    content = json.loads((path / INDEX).read_text())
    content["weight_map"]["model.norm.weight"] = shard
    (path / INDEX).write_text(json.dumps(content))
    refuse(path, "beside it", "outside" if "outside" in shard else "safetensors")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_broken_index(sharded: Path, tmp_path: Path, content: str) -> None:
    path = Path(shutil.copytree(sharded, tmp_path / "x"))
    (path / INDEX).write_text(content)
    refuse(path, INDEX)


def test_sizes_no_machine_has(copy: Callable[[str], Path]) -> None:
    path = copy("qwen")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": 2**40}))
    refuse(path, "cannot be allocated")
