"""Tenants: what each may have of every tier, and who gives way to whom. Pure decisions over plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quota:
    """One tenant's part of one tier, in bytes: never taken below `floor`, never above `limit`.

    What is between floors is divided by `share` among those who want it.
    """

    floor: int = 0
    limit: int = 1 << 62
    share: float = 1.0
