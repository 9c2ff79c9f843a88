"""Deletion of namespaces on one node of a group: the others delete their blocks too."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client, Layout, errors
from kvstore.daemon.network.epochs import CHECK_EVERY_S
from kvstore.daemon.network.names import EPOCH_BYTES, epoch_name
from kvstore.tiers.network import objects
from tests.daemon.network.group import counted, network, nodes, object_of, there
from tests.daemons import SMALL, WITH_NVME, eventually, got, idle, log_of, names, new_layout, payloads, tier
from tests.tiers.network.valkeys import Server, server

BOUND_S = CHECK_EVERY_S + 1.5
"""The documented bound, and time for calls on a busy machine."""


def put(node: Client, layout: Layout, keys: list[bytes], salt: int = 0) -> None:
    node.namespace(layout).put(keys, payloads(keys, salt=salt))


def empty(node: Client, layout: Layout, keys: list[bytes]) -> bool:
    """Whether neither the node nor the network has a block. Asks for the last one too: gaps count."""
    return not node.namespace(layout).lookup(keys)


def durable(node: Client, n: int) -> None:
    """Waits until a node's NVMe has exactly so many blocks."""
    eventually(lambda: tier(node.status(), "nvme")["blocks"] == n and idle(node.status()))


def epoch_of(folder: Path, layout: Layout) -> Path:
    return folder / objects.path(epoch_name(layout.fingerprint()))


def daemon(node: Client) -> Any:
    return node.daemon  # type: ignore[attr-defined]


def again(node: Client) -> None:
    """Starts a node's daemon, and waits until it uses the network."""
    daemon(node).start()
    eventually(lambda: uses_network(node))


def uses_network(node: Client) -> bool:
    try:
        return bool(network(node)["usable"])
    except errors.UnavailableError:  # it has yet to connect again
        return False


def deletions(node: Client) -> int:
    """How often a node has deleted blocks because of another epoch."""
    return log_of(daemon(node)).count("its epoch has changed")


def stored(node: Client, layout: Layout, keys: list[bytes], salt: int = 0) -> int:
    """Puts blocks. Returns how many are stored, 0 while the node is not connected."""
    try:
        return node.namespace(layout).put(keys, payloads(keys, salt=salt)).stored
    except errors.UnavailableError:
        return 0


def test_other_nodes_delete_their_copies_within_the_bound(shared: str) -> None:
    layout, other, keys = new_layout(), new_layout(), names(10)
    with nodes(shared) as (a, b):
        put(a, layout, keys)
        put(a, other, keys)
        there(a, 20)
        assert got(b.namespace(layout), keys) == got(b.namespace(other), keys) == 10
        for salt in (1, 2):  # a backend may keep an existing object: the second epoch replaces one
            assert a.namespace(layout).invalidate() == 10
            assert empty(a, layout, keys)
            eventually(lambda: empty(b, layout, keys), BOUND_S)
            put(a, layout, keys, salt)
            there(a, 20 + 10 * salt)
            eventually(lambda salt=salt: got(b.namespace(layout), keys, salt) == 10)
            assert counted(b, "read_ok_blocks") == 20 + 10 * salt, "by names of the new epoch"
        assert got(b.namespace(other), keys) == 10
        assert counted(b, "read_torn_blocks") == 0
        assert "Traceback" not in log_of(daemon(a)) + log_of(daemon(b))


def test_both_directions_by_revision(shared: str) -> None:
    first, second, keys = new_layout(), new_layout(), names(5)
    with nodes(shared) as (a, b):
        for layout in (first, second):
            put(a, layout, keys)
            there(a, 5 if layout is first else 10)
            assert got(b.namespace(layout), keys) == 5
        assert b.invalidate(model=first.model) == 5
        eventually(lambda: empty(a, first, keys), BOUND_S)
        put(b, first, keys, salt=1)
        there(b, 5)
        eventually(lambda: got(a.namespace(first), keys, salt=1) == 5)
        assert got(a.namespace(second), keys) == 5


