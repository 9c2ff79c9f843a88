"""Metrics: every counter of the core is exported, and none is exported that the core does not count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

import kvstore.core
from kvstore import Client
from kvstore.admin.metrics import (
    COUNTERS,
    EXPORTED_OTHERWISE,
    LABELS,
    TIER_COUNTERS,
    exposition,
    families,
    open_metrics,
)
from kvstore.daemon.operator.latency import Calls
from kvstore.daemon.tracing.request_traces import RequestTrace
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.wire.messages import Acquire, TraceContext
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


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answers of a daemon that has all tiers."""
    folder = tmp_path_factory.mktemp("read")
    settings = {
        "dram": {"limit": "16MiB", "huge_pages": False},
        "nvme": {"path": f"{folder}/nvme", "limit": "16MiB"},
        "network": {"url": f"file://{folder}/network"},
        "events": {"listen": "tcp://127.0.0.1:0"},
        "tracing": {"collector": "http://127.0.0.1:9"},
    }
    with LocalDaemon(settings) as daemon, Client(daemon.url, strict=True) as client:
        ns, keys = client.namespace(new_layout()), names(4)
        ns.put(keys, payloads(keys))
        assert ns.lookup(keys) == 4
        return client.status(), client.control("figures")


def test_every_exported_metric_is_described_with_its_labels(
    read: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    described = {family.name: family for family in families()}
    assert len(described) == len(list(families())) > 80
    text = exposition(*read).decode()
    open_text = open_metrics(*read).decode()
    assert {f.name for f in open_metrics_families(open_text)} >= {f.removesuffix("_total") for f in described}
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


def test_buckets_have_the_last_traced_request_as_an_exemplar(
    read: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    calls = Calls()
    for number, seconds in enumerate((0.001, 2.0, 1.5, 0.001)):
        context = TraceContext(1, bytes([number + 1]) * 16, b"s" * 8, 1)
        trace = RequestTrace("acquire", "default", context, 1e9 + number, 0.0, lambda: 0.0, {})
        calls.add(Acquire, True, seconds, trace if number < 3 else None)
    status, figures = read[0], {**read[1], "calls": calls.plain()}
    text = open_metrics(status, figures).decode()
    [family] = [family for family in open_metrics_families(text) if family.name == "kvstore_call_seconds"]
    found = [
        (s.labels["le"], s.exemplar.labels, s.exemplar.value)
        for s in family.samples
        if s.exemplar is not None
    ]
    assert found == [("0.001024", {"trace_id": "01" * 16}, 0.001), ("2.097152", {"trace_id": "03" * 16}, 1.5)]
    assert "trace_id" not in exposition(status, figures).decode(), "the older format has none"


def test_every_label_has_a_meaning() -> None:
    assert {label for family in families() for label in family.labels} == set(LABELS)
