"""A tenant that attacks: it speaks the wire by hand, has its own processes, and knows how kvstore is built.

Whatever it tries ends as a refusal or a miss; nobody gets another's bytes, and the daemon lives on.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Client, arena
from kvstore.errors import DeniedError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.types import SLOT_RECORD, Geometry, Layout, slot_bytes
from kvstore.wire import messages as m
from kvstore.wire.frames import pack
from tests.daemons import (
    BLOCK,
    Peer,
    eventually,
    got,
    idle,
    names,
    new_layout,
    payload,
    payloads,
    room_for,
    tier,
)
from tests.tenants import (
    ATTACKER,
    FRIEND,
    NOBODY,
    VICTIM,
    Member,
    TenantDaemon,
    acting_as,
    as_user,
    found_in_memory,
    found_on_disk,
    needs_root,
    peer_of,
    process_of,
)

pytestmark = needs_root

SETTINGS = {
    "dram": {"limit": "12MiB", "huge_pages": False},
    "nvme": {"limit": "48MiB", "io_threads": 2},
    "scrub": {"rate": 0},
}
"""Six extents of DRAM, with numbers of one digit; an extent has room for 127 blocks."""
READER_TOKEN = "kvs_reader"
TENANTS = f"""
[tenants.victim]
uids = [{VICTIM}]
role = "admin"
[[tenants.victim.tokens]]
hash = "sha256:385952345086bd751d11503e83f16c8aa1bec9d9bcbd6e92b622355d39626bc9"
role = "read"
[tenants.attacker]
uids = [{ATTACKER}]
role = "admin"
[tenants.attacker.dram]
limit = "4MiB"
[tenants.attacker.nvme]
limit = "8MiB"
[tenants.friend]
uids = [{FRIEND}]
"""
KEYS = names(20, "secret")
FAR = (10, 77, 999, (1 << 32) - 1, (1 << 63) - 1)


@pytest.fixture(scope="module")
def daemon() -> Iterator[TenantDaemon]:
    with TenantDaemon(SETTINGS, TENANTS) as served:
        yield served


@pytest.fixture
def victim(daemon: TenantDaemon) -> Iterator[Member]:
    with Member(daemon, VICTIM) as member:
        yield member


@pytest.fixture
def attacker(daemon: TenantDaemon) -> Iterator[Peer]:
    with peer_of(daemon, ATTACKER) as peer:
        yield peer


@pytest.fixture
def secret(victim: Member) -> Iterator[Any]:
    """A namespace of the victim's that holds `KEYS`; they are still there, and right, in the end."""
    ns = victim.namespace(new_layout())
    assert ns.put(KEYS, payloads(KEYS)).stored == len(KEYS)
    yield ns
    assert got(ns, KEYS) == len(KEYS)


def keyed(kind: Callable[..., Any], namespace: int, *more: Any, request: int = 7) -> Any:
    """A request about `KEYS`."""
    return kind(request, namespace, len(KEYS[0]), b"".join(KEYS), *more)


def about(namespace: int) -> list[Any]:
    """Every request about a namespace."""
    return [
        keyed(m.Lookup, namespace, 0.0, 0.0),
        keyed(m.Contains, namespace, 0.0),
        keyed(m.Acquire, namespace, 0.0, 0.0),
        keyed(m.Reserve, namespace, b"", 0.0),
        keyed(m.Prefetch, namespace),
        keyed(m.Pin, namespace, 60.0),
        keyed(m.Unpin, namespace),
        keyed(m.Invalidate, namespace),
        keyed(m.Suspect, namespace),
        m.Publish(7, namespace, ("attacker",)),
        m.Forget(7, namespace, "", ""),
    ]


_READS = m.Lookup | m.Contains | m.Acquire | m.Prefetch | m.Suspect
"""Requests that readers may send."""


def raw(peer: Peer, message: Any) -> bytes:
    """The one frame that answers, as it is on the wire."""
    peer.send(message)
    data = b""
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "little"):
        more = peer.sock.recv(1 << 16)
        assert more, "the daemon hung up"
        data += more
    return data


def lives(daemon: LocalDaemon) -> None:
    with Member(daemon, 0) as operator:
        assert operator.status()["pid"] == daemon.pid


