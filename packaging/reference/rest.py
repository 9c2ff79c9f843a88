"""Every path of the REST interface, from OpenAPI."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from kvstore.admin.app import make
from kvstore.config import Config
from reference.text import cell, prose

_METHODS = ("get", "put", "post", "patch", "delete")


def page() -> Iterator[str]:
    """Yields the page: a heading for each path and method, then the objects of bodies and answers."""
    schema = _openapi()
    yield "# All REST paths\n\nGenerated from `/openapi.json`. [REST, metrics, health](../rest.md) describes"
    yield "access, limits and errors. Every error is a [Problem](#problem).\n"
    for path, method, operation in _operations(schema):
        yield f"\n## {method.upper()} {path}\n\n{prose(_about(operation))}\n"
        yield from _parameters(operation)
        body = _content(operation.get("requestBody", {}))
        if names := _names(body):
            yield f"\nBody: {_links(names)}"
            yield from _example(schema, names[0])
        answer = operation["responses"].get("200", operation["responses"].get("201", {}))
        if names := _names(_content(answer)):
            yield f"\nAnswer: {_links(names)}"
        errors = sorted(status for status in operation["responses"] if status >= "400")
        if errors:
            yield f"\n[Errors](errors.md#http-statuses): {', '.join(errors)}"
    yield "\n# Objects\n"
    for name, each in sorted(schema["components"]["schemas"].items()):
        yield f"\n## {name}\n\n{prose(each.get('description', ''))}\n"
        if each.get("properties"):
            yield "| field | type | meaning |\n|---|---|---|"
        for field, kind in each.get("properties", {}).items():
            yield f"| `{field}` | {_type(kind)} | {cell(kind.get('description', ''))} |"


def missing() -> Iterator[str]:
    """Yields the paths, parameters and objects without a description."""
    schema = _openapi()
    for path, method, operation in _operations(schema):
        if not operation.get("description"):
            yield f"{method.upper()} {path} has no docstring: add it to its function in admin/routers"
        for each in operation.get("parameters", []):
            if not each.get("description"):
                yield f"{method.upper()} {path}: the parameter {each['name']} has no description"
    for name, each in schema["components"]["schemas"].items():
        if not each.get("description"):
            yield f"the object {name} has no docstring: add one in kvstore/admin/schemas"


def statuses() -> set[int]:
    """Returns the HTTP statuses of errors that any path documents."""
    found = (status for _, _, operation in _operations(_openapi()) for status in operation["responses"])
    return {int(status) for status in found if status >= "400"}


def _openapi() -> dict[str, Any]:
    return make(Config(), "unix:///run/kvstore/kvstore.sock").openapi()


def _operations(schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in sorted(schema["paths"].items()):
        for method in _METHODS:
            if method in methods:
                yield path, method, methods[method]


def _about(operation: dict[str, Any]) -> str:
    return str(operation.get("description") or operation["summary"])


def _parameters(operation: dict[str, Any]) -> Iterator[str]:
    parameters = operation.get("parameters", [])
    if parameters:
        yield "| parameter | in | meaning |\n|---|---|---|"
    for each in parameters:
        yield f"| `{each['name']}` | {each['in']} | {cell(each.get('description', ''))} |"


def _content(part: dict[str, Any]) -> list[Any]:
    return list(part.get("content", {}).values())


def _names(contents: list[Any]) -> list[str]:
    """Returns the objects that a body or an answer refers to."""
    return list(dict.fromkeys(name for each in contents for name in re.findall(r"/schemas/(\w+)", str(each))))


def _links(names: list[str]) -> str:
    return ", ".join(_link(name) for name in names)


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _example(schema: dict[str, Any], name: str) -> Iterator[str]:
    """Yields a body made of the examples of its fields, if all required fields have one."""
    each = schema["components"]["schemas"][name]
    properties = each.get("properties", {})
    fields = {field: kind["examples"][0] for field, kind in properties.items() if kind.get("examples")}
    if fields and set(each.get("required", ())) <= set(fields):
        yield f"\n```json\n{json.dumps(fields)}\n```"


def _type(kind: dict[str, Any]) -> str:
    """Returns a JSON type in words."""
    if "$ref" in kind:
        return _link(kind["$ref"].rpartition("/")[2])
    if "anyOf" in kind:
        return " or ".join(_type(each) for each in kind["anyOf"])
    if "enum" in kind:
        return ", ".join(f"`{value}`" for value in kind["enum"])
    name = kind.get("type", "any")
    return f"{name} of {_type(kind['items'])}" if name == "array" and "items" in kind else str(name)
