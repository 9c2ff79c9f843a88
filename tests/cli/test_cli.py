"""The command line against a real daemon: output, changes and exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvstore import Client, Layout
from kvstore.cli import app
from kvstore.cli.shared.changes import lines
from kvstore.cli.shared.keys import batches
from kvstore.cli.tenant import patch_of
from kvstore.core.policy import POLICIES
from kvstore.errors import MisuseError
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import BLOCK, SMALL, WITH_NVME, cli, eventually, idle, names, new_layout, payloads
from tests.lab.small import chats
from tests.tenants import VICTIM, TenantDaemon, as_user, needs_root

ABSENT = "0" * 32
RUN_RATHER_THAN_ANSWER = {"serve", "admin", "supervise", "demo", "config example"}


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(WITH_NVME) as served:
        yield served


@pytest.fixture
def client(daemon: LocalDaemon) -> Iterator[Client]:
    with Client(daemon.url, deadline_s=10, strict=True) as made:
        yield made


def stored(client: Client, n: int) -> tuple[Any, str, list[bytes]]:
    """Stores n blocks. Returns the namespace, its id and the keys."""
    ns, keys = client.namespace(new_layout()), names(n)
    assert ns.put(keys, payloads(keys)).stored == n
    eventually(lambda: idle(client.status()))
    return ns, ns.layout.fingerprint("default").hex(), keys


def run(daemon: LocalDaemon, *args: str) -> subprocess.CompletedProcess[str]:
    return in_process(*args, "--socket", str(daemon.socket))


def in_process(*args: str) -> subprocess.CompletedProcess[str]:
    """Runs a command like `cli`, without the start of an interpreter."""
    done = CliRunner(env={"COLUMNS": None}).invoke(app, args)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return subprocess.CompletedProcess(args, done.exit_code, done.stdout, done.stderr)


def told(daemon: LocalDaemon, *args: str, code: int = 0) -> Any:
    """Returns the JSON output of a command."""
    done = run(daemon, *args, "--json")
    assert (done.returncode, done.stderr) == (code, ""), done
    return json.loads(done.stdout)


def plain(value: Any) -> Any:
    """Returns the value with JSON types."""
    return json.loads(json.dumps(value))


# -- all commands


def commands(group: Any = None, name: str = "") -> Iterator[tuple[str, Any]]:
    group = group or get_command(app)
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}".strip())
        else:
            yield f"{name} {word}".strip(), command


@pytest.mark.parametrize(("name", "command"), [pytest.param(*each, id=each[0]) for each in commands()])
def test_every_command_has_an_example_and_json(name: str, command: Any) -> None:
    parts = [part for part in command.help.split("\n\n") if part.startswith("Example: kvstore ")]
    assert len(parts) == 1, "an example, the last paragraph of its docstring"
    options = {option for param in command.params for option in param.opts}
    assert ("--json" in options) is (name not in RUN_RATHER_THAN_ANSWER)


SAMPLE_ID, SAMPLE_KEY = "156dc0aeb7a10bca91a0111fbfe736c4", "3f7a0c9e"


@pytest.fixture(scope="module")
def tenants() -> Iterator[LocalDaemon]:
    named = f"[tenants.chat]\nuids = [{os.getuid()}]\nrole = 'admin'\n[tenants.batch]\n[tenants.team-a]\n"
    with TenantDaemon(WITH_NVME, named) as served:
        yield served


@pytest.mark.parametrize(
    ("name", "command"),
    [pytest.param(*each, id=each[0]) for each in commands() if each[0] not in RUN_RATHER_THAN_ANSWER],
)
def test_every_example_works(
    name: str, command: Any, tenants: LocalDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the example with a namespace, key, trace, configuration and folder that exist."""
    monkeypatch.chdir(tmp_path)
    text = command.help.split("Example: kvstore ")[1]
    with Client(tenants.url, deadline_s=10, strict=True) as client:
        ns, _, keys = stored(client, 1)
    id = ns.layout.fingerprint("chat").hex()
    if name == "pin remove":
        run(tenants, "pin", "add", id, keys[0].hex())
    config = str(tenants.folder / "kvstore.toml")
    replacements = {SAMPLE_ID: id, SAMPLE_KEY: keys[0].hex(), "/etc/kvstore/kvstore.toml": config}
    replacements |= {"kvstore.toml": config} if config not in text else {}
    for sample, here in replacements.items():
        text = re.sub(rf"(?<!\S){re.escape(sample)}(?!\S)", here, text)
    words = (
        text.replace("--for 10m", "--for 0.2s").replace("/mnt/nvme1/kvstore", str(tmp_path / "new")).split()
    )
    if "trace.jsonl" in words and "--out" not in words:
        chats(tmp_path / "trace.jsonl", 60)
    assert _example_works(name, words, tenants, command)


