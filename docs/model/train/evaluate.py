"""Measure a checkpoint: exact answers, stopping, distinct outputs, tokens per verification.

    python -m train.evaluate --model DIR --seen run.json

Greedy decoding by transformers in float32 is the oracle. Questions that occur in the training
stream (made again from the seeds in run.json) are left out, so names, numbers and keys are unseen
combinations.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from . import data, drill
from .encoder import Encoder
from .exchanges import KINDS, Exchange
from .network import Mtp, Shape
from .words import Words

DRAFTS = 3
BIGRAM_CHUNKS = 12
#: kind -> questions per seed; the first four are the gate, alone and after a history
PLAN = {
    "copy": 60,
    "json": 60,
    "context": 60,
    "tool": 60,
    "context without things": 60,
    "things": 60,
    "tool answer": 30,
    "unicode": 50,
    "say": 25,
    "format": 25,
    "pick": 25,
    "story": 30,
    "math": 30,
    "fact": 30,
    "list": 20,
    "chat": 20,
}
CORE = ("copy", "json", "context", "tool", "context without things")
HISTORIES = (300, 600)
FREE = ("story",)  # no single right answer
REPEATED = ("math", "fact", "list", "chat")  # closed sets: seen in training


@dataclass
class Case:
    """A chat that ends with a question, and its answer."""

    prompt: str
    answer: str


@dataclass
class Tally:
    """Counts of one group of cases."""

    total: int = 0
    exact: int = 0
    stopped: int = 0
    outputs: list[str] = field(default_factory=list)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    accepted: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))


def seen_questions(path: Path, encoder: Encoder) -> set[int]:
    """Hashes of every question in the training stream, the drills included."""
    run = json.loads(path.read_text())
    seen: set[int] = set()
    told = run.get("drill") or {"seed": 0, "steps": [0] * len(drill.EXERCISES), "tokens": 1}
    for rank in range(run["processes"]):
        for ids, _ in drill.made_again(encoder, told["seed"], rank, told["steps"], told["tokens"]):
            text = encoder.tokenizer.decode(ids, skip_special_tokens=False)
            turns = [part.split(data.END)[0] for part in text.split(f"{data.START}user\n")[1:]]
            seen.update(hash(tuple(turns[: count + 1])) for count in range(len(turns)))
    for stage in ("trunk", "mtp"):
        for rank in range(run["processes"]):
            first = run[stage].get("first", 0)
            for index in range(first, run[stage]["chunks"] + 2):  # another may be ahead
                for document in data.chunk(run[stage]["seed"], rank, index):
                    for made in document.exchanges:
                        seen.update(hash(question) for question in data.questions(made))
    return seen


def question(words: Words, kind: str) -> Exchange:
    """One exchange of a kind, ending with the answer to be judged."""
    if kind == "tool answer":
        while len((made := KINDS["tool"](words)).messages) < 4:
            pass
        return made
    if kind == "context without things":
        while (made := KINDS["context"](words)).kind == "things":
            pass
        return made
    made = KINDS[kind](words)
    if kind == "tool":
        made.messages = made.messages[:2]
    return made


def case(words: Words, kind: str, encoder: Encoder, history: int, seen: set[int]) -> Case:
    """An unseen question, after at least `history` tokens of other chat."""
    while True:
        last = question(words, kind)
        asked = list(data.questions(last))
        if kind in (*FREE, *REPEATED) or not any(hash(item) in seen for item in asked[-1:]):
            break
    tools = data.with_distractors(words.rng, last.tools) if last.tools else []
    document = data.Document([last], tools=tools)
    others = ["copy", "json", "context", "fact", "say", "format"]
    while history and len(encoder.ids(data.render(document))) < history:
        document.exchanges.insert(0, KINDS[words.rng.choice(others)](words))
    text = data.render(document)
    ending = data.END + "\n"
    answer = data.render_message(last.messages[-1])[len(data.GENERATE) :].removesuffix(ending)
    prompt = text.removesuffix(answer + ending)
    return Case(prompt, answer)


class Checkpoint:
    """The exported model in the oracle, with its draft head in this project's network."""

    def __init__(self, folder: Path) -> None:
        self.encoder = Encoder(folder)
        self.oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self.mtp = Mtp(Shape(vocab=config["vocab_size"]))
        head = {
            k.removeprefix("mtp."): v.float() for k, v in weights.items() if k.startswith("mtp.")
        }
        self.mtp.load_state_dict(head)
        self.embedding = self.oracle.get_input_embeddings().weight.detach()
        self.stops = [self.encoder.end, self.encoder.stop]

    @torch.no_grad()
    def answer(self, prompt: str, limit: int = 220) -> tuple[Tensor, int, str, bool]:
        """All ids, the prompt's length, the answer's text, and whether it stopped by itself."""
        ids = torch.tensor([self.encoder.ids(prompt)])
        out = self.oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=self.stops,
            pad_token_id=self.encoder.stop,
        )
        made = out[0, ids.shape[1] :].tolist()
        stopped = made[-1] in self.stops
        text = self.encoder.tokenizer.decode(
            made[:-1] if stopped else made, skip_special_tokens=False
        )
        return out[0], ids.shape[1], text, stopped

    @torch.no_grad()
    def mtp_drafts(self, ids: Tensor) -> list[list[int]]:
        """drafts[t] continues ids[: t + 2]: tokens t+2, t+3, ... along the trunk's own output."""
        padded = torch.cat([ids, torch.full((DRAFTS,), self.encoder.end)])[None]
        hidden = self.oracle.model(input_ids=padded, use_cache=False).last_hidden_state
        made = self.mtp.unroll(self.embedding, padded, hidden, DRAFTS)
        best = [F.linear(state, self.embedding).argmax(-1)[0].tolist() for state in made]
        return [list(column) for column in zip(*best, strict=True)]


