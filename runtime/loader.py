"""Checkpoint to parameters: safetensors files, by the family's declared names.

Reads tensors and nothing else: no code of a model directory is ever run, and pickled checkpoints are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from runtime.api import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SHOWN = 5

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One tensor of the checkpoint and where it goes.

    `name` is the published name, `shape` its shape in the file. `target` is filled in place, converted to its own dtype
    and device; it may be a view of some rows of a fused parameter. `transform` gets the tensor in float32.
    """

    name: str
    target: torch.Tensor
    shape: tuple[int, ...]
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class NameMap:
    """What a family expects of a checkpoint.

    Tensors whose published name matches one of `ignored` (regular expressions) may be there and are not read.
    `renamed` maps a file's own name to the published one, for variants of the same checkpoint.
    """

    weights: tuple[Weight, ...]
    ignored: tuple[str, ...]
    renamed: Callable[[str], str]


def load_weights(model_dir: Path, names: NameMap, progress: Progress | None = None) -> None:
    """Fills every target of `names`. Anything missing, left over, misshapen or unreadable is a ConfigError."""
    wanted = {weight.name: weight for weight in names.weights}
    files = _files(model_dir)
    found = _published_names(files, names)
    _compare(model_dir, wanted, found, names.ignored)
    total = sum(weight.target.numel() for weight in names.weights)
    done = 0
    for path, stored in files.items():
        with _opened(path) as file:
            for raw in stored:
                weight = wanted.get(names.renamed(raw))
                if weight is None:
                    continue
                _copy(path, raw, file, weight)
                done += weight.target.numel()
                if progress is not None:
                    progress(done / max(total, 1))


def _files(model_dir: Path) -> dict[Path, tuple[str, ...]]:
    """The checkpoint's files and the tensors in each."""
    if (model_dir / SINGLE).is_file():
        return {model_dir / SINGLE: _stored_names(model_dir / SINGLE)}
    if (model_dir / INDEX).is_file():
        return _shards(model_dir)
    if any(found for pattern in PICKLES for found in model_dir.glob(pattern)):
        raise ConfigError(f"{model_dir} holds only pickled weights; Lockstep reads safetensors only.")
    raise ConfigError(f"{model_dir} has neither {SINGLE} nor {INDEX}.")


def _shards(model_dir: Path) -> dict[Path, tuple[str, ...]]:
    index = model_dir / INDEX
    files: dict[Path, tuple[str, ...]] = {}
    weight_map = _weight_map(index)
    for shard in sorted(set(weight_map.values())):
        if PurePath(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise ConfigError(f"{index} names a shard that is not a safetensors file beside it: {shard!r}.")
        path = model_dir / shard
        if not path.is_file():
            raise ConfigError(f"{index} names a shard that does not exist: {shard}.")
        files[path] = _stored_names(path)
    for name, shard in weight_map.items():
        if name not in files[model_dir / shard]:
            raise ConfigError(f"{index} says that {shard} holds {name}, but it does not.")
    return files


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        weight_map = content["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index} is not a readable safetensors index: {error!r}.") from error
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ConfigError(f"{index}: weight_map must map tensor names to file names.")
    return weight_map


def _opened(path: Path) -> Any:
    """A safetensors reader (the library's type has no annotations)."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}.") from error


def _stored_names(path: Path) -> tuple[str, ...]:
    with _opened(path) as file:
        return tuple(file.keys())


def _published_names(files: Mapping[Path, Seq[str]], names: NameMap) -> set[str]:
    found: set[str] = set()
    for path, stored in files.items():
        for raw in stored:
            name = names.renamed(raw)
            if name in found:
                raise ConfigError(f"{path} holds {name} a second time.")
            found.add(name)
    return found


def _compare(model_dir: Path, wanted: Mapping[str, Weight], found: set[str], ignored: Seq[str]) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ConfigError(f"the checkpoint in {model_dir} lacks {_listed(missing)}.")
    patterns = [re.compile(pattern) for pattern in ignored]
    left = [name for name in sorted(found - wanted.keys()) if not any(p.search(name) for p in patterns)]
    if left:
        raise ConfigError(f"the checkpoint in {model_dir} holds tensors this model does not have: {_listed(left)}.")


def _listed(names: Seq[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _copy(path: Path, raw: str, file: Any, weight: Weight) -> None:
    shape = tuple(file.get_slice(raw).get_shape())
    if shape != weight.shape:
        raise ConfigError(f"{path}: {raw} has shape {list(shape)}, but config.json asks for {list(weight.shape)}.")
    try:
        tensor: torch.Tensor = file.get_tensor(raw)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: {raw} cannot be read: {error}.") from error
    if not tensor.is_floating_point() or tensor.itemsize == 1:
        raise ConfigError(f"{path}: {raw} has type {tensor.dtype}; weights must be float32, bfloat16 or float16.")
    if weight.transform is not None:
        tensor = weight.transform(tensor.to(torch.float32))
    weight.target.copy_(tensor)
