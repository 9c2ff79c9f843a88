"""The dashboard in a real Chromium, over a real interface and daemon; and the hour that it shows."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By

from kvstore import Client
from kvstore.admin.history import History, quantile
from kvstore.lab.local_daemon import LocalDaemon
from tests.admin.browsers import QuickAdmin, browser, prefer, resize
from tests.admin.serving import EXPIRED, VIEW, problem, settings
from tests.daemons import WITH_NVME, eventually, got, names, new_layout, payloads

PAGE = Path(__file__).parents[2] / "kvstore" / "admin" / "page"
PARTS = ("tiers", "history", "tenants", "decisions", "wear")
BOUNDS = [0.001, 0.002, 0.004]


# -- the hour


def said(
    served: int = 0,
    missed: int = 0,
    late: int = 0,
    written: int = 0,
    counts: tuple[int, ...] = (0, 0, 0, 0),
    evicted: int = 0,
    instance: str = "one",
    uptime_s: float = 1e6,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a daemon says of itself, status and figures."""
    units = ("blocks", "tokens", "bytes")
    admission = {"written_bytes": written}
    return (
        {
            "instance": instance,
            "uptime_s": uptime_s,
            "tiers": [{"name": "nvme", "used_bytes": 7, "limit_bytes": 9}],
        },
        {
            "bounds_s": BOUNDS,
            "hits": [
                {"tenant": "a", "what": what, "tier": tier, **dict.fromkeys(units, n)}
                for what, tier, n in (
                    ("requested", "", served + late + missed),
                    ("found", "nvme", served + late),
                    ("missed", "", missed),
                    ("delivered", "nvme", served),
                    ("too_late", "", late),
                )
            ],
            "calls": [{"call": "acquire", "waited": w, "counts": list(counts)} for w in (False, True)],
            "decisions": [{"what": "evicted", "tier": "nvme", "blocks": evicted}],
            "devices": [{"tier": "nvme", "admission": admission}],
        },
    )


def test_the_history_has_increments_between_points() -> None:
    history = History()
    history.add(1000.0, *said(served=10, missed=5, written=100))
    history.add(1010.0, *said(served=40, missed=15, late=10, written=350, counts=(0, 5, 0, 0), evicted=3))
    c = history.columns()
    assert c["at_s"] == [1000.0, 1010.0]
    assert (c["requested_blocks"], c["too_late_blocks"]) == ([None, 50], [None, 10])
    assert (c["hit_ratio"], c["delivered_ratio"]) == ([None, 0.8], [None, 0.6])
    assert c["seconds"] == [None, 10.0]
    assert c["missed_blocks"] == [None, 10]
    [tier] = c["tiers"]
    assert tier["found_blocks"] == [None, 40]
    assert tier["served_bytes"] == [None, 30]
    assert tier["written_bytes"] == [None, 250]
    assert (tier["used_bytes"], tier["limit_bytes"]) == ([7, 7], [9, 9])
    assert c["acquires"] == [None, 10]
    assert c["acquire_p50_s"] == [None, pytest.approx(0.0015)]
    assert c["decisions"] == [{"what": "evicted", "tier": "nvme", "blocks": [None, 3]}]


def test_the_history_and_its_columns_have_a_bounded_length() -> None:
    history = History(points=5)
    for n in range(50):
        history.add(10.0 * n, *said(served=n, evicted=n))
    c = history.columns()
    assert len(history) == 5
    assert c["at_s"] == [450.0, 460.0, 470.0, 480.0, 490.0]
    columns = [c["seconds"], c["acquires"], c["decisions"][0]["blocks"], c["tiers"][0]["served_blocks"]]
    assert {len(column) for column in columns} == {5}


def test_an_absent_or_restarted_daemon_is_a_gap_without_negative_rates() -> None:
    history = History()
    history.add(0.0, *said(served=100))
    history.miss(10.0)
    history.add(20.0, *said(served=130))
    history.add(30.0, *said(served=140))
    history.add(40.0, *said(served=3, instance="two"))
    history.add(50.0, *said(served=5, instance="two"))
    history.add(60.0, *said(served=1, instance="two"))
    history.add(60.0, *said(served=2, instance="two"))
    c = history.columns()
    assert c["tiers"][0]["served_blocks"] == [None, None, None, 10, None, 2, None, None]
    assert c["seconds"] == [None, None, None, 10.0, None, 10.0, None, None]
    assert c["tiers"][0]["used_bytes"][:3] == [7, None, 7]


