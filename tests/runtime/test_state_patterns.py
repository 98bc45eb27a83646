"""The state after every verification: all 36 patterns of drafts and acceptance, as rows of one batch.

For every pair of halves, attention mode, layer kind and settle lag, STATE is checked after every step, under POISON.
"""

from __future__ import annotations

import pytest

from runtime.speculation.proposer import Placement
from tests.support.engines import MODES, PAIRS, engine_of, forget, greedy, pair, run, texts
from tests.support.oracle import Watch
from tests.support.scripted import PATTERNS, Script, attach
from tests.support.undisturbed import NUM_TOKENS, prompts, undisturbed

MODELS = ("qwen", "granite")


def rotating(name: str, step: int) -> tuple[int, int]:
    """Every request goes through all patterns, and the rows of every step show all of them."""
    return PATTERNS[(int(name[1:]) + 5 * step) % len(PATTERNS)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("halves", PAIRS, ids="-".join)
def test_all_patterns_in_one_batch(halves: tuple[str, str], mode: str, name: str) -> None:
    engine = engine_of(name, speculative="ngram:7", max_num_seqs=36, max_num_batched_tokens=512, **pair(*halves, mode))
    expected = undisturbed(name)
    script = Script(engine, expected, rotating)
    attach(engine, script)
    watch = Watch(engine, name)
    stories = run(engine, [greedy(i, prompt, NUM_TOKENS) for i, prompt in prompts().items()], watch.look)
    assert texts(stories) == expected
    assert script.seen == set(PATTERNS)
    assert not script.surprises
    watch.check()
    assert watch.num_checked > 700
    forget(engine)


@pytest.mark.parametrize(("mode", "name"), list(zip(MODES, MODELS, strict=True)))
@pytest.mark.parametrize("halves", PAIRS, ids="-".join)
def test_all_patterns_with_a_step_in_flight(halves: tuple[str, str], mode: str, name: str) -> None:
    """Settle lag 1: the next step begins before the host has seen this one. Each request keeps its draft length."""
    settings = pair(*halves, mode) | {"settle_lag": 1, "max_num_seqs": 36, "max_num_batched_tokens": 512}
    engine = engine_of(name, speculative="ngram:7", **settings)
    expected = undisturbed(name)

    def plan(request: str, step: int) -> tuple[int, int]:
        k, first = PATTERNS[int(request[1:])]
        return k, (first + step) % (k + 1)

    script = Script(engine, expected, plan, Placement.DEVICE)
    attach(engine, script)
    watch = Watch(engine, name)
    given = zip(prompts().items(), PATTERNS, strict=True)
    stories = run(engine, [greedy(i, prompt, NUM_TOKENS, num_drafts=k) for (i, prompt), (k, _) in given], watch.look)
    assert texts(stories) == expected
    assert script.seen >= {(k, a) for k, a in PATTERNS if k}
    assert not script.surprises
    watch.check()
    assert watch.num_checked > 700
    forget(engine)
