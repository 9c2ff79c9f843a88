"""Several puts of a client in one call: both clients against a real daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvstore import Client, Put, PutResult, Reservation
from kvstore.client.leases import GIVEN_UP, NO_ANSWER
from kvstore.errors import MisuseError
from kvstore.lab.local_daemon import LocalDaemon
from tests.client.drivers import Driver
from tests.daemons import BLOCK, SMALL, eventually, got, names, new_layout, payload


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon({**SMALL, "limits": {"batch_keys": 16}}) as served:
        yield served


def filling(keys: list[bytes]) -> Callable[[Reservation], bool]:
    """Fills every slot with the payload of its key."""

    def fill(reservation: Reservation) -> bool:
        reservation.gather_all([[payload(keys[wanted])] for wanted in reservation.wanted])
        return True

    return fill


def test_puts_of_several_namespaces(client: Client) -> None:
    chain, states = (
        client.namespace(new_layout()),
        client.namespace(replace(new_layout(), kind="independent")),
    )
    first, second, own, more = names(3), names(2, "second"), names(4, "states"), names(2, "more")
    results = client.put([Put(chain, first, filling(first)), Put(chain, second, filling(second))])
    assert results == [PutResult(stored=3), PutResult(stored=2)]
    behind = [*first, *names(2, "behind")]
    results = client.put(
        [
            Put(states, own, filling(own), chain=(chain, first[-1])),
            Put(chain, behind[3:], filling(behind[3:]), parent=first[-1]),
            Put(chain, second, filling(second)),
            Put(states, more, filling(more)),
        ]
    )
    assert results == [PutResult(stored=4), PutResult(stored=2), PutResult(present=2), PutResult(stored=2)]
    assert (got(chain, behind), got(chain, second), got(states, own), got(states, more)) == (5, 2, 4, 2)
    assert client.put([]) == []


def test_a_refused_put_does_not_fail_the_others(client: Client) -> None:
    ns, large = client.namespace(new_layout()), client.namespace(replace(new_layout(), block_bytes=64 << 20))
    good, orphans, many = names(2), names(2, "orphans"), names(20, "many")
    refused, stored, lost, part = client.put(
        [
            Put(large, names(1), filling(good)),
            Put(ns, good, filling(good)),
            Put(ns, orphans, filling(orphans), parent=b"nothing"),
            Put(ns, many, filling(many)),
        ]
    )
    assert (stored, lost.denied, refused.denied) == (PutResult(stored=2), 2, 1)
    assert "does not fit into an extent" in refused.why
    assert "the parent is not stored" in lost.why
    assert part == PutResult(stored=16, denied=4, why="at most 16 blocks in one reservation")
    assert (got(ns, good), got(ns, many)) == (2, 16)


def test_a_put_that_is_not_filled_frees_its_slots(client: Client) -> None:
    ns = client.namespace(new_layout())
    kept, given_up = names(2), names(3, "given up")
    results = client.put([Put(ns, given_up, lambda _: False), Put(ns, kept, filling(kept))])
    assert results == [PutResult(denied=3, why=GIVEN_UP), PutResult(stored=2)]
    assert (ns.lookup(given_up), got(ns, kept)) == (0, 2)
    assert client.status()["reservations"] == 0


@pytest.mark.parametrize("error", [ZeroDivisionError, MisuseError])
def test_an_exception_of_a_fill_stores_nothing(client: Client, error: type[Exception]) -> None:
    ns = client.namespace(new_layout())
    first, second = names(2), names(2, "second")

    def fail(_: Reservation) -> bool:
        raise error("at once")

    with pytest.raises(error):
        client.put([Put(ns, first, filling(first)), Put(ns, second, fail)])
    eventually(lambda: client.status()["reservations"] == 0, 3)
    assert (ns.lookup(first), ns.lookup(second)) == (0, 0)
    assert client.put([Put(ns, first, filling(first))]) == [PutResult(stored=2)]


def test_a_slot_that_is_not_written_as_a_whole_has_the_checksum_of_its_bytes(client: Client) -> None:
    ns, [key] = client.namespace(new_layout()), names(1)

    def fill(reservation: Reservation) -> bool:
        reservation.write(0, payload(key)[: BLOCK // 2])
        reservation.write(0, payload(key)[BLOCK // 2 :], BLOCK // 2)
        return True

    assert client.put([Put(ns, [key], fill)]) == [PutResult(stored=1)]
    assert got(ns, [key]) == 1


def test_a_daemon_that_is_away_stores_nothing(driver: Driver) -> None:
    with driver.client("unix:///nowhere/kvstore.sock", deadline_s=0.5) as client:
        ns = client.namespace(new_layout())
        puts = [Put(ns, names(2), lambda _: True), Put(ns, names(3, "more"), lambda _: True)]
        assert client.put(puts) == [PutResult(denied=n, why=NO_ANSWER) for n in (2, 3)]


def test_wrong_arguments_are_refused(client: Client, driver: Driver, daemon: LocalDaemon) -> None:
    with driver.client(daemon.url) as other:
        theirs = other.namespace(new_layout())
        with pytest.raises(MisuseError, match="a namespace of another client"):
            client.put([Put(theirs, names(1), lambda _: True)])
    ns = client.namespace(new_layout())
    with pytest.raises(MisuseError, match="65 bytes"):
        client.put([Put(ns, names(1), lambda _: True, parent=b"p" * 65)])
