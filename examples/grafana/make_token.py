"""Makes a token with which Prometheus may read the metrics.

    python make_token.py TEMPLATE CONFIG_FOLDER SECRETS_FOLDER

Writes the token to a file for Prometheus, unless it is there, and the configuration: the template with the
token's hash.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

template, config, secret = Path(sys.argv[1]), Path(sys.argv[2], "kvstore.toml"), Path(sys.argv[3], "token")
if not secret.exists():
    ran = subprocess.run(
        ["kvstore", "tenant", "token", "prometheus", "--json"], check=True, capture_output=True
    )
    secret.write_text(json.loads(ran.stdout)["token"])  # Prometheus, another user, reads it
digest = hashlib.sha256(secret.read_bytes()).hexdigest()
entry = f'\n[[admin.tokens]]\nname = "prometheus"\nhash = "sha256:{digest}"\nrole = "view"\n'
config.write_text(template.read_text() + entry)
