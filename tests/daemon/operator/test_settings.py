"""A configuration that changes while the daemon runs: merge patches, what they do, where they are kept."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import Client
from kvstore.config import Source, difference, etag, keep_changes, load, merged, parse
from kvstore.daemon.tenancy.auth import hash_of, new_token
from kvstore.errors import ConfigError, DeniedError, UnavailableError
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import SMALL, WITH_NVME, eventually, got, log_of, names, new_layout, payloads

_values: Any = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)
_tables = st.dictionaries(st.sampled_from("abc"), _values, max_size=3)


# -- patches


@given(_tables, _tables)
def test_a_difference_leads_from_one_to_the_other_and_says_no_more(before: Any, after: Any) -> None:
    patch = difference(before, after)
    assert json.dumps(merged(before, patch), sort_keys=True) == json.dumps(after, sort_keys=True)
    assert (patch == {}) == (json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True))


@pytest.mark.parametrize(
    ("before", "patch", "after"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"a": "foo"}, {"a": {"b": {"c": None}}}, {"a": {"b": {}}}),
    ],
)
def test_merging_is_as_rfc_7396_has_it(before: Any, patch: Any, after: Any) -> None:
    assert merged(before, patch) == after


def test_etags_stand_for_values_and_not_for_their_order() -> None:
    assert etag({"a": 1, "b": [1, 2]}) == etag({"b": [1, 2], "a": 1})
    assert len({etag(each) for each in (None, {}, [], {"a": 1}, {"a": 1.5}, {"a": "1"}, {"a": True})}) == 7


# -- the file


def test_persisted_changes_are_read_with_the_configuration_file(tmp_path: Path) -> None:
    kept, file = tmp_path / "changes", tmp_path / "kvstore.toml"
    file.write_text(f'[daemon]\nchanges = "{kept}"\n[dram]\nlimit = "4MiB"\n[tenants.a]\nuids = [1]\n')
    assert load(file).dram.limit == 4 << 20
    keep_changes(kept, {"dram": {"limit": "8MiB"}, "tenants": {"a": None, "b": {"uids": [2]}}})
    assert kept.stat().st_mode & 0o777 == 0o600
    config = load(file)
    assert (config.dram.limit, list(config.tenants)) == (8 << 20, ["b"])
    expires = {"hash": f"sha256:{'0' * 64}", "expires": "2030-01-01T00:00:00Z"}
    keep_changes(kept, {"tenants": {"a": {"tokens": [expires]}}})
    assert load(file).tenants["a"].tokens[0].ends == 1893456000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"dram": {"limit": "none"}}', "dram.limit: 'none' is not a size"),
        ('{"nothing": 1}', "unknown key nothing = 1"),
        ("\udcff", "is not JSON"),
        ('{"a":' * 9000, "is not JSON"),
    ],
)
def test_invalid_persisted_changes_name_their_file(tmp_path: Path, text: str, said: str) -> None:
    kept, file = tmp_path / "changes", tmp_path / "kvstore.toml"
    file.write_text(f'[daemon]\nchanges = "{kept}"\n')
    kept.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=said) as raised:
        load(file)
    assert str(kept) in str(raised.value)


def test_a_failed_write_keeps_the_previous_changes(tmp_path: Path) -> None:
    kept = tmp_path / "changes"
    keep_changes(kept, {"a": 1})
    (tmp_path / "changes.new").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        keep_changes(kept, {"a": 2})
    assert json.loads(kept.read_text()) == {"a": 1}


def test_changes_are_the_difference_from_the_file() -> None:
    source = Source(values={"dram": {"limit": "4MiB"}, "scrub": {"rate": 0}})
    changed = source.changed({"dram": {"limit": "8MiB"}, "scrub": {"rate": 0}})
    assert changed.changes == {"dram": {"limit": "8MiB"}}
    assert changed.changed(source.effective).changes == {}, "taken back, nothing is left of it"
    assert changed.config() == parse('[dram]\nlimit = "8MiB"\n[scrub]\nrate = 0')


# -- a daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LocalDaemon]:
    # As an installation has it: beside the blocks.
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    kept = {"changes": nvme / "changes.json"}
    tenants = {"chat": {"dram": {"limit": "12MiB"}}, "default": {"uids": [os.getuid()], "role": "admin"}}
    with LocalDaemon(
        {**WITH_NVME, "nvme": {**WITH_NVME["nvme"], "path": nvme}, "daemon": kept, "tenants": tenants}
    ) as served:
        yield served


def limit_of(client: Client, tenant: str) -> int | None:
    [dram, *_] = client.control("tenant", name=tenant)["tiers"]
    limit: int | None = dram["limit_bytes"]
    return limit


def quota(limit: str | None, tenant: str = "chat") -> dict[str, Any]:
    return {"tenants": {tenant: {"dram": {"limit": limit}}}}


def test_a_change_holds_at_once_and_over_restarts(daemon: LocalDaemon) -> None:
    with Client(daemon.url, strict=True) as client:
        assert limit_of(client, "chat") == 12 << 20
        answer = client.control("change", patch=quota("8MiB"))
        assert list(answer["changed"]) == ["tenants.chat.dram.limit = 8388608"]
        assert answer["kept"]
        assert limit_of(client, "chat") == 8 << 20
        client.control("change", patch={"scrub": {"rate": "1MiB"}})
        for again in (daemon.restart, daemon.kill):
            again()
            if not daemon.pid:
                daemon.start()
            assert eventually(lambda: limit_of(client, "chat")) == 8 << 20
        shown = client.control("settings", part=["tenants", "chat"])
        assert shown["value"] == {"dram": {"limit": "8MiB"}}
        assert shown["changes"] == {
            "tenants": {"chat": {"dram": {"limit": "8MiB"}}},
            "scrub": {"rate": "1MiB"},
        }
        client.control("change", patch=quota("12MiB") | {"scrub": None})
        left = client.control("settings")
        assert left["value"]["tenants"]["chat"] == {"dram": {"limit": "12MiB"}}
        assert left["changes"] == {"scrub": None}, "what is as in the file is no change"


def test_the_file_and_the_changes_both_count_after_a_reload(daemon: LocalDaemon) -> None:
    with Client(daemon.url, strict=True) as client:
        client.control("change", patch=quota("8MiB"))
        file = daemon.folder / "kvstore.toml"
        file.write_text(file.read_text() + "\n[limits]\nconnections = 77\n")
        answer = client.control("reload")
        assert list(answer["changed"]) == ["limits.connections = 77"]
        assert limit_of(client, "chat") == 8 << 20
        file.write_text(file.read_text() + "\n[dram]\n")
        with pytest.raises(DeniedError, match="is not TOML"):
            client.control("reload")


def test_a_dry_run_reports_consequences_and_changes_nothing(daemon: LocalDaemon) -> None:
    with Client(daemon.url, strict=True) as client:
        ns, keys = client.namespace(new_layout()), names(400)
        for at in range(0, 400, 100):
            ns.put(keys[at : at + 100], payloads(keys[at : at + 100]))
        [used] = [t["used_bytes"] for t in client.control("tenant", name="default")["tiers"][:1]]
        patch = quota("2MiB", "default") | {"scrub": {"rate": 0}}
        patch["tenants"]["chat"] = {"dram": {"floor": "4MiB"}}
        answer = client.control("change", patch=patch, dry_run=True)
        rows = {row["tenant"]: row for row in answer["consequences"]}
        assert rows["default"]["evicted_bytes"] == used - (2 << 20) > 0
        assert rows["chat"] == {
            "tenant": "chat",
            "tier": "dram",
            "evicted_bytes": 0,
            "claimed_bytes": 4 << 20,
        }
        assert client.control("settings")["changes"] == {}
        assert limit_of(client, "default") is None
        assert client.control("change", patch=patch)["consequences"] == answer["consequences"]
        tiers = eventually(
            lambda: [
                t for t in client.control("tenant", name="default")["tiers"] if t["used_bytes"] <= 2 << 20
            ]
        )
        assert tiers[0]["name"] == "dram"
        assert got(ns, keys[:100]) == 100, "the other copies are on NVMe"


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ({"dram": {"huge_pages": True}}, "can't change while the daemon runs: dram.huge_pages"),
        ({"admin": {"listen": "127.0.0.1:1"}}, "can't change while the daemon runs: admin.listen"),
        ({"daemon": {"changes": None}}, "can't change while the daemon runs: daemon.changes"),
        (quota("zebra"), "'zebra' is not a size"),
        ({"tenants": {"chat": {"dram": {"floor": "8MiB", "limit": "4MiB"}}}}, "above the limit"),
        ({"tenants": {"chat": {"dram": {"floor": "1GiB", "limit": None}}}}, "floors of all tenants in dram"),
        ({"tenants": {"chat": {"nvme": {"floor": "63MiB"}}}}, "floors of nvme take 12 extents"),
        ({"tenants": {"other": {"uids": [os.getuid()]}}}, "is given twice"),
        ({"tenants": {"a/b": {}}}, "a/b"),
        ({"policy": {"eviction": "random"}}, "no eviction policy 'random'"),
        ({"policy": {"eviction": "collections:Counter"}}, "'collections:Counter' is not built in"),
        ({"tenants": 5}, "tenants is 5"),
        ({"nope": {"a": 1}}, "unknown key nope"),
    ],
)
def test_impossible_changes_are_refused_without_effect(
    daemon: LocalDaemon, tmp_path: Path, patch: dict[str, Any], said: str
) -> None:
    patch = {"daemon": {"log_level": "debug"}} | patch if "daemon" not in patch else patch
    if "63MiB" in str(patch):
        patch["tenants"]["default"] = {"nvme": {"floor": "1MiB"}}
    with Client(daemon.url, strict=True) as client:
        before = client.control("settings")
        with pytest.raises(DeniedError) as refused:
            client.control("change", patch=patch)
        assert said in str(refused.value)
        assert client.control("settings") == before
        kept = tmp_path / "nvme" / "changes.json"
        assert not kept.exists() or json.loads(kept.read_text()) == {}


def test_a_change_imports_only_policies_that_the_file_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("mine", "foreign"):
        policy = f"open({str(tmp_path / module)!r}, 'x')\nfrom kvstore.core.policy import LRU as Policy\n"
        (tmp_path / f"{module}.py").write_text(policy)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    mine, foreign = ({"policy": {"eviction": f"{module}:Policy"}} for module in ("mine", "foreign"))
    with LocalDaemon(SMALL) as daemon, Client(daemon.url, strict=True) as client:
        client.control("change", patch={"policy": {"eviction": "lru"}})
        for dry_run in (True, False):
            with pytest.raises(DeniedError, match="'foreign:Policy' is not built in"):
                client.control("change", patch=foreign, dry_run=dry_run)
        file = daemon.folder / "kvstore.toml"
        file.write_text(file.read_text() + '[policy]\neviction = "mine:Policy"\n')
        client.control("reload")
        answer = client.control("change", patch=mine, dry_run=True)
        assert list(answer["changed"]) == ["policy.eviction = mine:Policy"]
        assert not (tmp_path / "mine").exists(), "a dry run imports nothing"
        client.control("change", patch=mine)
        assert (tmp_path / "mine").exists()
        assert client.control("status")["policy"] == "mine:Policy"
        client.control("change", patch={"scrub": {"rate": 1}})
    assert not (tmp_path / "foreign").exists()


def test_one_of_two_concurrent_changes_is_refused(daemon: LocalDaemon) -> None:
    with Client(daemon.url, strict=True) as client:
        part = ["tenants", "chat"]
        seen = client.control("settings", part=part)["etag"]
        answers: list[dict[str, Any]] = []

        def change(limit: str) -> None:
            with Client(daemon.url, strict=True) as other:
                answers.append(other.control("change", patch=quota(limit), part=part, expected=seen))

        threads = [threading.Thread(target=change, args=(f"{n}MiB",)) for n in (4, 6, 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [done] = [answer for answer in answers if "etag" in answer]
        assert [answer["is_now"] for answer in answers if "is_now" in answer] == [done["etag"]] * 2
        assert client.control("settings", part=part)["etag"] == done["etag"]
        # What others change elsewhere is no reason.
        client.control("change", patch={"scrub": {"rate": 1}})
        assert "etag" in client.control("change", patch=quota(None), part=part, expected=done["etag"])


def test_without_a_file_changes_outlive_a_reload_and_not_the_daemon() -> None:
    with (
        LocalDaemon({**SMALL, "tenants": {"chat": {}}}) as daemon,
        Client(daemon.url, strict=True) as client,
    ):
        assert not client.control("change", patch=quota("8MiB"))["kept"]
        os.kill(daemon.pid, signal.SIGHUP)
        eventually(lambda: "reloaded: nothing has changed" in log_of(daemon))
        assert limit_of(client, "chat") == 8 << 20
        daemon.restart()
        assert eventually(lambda: client.control("settings"))["changes"] == {}
        assert limit_of(client, "chat") is None


def test_changes_that_cannot_be_persisted_are_not_applied(daemon: LocalDaemon, tmp_path: Path) -> None:
    (tmp_path / "nvme" / "changes.json.new").mkdir()
    with Client(daemon.url, strict=True) as client:
        with pytest.raises(DeniedError, match="cannot write"):
            client.control("change", patch=quota("8MiB"))
        assert limit_of(client, "chat") == 12 << 20


def test_a_daemon_does_not_start_on_damaged_changes_and_gives_a_hint(
    daemon: LocalDaemon, tmp_path: Path
) -> None:
    with Client(daemon.url, strict=True) as client:
        client.control("change", patch=quota("8MiB"))
    daemon.stop()
    (tmp_path / "nvme" / "changes.json").write_text("{")
    with pytest.raises(UnavailableError, match="is not JSON") as refused:
        daemon.start()
    assert "move it away" in str(refused.value)


def test_the_log_level_changes_and_tenants_come_and_go(daemon: LocalDaemon) -> None:
    with Client(daemon.url, strict=True) as client:
        client.control("change", patch={"daemon": {"log_level": "error"}})
        client.control("change", patch={"tenants": {"more": {"uids": [61001]}}})
        assert "tenants.more is new" not in log_of(daemon)
        client.control("change", patch={"daemon": {"log_level": None}})
        client.control("change", patch={"tenants": {"more": None}})
        assert "changed: tenants.more is gone" in log_of(daemon)
        assert client.control("tenant", name="more")["name"] == "more", "what it had stored is still its own"


def test_only_operators_see_or_change_settings() -> None:
    token = new_token(b"t" * 32)
    tokens = [{"hash": f"sha256:{hash_of(token).hex()}", "role": "admin"}]
    calls: dict[str, dict[str, Any]] = {"settings": {}, "change": {"patch": {}}, "reload": {}}
    settings = {**SMALL, "tenants": {"chat": {"tokens": tokens}}}
    with LocalDaemon(settings) as daemon, Client(daemon.url, token, strict=True) as member:
        for call, more in calls.items():
            with pytest.raises(DeniedError, match="only operators"):
                member.control(call, **more)


def test_an_operator_can_lift_the_cap_of_its_own_tenant() -> None:
    with LocalDaemon(SMALL) as daemon, Client(daemon.url, deadline_s=5, strict=True) as client:
        client.control("change", patch={"tenants": {"default": {"requests": 1}}})
        for _ in range(5):
            client.control("settings")
        client.control("change", patch={"tenants": {"default": None}})
        client.ping()
