"""The adapter as LMCache's controllers call it, on a real daemon."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

from kvstore import Client
from kvstore.daemon.tenancy.auth import hash_of, new_token
from kvstore.errors import ConfigError
from kvstore.lab.local_daemon import LocalDaemon
from kvstore_lmcache import KVStoreAdapter, naming
from tests.engines.lmcache.conftest import bytes_of, descs, load, look_up, names, store, things
from tests.engines.stores import SETTINGS

Make = Callable[..., KVStoreAdapter]


def test_another_process_loads_what_one_has_stored(adapter_of: Make, model: str) -> None:
    keys, objects = names(model, 9), things(9)
    result = store(adapter_of(), keys, objects)
    assert result.is_successful()
    assert result.bytes_transferred() == sum(len(bytes_of(thing)) for thing in objects)
    other, out = adapter_of(), things(9, fill=0)
    assert look_up(other, keys) == list(range(9))
    assert load(other, keys, out) == list(range(9))
    assert [bytes_of(thing) for thing in out] == [bytes_of(thing) for thing in objects]


def test_objects_that_are_missing_are_no_hits(adapter_of: Make, model: str) -> None:
    """Chunks stand for themselves: one that is missing hides none behind it."""
    adapter, keys, objects = adapter_of(), names(model, 8), things(8)
    some = [0, 1, 3, 6]
    assert store(adapter, [keys[i] for i in some], [objects[i] for i in some]).is_successful()
    assert look_up(adapter, keys) == some
    out = things(8, fill=7)
    assert load(adapter, keys, out) == some
    assert [bytes_of(out[i]) for i in some] == [bytes_of(objects[i]) for i in some]


@pytest.mark.parametrize(
    "other",
    [{"rank": 2}, {"group": 1}, {"salt": "tenant"}, {"first": 100}],
    ids=["another shard", "another group", "another salt", "other tokens"],
)
def test_another_name_is_another_object(adapter_of: Make, model: str, other: dict[str, Any]) -> None:
    adapter = adapter_of()
    store(adapter, names(model, 3), things(3))
    keys = names(model, 3, **other)
    assert look_up(adapter, keys, descs(groups=(0, 1))) == []
    assert load(adapter, keys, things(3, fill=0)) == []


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 4, 16, 32), torch.bfloat16), ((2, 4, 16, 64), torch.float16), ((1, 4, 32, 64), torch.bfloat16)],
    ids=["smaller", "another dtype", "another shape of the same bytes"],
)
def test_objects_of_another_form_are_never_mixed(
    adapter_of: Make, model: str, shape: Any, dtype: Any
) -> None:
    adapter, keys = adapter_of(), names(model, 3)
    store(adapter, keys, things(3))
    assert look_up(adapter, keys, descs(shape, dtype)) == []
    out = things(3, shape, dtype, fill=0)
    assert load(adapter, keys, out) == []
    assert not any(any(bytes_of(thing)) for thing in out)
    assert look_up(adapter, keys) == [0, 1, 2]


def test_groups_of_several_forms_in_one_task(adapter_of: Make, model: str) -> None:
    """As for a hybrid model: one task has the chunks of all groups."""
    adapter, small = adapter_of(), (1, 2, 16, 64)
    keys = [*names(model, 3), *names(model, 3, group=1)]
    objects = [*things(3), *things(3, small)]
    told = {**descs(), **descs(small, groups=(1,))}
    assert store(adapter, keys, objects).is_successful()
    assert look_up(adapter, keys, told) == list(range(6))
    out = [*things(3, fill=0), *things(3, small, fill=0)]
    assert load(adapter, keys, out) == list(range(6))
    assert [bytes_of(thing) for thing in out] == [bytes_of(thing) for thing in objects]


def test_an_object_larger_than_a_block_is_several(adapter_of: Make, model: str) -> None:
    adapter, keys, shape = adapter_of(), names(model, 2), (3, 7, 1 << 20)
    assert naming.Form.of([shape], [torch.bfloat16]).parts == 3
    objects = things(2, shape)
    assert store(adapter, keys, objects).is_successful()
    assert look_up(adapter, keys, descs(shape)) == [0, 1]
    out = things(2, shape, fill=0)
    assert load(adapter, keys, out) == [0, 1]
    assert [bytes_of(thing) for thing in out] == [bytes_of(thing) for thing in objects]


def test_a_part_that_is_gone_is_the_whole_object(daemon: LocalDaemon, adapter_of: Make, model: str) -> None:
    adapter, keys, shape = adapter_of(), names(model, 2), (3, 7, 1 << 20)
    store(adapter, keys, things(2, shape))
    form = naming.Form.of([shape], [torch.bfloat16])
    with Client(daemon.url, deadline_s=10) as client:
        space = client.namespace(naming.layout_of(model, "test", form))
        assert space.invalidate(naming.keys_of(keys[0], form.parts)[2:]) == 1
    assert look_up(adapter, keys, descs(shape)) == [1]
    assert load(adapter, keys, things(2, shape, fill=0)) == [1]


@pytest.mark.parametrize("workers", [1, 3, 64])
def test_a_large_load_is_done_in_parts(adapter_of: Make, model: str, workers: int) -> None:
    adapter, keys, shape = adapter_of(num_workers=workers), names(model, 23), (2, 4, 1024, 64)
    objects, some = things(23, shape), [i for i in range(23) if i not in (0, 7, 8, 15, 22)]
    assert store(adapter, [keys[i] for i in some], [objects[i] for i in some]).is_successful()
    out = things(23, shape, fill=0)
    assert load(adapter, keys, out) == some
    assert [bytes_of(out[i]) for i in some] == [bytes_of(objects[i]) for i in some]


def test_a_lookup_without_forms_knows_those_that_were_stored(adapter_of: Make, model: str) -> None:
    """`lmcache bench l2` gives none."""
    adapter, keys = adapter_of(), names(model, 2)
    assert look_up(adapter, keys, descs((), torch.uint8, groups=())) == []
    store(adapter, keys, things(2))
    assert look_up(adapter, keys, {}) == [0, 1]


def test_a_deleted_object_is_gone(adapter_of: Make, model: str) -> None:
    adapter, keys = adapter_of(), names(model, 3)
    store(adapter, keys, things(3))
    assert adapter.get_usage().total_bytes_used == 3 * len(bytes_of(things(1)[0]))
    adapter.delete([*keys[:2], *names(model, 1, first=50)])
    assert look_up(adapter, keys) == [2]
    assert adapter.get_usage().total_bytes_used == len(bytes_of(things(1)[0]))


def test_another_server_deletes_what_it_has_looked_up(adapter_of: Make, model: str) -> None:
    keys = names(model, 2)
    store(adapter_of(), keys, things(2))
    other = adapter_of()
    assert look_up(other, keys) == [0, 1]
    other.delete(keys[:1])
    assert look_up(other, keys) == [1]


def test_lmcache_is_told_of_no_capacity(adapter_of: Make) -> None:
    """The daemon evicts. LMCache would count what it has stored, whatever has been evicted."""
    adapter = adapter_of()
    assert not adapter.supports_global_eviction
    assert adapter.get_usage().usage_fraction == -1.0


def test_encoded_objects_are_refused(adapter_of: Make, model: str, caplog: pytest.LogCaptureFixture) -> None:
    adapter, keys, objects = adapter_of(), names(model, 2), things(2)
    objects[1].set_used_size(100)
    assert not store(adapter, keys, objects).is_successful()
    assert look_up(adapter, keys) == [0]
    assert "a serializer has encoded them" in caplog.text


def test_an_object_of_the_wrong_length_is_a_miss(adapter_of: Make, model: str) -> None:
    adapter, keys = adapter_of(), names(model, 1)
    store(adapter, keys, things(1))
    out = things(1, fill=0)
    out[0].set_used_size(100)
    assert load(adapter, keys, out) == []


# -- weights


def test_other_weights_share_nothing(adapter_of: Make, model: str) -> None:
    keys = names(model, 1)
    assert store(adapter_of(revision="one"), keys, things(1)).is_successful()
    assert look_up(adapter_of(revision="two"), keys) == []
    assert load(adapter_of(revision="two"), keys, things(1, fill=0)) == []
    assert look_up(adapter_of(revision="one"), keys) == [0]


def test_weights_without_a_name_are_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r"nothing names the weights: .*set revision"):
        KVStoreAdapter({"url": "unix:///x"})


# -- tenants


TOKENS = {name: new_token(bytes([i]) * 32) for i, name in enumerate(("red", "blue", "small"))}


@contextmanager
def served_tenants(**limits: str) -> Iterator[Callable[..., KVStoreAdapter]]:
    """A daemon with tenants and the limits of their DRAM. Yields what makes a tenant's adapter."""
    tenants = {
        name: {"tokens": [{"hash": f"sha256:{hash_of(TOKENS[name]).hex()}"}], "dram": {"limit": limit}}
        for name, limit in limits.items()
    }
    made = []
    with LocalDaemon({**SETTINGS, "tenants": tenants}) as daemon, pytest.MonkeyPatch.context() as patch:

        def make(token: str) -> KVStoreAdapter:
            patch.setenv("KVSTORE_TOKEN", token)
            made.append(KVStoreAdapter({"url": daemon.url, "revision": "test", "deadline_s": 5}))
            return made[-1]

        yield make
        for each in made:
            each.close()


