"""Service-level objectives: which events are good, out of all, and how many may be bad in 30 days."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.observability.promql import SERVICE, Scope, share

PERIOD = "30d"


@dataclass(frozen=True, slots=True)
class Burn:
    """A pair of windows: an alert fires while both burn the budget `factor` times faster than PERIOD allows."""

    long: str
    short: str
    factor: float


FAST = (Burn("1h", "5m", 14.4), Burn("6h", "30m", 6.0))
SLOW = (Burn("1d", "2h", 3.0), Burn("3d", "6h", 1.0))
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
LONG_WINDOWS = tuple(burn.long for burn in (*FAST, *SLOW))


@dataclass(frozen=True, slots=True)
class Term:
    """Events of one counter, or of a histogram's part."""

    name: str
    where: str = ""
    part: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """`target` of all events must be good.

    An alert needs `least` bad events in its long window, so that one slow request in a quiet night wakes nobody.
    """

    name: str
    title: str
    says: str
    target: float
    least: int
    good: tuple[Term, ...]
    all: tuple[Term, ...]

    @property
    def budget(self) -> float:
        """The share that may be bad."""
        return round(1.0 - self.target, 9)

    def good_ratio(self, scope: Scope, window: str, by: str = SERVICE) -> str:
        """The share of good events in a window; no data without events."""
        return share(_total(self.good, scope, window, by), _total(self.all, scope, window, by))

    def bad_ratio(self, scope: Scope, window: str, by: str = SERVICE) -> str:
        """The share of bad events in a window; no data without events."""
        return f"1 - {self.good_ratio(scope, window, by)}"

    def bad_events(self, scope: Scope, window: str, by: str = SERVICE) -> str:
        """How many events of a window were bad."""
        return f"{_total(self.all, scope, window, by, 'increase')} - {_total(self.good, scope, window, by, 'increase')}"


def _total(terms: tuple[Term, ...], scope: Scope, window: str, by: str, function: str = "rate") -> str:
    over = scope.over(window)
    call = over.rate if function == "rate" else over.increase
    parts = [call(term.name, by, term.where, term.part) for term in terms]
    return parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"


# Aborts are the client's wish, and what it did wrong is its own: neither is an event here. Every other end and refusal
# is bad, whatever good reason the server had.
GOOD_ENDS = ("stop", "length")
OWN_FAULT = ("too_long", "invalid", "auth")
REFUSED = Term("requests_rejected_total", f'reason!~"{"|".join(OWN_FAULT)}"')

OBJECTIVES = (
    Objective(
        name="availability",
        title="Availability",
        says="generations that end as they should, out of those that ended (aborts by the client aside) or were "
        "refused for want of room",
        target=0.999,
        least=5,
        good=(Term("requests_total", f'finish_reason=~"{"|".join(GOOD_ENDS)}"'),),
        all=(Term("requests_total", 'finish_reason!="abort"'), REFUSED),
    ),
    Objective(
        name="ttft",
        title="First token",
        says="generations whose first token comes within 2.5 s of submission",
        target=0.95,
        least=10,
        good=(Term("time_to_first_token_seconds", 'le="2.5"', "_bucket"),),
        all=(Term("time_to_first_token_seconds", "", "_count"),),
    ),
    Objective(
        name="itl",
        title="Token pace",
        says="tokens after the first that come within 200 ms each (a verification's tokens share its time)",
        target=0.99,
        least=500,
        good=(Term("inter_token_latency_seconds", 'le="0.2"', "_bucket"),),
        all=(Term("inter_token_latency_seconds", "", "_count"),),
    ),
)
