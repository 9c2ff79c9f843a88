"""Who has how much room: extents and slots, quotas of tenants, eviction, tiers that change.

Requests and transfers ask here for slots. Eviction orders come from `policy`.
"""
