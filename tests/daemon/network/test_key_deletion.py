"""Deletion of single keys on one node of a group: the others delete their blocks too."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstore import Client, Layout, errors
from kvstore.daemon.network.epochs import CHECK_EVERY_S
from kvstore.daemon.network.names import KEY_LISTS
from kvstore.tiers.network import objects
from tests.daemon.network.group import counted, network, nodes, object_of, there
from tests.daemon.network.test_namespace_deletion import BOUND_S, again, daemon, durable, epoch_of, put
from tests.daemons import WITH_NVME, eventually, got, log_of, names, new_layout, payloads
from tests.tiers.network.valkeys import server


def lacks(node: Client, layout: Layout, keys: list[bytes]) -> bool:
    """Whether a node has none of these blocks, and finds none on the network."""
    return not node.namespace(layout).contains(keys).any()


@pytest.mark.long
def test_other_nodes_delete_their_copies_and_no_others(shared: str) -> None:
    layout, keys = new_layout(), names(10)
    kept, gone = keys[:5], keys[5:]
    with nodes(shared, 3) as group:
        put(group[0], layout, keys)
        there(group[0], 10)
        for node in group[1:]:
            assert got(node.namespace(layout), keys) == 10
        for salt, deleter in ((1, group[0]), (2, group[1])):
            assert deleter.namespace(layout).invalidate(gone) == 5
            for node in group:
                eventually(lambda node=node: lacks(node, layout, gone), BOUND_S)
                assert got(node.namespace(layout), kept) == 5
            deleter.namespace(layout).put(gone, payloads(gone, salt=salt), parent=kept[-1])
            # Nothing is deleted that was stored again.
            for node in group:
                ns = node.namespace(layout)
                eventually(lambda ns=ns, salt=salt: got(ns, gone, salt) == 5)
        time.sleep(2 * CHECK_EVERY_S)
        for node in group:
            assert got(node.namespace(layout), gone, salt=2) == 5
        assert counted(group[2], "read_torn_blocks") == 0
        assert "Traceback" not in "".join(log_of(daemon(node)) for node in group)


@pytest.mark.long
def test_a_late_upload_of_a_deleted_key_is_not_found_and_is_deleted(folder: Path) -> None:
    layout, keys, url = new_layout(), names(4), f"file://{folder}"
    with nodes(url) as (a, b):
        put(a, layout, keys)
        there(a, 4)
        assert got(b.namespace(layout), keys) == 4
        file = object_of(folder, layout, keys[3])
        old = file.read_bytes()
        assert a.namespace(layout).invalidate(keys[3:]) == 1
        assert not file.exists()
        # As another node does that does not know of the deletion yet.
        file.write_bytes(old)
        assert a.namespace(layout).lookup(keys) == 3
        eventually(lambda: b.namespace(layout).lookup(keys) == 3, BOUND_S)
        with nodes(url, 1) as (c,):
            assert got(c.namespace(layout), keys) == 3, "a node that has just come"
        eventually(lambda: not file.exists(), 15)
        eventually(lambda: network(b)["owed_removals"] == 0)


@pytest.mark.long
def test_nodes_that_were_away_delete_the_keys() -> None:
    """One was down and has the blocks on NVMe, the whole group was without the network."""
    layout, keys = new_layout(), names(10)
    with server() as made, nodes(made.url, settings=WITH_NVME) as (a, b):
        for node in (a, b):
            put(node, layout, keys)
        durable(b, 10)
        daemon(b).kill()
        assert a.namespace(layout).invalidate(keys[5:]) == 5
        again(b)
        eventually(lambda: b.namespace(layout).lookup(keys) == 5, BOUND_S)
        made.kill()
        eventually(lambda: not (network(a)["usable"] or network(b)["usable"]), 20)
        with pytest.raises(errors.DeniedError, match="deleted here, but not on the network"):
            a.namespace(layout).invalidate(keys[3:4])
        assert got(a.namespace(layout), keys) == 3
        assert got(b.namespace(layout), keys) == 5, "it cannot know"
        made.start()
        eventually(lambda: b.namespace(layout).lookup(keys) == 3, 25)
        assert list(b.namespace(layout).contains(keys)) == [True] * 3 + [False, True] + [False] * 5


@pytest.mark.long
def test_concurrent_deletions_are_merged(shared: str) -> None:
    layout, keys = new_layout(), names(12)
    with nodes(shared, 3) as (a, b, c):
        put(c, layout, keys)
        there(c, 12)
        assert got(a.namespace(layout), keys) == got(b.namespace(layout), keys) == 12
        for i in (8, 4):
            for node, key in ((a, keys[i]), (b, keys[i + 1])):
                node.namespace(layout).invalidate([key])
        gone = [i in (4, 5, 8, 9) for i in range(12)]
        for node in (a, b, c):
            ns = node.namespace(layout)
            eventually(lambda ns=ns: [not x for x in ns.contains(keys)] == gone, 3 * BOUND_S)


@pytest.mark.long
def test_the_deletion_of_a_namespace_ends_the_list(folder: Path) -> None:
    layout, keys = new_layout(), names(4)
    with nodes(f"file://{folder}") as (a, b):
        put(a, layout, keys)
        there(a, 4)
        a.namespace(layout).invalidate(keys[2:])
        put(a, layout, keys[2:], salt=1)
        there(a, 6)
        assert list((folder / objects.folder(KEY_LISTS)).rglob("*"))
        eventually(lambda: got(b.namespace(layout), keys[2:], salt=1) == 2, BOUND_S)
        a.namespace(layout).invalidate()
        files = [file for file in (folder / objects.ROOT).rglob("*") if file.is_file()]
        assert files == [epoch_of(folder, layout)], "neither blocks nor the list are left"
        eventually(lambda: b.namespace(layout).lookup(keys) == 0, BOUND_S)
        put(b, layout, keys, salt=2)
        eventually(lambda: got(a.namespace(layout), keys, salt=2) == 4)
