"""Rows that teach one circuit: looking back from a thing to what stood before it.

Ordinary text asks for it a few times in a thousand tokens, and a small network then stays at
guessing among what it has read. These rows ask many times in a row, and only the looked-up tokens
count.
"""

import random

from . import data
from .encoder import Encoder, Row
from .exchanges import owners_text
from .words import COLORS, OBJECTS, Words

REST = 0.02  # weight of what is said around the looked-up tokens
ORDINARY = 8  # the last entries of the vocabulary are special tokens and marks


def spelled(encoder: Encoder, parts: list[tuple[str, float]]) -> Row:
    """A row from texts with a weight each."""
    ids: list[int] = []
    weights: list[float] = []
    for text, weight in parts:
        made = encoder.ids(text)
        ids += made
        weights += [weight] * len(made)
    return ids, weights


def pairs(encoder: Encoder, words: Words) -> Row:
    """Random tokens in pairs `a b.`; then of each b in any order `b is a.`"""
    rng = words.rng
    count = rng.randrange(2, 9)
    tokens = rng.sample(range(encoder.vocab - ORDINARY), 2 * count)
    stop, verb = encoder.ids(".")[0], encoder.ids(" is")[0]
    ids: list[int] = []
    weights: list[float] = []
    for index in range(count):
        ids += [tokens[index], tokens[count + index], stop]
        weights += [0.0, 0.0, 0.0]
    for index in rng.sample(range(count), count):
        ids += [tokens[count + index], verb, tokens[index], stop]
        weights += [0.0, 0.0, 1.0, 0.0]
    return ids, weights


def asked_of_all(encoder: Encoder, words: Words, question: str, verb: str) -> Row:
    """People with coloured things; one question about all the things, answered in any order."""
    rng = words.rng
    count = rng.randrange(2, 10)
    names = words.names(count)
    things = rng.sample(OBJECTS, count)
    colors = [rng.choice(COLORS) for _ in names]
    text = owners_text(names, colors, things)
    head = f"{data.START}user\n{text} {question}{data.END}\n{data.GENERATE}"
    parts: list[tuple[str, float]] = [(head, 0.0)]
    lead = "The"
    for index in rng.sample(range(count), count):
        sought = colors[index] if verb == "is" else names[index]
        parts += [(f"{lead} {things[index]} {verb}", REST), (f" {sought}", 1.0), (".", REST)]
        lead = " The"
    return spelled(encoder, [*parts, (f"{data.END}\n", REST)])


def colors_of_all(encoder: Encoder, words: Words) -> Row:
    """What colour each thing is: the word before it."""
    return asked_of_all(encoder, words, "What color is each?", "is")


def owners_of_all(encoder: Encoder, words: Words) -> Row:
    """Whose each thing is. Only the first piece of a name counts fully: the rest is copying."""
    ids, weights = asked_of_all(encoder, words, "Whose is each?", "belongs to")
    first = [
        0.2 if weight == 1.0 and at and weights[at - 1] == 1.0 else weight
        for at, weight in enumerate(weights)
    ]
    return ids, first


def owners_of_random_names(encoder: Encoder, words: Words) -> Row:
    """The same without a chat around it, with names of random tokens."""
    rng = words.rng
    count, size = rng.randrange(2, 8), rng.choice([1, 1, 2, 3])
    ordinary = encoder.vocab - ORDINARY
    names = [[rng.randrange(ordinary) for _ in range(size)] for _ in range(count)]
    if rng.random() < 0.5:
        things = rng.sample(range(ordinary), count)
    else:
        things = [encoder.ids(f" {thing}")[0] for thing in rng.sample(OBJECTS, count)]
    has, article, stop = encoder.ids(" has"), encoder.ids(" a"), encoder.ids(".")
    lead, verb = encoder.ids(" The"), encoder.ids(" belongs to")
    short = rng.random() < 0.4
    ids: list[int] = []
    for name, thing in zip(names, things, strict=True):
        color = encoder.ids(f" {rng.choice(COLORS)}")
        ids += name + (has if short else has + article + color) + [thing] + stop
    weights = [0.0] * len(ids)
    for index in rng.sample(range(count), count):
        ids += [*lead, things[index], *verb, *names[index], *stop]
        before = len(lead) + 1 + len(verb)
        weights += [0.0] * before + [1.0] + [0.2] * (size - 1) + [0.0]
    return ids, weights


def mixed(encoder: Encoder, rng: random.Random, count: int) -> list[Row]:
    """Some of the later kinds, to keep what was learnt."""
    words = Words(rng)
    kinds = [colors_of_all, owners_of_all, owners_of_random_names]
    return [rng.choice(kinds)(encoder, words) for _ in range(count)]
