"""Serves clients: sockets, connections, the order in which requests run, and the answer to each request.

`requests` says what runs each message, `event_table` how a message becomes an event. `services` lists what
requests use of the daemon. This room may import `core`, `wire` and the other rooms of `daemon`, but not
`runtime`: the composition fills in `services`.
"""
