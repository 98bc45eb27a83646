"""From documents to padded batches with loss weights.

One document per row, so no other document is in view; rows of similar length share a batch, padded
to a multiple of the network's chunk.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import data
from .network import CHUNK

PROMPT_WEIGHT = 0.1
PLAIN_WEIGHT = 0.5
COPIES = 3


class Encoder:
    """The tokenizer with the ids that training needs."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.vocab = self.tokenizer.get_vocab_size()
        self.stop = self.ids(data.STOP)[0]
        self.end = self.ids(data.END)[0]
        self.generate = self.ids(data.GENERATE)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text; special tokens are recognised."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of many texts."""
        return [list(e.ids) for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def weights(self, ids: list[int], prompt: float) -> list[float]:
        """Weight of each token as a target: one in the model's turns, `prompt` elsewhere."""
        found = [prompt] * len(ids)
        head = self.generate
        inside = False
        at = 0
        while at < len(ids):
            if not inside and ids[at] == head[0] and ids[at : at + len(head)] == head:
                inside = True
                at += len(head)
                continue
            if inside:
                found[at] = 1.0
                inside = ids[at] != self.end
            at += 1
        return found


Row = tuple[list[int], list[float]]


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
    return made


def padded(length: int) -> int:
    """Next multiple of the chunk."""
    return (length + CHUNK - 1) // CHUNK * CHUNK


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
            length = max(padded(len(ids)) for ids, _ in group)
            tokens = torch.full((len(group), length + 1), encoder.stop)
            weights = torch.zeros(len(group), length + 1)
            for at, (ids, weight) in enumerate(group):
                tokens[at, : len(ids)] = torch.tensor(ids)
                weights[at, : len(ids)] = torch.tensor(weight)
            yield tokens, weights, index
        index += 1
