"""The decisions: events in, actions out. Pure: no I/O, clock, randomness or log.

Lives here: `placement` (the entry point), `events` and `actions` (its vocabulary), `view` (read-only answers
about state), `invariants`, and one room for each part of the state. May be imported from here: these files
and the types of rooms. Rooms import each other in one order, see ARCHITECTURE.md. Must not import tiers,
clients or the daemon.
"""
