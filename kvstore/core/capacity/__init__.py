"""Extents of each tier, their slots, and the quotas of tenants. Plain bookkeeping: no block is moved here."""
