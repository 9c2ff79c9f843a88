"""What clients and the daemon ask for: one file for each kind of request, over one table of leases.

Only `placement` imports from here.
"""
