"""Documents for training: exchanges chained into chats, plain texts, and their rendering.

A document is a pure function of (seed, rank, chunk, position): the training stream can be made
again to know what the model has seen (evaluation leaves those questions out).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from .exchanges import (
    KINDS,
    TOOLS,
    Exchange,
    Message,
    as_json,
    assistant,
    statements,
    use_tool,
    user,
)
from .knowledge import plain_text
from .stories import story_request
from .words import Words

START, END, STOP = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
GENERATE = f"{START}assistant\n"

MIX = {
    "copy": 14,
    "unicode": 5,
    "say": 3,
    "json": 18,
    "format": 3,
    "pick": 2,
    "context": 26,
    "tool": 13,
    "story": 5,
    "math": 5,
    "fact": 5,
    "list": 2,
    "chat": 3,
}
LONG_MIX = {
    "copy": 16,
    "unicode": 4,
    "say": 3,
    "json": 20,
    "format": 3,
    "pick": 2,
    "context": 28,
    "story": 2,
    "math": 5,
    "fact": 5,
    "list": 2,
    "chat": 4,
}
#: what is still wrong most often comes more often later: (from this chunk on, new weights)
LATER: list[tuple[int, dict[str, int]]] = [
    (50, {"context": 40, "say": 6}),
    (92, {"things": 30, "math": 12, "fact": 8, "list": 4}),
    (141, {"context": 22, "things": 14, "json": 28, "tool": 32, "say": 5}),
]
DRILLED_FROM_CHUNK = 105  # the drills (train.drill) come before this chunk
SYSTEM_TEXTS = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a tiny assistant.",
    "You are a kind assistant. Answer in short sentences.",
    "You are Lockstep's test model.",
    "Be brief.",
    "Answer the question.",
]
CHUNK_DOCUMENTS = 512
LONG_FROM_CHUNK = 22  # per process; about two million tokens of short documents by then
RANDOM_UNTIL_CHUNK = 6  # many random-token copies first, a few later
LONG_SHARE = 0.27  # of the documents; about 60 % of the tokens
LONGEST = 960


@dataclass
class Document:
    """A chat, or a plain text if there are no exchanges."""

    exchanges: list[Exchange] = field(default_factory=list)
    system: str = ""
    tools: list[dict[str, object]] = field(default_factory=list)
    text: str = ""

    @property
    def messages(self) -> list[Message]:
        """All messages in order."""
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return first + [message for made in self.exchanges for message in made.messages]


def call_text(message: Message) -> str:
    """The tool calls of a message as text."""
    calls = message.get("tool_calls", [])
    assert isinstance(calls, list)
    texts = []
    for call in calls:
        function = call["function"]
        arguments = as_json(function["arguments"])
        texts.append(
            f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'
        )
    return "\n".join(texts)


def render_message(message: Message) -> str:
    """One message after the head of the chat, as the chat template writes it."""
    role, content = message["role"], message["content"]
    if role == "tool":
        return f"{START}user\n<tool_response>\n{content}\n</tool_response>{END}\n"
    return f"{START}{role}\n{content}{call_text(message)}{END}\n"


def render_head(system: str, tools: list[dict[str, object]]) -> str:
    """The system message with the tools, if there is either."""
    if tools:
        listed = "".join(as_json(tool) + "\n" for tool in tools)
        before = f"{system}\n\n" if system else ""
        return f"{START}system\n{before}# Tools\n{listed}{END}\n"
    return f"{START}system\n{system}{END}\n" if system else ""


def render(document: Document) -> str:
    """The text of a document, equal to what the chat template makes of it."""
    if document.text:
        return document.text + STOP
    head = render_head(document.system, document.tools)
    told = [message for made in document.exchanges for message in made.messages]
    return head + "".join(render_message(message) for message in told)


def weighted(rng: random.Random, mix: dict[str, int]) -> str:
    """A kind drawn by weight."""
    return rng.choices(list(mix), list(mix.values()))[0]


def system_text(rng: random.Random, chance: float) -> str:
    """Sometimes a system message."""
    return rng.choice(SYSTEM_TEXTS) if rng.random() < chance else ""


def with_distractors(rng: random.Random, tools: list[dict[str, object]]) -> list[dict[str, object]]:
    """The needed tools and up to two others, in any order."""
    others = [tool for tool in TOOLS.values() if tool not in tools]
    found = tools + rng.sample(others, rng.choice([0, 1, 1, 2]))
    rng.shuffle(found)
    return found


def short_chat(words: Words, changes: dict[str, int]) -> Document:
    """One exchange, sometimes followed by a second."""
    rng = words.rng
    kind = weighted(rng, MIX | changes)
    first = KINDS[kind](words)
    document = Document([first], system_text(rng, 0.15))
    if kind == "tool":
        document.tools = with_distractors(rng, first.tools)
    elif kind not in ("story", "context", "things") and rng.random() < 0.3:
        second = rng.choice(["copy", "say", "json", "math", "fact", "chat"])
        document.exchanges.append(KINDS[second](words))
    elif kind != "story" and rng.random() < 0.06:  # tools are there, but not needed
        document.tools = with_distractors(rng, [])
        if kind == "math":
            document.tools = [tool for tool in document.tools if tool != TOOLS["add"]]
    if not document.tools and rng.random() < 0.01:
        name = words.name()
        document.system = f"Your name is {name}."
        named = [user("What is your name?"), assistant(f"My name is {name}.")]
        document.exchanges = [Exchange("context", named)]
    return document


def long_chat(words: Words, changes: dict[str, int]) -> Document:
    """Several exchanges; sometimes something told early is asked for late, or tools are used."""
    rng = words.rng
    document = Document(system=system_text(rng, 0.2))
    count = min(rng.randrange(2, 14), rng.randrange(3, 16))
    allowed: list[str] = []
    mix = LONG_MIX | changes
    mix.pop("tool", None)
    if rng.random() < 0.35:
        allowed = rng.sample(list(TOOLS), rng.randrange(1, 4))
        document.tools = [TOOLS[name] for name in allowed]
        mix["tool"] = 24
        if "add" in allowed:
            mix["math"] = 0
    for _ in range(count):
        kind = weighted(rng, mix)
        made = use_tool(words, allowed) if kind == "tool" else KINDS[kind](words)
        document.exchanges.append(made)
    if rng.random() < 0.4:
        remember(words, document)
    return document


def remember(words: Words, document: Document) -> None:
    """Tell something near the start and ask for it later, with other exchanges between."""
    rng = words.rng
    chosen = rng.sample(statements(words), rng.randrange(1, 3))
    told: list[Message] = []
    for statement, reply, _, _ in chosen:
        told += [user(statement), assistant(reply)]
    asked: list[Message] = []
    for _, _, question, answer in chosen:
        asked += [user(question), assistant(answer)]
    own = ("My ", "I ", "Remember ")  # another user story would make the question ambiguous
    document.exchanges = [
        made
        for made in document.exchanges
        if not any(str(message["content"]).startswith(own) for message in made.messages)
    ]
    document.exchanges.insert(rng.randrange(2) if document.exchanges else 0, Exchange("told", told))
    at = rng.randrange(1, len(document.exchanges) + 1)
    at = max(at, 2) if document.exchanges[0].kind != "told" else at
    document.exchanges.insert(at, Exchange("remember", asked))


def document(words: Words, long_share: float, changes: dict[str, int] | None = None) -> Document:
    """One document of the mix, some of whose weights may be changed."""
    rng = words.rng
    if rng.random() < 0.04:
        _, tale = story_request(words)
        return Document(text=plain_text(words, tale))
    return (long_chat if rng.random() < long_share else short_chat)(words, changes or {})


def chunk(seed: int, rank: int, index: int) -> Iterator[Document]:
    """The documents of one chunk of one process's stream."""
    words = Words(random.Random(f"{seed}/{rank}/{index}"), drilled=index >= DRILLED_FROM_CHUNK)
    long_share = LONG_SHARE if index >= LONG_FROM_CHUNK else 0.0
    changes: dict[str, int] = {}
    for begin, weights in LATER:
        if index >= begin:
            changes |= weights
    for _ in range(CHUNK_DOCUMENTS):
        yield document(words, long_share, changes)


def questions(made: Exchange) -> Iterator[tuple[str, ...]]:
    """What identifies each answered question of an exchange: all that was asked up to it."""
    asked: list[str] = []
    for message in made.messages:
        if message["role"] == "assistant":
            yield tuple(asked)
        else:
            asked.append(str(message["content"]))