def test_a_late_upload_of_old_blocks_is_not_found(folder: Path) -> None:
    layout, keys, url = new_layout(), names(10), f"file://{folder}"
    with nodes(url) as (a, b):
        put(a, layout, keys)
        there(a, 10)
        assert got(b.namespace(layout), keys) == 10
        files = {key: object_of(folder, layout, key) for key in keys}
        old = {key: file.read_bytes() for key, file in files.items()}
        assert a.namespace(layout).invalidate() == 10
        assert not any(file.exists() for file in files.values())
        # What ends after the deletion, or comes from a daemon without epochs.
        for key, file in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(old[key])
        with nodes(url, 1) as (c,):
            assert empty(c, layout, keys), "a node that has just come"
            assert empty(a, layout, keys)
            eventually(lambda: empty(b, layout, keys), BOUND_S)
            assert got(c.namespace(layout), keys) == 0
            assert all(file.exists() for file in files.values()), "they were there all the time"
            assert a.namespace(layout).invalidate() == 0
            assert not any(file.exists() for file in files.values()), "the next deletion finds them"


def test_a_node_that_was_down_deletes_its_blocks(shared: str) -> None:
    layout, other, keys = new_layout(), new_layout(), names(10)
    with nodes(shared, settings=WITH_NVME) as (a, b):
        for each in (layout, other):
            put(b, each, keys)
        durable(b, 20)
        there(b, 20)
        daemon(b).kill()
        assert a.namespace(layout).invalidate() == 0
        again(b)
        eventually(lambda: empty(b, layout, keys), BOUND_S)
        durable(b, 10)
        assert got(b.namespace(other), keys) == 10
        daemon(b).kill()
        again(b)
        assert empty(b, layout, keys)
        assert got(b.namespace(other), keys) == 10


def test_a_known_epoch_survives_restarts(shared: str) -> None:
    layout, keys = new_layout(), names(10)
    # Without uploads: what is found is on the node.
    with nodes(shared, settings=WITH_NVME, admission="twice") as (a, b):
        put(b, layout, keys)
        durable(b, 10)
        a.namespace(layout).invalidate()
        eventually(lambda: deletions(b), BOUND_S)
        assert empty(b, layout, keys)
        put(b, layout, keys, salt=1)
        durable(b, 10)
        for end in ("kill", "stop"):
            getattr(daemon(b), end)()
            again(b)
            time.sleep(2 * CHECK_EVERY_S)
            assert got(b.namespace(layout), keys, salt=1) == 10


@pytest.mark.parametrize("seed", range(3))
def test_no_old_block_after_a_kill_at_any_time(folder: Path, seed: int) -> None:
    """Also between the deletion on the other node and its record of the epoch."""
    dice = random.Random(seed)
    layout, keys = new_layout(), names(100)
    with nodes(f"file://{folder}", settings=WITH_NVME) as (a, b):
        for salt in range(4):
            put(b, layout, keys, salt)
            durable(b, 100)
            a.namespace(layout).invalidate()
            if salt % 2:  # about when it deletes
                eventually(lambda: tier(b.status(), "dram")["blocks"] < 100, BOUND_S)
                time.sleep(dice.uniform(0, 0.02))
            else:
                time.sleep(dice.uniform(0, CHECK_EVERY_S))
            daemon(b).kill()
            again(b)
            eventually(lambda: empty(b, layout, keys), BOUND_S)
            # If the epoch was not recorded, the node deletes again. What is put must come after that.
            time.sleep(CHECK_EVERY_S)


def test_an_outage_delays_the_deletion_on_other_nodes() -> None:
    layout, keys = new_layout(), names(10)
    with server() as made, nodes(made.url) as (a, b):
        put(a, layout, keys)
        there(a, 10)
        assert got(b.namespace(layout), keys) == 10
        made.kill()
        eventually(lambda: not (network(a)["usable"] or network(b)["usable"]), 20)
        with pytest.raises(errors.DeniedError, match="deleted here, but not on the network"):
            a.namespace(layout).invalidate()
        assert network(a)["owed_removals"] == 1
        time.sleep(CHECK_EVERY_S)
        assert got(b.namespace(layout), keys) == 10, "it cannot know"
        made.start()
        eventually(lambda: empty(b, layout, keys), 25)
        eventually(lambda: network(a)["owed_removals"] == 0, 12)
        put(a, layout, keys, salt=1)
        eventually(lambda: got(b.namespace(layout), keys, salt=1) == 10)


