"""Two daemons that share nothing but a network tier: a folder, or a real Valkey. Real clients, real bytes."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Client, Estimate, StoredPrefix, errors
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.wire import messages as m
from tests.daemon.network.group import PATIENT, counted, network, nodes, object_of, there
from tests.daemons import (
    BLOCK,
    SMALL,
    WITH_NVME,
    eventually,
    got,
    greeted,
    idle,
    log_of,
    names,
    new_layout,
    payload,
    payloads,
    room_for,
)
from tests.processes import stop
from tests.tiers.network.valkeys import Server, server


def test_blocks_of_one_node_are_served_by_another(shared: str) -> None:
    layout, keys = new_layout(), names(40)
    with nodes(shared) as (a, b):
        a.namespace(layout).put(keys, payloads(keys))
        there(a, 40)
        other = b.namespace(layout)
        assert other.lookup(keys) == 40
        assert got(other, keys) == 40
        assert counted(b, "hit_blocks") == counted(b, "read_ok_blocks") == 40
        assert got(other, keys) == 40, "and from its own memory from then on"
        assert counted(b, "read_ok_blocks") == 40
        eventually(lambda: idle(a.status()) and idle(b.status()))


def test_a_chain_is_continued_where_another_node_left_it(shared: str) -> None:
    layout, keys = new_layout(), names(30)
    with nodes(shared) as (a, b):
        ours, others = a.namespace(layout), b.namespace(layout)
        ours.put(keys[:10], payloads(keys[:10]))
        there(a, 10)
        assert got(others, keys) == 10
        others.put(keys[10:20], payloads(keys[10:20]), parent=keys[9])
        there(b, 10)
        assert ours.lookup(keys) == 20
        assert got(ours, keys) == 20


def test_contains_finds_blocks_here_and_on_the_network(shared: str) -> None:
    layout, keys = new_layout(), names(30)
    with nodes(shared) as (a, b):
        a.namespace(layout).put(keys[:10], payloads(keys[:10]))
        there(a, 10)
        others = b.namespace(layout)
        others.put(keys[20:], payloads(keys[20:]))
        asked = [keys[25], keys[5], keys[15], keys[9]]
        assert others.contains(asked).tolist() == [True, True, False, True]
        assert counted(b, "read_ok_blocks") == 0, "nothing is downloaded"


def test_a_lookup_leaves_out_network_blocks_that_load_slower_than_they_are_computed(shared: str) -> None:
    layout, keys = new_layout(), names(30)
    with nodes(shared) as (a, b):
        a.namespace(layout).put(keys, payloads(keys))
        there(a, 30)
        others = b.namespace(layout)
        others.put(keys[:10], payloads(keys[:10]))

        def found(*guess: Any) -> StoredPrefix:
            [prefix], _ = b.lookup([(others, keys, None, Estimate(*guess) if guess else None)])
            return prefix

        # By its first estimate, the network moves a block in 4 µs.
        assert found() == found(1.0, 1.0) == StoredPrefix(30, 30)
        assert found(1e-9, 1.0) == StoredPrefix(30, 10), "slower than computing them"
        assert found(1e-9, 1.0, 30) == StoredPrefix(30, 30), "the caller has them"
        assert found(1.0, 1e-9) == StoredPrefix(30, 10), "later than the caller waits"
        assert counted(b, "read_ok_blocks") == 0


def test_downloaded_blocks_are_not_uploaded(shared: str) -> None:
    layout, keys = new_layout(), names(10)
    with nodes(shared) as (a, b):
        a.namespace(layout).put(keys, payloads(keys))
        there(a, 10)
        assert got(b.namespace(layout), keys) == 10
        got(b.namespace(layout), keys)
        time.sleep(0.3)
        assert counted(b, "written_ok_blocks") == 0


def test_concurrent_requests_share_one_download(shared: str) -> None:
    layout, keys = new_layout(), names(60)
    with nodes(shared) as (a, b):
        a.namespace(layout).put(keys, payloads(keys))
        there(a, 60)
        found: list[int] = []
        askers = [
            threading.Thread(target=lambda: found.append(got(b.namespace(layout), keys))) for _ in range(8)
        ]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        assert found == [60] * 8
        assert counted(b, "read_ok_blocks") == 60


def test_prefetch_loads_blocks_before_a_request(shared: str) -> None:
    layout, keys = new_layout(), names(20)
    with nodes(shared) as (a, b):
        a.namespace(layout).put(keys, payloads(keys))
        there(a, 20)
        assert b.namespace(layout).prefetch(keys) == 20
        eventually(lambda: counted(b, "read_ok_blocks") == 20)


def test_another_layout_shares_nothing(shared: str) -> None:
    keys = names(5)
    with nodes(shared) as (a, b):
        a.namespace(new_layout()).put(keys, payloads(keys))
        there(a, 5)
        assert b.namespace(new_layout()).lookup(keys) == 0


def test_a_node_that_restarts_without_nvme_finds_its_blocks_again(shared: str) -> None:
    layout, keys = new_layout(), names(20)
    with nodes(shared, 1) as (a,):
        a.namespace(layout).put(keys, payloads(keys))
        there(a, 20)
    with nodes(shared, 1) as (a,):
        assert got(a.namespace(layout), keys) == 20


def test_more_than_memory_holds(shared: str) -> None:
    layout, prompts = new_layout(), [names(100, f"prompt {i}") for i in range(15)]
    with nodes(shared, settings={**SMALL, "policy": {"eviction": "lru"}}) as (a, b):
        for keys in prompts:
            a.namespace(layout).put(keys, payloads(keys))
            eventually(lambda: not network(a)["going_blocks"])
        assert counted(a, "written_ok_blocks") == 1500
        for node in (a, b):
            for keys in prompts:
                assert got(node.namespace(layout), keys) == 100
            eventually(lambda node=node: idle(node.status()))


def test_invalidated_blocks_do_not_come_back(shared: str) -> None:
    layout, keys = new_layout(), names(10)
    with nodes(shared) as (a, b):
        ours = a.namespace(layout)
        ours.put(keys, payloads(keys))
        assert ours.invalidate(keys[5:]) == 5
        assert ours.lookup(keys) == got(ours, keys) == 5
        eventually(lambda: not network(a)["going_blocks"])
        assert eventually(lambda: got(b.namespace(layout), keys)) == 5
        ours.put(keys[5:], payloads(keys[5:]), parent=keys[4])
        there(a, 10)
        time.sleep(1.1)
        assert got(b.namespace(layout), keys) == 10


def test_a_deleted_namespace_is_deleted_from_the_network(shared: str) -> None:
    layout, other, keys = new_layout(), new_layout(), names(10)
    with nodes(shared) as (a, b):
        for each in (layout, other):
            a.namespace(each).put(keys, payloads(keys))
        there(a, 20)
        assert a.namespace(layout).invalidate() == 10
        assert a.namespace(layout).lookup(keys) == 0
        assert b.namespace(layout).lookup(keys) == 0
        assert got(b.namespace(other), keys) == 10


def test_blocks_that_end_stay_on_the_node(shared: str) -> None:
    layout, keys = new_layout(), names(5)
    with nodes(shared) as (a, b):
        a.namespace(layout, ttl_s=60).put(keys, payloads(keys))
        time.sleep(0.3)
        assert counted(a, "written_ok_blocks") == 0
        assert b.namespace(layout, ttl_s=60).lookup(keys) == 0
        with pytest.raises(errors.DeniedError, match="cannot be handed off"):
            a.namespace(layout, ttl_s=60).handoff(keys)


def test_with_admission_only_reused_blocks_are_uploaded(shared: str) -> None:
    layout, keys = new_layout(), names(10)
    with nodes(shared, 1, admission="twice") as (a,):
        ours = a.namespace(layout)
        ours.put(keys, payloads(keys))
        time.sleep(0.3)
        assert counted(a, "written_ok_blocks") == 0
        for _ in range(2):
            assert got(ours, keys[:4]) == 4
            a.ping()  # uses that are reported together count once
        there(a, 4)
        assert counted(a, "written_ok_blocks") == 4


# -- hand-off


def test_a_hand_off_ends_when_the_network_has_the_blocks(shared: str) -> None:
    layout, keys = new_layout(), names(30)
    with nodes(shared, admission="twice") as (a, b):
        ours = a.namespace(layout)
        ours.put(keys[:20], payloads(keys[:20]))
        assert ours.handoff(keys) == 20
        assert got(b.namespace(layout), keys) == 20


def test_a_hand_off_includes_blocks_on_nvme(shared: str) -> None:
    layout, keys = new_layout(), names(1500)
    with nodes(shared, settings=WITH_NVME, admission="twice") as (a, b):
        ours = a.namespace(layout)
        for at in range(0, 1500, 100):
            ours.put(keys[at : at + 100], payloads(keys[at : at + 100]), parent=keys[at - 1] if at else None)
            eventually(lambda: idle(a.status()))
        assert ours.handoff(keys[:200]) == 200
        assert got(b.namespace(layout), keys[:200]) == 200


def test_a_decode_node_starts_before_the_last_block_is_written(shared: str) -> None:
    layout, keys = new_layout(), names(64)
    with nodes(shared) as (a, b):
        ours, others = a.namespace(layout), b.namespace(layout)
        first_s: list[float] = []
        blocks: list[bytes] = []

        def decode() -> None:
            while len(blocks) < len(keys):
                with others.acquire(keys[len(blocks) :], wait_s=10) as lease:
                    assert len(lease), "it waits for the next block"
                    first_s.append(time.monotonic())
                    blocks.extend(bytes(block) for block in lease.blocks)

        reader = threading.Thread(target=decode)
        reader.start()
        for at in range(0, 64, 8):
            some = keys[at : at + 8]
            ours.put(some, payloads(some), parent=keys[at - 1] if at else None)
            assert ours.handoff(some) == 8
            time.sleep(0.05)
        written_s = time.monotonic()
        reader.join(20)
        assert blocks == [payload(key) for key in keys]
        assert first_s[0] < written_s - 0.2


def test_a_call_that_waits_ignores_cached_misses(shared: str) -> None:
    """Otherwise it would get block after block, until the misses are forgotten after 1 s."""
    keys = names(4)
    with nodes(shared) as (a, b):
        for _ in range(5):
            layout = new_layout()
            ours, others = a.namespace(layout), b.namespace(layout)
            assert others.lookup(keys) == 0
            ours.put(keys, payloads(keys))
            assert ours.handoff(keys) == len(keys)
            with others.acquire(keys, wait_s=10) as lease:
                came = len(lease)
            assert came == len(keys)


def test_waiting_ends_when_its_time_is_over(shared: str) -> None:
    with nodes(shared, 1) as (a,):
        ns = a.namespace(new_layout())
        began = time.monotonic()
        with ns.acquire(names(3), wait_s=0.4) as lease:
            assert len(lease) == 0
        assert 0.3 < time.monotonic() - began < 3


def test_waiting_needs_no_network() -> None:
    with LocalDaemon(SMALL) as daemon, Client(daemon.url, deadline_s=5, strict=True) as client:
        ns, keys = client.namespace(new_layout()), names(3)
        later = threading.Timer(0.2, lambda: ns.put(keys, payloads(keys)))
        later.start()
        with ns.acquire(keys, wait_s=10) as lease:
            assert len(lease) == 3
        with pytest.raises(errors.DeniedError, match="no network tier"):
            ns.handoff(keys)
        with pytest.raises(errors.MisuseError, match="wait_s"):
            ns.acquire(keys, wait_s=-1)


# -- what the network may do to us


@pytest.mark.parametrize("how", ["bit", "cut", "foreign", "swapped", "header"])
def test_an_object_altered_on_the_network_is_a_miss(folder: Path, how: str) -> None:
    layout, keys = new_layout(), names(6)
    with nodes(f"file://{folder}") as (a, b):
        a.namespace(layout).put(keys, payloads(keys))
        there(a, 6)
        file = object_of(folder, layout, keys[3])
        raw = bytearray(file.read_bytes())
        if how == "bit":
            raw[5000] ^= 1
        elif how == "cut":
            del raw[-4096:]
        elif how == "foreign":
            raw[:] = b"somebody else's" * 2000
        elif how == "swapped":
            raw[:] = object_of(folder, layout, keys[4]).read_bytes()
        else:
            raw[20] ^= 1
        file.write_bytes(raw)
        assert got(b.namespace(layout), keys) == 3
        assert counted(b, "read_torn_blocks") == 1
        eventually(lambda: not file.exists())
        assert got(a.namespace(layout), keys) == 6, "who has it is not concerned"


def test_blocks_that_rot_in_memory_are_not_sent(folder: Path) -> None:
    layout, keys = new_layout(), names(4)
    with nodes(f"file://{folder}", admission="twice") as (a, b):
        ours = a.namespace(layout)
        ours.put(keys, payloads(keys))
        with ours.reserve(names(1, "other")) as room:
            # A writer may reach every slot of its extent: that is how bytes in memory come to be others.
            whole = np.frombuffer(room.blocks[0].obj, np.uint8)
            raw = payload(keys[2])
            at = whole.tobytes().find(raw)
            assert at > 0
            whole[at] ^= 1
        assert ours.handoff(keys) == 2
        assert got(b.namespace(layout), keys) == 2
        assert got(ours, keys) == 2


@contextmanager
def stopped(made: Server) -> Iterator[None]:
    """The server hangs."""
    stop(made.process.pid)
    try:
        yield
    finally:
        made.signal(signal.SIGCONT)


def test_a_hanging_network_delays_requests_briefly_and_is_used_again() -> None:
    layout, keys, more = new_layout(), names(20), names(5, "more")
    with server() as made, nodes(made.url, timeout="500ms") as (a, b):
        ours = a.namespace(layout)
        ours.put(keys, payloads(keys))
        there(a, 20)
        with stopped(made):
            for _ in range(3):
                began = time.monotonic()
                assert got(ours, keys) == 20, "a hit here does not ask there"
                assert time.monotonic() - began < 0.4
                began = time.monotonic()
                b.namespace(layout).lookup(keys)
                assert time.monotonic() - began < 1.5
            eventually(lambda: not network(b)["usable"])
            began = time.monotonic()
            assert b.namespace(layout).lookup(keys) == 0
            assert got(b.namespace(layout), keys) == 0
            b.namespace(layout).put(more, payloads(more))
            assert time.monotonic() - began < 0.4
            assert "answer" in network(b)["problem"] or "time" in network(b)["problem"]
        eventually(lambda: network(b)["usable"], 12)
        assert got(b.namespace(layout), keys) == 20
        assert got(b.namespace(layout), more) == 5
        there(b, 5)


def test_a_restarted_network_is_used_again(tmp_path: Path) -> None:
    layout, keys = new_layout(), names(20)
    with server() as made, nodes(made.url) as (a, b):
        a.namespace(layout).put(keys, payloads(keys))
        there(a, 20)
        made.kill()
        for _ in range(4):
            assert b.namespace(layout).lookup(keys) == 0
            assert a.namespace(layout).lookup(names(1, "unknown")) == 0
            time.sleep(0.05)
            assert got(a.namespace(layout), keys) == 20
        eventually(lambda: not (network(a)["usable"] or network(b)["usable"]))
        with pytest.raises(errors.DeniedError, match="not on the network"):
            a.namespace(layout).invalidate(keys[10:])
        assert a.namespace(layout).lookup(keys) == 10
        made.start()
        eventually(lambda: network(a)["usable"] and network(b)["usable"], 12)
        assert a.namespace(layout).lookup(keys) == 10
        eventually(lambda: network(a)["owed_removals"] == 0)
        got(a.namespace(layout), keys)
        eventually(lambda: counted(a, "written_ok_blocks") == 30)
        assert got(b.namespace(layout), keys) == 10


def test_a_network_tier_that_cannot_be_opened_is_a_problem(tmp_path: Path) -> None:
    for url, said in (
        ("gopher://x", "names no known system"),
        (f"file://{tmp_path}/absent/deeper", "absent"),
    ):
        with LocalDaemon({**SMALL, "network": {"url": url}}) as daemon, Client(daemon.url) as client:
            status = client.status()
            problems = " ".join(status["problems"])
            if status["network"] is not None:
                eventually(lambda client=client: network(client)["problem"] != "not checked yet")
                problems += network(client)["problem"]
            assert said in problems
            ns, keys = client.namespace(new_layout()), names(3)
            ns.put(keys, payloads(keys))
            assert got(ns, keys) == 3


def test_a_password_stays_out_of_the_url() -> None:
    with pytest.raises(errors.ConfigError, match=r"network\.url contains a password"):
        LocalDaemon({"network": {"url": "redis://me:secret@host"}}).__enter__()


def test_two_daemons_have_no_problems(shared: str) -> None:
    with nodes(shared) as (a, b):
        layout, keys = new_layout(), names(3)
        a.namespace(layout).put(keys, payloads(keys))
        there(a, 3)
        out = room_for(3)
        with b.namespace(layout).acquire(keys) as lease:
            lease.copy_into(out)
        assert network(b)["problem"] == ""
        assert "Traceback" not in log_of(b.daemon) + log_of(a.daemon)  # type: ignore[attr-defined]
        assert layout.block_bytes == BLOCK


def test_a_slow_read_is_repeated_once() -> None:
    layout, keys = new_layout(), names(5)
    with server() as made, nodes(made.url, hedge_after="100ms", timeout="5s") as (a, b):
        a.namespace(layout).put(keys, payloads(keys))
        there(a, 5)
        ns = b.namespace(layout)
        assert ns.lookup(keys) == 5
        with stopped(made):
            threading.Timer(0.3, lambda: made.signal(signal.SIGCONT)).start()
            assert got(ns, keys) == 5
        assert counted(b, "hedged_blocks") == 5


def test_waiting_requests_of_a_connection_are_bounded() -> None:
    with LocalDaemon(SMALL) as daemon:
        with greeted(daemon) as (peer, number):
            for i in range(65):
                peer.send(m.Acquire(100 + i, number, 32, bytes(32), 5.0, 0.0, "", 5.0))
            denied = peer.receive()
            assert isinstance(denied, m.Denied)
            assert denied.id == 164
        with Client(daemon.url, strict=True) as client:
            eventually(lambda: client.status()["connections"] == 1)


@pytest.mark.parametrize("seed", range(3))
def test_no_wrong_bytes_between_two_nodes(folder: Path, seed: int) -> None:
    """Puts, gets, invalidations, hand-offs and kills, while files are altered, cut, swapped and removed."""
    dice = random.Random(seed)
    layout, prompts = new_layout(), [names(12, f"{seed} {i}") for i in range(6)]
    network_of = {"url": f"file://{folder}", **PATIENT}
    with ExitStack() as stack:
        settings = {**WITH_NVME, "network": network_of}
        daemons = [stack.enter_context(LocalDaemon(settings)) for _ in range(2)]
        clients = [stack.enter_context(Client(daemon.url, deadline_s=10)) for daemon in daemons]
        for client in clients:
            eventually(lambda client=client: network(client)["usable"])
        served = 0
        for _ in range(250):
            who = dice.randrange(2)
            ns, keys = clients[who].namespace(layout), dice.choice(prompts)
            first = dice.randrange(len(keys))
            match dice.choices(
                ["put", "get", "lookup", "invalidate", "handoff", "spoil", "kill"], [20, 50, 10, 6, 8, 20, 1]
            )[0]:
                case "put":
                    ns.put(keys, payloads(keys))
                case "get":
                    served += got(ns, keys)
                case "lookup":
                    assert ns.lookup(keys) <= len(keys)
                case "invalidate":
                    # What the other one is just sending may come behind it.
                    eventually(lambda who=who: not network(clients[1 - who])["going_blocks"])
                    ns.invalidate(keys[first:])
                    assert got(ns, keys) <= first
                case "handoff":
                    assert ns.handoff(keys, deadline_s=5) <= len(keys)
                case "spoil":
                    _spoil(dice, folder)
                case "kill":
                    daemons[who].kill()
                    daemons[who].start()
        assert served > 100
        for client in clients:
            for keys in prompts:
                got(client.namespace(layout), keys)
            eventually(lambda client=client: idle(client.status()))


def _spoil(dice: random.Random, folder: Path) -> None:
    files = sorted(folder.glob("kvstore-1/*/*/*"))
    if len(files) < 2:
        return
    file, other = dice.sample(files, 2)
    try:
        raw = bytearray(file.read_bytes())
        how = dice.randrange(4)
        if how == 0:
            file.unlink()
        elif how == 1 and len(raw) > 4096:
            raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
            file.write_bytes(raw)
        elif how == 2:
            file.write_bytes(other.read_bytes())
        else:
            file.write_bytes(raw[: dice.randrange(len(raw) + 1)])
    except OSError:
        return  # a daemon has taken it away


def test_blocks_with_a_failed_deletion_are_not_served() -> None:
    layout, keys = new_layout(), names(10)
    with server() as made, nodes(made.url, 1) as (a,):
        ns = a.namespace(layout)
        ns.put(keys, payloads(keys))
        there(a, 10)
        made.ask("ACL", "SETUSER", "default", "resetkeys", "%R~*", "~*health*")
        with pytest.raises(errors.DeniedError, match="not on the network"):
            ns.invalidate(keys[5:])
        assert network(a)["owed_removals"] == 5
        eventually(lambda: network(a)["usable"])
        assert ns.lookup(keys) == got(ns, keys) == 5
        assert made.ask("DBSIZE") == 10
        made.ask("ACL", "SETUSER", "default", "allkeys")
        eventually(lambda: network(a)["owed_removals"] == 0, 20)
        told = 2  # the epoch and the list of deleted keys
        eventually(lambda: made.ask("DBSIZE") == 5 + told)
        ns.put(keys[5:], payloads(keys[5:]), parent=keys[4])
        eventually(lambda: made.ask("DBSIZE") == 10 + told)
