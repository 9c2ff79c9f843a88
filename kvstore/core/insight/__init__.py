"""Observation: the log of decisions, explanations of blocks, hit counters, hints, reports of block locations.

Nothing here decides which block is stored, moved or evicted.
"""