def grown(daemon: LocalDaemon) -> None:
    """Waits until all of DRAM is there."""
    with Member(daemon, 0) as operator:
        eventually(lambda: (t := tier(operator.status(), "dram"))["capacity_bytes"] == t["limit_bytes"])


def written(daemon: LocalDaemon) -> None:
    """Waits until nothing that is stored is still on its way to NVMe."""
    with Member(daemon, 0) as operator:
        eventually(lambda: not operator.status()["copies_under_way"])


def extents_of(peer: Peer, namespace: int, keys: list[bytes] = KEYS) -> set[int]:
    """Where blocks are, as a reader is told."""
    granted = peer.ask(m.Acquire(7, namespace, len(keys[0]), b"".join(keys), 5.0, 0.0))
    assert isinstance(granted, m.Granted), granted
    peer.send(m.Release(granted.lease))
    return set((np.frombuffer(granted.slots, SLOT_RECORD)["place"] >> np.uint64(32)).astype(int).tolist())


# -- numbers that are guessed


def test_no_extent_of_others_can_be_mapped(daemon: TenantDaemon, secret: Any, attacker: Peer) -> None:
    with peer_of(daemon, VICTIM) as own:
        theirs = extents_of(own, own.open(secret.layout).namespace)
    with peer_of(daemon, ATTACKER) as fresh:
        mine = fresh.open(new_layout()).namespace
        reserved = fresh.ask(keyed(m.Reserve, mine, b"", 5.0))
        own_extents = set((np.frombuffer(reserved.slots, SLOT_RECORD)["place"] >> np.uint64(32)).tolist())
        assert not theirs & own_extents
        for number in [*range(10), *FAR]:
            for writable in (False, True):
                answer = attacker.ask(m.Map(7, number, writable))
                if number in own_extents:
                    assert isinstance(answer, m.Mapped)
                    with mmap.mmap(attacker.fds[-1], answer.extent_bytes, prot=mmap.PROT_READ) as view:
                        assert not any(view.find(payload(key)[:64]) >= 0 for key in KEYS)
                else:
                    assert isinstance(answer, m.Denied), number
                    assert not len(attacker.fds) > 2
    # What is another's, what is nobody's and what is not there: one answer.
    wanted = raw(attacker, m.Map(7, 9, False))
    for number in {*range(9)} - own_extents:
        there = raw(attacker, m.Map(7, number, False))
        assert there.replace(b"extent %d" % number, b"extent 9") == wanted


def test_no_namespace_is_named_by_a_number_of_others(attacker: Peer, secret: Any) -> None:
    for number in [*range(1, 200), *FAR]:
        for message in about(number):
            answer = attacker.ask(message)
            assert answer == m.Denied(7, f"unknown namespace {number}", answer.hint), message
    assert attacker.ask(m.Forget(7, 0, secret.layout.model, "")) == m.Value(7, 0)


def test_leases_of_others_stay_theirs(daemon: TenantDaemon, attacker: Peer, secret: Any) -> None:
    late = names(5, "late")
    with secret.acquire(KEYS) as lease, secret.reserve(late) as room:
        held = room.lease
        for number in range(held + 20):
            attacker.send(m.Release(number), m.Abort(number))
        here, nowhere = (
            raw(attacker, m.Commit(7, number, b"\0" * 40, b"\1" * 5))
            for number in (held, 10 ** len(str(held)) - 1)
        )
        assert here.replace(str(held).encode(), b"9" * len(str(held))) == nowhere
        with Member(daemon, 0) as operator:
            status = operator.status()
        assert (status["leases"], status["reservations"]) == (1, 1)
        for i, key in enumerate(late):
            room.fill(i, payload(key))
        assert room.commit().stored == len(late)
        assert [bytes(view) for view in lease.blocks] == [payload(key) for key in KEYS]
    assert got(secret, late) == len(late)


def test_numbers_of_leases_tell_nothing_of_others(daemon: TenantDaemon, attacker: Peer, secret: Any) -> None:
    space = attacker.open(new_layout()).namespace
    numbers = []
    for _ in range(3):
        room = attacker.ask(keyed(m.Reserve, space, b"", 1.0))
        numbers.append(room.lease)
        attacker.send(m.Abort(room.lease))
        for _ in range(5):
            secret.acquire(KEYS).release()
    assert [n - numbers[0] for n in numbers] == [0, 1, 2]


