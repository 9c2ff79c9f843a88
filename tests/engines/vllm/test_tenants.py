"""Tenants by request: whose blocks are found and stored, what else a request says, and what goes wrong."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client, Layout
from kvstore.daemon.tenancy.auth import hash_of, new_token
from kvstore.errors import UnavailableError
from kvstore.types import chain_keys
from kvstore_vllm.daemons import Daemons
from kvstore_vllm.options import OWN, Scope
from kvstore_vllm.tenants import RefusedError, Tenants
from tests.daemons import eventually, tier
from tests.engines.vllm.engine import Engine, cached, connector, full_blocks, prompt, said
from tests.engines.vllm.shapes import SHAPES
from tests.engines.vllm.test_page import (
    PAGE,
    SERVERS,
    cached_tokens,
    complete,
    flag_of_the_page,
    server,
    shell,
)
from tests.programs import need
from tests.tenants import TenantDaemon

DRAM_ONLY = {"dram": {"limit": "96MiB", "huge_pages": False}, "scrub": {"rate": 0}}
TOKENS = {name: new_token(bytes([i]) * 32) for i, name in enumerate(("red", "blue", "small"))}
WRONG = new_token(b"x" * 32)
MIB = 1 << 20
LIMIT_MIB = 16


def tenants(names: Any = tuple(TOKENS)) -> str:
    """The part of the configuration about tenants."""
    tokens = [f'[[tenants.{name}.tokens]]\nhash = "sha256:{hash_of(TOKENS[name]).hex()}"' for name in names]
    return "\n".join([*tokens, "[tenants.small.dram]", f'limit = "{LIMIT_MIB}MiB"', ""])


def of(name: str, **more: Any) -> dict[str, Any]:
    """The `kv_transfer_params` of a tenant's request."""
    return {"kvstore": {"token": TOKENS[name], **more}}


def says(**options: Any) -> dict[str, Any]:
    return {"kvstore": options}


@pytest.fixture(scope="module")
def own() -> Iterator[TenantDaemon]:
    with TenantDaemon(DRAM_ONLY, tenants()) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def operator(own: TenantDaemon) -> Iterator[Client]:
    with Client(own.url, deadline_s=10.0) as client:
        yield client


@pytest.fixture(scope="module")
def served(model: Path, own: TenantDaemon) -> Iterator[Engine]:
    with Engine(model, **connector(own)) as engine:
        yield engine


def counted(engine: Engine, name: str) -> int:
    return int(engine("counts").get(name, 0))


def used(operator: Client, name: str) -> int:
    """The bytes of a tenant in DRAM."""
    [tenant] = [each for each in operator.status()["tenants"] if each["name"] == name]
    return int(tier(tenant, "dram")["used_bytes"])


def blocks(engine: Engine, operator: Client, asked: list[int], tenant: str) -> list[Any]:
    """What the daemon knows of a prompt's stored blocks of a tenant, in all its namespaces."""
    keys = [bytes.fromhex(key) for key in engine("keys", prompt=asked)]
    return [each for each in operator.explain(keys, tenant=tenant) if each.get("copies")]


# -- whose blocks


def test_a_tenant_finds_its_own_blocks_and_no_others(plain: Engine, served: Engine, operator: Client) -> None:
    asked = [prompt(1000, 300), prompt(1001, 130)]
    expected, hit = said(plain.fresh(asked, max_tokens=40)), [full_blocks(300), full_blocks(130)]
    scopes = [of("red"), of("blue"), None]
    for params in scopes:
        answers = served.fresh(asked, max_tokens=40, params=[params] * 2)
        assert (said(answers), cached(answers)) == (expected, [0, 0])
    for params in scopes:
        answers = served.fresh(asked, max_tokens=40, params=[params] * 2)
        assert (said(answers), cached(answers)) == (expected, hit)
    for tenant in ("red", "blue", "default"):
        assert len(blocks(served, operator, asked[0], tenant)) == 9
    assert blocks(served, operator, asked[0], "small") == []
    assert served("failures") == {}


