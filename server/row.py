"""One row of the metrics table, and the ways to read a snapshot of the engine into it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from runtime.api import DISTRIBUTIONS, Distribution, EngineStats

Values = Iterable[tuple[tuple[str, ...], float | Distribution]]


@dataclass(frozen=True, slots=True)
class Row:
    """One metric. `source` reads an engine snapshot; rows without one are kept by the HTTP process.

    `labels` maps each label to all values it can ever have; `children` narrows their product where that is too wide.
    Without values (`told`) a label has one, which the engine tells when it is ready: such a row says what runs, as the
    labels of a series that is always 1.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    source: Callable[[EngineStats], Values] | None = None
    children: tuple[tuple[str, ...], ...] | None = None

    @property
    def told(self) -> bool:
        """Whether its one series waits for the engine."""
        return any(not values for values in self.labels.values())

    def combinations(self) -> tuple[tuple[str, ...], ...]:
        """The label values to create at start."""
        return self.children if self.children is not None else tuple(itertools.product(*self.labels.values()))


def one(read: Callable[[EngineStats], float]) -> Callable[[EngineStats], Values]:
    """A source with no labels of its own."""
    return lambda stats: [((), read(stats))]


def several(
    read: Callable[[EngineStats], Mapping[str, float]], names: Iterable[str]
) -> Callable[[EngineStats], Values]:
    """A source with one label, always with all its values."""
    order = tuple(names)

    def values(stats: EngineStats) -> Values:
        current = read(stats)
        return [((name,), current.get(name, 0.0)) for name in order]

    return values


def distribution(name: str) -> Callable[[EngineStats], Values]:
    """A histogram that the engine keeps: one of `DISTRIBUTIONS`."""
    nothing = Distribution([0] * (len(DISTRIBUTIONS[name]) + 1))
    return lambda stats: [((), stats.distributions.get(name, nothing))]


def told(*labels: str) -> dict[str, tuple[str, ...]]:
    """Labels whose values the engine tells when it is ready."""
    return dict.fromkeys(labels, ())


def ratio(used: float, total: float) -> float:
    """A share; 0 of nothing is 0."""
    return used / total if total else 0.0
