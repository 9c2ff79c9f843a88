"""Three nodes under load: upgrades one by one and back, lost nodes, a split and a slow network."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bench.s3server import BUCKET, S3Server
from kvstore import errors
from tests.daemon.network.fleet import BACK_S, BLOCKS, WIRE_BEFORE, Fleet, code_before, fleet, has_code_before
from tests.daemon.network.group import counted
from tests.daemon.network.proxy import Proxy
from tests.daemons import eventually
from tests.engines.mooncake.cluster import Cluster, without_rdma
from tests.tiers.network.valkeys import Server, cluster, server

NODES = 3
# Mooncake where it is installed: pip install mooncake-transfer-engine-non-cuda
BACKENDS = ["folder", "valkey", "cluster", "s3", *(["mooncake"] if find_spec("mooncake") else [])]
UPGRADES = [*((kind, "wire") for kind in BACKENDS), *([("valkey", "code")] if has_code_before() else [])]


@dataclass(frozen=True, slots=True)
class Shared:
    """A network tier. `url` has {port} where a proxy's can stand; `port` is 0 if none can."""

    url: str
    port: int = 0
    more: dict[str, Any] | None = None
    lists: bool = True
    """Whether it lists objects. Without a list, no namespace can be deleted there."""

    def settings(self, port: int = 0) -> dict[str, Any]:
        return {"url": self.url.format(port=port or self.port), **(self.more or {})}


@contextmanager
def backend(kind: str, folder: Path) -> Iterator[Shared]:
    """An empty network tier of this kind."""
    with ExitStack() as stack:
        if kind == "folder":
            yield Shared(f"file://{folder / 'shared'}")
        elif kind == "valkey":
            yield Shared("redis://127.0.0.1:{port}", stack.enter_context(server()).port)
        elif kind == "cluster":  # its servers tell clients their own ports
            yield Shared(stack.enter_context(cluster()).url)
        elif kind == "mooncake":
            with pytest.MonkeyPatch.context() as patch:
                for name, value in without_rdma(folder).items():
                    patch.setenv(name, value)
                url = stack.enter_context(Cluster(folder, 256 << 20)).url
                yield Shared(url + "&protocol=tcp", more={"timeout": "5s"}, lists=False)
        else:
            pytest.importorskip("obstore")
            store = S3Server()
            stack.callback(store.close)
            password = folder / "password"
            password.write_text("secret")
            url = f"s3://{BUCKET}/f?endpoint=http://127.0.0.1:{{port}}&region=us-east-1&unsigned_payload=1"
            yield Shared(url, urlsplit(store.endpoint).port or 0, {"user": "key", "password_file": password})


def roll(group: Fleet, first: str, by_key: bool) -> None:
    """Moves all nodes to the version of `first`, one by one under load, with a deletion at each step."""
    for who in range(NODES):
        group.replace(who, first)
        group.goes_on(*range(NODES))
        if by_key:
            group.delete(who, group.prompts[who][BLOCKS // 2 :])
        else:
            group.delete(who)


def test_an_upgrade_under_load(valkey: Server) -> None:
    with fleet([{"url": valkey.url}] * NODES, WIRE_BEFORE) as group:
        group.goes_on(*range(NODES))
        roll(group, "", by_key=True)
        group.goes_on(*range(NODES))
        assert any(counted(client, "read_ok_blocks") for client in group.clients), "of other nodes"
    print(f"{group.seen['hits']} hits, {group.seen['misses']} misses, {group.lag_s:.2f} s stale at most")


@pytest.mark.long
@pytest.mark.parametrize(("kind", "before"), UPGRADES)
def test_upgrades_and_back_under_load(kind: str, before: str, tmp_path: Path) -> None:
    first = WIRE_BEFORE if before == "wire" else code_before(tmp_path)
    with backend(kind, tmp_path) as shared, fleet([shared.settings()] * NODES, first) as group:
        # Nodes of the code before are told of deleted namespaces, and not of deleted keys.
        by_key = before == "wire"
        group.goes_on(*range(NODES))
        for version in ("", first, ""):
            roll(group, version, by_key)
        roll(group, "", by_key=True)
        group.goes_on(*range(NODES))
    print(f"{group.seen['hits']} hits, {group.seen['misses']} misses, {group.lag_s:.2f} s stale at most")


@pytest.mark.long
@pytest.mark.parametrize("kind", BACKENDS)
def test_lost_nodes_under_load(kind: str, tmp_path: Path) -> None:
    with backend(kind, tmp_path) as shared, fleet([shared.settings()] * NODES) as group:
        group.goes_on(*range(NODES))
        for who in range(NODES):
            others = [i for i in range(NODES) if i != who]
            group.lose(who)
            group.goes_on(*others)
            group.delete(others[0], group.prompts[who][3:])
            if shared.lists:
                group.delete(others[0])
            group.goes_on(*others)
            group.restart(who)
            group.goes_on(*range(NODES))
            group.delete(who, group.prompts[who + 3])
    print(f"{group.seen['hits']} hits, {group.seen['misses']} misses, {group.lag_s:.2f} s stale at most")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["valkey", "s3"])
def test_a_split_and_a_slow_network_under_load(kind: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        shared = stack.enter_context(backend(kind, tmp_path))
        proxies = [Proxy(shared.port) for _ in range(NODES)]
        for proxy in proxies:
            stack.callback(proxy.close)
        group = stack.enter_context(fleet([shared.settings(proxy.port) for proxy in proxies]))
        group.goes_on(*range(NODES))
        for who, other in ((0, 1), (2, 0)):
            with group.without_network(who):
                proxies[who].split = True
                eventually(lambda who=who: not group.uses_network(who), 20)
                group.goes_on(*range(NODES))
                for keys in (group.prompts[who][3:], None):
                    group.delete(other, keys)
                # The node that is cut off cannot tell the others.
                with pytest.raises(errors.DeniedError, match="not on the network"):
                    group.delete(who, group.prompts[5])
                group.goes_on(*range(NODES))
                proxies[who].split = False
            eventually(lambda who=who: group.uses_network(who), BACK_S)
            group.goes_on(*range(NODES))
            time.sleep(BACK_S)
        for proxy in proxies[:2]:
            proxy.delay_s = 0.05
        group.goes_on(*range(NODES))
        group.delete(0, group.prompts[6])
        group.delete(2, group.prompts[7])
        group.goes_on(*range(NODES))
        assert group.slowest_s < 2.5, "an engine has waited longer than its deadline"
    print(f"{group.seen['hits']} hits, {group.seen['misses']} misses, {group.lag_s:.2f} s stale at most")
