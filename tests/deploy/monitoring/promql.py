"""What a PromQL expression asks for, found in its syntax tree, and what is wrong with that."""

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds to everything it scrapes."""

COUNTERS_ONLY = {"rate", "increase", "irate", "resets"}
GAUGES_ONLY = {"avg_over_time", "min_over_time", "max_over_time", "deriv", "delta", "predict_linear"}


@dataclass(frozen=True)
class Series:
    """One name of a sample: counter, gauge or bucket; which values each of its labels has."""

    kind: str
    labels: Mapping[str, Set[str]]


# What Prometheus itself makes, under names of its own.
PROMETHEUS_OWN = {
    "up": Series("gauge", {}),
    "ALERTS": Series("gauge", {"alertname": set(), "alertstate": {"pending", "firing"}}),
}


def exported(page: str) -> dict[str, Series]:
    """The series on a page of /metrics, by name."""
    found: dict[str, Series] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            kind = "bucket" if sample.name.endswith("_bucket") else "gauge" if family.type == "gauge" else "counter"
            labels = dict(found[sample.name].labels) if sample.name in found else {}
            for label, value in sample.labels.items():
                labels[label] = {*labels.get(label, ()), value}
            found[sample.name] = Series(kind, labels)
    return found


def complaints(expression: str, known: Mapping[str, Series]) -> list[str]:
    """What is wrong with an expression; empty: nothing.

    Raises:
        ValueError: it cannot be parsed, or a function is given what it does not take.
    """
    return list(_complaints(promql.parse(expression), known, ()))


def result_labels(node: Any, known: Mapping[str, Series]) -> set[str]:
    """Labels that the result of an expression may have."""
    match node:
        case promql.VectorSelector():
            return {*known[node.name].labels, *SCRAPED} if node.name in known else set()
        case promql.MatrixSelector():
            return result_labels(node.vector_selector, known)
        case promql.AggregateExpr():
            return set(node.modifier.labels) if node.modifier is not None else set()
        case promql.BinaryExpr():
            return result_labels(node.lhs, known) or result_labels(node.rhs, known)
        case promql.Call():
            labels = {label for argument in node.args for label in result_labels(argument, known)}
            return labels - {"le"} if node.func.name == "histogram_quantile" else labels
        case promql.ParenExpr() | promql.UnaryExpr():
            return result_labels(node.expr, known)
    return set()


def selectors(node: Any) -> Iterator[Any]:
    """All vector selectors of an expression."""
    found: list[Any] = []
    promql.walk(node, lambda one: found.append(one) if isinstance(one, promql.VectorSelector) else None)
    return iter(found)


def _complaints(node: Any, known: Mapping[str, Series], inside: tuple[str, ...]) -> Iterator[str]:
    """Args: inside: names of the functions around it, the nearest last."""
    match node:
        case promql.VectorSelector():
            yield from _selector_complaints(node, known, inside)
        case promql.MatrixSelector():
            yield from _complaints(node.vector_selector, known, inside)
        case promql.AggregateExpr():
            labels = set(node.modifier.labels) if node.modifier is not None else set()
            if missing := labels - result_labels(node.expr, known):
                yield f"aggregates by {sorted(missing)}, which {node.expr} has not"
            yield from _complaints(node.expr, known, inside)
        case promql.BinaryExpr():
            yield from _complaints(node.lhs, known, inside)
            yield from _complaints(node.rhs, known, inside)
        case promql.Call():
            if node.func.name == "histogram_quantile" and "le" not in result_labels(node.args[1], known):
                yield "histogram_quantile over something without le"
            for argument in node.args:
                yield from _complaints(argument, known, (*inside, node.func.name))
        case promql.ParenExpr() | promql.UnaryExpr():
            yield from _complaints(node.expr, known, inside)
        case promql.NumberLiteral() | promql.StringLiteral():
            pass
        case _:
            yield f"{type(node).__name__} is not looked into here"


def _selector_complaints(node: Any, known: Mapping[str, Series], inside: tuple[str, ...]) -> Iterator[str]:
    series = known.get(node.name)
    if series is None:
        yield f"{node.name} is not exported"
        return
    around = inside[-1] if inside else ""
    if (series.kind in ("counter", "bucket")) != (around in COUNTERS_ONLY):
        yield f"{node.name} is a {series.kind}, and {around or 'no function'} is around it"
    if series.kind != "gauge" and around in GAUGES_ONLY:
        yield f"{around} of {node.name}, which is no gauge"
    if (series.kind == "bucket") != ("histogram_quantile" in inside):
        yield f"{node.name} and histogram_quantile belong together"
    for matcher in node.matchers.matchers:
        if matcher.name in SCRAPED:
            continue
        if matcher.name not in series.labels:
            yield f"{node.name} has no label {matcher.name}"
        elif values := series.labels[matcher.name]:
            for wanted in matcher.value.split("|"):
                if not any(re.fullmatch(wanted, value) for value in values):
                    yield f"{node.name} never has {matcher.name}={wanted}"
