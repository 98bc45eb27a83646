"""What is printed at start is what is allocated, and no request can need more."""

from __future__ import annotations

import gc
import itertools
import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from runtime.api import ConfigError, EngineConfig
from runtime.build import build_engine
from runtime.engine import Engine
from runtime.memory import MIB, Memory, fitting, plan_memory
from runtime.sizing import Sizes
from tests.runtime.engine.harness import ASSET, GRANITE, QWEN, Driver, assert_empty, build, directory, prompts, request

KIB = 1024
PAIRS = list(itertools.product(("snapshot", "replay"), repeat=2))
EVERYTHING: dict[str, Any] = {
    "temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "frequency_penalty": 0.1,
    "logprobs": 20, "logit_bias": {5: 1.0}, "min_tokens": 3,
}  # fmt: skip


def printed(engine: Engine, name: str) -> float:
    return float(engine.info.choices[name])


def storages() -> dict[int, int]:
    """Bytes of every tensor's memory that is alive, by address."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def load(engine: Engine, count: int, max_len: int) -> Driver:
    """As many requests as there are seats, as long as the context, asking for everything."""
    driver = Driver(engine)
    texts = prompts(count, [max_len - 8], seed=3)
    driver.submit(*(request(f"{i}", text, max_tokens=8, **EVERYTHING) for i, text in enumerate(texts)))
    return driver


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
@pytest.mark.parametrize(("model", "speculative"), [(QWEN, "mtp:3"), (GRANITE, "ngram:7"), (GRANITE, "none")])
def test_nothing_that_stays_is_more_than_printed(
    model: str, speculative: str, prefill: str, decode: str, mode: str
) -> None:
    """After requests that use everything there is, the tensors alive are those of the printed sizes."""
    before = set(storages())
    engine = build(
        model,
        None,
        speculative=speculative,
        prefill_backend=prefill,
        decode_backend=decode,
        speculative_attention_mode=mode,
        settle_lag=1,
        max_num_seqs=3,
        max_num_batched_tokens=32,
        num_checkpoints=5,
    )
    at_start = engine.states.backend.num_bytes()
    load(engine, 3, 90).finish()
    assert_empty(engine)
    assert engine.states.backend.num_bytes() == at_start, "scratch was made after start"
    held = sum(size for place, size in storages().items() if place not in before)
    assert held <= (printed(engine, "total_mib") - printed(engine, "workspace_mib") + 0.2) * MIB


@pytest.mark.parametrize(
    ("model", "speculative", "decode"),
    [
        (QWEN, "mtp:3", "replay"),
        (QWEN, "mtp:7", "snapshot"),
        (GRANITE, "ngram:4", "snapshot"),
        ("asset", "mtp:3", "replay"),
    ],
)
def test_a_step_allocates_no_more_than_printed(model: str, speculative: str, decode: str) -> None:
    """The peak of what steps allocate and free, at the longest context, by the profiler's account."""
    length = 400 if model == "asset" else 90
    engine = build(
        model,
        None,
        speculative=speculative,
        decode_backend=decode,
        max_num_seqs=4,
        max_model_len=length,
        max_num_batched_tokens=64,
        block_size=16,
    )
    bound = printed(engine, "workspace_mib") * MIB
    driver = load(engine, 4, length - 4)
    peak = 0
    while engine.has_work:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            driver.step()
        peak = max(peak, highest(seen))
    assert 0 < peak <= bound, f"{peak / MIB:.2f} MiB of {bound / MIB:.2f} MiB"


def highest(seen: profile) -> int:
    """The most bytes that were allocated at a time since the profile began."""
    now = most = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


MEASURE = """
import json, sys
from runtime.api import EngineConfig
from runtime.build import build_engine
from runtime.machine import resident_memory
from tests.runtime.test_sizing import load
config = json.loads(sys.argv[1])
budget = resident_memory() + config.pop("more")
engine = build_engine(EngineConfig(**config, memory_gb=budget / 2**30))
driver = load(engine, config["max_num_seqs"], engine.info.max_model_len - 1)
while engine.has_work:
    driver.step()
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([int(peak.split()[1]) * 1024, budget, engine.info.choices]))
"""


