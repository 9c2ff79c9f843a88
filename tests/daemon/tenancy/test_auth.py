"""Who a peer is, and what that lets it do: the registry, then real daemons and processes of other users."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from kvstore import AsyncClient, Client, Layout, PutResult
from kvstore.config import parse
from kvstore.daemon.tenancy import auth as tenants_module
from kvstore.daemon.tenancy.auth import Authenticator, Principal, RefusedError, Role, hash_of, new_token
from kvstore.errors import DeniedError, MisuseError, UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.wire import messages as m
from tests.daemons import (
    SMALL,
    Peer,
    cli,
    eventually,
    got,
    log_of,
    names,
    new_layout,
    payloads,
    room_for,
)
from tests.tenants import Member, needs_root

TOKENS = {name: new_token(bytes([i]) * 32) for i, name in enumerate("abcdefgh")}
UNKNOWN = "this peer is known by neither token, user nor group"
ABSENT = "there is no such namespace, or it is not published to this tenant"
NOW = datetime(2026, 6, 1, tzinfo=UTC).timestamp()
NOBODY = 4_000_000
"""A user id that nothing here has."""


def token_of(name: str, role: str = "write", expires: str = "") -> str:
    """A token of a tenant as the configuration has it."""
    until = f"\nexpires = {expires}" if expires else ""
    return f"\nhash = 'sha256:{hash_of(TOKENS[name]).hex()}'\nrole = '{role}'{until}\n"


def registry(text: str) -> Authenticator:
    return Authenticator(parse(text), own_uid=990)


# -- the registry


def test_without_tenants_everybody_is_the_default_tenant_and_may_do_everything() -> None:
    who = registry("").identify(NOBODY, [NOBODY], "whatever", NOW)
    assert who == Principal(0, "default", Role.ADMIN, operator=True, expires=math.inf)


def test_peers_are_known_by_user_then_by_primary_then_by_other_groups() -> None:
    known = registry(
        "[tenants.a]\nuids = [1]\n[tenants.b]\ngids = [2]\nrole = 'read'\n"
        "[tenants.c]\ngids = [3, 4]\nrole = 'admin'\n"
    )
    assert known.identify(1, [2, 3], "", NOW) == Principal(1, "a", Role.WRITE, operator=False)
    assert known.identify(7, [2, 3, 4], "", NOW) == Principal(2, "b", Role.READ, operator=False)
    assert known.identify(7, [9, 3, 4], "", NOW) == Principal(3, "c", Role.ADMIN, operator=False)
    with pytest.raises(RefusedError, match=UNKNOWN):
        known.identify(7, [9, 2, 3], "", NOW)  # groups of two tenants
    with pytest.raises(RefusedError, match=UNKNOWN):
        known.identify(7, [9], "", NOW)


def test_a_token_determines_the_tenant_for_every_user() -> None:
    known = registry(f"[tenants.a]\nuids = [1]\n[[tenants.b.tokens]]{token_of('a', 'admin')}")
    assert known.identify(1, [1], TOKENS["a"], NOW) == Principal(2, "b", Role.ADMIN, operator=False)


def test_operators_are_root_and_the_daemons_user() -> None:
    known = registry(f"[tenants.a]\nuids = [1, 990]\n[[tenants.b.tokens]]{token_of('a', 'read')}")
    assert known.identify(0, [0], "", NOW) == Principal(0, "default", Role.ADMIN, operator=True)
    assert known.identify(990, [1], "", NOW) == Principal(1, "a", Role.WRITE, operator=True)
    assert known.identify(0, [0], TOKENS["a"], NOW) == Principal(2, "b", Role.READ, operator=False)
    with pytest.raises(RefusedError):
        known.identify(0, [0], TOKENS["b"], NOW)


def test_two_tokens_are_valid_while_one_replaces_the_other() -> None:
    both = f"[[tenants.a.tokens]]{token_of('a')}[[tenants.a.tokens]]{token_of('b')}"
    known = registry(both)
    assert known.identify(7, [7], TOKENS["a"], NOW) == known.identify(7, [7], TOKENS["b"], NOW)
    known.reload(parse(f"[[tenants.a.tokens]]{token_of('b')}"))
    assert known.identify(7, [7], TOKENS["b"], NOW).name == "a"
    with pytest.raises(RefusedError, match=UNKNOWN):
        known.identify(7, [7], TOKENS["a"], NOW)


def test_a_refusal_tells_nothing_but_to_the_holder_of_an_expired_token() -> None:
    ends = "2026-06-01T00:00:00Z"
    known = registry(f"[tenants.a]\nuids = [1]\n[[tenants.a.tokens]]{token_of('a', expires=ends)}")
    texts = set()
    for uid, token in ((7, ""), (7, "kvs_wrong"), (1, "kvs_wrong"), (7, "x" * 100_000), (7, "\0é")):
        with pytest.raises(RefusedError) as refused:
            known.identify(uid, [7], token, NOW - 1)
        texts.add(str(refused.value))
    assert len(texts) == 1
    assert known.identify(7, [7], TOKENS["a"], NOW - 0.001).expires == NOW
    with pytest.raises(RefusedError, match="the token has expired"):
        known.identify(7, [7], TOKENS["a"], NOW)


def test_every_token_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"[[tenants.{name}.tokens]]{token_of(name)}" for name in "abcd")
    known, compared = registry(text), []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(tenants_module, "hmac", type("", (), {"compare_digest": staticmethod(compare)}))
    for name in "ad":
        compared.clear()
        assert known.identify(7, [7], TOKENS[name], NOW).name == name
        assert compared == [hash_of(TOKENS[each]) for each in "abcd"]


def test_numbers_stay_while_tenants_come_and_go() -> None:
    known = registry("[tenants.b]\n[tenants.a]\n")
    assert [known.number(name) for name in ("default", "b", "a", "c")] == [0, 1, 2, None]
    assert known.add("found-on-disk") == known.add("found-on-disk") == 3
    known.reload(parse("[tenants.c]\n[tenants.a]\nuids = [5]\n"))
    assert [known.number(name) for name in ("default", "b", "a", "c")] == [0, 1, 2, 4]
    assert known.identify(5, [5], "", NOW).tenant == 2
    assert [known.name(number) for number in range(5)] == ["default", "b", "a", "found-on-disk", "c"]
    assert known.names() == ["default", "b", "a", "found-on-disk", "c"]


@pytest.mark.parametrize("name", ["", "../a", "a/b", "a\n", "a\0b", ".a", "é", "a" * 65, "a b", None])
def test_invalid_tenant_names_get_no_number(name: Any) -> None:
    with pytest.raises(MisuseError, match="can't be a tenant's name"):
        registry("").add(name)


def test_a_token_is_32_random_bytes_that_need_no_quotes() -> None:
    made = new_token(bytes(range(224, 256)))
    assert made == "kvs_4OHi4-Tl5ufo6err7O3u7_Dx8vP09fb3-Pn6-_z9_v8"
    assert len(made) == 4 + 43


# -- processes


def as_user(uid: int, gids: Sequence[int], work: Callable[[], Any]) -> Any:
    """What `work` returns (as JSON has it) in a child process of that user; its first group is primary."""
    if os.getuid():
        print("skipped: only root can become somebody else")
        pytest.skip("only root can become somebody else")
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setgroups(gids[1:])
            os.setresgid(gids[0], gids[0], gids[0])
            os.setresuid(uid, uid, uid)
            os.write(writer, json.dumps(work()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(said)


@contextmanager
def serving(settings: Mapping[str, Any]) -> Iterator[LocalDaemon]:
    """A daemon whose socket everybody reaches."""
    with LocalDaemon({**SMALL, "daemon": {"socket_mode": 0o666}, **settings}) as daemon:
        os.chmod(daemon.folder, 0o711)
        yield daemon


def granted(name: str, role: str = "write") -> dict[str, str]:
    return {"hash": f"sha256:{hash_of(TOKENS[name]).hex()}", "role": role}


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    """Tenants one (tokens a: admin, b: write, c: read), two (d: admin) and three (e), and some users' ids."""
    tenants = {
        "one": {
            "uids": [NOBODY + 1],
            "tokens": [granted("a", "admin"), granted("b"), granted("c", "read")],
        },
        "two": {"gids": [NOBODY + 2], "role": "admin", "tokens": [granted("d", "admin")]},
        "three": {"tokens": [granted("e")]},
        "old": {"tokens": [{**granted("f"), "expires": datetime(2020, 1, 1, tzinfo=UTC)}]},
    }
    with serving({"tenants": tenants, "limits": {"namespaces_per_tenant": 64}}) as served:
        yield served


