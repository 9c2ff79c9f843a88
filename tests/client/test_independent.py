"""Independent namespaces, and one question for several namespaces: both clients against a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvstore import Client, StoredPrefix
from kvstore.client.calls.presence import NAMESPACES_AT_ONCE
from kvstore.client.sync import Namespace
from kvstore.errors import DeniedError, MisuseError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.wire import messages as m
from tests.client.drivers import Driver
from tests.daemon.hits import figures, since
from tests.daemons import SMALL, Peer, eventually, got, names, new_layout, payloads, room_for

FEW = {**SMALL, "limits": {"batch_keys": 16}}
"""Few keys at a time, so that calls have several batches."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(FEW) as served:
        yield served


@pytest.fixture
def ns(client: Client) -> Namespace:
    return client.namespace(replace(new_layout(), kind="independent"))


def test_independent_blocks_are_stored_and_read_in_any_order(ns: Namespace) -> None:
    keys = names(40)
    assert ns.put(keys[::2], payloads(keys[::2])).stored == 20
    assert ns.put(keys[1:3], payloads(keys[1:3])).stored == 1, "no parent is needed"
    assert ns.contains(keys).tolist() == [i % 2 == 0 or i == 1 for i in range(40)]
    assert got(ns, [*keys[:3], keys[38], keys[20]]) == 5
    with ns.acquire([keys[38], keys[0], keys[1], keys[3], keys[4]]) as lease:
        assert [bytes(block) for block in lease.blocks] == [bytes(b) for b in payloads([keys[38], *keys[:2]])]


