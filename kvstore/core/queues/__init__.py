"""Queues of copies: the queue of one device, and fair queueing of tenants."""
