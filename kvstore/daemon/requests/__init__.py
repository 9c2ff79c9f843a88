"""Runs the requests of peers: builds the core's event from a message, and a message from its answer.

`dispatch` says what runs each message, `event_table` how a message becomes an event. `services` lists the
objects of the daemon that requests use. This room may import `core`, `wire` and the rooms beside it, but not
`server`, which owns the sockets.
"""
