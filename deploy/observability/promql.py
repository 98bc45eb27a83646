"""PromQL text, spelt in one way and only of metrics, parts and labels that exist.

Everything is summed over what is selected, by the labels asked for; quotients have a denominator that is above 0, so
that no traffic is no data, and not NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deploy.observability.families import FAMILIES, TARGET_LABELS, Family

SERVICE = "job, namespace, model_name"


class UnknownMetricError(Exception):
    """A name or label that the server does not export, or one used in a way its type does not allow."""


def family(name: str) -> Family:
    """The family, by its name without the prefix `lockstep_` or by its full name."""
    found = FAMILIES.get(f"lockstep_{name}") or FAMILIES.get(name)
    if found is None:
        raise UnknownMetricError(f"the server exports no metric {name!r}")
    return found


def share(part: str, whole: str) -> str:
    """A quotient without 0/0."""
    return f"{part} / ({whole} > 0)"


@dataclass(frozen=True, slots=True)
class Scope:
    """Which series (`select`: matchers), and the window of rates."""

    select: str = ""
    window: str = "$__rate_interval"

    def over(self, window: str) -> Scope:
        """The same series with another window."""
        return replace(self, window=window)

    def series(self, name: str, where: str = "", part: str = "") -> str:
        """A selector. `part` is _bucket, _sum or _count of a histogram."""
        of = family(name)
        if (of.kind == "histogram") != bool(part):
            raise UnknownMetricError(f"{of.name} is a {of.kind}")
        select = self.select if "model_name" in of.labels else without_model(self.select)
        inside = ",".join(filter(None, (select, where)))
        return f"{of.name}{part}{{{inside}}}" if inside else of.name + part

    def _over(self, function: str, name: str, where: str, part: str) -> str:
        of = family(name)
        if of.kind not in ("counter", "histogram"):
            raise UnknownMetricError(f"{function} of {of.name}, which is a {of.kind}")
        return f"{function}({self.series(name, where, part)}[{self.window}])"

    def rate(self, name: str, by: str = "", where: str = "", part: str = "", how: str = "sum") -> str:
        """Events per second of a counter."""
        return aggregate(how, by, self._over("rate", name, where, part))

    def increase(self, name: str, by: str = "", where: str = "", part: str = "") -> str:
        """Events of a counter in the window."""
        return aggregate("sum", by, self._over("increase", name, where, part))

    def gauge(self, name: str, by: str = "", where: str = "", how: str = "sum") -> str:
        """A gauge, aggregated: sum, max, min, avg, count."""
        if family(name).kind != "gauge":
            raise UnknownMetricError(f"{name} is no gauge")
        return aggregate(how, by, self.series(name, where))

    def quantile(self, q: float, name: str, by: str = "", where: str = "") -> str:
        """A quantile of a histogram."""
        buckets = self.rate(name, f"le, {by}" if by else "le", where, "_bucket")
        return f"histogram_quantile({q:g}, {buckets})"

    def mean(self, name: str, by: str = "", where: str = "") -> str:
        """The mean of a histogram."""
        return share(self.rate(name, by, where, "_sum"), self.rate(name, by, where, "_count"))


def aggregate(how: str, by: str, of: str) -> str:
    """An aggregation."""
    return f"{how} by ({by}) ({of})" if by else f"{how}({of})"


def without_model(select: str) -> str:
    """Matchers for series that describe a process: those carry the target's labels alone."""
    return ",".join(one for one in select.split(",") if one.split("=")[0] in TARGET_LABELS)


BOARD = Scope('job=~"$job",namespace=~"$namespace",model_name=~"$model_name",pod=~"$pod"')
