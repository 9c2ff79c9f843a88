"""The daemon's process: executes the core's actions and serves requests on the socket."""
