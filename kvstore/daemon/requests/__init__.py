"""What peers ask: from a wire message to an event of the core, and from its answer to a message.

`dispatch` says what runs each message, `event_table` how a message becomes an event. `services` lists what
requests use of the daemon; the composition fills it in. This room may import `core`, `wire` and the rooms
beside it, but neither `server`, which owns the sockets, nor `runtime`.
"""
