"""Requests that the proxy does not read are passed on; slots are its own; many clients at a time."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.gguf_models import BLOCK, tokens
from tests.engines.llamaserver.serving import GREEDY, ONE_LONG, RUNS_MAIN, Served, alone, proxied, timings

PROMPT = tokens(5 * BLOCK + 3)
LONG = {"prompt": PROMPT, "n_predict": 3000, **GREEDY}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": ["one", "two", "three"], "n_predict": 4}),
        ("/completion", {"prompt": [tokens(20), tokens(30)], "n_predict": 4}),
        ("/v1/completions", {"prompt": "twice", "n": 2, "max_tokens": 4}),
        ("/completion", {"prompt": {"prompt_string": "in an object"}, "n_predict": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
        ("/tokenize", {"content": "some text"}),
        ("/apply-template", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/embeddings", {"input": "text"}),
        ("/completion", {"n_predict": 4}),
        ("/completion", {"prompt": PROMPT, "n_predict": "many"}),
        ("/completion", {"prompt": tokens(600), "n_predict": 4}),
        ("/completion", {"prompt": [-1, 2], "n_predict": 4}),
        ("/completion", {"prompt": [1 << 40], "n_predict": 4}),
        ("/completion", b"{not json"),
        ("/completion", b""),
        ("/completion", b"[]"),
        ("/v1/chat/completions", {"messages": "no list"}),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
                ]
            },
        ),
        ("/no/such/path", {}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_read_is_answered_as_by_llama_server(
    shared: Served, direct: Served, path: str, body: Any
) -> None:
    body = {**body, **GREEDY} if isinstance(body, dict) else body
    (status, said), (expected_status, expected) = (each.ask("POST", path, body) for each in (shared, direct))
    assert status == expected_status
    assert without_times(said) == without_times(expected)
    # The proxy and the server go on.
    assert shared.text(PROMPT) == direct.text(PROMPT)


@pytest.mark.parametrize("path", ["/health", "/props", "/v1/models", "/slots", "/no/such/path"])
def test_other_paths_are_passed_on(shared: Served, direct: Served, path: str) -> None:
    (status, said), (expected_status, expected) = (each.ask("GET", path) for each in (shared, direct))
    assert status == expected_status
    assert type(said) is type(expected)


@pytest.fixture(scope="module")
def shared(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, daemon: LocalDaemon) -> Any:
    with proxied(models["llama"], tmp_path_factory.mktemp("shared"), daemon.url) as served:
        yield served


def without_times(said: Any) -> Any:
    """An answer without what differs from one request to the next."""
    if isinstance(said, dict):
        left_out = {
            "timings", "created", "created_at", "completed_at", "id", "id_slot", "model",
            "system_fingerprint", "tokens_cached", "tokens_evaluated", "generation_settings", "usage",
        }  # fmt: skip
        return {key: without_times(value) for key, value in said.items() if key not in left_out}
    return [without_times(each) for each in said] if isinstance(said, list) else said


def test_slots_belong_to_the_proxy(shared: Served) -> None:
    status, said = shared.ask("POST", "/slots/0?action=erase", {})
    assert status == 403
    assert "belong to kvstore-llama-proxy" in said["error"]["message"]


def test_a_slot_that_somebody_else_took_gives_right_answers(proxy: Served, direct: Served) -> None:
    """A request past the proxy leaves other tokens in each slot."""
    expected = direct.text(PROMPT)
    for _ in range(2):
        assert proxy.text(PROMPT) == expected
        proxy.settled()
        for slot in (0, 1):
            other = {"prompt": tokens(100, seed=slot + 5), "n_predict": 1, "id_slot": slot}
            assert proxy.ask("POST", "/completion", other, port=proxy.server_port)[0] == 200
    assert proxy.settled()["failures"] == 0


def test_other_tokens_than_those_of_llama_server_cost_only_hits(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon, direct: Served
) -> None:
    """As if the proxy asked another tokenizer: it restores the KV of a prompt with 40 of its tokens."""
    differs = (
        "from kvstore_llamacpp.proxy.completions import Completions\n"
        "real = Completions.tokens\n"
        "async def tokens(self, *arguments):\n"
        "    found = (await real(self, *arguments)).copy()\n"
        "    found[40:] = 300\n"
        "    return found\n"
        "Completions.tokens = tokens\n"
    )
    wrong = [*PROMPT[:40], *[300] * (len(PROMPT) - 40)]
    with proxied(models["llama"], tmp_path, own_daemon.url) as proxy:
        assert proxy.text(wrong) == direct.text(wrong)
        proxy.settled()
    with proxied(models["llama"], tmp_path, own_daemon.url, runs=differs + RUNS_MAIN) as proxy:
        said = proxy.complete(PROMPT)
        assert (said["content"], timings(said)) == (direct.text(PROMPT), (40, len(PROMPT) - 40))
        assert proxy.settled()["restored_tokens"] == 5 * BLOCK
    # It finds its own tokens stored, so that no more is stored of the prompt.
    with proxied(models["llama"], tmp_path, own_daemon.url) as proxy:
        said = proxy.complete(PROMPT)
        assert (said["content"], timings(said)) == (direct.text(PROMPT), (32, len(PROMPT) - 32))


def test_sixteen_streams_at_a_time(models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon) -> None:
    """Four slots, eight prompts that share a system prompt, three rounds."""
    many = ("-c", "4096", "-np", "4")
    system = tokens(6 * BLOCK)
    prompts = [[*system, *tokens(20 + n, seed=n + 1)[1:]] for n in range(8)]
    with alone(models["llama"], tmp_path, *many) as direct:
        expected = [direct.text(prompt, 16) for prompt in prompts]
    with proxied(models["llama"], tmp_path, own_daemon.url, *many) as proxy:

        def stream(n: int) -> str:
            body = {"prompt": prompts[n % 8], "n_predict": 16, **GREEDY}
            return "".join(each["content"] for each in proxy.events("/completion", body))

        with ThreadPoolExecutor(16) as clients:
            for _ in range(3):
                assert list(clients.map(stream, range(16))) == 2 * expected
        said = proxy.settled()
        assert (said["requests"], said["failures"], said["unsaved"]) == (48, 0, 0)


def test_too_many_requests_are_turned_away(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon
) -> None:
    with proxied(models["llama"], tmp_path, own_daemon.url, *ONE_LONG, options=("--queue", "1")) as proxy:
        stream = proxy.events("/completion", LONG)
        next(stream)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(proxy.text, PROMPT)
            wait_for(lambda: proxy.status()["waiting"] == 1)
            status, said = proxy.ask("POST", "/completion", {"prompt": PROMPT})
            assert (status, said["error"]["type"]) == (503, "unavailable_error")
            assert "1 requests wait for 1 slots" in said["error"]["message"]
            stream.close()
            assert waiting.result(60)
        assert proxy.settled()["turned_away"] == 1


def test_a_cancelled_request_ends_in_llama_server(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon
) -> None:
    """Long before its last token."""
    with proxied(models["llama"], tmp_path, own_daemon.url, "--metrics", *ONE_LONG) as proxy:
        for _ in range(2):
            stream = proxy.events("/completion", LONG)
            next(stream)
            stream.close()
        assert proxy.text(PROMPT)
        assert proxy.settled()["cancelled"] == 2
        with urllib.request.urlopen(f"http://127.0.0.1:{proxy.port}/metrics") as answer:
            said = answer.read().decode()
    [made] = re.findall(r"^llamacpp:tokens_predicted_total (\d+)", said, re.MULTILINE)
    assert int(made) < LONG["n_predict"]


def test_requests_are_cancelled_at_any_time(proxy: Served, direct: Served) -> None:
    """Before and after the first token, and while they wait for a slot."""
    expected = direct.text(PROMPT)
    for events in (1, 5):
        for _ in range(3):
            stream = proxy.events("/completion", {"prompt": PROMPT, "n_predict": 400, **GREEDY})
            for _ in range(events):
                next(stream)
            stream.close()
            assert proxy.text(PROMPT) == expected
    for _ in range(4):
        with suppress(TimeoutError):
            body = {"prompt": PROMPT, "n_predict": 400, **GREEDY}
            proxy.ask("POST", "/completion", body, timeout_s=0.05)
    said = proxy.settled()
    assert said["cancelled"] >= 6
    wait_for(lambda: not any(slot["is_processing"] for slot in proxy.ask("GET", "/slots")[1]))
    assert proxy.text(PROMPT) == expected
    assert said["failures"] == 0


def test_a_waiting_request_that_is_cancelled_keeps_no_slot(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon
) -> None:
    with proxied(models["llama"], tmp_path, own_daemon.url, *ONE_LONG) as proxy:
        stream = proxy.events("/completion", LONG)
        next(stream)
        with pytest.raises(TimeoutError):
            proxy.ask("POST", "/completion", LONG, timeout_s=0.3)
        wait_for(lambda: proxy.status()["waiting"] == 0)
        stream.close()
        assert proxy.text(PROMPT)


def test_slots_make_room_for_what_is_restored(
    models: dict[str, Path], tmp_path: Path, daemon: LocalDaemon
) -> None:
    """Three prompts of 300 tokens do not fit into 512 cells: idle slots are emptied."""
    prompts = [tokens(300, seed=seed) for seed in range(3)]
    with alone(models["llama"], tmp_path) as direct:
        # Of later tokens, two are as likely: in other cells, sums have another order.
        expected = [direct.text(prompt, 4) for prompt in prompts]
    with proxied(models["llama"], tmp_path, daemon.url) as proxy:
        for turn in range(3):
            for prompt, text in zip(prompts, expected, strict=True):
                said = proxy.complete(prompt, 4)
                assert said["content"] == text
                proxy.settled()
                if turn:
                    assert said["timings"]["prompt_n"] <= 300 - 18 * BLOCK
        assert proxy.status()["refused_restores"] == 0


def test_keys_are_checked_before_the_store_is_asked(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon
) -> None:
    body = {"prompt": PROMPT, "n_predict": 4}
    right = {"Authorization": "Bearer secret"}
    with proxied(models["llama"], tmp_path, own_daemon.url, "--api-key", "secret,other") as proxy:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert proxy.ask("POST", "/completion", body, headers)[0] == 401
        assert proxy.settled()["read_requests"] == 0
        for headers in (right, {"X-Api-Key": "other"}):
            assert proxy.ask("POST", "/completion", body, headers)[0] == 200
        assert proxy.settled()["stored_blocks"] == 5


def wait_for(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_two_servers_share_prefixes_while_both_run(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon, direct: Served
) -> None:
    expected = direct.text(PROMPT)
    with (
        proxied(models["llama"], tmp_path, own_daemon.url) as one,
        proxied(models["llama"], tmp_path, own_daemon.url) as two,
    ):
        assert one.text(PROMPT) == expected
        one.settled()
        said = two.complete(PROMPT)
        assert (said["content"], said["timings"]["prompt_n"]) == (expected, 3)
        threads = [
            threading.Thread(target=each.text, args=(PROMPT,)) for each in (one, two) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert one.settled()["failures"] == two.settled()["failures"] == 0
