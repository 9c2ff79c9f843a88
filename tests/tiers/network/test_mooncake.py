"""What a Mooncake URL must be. Mooncake itself is in tests/engines/mooncake."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from kvstore.errors import ConfigError
from kvstore.tiers.network import BackendSettings, open_backend
from kvstore.tiers.network.base import Name, NetworkError


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConfigError, match="pip install mooncake-transfer-engine"):
        open_backend(BackendSettings("mooncake://master:50051"))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mooncake://", "names no master"),
        ("mooncake://:50051", "names no master"),
        ("mooncake://master/folder", "names no master"),
        ("mooncake://user@master", "names no master"),
        ("mooncake://master:port", "port"),
        ("mooncake://master:99999", "Port"),
        ("mooncake://master?protocol=udp", "protocol=udp"),
        ("mooncake://master?segment=4G", "segment=4G"),
        ("mooncake://master?segment=-1", "segment=-1"),
        ("mooncake://master?threads=2", "threads"),
    ],
)
def test_errors_in_a_url_are_named(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"network\.url") as raised:
        open_backend(BackendSettings(url))
    assert says in raised.value.message


@pytest.mark.parametrize(
    "url", ["mooncake://master", "mooncake://[::1]:1?protocol=rdma&device=mlx5_0&segment=5"]
)
def test_opening_asks_nothing_of_the_master(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("mooncake")
    package.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setattr("subprocess.Popen", None)
    backend = open_backend(BackendSettings(url))
    assert backend.kind == "mooncake"
    backend.close()


def test_a_package_that_lacks_a_library_is_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    backend = open_backend(BackendSettings("mooncake://127.0.0.1:1"))
    with pytest.raises(NetworkError, match="libibverbs") as raised:
        backend.probe([Name(bytes(16), b"k")], time.monotonic() + 20)
    assert raised.value.fatal
    assert "apt install libibverbs1" in raised.value.hint
    backend.close()