def test_tenants_of_one_batch_are_kept_apart(plain: Engine, served: Engine) -> None:
    """The same prompt at the same time: vLLM computes it once, and each tenant stores it for itself."""
    asked = prompt(1010, 300)
    [expected] = said(plain.fresh([asked]))
    served.fresh([asked], params=[of("red")])
    answers = served.fresh([asked] * 3, params=[of("blue"), None, of("red")])
    assert said(answers) == [expected] * 3
    for params in (of("blue"), None, of("red")):
        answers = served.fresh([asked], params=[params])
        assert (said(answers), cached(answers)) == ([expected], [full_blocks(300)])


def test_blocks_of_the_engines_own_cache_are_stored_for_who_asks(served: Engine) -> None:
    asked = [prompt(1020, 300)]
    served.fresh(asked, params=[of("red")])
    assert cached(served.generate(asked, params=[of("blue")])) == [full_blocks(300)]
    assert cached(served.fresh(asked, params=[of("blue")])) == [full_blocks(300)]


def test_a_quota_holds_while_other_tenants_store(served: Engine, operator: Client) -> None:
    asked = [prompt(1030 + i, 600) for i in range(12)]  # 27 MiB for each tenant
    served.fresh(asked, params=[of("red")] * 6 + [of("small")] * 6)
    served.fresh(asked, params=[of("small")] * 12)
    assert 0 < used(operator, "small") <= LIMIT_MIB * MIB
    # Who evicts is the tenant at its limit.
    found = cached(served.fresh(asked[:6], params=[of("red")] * 6))
    assert found == [full_blocks(600)] * 6
    assert used(operator, "small") <= LIMIT_MIB * MIB


def test_a_reset_makes_blocks_of_all_tenants_misses(served: Engine) -> None:
    asked = [prompt(1050, 300)]
    for _ in range(2):
        for params in (of("red"), says(ttl_s=600)):
            served.fresh(asked, params=[params])
            assert cached(served.fresh(asked, params=[params])) == [full_blocks(300)]
        eventually(lambda: served("reset", connector=True))
        for params in (of("red"), says(ttl_s=600)):
            assert cached(served.fresh(asked, params=[params])) == [0]


def test_a_wrong_token_is_served_without_the_store(plain: Engine, served: Engine, operator: Client) -> None:
    asked = [prompt(1060, 300)]
    expected = said(plain.fresh(asked, max_tokens=40))
    served.fresh(asked, max_tokens=40)
    before = {name: used(operator, name) for name in ("default", *TOKENS)}
    refused, failures = counted(served, "refused tokens"), served("failures")
    new = [prompt(1061, 300)]
    for _ in range(2):
        for some in (asked, new):
            answers = served.fresh(some, max_tokens=40, params=[says(token=WRONG, pin_s=60)])
            assert cached(answers) == [0]
            if some is asked:
                assert said(answers) == expected
    assert counted(served, "refused tokens") == refused + 4
    assert {name: used(operator, name) for name in ("default", *TOKENS)} == before
    assert served("failures") == failures
    assert cached(served.fresh(asked, params=[None])) == [full_blocks(300)]


# -- what else a request says


def test_a_request_that_stores_nothing_loads(served: Engine, operator: Client) -> None:
    asked = [prompt(1100, 300)]
    served.fresh(asked, params=[of("red", store=False)])
    assert blocks(served, operator, asked[0], "red") == []
    served.fresh(asked, params=[of("red")])
    longer = [asked[0] + prompt(1101, 200)]
    assert cached(served.fresh(longer, params=[of("red", store=False)])) == [full_blocks(300)]
    assert len(blocks(served, operator, longer[0], "red")) == 9


def test_blocks_with_a_lifetime_expire(served: Engine, operator: Client) -> None:
    asked = [prompt(1110, 300)]
    hit = [full_blocks(300)]
    served.fresh(asked, params=[of("red", ttl_s=90)])
    stored = blocks(served, operator, asked[0], "red")
    assert len(stored) == 9
    assert all(50 < block["expires_s"] <= 60 for block in stored)
    assert cached(served.fresh(asked, params=[of("red", ttl_s=60)])) == hit
    # Each lifetime has blocks of its own; so have those without.
    served.fresh(asked, params=[of("red", ttl_s=2)])
    ends = time.monotonic() + 2
    assert cached(served.fresh(asked, params=[of("red")])) == [0]
    assert any(block["expires_s"] is None for block in blocks(served, operator, asked[0], "red"))
    time.sleep(max(0.0, ends + 0.5 - time.monotonic()))
    assert cached(served.fresh(asked, params=[of("red", ttl_s=2, store=False)])) == [0]
    assert cached(served.fresh(asked, params=[of("red", ttl_s=60)])) == hit


