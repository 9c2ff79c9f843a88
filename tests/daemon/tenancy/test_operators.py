"""A socket for operators alone, and what root and the daemon's user are where others can be them too."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.config import Config, parse
from kvstore.daemon import doctor
from kvstore.daemon.tenancy.auth import Authenticator, Principal, RefusedError, Role
from kvstore.errors import ConfigError, DeniedError, UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.wire import messages as m
from tests.admin.serving import ServedAdmin, settings
from tests.daemons import SMALL, Peer, names, new_layout, payloads
from tests.tenants import FRIEND, NOBODY, VICTIM, Member, TenantDaemon, acting_as, needs_root, peer_of

NOW = 1e9
TENANTS = f"""
[tenants.victim]
uids = [{VICTIM}]
role = "admin"
[tenants.friend]
uids = [{FRIEND}]
role = "read"
[tenants.default]
uids = [0]
role = "read"
"""


class WithOperators(TenantDaemon):
    """A daemon whose operators have a socket of their own, in a folder that everybody may enter."""

    def __init__(self, folder: Path, tenants: str, supervised: bool = False) -> None:
        super().__init__(SMALL, tenants, supervised=supervised)
        self.own = folder / "operators.sock"
        self._settings = {**self._settings, "daemon": {"socket_mode": 0o666, "operator_socket": self.own}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("operators")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[WithOperators]:
    with WithOperators(folder, f"[tenants.victim]\nuids = [{VICTIM}]\n") as served:
        yield served


def registry(text: str) -> Authenticator:
    return Authenticator(parse(f'[daemon]\noperator_socket = "/run/ops/kvstore.sock"\n{text}'), own_uid=990)


def test_operators_use_the_operator_socket() -> None:
    known = registry("[tenants.a]\nuids = [1, 0]\n")
    for uid in (0, 990):
        assert known.identify(uid, [uid], "", NOW, among_operators=True).operator
    assert known.identify(0, [0], "", NOW) == Principal(1, "a", Role.WRITE, operator=False)
    for uid, among in ((990, False), (7, False), (7, True), (1, True)):
        with pytest.raises(RefusedError):
            known.identify(uid, [uid], "", NOW, among)


def test_without_tenants_too() -> None:
    known = registry("")
    assert not known.identify(0, [0], "", NOW).operator
    assert known.identify(0, [0], "", NOW, among_operators=True).operator


@needs_root
def test_root_without_a_token_is_unknown_on_the_tenants_socket(daemon: WithOperators) -> None:
    with pytest.raises(UnavailableError, match="known by neither token, user nor group"):
        Member(daemon, 0).status()
    with Client(daemon.operators_url, strict=True, deadline_s=10) as operator:
        listed = [tenant["name"] for tenant in operator.control("tenants")["tenants"]]
    assert listed == ["default", "victim"]


@needs_root
def test_a_tenant_is_no_operator_by_reaching_their_socket(daemon: WithOperators) -> None:
    assert stat.S_IMODE(daemon.own.stat().st_mode) == 0o600
    daemon.own.chmod(0o666)
    for above in [each for each in daemon.own.parents if each != Path("/")]:
        above.chmod(above.stat().st_mode | 0o011)
    try:
        with acting_as(VICTIM):
            peer = Peer(daemon.own)
        with peer:
            peer.send(m.Hello(m.MAGIC, m.VERSION, ""))
            assert "known by neither" in peer.refused().why
    finally:
        daemon.own.chmod(0o600)


@needs_root
def test_a_reload_leaves_operators_operators(daemon: WithOperators) -> None:
    with Client(daemon.operators_url, strict=True, deadline_s=10) as operator:
        operator.control("tenants")
        assert "reloaded" in daemon.reload(f"[tenants.victim]\nuids = [{VICTIM}, {NOBODY}]\n")
        operator.control("tenants")


def test_without_tenants_no_peer_of_the_clients_socket_is_an_operator(tmp_path: Path) -> None:
    own = tmp_path / "operators.sock"
    keys = names(2)
    settings = {**SMALL, "daemon": {"operator_socket": own}}
    with LocalDaemon(settings) as daemon, Client(daemon.url, strict=True, deadline_s=10) as client:
        assert client.namespace(new_layout()).put(keys, payloads(keys)).stored == 2
        with pytest.raises(DeniedError, match="only operators"):
            client.control("tenants")
        with Client(daemon.operators_url, strict=True, deadline_s=10) as operator:
            assert operator.control("tenants")["tenants"]
        daemon.restart()
        with Client(daemon.operators_url, strict=True, deadline_s=10) as operator:
            assert operator.control("tenants")["tenants"]
    assert not own.exists()


def test_a_supervised_daemon_makes_it_anew(tmp_path: Path) -> None:
    settings = {**SMALL, "daemon": {"operator_socket": tmp_path / "operators.sock"}}
    with LocalDaemon(settings, supervised=True) as daemon:
        for end in (daemon.restart, daemon.kill):
            end()
            if not daemon.pid:
                daemon.start()
            with Client(daemon.operators_url, strict=True, deadline_s=10) as operator:
                assert operator.control("tenants")["tenants"]


def test_the_interface_asks_there(tmp_path: Path) -> None:
    own = {"daemon": {"operator_socket": tmp_path / "operators.sock"}, "admin": settings()}
    with LocalDaemon({**SMALL, **own}) as daemon, ServedAdmin(daemon) as admin:
        assert admin.get("/v1/tenants").status == 200


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_it_is_another_path(mode: int) -> None:
    with pytest.raises(ConfigError, match=r"daemon\.operator_socket: it is the same as daemon\.socket"):
        parse(f'[daemon]\nsocket = "/a/b"\nsocket_mode = {mode}\noperator_socket = "/a/b"\n')


@needs_root
def test_root_and_the_daemons_user_get_no_memory_for_reading_only() -> None:
    keys, layout = names(4), new_layout()
    with TenantDaemon(SMALL, TENANTS) as daemon, Member(daemon, VICTIM) as victim:
        ns = victim.namespace(layout)
        assert ns.put(keys, payloads(keys)).stored == 4
        assert ns.publish(["friend", "default"])
        for uid, told in ((FRIEND, m.Mapped), (0, m.Denied)):
            with peer_of(daemon, uid) as peer:
                space = peer.ask(m.Open(2, layout.to_map(), "victim", 0.0)).namespace
                granted = peer.ask(m.Acquire(3, space, 32, b"".join(keys), 1.0, 0.0))
                extent = int.from_bytes(granted.slots[4:8], "little")
                answer = peer.ask(m.Map(4, extent, False))
                assert type(answer) is told
                if told is m.Denied:
                    assert "can write to whatever memory they may read" in answer.why


@pytest.mark.parametrize(
    ("text", "level", "said"),
    [
        ("", "", ""),
        ("[daemon]\nsocket_mode = 0o666\n", "warn", "root is an operator"),
        ('[daemon]\noperator_socket = "/run/kvstore/own.sock"\n', "warn", "beside daemon.socket"),
        ('[daemon]\noperator_socket = "/run/ops/own.sock"\n', "warn", "beside daemon.socket"),
        (
            '[daemon]\noperator_socket = "/run/ops/own.sock"\n[admin]\nsocket = "/run/ops/admin.sock"\n',
            "ok",
            "by /run/ops/own.sock only",
        ),
        ("[tenants.a]\nuids = [0]\n", "warn", "root is a member"),
        ('[tenants.a]\nuids = [0]\nrole = "read"\n', "warn", "a only reads"),
    ],
)
def test_doctor_warns_if_every_peer_is_an_operator(text: str, level: str, said: str) -> None:
    config = parse(text) if text else Config()
    lines = doctor.operators(config)
    assert [line for line in lines if line.level == level and said in line.found] or (not said and not lines)