def test_a_process_stays_within_the_memory_it_was_given() -> None:
    """--memory-gb bounds the whole process, interpreter, weights and temporaries included, under the largest load."""
    config = {
        "model_dir": str(ASSET), "speculative": "mtp:3", "threads": 1, "more": 64 * MIB, "max_num_seqs": 32,
        "max_model_len": 512,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(config)], capture_output=True, text=True, check=True, timeout=280
    )
    peak, budget, choices = json.loads(done.stdout.splitlines()[-1])
    assert peak <= budget, choices
    assert 34 < int(choices["kv_blocks"]) < 32 * 34, "the memory was the limit"


# --- how many fit


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("speculative", ["none", "mtp:3"])
def test_as_many_as_printed_run_at_once_and_none_gives_way(speculative: str, lag: int) -> None:
    engine = build(
        QWEN,
        speculative=speculative,
        settle_lag=lag,
        num_blocks=61,
        max_num_seqs=6,
        max_model_len=80,
        prefix_cache=False,
    )
    fits = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) x (\d+)", engine.info.choices["fits"])]
    assert len(fits) >= 2 and fits[0][1] == engine.info.max_model_len
    assert [count for count, _ in fits] == sorted(count for count, _ in fits)
    for count, length in fits:
        driver = Driver(engine)
        texts = prompts(count, [2], seed=1)
        driver.submit(*(request(f"{i}", text, max_tokens=length - 2) for i, text in enumerate(texts)))
        most = 0
        while engine.has_work:
            driver.step()
            most = max(most, engine.stats().running)
        assert most == count
        assert driver.since("preemptions_kv") == 0


def sizes(**changes: int) -> Sizes:
    return Sizes(
        **{"weights": 0, "slot": MIB, "block": MIB, "checkpoint": MIB, "scratch": 0, "workspace": 0, **changes}
    )


def config_of(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"model_dir": str(directory(QWEN)), "max_model_len": 64, "prefix_cache": False, **changes})


def test_given_memory_is_used_up_and_found_memory_by_half() -> None:
    engine = build(QWEN)
    spec = engine.runner.model.spec
    config = config_of(max_num_seqs=100)
    given = plan_memory(config, spec, sizes(), Memory(400 * MIB, "--memory-gb"))
    found = plan_memory(config, spec, sizes(), Memory(400 * MIB, None))
    assert (given.num_blocks, found.num_blocks) == (400 - 101, (400 - 101) // 2)


@pytest.mark.parametrize(
    ("changes", "memory", "words"),
    [
        (
            {"max_num_seqs": 100},
            Memory(50 * MIB, "--memory-gb"),
            ["seqs", "52 MiB more", "raise --memory-gb"],
        ),
        ({"max_num_seqs": 100}, Memory(50 * MIB, None), ["--max-num-seqs", "52 MiB more"]),
        ({"max_num_seqs": 1}, Memory(4 * MIB, "--memory-gb"), ["5 MiB", "2 MiB", "--max-model-len"]),
        ({"num_blocks": 99}, Memory(60 * MIB, "--gpu-memory-utilization"), ["99 MiB", "27 MiB", "--num-blocks"]),
    ],
)
def test_what_cannot_fit_is_refused_with_both_numbers(
    changes: dict[str, Any], memory: Memory, words: list[str]
) -> None:
    spec = build(QWEN).runner.model.spec
    with pytest.raises(ConfigError) as error:
        plan_memory(config_of(**changes), spec, sizes(), memory)
    for word in words:
        assert word in str(error.value), error.value


def test_a_process_that_is_given_too_little_does_not_start() -> None:
    with pytest.raises(ConfigError, match=r"more than there is; lower --max-num-seqs or raise --memory-gb"):
        build_engine(EngineConfig(model_dir=str(directory(QWEN)), threads=1, memory_gb=0.01))


def test_lengths_that_fit_are_halved_until_every_seat_is_taken() -> None:
    engine = build(QWEN)
    plan = plan_memory(
        config_of(max_num_seqs=7, num_blocks=30), engine.runner.model.spec, sizes(), Memory(MIB * 99, None)
    )
    assert fitting(config_of(max_num_seqs=7), plan, 64, 0) == {64: 7}
    assert fitting(config_of(max_num_seqs=7, block_size=4), plan, 64, 1) == {64: 1, 32: 3, 16: 5, 8: 7}
