"""Metrics: every counter of the core is exported, and none is exported that the core does not count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kvstore.core
from kvstore.admin.metrics import COUNTERS, EXPORTED_OTHERWISE, TIER_COUNTERS

CORE = Path(kvstore.core.__file__).parent


def names_of(index: ast.expr) -> Iterator[str]:
    """Names that an index into the counters may have; of an f-string, the part before the tier."""
    match index:
        case ast.Constant(value=str(name)):
            yield name
        case ast.JoinedStr(values=[ast.Constant(value=str(name)), *_]):
            yield name.removesuffix("_")
        case ast.IfExp(body=body, orelse=orelse):
            yield from names_of(body)
            yield from names_of(orelse)
        case _:
            raise AssertionError(f"cannot tell which counter this is: {ast.unparse(index)}")


def counted() -> set[str]:
    """Names of all counters that modules of the core increment."""
    names: set[str] = set()
    for file in CORE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
                of = node.target.value
                if isinstance(of, ast.Attribute | ast.Name) and "counters" in ast.unparse(of).split(".")[-1]:
                    names |= set(names_of(node.target.slice))
    return names


def test_every_counter_of_the_core_is_exported() -> None:
    found = counted()
    assert len(found) > 20
    assert found == set(COUNTERS) | set(TIER_COUNTERS) | set(EXPORTED_OTHERWISE)