def test_bytes_written_today_are_counted_over_restarts_until_midnight() -> None:
    noon, history = 1.5 * 86_400, History()
    history.add(noon, *said(written=500))
    assert history.columns()["today_since_s"] == noon, "what went before is another day's, perhaps"
    history.add(noon + 10, *said(written=600))
    history.add(noon + 20, *said(written=50, instance="two", uptime_s=5))
    [device] = history.columns()["devices"]
    assert device["written_today_bytes"] == 150
    history.add(noon + 43_210, *said(written=70, instance="two", uptime_s=40_000))
    assert history.columns()["devices"][0]["written_today_bytes"] == 20
    assert history.columns()["today_since_s"] == 2 * 86_400
    young = History()
    young.add(noon, *said(written=500, uptime_s=100))
    assert young.columns()["devices"][0]["written_today_bytes"] == 500
    assert young.columns()["today_since_s"] == noon - 100


def test_a_quantile_lies_within_its_bucket() -> None:
    assert quantile(BOUNDS, [0, 0, 0, 0], 0.5) is None
    assert quantile(BOUNDS, [4, 0, 0, 0], 0.5) == pytest.approx(0.0005)
    assert quantile(BOUNDS, [1, 1, 2, 0], 1.0) == pytest.approx(0.004)
    assert quantile(BOUNDS, [0, 0, 0, 9], 0.99) == 0.004, "the last bucket has no bound"


# -- what is served


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon({**WITH_NVME, "admin": settings()}) as served:
        yield served


@pytest.fixture(scope="module")
def admin(daemon: LocalDaemon) -> Iterator[QuickAdmin]:
    """Beside a daemon that has served from both tiers, missed, and evicted."""
    with QuickAdmin(daemon, times=20) as served, Client(daemon.url, deadline_s=10, strict=True) as client:
        ns = client.namespace(new_layout())
        chains = [names(100, f"chain {n}") for n in range(20)]
        for keys in chains:
            assert not ns.put(keys, payloads(keys)).denied
        eventually(lambda: served.get("/v1/history").json["decisions"])
        for keys in (chains[-1], chains[0]):
            assert got(ns, keys) == 100
        assert got(ns, names(50, "nothing")) == 0
        yield served


def test_the_page_and_its_files_are_served_to_anybody_under_a_strict_policy(admin: QuickAdmin) -> None:
    for path in ("/", *(f"/page/{file.name}" for file in PAGE.iterdir())):
        answer = admin.get(path, over_tcp=True)
        assert answer.status == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
        again = admin.get(path, over_tcp=True, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
        assert admin.get(path, over_tcp=True, method="HEAD").status == 200
    problem(admin.get("/page/..%2Fapp.py", over_tcp=True), 404)
    problem(admin.get("/page/none.js", over_tcp=True), 404)
    refused = admin.get("/", over_tcp=True, method="POST")
    problem(refused, 405)
    assert "GET" in refused.headers["allow"]
    assert "/" not in admin.get("/openapi.json").json["paths"]


def test_the_page_loads_nothing_from_other_hosts_and_inserts_no_markup() -> None:
    for file in PAGE.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"(?m)//\s.*$|url\(#", "", text).replace("*/", ""), file.name
        for bad in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "@import"):
            assert bad not in text, (file.name, bad)


def test_the_history_equals_the_daemons_counters(admin: QuickAdmin, daemon: LocalDaemon) -> None:
    with Client(daemon.url, deadline_s=10, strict=True) as client:
        figures = client.control("figures")

    def history() -> Any:
        asked: Any = admin.get("/v1/history", VIEW, over_tcp=True).json
        return asked if sum(n or 0 for n in asked["missed_blocks"]) >= 50 else None

    seen = eventually(history)
    for tier in seen["tiers"]:
        counted = {row["what"]: row["blocks"] for row in figures["hits"] if row["tier"] == tier["name"]}
        assert sum(n or 0 for n in tier["served_blocks"]) == counted["delivered"] > 0, tier["name"]
        assert sum(n or 0 for n in tier["found_blocks"]) == counted["found"], tier["name"]
    [nvme] = [device for device in seen["devices"] if device["tier"] == "nvme"]
    [device] = [device for device in figures["devices"] if device["tier"] == "nvme"]
    assert nvme["written_today_bytes"] == device["admission"]["written_bytes"] > 0
    assert {len(seen[name]) for name in ("at_s", "seconds", "hit_ratio")} == {len(seen["at_s"])}
    problem(admin.get("/v1/history", over_tcp=True), 401)


# -- in a browser


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    with browser() as made:
        yield made


