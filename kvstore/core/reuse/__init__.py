"""Statistics of reuse: what the past of a block says about its next use.

Eviction policies, admission and the decision log read them. Only `blocks.block_table` and `blocks.index` may
be imported here. Nothing here decides which block is stored or evicted.
"""
