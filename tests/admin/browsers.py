"""A real headless Chromium, which talks to nobody but the daemon's interface, and an interface in a hurry."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from kvstore.lab.local_daemon import LocalDaemon
from tests.admin.serving import ServedAdmin
from tests.programs import need

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)


@contextmanager
def browser(width: int = 1360, height: int = 900) -> Iterator[webdriver.Chrome]:
    """A Chromium with a profile of its own; the test is skipped where there is none."""
    need("chromium", "chromedriver")
    paths = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    options = Options()
    options.binary_location = str(paths["chromium"])
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(prefix="kvstore-chromium-", ignore_cleanup_errors=True) as profile:
        for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(str(paths["chromedriver"])))
        try:
            resize(driver, width, height)
            yield driver
        finally:
            driver.quit()


def resize(driver: webdriver.Chrome, width: int, height: int, scale: float = 1) -> None:
    """Gives the page so many pixels, as a device of that size would."""
    size: dict[str, Any] = {"width": width, "height": height}
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {**size, "deviceScaleFactor": scale, "mobile": False}
    )


def prefer(driver: webdriver.Chrome, **features: str) -> None:
    """Sets what the system says that its user prefers, e.g. prefers_color_scheme="dark"."""
    set_to = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": set_to})


class QuickAdmin(ServedAdmin):
    """Its hours pass so many times as fast: a point is added as often, and its clock says so."""

    def __init__(self, daemon: LocalDaemon, times: float) -> None:
        super().__init__(daemon)
        self.command = (sys.executable, "-c", _QUICK.format(times=times))


_QUICK = """
import functools, time
from kvstore.admin import daemon_state, history
began_s = time.time()
history.EVERY_S /= {times}
daemon_state.FRESH_S /= {times}
history.keep = functools.partial(history.keep, clock=lambda: began_s + (time.time() - began_s) * {times})
from kvstore.cli import app
app()
"""
