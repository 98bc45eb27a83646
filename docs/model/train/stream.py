"""From documents to padded batches with loss weights.

One document per row, so no other document is in view; rows of similar length share a batch, padded
to a multiple of the network's chunk.
"""

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from . import data, drills
from .encoder import Encoder, Row
from .network import CHUNK

PROMPT_WEIGHT = 0.1
PLAIN_WEIGHT = 0.5
COPIES = 3
DRILL_SHARE = 0.08  # beside the documents, once the drills are done


def random_copy(encoder: Encoder, rng: random.Random) -> Row:
    """A row of random tokens that come again: the plainest form of copying."""
    ordinary = encoder.vocab - 7  # without special tokens and marks
    tokens = [rng.randrange(ordinary) for _ in range(rng.randrange(2, 24))]
    if rng.random() < 0.3:  # repeats inside need a longer match
        few = tokens[: max(2, len(tokens) // 3)]
        tokens = [rng.choice(few) for _ in tokens]
    if rng.random() < 0.5:
        ids = tokens * COPIES
        return ids, [0.0] * len(tokens) + [0.7] * (len(ids) - len(tokens))
    ask = rng.choice(["Repeat after me: ", "Repeat: ", "Say this: ", "Copy this text: ", "Echo: "])
    ids = encoder.ids(f"{data.START}user\n{ask}") + tokens
    ids += encoder.ids(f"{data.END}\n{data.GENERATE}") + tokens + [encoder.end] + encoder.ids("\n")
    return ids, encoder.weights(ids, PROMPT_WEIGHT)


def rows(encoder: Encoder, seed: int, rank: int, index: int) -> list[Row]:
    """The rows of one chunk."""
    documents = list(data.chunk(seed, rank, index))
    coded = encoder.batch([data.render(document) for document in documents])
    made: list[Row] = []
    for document, ids in zip(documents, coded, strict=True):
        if len(ids) <= data.LONGEST:
            prompt = PLAIN_WEIGHT if document.text else PROMPT_WEIGHT
            made.append((ids, encoder.weights(ids, prompt)))
    rng = random.Random(f"random/{seed}/{rank}/{index}")
    share = 0.10 if index < data.RANDOM_UNTIL_CHUNK else 0.03
    made += [random_copy(encoder, rng) for _ in range(int(share * len(documents)))]
    if index >= data.DRILLED_FROM_CHUNK:
        made += drills.mixed(encoder, rng, int(DRILL_SHARE * len(documents)))
    return made


def padded(length: int) -> int:
    """Next multiple of the chunk."""
    return (length + CHUNK - 1) // CHUNK * CHUNK


def stacked(group: list[Row], fill: int) -> tuple[Tensor, Tensor]:
    """Rows as padded ids and weights [B, T+1]."""
    length = max(padded(len(ids)) for ids, _ in group)
    tokens = torch.full((len(group), length + 1), fill)
    weights = torch.zeros(len(group), length + 1)
    for at, (ids, weight) in enumerate(group):
        tokens[at, : len(ids)] = torch.tensor(ids)
        weights[at, : len(ids)] = torch.tensor(weight)
    return tokens, weights


def batches(
    encoder: Encoder, seed: int, rank: int, budget: int, skip: int = 0, first: int = 0
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Endless (ids [B, T+1], weights [B, T+1], chunk), B x T <= `budget`.

    It begins with chunk `first`, and leaves out `skip` batches.
    """
    index = first
    while True:
        rng = random.Random(f"order/{seed}/{rank}/{index}")
        ordered = sorted(
            rows(encoder, seed, rank, index), key=lambda r: len(r[0]) + 12 * rng.random()
        )
        groups: list[list[Row]] = [[]]
        longest = 0
        for row in ordered:
            length = padded(len(row[0]))
            if groups[-1] and max(longest, length) * (len(groups[-1]) + 1) > budget:
                groups.append([])
                longest = 0
            groups[-1].append(row)
            longest = max(longest, length)
        rng.shuffle(groups)
        for group in groups:
            if skip:
                skip -= 1
                continue
            yield *stacked(group, encoder.stop), index
        index += 1
