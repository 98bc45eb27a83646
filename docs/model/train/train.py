"""Train the trunk.

    python -m train.train --tokenizer DIR --out DIR --steps N

Two processes of one thread each, averaging one flat gradient, are the fastest layout on two cores;
on a CUDA device use `--device cuda --processes 1`. A checkpoint is written every `--every` steps;
`--resume` goes on from it, on the same data, and may be given another number of steps as long as
the learning rate has not begun to fall.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from . import data
from .encoder import Encoder
from .exchanges import KINDS
from .network import Model, Shape
from .optim import optimisers, schedule, set_rate
from .stream import batches, padded
from .words import Words

WATCHED = ["copy", "unicode", "say", "json", "context", "things", "tool", "math", "fact"]
Held = dict[str, list[tuple[list[int], int]]]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments that both stages share."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--tokenizer", type=Path, required=True)
    made.add_argument("--out", type=Path, required=True, help="folder for checkpoints and logs")
    made.add_argument("--steps", type=int, required=True)
    made.add_argument("--processes", type=int, default=2)
    made.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    made.add_argument("--tokens", type=int, default=2048, help="per process and step")
    made.add_argument("--every", type=int, default=250, help="steps between reports")
    return made


def launch(work: Callable[[int, argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Run `work(rank, args)` in every process."""
    args.out.mkdir(parents=True, exist_ok=True)
    if args.processes == 1:
        work(0, args)
        return
    (args.out / "rendezvous").unlink(missing_ok=True)
    mp.spawn(work, args=(args,), nprocs=args.processes)


def join(rank: int, args: argparse.Namespace) -> None:
    """Set up one process."""
    if args.device == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    if args.processes > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{(args.out / 'rendezvous').resolve()}",
            rank=rank,
            world_size=args.processes,
        )


def average_gradients(params: list[nn.Parameter], processes: int) -> None:
    """Average over processes, as one message."""
    if processes == 1:
        return
    flat = torch.cat(
        [p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel()) for p in params]
    )
    dist.all_reduce(flat)
    flat /= processes
    at = 0
    for param in params:
        param.grad = flat[at : at + param.numel()].view_as(param).clone()
        at += param.numel()


def weighted_loss(hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy; the head is computed only where a target counts."""
    counts = weights > 0
    logits = F.linear(hidden[counts], embedding)
    losses = F.cross_entropy(logits, targets[counts], reduction="none")
    return (losses * weights[counts]).sum() / weights[counts].sum().clamp(min=1.0)


def held_out(encoder: Encoder, count: int) -> Held:
    """Questions to watch: ids up to the end of the last answer, and where it begins."""
    words = Words(random.Random("held out"))
    made: Held = {}
    for kind in WATCHED:
        made[kind] = [last_answer(encoder, words, kind, False) for _ in range(count)]
    for kind in ("copy", "json", "context"):
        made["long " + kind] = [last_answer(encoder, words, kind, True) for _ in range(count // 2)]
    return made


def last_answer(encoder: Encoder, words: Words, kind: str, late: bool) -> tuple[list[int], int]:
    """One question, if `late` after a few hundred tokens of chat."""
    made = KINDS[kind](words)
    document = data.Document([made], tools=made.tools)
    while late and len(encoder.ids(data.render(document))) < 400:
        other = KINDS[words.rng.choice(["copy", "json", "fact", "math", "say"])](words)
        document.exchanges.insert(0, other)
    ids = encoder.ids(data.render(document))
    weights = encoder.weights(ids, 0.0)
    end = max(at for at, weight in enumerate(weights) if weight)
    begin = end
    while weights[begin - 1]:
        begin -= 1
    return ids[: end + 1], begin


@torch.no_grad()
def exact(model: Model, encoder: Encoder, held: Held, device: str) -> dict[str, float]:
    """Share of answers that greedy decoding would give exactly."""
    result = {}
    for kind, cases in held.items():
        right = 0
        for at in range(0, len(cases), 10):
            group = cases[at : at + 10]
            length = max(padded(len(ids)) for ids, _ in group)
            tokens = torch.full((len(group), length), encoder.stop)
            for row, (ids, _) in enumerate(group):
                tokens[row, : len(ids)] = torch.tensor(ids)
            hidden = model.model(tokens.to(device))
            for row, (ids, begin) in enumerate(group):
                logits = F.linear(
                    hidden[row, begin - 1 : len(ids) - 1], model.model.embed_tokens.weight
                )
                right += logits.argmax(-1).tolist() == ids[begin:]
        result[kind] = round(right / len(cases), 2)
    return result


def work(rank: int, args: argparse.Namespace) -> None:
    """One process of the run."""
    join(rank, args)
    encoder = Encoder(args.tokenizer)
    shape = Shape(vocab=encoder.vocab)
    model = Model(shape).to(args.device)
    named = list(model.model.named_parameters())
    params = [param for _, param in named]
    optims = optimisers(named, args.lr)
    step = tokens = 0
    drilled = None
    if args.resume:
        saved = torch.load(args.resume, map_location=args.device, weights_only=True)
        model.load_state_dict(saved["model"])
        for optim, state in zip(optims, saved["optims"], strict=True):
            optim.load_state_dict(state)
        step, tokens, drilled = saved["step"], saved["tokens"], saved.get("drill")
    held = held_out(encoder, 40)
    if rank == 0:
        print("parameters", sum(p.numel() for p in model.parameters()), vars(args), flush=True)
    mean = None
    begun, begun_tokens = time.time(), tokens
    for batch in batches(encoder, args.seed, rank, args.tokens, skip=step):
        set_rate(optims, schedule(step, args.steps))
        ids, weights, index = batch[0].to(args.device), batch[1].to(args.device), batch[2]
        hidden = model.model(ids[:, :-1])
        loss = weighted_loss(hidden, model.model.embed_tokens.weight, ids[:, 1:], weights[:, 1:])
        loss.backward()
        average_gradients(params, args.processes)
        nn.utils.clip_grad_norm_(params, 1.0)
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=True)
        step += 1
        tokens += (ids.numel() - ids.shape[0]) * args.processes
        mean = loss.item() if mean is None else 0.95 * mean + 0.05 * loss.item()
        if rank == 0 and (step % args.every == 0 or step == args.steps):
            rate = (tokens - begun_tokens) / (time.time() - begun)
            print(
                f"step {step} chunk {index} tokens {tokens / 1e6:.2f}M {time.time() - begun:.0f}s "
                f"{rate:.0f} tokens/s loss {mean:.3f} {exact(model, encoder, held, args.device)}",
                flush=True,
            )
            saved = {
                "model": model.state_dict(),
                "optims": [optim.state_dict() for optim in optims],
                "step": step,
                "tokens": tokens,
                "chunks": index + 1,
                "seed": args.seed,
                "shape": shape.as_dict(),
                "drill": drilled,
            }
            torch.save(saved, args.out / "writing.pt")
            (args.out / "writing.pt").replace(args.out / "trunk.pt")
        if step >= args.steps:
            break
    if args.processes > 1:
        dist.destroy_process_group()


def main() -> None:
    """Command line."""
    made = parser(__doc__)
    made.add_argument("--seed", type=int, default=20)
    made.add_argument("--lr", type=float, default=6e-3)
    made.add_argument("--resume", type=Path, default=None)
    launch(work, made.parse_args())


if __name__ == "__main__":
    main()
