"""Clients of the daemon: `sync` for threads, `aio` for event loops, both driving the same flows."""
