"""Every bench in its smallest size, and the file that its figures go to.

A bench yields the rows that it should, and what it checks of its own work holds (`bench.harness.expect`).
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import chart, memcpy_put, report, svg
from bench.catalog import BENCHES, EVERYWHERE, Entry, measure
from bench.harness import MIB, Bench, NotDone, Result, Unable
from bench.provenance import RESULTS, ROOT, provenance
from bench.results import HEADER, MACHINES, NOT_MEASURED, ORIGIN, merge, parse, problems, render
from bench.served import serve
from kvstore.cuda import device
from tests.programs import need
from tests.tenants import needs_root

TEXT = RESULTS.read_text(encoding="utf-8")
MACHINE = {"CPU": "a test's, 2 cores", "memory": "1.0 GiB", "kernel": "Linux 1.0", "Python": "3.11.0"}


def smoke(folder: Path) -> Bench:
    return Bench(0.001, folder, smoke=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_root) if name == "hostile" else name for name in EVERYWHERE]
)
def test_a_bench_yields_its_rows(name: str, tmp_path: Path) -> None:
    folder = tmp_path / ("a-folder-whose-name-is-longer-than-the-path-of-a-socket-may-be-" * 2)
    folder.mkdir()
    results = {result.name for result in measure(name, smoke(folder))}
    assert {*BENCHES[name].always} <= results <= {*BENCHES[name].rows}


def test_the_gpu_bench_without_a_gpu_is_unable(tmp_path: Path) -> None:
    """`make test-gpu` runs the bench on a GPU."""
    if not (why := device.why_not()):
        pytest.skip("there is a GPU: python -m bench gpu")
    with pytest.raises(Unable, match="no GPU to measure") as lack:
        list(measure("gpu", smoke(tmp_path)))
    assert why in str(lack.value)


@pytest.mark.parametrize("name", [name for name, entry in BENCHES.items() if entry.needs])
def test_benches_with_requirements_name_their_rows(name: str) -> None:
    """These benches need a GPU or a serving engine. The test imports them and searches for their rows."""
    module = importlib.import_module(f"bench.{BENCHES[name].run.partition(':')[0]}")
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    cases = [f"{name}/{case}" for case in getattr(module, "CASES", ())]
    for row in BENCHES[name].rows:
        named = f'"{row}"' in source or row in cases
        assert named or row.startswith("gpu/checksum/"), row


# -- benches without the timed work


def test_a_bench_with_refused_puts_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hazard` refuses new blocks with less expected reuse than the blocks to evict."""
    monkeypatch.setattr(memcpy_put, "SMOKE", memcpy_put.Sizes(4096, 64, 2, 16 * MIB))
    monkeypatch.setattr(memcpy_put, "serve", partial(serve, policy={"eviction": "hazard"}))
    with pytest.raises(NotDone, match=r"blocks stored: \d+, not 64"):
        list(measure("memcpy-put", smoke(tmp_path)))


@pytest.mark.parametrize(
    ("yields", "why"),
    [
        ([], "no figure for x/a, x/b"),
        (["x/a", "x/a"], "x/a is no row of x, or was there before"),
        (["x/a", "x/c"], "x/c is no row of x"),
    ],
)
def test_rows_outside_the_catalogue_are_refused(
    yields: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(bench: Bench) -> Iterator[Result]:
        yield from (Result(name, 1.0, "s", None, None, 1) for name in yields)

    monkeypatch.setitem(BENCHES, "x", Entry("core:made_up", ("x/a", "x/b"), {"x/d": "a part"}))
    monkeypatch.setattr("bench.core.made_up", run, raising=False)
    with pytest.raises(NotDone, match=why):
        list(measure("x", smoke(tmp_path)))


def test_a_zero_figure_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Result("core", 0.0, "GiB/s", 1.0, 0.0, 1)
    monkeypatch.setattr("bench.core.run", lambda bench: iter([nothing]))
    with pytest.raises(NotDone, match=r"core: 0\.0 GiB/s"):
        list(measure("core", smoke(tmp_path)))


# -- RESULTS.md and the benches


def test_the_file_has_the_rows_of_the_benches() -> None:
    assert list(problems(TEXT, RESULTS.parent)) == []
    assert render(parse(TEXT)) == TEXT


FIRST_MACHINE = next(section.rows[0]["machine"] for section in parse(TEXT) if section.name == MACHINES)


@pytest.mark.parametrize(
    ("was", "becomes", "why"),
    [
        ("## core-ram", "## core-rom", "core-ram has no section"),
        ("## core-ram", "## core-rom", "core-rom: there is no such bench"),
        ("| memcpy-put |", "| memcpy-cut |", "memcpy-put has no row"),
        ("| memcpy-put |", "| memcpy-cut |", "memcpy-cut is no row of memcpy-put"),
        ("| `memcpy-put --seconds", "|  | `", "memcpy-put: no command"),
        ("## start\n", "## start\nOne line more.\n", "start: a comment has at most 2 lines"),
        (f"\n| {FIRST_MACHINE} |", "\n| unknown |", f"there is no machine {FIRST_MACHINE}"),
    ],
)
def test_outdated_results_are_detected(was: str, becomes: str, why: str) -> None:
    assert was in TEXT
    found = list(problems(TEXT.replace(was, becomes), RESULTS.parent))
    assert any(why in problem for problem in found), found


def test_removed_and_new_benches_are_detected(tmp_path: Path) -> None:
    for path in RESULTS.parent.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "core.py").rename(tmp_path / "kernel.py")
    assert list(problems(TEXT, tmp_path)) == [
        "core: there is no run in bench/core.py",
        "bench/kernel.py is a bench, but bench/catalog.py does not name it",
    ]


