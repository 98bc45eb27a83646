"""Hundreds of verifications later the state is still REF's: rejected drafts do not add up."""

from __future__ import annotations

import pytest
import torch

from tests.support.engines import engine_of, forget, greedy, pair, run, tokens_of
from tests.support.oracle import Watch, assert_greedy, ref, truth
from tests.support.scripted import Script, attach

WAYS = [("replay", "snapshot", "decode"), ("snapshot", "replay", "decode")]
PROMPT = tokens_of(33, 6)


@pytest.mark.parametrize("name", ["qwen", "granite"])
def test_two_hundred_rejections_in_a_row(name: str) -> None:
    settings = {"max_model_len": 300, "num_blocks": 400}
    plain = engine_of(name, **settings)
    expected = run(plain, [greedy("a", PROMPT, 200)])["a"].tokens
    assert_greedy(name, PROMPT, expected)
    for way in WAYS:
        engine = engine_of(name, speculative="ngram:7", **settings, **pair(*way))
        script = Script(engine, {"a": expected}, lambda _name, step: (1 + step % 7, 0))
        attach(engine, script)
        watch = Watch(engine, name, every=5)
        story = run(engine, [greedy("a", PROMPT, 200)], watch.look)["a"]
        assert story.tokens == expected
        assert not script.surprises
        assert (story.accepted, story.drafted >= 700) == (0, True)
        watch.check()
        assert watch.num_checked > 160
        forget(engine)
    forget(plain)


@pytest.mark.parametrize(("speculative", "lag"), [("mtp:1", 0), ("mtp:3", 1), ("mtp:7", 0)])
def test_the_drafters_own_state(speculative: str, lag: int) -> None:
    """Eight requests at once: entry t of the head's KV is made of token t + 1 and REF's hidden state at t."""
    engine = engine_of("qwen", speculative=speculative, settle_lag=lag, max_num_seqs=8, max_num_batched_tokens=24)
    store = engine.proposer._store
    looks: list[tuple[object, int, torch.Tensor, torch.Tensor]] = []

    def look() -> None:
        for seq in engine.scheduler._running:
            lease = seq.lease
            if lease is not None and lease.computed:
                cells = torch.tensor(lease.blocks)
                keys, values = (side[0][cells].flatten(0, 1)[: lease.computed] for side in (store.keys, store.values))
                looks.append((seq, lease.computed, keys, values))

    run(engine, [greedy(f"m{i}", tokens_of(90 + i, 1 + 2 * i), 12) for i in range(8)], look)
    oracle = ref("qwen")
    checked = 0
    for seq in {look[0] for look in looks}:
        trace = oracle.trace(seq.tokens[:-1])
        embedded = oracle._norm(oracle._embed(seq.tokens[1:]), "mtp.pre_fc_norm_embedding.weight")
        both = torch.cat([embedded, oracle._norm(trace.hidden, "mtp.pre_fc_norm_hidden.weight")], dim=-1)
        x = oracle._norm(both @ oracle.weights["mtp.fc.weight"].T, "mtp.layers.0.input_layernorm.weight")
        _, kv = oracle._attention(x, "mtp.layers.0.self_attn", torch.arange(len(seq.tokens) - 1))
        for other, computed, keys, values in looks:
            if other is seq:
                for found, exact in ((keys, kv.k), (values, kv.v)):
                    assert (found - exact[:computed]).abs().max() <= 3e-5 * exact.abs().max()
                checked += 1
        assert truth("qwen", tuple(seq.tokens)).greedy[seq.prompt_len - 1 : -1] == seq.tokens[seq.prompt_len :]
    assert checked > 40
    assert engine.stats().draft_failures == 0
    forget(engine)


def test_a_drafter_that_fails_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("qwen", speculative="mtp:3")
    plain = engine_of("qwen")
    expected = run(plain, [greedy("a", PROMPT, 20)])["a"].tokens
    calls = iter(range(1000))
    original = engine.proposer.propose

    def sometimes(*args: object) -> object:
        if next(calls) % 3 == 0:
            raise ValueError("scripted")
        return original(*args)

    monkeypatch.setattr(engine.proposer, "propose", sometimes)
    watch = Watch(engine, "qwen")
    assert run(engine, [greedy("a", PROMPT, 20)], watch.look)["a"].tokens == expected
    watch.check()
    assert engine.stats().draft_failures > 2
    forget(engine)
    forget(plain)
