"""The commented example configuration: every key with its default."""

from __future__ import annotations

import json
from pathlib import Path

from kvstore.socket_paths import ADMIN_SOCKET, DAEMON_SOCKET, SYSTEM_FOLDER

_EXAMPLE = """\
# kvstore configuration. Every key is optional; the values shown are the defaults.
# Sizes: bytes, or text such as "512MiB", "64GiB", "100GB". Durations: seconds, or "250ms", "5s", "2m".

[daemon]
socket = "/run/kvstore/kvstore.sock"  # Unix socket for clients; its path has at most 107 bytes
socket_mode = 0o600                   # file mode of the socket
# operator_socket = "/run/kvstore-operators/kvstore.sock"  # socket for operators; absent: they use socket
stop_timeout = "10s"                  # how long a stop waits for running transfers
log_level = "info"                    # debug, info, warning or error
# changes = "/var/lib/kvstore/changes.json"  # persists changes made at run time; absent: a restart drops them

[dram]
limit = "1GiB"                        # hard limit of shared memory, at least 2MiB
huge_pages = true                     # use transparent huge pages where the kernel provides them

[nvme]
# path = "/var/lib/kvstore"           # folder on the device; absent: no NVMe tier
limit = "8GiB"                        # hard limit on the device, at least 2MiB
write_policy = "write_through"        # write_through: write on put; on_evict: write when DRAM evicts
admission = "always"                  # always; twice: blocks used again; reuse: blocks likely to be reused
admission_threshold = 0.2             # for reuse: minimum probability of reuse, 0 to 1
write_budget = 0                      # bytes per day, such as "500GiB" or "1x" (times the limit); 0: none
io_threads = 4                        # concurrent reads and writes
prefetch_blocks = 0                   # blocks loaded ahead of a chain that is being loaded; 0: none
# [nvme.devices.nvme1]                # an additional device; its name begins with nvme
# path = "/mnt/nvme1/kvstore"
# limit = "8GiB"
# write_budget = 0                    # bytes per day, as above

[hbm]
limit = "0B"                          # GPU memory per GPU, needs kvstore[cuda]; 0: no pools
# gpus = ["GPU-0a1b2c3d-..."]         # GPUs by UUID or index; absent: all that the daemon sees

[network]
# url = "file:///mnt/lustre/kvstore"  # storage shared by nodes; or redis://, s3://, gs://, az://, mooncake://
limit = "0B"                          # limit of a shared folder, enforced by all of its daemons; 0: no limit
user = ""                             # user name or access key
# password_file = "/etc/kvstore/network-password"
credentials = "keys"                  # object stores: keys, anonymous, or instance (cloud metadata service)
timeout = "2s"                        # per call
threads = 8                           # concurrent calls
hedge_after = 0                       # repeats a read that takes longer, such as "50ms"; 0: never
admission = "always"                  # always, twice or reuse, as for nvme
admission_threshold = 0.2             # for reuse

[events]                              # KV events for routers (Dynamo, llm-d); needs kvstore[events]
# listen = "tcp://127.0.0.1:5557"     # publishes events, which contain token ids of prompts; absent: none
# replay = "tcp://127.0.0.1:5558"     # resends missed events
# node = "gpu-7"                      # name of this node for routers; absent: its host name
# tenants = ["team-a"]                # tenants whose blocks are published; absent: all

[policy]
eviction = "hazard"                   # eviction policy: hazard, lru, arc, s3fifo, lfuda, gdsf or sieve

[scrub]
rate = "16MiB"                        # bytes per second that the background scrubber verifies; 0: none

[limits]
frame_bytes = "4MiB"                  # maximum size of a message
batch_keys = 4096                     # maximum keys per request
connections = 1024                    # maximum open connections
leases_per_connection = 1024          # maximum leases held by a connection
namespaces = 4096                     # maximum namespaces of the node, at most 65535
namespaces_per_tenant = 1024          # maximum namespaces of a tenant, and open on a connection
queued_requests = 1024                # maximum queued requests of a tenant; further ones are answered Busy

[admin]
socket = "/run/kvstore/admin.sock"    # Unix socket of the REST interface (kvstore admin)
socket_mode = 0o600                   # file mode of the socket
# listen = "127.0.0.1:9400"           # TCP address and port; addresses other than loopback need TLS
# certificate = "/etc/kvstore/tls.crt"
# key = "/etc/kvstore/tls.key"
# audit_log = "/var/log/kvstore/audit"  # records every change; absent: to the log of kvstore admin
requests_per_s = 50                   # requests per second per caller; excess requests get HTTP 429

# [[admin.tokens]]                    # callers over TCP, and local users other than root and the daemon's
# name = "grafana"                    # name of the holder in the audit log
# hash = "sha256:0000000000000000000000000000000000000000000000000000000000000000"  # kvstore tenant token
# role = "view"                       # or operate
# expires = 2027-01-01T00:00:00Z

[encryption]
# key_file = "/etc/kvstore/key"       # 32 bytes as 64 hex digits; absent: the systemd credential kvstore-key

# Without tenants, every peer belongs to the tenant "default" and may do everything.
# [tenants.team-a]                    # 1 to 64 letters, digits, "-", "_" and "."
# uids = [1001]                       # user ids of peers of this tenant
# gids = []                           # group ids of peers of this tenant
# role = "write"                      # role of these peers: read, write or admin
# ttl = "24h"                         # lifetime of blocks; absent: unlimited
# pin = "1GiB"                        # maximum pinned bytes; absent: half of its DRAM limit
# share = 1.0                         # weight when tenants compete for room or bandwidth
# bandwidth = "500MiB"                # maximum bytes per second between tiers; absent: no cap
# requests = 1000                     # maximum requests per second; absent: no cap
# encrypt = false                     # encrypts its blocks on NVMe with the key of [encryption]
# [tenants.team-a.dram]
# floor = "0"                         # guaranteed bytes; the sum of all floors is at most dram.limit
# limit = "16GiB"                     # hard limit in bytes; absent: dram.limit
# [tenants.team-a.nvme]
# floor = "0"
# limit = "64GiB"
# [tenants.team-a.hbm]                # per GPU
# floor = "0"
# limit = "4GiB"
# [[tenants.team-a.tokens]]           # `kvstore tenant token team-a` makes one; a tenant may have several
# hash = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
# role = "write"
# expires = 2030-01-01T00:00:00Z      # absent: never
"""


def example(sockets: Path = SYSTEM_FOLDER) -> str:
    """Returns a commented TOML file that loads to the defaults of a user whose sockets are in `sockets`."""
    text = _EXAMPLE
    for name in (DAEMON_SOCKET, ADMIN_SOCKET):
        line = f'socket = "{SYSTEM_FOLDER / name}"'
        text = text.replace(f"\n{line}", f"\nsocket = {json.dumps(str(sockets / name), ensure_ascii=False)}")
    return text
