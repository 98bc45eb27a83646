from __future__ import annotations

import pytest
import torch

from kernels.registry import IMPLEMENTATIONS, load
from kernels.state_commit.cases import SHAPES, make
from kernels.state_commit.reference import gather_commit


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", tuple(IMPLEMENTATIONS["state_commit.gather_commit"]))
def test_commit_writes_the_chosen_candidates_and_nothing_else(name: str, shape: str) -> None:
    case = make(SHAPES[shape])
    want = case.pool.clone()
    for slot, row, node in zip(case.slots.tolist(), case.candidate_rows.tolist(), case.nodes.tolist(), strict=True):
        want[slot] = case.candidates[row, node]
    run = load("state_commit.gather_commit", name, gather_commit)
    run(case.pool, case.candidates, case.slots, case.candidate_rows, case.nodes)
    assert torch.equal(case.pool, want)