@pytest.fixture
def page(driver: webdriver.Chrome, admin: QuickAdmin) -> Iterator[webdriver.Chrome]:
    """A tab that nobody has signed in to. At the end: it was nowhere else, and met no error."""
    driver.get("about:blank")
    resize(driver, 1360, 900)
    prefer(driver, prefers_color_scheme="light")
    driver.get_log("browser")
    driver.get_log("performance")
    origin = f"127.0.0.1:{admin.connection(over_tcp=True).port}"
    driver.get(f"http://{origin}/#every=50ms")
    driver.execute_script("sessionStorage.clear(); localStorage.clear()")
    driver.refresh()
    yield driver
    errors = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    # The first try without a token, and a daemon that is away, are told by the interface's status.
    assert not [error for error in errors if "responded with a status of" not in error]
    assert {urlsplit(url).netloc for url in asked_for(driver)} <= {origin}


def asked_for(driver: webdriver.Chrome) -> list[str]:
    """Everything the browser has asked a network for, since this was asked last."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if url.startswith(("http", "ws"))]


def text(driver: webdriver.Chrome, selector: str) -> str:
    found: str = driver.execute_script(
        "return document.querySelector(arguments[0])?.innerText ?? ''", selector
    )
    return found


def sign_in(driver: webdriver.Chrome, token: str = VIEW) -> None:
    eventually(lambda: driver.find_element(By.ID, "token").is_displayed())
    driver.find_element(By.ID, "token").send_keys(token, Keys.ENTER)


def shown(driver: webdriver.Chrome) -> None:
    """Signed in, with the figures of a whole answer of every kind."""
    sign_in(driver)
    eventually(lambda: text(driver, "#state") == "serving")
    eventually(lambda: text(driver, "#tiles .number") and text(driver, "#reasons"))
    eventually(lambda: text(driver, "#tenant-rows"))


def test_without_a_valid_token_the_page_shows_the_reason_only(page: webdriver.Chrome) -> None:
    for token, why in (("kvs_wrong", "Unknown token"), (EXPIRED, "expired"), ("ключ", "is not a token")):
        sign_in(page, token)
        eventually(lambda why=why: why in text(page, "#why"))
        page.find_element(By.ID, "token").clear()
    assert not page.find_element(By.ID, "board").is_displayed()
    shown(page)
    assert VIEW not in page.current_url
    assert page.execute_script("return [sessionStorage.length, localStorage.length]") == [1, 0]
    page.refresh()
    eventually(lambda: text(page, "#state") == "serving")
    page.find_element(By.ID, "leave").click()
    eventually(lambda: page.find_element(By.ID, "token").is_displayed())
    assert page.execute_script("return sessionStorage.length") == 0
    assert not page.find_element(By.ID, "board").is_displayed()


def test_every_part_of_the_page_shows_the_daemons_values(page: webdriver.Chrome, admin: QuickAdmin) -> None:
    shown(page)
    tiers = {tier["name"]: tier for tier in admin.get("/v1/tiers").json["tiers"]}
    picture = text(page, "#picture")
    for name in ("dram", "nvme"):
        assert f"{tiers[name]['blocks']:,} blocks" in picture
        assert f"{100 * tiers[name]['used_bytes'] / tiers[name]['limit_bytes']:.1f} %" in picture
    assert "default" in text(page, "#tenant-rows")
    counted = {row["what"] for row in admin.get("/v1/history").json["decisions"]}
    assert counted
    for what in counted:
        assert what in text(page, "#reasons")
    assert "Drive writes per day" in text(page, "#wear")
    drawn = page.execute_script(
        "return [...document.querySelectorAll('.chart')].map(c => [...c.querySelectorAll('.series path')]"
        ".map(p => p.getAttribute('d')).join('').length)"
    )
    assert len(drawn) == 6
    assert min(drawn) > 10
    for part in PARTS:
        page.find_element(By.CSS_SELECTOR, f"nav a[href='#{part}']").click()
        top = page.execute_script(f"return document.getElementById('{part}').getBoundingClientRect().top")
        assert 0 <= top < 900, part


def test_it_works_by_keyboard_alone(page: webdriver.Chrome) -> None:
    shown(page)

    def press(*keys: str) -> None:
        ActionChains(page).send_keys(*keys).perform()

    def tab_to(selector: str) -> None:
        for _ in range(60):
            press(Keys.TAB)
            here = page.execute_script("return document.activeElement.matches(arguments[0])", selector)
            if here:
                outline = page.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
                assert outline == "solid", f"{selector} does not show that it has the focus"
                return
        raise AssertionError(f"no way to {selector}")

    page.execute_script("document.activeElement.blur(); document.body.focus(); scrollTo(0, 0)")
    tab_to(".skip")
    tab_to("#theme")
    press(Keys.ENTER, Keys.ENTER)
    assert page.execute_script("return document.documentElement.dataset.theme") == "dark"
    tab_to("nav a[href='#history']")
    press(Keys.ENTER)
    tab_to(".chart")
    times = []
    for keys in ((Keys.HOME,), (Keys.ARROW_RIGHT,), (Keys.ARROW_LEFT,), (Keys.END,)):
        press(*keys)
        times.append(text(page, "#chart-hits .unseen").split(": ")[0])
        assert "DRAM" in text(page, "#chart-hits .unseen")
    assert times[0] == times[2] != times[3]
    assert page.execute_script("return document.querySelectorAll('.cursor[visibility=visible]').length") == 6
    press(Keys.ESCAPE)
    assert text(page, "#chart-hits .when") == "now"
    tab_to("#chart-latency .chart")


def test_a_chart_shows_the_values_under_the_mouse(page: webdriver.Chrome) -> None:
    shown(page)
    chart = page.find_element(By.CSS_SELECTOR, "#chart-used .chart")
    ActionChains(page).move_to_element(chart).perform()
    eventually(lambda: re.fullmatch(r"\d\d:\d\d:\d\d", text(page, "#chart-used .when")))
    names_ = page.execute_script(
        "return [...document.querySelectorAll('.chart')].map(c => [c.getAttribute('role'),"
        "c.querySelector('title').textContent, c.querySelector('desc').textContent].every(Boolean))"
    )
    assert names_ == [True] * 6


_CONTRASTS = """
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const rgb = (css) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data]; };
const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) =>
  v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
