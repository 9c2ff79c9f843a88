"""The REST interface over real sockets, beside a real daemon."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvstore import Client, Layout, config, native
from kvstore.admin import app as application
from kvstore.admin.daemon_state import FRESH_S, _Shared
from kvstore.daemon.operator.latency import BOUNDS_S, Calls, Histogram
from kvstore.errors import ConfigError, DeniedError, UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.wire import messages as m
from tests.admin.serving import EXPIRED, OPERATE, VIEW, ServedAdmin, free_port, problem, self_signed, settings
from tests.daemons import (
    BLOCK,
    WITH_NVME,
    Peer,
    cli,
    eventually,
    got,
    idle,
    names,
    new_layout,
    payloads,
)
from tests.tenants import ATTACKER, VICTIM, Member, TenantDaemon, as_user, needs_root


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDaemon]:
    network = {"url": f"file://{tmp_path_factory.mktemp('network')}/shared"}
    with LocalDaemon({**WITH_NVME, "admin": settings(), "network": network}) as served:
        yield served


@pytest.fixture(scope="module")
def admin(daemon: LocalDaemon) -> Iterator[ServedAdmin]:
    with ServedAdmin(daemon) as served:
        yield served


@pytest.fixture
def client(daemon: LocalDaemon) -> Iterator[Client]:
    with Client(daemon.url, deadline_s=10, strict=True) as made:
        yield made


def readings(admin: ServedAdmin) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All samples of /metrics, by name and labels."""
    text = admin.get("/metrics", VIEW).body.decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# -- the whole of it


STATE = "/v1/devices/{name}/state"


# Beside a device that is fenced nothing is ready, and that is a 503.
# The check takes what a dry run has deleted for gone. That a deletion ends in 404, other tests see.
ALL = ("--exclude-path", STATE, "--exclude-checks", "use_after_free")
# A state that somebody else has changed meanwhile is refused, however valid the new one is.
STATES = ("--include-path", STATE, "--exclude-checks", "positive_data_acceptance")


@pytest.mark.parametrize(
    ("options", "examples"),
    [
        pytest.param(ALL, 5, id="all, a few examples"),
        pytest.param(ALL, 40, id="all", marks=pytest.mark.long),
        pytest.param(STATES, 10, id="states of devices"),
    ],
)
def test_responses_match_openapi(tmp_path: Path, options: tuple[str, ...], examples: int) -> None:
    # It changes settings and tokens too, so this is a daemon of its own.
    settled = {**WITH_NVME, "admin": settings()}
    with LocalDaemon(settled) as daemon, ServedAdmin(daemon) as admin, Client(daemon.url) as client:
        ns, keys = client.namespace(new_layout()), names(40)
        ns.put(keys, payloads(keys))
        _schemathesis(admin, tmp_path, examples, options)
        assert admin.get("/v1/tiers", OPERATE, over_tcp=True).status == 200, "it was nobody's meanwhile"


def _schemathesis(admin: ServedAdmin, tmp_path: Path, examples: int, options: tuple[str, ...]) -> None:
    port = admin.connection(over_tcp=True).port
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{port}/openapi.json"),
        *("--header", f"Authorization: Bearer {OPERATE}", "--max-examples", str(examples), "--seed", "1"),
        *("--checks", "all", "--no-color", *options),
    ]
    # An ETag that somebody made up is answered by 412, as is documented.
    accepted = '["2xx", "3xx", "401", "403", "404", "409", "412", "429", "5xx"]'
    (tmp_path / "schemathesis.toml").write_text(
        f"[checks.positive_data_acceptance]\nexpected-statuses = {accepted}\n"
    )
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout[-9000:] + admin.log.read_text()[-3000:]
    assert not re.search(r"\bTraceback\b", admin.log.read_text())


