"""Requests of clients and the daemon: one file for each kind, over one table of leases.

Only `placement` imports from here.
"""
