"""Observation: explanations of blocks, hit counters, reports of block locations.

Nothing here decides which block is stored, moved or evicted.
"""
