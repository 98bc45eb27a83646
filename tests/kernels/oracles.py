"""The recurrences, the convolution and attention as their definitions say: one token after the other, in any dtype."""

from __future__ import annotations

import torch

from kernels.causal_conv1d.cases import Case as ConvCase
from kernels.gated_delta.cases import Case as DeltaCase
from kernels.mamba2.cases import Case as MambaCase
from kernels.paged_attention.cases import Case as AttentionCase


def mamba2(case: MambaCase, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """y [n, T, H, P] and the state after each node [n, T, H, P, N]."""
    x, dt, A, B, C, D, start = (
        each.to(dtype) for each in (case.x, case.dt, case.A, case.B, case.C, case.D, case.state)
    )
    n, T, H, P = x.shape
    share = H // B.shape[2]
    y = x.new_zeros(n, T, H, P)
    states = x.new_zeros(n, T, H, P, start.shape[3])
    for i in range(n):
        for t in range(T):
            parent = t - 1 if case.parents is None else int(case.parents[i, t])
            before = start[i] if parent < 0 else states[i, parent]
            for h in range(H):
                b, c = B[i, t, h // share], C[i, t, h // share]
                states[i, t, h] = torch.exp(dt[i, t, h] * A[h]) * before[h] + torch.outer(dt[i, t, h] * x[i, t, h], b)
                y[i, t, h] = states[i, t, h] @ c + D[h] * x[i, t, h]
    return y, states


def gated_delta(case: DeltaCase, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """y [n, T, Hv, V] and the state after each node [n, T, Hv, V, K]."""
    q, k, v, g, beta, start = (each.to(dtype) for each in (case.q, case.k, case.v, case.g, case.beta, case.state))
    n, T, Hv, V = v.shape
    K = k.shape[3]
    share = Hv // k.shape[2]
    y = v.new_zeros(n, T, Hv, V)
    states = v.new_zeros(n, T, Hv, V, K)
    for i in range(n):
        for t in range(T):
            parent = t - 1 if case.parents is None else int(case.parents[i, t])
            before = start[i] if parent < 0 else states[i, parent]
            for h in range(Hv):
                query, key = q[i, t, h // share], k[i, t, h // share]
                query = query / torch.sqrt(query @ query + 1e-6) / K**0.5
                key = key / torch.sqrt(key @ key + 1e-6)
                decayed = torch.exp(g[i, t, h]) * before[h]
                u = beta[i, t, h] * (v[i, t, h] - decayed @ key)
                states[i, t, h] = decayed + torch.outer(u, key)
                y[i, t, h] = states[i, t, h] @ query
    return y, states


def convolution(case: ConvCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 y [n, T, C], and the window after each node [n, T, C, W - 1] (exact copies)."""
    n, T, C = case.x.shape
    W = case.weight.shape[1]
    y = torch.zeros(n, T, C, dtype=torch.float64)
    windows = torch.zeros(n, T, C, W - 1)
    for i in range(n):
        for t in range(T):
            node, inputs = t, []
            while node >= 0:
                inputs.insert(0, case.x[i, node])
                node = node - 1 if case.parents is None else int(case.parents[i, node])
            inputs = [*case.window[i].unbind(1), *inputs][-W:]
            total = torch.zeros(C, dtype=torch.float64) if case.bias is None else case.bias.double()
            for j, each in enumerate(inputs):
                total = total + case.weight[:, j].double() * each.double()
            y[i, t] = total * torch.sigmoid(total)
            for j, each in enumerate(inputs[1:]):
                windows[i, t, :, j] = each
    return y, windows


def attention(case: AttentionCase) -> torch.Tensor:
    """Float64 outputs [t, Hq, D], from the visible cells alone."""
    size, Hkv = case.k_cache.shape[1:3]
    Hq = case.q.shape[1]
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    token = 0
    for i, count in enumerate(case.fed):
        length = int(case.lengths[i])
        for j in range(count):
            seen, node = list(range(length)), j
            while node >= 0:
                seen.append(length + node)
                node = node - 1 if case.parents is None else int(case.parents[i, node])
            blocks = [int(case.block_table[i, place // size]) for place in seen]
            offsets = [place % size for place in seen]
            keys = case.k_cache[blocks, offsets].double()
            values = case.v_cache[blocks, offsets].double()
            for h in range(Hq):
                group = h // (Hq // Hkv)
                weights = torch.softmax(keys[:, group] @ case.q[token, h].double() * case.scale, 0)
                out[token, h] = weights @ values[:, group]
            token += 1
    return out
