"""Exchanges: a question (or a few on one context) and its answers, by kind of task.

The answer follows from the question alone, whatever came before, except where an exchange says that
it refers to its own context. So exchanges can be chained into chats of any length.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from . import knowledge
from .stories import story_request
from .words import (
    ADJECTIVES,
    ANIMALS,
    COLORS,
    FOODS,
    JOBS,
    NOUNS,
    NUMBER_WORDS,
    OBJECTS,
    PARAMETERS,
    VERBS,
    WEATHER,
    Words,
    article,
    capital,
    join_and,
)

Message = dict[str, object]


@dataclass
class Exchange:
    """Messages that belong together; tools that they need."""

    kind: str
    messages: list[Message]
    tools: list[dict[str, object]] = field(default_factory=list)


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """The model's message."""
    return {"role": "assistant", "content": text}


def as_json(value: object) -> str:
    """JSON as the model writes it."""
    return json.dumps(value, ensure_ascii=False)


# --- copying -------------------------------------------------------------------------------------


def sentence(words: Words) -> str:
    """A plain sentence."""
    rng = words.rng
    name, other = words.name(), words.name()
    return rng.choice(
        [
            f"{name} lives in {words.city()}.",
            f"{name} has {words.number()} {words.word()}s.",
            f"{name} likes {words.word()} and {words.word()}.",
            f"the {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)} sees "
            f"{article(rng.choice(COLORS))} {rng.choice(OBJECTS)}",
            f"{name} met {other} in {words.city()}.",
            f"{name} and {other} walk to the {rng.choice(OBJECTS)}.",
            f"Is {name} {rng.choice(ADJECTIVES)}?",
            f"{name} said: {words.code()}!",
        ]
    )


def passage(words: Words, foreign: float = 0.22) -> str:
    """Something to copy."""
    rng = words.rng
    if rng.random() < foreign:
        return words.foreign_text()
    form = rng.randrange(9)
    if form < 2:
        return " ".join(words.names(rng.randrange(1, 5)))
    if form == 2:
        return " ".join(str(words.number()) for _ in range(rng.randrange(1, 6)))
    if form == 3:
        pieces = [words.name, words.word, lambda: str(words.number()), words.code]
        return " ".join(rng.choice(pieces)() for _ in range(rng.randrange(2, 7)))
    if form == 4:
        return " ".join(words.word() for _ in range(rng.randrange(1, 6)))
    if form == 5:
        return " ".join(words.code() for _ in range(rng.randrange(1, 4)))
    if form == 6:
        return " ".join(sentence(words) for _ in range(rng.randrange(2, 4)))
    if form == 7:
        name = words.name().lower()
        return rng.choice(
            [
                f"{name}@{words.city().lower()}.com",
                f"/{name}/{words.word()}/{words.number()}.txt",
                f"{words.word()} = {words.number()}; {name}({words.number()})",
                f"{words.number()} + {words.number()} = {words.number()}",
                f"<{words.word()}>{name}</{words.word()}>",
            ]
        )
    return sentence(words)


def copy(words: Words, foreign: float = 0.22) -> Exchange:
    """Repeat a text exactly."""
    text = passage(words, foreign)
    ask = words.rng.choice(
        [
            "Repeat after me: {}",
            "Repeat: {}",
            "Say this: {}",
            "Copy this text: {}",
            "Echo: {}",
            "Please repeat this exactly: {}",
            "Write this again: {}",
            "{}\nRepeat the line above.",
        ]
    )
    return Exchange("copy", [user(ask.replace("{}", text)), assistant(text)])


def foreign_copy(words: Words) -> Exchange:
    """Repeat a text with accents, CJK or emoji."""
    made = copy(words, foreign=1.0)
    return Exchange("unicode", made.messages)


def say(words: Words) -> Exchange:
    """Say a word several times."""
    rng = words.rng
    count = rng.randrange(2, 6)
    word = rng.choice([words.name, words.word])()
    times = NUMBER_WORDS[count]
    if rng.random() < 0.7:
        return Exchange(
            "say",
            [user(f"Say the word {word} {times} times."), assistant(" ".join([word] * count))],
        )
    return Exchange(
        "say",
        [user(f"Write {word} {times} times with commas."), assistant(", ".join([word] * count))],
    )


# --- records -------------------------------------------------------------------------------------

