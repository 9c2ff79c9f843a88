"""The protocol between client and daemon, without sockets: messages, and the frames that carry them."""
