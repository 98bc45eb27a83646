"""Shared by the model tests: prompts, transformers' answers, and forwards through the dense context."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from runtime.models.base import HybridModel
from runtime.models.registry import Loaded, load_model
from tests.support.dense import Form, RefContext
from tests.support.ref import Ref
from tests.support.tiny import tiny

CPU = torch.device("cpu")
ASSET = Path(__file__).parents[3] / "runtime" / "assets" / "model"
LENGTH = 200


def directory(name: str) -> Path:
    """A tiny model, or the embedded one as "asset"."""
    return ASSET if name == "asset" else tiny(name)


@functools.cache
def loaded(name: str) -> Loaded:
    return load_model(directory(name), torch.float32, CPU, with_mtp=True)


@functools.cache
def ref(name: str, dtype: torch.dtype = torch.float64) -> Ref:
    return Ref(directory(name), dtype)


@functools.cache
def prompt(name: str, seed: int = 0) -> tuple[int, ...]:
    """LENGTH random tokens."""
    vocab = loaded(name).model.spec.vocab_size
    return tuple(torch.randint(0, vocab, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist())


@functools.cache
def ref_logits(name: str) -> torch.Tensor:
    return ref(name).logits(prompt(name))


def hf_logits(model_dir: Path, tokens: Iterable[int]) -> torch.Tensor:
    """[T, V] by transformers, in float32 and without a cache (which it cannot make for models without attention)."""
    return hf_model(model_dir)(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].detach()


@functools.cache
def hf_model(model_dir: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@functools.cache
def chat(question: str) -> tuple[int, ...]:
    """A question to the embedded model, as its chat template puts it."""
    from tokenizers import Tokenizer

    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return tuple(Tokenizer.from_file(str(ASSET / "tokenizer.json")).encode(text).ids)


def run(model: HybridModel, tokens: Iterable[int], ctx: RefContext, *, start: int = 0) -> torch.Tensor:
    """Hidden [T, H] of one forward that continues the context at position `start`."""
    flat = torch.tensor(list(tokens), dtype=torch.long)
    with torch.inference_mode():
        return model.forward(flat, torch.arange(start, start + flat.shape[0]), ctx)


def chunked_logits(
    name: str, sizes: Iterator[int], form: Form, length: int = LENGTH
) -> tuple[torch.Tensor, RefContext]:
    """Logits [length, V] of the prompt fed in pieces, and the context afterwards."""
    model, tokens = loaded(name).model, prompt(name)[:length]
    ctx, start, out = RefContext(model.spec.layers, form), 0, []
    while start < length:
        stop = min(length, start + next(sizes))
        out.append(run(model, tokens[start:stop], ctx, start=start))
        start = stop
    with torch.inference_mode():
        return model.logits(torch.cat(out)), ctx


def assert_equal_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to float32 rounding: 3e-5 of the largest logit."""
    assert found.dtype == torch.float32
    difference = (found.double() - expected.double()).abs().max().item()
    assert difference <= 3e-5 * expected.abs().max().item(), difference