def _example_works(name: str, words: list[str], tenants: LocalDaemon, command: Any) -> bool:
    """Runs an example. Returns whether its exit code is that of success."""
    if name == "events":
        words.remove("--follow")
    if name == "top":
        words += ["--count", "1"]
        words[words.index("5s")] = "0.1s"
    if name == "lab compare":
        for report in ("a.json", "b.json"):
            chats(Path("trace.jsonl"), 60)
            done = in_process(
                "lab", "replay", "trace.jsonl", "--capacities", "5%", "--processes", "1", "--json"
            )
            Path(report).write_text(done.stdout)
    if name == "device remove":
        (tenants.folder / "nvme1").mkdir()
        add = ("device", "add", "nvme1", str(tenants.folder / "nvme1"), "--limit", "16MiB")
        assert run(tenants, *add).returncode == 0
    if name in ("lab fleet", "lab replay", "lab recommend"):
        words += ["--processes", "1"]
    if name == "fsck":
        with LocalDaemon(WITH_NVME) as stopped:
            stopped.stop()
            words[words.index("-c") + 1] = str(stopped.folder / "kvstore.toml")
            return in_process(*words).returncode == 0
    asks = (
        "--socket" in {option for param in command.params for option in param.opts} and "--serve" not in words
    )
    done = run(tenants, *words) if asks else in_process(*words)
    # The machine of the test may fail a check of doctor.
    return done.returncode in ((0, 1) if name == "doctor" else (0,)) or pytest.fail(done.stdout + done.stderr)


ASKING = (
    *(("ns", "list"), ("ns", "show", ABSENT), ("ns", "publish", ABSENT, "a"), ("ns", "unpublish", ABSENT)),
    *(("ns", "forget", ABSENT, "--yes"), ("blocks", "show", "00"), ("blocks", "prefetch", ABSENT, "00")),
    *(("blocks", "invalidate", ABSENT, "00", "--yes"), ("pin", "add", ABSENT, "00")),
    *(("pin", "remove", ABSENT, "00"), ("quota", "list"), ("quota", "show", "a"), ("tier", "list")),
    *(
        ("tier", "show", "dram"),
        ("device", "list"),
        ("device", "show", "dram"),
        ("device", "set", "nvme", "fenced"),
        ("policy", "show"),
        ("events",),
    ),
    *(("quota", "set", "a", "--share", "2"), ("policy", "set", "lru"), ("events", "--follow"), ("status",)),
)


