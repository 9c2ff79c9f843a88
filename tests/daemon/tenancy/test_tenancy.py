"""What tenants are promised, with real daemons: publication, ends of blocks, quotas, tokens, and upgrades."""

from __future__ import annotations

import hashlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import numpy as np
import pytest

from kvstore import Client
from kvstore.errors import DeniedError, UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.types import Layout
from kvstore.wire import messages as m
from kvstore.wire.frames import Frames, pack
from tests.daemons import (
    BLOCK,
    eventually,
    got,
    idle,
    names,
    new_layout,
    payload,
    payloads,
    room_for,
)
from tests.tenants import (
    FRIEND,
    NOBODY,
    VICTIM,
    Member,
    TenantDaemon,
    needs_root,
    peer_of,
)
from tests.tiers.nvme.old_format import to_format_4

pytestmark = needs_root

OWNER, READER = VICTIM, FRIEND
DRAM = {"dram": {"limit": "12MiB", "huge_pages": False}, "scrub": {"rate": 0}}
BOTH = {**DRAM, "nvme": {"limit": "48MiB", "io_threads": 2}}
"""Six extents of DRAM with 127 blocks each."""
TENANTS = f"""
[tenants.owner]
uids = [{OWNER}]
role = "admin"
[tenants.reader]
uids = [{READER}]
role = "admin"
"""
KEYS = names(20)
SLOT = 16 << 10


@pytest.fixture(params=[DRAM, BOTH], ids=["dram", "dram and nvme"])
def daemon(request: pytest.FixtureRequest) -> Iterator[TenantDaemon]:
    with TenantDaemon(request.param, TENANTS) as served:
        quiet(served)
        yield served


@pytest.fixture
def both(daemon: TenantDaemon) -> Iterator[tuple[Member, Member]]:
    with Member(daemon, OWNER) as owner, Member(daemon, READER) as reader:
        yield owner, reader


def quiet(daemon: LocalDaemon) -> dict[str, Any]:
    """Status once all memory is there and nothing moves."""
    with Member(daemon, 0) as operator:

        def look() -> Any:
            status = operator.status()
            grown = all(t["capacity_bytes"] == t["limit_bytes"] for t in status["tiers"])
            return grown and idle(status) and status

        return dict(eventually(look))


def fill(ns: Any, n: int, prefix: str = "fill") -> list[bytes]:
    """Puts n blocks, in chains of 100."""
    keys = names(n, prefix)
    for at in range(0, n, 100):
        ns.put(keys[at : at + 100], payloads(keys[at : at + 100], ns.layout.block_bytes))
    return keys


def used(daemon: LocalDaemon, name: str) -> dict[str, int]:
    with Member(daemon, 0) as operator:
        [found] = [t for t in operator.status()["tenants"] if t["name"] == name]
    return {t["name"]: t["used_bytes"] for t in found["tiers"]}


# -- publication


def test_a_published_namespace_is_read_until_it_is_unpublished(
    daemon: TenantDaemon, both: tuple[Member, Member]
) -> None:
    owner, reader = both
    ns = owner.namespace(new_layout())
    shared = reader.namespace(ns.layout, owner="owner")
    assert ns.put(KEYS[:10], payloads(KEYS[:10])).stored == 10
    with pytest.raises(DeniedError, match="not published"):
        shared.lookup(KEYS)
    assert ns.publish(["reader"])
    assert got(shared, KEYS) == 10
    assert ns.put(KEYS[10:], payloads(KEYS[10:]), parent=KEYS[9]).stored == 10
    assert got(shared, KEYS) == shared.lookup(KEYS) == 20
    with shared.acquire(KEYS) as lease:
        assert lease.verify() == 20
        assert ns.publish([])
        # What was granted stays in place until it is given back, if perhaps no longer as theirs.
        assert [bytes(view) for view in lease.blocks] == [payload(key) for key in KEYS]
    with pytest.raises(DeniedError, match="not published"):
        got(shared, KEYS)
    assert got(ns, KEYS) == 20
    assert ns.publish(["reader"])
    assert got(shared, KEYS) == 20
    # One's own of the same layout is something else.
    own = reader.namespace(ns.layout)
    assert own.put(KEYS, payloads(KEYS, salt=3)).stored == 20
    assert got(own, KEYS, salt=3) == got(shared, KEYS) == 20


