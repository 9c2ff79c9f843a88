"""The pages that explain: named places exist, numbers are those of the code, drawings can be read."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvstore.config import Config
from kvstore.core.policy import POLICIES, admission
from kvstore.core.queues import device_queue
from kvstore.core.requests.leases import Limits
from kvstore.core.reuse import reuse
from kvstore.core.transfers import eviction
from kvstore.daemon.server import connection_table, request_scheduler
from kvstore.tiers.nvme import journal

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/explained"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
DRAWINGS = sorted(FOLDER.glob("*.svg"))
MIB = 1 << 20
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", PAGES)
def test_named_places_exist(name: str) -> None:
    places = re.findall(r"`([a-z_]+/[\w/.]*|arena\.py)(?::\s\w+)?`", PAGES[name])
    assert places
    for place in places:
        assert (ROOT / "kvstore" / place).exists() or (ROOT / place).exists(), place


@pytest.mark.parametrize("name", PAGES)
def test_links_have_targets(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        file, _, anchor = target.partition("#")
        linked = (FOLDER / file).resolve()
        assert linked.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}, (
                target
            )


@pytest.mark.parametrize("name", PAGES)
def test_named_keys_exist(name: str) -> None:
    sections = Config.model_fields
    for section, key in re.findall(
        r"`(dram|nvme|scrub|limits|policy|daemon)\.([a-z_]+)(?: =|`)", PAGES[name]
    ):
        assert key in sections[section].annotation.model_fields, f"{section}.{key}"  # type: ignore[union-attr]


def test_every_page_is_in_the_menu_and_has_its_drawing() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for name, text in PAGES.items():
        assert f"explained/{name}.md" in menu
        [drawing] = re.findall(r"!\[.+\]\((.+\.svg)\)", text)
        assert drawing == ("architecture.svg" if name == "index" else f"{name}.svg")


NUMBERS = [
    ("fairness", f"slots of {request_scheduler.SLICE_S * 1e6:.0f} µs"),
    ("fairness", f"{Config().limits.queued_requests:,} queued requests"),
    ("fairness", f"{request_scheduler.QUEUED_BYTES // MIB} MiB of queued messages"),
    ("fairness", f"{request_scheduler.READ_BYTES_PER_S // MIB} MiB per second"),
    ("fairness", f"for each {request_scheduler._UNIT_KEYS} keys"),
    ("fairness", f"last {connection_table._FOR_OPERATORS} connections"),
    ("fairness", f"most {connection_table.STRANGERS} of them"),
    ("fairness", f"{device_queue._READING_BYTES // MIB} MiB of reads"),
    ("fairness", f"{device_queue._READING_ALONE_BYTES // MIB} MiB\n  for a tenant alone"),
    ("fairness", f"have {device_queue._ASIDE_BYTES // MIB} MiB while reads wait"),
    ("fairness", f"{device_queue._WRITING_ALONE_BYTES // MIB} MiB on a device"),
    ("fairness", f"{device_queue._WAITING_BYTES // MIB} MiB queued"),
    ("fairness", f"most {eviction._EMPTIED_AT_ONCE} in a step"),
    ("durability", f"about {journal.GROUP_RECORDS:,} records"),
    ("durability", f"for {device_queue._OPEN_FOR_S:.0f} s"),
    ("durability", f"progress for {device_queue._FENCED_AFTER_S:.0f} s"),
    ("durability", f"for {Config().daemon.stop_timeout:.0f} s at most"),
    ("integrity", f"{Config().scrub.rate // MIB} MiB per second"),
    ("life-of-a-block", f"{Limits().reserve_keys} at most"),
    ("eviction", f"`{Config().policy.eviction}` (default)"),
    ("eviction", f"`nvme.admission_threshold` ({Config().nvme.admission_threshold})"),
    ("eviction", f"{admission._SLACK * 100:.0f} % of it"),
    ("eviction", f"{reuse._LEARN_AFTER:,} blocks of\nhistory"),
]


@pytest.mark.parametrize(("name", "words"), NUMBERS)
def test_numbers_are_those_of_the_code(name: str, words: str) -> None:
    assert words in PAGES[name]


def test_classes_and_policies_are_those_of_the_code() -> None:
    table = re.findall(r"^\| (demand|prefetch|write-back|scrub) \| (\d+) \|", PAGES["fairness"], re.MULTILINE)
    assert [float(weight) for _, weight in table] == list(device_queue._WEIGHTS)
    drawn = re.findall(r"weight (\d+)", (FOLDER / "fairness.svg").read_text(encoding="utf-8"))
    assert [float(weight) for weight in drawn] == list(device_queue._WEIGHTS)
    section = PAGES["eviction"].partition("## Policies")[2].partition("\n## ")[0]
    assert set(POLICIES) <= set(re.findall(r"^\| `([a-z0-9]+)`", section, re.MULTILINE))


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_a_drawing_can_be_read_in_light_and_dark(path: Path) -> None:
    """It has a background, both themes, real text within its edges, and nothing from outside."""
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    assert root.attrib["viewBox"] == f"0 0 {width:g} {height:g}"
    assert root.find(f"{SVG}title") is not None
    assert "@media (prefers-color-scheme: dark)" in text
    assert 'class="card"' in text
    assert not re.search(r"<script|<image|href=|@import|url\((?!#)", text)
    words = root.findall(f".//{SVG}text")
    assert len(words) > 10
    for each in words:
        assert each.text
        # About 0.55 em a letter, on each side of its anchor.
        kinds = each.attrib.get("class", "").split()
        long = len(each.text) * (6.9 if "s" in kinds else 8.0)
        left = float(each.attrib["x"]) - (long / 2 if "m" in kinds else long if "e" in kinds else 0)
        assert left >= 0, each.text
        assert left + long <= width + 20, each.text
        assert 0 < float(each.attrib["y"]) < height, each.text


def test_all_drawings_have_one_style() -> None:
    styles = {
        re.search(r"<style>.*</style>", path.read_text(encoding="utf-8"), re.DOTALL)[0] for path in DRAWINGS
    }  # type: ignore[index]
    assert len(styles) == 1
