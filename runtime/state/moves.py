"""What the host half decided and the device half has yet to do, strictly in this order. Plain integers, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Freed:
    """What a closed lease held: its slot, and the blocks that nobody else holds.

    They may have been handed out again already, but not used yet.
    """

    serial: int
    slot: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of a slot whose lease closed becomes checkpoint row `row`."""

    slot: int
    row: int


@dataclass(frozen=True, slots=True)
class Spilled:
    """Checkpoint row `row` and device blocks go to host memory, as (device block, host block) and `host_row`."""

    row: int
    host_row: int
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Vacated:
    """Blocks and checkpoint rows that came free when cache entries were dropped."""

    blocks: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Host blocks and host rows that are of no use any more."""

    blocks: tuple[int, ...]
    rows: tuple[int, ...]


Move = Freed | Saved | Spilled | Vacated | Forgotten
