"""KV events for routers: which blocks this node holds, and the sockets that publish changes.

`tracker` turns the core's reports into events, parents before their children; `publisher` sends them over
ZeroMQ and repeats missed ones. May be imported from here: `tracker`, by the composition and by requests,
which pass token ids to it.
"""
