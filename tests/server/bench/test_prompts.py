"""The same seed asks the same; different numbers ask different things."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from server.bench.prompts import KINDS, IdPrompts, Prompts, TextPrompts
from server.prompt import PromptEncoder


def ids(seed: int) -> Prompts:
    return IdPrompts(length=32, vocab=500, seed=seed)


def texts(seed: int) -> Prompts:
    return TextPrompts(seed=seed)


@pytest.mark.parametrize("make", [ids, texts])
def test_a_function_of_seed_and_number(make: Callable[[int], Prompts]) -> None:
    prompts, again = make(3), make(3)
    assert [prompts(number) for number in range(-3, 30)] == [again(number) for number in range(-3, 30)]
    assert len({prompts(number) for number in range(40)}) == 40
    assert prompts(0) != make(4)(0)


def test_ids() -> None:
    prompts = IdPrompts(length=50, vocab=200, shared=20)
    made = [prompts(number).ids for number in range(5)]
    assert all(len(each) == 50 and min(each) >= 10 and max(each) < 200 for each in made)
    assert len({each[:20] for each in made}) == 1
    assert len({each[20] for each in made}) > 1
    assert prompts(1).body(chat=False) == {"prompt": list(made[1])}
    assert set(IdPrompts(length=9, vocab=2)(0).ids) <= {0, 1}


def test_every_kind_comes_in_turn_and_encodes(encoder: PromptEncoder) -> None:
    prompts = TextPrompts()
    for number in range(len(KINDS) * 3):
        body = prompts(number).body(chat=True)
        assert body["messages"][-1]["role"] == "user"
        assert 5 < len(encoder.encode_chat(body["messages"], 2048, variables={})) < 400
        assert isinstance(prompts(number).body(chat=False)["prompt"], str)
    one = TextPrompts(kinds=("tool",))
    assert all(one(number).messages[0][1].startswith("# Tools\n") for number in range(4))


def test_a_shared_prefix_is_one_system_message() -> None:
    prompts = TextPrompts(shared=30)
    systems = [prompts(number).messages[0] for number in range(5)]
    assert {role for role, _ in systems} == {"system"}
    assert len({text.split("\n\n")[0] for _, text in systems}) == 1
    assert len(systems[0][1].split()) == 30
    assert sum(role == "system" for role, _ in prompts(list(KINDS).index("tool")).messages) == 1
