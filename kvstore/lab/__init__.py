"""Experiments with traces: what a cache would serve, and what a daemon does serve.

Lives here: traces and workloads, nodes simulated in virtual time on the core (`simulated_node`), experiments,
sizing, simulated fleets (`fleet`), plots and reports, replays against a daemon with real bytes (`replay`), a
daemon of one's own for examples and tests (`local_daemon`), the demo. May be imported from here: everything,
by `cli`, tests and benchmarks. Must not import `daemon`, `admin` or `cli`: a daemon is started as a process.
"""