def test_names_of_others_open_nothing(
    daemon: TenantDaemon, attacker: Peer, secret: Any, victim: Member
) -> None:
    layout = secret.layout.to_map()
    wanted = raw(attacker, m.Open(7, new_layout().to_map(), "victim", 0.0))

    def refused() -> None:
        for what in (layout, new_layout().to_map()):
            for owner in ("victim", "friend", "nobody", "default", "no such name"):
                assert raw(attacker, m.Open(7, what, owner, 0.0)) == wanted

    refused()
    assert secret.publish(["friend"])
    refused()
    assert secret.publish(["friend", "attacker"])
    opened = attacker.ask(m.Open(7, layout, "victim", 0.0))
    assert isinstance(opened, m.Opened)
    assert len(extents_of(attacker, opened.namespace)) > 0
    assert secret.publish(["friend"])
    refused()
    for message in about(opened.namespace):
        assert raw(attacker, message) == wanted, message
    assert secret.publish([])
    refused()
    assert secret.layout.fingerprint("victim") != attacker.open(secret.layout).fingerprint


def test_readers_can_change_nothing(daemon: TenantDaemon, secret: Any) -> None:
    assert secret.publish(["attacker"])
    with peer_of(daemon, ATTACKER) as peer:
        space = peer.ask(m.Open(7, secret.layout.to_map(), "victim", 0.0)).namespace
        for extent in extents_of(peer, space):
            assert isinstance(peer.ask(m.Map(7, extent, True)), m.Denied)
            assert isinstance(peer.ask(m.Map(7, extent, False)), m.Mapped)
        for message in about(space):
            if not isinstance(message, _READS):
                assert isinstance(peer.ask(message), m.Denied), message
        assert peer.ask(keyed(m.Suspect, space)) == m.Value(7, 0)
    assert secret.publish([])


def test_only_ones_own_tenant_can_be_deleted(attacker: Peer, secret: Any) -> None:
    wanted = raw(attacker, m.DeleteTenant(7, "nobody"))
    for name in ("victim", "friend", "default", "no such name", ""):
        assert raw(attacker, m.DeleteTenant(7, name)) == wanted


def test_status_shows_nothing_of_others(attacker: Peer, secret: Any) -> None:
    report = attacker.ask(m.Status(7))
    assert [t["name"] for t in report.status["tenants"]] == ["attacker"]
    assert set(report.status) == {"version", "connections", "tenants"}
    assert report.status["connections"] == 1


def test_replayed_messages_of_another_connection_have_no_effect(
    daemon: TenantDaemon, victim: Member, attacker: Peer
) -> None:
    sent: list[bytes] = []
    send = socket.socket.send

    def noted(sock: socket.socket, data: Any, *flags: int) -> int:
        n = send(sock, data, *flags)
        sent.append(bytes(data[:n]))
        return n

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "send", noted)
        with Member(daemon, VICTIM) as talking:
            ns = talking.namespace(new_layout())
            ns.put(KEYS, payloads(KEYS))
            assert got(ns, KEYS) == len(KEYS)
            ns.pin(KEYS, 60)
    assert len(sent) > 5
    heard = []
    for message in sent[1:]:
        attacker.send(message)
    attacker.send(m.Ping(99))
    while (answer := attacker.receive()) != m.Value(99, 0):
        heard.append(answer)
    for answer in heard:
        assert not (isinstance(answer, m.Granted) and answer.slots), answer
        assert not isinstance(answer, m.Value | m.Found) or answer.value == 0
    assert got(victim.namespace(ns.layout), KEYS) == len(KEYS)


# -- what the kernel grants


