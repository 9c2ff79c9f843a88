"""Stands in for packages that SGLang imports on a CPU without using them: every use of one raises.

`sgl_kernel` has compiled kernels and no build for CPUs in the package registry. `torchvision` is a build for
CUDA there, which does not load beside torch for CPUs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any


class Absent:
    """Something of a package that is not there. It may be named, as a default or a key, but not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self._name} is a stub of the tests")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of the packages in `packages`."""

    packages: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        package, _, below = name.partition(".")
        if below and package in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        _fill(module)


def stand_in_for(package: str) -> None:
    """Gives an imported, empty package every submodule and attribute."""
    if not _Submodules.packages:
        sys.meta_path.append(_Submodules())
    _Submodules.packages.add(package)
    _fill(sys.modules[package])


def _fill(module: ModuleType) -> None:
    whole = Absent(module.__name__)
    module.__getattr__ = whole.__getattr__  # type: ignore[method-assign]
