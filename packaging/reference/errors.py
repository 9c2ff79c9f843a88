"""Errors with their hints: exceptions, reasons of a put, HTTP statuses, and every message in the code."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import kvstore
from kvstore.client import leases
from kvstore.core import actions
from kvstore.errors import KVStoreError
from reference.rest import statuses
from reference.text import cell, prose

_ROOT = Path(kvstore.__file__).parent

_STATUSES = {
    400: "The request is not valid HTTP or names an unknown field.",
    401: "The token is missing, unknown or expired.",
    403: "The caller may not do this: its role is `view`, or the request is from a page of another site.",
    404: "There is no such path or object.",
    405: "The path has other methods; the header `Allow` names them.",
    409: "The daemon refused the change.",
    412: "The object has changed since the ETag in `If-Match`.",
    413: "The body is too long.",
    415: "The body has another type than `application/json` or a merge patch.",
    422: "A value is not valid. `detail` names it.",
    429: "The caller exceeds `admin.requests_per_s`. `Retry-After` has the seconds to wait.",
    500: "A bug. The log of `kvstore admin` has its traceback.",
    503: "The daemon does not answer, or the interface has too many requests.",
}
"""When each HTTP status is answered."""

_CALLS = {"deny", "Deny", "Denied", "RefusedError"}
"""Calls, besides exceptions, whose arguments are a message and a hint."""


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """An error in the code. `where`: its package; `...` stands for values."""

    where: str
    text: str
    hint: str


def page() -> Iterator[str]:
    """Yields the page."""
    yield f"# Errors\n\n{prose(inspect.getdoc(kvstore.errors) or '')}\n"
    yield "\n## Exceptions\n\n| error | meaning |\n|---|---|"
    for error in _exceptions():
        yield f"| `{error.__name__}` | {cell(error.__doc__ or '')} |"
    yield "\n## Reasons of denied blocks\n\n`PutResult.why` is one of these, or a message from below.\n"
    yield "| reason | meaning |\n|---|---|"
    for reason, meaning in (actions.DENIALS | leases.DENIALS).items():
        yield f"| `{reason}` | {cell(meaning)} |"
    yield "\n## HTTP statuses\n\nThe body of each is a [Problem](rest.md#problem) with a hint.\n"
    yield "| status | meaning |\n|---|---|"
    for status, meaning in _STATUSES.items():
        yield f"| {status} {HTTPStatus(status).phrase} | {cell(meaning)} |"
    yield "\n## Messages\n\nThe messages of exceptions, refusals and problems. `...` stands for a value.\n"
    where = ""
    for message in messages():
        if message.where != where:
            where = message.where
            yield f"\n### {where}\n\n| message | hint |\n|---|---|"
        yield f"| {_literal(message.text)} | {_literal(message.hint)} |"


def missing() -> Iterator[str]:
    """Yields the exceptions without a docstring, and HTTP statuses of REST without a meaning."""
    for error in _exceptions():
        if not error.__doc__:
            yield f"{error.__name__} has no docstring: add one in kvstore/errors.py"
    for status in statuses() - set(_STATUSES):
        yield f"the HTTP status {status} has no meaning: add it in packaging/reference/errors.py"


def _exceptions() -> list[type[KVStoreError]]:
    public = [each for each in KVStoreError.__subclasses__() if each.__module__ == "kvstore.errors"]
    return [KVStoreError, *public]


def messages() -> list[Message]:
    """Returns the errors in the code whose text is written where they are raised."""
    found = set()
    for file in sorted(_ROOT.rglob("*.py")):
        parts = file.relative_to(_ROOT).parts
        where = parts[0].removesuffix(".py") if len(parts) < 3 else f"{parts[0]}.{parts[1]}"
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                found |= {Message(where, text, hint) for text, hint in _raised(function)}
    return sorted(found)


def _raised(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, str]]:
    """Yields message and hint of each error that a function makes."""
    names = {
        target.id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _CALLS or (name.endswith("Error") and name[:1].isupper()):
            texts = [text for each in node.args if (text := _text(names.get(getattr(each, "id", ""), each)))]
            if texts and re.search(r"[a-z]{3}", texts[0]):
                yield texts[0], texts[1] if len(texts) > 1 else ""


def _text(node: ast.expr) -> str:
    """Returns the text of a literal, with `...` for values; empty for other expressions."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(each) or "..." for each in values)
    return ""


def _literal(text: str) -> str:
    return prose(text).replace("|", "\\|").replace("*", "\\*").replace("[", "\\[")
