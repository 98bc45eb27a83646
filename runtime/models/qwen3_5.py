"""Qwen3.5, dense text: gated delta-net layers and gated full attention, with an optional MTP head.

Also reads the language model of a multimodal checkpoint: its vision tower is ignored, and for text alone mrope's
three position rows are equal, which makes it plain rotary embedding.
"""

from __future__ import annotations

import torch

from runtime.api import CapabilityError
from runtime.attention.backend import StepContext
from runtime.layers.attention import Attention, AttentionOptions
from runtime.layers.embedding import Embedding
from runtime.layers.gated_delta import GatedDeltaMixer
from runtime.layers.linear import Linear, Part, Placement
from runtime.layers.mlp import GatedMLP
from runtime.layers.norm import RMSNorm, centre_on_one, over_rms
from runtime.layers.rotary import Angles, Rotary
from runtime.loader import NameMap, Weight
from runtime.models.base import Built, Family, HybridModel, MtpHead
from runtime.models.options import divisible, layer_kinds, require_silu, rope_theta, rotary_dim
from runtime.spec import AttentionSpec, ConfigFile, LayerKind, LayerSpec, ModelSpec, RecurrentSpec

KINDS = {"linear_attention": LayerKind.GATED_DELTA, "full_attention": LayerKind.ATTENTION}
IGNORED = (r"^model\.visual\.", r"rotary_emb\.inv_freq$")


class DecoderLayer:
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, name: str, index: int, layer: LayerSpec, config: ConfigFile, place: Placement) -> None:
        hidden = config.integer("hidden_size")
        eps = config.number("rms_norm_eps", 1e-6)
        self._index = index
        self._attention: Attention | None = None
        self._delta: GatedDeltaMixer | None = None
        if layer.attention is not None:
            options = AttentionOptions(
                scale=layer.attention.head_dim**-0.5,
                bias=config.boolean("attention_bias", default=False),
                gated=True,
                norm_eps=eps,
            )
            self._attention = Attention(f"{name}.self_attn", layer.attention, hidden, options, place)
        if layer.recurrent is not None:
            self._delta = GatedDeltaMixer(f"{name}.linear_attn", layer.recurrent, hidden, eps, place)
        inner = config.integer("intermediate_size")
        gate_up = [Part(f"{name}.mlp.gate_proj", inner), Part(f"{name}.mlp.up_proj", inner)]
        self._mlp = GatedMLP(gate_up, f"{name}.mlp.down_proj", hidden, place)
        self._before = RMSNorm(f"{name}.input_layernorm", hidden, eps, place, zero_centred=True)
        self._between = RMSNorm(f"{name}.post_attention_layernorm", hidden, eps, place, zero_centred=True)

    def __call__(self, x: torch.Tensor, angles: Angles | None, ctx: StepContext) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        if self._attention is not None:
            x = self._attention.add_to(x, self._before(x), self._index, angles, ctx)
        elif self._delta is not None:
            x = self._delta.add_to(x, self._before(x), self._index, ctx)
        return self._mlp.add_to(x, self._between(x))

    def weights(self) -> list[Weight]:
        """Where the checkpoint's tensors go."""
        found = self._before.weights() + self._between.weights() + self._mlp.weights()
        if self._attention is not None:
            found += self._attention.weights()
        if self._delta is not None:
            found += self._delta.weights()
        return found


class Qwen35Model(HybridModel):
    """The trunk and its head."""

    def __init__(self, config: ConfigFile, spec: ModelSpec, place: Placement) -> None:
        hidden = spec.hidden_size
        self._spec = spec
        self.embedding = Embedding("model.embed_tokens", spec.vocab_size, hidden, place)
        self._head = self.embedding
        if not spec.tie_word_embeddings:
            self._head = Embedding("lm_head", spec.vocab_size, hidden, place)
        self.rotary = _rotary(config, spec.max_position_embeddings, place)
        self._layers = [
            DecoderLayer(f"model.layers.{i}", i, layer, config, place) for i, layer in enumerate(spec.layers)
        ]
        eps = config.number("rms_norm_eps", 1e-6)
        self._norm = RMSNorm("model.norm", hidden, eps, place, zero_centred=True)

    @property
    def spec(self) -> ModelSpec:
        """Shapes and ids."""
        return self._spec

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps tokens [T] -> [T, hidden] float32."""
        return self.embedding.look_up(tokens)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """tokens, positions [T] -> hidden [T, hidden] float32 after the final norm."""
        x = self.embedding.look_up(tokens)
        angles = self.rotary(positions) if self._spec.attention_layers else None
        for layer in self._layers:
            x = layer(x, angles, ctx)
        return self._norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden [m, hidden] -> [m, vocab] float32."""
        return self._head.score(hidden)

    def weights(self) -> list[Weight]:
        """Where the checkpoint's tensors go."""
        found = self.embedding.weights() + self._norm.weights()
        if self._head is not self.embedding:
            found += self._head.weights()
        for layer in self._layers:
            found += layer.weights()
        return found


