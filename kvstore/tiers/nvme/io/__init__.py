"""I/O of NVMe blocks: engines, and the transforms of blocks that an engine cannot move as they are."""
