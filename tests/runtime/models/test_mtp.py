"""The MTP head equals the oracle's at every depth, and on the trained model it predicts what the trunk will say."""

from __future__ import annotations

import pytest
import torch

from runtime.models.registry import load_model
from tests.runtime.models.common import CPU, assert_equal_logits, chat, directory, loaded, prompt, ref, run
from tests.support.dense import RefContext

NAMES = ["qwen", "qwen-untied-bias", "qwen-all-linear", "qwen-one-group", "asset"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 7, 50])
def test_head_equals_the_oracle_in_pieces_and_two_depths(name: str, size: int) -> None:
    model, head = loaded(name).model, loaded(name).mtp
    assert head is not None
    tokens = prompt(name)[:50]
    trunk = run(model, tokens[:-1], RefContext(model.spec.layers))
    exact = ref(name).hidden(tokens[:-1])
    first, second = RefContext(head.layers), RefContext(head.layers)
    after = [*tokens[2:], 5]
    for start in range(0, 49, size):
        stop = min(49, start + size)
        positions = torch.arange(start, stop)
        with torch.inference_mode():
            one = head.forward(torch.tensor(tokens[start + 1 : stop + 1]), trunk[start:stop], positions, first)
            two = head.forward(torch.tensor(after[start:stop]), one, positions, second)
        expected_one = ref(name).mtp_hidden(tokens[1:], exact)
        expected_two = ref(name).mtp_hidden(after, expected_one)
        assert_equal_logits(head.logits(one), ref(name).head(expected_one)[start:stop])
        assert_equal_logits(head.logits(two), ref(name).head(expected_two)[start:stop])


def test_trained_head_agrees_with_the_trunk() -> None:
    """Only the right order of halves, norm, position and shift gives this."""
    oracle = ref("asset", torch.float32)
    question = list(chat("Tell me a story about a fox named Rimo."))
    text = question + oracle.greedy(question, 36)
    guesses = oracle.mtp_logits(text[1:], oracle.hidden(text[:-1])).argmax(-1)[:-1]
    right = guesses == torch.tensor(text[2:])
    assert right[len(question) - 1 :].float().mean() > 0.7


@pytest.mark.parametrize("name", ["qwen", "granite"])
def test_no_head_unless_asked_for_and_there(name: str) -> None:
    assert load_model(directory(name), torch.float32, CPU, with_mtp=False).mtp is None
    assert (loaded(name).mtp is not None) == (name == "qwen")
    assert bool(loaded(name).model.spec.mtp_layers) == (name == "qwen")
