"""`kvstore why` and hints against a real daemon: output and access rights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import AsyncClient, Client
from kvstore.errors import DeniedError, MisuseError, RemoteProtocolError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.types import EXPLAIN_KEYS
from kvstore.wire import messages as m
from tests.daemons import WITH_NVME, cli, eventually, got, greeted, idle, log_of, names, new_layout, payloads
from tests.tenants import ATTACKER, VICTIM, Member, TenantDaemon, needs_root

TENANTS = f"""
[tenants.victim]
uids = [{VICTIM}]
[tenants.attacker]
uids = [{ATTACKER}]
role = "admin"
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(WITH_NVME) as served:
        yield served


@pytest.fixture
def client(daemon: LocalDaemon) -> Iterator[Client]:
    with Client(daemon.url, deadline_s=10, strict=True) as made:
        yield made


def stored(client: Client, n: int) -> tuple[Any, list[bytes]]:
    """Stores n blocks on both tiers. Returns the namespace and the keys."""
    ns, keys = client.namespace(new_layout()), names(n)
    assert ns.put(keys, payloads(keys)).stored == n
    eventually(lambda: idle(client.status()))
    return ns, keys


def why(daemon: LocalDaemon, *args: str) -> tuple[int, dict[str, Any]]:
    done = cli("why", *args, "--socket", str(daemon.socket), "--json")
    assert done.stderr == "", done.stderr
    return done.returncode, json.loads(done.stdout)


# -- explain


def test_a_stored_key_is_explained_to_operators(daemon: LocalDaemon, client: Client) -> None:
    ns, keys = stored(client, 3)
    ns.pin(keys[:1], 100.0)
    for text in (keys[0].hex(), "0x" + keys[0].hex().upper()):
        code, told = why(daemon, text, "--model", ns.layout.model)
        [block] = told["blocks"]
        assert (code, told["keys"]) == (0, 1)
        assert block["key"] == keys[0].hex()
        assert (block["tenant"], block["model"], block["state"]) == ("default", ns.layout.model, "live")
        assert [copy["tier"] for copy in block["copies"]] == ["dram", "nvme"]
        assert (block["parent"], block["children"]) == ("", 1)
        assert 0 < block["pinned_s"] <= 100.0


def test_a_chain_in_a_file_is_a_table(daemon: LocalDaemon, client: Client, tmp_path: Path) -> None:
    ns, keys = stored(client, EXPLAIN_KEYS + 4)
    file = tmp_path / "chain"
    file.write_text("\n".join(["", *(key.hex() for key in keys), "0x" + names(1, "absent")[0].hex()]) + "\n")
    code, told = why(daemon, str(file), "--model", ns.layout.model)
    assert code == 0
    assert [block["key"] for block in told["blocks"]] == [key.hex() for key in keys]
    assert told["keys"] == len(keys) + 1
    shown = cli("why", str(file), "--socket", str(daemon.socket), "--model", ns.layout.model, COLUMNS="200")
    assert shown.returncode == 0
    assert [key.hex()[:16] in shown.stdout for key in keys] == [True] * len(keys)
    assert shown.stdout.count("live") == len(keys)


def test_an_evicted_block_has_a_reason(daemon: LocalDaemon, client: Client) -> None:
    ns, keys = stored(client, 2)
    ns.invalidate(keys[1:])
    code, told = why(daemon, keys[1].hex(), "--model", ns.layout.model)
    [block] = told["blocks"]
    assert (code, block["state"]) == (0, "not stored")
    assert [(d["what"], d["tier"]) for d in block["decisions"]] == [("invalidated", "")]
    shown = cli("why", keys[1].hex(), "--socket", str(daemon.socket), "--model", ns.layout.model)
    assert shown.returncode == 0
    assert "invalidated" in shown.stdout
    assert "ago" in shown.stdout


