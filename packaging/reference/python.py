"""The Python API, from the docstrings of everything in `kvstore.__all__`."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import kvstore
from reference.text import prose

_MADE_BY_CALLERS = ("Client", "AsyncClient", "Fp8")
"""Classes, besides dataclasses, that callers construct."""


_WIDTH = 60
"""The longest signature on one line, in characters."""


def page() -> Iterator[str]:
    """Yields the page: a heading for each class and function, and for each method."""
    yield "# Python API\n\nGenerated from docstrings. [Python client](../python.md) has an example,"
    yield "[Errors](errors.md) the exceptions. `Key` is `bytes`."
    for name, thing in _public():
        if inspect.isclass(thing):
            yield _entry("##", name, f"class {name}{_arguments(thing)}", thing)
            for member, shown, documented in _members(thing):
                code = f"{member}{_signature(shown)}" if callable(shown) else ""
                yield _entry("###", f"{name}.{member}", code, documented)
        else:
            yield _entry("##", name, f"{name}{_signature(thing)}", thing)


def missing() -> Iterator[str]:
    """Yields the public classes, functions, methods and properties without a docstring."""
    for name, thing in _public():
        if not inspect.getdoc(thing):
            yield f"{name} has no docstring"
        for member, _, documented in _members(thing) if inspect.isclass(thing) else ():
            if not inspect.getdoc(documented):
                yield f"{name}.{member} has no docstring"


def _public() -> Iterator[tuple[str, Any]]:
    for name in sorted(kvstore.__all__):
        thing = getattr(kvstore, name)
        if (inspect.isclass(thing) and thing is not bytes) or inspect.isfunction(thing):
            yield name, thing


def _members(thing: type) -> Iterator[tuple[str, Any, Any]]:
    """Yields the methods and properties of a class: name, what is called, what has the docstring."""
    if issubclass(thing, enum.Enum):
        return
    for name, value in inspect.getmembers_static(thing):
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield name, value, value
            continue
        found = getattr(thing, name)
        function = inspect.unwrap(found) if callable(found) else None
        if inspect.isfunction(function) or inspect.ismethod(function):
            yield name, function, function


def _entry(level: str, title: str, code: str, thing: Any) -> str:
    shown = f"```python\n{_folded(code)}\n```\n\n" if code else ""
    return f"\n{level} {title}\n\n{shown}{prose(inspect.getdoc(thing) or '')}"


def _folded(code: str) -> str:
    """Returns a signature with one argument per line if it is long."""
    if len(code) <= _WIDTH:
        return code
    lines, depth = [""], 0
    for part in re.split(r"([(\[\])]|, )", code):
        depth += (part in ("(", "[")) - (part in (")", "]"))
        if depth == 1 and part in ("(", ", "):
            lines[-1] += part.rstrip()
            lines.append("    ")
        elif part == ")" and depth == 0:
            lines.append(part)
        else:
            lines[-1] += part
    return "\n".join(lines)


def _arguments(thing: type) -> str:
    """Returns the arguments of a class, or nothing where they are internal."""
    public = dataclasses.is_dataclass(thing) or thing.__name__ in _MADE_BY_CALLERS
    return _signature(thing) if public else ""


def _signature(thing: Callable[..., Any]) -> str:
    signature = str(inspect.signature(thing)).replace("(self, ", "(").replace("(self)", "()")
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)
    return re.sub(r"-> Call\[(.*)\]$", r"-> \1", signature)