def test_pins_and_hints_reach_the_daemon(served: Engine, operator: Client) -> None:
    asked = prompt(1120, 300)
    pinned = counted(served, "pinned")
    [answer] = served.fresh([asked], max_tokens=40, params=[of("red", pin_s=500, next_use_s=5)])
    # 339 tokens have KV: ten blocks.
    stored = blocks(served, operator, asked + answer["tokens"], "red")
    assert len(stored) == 10
    assert all(450 < block["pinned_s"] <= 500 for block in stored)
    assert {block["class"] for block in stored} == {"told: used again within 10 s"}
    assert counted(served, "pinned") == pinned + 10
    # Of blocks that were found, too, and without storing any.
    served.fresh([asked], max_tokens=40, params=[of("red", pin_s=5000, store=False, closed=True)])
    stored = blocks(served, operator, asked + answer["tokens"], "red")
    assert [block["pinned_s"] > 4000 for block in stored] == [True] * 9 + [False]
    assert served("failures") == {}


def test_blocks_of_high_priority_stay_where_others_go(served: Engine, operator: Client) -> None:
    """The same number of prompts, stored and used alike."""
    operator.delete_tenant("small")
    sizes = {1: [], -1: []}
    for i in range(8):
        priority = (1, -1)[i % 2]
        asked = prompt(1130 + i, 400)
        served.fresh([asked], params=[of("small", priority=priority)])
        sizes[priority].append(asked)
    # 8 prompts of 12 blocks of 128 KiB are 12 MiB of 16.
    for i in range(3):
        served.fresh([prompt(1140 + i, 400)], params=[of("small")])
    left = {
        priority: sum(len(blocks(served, operator, asked, "small")) for asked in prompts)
        for priority, prompts in sizes.items()
    }
    assert left[1] == 4 * 12
    assert left[-1] < 4 * 12


def test_hints_of_an_orchestrator_reach_the_daemon(served: Engine, operator: Client) -> None:
    asked = prompt(1150, 300)
    retain = {"priority": 7, "ttl_seconds": 300.0, "execute_at": "request_completion", "block_hashes": []}
    served("hinted", prompt=asked, actions=[["kv.retain", "1.0", retain]])
    assert all(block["pinned_s"] > 200 for block in blocks(served, operator, asked, "default"))

    system = {"directives": [{"start": 0, "end": 128, "priority": 90, "duration": 3000.0}]}
    served("hinted", prompt=asked, actions=[["kv.retain", "1.0", system]])
    stored = blocks(served, operator, asked, "default")
    assert [block["pinned_s"] > 2000 for block in stored] == [True] * 4 + [False] * 5

    served("hinted", prompt=asked, actions=[["kv.evict", "1.0", {"include_current_request": True}]])
    stored = blocks(served, operator, asked, "default")
    assert [block["pinned_s"] for block in stored] == [None] * 9
    assert {block["class"] for block in stored} == {"told: not used again"}

    ignored = counted(served, "ignored hints")
    served("hinted", prompt=asked, actions=[["kv.fetch", "1.0", {}], ["kv.retain", "2.0", retain]])
    assert counted(served, "ignored hints") == ignored + 2
    assert blocks(served, operator, asked, "default")[0]["pinned_s"] is None
    assert served("failures") == {}


BAD: list[Any] = [
    {"kvstore": None},
    {"kvstore": "red"},
    says(tokens="kvs_a"),
    says(token=""),
    says(token=None),
    says(token=5),
    says(token="x" * 5000),
    says(store="no"),
    says(ttl_s=0),
    says(ttl_s="60"),
    says(pin_s=-1),
    says(priority=7),
    says(priority="high"),
    says(closed=1),
    says(next_use_s=[]),
    of("red", unknown={}),
]