@pytest.mark.parametrize("harm", ["none", "cut", "other"])
def test_policy_state_survives_an_orderly_restart(harm: str) -> None:
    with LocalDaemon({**WITH_NVME, "policy": {"eviction": "hazard"}}) as daemon:
        with Client(daemon.url, deadline_s=10, strict=True) as client:
            ns, keys = stored(client, 3)
            for _ in range(4):
                assert got(ns, keys) == 3
                client.ping()  # uses that are reported together count once
        daemon.stop()
        [file] = Path(daemon.folder / "nvme").glob("learned*")
        assert file.stat().st_mode & 0o777 == 0o600
        if harm == "cut":
            file.write_bytes(file.read_bytes()[:-1000])
        elif harm == "other":
            file.write_bytes(b"something else")
        daemon.start()
        with Client(daemon.url, deadline_s=10, strict=True) as client:
            assert client.namespace(ns.layout).lookup(keys) == 3
        [block] = why(daemon, keys[0].hex(), "--model", ns.layout.model)[1]["blocks"]
        assert block["uses"] == (5 if harm == "none" else 1)
        assert ("reuse statistics start empty" in log_of(daemon)) is (harm != "none")


def test_unknown_keys_give_exit_code_1(daemon: LocalDaemon) -> None:
    absent = names(1, "absent")[0].hex()
    assert why(daemon, absent) == (1, {"keys": 1, "blocks": []})
    done = cli("why", absent, "--socket", str(daemon.socket))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "unknown key\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("abc", "is neither a key nor a file (keys are 1 to 64 bytes in hex"),
        ("0x", "is neither a key nor a file"),
        ("ab" * 65, "is neither a key nor a file"),
    ],
)
def test_an_invalid_key_is_an_error_with_a_hint(daemon: LocalDaemon, text: str, says: str) -> None:
    done = cli("why", text, "--socket", str(daemon.socket))
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            "",
            "no keys (keys are 1 to 64 bytes in hex, with or without 0x; a file has one key per line)",
        ),
        ("\n \n", "contains no keys"),
        ("abcd\nxyz\n", "line 2 is not a key: 'xyz'"),
        ("abcd\nab cd\n", "line 2 is not a key: 'ab cd'"),
        ("abcd\nabcdef\n", "keys of one call differ in length"),
    ],
)
def test_a_file_without_keys_is_an_error_with_a_hint(
    daemon: LocalDaemon, tmp_path: Path, content: str, says: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    done = cli("why", str(file), "--socket", str(daemon.socket))
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_a_folder_is_an_error(daemon: LocalDaemon, tmp_path: Path) -> None:
    done = cli("why", str(tmp_path), "--socket", str(daemon.socket))
    assert done.returncode == 2
    assert "cannot read" in done.stderr


@needs_root
def test_tenants_explain_their_own_blocks_and_operators_all() -> None:
    with TenantDaemon(WITH_NVME, TENANTS) as daemon:
        keys, layout = names(2), new_layout()
        with Member(daemon, VICTIM) as victim, Member(daemon, ATTACKER) as attacker:
            victim.namespace(layout).put(keys, payloads(keys))
            assert [b["tenant"] for b in victim.explain(keys)] == ["victim", "victim"]
            assert attacker.explain(keys) == attacker.explain(keys, tenant="victim") == []
            attacker.namespace(layout).put(keys[:1], payloads(keys[:1]))
            assert [b["tenant"] for b in attacker.explain(keys)] == ["attacker"]
            assert victim.explain(keys, tenant="attacker") == []
        with Client(daemon.url, strict=True) as operator:
            assert {b["tenant"] for b in operator.explain(keys)} == {"victim", "attacker"}
            assert {b["tenant"] for b in operator.explain(keys, tenant="victim")} == {"victim"}
            assert operator.explain(keys, tenant="nobody") == []
            assert operator.explain(keys, model="other") == []


def test_too_many_keys_in_one_request_are_refused(daemon: LocalDaemon) -> None:
    with greeted(daemon) as (peer, _):
        raw = b"".join(names(EXPLAIN_KEYS + 1))
        denied = peer.ask(m.Explain(5, "", "", 32, raw))
        assert isinstance(denied, m.Denied)
        assert denied.id == 5
        assert isinstance(peer.ask(m.Explain(6, "", "", 32, raw[32:])), m.Explained)


def test_the_async_client_explains_blocks(daemon: LocalDaemon, client: Client) -> None:
    ns, keys = stored(client, 2)

    async def ask() -> list[dict[str, Any]]:
        async with AsyncClient(daemon.url, deadline_s=10) as a:
            return await a.explain(keys, model=ns.layout.model)

    assert [block["key"] for block in asyncio.run(ask())] == keys
    with pytest.raises(MisuseError, match="can't be a tenant's name"):
        client.explain(keys, tenant="/")


# -- hints


def test_hints_are_accepted_and_evict_nothing(daemon: LocalDaemon, client: Client) -> None:
    ns, keys = stored(client, 5)
    assert ns.hint(keys, next_use_s=30.0, priority=1) == 5
    assert ns.hint([*keys[:3], b"x" * 32], closed=True) == 3
    assert ns.hint(keys, closed=True, priority=-1, next_use_s=0) == 5
    assert got(ns, keys) == 5

    async def ask() -> int:
        async with AsyncClient(daemon.url, deadline_s=10) as a:
            return await a.namespace(ns.layout).hint(keys, closed=True)

    assert asyncio.run(ask()) == 5


def test_hints_about_unknown_blocks_are_ignored(client: Client, tmp_path: Path) -> None:
    ns = client.namespace(new_layout())
    assert ns.hint(names(3), closed=True) == 0
    assert ns.hint([]) == 0
    with Client(f"unix://{tmp_path}/nobody.sock") as away:
        assert away.namespace(new_layout()).hint(names(3), next_use_s=1.0) == 0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"next_use_s": -1.0}, "next_use_s is -1.0"),
        ({"next_use_s": float("inf")}, "next_use_s is inf"),
        ({"next_use_s": float("nan")}, "next_use_s is nan"),
        ({"next_use_s": "soon"}, "next_use_s is 'soon'"),
        ({"next_use_s": True}, "next_use_s is True"),
        ({"priority": 2}, "priority is 2"),
        ({"priority": 0.5}, "priority is 0.5"),
        ({"priority": None}, "priority is None"),
        ({"closed": 1}, "closed is 1"),
    ],
)
def test_misused_hints_raise_before_anything_is_sent(more: dict[str, Any], says: str) -> None:
    with Client("unix:///nowhere/kvstore.sock") as away, pytest.raises(MisuseError, match=says):
        away.namespace(new_layout()).hint(names(1), **more)


