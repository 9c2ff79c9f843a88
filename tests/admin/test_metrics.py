"""Metrics: every counter of the core is exported, and none is exported that the core does not count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

import kvstore.core
from kvstore import Client
from kvstore.admin.metrics import COUNTERS, EXPORTED_OTHERWISE, LABELS, TIER_COUNTERS, exposition, families
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import names, new_layout, payloads

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


def test_every_exported_metric_is_described_with_its_labels(tmp_path: Path) -> None:
    described = {family.name: family for family in families()}
    assert len(described) == len(list(families())) > 80
    settings = {
        "dram": {"limit": "16MiB", "huge_pages": False},
        "nvme": {"path": f"{tmp_path}/nvme", "limit": "16MiB"},
        "network": {"url": f"file://{tmp_path}/network"},
        "events": {"listen": "tcp://127.0.0.1:0"},
        "tracing": {"collector": "http://127.0.0.1:9"},
    }
    with LocalDaemon(settings) as daemon, Client(daemon.url, strict=True) as client:
        ns, keys = client.namespace(new_layout()), names(4)
        ns.put(keys, payloads(keys))
        assert ns.lookup(keys) == 4
        text = exposition(client.status(), client.control("figures")).decode()
    exported = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        exported[name] = family
    assert set(exported) == set(described)
    with_rows = 0
    for name, family in exported.items():
        assert (family.type, family.documentation) == (described[name].kind, described[name].about)
        for sample in family.samples:
            with_rows += 1
            assert set(sample.labels) - {"le"} == set(described[name].labels), name
    assert with_rows > 100


def test_every_label_has_a_meaning() -> None:
    assert {label for family in families() for label in family.labels} == set(LABELS)