def bigram_table(encoder: Encoder, seed: int) -> dict[int, int]:
    """The most frequent next token in the model's turns of a part of the training text."""
    counts: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for index in range(BIGRAM_CHUNKS):
        for ids in encoder.batch([data.render(d) for d in data.chunk(seed, 0, index)]):
            weights = encoder.weights(ids, 0.0)
            for at in range(1, len(ids)):
                if weights[at]:
                    counts[ids[at - 1]][ids[at]] += 1
    return {token: max(after, key=lambda k: after[k]) for token, after in counts.items()}


def bigram_drafts(table: dict[int, int], ids: Tensor, stop: int) -> list[list[int]]:
    """Drafts of the baseline in the same form as the head's."""
    made = []
    for token in ids[1:].tolist():
        chain = []
        for _ in range(DRAFTS):
            token = table.get(token, stop)  # noqa: PLW2901
            chain.append(token)
        made.append(chain)
    return made


def verifications(ids: list[int], begin: int, drafts: list[list[int]]) -> tuple[int, int]:
    """Tokens emitted and verifications made, if every verification checks DRAFTS drafts."""
    emitted = steps = 0
    at = begin - 1  # ids[at + 1] is known: the last verified token
    while at < len(ids) - 2:
        good = 0
        while good < DRAFTS and at + 2 + good < len(ids) and drafts[at][good] == ids[at + 2 + good]:
            good += 1
        made = min(good + 1, len(ids) - 2 - at)
        emitted += made
        steps += 1
        at += made
    return emitted, steps


def judge(
    checkpoint: Checkpoint, cases: list[Case], table: dict[int, int], known: set[str]
) -> Tally:
    """Answer all cases; drafts are measured on outputs not met before."""
    tally = Tally()
    for item in cases:
        ids, begin, text, stopped = checkpoint.answer(item.prompt)
        tally.total += 1
        tally.exact += text == item.answer
        tally.stopped += stopped
        tally.outputs.append(text)
        if text != item.answer:
            tally.wrong.append((item.prompt.split(data.START)[-2], text, item.answer))
        if text in known:
            continue
        known.add(text)
        for label, drafts in (
            ("mtp", checkpoint.mtp_drafts(ids)),
            ("bigram", bigram_drafts(table, ids, checkpoint.encoder.end)),
        ):
            emitted, steps = verifications(ids.tolist(), begin, drafts)
            tally.accepted[label][0] += emitted
            tally.accepted[label][1] += steps
    return tally


