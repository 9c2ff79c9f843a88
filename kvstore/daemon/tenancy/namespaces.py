"""Namespaces by number and by tenant, and the domains of their extents.

A deleted namespace gets a new number. Connections keep its `NamespaceEntry`. A closed namespace has no number
until a connection uses it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from kvstore.core.insight.hit_counters import Column
from kvstore.types import Layout

_MOST_NUMBERS = 1 << 16
_FIRST_SHARED = 1 << 16
_DEFAULT = "default"
_UNUSED_KEPT = 1024
"""Domains that no namespace has any more. A copy that was requested for one may still need it."""


@dataclass(eq=False, slots=True)
class NamespaceEntry:
    """One namespace. `number` is the core's, 0 while it is closed. `layout` is None until a client sends it.

    `readers` are the tenants that it is published to; they determine `domain`. `hits` counts blocks of
    prompts of all tenants. `epoch` is the epoch of its blocks on this node, None while it is unknown (see
    `kvstore.daemon.network.epochs`). `key_epochs` has a later one for each key that was deleted alone, and
    `keys_digest` their digest.
    """

    number: int
    fingerprint: bytes
    tenant: int
    block_bytes: int
    layout: Layout | None = None
    readers: frozenset[str] = frozenset()
    domain: int = 0
    ttl_s: float = 0.0
    hits: Counter[Column] = field(default_factory=Counter)
    epoch: bytes | None = None
    key_epochs: Mapping[bytes, bytes] = field(default_factory=dict)
    keys_digest: bytes = b""

    @property
    def independent(self) -> bool:
        """Whether no block has a parent."""
        return self.layout is not None and self.layout.independent


class Namespaces:
    """All namespaces of one daemon. `fingerprints` and `lengths` (bytes per payload) are by number."""

    def __init__(self) -> None:
        self.fingerprints: dict[int, bytes] = {}
        self.lengths: dict[int, int] = {}
        self._uses: Counter[NamespaceEntry] = Counter()
        self._by_number: dict[int, NamespaceEntry] = {}
        self._by_name: dict[tuple[int, bytes], NamespaceEntry] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[NamespaceEntry]:
        return iter(self._by_name.values())

    def find(self, tenant: int, fingerprint: bytes) -> NamespaceEntry | None:
        """Returns a tenant's namespace, None if it is absent."""
        return self._by_name.get((tenant, fingerprint))

    def at(self, number: int) -> NamespaceEntry | None:
        """Returns the namespace that has this number now."""
        return self._by_number.get(number)

    def new_number(self) -> int:
        """Returns a number that is free: no namespace has it, and no deletion uses it."""
        for _ in range(_MOST_NUMBERS):
            self._last = self._last % (_MOST_NUMBERS - 1) + 1
            if self._last not in self.fingerprints:
                return self._last
        raise AssertionError("more namespaces than the core allows")

    def add(self, namespace: NamespaceEntry) -> None:
        """Adds a namespace, or its new number."""
        self._by_name[namespace.tenant, namespace.fingerprint] = namespace
        self._by_number[namespace.number] = namespace
        self.fingerprints[namespace.number] = namespace.fingerprint
        self.lengths[namespace.number] = namespace.block_bytes

    def close(self, namespace: NamespaceEntry) -> int:
        """Takes the number of a namespace away, and returns it."""
        number, namespace.number = namespace.number, 0
        self._by_number.pop(number, None)
        return number

    def remove(self, namespace: NamespaceEntry) -> None:
        """Removes a namespace. A connection that has it open may open it again."""
        self._by_name.pop((namespace.tenant, namespace.fingerprint), None)

    def use(self, namespace: NamespaceEntry) -> None:
        """Keeps a namespace open until `drop`."""
        self._uses[namespace] += 1

    def drop(self, namespace: NamespaceEntry) -> None:
        """Undoes one `use`."""
        self._uses[namespace] -= 1
        if not self._uses[namespace]:
            del self._uses[namespace]

    @property
    def in_use(self) -> frozenset[int]:
        """Numbers of the namespaces that must not be closed."""
        return frozenset(namespace.number for namespace in self._uses)

    def forgotten(self, number: int) -> None:
        """Makes a number available again, when nothing of its namespace is left."""
        del self.fingerprints[number], self.lengths[number]

    def of(self, tenant: int, revision: str = "", model: str = "") -> list[NamespaceEntry]:
        """Returns a tenant's namespaces, "" for any revision or model."""
        return [
            s
            for s in self
            if s.tenant == tenant
            and (not revision or (s.layout is not None and s.layout.revision == revision))
            and (not model or (s.layout is not None and s.layout.model == model))
        ]


