"""The network and its training forward: gated delta-net, gated attention, MTP head (Qwen3.5 dense).

Parameters carry the names of the published format, so a state dict is a checkpoint. The forward
pass is written for training on padded rows: the delta rule runs in chunks of 32 positions, with one
triangular solve for all chunks of all heads at once; only the state from chunk to chunk is
sequential.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 32
EPSILON = 1e-6


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; the defaults are the shipped model's."""

    vocab: int
    hidden: int = 128
    mlp: int = 256
    layers: int = 4
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    delta_key_heads: int = 2
    delta_value_heads: int = 4
    delta_dim: int = 32
    conv: int = 4
    rope_theta: float = 10000.0

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that are rotated (half of it)."""
        return self.head_dim // 2

    @property
    def layer_types(self) -> list[str]:
        """Linear and full attention in turns."""
        return ["linear_attention", "full_attention"] * (self.layers // 2)

    def config(self, end_of_turn: int, pad: int) -> dict[str, object]:
        """The published config.json."""
        frequencies = self.rotary_dim // 2
        third, rest = divmod(frequencies, 3)
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "full_attention_interval": 2,
            "layer_types": self.layer_types,
            "linear_conv_kernel_dim": self.conv,
            "linear_key_head_dim": self.delta_dim,
            "linear_num_key_heads": self.delta_key_heads,
            "linear_num_value_heads": self.delta_value_heads,
            "linear_value_head_dim": self.delta_dim,
            "max_position_embeddings": 4096,
            "rms_norm_eps": EPSILON,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [third + (rest > 0), third + (rest > 1), third],
                "partial_rotary_factor": 0.5,
                "rope_theta": self.rope_theta,
                "rope_type": "default",
            },
            "initializer_range": 0.02,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": end_of_turn,
            "pad_token_id": pad,
        }

    def as_dict(self) -> dict[str, object]:
        """Plain values, for checkpoints."""
        return asdict(self)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A matrix without bias, at the usual small initial scale."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, 0.0, 0.02)
    return layer


class Norm(nn.Module):
    """RMS norm whose weight is an offset from one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), 1.0 + self.weight, EPSILON)


