"""Takes the pictures of docs/dashboard.md: `python -m tests.admin.screenshots [MINUTES]`, as root.

A real daemon with four tenants and real bytes. So that an hour fills in MINUTES (2.5), the interface looks
that much oftener and its clock runs that much faster: a second in the pictures took a fraction of one.
"""

from __future__ import annotations

import base64
import io
import math
import sys
import threading
import time
from pathlib import Path

import numpy as np
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By

from kvstore import Layout
from kvstore.lab.local_daemon import LocalDaemon
from tests.admin.browsers import QuickAdmin, browser, prefer, resize
from tests.admin.serving import VIEW, settings
from tests.daemons import names
from tests.tenants import Member, TenantDaemon

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = 32 << 10
_SETTINGS = {
    "dram": {"limit": "128MiB", "huge_pages": False},
    "nvme": {"limit": "768MiB", "io_threads": 2, "write_budget": "1TiB"},
    "admin": settings(),
}
_TENANTS = """
[tenants.chat]
uids = [61001]
share = 4
dram = { floor = "32MiB" }
nvme = { floor = "192MiB" }
[tenants.agents]
uids = [61002]
share = 3
dram = { floor = "24MiB", limit = "64MiB" }
[tenants.batch]
uids = [61003]
share = 1
dram = { limit = "32MiB" }
nvme = { limit = "256MiB" }
[tenants.evaluation]
uids = [61004]
share = 1
dram = { limit = "16MiB" }
"""
_USERS = ((61001, 260, 0.9), (61002, 120, 1.2), (61003, 900, 0.2), (61004, 60, 0.7))
"""Who, how many conversations, and how much oftener some of them go on than others."""


def _converse(daemon: LocalDaemon, uid: int, conversations: int, skew: float, ends_s: float) -> None:
    """Conversations that go on one after another: what is stored is read, what is missing is stored."""
    rng, began_s = np.random.default_rng(uid), time.monotonic()
    chance = 1 / np.arange(1, conversations + 1) ** skew
    chance /= chance.sum()
    blocks = rng.integers(0, 256, (40, _BLOCK), np.uint8)
    out = np.empty_like(blocks)
    grown: dict[int, int] = {}
    with Member(daemon, uid) as client:
        ns = client.namespace(Layout(model=f"llama-{uid}", block_bytes=_BLOCK, block_tokens=256))
        while (now_s := time.monotonic()) < ends_s:
            part = (now_s - began_s) / (ends_s - began_s)
            # Half an hour comes and goes, and some conversations are new ones.
            who = int(rng.choice(conversations, p=chance)) + conversations * int(
                3 * part + rng.random() * 0.3
            )
            n = min(40, grown.get(who, 6) + int(rng.integers(1, 4)))
            keys = names(n, f"{uid}/{who}")
            had = ns.get(keys, out[:n])
            if had < n:
                ns.put(keys[had:], blocks[had:n], parent=keys[had - 1] if had else None)
            grown[who] = n if n < 40 else 6
            time.sleep(0.012 * (1.3 - math.sin(6.3 * part + uid) + 0.4 * rng.random()))


def _take(driver: webdriver.Chrome, name: str, height: int | None = None) -> None:
    """The whole page, or as much of it as is so high."""
    tall = height or driver.execute_script("return document.documentElement.scrollHeight")
    wide = driver.execute_script("return innerWidth")
    clip = {"x": 0, "y": 0, "width": wide, "height": tall, "scale": 1}
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"])))
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(DOCS / name, optimize=True)
    print(name, f"{(DOCS / name).stat().st_size / 1e3:.0f} kB")


def main(minutes: float) -> None:
    """Runs all of it, and writes the pictures."""
    ends_s = time.monotonic() + 60 * minutes
    with TenantDaemon(_SETTINGS, _TENANTS) as daemon, QuickAdmin(daemon, 60 / minutes) as admin:
        users = [threading.Thread(target=_converse, args=(daemon, *user, ends_s)) for user in _USERS]
        for user in users:
            user.start()
            time.sleep(0.3)  # they change who this process is, one at a time
        time.sleep(max(0.0, ends_s - time.monotonic() - 25))
        port = admin.connection(over_tcp=True).port
        with browser(1360, 900) as driver:
            driver.get(f"http://127.0.0.1:{port}/")
            driver.implicitly_wait(10)
            driver.find_element(By.CSS_SELECTOR, "#login:not([hidden])")
            driver.find_element(By.ID, "token").send_keys(VIEW + "\n")
            time.sleep(6)
            for theme in ("light", "dark"):
                prefer(driver, prefers_color_scheme=theme)
                time.sleep(0.8)
                _take(driver, f"dashboard-{theme}.png", 1265 if theme == "dark" else None)
            resize(driver, 390, 844)
            time.sleep(1.5)
            _take(driver, "dashboard-phone.png", 1800)
        for user in users:
            user.join()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 2.5)