def client_of(daemon: LocalDaemon, token: str, strict: bool = True) -> Client:
    # Root gets no memory for reading only.
    if os.getuid():
        return Client(daemon.url, TOKENS.get(token, token), deadline_s=10, strict=strict)
    return Member(daemon, NOBODY + 7, strict=strict, token=TOKENS.get(token, token))


def tenants_in(status: Mapping[str, Any]) -> list[str]:
    return [tenant["name"] for tenant in status["tenants"]]


def test_the_kernel_says_which_user_and_groups_a_peer_has(daemon: LocalDaemon) -> None:
    def who() -> list[str]:
        with Client(daemon.url, "", deadline_s=10) as client:
            return tenants_in(client.status())

    def refused() -> str:
        try:
            who()
        except UnavailableError as error:
            return str(error)
        return "let in"

    assert as_user(NOBODY + 1, [NOBODY], who) == ["one"]
    assert as_user(NOBODY + 7, [NOBODY + 2], who) == ["two"]
    assert as_user(NOBODY + 7, [NOBODY, NOBODY + 5, NOBODY + 2], who) == ["two"]
    assert UNKNOWN in as_user(NOBODY + 7, [NOBODY], refused)
    assert UNKNOWN in as_user(NOBODY + 2, [NOBODY + 1], refused), "users and groups are not the same"


