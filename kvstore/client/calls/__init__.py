"""The calls of a client, written once for both clients: arguments, messages, results.

`reads`, `writes`, `namespace` and `client` hold one method per call (its signature, documentation and checks
of arguments) beside the generator that says which messages the call sends. `call` defines what a call is and
binds the methods to the blocking and to the asyncio client. A new call is one method and one generator here.

May import the rest of `kvstore.client` except `base`, `sync` and `aio`. Nothing here touches a socket, waits
or starts a thread: the drivers in `sync` and `aio` do.
"""
