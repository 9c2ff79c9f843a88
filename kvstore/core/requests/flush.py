"""Flush: before a stop, queues writes of all blocks that only memory holds."""

from __future__ import annotations

import numpy as np

from kvstore.core.blocks.block_table import LIVE
from kvstore.core.requests.leases import LeaseTable


def flush(leases: LeaseTable) -> None:
    """Replaces the backlog of writes by all blocks that only memory holds, the last used first."""
    r, transfers = leases.residency, leases.transfers
    if not r.topology.persistent:
        return
    r.ending = True
    rows = np.flatnonzero(r.blocks.state == LIVE)
    rows = rows[r.alone_in_memory(rows)]
    transfers.backlog.clear()
    # Time or space may run out, and a block is useless without its parents, which were used no earlier.
    latest_first = np.argsort(-r.reuse.history.last_used(rows), kind="stable")
    transfers.queue_writes(rows[latest_first])
    transfers.pump()
