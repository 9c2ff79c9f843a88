"""Replay and the command line, against a store with injected errors and a real daemon."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvstore import Client
from kvstore.cli import app
from kvstore.errors import ConfigError, KVStoreError, MisuseError, UnavailableError
from kvstore.lab import replay
from kvstore.lab.local_daemon import LocalDaemon
from kvstore.lab.replay import Engine, Options, Payload
from kvstore.lab.traces import Trace
from kvstore.types import Layout, Tier

BLOCK = 4096
KEYS = [bytes([i]) * 32 for i in range(10)]
LAYOUT = Layout(model="m", block_bytes=BLOCK)


class Store:
    """A client, a namespace and its blocks in a dictionary; subclasses misbehave."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, np.ndarray] = {}
        self.asked: list[list[bytes]] = []
        self.parents: list[bytes | None] = []
        self.acquired: list[int] = []
        self.lock = threading.Lock()

    def status(self) -> dict[str, Any]:
        return {"counters": {"written_bytes": BLOCK * len(self.blocks)}}

    def namespace(self, _layout: Layout) -> Store:
        return self

    def lookup(self, keys: list[bytes]) -> int:
        with self.lock:
            self.asked.append(keys)
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def acquire(self, keys: list[bytes]) -> Lease:
        self.acquired.append(len(keys))
        return Lease([self.blocks[key] for key in keys])

    def put(self, keys: list[bytes], rows: np.ndarray, parent: bytes | None) -> SimpleNamespace:
        self.parents.append(parent)
        with self.lock:
            new = [key for key in keys if key not in self.blocks]
            self.blocks.update(zip(keys, rows.copy(), strict=True))
        return SimpleNamespace(stored=len(new), present=len(keys) - len(new), denied=0, why="")


class Lease:
    def __init__(self, blocks: Sequence[np.ndarray]) -> None:
        self.held = blocks
        self.tiers = bytes([Tier.DRAM] * len(blocks))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __len__(self) -> int:
        return len(self.held)

    def copy_into(self, out: np.ndarray) -> int:
        assert len(out) == len(self.held)
        out[:] = self.held
        return len(out)


def engine(store: Store) -> Engine:
    return Engine(store, LAYOUT)  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [0, 7, 8, 2049, BLOCK - 1])
def test_every_byte_of_a_block_is_checked(at: int) -> None:
    payload, rows = Payload(BLOCK), np.zeros((3, BLOCK), np.uint8)
    payload.fill(KEYS[:3], rows)
    right = rows.copy()
    assert payload.count_wrong(KEYS[:3], rows) == 0
    rows[:] = right
    rows[1, at] ^= 1
    assert payload.count_wrong(KEYS[:3], rows) == 1
    assert not rows.any(), "checked bytes are cleared"


def test_foreign_torn_and_zero_blocks_are_wrong() -> None:
    payload, rows = Payload(BLOCK), np.zeros((3, BLOCK), np.uint8)
    payload.fill(KEYS[:3], rows)
    rows[0] = rows[1]
    rows[1, BLOCK // 2 :] = rows[2, BLOCK // 2 :]
    rows[2] = 0
    assert payload.count_wrong(KEYS[:3], rows) == 3


@pytest.mark.parametrize("block_bytes", [0, 4, 12, 4097])
def test_odd_block_sizes_are_refused(block_bytes: int) -> None:
    with pytest.raises(MisuseError, match=f"{block_bytes} bytes"):
        Payload(block_bytes)


def test_a_prompt_gets_the_stored_prefix_and_puts_the_rest() -> None:
    store = Store()
    player = engine(store)
    first = player.prompt(KEYS[:4])
    again = player.prompt(KEYS[:6])
    assert (first.asked, first.served, first.stored, store.parents[0]) == (4, 0, 4, None)
    assert (again.asked, again.served, again.stored, store.parents[1]) == (6, 4, 2, KEYS[3])
    assert again.hits == {Tier.DRAM: 4}
    assert again.wrong == 0
    assert (len(first.gets_s), len(again.gets_s), len(again.lookups_s)) == (0, 1, 1)


def test_long_prompts_move_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "BUFFER_BYTES", 4 * BLOCK)
    store = Store()
    player = engine(store)
    player.prompt(KEYS)
    assert store.parents == [None, KEYS[3], KEYS[7]]
    assert player.prompt(KEYS).served == 10
    assert store.acquired == [4, 4, 2]
    assert [len(keys) for keys in store.asked] == [10, 10]


