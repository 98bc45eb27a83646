from __future__ import annotations

import pytest
import torch
from scipy import stats

from kernels.gumbel import counter_gumbel, counter_gumbel_at
from kernels.gumbel.cases import CASES, make
from kernels.gumbel.reference import MIX32, MIX64, _mix
from kernels.registry import IMPLEMENTATIONS, load

NAMES = tuple(IMPLEMENTATIONS["gumbel.counter_gumbel"])
SMALLEST_P = 1e-4  # the noise is fixed, so a test passes always or never


def mixed(word: int, rounds: tuple[tuple[int, int], ...], bits: int) -> int:
    for shift, factor in rounds:
        word ^= word >> shift
        word = word * factor % 2**bits
    return word


def signed(word: int, bits: int) -> int:
    return word - 2**bits if word >= 2 ** (bits - 1) else word


def noise(seeds: list[int], positions: list[int], vocab: int) -> torch.Tensor:
    return counter_gumbel(torch.tensor(seeds), torch.tensor(positions), vocab)


def uniform(gumbel: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.exp(-gumbel.double()))


@pytest.mark.parametrize("bits", [32, 64])
def test_the_mix_is_unsigned_arithmetic(bits: int) -> None:
    rounds = MIX32 if bits == 32 else MIX64
    words = [0, 1, 2, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 0x9E3779B9, 12345678901 % 2**bits]
    dtype = torch.int32 if bits == 32 else torch.int64
    got = _mix(torch.tensor([signed(word, bits) for word in words], dtype=dtype), rounds, bits)
    assert got.tolist() == [signed(mixed(word, rounds, bits), bits) for word in words]


def test_the_64_bit_mix_is_splitmix() -> None:
    state = 0x9E3779B97F4A7C15  # the first output for seed 0, from the generator's published test vector
    assert mixed(state, MIX64, 64) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_shape_and_range(name: str, case: str) -> None:
    given = make(case)
    got = counter_gumbel(given.seeds, given.positions, given.vocab)
    assert got.shape == (given.seeds.shape[0], given.vocab)
    assert got.dtype == torch.float32
    assert bool(got.isfinite().all())


def test_noise_is_a_function_of_seed_position_and_token_alone() -> None:
    whole = noise([3, 9, 3], [5, 5, 6], 50)
    again = noise([9, 3], [5, 6], 70)
    assert torch.equal(again[:, :50], whole[1:])
    tokens = torch.tensor([[49, 0, 7], [1, 1, 2], [0, 1, 2]])
    at = counter_gumbel_at(torch.tensor([3, 9, 3]), torch.tensor([5, 5, 6]), tokens)
    assert torch.equal(at, whole.gather(1, tokens))
    assert torch.equal(
        load("gumbel.counter_gumbel", "reference", counter_gumbel)(
            torch.tensor([3]), torch.tensor([5]), 50, torch.device("cpu")
        ),
        whole[:1],
    )


def test_no_word_gives_an_infinite_value(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.tensor([[0, 1, -1, 2**31 - 1, -(2**31), 0x7FFFFF80]], dtype=torch.int32)
    monkeypatch.setattr(
        "kernels.gumbel.reference._mix", lambda word, rounds, bits: words.clone() if bits == 32 else word
    )
    got = noise([0], [0], 6)
    assert bool(got.isfinite().all())
    assert float(got.max()) > 20


@pytest.mark.parametrize(
    ("seeds", "positions", "vocab"),
    [
        ([0], [0], 400_000),  # along token ids
        (list(range(4000)), [7] * 4000, 100),  # along seeds
        ([42] * 4000, list(range(4000)), 100),  # along positions
        ([2**40 * i for i in range(4000)], [2**20 * i for i in range(4000)], 100),
    ],
)
def test_marginals_are_uniform(seeds: list[int], positions: list[int], vocab: int) -> None:
    u = uniform(noise(seeds, positions, vocab))
    counts = torch.histc(u.flatten(), 1000, 0, 1)
    assert stats.chisquare(counts.numpy()).pvalue > SMALLEST_P
    if len(seeds) > 1:  # and so is every single token's
        for token in range(0, vocab, 10):
            assert stats.kstest(u[:, token].numpy(), "uniform").pvalue > SMALLEST_P
    assert stats.kstest(noise(seeds, positions, vocab).flatten()[:100_000].numpy(), "gumbel_r").pvalue > SMALLEST_P


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 256, 4096])
@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
def test_neighbours_are_independent(along: str, lag: int) -> None:
    m = 8192
    if along == "tokens":
        u = uniform(noise([5], [3], 64 * m)).view(-1)
        first, second = u[:-lag], u[lag:]
    else:
        counter = list(range(m))
        fixed = [11] * m
        u = uniform(noise(fixed, counter, 64) if along == "positions" else noise(counter, fixed, 64))
        first, second = u[:-lag].flatten(), u[lag:].flatten()
    # Correlation of n independent pairs is normal with deviation 1 / sqrt(n).
    correlation = float(torch.corrcoef(torch.stack([first, second]))[0, 1])
    assert abs(correlation) * first.numel() ** 0.5 < 4.5
    cells = (first * 32).long() * 32 + (second * 32).long()
    counts = torch.bincount(cells, minlength=1024)
    assert stats.chisquare(counts.numpy()).pvalue > SMALLEST_P


def test_adding_it_samples_from_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.024, 0.001])
    draws = (probabilities.log() + noise([1] * 200_000, list(range(200_000)), 6)).argmax(1)
    counts = torch.bincount(draws, minlength=6)
    assert (
        stats.chisquare(
            counts.numpy(), (probabilities.double() / probabilities.double().sum() * 200_000).numpy()
        ).pvalue
        > SMALLEST_P
    )


def test_consecutive_samples_are_independent() -> None:
    draws = noise([1] * 200_000, list(range(200_000)), 8).argmax(1)
    pairs = torch.bincount(draws[:-1] * 8 + draws[1:], minlength=64)
    assert stats.chisquare(pairs.numpy()).pvalue > SMALLEST_P