def test_unknown_wrong_and_missing_tokens_are_refused_in_the_same_words(daemon: LocalDaemon) -> None:
    def refused() -> list[str]:
        said = []
        for token in ("", "kvs_wrong", TOKENS["h"], "one", "\U0001f511", "x" * 3_000):
            with Peer(daemon.socket) as peer:
                peer.send(m.Hello(m.MAGIC, m.VERSION, token))
                said.append(peer.refused().why)
        return said

    assert as_user(NOBODY + 7, [NOBODY], refused) == [UNKNOWN] * 6
    with Peer(daemon.socket) as peer:
        peer.send(m.Hello(m.MAGIC, m.VERSION, TOKENS["f"]))
        assert peer.refused().why == "the token has expired"


def test_a_refused_client_misses_and_a_strict_one_raises(daemon: LocalDaemon) -> None:
    keys = names(2)
    with client_of(daemon, "kvs_wrong", strict=False) as client:
        ns = client.namespace(new_layout())
        assert ns.put(keys, payloads(keys)).denied == 2
        assert ns.lookup(keys) == 0
        assert ns.publish(["two"]) is False
        assert ns.invalidate() == client.invalidate(model="x") == 0
    with (
        client_of(daemon, "kvs_wrong") as client,
        pytest.raises(UnavailableError, match=f"{UNKNOWN}.*KVSTORE_TOKEN"),
    ):
        client.namespace(new_layout()).lookup(keys)