def test_every_path_is_documented_with_its_errors_and_needs_a_token(admin: ServedAdmin) -> None:
    paths = admin.get("/openapi.json").json["paths"]
    for path, methods in paths.items():
        for verb, method in methods.items():
            assert method["description"], path
            if path in ("/livez", "/readyz"):
                assert "security" not in method
                continue
            assert method["security"] == [{"token": []}], path
            assert {"401", "429"} <= set(method["responses"]), path
            asked = path.replace("{key}", "00").replace("{name}", "dram").replace("{id}", "0" * 32)
            problem(admin.get(asked, over_tcp=True, method=verb.upper()), 401)


# -- who


def test_on_tcp_every_caller_needs_a_valid_token(admin: ServedAdmin) -> None:
    for token in (VIEW, OPERATE):
        assert admin.get("/v1/tiers", token, over_tcp=True).status == 200
    for token, why in (("", "needs a token"), ("kvs_wrong", "unknown"), (EXPIRED, "expired")):
        answer = admin.get("/v1/tiers", token, over_tcp=True)
        assert why in problem(answer, 401)["detail"]
        assert answer.headers["www-authenticate"] == "Bearer"
    problem(admin.get("/v1/tiers", over_tcp=True, headers={"Authorization": "Basic b3BzOm9wcw=="}), 401)
    assert "unknown" in problem(admin.get("/v1/tiers", "nonsense"), 401)["detail"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:8080"}, 200),
        ({"Host": "127.0.0.1:8080"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "kvstore"}, 403),
        ({"Host": "localhost.", "Origin": "http://localhost."}, 403),
        ({"Host": "localhost@rebound:80"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "localhost", "Origin": "http://[::1"}, 403),
        ({"Host": "localhost:8080", "Origin": "http://localhost:8080"}, 200),
        ({"Host": "rebound.example:8080"}, 403),
        ({"Host": "192.0.2.1"}, 403),
        ({"Host": "localhost:8080", "Origin": "http://elsewhere.example"}, 403),
        ({"Host": "localhost:8080", "Origin": "http://localhost:9090"}, 403),
        ({"Host": "localhost:8080", "Origin": "null"}, 403),
        ({"Host": "rebound.example", "Origin": "http://rebound.example"}, 403),
        ({"Host": "rebound.example", "Authorization": f"Bearer {VIEW}"}, 200),
    ],
)
def test_pages_of_other_sites_cannot_use_the_socket_without_a_token(
    admin: ServedAdmin, headers: dict[str, str], status: int
) -> None:
    answer = admin.get("/v1/tiers", headers=headers)
    assert answer.status == status
    if status != 200:
        assert "token" in problem(answer, 403)["hint"]


@needs_root
def test_on_the_socket_other_users_than_the_daemons_need_a_token() -> None:
    tenants = f"[tenants.chat]\nuids = [{VICTIM}]\n"
    section = settings(socket_mode=0o666)
    with TenantDaemon({**WITH_NVME, "admin": section}, tenants) as daemon, ServedAdmin(daemon) as admin:
        assert admin.socket.stat().st_mode & 0o777 == 0o666
        assert admin.get("/v1/tiers").status == 200
        asked = as_user(ATTACKER, lambda: [_raw(admin.socket, token) for token in ("", VIEW)])
        assert asked == [b"401", b"200"]