# -- changes by a run


def line(name: str, bench: str, **more: Any) -> dict[str, Any]:
    """Returns a line in the format of `python -m bench NAME --json`."""
    made = {"bench": bench, "command": f"{bench} --seconds 6", "date": "2030-01-02", "commit": "abcdef0"}
    figures = Result(name, 12.5, "GiB/s", 25.0, 0.5, 7, extra={"blocks": 3, "each": {"a": 1}}).to_map()
    return figures | made | {"machine": MACHINE} | more


def rows(text: str, name: str) -> dict[str, dict[str, str]]:
    [section] = [section for section in parse(text) if section.name == name]
    return {row["name"]: row for row in section.rows}


def test_a_run_rewrites_only_the_tables_of_its_benches() -> None:
    after = merge(TEXT, [line("core", "core")])
    row = rows(after, "core")["core"]
    assert {key: row[key] for key in (*HEADER, *ORIGIN)} == {
        "name": "core", "value": "12.5", "unit": "GiB/s", "reference": "25", "ratio": "0.5", "target": "",
        "met": "", "runs": "7", "also": "blocks 3", "command": "`core --seconds 6`", "date": "2030-01-02",
        "commit": "abcdef0", "machine": row["machine"],
    }  # fmt: skip
    assert rows_of_machine(after, row["machine"])["CPU"] == MACHINE["CPU"]
    before, now = TEXT.splitlines(), after.splitlines()
    new = [text for text in now if text not in before]
    assert [text.split(" | ")[0].strip("| ") for text in new] == [row["machine"], "core"]
    assert list(problems(after, RESULTS.parent)) == []
    assert merge(after, [line("core", "core")]) == after


def test_a_noisy_row_without_a_target_is_parsed_unchanged() -> None:
    after = merge(TEXT, [{**line("core", "core"), "noisy": True}])
    assert rows(after, "core")["core"]["met"] == "(noisy)"
    assert render(parse(after)) == after


def rows_of_machine(text: str, number: str) -> dict[str, str]:
    [section] = [section for section in parse(text) if section.name == MACHINES]
    [row] = [row for row in section.rows if row["machine"] == number]
    return row


def test_rows_of_a_failed_bench_have_the_error() -> None:
    ended = {**line("", "lookup"), "failed": "NotDone: 0 | 1"}
    del ended["name"]
    after = rows(merge(TEXT, [line("lookup/1", "lookup"), ended]), "lookup")
    assert after["lookup/1"]["value"] == "12.5"
    assert {after[f"lookup/{n}"]["value"] for n in (64, 1024, 8192)} == {"failed: NotDone: 0 | 1"}
    assert {row["commit"] for row in after.values()} == {"abcdef0"}


def test_unmeasured_rows_are_kept_or_name_their_requirement() -> None:
    unable = {**line("", "gpu"), "unable": "no GPU"}
    del unable["name"]
    assert rows(merge(TEXT, [unable]), "gpu") == rows(TEXT, "gpu")
    measured = merge(TEXT, [line(name, "gpu") for name in BENCHES["gpu"].rows])
    assert rows(merge(measured, [unable]), "gpu") == rows(measured, "gpu")
    empty = merge(TEXT.split("## gpu")[0], [unable])
    assert {row["value"] for row in rows(empty, "gpu").values()} == {
        NOT_MEASURED + "a GPU",
        NOT_MEASURED + "kvikio",
    }


def test_a_smoke_run_has_no_origin(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="smoke"):
        provenance("core", smoke(tmp_path))
    made = Result("core", 1.0, "GiB/s", 1.0, 1.0, 1).to_map()
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({**made, "bench": "core"}) + "\n", encoding="utf-8")
    with pytest.raises(report.Refused, match="line 1 is none of"):
        list(report.read(path, True))


@pytest.mark.parametrize(
    ("commit", "dirty", "why"), [("", True, "no commit"), ("abcdef0+", False, "was changed")]
)
def test_figures_without_a_commit_are_refused(tmp_path: Path, commit: str, dirty: bool, why: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(line("core", "core", commit=commit)) + "\n", encoding="utf-8")
    with pytest.raises(report.Refused, match=why):
        list(report.read(path, dirty))