@needs_root
def test_roles_determine_the_permitted_requests(daemon: LocalDaemon) -> None:
    layout, keys = new_layout(), names(3)
    with client_of(daemon, "b") as writer, client_of(daemon, "c") as reader, client_of(daemon, "a") as admin:
        put, read = writer.namespace(layout), reader.namespace(layout)
        assert put.put(keys, payloads(keys)) == PutResult(stored=3)
        assert got(read, keys) == read.lookup(keys) == read.prefetch(keys) == 3
        for call in (
            lambda: read.put(keys, payloads(keys)),
            lambda: read.pin(keys, 1),
            lambda: read.unpin(keys),
            lambda: read.invalidate(keys),
        ):
            with pytest.raises(DeniedError, match="this peer's role is read, this needs write"):
                call()
        for space, client, role in ((read, reader, "read"), (put, writer, "write")):
            for call in (
                lambda space=space: space.publish(["two"]),
                lambda space=space: space.invalidate(),
                lambda client=client: client.invalidate(),
                lambda client=client: client.delete_tenant("one"),
            ):
                with pytest.raises(DeniedError, match=f"role is {role}, this needs admin"):
                    call()
        with pytest.raises(DeniedError, match="only operators delete other tenants"):
            admin.delete_tenant("two")
        with pytest.raises(DeniedError, match="only operators delete other tenants"):
            admin.delete_tenant("no-such-tenant")
        assert got(read, keys) == 3


def raw(daemon: LocalDaemon, token: str) -> Peer:
    """A peer that has said Hello."""
    peer = Peer(daemon.socket)
    assert isinstance(peer.ask(m.Hello(m.MAGIC, m.VERSION, TOKENS[token])), m.Welcome)
    return peer


def test_readers_get_no_writable_extent_and_refusals_do_not_reveal_extents(daemon: LocalDaemon) -> None:
    with raw(daemon, "c") as reader, raw(daemon, "b") as writer:
        answer = reader.ask(m.Map(1, 0, True))
        assert answer.why == "this peer's role is read, this needs write"
        assert not reader.fds
        for extent in (999, 2**64 - 1):
            for writable in (False, True):
                assert writer.ask(m.Map(2, extent, writable)).why == f"there is no extent {extent}"


def test_a_lease_of_another_connection_is_unknown(daemon: LocalDaemon) -> None:
    layout, [key] = new_layout(), names(1)
    with raw(daemon, "b") as owner, raw(daemon, "d") as other:
        owner.open(layout)
        room = owner.ask(m.Reserve(2, 1, 32, key, b"", 1.0))
        assert room.lease
        said = [other.ask(m.Commit(3, lease, bytes(8), b"\1")) for lease in (room.lease, room.lease + 10**6)]
        assert [type(answer) for answer in said] == [m.Denied, m.Denied]
        assert said[0].why.replace(str(room.lease), "N") == said[1].why.replace(str(room.lease + 10**6), "N")
        other.send(m.Abort(room.lease), m.Release(room.lease))
        assert other.ask(m.Ping(4)) == m.Value(4, 0)
        assert owner.ask(m.Commit(5, room.lease, bytes(8), b"\1")).value == 1


def test_the_same_layout_of_two_tenants_is_two_namespaces(daemon: LocalDaemon) -> None:
    layout, keys = new_layout(), names(3)
    with client_of(daemon, "a") as one, client_of(daemon, "d") as two:
        assert one.namespace(layout).put(keys, payloads(keys, salt=1)).stored == 3
        assert two.namespace(layout).lookup(keys) == 0
        assert two.namespace(layout).put(keys, payloads(keys, salt=2)).stored == 3
        assert got(one.namespace(layout), keys, salt=1) == got(two.namespace(layout), keys, salt=2) == 3


