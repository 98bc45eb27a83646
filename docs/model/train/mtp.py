"""Train the draft head (MTP) on the frozen trunk.

    python -m train.mtp --tokenizer DIR --trunk DIR/trunk.pt --out DIR --steps 450

It starts from its random state and learns, three drafts deep, the trunk's own next-token
distribution on the model's turns. No joint training is needed.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .encoder import Encoder
from .network import Model, Shape
from .optim import optimisers, schedule, set_rate
from .stream import batches
from .train import average_gradients, join, launch, parser

DEPTH_WEIGHTS = (1.0, 0.7, 0.5)


def draft_losses(model: Model, ids: Tensor, weights: Tensor) -> Tensor:
    """For each depth: cross-entropy of the draft's distribution to the trunk's."""
    embedding = model.model.embed_tokens.weight.detach()
    inputs = ids[:, :-1]
    with torch.no_grad():
        hidden = model.model(inputs)
    drafts = model.mtp.unroll(embedding, inputs, hidden, len(DEPTH_WEIGHTS))
    size = drafts[0].shape[1]
    losses = []
    for depth, draft in enumerate(drafts, 1):
        # draft at t stands for the trunk's prediction at t + depth, the target ids[t + depth + 1]
        counts = weights[:, depth + 1 : depth + 1 + size] > 0.9
        wanted = F.linear(hidden[:, depth : depth + size][counts], embedding).softmax(-1)
        given = F.linear(draft[counts], embedding).log_softmax(-1)
        losses.append(-(wanted * given).sum(-1).mean())
    return torch.stack(losses)


def work(rank: int, args: argparse.Namespace) -> None:
    """One process of the run."""
    join(rank, args)
    saved = torch.load(args.trunk, map_location=args.device, weights_only=True)
    encoder = Encoder(args.tokenizer)
    model = Model(Shape(**saved["shape"])).to(args.device)
    fresh = {f"mtp.{name}": value.clone() for name, value in model.mtp.state_dict().items()}
    model.load_state_dict({**saved["model"], **fresh})
    named = [(f"mtp.{name}", param) for name, param in model.mtp.named_parameters()]
    params = [param for _, param in named]
    optims = optimisers(named, args.lr)
    begun, last = time.time(), 0
    mean = torch.zeros(len(DEPTH_WEIGHTS), device=args.device)
    stream = batches(encoder, args.seed, rank, args.tokens, first=args.first)
    for step, batch in enumerate(stream, 1):
        last = batch[2]
        set_rate(optims, schedule(step - 1, args.steps))
        losses = draft_losses(model, batch[0].to(args.device), batch[1].to(args.device))
        if torch.isfinite(losses).all():  # a batch of plain texts has no turn of the model
            (losses * losses.new_tensor(DEPTH_WEIGHTS)).sum().backward()
            mean = mean + 0.05 * (losses.detach() - mean) if step > 1 else losses.detach()
        average_gradients(params, args.processes)
        nn.utils.clip_grad_norm_(params, 1.0)
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=True)
        if rank == 0 and (step % args.every == 0 or step == args.steps):
            shown = ", ".join(f"{value:.3f}" for value in mean.tolist())
            print(f"step {step} {time.time() - begun:.0f}s loss by depth {shown}", flush=True)
        if step >= args.steps:
            break
    if rank == 0:
        record = {"seed": args.seed, "steps": args.steps, "first": args.first, "chunks": last + 1}
        torch.save(
            {
                "model": model.state_dict(),
                "shape": saved["shape"],
                "trunk": {key: saved[key] for key in ("seed", "step", "tokens", "chunks")},
                "mtp": record,
                "drill": saved.get("drill"),
                "processes": args.processes,
            },
            args.out / "final.pt",
        )
    if args.processes > 1:
        dist.destroy_process_group()


def main() -> None:
    """Command line."""
    made = parser(__doc__)
    made.add_argument("--trunk", type=Path, required=True)
    made.add_argument("--seed", type=int, default=70)
    made.add_argument("--first", type=int, default=100, help="chunk to begin with: the full mix")
    made.add_argument("--lr", type=float, default=5e-3)
    launch(work, made.parse_args())


if __name__ == "__main__":
    main()