FIELDS: dict[str, Callable[[Words], object]] = {
    "name": lambda w: w.name(),
    "age": lambda w: w.rng.randrange(2, 100),
    "city": lambda w: w.city(),
    "job": lambda w: w.rng.choice(JOBS),
    "color": lambda w: w.rng.choice(COLORS),
    "pet": lambda w: w.rng.choice(ANIMALS),
    "friend": lambda w: w.name(),
    "number": lambda w: w.rng.randrange(10, 10_000),
    "food": lambda w: w.rng.choice(FOODS),
    "code": lambda w: w.code(),
}
SENTENCES = {
    "age": ["{n} is {x} years old.", "The age of {n} is {x}."],
    "city": ["{n} lives in {x}.", "{n} comes from {x}."],
    "job": ["{n} works as {ax}.", "The job of {n} is {x}."],
    "color": ["{n} likes the color {x}.", "The favorite color of {n} is {x}."],
    "pet": ["{n} has {ax}.", "The pet of {n} is {ax}."],
    "friend": ["The friend of {n} is {x}.", "{n} has a friend named {x}."],
    "number": ["The number of {n} is {x}.", "{n} has number {x}."],
    "food": ["{n} likes to eat {x}.", "The favorite food of {n} is {x}."],
    "code": ["The code of {n} is {x}.", "{n} uses the code {x}."],
}
QUESTIONS = {
    "age": (["How old is {n}?", "What is the age of {n}?"], "{n} is {x} years old."),
    "city": (["Where does {n} live?", "In which city does {n} live?"], "{n} lives in {x}."),
    "job": (["What is the job of {n}?", "What does {n} do?"], "{n} is {ax}."),
    "color": (["What color does {n} like?"], "{n} likes {x}."),
    "pet": (["What pet does {n} have?", "Which animal does {n} have?"], "{n} has {ax}."),
    "friend": (["Who is the friend of {n}?"], "The friend of {n} is {x}."),
    "number": (["What is the number of {n}?"], "The number of {n} is {x}."),
    "food": (["What does {n} like to eat?"], "{n} likes {x}."),
    "code": (["What is the code of {n}?", "Which code does {n} use?"], "The code of {n} is {x}."),
}


def fill(text: str, name: str, value: object) -> str:
    """Put a name and a value into a sentence."""
    return text.format(n=name, x=value, ax=article(str(value)) if value else "")


def record(words: Words, count: int) -> tuple[dict[str, object], str]:
    """A person with some fields, and the sentences that say so."""
    rng = words.rng
    name = words.name()
    keys = rng.sample(list(SENTENCES), count)
    values: dict[str, object] = {"name": name}
    values.update({key: FIELDS[key](words) for key in keys})
    told = [fill(rng.choice(SENTENCES[key]), name, values[key]) for key in keys]
    return values, " ".join(told)


def extract(words: Words) -> Exchange:
    """Write given facts as JSON."""
    rng = words.rng
    draw = rng.random()
    if draw < 0.72:
        values, text = record(words, rng.randrange(1, 5))
        keys = rng.sample(list(values), rng.randrange(1, min(4, len(values)) + 1))
        ask = rng.choice(
            [
                "Extract the {k} as JSON: {t}",
                "{t} Give the {k} as JSON.",
                "Return JSON with {k}: {t}",
                "{t}\nWrite the {k} as a JSON object.",
                "Which {k} do you find here? Answer in JSON. {t}",
            ]
        )
        question = ask.format(k=join_and(keys), t=text)
        return Exchange(
            "json", [user(question), assistant(as_json({key: values[key] for key in keys}))]
        )
    if draw < 0.88:
        keys = rng.sample(list(FIELDS), rng.randrange(1, 5))
        values = {key: FIELDS[key](words) for key in keys}
        listed = ", ".join(f"{key} is {value}" for key, value in values.items())
        ask = rng.choice(["Write as JSON: ", "Convert to JSON: "])
        return Exchange("json", [user(ask + listed), assistant(as_json(values))])
    items: list[object] = list(words.names(rng.randrange(2, 6)))
    if rng.random() < 0.3:
        items = [words.number() for _ in items]
    listed = ", ".join(str(item) for item in items)
    return Exchange("json", [user(f"Make a JSON list: {listed}"), assistant(as_json(items))])


def reformat(words: Words) -> Exchange:
    """Write a list in another form."""
    rng = words.rng
    count = rng.randrange(2, 6)
    items = words.names(count) if rng.random() < 0.6 else [words.word() for _ in range(count)]
    listed = ", ".join(items)
    ask, answer = rng.choice(
        [
            ("Write as a numbered list", "\n".join(f"{i}. {x}" for i, x in enumerate(items, 1))),
            ("Write as bullets", "\n".join(f"- {x}" for x in items)),
            ("Join with semicolons", "; ".join(items)),
            ("Write one per line", "\n".join(items)),
            ("Write as a sentence", f"I see {join_and(items)}."),
            ("Write as XML", "".join(f"<item>{x}</item>" for x in items)),
        ]
    )
    return Exchange("format", [user(f"{ask}: {listed}"), assistant(answer)])


