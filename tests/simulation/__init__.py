"""Whole runs of the daemon and its clients over a simulated clock, network and device: one seed a run.

Real are the core, the shell, the server, the tiers and the client; simulated are time, threads, sockets, the
slab files, the I/O engine and the records' store. One thread, no sleeping: the same seed is the same run.
"""
