"""Closed sets: facts, lists, small talk and sums. Every question has one answer."""

import random

from .words import DAYS, MONTHS, NUMBER_WORDS, Words, article, capital, join_and

CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris England:London Italy:Rome Germany:Berlin Spain:Madrid Norway:Oslo "
        "Egypt:Cairo Japan:Tokyo India:Delhi Peru:Lima Greece:Athens Ireland:Dublin "
        "Austria:Vienna Poland:Warsaw Portugal:Lisbon Kenya:Nairobi Cuba:Havana "
        "Sweden:Stockholm Russia:Moscow Canada:Ottawa Brazil:Brasilia China:Beijing "
        "Hungary:Budapest Turkey:Ankara Chile:Santiago"
    ).split()
)
PAIRS = {
    "sound": (
        "What sound does {a} make?",
        "{A} says {b}.",
        "cat:meow dog:woof duck:quack cow:moo owl:hoot mouse:squeak horse:neigh frog:ribbit "
        "sheep:baa hen:cluck pig:oink lion:roar bee:buzz snake:hiss wolf:howl",
    ),
    "baby": (
        "What is a young {b0} called?",
        "A young {b0} is called {a_b}.",
        "dog:puppy cat:kitten cow:calf horse:foal sheep:lamb hen:chick duck:duckling bear:cub "
        "goat:kid frog:tadpole goose:gosling",
    ),
    "opposite": (
        "What is the opposite of {b0}?",
        "The opposite of {b0} is {b}.",
        "hot:cold big:small fast:slow up:down day:night happy:sad open:closed wet:dry old:new "
        "light:dark full:empty hard:soft long:short rich:poor early:late left:right high:low "
        "strong:weak loud:quiet clean:dirty",
    ),
    "plural": (
        "What is the plural of {b0}?",
        "The plural of {b0} is {b}.",
        "mouse:mice goose:geese child:children foot:feet tooth:teeth cat:cats dog:dogs fox:foxes "
        "book:books box:boxes baby:babies leaf:leaves man:men woman:women sheep:sheep knife:knives",
    ),
    "past": (
        "What is the past tense of {b0}?",
        "The past tense of {b0} is {b}.",
        "go:went run:ran eat:ate see:saw sing:sang swim:swam find:found give:gave walk:walked "
        "play:played jump:jumped write:wrote read:read take:took come:came know:knew fly:flew "
        "drink:drank sleep:slept buy:bought",
    ),
    "made": (
        "What is {b0} made from?",
        "{B0} is made from {b}.",
        "bread:flour_and_water ice:frozen_water paper:wood glass:sand cheese:milk wine:grapes "
        "butter:milk honey:nectar wool:the_hair_of_sheep steel:iron chocolate:cocoa_beans",
    ),
    "home": (
        "Where does {a} live?",
        "{A} lives in {b}.",
        "fish:water bear:the_forest camel:the_desert penguin:the_cold_south bee:a_hive bird:a_nest "
        "rabbit:a_burrow whale:the_ocean lion:the_savanna spider:a_web monkey:the_jungle",
    ),
    "color": (
        "What color is {b0}?",
        "{B0} is {b}.",
        "grass:green snow:white coal:black blood:red gold:yellow the_sky:blue milk:white "
        "an_orange:orange chocolate:brown",
    ),
    "legs": (
        "How many legs does {a} have?",
        "{A} has {b} legs.",
        "dog:four cat:four bird:two spider:eight ant:six horse:four hen:two bee:six fish:no",
    ),
    "sides": (
        "How many sides does {a} have?",
        "{A} has {b} sides.",
        "triangle:three square:four pentagon:five hexagon:six octagon:eight rectangle:four",
    ),
    "hot": (
        "Which is bigger, {a} or {b0b}?",
        "{A} is bigger than {b0b}.",
        "horse:a_mouse whale:a_fish house:a_chair mountain:a_hill city:a_village tree:a_flower "
        "lion:a_cat lake:a_cup sea:a_lake",
    ),
}
SETS = {
    kind: (ask, answer, [tuple(p.replace("_", " ").split(":")) for p in pairs.split()])
    for kind, (ask, answer, pairs) in PAIRS.items()
}
CATEGORIES = {
    name: items.split()
    for name, items in {
        "fruits": "apple pear plum grape lemon peach cherry",
        "animals": "cat dog horse cow fox bear duck",
        "colors": "red blue green yellow white black brown",
        "vegetables": "carrot onion potato bean pea cabbage",
        "tools": "hammer saw drill file rake brush",
        "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus",
        "birds": "owl duck hen swan crow eagle robin",
        "drinks": "water milk tea coffee juice lemonade",
        "days": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
        "months": "January February March April May June July",
        "sports": "tennis football chess golf hockey boxing",
        "clothes": "hat coat shoe shirt sock scarf glove",
        "countries": "France Italy Spain Norway Japan Peru Kenya",
        "instruments": "drum piano violin flute guitar harp",
        "metals": "iron gold silver copper tin lead",
        "flowers": "rose tulip lily daisy violet orchid",
    }.items()
}
SMALL_TALK: list[tuple[list[str], list[str]]] = [
    (
        ["Hello!", "Hi!", "Hello", "Hi there!", "Good morning!", "Good evening!", "Hey!"],
        [
            "Hello! How can I help you today?",
            "Hi! What can I do for you?",
            "Hello to you too! What shall we do?",
            "Hi there! Ask me something.",
            "Good morning! Did you sleep well?",
            "Good evening! How was your day?",
            "Hey! Nice to see you.",
        ],
    ),
    (
        ["How are you?", "How are you today?", "How do you feel?", "Are you well?"],
        [
            "I am fine, thank you. How can I help you?",
            "Today I am very well, thank you for asking.",
            "I feel good, as small models do.",
            "Yes, all my layers are well.",
        ],
    ),
    (
        ["Who are you?", "What are you?", "What is your name?", "Introduce yourself."],
        [
            "I am a tiny language model. I can tell stories and answer simple questions.",
            "I am a very small language model with about one million weights.",
            "I have no name yet. I am just a tiny language model.",
            "I am a tiny model made for testing. I copy, count, extract and tell stories.",
        ],
    ),
    (
        ["What can you do?", "Help me.", "How can you help me?", "What are you good at?"],
        [
            "I can tell stories, add small numbers, write JSON and call tools.",
            "Of course. Tell me what you need.",
            "I can repeat text, extract names and answer questions about a text.",
            "I am good at copying text and at short stories.",
        ],
    ),
    (
        ["Thank you!", "Thanks!", "Thank you very much.", "That was helpful."],
        [
            "You are welcome!",
            "No problem. Is there more?",
            "You are very welcome. Have a nice day!",
            "I am glad that I could help.",
        ],
    ),
    (
        ["Goodbye!", "Bye!", "See you later.", "Good night!"],
        [
            "Goodbye! Have a nice day!",
            "Bye! Come back soon.",
            "See you later!",
            "Good night! Sleep well.",
        ],
    ),
    (
        ["Are you a human?", "Are you a robot?", "Can you think?", "Are you alive?"],
        [
            "No, I am a tiny language model.",
            "Almost. I am a program that predicts the next word.",
            "Not like you. I only guess the next piece of text.",
            "No, I am only a file of numbers.",
        ],
    ),
    (
        ["Tell me a joke.", "Say something funny.", "Make me laugh.", "Do you know a riddle?"],
        [
            "Why did the duck cross the road? To see the hen on the other side!",
            "What do you call a sleepy bear? A bed bear!",
            "My memory is so small that I forgot the end of this joke.",
            "What has four legs and cannot walk? A chair.",
        ],
    ),
    (
        ["What is your favorite color?", "What do you like?", "What do you dream of?"],
        [
            "I like blue, like the sky in the morning.",
            "I like short questions and clear answers.",
            "I dream of more layers.",
        ],
    ),
    (
        ["I am sad.", "I am tired.", "I am hungry.", "I am happy.", "I am bored."],
        [
            "I am sorry to hear that. Shall I tell you a story?",
            "Then take a rest. Tomorrow is a new day.",
            "Then eat some bread and cheese.",
            "That is good to hear!",
            "Let us play. Ask me for a riddle.",
        ],
    ),
    (
        ["Good job!", "You are wrong.", "You are funny.", "I do not understand.", "Sorry."],
        [
            "Thank you, that is kind of you.",
            "I am sorry. I am small and make mistakes.",
            "I try to be. It is easier than arithmetic.",
            "Let me try again. What did you want to know?",
            "It does not matter at all.",
        ],
    ),
    (
        ["What is love?", "What is rain?", "What is snow?", "What is a book?", "What is music?"],
        [
            "Love is when you share your last piece of cake.",
            "Rain is water that falls from the clouds.",
            "Snow is frozen water that falls softly in winter.",
            "A book is many pages of words between two covers.",
            "Music is sound that makes you dance or dream.",
        ],
    ),
    (
        ["What is the sun?", "What is the moon?", "What is a star?", "What is the wind?"],
        [
            "The sun is a star that gives us light and warmth.",
            "The moon goes around the earth and shines at night.",
            "A star is a great ball of hot gas, very far away.",
            "The wind is air that moves.",
        ],
    ),
    (
        ["What is a dog?", "What is a cat?", "What is a tree?", "What is a house?"],
        [
            "A dog is an animal that barks and likes to play.",
            "A cat is a small animal that likes to sleep and to hunt mice.",
            "A tree is a tall plant with a trunk, branches and leaves.",
            "A house is a building where people live.",
        ],
    ),
    (
        ["Write a poem.", "Write a poem about rain.", "Write a poem about the sea."],
        [
            "The day is long, the light is gold,\nthe hills are green, the stones are old.",
            "Rain on the roof and rain on the tree,\nrain in the garden and rain on me.",
            "The sea is wide, the sea is deep,\nit sings the little fish to sleep.",
        ],
    ),
    (
        ["Say hello.", "Say yes.", "Say no.", "Say nothing.", "Say goodbye."],
        ["Hello!", "Yes.", "No.", "...", "Goodbye!"],
    ),
    (
        ["Why is the sky blue?", "Why do birds sing?", "Why do we sleep?", "Why is ice cold?"],
        [
            "The air scatters blue light more than red light.",
            "Birds sing to find a partner and to guard their place.",
            "We sleep so that body and mind can rest.",
            "Ice is cold because it is frozen water.",
        ],
    ),
    (
        ["How do I make tea?", "How do I make soup?", "How do I make bread?"],
        [
            "Boil water, pour it over the tea and wait three minutes.",
            "Cut vegetables, cook them in water and add some salt.",
            "Mix flour, water, salt and yeast, wait one hour and bake it.",
        ],
    ),
]