def pick(words: Words) -> Exchange:
    """First, last, membership, number of items."""
    rng = words.rng
    items = words.names(rng.randrange(2, 6))
    listed = ", ".join(items)
    form = rng.randrange(4)
    if form == 0:
        return Exchange("pick", [user(f"What is the first word? {listed}"), assistant(items[0])])
    if form == 1:
        return Exchange("pick", [user(f"What is the last word? {listed}"), assistant(items[-1])])
    if form == 2:
        there = rng.random() < 0.5
        asked = rng.choice(items) if there else words.name()
        there = asked in items
        answer = f"Yes, {asked} is in the list." if there else f"No, {asked} is not in the list."
        return Exchange("pick", [user(f"Is {asked} in this list? {listed}"), assistant(answer)])
    answer = f"There are {NUMBER_WORDS[len(items)]} words."
    return Exchange("pick", [user(f"How many words are there? {listed}"), assistant(answer)])


# --- questions on a context ----------------------------------------------------------------------


def statements(words: Words) -> list[tuple[str, str, str, str]]:
    """What a user may tell about himself: statement, reply, later question, answer."""
    rng = words.rng
    name, city, job, code = words.name(), words.city(), rng.choice(JOBS), words.code()
    thing, color, age = rng.choice(OBJECTS), rng.choice(COLORS), rng.randrange(2, 100)
    colored = f"{article(color)} {thing}"
    friend = words.name()
    return [
        (
            f"My name is {name}.",
            f"Nice to meet you, {name}!",
            "What is my name?",
            f"Your name is {name}.",
        ),
        (
            f"I live in {city}.",
            f"{city} is a nice place.",
            "Where do I live?",
            f"You live in {city}.",
        ),
        (
            f"I have {colored}.",
            f"{capital(colored)} sounds lovely.",
            f"What color is my {thing}?",
            f"Your {thing} is {color}.",
        ),
        (
            f"I am {age} years old.",
            f"{age} is a good age.",
            "How old am I?",
            f"You are {age} years old.",
        ),
        (
            f"I am {article(job)}.",
            f"It is good to be {article(job)}.",
            "What is my job?",
            f"You are {article(job)}.",
        ),
        (
            f"My friend is called {friend}.",
            f"{friend} is a good name.",
            "Who is my friend?",
            f"Your friend is {friend}.",
        ),
        (
            f"Remember the code {code}.",
            f"I will remember {code}.",
            "What was the code?",
            f"The code was {code}.",
        ),
    ]


def ask_in_turn(kind: str, context: str, pairs: list[tuple[str, str]]) -> Exchange:
    """Questions on one context, which stands before the first of them."""
    messages: list[Message] = []
    for index, (question, answer) in enumerate(pairs):
        asked = f"{context} {question}" if index == 0 else question
        messages += [user(asked), assistant(answer)]
    return Exchange(kind, messages)


def owners_text(names: list[str], colors: list[str], things: list[str]) -> str:
    """Who has what."""
    return " ".join(
        f"{n} has {article(c)} {t}." for n, c, t in zip(names, colors, things, strict=True)
    )


def things(words: Words) -> Exchange:
    """Several people with coloured things, the hardest of the contexts."""
    rng = words.rng
    pairs: list[tuple[str, str]] = []
    names = words.names(rng.randrange(2, 4))
    owned = rng.sample(OBJECTS, len(names))
    colors = [rng.choice(COLORS) for _ in names]
    text = owners_text(names, colors, owned)
    for index in rng.sample(range(len(names)), rng.randrange(1, len(names) + 1)):
        name, thing, color = names[index], owned[index], colors[index]
        owner = f"The {thing} belongs to {name}." if words.drilled else f"{name} has the {thing}."
        asks_owner = f"Who has the {thing}?"
        if words.drilled and len(pairs) % 2:
            asks_owner = f"Who does the {thing} belong to?"
        pairs.append(
            rng.choice(
                [
                    (asks_owner, owner),
                    (f"What does {name} have?", f"{name} has {article(color)} {thing}."),
                    (f"What color is the {thing}?", f"The {thing} is {color}."),
                ]
            )
        )
    return ask_in_turn("things", text, pairs)


