"""The block table: a row for each block, and an index from key to row."""
