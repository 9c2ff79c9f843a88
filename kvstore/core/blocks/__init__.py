"""Which blocks there are: a row for each block, an index from key to row, and the tiers that hold it.

Every room of `core` may import from here. Nothing here decides what is stored, moved or evicted.
"""
