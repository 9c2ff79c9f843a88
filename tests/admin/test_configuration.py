"""The configuration over REST: tenants, quotas and tokens, tried out and changed; recordings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.errors import DeniedError, UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.lab.traces import Trace
from tests.admin.serving import OPERATE, VIEW, ServedAdmin, problem, settings
from tests.admin.test_changes import change, written
from tests.daemons import WITH_NVME, eventually, got, names, new_layout, payloads

CHANGES = (
    ("PATCH", "/v1/settings"),
    ("POST", "/v1/reload"),
    ("PUT", "/v1/tenants/chat/settings"),
    ("DELETE", "/v1/tenants/chat/settings"),
    ("POST", "/v1/tenants/chat/tokens"),
    ("DELETE", f"/v1/tenants/chat/tokens/{'0' * 16}"),
    ("POST", "/v1/tokens"),
    ("DELETE", "/v1/tokens/grafana"),
    ("PUT", "/v1/recording"),
    ("GET", "/v1/recording"),
    ("GET", "/v1/recording/trace"),
    ("DELETE", "/v1/recording"),
)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LocalDaemon]:
    section = settings(audit_log=tmp_path / "audit")
    tenants = {"chat": {"uids": [70001]}, "mine": {"uids": [os.getuid()], "role": "admin"}}
    kept = {"changes": tmp_path / "changes.json"}
    with LocalDaemon({**WITH_NVME, "daemon": kept, "admin": section, "tenants": tenants}) as served:
        yield served


@pytest.fixture
def admin(daemon: LocalDaemon) -> Iterator[ServedAdmin]:
    with ServedAdmin(daemon) as served:
        yield served


def test_changing_settings_needs_a_token_with_role_operate(admin: ServedAdmin) -> None:
    body = b'{"name": "x", "seconds": 1}'
    for method, path in CHANGES:
        asked = {"method": method, "body": body if method in ("POST", "PUT") else b"{}", "over_tcp": True}
        assert "role operate" in problem(admin.get(path, VIEW, **asked), 403)["hint"], path
        problem(admin.get(path, **asked), 401)
    for path in ("/v1/settings", "/v1/tenants/chat/settings", "/v1/tenants/chat/tokens", "/v1/tokens"):
        assert admin.get(path, VIEW).status == 200


# -- tenants


def test_a_tenant_is_made_looked_at_changed_and_removed(admin: ServedAdmin, daemon: LocalDaemon) -> None:
    path = "/v1/tenants/new/settings"
    assert "PUT" in problem(admin.get(path), 404)["hint"]
    made = change(admin, "PUT", path, {"uids": [70009], "dram": {"limit": 4 << 20}, "ttl": 60})
    assert made.json["changed"] == ["tenants.new is new"]
    assert made.json["kept"]
    seen = admin.get(path)
    assert seen.headers["etag"] == made.headers["etag"]
    assert (seen.json["uids"], seen.json["dram"], seen.json["ttl"]) == (
        [70009],
        {"floor": 0, "limit": 4 << 20},
        60,
    )
    # What was looked at can be sent back.
    again = change(admin, "PUT", path, seen.json, headers={"If-Match": seen.headers["etag"]})
    assert again.json["changed"] == []
    changed = change(admin, "PUT", path, {"uids": [70009], "dram": {"limit": 8 << 20}})
    assert sorted(changed.json["changed"]) == ["tenants.new.dram.limit = 8388608", "tenants.new.ttl = None"]
    [dram, _] = admin.get("/v1/tenants/new").json["tiers"]
    assert dram["limit_bytes"] == 8 << 20
    late = change(admin, "DELETE", path, headers={"If-Match": made.headers["etag"]})
    assert late.headers["etag"] == changed.headers["etag"]
    problem(late, 412)
    assert change(admin, "DELETE", path).json["changed"] == ["tenants.new is gone"]
    problem(admin.get(path), 404)
    problem(change(admin, "DELETE", path), 404)


def test_a_dry_run_reports_evictions(admin: ServedAdmin, daemon: LocalDaemon) -> None:
    keys = names(400)
    with Client(daemon.url, strict=True) as client:
        ns = client.namespace(new_layout())
        for at in range(0, 400, 100):
            ns.put(keys[at : at + 100], payloads(keys[at : at + 100]))
        path, wanted = "/v1/tenants/mine/settings", {"uids": [os.getuid()], "dram": {"limit": 2 << 20}}
        tried = change(admin, "PUT", f"{path}?dry_run=true", wanted)
        [row] = tried.json["consequences"]
        assert (row["tenant"], row["tier"]) == ("mine", "dram")
        assert row["evicted_bytes"] > 1 << 20
        assert tried.json["dry_run"]
        assert admin.get(path).json["dram"]["limit"] is None
        assert got(ns, keys[:100]) == 100
        done = change(admin, "PUT", path, {**wanted, "role": "admin"})
        assert not done.json["dry_run"]
        assert eventually(
            lambda: admin.get("/v1/tenants/mine").json["tiers"][0]["used_bytes"] <= 2 << 20, within_s=20
        )


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"dram": {"floor": 1 << 40}}, 409, "floors of all tenants in dram"),
        ({"dram": {"floor": 8 << 20, "limit": 4 << 20}}, 409, "above the limit"),
        ({"uids": [os.getuid()]}, 409, "is given twice"),
        ({"uids": [-1]}, 422, "uids"),
        ({"share": 0}, 422, "share"),
        ({"dram": {"limit": "8MiB"}}, 422, "dram.limit"),
        ({"nothing": 1}, 422, "nothing"),
        ({"tokens": []}, 422, "tokens"),
        ([], 422, "body"),
    ],
)
def test_an_invalid_tenant_is_refused(admin: ServedAdmin, body: object, status: int, said: str) -> None:
    before = admin.get("/v1/settings").json
    told = problem(change(admin, "PUT", "/v1/tenants/chat/settings", body), status)
    assert said in told["detail"]
    assert told["hint"]
    assert admin.get("/v1/settings").json == before


def test_concurrent_changes_do_not_undo_each_other(admin: ServedAdmin) -> None:
    def add(n: int) -> int:
        return change(admin, "POST", "/v1/tenants/chat/tokens", {}).status

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(add, range(12))) <= {201, 409}
    made = len(admin.get("/v1/tenants/chat/tokens").json["tokens"])
    tries = [line["status"] for line in written(admin.daemon) if line["path"].endswith("/tokens")]
    assert made == tries.count(201) >= 4


# -- tokens


def test_a_tenants_token_opens_the_door_and_closes_it(admin: ServedAdmin, daemon: LocalDaemon) -> None:
    path = "/v1/tenants/chat/tokens"
    made = change(admin, "POST", path, {"role": "read", "expires_in_s": 600})
    assert made.status == 201
    token = made.json["token"]
    [seen] = admin.get(path, VIEW).json["tokens"]
    assert seen == {"id": made.json["id"], "role": "read", "expires": made.json["expires"]}
    with Client(daemon.url, token, strict=True) as member:
        assert [t["name"] for t in member.status()["tenants"]] == ["chat"]
        ns = member.namespace(new_layout())
        with pytest.raises(DeniedError, match="write"):
            ns.put(names(1), payloads(names(1)))
        ended = change(admin, "DELETE", f"{path}/{seen['id']}")
        assert ended.json["changed"] == ["tenants.chat.tokens: 0"]
        with pytest.raises(UnavailableError):
            member.status()
    problem(change(admin, "DELETE", f"{path}/{seen['id']}"), 404)
    assert token not in (daemon.folder / "admin.log").read_text() + json.dumps(written(daemon))


def test_a_token_of_the_interface_holds_at_once_and_until_it_is_ended(admin: ServedAdmin) -> None:
    made = change(admin, "POST", "/v1/tokens", {"name": "new", "role": "view"})
    token = made.json["token"]
    assert admin.get("/v1/tiers", token, over_tcp=True).status == 200
    problem(admin.get("/v1/tokens/new", token, over_tcp=True, method="DELETE"), 403)
    assert "same name" in problem(change(admin, "POST", "/v1/tokens", {"name": "new"}), 409)["detail"]
    admin.stop()
    admin.start()
    assert admin.get("/v1/tiers", token, over_tcp=True).status == 200, "it is kept"
    assert [t["name"] for t in admin.get("/v1/tokens").json["tokens"]] == ["grafana", "ops", "left", "new"]
    assert change(admin, "DELETE", "/v1/tokens/new").status == 200
    problem(admin.get("/v1/tiers", token, over_tcp=True), 401)
    problem(change(admin, "DELETE", "/v1/tokens/new"), 404)
    assert "token of this request" in problem(change(admin, "DELETE", "/v1/tokens/ops"), 409)["detail"]
    assert admin.get("/v1/tiers", OPERATE, over_tcp=True).status == 200


# -- all of it


def test_settings_are_patched_against_an_etag(admin: ServedAdmin) -> None:
    seen = admin.get("/v1/settings")
    assert seen.json["changes"] == {}
    assert "sha256" not in seen.body.decode()
    matching = {"If-Match": seen.headers["etag"]}
    tried = change(admin, "PATCH", "/v1/settings?dry_run=true", {"scrub": {"rate": "1MiB"}}, headers=matching)
    assert tried.json["changed"] == ["scrub.rate = 1048576"]
    done = change(admin, "PATCH", "/v1/settings", {"scrub": {"rate": "2MiB"}}, headers=matching)
    assert done.json["changed"] == ["scrub.rate = 2097152"]
    late = change(admin, "PATCH", "/v1/settings", {"scrub": {"rate": "3MiB"}}, headers=matching)
    problem(late, 412)
    assert admin.get("/v1/settings").json["changes"] == {"scrub": {"rate": "2MiB"}}
    assert admin.get("/v1/settings").headers["etag"] == late.headers["etag"] == done.headers["etag"]
    huge = change(admin, "PATCH", "/v1/settings", {"scrub": {"rate": 1 << 70}})
    assert "cannot be sent" in problem(huge, 409)["detail"]
    problem(change(admin, "PATCH", "/v1/settings", {"dram": {"huge_pages": True}}), 409)


def test_a_reload_reads_the_file_again_here_and_there(admin: ServedAdmin, daemon: LocalDaemon) -> None:
    file = daemon.folder / "kvstore.toml"
    file.write_text(file.read_text().replace("requests_per_s = 10000", "requests_per_s = 1"))
    file.write_text(
        file.read_text().replace("huge_pages = false", "huge_pages = true") + "\n[limits]\nnamespaces = 9\n"
    )
    answer = change(admin, "POST", "/v1/reload")
    assert answer.json == {"changed": ["limits.namespaces = 9"], "needs_restart": ["dram.huge_pages"]}
    assert 429 in [admin.get("/v1/tiers").status for _ in range(4)]


# -- recordings


def test_requests_are_recorded_and_fetched(admin: ServedAdmin, daemon: LocalDaemon, tmp_path: Path) -> None:
    keys = names(5)
    assert admin.get("/v1/recording").json["running"] is False
    started = change(admin, "PUT", "/v1/recording", {"seconds": 600})
    assert started.status == 202
    assert started.json["running"]
    assert "DELETE" in problem(change(admin, "PUT", "/v1/recording", {"seconds": 1}), 409)["hint"]
    with Client(daemon.url, strict=True) as client:
        ns = client.namespace(new_layout())
        ns.put(keys, payloads(keys))
        assert got(ns, keys) == 5
    eventually(lambda: admin.get("/v1/recording").json["requests"])
    ended = change(admin, "DELETE", "/v1/recording")
    assert (ended.json["running"], ended.json["requests"], ended.json["blocks"]) == (False, 1, 5)
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(admin.get("/v1/recording/trace").body)
    [request] = Trace(trace)
    assert len(request.keys) == 5
    assert change(admin, "PUT", "/v1/recording", {"seconds": 0.2}).status == 202
    eventually(lambda: not admin.get("/v1/recording").json["running"])
    assert admin.get("/v1/recording/trace").body == b""


def test_a_recording_ends_with_the_daemon_and_says_so(admin: ServedAdmin, daemon: LocalDaemon) -> None:
    change(admin, "PUT", "/v1/recording", {"seconds": 600})
    daemon.kill()
    ended = eventually(lambda: not (said := admin.get("/v1/recording").json)["running"] and said)
    assert ended["problem"]
    problem(change(admin, "PUT", "/v1/recording", {"seconds": 1}), 503)
    assert admin.get("/v1/recording").json["running"] is False
