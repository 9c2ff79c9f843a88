"""Traces of requests: spans for requests that name their caller's span, exported to a collector.

`request_traces` measures on the event loop, `exporter` makes spans of OpenTelemetry and sends them on a
thread. Imports `runtime.problems`, `config` and `wire` only.
"""
