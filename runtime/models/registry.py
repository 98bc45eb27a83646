"""The families Lockstep serves, by the names config.json uses, and the one way to load a model directory."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

import torch

from runtime.api import ConfigError
from runtime.layers.linear import Placement
from runtime.loader import Progress, load_weights
from runtime.models.base import Family, HybridModel, MtpHead
from runtime.models.options import refuse_quantised
from runtime.spec import ConfigFile, ModelSpec, read_config, read_eos_ids

FAMILIES: dict[str, str] = {
    "Qwen3_5ForCausalLM": "runtime.models.qwen3_5:FAMILY",
    "Qwen3_5ForConditionalGeneration": "runtime.models.qwen3_5:FAMILY",
    "qwen3_5": "runtime.models.qwen3_5:FAMILY",
    "qwen3_5_text": "runtime.models.qwen3_5:FAMILY",
    "GraniteMoeHybridForCausalLM": "runtime.models.granitemoehybrid:FAMILY",
    "granitemoehybrid": "runtime.models.granitemoehybrid:FAMILY",
}

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A model ready to run. `mtp` is None unless it was asked for and the checkpoint has one.

    `num_bytes`: memory of the parameters of both, in bytes. `widest`: rows of the largest matrix inside a layer.
    """

    model: HybridModel
    mtp: MtpHead | None
    num_bytes: int
    widest: int


def read_spec(model_dir: Path) -> ModelSpec:
    """The spec of a model directory, without loading it."""
    config = read_config(model_dir)
    return _read_spec(model_dir, config, _family(config))


def load_model(
    model_dir: Path, dtype: torch.dtype, device: torch.device, *, with_mtp: bool, progress: Progress | None = None
) -> Loaded:
    """Loads a model directory; whatever cannot work is a ConfigError or CapabilityError of one sentence.

    `dtype` is that of the weight matrices; norms, gates and recurrences compute in float32. `progress` gets 0..1.
    """
    config = read_config(model_dir)
    family = _family(config)
    spec = _read_spec(model_dir, config, family)
    try:
        built = family.build(config, spec, Placement(dtype, device), with_mtp=with_mtp)
    except (RuntimeError, MemoryError) as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(f"{model_dir}: the parameters cannot be allocated on {device}: {reason}") from error
    load_weights(model_dir, built.names, progress)
    targets = [weight.target for weight in built.names.weights]
    storages = {t.untyped_storage().data_ptr(): (t.untyped_storage().nbytes(), t.element_size()) for t in targets}
    rows = [num_bytes // size // spec.hidden_size for num_bytes, size in storages.values()]
    inside = [count for count in rows if count != spec.vocab_size]
    return Loaded(built.model, built.mtp, sum(num_bytes for num_bytes, _ in storages.values()), max(inside, default=1))


def _read_spec(model_dir: Path, config: ConfigFile, family: Family) -> ModelSpec:
    refuse_quantised(config)
    text = config.section("text_config") if config.has("text_config") else config
    vocab_size = text.integer("vocab_size")
    return family.spec(config, read_eos_ids(model_dir, text if text.has("eos_token_id") else config, vocab_size))


def _family(config: ConfigFile) -> Family:
    names = config.texts("architectures") if config.has("architectures") else ()
    names += (config.text("model_type"),) if config.has("model_type") else ()
    for name in names:
        if name in FAMILIES:
            module, attribute = FAMILIES[name].split(":")
            return cast(Family, vars(import_module(module))[attribute])
    known = ", ".join(FAMILIES)
    raise ConfigError(f"{config.where}: {' / '.join(names) or 'no architecture'} is not supported (only {known}).")
