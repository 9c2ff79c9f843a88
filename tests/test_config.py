"""The configuration: what it accepts, and how it names what it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore.config import (
    GIB,
    MIB,
    Config,
    example,
    format_size,
    load,
    parse,
    parse_duration,
    parse_size,
)
from kvstore.errors import ConfigError, MisuseError


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
def test_not_a_size(text: object) -> None:
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
def test_not_a_duration(text: object) -> None:
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
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


def test_the_example_is_the_default_and_shows_every_key() -> None:
    text = example()
    assert parse(text) == Config() == load(None)
    sections = re.split(r"^\[(\w+)\]$", text, flags=re.M)
    shown = {
        name: set(re.findall(r"^(?:# )?(\w+) = ", body, flags=re.M))
        for name, body in zip(sections[1::2], sections[2::2], strict=True)
    }
    assert shown == {name: set(dict(section)) for name, section in Config()}


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
    ],
)
def test_an_error_names_the_key_the_value_and_what_to_do(text: str, names: str, hint: str) -> None:
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
