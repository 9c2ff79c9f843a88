"""Every key of the configuration, from the fields and docstrings of `kvstore.config`."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.config import Key, Table, tables
from reference.text import prose

_MORE = {
    "hbm": "[GPU memory](../gpu.md)",
    "network": "[Network tier](../network.md)",
    "events": "[KV events for routers](../kv-events.md)",
    "tracing": "[Traces of requests](../tracing.md)",
    "encryption": "[Encryption](../encryption.md)",
    "admin": "[REST, metrics, health](../rest.md)",
    "tenants": "[Tenants](../tenants.md)",
    "nvme": "[Devices and limits](../devices.md)",
}
"""A page with more about a section."""


def page() -> Iterator[str]:
    """Yields the page: a section for each table, a heading for each key."""
    yield "# Configuration keys\n"
    yield "Generated from the code. [Configuration](../configuration.md) describes the file and its units.\n"
    yield "`NAME` stands for the name of a tenant or device. A key with *change: at run time* takes effect"
    yield "with a reload, or by REST and the command line. Other keys take effect with a restart.\n"
    for table in tables():
        yield f"\n## {table.heading} {{#{_anchor(table)}}}\n"
        yield f"{prose(table.summary).removesuffix('.')}.\n"
        yield from ([f"{prose(table.detail)}\n"] if table.detail else [])
        yield from ([f"More: {_MORE[table.path[0]]}.\n"] if _MORE.get(".".join(table.path[:1])) else [])
        for key in table.keys:
            yield from _entry(table, key)


def missing() -> Iterator[str]:
    """Yields the keys and tables without a docstring."""
    for table in tables():
        if not table.summary:
            yield f"{table.heading} has no docstring: add one to its class in kvstore/config"
        for key in table.keys:
            if not key.summary:
                yield f"{_name(table, key)} has no docstring: add one below its field in kvstore/config"
            if not key.sample:
                yield f"{_name(table, key)} has neither a default nor `examples`: the example cannot show it"


def _entry(table: Table, key: Key) -> Iterator[str]:
    values = ", ".join(f"`{choice}`" for choice in key.choices)
    kind = ", ".join(filter(None, (f"{key.kind} {values}".strip(), key.bounds)))
    default = "required" if key.required else f"`{key.default}`" if key.default else "none"
    facts = {"type": kind, "default": default, "change": "at run time" if key.live else "restart"}
    if not key.has_default:
        facts["example"] = f"`{key.sample}`"
    yield f"\n### {_name(table, key)} {{#{_anchor(table)}.{key.name}}}\n"
    yield f"{prose(key.summary).removesuffix('.')}. {prose(key.detail)}".rstrip() + "\n"
    yield " ".join(f"<span class=fact>*{name}:* {said}</span>" for name, said in facts.items()) + "\n"


def _name(table: Table, key: Key) -> str:
    return ".".join((*table.path, key.name))


def _anchor(table: Table) -> str:
    return ".".join(table.path)