class PlainNorm(nn.Module):
    """The delta-net's output norm: its weight is the factor itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, EPSILON)


class Mlp(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden, shape.mlp)
        self.up_proj = linear(shape.hidden, shape.mlp)
        self.down_proj = linear(shape.mlp, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_table(shape: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, rotary_dim]; text positions are equal on all three rope axes."""
    steps = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[:, None].float() / shape.rope_theta ** (steps / shape.rotary_dim)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first half of each head of x [B, H, T, D]."""
    cos, sin = table
    size = cos.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    low, high = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-high, low], -1) * sin, kept], -1)


class Attention(nn.Module):
    """Grouped-query attention with an output gate per head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.query_heads * shape.head_dim
        self.q_proj = linear(shape.hidden, 2 * width)
        self.k_proj = linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = linear(width, shape.hidden)
        self.q_norm = Norm(shape.head_dim)
        self.k_norm = Norm(shape.head_dim)

    def project(
        self, x: Tensor, table: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rotated queries, keys and values [B, H, T, D] (one per query head), and the gate."""
        batch, length, _ = x.shape
        shape = self.shape
        both = self.q_proj(x).view(batch, length, shape.query_heads, 2 * shape.head_dim)
        query, gate = both.chunk(2, -1)
        key = self.k_proj(x).view(batch, length, shape.kv_heads, shape.head_dim)
        value = self.v_proj(x).view(batch, length, shape.kv_heads, shape.head_dim)
        group = shape.query_heads // shape.kv_heads
        query = rotate(self.q_norm(query).transpose(1, 2), table)
        key = rotate(self.k_norm(key).transpose(1, 2), table).repeat_interleave(group, 1)
        value = value.transpose(1, 2).repeat_interleave(group, 1)
        return query, key, value, gate.reshape(batch, length, -1)

    def finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Gate and project attention's output [B, H, T, D]."""
        batch, _, length, _ = mixed.shape
        flat = mixed.transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(flat * torch.sigmoid(gate))

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value, gate = self.project(x, table)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.finish(mixed, gate)


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """Gated delta rule over [B, T, H, D] (T a multiple of CHUNK), from an empty state.

    S[t] = exp(g[t]) S[t-1] + beta[t] k[t] (v[t] - (exp(g[t]) S[t-1])^T k[t])^T
    out[t] = S[t]^T q[t]
    """
    batch, length, heads, size = value.shape
    count = length // CHUNK

    def split(x: Tensor) -> Tensor:
        return x.view(batch, count, CHUNK, heads, -1).permute(0, 3, 1, 2, 4)

    query, key, value = split(query), split(key), split(value)
    beta = split(beta[..., None])
    decay = split(log_decay[..., None]).squeeze(-1).cumsum(-1)
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=value.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(future, float("-inf")).exp()
    from_start = decay.exp()[..., None]
    weighted = key * beta
    transposed = key.transpose(-1, -2)
    right = torch.cat([value * beta, weighted * from_start], -1)
    solved = torch.linalg.solve_triangular(
        weighted @ transposed * between, right, upper=False, unitriangular=True
    )
    fresh, reads = solved.split([size, key.shape[-1]], -1)
    scores = query @ transposed * between
    state_query = query * from_start
    to_end = (key * (decay[..., -1:] - decay).exp()[..., None]).transpose(-1, -2)
    whole = decay[..., -1].exp()[..., None, None]

    outputs = []
    state = torch.zeros(batch, heads, key.shape[-1], size, device=value.device)
    for index in range(count):
        change = fresh[:, :, index] - reads[:, :, index] @ state
        outputs.append(scores[:, :, index] @ change + state_query[:, :, index] @ state)
        if index < count - 1:
            state = state * whole[:, :, index] + to_end[:, :, index] @ change
    return torch.stack(outputs, 2).permute(0, 2, 3, 1, 4).reshape(batch, length, heads, size)


class DeltaNet(nn.Module):
    """Gated delta-net: short causal convolution, then a linear-attention state with decay."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.key_width = shape.delta_key_heads * shape.delta_dim
        self.value_width = shape.delta_value_heads * shape.delta_dim
        mixed = 2 * self.key_width + self.value_width
        self.in_proj_qkv = linear(shape.hidden, mixed)
        self.in_proj_z = linear(shape.hidden, self.value_width)
        self.in_proj_b = linear(shape.hidden, shape.delta_value_heads)
        self.in_proj_a = linear(shape.hidden, shape.delta_value_heads)
        self.conv1d = nn.Conv1d(mixed, mixed, shape.conv, groups=mixed, bias=False)
        nn.init.uniform_(self.conv1d.weight, -0.5, 0.5)
        heads = shape.delta_value_heads
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.5, 8.0).log())
        self.dt_bias = nn.Parameter(torch.empty(heads).uniform_(-4.5, -1.0))
        self.norm = PlainNorm(shape.delta_dim)
        self.out_proj = linear(self.value_width, shape.hidden)

    def convolve(self, x: Tensor) -> Tensor:
        """Causal depthwise convolution over [B, T, C], as shifted sums (fast for four taps)."""
        length, taps = x.shape[1], self.shape.conv
        padded = F.pad(x, (0, 0, taps - 1, 0))
        weight = self.conv1d.weight[:, 0]
        total = padded[:, :length] * weight[:, 0]
        for tap in range(1, taps):
            total = total + padded[:, tap : tap + length] * weight[:, tap]
        return F.silu(total)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shape = self.shape
        heads, size = shape.delta_value_heads, shape.delta_dim
        mixed = self.convolve(self.in_proj_qkv(x))
        query, key, value = mixed.split([self.key_width, self.key_width, self.value_width], -1)
        query = query.view(batch, length, shape.delta_key_heads, size)
        key = key.view(batch, length, shape.delta_key_heads, size)
        query = query * torch.rsqrt((query * query).sum(-1, keepdim=True) + 1e-6) * size**-0.5
        key = key * torch.rsqrt((key * key).sum(-1, keepdim=True) + 1e-6)
        group = heads // shape.delta_key_heads
        log_decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)
        mixed = chunked_delta_rule(
            query.repeat_interleave(group, 2),
            key.repeat_interleave(group, 2),
            value.view(batch, length, heads, size),
            log_decay,
            self.in_proj_b(x).sigmoid(),
        )
        gate = F.silu(self.in_proj_z(x).view(batch, length, heads, size))
        return self.out_proj((self.norm(mixed) * gate).reshape(batch, length, -1))


class DeltaLayer(nn.Module):
    """A layer whose mixer is the delta-net."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.linear_attn = DeltaNet(shape)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        del table  # the delta-net has no positions
        x = x + self.linear_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class AttentionLayer(nn.Module):
    """A layer whose mixer is attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), table)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Embedding, layers and final norm; the head is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        nn.init.normal_(self.embed_tokens.weight, 0.0, 0.02)
        self.layers = nn.ModuleList(
            DeltaLayer(shape) if kind == "linear_attention" else AttentionLayer(shape)
            for kind in shape.layer_types
        )
        self.norm = Norm(shape.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        """Final hidden states [B, T, hidden]; T must be a multiple of CHUNK."""
        table = rotary_table(self.shape, torch.arange(ids.shape[1], device=ids.device))
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, table)
        return self.norm(x)


class Mtp(nn.Module):
    """The draft head: one attention layer over (embedding of the next token, hidden state)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = linear(2 * shape.hidden, shape.hidden)
        self.pre_fc_norm_embedding = Norm(shape.hidden)
        self.pre_fc_norm_hidden = Norm(shape.hidden)
        self.layers = nn.ModuleList([AttentionLayer(shape)])
        self.norm = Norm(shape.hidden)

    def unroll(self, embedding: Tensor, ids: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
        """Hidden states of drafts 1..depth: draft d at position t predicts ids[t + d + 1].

        Draft 1 attends to itself causally. A later draft attends to the first drafts' keys before
        it and to the keys of its own chain, which is what a drafter sees that keeps its cache from
        verified tokens and appends its own drafts.
        """
        bases = ids.shape[1] - depth
        causal = torch.ones(bases, bases, dtype=torch.bool, device=ids.device).triu(1)
        first: tuple[Tensor, Tensor] | None = None
        chain: list[tuple[Tensor, Tensor]] = []
        outputs = []
        state = hidden[:, :bases]
        layer = self.layers[0]
        scale = self.shape.head_dim**-0.5
        for step in range(1, depth + 1):
            token = F.embedding(ids[:, step : step + bases], embedding)
            both = [self.pre_fc_norm_embedding(token), self.pre_fc_norm_hidden(state)]
            x = self.fc(torch.cat(both, -1))
            positions = torch.arange(bases, device=ids.device) + step - 1
            table = rotary_table(self.shape, positions)
            attention = layer.self_attn
            query, key, value, gate = attention.project(layer.input_layernorm(x), table)
            if first is None:
                mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
                first = (key, value)
            else:
                chain.append((key, value))
                scores = (query @ first[0].transpose(-1, -2) * scale).masked_fill(
                    causal, float("-inf")
                )
                own = torch.stack([(query * k).sum(-1) * scale for k, _ in chain], -1)
                share = torch.cat([scores, own], -1).softmax(-1)
                mixed = share[..., :bases] @ first[1]
                for index, (_, v) in enumerate(chain):
                    mixed = mixed + share[..., bases + index, None] * v
            x = x + attention.finish(mixed, gate)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            state = self.norm(x)
            outputs.append(state)
        return outputs


class Model(nn.Module):
    """Trunk and draft head, under the published names `model.*` and `mtp.*`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Trunk(shape)
        self.mtp = Mtp(shape)