def test_publication_survives_a_restart(tmp_path: Path) -> None:
    with TenantDaemon(BOTH, TENANTS) as daemon:
        layout = new_layout()
        with Member(daemon, OWNER) as owner:
            ns = owner.namespace(layout)
            assert ns.publish(["reader"])
            assert ns.put(KEYS, payloads(KEYS)).stored == 20
            quiet(daemon)
        for restart in (daemon.restart, daemon.kill):
            restart()
            if not daemon.pid:
                daemon.start()
            with Member(daemon, READER) as reader:
                assert got(reader.namespace(layout, owner="owner"), KEYS) == 20
        with Member(daemon, OWNER) as owner:
            assert owner.namespace(layout).publish([])
        daemon.kill()
        daemon.start()
        with Member(daemon, READER) as reader, pytest.raises(DeniedError, match="not published"):
            reader.namespace(layout, owner="owner").lookup(KEYS)


def test_published_blocks_in_memory_survive_a_restart() -> None:
    with TenantDaemon(DRAM, TENANTS, supervised=True) as daemon:
        layout = new_layout()
        with Member(daemon, OWNER) as owner:
            quiet(daemon)
            ns = owner.namespace(layout)
            assert ns.publish(["reader"])
            assert ns.put(KEYS, payloads(KEYS)).stored == 20
        daemon.kill()
        daemon.start()
        with Member(daemon, OWNER) as owner, Member(daemon, READER) as reader:
            assert got(owner.namespace(layout), KEYS) == 20
            # What the owner wants others to read is on record on NVMe, and there is none.
            with pytest.raises(DeniedError, match="not published"):
                reader.namespace(layout, owner="owner").lookup(KEYS)


def test_published_blocks_come_up_from_nvme_for_readers() -> None:
    with TenantDaemon(BOTH, TENANTS) as daemon, Member(daemon, OWNER) as owner:
        ns = owner.namespace(new_layout())
        assert ns.put(KEYS, payloads(KEYS)).stored == 20
        quiet(daemon)
        fill(owner.namespace(new_layout()), 900)
        quiet(daemon)
        assert ns.publish(["reader"])
        with Member(daemon, READER) as reader:
            assert eventually(lambda: got(reader.namespace(ns.layout, owner="owner"), KEYS) == 20)


# -- ends of blocks


def test_blocks_end_when_their_time_is_over(daemon: TenantDaemon, both: tuple[Member, Member]) -> None:
    owner, _ = both
    brief = owner.namespace(new_layout(), ttl_s=1.5)
    for_good = owner.namespace(new_layout())
    for ns in (brief, for_good):
        assert ns.put(KEYS, payloads(KEYS)).stored == 20
    assert got(brief, KEYS) == 20
    eventually(lambda: brief.lookup(KEYS) == 0)
    assert got(for_good, KEYS) == 20
    eventually(lambda: used(daemon, "owner")["dram"] == 20 * BLOCK)
    assert brief.put(KEYS, payloads(KEYS, salt=1)).stored == 20
    assert got(brief, KEYS, salt=1) == 20


@pytest.mark.parametrize("supervised", [False, True], ids=["restart", "handover"])
def test_the_end_of_a_block_outlives_the_daemon(supervised: bool) -> None:
    settings = DRAM if supervised else BOTH
    tenants = TENANTS.replace('role = "admin"', 'role = "admin"\nttl = "6s"', 1)
    with TenantDaemon(settings, tenants, supervised=supervised) as daemon:
        layouts = [new_layout(), new_layout()]
        with Member(daemon, OWNER) as owner, Member(daemon, READER) as reader:
            assert owner.namespace(layouts[0]).put(KEYS, payloads(KEYS)).stored == 20
            stored = time.monotonic()
            assert reader.namespace(layouts[1]).put(KEYS, payloads(KEYS)).stored == 20
            quiet(daemon)
        daemon.kill()
        daemon.start()
        with Member(daemon, OWNER) as owner, Member(daemon, READER) as reader:
            ns = owner.namespace(layouts[0])
            found = got(ns, KEYS)
            assert found == 20 or time.monotonic() - stored > 5.9
            eventually(lambda: ns.lookup(KEYS) == 0)
            assert time.monotonic() - stored > 5.9
            assert got(reader.namespace(layouts[1]), KEYS) == 20


