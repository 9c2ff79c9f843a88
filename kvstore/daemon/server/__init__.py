"""Serves peers: listening sockets, connections and their bounds, and the order in which requests run.

A connection cuts bytes into messages and has the scheduler run them; `requests` does what they ask. This room
may import `wire`, `core` and `requests`, but not `runtime`.
"""
