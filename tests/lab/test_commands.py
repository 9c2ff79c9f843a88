"""`kvstore lab`: output, files and refused options."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvstore.cli import app
from kvstore.errors import KVStoreError, MisuseError
from kvstore.lab import plots, sizing
from kvstore.lab.capacity import Capacity, parse_capacities
from kvstore.lab.compare import compare
from kvstore.lab.experiment import Experiment, Options
from kvstore.lab.report import Report, load
from kvstore.lab.sizing import limit_for
from kvstore.types import Tier
from tests.lab.small import call, chats, conversation, write

BLOCK = 64 << 10
MIB = 1 << 20


def run(*args: object, code: int = 0) -> Result:
    ran = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["lab", *map(str, args)])
    assert ran.exit_code == code, ran.output
    return ran


def refused(*args: object) -> str:
    return run(*args, code=2).stderr


def json_of(*args: object) -> dict[str, Any]:
    values = json.loads(run(*args, "--block-bytes", "64KiB", "--processes", 1, "--json").stdout)
    assert isinstance(values, dict)
    return values


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return chats(tmp_path / "trace.jsonl", 150)


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    rows = [conversation(*(call(i, range(4 * i + 4)) for i in range(5)), tools=512) for _ in range(6)]
    return write(tmp_path / "talks.jsonl", rows)


def test_replay_of_a_hybrid_model(trace: Path) -> None:
    plain = json_of("replay", trace, "--capacities", "20%")
    hybrid = json_of("replay", trace, "--capacities", "20%", "--model", "3xstate")
    assert (plain["settings"]["model"], hybrid["settings"]["model"]) == ("", "3xstate")
    assert hybrid["points"][0]["hit_ratio"] < plain["points"][0]["hit_ratio"]
    assert hybrid["trace"]["best_hit_ratio"] <= plain["trace"]["best_hit_ratio"]
    assert hybrid["points"][0]["hit_ratio"] <= hybrid["bounds"][0]["hit_ratio"]


def test_replay(trace: Path) -> None:
    args = ("replay", trace, "--capacities", "5%,20%,5%+20%")
    report = json_of(*args)
    again = json_of(*args)
    for each in (report, again):
        for point in each["points"]:
            assert point.pop("wall_s") > 0
            assert point.pop("accesses_per_s") > 0
    assert report == again, "the same again"
    small, large, two = report["points"]
    assert report["trace"]["requests"] == 150
    assert small["blocks_by_tier"] == {"dram": report["trace"]["unique_blocks"] * 5 // 100}
    assert small["hit_ratio"] < large["hit_ratio"] < report["trace"]["best_hit_ratio"]
    assert small["hit_ratio"] < small["block_hit_ratio"], "tokens of partial blocks are asked for too"
    assert two["share_by_tier"]["dram"] + two["share_by_tier"]["nvme"] == pytest.approx(1)
    written, nvme_bytes = two["written_bytes_by_tier"]["nvme"], two["bytes_by_tier"]["nvme"]
    served = sum(two["hits_by_tier"].values()) * BLOCK
    assert two["written_per_served"] == {"nvme": pytest.approx(written / served)}
    days = report["trace"]["duration_s"] / 86400
    assert two["drive_writes_per_day"] == pytest.approx(written / nvme_bytes / days)
    assert small["drive_writes_per_day"] is None
    table = run(*args[:3], "5%,5%+20%", "--processes", 1).stdout
    assert "5%+20%" in table
    assert f"{100 * report['bounds'][0]['hit_ratio']:.2f} %" in table


def test_policies_by_capacities(trace: Path) -> None:
    points = json_of("replay", trace, "--policies", "lru", "--capacities", "5%, 10%,5%")["points"]
    assert [(p["policy"], p["capacity"]) for p in points] == [("lru", "5%"), ("lru", "10%")]


def test_conversations(talks: Path) -> None:
    args = ("replay", talks, "--capacities", "50%")
    settings = json_of(*args)["settings"]
    assert (settings["users"], settings["gap_cap_s"], settings["shared"]) == (64, 300.0, 0.5)
    assert (settings["block_tokens"], settings["seed"]) == (256, 1)
    own = json_of(*args, "--users", 2, "--gap-cap", "1m", "--shared", 0, "--seed", 4, "--block-tokens", 64)
    assert own["settings"] == {
        **settings, "users": 2, "gap_cap_s": 60.0, "shared": 0.0, "seed": 4, "block_tokens": 64
    }  # fmt: skip
    assert own["trace"]["unique_blocks"] == 6 * 20


FLEET = ("--nodes", "1,3", "--per-node", "50%", "--capacity", "40%")


def test_fleet(trace: Path) -> None:
    report = json_of("fleet", trace, *FLEET, "--nvme-rate", "300MB", "--seed", 7)
    settings, points = report["settings"], report["points"]
    assert (settings["copies_per_node"], settings["seed"], settings["nvme_bytes_per_s"]) == (0.5, 7, 3e8)
    assert [p["nodes"] for p in points] == [1] * 6 + [3] * 6
    for point in points:
        assert sum(point["hits_by_tier"].values()) + point["computed_blocks"] == point["accesses"]
        assert 0 < point["ttft_p50_s"] <= point["ttft_p99_s"]
        assert (point["network_bytes_per_request"] > 0) is (point["network"] == "unlimited")
    table = run("fleet", trace, *FLEET, "--processes", 1, "--block-bytes", "64KiB").stdout
    assert "every node has 50 % of this load" in table
    for name in ("random", "sticky", "events", "unlimited", "TTFT p50", "per request"):
        assert name in table


def test_fleet_of_conversations_with_decode_nodes(talks: Path) -> None:
    args = ("--nodes", "4", "--copies", 1, "--decode", "50%", "--network", "unlimited", "--routing", "events")
    report = json_of("fleet", talks, *args, "--users", 2, "--capacity", "100%", "--seed", 3)
    [point] = report["points"]
    assert (point["nodes"], point["decode_nodes"], point["copies"]) == (4, 2, 1)
    assert report["settings"]["users"] == 2
    assert report["settings"]["copies_per_node"] is None
    other = ("fleet", talks, *args, "--users", 2, "--capacity", "100%", "--seed", 4)
    assert report["trace"]["digest"] != json_of(*other)["trace"]["digest"], "the seed orders conversations"
    table = run(*other, "--processes", 1, "--block-bytes", "64KiB").stdout
    assert "every fleet has the same load" in table
    assert "4, 2 decode" in table


def recommended(*args: object) -> dict[str, Any]:
    """Returns the recommendation as JSON, for tokens of 128 bytes: blocks of 64 KiB."""
    run_args = ("--token-bytes", "128", "--prefill", 100, "--processes", 1, "--json")
    values = json.loads(run("recommend", *args, *run_args).stdout)
    assert isinstance(values, dict)
    return values


def test_recommend_dram_for_a_hit_ratio(trace: Path) -> None:
    found = recommended(trace, "--hit", "30%", "--nvme", "none")["sizing"]
    answer, points = found["answer"], found["report"]["points"]
    assert answer["hit_ratio"] >= 0.3
    tried = {p["blocks_by_tier"]["dram"]: p["hit_ratio"] for p in points if p["policy"] == "hazard"}
    just_below = max(n for n, ratio in tried.items() if ratio < 0.3)
    n = answer["blocks_by_tier"]["dram"]
    assert just_below < n <= max(1.02 * just_below, just_below + 1)
    assert Capacity(Tier.DRAM, limit_bytes=found["limits_bytes"]["dram"]).blocks(BLOCK) >= n
    assert found["searched"].startswith("DRAM from")
    others = {p["policy"] for p in points if p["capacity"] == answer["capacity"]}
    assert others == {"hazard", "lru", "s3fifo"}, "compared where the search ended"


def test_recommend_without_a_target_serves_most_of_what_can_be_served(trace: Path) -> None:
    page = recommended(trace)
    found, report = page["sizing"], page["sizing"]["report"]
    answer, info = found["answer"], report["trace"]
    assert answer["hit_ratio"] >= 0.9 * info["best_hit_ratio"]
    alone = min(
        p["blocks_by_tier"]["dram"]
        for p in report["points"]
        if len(p["blocks_by_tier"]) == 1 and p["hit_ratio"] >= 0.9 * info["best_hit_ratio"]
    )
    assert answer["blocks_by_tier"]["dram"] <= alone
    hours, saved_s = info["duration_s"] / 3600, answer["hit_ratio"] * info["input_tokens"] / 100
    assert page["gpu_s_per_hour"] == pytest.approx(saved_s / hours)
    assert page["token_bytes"] == 128


def test_recommend_less_dram_beside_nvme_that_keeps_up(trace: Path) -> None:
    budget = ("--hit", "60%", "--write-budget", "0", "--admission", "always")
    page = recommended(trace, *budget)
    answer = page["sizing"]["answer"]
    assert set(page["sizing"]["limits_bytes"]) == {"dram", "nvme"}
    assert answer["hit_ratio"] >= 0.6
    assert answer["blocks_by_tier"]["nvme"] > answer["blocks_by_tier"]["dram"]
    seconds = page["sizing"]["report"]["trace"]["duration_s"]
    loads = answer["hits_by_tier"]["nvme"] * BLOCK / seconds
    assert page["nvme_loads_bytes_per_s"] == pytest.approx(loads)
    written = answer["written_bytes_by_tier"]["nvme"]
    assert page["nvme_writes_bytes_per_day"] == pytest.approx(written * 86400 / seconds)
    slow = recommended(trace, *budget, "--nvme-rate", round(loads) // 2, "--prefill", 1)
    assert set(slow["sizing"]["limits_bytes"]) == {"dram"}, "the drive would not keep up"
    slower = recommended(trace, *budget, "--nvme-rate", 12_000)
    assert {len(p["blocks_by_tier"]) for p in slower["sizing"]["report"]["points"]} == {1}, (
        "computing is faster"
    )


def test_recommend_the_policy_that_is_clearly_better(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer() -> dict[str, Any]:
        found = recommended(trace, "--nvme", "none", "--policies", "sieve,lru")["sizing"]
        assert isinstance(found, dict)
        return found

    def hits(found: dict[str, Any], policy: str) -> float:
        points = found["report"]["points"]
        at = found["answer"]["capacity"]
        return max(p["hit_ratio"] for p in points if (p["policy"], p["capacity"]) == (policy, at))

    monkeypatch.setattr(sizing, "_BETTER", -1.0)
    assert answer()["answer"]["policy"] == "lru"
    monkeypatch.setattr(sizing, "_BETTER", 1.0)
    found = answer()
    assert found["answer"]["policy"] == "sieve"
    assert found["answer"]["hit_ratio"] == hits(found, "sieve")


def test_the_page_of_a_recommendation(trace: Path) -> None:
    args = (trace, "--hit", "60%", "--write-budget", "0", "--token-bytes", 128, "--prefill", 100)
    page = run("recommend", *args, "--processes", 1).stdout
    for words in (
        "dram.limit",
        "nvme.limit",
        "policy.eviction",
        "nvme.admission     reuse",
        "GPU seconds an hour",
        "written to NVMe",
        "of the limit a day",
        "128B of KV per token, 100 tokens/s of prefill",
        "then less beside NVMe",
        "drives/day",
    ):
        assert words in page, words
    slow = run("recommend", *args, "--processes", 1, "--nvme", "20%", "--nvme-rate", 12_000).stdout
    assert "NVMe loads 94 tokens/s, which is slower than prefill" in slow


def test_recommend_beside_nvme(trace: Path) -> None:
    found = recommended(trace, "--hit", "30%", "--nvme", "20%", "--policies", "hazard")["sizing"]
    assert set(found["limits_bytes"]) == {"dram", "nvme"}
    sizes = {p["blocks_by_tier"]["nvme"] for p in found["report"]["points"]}
    assert sizes == {found["report"]["trace"]["unique_blocks"] // 5}


def test_recommend_for_an_unreachable_hit_ratio_fails(trace: Path) -> None:
    best = json_of("replay", trace, "--capacities", "5%")["trace"]["best_hit_ratio"]
    says = refused("recommend", trace, "--hit", "99%")
    assert "99.0 % of the tokens cannot be served" in says
    assert f"{100 * best:.1f} %" in says


def test_recommend_for_a_budget(trace: Path) -> None:
    args = (trace, "--budget", 0.015, "--dram-cost", 4, "--nvme-cost", 0.5, "--write-budget", 0)
    found = recommended(*args, "--admission", "always", "--policies", "hazard")["sizing"]
    assert 0 < found["cost"] <= 0.015
    answer, points = found["answer"], found["report"]["points"]
    assert answer["hit_ratio"] == max(p["hit_ratio"] for p in points)
    assert answer["hit_ratio"] > max(p["hit_ratio"] for p in points if len(p["blocks_by_tier"]) == 1)
    assert set(found["limits_bytes"]) == {"dram", "nvme"}
    assert "splits of 0.015 between DRAM at 4 and NVMe at 0.5" in found["searched"]
    says = refused("recommend", trace, "--budget", 0.00001, *args[3:], "--token-bytes", 128)
    assert "does not buy DRAM for the longest prompt" in says


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.NVME])
@pytest.mark.parametrize("block_bytes", [4096, BLOCK, 3 * MIB])
def test_limit_for_holds_the_blocks_exactly(tier: Tier, block_bytes: int) -> None:
    for blocks in (1, 20, 1000):
        limit = limit_for(blocks, tier, block_bytes)
        assert Capacity(tier, limit_bytes=limit).blocks(block_bytes) >= blocks
        assert limit <= 2 * blocks * block_bytes + 128 * MIB


def test_compare(trace: Path, talks: Path, tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    a.write_text(json.dumps(json_of("replay", trace, "--capacities", "5%,10%")))
    b.write_text(json.dumps(json_of("replay", trace, "--capacities", "10%,20%")))
    c.write_text(json.dumps(json_of("replay", talks, "--capacities", "5%")))
    assert asdict(load(a)) == json.loads(a.read_text()), "what is written is read"
    both = json.loads(run("compare", a, b, "--json").stdout)
    assert both["differing"] == {}
    assert [(p["capacity"], p["points"]) for p in both["pairs"]] == [
        ("10%", 0.0),
        ("5%", None),
        ("20%", None),
    ]
    other = run("compare", a, c).stdout
    assert "trace.name differs: trace.jsonl, talks.jsonl" in other
    assert "settings.users differs: None, 64" in other


def test_compare_counts_points(trace: Path) -> None:
    report = Experiment(trace, Options(block_bytes=BLOCK)).report(["lru"], ["5%"])
    better = [replace(p, hit_ratio=p.hit_ratio + 0.025) for p in report.points]
    [pair] = compare(report, replace(report, points=better)).pairs
    assert pair.points == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not a report"),
        ('{"version": 1}', "is not a report: trace: Field required"),
        ("[]", "is not a report"),
    ],
)
def test_files_that_are_not_reports(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert says in refused("compare", path, path)
    assert "check the path" in refused("compare", tmp_path / "none", path)


def test_a_report_of_another_version(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**json_of("replay", trace, "--capacities", "5%"), "version": 2}))
    with pytest.raises(KVStoreError, match="is a report of version 2, this is 1"):
        load(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("10000", "10000 may mean blocks or bytes"),
        ("0%", "0% is out of range"),
        ("100.1%", "100.1% is out of range"),
        ("0.001%", "less than one block"),
        ("-5%", "'-5%' is not a capacity"),
        ("five", "'five' is not a capacity"),
        ("5%+", "'' is not a capacity"),
        ("5%+5%+5%", "names 3 tiers"),
        ("1KiB", "1KiB holds no block of 64KiB in DRAM"),
        ("0MiB", "0MiB holds no block of 64KiB in DRAM"),
        ("5%+1KiB", "1KiB holds no block of 64KiB in NVME"),
    ],
)
def test_invalid_capacities_are_refused(text: str, says: str) -> None:
    with pytest.raises(MisuseError) as caught:
        parse_capacities(text, 1000, BLOCK)
    assert says in caught.value.message
    assert caught.value.hint


def test_capacities() -> None:
    def blocks(text: str) -> list[int]:
        return [tier.blocks(BLOCK) for tier in parse_capacities(text, 1000, BLOCK)]

    assert blocks("5%") == [50]
    assert blocks("0.25 %+100%") == [2, 1000]
    # 128 MiB are eight extents, and each has a label and a table of headers before its slots.
    assert blocks("128MiB+128MiB") == [8 * 255, 8 * 256]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["replay", "--model", "llama"], "no hybrid model 'llama' (one of gpt-oss, gemma-3, qwen3-next"),
        (["replay", "--policies", "lru,nru"], "no eviction policy 'nru' (one of lru"),
        (["replay", "--capacities", "5%,,6%"], "--capacities: '5%,,6%' has an empty item"),
        (["replay", "--capacities", "5000"], "5000 may mean blocks or bytes"),
        (["replay", "--block-bytes", "big"], "--block-bytes: 'big' is not a size"),
        (["replay", "--block-bytes", "0"], "block_bytes is 0"),
        (["replay", "--block-tokens", "300"], "blocks of 300 tokens cannot be made of the trace's 512"),
        (
            ["replay", "--write-policy", "never"],
            "unknown write_policy 'never' (one of write_through, on_evict)",
        ),
        (["replay", "--users", "4"], "--users, --gap-cap, --shared and --seed are for conversations"),
        (["replay", "--gap-cap", "soon"], "--gap-cap: 'soon' is not a duration"),
        (["replay", "--plot", "a.pdf"], "a name that ends in .png or .svg"),
        (["fleet", "--nodes", "1,many"], "--nodes: 'many' is not a number of nodes"),
        (["fleet", "--nodes", "1,,2"], "--nodes: '1,,2' has an empty item"),
        (["fleet", "--nodes", "0"], "a fleet has 0 nodes"),
        (["fleet", "--routing", "best"], "no routing 'best' (one of random, sticky, shortest-queue, events)"),
        (["fleet", "--network", "20"], "20 may mean blocks or bytes"),
        (["fleet", "--per-node", "2"], "--per-node: '2' is not a percentage"),
        (["fleet", "--per-node", "2%", "--copies", "1"], "--per-node and --copies exclude each other"),
        (["fleet", "--copies", "0"], "0 copies of the trace"),
        (["fleet", "--common", "0%"], "--common: '0%' is not a percentage"),
        (["fleet", "--decode", "50%"], "one node cannot both prefill and decode apart"),
        (["fleet", "--decode", "50%", "--nodes", "2"], "decode nodes get their blocks over the network"),
        (["fleet", "--prefill", "0"], "prefill_tokens_per_s is 0"),
        (["fleet", "--prefill", "100000"], "a block is loaded from NVMe in"),
        (["fleet", "--network-rate", "fast"], "--network-rate: 'fast' is not a size"),
        (["fleet", "--latency", "soon"], "--latency: 'soon' is not a duration"),
        (["fleet", "--network-admission", "never"], "unknown network admission 'never'"),
        (["fleet", "--users", "4"], "--users, --gap-cap, --shared and --seed are for conversations"),
        (["fleet", "--plot", "a.pdf"], "a name that ends in .png or .svg"),
        (["recommend", "--hit", "30%", "--budget", "5"], "--hit and --budget exclude each other"),
        (["recommend", "--hit", "30"], "--hit: '30' is not a percentage"),
        (["recommend", "--hit", "101%"], "--hit: '101%' is not a percentage"),
        (["recommend", "--dram-cost", "3"], "--dram-cost and --nvme-cost belong to --budget"),
        (["recommend", "--nvme", "12"], "--nvme: 12 may mean blocks or bytes"),
        (["recommend", "--budget", "5", "--nvme", "5%"], "--nvme and --budget exclude each other"),
        (["recommend", "--budget", "5", "--dram-cost", "3"], "--budget needs prices"),
        (["recommend", "--budget", "5", "--dram-cost", "0", "--nvme-cost", "1"], "a GiB of dram costs 0"),
        (["recommend", "--policies", "hazard,nru"], "no eviction policy 'nru' (one of lru"),
        (["recommend", "--token-bytes", "0"], "--token-bytes is 0"),
        (["recommend", "--token-bytes", "1MiB"], "block_bytes is 536870912"),
        (["recommend", "--prefill", "0"], "prefill_tokens_per_s is 0"),
        (["recommend", "--nvme-rate", "fast"], "--nvme-rate: 'fast' is not a size"),
    ],
)
def test_invalid_options_are_refused(trace: Path, args: list[str], says: str) -> None:
    assert says in refused(args[0], trace, *args[1:])


def test_bad_lines_are_counted(trace: Path, tmp_path: Path) -> None:
    text = trace.read_text()
    trace.write_text(text + "nonsense\n" + text)
    assert "line 151 is not JSON" in refused("replay", trace)
    report = json_of("replay", trace, "--skip-bad", "--capacities", "5%")
    assert report["trace"]["skipped_lines"] == 1 + 149, "what was before the last good line goes back in time"
    assert "150 bad lines skipped" in run("replay", trace, "--skip-bad", "--capacities", "5%").stdout
    empty = write(tmp_path / "empty", [])
    assert "holds no requests" in refused("replay", empty)
    assert "holds no requests" in refused("replay", write(empty, [conversation()]))


def test_plots(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are the extra `lab`")
    png, svg = tmp_path / "a.png", tmp_path / "a.svg"
    json_of("replay", trace, "--capacities", "5%,5%+20%", "--plot", png)
    assert png.read_bytes().startswith(b"\x89PNG")
    recommended(trace, "--hit", "30%", "--nvme", "20%", "--plot", svg)
    text = (tmp_path / "a.svg").read_text()
    for title in ("Tokens served", "Hits by tier", "Bytes written", "Drive writes per day", "Belady"):
        assert f">{title}" in text, title
    json_of("fleet", trace, *FLEET, "--plot", svg)
    text = (tmp_path / "a.svg").read_text()
    for title in (
        "Tokens served",
        "Network bytes per request",
        "99th percentile",
        "events, network unlimited",
    ):
        assert title in text, title
    json_of("fleet", trace, *FLEET, "--network", "none", "--plot", svg)
    assert "Network bytes" not in svg.read_text(), "there is no network"
    plots.draw(_report(trace), tmp_path / "one.svg")
    assert "Drive writes" not in (tmp_path / "one.svg").read_text(), "one tier has no drives"
    with pytest.raises(KVStoreError, match="cannot write"):
        plots.draw(_report(trace), tmp_path / "none" / "a.png")


def _report(trace: Path) -> Report:
    return Experiment(trace, Options(block_bytes=BLOCK)).report(["lru"], ["5%"])


def test_plots_without_matplotlib(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    says = refused("replay", trace, "--plot", tmp_path / "a.png")
    assert "plots need matplotlib (pip install 'kvstore[lab]')" in says