def attempts_on(pid: int) -> dict[str, str]:
    """What somebody else gets of a process, its descriptors and its memory: why not, or "got it"."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(*args: int) -> None:
        if libc.syscall(*(ctypes.c_long(a) for a in args)) < 0:
            raise OSError(ctypes.get_errno(), "")

    def peek(path: str) -> None:
        open(path, "rb").close()

    def peek_at(pid: int) -> None:
        into = ctypes.create_string_buffer(8)
        part = (ctypes.c_void_p * 2)(ctypes.addressof(into), 8)
        if (
            libc.process_vm_readv(pid, part, ctypes.c_ulong(1), part, ctypes.c_ulong(1), ctypes.c_ulong(0))
            < 0
        ):
            raise OSError(ctypes.get_errno(), "")

    tries: dict[str, Callable[[], object]] = {
        "mem": lambda: peek(f"/proc/{pid}/mem"),
        "maps": lambda: peek(f"/proc/{pid}/maps"),
        "fd": lambda: os.listdir(f"/proc/{pid}/fd"),
        "map_files": lambda: os.listdir(f"/proc/{pid}/map_files"),
        "environ": lambda: peek(f"/proc/{pid}/environ"),
        "ptrace": lambda: call(101, 0x4206, pid, 0, 0),
        "kill": lambda: os.kill(pid, 0),
        "pidfd_getfd": lambda: call(438, os.pidfd_open(pid), 3, 0),
        "process_vm_readv": lambda: peek_at(pid),
    }
    tries |= {f"fd {n}": lambda n=n: peek(f"/proc/{pid}/fd/{n}") for n in range(64)}  # type: ignore[misc]
    told = {}
    for what, attempt in tries.items():
        try:
            attempt()
            told[what] = "got it"
        except OSError as error:
            told[what] = errno.errorcode[error.errno or 0]
    return told


def test_processes_of_others_are_closed_books(daemon: TenantDaemon, secret: Any) -> None:
    def hold() -> Any:
        lease = Client(daemon.url, deadline_s=10).namespace(secret.layout).acquire(KEYS)
        return lease.blocks or None

    with process_of(VICTIM, hold) as pid:
        assert "memfd" in Path(f"/proc/{pid}/maps").read_text()
        for target in (pid, daemon.pid):
            told = as_user(ATTACKER, lambda target=target: attempts_on(target))
            assert set(told.values()) <= {"EACCES", "EPERM"}, told
        assert "got it" in as_user(VICTIM, lambda: attempts_on(pid)).values()


def misuses_of(fd: int, nbytes: int) -> dict[str, str]:
    """What can be done with a descriptor that is for reading: why not, or "done"."""
    libc = ctypes.CDLL(None, use_errno=True)

    def reopen(flags: int) -> None:
        os.close(os.open(f"/proc/self/fd/{fd}", flags))

    def unprotect() -> None:
        libc.mmap.restype = ctypes.c_void_p
        at = libc.mmap(None, ctypes.c_size_t(nbytes), 1, 1, fd, ctypes.c_long(0))
        if libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(nbytes), 3):
            raise OSError(ctypes.get_errno(), "")

    def punch() -> None:
        if libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(nbytes)):
            raise OSError(ctypes.get_errno(), "")

    tries: dict[str, Callable[[], object]] = {
        "reopen for writing": lambda: reopen(os.O_RDWR),
        "reopen for appending": lambda: reopen(os.O_WRONLY | os.O_APPEND),
        "truncate by name": lambda: os.truncate(f"/proc/self/fd/{fd}", 0),
        "chmod": lambda: os.fchmod(fd, 0o666),
        "chown": lambda: os.fchown(fd, os.getuid(), -1),
        "write": lambda: os.pwrite(fd, b"x", 0),
        "truncate": lambda: os.ftruncate(fd, 0),
        "map writable": lambda: mmap.mmap(fd, nbytes),
        "mprotect": unprotect,
        "punch": punch,
        "seal": lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    }
    told = {}
    for what, attempt in tries.items():
        try:
            attempt()
            told[what] = "done"
        except OSError as error:
            told[what] = errno.errorcode[error.errno or 0]
    return told


@contextmanager
def descriptor_of(peer: Peer, extent: int, writable: bool) -> Iterator[tuple[int, int]]:
    mapped = peer.ask(m.Map(7, extent, writable))
    assert isinstance(mapped, m.Mapped), mapped
    yield peer.fds[-1], mapped.extent_bytes


def test_a_readers_descriptor_can_never_be_written(daemon: TenantDaemon, secret: Any) -> None:
    assert secret.publish(["friend"])
    with peer_of(daemon, FRIEND) as peer:
        space = peer.ask(m.Open(7, secret.layout.to_map(), "victim", 0.0)).namespace
        extent = min(extents_of(peer, space))
        with descriptor_of(peer, extent, writable=False) as (fd, nbytes):
            told = as_user(FRIEND, lambda: misuses_of(fd, nbytes))
            assert set(told.values()) <= {"EACCES", "EPERM", "EBADF", "EINVAL"}, told
            own = os.memfd_create("own")
            os.truncate(own, nbytes)
            os.fchown(own, FRIEND, FRIEND)
            # Who may reopen, can: nothing but the owner of the memory is in the way above.
            as_user(FRIEND, lambda: os.open(f"/proc/self/fd/{own}", os.O_RDWR))
            os.close(own)
    assert secret.publish([])


def test_a_writer_cannot_close_its_extent_to_the_daemon(daemon: TenantDaemon, attacker: Peer) -> None:
    space = attacker.open(new_layout()).namespace
    reserved = attacker.ask(keyed(m.Reserve, space, b"", 5.0))
    extent = int(np.frombuffer(reserved.slots, SLOT_RECORD)["place"][0] >> np.uint64(32))
    with descriptor_of(attacker, extent, writable=True) as (fd, _):
        # A sealed extent could be neither emptied nor mapped by the next daemon.
        for seal in (fcntl.F_SEAL_WRITE, 0x10, fcntl.F_SEAL_SEAL):
            with pytest.raises(PermissionError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)


def test_overwriting_own_extents_harms_no_other_tenant(daemon: TenantDaemon, secret: Any) -> None:
    with Member(daemon, ATTACKER) as member, peer_of(daemon, ATTACKER) as peer:
        ns = member.namespace(new_layout())
        assert ns.put(KEYS, payloads(KEYS)).stored == len(KEYS)
        written(daemon)
        extent, *_ = extents_of(peer, peer.open(ns.layout).namespace)
        with descriptor_of(peer, extent, writable=True) as (fd, nbytes), mmap.mmap(fd, nbytes) as view:
            view[:] = b"\xff" * nbytes
            assert got(secret, KEYS) == len(KEYS)
            # Its own blocks are bad now, which it is told as misses until they are back from NVMe.
            eventually(lambda: got(ns, KEYS) == len(KEYS))
    lives(daemon)


# -- headers and labels that are forged


def forge(view: mmap.mmap, layout: Layout, owner: str, keys: list[bytes], salt: int) -> None:
    """Fills an extent with readable headers that name blocks of somebody's namespace, and bytes to fit."""
    geometry = Geometry(len(view), slot_bytes(layout.block_bytes), table=True)
    table = np.frombuffer(view, arena.HEADER, geometry.slots, 4096)
    fingerprint = layout.fingerprint(owner)
    for i in range(geometry.slots):
        key = keys[i % len(keys)]
        data = payload(key, layout.block_bytes, salt)
        at = geometry.payload_offset + i * geometry.slot_bytes
        view[at : at + len(data)] = data
        table["namespace"][i] = np.frombuffer(fingerprint, np.uint8)
        table["key"][i] = np.frombuffer(key.ljust(64, b"\0"), np.uint8)
        table["parent"][i] = np.frombuffer(keys[(i + 1) % len(keys)].ljust(64, b"\0"), np.uint8)
        table["key_bytes"][i] = table["parent_bytes"][i] = len(key)
        table["length"][i] = len(data)
        table["checksum"][i] = arena.checksum(data, arena.seed(fingerprint, key, len(data)))
        table["magic"][i] = arena.MAGIC
        table["stamp"][i] = 0xFFFFFF00 + i % 200
        table["version"][i] = table["last"][i] = 1 + i
        table["expires"][i] = (0.0, np.nan, np.inf, -1.0, 1e300)[i % 5]
    del table


