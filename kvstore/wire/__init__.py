"""The protocol between client and daemon, without sockets: messages, and the frames that carry them.

May be imported from here: both modules, by `client` and `daemon`. Must not import anything of ours but
`errors` and `types`: both sides of the socket must be able to use it.
"""
