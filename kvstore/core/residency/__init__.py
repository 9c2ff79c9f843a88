"""Which blocks exist and which tiers hold them: rows, chains, pins, tiers and their policies, kept in step.

Not covered: what is stored, copied or evicted. `transfers` and `requests` decide that.
"""