def test_wrong_bytes_are_detected() -> None:
    class Liar(Store):
        def acquire(self, keys: list[bytes]) -> Lease:
            return Lease([self.blocks[KEYS[0]] for _ in keys])

    player = engine(Liar())
    player.prompt(KEYS)
    assert player.prompt(KEYS).wrong == 9


def test_missing_copies_are_detected() -> None:
    class Idle(Lease):
        def copy_into(self, out: np.ndarray) -> int:
            return len(out)

    class Lazy(Store):
        def acquire(self, keys: list[bytes]) -> Lease:
            return Idle([self.blocks[key] for key in keys])

    player = engine(Lazy())
    player.prompt(KEYS)
    assert player.prompt(KEYS).wrong == 10


def test_blocks_that_fail_their_check_are_misses_and_their_bytes_are_not_reused() -> None:
    class Rotten(Lease):
        def copy_into(self, out: np.ndarray) -> int:
            super().copy_into(out)
            return 6

    class Store6(Store):
        rotten = True

        def acquire(self, keys: list[bytes]) -> Lease:
            lease = [self.blocks[key] for key in keys]
            if not self.rotten:
                return Lease([])
            self.rotten = False
            return Rotten(lease)

    player = engine(Store6())
    player.prompt(KEYS)
    tally = player.prompt(KEYS)
    assert (tally.served, tally.wrong, tally.present) == (6, 0, 4)
    assert not player._got.any()


def test_a_partial_lease_is_followed_by_another_acquire() -> None:
    class Narrow(Store):
        def acquire(self, keys: list[bytes]) -> Lease:
            return super().acquire(keys[:4])

    store = Narrow()
    player = engine(store)
    player.prompt(KEYS)
    assert player.prompt(KEYS).served == 10
    assert store.acquired == [4, 4, 2]


def test_after_a_denial_the_rest_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Store):
        def put(self, keys: list[bytes], rows: np.ndarray, parent: bytes | None) -> SimpleNamespace:
            self.parents.append(parent)
            return SimpleNamespace(stored=1, present=1, denied=len(keys) - 2, why="full")

    monkeypatch.setattr(replay, "BUFFER_BYTES", 4 * BLOCK)
    store = Full()
    tally = engine(store).prompt(KEYS)
    assert (tally.stored, tally.present, tally.denied) == (1, 1, 8)
    assert tally.denied_why == {"full": 1}
    assert len(store.parents) == 1