def test_tenants_share_nothing(model: str) -> None:
    with served_tenants(red="64MiB", blue="64MiB") as make:
        red, blue, stranger = make(TOKENS["red"]), make(TOKENS["blue"]), make(new_token(b"x" * 32))
        keys, objects = names(model, 2), things(2)
        assert store(red, keys, objects).is_successful()
        assert look_up(blue, keys) == []
        assert load(blue, keys, things(2, fill=0)) == []
        assert look_up(red, keys) == [0, 1]
        assert not store(stranger, keys, objects).is_successful()
        assert look_up(stranger, keys) == []
        assert load(stranger, keys, things(2, fill=0)) == []
        assert not stranger.report_status()["is_healthy"]


def test_a_full_quota_is_a_failed_store(model: str) -> None:
    shape = (2, 4, 256, 1024)  # 4 MiB
    with served_tenants(small="16MiB") as make:
        adapter, keys = make(TOKENS["small"]), names(model, 16)
        assert not store(adapter, keys, things(16, shape)).is_successful()
        assert len(look_up(adapter, keys, descs(shape))) < 5


# -- failures


def test_a_daemon_that_is_absent_is_used_when_it_comes(tmp_path: Path, model: str) -> None:
    socket = tmp_path / "s"
    adapter = KVStoreAdapter({"url": f"unix://{socket}", "revision": "test", "deadline_s": 2})
    keys, objects = names(model, 2), things(2)
    assert not store(adapter, keys, objects).is_successful()
    assert look_up(adapter, keys) == []
    assert load(adapter, keys, things(2, fill=0)) == []
    status = adapter.report_status()
    assert not status["is_healthy"]
    assert status["problem"]
    with LocalDaemon(SETTINGS) as daemon:
        socket.symlink_to(daemon.url.removeprefix("unix://"))
        assert store(adapter, keys, objects).is_successful()
        assert look_up(adapter, keys) == [0, 1]
        assert adapter.report_status()["is_healthy"]
    adapter.close()


