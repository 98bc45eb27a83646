"""REF, the oracle: a model recomputed from nothing, one sequence, no cache, recurrences one token after the other.

Plain torch on the tensors of a model directory. It shares no code with runtime/layers or kernels and imports neither,
so that an error there cannot hide here. tests/runtime/models/test_ref.py compares it with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional

Tensor = torch.Tensor


@dataclass
class State:
    """One recurrent layer after some tokens: window [channels, width - 1], oldest first, and state [heads, V, K]."""

    window: Tensor
    state: Tensor


@dataclass
class KV:
    """One attention layer: k and v [T, kv_heads, D], k as it is stored (after norm and rotation)."""

    k: Tensor
    v: Tensor


@dataclass
class Trace:
    """One pass over a prefix. `states[n][layer]` is the state after the first n tokens, for the marks asked for."""

    hidden: Tensor
    states: dict[int, dict[int, State]] = field(default_factory=dict)
    kv: dict[int, KV] = field(default_factory=dict)


class Ref:
    """The oracle of one model directory, in `dtype` (float64 or float32)."""

    def __init__(self, model_dir: Path, dtype: torch.dtype = torch.float64) -> None:
        config = json.loads((model_dir / "config.json").read_text())
        config = config.get("text_config", config)
        self.config: dict[str, Any] = config
        self.dtype = dtype
        self.weights: dict[str, Tensor] = {}
        for path in sorted(model_dir.glob("*.safetensors")):
            for name, tensor in load_file(path).items():
                self.weights[name.replace("model.language_model.", "model.")] = tensor.to(dtype)
        self._qwen = config["model_type"].startswith("qwen3_5")
        self._eps = config.get("rms_norm_eps", 1e-6)
        self._kinds = self._layer_kinds()

    # --- what tests ask ---------------------------------------------------------------------------------------------

    def trace(self, tokens: Sequence[int], marks: Iterable[int] = ()) -> Trace:
        """Everything at once: hidden [T, H] after the final norm, KV, and states after each of `marks` tokens."""
        wanted = set(marks)
        trace = Trace(hidden=torch.empty(0), states={n: {} for n in wanted})
        x = self._embed(tokens)
        positions = torch.arange(len(tokens))
        scale = 1.0 if self._qwen else self.config.get("residual_multiplier", 1.0)
        for i, kind in enumerate(self._kinds):
            name = f"model.layers.{i}"
            h = self._norm(x, f"{name}.input_layernorm.weight")
            if kind == "attention":
                mixed, trace.kv[i] = self._attention(h, f"{name}.self_attn", positions)
            elif self._qwen:
                mixed, states = self._gated_delta(h, f"{name}.linear_attn", wanted)
            else:
                mixed, states = self._mamba2(h, f"{name}.mamba", wanted)
            if kind != "attention":
                for n, state in states.items():
                    trace.states[n][i] = state
            x = x + scale * mixed
            h = self._norm(x, f"{name}.post_attention_layernorm.weight")
            x = x + scale * self._mlp(h, name)
        trace.hidden = self._norm(x, "model.norm.weight")
        return trace

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """[T, H], after the final norm."""
        return self.trace(tokens).hidden

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[T, V]."""
        return self.head(self.hidden(tokens))

    def states(self, tokens: Sequence[int]) -> dict[int, State]:
        """By layer index, after all of `tokens`."""
        return self.trace(tokens, [len(tokens)]).states[len(tokens)]

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The `num_tokens` most likely next tokens, one after the other; EOS does not end it."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.head(self.hidden(tokens)[-1:]).argmax()))
        return tokens[len(prompt) :]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [m, V] of hidden rows [m, H]."""
        tied = "lm_head.weight" not in self.weights or self.config.get("tie_word_embeddings", False)
        weight = self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return hidden @ weight.T / (1.0 if self._qwen else self.config.get("logits_scaling", 1.0))

    def mtp_hidden(self, next_tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """Head output [T, H] for positions 0..T-1: `hidden` [T, H] beside the embedding of the token that follows."""
        embedded = self._norm(self._embed(next_tokens), "mtp.pre_fc_norm_embedding.weight")
        both = torch.cat([embedded, self._norm(hidden, "mtp.pre_fc_norm_hidden.weight")], dim=-1)
        x = both @ self.weights["mtp.fc.weight"].T
        name = "mtp.layers.0"
        h = self._norm(x, f"{name}.input_layernorm.weight")
        x = x + self._attention(h, f"{name}.self_attn", torch.arange(len(next_tokens)))[0]
        x = x + self._mlp(self._norm(x, f"{name}.post_attention_layernorm.weight"), name)
        return self._norm(x, "mtp.norm.weight")

    def mtp_logits(self, next_tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """[T, V], by the target's head."""
        return self.head(self.mtp_hidden(next_tokens, hidden))

    # --- the model --------------------------------------------------------------------------------------------------

    def _layer_kinds(self) -> list[str]:
        names = self.config.get("layer_types") or self.config.get("layers_block_type")
        if not names:
            interval = self.config.get("full_attention_interval", 4)
            names = ["linear" if (i + 1) % interval else "attention" for i in range(self.config["num_hidden_layers"])]
        return ["attention" if name in {"attention", "full_attention"} else "recurrent" for name in names]

    def _embed(self, tokens: Sequence[int]) -> Tensor:
        scale = 1.0 if self._qwen else self.config.get("embedding_multiplier", 1.0)
        return self.weights["model.embed_tokens.weight"][torch.tensor(list(tokens), dtype=torch.long)] * scale

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name] + (1.0 if self._qwen else 0.0)
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self._eps) * weight

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        if self._qwen:
            gate, up = self._linear(x, f"{name}.mlp.gate_proj"), self._linear(x, f"{name}.mlp.up_proj")
            return self._linear(functional.silu(gate) * up, f"{name}.mlp.down_proj")
        gate, up = self._linear(x, f"{name}.shared_mlp.input_linear").chunk(2, dim=-1)
        return self._linear(functional.silu(gate) * up, f"{name}.shared_mlp.output_linear")

    def _attention(self, x: Tensor, name: str, positions: Tensor) -> tuple[Tensor, KV]:
        c = self.config
        T, heads, kv_heads = x.shape[0], c["num_attention_heads"], c["num_key_value_heads"] or c["num_attention_heads"]
        q = self._linear(x, f"{name}.q_proj").view(T, heads, -1)
        k = self._linear(x, f"{name}.k_proj").view(T, kv_heads, -1)
        v = self._linear(x, f"{name}.v_proj").view(T, kv_heads, -1)
        gate = None
        if self._qwen:
            q, gate = q.chunk(2, dim=-1)
            q, k = self._norm(q, f"{name}.q_norm.weight"), self._norm(k, f"{name}.k_norm.weight")
        if self._qwen or c.get("position_embedding_type") == "rope":
            q, k = self._rotate(q, positions), self._rotate(k, positions)
        scale = q.shape[-1] ** -0.5 if self._qwen else c.get("attention_multiplier", 1.0)
        shared = heads // kv_heads
        scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(shared, dim=1)) * scale
        scores = scores.masked_fill(positions[None, :] > positions[:, None], float("-inf"))
        out = torch.einsum("hts,shd->thd", scores.softmax(-1), v.repeat_interleave(shared, dim=1))
        if gate is not None:
            out = out * torch.sigmoid(gate)
        return self._linear(out.reshape(T, -1), f"{name}.o_proj"), KV(k, v)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        rope = self.config.get("rope_parameters") or self.config
        factor = rope.get("partial_rotary_factor", 0.25 if self._qwen else 1.0)
        size = int(x.shape[-1] * factor)
        frequencies = 1.0 / rope.get("rope_theta", 10000.0) ** (torch.arange(0, size, 2, dtype=self.dtype) / size)
        angles = positions.to(self.dtype)[:, None, None] * frequencies
        a, b, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], dim=-1)

    def _convolve(self, raw: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Raw [T, C] -> silu(conv) [T, C], and the inputs with their zero history [W - 1 + T, C]."""
        weight = self.weights[f"{name}.conv1d.weight"][:, 0]
        width = weight.shape[1]
        history = torch.cat([raw.new_zeros(width - 1, raw.shape[1]), raw])
        y = sum(history[j : j + raw.shape[0]] * weight[:, j] for j in range(width))
        assert isinstance(y, Tensor)
        bias = self.weights.get(f"{name}.conv1d.bias")
        return functional.silu(y if bias is None else y + bias), history

    def _window(self, history: Tensor, num_tokens: int, width: int) -> Tensor:
        return history[num_tokens : num_tokens + width - 1].T.clone()

    def _gated_delta(self, x: Tensor, name: str, marks: set[int]) -> tuple[Tensor, dict[int, State]]:
        c = self.config
        T, width = x.shape[0], c.get("linear_conv_kernel_dim", 4)
        groups, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        K, V = c["linear_key_head_dim"], c["linear_value_head_dim"]
        mixed, history = self._convolve(self._linear(x, f"{name}.in_proj_qkv"), name)
        q, k, v = mixed.split([groups * K, groups * K, heads * V], dim=-1)
        q = _unit(q.view(T, groups, K)).repeat_interleave(heads // groups, dim=1) * K**-0.5
        k = _unit(k.view(T, groups, K)).repeat_interleave(heads // groups, dim=1)
        v = v.view(T, heads, V)
        beta = torch.sigmoid(self._linear(x, f"{name}.in_proj_b"))
        dt = functional.softplus(self._linear(x, f"{name}.in_proj_a") + self.weights[f"{name}.dt_bias"])
        decay = torch.exp(-self.weights[f"{name}.A_log"].exp() * dt)
        state, out, found = x.new_zeros(heads, V, K), [], {}
        for t in range(T + 1):
            if t in marks:
                found[t] = State(self._window(history, t, width), state.clone())
            if t == T:
                break
            state = state * decay[t][:, None, None]
            change = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
            state = state + change[:, :, None] * k[t][:, None, :]
            out.append(torch.einsum("hvk,hk->hv", state, q[t]))
        y = torch.stack(out)
        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + self._eps) * self.weights[f"{name}.norm.weight"]
        y = y * functional.silu(self._linear(x, f"{name}.in_proj_z").view(T, heads, V))
        return self._linear(y.reshape(T, -1), f"{name}.out_proj"), found

    def _mamba2(self, x: Tensor, name: str, marks: set[int]) -> tuple[Tensor, dict[int, State]]:
        c = self.config
        T, width, heads, groups, N = (
            x.shape[0],
            c["mamba_d_conv"],
            c["mamba_n_heads"],
            c["mamba_n_groups"],
            c["mamba_d_state"],
        )
        inner = c["mamba_expand"] * c["hidden_size"]
        P = inner // heads
        z, raw, dt = self._linear(x, f"{name}.in_proj").split([inner, inner + 2 * groups * N, heads], dim=-1)
        mixed, history = self._convolve(raw, name)
        u, B, C = mixed.split([inner, groups * N, groups * N], dim=-1)
        u = u.view(T, heads, P)
        B = B.view(T, groups, N).repeat_interleave(heads // groups, dim=1)
        C = C.view(T, groups, N).repeat_interleave(heads // groups, dim=1)
        low, high = (_plain(v) for v in c.get("time_step_limit") or (0.0, float("inf")))
        dt = functional.softplus(dt + self.weights[f"{name}.dt_bias"]).clamp(low, high)
        decay = torch.exp(-self.weights[f"{name}.A_log"].exp() * dt)
        state, out, found = x.new_zeros(heads, P, N), [], {}
        for t in range(T + 1):
            if t in marks:
                found[t] = State(self._window(history, t, width), state.clone())
            if t == T:
                break
            update = (dt[t][:, None] * u[t])[:, :, None] * B[t][:, None, :]
            state = state * decay[t][:, None, None] + update
            out.append(torch.einsum("hpn,hn->hp", state, C[t]) + self.weights[f"{name}.D"][:, None] * u[t])
        y = torch.stack(out).reshape(T, inner) * functional.silu(z)
        y = y.view(T, groups, -1)
        y = (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + self._eps)).reshape(T, inner)
        return self._linear(y * self.weights[f"{name}.norm.weight"], f"{name}.out_proj"), found


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _plain(value: Any) -> float:
    return float(value["__float__"] if isinstance(value, dict) else value)