def chat_trace(path: Path, requests: int = 40) -> Path:
    """Chats that share a system prompt of two blocks and repeat every fifth prompt."""
    rows = [
        {
            "timestamp": 20 * i,
            "input_length": 6 * 512,
            "output_length": 1,
            "hash_ids": [0, 1, *range(10 + 10 * (i % 5), 14 + 10 * (i % 5))],
        }
        for i in range(requests)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def agent_trace(path: Path) -> Path:
    """Six conversations of eight requests, each of which adds a block."""
    rows = [
        {
            "block_size": 64,
            "requests": [
                {"t": float(t), "in": 64 * (t + 1), "out": 1, "hash_ids": list(range(t + 1))}
                for t in range(8)
            ],
        }
        for _ in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def play(store: Store, trace: Trace, options: Options) -> replay.Result:
    return replay.replay(store, trace, options)  # type: ignore[arg-type]


def test_the_result_counts_everything(tmp_path: Path) -> None:
    result = play(Store(), Trace(chat_trace(tmp_path / "t")), Options(concurrency=1, block_bytes=BLOCK))
    unique = 2 + 5 * 4
    assert (result.requests, result.blocks, result.input_tokens) == (40, 240, 40 * 6 * 512)
    hits = 240 - unique
    assert result.token_hit_ratio == hits / 240
    assert result.hits_by_tier == {"dram": hits, "nvme": 0}
    assert result.bytes_served == hits * BLOCK
    assert result.bytes_written == result.nvme_bytes_written == unique * BLOCK
    assert (result.wrong_blocks, result.denied_blocks, result.present_blocks) == (0, 0, 0)
    assert result.get_p50_s is not None
    assert result.lookup_p99_s is not None
    json.dumps(asdict(result))


def test_a_conversation_stays_in_order_on_one_worker(tmp_path: Path) -> None:
    store = Store()
    result = play(store, Trace(agent_trace(tmp_path / "t")), Options(concurrency=4, block_bytes=BLOCK))
    assert result.requests == 48
    lengths: dict[bytes, list[int]] = {}
    for keys in store.asked:
        lengths.setdefault(keys[0], []).append(len(keys))
    assert list(lengths.values()) == [list(range(1, 9))] * 6
    assert result.token_hit_ratio == sum(range(8)) / sum(range(9))


def test_requests_limit_and_progress(tmp_path: Path) -> None:
    shares: list[float] = []
    replay.replay(
        Store(),  # type: ignore[arg-type]
        Trace(agent_trace(tmp_path / "t")),
        Options(requests=10, concurrency=1, block_bytes=BLOCK),
        lambda share, _total: shares.append(share),
    )
    assert shares == pytest.approx([(i + 1) / 10 for i in range(10)])


def test_speed_waits_for_the_trace(tmp_path: Path) -> None:
    trace = Trace(chat_trace(tmp_path / "t", requests=11))
    assert play(Store(), trace, Options(speed=2, block_bytes=BLOCK)).wall_s >= 0.1


@pytest.mark.parametrize("bad", [{"requests": 0}, {"concurrency": 0}, {"speed": -1}, {"speed": float("nan")}])
def test_bad_options(bad: dict[str, Any]) -> None:
    with pytest.raises(MisuseError, match=next(iter(bad))):
        Options(**bad)


def test_an_error_in_a_worker_ends_the_replay(tmp_path: Path) -> None:
    path = chat_trace(tmp_path / "t", requests=20)
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(KVStoreError, match="line 21 is not JSON"):
        play(Store(), Trace(path), Options(block_bytes=BLOCK))


# The following tests use a real daemon.


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon({"dram": {"limit": "16MiB", "huge_pages": False}}) as served:
        yield served


def test_replay_against_a_daemon(daemon: LocalDaemon, tmp_path: Path) -> None:
    with Client(daemon.url, deadline_s=5.0) as client:
        options = Options(concurrency=3, block_bytes=BLOCK)
        result = replay.replay(client, Trace(agent_trace(tmp_path / "t")), options)
        again = replay.replay(client, Trace(agent_trace(tmp_path / "t")), options)
    assert result.wrong_blocks == again.wrong_blocks == 0
    assert result.bytes_written == 48 * BLOCK
    assert result.token_hit_ratio == sum(range(8)) / sum(range(9))
    assert again.token_hit_ratio == 1.0
    assert again.bytes_written == 0


def test_blocks_evicted_from_dram_are_served_from_nvme_after_a_restart(tmp_path: Path) -> None:
    path = chat_trace(tmp_path / "t")
    # The scrubber holds slots, and there are few.
    settings = {
        "dram": {"limit": "2MiB", "huge_pages": False},
        "nvme": {"limit": "64MiB"},
        "scrub": {"rate": 0},
    }
    with LocalDaemon(settings) as served:
        options = Options(concurrency=1, block_bytes=256 << 10)
        with Client(served.url, deadline_s=10.0) as client:
            first = replay.replay(client, Trace(path), options)
        served.restart()
        with Client(served.url, deadline_s=10.0) as client:
            second = replay.replay(client, Trace(path), options)
    assert first.wrong_blocks == second.wrong_blocks == 0
    assert first.hits_by_tier["nvme"] > 0
    assert first.nvme_bytes_written
    assert second.nvme_bytes_written == 0
    assert second.token_hit_ratio == 1.0


def test_a_local_daemon_removes_its_files(daemon: LocalDaemon) -> None:
    with LocalDaemon({"dram": {"limit": "2MiB"}, "nvme": {"limit": "4MiB"}}) as served:
        folder, first = served.folder, served.pid
        assert folder != daemon.folder
        served.kill()
        assert served.pid == 0
        served.start()
        assert served.pid not in (0, first)
    assert not folder.exists()


def test_a_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(UnavailableError, match="ended with exit code") as caught,
        LocalDaemon({"nvme": {"path": tmp_path / "file", "limit": "4MiB"}}),
    ):
        pass
    assert "file" in caught.value.hint
    with pytest.raises(ConfigError, match=r"dram\.limit"), LocalDaemon({"dram": {"limit": "soon"}}):
        pass


def run(*args: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_status(daemon: LocalDaemon) -> None:
    state = json.loads(run("status", "--socket", daemon.socket, "--json").stdout)
    assert state["pid"] == daemon.pid
    assert [tier["name"] for tier in state["tiers"]] == ["dram"]
    text = run("status", "--socket", daemon.url).stdout
    assert "dram" in text
    assert str(daemon.pid) in text


def test_status_without_a_daemon(tmp_path: Path) -> None:
    result = run("status", "--socket", tmp_path / "none", code=2)
    assert result.stderr.startswith("error: ")
    assert str(tmp_path / "none") in result.stderr
    assert result.stdout == ""


def test_config_commands(tmp_path: Path) -> None:
    example = run("config", "example").stdout
    file = tmp_path / "kvstore.toml"
    file.write_text(example)
    assert run("config", "check", file).stdout == f"{file}: ok\n"
    file.write_text(re.sub(r"(\n\[limits\].*\n)", r"\1lease = 1\n", example))
    result = run("config", "check", file, code=2)
    assert result.stderr.startswith(f"error: {file}: unknown key limits.lease = 1 (")
    for wrong in ("fifo", "no.such.module:Policy"):
        file.write_text(f'[policy]\neviction = "{wrong}"\n')
        for command in (("config", "check", file), ("serve", "-c", file)):
            result = run(*command, code=2)
            assert result.stderr.startswith(f"error: {file}: policy.eviction: no eviction policy '{wrong}'")
            assert "lru, arc, s3fifo" in result.stderr


def test_serve_with_a_bad_configuration(tmp_path: Path) -> None:
    assert "No such file" in run("serve", "-c", tmp_path / "none.toml", code=2).stderr


def test_replay_prints_one_object(daemon: LocalDaemon, tmp_path: Path) -> None:
    trace = chat_trace(tmp_path / "t")
    args = ("replay", trace, "--socket", daemon.socket, "--block-bytes", "8KiB", "--json")
    result = run(*args)
    values = json.loads(result.stdout)
    assert values["requests"] == 40
    assert values["block_bytes"] == 8192
    assert values["wrong_blocks"] == 0
    assert result.stderr == "", "no bar where nobody watches"
    table = run(*args[:-1]).stdout
    assert "wrong blocks" in table


def test_replay_serve_starts_a_daemon(tmp_path: Path) -> None:
    trace, data = chat_trace(tmp_path / "t"), tmp_path / "data"
    data.mkdir()
    own = ("--serve", "--dram", "2MiB", "--nvme", "64MiB", "--data", data, "--json", "--block-bytes", "64KiB")
    cold = json.loads(run("replay", trace, *own).stdout)
    warm = json.loads(run("replay", trace, *own).stdout)
    assert cold["wrong_blocks"] == warm["wrong_blocks"] == 0
    assert warm["token_hit_ratio"] == 1.0, "the folder that was given is kept, and served from"
    assert warm["hits_by_tier"]["nvme"] > 0


def test_replay_fails_when_a_block_is_wrong(
    daemon: LocalDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Payload, "count_wrong", lambda *_: 1)
    trace = chat_trace(tmp_path / "t")
    run("replay", trace, "--socket", daemon.socket, "--block-bytes", "16KiB", "--json", code=1)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--dram", "1GiB"], "add --serve"),
        (["--serve", "--dram", "much"], "--dram: 'much' is not a size"),
        (["--serve", "--nvme", "0", "--data", "x"], "--nvme 0"),
        (["--serve", "--dram", "1KiB"], "dram.limit: 1KiB is too small"),
        (["--block-bytes", "64K"], "--block-bytes: '64K' is not a size"),
        (["--block-bytes", "12"], "12 bytes"),
        (["--deadline", "soon"], "--deadline: 'soon' is not a duration"),
        (["--concurrency", "0"], "concurrency is 0"),
        (["--requests", "0"], "requests is 0"),
    ],
)
def test_invalid_replay_options_are_refused(
    daemon: LocalDaemon, tmp_path: Path, args: list[str], says: str
) -> None:
    socket = [] if "--serve" in args else ["--socket", str(daemon.socket)]
    assert says in run("replay", chat_trace(tmp_path / "t"), *socket, *args, code=2).stderr


def test_replay_of_an_invalid_trace_fails(tmp_path: Path) -> None:
    assert "check the path" in run("replay", tmp_path / "none", "--serve", code=2).stderr
