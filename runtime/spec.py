"""What a model is made of, as the state pools need to know it, and typed access to the config files that say so.

Knows nothing of tensors or families: a family (runtime/models) turns a `ConfigFile` into a `ModelSpec`.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from runtime.api import ConfigError

LARGEST = 2**40


class LayerKind(enum.Enum):
    """What mixes tokens in a layer."""

    ATTENTION = "attention"
    MAMBA2 = "mamba2"
    GATED_DELTA = "gated_delta"


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer; it keeps k [num_kv_heads, head_dim] and v [num_kv_heads, v_dim] per token."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """One recurrent layer; it keeps S [heads, v_dim, k_dim] and a window [conv_channels, conv_width - 1], float32.

    `groups` is the number of k heads: each serves heads / groups neighbouring heads. `gates` values per head and token.
    """

    conv_channels: int
    conv_width: int
    heads: int
    v_dim: int
    k_dim: int
    groups: int
    gates: int

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[heads, V, K]."""
        return (self.heads, self.v_dim, self.k_dim)

    @property
    def window_shape(self) -> tuple[int, int]:
        """[channels, width - 1]."""
        return (self.conv_channels, self.conv_width - 1)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: its kind, and the shape of the state it keeps (exactly one of the two)."""

    kind: LayerKind
    attention: AttentionSpec | None = None
    recurrent: RecurrentSpec | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model, as everything outside runtime/models knows it.

    `layers` are in forward order; a layer is named by its index here in `StepContext.attend` and `mix`. `mtp_layers`
    are those of the checkpoint's own MTP head (empty: it has none), numbered from 0 in the head's own context.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    eos_ids: tuple[int, ...]
    tie_word_embeddings: bool
    mtp_layers: tuple[LayerSpec, ...] = ()

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep KV."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.attention is not None)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep a recurrent state."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.recurrent is not None)


class ConfigFile:
    """A JSON object with typed getters; what is missing or of a wrong type is a ConfigError that names the key.

    A key that is absent or null takes `default`; without a default it is required.
    """

    def __init__(self, where: str, values: Mapping[str, object]) -> None:
        self.where = where
        self._values = values

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number, minimum <= n <= LARGEST."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= LARGEST:
            raise self._wrong(key, f"a whole number of {minimum}..{LARGEST}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number. transformers writes infinity as {"__float__": "Infinity"}."""
        value = _plain_float(self._get(key, default))
        if value is None:
            raise self._wrong(key, "a number")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.number(key, default)
        if not 0.0 < value < math.inf:
            raise self._wrong(key, "a number above zero")
        return value

    def boolean(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def is_text(self, key: str, text: str) -> bool:
        """Whether the key holds exactly this string."""
        return self._values.get(key) == text

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings")
        return tuple(cast("list[str]", value))

    def numbers(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """A list of as many numbers as `default` has."""
        value = self._get(key, list(default))
        found = [_plain_float(item) for item in value] if isinstance(value, list) else []
        if len(found) != len(default) or None in found:
            raise self._wrong(key, f"a list of {len(default)} numbers")
        return tuple(item for item in found if item is not None)

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: a number, a list of numbers, or nothing."""
        value = self._values.get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in found):
            raise self._wrong(key, "a token id or a list of token ids")
        return tuple(dict.fromkeys(found))

    def section(self, key: str) -> ConfigFile:
        """A nested object."""
        value = self._get(key, None)
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return ConfigFile(f"{self.where}: {key}", value)

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.where} lacks {key}.")
        return value

    def _wrong(self, key: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} must be {expected}, not {self._values.get(key)!r}.")


def _plain_float(value: object) -> float | None:
    if isinstance(value, dict) and value.get("__float__") in {"Infinity", "-Infinity"}:
        return float(value["__float__"])
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (isinstance(value, int) and abs(value) > LARGEST)
    ):
        return None
    return float(value)


def read_config(model_dir: Path) -> ConfigFile:
    """config.json of a model directory."""
    if not model_dir.is_dir():
        raise ConfigError(f"model directory {model_dir} does not exist.")
    path = model_dir / "config.json"
    if not path.is_file():
        raise ConfigError(f"model directory {model_dir} has no config.json.")
    return read_json(path)


def read_json(path: Path) -> ConfigFile:
    """A JSON file that holds an object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return ConfigFile(str(path), values)


def read_eos_ids(model_dir: Path, config: ConfigFile, vocab_size: int) -> tuple[int, ...]:
    """The ids that end a generation: generation_config.json's if it names any, else config.json's."""
    ids = config.ids("eos_token_id")
    generation = model_dir / "generation_config.json"
    if generation.is_file():
        ids = read_json(generation).ids("eos_token_id") or ids
    beyond = [i for i in ids if i >= vocab_size]
    if beyond:
        raise ConfigError(f"{model_dir}: eos_token_id {beyond[0]} is outside the vocabulary of {vocab_size}.")
    return ids