def context(words: Words) -> Exchange:
    """Questions whose answers stand in the prompt."""
    rng = words.rng
    form = rng.randrange(6)
    if form == 0:
        chosen = rng.sample(statements(words), rng.randrange(1, 4))
        messages: list[Message] = []
        for told, reply, _, _ in chosen:
            messages += [user(told), assistant(reply)]
        for _, _, question, answer in rng.sample(chosen, rng.randrange(1, len(chosen) + 1)):
            messages += [user(question), assistant(answer)]
        return Exchange("context", messages)
    pairs: list[tuple[str, str]] = []
    if form == 1:  # one person, several fields
        values, text = record(words, rng.randrange(1, 5))
        keys = [key for key in values if key != "name"]
        for key in rng.sample(keys, rng.randrange(1, len(keys) + 1)):
            asks, answer = QUESTIONS[key]
            name = str(values["name"])
            pairs.append(
                (fill(rng.choice(asks), name, values[key]), fill(answer, name, values[key]))
            )
        return ask_in_turn("context", text, pairs)
    if form == 2:  # several people, one field
        key = rng.choice(list(QUESTIONS))
        names = words.names(rng.randrange(2, 4))
        values_of = [FIELDS[key](words) for _ in names]
        form_of = rng.choice(SENTENCES[key])
        text = " ".join(fill(form_of, n, v) for n, v in zip(names, values_of, strict=True))
        asks, answer = QUESTIONS[key]
        for index in rng.sample(range(len(names)), rng.randrange(1, len(names) + 1)):
            name, value = names[index], values_of[index]
            pairs.append((fill(rng.choice(asks), name, value), fill(answer, name, value)))
        return ask_in_turn("context", text, pairs)
    if form in (3, 4):
        return things(words)
    keys = words.names(rng.randrange(2, 5))  # a table of keys and values
    if rng.random() < 0.3:
        keys = [words.code() for _ in keys]
    table = [rng.choice([str(words.number()), words.name(), words.code()]) for _ in keys]
    text = ", ".join(f"{key} = {value}" for key, value in zip(keys, table, strict=True)) + "."
    for index in rng.sample(range(len(keys)), rng.randrange(1, len(keys) + 1)):
        ask = rng.choice(["What is {}?", "Give {}.", "What is the value of {}?"])
        pairs.append((ask.format(keys[index]), f"{keys[index]} = {table[index]}"))
    return ask_in_turn("context", text, pairs)


# --- tools ---------------------------------------------------------------------------------------


def tool(name: str, description: str, parameters: dict[str, str]) -> dict[str, object]:
    """A tool in the form of the chat API."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }


TOOLS = {
    name: tool(name, description, dict(pair.split(":") for pair in parameters.split()))
    for name, description, parameters in (
        ("get_weather", "Get the weather in a city.", "city:string"),
        ("get_time", "Get the time in a city.", "city:string"),
        ("add", "Add two numbers.", "a:integer b:integer"),
        ("search", "Search for a word.", "query:string"),
        ("call", "Call a person.", "name:string"),
        ("send_message", "Send a message to a person.", "name:string text:string"),
        ("set_timer", "Set a timer.", "minutes:integer"),
        ("get_user", "Get the user with an id.", "id:string"),
        ("get_price", "Get the price of a thing.", "item:string"),
    )
}


def request(words: Words, name: str) -> tuple[str, dict[str, object], dict[str, object], str]:
    """A request for a known tool: question, arguments, the tool's result, final answer."""
    rng = words.rng
    city, person, number = words.city(), words.name(), words.number()
    if name == "get_weather":
        weather, degrees = rng.choice(WEATHER), rng.randrange(40)
        ask = rng.choice(
            ["What is the weather in {}?", "How is the weather in {} today?", "Weather in {}?"]
        ).format(city)
        final = f"It is {weather} in {city}, and the temperature is {degrees} degrees."
        return ask, {"city": city}, {"weather": weather, "temperature": degrees}, final
    if name == "get_time":
        time = f"{rng.randrange(1, 13)}:{rng.randrange(10, 60)}"
        ask = rng.choice(["What time is it in {}?", "Tell me the time in {}."]).format(city)
        return ask, {"city": city}, {"time": time}, f"It is {time} in {city}."
    if name == "add":
        a, b = number, words.number()
        ask = rng.choice([f"What is {a} + {b}?", f"Add {a} and {b}."])
        return ask, {"a": a, "b": b}, {"result": a + b}, f"{a} + {b} = {a + b}."
    if name == "search":
        what = rng.choice([words.word(), person])
        ask = rng.choice(["Search for {}.", "Find something about {}."]).format(what)
        return ask, {"query": what}, {"found": number}, f"I found {number} results for {what}."
    if name == "call":
        busy = rng.random() < 0.5
        ask = rng.choice(["Call {}.", "Please call {} now."]).format(person)
        final = f"{person} is busy." if busy else f"I called {person}."
        return ask, {"name": person}, {"status": "busy" if busy else "ok"}, final
    if name == "send_message":
        text = passage(words, foreign=0.1) if not words.plain else sentence(words)
        ask = f"Send {person} this message: {text}"
        final = f"I sent the message to {person}."
        return ask, {"name": person, "text": text}, {"sent": True}, final
    if name == "set_timer":
        minutes = rng.randrange(2, 100)
        ask = rng.choice(["Set a timer for {} minutes.", "Wake me in {} minutes."]).format(minutes)
        final = f"The timer is set for {minutes} minutes."
        return ask, {"minutes": minutes}, {"status": "ok"}, final
    if name == "get_user":
        code = words.code()
        ask = rng.choice(["Who is user {}?", "Look up the user {}."]).format(code)
        return ask, {"id": code}, {"name": person}, f"User {code} is {person}."
    item = words.word()
    ask = rng.choice(["What does {} cost?", "What is the price of {}?"]).format(article(item))
    return ask, {"item": item}, {"price": number}, f"{capital(article(item))} costs {number}."


