"""core/ and wire/ decide and describe: they touch no file, socket, clock or dice, and log nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvstore

ROOT = Path(kvstore.__file__).parent
FORBIDDEN = {
    "asyncio", "os", "time", "random", "logging", "socket", "threading", "datetime", "secrets", "select",
    "multiprocessing", "subprocess", "queue", "concurrent", "signal", "tempfile", "shutil", "pathlib", "io",
    "mmap", "fcntl", "ctypes", "uuid", "sys", "warnings",
}  # fmt: skip
CALLS = {"open", "print", "input", "exec", "eval", "__import__"}
PURE = sorted(path for part in ("core", "wire") for path in (ROOT / part).rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    """Top-level names of all modules imported anywhere, also inside functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            found.add((node.module or "").partition(".")[0])
    return found


def called(tree: ast.AST) -> set[str]:
    return {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


def dice(tree: ast.AST) -> set[str]:
    """Uses of numpy's own dice, clock and files."""
    names = {"random", "datetime64", "memmap", "fromfile", "tofile", "load", "save"}
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "np"
        and node.attr in names
    }


def waits(tree: ast.AST) -> list[ast.AST]:
    kinds = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Global)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def test_there_is_something_to_look_at() -> None:
    assert {p.name for p in PURE} >= {"placement.py", "index.py", "extents.py", "messages.py", "frames.py"}


@pytest.mark.parametrize("path", PURE, ids=lambda p: str(p.relative_to(ROOT)))
def test_core_and_wire_are_pure(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not imported(tree) & FORBIDDEN
    assert not called(tree) & CALLS
    assert not dice(tree)
    assert not waits(tree)


@pytest.mark.parametrize(
    ("code", "look"),
    [
        ("def f():\n    import os.path", lambda t: imported(t) & FORBIDDEN),
        ("from time import monotonic", lambda t: imported(t) & FORBIDDEN),
        ("print(1)", lambda t: called(t) & CALLS),
        ("np.random.default_rng()", dice),
        ("async def f(): await g()", waits),
    ],
)
def test_impure_code_is_found(code: str, look: object) -> None:
    assert look(ast.parse(code))  # type: ignore[operator]