def rate(tallies: list[Tally], label: str) -> float:
    """Tokens per verification over several groups."""
    emitted = sum(tally.accepted[label][0] for tally in tallies)
    return emitted / max(1, sum(tally.accepted[label][1] for tally in tallies))


def cases_of(
    words: Words, kind: str, encoder: Encoder, history: int, seen: set[int], count: int
) -> list[Case]:
    """Cases with different prompts."""
    found: dict[str, Case] = {}
    for _ in range(60 * count):
        if len(found) == count:
            break
        made = case(words, kind, encoder, history, seen)
        found.setdefault(made.prompt, made)
    return list(found.values())


def groups() -> list[tuple[str, str, int, Callable[[Words], None]]]:
    """(label, kind, history, set-up of the names) of everything that is measured."""

    def nothing(words: Words) -> None:
        del words

    def styled(style: str) -> Callable[[Words], None]:
        def apply(words: Words) -> None:
            words.name_style = style

        return apply

    made: list[tuple[str, str, int, Callable[[Words], None]]] = [(k, k, 0, nothing) for k in PLAN]
    for history in HISTORIES:
        made += [(f"{kind} after {history}+ tokens", kind, history, nothing) for kind in CORE]
    for style in ("syllables", "letters"):
        made += [(f"{kind}, names of {style}", kind, 0, styled(style)) for kind in CORE]
    return made


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seen", type=Path, default=None, help="run.json of the training run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer questions")
    parser.add_argument("--only", default="", help="only groups whose label has this in it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    checkpoint = Checkpoint(args.model)
    seen = seen_questions(args.seen, checkpoint.encoder) if args.seen else set()
    drilled = bool(args.seen and json.loads(args.seen.read_text()).get("drill"))
    print(f"{len(seen)} questions in training are left out", flush=True)
    table = bigram_table(checkpoint.encoder, 20)
    known: set[str] = set()
    tallies: dict[str, Tally] = {}
    print("| group | exact | stopped | distinct | MTP tokens/verification | bigram |")
    print("|---|---|---|---|---|---|")
    for label, kind, history, prepare in groups():
        if args.only not in label:
            continue
        words = Words(random.Random(f"evaluate/{args.seed}/{label}"), drilled=drilled)
        prepare(words)
        count = max(2, round(args.scale * PLAN[kind]))
        cases = cases_of(words, kind, checkpoint.encoder, history, seen, count)
        tally = tallies[label] = judge(checkpoint, cases, table, known)
        exact = "-" if kind in FREE else f"{tally.exact}/{tally.total}"
        print(
            f"| {label} | {exact} | {tally.stopped}/{tally.total} "
            f"| {len(set(tally.outputs))}/{tally.total} "
            f"| {rate([tally], 'mtp'):.2f} | {rate([tally], 'bigram'):.2f} |",
            flush=True,
        )
    every = list(tallies.values())
    outputs = [text for tally in every for text in tally.outputs]
    total = sum(tally.total for tally in every)
    print(
        f"| all | - | {sum(t.stopped for t in every)}/{total} | {len(set(outputs))}/{total} "
        f"| {rate(every, 'mtp'):.2f} | {rate(every, 'bigram'):.2f} |"
    )
    for label, tally in tallies.items():
        for prompt, text, answer in tally.wrong[:4]:
            print(f"WRONG {label}: {prompt!r}\n  given {text!r}\n  right {answer!r}")
    if args.json:
        figures = {
            label: {
                "total": tally.total,
                "exact": tally.exact,
                "stopped": tally.stopped,
                "distinct": len(set(tally.outputs)),
                "mtp": tally.accepted["mtp"],
                "bigram": tally.accepted["bigram"],
            }
            for label, tally in tallies.items()
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
