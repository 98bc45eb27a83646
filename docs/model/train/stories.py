"""Short stories. What happens follows from who is in them, so that greedy stories differ too.

The animal decides home and friend, the place decides the thing, the thing decides the plot and the
hero's first letter decides character, opening and ending, each with a little chance of another
choice.
"""

import random

from .words import (
    ADJECTIVES,
    ANIMALS,
    COLORS,
    FOODS,
    OBJECTS,
    PLACES,
    REAL_NAMES,
    Words,
    article,
    capital,
)

OPENINGS = [
    "Once upon a time there was {a_adj} {kind} named {hero}. {hero} lived near the {place}.",
    "{hero} was {a_adj} {kind}. Every day {he} walked to the {place}.",
    "In a house by the {place} lived {hero}, {a_adj} {kind}.",
    "Long ago, {a_adj} {kind} came to the {place}. {His} name was {hero}.",
    "One morning {hero} the {kind} woke up early and went to the {place}.",
]
PLOTS = [
    'There {he} found a {color} {thing}. "Whose {thing} is this?" said {hero}. '
    'Then {he} met {friend} the {other}, who was crying. "I lost my {thing}," said {friend}. '
    "{hero} gave it back at once.",
    "{He} was very hungry. {friend} the {other} had a big {food}. "
    '"May I have some {food}?" asked {hero}. "Yes," said {friend}, and they ate it under a tree.',
    "It began to rain, and {hero} was cold and wet. {friend} the {other} opened a door. "
    '"Come in," said {friend}. {hero} sat by the fire until the sun came out.',
    "{hero} wanted to find the {color} {thing}. {He} looked under a tree and behind a rock. "
    '{friend} the {other} came to help. "I can see it!" said {friend}. It was in the river.',
    "One night the {thing} was gone. {hero} followed small steps in the snow. "
    'They led to {friend} the {other}. "I only wanted to look at it," said {friend}. "I am sorry."',
    '{friend} the {other} said, "Let us see who is faster." They ran around the {place}. '
    "{hero} fell, and {friend} stopped to help {him}. So nobody won, and both were glad.",
    "{hero} made a {color} {thing} for {friend} the {other}. It took three days. "
    '"Is it for me?" asked {friend}. It was the best gift in the world.',
    "A big storm came, and the bridge broke. {hero} could not go home. "
    "{friend} the {other} had a long rope. Together they crossed the water, step by step.",
    "{hero} could not sleep, because there was a strange sound. {He} took the {thing} and looked. "
    "It was only {friend} the {other}, who sang to the moon.",
    "{hero} planted a seed. {friend} the {other} brought water every day. "
    "In summer there was a {food} as big as a house, and they made soup for all.",
    "{friend} the {other} was ill. {hero} brought bread, honey and the {color} {thing}. "
    "They read a book together, and soon {friend} could laugh again.",
    "{hero} found an old map in the {thing}. It showed the way to the {place}. "
    "{friend} the {other} dug a hole. In it was a box full of golden coins.",
]
ENDINGS = [
    "From that day on, {hero} and {friend} were friends.",
    "That night {hero} slept well.",
    "And they all lived happily by the {place}.",
    '"Thank you, {hero}!" said {friend}. The end.',
]


def usual(rng: random.Random, choices: list[str], index: int, chance: float = 0.85) -> str:
    """The choice at `index`, most of the time."""
    return choices[index % len(choices)] if rng.random() < chance else rng.choice(choices)


def story(words: Words, hero: str, kind: str = "", place: str = "", thing: str = "") -> str:
    """A story of about eight sentences; empty parts are chosen."""
    rng = words.rng
    letter = ord(hero[:1].lower() or "a") - ord("a")
    kind = kind or usual(rng, ANIMALS, letter * 5)
    animal = ANIMALS.index(kind)
    place = place or usual(rng, PLACES, animal)
    thing = thing or usual(rng, OBJECTS, animal * 3 + PLACES.index(place))
    item = OBJECTS.index(thing)
    others = [other for other in ANIMALS if other != kind]
    female = hero[-1:] in "aeiy"
    if words.blank:
        friend = ""
    else:
        friend = usual(rng, REAL_NAMES[:60], animal * 7 + letter, 0.8)
        if friend == hero:
            friend = "Ada"
    adjective = usual(rng, ADJECTIVES, letter)
    parts = {
        "hero": hero,
        "kind": kind,
        "place": place,
        "thing": thing,
        "friend": friend,
        "other": usual(rng, others, animal + 4),
        "color": usual(rng, COLORS, item),
        "food": usual(rng, FOODS, item + animal),
        "a_adj": article(adjective),
        "he": "she" if female else "he",
        "him": "her" if female else "him",
        "His": "Her" if female else "His",
        "He": "She" if female else "He",
    }
    plot = PLOTS[(item + animal) % len(PLOTS)] if rng.random() < 0.85 else rng.choice(PLOTS)
    chosen = [usual(rng, OPENINGS, letter + animal), plot, usual(rng, ENDINGS, letter + item)]
    return " ".join(part.format(**parts) for part in chosen)


def story_request(words: Words) -> tuple[str, str]:
    """A request and its story."""
    rng = words.rng
    hero = words.name()
    kind, place, thing = rng.choice(ANIMALS), rng.choice(PLACES), rng.choice(OBJECTS)
    form = rng.randrange(8)
    if form == 0:
        return f"Tell me a story about {article(kind)} named {hero}.", story(words, hero, kind)
    if form == 1:
        text = story(words, hero, "", place)
        return f"Write a short story about {hero} and the {place}.", text
    if form == 2:
        text = story(words, hero, kind, "", thing)
        return f"Write a story about {hero}, {article(kind)} and {article(thing)}.", text
    if form == 3:
        return f"Tell me about {hero} the {kind}.", story(words, hero, kind)
    if form == 4:
        text = story(words, hero, kind, place)
        return f"{capital(article(kind))} named {hero} goes to the {place}. What happens?", text
    if form == 5:
        return f"Write a story about {hero}.", story(words, hero)
    mixed = ANIMALS.index(kind) * 11 + OBJECTS.index(thing)
    hero = "" if words.blank else usual(rng, REAL_NAMES[:60], mixed, 0.8)
    if form == 6:
        text = story(words, hero, kind, "", thing)
        return f"Write a story with {article(kind)} and {article(thing)}.", text
    kind = kind if rng.random() < 0.8 else ""
    ask = f"Tell me a story about {article(kind)}." if kind else "Tell me a story."
    return ask, story(words, hero if kind else "Mia", kind or "fox")