def test_a_namespace_is_invalidated_as_a_whole(daemon: TenantDaemon, both: tuple[Member, Member]) -> None:
    owner, reader = both
    ns, other = owner.namespace(new_layout()), owner.namespace(new_layout())
    theirs = reader.namespace(ns.layout)
    keys = fill(ns, 300, "gone")
    for kept in (other, theirs):
        assert kept.put(KEYS, payloads(KEYS)).stored == 20
    assert ns.invalidate() == 300
    assert ns.lookup(keys) == 0
    assert got(other, KEYS) == got(theirs, KEYS) == 20
    assert ns.put(KEYS, payloads(KEYS, salt=1)).stored == 20
    assert got(ns, KEYS, salt=1) == 20


def test_a_revision_is_invalidated_wherever_it_is(daemon: TenantDaemon, both: tuple[Member, Member]) -> None:
    owner, reader = both
    model = new_layout().model
    old = [Layout(model, BLOCK, revision="old", shard=shard) for shard in ("0/2", "1/2")]
    new, else_ = Layout(model, BLOCK, revision="new"), Layout(f"{model}-else", BLOCK, revision="old")
    for layout in (*old, new, else_):
        assert owner.namespace(layout).put(KEYS, payloads(KEYS)).stored == 20
    assert reader.namespace(old[0]).put(KEYS, payloads(KEYS)).stored == 20
    assert owner.invalidate(model=model, revision="old") == 40
    assert [owner.namespace(layout).lookup(KEYS) for layout in (*old, new, else_)] == [0, 0, 20, 20]
    assert owner.invalidate(revision="old") == 20
    assert owner.namespace(else_).lookup(KEYS) == 0
    assert got(reader.namespace(old[0]), KEYS) == 20


def test_invalidated_blocks_are_gone_even_after_a_crash() -> None:
    with TenantDaemon(BOTH, TENANTS) as daemon:
        layout, model = new_layout(), new_layout()
        with Member(daemon, OWNER) as owner:
            for each in (layout, model):
                assert owner.namespace(each).put(KEYS, payloads(KEYS)).stored == 20
            quiet(daemon)
            assert owner.namespace(layout).invalidate() == 20
            daemon.kill()
        daemon.start()
        with Member(daemon, OWNER) as owner:
            assert owner.namespace(layout).lookup(KEYS) == 0
            assert got(owner.namespace(model), KEYS) == 20
            assert owner.delete_tenant("owner") == 20
            daemon.kill()
        daemon.start()
        with Member(daemon, OWNER) as owner:
            assert owner.namespace(model).lookup(KEYS) == 0


# -- quotas


def limited(limit: str, floor: str = "0") -> str:
    return f'{TENANTS}[tenants.reader.dram]\nlimit = "{limit}"\nfloor = "{floor}"\n'


def test_quotas_change_under_load(daemon: TenantDaemon) -> None:
    over, stop = [], threading.Event()
    with Member(daemon, READER) as reader, Member(daemon, OWNER) as owner:
        ns, theirs = reader.namespace(new_layout()), owner.namespace(new_layout())
        # Connected before there are threads: only all of a process can act as somebody else.
        ns.lookup(KEYS)
        theirs.lookup(KEYS)

        def write() -> None:
            for turn in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
                fill(theirs, 100, f"load {turn}")

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for limit in ("8MiB", "2MiB", "6MiB", "4MiB"):
                assert "INFO reloaded" in daemon.reload(limited(limit))
                most = int(limit.removesuffix("MiB")) << 20
                eventually(lambda most=most: used(daemon, "reader")["dram"] <= most)
                for turn in range(4):
                    fill(ns, 100, f"{limit} {turn}")
                    now = used(daemon, "reader")["dram"]
                    over += [now] if now > most else []
        finally:
            stop.set()
            thread.join()
    assert not over