@pytest.mark.parametrize("args", ASKING, ids=" ".join)
def test_without_a_daemon_commands_fail_with_a_hint(args: tuple[str, ...], tmp_path: Path) -> None:
    done = in_process(*args, "--socket", str(tmp_path / "nobody.sock"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "no answer from the daemon" in done.stderr
    assert "(start the daemon: `kvstore serve`" in done.stderr


@needs_root
def test_tenants_cannot_use_operator_commands() -> None:
    with TenantDaemon(WITH_NVME, f"[tenants.chat]\nuids = [{VICTIM}]\n") as daemon:
        for args in (("quota", "list"), ("ns", "list"), ("tier", "list"), ("events",)):
            asked = [*args, "--socket", str(daemon.socket)]
            code, said = as_user(VICTIM, lambda asked=asked: _in_process(asked))
            assert (code, said) == (
                2,
                "error: only operators may ask this (ask the operator of the daemon)\n",
            )


def _in_process(args: list[str]) -> tuple[int, str]:
    done = in_process(*args)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("ns", "show", ABSENT), f"there is no namespace '{ABSENT}' (it is open once"),
        (("ns", "list", "--tenant", "nobody"), "there is no tenant 'nobody' (`kvstore tenant list`"),
        (("ns", "forget", ABSENT), "add --yes"),
        (("ns", "forget", ABSENT, "--yes"), "there is no namespace"),
        (("ns", "publish", ABSENT, "a"), "there is no namespace"),
        (("blocks", "invalidate", ABSENT, "00"), "add --yes"),
        (("blocks", "prefetch", ABSENT, "xyz"), "is neither a key nor a file (keys are"),
        (("blocks", "prefetch", ABSENT, "00", "0000"), "keys of 1 and of 2 bytes in one call"),
        (("pin", "add", ABSENT, "00", "--for", "2d"), "--for is 2d (more than 0, at most 1d)"),
        (("pin", "add", ABSENT, "00", "--for", "soon"), "--for: 'soon' is not a duration"),
        (("quota", "show", "nobody"), "there is no tenant 'nobody'"),
        (("quota", "set", "default"), "no option was given (give one of --dram-limit"),
        (("quota", "set", "default", "--dram-limit", "much"), "--dram-limit: 'much' is not a size"),
        (("tier", "show", "tape"), "there is no tier 'tape' (there are dram, nvme)"),
        (("device", "show", "tape"), "there is no device 'tape' (there are dram, nvme)"),
        (("device", "set", "tape", "fenced"), "there is no device 'tape' (there are dram, nvme)"),
        (("device", "set", "dram", "fenced"), "dram can't be fenced"),
        (("policy", "set", "best"), "no eviction policy 'best' (one of lru"),
        (("events", "--what", "miracles"), "there is no event 'miracles' (there are evicted"),
        (("events", "--tenant", "nobody"), "there is no tenant 'nobody'"),
        (("events", "--since", "soon"), "--since: 'soon' is not a duration"),
    ],
)
def test_invalid_arguments_are_errors_with_a_hint(
    daemon: LocalDaemon, args: tuple[str, ...], says: str
) -> None:
    done = run(daemon, *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert says in done.stderr


# -- namespaces


def test_namespaces_are_listed_in_pages_shown_and_published(daemon: LocalDaemon, client: Client) -> None:
    for _ in range(70):
        client.namespace(new_layout()).lookup(names(1))
    ns, id, _ = stored(client, 1)
    listed = told(daemon, "ns", "list", "--tenant", "default")["namespaces"]
    assert len(listed) == len({row["id"] for row in listed}) == client.status()["namespaces"]
    shown = told(daemon, "ns", "show", id)
    assert shown == plain(client.control("namespace", id=id))
    assert shown in listed
    assert shown["layout"]["model"] == ns.layout.model
    assert told(daemon, "ns", "publish", id, "friend", "batch")["published_to"] == ["batch", "friend"]
    assert client.control("namespace", id=id)["published_to"] == ("batch", "friend")
    assert told(daemon, "ns", "publish", id, "friend")["published_to"] == ["friend"]
    text = run(daemon, "ns", "list").stdout
    assert [line for line in text.splitlines() if id in line and ns.layout.model in line and "friend" in line]
    assert "\x1b" not in text
    assert told(daemon, "ns", "unpublish", id)["published_to"] == []


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    model = "\x1b]0;owned\x07[bold]\u202e\x9b31m[/nothing]"
    with LocalDaemon(SMALL) as daemon, Client(daemon.url, deadline_s=10, strict=True) as client:
        ns, keys = client.namespace(Layout(model, BLOCK, revision=model, shard=model)), names(2)
        ns.put(keys, payloads(keys))
        [row] = client.control("namespaces")["namespaces"]
        listed = [("ns", "list"), ("ns", "show", row["id"]), ("why", keys[0].hex()), ("events",), ("status",)]
        (tmp_path / "keys").write_text("\n".join(key.hex() for key in keys))
        for args in (*listed, ("why", str(tmp_path / "keys"))):
            ran = run(daemon, *args)
            shown = ran.stdout + ran.stderr
            assert all(map(str.isprintable, shown.splitlines())), shown
            if args[0] in ("ns", "why"):
                assert "\\x1b]0" in shown


def test_ns_forget_deletes_blocks(daemon: LocalDaemon, client: Client) -> None:
    ns, id, keys = stored(client, 3)
    assert told(daemon, "ns", "forget", id, "--yes") == {"namespace": id, "deleted_blocks": 3}
    assert ns.lookup(keys) == 0


# -- blocks


def test_blocks_are_pinned_and_unpinned(daemon: LocalDaemon, client: Client, tmp_path: Path) -> None:
    ns, id, keys = stored(client, 3)
    file = tmp_path / "keys"
    file.write_text("\n".join(key.hex() for key in keys[1:]))
    asked = (id, keys[0].hex(), str(file))
    values = {"namespace": id, "keys": 3, "blocks": 3}
    assert told(daemon, "pin", "add", *asked, "--for", "50s") == values
    known = client.explain(keys, model=ns.layout.model)
    assert all(40 < block["pinned_s"] <= 50 for block in known)
    assert told(daemon, "pin", "remove", *asked) == values
    assert [b["pinned_s"] for b in client.explain(keys, model=ns.layout.model)] == [None] * 3


def test_blocks_are_shown_prefetched_and_invalidated(daemon: LocalDaemon, client: Client) -> None:
    ns, id, keys = stored(client, 2)
    first = keys[0].hex()
    [block] = told(daemon, "blocks", "show", first, "--model", ns.layout.model)["blocks"]
    assert (block["key"], block["state"]) == (first, "live")
    assert told(daemon, "blocks", "prefetch", id, first)["blocks"] == 1
    last = keys[1].hex()
    assert run(daemon, "blocks", "invalidate", id, last, "--yes").stdout == "1 of 1 blocks invalidated\n"
    assert ns.lookup(keys) == 1


@pytest.mark.parametrize(
    "args", [("blocks", "prefetch"), ("blocks", "invalidate", "--yes"), ("pin", "add"), ("pin", "remove")]
)
def test_missing_blocks_give_exit_code_1(daemon: LocalDaemon, client: Client, args: tuple[str, ...]) -> None:
    _, id, _ = stored(client, 1)
    absent = names(1, "absent")[0].hex()
    assert told(daemon, *args, id, absent, code=1) == {"namespace": id, "keys": 1, "blocks": 0}


def test_many_keys_are_sent_in_batches(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join(f"{i:08x}" for i in range(2500)))
    parts = list(batches(["ffffffff", str(file)]))
    assert [len(raw) // size for raw, size in parts] == [1024, 1024, 453]
    assert b"".join(raw for raw, _ in parts)[:8] == bytes.fromhex("ffffffff00000000")


# -- tiers, devices, policy, quotas


def test_tiers_and_devices_show_the_daemons_answers(daemon: LocalDaemon, client: Client) -> None:
    stored(client, 40)
    status, figures = plain(client.control("status")), plain(client.control("figures"))
    assert told(daemon, "tier", "list")["tiers"] == status["tiers"]
    assert told(daemon, "tier", "show", "nvme") == status["tiers"][1]
    devices = told(daemon, "device", "list")["devices"]
    assert [{name: d[name] for name in figures["devices"][0]} for d in devices] == figures["devices"]
    nvme = told(daemon, "device", "show", "nvme")
    written = nvme["admission"]["written_bytes"]
    assert nvme["written_in_a_day_bytes"] == written > 0
    assert nvme["drive_writes_a_day"] == pytest.approx(written / (64 << 20))
    assert (nvme["state"], nvme["readable"], nvme["writable"]) == ("serving", True, True)
    drained = told(daemon, "device", "set", "nvme", "draining")
    assert (drained["state"], drained["readable"], drained["writable"]) == ("draining", True, False)
    assert told(daemon, "device", "set", "nvme", "serving")["writable"]
    shown = run(daemon, "device", "show", "nvme").stdout
    assert "queued write back" in shown
    assert "always" in shown
    assert "nvme" in run(daemon, "tier", "list").stdout


def test_policy_show_prints_the_active_policy(daemon: LocalDaemon) -> None:
    assert told(daemon, "policy", "show") == {"policy": "lru", "policies": list(POLICIES)}


TENANTS = """
[tenants.chat]
share = 2.0
[tenants.chat.dram]
floor = "2MiB"
limit = "8MiB"
[tenants.batch]
"""


def test_quotas_show_the_daemons_answers() -> None:
    with TenantDaemon(WITH_NVME, TENANTS) as daemon, Client(daemon.url, strict=True) as client:
        rows = told(daemon, "quota", "list")["tenants"]
        assert rows == plain(client.control("tenants")["tenants"])
        chat = told(daemon, "quota", "show", "chat")
        assert chat in rows
        assert (chat["share"], chat["tiers"][0]["limit_bytes"]) == (2.0, 8 << 20)
        [line] = [
            line
            for line in run(daemon, "quota", "list").stdout.splitlines()
            if line.startswith("chat ") and "dram" in line
        ]
        assert line.split() == ["chat", "2", "dram", "0B", "2MiB", "8MiB"]


def test_quota_options_become_a_merge_patch() -> None:
    sizes = {"--dram-limit": "64GiB", "--dram-floor": "", "--nvme-limit": "none", "--nvme-floor": "0"}
    patch = {"dram": {"limit": 64 << 30}, "nvme": {"limit": None, "floor": 0}}
    assert patch_of("chat", sizes, None) == {"tenants": {"chat": patch}}
    assert patch_of("chat", {}, 2.0) == {"tenants": {"chat": {"share": 2.0}}}
    with pytest.raises(MisuseError, match="can't be a tenant's name"):
        patch_of("no/name", sizes, None)


def test_consequences_of_a_change_are_one_line_each() -> None:
    evicted = {"tenant": "chat", "tier": "dram", "evicted_bytes": 3 << 20, "claimed_bytes": 0}
    answer = {"changed": ["tenants.chat.share = 2"], "kept": True, "consequences": [evicted]}
    assert lines(answer, False) == [
        "is now: tenants.chat.share = 2",
        "3MiB of chat will be evicted from dram",
    ]
    assert lines(answer, True) == [
        "would be: tenants.chat.share = 2",
        "3MiB of chat would be evicted from dram",
    ]
    assert lines({"changed": [], "consequences": [], "kept": True}, False) == ["nothing changes"]


# -- traces


def test_trace_info_sums_a_trace(tmp_path: Path) -> None:
    trace = chats(tmp_path / "trace", 50)
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    done = cli("trace", "info", str(trace), "--json")
    seen = json.loads(done.stdout)
    full = [row["hash_ids"][: row["input_length"] // 512] for row in rows]
    assert seen["requests"] == seen["sessions"] == 50
    assert seen["blocks"] == sum(map(len, full))
    assert 0 < seen["unique_blocks"] <= seen["blocks"]
    assert seen["duration_s"] == (rows[-1]["timestamp"] - rows[0]["timestamp"]) / 1000
    assert (seen["kind"], seen["block_tokens"], seen["bad_lines"]) == ("requests", 512, 0)
    bad = tmp_path / "bad"
    bad.write_text(trace.read_text() + "nonsense\n")
    assert cli("trace", "info", str(bad)).returncode == 2
    skipped = cli("trace", "info", str(bad), "--skip-bad", "--json")
    assert json.loads(skipped.stdout)["bad_lines"] == 1


def test_record_is_a_command_of_trace_and_of_lab(daemon: LocalDaemon, tmp_path: Path) -> None:
    for group in ("trace", "lab"):
        out = tmp_path / group
        assert told(daemon, group, "record", "--out", str(out), "--for", "0.2s")["requests"] == 0
        assert out.exists()


# -- completion


def completed(words: str, socket: Path | str, shell: str = "bash") -> list[str]:
    """Returns the completions of the last word."""
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1), "KVSTORE_SOCKET": str(socket)}
    done = cli(_KVSTORE_COMPLETE=f"complete_{shell}", **asked)
    assert done.stderr == ""
    return done.stdout.split()


def test_completion_offers_names_of_the_daemon(daemon: LocalDaemon, client: Client) -> None:
    _, id, _ = stored(client, 1)
    for words in ("kvstore ns show ", f"kvstore ns publish {id[:30]}", "kvstore pin add "):
        assert id in completed(words, daemon.socket)
    for words in ("kvstore quota show d", "kvstore tenant delete ", "kvstore events --tenant "):
        assert completed(words, daemon.socket) == ["default"]
    assert completed("kvstore device show ", daemon.socket) == ["dram", "nvme"]
    assert completed("kvstore tier show n", daemon.socket) == ["nvme"]
    assert completed(f"kvstore tier show --socket {daemon.socket} ", "/nowhere") == ["dram", "nvme"]
    assert completed("kvstore policy set s", "/nowhere") == ["s3fifo", "sieve"]
    assert completed("kvstore events --what dropped,ev", "/nowhere") == ["dropped,evicted"]
    assert completed("kvstore bl", "/nowhere") == ["blocks"]
    assert completed("kvstore pin ", "/nowhere") == ["add", "remove"]


def test_completion_is_silent_without_a_daemon(tmp_path: Path) -> None:
    assert completed("kvstore tier show ", tmp_path / "nobody.sock") == []
    assert completed("kvstore tier show ", "not-a-path") == []


def test_completion_has_two_options() -> None:
    options = {option for param in get_command(app).params for option in param.opts}
    assert {"--install-completion", "--show-completion"} <= options
