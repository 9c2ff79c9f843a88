"""Typer applications: groups of commands with an example each, which may take a dataclass as several options.

A parameter annotated with a dataclass becomes one option per field. The field's annotation and default
describe the option. The command receives an instance made of their values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import Parameter
from typing import Any, TypeVar, get_type_hints

import typer

from kvstore.cli.shared.groups import Command, Group, paragraphs

_F = TypeVar("_F", bound=Callable[..., Any])


class Commands(typer.Typer):
    """A group of commands, which prints its help without a command. Expands dataclass parameters."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(cls=Group, no_args_is_help=True, **kwargs)

    def command(self, *args: Any, **kwargs: Any) -> Callable[[_F], _F]:
        """See typer.Typer. The help is the docstring of the function."""
        register = super().command

        def expand_and_register(function: _F) -> _F:
            register(*args, cls=Command, help=paragraphs(function.__doc__ or ""), **kwargs)(
                _expanded(function)
            )
            return function

        return expand_and_register


def _expanded(function: Callable[..., Any]) -> Callable[..., Any]:
    groups: dict[str, Any] = {}
    options: list[Parameter] = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            options += _options_of(parameter.annotation)
        else:
            options.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def run(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return function(**values)

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _options_of(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]