def test_report_writes_the_rows_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, results = tmp_path / "run.jsonl", tmp_path / "RESULTS.md"
    results.write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(report, "RESULTS", results)
    monkeypatch.setattr(chart, "DOCS", tmp_path)
    path.write_text(json.dumps(line("core", "core")) + "\n", encoding="utf-8")
    assert report.main(["--from", str(path)]) == 0
    assert results.read_text(encoding="utf-8") == merge(TEXT, [line("core", "core")])
    for name, picture in chart.pictures(merge(TEXT, [line("core", "core")])).items():
        assert (tmp_path / name).read_text(encoding="utf-8") == picture
    ended = {key: value for key, value in line("", "core").items() if key != "name"} | {"failed": "no"}
    path.write_text(json.dumps(ended) + "\n", encoding="utf-8")
    assert report.main(["--from", str(path)]) == 1


def test_report_continues_after_a_failed_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both benches end at once: one is unknown to its process, the other has no GPU."""
    if not device.why_not():
        pytest.skip("there is a GPU: its bench takes longer")
    need("git")
    results = tmp_path / "RESULTS.md"
    results.write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(report, "RESULTS", results)
    monkeypatch.setattr(chart, "DOCS", tmp_path)
    monkeypatch.setattr(report, "KEPT", tmp_path / "run.jsonl")
    monkeypatch.setitem(BENCHES, "made-up", Entry("core:run", ("made-up",)))
    assert report.main(["made-up", "gpu", "--seconds", "0.01", "--folder", str(tmp_path), "--dirty"]) == 1
    kept = [json.loads(text) for text in (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [text["bench"] for text in kept] == ["made-up", "gpu"]
    assert rows(results.read_text(encoding="utf-8"), "made-up")["made-up"]["value"] == "failed: exit code 2"


def test_check_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "check"], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


# -- the pictures of README and docs/benchmarks.md


def test_the_pictures_are_those_of_the_results() -> None:
    """`python -m bench chart` redraws them."""
    drawn = chart.pictures(TEXT)
    assert {path.name for path in chart.DOCS.glob("bench-*.svg")} <= set(drawn)
    for name, picture in drawn.items():
        assert (chart.DOCS / name).read_text(encoding="utf-8") == picture, name


@pytest.mark.parametrize("name", ["ttft.svg", "ttft-light.svg", "ttft-dark.svg"])
def test_the_chart_shows_the_figures_of_the_results(name: str) -> None:
    rows = chart.figures(TEXT)
    drawn = chart.pictures(TEXT)[name]
    assert f"recompute: {rows[-1][2]:.2g} s" in drawn
    assert f"kvstore hit: {rows[-1][1]:.2g} s" in drawn
    assert all(f"{tokens:,}" in drawn for tokens, _, _ in rows)


def test_a_bar_has_the_length_of_its_ratio_and_a_mark_at_its_target() -> None:
    ratio, target = 2.4, 0.7  # the longest bar: the axis ends behind it
    after = merge(TEXT, [line("memcpy-put", "memcpy-put", ratio=ratio, target=f">= {target}")])
    drawn = chart.pictures(after)["bench-throughput.svg"]
    full = (svg.WIDTH - 236 - 152) / (ratio * 1.05)
    bar = drawn.partition(">put, with checksums<")[2].partition("<text")[0]
    assert f'width="{ratio * full:.1f}"' in bar
    assert f'x1="{236 + target * full:.1f}"' in bar
    assert "12.5 / 25 GiB/s" in drawn


def test_rows_without_a_figure_are_not_drawn() -> None:
    without = re.sub(
        r"(?m)^\| (gpu/[^ ]+) \|.*$", r"| \1 | not measured: needs a GPU" + " | " * 11 + "|", TEXT
    )
    assert "GPU" not in chart.pictures(without)["bench-throughput.svg"]
    measured = merge(without, [line(name, "gpu") for name in BENCHES["gpu"].rows])
    assert "hit in the pool" in chart.pictures(measured)["bench-throughput.svg"]


def test_hit_ratios_of_both_traces_are_read() -> None:
    found = chart.hit_ratios(TEXT)
    assert set(found) == {"chat", "agents"}
    for capacities, by_policy in found.values():
        assert {"`hazard`", "`lru`", "Belady's bound"} <= set(by_policy)
        assert all(len(ratios) == len(capacities) for ratios in by_policy.values())


def test_every_drawn_row_is_a_row_of_a_bench() -> None:
    known = {row for entry in BENCHES.values() for row in entry.rows}
    for groups in (chart.THROUGHPUT, chart.LATENCY, chart.ISOLATION):
        assert {name for names in groups.values() for name in names} <= known