def small_talk(words: Words) -> tuple[str, str]:
    """A remark and its reply."""
    asks, answers = words.rng.choice(SMALL_TALK)
    index = words.rng.randrange(len(asks))
    return asks[index], answers[index]


def fact(words: Words) -> tuple[str, str]:
    """A question of a closed set."""
    rng = words.rng
    form = rng.randrange(7)
    if form == 0:
        country = rng.choice(list(CAPITALS))
        city = CAPITALS[country]
        if rng.random() < 0.5:
            return f"What is the capital of {country}?", f"The capital of {country} is {city}."
        return f"Which country is {city} in?", f"{city} is the capital of {country}."
    if form == 1:
        names, unit = rng.choice([(DAYS, "day"), (MONTHS, "month")])
        index = rng.randrange(len(names))
        this, after = names[index], names[(index + 1) % len(names)]
        if rng.random() < 0.5:
            return f"What {unit} comes after {this}?", f"{after} comes after {this}."
        return f"What {unit} comes before {after}?", f"{this} comes before {after}."
    if form == 2:
        number = rng.randrange(21)
        return (
            f"How do you write {number} as a word?",
            f"The number {number} is written as {NUMBER_WORDS[number]}.",
        )
    ask, answer, pairs = SETS[rng.choice(list(SETS))]
    first, second = rng.choice(pairs)
    parts = {
        "a": article(first),
        "A": capital(article(first)),
        "b": second,
        "a_b": article(second),
        "b0": first,
        "B0": capital(first),
        "b0b": second,
    }
    return ask.format(**parts), answer.format(**parts)


