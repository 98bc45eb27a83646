"""Chat prompts for the embedded model, the same ones every time: what it was trained for, with other words in it."""

from __future__ import annotations

import functools
import json
import random

from tokenizers import Tokenizer

from tests.support.engines import ASSET

NAMES = (
    "Amara",
    "Bjorn",
    "Chioma",
    "Dmitri",
    "Elif",
    "Farid",
    "Greta",
    "Hiro",
    "Ines",
    "Jonas",
    "Kavya",
    "Luca",
    "Zoë",
)
PLACES = ("Lisbon", "Oslo", "Nairobi", "Kyoto", "Quito", "Ghent", "Turin", "Perth", "Łódź", "São Paulo")
THINGS = ("lantern", "violin", "kettle", "bicycle", "notebook", "compass", "umbrella", "teapot", "ladder", "blanket")
COLOURS = ("red", "green", "blue", "amber", "violet", "grey", "white", "black")
JOBS = ("baker", "pilot", "nurse", "farmer", "teacher", "painter", "plumber")
SIGNS = ("café", "naïve", "東京", "мир", "🙂🚀", "Ünïcödé", "x = 1;")

Message = tuple[str, str]


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSET / "tokenizer.json"))


def render(messages: list[Message]) -> str:
    """What the embedded chat template makes of plain messages, with the answer to come."""
    said = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return said + "<|im_start|>assistant\n"


@functools.cache
def chat_prompts(count: int, seed: int = 0) -> dict[str, tuple[int, ...]]:
    """Token ids by name, all texts different."""
    chance = random.Random(seed)
    kinds = (_copy, _extract, _question, _story, _number, _later_turn, _repeat)
    found: dict[str, str] = {}
    while len(found) < count:
        kind = kinds[len(found) % len(kinds)]
        text = render(kind(chance))
        if text not in found.values():
            found[f"{kind.__name__[1:]}-{len(found)}"] = text
    return {name: tuple(tokenizer().encode(text, add_special_tokens=False).ids) for name, text in found.items()}


def _copy(chance: random.Random) -> list[Message]:
    words = chance.sample([*THINGS, *PLACES, *SIGNS], 4)
    return [("user", f"Repeat exactly: {' '.join(words)} {chance.randint(10, 9999)}")]


def _extract(chance: random.Random) -> list[Message]:
    name, place, age = chance.choice(NAMES), chance.choice(PLACES), chance.randint(18, 90)
    job = chance.choice(JOBS)
    asked = json.dumps(["name", "age", "city", "job"])
    return [("user", f"Extract {asked} as JSON: {name} is a {age} year old {job} from {place}.")]


def _question(chance: random.Random) -> list[Message]:
    first, second = chance.sample(NAMES, 2)
    thing, other = chance.sample(THINGS, 2)
    facts = f"{first} owns a {chance.choice(COLOURS)} {thing}. {second} owns a {chance.choice(COLOURS)} {other}."
    return [("user", f"{facts} What colour is the {thing} of {first}?")]


def _story(chance: random.Random) -> list[Message]:
    name, thing, place = chance.choice(NAMES), chance.choice(THINGS), chance.choice(PLACES)
    return [("user", f"Tell a short story about {name}, a {thing} and a trip to {place}.")]


def _number(chance: random.Random) -> list[Message]:
    start = chance.randint(1, 400)
    return [("user", f"Count from {start} to {start + chance.randint(5, 20)}.")]


def _later_turn(chance: random.Random) -> list[Message]:
    name, place, code = chance.choice(NAMES), chance.choice(PLACES), chance.randint(1000, 9999)
    return [
        ("system", "Be brief."),
        ("user", f"My name is {name}, I live in {place} and my code is {code}."),
        ("assistant", f"Hello {name}!"),
        ("user", f"I like the {chance.choice(COLOURS)} {chance.choice(THINGS)} best."),
        ("assistant", "Noted."),
        ("user", chance.choice(["What is my code?", "Where do I live?", "What is my name?"])),
    ]


def _repeat(chance: random.Random) -> list[Message]:
    line = f"{chance.choice(NAMES)} {chance.randint(100, 999)} {chance.choice(THINGS)}"
    return [("user", f"Write this line five times: {line}")]
