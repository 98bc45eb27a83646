"""Checks an expression against the metrics table: names, types, labels and their values, and what can never match."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import promql_parser as ast

from deploy.observability.families import TARGET_LABELS, Family, resolve

Labels = frozenset[str]
TARGET = frozenset(TARGET_LABELS)
# Series that Prometheus itself makes.
SYNTHETIC: Mapping[str, Labels] = {
    "ALERTS": frozenset({"alertname", "alertstate", "severity", "model_name", *TARGET}),
    "up": TARGET,
}

OF_COUNTERS = {"rate", "irate", "increase", "resets"}
OF_GAUGES = {"delta", "idelta", "deriv", "predict_linear", "changes"}
COMPARISONS = {"==", "!=", ">", "<", ">=", "<="}
SETS = {"and", "or", "unless"}
KEEPING = {"topk", "bottomk", "limitk"}
VARIABLES = {
    "$__rate_interval": "1m",
    "$__interval": "15s",
    "$__range": "1h",
    "$job": "job",
    "$namespace": ".*",
    "$model_name": ".*",
    "$pod": ".*",
}


def substitute(expr: str, variables: Mapping[str, str] = VARIABLES) -> str:
    """The expression with Grafana's variables replaced; raises KeyError for one that is not known."""

    def value(match: re.Match[str]) -> str:
        return variables["$" + match.group(1)]

    return re.sub(r"\$\{?(\w+)(?::\w+)?\}?", value, expr)


