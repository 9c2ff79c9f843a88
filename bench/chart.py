"""python -m bench chart: draws the pictures of README and docs/benchmarks.md from bench/RESULTS.md.

A row without a figure is left out. Not covered: how a chart looks, see `svg`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bench.provenance import RESULTS
from bench.results import Row, parse
from bench.svg import WIDTH, Bar, Line, Picture

DOCS = RESULTS.parents[1] / "docs"

THROUGHPUT = {
    "DRAM, as a share of memcpy in the same run": {
        "memcpy-get/1-client/unverified": "get, unverified",
        "memcpy-get/1-client/verified": "get, verified",
        "memcpy-get/2-clients/verified": "get, verified, 2 clients",
        "memcpy-put": "put, with checksums",
    },
    "NVMe, as a share of preadv and pwritev by four threads": {
        "nvme-read/same-memory": "read into DRAM, verified",
        "nvme-read-acquire/same-memory": "acquire by a client",
        "nvme-write/same-memory": "write, sync, record",
        "nvme-write-put/same-memory": "put until on record",
    },
    "Network tier, as a share of one raw TCP connection": {
        "valkey/get/tcp": "Valkey, get",
        "valkey/put/tcp": "Valkey, put",
        "objectstore/get": "S3, get",
        "objectstore/put": "S3, put",
    },
    "GPU, as a share of one cudaMemcpy, or of kvikio alone": {
        "gpu/dram-to-device": "DRAM to GPU",
        "gpu/hbm-hit": "hit in the pool",
        "gpu/hbm-hit-verified": "hit in the pool, verified",
        "gpu/nvme-to-hbm": "NVMe to GPU",
    },
}
LATENCY = {
    "Requests, as a multiple of an empty round trip": {
        "zero-copy/acquire": "acquire of 32 blocks",
        "zero-copy/acquire-and-views": "acquire and views",
        "lookup/1": "lookup of 1 key",
        "lookup/64": "lookup of 64 keys",
        "lookup/1024": "lookup of 1,024 keys",
        "lookup/8192": "lookup of 8,192 keys",
        "lookup/8192-with-gaps": "the same, after deletions",
    }
}
ISOLATION = {
    "A tenant beside one at full load, as a multiple of alone": {
        "qos/zero-copy-p99/against-alone": "hits in DRAM",
        "qos/nvme-p99-beside-reads/against-alone": "NVMe, beside reads",
        "qos/nvme-p99-beside-writes/against-alone": "NVMe, beside writes",
    },
    "A tenant beside an attack, as a multiple of alone": {
        f"hostile/{attack}/p99": words
        for attack, words in {
            "long-frames": "long frames",
            "many-values": "many values",
            "waits": "waiting requests",
            "unread": "unread answers",
            "leases": "leases",
            "namespaces": "namespaces",
            "unfinished": "unfinished frames",
            "connections": "connections",
            "all": "all at once",
            "control": "a busy processor only",
        }.items()
    },
}
PEERS = {
    "peers/get/2-MiB": "Get of 2 MiB blocks, GiB/s",
    "peers/get/64-KiB": "Get of 64 KiB blocks, GiB/s",
    "peers/put/2-MiB": "Put of 2 MiB blocks, GiB/s",
    "peers/put/64-KiB": "Put of 64 KiB blocks, GiB/s",
}
_STORES = {
    "memcpy": "memcpy, no store",
    "tmpfs": "a file in memory",
    "valkey": "Valkey",
    "mooncake": "Mooncake",
}
_POLICIES = {"Belady's bound": "second", "`hazard`": "first", "`lru`": "fourth", "`arc`": "third"}
"""Policies with a line in the picture of hit ratios, and its colour."""


def main() -> int:
    """Writes the pictures. Returns 0, or 1 if there are no figures."""
    drawn = write(RESULTS.read_text(encoding="utf-8"), DOCS)
    if "ttft.svg" not in drawn:
        print("bench chart: no figures of vllm-ttft (run `python -m bench report vllm-ttft` first)")
        return 1
    for name in drawn:
        print(f"bench chart: docs/{name}")
    return 0


def write(text: str, folder: Path) -> list[str]:
    """Writes the pictures of the text of RESULTS.md into a folder and returns their names."""
    drawn = pictures(text)
    for name, picture in drawn.items():
        (folder / name).write_text(picture, encoding="utf-8")
    return list(drawn)


def pictures(text: str) -> dict[str, str]:
    """Returns the content of each picture by its name in docs/, drawn from the text of RESULTS.md."""
    rows = {row["name"]: row for section in parse(text) for row in section.rows if "name" in row}
    times = [(float(tick), f"{tick}x") for tick in (0, 1, 2, 3, 4, 5, 6)]
    drawn = {
        "bench-throughput.svg": _bars("Throughput against a plain copy in the same run", THROUGHPUT, rows),
        "bench-latency.svg": _bars("Median latency", LATENCY, rows, (6.4, times)),
        "bench-isolation.svg": _bars("p99 of a tenant beside others", ISOLATION, rows, (6.4, times)),
        "bench-hits.svg": _hits(text),
    }
    if all(rows.get(name, {}).get("ratio") for name in PEERS):
        drawn["bench-peers.svg"] = _peers(rows)
    if measured := figures(text):
        drawn["ttft.svg"] = _ttft(measured, "Time to the first token").render()
        for theme in ("light", "dark"):
            drawn[f"ttft-{theme}.svg"] = _ttft(measured).render(theme)
    return drawn


def figures(text: str) -> list[tuple[int, float, float]]:
    """Returns (tokens, seconds loaded, seconds computed) for each measured prompt that is stored whole."""
    [section] = [section for section in parse(text) if section.name == "vllm-ttft"]
    return [
        (int(row["name"].rpartition("/")[2]), float(row["value"]), float(row["reference"]))
        for row in section.rows
        if row.get("reference") and not row["name"].endswith("/half")
    ]


def hit_ratios(text: str) -> dict[str, tuple[list[str], dict[str, list[float]]]]:
    """Returns (capacities, hit ratios in % by policy) for each trace of RESULTS.md."""
    table = r"^\| (\w+), % of unique blocks \| (.*?) \| date.*\n.*\n((?:\|.*\n)+)"
    found = {}
    for trace, head, body in re.findall(table, text, re.MULTILINE):
        capacities = [cell.strip() for cell in head.split("|")]
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in body.splitlines()]
        n = len(capacities) + 1
        found[trace] = capacities, {line[0]: [float(cell) for cell in line[1:n]] for line in lines}
    return found


def _bars(
    title: str,
    groups: dict[str, dict[str, str]],
    rows: dict[str, Row],
    axis: tuple[float, list[tuple[float, str]]] | None = None,
) -> str:
    """Draws the rows that have a ratio, by group. `groups`: labels by name of a row, by heading.

    `axis`: its end and ticks; longer bars are cut. None: in percent, long enough for all bars and targets.
    """
    picture = Picture(title)
    measured = {name: row for name, row in rows.items() if row.get("ratio")}
    shown = [measured[name] for names in groups.values() for name in names if name in measured]
    most, ticks = axis or _percent([_bar("", row) for row in shown])
    for heading, names in groups.items():
        there = [_bar(label, measured[name]) for name, label in names.items() if name in measured]
        if there:
            picture.bars(heading, there, most, ticks)
    picture.line(18, picture.bottom + 2, 18, picture.bottom + 18, "mark")
    picture.text(28, picture.bottom + 14, "target", "s")
    picture.text(WIDTH - 16, picture.bottom + 14, _origin(shown), "s", "end")
    picture.bottom += 20
    return picture.render()


def _percent(bars: Sequence[Bar]) -> tuple[float, list[tuple[float, str]]]:
    most = max([1.05, *(bar.size for bar in bars), *(bar.mark or 0.0 for bar in bars)]) * 1.05
    step = 25 if most < 1.5 else 50
    return most, [(tick / 100, f"{tick} %") for tick in range(0, int(most * 100) + 1, step)]


def _peers(rows: dict[str, Row]) -> str:
    """Draws this store beside others, with one axis for all operations."""
    picture, shown = Picture("Beside other stores"), [rows[name] for name in PEERS]
    stores = [
        {"kvstore, with checksums": float(row["value"]), **{_STORES[name]: also[name] for name in _STORES}}
        for row in shown
        for also in [_figures(row["also"])]
    ]
    most = max(figure for each in stores for figure in each.values()) * 1.05
    ticks = [(float(tick), f"{tick}") for tick in range(0, int(most) + 1, 4)]
    for heading, each in zip(PEERS.values(), stores, strict=True):
        bars = [
            Bar(label, figure, None, f"{figure:.3g}", "second" if i else "first")
            for i, (label, figure) in enumerate(each.items())
        ]
        picture.bars(heading, bars, most, ticks)
    picture.text(WIDTH - 16, picture.bottom + 14, _origin(shown), "s", "end")
    picture.bottom += 20
    return picture.render()


def _figures(also: str) -> dict[str, float]:
    """Returns the numbers of the column `also` by their names."""
    return {name: float(figure) for name, figure in re.findall(r"(\w+) ([\d.]+)(?:,|$)", also)}


def _origin(rows: Sequence[Row]) -> str:
    """Returns machines, commits and dates of rows, in words."""
    words = [", ".join(sorted({row[key] for row in rows})) for key in ("machine", "commit", "date")]
    return f"machine {words[0]}, commit {words[1]}, {words[2]}"


def _bar(label: str, row: Row) -> Bar:
    target = re.fullmatch(r"[<>]= ([\d.]+)", row["target"])
    mark = float(target[1]) if target else None
    pair = f"{_short(row['value'])} / {_short(row['reference'])} {row['unit'].split()[0]}"
    return Bar(label, float(row["ratio"]), mark, pair)


def _short(figure: str) -> str:
    value = float(figure)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ttft(rows: list[tuple[int, float, float]], title: str = "") -> Picture:
    """Draws both times by prompt length."""
    picture = Picture(title)
    tokens = [row[0] for row in rows]
    computed, loaded = [row[2] for row in rows], [row[1] for row in rows]
    lines = [Line("recompute", computed, "second"), Line("kvstore hit", loaded, "first")]
    top, height = (54.0, 190.0) if title else (22.0, 190.0)
    # No line of the grid crosses the label above the highest point.
    ticks, end = list(range(int(max(computed)) + 1)), max(computed) * 1.15
    picture.text(16, top - 8, "seconds", "s")
    picture.chart((44, top, WIDTH - 84, height), tokens, lines, ticks, [f"{n:,}" for n in tokens], end)
    down = height / end
    for words, seconds in (("recompute", computed[-1]), ("kvstore hit", loaded[-1])):
        y = top + height - seconds * down - 10
        picture.text(WIDTH - 48, y, f"{words}: {seconds:.2g} s", "b", "end")
    picture.text(44 + (WIDTH - 84) / 2, top + height + 38, "prompt length in tokens", "s", "middle")
    picture.bottom = top + height + 42
    return picture


def _hits(text: str) -> str:
    """Draws the hit ratios of policies by capacity, one chart for each trace."""
    picture = Picture("Token hit ratio by cache size and policy, in %")
    width = (WIDTH - 112) / 2
    for i, (trace, (capacities, by_policy)) in enumerate(hit_ratios(text).items()):
        lines = [
            Line(name.strip("`"), by_policy[name], colour, name.startswith("Belady"))
            for name, colour in _POLICIES.items()
        ]
        left = 44 + i * (width + 56)
        most = max(max(line.ys) for line in lines)
        step = 10 if most < 60 else 20
        ticks = [step * n for n in range(int(most // step) + 2)]
        places = [float(n) for n in range(len(capacities))]
        picture.text(left, 76, f"{trace} trace", "b")
        picture.chart((left, 88, width, 200), places, lines, ticks, capacities)
        picture.text(left + width / 2, 326, "cache size in % of the unique blocks", "s", "middle")
        if not i:
            picture.legend(44, 52, lines, 130)
    picture.bottom = 332
    return picture.render()