@needs_root
def test_a_published_namespace_is_read_until_it_is_taken_back(daemon: LocalDaemon) -> None:
    layout, keys = new_layout(), names(4)
    with (
        client_of(daemon, "a") as one,
        client_of(daemon, "d") as two,
        client_of(daemon, "e") as three,
        client_of(daemon, "d", strict=False) as patient,
    ):
        own = one.namespace(layout)
        own.put(keys, payloads(keys))
        theirs, mine = two.namespace(layout, owner="one"), patient.namespace(layout, owner="one")
        assert got(mine, keys) == 0, "not published yet"
        with pytest.raises(DeniedError, match=ABSENT):
            theirs.lookup(keys)
        assert own.publish(["two"]) is True
        assert got(mine, keys) == got(theirs, keys) == 4, "the same objects, without a new connection"
        with pytest.raises(DeniedError, match=ABSENT):
            three.namespace(layout, owner="one").lookup(keys)
        for call in (
            lambda: theirs.put(keys, payloads(keys)),
            lambda: theirs.invalidate(keys),
            lambda: theirs.pin(keys, 1),
            lambda: theirs.publish(["three"]),
            theirs.invalidate,
        ):
            with pytest.raises(DeniedError, match="this namespace is another tenant's"):
                call()
        assert own.publish([]) is True
        assert got(mine, keys) == 0
        for call in (
            lambda: theirs.lookup(keys),
            lambda: theirs.get(keys, room_for(4)),
            lambda: theirs.put(keys, payloads(keys)),
            lambda: theirs.publish(["two"]),
        ):
            with pytest.raises(DeniedError, match=ABSENT):
                call()
        own.publish(["two"])
        assert got(mine, keys) == 4
        assert got(own, keys) == 4


def test_absent_and_unpublished_namespaces_get_the_same_refusal(
    daemon: LocalDaemon,
) -> None:
    hidden, taken, nowhere = new_layout(), new_layout(), new_layout()
    with client_of(daemon, "a") as one, raw(daemon, "d") as peer:
        one.namespace(hidden).lookup(names(1))
        one.namespace(taken).publish(["two"])
        number = peer.ask(m.Open(1, taken.to_map(), "one", 0.0)).namespace
        assert peer.ask(m.Lookup(1, number, 32, bytes(32), 0.0, 0.0)).value == 0
        one.namespace(taken).publish([])
        said = [
            peer.ask(m.Lookup(1, number, 32, bytes(32), 0.0, 0.0)),
            peer.ask(m.Reserve(1, number, 32, bytes(32), b"", 0.1)),
            *(peer.ask(m.Open(1, layout.to_map(), "one", 0.0)) for layout in (hidden, taken, nowhere)),
            peer.ask(m.Open(1, hidden.to_map(), "no-such-tenant", 0.0)),
            peer.ask(m.Open(1, hidden.to_map(), "../../etc", 0.0)),
        ]
        assert {(type(answer), answer.why) for answer in said} == {(m.Denied, ABSENT)}
        assert len({answer.hint for answer in said}) == 1


def test_a_whole_namespace_and_all_of_a_model_are_forgotten(daemon: LocalDaemon) -> None:
    keys, model = names(2), new_layout().model
    layouts = [Layout(model, 4096, revision=revision) for revision in ("r1", "r2", "r3")]
    with client_of(daemon, "a") as client, client_of(daemon, "d") as other:
        for layout in layouts:
            client.namespace(layout).put(keys, payloads(keys, 4096))
        other.namespace(layouts[0]).put(keys, payloads(keys, 4096))
        client.namespace(layouts[0]).invalidate()
        assert [client.namespace(layout).lookup(keys) for layout in layouts] == [0, 2, 2]
        client.invalidate(model, "r2")
        assert [client.namespace(layout).lookup(keys) for layout in layouts] == [0, 0, 2]
        assert client.invalidate("no such model") == 0
        client.invalidate(model)
        assert [client.namespace(layout).lookup(keys) for layout in layouts] == [0, 0, 0]
        assert got(other.namespace(layouts[0]), keys) == 2
        assert client.namespace(layouts[0]).put(keys, payloads(keys, 4096)).stored == 2


def test_too_many_namespaces_of_a_tenant_are_denied_and_named() -> None:
    tenants = {"one": {"tokens": [granted("a")]}, "two": {"tokens": [granted("d", "admin")]}}
    with (
        serving({"tenants": tenants, "limits": {"namespaces_per_tenant": 3}}) as served,
        client_of(served, "a") as one,
        client_of(served, "d") as two,
    ):
        layouts = [new_layout() for _ in range(4)]
        for layout in layouts[:3]:
            one.namespace(layout).put([b"k"], payloads([b"k"]))
        with pytest.raises(DeniedError, match=r"3 namespaces .*limits\.namespaces_per_tenant"):
            one.namespace(layouts[3]).lookup([b"k"])
        assert one.namespace(layouts[2]).lookup([b"k"]) == 1
        assert two.namespace(layouts[3]).publish(["one"])
        assert one.namespace(layouts[3], owner="two").lookup([b"k"]) == 0
        with client_of(served, "a") as fresh:
            assert fresh.namespace(layouts[3], owner="two").lookup([b"k"]) == 0


