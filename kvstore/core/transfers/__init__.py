"""Copies between tiers, and eviction, which demotes blocks by copies. Requests ask here for slots."""
