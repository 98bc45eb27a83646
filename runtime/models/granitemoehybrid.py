"""Granite 4 hybrid with a dense feed-forward block: Mamba2 layers and plain grouped attention."""

from __future__ import annotations

import torch

from runtime.api import CapabilityError, ConfigError
from runtime.attention.backend import StepContext
from runtime.layers.attention import Attention, AttentionOptions
from runtime.layers.embedding import Embedding
from runtime.layers.linear import Part, Placement
from runtime.layers.mamba2 import Mamba2Mixer, Mamba2Options
from runtime.layers.mlp import GatedMLP
from runtime.layers.norm import RMSNorm
from runtime.layers.rotary import Angles, Rotary
from runtime.loader import NameMap, Weight
from runtime.models.base import Built, Family, HybridModel
from runtime.models.options import divisible, layer_kinds, require_silu, rope_theta, rotary_dim
from runtime.spec import AttentionSpec, ConfigFile, LayerKind, LayerSpec, ModelSpec, RecurrentSpec

KINDS = {
    "mamba": LayerKind.MAMBA2,
    "attention": LayerKind.ATTENTION,
    "linear_attention": LayerKind.MAMBA2,
    "full_attention": LayerKind.ATTENTION,
}
IGNORED = (r"rotary_emb\.inv_freq$",)
NO_ROPE = "nope"


class DecoderLayer:
    """x + m * mixer(norm(x)), then x + m * mlp(norm(x)), with m the residual multiplier."""

    def __init__(self, index: int, layer: LayerSpec, config: ConfigFile, place: Placement) -> None:
        name = f"model.layers.{index}"
        hidden = config.integer("hidden_size")
        eps = config.number("rms_norm_eps", 1e-6)
        self._index = index
        self._scale = config.number("residual_multiplier", 1.0)
        self._attention: Attention | None = None
        self._mamba: Mamba2Mixer | None = None
        if layer.attention is not None:
            options = AttentionOptions(
                scale=config.number("attention_multiplier", 1.0), bias=config.boolean("attention_bias", default=False)
            )
            self._attention = Attention(f"{name}.self_attn", layer.attention, hidden, options, place)
        if layer.recurrent is not None:
            self._mamba = Mamba2Mixer(f"{name}.mamba", layer.recurrent, hidden, _mamba_options(config), place)
        inner = config.integer("shared_intermediate_size", 1024)
        gate_up = [Part(f"{name}.shared_mlp.input_linear", 2 * inner)]
        self._mlp = GatedMLP(gate_up, f"{name}.shared_mlp.output_linear", hidden, place)
        self._before = RMSNorm(f"{name}.input_layernorm", hidden, eps, place, zero_centred=False)
        self._between = RMSNorm(f"{name}.post_attention_layernorm", hidden, eps, place, zero_centred=False)

    def __call__(self, x: torch.Tensor, angles: Angles | None, ctx: StepContext) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        if self._attention is not None:
            x = self._attention.add_to(x, self._before(x), self._index, angles, ctx, scale=self._scale)
        elif self._mamba is not None:
            x = self._mamba.add_to(x, self._before(x), self._index, ctx, scale=self._scale)
        return self._mlp.add_to(x, self._between(x), self._scale)

    def weights(self) -> list[Weight]:
        """Where the checkpoint's tensors go."""
        found = self._before.weights() + self._between.weights() + self._mlp.weights()
        if self._attention is not None:
            found += self._attention.weights()
        if self._mamba is not None:
            found += self._mamba.weights()
        return found


class GraniteModel(HybridModel):
    """The trunk and its head."""

    def __init__(self, config: ConfigFile, spec: ModelSpec, place: Placement) -> None:
        self._spec = spec
        self._embedding = Embedding("model.embed_tokens", spec.vocab_size, spec.hidden_size, place)
        self._head = self._embedding
        if not spec.tie_word_embeddings:
            self._head = Embedding("lm_head", spec.vocab_size, spec.hidden_size, place)
        self._layers = [DecoderLayer(i, layer, config, place) for i, layer in enumerate(spec.layers)]
        eps = config.number("rms_norm_eps", 1e-6)
        self._norm = RMSNorm("model.norm", spec.hidden_size, eps, place, zero_centred=False)
        self._embedding_scale = config.number("embedding_multiplier", 1.0)
        self._logits_scale = 1.0 / config.positive("logits_scaling", 1.0)
        self._rotary: Rotary | None = None
        if spec.attention_layers and config.text("position_embedding_type", NO_ROPE) == "rope":
            head_dim = _head_dim(config)
            self._rotary = Rotary(
                rotary_dim(config, head_dim, 1.0),
                head_dim,
                rope_theta(config),
                num_positions=spec.max_position_embeddings,
                device=place.device,
            )

    @property
    def spec(self) -> ModelSpec:
        """Shapes and ids."""
        return self._spec

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps tokens [T] -> [T, hidden] float32."""
        return self._embedding.look_up(tokens) * self._embedding_scale

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """tokens, positions [T] -> hidden [T, hidden] float32 after the final norm."""
        x = self.embed(tokens)
        angles = None if self._rotary is None else self._rotary(positions)
        for layer in self._layers:
            x = layer(x, angles, ctx)
        return self._norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden [m, hidden] -> [m, vocab] float32."""
        return self._head.score(hidden * self._logits_scale)

    def weights(self) -> list[Weight]:
        """Where the checkpoint's tensors go."""
        found = self._embedding.weights() + self._norm.weights()
        if self._head is not self._embedding:
            found += self._head.weights()
        for layer in self._layers:
            found += layer.weights()
        return found


