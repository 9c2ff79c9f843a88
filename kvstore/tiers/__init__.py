"""Tiers: the memory, files and services that hold blocks. They move and verify bytes and decide nothing.

Lives here: the protocols of tiers and I/O engines (`base`), DRAM extents, GPU pools, and the shared parts of
tiers: ownership of extents, CUDA IPC exports, copies, results. `nvme/` and `network/` are packages. May be
imported from here: tiers and their protocols, by `daemon`. Must not import `daemon` or `client`; of `core`
only the vocabulary (actions, events). Byte layouts: README.md.
"""
