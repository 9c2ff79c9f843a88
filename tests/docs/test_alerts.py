"""Each alert of docs/alerts.yml fires for its own condition only, as Prometheus evaluates it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.commands import ROOT
from tests.docs.test_runbooks import ALERTS
from tests.packaging.sources import run
from tests.programs import need, path_of

MINUTES = 26 * 60
"""Duration of a case, with a sample per minute: one alert looks at a day, for an hour."""


def constant(value: int) -> str:
    return f"{value}x{MINUTES}"


def rising(per_minute: float) -> str:
    return f"0+{per_minute}x{MINUTES}"


def loop(slow: int) -> dict[str, str]:
    """Returns a histogram of 100 turns a minute, of which `slow` take 30 ms and the others 1 ms."""
    counts = {"0.001": 100 - slow, "0.02": 100 - slow, "0.03": 100, "+Inf": 100}
    return {f'kvstore_loop_lag_seconds_bucket{{le="{le}"}}': rising(n) for le, n in counts.items()}


NVME1 = '{tier="nvme1"}'
FINE = {
    "kvstore_up": constant(1),
    'up{job="kvstore"}': constant(1),
    'up{job="other"}': constant(0),
    "kvstore_network_usable": constant(1),
    f"kvstore_tier_fenced{NVME1}": constant(0),
    f"kvstore_tier_readable{NVME1}": constant(1),
    f"kvstore_tier_writable{NVME1}": constant(1),
    "kvstore_quarantined_blocks_total": constant(7),
    "kvstore_denied_blocks_total": rising(50),
    f"kvstore_tier_limit_bytes{NVME1}": constant(14400),
    f"kvstore_admission_written_bytes_total{NVME1}": rising(29),
    'kvstore_tier_limit_bytes{tier="dram"}': constant(1),
    'kvstore_admission_written_bytes_total{tier="hbm0"}': rising(1000),
    "kvstore_problems": constant(0),
    **loop(0),
}
"""A node without alerts."""

CASES = {
    "KVStoreDown": {"kvstore_up": constant(0)},
    "KVStoreNotScraped": {'up{job="kvstore/kvstore"}': constant(0)},
    "KVStoreNetworkTierAway": {"kvstore_network_usable": constant(0)},
    "KVStoreDeviceHangs": {
        f"kvstore_tier_fenced{NVME1}": constant(1),
        f"kvstore_tier_readable{NVME1}": constant(0),
        f"kvstore_tier_writable{NVME1}": constant(0),
    },
    "KVStoreDeviceFails": {f"kvstore_tier_writable{NVME1}": constant(0)},
    "KVStoreBadBlocks": {"kvstore_quarantined_blocks_total": rising(0.1)},
    "KVStoreNoRoom": {"kvstore_denied_blocks_total": rising(70)},
    "KVStoreSlowLoop": loop(2),
    "KVStoreDriveWearsOut": {f"kvstore_admission_written_bytes_total{NVME1}": rising(31)},
    "KVStoreProblems": {"kvstore_problems": constant(1)},
}


def firing(series: dict[str, str], folder: Path, expected: list[str]) -> None:
    """Asserts that exactly the expected alerts fire at the end of these series."""
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in expected]
    fired = 'count by (alertname) (ALERTS{alertstate="firing"})'
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": fired, "eval_time": f"{MINUTES}m", "exp_samples": samples}],
    }
    file = folder / "case.yml"
    rules = [str(ROOT / "docs/alerts.yml")]
    file.write_text(json.dumps({"rule_files": rules, "evaluation_interval": "1m", "tests": [case]}))
    run(path_of("promtool"), "test", "rules", str(file))


def test_every_alert_has_a_case() -> None:
    assert CASES.keys() == ALERTS.keys()


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_alone(alert: str, tmp_path: Path) -> None:
    need("promtool")
    firing({**FINE, **CASES[alert]}, tmp_path, [alert])


def test_no_alert_fires_on_a_node_that_is_well(tmp_path: Path) -> None:
    need("promtool")
    firing(FINE, tmp_path, [])