def test_bad_options_fail_no_request(plain: Engine, served: Engine, operator: Client) -> None:
    asked = [prompt(1160, 300)]
    expected = said(plain.fresh(asked * len(BAD)))
    served.fresh(asked)
    served.fresh(asked, params=[of("red")])
    before = {name: used(operator, name) for name in ("default", "red")}
    bad = counted(served, "bad options")
    answers = served.fresh(asked * len(BAD), params=BAD)
    assert said(answers) == expected
    # The first one is computed: its blocks are vLLM's own hits of the others.
    assert cached(answers)[0] == 0
    for params in BAD:
        assert cached(served.fresh(asked, params=[params])) == [0]
    assert counted(served, "bad options") == bad + 2 * len(BAD)
    assert {name: used(operator, name) for name in ("default", "red")} == before
    # Options of other connectors are none of ours.
    others = {"do_remote_decode": False, "remote_host": "there", "kv_hint": {"actions": []}}
    assert cached(served.fresh(asked, params=[others])) == [full_blocks(300)]
    assert served("failures") == {}


# -- other engines


def test_a_model_with_windows(tmp_path: Path, own: TenantDaemon, operator: Client) -> None:
    folder = SHAPES["interleaved windows"].save(tmp_path)
    asked = [prompt(1200, 500)]
    with Engine(folder, **connector(own)) as engine:
        expected = said(engine.fresh(asked, params=[says(store=False)]))
        for params in (None, of("red"), of("blue"), of("blue", ttl_s=600), says(ttl_s=600)):
            answers = engine.fresh(asked, params=[params])
            assert (said(answers), cached(answers)) == (expected, [0]), params
            answers = engine.fresh(asked, params=[params])
            assert (said(answers), cached(answers)) == (expected, [full_blocks(500)]), params
        [answer] = engine.fresh(asked, max_tokens=100, params=[of("red", pin_s=500)])
        whole = asked[0] + answer["tokens"]
        stored = blocks(engine, operator, whole, "red")
        # All 18 blocks of full attention; two before the end of the prompt and two before that of the answer.
        assert len(stored) == 18 + 4
        assert all(block["pinned_s"] > 400 for block in stored)
        assert cached(engine.fresh(asked, params=[says(token=WRONG)])) == [0]
        assert engine("failures") == {}


def test_a_daemon_that_is_away_and_tenants_that_change(plain: Engine, model: Path) -> None:
    asked = [prompt(1210, 300)]
    expected, hit = said(plain.fresh(asked)), [full_blocks(300)]
    with (
        TenantDaemon(DRAM_ONLY, tenants()) as daemon,
        Engine(model, **connector(daemon, deadline_s=1.0)) as engine,
    ):
        for _ in range(2):
            answers = engine.fresh(asked, params=[of("red")])
        assert cached(answers) == hit
        # The token is taken away, given back.
        daemon.reload(tenants(("blue", "small")))
        answers = engine.fresh(asked, params=[of("red")])
        assert (said(answers), cached(answers)) == (expected, [0])
        assert counted(engine, "refused tokens") == 1
        daemon.reload(tenants())
        eventually(lambda: cached(engine.fresh(asked, params=[of("red")])) == hit, 30.0)
        daemon.kill()
        for params in (of("red"), of("blue"), None):
            answers = engine.fresh(asked, params=[params])
            assert (said(answers), cached(answers)) == (expected, [0])
        daemon.start()
        for params in (of("red"), of("blue"), None):
            eventually(lambda params=params: cached(engine.fresh(asked, params=[params])) == hit, 30.0)
        assert engine("failures") == {}


def emptied(url: str) -> bool:
    """Empties vLLM's own cache; False while blocks are being stored."""
    request = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bool(json.load(answer)["success"])


