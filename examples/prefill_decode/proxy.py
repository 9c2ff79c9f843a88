"""A proxy for completions in front of a prefill server and a decode server of vLLM.

    python proxy.py PORT PREFILL_URL DECODE_URL

Sends each request to the prefill server with `max_tokens` 1, then to the decode server, with the
`kv_transfer_params` that the prefill server has answered. These are the fields of vLLM's own proxies for its
NixlConnector, which can be used instead of this one. For demonstrations: one server of each kind, no retries.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TIMEOUT_S = 600.0
PREFILL_ONLY = {
    "max_tokens": 1,
    "stream": False,
    "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
}


class Proxy(BaseHTTPRequestHandler):
    """Answers one request. `prefill`, `decode`: the addresses of the servers."""

    prefill = ""
    decode = ""

    def do_POST(self) -> None:
        """Has the prompt computed by one server, and the answer by the other."""
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        short = body | PREFILL_ONLY
        if "max_completion_tokens" in short:
            short["max_completion_tokens"] = 1
        short.pop("stream_options", None)
        try:
            with self._post(self.prefill, short) as answer:
                params = json.load(answer).get("kv_transfer_params")
            with self._post(self.decode, body | {"kv_transfer_params": params}) as answer:
                self._pass_on(answer.status, answer)
        except urllib.error.HTTPError as error:
            self._pass_on(error.code, error)

    def _post(self, server: str, body: dict[str, Any]) -> HTTPResponse:
        headers = {"Content-Type": "application/json", "Authorization": self.headers.get("Authorization", "")}
        request = urllib.request.Request(server + self.path, json.dumps(body).encode(), headers)
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        return answer

    def _pass_on(self, status: int, answer: HTTPResponse | urllib.error.HTTPError) -> None:
        """Sends an answer to the client as it comes, also a streamed one."""
        self.send_response(status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
        self.end_headers()
        while some := answer.read1(1 << 16):
            self.wfile.write(some)
            self.wfile.flush()


if __name__ == "__main__":
    _, port, Proxy.prefill, Proxy.decode = sys.argv
    ThreadingHTTPServer(("127.0.0.1", int(port)), Proxy).serve_forever()
