"""Finds the file of a model that Ollama has pulled."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError, MisuseError

_SYSTEM = Path("/usr/share/ollama/.ollama/models")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_KIND = "application/vnd.ollama.image."
_REFUSED = {"adapter": "an adapter, which changes KV", "projector": "a part for images"}


def model_file(name: str, variables: Mapping[str, str]) -> Path:
    """Returns the blob with the weights of a model, by Ollama's name for it, e.g. `llama3.2:3b`.

    Raises MisuseError for a name that is none, and for a model of more than weights, ConfigError if the model
    is not there.
    """
    parts = _parts(name)
    folders = _folders(variables)
    for folder in folders:
        manifest = folder.joinpath("manifests", *parts)
        if manifest.is_file():
            return _blob(folder, name, manifest)
    told = " or ".join(map(str, folders))
    raise ConfigError(f"{name} is not in {told}", f"ollama pull {name}, or set OLLAMA_MODELS")


def _parts(name: str) -> list[str]:
    """Returns host, namespace, model and tag."""
    path, _, tag = name.rpartition(":") if ":" in name.rpartition("/")[2] else (name, "", "latest")
    parts = path.split("/")
    parts = [*("registry.ollama.ai", "library")[: max(0, 3 - len(parts))], *parts, tag]
    if len(parts) != 4 or not all(map(_PART.fullmatch, parts)):
        raise MisuseError(
            f"{name!r:.80} is no model of Ollama", "as `ollama list` prints it, e.g. llama3.2:3b"
        )
    return parts


def _folders(variables: Mapping[str, str]) -> list[Path]:
    if own := variables.get("OLLAMA_MODELS"):
        return [Path(own)]
    return [Path(variables.get("HOME", "/")) / ".ollama/models", _SYSTEM]


def _blob(folder: Path, name: str, manifest: Path) -> Path:
    try:
        layers: list[Any] = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        by_kind = {each["mediaType"].removeprefix(_KIND): each["digest"] for each in layers}
        digest = by_kind["model"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read {manifest}: {error}", f"ollama pull {name}") from error
    for kind, what in _REFUSED.items():
        if kind in by_kind:
            raise MisuseError(f"{name} has {what}", "give llama-server the file of its weights with -m")
    blob = folder / "blobs" / str(digest).replace(":", "-")
    if not _DIGEST.fullmatch(str(digest)) or not os.access(blob, os.R_OK):
        raise ConfigError(f"{name} needs {blob}, which cannot be read", "give this user access to it")
    return blob