class GraniteFamily(Family):
    """GraniteMoeHybridForCausalLM without experts."""

    def spec(self, config: ConfigFile, eos_ids: tuple[int, ...]) -> ModelSpec:
        """Reads config.json."""
        require_silu(config)
        if config.integer("num_local_experts", 8, minimum=0):
            raise CapabilityError(f"{config.where}: num_local_experts above 0 (mixture of experts) is not supported.")
        norm = config.text("normalization_function", "rmsnorm")
        if norm != "rmsnorm":
            raise CapabilityError(f"{config.where}: normalization_function {norm!r} is not supported (only rmsnorm).")
        position = config.text("position_embedding_type", NO_ROPE)
        if position not in {NO_ROPE, "rope"}:
            raise CapabilityError(f"{config.where}: position_embedding_type {position!r} is not supported.")
        if position == "rope":
            rope_theta(config)
        return ModelSpec(
            architecture="GraniteMoeHybridForCausalLM",
            vocab_size=config.integer("vocab_size"),
            hidden_size=config.integer("hidden_size"),
            layers=tuple(_layer_spec(config, kind) for kind in layer_kinds(config, _layer_names(config), KINDS)),
            max_position_embeddings=config.integer("max_position_embeddings", 2048),
            eos_ids=eos_ids,
            tie_word_embeddings=config.boolean("tie_word_embeddings", default=False),
        )

    def build(self, config: ConfigFile, spec: ModelSpec, place: Placement, *, with_mtp: bool) -> Built:
        """Allocates the parameters; this family publishes no MTP heads."""
        model = GraniteModel(config, spec, place)
        ignored = IGNORED + ((r"^lm_head\.weight$",) if spec.tie_word_embeddings else ())
        return Built(model, None, NameMap(tuple(model.weights()), ignored, _published))


def _layer_names(config: ConfigFile) -> tuple[str, ...]:
    for key in ("layer_types", "layers_block_type"):
        if config.has(key):
            return config.texts(key)
    return ("linear_attention",) * config.integer("num_hidden_layers")


def _head_dim(config: ConfigFile) -> int:
    return config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))


def _layer_spec(config: ConfigFile, kind: LayerKind) -> LayerSpec:
    if kind is LayerKind.ATTENTION:
        heads = config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", heads)
        divisible(config, heads, kv_heads, "attention")
        size = _head_dim(config)
        return LayerSpec(kind, attention=AttentionSpec(heads, kv_heads, size, size))
    heads, groups = config.integer("mamba_n_heads"), config.integer("mamba_n_groups", 1)
    divisible(config, heads, groups, "mamba")
    inner = config.integer("mamba_expand", 2) * config.integer("hidden_size")
    if inner % heads:
        raise ConfigError(f"{config.where}: mamba_n_heads {heads} must divide mamba_expand * hidden_size.")
    if not config.is_text("mamba_d_head", "auto") and config.integer("mamba_d_head", inner // heads) * heads != inner:
        raise ConfigError(f"{config.where}: mamba_d_head * mamba_n_heads must be mamba_expand * hidden_size.")
    k_dim = config.integer("mamba_d_state", 256)
    recurrent = RecurrentSpec(
        conv_channels=inner + 2 * groups * k_dim,
        conv_width=config.integer("mamba_d_conv", 4),
        heads=heads,
        v_dim=inner // heads,
        k_dim=k_dim,
        groups=groups,
        gates=1,
    )
    return LayerSpec(kind, recurrent=recurrent)


def _mamba_options(config: ConfigFile) -> Mamba2Options:
    low, high = config.numbers("time_step_limit", (0.0, float("inf")))
    return Mamba2Options(
        eps=config.number("rms_norm_eps", 1e-6),
        conv_bias=config.boolean("mamba_conv_bias", default=True),
        proj_bias=config.boolean("mamba_proj_bias", default=False),
        time_step_limit=(low, high),
        chunk=config.integer("mamba_chunk_size", 256),
    )


def _published(name: str) -> str:
    return name


FAMILY = GraniteFamily()
