"""Copies between tiers, and eviction, which demotes blocks by copies. Requests ask here for slots.

Lives here: the copy queue, promotion and write-back (`transfers`), eviction, rebalancing of extents between
tenants. May be imported by `reconfiguration`, `requests` and `placement`. Imports `residency` and the rooms
below it.
"""