def test_a_limit_below_the_use_is_enforced_soon(daemon: TenantDaemon) -> None:
    with Member(daemon, READER) as reader:
        ns = reader.namespace(new_layout())
        keys = fill(ns, 500)
        assert used(daemon, "reader")["dram"] > 6 << 20
        daemon.reload(limited("2MiB"))
        eventually(lambda: used(daemon, "reader")["dram"] <= 2 << 20)
        kept = sum(got(ns, keys[at : at + 100]) for at in range(0, 500, 100))
        assert kept > 0
        more = names(10, "more")
        assert ns.put(more, payloads(more)).stored == 10


def test_floors_are_never_taken() -> None:
    tenants = f'{TENANTS}[tenants.owner.dram]\nfloor = "4MiB"\n'
    with TenantDaemon(DRAM, tenants) as daemon, ExitStack() as stack:
        owner, reader = (stack.enter_context(Member(daemon, uid)) for uid in (OWNER, READER))
        quiet(daemon)
        fill(reader.namespace(new_layout()), 900)
        ns = owner.namespace(new_layout())
        keys = fill(ns, 200, "kept")
        for turn in range(5):
            fill(reader.namespace(new_layout()), 300, f"pushing {turn}")
        assert [got(ns, keys[at : at + 100]) for at in (0, 100)] == [100, 100]


def test_floors_that_do_not_fit_are_refused_at_the_start_and_at_run_time() -> None:
    # Together 10 MiB of 12, but each takes whole extents of 2 MiB: seven of six.
    floors = "".join(
        f'[tenants.{name}.dram]\nfloor = "{floor}"\n'
        for name, floor in (("owner", "5MiB"), ("reader", "7MiB"))
    )
    with (
        pytest.raises(UnavailableError) as failed,
        TenantDaemon(DRAM, TENANTS + floors),
    ):
        pass
    assert "floors of dram take 7 extents of 2097152 bytes each, the tier has 6" in failed.value.hint
    with TenantDaemon(DRAM, TENANTS) as daemon, Member(daemon, READER) as reader:
        ns = reader.namespace(new_layout())
        for bad in (TENANTS + floors, TENANTS.replace("uids", "uuids")):
            assert "not reloaded" in daemon.reload(bad)
            assert ns.put(KEYS, payloads(KEYS)).stored + ns.lookup(KEYS) >= 20
        assert "INFO reloaded: tenants.reader.dram.limit" in daemon.reload(limited("4MiB"))


# -- who is who


def token_of(name: str, *tokens: str) -> str:
    hashes = [hashlib.sha256(token.encode()).hexdigest() for token in tokens]
    rows = "".join(f'[[tenants.{name}.tokens]]\nhash = "sha256:{h}"\nrole = "admin"\n' for h in hashes)
    return f"{TENANTS}[tenants.{name}]\n{rows}" if name not in TENANTS else TENANTS + rows


def test_tokens_are_rotated_without_a_gap() -> None:
    uid = 61050
    with TenantDaemon(DRAM, token_of("third", "old")) as daemon, ExitStack() as stack:
        by_old = stack.enter_context(Member(daemon, uid, token="old"))
        layout = new_layout()
        assert by_old.namespace(layout).put(KEYS, payloads(KEYS)).stored == 20
        assert "reloaded" in daemon.reload(token_of("third", "old", "new"))
        by_new = stack.enter_context(Member(daemon, uid, token="new"))
        for member in (by_old, by_new):
            assert got(member.namespace(layout), KEYS) == 20
        daemon.reload(token_of("third", "new"))
        assert got(by_new.namespace(layout), KEYS) == 20
        with pytest.raises(UnavailableError, match="neither token, user nor group"):
            by_old.namespace(layout).lookup(KEYS)