def test_a_daemon_that_is_killed(own_daemon: LocalDaemon, model: str) -> None:
    adapter = KVStoreAdapter({"url": own_daemon.url, "revision": "test", "deadline_s": 2})
    keys, objects = names(model, 4), things(4)
    assert store(adapter, keys, objects).is_successful()
    own_daemon.kill()
    began = time.monotonic()
    assert load(adapter, keys, things(4, fill=0)) == []
    assert not store(adapter, keys, objects).is_successful()
    assert look_up(adapter, keys) == []
    assert time.monotonic() - began < 10, "no longer than the deadline of each"
    own_daemon.start()
    assert store(adapter, keys, objects).is_successful()
    assert load(adapter, keys, things(4, fill=0)) == [0, 1, 2, 3]
    adapter.close()


def test_a_daemon_that_hangs_delays_no_task_beyond_its_deadline(own_daemon: LocalDaemon, model: str) -> None:
    adapter = KVStoreAdapter({"url": own_daemon.url, "revision": "test", "deadline_s": 1})
    keys, objects = names(model, 2), things(2)
    assert store(adapter, keys, objects).is_successful()
    os.kill(own_daemon.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert not store(adapter, names(model, 2, first=10), objects).is_successful()
        assert load(adapter, keys, things(2, fill=0)) == []
        assert time.monotonic() - began < 6
    finally:
        os.kill(own_daemon.pid, signal.SIGCONT)
    adapter.close()


@pytest.mark.parametrize("where", ["form_of", "keys_of"])
def test_an_exception_in_a_task_is_a_miss(
    adapter_of: Make, model: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    adapter, keys, objects = adapter_of(), names(model, 2), things(2)
    assert store(adapter, keys, objects).is_successful()

    def fails(*_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(f"kvstore_lmcache.adapter.{where}", fails)
    assert not store(adapter, keys, objects).is_successful()
    assert where == "form_of" or look_up(adapter, keys) == []
    assert load(adapter, keys, things(2, fill=0)) == []
    adapter.delete(keys)
    monkeypatch.undo()
    assert load(adapter, keys, things(2, fill=0)) == [0, 1] or where == "form_of"
    assert adapter.report_status()["failures"]


def test_tasks_after_the_close_end(adapter_of: Make, model: str) -> None:
    adapter, keys = adapter_of(), names(model, 1)
    fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
    assert len(fds) == 3
    adapter.close()
    adapter.close()
    task = adapter.submit_store_task(keys, things(1))
    assert not adapter.pop_completed_store_tasks()[task].is_successful()
    task = adapter.submit_load_task(keys, things(1))
    assert not adapter.query_load_result(task).popcount()
    assert adapter.query_load_result(task) is None, "once"


# -- options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"deadline": 1}, "unknown key 'deadline' (did you mean deadline_s?)"),
        ({"deadline_s": "1"}, "deadline_s is '1'"),
        ({"deadline_s": 0}, "deadline_s is 0"),
        ({"deadline_s": True}, "deadline_s is True"),
        ({"num_workers": 0, "revision": "r"}, "num_workers is 0"),
        ({"num_workers": 1.5}, "num_workers is 1.5"),
        ({"num_workers": 65, "revision": "r"}, "num_workers is 65"),
        ({"revision": ["a"]}, "revision is ['a']"),
        ({"url": 1}, "url is 1"),
    ],
)
def test_wrong_options(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        KVStoreAdapter(given)
    assert message in str(raised.value)


def created(**options: Any) -> Any:
    """An adapter, as LMCache's server makes it from its command line."""
    spec = {
        "type": "plugin",
        "module_path": "kvstore_lmcache",
        "class_name": "KVStoreAdapter",
        "adapter_params": options,
    }
    config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))
    return create_l2_adapter(config.adapters[0])


def test_lmcache_creates_it_by_its_module_path(daemon: LocalDaemon) -> None:
    adapter = created(url=daemon.url, revision="test")
    assert isinstance(adapter, KVStoreAdapter)
    adapter.close()


def test_a_wrong_option_ends_the_start_of_lmcache() -> None:
    with pytest.raises(ConfigError, match="unknown key 'adress'"):
        created(adress="unix:///x")


def test_the_package_of_lmcache_lacks_its_adapter_for_mooncake() -> None:
    """Where it is there, `bench.lmcache` can have it as a contestant."""
    spec = {"type": "mooncake_store", "master_server_addr": "127.0.0.1:1", "protocol": "tcp"}
    config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))
    with pytest.raises(RuntimeError, match="requires the C\\+\\+ Mooncake extension"):
        create_l2_adapter(config.adapters[0])