@pytest.mark.alone
def test_the_http_server_takes_options_in_the_body(
    model: Path, own: TenantDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("curl")
    monkeypatch.setitem(SERVERS, "VLLM_SERVER_DEV_MODE", "1")
    asked, hit = prompt(1220, 300), full_blocks(300)
    with server(model, flag_of_the_page(own.url)) as url:
        answers = []
        for params, found in (
            (of("red"), 0),
            (of("red"), hit),
            (of("blue"), 0),
            (of("blue", store=False), hit),
            (says(token=WRONG), 0),
            (says(pin_s="long"), 0),
            ({"kvstore": 5}, 0),
            (None, 0),
            ({"do_remote_prefill": False}, hit),
        ):
            eventually(lambda: emptied(url), 30.0)
            answer = complete(url, model, asked, **({"kv_transfer_params": params} if params else {}))
            assert cached_tokens(answer) == found, params
            assert "kvs_" not in str(answer)
            answers.append(answer["choices"][0]["token_ids"])
        assert answers == answers[:1] * len(answers)
        # The page's example.
        _, lines = re.findall(r"```\n(curl .*?)```", PAGE, re.DOTALL)
        for before, after in (
            ("localhost:8000", url.removeprefix("http://")),
            ("MODEL", str(model)),
            ('"Once upon a time"', f'{prompt(1230, 300)}, "detokenize": false'),
            ("kvs_...", TOKENS["red"]),
        ):
            assert before in lines
            lines = lines.replace(before, after)
        assert json.loads(shell(lines))["usage"]["prompt_tokens"] == 300
        eventually(lambda: emptied(url), 30.0)
        answer = complete(url, model, prompt(1230, 300), kv_transfer_params=of("red"))
        assert cached_tokens(answer) == hit


# -- the clients of tenants


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(made: Tenants, token: str) -> Client:
    layout = Layout(model="opened", block_bytes=4096)
    return made.opened(Scope(token), "", "client", lambda daemons: daemons.of(layout))


def test_clients_are_few_and_closed_when_unused(own: TenantDaemon, operator: Client) -> None:
    clock = Clock()
    made = Tenants(Daemons([operator]), 1.0, clock=clock)
    assert opened(made, OWN.token) is operator
    first = opened(made, TOKENS["red"])
    assert first is opened(made, TOKENS["red"])
    first.ping()
    clients = [opened(made, f"kvs_{i}") for i in range(40)]
    assert len(made) == 32
    with pytest.raises(UnavailableError, match="closed"):
        first.ping()
    second = opened(made, TOKENS["red"])
    second.ping()
    clock.now = 301.0
    opened(made, TOKENS["blue"])
    assert len(made) == 1
    for client in (second, *clients):
        with pytest.raises(UnavailableError, match="closed"):
            client.ping()
    made.close()
    assert len(made) == 0
    operator.ping()


def test_a_refused_token_is_not_tried_again_at_once(
    own: TenantDaemon, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, tried = Clock(), list[str]()
    made = Tenants(Daemons([operator]), 1.0, tries=True, clock=clock)
    monkeypatch.setattr(
        "kvstore_vllm.daemons.Client", lambda *args, **more: tried.append(args[1]) or Client(*args, **more)
    )
    good = opened(made, TOKENS["red"])
    for _ in range(5):
        with pytest.raises(RefusedError, match="known by neither token"):
            opened(made, WRONG)
    assert tried == [TOKENS["red"], WRONG]
    assert len(made) == 1
    clock.now = 11.0
    for _ in range(2):
        with pytest.raises(RefusedError):
            opened(made, WRONG)
    assert tried == [TOKENS["red"], WRONG, WRONG]
    # Thousands of them push no good client out, and are not remembered for ever.
    for i in range(1500):
        made._refused[f"kvs_{i}"] = 99.0, "no"
    with pytest.raises(RefusedError):
        opened(made, "kvs_other")
    assert len(made._refused) < 1502
    assert opened(made, TOKENS["red"]) is good
    made.close()


def test_a_daemon_that_is_away_refuses_no_token(own: TenantDaemon, tmp_path: Path) -> None:
    with Client(f"unix://{tmp_path}/none.sock") as away:
        made = Tenants(Daemons([away]), 0.05, tries=True)
        for _ in range(3):
            assert isinstance(opened(made, TOKENS["red"]), Client)
        assert len(made) == 1
        made.close()


def test_namespaces_of_scopes_differ(own: TenantDaemon, operator: Client) -> None:
    made, layout = Tenants(Daemons([operator]), 1.0), Layout(model="scopes", block_bytes=4096)
    keys = chain_keys(range(32), 16)
    scopes = [Scope(token, ttl_s) for token in ("", TOKENS["red"], TOKENS["blue"]) for ttl_s in (0.0, 60.0)]
    for epoch in ("", "after a reset"):
        for i, scope in enumerate(scopes):
            found = [made.namespace(each, epoch, layout).contains(keys).all() for each in scopes]
            assert found == [True] * i + [False] * (len(scopes) - i)
            namespace = made.namespace(scope, epoch, layout)
            assert namespace.put(keys, [bytes(4096)] * len(keys)).stored == len(keys)
            assert made.namespace(scope, epoch, layout) is namespace
    made.close()
