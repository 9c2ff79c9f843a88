"""What peers ask: from a wire message to an event of the core, and from its answer to a message.

`dispatch` says what runs each message, `event_table` how a message becomes an event. `services` lists the
objects of the daemon that requests use. This room may import `core`, `wire` and the rooms beside it, but not
`server`, which owns the sockets.
"""
