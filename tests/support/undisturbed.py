"""What each request of a fixed set says without speculation, states simply copied. REF agrees, token by token."""

from __future__ import annotations

import functools

from tests.support.engines import engine_of, forget, greedy, pair, run, texts, tokens_of
from tests.support.oracle import assert_greedy
from tests.support.scripted import PATTERNS

NUM_TOKENS = 18
PROMPT_LENGTHS = (1, 2, 3, 4, 5, 9, 14)


@functools.cache
def prompts(count: int = len(PATTERNS)) -> dict[str, tuple[int, ...]]:
    """Random prompts, shorter and longer than a convolution and a block."""
    return {f"r{i}": tokens_of(i, PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)]) for i in range(count)}


@functools.cache
def undisturbed(name: str, num_tokens: int = NUM_TOKENS, count: int = len(PATTERNS)) -> dict[str, list[int]]:
    """The greedy texts of `prompts(count)`."""
    engine = engine_of(name, max_num_seqs=count, max_model_len=384, **pair("snapshot", "snapshot"))
    said = texts(run(engine, [greedy(i, prompt, num_tokens) for i, prompt in prompts(count).items()]))
    for i, prompt in prompts(count).items():
        assert_greedy(name, prompt, said[i])
    forget(engine)
    return said
