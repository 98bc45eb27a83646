"""Deterministic prompts: random token ids, or short chats in the style the embedded model is trained for.

A prompt is a function of (seed, index) alone, so every target is asked the same and a run can be repeated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

FIRST_ID = 10  # below are, by custom, a vocabulary's special tokens
CONSONANTS, VOWELS = "bdfghjklmnprstvwz", "aeiou"
ANIMALS = ["cat", "dog", "fox", "bear", "frog", "duck", "owl", "mouse", "rabbit", "horse", "goat", "hen"]
COLORS = ["red", "blue", "green", "yellow", "white", "black", "brown", "golden", "pink", "gray"]
OBJECTS = ["ball", "kite", "lamp", "book", "key", "hat", "boat", "drum", "bell", "cup", "map", "ring"]
PLACES = ["garden", "forest", "village", "river", "hill", "market", "beach", "farm"]
JOBS = ["teacher", "doctor", "farmer", "baker", "pilot", "singer", "writer", "driver"]

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """Token ids, or the messages of a chat."""

    ids: tuple[int, ...] = ()
    messages: tuple[tuple[str, str], ...] = ()

    def body(self, *, chat: bool) -> dict[str, Any]:
        """The part of a request body that carries it; a chat on the completions route is its texts, line by line."""
        if self.ids:
            return {"prompt": list(self.ids)}
        if chat:
            return {"messages": [{"role": role, "content": content} for role, content in self.messages]}
        return {"prompt": "\n".join(content for _, content in self.messages) + "\n"}


class Prompts(Protocol):
    """An endless, numbered supply."""

    def __call__(self, index: int) -> Prompt:
        """Prompt number `index`, any integer."""


@dataclass(frozen=True, kw_only=True)
class IdPrompts(Prompts):
    """Random token ids, the first `shared` of them the same in every prompt."""

    length: int
    vocab: int
    seed: int = 0
    shared: int = 0

    def __call__(self, index: int) -> Prompt:
        """See `Prompts`."""
        shared = min(self.shared, self.length)
        common = self._draw(random.Random(f"{self.seed}:shared"), shared)
        return Prompt(ids=common + self._draw(random.Random(f"{self.seed}:{index}"), self.length - shared))

    def _draw(self, rng: random.Random, count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(min(FIRST_ID, self.vocab - 1), self.vocab) for _ in range(count))


class Words:
    """Names and numbers nobody has seen before."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def name(self) -> str:
        """A name of two or three syllables."""
        syllables = (self.rng.choice(CONSONANTS) + self.rng.choice(VOWELS) for _ in range(self.rng.randrange(2, 4)))
        return "".join(syllables).capitalize() + self.rng.choice(["", "", "n", "r", "l", "s"])

    def number(self) -> int:
        """A number of up to four digits."""
        return self.rng.randrange(10, 10_000)


def article(word: str) -> str:
    """The word with "a" or "an" before it."""
    return ("an " if word[:1] in "aeiou" else "a ") + word


def copy(words: Words) -> list[tuple[str, str]]:
    """A text to repeat."""
    count = words.rng.randrange(4, 12)
    text = " ".join(words.name() if words.rng.random() < 0.6 else str(words.number()) for _ in range(count))
    return [("user", words.rng.choice(["Repeat after me: ", "Copy this text: ", "Echo: "]) + text)]


def extract(words: Words) -> list[tuple[str, str]]:
    """Facts to write as JSON."""
    name, city, age = words.name(), words.name(), words.rng.randrange(2, 100)
    told = f"{name} is {age} years old. {name} lives in {city}. {name} works as {article(words.rng.choice(JOBS))}."
    return [("user", f"Extract the name, age, city and job as JSON: {told}")]


def context(words: Words) -> list[tuple[str, str]]:
    """A question whose answer was told before."""
    names = [words.name() for _ in range(3)]
    things, colors = words.rng.sample(OBJECTS, 3), words.rng.sample(COLORS, 3)
    parts = zip(names, colors, things, strict=True)
    told = " ".join(f"{name} has {article(color)} {thing}." for name, color, thing in parts)
    asked = words.rng.randrange(3)
    question = words.rng.choice([f"Who has the {things[asked]}?", f"What does {names[asked]} have?"])
    return [("user", f"My name is {words.name()}."), ("assistant", "Nice to meet you!"), ("user", f"{told} {question}")]


def tool(words: Words) -> list[tuple[str, str]]:
    """A request that needs a tool, which is described the way chat templates describe it."""
    name, about, parameter, ask = words.rng.choice(
        [
            ("get_weather", "Get the weather in a city.", "city", f"What is the weather in {words.name()}?"),
            ("get_time", "Get the time in a city.", "city", f"What time is it in {words.name()}?"),
            ("call", "Call a person.", "name", f"Please call {words.name()}."),
        ]
    )
    properties = {parameter: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    function = {"name": name, "description": about, "parameters": parameters}
    described = json.dumps({"type": "function", "function": function})
    return [("system", f"# Tools\n{described}\n"), ("user", ask)]


def story(words: Words) -> list[tuple[str, str]]:
    """A story to tell."""
    hero, kind = words.name(), words.rng.choice(ANIMALS)
    place, thing = words.rng.choice(PLACES), words.rng.choice(OBJECTS)
    ask = [
        f"Tell me a story about {article(kind)} named {hero}.",
        f"Write a short story about {hero} and the {place}.",
        f"Write a story about {hero}, {article(kind)} and {article(thing)}.",
    ]
    return [("user", words.rng.choice(ask))]


KINDS: dict[str, Callable[[Words], list[tuple[str, str]]]] = {
    "copy": copy,
    "json": extract,
    "context": context,
    "tool": tool,
    "story": story,
}


@dataclass(frozen=True, kw_only=True)
class TextPrompts(Prompts):
    """Chats of the named kinds in turn; `shared` words of system message are the same in every prompt."""

    kinds: tuple[str, ...] = tuple(KINDS)
    seed: int = 0
    shared: int = 0

    def __call__(self, index: int) -> Prompt:
        """See `Prompts`."""
        kind = self.kinds[index % len(self.kinds)]
        messages = KINDS[kind](Words(random.Random(f"{self.seed}:{index}")))
        if self.shared:
            words = Words(random.Random(f"{self.seed}:shared"))
            told = " ".join(words.name() for _ in range(self.shared))
            if messages[0][0] == "system":
                messages[0] = ("system", f"{told}\n\n{messages[0][1]}")
            else:
                messages.insert(0, ("system", told))
        return Prompt(messages=tuple(messages))
