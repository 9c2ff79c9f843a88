"""The NVMe tier: slab files of slots on one device, and records of the blocks in them.

Lives here: the tier with its reader and writer, slabs, records and their journal, recovery, encryption, fsck.
`io/` has the I/O engines. May be imported from here: `tier`, and `fsck` and `key_files` by commands. Bytes
are written first, then synced, then recorded: a crash leaves no record without its bytes.
"""
