"""Muon in float32 for matrices, AdamW for the rest, and the learning-rate schedule.

torch's own Muon runs its Newton-Schulz iteration in bfloat16, which is slow on CPUs without it;
this one stays in float32 and stacks matrices of equal shape into one batched product.
"""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; each matrix moves by 0.2 sqrt(larger side) x lr."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update."""
        del closure
        for group in self.param_groups:
            same: dict[tuple[int, ...], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                state["momentum"].mul_(group["momentum"]).add_(param.grad)
                update = param.grad + group["momentum"] * state["momentum"]
                tall = update.shape[0] > update.shape[1]
                same[tuple(sorted(update.shape))].append((param, update.T if tall else update))
            for entries in same.values():
                stacked = orthogonalise(torch.stack([update for _, update in entries]))
                for (param, _), update in zip(entries, stacked, strict=True):
                    tall = param.shape[0] > param.shape[1]
                    size = 0.2 * max(param.shape) ** 0.5
                    param.add_(update.T if tall else update, alpha=-group["lr"] * size)


def orthogonalise(x: Tensor) -> Tensor:
    """Push the singular values of each matrix of a stack towards one."""
    a, b, c = NEWTON_SCHULZ
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def optimisers(named: list[tuple[str, nn.Parameter]], lr: float) -> list[torch.optim.Optimizer]:
    """Muon for weight matrices; AdamW for the embedding, vectors and the two thin projections."""
    matrices, others = [], []
    for name, param in named:
        thin = "embed" in name or "in_proj_a" in name or "in_proj_b" in name
        (matrices if param.ndim == 2 and not thin else others).append(param)
    return [
        Muon(matrices, lr),
        torch.optim.AdamW(others, lr=0.7 * lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def schedule(step: int, steps: int, warmup: int = 20, decay: float = 0.5) -> float:
    """Factor of the learning rate: a short warm-up, constant, then linear down to 2 %."""
    done = step / steps
    late = 1.0 if done < 1.0 - decay else max(0.02, (1.0 - done) / decay)
    return min(1.0, (step + 1) / warmup) * late


def set_rate(optims: list[torch.optim.Optimizer], factor: float) -> None:
    """Scale every group's rate from its initial value."""
    for optim in optims:
        for group in optim.param_groups:
            base = group.setdefault("base_lr", group["lr"])
            group["lr"] = base * factor
