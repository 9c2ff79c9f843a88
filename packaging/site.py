"""Pages of the documentation site that come from the code: a hook of MkDocs, see mkdocs.yml.

Commands come from typer, paths from OpenAPI, metrics from a running daemon, the Python API and errors from
docstrings. The README and the documents beside the code become pages with links that work there. Not covered:
pages of docs/, which are written by hand and compared with the code by tests/docs.
"""

from __future__ import annotations

import dataclasses
import inspect
import posixpath
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.main import get_command

import kvstore
from kvstore import Client, config
from kvstore.admin.app import make
from kvstore.admin.metrics import _Reading
from kvstore.cli import app
from kvstore.errors import KVStoreError
from kvstore.lab.local_daemon import LocalDaemon

ROOT = Path(__file__).parents[1]

COPIES = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "benchmarks.md": "bench/RESULTS.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security-reports.md": "SECURITY.md",
    "explained/core.md": "kvstore/core/README.md",
    "explained/policy.md": "kvstore/core/policy/README.md",
    "explained/tiers.md": "kvstore/tiers/README.md",
    "explained/tenancy.md": "kvstore/daemon/tenancy/README.md",
    "explained/network.md": "kvstore/daemon/network/README.md",
    "explained/cuda.md": "kvstore/cuda/README.md",
}
"""Pages that are copies of documents, by their place on the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    pages = {page: _copy(source) for page, source in COPIES.items()}
    for name, generate in GENERATED.items():
        pages[f"reference/{name}.md"] = "\n".join(generate()) + "\n"
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Returns a page of docs/ with links to copied documents, such as `../bench/RESULTS.md`, for the site."""
    here = posixpath.dirname(page.file.src_uri)
    pages = {document: copy for copy, document in COPIES.items()}

    def link(match: re.Match[str]) -> str:
        copy = pages.get(posixpath.normpath(posixpath.join("docs", here, match[1])))
        return f"]({posixpath.relpath(copy, here or '.')}" if copy else match[0]

    return re.sub(r"\]\((\.\./[^)#\s]+)", link, markdown)


def _copy(source: str) -> str:
    """Returns a document with links to places on the site. Links to files that are no pages become text."""
    pages = {document: page for page, document in COPIES.items()}

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if target.startswith("docs/"):
            return f"[{text}]({target.removeprefix('docs/')}{anchor})"
        return f"[{text}]({pages[target]}{anchor})" if target in pages else text

    document = (ROOT / source).read_text(encoding="utf-8").replace('="docs/', '="')
    return re.sub(r"\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)", link, document)


def commands() -> Iterator[str]:
    """The page of all commands, with their options."""
    yield "# All commands\n\nGenerated from `--help`. [Command line](../cli.md) has an overview."
    yield from _command(get_command(app), "kvstore")


def _command(command: Any, path: str) -> Iterator[str]:
    inner: dict[str, Any] = getattr(command, "commands", {})
    for name in sorted(inner):
        yield from _command(inner[name], f"{path} {name}")
    if inner:
        return
    shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    yield f"\n## {path}\n\n{_prose(command.help or '')}\n"
    if shown:
        yield "| option | default | meaning |\n|---|---|---|"
    for param in shown:
        name = param.metavar or str(param.name).upper()
        names = (
            name if param.param_type_name == "argument" else ", ".join([*param.opts, *param.secondary_opts])
        )
        default = param.show_default if isinstance(param.show_default, str) else param.default
        default = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
        env = f" Environment: `{param.envvar}`." if param.envvar else ""
        yield f"| `{names}` | {default} | {_cell(getattr(param, 'help', '') or '')}{env} |"


def rest() -> Iterator[str]:
    """The page of all REST paths, with parameters and answers."""
    schema = make(config.Config(), "unix:///run/kvstore/kvstore.sock").openapi()
    yield "# All REST paths\n\nGenerated from `/openapi.json`. See also [REST](../rest.md).\n"
    for path, methods in sorted(schema["paths"].items()):
        for method, operation in methods.items():
            about = operation.get("description") or operation["summary"]
            yield f"\n## {method.upper()} {path}\n\n{_prose(about)}\n"
            parameters = operation.get("parameters", [])
            if parameters:
                yield "| parameter | in | meaning |\n|---|---|---|"
            for each in parameters:
                yield f"| `{each['name']}` | {each['in']} | {_cell(each.get('description', ''))} |"
            body = operation.get("requestBody", {}).get("content", {})
            names = [n for each in body.values() for n in re.findall(r"/schemas/(\w+)", str(each))]
            if names:
                yield f"\nBody: {', '.join(_schema_link(name) for name in names)}"
            answers = operation["responses"].get("200", operation["responses"].get("201", {}))
            names = re.findall(r"/schemas/(\w+)", str(answers.get("content", {})))
            if names:
                yield f"\nAnswer: {', '.join(_schema_link(name) for name in dict.fromkeys(names))}"
    yield "\n# Objects\n"
    for name, each in sorted(schema["components"]["schemas"].items()):
        yield f"\n## {name}\n\n{_prose(each.get('description', ''))}\n"
        if each.get("properties"):
            yield "| field | type | meaning |\n|---|---|---|"
        for field, kind in each.get("properties", {}).items():
            yield f"| `{field}` | {_type(kind)} | {_cell(kind.get('description', ''))} |"