def calls(made: list[tuple[str, dict[str, object]]]) -> Message:
    """A message that calls tools."""
    listed = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in made
    ]
    return {"role": "assistant", "content": "", "tool_calls": listed}


def known_tool(words: Words, name: str, answered: bool) -> Exchange:
    """A request for one of the known tools, perhaps with its result and the final answer."""
    ask, arguments, result, final = request(words, name)
    messages = [user(ask), calls([(name, arguments)])]
    if answered:
        messages += [{"role": "tool", "content": as_json(result)}, assistant(final)]
    return Exchange("tool", messages, [TOOLS[name]])


def two_cities(words: Words) -> Exchange:
    """Two calls in one message."""
    name, ask = words.rng.choice(
        [
            ("get_weather", "What is the weather in {} and {}?"),
            ("get_time", "What time is it in {} and {}?"),
        ]
    )
    first, second = words.city(), words.city()
    made: list[tuple[str, dict[str, object]]] = [(name, {"city": c}) for c in (first, second)]
    return Exchange("tool", [user(ask.format(first, second)), calls(made)], [TOOLS[name]])


def made_up_tool(words: Words) -> Exchange:
    """A tool never seen before, named in the request."""
    rng = words.rng
    noun = rng.choice(NOUNS) if rng.random() < 0.6 else words.syllable_name(2).lower()
    name = f"{rng.choice(VERBS)}_{noun}"
    keys = rng.sample(PARAMETERS, rng.randrange(1, 4))
    kinds = {key: rng.choice(["string", "string", "integer"]) for key in keys}
    arguments: dict[str, object] = {
        key: words.number()
        if kind == "integer"
        else rng.choice([words.name, words.word, words.code])()
        for key, kind in kinds.items()
    }
    told = join_and([f"{key} {value}" for key, value in arguments.items()])
    ask = rng.choice(["Use {} with {}.", "Call {} with {}.", "Run {} with {}."]).format(name, told)
    description = f"{capital(name.replace('_', ' '))}."
    return Exchange(
        "tool", [user(ask), calls([(name, arguments)])], [tool(name, description, kinds)]
    )


def use_tool(words: Words, allowed: list[str] | None = None, answered: float = 0.45) -> Exchange:
    """A request that needs a tool; `allowed` limits it to known tools of these names."""
    rng = words.rng
    names = list(TOOLS) if allowed is None else allowed
    if allowed is None:
        draw = rng.random()
        if draw < 0.07:
            return two_cities(words)
        if draw < 0.2:
            return made_up_tool(words)
    return known_tool(words, rng.choice(names), rng.random() < answered)


# --- the rest ------------------------------------------------------------------------------------


def simple(kind: str, make: Callable[[Words], tuple[str, str]]) -> Callable[[Words], Exchange]:
    """An exchange of one question and one answer."""

    def build(words: Words) -> Exchange:
        ask, answer = make(words)
        return Exchange(kind, [user(ask), assistant(answer)])

    return build


KINDS: dict[str, Callable[[Words], Exchange]] = {
    "copy": copy,
    "unicode": foreign_copy,
    "say": say,
    "json": extract,
    "format": reformat,
    "pick": pick,
    "context": context,
    "things": things,
    "tool": use_tool,
    "story": simple("story", story_request),
    "math": simple("math", knowledge.sum_or_count),
    "fact": simple("fact", knowledge.fact),
    "list": simple("list", knowledge.listing),
    "chat": simple("chat", knowledge.small_talk),
}