@dataclass(slots=True)
class Linter:
    """Collects what is wrong with one expression. `recorded` maps the series of recording rules to their labels."""

    recorded: Mapping[str, Labels] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def check(self, text: str) -> Labels | None:
        """The labels the result can have; None for a scalar, or when it does not parse."""
        try:
            tree = ast.parse(text)
        except ValueError as error:
            self.problems.append(f"does not parse: {error}")
            return None
        return self._visit(tree, inside=None)

    def _say(self, problem: str) -> None:
        self.problems.append(problem)

    def _visit(self, node: ast.Expr, inside: str | None) -> Labels | None:
        if isinstance(node, ast.ParenExpr | ast.UnaryExpr | ast.SubqueryExpr):
            return self._visit(node.expr, inside)
        if isinstance(node, ast.MatrixSelector):
            return self._selector(node.vector_selector, inside)
        if isinstance(node, ast.VectorSelector):
            return self._selector(node, inside)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.AggregateExpr):
            return self._aggregate(node)
        if isinstance(node, ast.BinaryExpr):
            return self._binary(node)
        return None

    # --- selectors

    def _selector(self, node: ast.VectorSelector, inside: str | None) -> Labels:
        name = node.name or ""
        if name in SYNTHETIC or name in self.recorded:
            labels = SYNTHETIC.get(name) or self.recorded[name]
            for matcher in node.matchers.matchers:
                if matcher.name not in labels:
                    self._say(f"{name} has no label {matcher.name}")
            return labels
        found = resolve(name)
        if found is None:
            self._say(f"nothing exports {name or 'a series without a name'}")
            return TARGET
        family, part = found
        self.used.add(family.name)
        self._check_use(family, part, name, inside)
        labels = TARGET | set(family.labels) | ({"le"} if part == "_bucket" else set())
        for matcher in node.matchers.matchers:
            if matcher.name not in labels:
                self._say(f"{name} has no label {matcher.name}")
            else:
                self._check_value(family, matcher)
        return labels

    def _check_use(self, family: Family, part: str, name: str, inside: str | None) -> None:
        if family.kind == "histogram" and not part:
            self._say(f"{name} is a histogram: take its _bucket, _sum or _count")
        counts = family.kind == "counter" or bool(part)
        if counts and inside not in OF_COUNTERS:
            self._say(f"{name} is a counter, and only its growth means something")
        if not counts and inside in OF_COUNTERS:
            self._say(f"{inside} of {name}, which is a gauge")

    def _check_value(self, family: Family, matcher: ast.Matcher) -> None:
        values = family.labels.get(matcher.name, ())
        if matcher.name == "le":
            values = (*map(str, family.buckets), "+Inf")
        if not values or matcher.value == "":
            return
        regular = matcher.op in (ast.MatchOp.Re, ast.MatchOp.NotRe)
        for wanted in matcher.value.split("|") if regular else (matcher.value,):
            pattern = wanted if regular else re.escape(wanted)
            if not any(re.fullmatch(pattern, value) for value in values):
                self._say(f"{family.name} has no {matcher.name}={wanted!r}; it has {', '.join(values)}")

    # --- functions and aggregations

    def _call(self, node: ast.Call) -> Labels | None:
        name = node.func.name
        inside = name if name in OF_COUNTERS | OF_GAUGES else None
        parts = [self._visit(argument, inside) for argument in node.args]
        if name == "histogram_quantile":
            labels = parts[1] or frozenset()
            if "le" not in labels:
                self._say("histogram_quantile of something without le")
            return labels - {"le"}
        if name in ("scalar", "time", "vector"):
            return frozenset() if name == "vector" else None
        vectors = [labels for labels in parts if labels is not None]
        return vectors[0] if vectors else frozenset()

    def _aggregate(self, node: ast.AggregateExpr) -> Labels:
        inner = self._visit(node.expr, None)
        if inner is None:
            raise TypeError(f"the parser let {node.op} of a scalar pass")
        if str(node.op) in KEEPING:
            return inner
        if node.modifier is None:
            return frozenset()
        listed = frozenset(node.modifier.labels)
        for label in sorted(listed - inner):
            self._say(f"{node.op} by {label}, which is not there; there are {', '.join(sorted(inner))}")
        return listed if node.modifier.type == ast.AggModifierType.By else inner - listed

    # --- operators

    def _binary(self, node: ast.BinaryExpr) -> Labels | None:
        operator = str(node.op)
        left, right = self._visit(node.lhs, None), self._visit(node.rhs, None)
        if operator == "/" and not _above_zero(node.rhs):
            self._say(f"the denominator may be 0: {node.rhs.prettify()}")
        if left is None or right is None:
            return right if left is None else left
        modifier = node.modifier
        if modifier is None or modifier.matching is None:
            if operator != "or" and left != right:
                self._say(f"sides never match: {sorted(left)} {operator} {sorted(right)}")
            return left
        listed = frozenset(modifier.matching.labels)
        if str(modifier.matching).startswith("on"):
            for label in sorted((listed - left) | (listed - right)):
                self._say(f"on({label}), which one side does not have")
            one_to_one = "OneToOne" in str(modifier.card)
            if one_to_one and operator not in COMPARISONS | SETS:
                return listed
        elif left - listed != right - listed:
            self._say(f"sides never match: {sorted(left - listed)} {operator} {sorted(right - listed)}")
        return left | frozenset(modifier.group_labels or ())


def _above_zero(node: ast.Expr) -> bool:
    """A number, or something filtered to be above one."""
    while isinstance(node, ast.ParenExpr):
        node = node.expr
    if isinstance(node, ast.NumberLiteral):
        return node.val != 0
    return isinstance(node, ast.BinaryExpr) and str(node.op) == ">" and isinstance(node.rhs, ast.NumberLiteral)


def unfiltered(text: str) -> Iterator[str]:
    """What an alert compares, without the comparison: the parts that must have data while nothing is wrong."""

    def parts(node: ast.Expr) -> Iterator[str]:
        if isinstance(node, ast.ParenExpr):
            yield from parts(node.expr)
        elif isinstance(node, ast.BinaryExpr) and str(node.op) in COMPARISONS | SETS:
            yield from parts(node.lhs)
            yield from parts(node.rhs)
        elif not isinstance(node, ast.NumberLiteral):
            yield node.prettify()

    yield from parts(ast.parse(text))


def legend_labels(legend: str) -> set[str]:
    """The labels a legend shows."""
    return set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend))