def test_keys_deleted_while_the_epoch_is_unknown_are_deleted_later(folder: Path) -> None:
    layout, keys, url = new_layout(), names(10), f"file://{folder}"
    with nodes(url, settings=WITH_NVME) as (a, b):
        put(b, layout, keys)
        durable(b, 10)
        a.namespace(layout).invalidate()
        eventually(lambda: empty(b, layout, keys), BOUND_S)
        put(a, layout, keys, salt=1)
        there(a, 10)
        epoch, aside = epoch_of(folder, layout), folder / "aside"
        raw = epoch.read_bytes()
        with nodes(url, 1) as (c,):
            epoch.write_bytes(b"x" * len(raw))
            ns = c.namespace(layout)
            assert ns.lookup(keys) == 0
            with pytest.raises(errors.DeniedError, match="not on the network"):
                ns.invalidate(keys[5:])
            assert network(c)["owed_removals"] == 5
            aside.write_bytes(raw)
            aside.rename(epoch)
            eventually(lambda: network(c)["owed_removals"] == 0, 20)
            eventually(lambda: got(ns, keys, salt=1) == 5)


def test_deletion_of_a_tenant_reaches_other_nodes(shared: str) -> None:
    layouts, keys = [new_layout(), new_layout()], names(5)
    with nodes(shared) as (a, b):
        for layout in layouts:
            put(a, layout, keys)
        there(a, 10)
        for layout in layouts:
            assert got(b.namespace(layout), keys) == 5
        assert a.delete_tenant("default") == 10
        eventually(lambda: all(empty(b, layout, keys) for layout in layouts), BOUND_S)
        # The tenant's namespaces are new: a lookup waits for their epochs, a put does not.
        assert empty(a, layouts[0], keys)
        put(a, layouts[0], keys, salt=1)
        eventually(lambda: got(b.namespace(layouts[0]), keys, salt=1) == 5)


@pytest.mark.parametrize("how", ["foreign", "bit", "cut", "swapped"])
def test_a_foreign_epoch_changes_nothing_and_is_reported(folder: Path, how: str) -> None:
    layout, other, keys = new_layout(), new_layout(), names(5)
    with nodes(f"file://{folder}") as (a, b):
        for each in (layout, other):
            put(a, each, keys)
        there(a, 10)
        for each in (layout, other):
            a.namespace(each).invalidate()
            eventually(lambda each=each: empty(b, each, keys), BOUND_S)
        put(b, layout, keys, salt=1)
        file = epoch_of(folder, layout)
        raw = bytearray(file.read_bytes())
        if how == "foreign":
            raw[:] = b"somebody else's"
        elif how == "bit":
            raw[4096 if len(raw) > 4096 else 256] ^= 1
        elif how == "cut":
            del raw[100:]
        else:
            raw[:] = epoch_of(folder, other).read_bytes()
        file.write_bytes(raw)
        eventually(lambda: "the epoch of a namespace is corrupt" in log_of(daemon(b)), BOUND_S)
        time.sleep(CHECK_EVERY_S)
        assert got(b.namespace(layout), keys, salt=1) == 5
        assert log_of(daemon(b)).count("the epoch of a namespace is corrupt") == 1
        assert file.exists(), "no node deletes it"
        a.namespace(layout).invalidate()
        eventually(lambda: empty(b, layout, keys), BOUND_S)


def test_a_lost_epoch_is_written_again(folder: Path) -> None:
    layout, keys = new_layout(), names(5)
    with nodes(f"file://{folder}") as (a, b):
        put(a, layout, keys)
        there(a, 5)
        a.namespace(layout).invalidate()
        eventually(lambda: empty(b, layout, keys), BOUND_S)
        put(b, layout, keys, salt=1)
        there(b, 5)
        file = epoch_of(folder, layout)
        epoch = file.read_bytes()[-EPOCH_BYTES:]
        file.unlink()
        eventually(file.exists, 3 * BOUND_S)
        assert file.read_bytes()[-EPOCH_BYTES:] == epoch
        time.sleep(CHECK_EVERY_S)
        assert got(b.namespace(layout), keys, salt=1) == got(a.namespace(layout), keys, salt=1) == 5


