"""The adapter: LMCache's L2AdapterInterface on a kvstore daemon.

LMCache's server calls it from two threads: one stores, one looks up and loads. No call waits for the daemon
and none raises. Tasks run on threads (`tasks`), and each ends: a failure is an object that is not there.

Lookups do not lock. An object that is evicted between its lookup and its load is missing in the load's
bitmap, which LMCache expects. The daemon evicts, so LMCache is told of no capacity.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from kvstore import Client, ExceptionBarrier, Namespace
from kvstore_lmcache.naming import Form, form_of, keys_of, layout_of, logger
from kvstore_lmcache.options import AdapterOptions
from kvstore_lmcache.tasks import Tasks

_PART_BYTES = 4 << 20
"""The least bytes of a part of a load that gets a thread of its own."""


@dataclass(slots=True)
class _Batch:
    """Objects of one namespace. `which`: their indices in the call; `keys`: those of all their blocks."""

    namespace: Namespace
    form: Form
    which: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)

    def whole(self, blocks: Sequence[bool]) -> list[int]:
        """Returns the objects all of whose blocks are there."""
        parts = self.form.parts
        return [i for n, i in enumerate(self.which) if all(blocks[n * parts : (n + 1) * parts])]


class KVStoreAdapter(L2AdapterInterface):
    """Stores LMCache's objects in a daemon, and loads them again. Options: `AdapterOptions`."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        """Needs no daemon yet. Raises ConfigError."""
        super().__init__()
        options = AdapterOptions.of(params)
        self._deadline_s = options.deadline_s
        self._client = Client(options.url or None, deadline_s=options.deadline_s)
        self._revision = options.revision
        self._guard = ExceptionBarrier(logger)
        self._lock = threading.Lock()
        self._forms: dict[tuple[str, int], set[Form]] = {}
        self._namespaces: dict[tuple[str, Form], Namespace] = {}
        self._has_told_of_encoded = False
        self._stores: Tasks[L2StoreResult] = Tasks("store", options.num_workers)
        self._lookups: Tasks[Bitmap] = Tasks("lookup", 1)
        self._loads: Tasks[Bitmap] = Tasks("load", options.num_workers)
        self._most_parts = options.num_workers
        self._parts = ThreadPoolExecutor(options.num_workers, "kvstore-part")

    # -- called by LMCache

    def get_store_event_fd(self) -> int:
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.fileno()

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        failed = L2StoreResult(False, 0)
        return self._stores.submit(lambda: self._store(keys, objects), failed)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        return self._lookups.submit(lambda: self._look_up(keys, group_layout_descs), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Does nothing: a lookup has locked nothing."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._loads.submit(lambda: self._load(keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Deletes objects, of all forms that this process has seen."""
        with self._guard("delete"):
            gone, sizes = [], []
            for batch in self._batches(keys, [self._seen(key) for key in keys]):
                there = batch.whole(batch.namespace.contains(batch.keys).tolist())
                batch.namespace.invalidate(batch.keys)
                gone += [keys[i] for i in there]
                sizes += [batch.form.nbytes] * len(there)
            self._notify_keys_deleted(gone, sizes)

    def list_l2_keys(self, model_name: Any = None, page_size: int = 500, cursor: Any = None) -> NoReturn:
        """Raises NotImplementedError, which LMCache answers with 503: the daemon has digests of the keys."""
        # The keys that this process has stored would be a list that lacks those of other servers.
        raise NotImplementedError(
            "the daemon keeps digests of LMCache's keys, not the keys ('kvstore ns list' shows the models)"
        )

    def report_status(self) -> dict[str, Any]:
        """Returns whether the daemon answers, and the failures by call."""
        healthy, problem = True, ""
        try:
            self._client.ping()
        except Exception as error:
            healthy, problem = False, str(error)
        return {"is_healthy": healthy, "problem": problem, "failures": dict(self._guard.failures)}

    def close(self) -> None:
        """Waits for running tasks, drops the others, and closes the connections."""
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()
        self._parts.shutdown()
        self._client.close()

    # -- on threads

    def _store(self, keys: list[Any], objects: list[Any]) -> L2StoreResult:
        ends, stored, nbytes = time.monotonic() + self._deadline_s, True, 0
        with self._guard("store"):
            forms = [form_of(thing) for thing in objects]
            if None in forms:
                self._warn_encoded(objects[forms.index(None)])
            for batch in self._batches(keys, [{form} if form else set() for form in forms]):
                views = [view for i in batch.which for view in _views(objects[i], batch.form)]
                put = batch.namespace.put(batch.keys, views, deadline_s=_left(ends))
                if put.denied:
                    stored = False
                    continue
                nbytes += batch.form.nbytes * len(batch.which)
                self._notify_keys_stored(
                    [keys[i] for i in batch.which], [batch.form.nbytes] * len(batch.which)
                )
            return L2StoreResult(stored and None not in forms, nbytes)
        return L2StoreResult(False, 0)

    def _look_up(self, keys: list[Any], descs: dict[int, Any]) -> Bitmap:
        ends, found = time.monotonic() + self._deadline_s, Bitmap(len(keys))
        with self._guard("lookup"):
            told = {group: Form.of(desc.shapes, desc.dtypes) for group, desc in descs.items()}
            told = {group: form for group, form in told.items() if form.parts}
            forms = [
                {told[key.object_group_id]} if key.object_group_id in told else self._seen(key)
                for key in keys
            ]
            batches = list(self._batches(keys, forms))
            questions = [(batch.namespace, batch.keys) for batch in batches]
            there: set[int] = set()
            masks = self._client.contains(questions, _left(ends)) if questions else []
            for batch, mask in zip(batches, masks, strict=True):
                there.update(batch.whole(mask.tolist()))
            found.batched_set(sorted(there))
            self._notify_keys_accessed([keys[i] for i in sorted(there)])
        return found

    def _load(self, keys: list[Any], objects: list[Any]) -> Bitmap:
        ends, loaded = time.monotonic() + self._deadline_s, Bitmap(len(keys))
        with self._guard("load"):
            forms = [form_of(thing) for thing in objects]
            for batch in self._batches(keys, [{form} if form else set() for form in forms]):
                views = [view for i in batch.which for view in _views(objects[i], batch.form)]
                loaded.batched_set(batch.whole(self._read(batch, views, ends)))
        return loaded

    def _read(self, batch: _Batch, views: list[memoryview], ends: float) -> list[bool]:
        """Reads blocks into memory, parts of a large batch side by side. Returns which were good."""
        nbytes = len(views) * batch.form.nbytes // batch.form.parts
        step = -(-len(views) // max(1, min(self._most_parts, nbytes // _PART_BYTES)))
        reads: list[Future[list[bool]]] = []
        try:
            for at in range(step, len(views), step):
                part = batch.keys[at : at + step], views[at : at + step]
                reads.append(self._parts.submit(_read_part, batch.namespace, *part, ends))
            good = _read_part(batch.namespace, batch.keys[:step], views[:step], ends)
        finally:
            wait(reads)  # the memory is LMCache's again afterwards
        return good + [each for read in reads for each in read.result()]

    # -- within

    def _batches(self, keys: Sequence[Any], forms: Sequence[set[Form]]) -> Iterator[_Batch]:
        """Yields objects by namespace, in each of their possible forms."""
        batches: dict[tuple[str, int], _Batch] = {}
        for i, (key, some) in enumerate(zip(keys, forms, strict=True)):
            for form in some:
                if (batch := batches.get((key.model_name, id(form)))) is None:
                    space = self._namespace(key.model_name, form)
                    batch = batches[key.model_name, id(form)] = _Batch(space, form)
                batch.which.append(i)
                batch.keys += keys_of(key, form.parts)
        with self._lock:
            for (model, _), batch in batches.items():
                for group in {keys[i].object_group_id for i in batch.which}:
                    self._forms.setdefault((model, group), set()).add(batch.form)
        yield from batches.values()

    def _namespace(self, model: str, form: Form) -> Namespace:
        if (model, form) not in self._namespaces:
            layout = layout_of(model, self._revision, form)
            self._namespaces[model, form] = self._client.namespace(layout)
        return self._namespaces[model, form]

    def _seen(self, key: Any) -> set[Form]:
        """Returns the forms in which this process was given, or asked for, objects of a model and group."""
        with self._lock:
            return set(self._forms.get((key.model_name, key.object_group_id), ()))

    def _warn_encoded(self, thing: Any) -> None:
        if not self._has_told_of_encoded:
            self._has_told_of_encoded = True
            logger.warning(
                "objects of %d bytes are not stored: a serializer has encoded them (leave out serde)",
                thing.get_size(),
            )


def _read_part(namespace: Namespace, keys: list[bytes], views: list[memoryview], ends: float) -> list[bool]:
    """Reads blocks into memory until a monotonic time. Returns which were there and proved right."""
    good = [False] * len(views)
    at = 0
    while at < len(views) and (left_s := ends - time.monotonic()) > 0:
        n = namespace.get(keys[at:], views[at:], deadline_s=left_s, prompt=0)
        good[at : at + n] = [True] * n
        at += n + 1  # the block behind them is missing or corrupt
    return good


def _views(thing: Any, form: Form) -> list[memoryview]:
    """Returns the bytes of an object's blocks."""
    whole = memoryview(thing.byte_array).cast("B")
    size = form.nbytes // form.parts
    return [whole[at : at + size] for at in range(0, form.nbytes, size)]


def _left(ends: float) -> float:
    """Returns the seconds until `ends`, more than 0 as deadlines are."""
    return max(0.001, ends - time.monotonic())