def _schema_link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _type(kind: dict[str, Any]) -> str:
    """Returns a JSON type in words."""
    if "$ref" in kind:
        return _schema_link(kind["$ref"].rpartition("/")[2])
    if "anyOf" in kind:
        return " or ".join(_type(each) for each in kind["anyOf"])
    if "enum" in kind:
        return ", ".join(f"`{value}`" for value in kind["enum"])
    name = kind.get("type", "any")
    return f"{name} of {_type(kind['items'])}" if name == "array" and "items" in kind else str(name)


def metrics() -> Iterator[str]:
    """The page of all metrics, as a daemon with every tier but GPU memory exports them."""
    yield "# All metrics\n\nGenerated from `/metrics`. See also [hit ratio](../rest.md#hit-ratio).\n"
    yield "| metric | type | labels | meaning |\n|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "dram": {"limit": "16MiB", "huge_pages": False},
            "nvme": {"path": f"{folder}/nvme", "limit": "16MiB"},
            "network": {"url": f"file://{folder}/network"},
            "events": {"listen": "tcp://127.0.0.1:0"},
        }
        with LocalDaemon(settings) as daemon, Client(daemon.url, strict=True) as client:
            families = list(_Reading(client.status(), client.control("figures")).collect())
    for family in sorted(families, key=lambda family: family.name):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))
        yield f"| `{name}` | {family.type} | {labels} | {_cell(family.documentation)} |"


def python() -> Iterator[str]:
    """The page of the Python API."""
    yield "# Python API\n\nGenerated from docstrings. [Python client](../python.md) has an example."
    for name in sorted(kvstore.__all__):
        thing = getattr(kvstore, name)
        if inspect.isclass(thing):
            yield _entry("##", name, f"class {name}{_arguments(thing)}", thing)
            for member, value in inspect.getmembers_static(thing):
                if not member.startswith("_"):
                    yield _member(f"{name}.{member}", member, getattr(thing, member), value)
        elif callable(thing):
            yield _entry("##", name, f"{name}{_signature(thing)}", thing)


def _member(title: str, name: str, thing: Any, value: Any) -> str:
    """Returns the entry of a method or property, or nothing if it has no docstring."""
    function = inspect.unwrap(thing) if callable(thing) else None
    if not inspect.getdoc(function or value):
        return ""
    if inspect.isfunction(function) or inspect.ismethod(function):
        return _entry("###", title, f"{name}{_signature(function)}", function)
    return _entry("###", title, "", value) if isinstance(value, property) else ""


def _entry(level: str, title: str, code: str, thing: Any) -> str:
    shown = f"```python\n{code}\n```\n\n" if code else ""
    return f"\n{level} {title}\n\n{shown}{_prose(inspect.getdoc(thing) or '')}"


def _arguments(thing: type) -> str:
    """Returns the arguments of a class, or nothing where they are internal."""
    public = dataclasses.is_dataclass(thing) or thing.__name__ in ("Client", "AsyncClient", "Fp8")
    return _signature(thing) if public else ""


def _signature(thing: Callable[..., Any]) -> str:
    signature = str(inspect.signature(thing)).replace("(self, ", "(").replace("(self)", "()")
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)
    return re.sub(r"-> Call\[(.*)\]$", r"-> \1", signature)


def errors() -> Iterator[str]:
    """The page of the exceptions."""
    yield f"# Errors\n\n{_prose(inspect.getdoc(kvstore.errors) or '')}\n\n| error | meaning |\n|---|---|"
    public = [each for each in KVStoreError.__subclasses__() if each.__module__ == "kvstore.errors"]
    for thing in (KVStoreError, *public):
        yield f"| `{thing.__name__}` | {_cell(thing.__doc__ or '')} |"


def _prose(text: str) -> str:
    """Returns a docstring as Markdown: paragraphs stay, and no word is taken for markup."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n")).replace(
        "<", "&lt;"
    )


def _cell(text: str) -> str:
    return _prose(text).replace("\n\n", " ").replace("|", "\\|")


GENERATED: dict[str, Callable[[], Iterator[str]]] = {
    "commands": commands,
    "rest": rest,
    "metrics": metrics,
    "python": python,
    "errors": errors,
}
"""Generated pages by name."""