@pytest.mark.parametrize("how", ["emptied", "expired"])
def test_an_emptied_network_costs_no_local_blocks(valkey: Server, how: str) -> None:
    layout, keys = new_layout(), names(10)
    with nodes(valkey.url + ("?ttl=3" if how == "expired" else "")) as (a, b):
        for node in (a, b):
            put(node, layout, keys)
        a.namespace(layout).invalidate()
        eventually(lambda: empty(b, layout, keys), BOUND_S)
        for node in (a, b):
            put(node, layout, keys, salt=1)
        if how == "emptied":
            valkey.ask("FLUSHALL")
        time.sleep(4 * CHECK_EVERY_S)
        for node in (a, b):
            assert got(node.namespace(layout), keys, salt=1) == 10
        assert "the network had lost its epoch" in log_of(daemon(a)) + log_of(daemon(b))
        b.namespace(layout).invalidate()
        eventually(lambda: empty(a, layout, keys), BOUND_S)


# -- nothing is deleted that was put after the deletion


def test_blocks_that_are_put_right_after_an_open_are_kept(shared: str) -> None:
    layout, keys = new_layout(), names(20)
    with nodes(shared) as (a, b):
        a.namespace(layout).invalidate()
        put(b, layout, keys[:10], salt=1)
        daemon(b).kill()
        daemon(b).start()
        # The network tier is not checked yet, and the clients connect again with this call.
        eventually(lambda: stored(b, layout, keys[10:], salt=2) == 10)
        time.sleep(2 * CHECK_EVERY_S)
        assert got(b.namespace(layout), keys[10:], salt=2) == 10
        assert not deletions(b)


def test_a_put_waits_for_the_epoch(valkey: Server) -> None:
    layout, keys = new_layout(), names(10)
    valkey.ask("FLUSHALL")
    with nodes(valkey.url) as (a, b):
        a.namespace(layout).invalidate()
        valkey.ask("CLIENT", "PAUSE", "500", "ALL")
        assert stored(b, layout, keys) == 10
        time.sleep(2 * CHECK_EVERY_S)
        assert got(b.namespace(layout), keys) == 10
        assert not deletions(b)


def test_blocks_of_an_outage_are_deleted_if_the_namespace_has_an_epoch() -> None:
    """They may be older than it. The server forgets it, and the other node has it."""
    deleted, other, keys = new_layout(), new_layout(), names(10)
    with server() as made, nodes(made.url) as (a, b):
        a.namespace(deleted).invalidate()
        daemon(b).kill()
        made.kill()
        daemon(b).start()
        eventually(lambda: stored(b, deleted, keys) == 10)
        put(b, other, keys)
        made.start()
        eventually(lambda: empty(b, deleted, keys), 25)
        assert got(b.namespace(other), keys) == 10


@pytest.mark.parametrize("nvme", [False, True])
def test_dram_that_is_kept_through_a_restart(folder: Path, nvme: bool) -> None:
    layout, other, keys = new_layout(), new_layout(), names(10)
    settings = {**WITH_NVME, "nvme": {**WITH_NVME["nvme"], "write_policy": "on_evict"}} if nvme else SMALL
    # Without uploads: what is found is on the node.
    with nodes(f"file://{folder}", 2, settings, supervised=True, admission="twice") as (a, b):
        put(b, layout, keys)
        put(b, other, keys)
        a.namespace(layout).invalidate()
        eventually(lambda: empty(b, layout, keys), BOUND_S)
        put(b, layout, keys, salt=1)
        time.sleep(CHECK_EVERY_S)  # its epoch is on NVMe
        daemon(b).kill()
        again(b)
        time.sleep(2 * CHECK_EVERY_S)
        # Without NVMe the epoch of the blocks is unknown: they may be old.
        assert got(b.namespace(layout), keys, salt=1) == 10 * nvme
        assert got(b.namespace(other), keys) == 10
        put(b, layout, keys, salt=1)
        os.kill(daemon(b).pid, signal.SIGSTOP)
        a.namespace(layout).invalidate()
        daemon(b).kill()
        again(b)
        eventually(lambda: empty(b, layout, keys), BOUND_S)
        assert got(b.namespace(other), keys) == 10


def test_a_full_network_gets_the_epoch_when_the_old_objects_are_gone() -> None:
    layout, keys = new_layout(), names(600)
    with server("maxmemory 8mb", "maxmemory-policy noeviction") as made, nodes(made.url) as (a, b):
        put(a, layout, keys)
        eventually(lambda: counted(a, "written_full_blocks"))
        assert b.namespace(layout).lookup(keys)
        assert a.namespace(layout).invalidate() == 600
        eventually(lambda: empty(b, layout, keys), BOUND_S)
