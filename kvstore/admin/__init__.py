"""The REST interface: a process beside the daemon, which it asks over its socket like any operator.

So the daemon sees no network, and whatever happens here costs it no more than a client's requests do.
"""