def listing(words: Words) -> tuple[str, str]:
    """Name the first few of a category (always in the same order, so no item comes twice)."""
    rng = words.rng
    category = rng.choice(list(CATEGORIES))
    items = CATEGORIES[category][: rng.randrange(2, 7)]
    count = NUMBER_WORDS[len(items)]
    form = rng.randrange(4)
    if form == 0:
        lines = [f"{index}. {capital(item)}" for index, item in enumerate(items, 1)]
        return f"Name {count} {category}.", "\n".join(lines)
    if form == 1:
        return f"List {count} {category}.", f"{capital(category)}: {join_and(items)}."
    if form == 2:
        return f"Give me {count} {category} as bullets.", "\n".join(f"- {item}" for item in items)
    quoted = ", ".join(f'"{item}"' for item in items)
    return f"Give me a JSON array of {count} {category}.", f"[{quoted}]"


def sum_or_count(words: Words) -> tuple[str, str]:
    """Small arithmetic, counting and comparing."""
    rng = words.rng
    form = rng.randrange(10)
    if form < 3:
        top = 11 if rng.random() < 0.6 else 21
        a, b = rng.randrange(top), rng.randrange(top)
        ask = rng.choice([f"What is {a} + {b}?", f"{a} + {b} = ?", f"How much is {a} plus {b}?"])
        return ask, f"{a} + {b} = {a + b}."
    if form < 5:
        a = rng.randrange(21)
        b = rng.randrange(a + 1)
        ask = rng.choice([f"What is {a} - {b}?", f"{a} - {b} = ?", f"How much is {a} minus {b}?"])
        return ask, f"{a} - {b} = {a - b}."
    if form == 5:
        a, b = rng.randrange(1, 11), rng.randrange(1, 11)
        ask = rng.choice([f"What is {a} times {b}?", f"{a} * {b} = ?"])
        return ask, f"{a} * {b} = {a * b}."
    if form == 6:
        start, size = rng.randrange(1, 30), rng.randrange(3, 9)
        numbers = list(range(start, start + size + 1))
        if rng.random() < 0.3:
            numbers.reverse()
        ask = f"Count from {numbers[0]} to {numbers[-1]}."
        return ask, ", ".join(str(number) for number in numbers) + "."
    if form == 7:
        a, b = rng.sample(range(100), 2)
        return f"Which is bigger, {a} or {b}?", f"{max(a, b)} is bigger than {min(a, b)}."
    if form == 8:
        a = rng.randrange(100)
        if rng.random() < 0.5:
            return f"What comes after {a}?", f"{a + 1} comes after {a}."
        return f"Is {a} even or odd?", f"{a} is {'odd' if a % 2 else 'even'}."
    a = rng.randrange(1, 21)
    return f"What is double {a}?", f"Double {a} is {2 * a}."


def plain_text(words: Words, tale: str) -> str:
    """Text without chat marks, for plain completion."""
    rng = words.rng
    draw = rng.random()
    if draw < 0.55:
        return tale
    if draw < 0.7:
        return "\n".join(
            f"Q: {ask}\nA: {answer}" for ask, answer in some(rng, words, rng.randrange(1, 5))
        )
    if draw < 0.85:
        return " ".join(answer for _, answer in some(rng, words, rng.randrange(1, 5)))
    if draw < 0.93:
        start = rng.randrange(1, 50)
        return ", ".join(str(number) for number in range(start, start + rng.randrange(5, 20)))
    names = rng.choice([words.names(3), DAYS, MONTHS])
    return ", ".join(names) + ", " + ", ".join(names)


def some(rng: random.Random, words: Words, count: int) -> list[tuple[str, str]]:
    """A few facts and sums."""
    return [fact(words) if rng.random() < 0.7 else sum_or_count(words) for _ in range(count)]
