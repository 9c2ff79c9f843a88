"""KV events for routers: which blocks this node holds, and the sockets that publish changes."""
