"""Every family and shape equals transformers, in one piece, in pieces of awkward sizes, and token by token."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.runtime.models.common import (
    LENGTH,
    assert_equal_logits,
    chat,
    chunked_logits,
    directory,
    hf_logits,
    hf_model,
    loaded,
    prompt,
    ref_logits,
    run,
)
from tests.support.dense import Form, RefContext
from tests.support.tiny import MODELS

ALL = [*MODELS, "asset"]
QUESTIONS = (
    "Repeat after me: Zavo Kulim 90210",
    "Extract the name and city as JSON: Dora lives in Velto.",
    "Tell me a story about a fox named Rimo.",
)
EDGES = (1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 128, 129)


@pytest.mark.parametrize("name", ALL)
def test_one_piece_equals_transformers(name: str) -> None:
    logits, _ = chunked_logits(name, itertools.repeat(LENGTH), "scan")
    assert_equal_logits(logits, hf_logits(directory(name), prompt(name)))


@pytest.mark.parametrize("name", ALL)
def test_short_prompts_equal_transformers(name: str) -> None:
    model = loaded(name).model
    for length in EDGES:
        tokens = prompt(name, seed=length)[:length]
        hidden = run(model, tokens, RefContext(model.spec.layers))
        assert_equal_logits(model.logits(hidden), hf_logits(directory(name), tokens))


@pytest.mark.parametrize("name", ["qwen", "granite"])
def test_every_length_equals_the_oracle(name: str) -> None:
    model = loaded(name).model
    expected = ref_logits(name)
    for length in range(1, LENGTH + 1):
        hidden = run(model, prompt(name)[:length], RefContext(model.spec.layers))
        assert_equal_logits(model.logits(hidden[-1:]), expected[length - 1 : length])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("sizes", "form"),
    [
        ((1,), "steps"),
        ((1,), "block"),
        ((1, 3), "scan"),
        ((7, 1, 8), "block"),
        ((9, 2), "steps"),
        ((63, 1, 26), "scan"),
    ],
    ids=str,
)
def test_pieces_equal_transformers(name: str, sizes: tuple[int, ...], form: Form) -> None:
    logits, _ = chunked_logits(name, itertools.cycle(sizes), form, length=90)
    assert_equal_logits(logits, ref_logits(name)[:90])


@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 31, 33, 64, 65, 100, 199])
@pytest.mark.parametrize("name", ["qwen", "granite-groups-rope"])
def test_every_piece_size(name: str, size: int) -> None:
    logits, _ = chunked_logits(name, itertools.repeat(size), "scan")
    assert_equal_logits(logits, hf_logits(directory(name), prompt(name)))


def test_embedded_model_continues_text_like_transformers() -> None:
    model = loaded("asset").model
    for question in QUESTIONS:
        tokens = list(chat(question))
        expected = (
            hf_model(directory("asset"))
            .generate(torch.tensor([tokens]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
            .tolist()
        )
        ctx, fed = RefContext(model.spec.layers, "steps"), 0
        for _ in range(24):
            hidden = run(model, tokens[fed:], ctx, start=fed)
            fed = len(tokens)
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
        assert tokens == expected


def test_embedded_model_equals_transformers_on_chats() -> None:
    model = loaded("asset").model
    for question in QUESTIONS:
        tokens = chat(question)
        hidden = run(model, tokens, RefContext(model.spec.layers))
        assert_equal_logits(model.logits(hidden), hf_logits(directory("asset"), tokens))


def test_embedding_is_what_enters_the_first_layer() -> None:
    for name in ("qwen", "granite"):
        model = loaded(name).model
        tokens = torch.tensor([3, 7])
        scale = hf_model(directory(name)).config.to_dict().get("embedding_multiplier", 1.0)
        table = hf_model(directory(name)).get_input_embeddings().weight
        assert torch.equal(model.embed(tokens), table[tokens] * scale)
