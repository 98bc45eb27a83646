"""Chat prompts for the embedded model, the same ones every time: what it was trained for, with other words in it."""

from __future__ import annotations

import functools
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
    kinds = (_copy, _extract, _question, _story, _list, _later_turn, _say)
    found: dict[str, str] = {}
    while len(found) < count:
        kind = kinds[len(found) % len(kinds)]
        text = render(kind(chance))
        if text not in found.values():
            found[f"{kind.__name__[1:]}-{len(found)}"] = text
    return {name: tuple(tokenizer().encode(text, add_special_tokens=False).ids) for name, text in found.items()}


def _copy(chance: random.Random) -> list[Message]:
    words = " ".join(chance.sample([*THINGS, *PLACES, *SIGNS], 4))
    return [("user", f"Please repeat this exactly: {words} {chance.randint(10, 9999)}")]


def _extract(chance: random.Random) -> list[Message]:
    name, place, age = chance.choice(NAMES), chance.choice(PLACES), chance.randint(18, 90)
    facts = f"{name} is {age} years old. {name} lives in {place}. {name} works as a {chance.choice(JOBS)}."
    return [("user", f"Extract the name, age, city and job as JSON: {facts}")]


def _question(chance: random.Random) -> list[Message]:
    first, second = chance.sample(NAMES, 2)
    told = [
        f"{who} lives in {chance.choice(PLACES)}. {who} likes the color {chance.choice(COLOURS)}."
        for who in (first, second)
    ]
    return [("user", f"{' '.join(told)} {chance.choice(['Where does', 'In which city does'])} {first} live?")]


def _story(chance: random.Random) -> list[Message]:
    name, thing, place = chance.choice(NAMES), chance.choice(THINGS), chance.choice(PLACES)
    return [("user", f"Tell me a story about {name}, a {thing} and a trip to {place}.")]


def _list(chance: random.Random) -> list[Message]:
    items = ", ".join(str(chance.randint(1, 999)) for _ in range(chance.randint(3, 8)))
    return [
        ("user", f"{chance.choice(['Make a JSON list', 'Write as a numbered list', 'Write one per line'])}: {items}")
    ]


def _later_turn(chance: random.Random) -> list[Message]:
    name, place, age = chance.choice(NAMES), chance.choice(PLACES), chance.randint(10, 99)
    return [
        ("system", "Be brief."),
        ("user", f"My name is {name}."),
        ("assistant", f"Nice to meet you, {name}!"),
        ("user", f"I live in {place}."),
        ("assistant", f"{place} is a nice place."),
        ("user", f"I am {age} years old."),
        ("assistant", f"{age} is a good age."),
        ("user", chance.choice(["How old am I?", "Where do I live?", "What is my name?"])),
    ]


def _say(chance: random.Random) -> list[Message]:
    return [("user", f"Say the word {chance.choice([*THINGS, *NAMES])} {chance.randint(3, 12)} times.")]
