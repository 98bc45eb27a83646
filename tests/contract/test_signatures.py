"""One explicit signature for every method of a protocol, in the protocol and in every implementation."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import pytest

import runtime
from runtime.api import EngineCore
from runtime.attention.backend import AttentionBackend, AttentionPlan, Recurrence, StepContext
from runtime.attention.linear import LinearAttention
from runtime.models.base import Family, HybridModel, MtpHead
from runtime.speculation.proposer import SpeculativeProposer
from runtime.speculation.registry import PROPOSERS

for _module in pkgutil.walk_packages(runtime.__path__, "runtime."):
    if not _module.name.endswith("__main__"):
        importlib.import_module(_module.name)

PROTOCOLS = (
    AttentionBackend,
    AttentionPlan,
    EngineCore,
    Family,
    HybridModel,
    LinearAttention,
    MtpHead,
    Recurrence,
    SpeculativeProposer,
    StepContext,
)
COMMIT = "update_mamba_state_after_mtp_verify"


def implementations(protocol: type) -> list[type]:
    """Every subclass in the package itself, however deep."""
    found = []
    for child in protocol.__subclasses__():
        if child.__module__.startswith("runtime."):
            found += [child, *implementations(child)]
    return found


CASES = [(protocol, implementation) for protocol in PROTOCOLS for implementation in implementations(protocol)]


def declared(where: type, name: str) -> Any:
    return next(vars(each)[name] for each in where.__mro__ if name in vars(each))


def parameters(function: Any) -> list[inspect.Parameter]:
    function = function.fget if isinstance(function, property) else function
    return list(inspect.signature(function).parameters.values())


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda each: each.__name__)
def test_everything_in_a_protocol_is_abstract(protocol: type) -> None:
    """Otherwise an implementation could leave it out, and start."""
    public = {name for name, value in vars(protocol).items() if callable(value) or isinstance(value, property)}
    assert {name for name in public if not name.startswith("_")} == protocol.__abstractmethods__
    for name in protocol.__abstractmethods__:
        kinds = {each.kind for each in parameters(declared(protocol, name))}
        assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(("protocol", "implementation"), CASES, ids=lambda each: each.__name__)
def test_implementations_have_the_protocols_signatures(protocol: type, implementation: type) -> None:
    for name in protocol.__abstractmethods__:
        assert parameters(declared(implementation, name)) == parameters(declared(protocol, name)), name
    assert not implementation.__abstractmethods__


def test_the_enumeration_finds_them() -> None:
    names = {implementation.__name__ for _, implementation in CASES}
    assert {"HybridAttnBackend", "HybridLinearAttnBackend", "SnapshotLinear", "ReplayLinear", "StateTxn"} <= names
    proposers = {path.split(":")[0] for path in PROPOSERS.values()}
    assert proposers == {each.__module__ for each in implementations(SpeculativeProposer)}


def test_the_commit_is_spelled_out() -> None:
    for backend in (AttentionBackend, *implementations(AttentionBackend)):
        signature = inspect.signature(declared(backend, COMMIT))
        assert list(signature.parameters) == ["self", "ticket", "kept", "path"]
        assert all(each.default is each.empty for each in signature.parameters.values())