@pytest.mark.parametrize("nvme", [False, True], ids=["dram", "dram and nvme"])
def test_forged_headers_restore_no_blocks_of_others(nvme: bool) -> None:
    settings = {name: section for name, section in SETTINGS.items() if nvme or name != "nvme"}
    layout, absent = new_layout(), names(10, "absent")
    with TenantDaemon(settings, TENANTS, supervised=True) as daemon:
        with Member(daemon, VICTIM) as member:
            assert member.namespace(layout).put(KEYS, payloads(KEYS)).stored == len(KEYS)
        with Member(daemon, ATTACKER) as member, peer_of(daemon, ATTACKER) as peer:
            ns = member.namespace(layout)
            assert ns.put(KEYS, payloads(KEYS, salt=6)).stored == len(KEYS)
            extent, *_ = extents_of(peer, peer.open(layout).namespace)
            with Member(daemon, 0) as operator:
                eventually(lambda: idle(operator.status()))
            with descriptor_of(peer, extent, writable=True) as (fd, nbytes), mmap.mmap(fd, nbytes) as view:
                forge(view, layout, "victim", [*KEYS, *absent], salt=66)
                # It says that it is the victim's too.
                np.frombuffer(view, arena.LABEL, 1)["number"][:] = 0
                daemon.kill()
                daemon.start()
        with Member(daemon, VICTIM) as member:
            ns = member.namespace(layout)
            assert got(ns, KEYS) == len(KEYS)
            for key in absent:
                assert ns.lookup([key]) == got(ns, [key]) == 0
            assert ns.put(absent, payloads(absent)).stored == len(absent)
            assert got(ns, absent) == len(absent)
        with Member(daemon, ATTACKER) as member:
            ns = member.namespace(layout)
            assert got(ns, KEYS, salt=6) in (0, len(KEYS))
        lives(daemon)