class Numbering:
    """The namespaces of one connection, by the numbers that its peer uses for them.

    Keeps the `most` recently used ones. A number is never reused.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._spaces: dict[int, NamespaceEntry] = {}
        self._numbers: dict[NamespaceEntry, int] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._spaces)

    def number_of(self, namespace: NamespaceEntry) -> int:
        """Returns the number of a namespace, a new number if it has none."""
        number = self._numbers.get(namespace, 0)
        if self.at(number) is None:
            self._last += 1
            number = self._last
            self.set(number, namespace)
        return number

    def at(self, number: int) -> NamespaceEntry | None:
        """Returns the namespace of a number and marks it as used. None: the number is unknown or dropped."""
        namespace = self._spaces.pop(number, None)
        if namespace is not None:
            self._spaces[number] = namespace
        return namespace

    def set(self, number: int, namespace: NamespaceEntry) -> None:
        """Assigns a number to a namespace."""
        self._forget(number)
        self._spaces[number] = namespace
        self._numbers.setdefault(namespace, number)
        if len(self._spaces) > self._most:
            self._forget(next(iter(self._spaces)))

    def _forget(self, number: int) -> None:
        namespace = self._spaces.pop(number, None)
        if namespace is not None and self._numbers.get(namespace) == number:
            del self._numbers[namespace]


class Domains:
    """Domains: sets of tenants that may map the same extents, by number and by tag.

    A tag has 16 bytes and is stored with each extent. Its first half identifies the owner, its second half
    the readers.
    """

    def __init__(self) -> None:
        self._last = _FIRST_SHARED - 1
        self._tidy_at = 2 * _UNUSED_KEPT
        self._tenants: dict[bytes, int] = {}
        self._numbers: dict[bytes, int] = {}
        self._tags: dict[int, bytes] = {}

    def of(self, tenant: int, name: str, readers: frozenset[str]) -> int:
        """Returns the domain of a tenant's extents with these readers; without any, the tenant's number."""
        owner = _half(name)
        self._tenants[owner] = tenant
        if readers:
            return self._number(owner + _half(*sorted(readers)))
        tag = bytes(16) if name == _DEFAULT else owner + bytes(8)
        self._numbers[tag] = tenant
        self._tags[tenant] = tag
        return tenant

    def _number(self, tag: bytes) -> int:
        if tag not in self._numbers:
            self._last += 1
            self._numbers[tag] = self._last
            self._tags[self._last] = tag
        return self._numbers[tag]

    def tidy(self, in_use: Callable[[], set[int]]) -> None:
        """If there are many domains, forgets those that are not `in_use`, but for the latest."""
        if len(self._numbers) < self._tidy_at:
            return
        used = in_use() | set(range(self._last - _UNUSED_KEPT, self._last + 1))
        for tag, number in list(self._numbers.items()):
            if number >= _FIRST_SHARED and number not in used:
                del self._numbers[tag], self._tags[number]
        self._tidy_at = 2 * (len(self._numbers) + _UNUSED_KEPT)

    def owner(self, domain: int) -> tuple[int, bytes]:
        """Returns the tenant and the tag of a domain. A domain without extents in DRAM has an empty tag."""
        tag = self._tags.get(domain, b"")
        return self._tenants.get(tag[:8], domain), tag

    def by_tag(self, tag: bytes) -> tuple[int, int] | None:
        """Returns the tenant and the domain of a tag, None if no tenant has it."""
        if tag == bytes(16):
            return 0, 0
        tenant = self._tenants.get(tag[:8])
        return None if tenant is None else (tenant, self._number(tag))


def _half(*names: str) -> bytes:
    return blake3(b"kvstore-domain-2" + "\0".join(names).encode()).digest(length=8)
