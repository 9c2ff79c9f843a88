"""Servers that speak S3, for the time of a test session: moto's and rclone's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

import boto3
from botocore.config import Config
from moto.server import ThreadedMotoServer

KEY, SECRET = "an-access-key", "a-secret-key"
_STARTS_S = 20.0
_URL = re.compile(r"http://127\.0\.0\.1:\d+")


@contextmanager
def moto() -> Iterator[str]:
    """Moto's server, which lets everybody in; yields its endpoint."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextmanager
def rclone(folder: Path) -> Iterator[str]:
    """`rclone serve s3`: buckets are folders, and only KEY with SECRET is let in; yields its endpoint."""
    program = str(Path(sys.executable).with_name("rclone"))
    command = [program, "serve", "s3", str(folder), "--addr", "127.0.0.1:0", "--auth-key", f"{KEY},{SECRET}"]
    environment = {**os.environ, "RCLONE_CONFIG": str(folder.parent / "no-rclone.conf")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=_drain, args=(process.stderr, lines), daemon=True).start()
        try:
            yield _said(lines)
        finally:
            process.kill()


def client(endpoint: str):
    """Amazon's own client, which makes buckets and what is foreign in them."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=Config(s3={"addressing_style": "path"}),
    )


def _drain(pipe, lines: SimpleQueue[str]) -> None:
    for line in pipe:
        lines.put(line)


def _said(lines: SimpleQueue[str]) -> str:
    """The URL that a server says it serves."""
    ends, all_said = time.monotonic() + _STARTS_S, []
    while (left := ends - time.monotonic()) > 0:
        try:
            all_said.append(lines.get(timeout=left))
        except Empty:
            break
        if found := _URL.search(all_said[-1]):
            return found[0]
    raise RuntimeError(f"no server after {_STARTS_S:g} s: {''.join(all_said)}")
