"""The stored blocks and the tiers that hold them: rows, chains, pins, policies, decision log.

Not covered: decisions to store, copy or evict. `transfers` and `requests` make them.
"""
