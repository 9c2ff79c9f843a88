"""Makes a token with which Prometheus may read the metrics.

    python make_token.py TEMPLATE CONFIG_FOLDER SECRETS_FOLDER

Writes the token to a file for Prometheus, and the template with the token's hash as the configuration. An
existing token is kept.
"""

import json
import subprocess
import sys
from pathlib import Path

template, config, secret = Path(sys.argv[1]), Path(sys.argv[2], "kvstore.toml"), Path(sys.argv[3], "token")
if not secret.exists():
    ran = subprocess.run(
        ["kvstore", "tenant", "token", "prometheus", "--json"], check=True, stdout=subprocess.PIPE
    )
    made = json.loads(ran.stdout)
    entry = f'\n[[admin.tokens]]\nname = "prometheus"\nhash = "{made["hash"]}"\nrole = "view"\n'
    config.write_text(template.read_text() + entry)
    secret.write_text(made["token"])  # Prometheus reads it as another user: only its container mounts it
