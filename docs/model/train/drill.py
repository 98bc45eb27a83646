"""Drill the trunk: look back from a thing to its owner and its colour.

    python -m train.drill --tokenizer DIR --trunk DIR/trunk.pt --out DIR --steps 900

Three exercises, each until it is right or `--steps` are over: pairs of random tokens, colours,
owners. The later ones keep the earlier among their rows, and the last also ordinary documents. What
the trunk forgets over it comes back in the steps of train.train that follow.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn

from . import data, drills
from .encoder import Encoder, Row
from .network import Model, Shape
from .optim import optimisers, set_rate
from .stream import PLAIN_WEIGHT, PROMPT_WEIGHT, padded, stacked
from .train import average_gradients, join, launch, parser, weighted_loss
from .words import Words

Make = Callable[[Encoder, Words], Row]


def ordinary(encoder: Encoder, words: Words) -> Row:
    """A document of the usual stream."""
    made = data.document(words, 0.2)
    ids = encoder.ids(data.render(made))
    return ids, encoder.weights(ids, PLAIN_WEIGHT if made.text else PROMPT_WEIGHT)


@dataclass(frozen=True)
class Exercise:
    """Kinds of rows by weight; it is over when `judged` is right often enough."""

    rows: dict[Make, float]
    judged: Make
    enough: float


EXERCISES = [
    Exercise({drills.pairs: 1.0}, drills.pairs, 0.82),
    Exercise({drills.pairs: 0.5, drills.colors_of_all: 0.5}, drills.colors_of_all, 0.96),
    Exercise(
        {
            drills.owners_of_random_names: 0.36,
            drills.owners_of_all: 0.28,
            drills.colors_of_all: 0.18,
            drills.pairs: 0.03,
            ordinary: 0.15,
        },
        drills.owners_of_all,
        0.94,
    ),
]


def batch(make: Make, encoder: Encoder, words: Words, budget: int) -> list[Row]:
    """As many rows as fit into `budget` tokens."""
    rows: list[Row] = []
    longest = 0
    while True:
        row = make(encoder, words)
        if len(row[0]) > data.LONGEST:
            continue
        longest = max(longest, padded(len(row[0])))
        if rows and longest * (len(rows) + 1) > budget:
            return rows
        rows.append(row)


def lesson(exercise: Exercise, encoder: Encoder, words: Words, budget: int) -> Iterator[list[Row]]:
    """Endless batches of one exercise."""
    while True:
        make = words.rng.choices(list(exercise.rows), list(exercise.rows.values()))[0]
        yield batch(make, encoder, words, budget)


def source(seed: int, rank: int) -> Words:
    """What one process draws its rows from, through all exercises."""
    return Words(random.Random(f"drill/{seed}/{rank}"), drilled=True)


def made_again(
    encoder: Encoder, seed: int, rank: int, steps: list[int], budget: int
) -> Iterator[Row]:
    """Every row of one process of a run that took `steps` in each exercise."""
    words = source(seed, rank)
    for exercise, count in zip(EXERCISES, steps, strict=True):
        for rows in islice(lesson(exercise, encoder, words, budget), count):
            yield from rows


@torch.no_grad()
def right(model: Model, encoder: Encoder, make: Make, device: str) -> float:
    """Share of looked-up tokens that come out right."""
    words = Words(random.Random("judged"), drilled=True)
    ids, weights = stacked([make(encoder, words) for _ in range(24)], encoder.stop)
    sought = (weights[:, 1:] == 1.0).to(device)
    ids = ids.to(device)
    hidden = model.model(ids[:, :-1])
    best = F.linear(hidden[sought], model.model.embed_tokens.weight).argmax(-1)
    return (best == ids[:, 1:][sought]).float().mean().item()


def work(rank: int, args: argparse.Namespace) -> None:
    """One process of the run."""
    join(rank, args)
    encoder = Encoder(args.tokenizer)
    saved = torch.load(args.trunk, map_location=args.device, weights_only=True)
    model = Model(Shape(**saved["shape"])).to(args.device)
    model.load_state_dict(saved["model"])
    named = list(model.model.named_parameters())
    params = [param for _, param in named]
    optims = optimisers(named, args.lr)
    words = source(args.seed, rank)
    begun, done, tokens = time.time(), [0] * len(EXERCISES), saved["tokens"]
    for number, exercise in enumerate(EXERCISES):
        lessons = lesson(exercise, encoder, words, args.tokens)
        for step, rows in enumerate(islice(lessons, args.steps), 1):
            set_rate(optims, min(1.0, step / 20))
            ids, weights = stacked(rows, encoder.stop)
            ids, weights = ids.to(args.device), weights.to(args.device)
            hidden = model.model(ids[:, :-1])
            embedding = model.model.embed_tokens.weight
            weighted_loss(hidden, embedding, ids[:, 1:], weights[:, 1:]).backward()
            average_gradients(params, args.processes)
            nn.utils.clip_grad_norm_(params, 1.0)
            for optim in optims:
                optim.step()
                optim.zero_grad(set_to_none=True)
            done[number] = step
            tokens += args.tokens * args.processes
            if step % args.every == 0:  # the same in every process: all hold the same weights
                share = right(model, encoder, exercise.judged, args.device)
                if rank == 0:
                    name = exercise.judged.__name__
                    print(f"{name} {step} {time.time() - begun:.0f}s {share:.2f}", flush=True)
                if share >= exercise.enough:
                    break
    if rank == 0:
        set_rate(optims, 1.0)
        saved["model"], saved["tokens"] = model.state_dict(), tokens
        saved["drill"] = {"seed": args.seed, "steps": done, "tokens": args.tokens}
        torch.save(saved, args.out / "trunk.pt")


def main() -> None:
    """Command line."""
    made = parser(__doc__)
    made.add_argument("--trunk", type=str, required=True)
    made.add_argument("--seed", type=int, default=40)
    made.add_argument("--lr", type=float, default=4e-3)
    launch(work, made.parse_args())


if __name__ == "__main__":
    main()