class Qwen35Mtp(MtpHead):
    """norm(layer(fc[norm(embedding of the next token) | norm(hidden)])): embedding and head are the trunk's."""

    def __init__(self, config: ConfigFile, target: Qwen35Model, place: Placement) -> None:
        hidden = target.spec.hidden_size
        eps = config.number("rms_norm_eps", 1e-6)
        self._target = target
        self._fuse = Linear([Part("mtp.fc", hidden)], 2 * hidden, place)
        self._before = place.vector(2 * hidden).view(2, hidden)
        self._eps = eps
        self._norm = RMSNorm("mtp.norm", hidden, eps, place, zero_centred=True)
        self._layer = DecoderLayer("mtp.layers.0", 0, self.layers[0], config, place)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """One full-attention layer."""
        return self._target.spec.mtp_layers

    def forward(
        self, next_tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, ctx: StepContext
    ) -> torch.Tensor:
        """See `MtpHead.forward`."""
        both = torch.stack((self._target.embed(next_tokens), hidden), dim=1)
        both = (over_rms(both, self._eps) * self._before).view(hidden.shape[0], -1)
        return self._norm(self._layer(self._fuse(both), self._target.rotary(positions), ctx))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden [m, hidden] -> [m, vocab] float32, by the target's head."""
        return self._target.logits(hidden)

    def weights(self) -> list[Weight]:
        """Where the checkpoint's tensors go."""
        size = (self._before.shape[1],)
        found = self._fuse.weights() + self._norm.weights() + self._layer.weights()
        for name, row in (("embedding", self._before[0]), ("hidden", self._before[1])):
            found.append(Weight(f"mtp.pre_fc_norm_{name}.weight", row, size, centre_on_one))
        return found


class Qwen35Family(Family):
    """Qwen3_5ForCausalLM, and the text half of Qwen3_5ForConditionalGeneration."""

    def spec(self, config: ConfigFile, eos_ids: tuple[int, ...]) -> ModelSpec:
        """Reads config.json."""
        text = _text(config)
        require_silu(text)
        if not text.boolean("attn_output_gate", default=True):
            raise CapabilityError(f"{text.where}: attn_output_gate false is not supported.")
        rope_theta(text)
        layers = tuple(_layer_spec(text, kind) for kind in layer_kinds(text, _layer_names(text), KINDS))
        num_mtp = text.integer("mtp_num_hidden_layers", 0, minimum=0)
        return ModelSpec(
            architecture="Qwen3_5ForCausalLM",
            vocab_size=text.integer("vocab_size"),
            hidden_size=text.integer("hidden_size"),
            layers=layers,
            max_position_embeddings=text.integer("max_position_embeddings", 32768),
            eos_ids=eos_ids,
            tie_word_embeddings=config.boolean(
                "tie_word_embeddings", default=text.boolean("tie_word_embeddings", default=False)
            ),
            mtp_layers=(_layer_spec(text, LayerKind.ATTENTION),) * num_mtp,
        )

    def build(self, config: ConfigFile, spec: ModelSpec, place: Placement, *, with_mtp: bool) -> Built:
        """Allocates the parameters."""
        text = _text(config)
        model = Qwen35Model(text, spec, place)
        weights = model.weights()
        ignored = IGNORED + ((r"^lm_head\.weight$",) if spec.tie_word_embeddings else ())
        mtp = None
        if with_mtp and spec.mtp_layers:
            _check_mtp(text)
            mtp = Qwen35Mtp(text, model, place)
            weights += mtp.weights()
        else:
            ignored += (r"^mtp\.",)
        return Built(model, mtp, NameMap(tuple(weights), ignored, _published))


def _text(config: ConfigFile) -> ConfigFile:
    return config.section("text_config") if config.has("text_config") else config


def _layer_names(text: ConfigFile) -> tuple[str, ...]:
    if text.has("layer_types"):
        return text.texts("layer_types")
    interval = text.integer("full_attention_interval", 4)
    count = text.integer("num_hidden_layers")
    return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(count))


def _layer_spec(text: ConfigFile, kind: LayerKind) -> LayerSpec:
    if kind is LayerKind.ATTENTION:
        heads, kv_heads = text.integer("num_attention_heads"), text.integer("num_key_value_heads")
        divisible(text, heads, kv_heads, "attention")
        size = text.integer("head_dim", 256)
        return LayerSpec(kind, attention=AttentionSpec(heads, kv_heads, size, size))
    heads, groups = text.integer("linear_num_value_heads"), text.integer("linear_num_key_heads")
    divisible(text, heads, groups, "linear_num_value")
    k_dim, v_dim = text.integer("linear_key_head_dim"), text.integer("linear_value_head_dim")
    recurrent = RecurrentSpec(
        conv_channels=2 * groups * k_dim + heads * v_dim,
        conv_width=text.integer("linear_conv_kernel_dim", 4),
        heads=heads,
        v_dim=v_dim,
        k_dim=k_dim,
        groups=groups,
        gates=2,
    )
    return LayerSpec(kind, recurrent=recurrent)


def _rotary(text: ConfigFile, num_positions: int, place: Placement) -> Rotary:
    factor = text.positive("partial_rotary_factor", 0.25)
    if text.has("rope_parameters"):
        factor = text.section("rope_parameters").positive("partial_rotary_factor", factor)
    head_dim = text.integer("head_dim", 256)
    size = rotary_dim(text, head_dim, factor)
    return Rotary(size, head_dim, rope_theta(text), num_positions=num_positions, device=place.device)


def _check_mtp(text: ConfigFile) -> None:
    if text.integer("mtp_num_hidden_layers") != 1:
        raise CapabilityError(f"{text.where}: mtp_num_hidden_layers above 1 is not supported.")
    if text.boolean("mtp_use_dedicated_embeddings", default=False):
        raise CapabilityError(f"{text.where}: mtp_use_dedicated_embeddings is not supported.")


def _published(name: str) -> str:
    """Multimodal checkpoints keep the text model one level deeper."""
    for deeper in ("model.language_model.", "language_model.model."):
        if name.startswith(deeper):
            return f"model.{name.removeprefix(deeper)}"
    return name


FAMILY = Qwen35Family()