def test_members_see_their_own_tenant_and_operators_all(daemon: LocalDaemon) -> None:
    with client_of(daemon, "c") as member, raw(daemon, "d"), raw(daemon, "e"):
        status = member.status()
        assert tenants_in(status) == ["one"]
        assert status["connections"] == 1
        if os.getuid() == 0:
            with Client(daemon.url, "") as operator:
                assert {"one", "two", "three", "old"} <= set(tenants_in(operator.status()))
                assert operator.status()["connections"] >= 4


def reload(daemon: LocalDaemon, text: str) -> str:
    """What the daemon says when its tenants are those of `text`."""
    file, before = daemon.folder / "kvstore.toml", len(log_of(daemon))
    file.write_text(file.read_text().split("[tenants]")[0] + text)
    os.kill(daemon.pid, signal.SIGHUP)
    said: str = eventually(lambda: "reloaded" in (log := log_of(daemon)[before:]) and log)
    return said


def test_a_reload_closes_connections_whose_authentication_changed() -> None:
    tenants = {
        name: {"tokens": [granted(token)]} for name, token in (("one", "a"), ("two", "d"), ("six", "e"))
    }
    with serving({"tenants": tenants}) as served:
        layout, keys = new_layout(), names(2)
        peers = {token: raw(served, token) for token in "ade"}
        peers["d"].open(layout)
        reload(
            served, f"[tenants]\n[[tenants.two.tokens]]{token_of('d')}[[tenants.seven.tokens]]{token_of('e')}"
        )
        assert peers["a"].refused().why == UNKNOWN
        assert peers["e"].refused().why == "this peer is another tenant now"
        assert isinstance(peers["d"].ask(m.Lookup(3, 1, 32, keys[0], 0.0, 0.0)), m.Found)
        said = reload(served, f"[tenants]\n[[tenants.two.tokens]]{token_of('d', 'read')}")
        assert "tenants.seven is gone" in said
        assert "this needs write" in peers["d"].ask(m.Reserve(4, 1, 32, keys[0], b"", 0.1)).why
        reload(served, f"[tenants]\n[[tenants.two.tokens]]{token_of('d', expires='2020-01-01T00:00:00Z')}")
        assert peers["d"].refused().why == "the token has expired"
        for peer in peers.values():
            peer.close()


def test_a_token_ends_on_open_connections_too() -> None:
    with serving({"tenants": {"one": {"tokens": [granted("a")]}}}) as served:
        ends = datetime.fromtimestamp(datetime.now(UTC).timestamp() + 2.0, UTC)
        reload(served, f"[tenants]\n[[tenants.one.tokens]]{token_of('a', expires=ends.isoformat())}")
        with raw(served, "a") as peer:
            answer = peer.ask(m.Ping(1))
            assert answer == m.Value(1, 0)
            while isinstance(answer, m.Value):
                answer = peer.ask(m.Ping(1))
            assert isinstance(answer, m.Failure)
            assert answer.why == "the token has expired"
            assert datetime.now(UTC) >= ends


# -- the command


