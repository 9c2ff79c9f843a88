"""The memory of a machine, and the DRAM limit of a daemon without a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.config import GIB, MIB, Memory, check_dram, choose, parse, read_memory
from kvstore.errors import ConfigError
from kvstore.types import extent_bytes

MEMINFO = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {40 << 20} kB\n"


def machine(folder: Path, groups: str, limits: dict[str, str]) -> Memory:
    """Returns the memory of a machine with these groups of the process, and limits by file."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(MEMINFO)
    (folder / "proc/self/cgroup").write_text(groups)
    for name, text in limits.items():
        (folder / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup" / name).write_text(f"{text}\n")
    return read_memory(folder / "proc", folder / "cgroup")


@pytest.mark.parametrize(
    ("groups", "limits", "total"),
    [
        ("0::/\n", {}, 64 * GIB),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": str(8 * GIB)}, 8 * GIB),
        ("0::/a\n", {"memory.max": str(100 * GIB)}, 64 * GIB),
        ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": str(2 * GIB)}, 2 * GIB),
        ("3:cpu,memory:/a\n", {"memory/memory.limit_in_bytes": str(3 * GIB)}, 3 * GIB),
        ("3:cpu:/a\n", {"memory/a/memory.limit_in_bytes": str(2 * GIB)}, 64 * GIB),
    ],
)
def test_the_least_limit_of_machine_and_control_groups_counts(
    tmp_path: Path, groups: str, limits: dict[str, str], total: int
) -> None:
    found = machine(tmp_path, groups, limits)
    assert found == Memory(total, min(total, 40 * GIB), total < 64 * GIB)
    assert str(found).startswith("the control group" if total < 64 * GIB else "this machine has 64GiB")


def test_a_service_without_proc_still_knows_its_memory(tmp_path: Path) -> None:
    found = read_memory(tmp_path, tmp_path)
    assert 0 < found.available_bytes <= found.total_bytes


@pytest.mark.parametrize(
    ("memory", "kept", "limit"),
    [
        (Memory(64 * GIB, 60 * GIB), 0, 16 * GIB),
        (Memory(64 * GIB, 8 * GIB), 0, 4 * GIB),
        (Memory(64 * GIB, 2 * GIB), 6 * GIB, 6 * GIB),
        (Memory(64 * GIB, 48 * GIB), 16 * GIB, 16 * GIB),
        (Memory(64 * MIB, 10 * MIB), 0, 4 * MIB),
        (Memory(4 * MIB, MIB), 0, 2 * MIB),
    ],
)
def test_dram_is_a_quarter_of_memory_and_half_of_the_available(memory: Memory, kept: int, limit: int) -> None:
    source = choose(memory, kept)
    assert source.config().dram.limit == limit
    assert limit % extent_bytes(limit) == 0


def test_the_limit_of_an_explicit_file_is_documented_and_not_chosen() -> None:
    assert parse("").dram.limit == GIB


def test_a_limit_beyond_the_memory_of_the_machine_is_an_error() -> None:
    config = parse('[dram]\nlimit = "64GiB"\n')
    check_dram(config, Memory(64 * GIB, GIB), None)
    with pytest.raises(ConfigError) as caught:
        check_dram(config, Memory(32 * GIB, 30 * GIB, True), Path("/a.toml"))
    assert caught.value.message == (
        "dram.limit is 64GiB, and the control group of this process has 32GiB of memory"
    )
    assert caught.value.hint == (
        'set dram.limit in /a.toml to less, such as "8192MiB", then: kvstore doctor -c /a.toml'
    )
