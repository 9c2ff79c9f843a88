"""A plain Mooncake client that lends the store memory, and does what it reads: a line of JSON each."""

from __future__ import annotations

import base64
import json
import sys

from mooncake.store import MooncakeDistributedStore


def main() -> None:
    master, segment_bytes = sys.argv[1], int(sys.argv[2])
    store = MooncakeDistributedStore()
    if code := store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", master):
        sys.exit(f"setup ended with {code}")
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        if what == "get":
            answer = base64.b64encode(store.get(*arguments)).decode()
        elif what == "put":
            key, value = arguments
            answer = store.put(key, base64.b64decode(value))
        elif what == "remove":
            answer = store.remove(arguments[0], True)
        else:
            answer = store.remove_all(True)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