def test_a_new_token_works_with_the_printed_configuration() -> None:
    made = cli("tenant", "token", "team.a", "--role", "admin", "--expires", "90d")
    assert made.returncode == 0, made.stderr
    token, *lines = [line for line in made.stdout.splitlines() if line]
    [tenant] = parse("\n".join(lines)).tenants.items()
    assert tenant[0] == "team.a"
    [entry] = tenant[1].tokens
    assert (entry.digest, entry.role) == (hash_of(token), "admin")
    assert entry.expires is not None
    assert 89.9 < (entry.expires - datetime.now(UTC)).total_seconds() / 86400 < 90
    again = cli("tenant", "token", "team.a", "--json")
    shown = json.loads(again.stdout)
    assert shown["token"] != token
    assert shown["hash"] == f"sha256:{hash_of(shown['token']).hex()}"
    assert (shown["tenant"], shown["role"], shown["expires"]) == ("team.a", "write", None)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("token", "../a"), "'../a' can't be a tenant's name"),
        (("token", "a", "--expires", "soon"), "--expires: 'soon' is not a duration"),
        (("token", "a", "--expires", "0"), "--expires is 0"),
        (("delete", "a"), "this deletes all blocks of tenant a (add --yes"),
        (("delete", "a/b", "--yes"), "'a/b' can't be a tenant's name"),
    ],
)
def test_the_token_command_names_invalid_arguments(args: tuple[str, ...], why: str) -> None:
    ran = cli("tenant", *args)
    assert ran.returncode == 2
    assert f"error: {why}" in ran.stderr


def test_tenants_are_listed_and_deleted(daemon: LocalDaemon) -> None:
    keys, layout = names(2), new_layout()
    with client_of(daemon, "e") as three:
        ns = three.namespace(layout)
        ns.put(keys, payloads(keys))
        listed = cli("tenant", "list", "--socket", str(daemon.socket), KVSTORE_TOKEN=TOKENS["e"])
        assert listed.returncode == 0, listed.stderr
        assert "three" in listed.stdout
        assert "two" not in listed.stdout
        refused = cli(
            "tenant", "delete", "two", "--yes", "--socket", str(daemon.socket), KVSTORE_TOKEN=TOKENS["a"]
        )
        assert refused.returncode == 2
        assert "only operators delete other tenants" in refused.stderr
        if os.getuid() == 0:
            gone = cli("tenant", "delete", "three", "--yes", "--json", "--socket", str(daemon.socket))
            assert json.loads(gone.stdout)["tenant"] == "three", gone.stderr
            assert ns.lookup(keys) == 0
            assert ns.put(keys, payloads(keys)).stored == 2
            assert got(ns, keys) == 2
            unknown = cli("tenant", "delete", "no-such", "--yes", "--socket", str(daemon.socket))
            assert "there is no tenant 'no-such'" in unknown.stderr


def test_a_configuration_is_checked_with_its_tenants(tmp_path: Any) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(
        f"[[tenants.a.tokens]]{token_of('a', expires='2020-01-01T00:00:00Z')}"
        f"[[tenants.a.tokens]]{token_of('b')}"
        "[tenants.a.dram]\nfloor = '1MiB'\n[tenants.b]\nuids = [1, 2]\nshare = 2.5\nnvme = {limit = '1GiB'}\n"
    )
    ran = cli("config", "check", str(file))
    assert ran.stdout.splitlines() == [
        f"{file}: ok",
        "tenant a: 0 users, 0 groups, 2 tokens (1 expired), share 1, "
        "dram from 1MiB to all, nvme from 0B to all",
        "tenant b: 2 users, 0 groups, 0 tokens, share 2.5, dram from 0B to all, nvme from 0B to 1GiB",
    ]


def test_the_asyncio_client_publishes_and_deletes_too(daemon: LocalDaemon) -> None:
    layout, keys = new_layout(), names(3)

    async def work() -> None:
        async with (
            AsyncClient(daemon.url, TOKENS["a"], 10, strict=True) as one,
            AsyncClient(daemon.url, TOKENS["d"], 10) as two,
        ):
            own, theirs = one.namespace(layout, ttl_s=3600), two.namespace(layout, owner="one")
            assert (await own.put(keys, payloads(keys))).stored == 3
            assert await theirs.lookup(keys) == 0
            assert await own.publish(["two"]) is True
            assert await theirs.lookup(keys) == 3
            assert await theirs.publish([]) is False
            await own.invalidate()
            assert await own.lookup(keys) == 0
            assert await one.invalidate(model="no such model") == 0
            with pytest.raises(DeniedError, match="only operators"):
                await one.delete_tenant("two")

    asyncio.run(work())