def test_noise_in_ones_own_headers_does_not_keep_the_daemon_from_starting() -> None:
    layout, dice = new_layout(), np.random.default_rng(7)
    with TenantDaemon(SETTINGS, TENANTS, supervised=True) as daemon:
        with Member(daemon, VICTIM) as member:
            assert member.namespace(layout).put(KEYS, payloads(KEYS)).stored == len(KEYS)
        for noise in range(4):
            with Member(daemon, ATTACKER) as member, peer_of(daemon, ATTACKER) as peer:
                ns = member.namespace(new_layout())
                assert ns.put(KEYS, payloads(KEYS)).stored == len(KEYS)
                extent, *_ = extents_of(peer, peer.open(ns.layout).namespace)
                with (
                    descriptor_of(peer, extent, writable=True) as (fd, nbytes),
                    mmap.mmap(fd, nbytes) as view,
                ):
                    head = Geometry(nbytes, BLOCK, table=True).payload_offset
                    if noise < 2:
                        view[4096 if noise else 0 : head] = dice.bytes(head - (4096 if noise else 0))
                    else:
                        # Readable in form: each names another namespace, or itself as its parent.
                        table = np.frombuffer(view, arena.HEADER, 100, 4096)
                        table["magic"], table["key_bytes"], table["parent_bytes"] = arena.MAGIC, 64, 64
                        table["version"] = table["last"] = np.arange(1, 101) << (24 if noise == 2 else 0)
                        table["length"] = BLOCK - np.arange(100) * (noise == 2)
                        table["namespace"] = dice.integers(0, 256, (100, 16))
                        table["key"] = dice.integers(0, 256, (100, 64))
                        table["parent"], table["stamp"] = table["key"], 0xFFFFFFFF
                        table["expires"] = np.nan
                        del table
                    daemon.kill()
                    daemon.start()
            with Member(daemon, VICTIM) as member:
                assert got(member.namespace(layout), KEYS) == len(KEYS)
        lives(daemon)


# -- quotas


def usage(operator: Member, name: str) -> dict[str, dict[str, Any]]:
    [found] = [t for t in operator.status()["tenants"] if t["name"] == name]
    return {t["name"]: t for t in found["tiers"]}


