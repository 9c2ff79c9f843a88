"""What the REST interface changes: by whom, at the same time as others, and what is written down of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.admin.access import audit
from kvstore.errors import DeniedError
from kvstore.lab.local_daemon import LocalDaemon
from tests.admin.serving import OPERATE, VIEW, Answer, ServedAdmin, problem, settings
from tests.daemons import WITH_NVME, eventually, got, idle, names, new_layout, payloads

ABSENT = "0" * 32
CHANGES = (
    ("DELETE", f"/v1/namespaces/{ABSENT}/blocks"),
    ("DELETE", "/v1/tenants/nobody/blocks"),
    ("PUT", f"/v1/namespaces/{ABSENT}/readers"),
    ("PUT", "/v1/devices/none/state"),
    ("DELETE", f"/v1/namespaces/{ABSENT}/blocks/00"),
    ("PUT", f"/v1/namespaces/{ABSENT}/blocks/00/pin"),
    ("DELETE", f"/v1/namespaces/{ABSENT}/blocks/00/pin"),
    ("POST", f"/v1/namespaces/{ABSENT}/blocks/00/prefetch"),
    ("POST", f"/v1/namespaces/{ABSENT}/prefetch"),
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDaemon]:
    section = settings(audit_log=tmp_path_factory.mktemp("audit") / "audit")
    tenants = {"chat": {"uids": [70001]}, "batch": {"uids": [70002]}}
    with LocalDaemon({**WITH_NVME, "admin": section, "tenants": tenants}) as served:
        yield served


@pytest.fixture(scope="module")
def admin(daemon: LocalDaemon) -> Iterator[ServedAdmin]:
    with ServedAdmin(daemon) as served:
        yield served


@pytest.fixture
def client(daemon: LocalDaemon) -> Iterator[Client]:
    with Client(daemon.url, deadline_s=10, strict=True) as made:
        yield made


def put(client: Client, n: int) -> tuple[Any, str, list[bytes]]:
    """A namespace, the start of its path, and n keys that are in it, on both tiers."""
    ns, keys = client.namespace(new_layout()), names(n)
    assert ns.put(keys, payloads(keys)).stored == n
    eventually(lambda: idle(client.status()))
    return ns, f"/v1/namespaces/{ns.layout.fingerprint('default').hex()}", keys


def change(admin: ServedAdmin, method: str, path: str, body: object = None, **more: Any) -> Answer:
    raw = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **more.pop("headers", {})}
    return admin.get(path, OPERATE, method=method, body=raw, headers=headers, **more)


def audit_log(daemon: LocalDaemon) -> Path:
    text = (daemon.folder / "kvstore.toml").read_text()
    return Path(text.split('audit_log = "')[1].split('"')[0])


def written(daemon: LocalDaemon, end: str = "") -> list[dict[str, Any]]:
    """What the audit log says, or (`.refused`) that of refusals."""
    file = audit_log(daemon)
    return [json.loads(line) for line in file.with_name(file.name + end).read_text().splitlines()]


# -- who


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_changes_need_a_token_with_role_operate(
    admin: ServedAdmin, daemon: LocalDaemon, method: str, path: str
) -> None:
    body = {"PUT": b'{"tenants": [], "ttl_s": 1}'}.get(method)
    asked = {"method": method, "body": body, "over_tcp": True}
    assert "role operate" in problem(admin.get(path, VIEW, **asked), 403)["hint"]
    problem(admin.get(path, **asked), 401)
    last = written(daemon, ".refused")[-2:]
    assert [(line["who"], line["status"], line["path"]) for line in last] == [
        ("grafana", 403, path),
        ("", 401, path),
    ]


# -- devices and policy


def test_a_device_is_fenced_drained_and_given_back(admin: ServedAdmin, client: Client) -> None:
    ns, _, keys = put(client, 4)
    path = "/v1/devices/nvme"
    serving = admin.get(path, VIEW)
    assert serving.headers["etag"] == '"serving"'
    assert serving.json["written_in_a_day_bytes"] >= 4 * 16384
    assert serving.json["drive_writes_a_day"] == pytest.approx(
        serving.json["written_in_a_day_bytes"] / (64 << 20)
    )
    try:
        fenced = change(admin, "PUT", f"{path}/state", {"state": "fenced"})
        assert (fenced.status, fenced.json["state"], fenced.json["readable"]) == (200, "fenced", False)
        said = eventually(lambda: (r := admin.get("/readyz")).status == 503 and r.json)
        assert said["reasons"] == ["nvme: fenced by an operator"]
        written = client.status()["counters"]["written_blocks"]
        assert ns.put(names(3, "fenced"), payloads(names(3, "fenced"))).stored == 3
        eventually(lambda: idle(client.status()))
        assert client.status()["counters"]["written_blocks"] == written
        assert got(ns, keys) == 4, "what DRAM has is served"
        late = {"If-Match": '"serving"'}
        stale = change(admin, "PUT", f"{path}/state", {"state": "draining"}, headers=late)
        assert "fenced" in problem(stale, 412)["hint"]
        assert stale.headers["etag"] == '"fenced"'
        current = {"If-Match": '"fenced"'}
        assert change(admin, "PUT", f"{path}/state", {"state": "draining"}, headers=current).status == 200
        drains = admin.get("/v1/devices").json["devices"][1]
        assert (drains["readable"], drains["writable"]) == (True, False)
        eventually(lambda: admin.get("/readyz").status == 200)
    finally:
        assert change(admin, "PUT", f"{path}/state", {"state": "serving"}).json["writable"]


def test_unknown_devices_and_invalid_states_are_refused(admin: ServedAdmin) -> None:
    assert problem(admin.get("/v1/devices/tape", VIEW), 404)["hint"] == "there are dram, nvme"
    assert (
        "dram" in problem(change(admin, "PUT", "/v1/devices/dram/state", {"state": "fenced"}), 409)["detail"]
    )
    assert change(admin, "PUT", "/v1/devices/dram/state", {"state": "serving"}).status == 200
    problem(change(admin, "PUT", "/v1/devices/nvme/state", {"state": "off"}), 422)


def test_the_policy_is_shown(admin: ServedAdmin) -> None:
    said = admin.get("/v1/policy", VIEW).json
    assert (said["name"], said["wanted"], said["pools_left"]) == ("lru", "lru", 0)
    assert {"hazard", "arc"} <= set(said["available"])
    assert [tier["tier"] for tier in said["tiers"]] == ["dram", "nvme"]


# -- blocks


def test_a_block_is_pinned_and_let_go(admin: ServedAdmin, client: Client) -> None:
    _, path, keys = put(client, 2)
    block = f"{path}/blocks/{keys[1].hex()}"
    assert change(admin, "PUT", f"{block}/pin", {"ttl_s": 60}).json == {"blocks": 1}
    [known] = client.explain(keys[1:], model=_model(admin, path))
    assert 50 < known["pinned_s"] <= 60
    assert change(admin, "DELETE", f"{block}/pin").json == {"blocks": 1}
    [known] = client.explain(keys[1:], model=_model(admin, path))
    assert known["pinned_s"] is None


def _model(admin: ServedAdmin, path: str) -> str:
    return str(admin.get(path).json["layout"]["model"])


def test_a_block_is_brought_up_and_forgotten(admin: ServedAdmin, client: Client) -> None:
    ns, path, keys = put(client, 3)
    assert change(admin, "POST", f"{path}/blocks/{keys[0].hex()}/prefetch").json == {"blocks": 1}
    assert change(admin, "DELETE", f"{path}/blocks/{keys[1].hex()}").json == {"blocks": 1}
    assert got(ns, keys) == 1
    for method, end in (("DELETE", ""), ("DELETE", "/pin"), ("POST", "/prefetch")):
        said = problem(change(admin, method, f"{path}/blocks/{keys[1].hex()}{end}"), 404)
        assert keys[1].hex() in said["hint"]


# -- wholes


def test_a_namespace_is_emptied_and_can_be_used_again(admin: ServedAdmin, client: Client) -> None:
    ns, path, keys = put(client, 8)
    other, _, _ = put(client, 4)
    assert change(admin, "DELETE", f"{path}/blocks").json == {"blocks": 8}
    assert (got(ns, keys), got(other, keys[:4])) == (0, 4)
    assert ns.put(keys, payloads(keys)).stored == 8
    assert admin.get(path).json["id"] == path.rpartition("/")[2]


def test_all_blocks_of_a_tenant_are_deleted() -> None:
    with (
        LocalDaemon({**WITH_NVME, "admin": settings()}) as daemon,
        ServedAdmin(daemon) as admin,
        Client(daemon.url, deadline_s=10, strict=True) as client,
    ):
        ns, _, keys = put(client, 5)
        assert change(admin, "DELETE", "/v1/tenants/default/blocks").json == {"blocks": 5}
        assert got(ns, keys) == 0
        assert "audit: " in admin.log.read_text()


def test_readers_of_a_namespace_change_only_with_the_current_etag(admin: ServedAdmin, client: Client) -> None:
    _, path, _ = put(client, 1)
    seen = admin.get(path)
    assert seen.json["published_to"] == []
    held = {"If-Match": seen.headers["etag"]}
    changed = change(admin, "PUT", f"{path}/readers", {"tenants": ["chat"]}, headers=held)
    assert changed.json["published_to"] == ["chat"]
    late = change(admin, "PUT", f"{path}/readers", {"tenants": ["batch"]}, headers=held)
    assert "published to chat" in problem(late, 412)["hint"]
    again = {"If-Match": late.headers["etag"]}
    both = change(admin, "PUT", f"{path}/readers", {"tenants": ["chat", "batch"]}, headers=again)
    assert both.json["published_to"] == ["batch", "chat"]
    assert change(admin, "PUT", f"{path}/readers", {"tenants": []}).json["published_to"] == []


def test_of_edits_at_the_same_time_one_wins_and_the_others_are_told(
    admin: ServedAdmin, client: Client
) -> None:
    _, path, _ = put(client, 1)
    for _ in range(5):
        held = {"If-Match": admin.get(path).headers["etag"]}
        readers = [["chat"], ["batch"], ["chat", "batch"], []]
        now = admin.get(path).json["published_to"]
        readers = [names for names in readers if sorted(names) != now]

        def edit(tenants: list[str], held: dict[str, str] = held) -> Answer:
            return change(admin, "PUT", f"{path}/readers", {"tenants": tenants}, headers=held)

        with ThreadPoolExecutor(len(readers)) as pool:
            answers = list(pool.map(edit, readers))
        assert sorted(answer.status for answer in answers) == [200, 412, 412]
        [won] = [tenants for tenants, answer in zip(readers, answers, strict=True) if answer.status == 200]
        assert admin.get(path).json["published_to"] == sorted(won)


# -- what makes no sense


def test_unknown_objects_and_invalid_requests_are_problems(admin: ServedAdmin, client: Client) -> None:
    _, path, keys = put(client, 1)
    bodies = {"readers": {"tenants": []}, "pin": {"ttl_s": 1.0}, "state": {"state": "fenced"}}
    bodies[f"{ABSENT}/prefetch"] = {"keys": ["00"]}
    for method, absent in CHANGES:
        body = next((bodies[end] for end in bodies if absent.endswith(end)), None)
        assert problem(change(admin, method, absent, body), 404)["hint"]
    pin = f"{path}/blocks/{keys[0].hex()}/pin"
    for body in ({}, {"ttl_s": 0}, {"ttl_s": 1e9}, {"ttl_s": "long"}, {"ttl_s": 1, "more": 1}, [], "x", 7):
        problem(change(admin, "PUT", pin, body), 422)
    for tenants in ("chat", ["a b"], [1], [f"t{n}" for n in range(65)]):
        problem(change(admin, "PUT", f"{path}/readers", {"tenants": tenants}), 422)
    headers = {"Content-Type": "application/json"}
    for raw, status in ((b"{", 422), (b'{"ttl_s": "\xff"}', 400), (b"x" * (65 << 10), 413)):
        problem(admin.get(pin, OPERATE, method="PUT", body=raw, headers=headers), status)
    problem(change(admin, "DELETE", "/v1/namespaces/xyz/blocks"), 422)


def test_an_unsupported_method_is_answered_with_the_allowed_ones(admin: ServedAdmin) -> None:
    answer = change(admin, "POST", f"/v1/namespaces/{ABSENT}/blocks/00/pin")
    problem(answer, 405)
    assert answer.headers["allow"] == "DELETE, PUT"


def test_a_body_of_unknown_length_is_bounded(admin: ServedAdmin) -> None:
    head = f"PUT /v1/namespaces/{ABSENT}/readers HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(admin.socket))
        sock.sendall(head.encode() + 5 * chunk)
        assert sock.recv(4096).startswith(b"HTTP/1.1 413")


# -- what is written down


def test_every_try_is_written_down_before_it_is_answered(
    admin: ServedAdmin, daemon: LocalDaemon, client: Client
) -> None:
    _, path, keys = put(client, 1)
    pin = f"{path}/blocks/{keys[0].hex()}/pin"
    change(admin, "PUT", pin, {"ttl_s": 5})
    last = written(daemon)[-1]
    assert (last["who"], last["method"], last["path"], last["status"]) == ("ops", "PUT", pin, 200)
    assert json.loads(last["body"]) == {"ttl_s": 5}
    assert last["at"].endswith("+00:00")
    before = len(written(daemon))
    admin.get(path, OPERATE)
    assert len(written(daemon)) == before, "looking is not written down"
    admin.get(pin, method="DELETE")
    assert written(daemon)[-1]["who"] == f"uid {os.getuid()}"
    assert OPERATE not in Path(daemon.folder / "admin.log").read_text()


def test_refusals_never_displace_changes_and_are_bounded(tmp_path: Path) -> None:
    section = settings(audit_log=tmp_path / "audit")
    with LocalDaemon({**WITH_NVME, "admin": section}) as daemon, ServedAdmin(daemon) as admin:
        change(admin, "DELETE", "/v1/tenants/default/blocks")
        connection = admin.connection(over_tcp=True)
        for n in range(audit.REFUSALS + 5):
            connection.request("POST", f"/v1/{n}/{'x' * 60_000}", body=b"y" * 2000)
            assert connection.getresponse().read()
        connection.close()
        [kept] = written(daemon)
        assert (kept["who"], kept["status"]) == ("ops", 200)
        refused = written(daemon, ".refused")
        assert len(refused) == audit.REFUSALS
        assert all(len(json.dumps(line)) < 2000 and line["path"].startswith("/v1/") for line in refused)
        assert all(file.stat().st_mode & 0o027 == 0 for file in tmp_path.iterdir())


def test_refusals_beyond_the_bound_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "INTERVAL_S", 0.05)
    monkeypatch.setattr(audit, "REFUSALS", 2)
    log, file = audit.AuditLog(tmp_path / "audit"), tmp_path / "audit.refused"

    async def refuse() -> None:
        await asyncio.gather(*(log.refuse({"n": n}) for n in range(5)))
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=10)
        await log.refuse({"n": 5})

    asyncio.run(refuse())
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("n") for line in lines] == [0, 1, None, 5]
    assert lines[2]["left_out"] == 3


def test_control_characters_are_escaped(tmp_path: Path) -> None:
    log, path = audit.AuditLog(tmp_path / "audit"), "/\x1b[2J\u202e\x7f\u200b\x9b"
    asyncio.run(log.write({"path": path}))
    line = (tmp_path / "audit").read_text().rstrip("\n")
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line) == {"path": path}


def test_old_files_of_the_log_make_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MOST_BYTES", 200)
    log = audit.AuditLog(tmp_path / "audit")

    async def fill() -> None:
        for n in range(60):
            await log.write({"n": n, "padding": "x" * 60})

    asyncio.run(fill())
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["audit", *(f"audit.{n + 1}" for n in range(audit.KEPT))]
    assert all(file.stat().st_size < 400 for file in files)
    oldest_first = "".join(file.read_text() for file in [*files[:0:-1], files[0]])
    ordered = [json.loads(line)["n"] for line in oldest_first.splitlines()]
    assert ordered == list(range(ordered[0], 60))


def test_entries_that_the_file_does_not_take_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = audit.AuditLog(tmp_path / "absent" / "audit")
    asyncio.run(log.write({"who": "ops"}))
    assert '{"who": "ops"}' in caplog.text
    assert "cannot write" in caplog.text


# -- prefixes and what moves


def test_a_prefix_is_loaded_and_its_transfers_are_shown(admin: ServedAdmin, client: Client) -> None:
    _, path, keys = put(client, 20)
    chain = [key.hex() for key in keys]
    assert change(admin, "POST", f"{path}/prefetch", {"keys": chain}).json == {"blocks": 20}
    assert change(admin, "POST", f"{path}/prefetch", {"keys": [*chain[:5], "00" * 32]}).json == {"blocks": 5}
    mixed = change(admin, "POST", f"{path}/prefetch", {"keys": ["00", "0011"]})
    assert "of 1 and of 2 bytes" in problem(mixed, 409)["detail"]
    for wrong in ([], ["0"], ["zz"], [chain[0]] * 513):
        problem(change(admin, "POST", f"{path}/prefetch", {"keys": wrong}), 422)
    # While its device is fenced, nothing is on its way; what comes down later is seen there. A write may end
    # before the question, so others follow until one is seen.
    more, is_seen = client.namespace(new_layout()), threading.Event()

    def put_more() -> None:
        for n in itertools.count():
            if is_seen.is_set():
                return
            some = names(100, f"moving {n}")
            more.put(some, payloads(some))

    putting = threading.Thread(target=put_more)
    putting.start()
    try:
        seen = eventually(lambda: admin.get("/v1/transfers?limit=1000").json["transfers"])
    finally:
        is_seen.set()
        putting.join()
    assert {(t["source"], t["target"], t["class"]) for t in seen} == {("dram", "nvme", "write_back")}
    assert all(t["blocks"] and t["bytes"] and t["state"] in ("queued", "moving") for t in seen)
    assert {t["tenant"] for t in seen} == {"default"}
    assert seen[0]["namespace"] == more.layout.fingerprint("default").hex()
    assert eventually(lambda: not admin.get("/v1/transfers").json["transfers"])


# -- the daemon's side


def test_the_daemon_refuses_invalid_changes(client: Client) -> None:
    _, path, keys = put(client, 1)
    at = {"namespace": path.rpartition("/")[2], "keys": keys[0], "key_bytes": 32}
    for call, arguments, why in (
        ("pin", {**at, "ttl_s": 0.0}, "ttl_s is 0"),
        ("pin", {**at, "ttl_s": 1e9}, "ttl_s is 1e\\+09"),
        ("unpin", {**at, "keys": b""}, "0 bytes of keys"),
        ("unpin", {**at, "key_bytes": 33}, "32 bytes of keys of 33"),
        ("invalidate", {**at, "key_bytes": 0}, "of 0"),
        ("prefetch", {**at, "namespace": "ff"}, "no namespace 'ff'"),
        ("publish", {"namespace": at["namespace"], "tenants": ["a b"], "instead_of": None}, "tenant's name"),
        ("delete_tenant", {"name": "nobody"}, "no tenant 'nobody'"),
    ):
        with pytest.raises(DeniedError, match=why):
            client.control(call, **arguments)