def test_a_removed_tenant_keeps_its_blocks_until_others_need_the_room() -> None:
    only_owner = TENANTS.partition("[tenants.reader]")[0]
    with TenantDaemon(BOTH, TENANTS) as daemon:
        layout = new_layout()
        with Member(daemon, READER) as reader:
            keys = fill(reader.namespace(layout), 300, "kept")
        quiet(daemon)
        daemon.reload(only_owner)
        with Member(daemon, READER) as reader, pytest.raises(UnavailableError):
            reader.namespace(layout).lookup(keys)
        daemon.restart()
        assert used(daemon, "reader")["nvme"] == 300 * BLOCK
        daemon.reload(TENANTS)
        with Member(daemon, READER) as reader:
            assert got(reader.namespace(layout), keys[:100]) == 100
        daemon.reload(only_owner)
        with Member(daemon, OWNER) as owner:
            ns = owner.namespace(new_layout())
            last = []
            for turn in range(40):
                last = fill(ns, 100, f"pushing {turn}")
            quiet(daemon)
            assert got(ns, last) == 100
        assert used(daemon, "reader")["nvme"] < 300 * BLOCK


# -- what is worth it


def test_blocks_slower_to_load_than_to_recompute_are_misses() -> None:
    tenants = TENANTS.replace('role = "admin"', 'role = "admin"\nbandwidth = "1MiB"', 1)
    with TenantDaemon(BOTH, tenants) as daemon, Member(daemon, OWNER) as owner:
        layout = Layout(new_layout().model, 1 << 18, block_tokens=16)
        ns = owner.namespace(layout)
        keys = names(20, "slow")
        for at in range(0, 20, 5):
            assert ns.put(keys[at : at + 5], payloads(keys[at : at + 5], 1 << 18)).stored == 5
        eventually(lambda: used(daemon, "owner")["nvme"] == 20 << 18, 30)
        quiet(daemon)
        fill(owner.namespace(new_layout(1 << 18)), 60)
        # 256 KiB at 1 MiB/s: a quarter of a second a block, or 64 tokens/s.
        assert ns.lookup(keys) == 20
        assert ns.lookup(keys, recompute_tokens_per_s=1e6) < 20
        assert ns.lookup(keys, recompute_tokens_per_s=1.0, deadline_s=60) == 20
        began = time.monotonic()
        out = room_for(20, 1 << 18)
        n = ns.get(keys, out, deadline_s=1.0)
        assert time.monotonic() - began < 1.5
        assert n < 20
        assert np.array_equal(out[:n], payloads(keys[:n], 1 << 18))


# -- a client's view, and an older folder


@contextmanager
def answering(folder: Path, answer: Callable[[Any], Any]) -> Iterator[str]:
    """The url of a daemon that greets, opens namespaces, and gives this answer to whatever else is asked."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / "socket"))
    listener.listen()

    def reply(message: Any) -> Any:
        if isinstance(message, m.Hello):
            return m.Welcome(m.VERSION, b"12345678", 1 << 20, 16, 16)
        return m.Opened(message.id, 1, bytes(16)) if isinstance(message, m.Open) else answer(message)

    def serve() -> None:
        with suppress(OSError):
            while True:
                with listener.accept()[0] as peer:
                    frames = Frames(1 << 20)
                    while data := peer.recv(1 << 16):
                        for message in frames.feed(data):
                            peer.sendall(pack(reply(message)))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"unix://{folder}/socket"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def test_busy_is_a_miss_with_a_reason(tmp_path: Path) -> None:
    with answering(tmp_path, lambda q: m.Busy(q.id, 0.25, "too much waits")) as url:
        with Client(url) as lenient:
            ns = lenient.namespace(new_layout())
            assert ns.lookup(KEYS) == ns.get(KEYS, room_for(20)) == 0
            result = ns.put(KEYS, payloads(KEYS))
            assert (result.stored, result.denied, result.why) == (0, 20, "too much waits")
        with Client(url, strict=True) as strict, pytest.raises(DeniedError, match="too much waits") as told:
            strict.namespace(new_layout()).lookup(KEYS)
        assert told.value.hint == "try again in 0.25 s"


def test_too_many_pending_deletions_are_answered_busy() -> None:
    settings = {**BOTH, "limits": {"namespaces_per_tenant": 1}}
    with TenantDaemon(settings, TENANTS) as daemon, peer_of(daemon, OWNER) as peer:
        peer.open(new_layout())
        peer.send(*(m.Forget(n, 0, "", "") for n in range(1, 65)))
        answers = [peer.receive() for _ in range(64)]
        busy = [answer for answer in answers if isinstance(answer, m.Busy)]
        assert busy
        assert all(answer.retry_s > 0 for answer in busy)
        assert {answer.value for answer in answers if answer not in busy} == {0}
        assert peer.ask(m.Forget(99, 0, "", "")) == m.Value(99, 0)


def to_format_2(folder: Path) -> None:
    """Writes a folder's records as daemons did that knew one tenant."""
    to_format_4(folder)
    number = struct.Struct("<Q")
    with lmdb.open(str(folder / "records"), max_dbs=8) as env, env.begin(write=True) as txn:
        meta, spaces, extents = (env.open_db(n, txn) for n in (b"meta", b"namespaces", b"extents"))
        txn.put(b"format", number.pack(2), db=meta)
        for key, value in list(txn.cursor(spaces)):
            txn.put(key, msgpack.packb(msgpack.unpackb(value)[:3]), db=spaces)
        for key, value in list(txn.cursor(extents)):
            txn.put(key, value[: number.size], db=extents)


