"""Logs as JSON lines: of the daemon, of its supervisor, of the REST server."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from kvstore import logs
from kvstore.lab.local_daemon import LocalDaemon
from tests.daemons import SMALL, log_of

FIELDS = {"time", "level", "logger", "message", "pid"}


def lines(said: str) -> list[dict[str, object]]:
    """The objects of all lines; every line is one."""
    return [json.loads(line) for line in said.splitlines()]


def test_every_line_of_a_daemon_is_an_object() -> None:
    with LocalDaemon({**SMALL, "daemon": {"log_format": "json"}}) as daemon:
        said = lines(log_of(daemon))
    assert all(each.keys() == FIELDS for each in said)
    [serving] = [each for each in said if str(each["message"]).startswith("serving on")]
    assert (serving["level"], serving["logger"]) == ("info", "kvstore")
    assert datetime.fromisoformat(str(serving["time"]).replace("Z", "+00:00")).year > 2000


def test_text_is_the_default() -> None:
    with LocalDaemon(SMALL) as daemon:
        assert "INFO serving on" in log_of(daemon)


@pytest.mark.parametrize("command", ["supervise", "admin"])
def test_other_processes_of_a_node_do_the_same(tmp_path: Path, command: str) -> None:
    config = tmp_path / "kvstore.toml"
    config.write_text(
        f'[daemon]\nsocket = "{tmp_path}/k.sock"\nlog_format = "json"\n[dram]\nlimit = "2MiB"\n'
        f'huge_pages = false\n[admin]\nsocket = "{tmp_path}/a.sock"\n'
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore", command, "-c", str(config)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = lines(process.stderr.readline())
    process.send_signal(signal.SIGTERM)
    said += lines(process.stderr.read())
    process.wait()
    process.stderr.close()
    assert said
    assert all(each.keys() == FIELDS for each in said)


def test_an_exception_and_line_breaks_stay_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        with caplog.at_level(logging.ERROR):
            logging.getLogger("kvstore.test").exception("it failed: %s", "ä\n")
    line = logs.JsonFormatter().format(caplog.records[0])
    assert "\n" not in line
    found = json.loads(line)
    assert found["message"] == "it failed: ä\n"
    assert found["exception"].endswith("ValueError: two\nlines")