def test_lookup_of_independent_blocks_counts_the_leading_ones_exactly(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.calls.reads.SAMPLE_FROM", 9)
    ns, keys = client.namespace(replace(new_layout(), kind="independent")), names(100)
    for missing in (0, 7, 50, 99):
        stored = [key for i, key in enumerate(keys) if i != missing]
        ns.put(stored, payloads(stored))
        assert ns.lookup(keys) == missing
        assert ns.lookup(keys[missing + 1 :]) == 99 - missing
        assert ns.invalidate(keys) == 99


def test_an_independent_block_has_no_parent(ns: Namespace) -> None:
    keys = names(2)
    assert ns.put(keys[:1], payloads(keys[:1])).stored == 1
    for call in (
        lambda: ns.put(keys[1:], payloads(keys[1:]), parent=keys[0]),
        lambda: ns.reserve(keys[1:], parent=keys[0]),
    ):
        with pytest.raises(MisuseError, match="blocks of an independent namespace have no parent"):
            call()
    assert ns.invalidate(keys[:1]) == 1
    assert ns.put(keys, payloads(keys)).stored == 2


def test_a_daemon_refuses_a_parent_that_a_client_sends(daemon: LocalDaemon) -> None:
    layout = replace(new_layout(), kind="independent")
    with Peer(daemon.socket) as peer:
        assert isinstance(peer.ask(m.Hello(m.MAGIC, m.VERSION, "")), m.Welcome)
        opened = peer.ask(m.Open(1, layout.to_map(), "", 0.0))
        assert isinstance(opened, m.Opened)
        denied = peer.ask(m.Reserve(2, opened.namespace, 1, b"k", b"p", 0.0))
        assert denied == m.Denied(
            2, "blocks of an independent namespace have no parent", "leave out the parent"
        )
        assert isinstance(peer.ask(m.Reserve(3, opened.namespace, 1, b"k", b"", 0.0)), m.Reserved)
        unknown = peer.ask(m.Open(4, layout.to_map() | {"kind": "tree"}, "", 0.0))
        assert isinstance(unknown, m.Denied)
        assert "layout.kind is 'tree'" in unknown.why


def test_blocks_belong_to_a_stored_chain(client: Client, ns: Namespace) -> None:
    chain, keys, states = client.namespace(new_layout()), names(4), names(20, "states")
    chain.put(keys[:2], payloads(keys[:2]))
    assert ns.put(states, payloads(states), chain=(chain, keys[1])).stored == 20, "in several batches"
    refused = ns.put(states[:1] + names(1), payloads(states[:1] + names(1)), chain=(chain, keys[2]))
    assert (refused.stored, refused.denied) == (0, 2)
    assert refused.why.startswith("the chain of these blocks is not stored")
    for call, why in (
        (lambda: chain.put(keys, payloads(keys), chain=(chain, keys[0])), "only independent blocks belong"),
        (lambda: ns.put(keys, payloads(keys), chain=(ns, keys[0])), "independent blocks are no chain"),
        (lambda: ns.reserve(keys, chain=("ns", keys[0])), "a namespace of another client"),
        (lambda: ns.reserve(keys, chain=(chain, b"")), "key"),
    ):
        with pytest.raises(MisuseError, match=why):
            call()
    reservation = ns.reserve(keys, chain=(chain, keys[0]))
    assert len(reservation) == 4
    reservation.abort()


def test_a_daemon_refuses_chains_that_are_none_of_the_peer(daemon: LocalDaemon) -> None:
    layout = replace(new_layout(), kind="independent")
    with Peer(daemon.socket) as peer:
        assert isinstance(peer.ask(m.Hello(m.MAGIC, m.VERSION, "")), m.Welcome)
        number = peer.ask(m.Open(1, layout.to_map(), "", 0.0)).namespace
        for chain, why in (
            (number, "independent blocks are no chain"),
            (99, "99 is no chain of this tenant"),
        ):
            answer = peer.ask(m.Reserve(2, number, 1, b"k", b"", 0.0, "", b"", chain, b"a"))
            assert isinstance(answer, m.Denied)
            assert answer.why == why


def test_independent_blocks_are_pinned_prefetched_hinted_and_invalidated(ns: Namespace) -> None:
    keys = names(5)
    some = [keys[4], keys[1]]
    assert ns.put(some, payloads(some)).stored == 2
    assert [ns.pin(some, 60.0), ns.unpin(some), ns.prefetch(some), ns.hint(some, closed=True)] == [2] * 4
    assert ns.pin(keys, 60.0) == 0, "the first key is missing"
    assert ns.invalidate(keys) == 2
    assert not ns.contains(keys).any()


def test_one_question_has_an_answer_for_each_namespace(client: Client, ns: Namespace) -> None:
    chain, other, keys = client.namespace(new_layout()), client.namespace(new_layout()), names(40)
    chain.put(keys[:25], payloads(keys[:25]))
    ns.put(keys[1::3], payloads(keys[1::3]))
    for _ in range(2):
        masks = client.contains([(chain, keys), (ns, keys), (other, keys[:1]), (ns, []), (ns, keys[:2])])
        assert [mask.dtype for mask in masks] == [np.bool_] * 5
        assert [mask.tolist() for mask in masks] == [
            [i < 25 for i in range(40)],
            [i % 3 == 1 for i in range(40)],
            [False],
            [],
            [False, True],
        ]
    assert client.contains([]) == []


def test_more_questions_than_a_socket_holds_are_all_answered(client: Client, ns: Namespace) -> None:
    keys = names(64)
    ns.put(keys[:3], payloads(keys[:3]))
    masks = client.contains([(ns, keys)] * (2 * NAMESPACES_AT_ONCE + 3))
    assert len(masks) == 2 * NAMESPACES_AT_ONCE + 3
    assert all(mask.sum() == 3 and mask[:3].all() for mask in masks)


def test_namespaces_of_another_client_are_misuse(driver: Driver, client: Client, ns: Namespace) -> None:
    with driver.client() as other:
        for bad in (other.namespace(new_layout()), "ns", None):
            with pytest.raises(MisuseError, match="a namespace of another client"):
                client.contains([(ns, []), (bad, [])])


def test_a_question_without_a_daemon_is_a_miss_for_all(driver: Driver) -> None:
    with driver.client("unix:///nowhere/kvstore.sock") as client:
        masks = client.contains([(client.namespace(new_layout()), names(2))] * 2, deadline_s=0.5)
        assert [mask.tolist() for mask in masks] == [[False] * 2] * 2


def test_a_refused_namespace_has_no_keys_and_the_others_have_theirs(
    driver: Driver, daemon: LocalDaemon
) -> None:
    keys = names(3)

    def ask(client: Client) -> list[list[bool]]:
        mine, theirs = client.namespace(new_layout()), client.namespace(new_layout(), owner="nobody")
        mine.put(keys, payloads(keys))
        return [mask.tolist() for mask in client.contains([(theirs, keys), (mine, keys)])]

    with driver.client(daemon.url, deadline_s=10) as client:
        assert ask(client) == [[False] * 3, [True] * 3]
    with (
        driver.client(daemon.url, deadline_s=10, strict=True) as client,
        pytest.raises(DeniedError, match="no such namespace"),
    ):
        ask(client)


def test_a_lookup_answers_for_chains_and_others_and_counts_each_prompt_once(
    client: Client, ns: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.calls.reads.SAMPLE_FROM", 9)
    whole, part, keys = client.namespace(new_layout()), client.namespace(new_layout()), names(40)
    whole.put(keys[:25], payloads(keys[:25]))
    part.put(keys[:12], payloads(keys[:12]))
    ns.put(keys[1::3], payloads(keys[1::3]))
    with Client(client.path, deadline_s=10) as other:
        for others in ([(ns, keys), (ns, keys[:2])], []):
            before = figures(other)
            prefixes, masks = client.lookup(
                [(whole, keys, 40, None), (part, keys, 0, None), (part, [], 3, None)], others
            )
            assert [each.blocks for each in prefixes] == [25, 12, 0]
            expected = [[i % 3 == 1 for i in range(40)], [False, True]]
            assert [mask.tolist() for mask in masks] == expected[: len(others)]
            wanted = {"requested": 43, "found": 25, "missed": 18}
            eventually(lambda before=before, wanted=wanted: since(before, figures(other)) == wanted)
    assert client.lookup([]) == ([], [])


def test_a_refused_chain_has_no_keys_and_the_others_have_theirs(driver: Driver, daemon: LocalDaemon) -> None:
    keys = names(3)

    def ask(client: Client) -> tuple[list[int], list[list[bool]]]:
        mine, theirs = client.namespace(new_layout()), client.namespace(new_layout(), owner="nobody")
        mine.put(keys, payloads(keys))
        chains = [(theirs, keys, 0, None), (mine, keys, 0, None)]
        prefixes, masks = client.lookup(chains, [(theirs, keys), (mine, keys)])
        return [each.blocks for each in prefixes], [mask.tolist() for mask in masks]

    with driver.client(daemon.url, deadline_s=10) as client:
        assert ask(client) == ([0, 3], [[False] * 3, [True] * 3])
    with (
        driver.client(daemon.url, deadline_s=10, strict=True) as client,
        pytest.raises(DeniedError, match="no such namespace"),
    ):
        ask(client)


def test_a_lookup_without_a_daemon_is_a_miss_for_all(driver: Driver) -> None:
    with driver.client("unix:///nowhere/kvstore.sock") as client:
        ns = client.namespace(new_layout())
        prefixes, masks = client.lookup([(ns, names(2), 2, None)], [(ns, names(3))], deadline_s=0.5)
        assert (prefixes, [mask.tolist() for mask in masks]) == ([StoredPrefix()], [[False] * 3])


@pytest.mark.parametrize("kind", ["chain", "independent"])
def test_kinds_are_different_namespaces(client: Client, kind: str) -> None:
    layout, keys = new_layout(), names(2)
    ns, other = (client.namespace(replace(layout, kind=k)) for k in ("chain", "independent"))
    if kind == "independent":
        ns, other = other, ns
    ns.put(keys, payloads(keys))
    assert (ns.get(keys, room_for(2)), other.get(keys, room_for(2))) == (2, 0)