def _raw(path: Path, token: str = "", asked: str = "/v1/tiers") -> bytes:
    """The status of an answer on the socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        header = f"Authorization: Bearer {token}\r\n" if token else ""
        sock.sendall(f"GET {asked} HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode())
        return sock.recv(4096).split()[1]


def test_tokens_and_rates_are_read_again_on_sighup() -> None:
    with LocalDaemon({**WITH_NVME, "admin": settings()}) as daemon, ServedAdmin(daemon) as admin:
        file = daemon.folder / "kvstore.toml"
        good = file.read_text()
        file.write_text(good.replace("requests_per_s = 10000", "requests_per_s = 0"))
        admin.process.send_signal(signal.SIGHUP)
        eventually(lambda: "not reloaded" in admin.log.read_text())
        assert admin.get("/v1/tiers", VIEW).status == 200
        file.write_text(good.replace('"grafana"', '"prometheus"').replace('"operate"', '"view"'))
        admin.process.send_signal(signal.SIGHUP)
        eventually(lambda: "reloaded: tokens" in admin.log.read_text())
        assert admin.get("/v1/tiers", VIEW).status == 200


# -- bad requests


def test_unknown_paths_and_invalid_queries_are_problems_with_a_hint(admin: ServedAdmin) -> None:
    assert problem(admin.get("/v1/tiers/hbm"), 404)["hint"] == "there are dram, nvme"
    assert problem(admin.get("/v1/tenants/nobody"), 404)["detail"] == "there is no tenant 'nobody'"
    assert "nobody" in problem(admin.get("/v1/namespaces?tenant=nobody"), 404)["detail"]
    assert problem(admin.get("/v1/nothing"), 404)["hint"]
    assert problem(admin.get("/v1/tiers", method="POST", body=b"{}"), 405)
    for path in ("/v1/tenants?limit=0", "/v1/tenants?limit=x", "/v1/namespaces?after=-1", "/v1/blocks/xyz"):
        assert problem(admin.get(path), 422)["hint"]
    assert "65 bytes" not in problem(admin.get(f"/v1/blocks/{'ab' * 65}"), 422)["detail"]
    assert problem(admin.get("/v1/blocks/ab?tenant=a%20b"), 422)["detail"]


def test_a_too_large_body_is_refused_before_it_is_read(admin: ServedAdmin) -> None:
    announced = {"Content-Length": str(1 << 40)}
    assert "at most" in problem(admin.get("/v1/tiers", headers=announced), 413)["hint"]
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(admin.socket))
        with suppress(BrokenPipeError):
            sock.sendall(b"GET /v1/tiers HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * (1 << 20) + b"\r\n\r\n")
        assert sock.recv(4096).split()[1] in (b"400", b"431")
    assert admin.get("/livez").status == 200


def test_garbage_ends_only_its_connection(admin: ServedAdmin) -> None:
    hello = b"\x16\x03\x01\x02\x00\x01\x00"
    for garbage in (hello, b"GET\r\n\r\n", b"GET /nothing HTTP/9.9\r\n\r\n", os.urandom(512)):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(admin.socket))
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            assert not sock.recv(4096).startswith(b"HTTP/1.1 2")
    assert admin.get("/livez").status == 200


def test_a_caller_above_its_rate_gets_429_and_others_do_not() -> None:
    section = settings(requests_per_s=5)
    with LocalDaemon({**WITH_NVME, "admin": section}) as daemon, ServedAdmin(daemon) as admin:
        answers = [admin.get("/v1/tiers", VIEW) for _ in range(100)]
        refused = [answer for answer in answers if answer.status == 429]
        assert len(refused) >= 20
        assert refused[0].headers["retry-after"] == "1"
        assert "requests_per_s" in problem(refused[0], 429)["hint"]
        assert admin.get("/v1/tiers", OPERATE).status == 200
        assert eventually(lambda: admin.get("/v1/tiers", VIEW).status == 200)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ('listen = "0.0.0.0:9400"', "set certificate and key, or listen on 127.0.0.1"),
        ('listen = "localhost:9400"', "'localhost:9400' is not an address to listen on"),
        ('listen = "127.0.0.1:http"', "'127.0.0.1:http' has no port"),
        ('listen = "127.0.0.1:65536"', "has no port"),
        ('certificate = "/etc/tls.crt"', "certificate and key belong together"),
        ("requests_per_s = 0", "admin.requests_per_s"),
        ('[[admin.tokens]]\nname = "a b"\nhash = "sha256:' + "0" * 64 + '"', "admin.tokens.0.name"),
        ('[[admin.tokens]]\nname = "a"\nhash = "secret"', "this is not sha256:"),
        ('[[admin.tokens]]\nname = "a"\nhash = "sha256:' + "0" * 64 + '"\nrole = "root"', "view"),
        (
            "\n".join(f'[[admin.tokens]]\nname = "a"\nhash = "sha256:{n}{"0" * 63}"' for n in (1, 2)),
            "two tokens have the same name",
        ),
        (
            "\n".join(f'[[admin.tokens]]\nname = "{n}"\nhash = "sha256:{"0" * 64}"' for n in (1, 2)),
            "two tokens have the same hash",
        ),
    ],
)
def test_an_unsafe_configuration_is_refused(lines: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.parse(f"[admin]\n{lines}\n")
    assert why in str(refused.value)
    assert "secret" not in str(refused.value)


def test_an_unusable_address_is_reported_at_the_start(admin: ServedAdmin, tmp_path: Path) -> None:
    taken = admin.connection(over_tcp=True).port
    for lines, why in (
        (f'socket = "{admin.socket}"', f"another process serves {admin.socket}: pid {admin.process.pid}"),
        (
            f'socket = "{tmp_path}/a.sock"\nlisten = "127.0.0.1:{taken}"',
            f"127.0.0.1 port {taken}: another process uses this port (set admin.listen",
        ),
        (
            f'socket = "{tmp_path}/a.sock"\nlisten = "127.0.0.1:0"\n'
            f'certificate = "{tmp_path}/no.crt"\nkey = "{tmp_path}/no.key"',
            f"{tmp_path}/no.crt",
        ),
    ):
        done = cli("admin", config=f"[admin]\n{lines}\n", folder=tmp_path)
        assert done.returncode == 2
        assert why in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    assert admin.get("/livez").status == 200


# -- health


def test_it_is_ready_while_the_daemon_serves_and_says_why_not() -> None:
    with LocalDaemon({**WITH_NVME, "admin": settings()}) as daemon, ServedAdmin(daemon) as admin:
        assert admin.get("/readyz").json == {"ready": True, "reasons": []}
        assert admin.get("/version").json["daemon"] == admin.get("/version").json["admin"]
        daemon.kill()
        away = eventually(lambda: (a := admin.get("/readyz", over_tcp=True)).status == 503 and a)
        assert away.json == {"ready": False, "reasons": ["the daemon does not answer"]}
        assert admin.get("/livez").json == {"status": "alive"}
        answer = admin.get("/v1/tiers")
        assert "`kvstore serve`" in problem(answer, 503)["hint"] or problem(answer, 503)["detail"]
        assert answer.headers["retry-after"] == "1"
        assert readings(admin) == {("kvstore_up", ()): 0.0}
        assert admin.get("/version").json["daemon"] == ""
        daemon.start()
        eventually(lambda: admin.get("/readyz").status == 200)
        assert readings(admin)["kvstore_up", ()] == 1.0


def test_a_daemon_outlives_its_interface(daemon: LocalDaemon, client: Client) -> None:
    own = LocalDaemon({**WITH_NVME, "admin": settings()})
    with own, Client(own.url, deadline_s=10, strict=True) as asking:
        admin = ServedAdmin(own)
        admin.start()
        admin.process.kill()
        admin.process.wait()
        ns, keys = asking.namespace(new_layout()), names(4)
        assert ns.put(keys, payloads(keys)).stored == 4
        admin.start()  # over what the one before left behind
        assert admin.get("/readyz").status == 200
        admin.stop()
        assert not admin.socket.exists()
        assert got(ns, keys) == 4


def test_tls_where_it_is_configured(tmp_path: Path) -> None:
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    self_signed(certificate, key)
    port = free_port()
    section = settings(listen=f"127.0.0.1:{port}", certificate=certificate, key=key)
    with LocalDaemon({**WITH_NVME, "admin": section}) as daemon, ServedAdmin(daemon) as admin:
        trusted = ssl.create_default_context(cafile=str(certificate))
        plain = socket.create_connection(("127.0.0.1", port), timeout=10)
        with trusted.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
            asked = f"GET /v1/tiers HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {VIEW}\r\n\r\n"
            sock.sendall(asked.encode())
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            sock.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert not sock.recv(4096).startswith(b"HTTP/1.1 2")
        assert admin.get("/livez").status == 200


def test_idle_connections_are_closed_for_new_ones(admin: ServedAdmin) -> None:
    with ExitStack() as idle:
        for n in range(140):
            sock = idle.enter_context(_tcp(admin))
            if n % 2:
                sock.sendall(b"PATCH /v1/settings HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx")
        for path in ("/livez", "/readyz"):
            assert admin.get(path, over_tcp=True).status == 200
        assert admin.get("/v1/tiers", VIEW, over_tcp=True).status == 200


def _tcp(admin: ServedAdmin) -> socket.socket:
    return socket.create_connection(("127.0.0.1", admin.connection(over_tcp=True).port), timeout=10)


@needs_root
def test_idle_users_are_closed_first_and_have_rates_of_their_own() -> None:
    section = settings(socket_mode=0o666, requests_per_s=5)
    tenants = f"[tenants.chat]\nuids = [{VICTIM}]\n"
    with TenantDaemon({**WITH_NVME, "admin": section}, tenants) as daemon, ServedAdmin(daemon) as admin:
        victim = socket.socket(socket.AF_UNIX)
        victim.connect(str(admin.socket))
        assert as_user(ATTACKER, lambda: _crowd(admin.socket))
        victim.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert victim.recv(4096).split()[1] == b"200", "the attacker has more that wait"
        victim.close()
        asked = as_user(ATTACKER, lambda: [_raw(admin.socket, asked="/livez") for _ in range(40)])
        assert b"429" in asked
        assert as_user(VICTIM, lambda: _raw(admin.socket, asked="/livez")) == b"200"


def _crowd(path: Path) -> bool:
    """Whether some of many connections that say nothing are closed."""
    socks = [socket.socket(socket.AF_UNIX) for _ in range(200)]
    for sock in socks:
        sock.connect(str(path))
    return bool(select.select(socks, [], [], 10)[0])


@pytest.mark.long
@pytest.mark.parametrize("body", [b"", b"Content-Length: 9\r\n\r\nx"])
def test_an_unfinished_request_is_closed(admin: ServedAdmin, body: bytes) -> None:
    with _tcp(admin) as sock:
        sock.settimeout(30)
        sock.sendall(b"PATCH /v1/settings HTTP/1.1\r\nHost: x\r\n" + body)
        with suppress(ConnectionResetError):
            while sock.recv(4096):
                pass


def test_requests_beyond_the_bound_are_refused_except_health_checks() -> None:
    async def run() -> list[int]:
        gate, told = asyncio.Event(), []

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            await gate.wait()

        async def send(message: Any) -> None:
            told.append(message.get("status", 0))

        bounded = application._Bounded(inner)

        async def ask(path: str) -> None:
            await bounded({"type": "http", "path": path, "headers": []}, None, send)  # type: ignore[arg-type]

        paths = ["/v1/tiers"] * application._MOST_CONCURRENT + ["/livez"] * 9 + ["/v1/tiers"] * 2
        asking = [asyncio.create_task(ask(path)) for path in paths]
        await asyncio.wait(asking[-2:])
        assert not any(task.done() for task in asking[:-2])
        gate.set()
        await asyncio.gather(*asking)
        await ask("/v1/tiers")
        return [status for status in told if status]

    assert asyncio.run(asyncio.wait_for(run(), 10)) == [503, 503]


def test_callers_of_the_same_answer_share_its_failure() -> None:
    asked: list[asyncio.Future[int]] = []

    def ask() -> asyncio.Future[int]:
        asked.append(asyncio.get_running_loop().create_future())
        return asked[-1]

    async def fail() -> list[object]:
        shared = _Shared(ask)
        waiting = [asyncio.create_task(shared.get()) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asked[0].set_exception(UnavailableError("away"))
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert [str(error) for error in asyncio.run(asyncio.wait_for(fail(), 10))] == ["away"] * 3
    assert len(asked) == 1


# -- what is seen


def test_tenants_and_namespaces_come_a_page_at_a_time() -> None:
    tenants = {f"t{n:02}": {"uids": [70000 + n]} for n in range(7)}
    section = {**WITH_NVME, "admin": settings(), "tenants": tenants}
    with (
        LocalDaemon(section) as daemon,
        ServedAdmin(daemon) as admin,
        Client(daemon.url, deadline_s=10, strict=True) as client,
    ):
        seen, after = [], ""
        while True:
            page = admin.get(f"/v1/tenants?limit=3&after={after}").json
            seen += [tenant["name"] for tenant in page["tenants"]]
            after = page["next"]
            if after is None:
                break
            assert len(page["tenants"]) == 3
        assert seen == ["default", *tenants]
        layouts = [new_layout() for _ in range(5)]
        for layout in layouts:
            client.namespace(layout).lookup([b"k"])
        first = admin.get("/v1/namespaces?limit=2").json
        rest = admin.get(f"/v1/namespaces?limit=1000&after={first['next']}").json
        both = first["namespaces"] + rest["namespaces"]
        assert rest["next"] is None
        assert {n["layout"]["model"] for n in both} == {layout.model for layout in layouts}
        assert admin.get("/v1/namespaces?tenant=t01").json == {"namespaces": [], "next": None}


def test_many_callers_cause_few_requests_to_the_daemon(admin: ServedAdmin, client: Client) -> None:
    def asked() -> int:
        calls = client.control("figures")["calls"]
        return sum(sum(row["counts"]) for row in calls if row["call"] == "control")

    before, started_s = asked(), time.monotonic()
    paths = ("status", "tiers", "tenants", "namespaces", "history")
    for n in range(100):
        assert admin.get(f"/v1/{paths[n % 5]}").status == 200
    readings = (time.monotonic() - started_s) / FRESH_S + 2
    # A status, a page of tenants and one of namespaces each time, figures for the hour, and our own look.
    assert asked() - before <= 3 * readings + 2


def test_a_block_is_explained(admin: ServedAdmin, client: Client) -> None:
    layout, keys = new_layout(), names(2, "explained")
    ns = client.namespace(layout)
    ns.put(keys, payloads(keys))
    eventually(lambda: idle(client.status()))
    [block] = admin.get(f"/v1/blocks/{keys[1].hex()}?model={layout.model}").json["blocks"]
    assert block["key"] == keys[1].hex()
    assert block["parent"] == keys[0].hex()
    assert [copy["tier"] for copy in block["copies"]] == ["dram", "nvme"]
    ns.invalidate(keys[1:])
    [block] = admin.get(f"/v1/blocks/{keys[1].hex().upper()}").json["blocks"]
    assert block["state"] == "not stored"
    assert block["decisions"][0]["what"] == "invalidated"
    assert admin.get("/v1/blocks/00").json == {"blocks": []}


def test_status_and_tiers_are_those_of_the_command(admin: ServedAdmin, daemon: LocalDaemon) -> None:
    shown = json.loads(cli("status", "--json", "--socket", str(daemon.socket)).stdout)
    status = admin.get("/v1/status").json
    assert (status["pid"], status["nvme_io"]) == (shown["pid"], shown["nvme_io"])
    assert status["copies"] == shown["copies"] == native.IMPLEMENTATION
    tiers = admin.get("/v1/tiers").json["tiers"]
    assert [(t["name"], t["limit_bytes"]) for t in tiers] == [
        (t["name"], t["limit_bytes"]) for t in shown["tiers"]
    ]
    assert admin.get("/v1/tiers/nvme").json["name"] == "nvme"


# -- metrics


def test_hits_and_misses_are_counted_by_tenant_and_tier_in_blocks_tokens_and_bytes() -> None:
    section = {**WITH_NVME, "dram": {"limit": "4MiB", "huge_pages": False}, "admin": settings()}
    with LocalDaemon(section) as daemon, ServedAdmin(daemon) as admin:
        with Client(daemon.url, deadline_s=10, strict=True) as client:
            layout = Layout(model="counted", block_bytes=BLOCK, block_tokens=16)
            ns, keys = client.namespace(layout), names(400)
            for at in range(0, 400, 50):
                ns.put(keys[at : at + 50], payloads(keys[at : at + 50]), parent=keys[at - 1] if at else None)
                eventually(lambda: idle(client.status()))
            out = np.empty((50, BLOCK), np.uint8)
            assert all(ns.get(keys[at : at + 50], out) == 50 for at in range(0, 400, 50))
            assert ns.get([*keys[390:], *names(3, "others")], out[:13]) == 10
            eventually(lambda: idle(client.status()))
            by_tier = [
                int(client.status()["counters"].get(f"hit_blocks_{tier}", 0)) for tier in ("dram", "nvme")
            ]
            assert sum(by_tier) == 410
            assert min(by_tier) > 0
        read = eventually(lambda: (r := readings(admin)).get(_miss("blocks")) == 3 and r)
        for tier, blocks in zip(("dram", "nvme"), by_tier, strict=True):
            labels = ("tenant", "default"), ("tier", tier)
            assert read["kvstore_hit_blocks_total", labels] == blocks
            assert read["kvstore_hit_tokens_total", labels] == 16 * blocks
            assert read["kvstore_hit_bytes_total", labels] == BLOCK * blocks
        assert (read[_miss("tokens")], read[_miss("bytes")]) == (48, 3 * BLOCK)
        assert read["kvstore_promoted_blocks_total", ()] >= by_tier[1]
        assert read["kvstore_decided_blocks_total", (("decision", "evicted"), ("tier", "dram"))] > 0


def _miss(unit: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return f"kvstore_missed_{unit}_total", (("tenant", "default"),)


def test_durations_are_counted_by_call_and_whether_it_waited(admin: ServedAdmin, client: Client) -> None:
    ns, keys = client.namespace(new_layout()), names(8)
    ns.put(keys, payloads(keys))
    with ns.acquire(keys) as lease:
        assert len(lease) == 8
    eventually(lambda: idle(client.status()))
    name = "kvstore_call_seconds"
    at_once = ("call", "acquire"), ("waited", "false")
    read = eventually(lambda: (r := readings(admin)).get((f"{name}_count", at_once)) and r)
    buckets = {
        dict(labels)["le"]: value
        for (sample, labels), value in read.items()
        if sample == f"{name}_bucket" and ("call", "acquire") in labels and ("waited", "false") in labels
    }
    ordered = [buckets[bound] for bound in sorted(buckets, key=float)]
    assert len(ordered) == len(BOUNDS_S) + 1
    assert ordered == sorted(ordered)
    assert ordered[-1] == read[f"{name}_count", at_once]
    assert 0 < read[f"{name}_sum", at_once] < 60
    assert read["kvstore_copy_seconds_count", (("source", "dram"), ("target", "nvme"))] > 0
    assert read["kvstore_loop_lag_seconds_count", ()] > 0


def test_a_scraper_gets_the_format_that_it_asks_for(admin: ServedAdmin) -> None:
    # What Prometheus sends.
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    answer = admin.get("/metrics", VIEW, headers={"Accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.body.endswith(b"# EOF\n")
    for header in ({}, {"Accept": "text/plain"}):
        answer = admin.get("/metrics", VIEW, headers=header)
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert b"# EOF" not in answer.body


def test_dashboards_alerts_and_runbooks_use_existing_metrics(admin: ServedAdmin) -> None:
    text = admin.get("/metrics", VIEW).body.decode()
    there = {
        name for family in text_string_to_metric_families(text) for name in _samples(family.name, family.type)
    }
    docs = Path(__file__).parents[2] / "docs"
    board = json.loads((docs / "grafana.json").read_text())
    rules = yaml.safe_load((docs / "alerts.yml").read_text())["groups"][0]["rules"]
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert all(panel["description"] for panel in board["panels"])
    asked += [rule["expr"] for rule in rules]
    assert all({"summary", "description"} <= set(rule["annotations"]) for rule in rules)
    asked.append((docs / "runbooks.md").read_text())
    named = {name for text in asked for name in re.findall(r"\bkvstore_\w+", text)}
    assert len(named) > 20
    assert named <= there


def _samples(name: str, kind: str) -> list[str]:
    """Names of the samples that a family of this kind has."""
    ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(kind, [""])
    return [name + end for end in ends]


def test_of_many_tenants_most_share_a_label() -> None:
    tenants: dict[str, Any] = {
        f"t{n:02}": {"tokens": [{"hash": f"sha256:{n:064x}"}], "uids": [70000 + n]} for n in range(30)
    }
    section = {**WITH_NVME, "admin": settings(), "tenants": tenants}
    with LocalDaemon(section) as daemon, ServedAdmin(daemon) as admin:
        with Client(daemon.url, deadline_s=10, strict=True) as client:
            ns, keys = client.namespace(new_layout()), names(30)
            ns.put(keys, payloads(keys))
            eventually(lambda: idle(client.status()))
            used = {tier["name"]: tier["used_bytes"] for tier in client.status()["tiers"]}
        read = eventually(lambda: (r := readings(admin)).get(("kvstore_blocks", ())) == 30 and r)
        by_tenant = {dict(labels)["tenant"] for (_, labels) in read if "tenant" in dict(labels)}
        assert len(by_tenant) == 21
        assert {"(other)", "default"} <= by_tenant
        for tier, nbytes in used.items():
            parts = [
                value
                for (name, labels), value in read.items()
                if name == "kvstore_tenant_used_bytes" and ("tier", tier) in labels
            ]
            assert sum(parts) == nbytes > 0


def test_a_histogram_has_every_duration_in_one_bucket() -> None:
    histogram = Histogram()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[0] * 1.01, BOUNDS_S[-1], 100.0):
        histogram.add(seconds)
    assert histogram.counts[:2] == [2, 1]
    assert histogram.counts[-2:] == [1, 1]
    calls = Calls()
    calls.add(m.Acquire, True, 0.1)
    assert [(row["call"], row["waited"], sum(row["counts"])) for row in calls.plain()] == [
        ("acquire", True, 1)
    ]


# -- the daemon's side


def test_only_operators_run_commands_and_only_known_ones(client: Client) -> None:
    with pytest.raises(DeniedError, match=r"there is no call 'nothing' \(there are status, figures, "):
        client.control("nothing")
    with pytest.raises(DeniedError, match="limit"):
        client.control("namespaces", limit="all")
    with pytest.raises(DeniedError, match="limit is 0"):
        client.control("namespaces", limit=0)
    with pytest.raises(DeniedError, match="no tenant 'nobody'"):
        client.control("namespaces", tenant="nobody")
    with pytest.raises(DeniedError, match="surprise"):
        client.control("figures", surprise=1)


@pytest.mark.parametrize(
    ("call", "arguments", "why"),
    [
        ("settings", {"part": 5}, "settings: part: Input should be a valid tuple"),
        ("settings", {"part": (1,)}, "settings: part.0: Input should be a valid string"),
        ("change", {}, "change: patch: Missing required argument"),
        ("change", {"patch": {b"limits": {}}}, "change: patch"),
        ("reload", {"x" * 5000: 1}, "Unexpected keyword argument"),
        ("pin", {"namespace": 5}, "pin: namespace: Input should be a valid string"),
        ("status", {b"after": 1}, "status: b'after' names no argument"),
        ("change", {b"patch": {}}, "change: b'patch' names no argument"),
    ],
)
def test_wrong_arguments_are_denied_with_a_reason(
    daemon: LocalDaemon, call: str, arguments: dict[Any, Any], why: str
) -> None:
    with Peer(daemon.socket) as peer:
        peer.hello()
        denied = peer.ask(m.Control(1, call, arguments))
        assert isinstance(denied, m.Denied), denied
        assert why in denied.why
        assert len(denied.why) < 300
        assert peer.ask(m.Ping(2)) == m.Value(2, 0), "the connection stays"


@needs_root
def test_tenants_do_not_control() -> None:
    tenants = f'[tenants.chat]\nuids = [{VICTIM}]\nrole = "admin"\n'
    with (
        TenantDaemon(WITH_NVME, tenants) as daemon,
        Member(daemon, VICTIM) as member,
        pytest.raises(DeniedError, match="only operators"),
    ):
        member.control("figures")
