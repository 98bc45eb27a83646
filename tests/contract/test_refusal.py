"""A half or a proposer that is not complete cannot be built, and the message names it."""

from __future__ import annotations

import pytest
import torch

from runtime.api import CapabilityError, ConfigError
from runtime.attention import registry
from runtime.attention.backend import AttentionBackend, VerifyTicket
from runtime.attention.hybrid import HybridAttnBackend, require_complete
from runtime.attention.hybrid_linear import HybridLinearAttnBackend
from runtime.attention.linear import LinearAttention
from runtime.attention.snapshot import SnapshotLinear
from runtime.plan import RowKind
from runtime.speculation.ngram import NgramProposer
from runtime.speculation.proposer import SpeculativeProposer
from tests.support.engines import engine_of, pair

COMMIT = "update_mamba_state_after_mtp_verify"


def lacking(name: str) -> type:
    """A half like the real one, without one method."""
    members = {key: value for key, value in vars(HybridLinearAttnBackend).items() if key not in {name, "__dict__"}}
    return type("Incomplete", (AttentionBackend,), members)


@pytest.mark.parametrize("name", sorted(AttentionBackend.__abstractmethods__))
def test_a_half_without_a_method(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    incomplete = lacking(name)
    with pytest.raises(CapabilityError, match=f"Incomplete lacks {name}"):
        require_complete(incomplete)
    monkeypatch.setattr(registry, "HybridLinearAttnBackend", incomplete)
    with pytest.raises((TypeError, CapabilityError), match=f"Incomplete.*{name}"):
        engine_of("qwen")


class Duck:
    """Has everything but the parent."""

    name = "duck"


for _name in AttentionBackend.__abstractmethods__:
    setattr(Duck, _name, vars(HybridLinearAttnBackend)[_name])


class StarArguments(HybridLinearAttnBackend):
    def update_mamba_state_after_mtp_verify(self, *args: object, **kwargs: object) -> None:
        """Forwards whatever comes."""


class OldParameters(HybridLinearAttnBackend):
    def update_mamba_state_after_mtp_verify(self, ticket: VerifyTicket, kept: torch.Tensor) -> None:
        """As it was before trees."""


class SwitchedOff(HybridLinearAttnBackend):
    update_mamba_state_after_mtp_verify = None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(Duck, "no AttentionBackend"), (StarArguments, COMMIT), (OldParameters, COMMIT), (SwitchedOff, COMMIT)],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_half_with_a_wrong_method(role: str, wrong: type, message: str) -> None:
    right = object.__new__(HybridLinearAttnBackend)
    right.name = "right"
    half = object.__new__(wrong)
    half.name = "wrong"
    halves = (half, right) if role == "prefill" else (right, half)
    with pytest.raises(CapabilityError, match=wrong.__name__) as caught:
        HybridAttnBackend(*halves)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", sorted(LinearAttention.__abstractmethods__))
def test_a_strategy_without_a_method(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {key: value for key, value in vars(SnapshotLinear).items() if key not in {name, "__dict__"}}
    incomplete = type("IncompleteStrategy", (LinearAttention,), members)
    monkeypatch.setitem(registry.STRATEGIES, "snapshot", lambda store, _max_fed: incomplete(store))
    with pytest.raises(TypeError, match=f"IncompleteStrategy.*{name}"):
        engine_of("qwen", **pair("snapshot", "replay"))


@pytest.mark.parametrize("name", sorted(SpeculativeProposer.__abstractmethods__))
def test_a_proposer_without_a_method(name: str) -> None:
    members = {key: value for key, value in vars(NgramProposer).items() if key not in {name, "__dict__"}}
    with pytest.raises(TypeError, match=f"IncompleteProposer.*{name}"):
        type("IncompleteProposer", (SpeculativeProposer,), members)()


def test_unknown_names() -> None:
    for settings in ({"prefill_backend": "x"}, {"decode_backend": "x"}, {"speculative_attention_mode": "x"}):
        with pytest.raises(ConfigError, match="x"):
            engine_of("qwen", **settings)


def test_one_rule_selects() -> None:
    """Every kind has one half; verification follows the mode; a half is its own selection."""
    for mode in ("decode", "prefill"):
        halves = [object.__new__(HybridLinearAttnBackend) for _ in range(2)]
        for half in halves:
            half.name = "half"
        hybrid = HybridAttnBackend(*halves, mode)
        assert hybrid.select(RowKind.PREFILL) is halves[0]
        assert hybrid.select(RowKind.DECODE) is halves[1]
        assert hybrid.select(RowKind.VERIFY) is halves[("prefill", "decode").index(mode)]
        assert all(half.select(kind) is half for half in halves for kind in RowKind)
