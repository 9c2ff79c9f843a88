"""The configuration to start from."""

from __future__ import annotations

_EXAMPLE = """\
# kvstore configuration. Every key is optional; the values shown are the defaults.
# Sizes: bytes, or text such as "512MiB", "64GiB", "100GB". Durations: seconds, or "250ms", "5s", "2m".

[daemon]
socket = "/run/kvstore/kvstore.sock"  # Unix socket that clients connect to, at most 107 bytes
socket_mode = 0o600                   # its file mode: who may connect
# operator_socket = "/run/kvstore-operators/kvstore.sock"  # operators connect here; absent: to socket
stop_timeout = "10s"                  # how long a stop waits for transfers in flight
log_level = "info"                    # debug, info, warning or error
# changes = "/var/lib/kvstore/changes.json"  # keeps what is changed while it runs; absent: until a restart

[dram]
limit = "1GiB"                        # hard limit of shared memory, at least 2MiB
huge_pages = true                     # back it by huge pages where the kernel gives them

[nvme]
# path = "/var/lib/kvstore"           # folder on the device; without one there is no NVMe tier
limit = "8GiB"                        # hard limit on the device, at least 2MiB
write_policy = "write_through"        # write_through: with every put; on_evict: when DRAM lets go of a block
admission = "always"                  # always; twice: what was used again; reuse: likely to be used again
admission_threshold = 0.2             # for reuse: how likely, 0 to 1
write_budget = 0                      # a day, such as "500GiB" or "1x" (times the limit); 0: no bound
io_threads = 4                        # reads and writes in flight
prefetch_blocks = 0                   # most blocks loaded unasked behind those of a chain that are; 0: none
# [nvme.devices.nvme1]                # another device: nvme and whatever tells it apart
# path = "/mnt/nvme1/kvstore"
# limit = "8GiB"
# write_budget = 0                    # what is written to it a day, as above

[hbm]
limit = "0B"                          # of GPU memory, on each GPU, for kvstore[cuda]; 0: no such tier
# gpus = ["GPU-0a1b2c3d-..."]         # on which, by UUID or by number; absent: on all that the daemon sees

[network]
# url = "file:///mnt/lustre/kvstore"  # what many nodes share; or redis://, s3://, gs://, az://, mooncake://
limit = "0B"                          # bytes in a shared folder, kept by all daemons on it; 0: no limit
user = ""                             # or access key
# password_file = "/etc/kvstore/network-password"
credentials = "keys"                  # of object stores; or "anonymous", or "instance": what the cloud gives
timeout = "2s"                        # of one call
threads = 8                           # calls at once
hedge_after = 0                       # a read that takes longer, such as "50ms", is asked once more; 0: never
admission = "always"                  # what goes there: always, twice or reuse, as for nvme
admission_threshold = 0.2             # for reuse

[events]                              # what is where, for routers (Dynamo, llm-d); needs kvstore[events]
# listen = "tcp://127.0.0.1:5557"     # whoever connects reads prompts' tokens: beyond loopback think twice
# replay = "tcp://127.0.0.1:5558"     # where they ask for what they have missed
# node = "gpu-7"                      # what routers call this node; absent: its host name
# tenants = ["team-a"]                # whose blocks; absent: everybody's

[policy]
eviction = "hazard"                   # who leaves first, or lru, arc, s3fifo, lfuda, gdsf, sieve

[scrub]
rate = "16MiB"                        # a second, read again in the background to find what rots; 0: nothing

[limits]
frame_bytes = "4MiB"                  # largest message in either direction
batch_keys = 4096                     # most keys in one request
connections = 1024                    # most clients at once
leases_per_connection = 1024          # most leases that one client holds at once
namespaces = 4096                     # most namespaces of the whole node, at most 65535
namespaces_per_tenant = 1024          # most namespaces of one tenant, and open on one connection
queued_requests = 1024                # a tenant's requests that wait for their turn, before it is told Busy

[admin]
socket = "/run/kvstore/admin.sock"    # Unix socket of the REST interface (kvstore admin)
socket_mode = 0o600                   # its file mode: who may connect
# listen = "127.0.0.1:9400"           # a port too: everywhere else than on loopback it needs TLS
# certificate = "/etc/kvstore/tls.crt"
# key = "/etc/kvstore/tls.key"
# audit_log = "/var/log/kvstore/audit"  # a line for each change; absent: to the log of kvstore admin
requests_per_s = 50                   # of one caller; what is more is told 429

# [[admin.tokens]]                    # who may call it over the port, or as another user than the daemon's
# name = "grafana"                    # what the log calls it
# hash = "sha256:0000000000000000000000000000000000000000000000000000000000000000"  # kvstore tenant token
# role = "view"                       # or operate
# expires = 2027-01-01T00:00:00Z

[encryption]
# key_file = "/etc/kvstore/key"       # 32 bytes as 64 hex digits; absent: the systemd credential kvstore-key

# Without tenants, whoever can connect is the one tenant "default" and may do everything.
# [tenants.team-a]                    # 1 to 64 letters, digits, "-", "_" and "."
# uids = [1001]                       # peers with these user ids are this tenant
# gids = []                           # and those in these groups
# role = "write"                      # of peers known by uid or gid: read, write or admin
# ttl = "24h"                         # blocks are misses so long after they were stored; absent: never
# pin = "1GiB"                        # most bytes it may pin; absent: half of what it may have of DRAM
# share = 1.0                         # its weight where tenants compete for room or bandwidth
# bandwidth = "500MiB"                # most bytes a second between tiers; absent: no cap
# requests = 1000                     # most requests a second; absent: no cap
# encrypt = false                     # its blocks on NVMe, with the key of [encryption]
# [tenants.team-a.dram]
# floor = "0"                         # bytes that are never taken from it; all floors fit dram.limit
# limit = "16GiB"                     # bytes that it never exceeds; absent: dram.limit
# [tenants.team-a.nvme]
# floor = "0"
# limit = "64GiB"
# [tenants.team-a.hbm]                # on each GPU
# floor = "0"
# limit = "4GiB"
# [[tenants.team-a.tokens]]           # `kvstore tenant token team-a` makes one; several may be valid
# hash = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
# role = "write"
# expires = 2030-01-01T00:00:00Z      # absent: never
"""


def example() -> str:
    """A commented TOML file that loads to the defaults."""
    return _EXAMPLE