const found = [];
for (const node of document.querySelectorAll('body *')) {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  if (!own || !node.checkVisibility() || node.closest('.skip, .unseen, title, desc, option')) continue;
  const ink = getComputedStyle(node)[node instanceof SVGElement ? 'fill' : 'color'];
  let under = node;
  while (under && rgb(getComputedStyle(under).backgroundColor)[3] < 255) under = under.parentElement;
  const pair = [light(rgb(ink)), light(rgb(getComputedStyle(under ?? document.body).backgroundColor))];
  const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  if (ratio < 4.5) found.push(`${node.className?.baseVal ?? node.className}: ${node.textContent} ${ratio}`);
}
return [document.querySelectorAll('body *').length, found];
"""


def test_light_and_dark_can_be_read_and_a_choice_is_kept(page: webdriver.Chrome) -> None:
    shown(page)
    grounds = {}
    for theme in ("light", "dark"):
        prefer(page, prefers_color_scheme=theme, prefers_reduced_motion="reduce")
        nodes, faint = page.execute_script(_CONTRASTS)
        assert nodes > 200
        assert not faint, theme
        grounds[theme] = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert grounds["light"] != grounds["dark"]
    assert page.execute_script(
        "return getComputedStyle(document.querySelector('.stream')).animationName === 'none'"
    )
    page.find_element(By.ID, "theme").click()
    page.refresh()
    assert page.execute_script("return document.documentElement.dataset.theme") == "light"
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == grounds["light"]


def test_it_fits_a_phone(page: webdriver.Chrome) -> None:
    for width in (390, 360):
        resize(page, width, 844)
        if width == 390:
            assert page.execute_script("return document.documentElement.scrollWidth") == width
            shown(page)
        eventually(lambda width=width: page.execute_script("return innerWidth") == width)
        assert page.execute_script("return document.documentElement.scrollWidth") == width
        outside = page.execute_script(
            "return [...document.querySelectorAll('main *')].filter(n => n.checkVisibility() &&"
            "n.getBoundingClientRect().right > innerWidth + 1).map(n => n.outerHTML)"
        )
        assert not outside


@contextmanager
def altered(driver: webdriver.Chrome, script: str) -> Iterator[None]:
    """Has every page run this first."""
    made = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    try:
        driver.refresh()
        yield
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", made)


def test_text_of_the_server_is_never_markup(page: webdriver.Chrome) -> None:
    evil = "<img src=x onerror=window.hit=1><script>window.hit=1</script>\u202e"
    script = f"""
      const real = window.fetch;
      window.fetch = async (path, more) => {{
        const answer = await real(path, more);
        const body = await answer.json();
        const evil = {json.dumps(evil)};
        if (body.tenants) body.tenants[0].name = evil;
        if (body.problems) body.problems = [evil];
        if (body.decisions) for (const one of body.decisions) one.what = evil;
        if (body.tiers?.[0]?.extents) body.tiers[0].name = evil;
        return new Response(JSON.stringify(body), {{status: answer.status, headers: answer.headers}});
      }};
    """
    with altered(page, script):
        sign_in(page)
        for part in ("#tenant-rows", "#problems", "#reasons", "#picture"):
            eventually(lambda part=part: "<img src=x" in text(page, part))
        assert page.execute_script("return document.querySelectorAll('main img, main script').length") == 0
        assert page.execute_script("return window.hit") is None


def test_the_page_shows_a_drained_device(page: webdriver.Chrome, daemon: LocalDaemon) -> None:
    shown(page)
    with Client(daemon.url, deadline_s=10, strict=True) as client:
        for state, said in (
            ("draining", "NVMe is draining"),
            ("fenced", "NVMe is fenced"),
            ("serving", "serving"),
        ):
            client.control("set_device", name="nvme", state=state, instead_of=None)
            eventually(lambda said=said: text(page, "#state") == said)


def test_the_page_shows_when_the_daemon_is_absent_and_back(
    page: webdriver.Chrome, daemon: LocalDaemon
) -> None:
    shown(page)
    before = text(page, "#picture .sizes")
    daemon.kill()
    try:
        eventually(lambda: text(page, "#state").startswith("daemon away since "))
        assert text(page, "#picture .sizes") == before, "the last values stay"
        fades = "return getComputedStyle(document.getElementById('board')).opacity < 1"
        eventually(lambda: page.execute_script(fades))
    finally:
        daemon.start()
    eventually(lambda: text(page, "#state") == "serving", within_s=30)
    assert not page.execute_script("return document.body.classList.contains('away')")


def test_a_hidden_page_sends_no_requests(page: webdriver.Chrome) -> None:
    shown(page)
    hide = "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
    page.execute_script(hide + "document.dispatchEvent(new Event('visibilitychange'))", True)
    eventually(lambda: quiet(page))
    page.execute_script(hide + "document.dispatchEvent(new Event('visibilitychange'))", False)
    eventually(lambda: asked_for(page))


def quiet(driver: webdriver.Chrome) -> bool:
    """Whether nothing is asked for in a while."""
    asked_for(driver)
    driver.execute_async_script("setTimeout(arguments[0], 500)")
    return not asked_for(driver)


_COUNT = """
const real = window.fetch;
window.polls = 0;
window.under = {};
window.most = 0;
window.fetch = async (path, more) => {
  window.polls += 1;
  window.under[path] = (window.under[path] ?? 0) + 1;
  window.most = Math.max(window.most, window.under[path]);
  try { return await real(path, more); } finally { window.under[path] -= 1; }
};
"""


def test_open_for_a_day_it_keeps_no_more_than_at_first(page: webdriver.Chrome) -> None:
    page.get(page.current_url.replace("every=50ms", "every=5ms"))
    with altered(page, _COUNT):
        shown(page)
        page.execute_cdp_cmd("Performance.enable", {})
        kept = []
        for polls in (200, 2000):
            eventually(lambda polls=polls: page.execute_script("return window.polls") >= polls, within_s=60)
            for _ in range(3):
                page.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
            measured = page.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
            kept.append({metric["name"]: metric["value"] for metric in measured})
        first, last = kept
        assert last["JSHeapUsedSize"] - first["JSHeapUsedSize"] < 1 << 20
        # An hour that is still filling has a few more labels.
        assert last["Nodes"] - first["Nodes"] < 150
        assert last["JSEventListeners"] - first["JSEventListeners"] < 10
        assert page.execute_script("return window.most") == 1, "one request of a kind at a time"


@contextmanager
def forwarded(path: Path) -> Iterator[int]:
    """A port of loopback that leads to a Unix socket, as `ssh -L` makes one."""

    def carry(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                near, far = listener.accept()[0], socket.socket(socket.AF_UNIX)
                open_.extend((near, far))
                far.connect(str(path))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

    open_: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
    for sock in open_:
        sock.close()


def test_over_the_socket_the_page_needs_no_token(driver: webdriver.Chrome, admin: QuickAdmin) -> None:
    with forwarded(admin.socket) as port:
        driver.get(f"http://127.0.0.1:{port}/")
        eventually(lambda: text(driver, "#state") == "serving")
        assert not driver.find_element(By.ID, "login").is_displayed()
        assert not driver.find_element(By.ID, "leave").is_displayed()
        driver.get("about:blank")
