"""Serves peers: listening sockets, connections and their bounds, and the order in which requests run.

A connection decodes messages and passes them to the scheduler; `requests` runs them. Imports `requests`,
`tenancy`, `operator.latency`, `wire` and `core`, but not `runtime`.
"""
