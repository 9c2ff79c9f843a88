"""I/O of NVMe blocks: engines, and the transforms of blocks that an engine cannot move as they are.

Lives here: the table of engines (`engines`), direct I/O (`posix_engine`), GPUDirect Storage
(`kvikio_engine`), encryption and bounce buffers on the way. May be imported from here: `engines` and
`transforms`, by the tier. Must not import the tier, its records or its slabs.
"""