def test_malformed_hints_are_refused_by_the_daemon(daemon: LocalDaemon) -> None:
    with greeted(daemon) as (peer, number):
        assert peer.ask(m.Hint(1, number, 32, names(1)[0], True, 2.0, False, m.HIGH)) == m.Value(1, 0)
        denied = peer.ask(m.Hint(2, number + 7, 32, names(1)[0], False, 0.0, True, m.LOW))
        assert isinstance(denied, m.Denied)
        peer.send(m.Hint(3, number, 32, names(1)[0], False, 0.0, True, 3))
        assert "a hint of priority 3" in peer.refused().why
    with pytest.raises(RemoteProtocolError, match=r"Hint\.next_use_s is -1\.0"):
        m.decode(m.encode(m.Hint(3, 1, 32, names(1)[0], True, -1.0, True, 1)))


@needs_root
def test_only_the_owner_hints() -> None:
    with TenantDaemon(WITH_NVME, TENANTS) as daemon:
        keys, layout = names(2), new_layout()
        with Member(daemon, VICTIM) as victim, Member(daemon, ATTACKER) as attacker:
            attacker.namespace(layout).put(keys, payloads(keys))
            assert attacker.namespace(layout).publish(["victim"])
            theirs = victim.namespace(layout, owner="attacker")
            assert theirs.lookup(keys) == 2
            with pytest.raises(DeniedError, match="another tenant's"):
                theirs.hint(keys, closed=True)
