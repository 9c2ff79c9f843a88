"""The configuration: accepted values, and the messages for invalid ones."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvstore.config import (
    GIB,
    MIB,
    AdminToken,
    Config,
    NvmeDevice,
    Tenant,
    TierQuota,
    Token,
    changes,
    example,
    format_size,
    load,
    parse,
    parse_duration,
    parse_size,
    tables,
)
from kvstore.core.policy import POLICIES
from kvstore.errors import ConfigError, MisuseError
from kvstore.socket_paths import default_folder

TOKEN = f"[[tenants.a.tokens]]\nhash = 'sha256:{'0F' * 32}'"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("64B", 64),
        ("64GiB", 64 << 30),
        ("512MiB", 512 << 20),
        ("100GB", 100 * 10**9),
        ("3kb", 3000),
        (" 2 TiB ", 2 << 40),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "0foo", "64G", "1.5GiB", "-1", "1 2", "1e9", "9999999999TiB", -1, True, 1.0, None]
)
def test_invalid_sizes_are_refused(text: object) -> None:
    with pytest.raises(MisuseError, match=re.escape(f"{text!r} is not a size")) as caught:
        parse_size(text)
    assert "64GiB" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (5, 5.0),
        (0.25, 0.25),
        ("250ms", 0.25),
        ("5s", 5.0),
        ("1.5s", 1.5),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("7", 7),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "ms", "0x", "5 sec", "-1s", -1, float("nan"), float("inf"), True, None])
def test_invalid_durations_are_refused(text: object) -> None:
    with pytest.raises(MisuseError, match="is not a duration") as caught:
        parse_duration(text)
    assert "250ms" in caught.value.hint


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (8 * GIB, "8GiB"),
        (5 << 40, "5TiB"),
        (2**20 - 1, "1MiB"),
    ],
)
def test_format_size(size: int, text: str) -> None:
    assert format_size(size) == text


def test_the_example_is_the_default_and_shows_every_key() -> None:
    text = example(default_folder())
    assert parse(text) == Config() == load(None)
    sections = re.split(r"^(?:# )?\[+([\w.-]+)\]+.*$", text, flags=re.M)
    shown = {
        name: set(re.findall(r"^(?:# )?(\w+) = ", body, flags=re.M))
        for name, body in zip(sections[1::2], sections[2::2], strict=True)
    }
    quota = set(TierQuota.model_fields)
    tenant = {
        "": set(Tenant.model_fields) - {"dram", "nvme", "hbm", "tokens"},
        ".tokens": set(Token.model_fields),
    }
    tenant |= {".dram": quota, ".nvme": quota, ".hbm": quota}
    by_name = {"tokens", "devices"}
    assert shown == {
        **{name: set(dict(section)) - by_name for name, section in Config() if name != "tenants"},
        "nvme.devices.nvme1": set(NvmeDevice.model_fields),
        "admin.tokens": set(AdminToken.model_fields),
        **{f"tenants.team-a{part}": keys for part, keys in tenant.items()},
    }


def test_the_commented_tenant_of_the_example_is_valid() -> None:
    lines = example().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("# [tenants.team-a]"))
    text = "\n".join([*lines[:at], *(line.removeprefix("# ") for line in lines[at:])])
    [(name, tenant)] = parse(text).tenants.items()
    assert (name, tenant.uids, tenant.dram.limit) == ("team-a", (1001,), 16 * GIB)
    assert tenant.tokens[0].expires == datetime(2030, 1, 1, tzinfo=UTC)
    shown = {"ttl": 86400, "pin": GIB, "bandwidth": 500 * MIB, "requests": 1000}
    assert {key: getattr(tenant, key) for key in shown} == shown
    defaults = Tenant()
    for key in ("gids", "role", "share", "encrypt"):
        assert getattr(tenant, key) == getattr(defaults, key)


def test_every_line_of_the_example_has_a_comment_and_fits() -> None:
    lines = example().splitlines()
    assert max(map(len, lines)) <= 110
    shown = [line for line in lines if re.match(r"(# )?(\[|\w+ = )", line)]
    assert len(shown) > 80
    assert all(re.search(r"\S  +# \w", line) for line in shown)


def test_every_key_is_described_once_with_its_type_bounds_and_default() -> None:
    by_name = {f"{table.heading} {key.name}": key for table in tables() for key in table.keys}
    limit = by_name["[dram] limit"]
    assert (limit.kind, limit.bounds, limit.default, limit.live) == ("size", "at least 2MiB", '"1GiB"', True)
    assert limit.summary == "Hard limit of shared memory"
    assert "four times" in limit.detail
    mode = by_name["[daemon] socket_mode"]
    assert (mode.kind, mode.bounds, mode.default, mode.live) == ("file mode", "0o0 to 0o777", "0o600", False)
    level = by_name["[daemon] log_level"]
    assert (level.kind, level.choices) == ("one of", ("debug", "info", "warning", "error"))
    timeout = by_name["[network] timeout"]
    assert (timeout.kind, timeout.bounds, timeout.default) == ("duration", "50ms to 60s", '"2s"')
    assert by_name["[hbm] gpus"].kind == "list of strings"
    assert by_name["[hbm] gpus"].bounds == "at most 7 values"
    path = by_name["[nvme.devices.NAME] path"]
    assert (path.required, path.default, path.live) == (True, "", False)
    tokens = {key for key in by_name if "tokens" in key}
    assert {f"[[tenants.NAME.tokens]] {key}" for key in ("hash", "role", "expires")} < tokens
    assert all(by_name[key].live for key in tokens), "the table around them is"
    assert not [name for name, key in by_name.items() if not key.summary]


def test_the_key_of_the_policy_names_every_policy() -> None:
    [policy] = next(table.keys for table in tables() if table.path == ("policy",))
    assert set(re.findall(r"[\w]+", policy.summary.partition(":")[2])) - {"or"} == set(POLICIES)


def test_a_file_is_read_and_frozen(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(
        '[daemon]\nsocket = "/tmp/s"\nsocket_mode = 0o660\nstop_timeout = "250ms"\n'
        '[dram]\nlimit = "64MiB"\n[nvme]\npath = "/data"\nwrite_policy = "on_evict"\n'
    )
    config = load(file)
    assert config.daemon.socket == Path("/tmp/s")
    assert config.daemon.socket_mode == 0o660
    assert config.daemon.stop_timeout == 0.25
    assert config.dram.limit == 64 * MIB
    assert config.nvme.path == Path("/data")
    assert config.nvme.write_policy == "on_evict"
    with pytest.raises(ValueError, match="frozen"):
        config.dram.limit = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "names", "hint"),
    [
        ("[nvme]\nlimit = '8XB'", "nvme.limit: '8XB'", "64GiB"),
        ("[dram]\nlimit = true", "dram.limit: True", "64GiB"),
        ("[dram]\nlimit = '1MiB'", "dram.limit: 1MiB", "at least 2MiB"),
        ("[nvme]\nlimit = 5", "nvme.limit: 5B", "at least 2MiB"),
        ("[daemon]\nstop_timeout = '5x'", "daemon.stop_timeout: '5x'", "250ms"),
        ("[daemon]\nstop_timeout = 0", "daemon.stop_timeout is 0", "greater than 0"),
        ("[daemon]\nsocket_mode = 0o1777", "daemon.socket_mode is 0o1777", "less than"),
        ("[daemon]\nlog_level = 'loud'", "daemon.log_level is 'loud'", "'warning'"),
        ("[dram]\nhuge_pages = 'yes'", "dram.huge_pages is 'yes'", "boolean"),
        ("[nvme]\nwrite_policy = 'never'", "nvme.write_policy is 'never'", "on_evict"),
        ("[nvme]\npath = ''", "nvme.path: ''", "folder"),
        ("[nvme]\npath = 7", "nvme.path: 7", "folder"),
        ("[nvme]\nio_threads = 0", "nvme.io_threads is 0", "greater than or equal to 1"),
        ("[limits]\nconnections = 1.5", "limits.connections is 1.5", "integer"),
        ("[limits]\nbatch_keys = 100000", "limits.batch_keys: 100000 keys", "12800000"),
        ("[limits]\nframe_bytes = '64KiB'", "limits.batch_keys: 4096 keys", "512 keys"),
        ("dram = 5", "dram is 5", "[dram]"),
        ("[dram]\nlimits = 1", "unknown key dram.limits = 1", "did you mean dram.limit?"),
        ("limit = 1", "unknown key limit = 1", "did you mean dram.limit?"),
        (
            "[dram]\nwrite_policy = 'x'",
            "unknown key dram.write_policy = 'x'",
            "did you mean nvme.write_policy?",
        ),
        ("[deamon]\n", "unknown key deamon = {}", "did you mean daemon?"),
        ("zzz = 1", "unknown key zzz = 1", "config example"),
        ("[limits]\nnamespaces = 0", "limits.namespaces is 0", "greater than or equal to 1"),
        ("[limits]\nnamespaces = 65536", "limits.namespaces is 65536", "less than or equal to 65535"),
        ("[limits]\nqueued_requests = 0", "limits.queued_requests is 0", "greater than or equal to 1"),
        ("[encryption]\nkey_file = 1", "encryption.key_file: 1 is not a path", "file"),
        ("tenants = 5", "tenants is 5", "[tenants.NAME]"),
        ("tenants.a = 5", "tenants.a is 5", "[tenants.a]"),
        ("[tenants.'../etc']", "'../etc' can't be a tenant's name", "1 to 64 letters"),
        ('[tenants."a/b"]', "'a/b' can't be a tenant's name", "1 to 64 letters"),
        ('[tenants."a\\u001b[2J"]', "'a\\x1b[2J' can't be a tenant's name", "1 to 64 letters"),
        ('[tenants."a\\n"]', "'a\\n' can't be a tenant's name", "1 to 64 letters"),
        ("[tenants.'.a']", "'.a' can't be a tenant's name", "not starting with a dot"),
        ("[tenants.'é']", "can't be a tenant's name", "1 to 64 letters"),
        ("[tenants.'']", "'' can't be a tenant's name", "1 to 64 letters"),
        (f"[tenants.{'a' * 65}]", "can't be a tenant's name", "1 to 64 letters"),
        ("[tenants.a.dram]\nflor = 1", "unknown key tenants.a.dram.flor = 1", "mean tenants.a.dram.floor?"),
        ("[tenants.a]\nlimit = 1", "unknown key tenants.a.limit = 1", "mean tenants.a.dram.limit?"),
        ("[tenants.a]\nuid = 1", "unknown key tenants.a.uid = 1", "mean tenants.a.uids?"),
        ("[tenant.a]\nuids = [1]", "unknown key tenant", "mean tenants?"),
        ("[[tenants.a.tokens]]\ntoken = 'kvs_abc'", "tokens.0.token = 'kvs_...'", "a.tokens?"),
        ("[[tenants.a.tokens]]\nrole = 'write'", "tenants.a.tokens.0.hash is missing", "config example"),
        (
            "[[tenants.a.tokens]]\nhash = 'kvs_a'",
            "tenants.a.tokens.0.hash: this is not sha256:",
            "token NAME",
        ),
        (f"[[tenants.a.tokens]]\nhash = '{'0' * 64}'", "tenants.a.tokens.0.hash: this is not", "token NAME"),
        (f"{TOKEN}\nrole = 'root'", "tenants.a.tokens.0.role is 'root'", "'admin'"),
        (f"{TOKEN}\nexpires = 2027-01-01", "tenants.a.tokens.0.expires: 2027-01-01", "2027-01-01T00:00:00Z"),
        (f"{TOKEN}\nexpires = 2027-01-01T00:00:00", "tokens.0.expires: 2027-01-01", "2027-01-01T00:00:00Z"),
        ("[tenants.a]\nuids = [-1]", "tenants.a.uids.0 is -1", "greater than or equal to 0"),
        ("[tenants.a]\nuids = ['joe']", "tenants.a.uids.0 is 'joe'", "integer"),
        ("[tenants.a]\nuids = 1", "tenants.a.uids is 1", "tuple"),
        ("[tenants.a]\nrole = 'root'", "tenants.a.role is 'root'", "'admin'"),
        ("[tenants.a]\nshare = 0", "tenants.a.share is 0", "greater than 0"),
        ("[tenants.a]\nshare = -1.5", "tenants.a.share is -1.5", "greater than 0"),
        ("[tenants.a]\nshare = nan", "tenants.a.share is nan", "finite"),
        ("[tenants.a]\nttl = 0", "tenants.a.ttl is 0", "greater than 0"),
        ("[tenants.a]\nbandwidth = 0", "tenants.a.bandwidth: 0B per second", "no cap"),
        ("[tenants.a]\nrequests = 0", "tenants.a.requests is 0", "greater than or equal to 1"),
        ("[tenants.a.dram]\nfloor = '2MiB'\nlimit = '1MiB'", "tenants.a.dram: a floor of 2MiB", "lower"),
        (
            "[tenants.a]\nuids = [7, 8]\n[tenants.b]\nuids = [8]",
            "uid 8 is given twice: to tenants.a and to tenants.b",
            "one tenant",
        ),
        (
            "[tenants.a]\ngids = [7]\n[tenants.b]\ngids = [7]",
            "gid 7 is given twice: to tenants.a and to tenants.b",
            "one tenant",
        ),
        (
            f"{TOKEN}\n{TOKEN.replace('.a.', '.b.')}",
            f"token sha256:{'0f' * 32} is given twice: to tenants.a and to tenants.b",
            "one tenant",
        ),
        (
            "[dram]\nlimit = '16MiB'\n[tenants.a.dram]\nfloor = '10MiB'\n[tenants.b.dram]\nfloor = '7MiB'",
            "the floors of all tenants in dram add up to 17MiB (17825792 bytes), dram.limit is 16MiB",
            "raise dram.limit",
        ),
        (
            "[tenants.a.nvme]\nfloor = '9GiB'",
            "the floors of all tenants in nvme add up to 9GiB (9663676416 bytes), nvme.limit is 8GiB",
            "raise nvme.limit",
        ),
    ],
)
def test_an_error_names_the_key_the_value_and_a_remedy(text: str, names: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "x.toml")
    assert caught.value.message.startswith("x.toml: ")
    assert names in caught.value.message
    assert hint in caught.value.hint


def test_the_longest_socket_path() -> None:
    fits, too_long = "/" + "s" * 106, "/" + "é" * 53 + "s"
    assert str(parse(f'[daemon]\nsocket = "{fits}"').daemon.socket) == fits
    with pytest.raises(ConfigError, match=r"daemon\.socket: the path is 108 bytes long") as caught:
        parse(f'[daemon]\nsocket = "{too_long}"')
    assert "107" in caught.value.hint


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        load(tmp_path / "absent.toml")
    assert "config example" in caught.value.hint
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "a.toml").write_text("[dram\n")
    with pytest.raises(ConfigError, match=r"a\.toml is not TOML: .*line 1"):
        load(tmp_path / "a.toml")
    (tmp_path / "b.toml").write_bytes(b"# \xff\n")
    with pytest.raises(ConfigError, match="byte 2 is not UTF-8"):
        load(tmp_path / "b.toml")


def test_no_error_contains_a_token() -> None:
    token = "kvs_" + "s" * 43
    for text in (
        f"[[tenants.a.tokens]]\nhash = '{token}'",
        f"[tenants.a]\ntokens = ['{token}']",
        f"[tenants.a]\ntokens = '{token}'",
        f"token = '{token}'",
    ):
        with pytest.raises(ConfigError) as caught:
            parse(text)
        assert "ssss" not in str(caught.value)


def test_several_tokens_of_a_tenant_are_valid_and_floors_may_fill_a_tier() -> None:
    text = f"{TOKEN}\n{TOKEN.replace('0F', '1e')}\nrole = 'read'\n[dram]\nlimit = '8MiB'\n"
    text += "[tenants.a.dram]\nfloor = '4MiB'\n[tenants.b.dram]\nfloor = '4MiB'\nlimit = '4MiB'"
    tenants = parse(text).tenants
    assert [(t.digest, t.role) for t in tenants["a"].tokens] == [
        (b"\x0f" * 32, "write"),
        (b"\x1e" * 32, "read"),
    ]
    assert tenants["b"].dram == TierQuota(floor=4 * MIB, limit=4 * MIB)


def test_tenants_and_their_limits_change_at_run_time() -> None:
    old = parse("[tenants.a]\nshare = 2.0\n[tenants.gone]\n")
    new = parse(
        "[limits]\nnamespaces = 7\nnamespaces_per_tenant = 5\nqueued_requests = 3\n"
        f"[encryption]\nkey_file = '/key'\n[tenants.a]\nuids = [7]\n[tenants.a.dram]\nfloor = 9\n{TOKEN}\n"
        "[tenants.new]\n"
    )
    assert changes(old, old) == ([], [])
    changed, fixed = changes(old, new)
    assert fixed == ["encryption.key_file"]
    assert changed == [
        "tenants.new is new",
        "tenants.gone is gone",
        "limits.namespaces = 7",
        "limits.namespaces_per_tenant = 5",
        "limits.queued_requests = 3",
        "tenants.a.uids = (7,)",
        "tenants.a.share = 1.0",
        "tenants.a.dram.floor = 9",
        "tenants.a.tokens: 1",
    ]
