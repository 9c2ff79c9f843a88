"""Every key of the configuration with its documentation, as data: for the example and the reference.

A table is a section, or a table within one; NAME stands for the names of tenants and devices. The text comes
from the docstrings in `sections`, `tenants` and `admin`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from kvstore.config.file import Config
from kvstore.config.sections import FILE_MODE, LIVE, Section, section_in
from kvstore.config.units import Least, Notation, format_duration, format_size

NAME = "NAME"
"""Stands for the name of a tenant or device."""

_PLAIN = {bool: "`true` or `false`", int: "integer", float: "number", str: "string"}
_BOUNDS: dict[type, tuple[str, str]] = {
    Ge: ("at least", "ge"),
    Gt: ("above", "gt"),
    Le: ("at most", "le"),
    Lt: ("below", "lt"),
}


@dataclass(frozen=True, slots=True)
class Key:
    """A key. `summary` is one phrase, `detail` sentences or empty, `live`: it changes without a restart."""

    name: str
    summary: str
    detail: str
    kind: str
    choices: tuple[str, ...]
    bounds: str
    default: str
    sample: str
    required: bool
    live: bool

    @property
    def has_default(self) -> bool:
        """Whether the sample is the default."""
        return self.sample == self.default


@dataclass(frozen=True, slots=True)
class Table:
    """A table of keys. `path` has its names, `sample` the same with an example in place of NAME.

    `repeated`: it is an array of tables. `added`: it is absent by default.
    """

    path: tuple[str, ...]
    sample: tuple[str, ...]
    summary: str
    detail: str
    keys: tuple[Key, ...]
    repeated: bool
    added: bool

    @property
    def heading(self) -> str:
        """The heading of the table in the file, with NAME."""
        return self._in_brackets(self.path)

    @property
    def sample_heading(self) -> str:
        """The heading of the table in the example."""
        return self._in_brackets(self.sample)

    def _in_brackets(self, path: tuple[str, ...]) -> str:
        name = ".".join(path)
        return f"[[{name}]]" if self.repeated else f"[{name}]"


def tables() -> Iterator[Table]:
    """Yields all tables in the order of the example."""
    for name, field in Config.model_fields.items():
        yield from _field_tables(field, "", (name,), (name,), live=False, added=False)


def _field_tables(
    field: FieldInfo, doc: str, path: tuple[str, ...], sample: tuple[str, ...], *, live: bool, added: bool
) -> Iterator[Table]:
    """Yields the tables of a field that holds a section, a table by name, or an array of tables."""
    model, live = section_in(field.annotation), live or LIVE in field.metadata
    assert model is not None
    named, repeated = (
        typing.get_origin(field.annotation) is dict,
        typing.get_origin(field.annotation) is tuple,
    )
    if named:
        path, sample = (*path, NAME), (*sample, *_examples(field))
    text = doc or inspect.cleandoc(model.__doc__ or "")
    added = added or named or repeated
    yield from _tables(model, path, sample, text, live=live, repeated=repeated, added=added)


def _tables(
    model: type[Section],
    path: tuple[str, ...],
    sample: tuple[str, ...],
    text: str,
    *,
    live: bool,
    repeated: bool,
    added: bool,
) -> Iterator[Table]:
    summary, detail = _texts(text)
    fields, docs = model.model_fields, _docs(model)
    inner = {name: field for name, field in fields.items() if section_in(field.annotation) is not None}
    keys = tuple(
        _key(name, field, docs.get(name, ""), live) for name, field in fields.items() if name not in inner
    )
    yield Table(path, sample, summary, detail, keys, repeated, added)
    for name, field in inner.items():
        doc = docs.get(name, "")
        yield from _field_tables(field, doc, (*path, name), (*sample, name), live=live, added=added)


@cache
def _docs(model: type[Section]) -> dict[str, str]:
    """Returns the docstrings of the fields of a section. pydantic could, but at every start, in 50 ms."""
    docs: dict[str, str] = {}
    for each in reversed(model.__mro__[: model.__mro__.index(Section)]):
        [parsed] = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(parsed, ast.ClassDef)
        for field, text in pairwise(parsed.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    docs[name] = inspect.cleandoc(doc)
    return docs


def _key(name: str, field: FieldInfo, doc: str, live: bool) -> Key:
    summary, detail = _texts(doc)
    parts = list(_parts(field))
    kind, choices = _kind(parts)
    write = _writer(parts)
    required = field.is_required()
    [shown] = _examples(field) or [None]
    # The default that depends on the user is the example: that of root.
    value = shown if field.default_factory else field.default
    default = "" if required or value is None else write(value)
    return Key(
        name, summary, detail, kind, choices, _bounds(parts, write), default,
        default if shown is None else write(shown), required, live or LIVE in field.metadata,
    )  # fmt: skip


def _texts(text: str) -> tuple[str, str]:
    """Returns the first paragraph of a docstring, and the others joined by blank lines."""
    first, *others = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return first, "\n\n".join(others)


def _examples(field: FieldInfo) -> list[Any]:
    return list(field.examples or ())[:1]


def _parts(field: FieldInfo) -> Iterator[Any]:
    """Yields the type of a field and its annotations. Leaves out None and what a list holds."""
    yield from _unpacked(field.annotation)
    yield from field.metadata


def _unpacked(annotation: Any) -> Iterator[Any]:
    inner = [part for part in typing.get_args(annotation) if part is not type(None)]
    if hasattr(annotation, "__metadata__"):
        yield from _unpacked(annotation.__origin__)
        for each in annotation.__metadata__:
            yield from each.metadata if isinstance(each, FieldInfo) else (each,)
    elif len(inner) == 1 and typing.get_origin(annotation) is not tuple:
        yield from _unpacked(inner[0])
    else:
        yield annotation


def _kind(parts: list[Any]) -> tuple[str, tuple[str, ...]]:
    """Returns the type in words, and the values of an enumeration."""
    notations = [part for part in parts if isinstance(part, Notation)]
    if notations:
        return notations[-1].name, ()
    plain = parts[0]
    if typing.get_origin(plain) is Literal:
        return "one of", tuple(typing.get_args(plain))
    if typing.get_origin(plain) is tuple:
        held = [part for part in _unpacked(typing.get_args(plain)[0]) if isinstance(part, Notation)]
        return f"list of {held[-1].plural if held else 'strings'}", ()
    return _PLAIN[plain], ()


def _bounds(parts: list[Any], write: Callable[[Any], str]) -> str:
    """Returns the smallest and largest value in words."""
    said: dict[str, str] = {}
    for part in parts:
        if isinstance(part, AfterValidator) and isinstance(part.func, Least):
            said["at least"] = format_size(part.func.minimum)
        elif type(part) in _BOUNDS:
            words, name = _BOUNDS[type(part)]
            said[words] = _number(getattr(part, name), write)
        elif isinstance(part, MaxLen) and typing.get_origin(parts[0]) is tuple:
            said["at most"] = f"{part.max_length} values"
    if set(said) == {"at least", "at most"}:
        return f"{said['at least']} to {said['at most']}"
    return ", ".join(f"{words} {bound}" for words, bound in said.items())


def _number(bound: Any, write: Callable[[Any], str]) -> str:
    bound = int(bound) if bound == int(bound) else bound
    return write(bound).strip('"')


def _writer(parts: list[Any]) -> Callable[[Any], str]:
    """Returns the function that writes values of this type as TOML."""
    names = {part.name for part in parts if isinstance(part, Notation)}
    if "size" in names:
        return lambda size: f'"{format_size(size)}"' if size else "0"
    if "duration" in names:
        return lambda seconds: f'"{format_duration(seconds)}"' if seconds else "0"
    if FILE_MODE in names:
        return lambda mode: f"{mode:#o}"
    return _toml


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)
        case datetime():
            return f"{value.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
        case list() | tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case str() | Path():
            return f'"{value}"'
    raise TypeError(f"a key has a default of type {type(value).__name__}, which the example cannot show")
