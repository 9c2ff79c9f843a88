"""The daemon's process: executes the core's actions and serves requests on the socket.

Lives here: `main` (from the configuration to the stop), `composition` (builds all objects), `lifecycle`,
`systemd`, `supervise`, `doctor`, and one room for each part of the work. Rooms import each other in one
direction only; only `composition` and `lifecycle` know all rooms. May be imported from here: `main`,
`supervise`, `doctor` and the names of commands, by `cli` and `admin`.
"""
