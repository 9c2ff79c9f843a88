"""What happened, as a daemon tells it: decisions about blocks and what became of the daemon, in order."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import Client
from kvstore.config import Config
from kvstore.core.queues.device_queue import DeviceQueue
from kvstore.core.residency.decision_log import DecisionKind
from kvstore.core.view import TierView
from kvstore.daemon.operator.event_log import MOST_EVENTS, EventLog
from kvstore.daemon.runtime.entry_kinds import EntryKind
from kvstore.daemon.tenancy.auth import Authenticator
from kvstore.errors import DeniedError
from kvstore.lab.local_daemon import LocalDaemon
from tests.admin.serving import VIEW, ServedAdmin, problem, settings
from tests.core.insight.test_explain import rows_of
from tests.daemons import SMALL, WITH_NVME, eventually, got, log_of, names, new_layout, payloads


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon({**WITH_NVME, "admin": settings()}) as served:
        yield served


@pytest.fixture
def client(daemon: LocalDaemon) -> Iterator[Client]:
    with Client(daemon.url, deadline_s=10, strict=True) as made:
        yield made


def latest(client: Client) -> int:
    """The number of the last event so far."""
    return int(client.control("events", after=-1)["next"])


def since(client: Client, after: int, **more: Any) -> list[dict[str, Any]]:
    """All events behind one, page by page."""
    events: list[dict[str, Any]] = []
    while (page := client.control("events", after=after, **more))["next"] != after:
        events += page["events"]
        after = page["next"]
    assert page["events"] == ()
    return events


def fingerprint(ns: Any) -> str:
    return str(ns.layout.fingerprint("default").hex())


def test_the_event_log_has_the_start_of_the_daemon(daemon: LocalDaemon, client: Client) -> None:
    [first] = client.control("events", limit=1)["events"]
    assert (first["number"], first["what"], first["detail"]) == (1, "started", f"pid {daemon.pid}")
    up_s = client.status()["uptime_s"]
    assert first["at_s"] == pytest.approx(time.time() - up_s, abs=5)


def test_evictions_are_logged_by_key_in_order(client: Client) -> None:
    ns, keys, before = client.namespace(new_layout()), names(5), latest(client)
    ns.put(keys, payloads(keys))
    ns.invalidate(keys[3:])
    ns.invalidate(keys[:2])
    told = since(client, before)
    gone = [event for event in told if event["what"] == "invalidated"]
    first, second = gone[:2], gone[2:]
    assert {event["key"] for event in first} == {key.hex() for key in keys[3:]}
    assert {event["key"] for event in second} == {key.hex() for key in keys[:2]}
    assert {(e["tenant"], e["namespace"], e["tier"]) for e in gone} == {("default", fingerprint(ns), "")}
    assert [event["number"] for event in told] == list(range(before + 1, before + 1 + len(told)))
    assert all(abs(event["at_s"] - time.time()) < 60 for event in told)


def test_pages_of_any_size_are_complete(client: Client) -> None:
    ns, keys, before = client.namespace(new_layout()), names(150), latest(client)
    ns.put(keys, payloads(keys))
    ns.publish(["friend"])
    ns.invalidate(keys)
    whole = since(client, before)
    assert len(whole) > 2 * MOST_EVENTS
    for limit in (1, 7, MOST_EVENTS):
        assert [e["number"] for e in since(client, before, limit=limit)] == [e["number"] for e in whole]
    tail = client.control("events", after=-3)["events"]
    assert [event["number"] for event in tail] == [event["number"] for event in whole[-3:]]


def test_events_are_filtered_by_tenant_and_kind(client: Client) -> None:
    ns, keys, before = client.namespace(new_layout()), names(20), latest(client)
    ns.put(keys, payloads(keys))
    ns.publish(["friend"])
    ns.invalidate(keys[:4])
    assert {e["what"] for e in since(client, before)} >= {"published", "invalidated"}
    assert [e["what"] for e in since(client, before, what=("published",))] == ["published"]
    only = since(client, before, what=("invalidated",))
    assert {e["key"] for e in only} == {key.hex() for key in keys[:4]}
    both = since(client, before, what=("published", "invalidated"), tenant="default")
    assert [e["what"] for e in both] == ["published", *["invalidated"] * 4]
    # The page after the last one is where the end is, whatever was asked for.
    assert client.control("events", after=before, what=("fenced",))["next"] == latest(client)


def test_events_of_namespaces_and_tenants_are_logged(client: Client) -> None:
    ns, before = client.namespace(new_layout()), latest(client)
    keys = names(2)
    ns.put(keys, payloads(keys))
    ns.publish(["friend", "batch"])
    ns.publish([])
    ns.invalidate()
    client.delete_tenant("default")
    happened = since(client, before, what=("published", "forgotten", "deleted"))
    assert [(e["what"], e["detail"]) for e in happened[:3]] == [
        ("published", "to batch, friend"),
        ("published", "to nobody"),
        ("forgotten", ""),
    ]
    assert {e["namespace"] for e in happened[:3]} == {fingerprint(ns)}
    assert [(e["what"], e["tenant"]) for e in happened[3:]] == [("deleted", "default")]


def test_decisions_keep_the_names_of_a_deleted_namespace(client: Client) -> None:
    ns, keys, before = client.namespace(new_layout()), names(3), latest(client)
    ns.put(keys, payloads(keys))
    ns.invalidate(keys)
    ns.invalidate()
    gone = since(client, before, what=("invalidated",), tenant="default")
    assert [(e["tenant"], e["namespace"]) for e in gone] == [("default", fingerprint(ns))] * 3


def test_a_reload_is_logged_with_the_changed_keys(daemon: LocalDaemon, client: Client) -> None:
    before, file = latest(client), daemon.folder / "kvstore.toml"
    text = file.read_text()
    file.write_text(text.replace("[scrub]\nrate = 0", "[scrub]\nrate = 4096"))
    assert file.read_text() != text
    os.kill(daemon.pid, signal.SIGHUP)
    [event] = eventually(lambda: since(client, before, what=("reloaded",)))
    assert "scrub.rate" in event["detail"]
    assert event["detail"] in log_of(daemon)


def test_a_corrupt_copy_is_logged(daemon: LocalDaemon, client: Client) -> None:
    ns, keys, before = client.namespace(new_layout()), names(1, "bad"), latest(client)
    ns.put(keys, payloads(keys))
    with ns.acquire(keys) as lease:
        [block] = client.explain(keys, model=ns.layout.model)
        assert len(lease) == 1
    copy = next(copy for copy in block["copies"] if copy["tier"] == "dram")
    spoil(daemon, copy, payloads(keys)[0].tobytes())
    assert got(ns, keys) in (0, 1)
    [event] = eventually(lambda: since(client, before, what=("quarantined",)))
    assert (event["tier"], event["key"]) == ("dram", keys[0].hex())


def spoil(daemon: LocalDaemon, copy: dict[str, Any], there: bytes) -> None:
    """Alters a byte of a block in memory, as a bad chip would."""
    for fd in os.listdir(f"/proc/{daemon.pid}/fd"):
        path = f"/proc/{daemon.pid}/fd/{fd}"
        try:
            if not os.readlink(path).startswith("/memfd:"):
                continue
            with open(path, "r+b", 0) as file:
                at = file.read().find(there)
                if at >= 0:
                    file.seek(at)
                    file.write(bytes([there[0] ^ 1]))
                    return
        except OSError:
            continue
    raise AssertionError(f"{copy} is not where it should be")


def test_after_a_restart_event_numbers_restart_under_another_instance() -> None:
    with LocalDaemon(SMALL) as daemon, Client(daemon.url, deadline_s=10) as client:
        ns, keys = client.namespace(new_layout()), names(3)
        ns.put(keys, payloads(keys))
        ns.invalidate(keys)
        before = client.control("events")
        daemon.stop()
        daemon.start()
        after = eventually(lambda: client.control("events", after=before["next"]))
        assert after["instance"] != before["instance"]
        assert (after["events"], after["next"]) == ((), 1)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"limit": 0}, "limit is 0"),
        ({"limit": MOST_EVENTS + 1}, "limit is 65"),
        ({"what": ("nothing",)}, "there is no event 'nothing'"),
        ({"tenant": "nobody"}, "there is no tenant 'nobody'"),
        ({"after": "x"}, "events: after"),
    ],
)
def test_invalid_queries_are_refused(client: Client, more: dict[str, Any], says: str) -> None:
    with pytest.raises(DeniedError, match=says):
        client.control("events", **more)


# -- the ring


def event_log(most: int = 4) -> tuple[EventLog, Callable[[int], None]]:
    """One over a ring of 16 decisions, and how to have it decide about so many blocks."""
    ring, rows, _ = rows_of(16)
    nobody: Any = SimpleNamespace(at=lambda _: None, fingerprints={})
    view = SimpleNamespace(decisions=ring, tiers=[TIER])
    core: Any = SimpleNamespace(view=view, now=lambda: 5.0)
    log = EventLog(core, nobody, Authenticator(Config()), b"i", lambda: 1000.0, most)
    return log, lambda n: ring.record(DecisionKind.DROPPED, 0, rows[:n], 3.0)


def told(page: dict[str, Any]) -> list[tuple[int, str]]:
    return [(event["number"], event["detail"] or event["what"]) for event in page["events"]]


STATE: Any = SimpleNamespace(spec=SimpleNamespace(name="nvme"), device=DeviceQueue())
TIER = TierView(0, STATE)


def test_both_kinds_are_in_the_order_in_which_they_came() -> None:
    kept, decide = event_log()
    for name, n in (("a", 2), ("b", 0), ("c", 1)):
        kept.add(EntryKind.LOST, detail=name)
        decide(n)
    want = [(1, "a"), (2, "dropped"), (3, "dropped"), (4, "b"), (5, "c"), (6, "dropped")]
    assert told(kept.page(0, 64, None, ())) == want
    for after in range(7):
        for limit in (1, 2, 3, 64):
            page = kept.page(after, limit, None, ())
            assert told(page) == want[after : after + limit]
            assert page["next"] == min(6, after + limit)
    assert told(kept.page(-2, 64, None, ())) == want[-2:]
    assert told(kept.page(99, 64, None, ())) == []
    assert {e["at_s"] for e in kept.page(1, 2, None, ())["events"]} == {998.0}


def test_overwritten_decisions_are_counted_and_entries_outlive_them() -> None:
    kept, decide = event_log()
    kept.add(EntryKind.LOST, detail="a")
    decide(16)
    decide(10)
    page = kept.page(0, 64, None, ())
    rest = kept.page(page["next"], 64, None, ())
    assert told(page) + told(rest) == [(1, "a"), *((number, "dropped") for number in range(12, 28))]
    assert (page["lost"], rest["lost"], rest["next"]) == (10, 0, 27)
    assert kept.page(5, 64, None, ())["lost"] == 6
    assert kept.page(11, 64, None, ())["lost"] == 0


def test_happenings_make_way_too_and_numbers_stay() -> None:
    kept, decide = event_log(most=4)
    for i in range(9):
        decide(1)
        kept.add(EntryKind.LOST, detail=str(i))
    page = kept.page(0, 64, None, ())
    # Of the first four nothing is left, nor is it known how many came before an older decision.
    assert (page["lost"], page["next"]) == (8, 18)
    assert told(page) == [row for i in range(4, 9) for row in ((2 * i + 1, "dropped"), (2 * i + 2, str(i)))]
    assert told(kept.page(12, 64, None, ())) == told(page)[4:]


def test_a_changed_device_is_logged_once() -> None:
    kept, _ = event_log()
    STATE.device.fenced = False
    kept.look_at_devices()
    STATE.device.fenced = True
    kept.look_at_devices()
    kept.look_at_devices()
    STATE.device.fenced = False
    kept.look_at_devices()
    told = [(e["what"], e["tier"]) for e in kept.page(0, 64, None, ())["events"]]
    down, up = ("fenced", "unreadable", "unwritable"), ("unfenced", "readable", "writable")
    assert told == [(what, "nvme") for what in (*down, *up)]


# -- by REST


def test_the_same_by_rest(daemon: LocalDaemon, client: Client) -> None:
    ns, keys, before = client.namespace(new_layout()), names(150), latest(client)
    ns.put(keys, payloads(keys))
    ns.invalidate(keys)
    with ServedAdmin(daemon) as admin:
        whole = admin.get(f"/v1/events?after={before}&limit=1000&what=invalidated&what=published", VIEW).json
        assert {event["key"] for event in whole["events"]} == {key.hex() for key in keys}
        same = since(client, before, what=("invalidated",))
        assert whole["events"] == [event | {"at_s": pytest.approx(event["at_s"], abs=5)} for event in same]
        assert (whole["lost"], whole["next"]) == (0, latest(client))
        page = admin.get(f"/v1/events?after={before}&limit=70", VIEW).json
        assert [event["number"] for event in page["events"]] == list(range(before + 1, before + 71))
        assert page["next"] == before + 70
        assert "tenant" in problem(admin.get("/v1/events?tenant=nobody", VIEW), 404)["detail"]
        problem(admin.get("/v1/events?what=nothing", VIEW), 422)
