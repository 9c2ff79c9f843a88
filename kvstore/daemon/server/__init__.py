"""Serves clients: sockets, connections, the order in which requests run, the answer to each request."""