def test_an_older_folder_is_the_default_tenants() -> None:
    settings = {**BOTH, "limits": {"namespaces": 100}}
    with LocalDaemon(settings) as daemon:
        layout = new_layout()
        with Client(daemon.url, deadline_s=10, strict=True) as client:
            assert client.namespace(layout).put(KEYS, payloads(KEYS)).stored == 20
        daemon.stop()
        to_format_2(daemon.folder / "nvme")
        daemon.start()
        with Client(daemon.url, deadline_s=10, strict=True) as client:
            assert got(client.namespace(layout), KEYS) == 20
        daemon.stop()
        to_format_2(daemon.folder / "nvme")
        file = daemon.folder / "kvstore.toml"
        file.write_text(
            f"{file.read_text()}\n[tenants.default]\nuids = [{OWNER}]\n{TENANTS.replace(str(OWNER), '')}"
        )
        daemon.folder.chmod(0o755)
        daemon.start()
        daemon.socket.chmod(0o666)
        with Member(daemon, OWNER) as owner, Member(daemon, READER) as reader:
            assert got(owner.namespace(layout), KEYS) == 20
            assert reader.namespace(layout).lookup(KEYS) == 0


def test_leases_of_readers_do_not_exhaust_the_owners_room() -> None:
    layout, most, held = new_layout(), names(700), []
    settings = {**DRAM, "policy": {"eviction": "lru"}}
    with (
        TenantDaemon(settings, TENANTS) as daemon,
        Member(daemon, OWNER) as owner,
        Member(daemon, READER, strict=False) as reader,
        Member(daemon, 0) as operator,
    ):
        quiet(daemon)
        ns = owner.namespace(layout)
        assert ns.publish(["reader"])
        assert ns.put(most, payloads(most)).stored == len(most)
        theirs = reader.namespace(layout, owner="owner")
        for first in range(0, len(most), 50):
            held.append(theirs.acquire(most[first : first + 50], deadline_s=0.05))
        n = sum(map(len, held))
        assert 300 <= n < 450, "half of what the owner can have"
        assert operator.control("tenant", name="owner")["lent_bytes"] == {"reader": n * SLOT}
        more = names(300, "more")
        assert ns.put(more, payloads(more)).stored == 300, "what others hold denies the owner nothing"
        for lease in held:
            lease.release()
        assert got(theirs, more) == 300
        eventually(lambda: operator.control("tenant", name="owner")["lent_bytes"] == {})


def test_readers_create_no_namespaces() -> None:
    tenants = TENANTS + f'[tenants.looker]\nuids = [{NOBODY}]\nrole = "read"\n'
    with TenantDaemon(DRAM, tenants) as daemon, Member(daemon, NOBODY) as looker:
        keys, before = names(2), None
        with Member(daemon, 0) as operator:
            before = len(operator.control("namespaces")["namespaces"])
            for _ in range(50):
                ns = looker.namespace(new_layout())
                assert ns.lookup(keys) == ns.prefetch(keys) == got(ns, keys) == 0
            assert len(operator.control("namespaces")["namespaces"]) == before
            assert not ns.acquire(keys, wait_s=0.05)
            assert len(operator.control("namespaces")["namespaces"]) == before + 1
