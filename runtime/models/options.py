"""Options of config.json that several families share: read once here, refused by name where not implemented."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from runtime.api import CapabilityError, ConfigError
from runtime.spec import ConfigFile, LayerKind

PLAIN_ROPE = ("default", "mrope")


def refuse_quantised(config: ConfigFile) -> None:
    """Quantised checkpoints are not implemented."""
    for key in ("quantization_config", "compression_config"):
        if config.has(key):
            raise CapabilityError(f"{config.where}: {key} is set, and quantised weights are not supported.")


def require_silu(config: ConfigFile) -> None:
    """The only activation implemented."""
    activation = config.text("hidden_act", "silu")
    if activation not in {"silu", "swish"}:
        raise CapabilityError(f"{config.where}: hidden_act {activation!r} is not supported (only silu).")


def layer_kinds(config: ConfigFile, names: Seq[str], known: Mapping[str, LayerKind]) -> tuple[LayerKind, ...]:
    """`layer_types` as kinds; there must be num_hidden_layers of them."""
    count = config.integer("num_hidden_layers")
    if len(names) != count:
        raise ConfigError(f"{config.where}: layer_types names {len(names)} layers, num_hidden_layers says {count}.")
    for name in names:
        if name not in known:
            raise ConfigError(f"{config.where}: layer type {name!r} is not supported (only {', '.join(known)}).")
    return tuple(known[name] for name in names)


def rope_theta(config: ConfigFile) -> float:
    """The base of unscaled rotary embedding; any scaling is refused."""
    for key in ("rope_parameters", "rope_scaling"):
        if not config.has(key):
            continue
        section = config.section(key)
        kind = section.text("rope_type", section.text("type", "default"))
        if kind not in PLAIN_ROPE:
            raise CapabilityError(f"{config.where}: {key} of type {kind!r} is not supported (only default).")
        if section.has("rope_theta"):
            return section.positive("rope_theta")
    return config.positive("rope_theta", 10000.0)


def rotary_dim(config: ConfigFile, head_dim: int, factor: float) -> int:
    """How many values of each head turn."""
    size = int(head_dim * factor)
    if not 0 < size <= head_dim or size % 2:
        raise ConfigError(f"{config.where}: {factor} of a head of {head_dim} values cannot be rotated in pairs.")
    return size


def divisible(config: ConfigFile, heads: int, groups: int, what: str) -> None:
    """Grouped heads must divide."""
    if heads % groups:
        raise ConfigError(f"{config.where}: {heads} {what} heads cannot be shared by {groups} groups.")
