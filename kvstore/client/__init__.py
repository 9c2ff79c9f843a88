"""Clients of the daemon, in the process of an engine: blocking (`sync`) and for event loops (`aio`).

`calls` describes every call once; `base` adds idle connections, retries and misses; `sync` and `aio` are the
drivers that move bytes. `connection` and `protocol` are one connection and its state, `extents` the shared
memory that it maps, `leases` and `gpu` the memory that callers read and fill. Users import from `kvstore`.

May import `kvstore.wire`, `kvstore.cuda`, `kvstore.arena`, `kvstore.types` and `kvstore.errors`. Must not
import the daemon, its tiers or its core.
"""
