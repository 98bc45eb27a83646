"""Different backends for prefill and decode. Selects; has nothing to forward but the commit, and that by `select`."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Sequence as Seq
from inspect import signature

import torch

from runtime.api import CapabilityError, ConfigError, StateError
from runtime.attention.backend import AttentionBackend, AttentionPlan, Recurrence, VerifyTicket
from runtime.plan import RowKind
from runtime.step import StepPart

MODES = ("decode", "prefill")


class HybridAttnBackend(AttentionBackend):
    """`prefill` runs PREFILL rows, `decode` runs DECODE rows, and `speculative_attention_mode` says who verifies.

    Raises CapabilityError when a half is not a complete AttentionBackend, ConfigError for an unknown mode.
    """

    def __init__(
        self, prefill: AttentionBackend, decode: AttentionBackend, speculative_attention_mode: str = "decode"
    ) -> None:
        if speculative_attention_mode not in MODES:
            raise ConfigError(f"speculative_attention_mode must be one of {MODES}, not {speculative_attention_mode!r}")
        for half in (prefill, decode):
            require_complete(type(half))
        self.name = f"hybrid({prefill.name}, {decode.name}, verify={speculative_attention_mode})"
        self._halves = (prefill, decode)
        verify = decode if speculative_attention_mode == "decode" else prefill
        self._by_kind = {RowKind.PREFILL: prefill, RowKind.DECODE: decode, RowKind.VERIFY: verify}

    @property
    def halves(self) -> tuple[AttentionBackend, AttentionBackend]:
        """(prefill, decode)."""
        return self._halves

    def select(self, kind: RowKind) -> AttentionBackend:
        """The one rule: planning, running and committing a row all ask here."""
        return self._by_kind[kind]

    def plan(self, part: StepPart, serial: int) -> AttentionPlan:
        """The selected half's plan; it carries its owner."""
        return self.select(part.kind).plan(part, serial)

    def ticket(self, plan: AttentionPlan, serial: int) -> VerifyTicket:
        """The selected half's ticket."""
        return self.select(plan.part.kind).ticket(plan, serial)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, plan: AttentionPlan
    ) -> torch.Tensor:
        """Runs on the selected half."""
        return self.select(plan.part.kind).attend(layer, q, k, v, scale, plan)

    def mix(
        self, layer: int, recurrence: Recurrence, x: torch.Tensor, gates: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Runs on the selected half."""
        return self.select(plan.part.kind).mix(layer, recurrence, x, gates, plan)

    def update_mamba_state_after_mtp_verify(self, ticket: VerifyTicket, kept: torch.Tensor, path: torch.Tensor) -> None:
        """Commits on the half that `select` names, which must be the one that wrote the candidates."""
        half = self.select(ticket.kind)
        if half is not ticket.backend:
            raise StateError(
                f"{ticket.kind.value} rows belong to {half.name!r}, the ticket is of {ticket.backend.name!r}"
            )
        half.update_mamba_state_after_mtp_verify(ticket, kept, path)

    def materialise(self, slots: Seq[int]) -> None:
        """Folds whatever either half still holds for these slots."""
        for half in self._halves:
            half.materialise(slots)

    def peek(self, slot: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Reads through the half that holds pending inputs; at most one does."""
        prefill, decode = self._halves
        return (prefill if prefill.has_pending(slot) else decode).peek(slot)

    def has_pending(self, slot: int) -> bool:
        """Whether either half does."""
        return any(half.has_pending(slot) for half in self._halves)

    def num_folds(self) -> int:
        """Of both halves."""
        return sum(half.num_folds() for half in self._halves)

    def reserve(self, num_rows: int, width: int, kinds: frozenset[RowKind]) -> None:
        """Each half for the kinds it runs."""
        for half in self._halves:
            half.reserve(num_rows, width, frozenset(kind for kind in kinds if self.select(kind) is half))

    def num_bytes(self) -> int:
        """Of both halves."""
        return sum(half.num_bytes() for half in self._halves)

    def forget(self, slot: int) -> None:
        """Both halves drop what they hold."""
        for half in self._halves:
            half.forget(slot)


def require_complete(backend: type) -> None:
    """Raises CapabilityError naming the class and what it lacks, unless it implements the protocol as declared."""
    if AttentionBackend not in backend.__mro__:
        raise CapabilityError(f"{backend.__name__} is no AttentionBackend: it must subclass the protocol")
    missing = sorted(backend.__abstractmethods__) if isinstance(backend, ABCMeta) else []
    if missing:
        raise CapabilityError(f"attention backend {backend.__name__} lacks {', '.join(missing)}; it cannot start")
    for name in sorted(AttentionBackend.__abstractmethods__):
        method = next(vars(each)[name] for each in backend.__mro__ if name in vars(each))
        wanted = list(signature(vars(AttentionBackend)[name]).parameters)
        if not callable(method) or list(signature(method).parameters) != wanted:
            raise CapabilityError(f"attention backend {backend.__name__}: {name} must take ({', '.join(wanted)})")
