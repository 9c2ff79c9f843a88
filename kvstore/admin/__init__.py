"""The REST interface: `kvstore admin`, a process beside the daemon that serves HTTP.

Lives here: the HTTP server, routers, access control, metrics, the dashboard and the last hour's history. The
process talks to the daemon over the daemon's Unix socket, as any operator's client does. The daemon itself
opens no network port, and load on the interface costs it no more than other clients' requests.

May be imported from here: `main.run` (by `cli`). This package may import `client`, `config`, `errors`, and
names and constants of `daemon` and `core`; it never edits state except through operator commands.
"""
