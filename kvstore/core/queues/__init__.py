"""Queues of copies: the queue of one device, and fair queueing of tenants.

May be imported by `residency` and the rooms above it. A queue orders copies by class and tenant and bounds
the bytes in flight; `transfers` decides what is copied.
"""
