"""The block table: a row for each block, and an index from key to row.

State is in numpy arrays indexed by row, without an object per block. May be imported by every room of `core`.
Imports no other room. Nothing here decides which block is stored, copied or evicted.
"""
