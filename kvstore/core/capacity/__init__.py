"""Extents of each tier, their slots, and the quotas of tenants. Plain bookkeeping: no block is moved here.

May be imported by `residency` and the rooms above it. Imports `blocks` only. Free space is counted here and
never stored.
"""
