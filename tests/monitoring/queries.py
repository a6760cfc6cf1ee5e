"""PromQL, read by a real parser: which labels an expression leaves, and whether the server has what it names."""

import re

import promql_parser as promql

from tests.monitoring.page import queryable

TARGET = frozenset({"job", "instance"})  # that the scrape adds
_NONE: frozenset[str] = frozenset()


def labels_of(query: str) -> frozenset[str]:
    """The labels of what a query gives. Fails where it names a metric or a label that no server has."""
    return _labels(promql.parse(query))


def metrics_of(query: str) -> set[str]:
    """The metrics that a query names."""
    return set(re.findall(r"hexllm:\w+", query))


def _labels(node: object) -> frozenset[str]:
    match node:
        case promql.NumberLiteral():
            return _NONE
        case promql.ParenExpr():
            return _labels(node.expr)
        case promql.VectorSelector():
            known = queryable()
            assert node.name in known, f"no server has {node.name}"
            labels = known[node.name] | TARGET
            assert {each.name for each in node.matchers.matchers} <= labels, node
            return labels
        case promql.MatrixSelector():
            return _labels(node.vector_selector)
        case promql.Call():
            labels = _NONE.union(*map(_labels, node.args))
            if node.func.name == "histogram_quantile":
                assert "le" in labels, node
                return labels - {"le"}
            return _NONE if node.func.name == "absent" else labels
        case promql.AggregateExpr():
            within = _labels(node.expr)
            if node.modifier is None:
                return _NONE
            assert str(node.modifier).startswith("by")
            assert set(node.modifier.labels) <= within, node
            return frozenset(node.modifier.labels)
        case promql.BinaryExpr():
            left, right = _labels(node.lhs), _labels(node.rhs)
            if node.modifier is not None and node.modifier.matching is not None:
                assert set(node.modifier.matching.labels) <= left & right, node
            elif not any(isinstance(side, promql.NumberLiteral) for side in (node.lhs, node.rhs)):
                assert left == right, f"no sample of {node.lhs} has the labels of {node.rhs}"
            return left
    raise AssertionError(f"{node} is not known to this test")
