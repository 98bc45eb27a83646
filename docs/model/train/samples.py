"""Print what a checkpoint answers to hand-written prompts, as it is.

python -m train.samples --model DIR
"""

import argparse
from pathlib import Path

from . import data
from .evaluate import Checkpoint
from .exchanges import TOOLS, Message, assistant, user

CHATS: list[list[str]] = [
    ["Hello!"],
    ["Repeat after me: Zyxqw Flarn 90210"],
    ["Repeat: Grüße aus Zürich, señor Ångström! 漢字 テスト 한국어 🦊🚀"],
    ["Copy this text: the quick brown fox jumps over the lazy dog"],
    ["Echo: x = foo(42); return x"],
    ["Extract the name and city as JSON: Wolfgang lives in Xylograd."],
    ["Write as JSON: name is Zoë, age is 31, city is São Paulo"],
    ["Hello! My name is Quentin.", "What is my name?"],
    [
        "My name is Brimolda.",
        "Say the word lamp three times.",
        "What is 7 + 8?",
        "What is my name?",
    ],
    ["Anna has a red box. Wolfgang has a blue boat. Who has the boat?"],
    ["alpha = 17, beta = 42, gamma = 5. What is beta?"],
    ["Write as a numbered list: milk, eggs, bread"],
    ["Name four tools."],
    ["Give me a JSON array of three fruits."],
    ["What is 12 - 5?"],
    ["What is 37 + 48?"],
    ["Count from 7 to 15."],
    ["What is the capital of Brazil?"],
    ["What is the capital of Australia?"],
    ["Tell me a story about a fox named Rimo."],
    ["Write a story about a lion and a clock."],
    ["Tell me a joke."],
    ["Write a Python function that adds two numbers."],
    ["Translate to French: good morning"],
    ["Who was the first person on the moon?"],
]
TOOL_CHATS: list[tuple[list[str], list[str]]] = [
    (["get_weather", "get_time"], ["What is the weather in Xylograd?"]),
    (["get_weather"], ["What is the weather in Paris and Qomru?"]),
    (["send_message", "call"], ["Send Brimolda this message: see you at 7 by the old bridge"]),
    (["get_time"], ["Could you find out how late it is in Berlin?"]),
    (["get_weather"], ["What is the opposite of hot?"]),
]
PLAIN = ["Once upon a time", "Q: What is the capital of Italy?\nA:", "1, 2, 3, 4,"]


def show(asked: str, text: str, stopped: bool) -> None:
    """One entry."""
    mark = "" if stopped else "  (did not stop within the limit)"
    print(f"> {asked!r}\n{text!r}{mark}\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=120)
    args = parser.parse_args()
    checkpoint = Checkpoint(args.model)
    for names, turns in [([], chat) for chat in CHATS] + TOOL_CHATS:
        head = data.render_head("", [TOOLS[name] for name in names])
        messages: list[Message] = []
        for turn in turns:
            messages.append(user(turn))
            prompt = head + "".join(map(data.render_message, messages)) + data.GENERATE
            _, _, text, stopped = checkpoint.answer(prompt, args.limit)
            messages.append(assistant(text))
        show(" / ".join(([f"tools {names}"] if names else []) + turns), text, stopped)
    for start in PLAIN:
        _, _, text, stopped = checkpoint.answer(start, args.limit)
        show(f"(plain) {start}", text, stopped)


if __name__ == "__main__":
    main()
