"""What is asked: a set of short prompts with a secret each, their answers when nobody else is there, and who is right.

Prompts share prefixes in families. Half of them are greedy, half sampled with a seed; both have one right answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from kernels.gumbel import counter_gumbel
from runtime.api import EngineConfig, Request, SamplingParams
from runtime.build import build_engine
from server.prompt import PromptEncoder
from server.settings import embedded_model_dir
from server.tokenizer import TextTokenizer
from tests.support.ref import Ref

FAMILIES = 6
MARGIN = 1e-4  # design: a first difference is allowed where the two best are closer than this
SYLLABLES = ("ba", "do", "fi", "ku", "le", "mo", "na", "pe", "ri", "su", "ta", "vo", "wi", "zu")


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt in tokens, what is asked of it, its secret, and the only right answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    secret: str
    answer: tuple[int, ...] = ()

    def body(self) -> dict[str, Any]:
        """The request."""
        return {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            "seed": self.seed,
            "stream": True,
            "return_token_ids": True,
        }


def make_items(count: int, seed: int) -> list[Item]:
    """Without answers."""
    dice = random.Random(seed)
    encoder = PromptEncoder.load(TextTokenizer.load(embedded_model_dir()), embedded_model_dir())
    numbers = dice.sample(range(10_000, 100_000), count)
    systems = [" ".join(_word(dice) for _ in range(4 + 6 * family)) for family in range(FAMILIES)]
    items = []
    for i in range(count):
        secret = f"{_word(dice).title()} {numbers[i]}"
        messages = [
            {"role": "system", "content": systems[i % FAMILIES]},
            {"role": "user", "content": f"Repeat after me: {secret}"},
        ]
        prompt = encoder.encode_chat(messages, 4096, variables={})
        items.append(Item(tuple(prompt), dice.choice((1, 2, 5, 9, 14, 24)), float(i % 2), seed + i, secret))
    return items


def _word(dice: random.Random) -> str:
    return "".join(dice.choice(SYLLABLES) for _ in range(dice.choice((2, 3))))


def answered(items: list[Item]) -> list[Item]:
    """With what each says alone: no drafts, no cache, nobody else in the engine."""
    engine = build_engine(
        EngineConfig(model_dir=str(embedded_model_dir()), max_num_seqs=1, max_model_len=512, prefix_cache=False)
    )
    found = []
    for i, item in enumerate(items):
        sampling = SamplingParams(max_tokens=item.max_tokens, temperature=item.temperature, seed=item.seed)
        deltas = list(engine.generate([Request(id=str(i), prompt=item.prompt, sampling=sampling)]))
        tokens = tuple(token for delta in deltas for token in delta.tokens)
        found.append(Item(item.prompt, item.max_tokens, item.temperature, item.seed, item.secret, tokens))
    return found


class Judge:
    """Compares answers. A first difference is a near tie when float64 says that both tokens are as good."""

    def __init__(self, items: list[Item]) -> None:
        self._items = items
        self._ref: Ref | None = None
        self._secrets = {item.secret for item in items}

    def verdict(self, item: Item, tokens: list[int], text: str, *, whole: bool) -> str:
        """`right`, `near tie`, `wrong`, or `leak` when it contains somebody else's secret."""
        if any(secret in text for secret in self._secrets - {item.secret}):
            return "leak"
        want = item.answer if whole else item.answer[: len(tokens)]
        if tuple(tokens) == want:
            return "right"
        at = next((i for i, (a, b) in enumerate(zip(tokens, want, strict=False)) if a != b), None)
        return "wrong" if at is None or not self._is_tie(item, at, tokens[at]) else "near tie"

    def _is_tie(self, item: Item, at: int, token: int) -> bool:
        self._ref = self._ref or Ref(embedded_model_dir())
        scores = self._ref.logits([*item.prompt, *item.answer[:at]])[-1].double()
        if item.temperature:
            position = torch.tensor([len(item.prompt) + at])
            noise = counter_gumbel(torch.tensor([item.seed]), position, scores.shape[0])
            scores = scores / item.temperature + noise[0].double()
        best = scores.topk(2)
        return {token, item.answer[at]} == set(best.indices.tolist()) and float(
            best.values[0] - best.values[1]
        ) < MARGIN
