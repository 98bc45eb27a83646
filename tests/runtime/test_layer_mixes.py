"""No layer is special: whatever their order and number, states are intact beside prefill and decoding."""

from __future__ import annotations

import pytest

from tests.support.engines import engine_of, forget, greedy, pair, run, texts, tokens_of
from tests.support.oracle import Watch, assert_greedy
from tests.support.scripted import Script, attach
from tests.support.tiny import MODELS

PROMPTS = {f"m{i}": tokens_of(40 + i, length) for i, length in enumerate((1, 3, 11))}
WAYS = [("snapshot", "replay", "decode"), ("replay", "snapshot", "prefill")]
NUM_TOKENS = 10


@pytest.mark.parametrize(("name", "lag"), [(name, i % 2) for i, name in enumerate(MODELS)])
def test_every_tiny_model(name: str, lag: int) -> None:
    requests = [greedy(i, prompt, NUM_TOKENS) for i, prompt in PROMPTS.items()]
    plain = engine_of(name, **pair("snapshot", "snapshot"))
    expected = texts(run(plain, requests))
    for i, prompt in PROMPTS.items():
        assert_greedy(name, prompt, expected[i])
    settings = {"speculative": "ngram:7", "settle_lag": lag, "max_num_batched_tokens": 10}
    engine = engine_of(name, **settings, **pair(*WAYS[lag]))
    script = Script(engine, expected, lambda request, step: (3, (step + int(request[1:])) % 4))
    attach(engine, script)
    watch = Watch(engine, name)
    assert texts(run(engine, requests, watch.look)) == expected
    watch.check()
    assert not script.surprises
    assert script.seen >= {(3, 0), (3, 1), (3, 2)}
    forget(engine)
    forget(plain)


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("qwen")])
def test_every_tiny_model_with_its_own_head(name: str) -> None:
    requests = [greedy(i, prompt, NUM_TOKENS) for i, prompt in PROMPTS.items()]
    plain, engine = engine_of(name), engine_of(name, speculative="mtp:2", settle_lag=1)
    assert texts(run(engine, requests)) == texts(run(plain, requests))
    assert engine.stats().draft_failures == 0
    forget(plain)
    forget(engine)