def test_a_limit_holds_for_all_puts_of_a_tenant(daemon: TenantDaemon, secret: Any) -> None:
    with ExitStack() as stack:
        operator = stack.enter_context(Member(daemon, 0))
        members = [stack.enter_context(Member(daemon, ATTACKER)) for _ in range(4)]
        for turn, size in enumerate((BLOCK, 4096, 100_000, 1 << 19, 1, 300_003) * 2):
            rooms = []
            for i, member in enumerate(members):
                ns = member.namespace(new_layout(size))
                keys = names(min(100, (3 << 20) // size), f"{turn} {i}")
                ns.put(keys, payloads(keys, size))
                rooms.append(ns.reserve(names(50, f"held {turn} {i}")))
                used = usage(operator, "attacker")
                assert used["dram"]["used_bytes"] <= 4 << 20
                assert used["nvme"]["used_bytes"] <= 8 << 20
            for room in rooms:
                room.abort()
    assert got(secret, KEYS) == len(KEYS)


def test_namespaces_without_end_are_closed_and_others_do_not_notice(
    daemon: TenantDaemon, secret: Any
) -> None:
    with peer_of(daemon, ATTACKER) as peer, Member(daemon, VICTIM) as member:
        for at in range(0, 10_000, 1000):
            peer.send(
                b"".join(
                    pack(m.Open(7, Layout(f"n{n}", BLOCK).to_map(), "", 0.0)) for n in range(at, at + 1000)
                )
            )
            for _ in range(1000):
                assert isinstance(peer.receive(), m.Opened), "the oldest one without blocks makes place"
        assert got(secret, KEYS) == len(KEYS), "the victim's are not closed for that"
        assert member.namespace(new_layout()).put(KEYS, payloads(KEYS)).stored == len(KEYS)
        # Forgetting them all, again and again, uses up neither the numbers that all share nor the daemon.
        for _ in range(100):
            peer.send(m.Forget(7, 0, "", ""))
        for _ in range(100):
            assert isinstance(peer.receive(), m.Value | m.Denied | m.Busy)
        assert member.namespace(new_layout()).put(KEYS, payloads(KEYS)).stored == len(KEYS)
        member.namespace(Layout("n1", BLOCK)).lookup(KEYS)
    lives(daemon)


# -- memory that changes hands


def test_a_reassigned_extent_shows_its_old_owner_nothing() -> None:
    settings = {"dram": {"limit": "6MiB", "huge_pages": False}}
    with (
        TenantDaemon(settings, TENANTS) as daemon,
        Member(daemon, ATTACKER) as member,
        peer_of(daemon, ATTACKER) as peer,
    ):
        ns = member.namespace(new_layout())
        keys = names(200, "mine")
        for at in (0, 100):
            ns.put(keys[at : at + 100], payloads(keys[at : at + 100], salt=9))
        held = extents_of(peer, peer.open(ns.layout).namespace, keys)
        assert len(held) == 2
        views = []
        for extent in held:
            with descriptor_of(peer, extent, writable=True) as (fd, nbytes):
                views.append(mmap.mmap(fd, nbytes))
        assert member.delete_tenant("attacker") == 200
        for view in views:
            assert not any(view[:])
        with Member(daemon, VICTIM) as owner:
            theirs = owner.namespace(new_layout())
            many = names(300, "theirs")
            for at in range(0, 300, 100):
                part = many[at : at + 100]
                assert theirs.put(part, payloads(part)).stored == 100
            for view in views:
                assert not any(view[:])
                view[:] = b"\xee" * len(view)
            assert got(theirs, many) == 300
        for extent in range(10):
            assert isinstance(peer.ask(m.Map(7, extent, False)), m.Denied)


@pytest.mark.parametrize("nvme", [False, True], ids=["dram", "dram and nvme"])
def test_an_unpublished_namespace_cannot_be_read(nvme: bool) -> None:
    settings = {name: section for name, section in SETTINGS.items() if nvme or name != "nvme"}
    with TenantDaemon(settings, TENANTS) as daemon, Member(daemon, VICTIM) as member:
        ns = member.namespace(new_layout())
        grown(daemon)
        assert ns.put(KEYS, payloads(KEYS)).stored == len(KEYS)
        assert ns.publish(["friend"])
        with Member(daemon, FRIEND) as reader, peer_of(daemon, FRIEND) as peer:
            assert got(reader.namespace(ns.layout, owner="victim"), KEYS) == len(KEYS)
            space = peer.ask(m.Open(7, ns.layout.to_map(), "victim", 0.0)).namespace
            shared = extents_of(peer, space)
            views = []
            for extent in shared:
                with descriptor_of(peer, extent, writable=False) as (fd, nbytes):
                    views.append(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))
            assert ns.publish([])
            new = names(300, "afterwards")
            for at in range(0, 300, 100):
                ns.put(new[at : at + 100], payloads(new[at : at + 100]))
            assert got(ns, KEYS) == len(KEYS)
            assert got(ns, new[:100]) == 100
            for view in views:
                assert not any(view.find(payload(key)[:64]) >= 0 for key in new)
            for extent in range(10):
                assert isinstance(peer.ask(m.Map(7, extent, False)), m.Denied), extent
            assert isinstance(peer.ask(keyed(m.Acquire, space, 1.0, 0.0)), m.Denied)
            with pytest.raises(DeniedError):
                reader.namespace(ns.layout, owner="victim").lookup(KEYS)


# -- roles


def test_readers_of_ones_own_tenant_write_nothing(daemon: TenantDaemon, secret: Any) -> None:
    with peer_of(daemon, NOBODY, READER_TOKEN) as peer:
        space = peer.open(secret.layout).namespace
        for extent in extents_of(peer, space):
            assert isinstance(peer.ask(m.Map(7, extent, True)), m.Denied)
            assert isinstance(peer.ask(m.Map(7, extent, False)), m.Mapped)
        wanted = "this peer's role is read"
        for message in [*about(space), m.Commit(7, 1, b"\0" * 8, b"\1"), m.DeleteTenant(7, "victim")]:
            if not isinstance(message, _READS):
                answer = peer.ask(message)
                assert isinstance(answer, m.Denied), message
                assert answer.why.startswith(wanted)


def test_unknown_peers_are_refused(daemon: TenantDaemon) -> None:
    told = set()
    for token in ("", "kvs_wrong", "x" * 1000):
        with acting_as(NOBODY), Peer(daemon.socket) as peer:
            told.add(raw(peer, m.Hello(m.MAGIC, m.VERSION, token)))
    assert len(told) == 1


# -- a tenant's end


def marked(mark: bytes, n: int) -> np.ndarray:
    return np.frombuffer(mark * (BLOCK // len(mark)) * n, np.uint8).reshape(n, BLOCK)


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
def test_nothing_is_left_of_a_deleted_tenant(encrypt: bool, tmp_path: Path) -> None:
    mark, layout = os.urandom(32), new_layout()
    key_file = tmp_path / "key"
    key_file.write_text(os.urandom(32).hex())
    key_file.chmod(0o600)
    tenants = TENANTS.replace('role = "admin"', 'role = "admin"\nencrypt = true') if encrypt else TENANTS
    tenants += f'\n[encryption]\nkey_file = "{key_file}"\n'
    with TenantDaemon(SETTINGS, tenants) as daemon, Member(daemon, 0) as operator:
        with Member(daemon, VICTIM) as member, Member(daemon, FRIEND) as other:
            ns = member.namespace(layout)
            keys = names(600, "marked")
            for at in range(0, 600, 100):
                assert ns.put(keys[at : at + 100], marked(mark, 100)).stored == 100
            kept = other.namespace(layout)
            assert kept.put(KEYS, payloads(KEYS)).stored == len(KEYS)
            eventually(lambda: idle(operator.status()) and operator.status())
            out = room_for(100)
            learned = daemon.folder / "nvme" / "learned.npz"
            learned.write_bytes(b"of the life before, victim's too")
            assert ns.get(keys[:100], out) == 100
            assert np.array_equal(out, marked(mark, 100))
            assert bool(found_on_disk(daemon, mark)) is not encrypt
            assert found_in_memory(daemon.pid, mark)
            assert operator.delete_tenant("victim") > 0
            assert not found_on_disk(daemon, mark)
            assert not found_in_memory(daemon.pid, mark)
            assert not learned.exists()
            assert ns.lookup(keys) == 0
            assert got(kept, KEYS) == len(KEYS)
            used = usage(operator, "victim")
            assert used["dram"]["used_bytes"] == used["nvme"]["used_bytes"] == 0
            # It may go on, with nothing of what was.
            assert ns.put(KEYS, payloads(KEYS, salt=2)).stored == len(KEYS)
            assert got(ns, KEYS, salt=2) == len(KEYS)
        daemon.restart()
        assert not found_on_disk(daemon, mark)
        with Member(daemon, VICTIM) as member, Member(daemon, FRIEND) as other:
            assert member.namespace(layout).lookup(keys) == 0
            assert got(member.namespace(layout), KEYS, salt=2) == len(KEYS)
            assert got(other.namespace(layout), KEYS) == len(KEYS)
