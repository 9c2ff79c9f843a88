"""Answers through the proxy are those of llama-server alone, and only what is not stored is evaluated."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.lab.local_daemon import LocalDaemon
from kvstore_llamacpp.proxy.namespace import SERVED_MODELS
from tests.engines.gguf_models import BLOCK, MODELS, tokens
from tests.engines.llamaserver.serving import GREEDY, RUNS_MAIN, Served, alone, proxied, timings
from tests.engines.stores import SETTINGS

KINDS = {
    "f16": ("-fa", "off"),
    "f16 flash": ("-fa", "on"),
    "keys q8_0": ("-fa", "off", "-ctk", "q8_0"),
    "q8_0 flash": ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"),
    "q4_0 flash": ("-fa", "on", "-ctk", "q4_0", "-ctv", "q4_0"),
    "bf16": ("-fa", "off", "-ctk", "bf16", "-ctv", "bf16"),
}
NAMES = [name for name in MODELS if MODELS[name][0] in SERVED_MODELS]
CASES = [(name, "f16 flash") for name in NAMES] + [("llama", kind) for kind in KINDS if kind != "f16 flash"]
PROMPT = tokens(5 * BLOCK + 3)
WHOLE = (0, len(PROMPT))
STORED = (5 * BLOCK, 3)


@pytest.mark.parametrize(("name", "kind"), CASES, ids=map(" ".join, CASES))
def test_a_restart_of_the_server_keeps_prefixes(
    models: dict[str, Path], tmp_path: Path, daemon: LocalDaemon, name: str, kind: str
) -> None:
    arguments = KINDS[kind]
    with alone(models[name], tmp_path, *arguments) as direct:
        expected = direct.text(PROMPT)
        # A shorter prompt, which ends in the middle of what is stored: of it, the slot has three blocks.
        direct.complete([*PROMPT[: 3 * BLOCK], 300], 1)
        part = direct.complete(PROMPT[: 3 * BLOCK + 5])
        assert timings(part) == (3 * BLOCK, 5)
    with proxied(models[name], tmp_path, daemon.url, *arguments) as proxy:
        first = proxy.complete(PROMPT)
        assert (first["content"], timings(first)) == (expected, WHOLE)
        # 83 tokens and 11 of the answer.
        assert proxy.settled()["stored_blocks"] == 5
    with proxied(models[name], tmp_path, daemon.url, *arguments) as proxy:
        cut = proxy.complete(PROMPT[: 3 * BLOCK + 5])
        assert (cut["content"], timings(cut)) == (part["content"], timings(part))
        proxy.settled()
        again = proxy.complete(PROMPT)
        assert (again["content"], timings(again)) == (expected, STORED)
        assert proxy.settled()["failures"] == 0


def test_every_served_architecture_has_a_model() -> None:
    assert {MODELS[name][0] for name in NAMES} == set(SERVED_MODELS)


def test_a_restart_of_the_daemon_keeps_prefixes(
    models: dict[str, Path], tmp_path: Path, direct: Served
) -> None:
    expected = direct.text(PROMPT)
    with LocalDaemon({**SETTINGS, "nvme": {"limit": "128MiB"}}) as daemon:
        with proxied(models["llama"], tmp_path, daemon.url) as proxy:
            assert proxy.text(PROMPT) == expected
            assert proxy.settled()["stored_blocks"] == 5
            daemon.restart()
            assert proxy.text(PROMPT) == expected
        daemon.restart()
        with proxied(models["llama"], tmp_path, daemon.url) as proxy:
            again = proxy.complete(PROMPT)
            assert (again["content"], timings(again)) == (expected, STORED)


def test_zeroed_blocks_give_other_answers(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon, direct: Served
) -> None:
    """Without this control, a server that ignores what is restored would pass the tests above."""
    zeroes = (
        "from kvstore_llamacpp.proxy import store\n"
        "class Zeroed(store.NewState):\n"
        "    def fill(self, block_tokens, first, blocks):\n"
        "        super().fill(block_tokens, first, 0 * blocks)\n"
        "store.NewState = Zeroed\n"
    )
    expected = direct.text(PROMPT)
    with proxied(models["llama"], tmp_path, own_daemon.url) as proxy:
        assert proxy.text(PROMPT) == expected
        proxy.settled()
    with proxied(models["llama"], tmp_path, own_daemon.url, runs=zeroes + RUNS_MAIN) as proxy:
        again = proxy.complete(PROMPT)
        assert timings(again) == STORED
        assert again["content"] != expected


TEXT = "The house has twelve rooms, and a garden behind the wall. " * 4
QUESTION = {"role": "user", "content": "How many rooms are there?"}
PATHS = {
    "/completion": {"n_predict": 8},
    "/completions": {"n_predict": 8},
    "/v1/completions": {"max_tokens": 8},
    "/v1/chat/completions": {"max_tokens": 8},
    "/chat/completions": {"max_tokens": 8, "tools": [], "chat_template_kwargs": {}},
}


def body_of(path: str, streams: bool) -> dict[str, Any]:
    """A request whose prompt begins as no other does."""
    text = f"{path} {streams} {TEXT}"
    prompts: dict[str, Any] = {
        "/completion": text, "/completions": [*tokens(20), text], "/v1/completions": [text]
    }  # fmt: skip
    asked = {"prompt": prompts[path]} if path in prompts else {}
    chat = {} if asked else {"messages": [{"role": "system", "content": text}, QUESTION]}
    return {**asked, **chat, **PATHS[path], **GREEDY}


def test_every_path_of_completions(models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon) -> None:
    """The tokens that the proxy asks for are those that llama-server evaluates. Whole answers, streams."""
    asked = [(path, streams) for path in PATHS for streams in (False, True)]
    sizes = ("-c", "8192", "-np", "1")

    def answer(served: Served, path: str, streams: bool) -> tuple[str, tuple[int, int]]:
        body = body_of(path, streams)
        said = list(served.events(path, body)) if streams else [served.post(path, body)]
        return "".join(map(content_of, said)), timings(said[-1])

    expected = {}
    with (
        alone(models["llama"], tmp_path, *sizes) as direct,
        proxied(models["llama"], tmp_path, own_daemon.url, *sizes) as proxy,
    ):
        for each in asked:
            text, (cached, evaluated) = answer(direct, *each)
            expected[each] = text, cached + evaluated
            said, (cached, evaluated) = answer(proxy, *each)
            proxy.settled()
            assert (said, cached + evaluated) == expected[each], each
            assert cached < 3 * BLOCK, each  # the template begins all chats
        assert proxy.status()["read_requests"] == len(asked)
    with proxied(models["llama"], tmp_path, own_daemon.url, *sizes) as proxy:
        for each in asked:
            text, whole = expected[each]
            said, (cached, evaluated) = answer(proxy, *each)
            proxy.settled()
            # A prompt of whole blocks is evaluated from its last token on.
            assert (said, cached) == (text, min(whole // BLOCK * BLOCK, whole - 1)), each
            assert evaluated == whole - cached


def content_of(said: dict) -> str:
    if "choices" not in said:
        return str(said["content"])
    [choice] = said["choices"] or [{"text": ""}]
    part = choice.get("message") or choice.get("delta") or choice
    return str(part.get("content") or part.get("text") or "")


def test_a_conversation_continues_on_another_server(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon, direct: Served
) -> None:
    """Answers are stored too: the second turn evaluates what is new."""
    with (
        proxied(models["llama"], tmp_path, own_daemon.url) as one,
        proxied(models["llama"], tmp_path, own_daemon.url) as two,
    ):
        prompt = PROMPT
        for turn, (here, there) in enumerate(((one, two), (two, one), (one, two))):
            said = here.complete(prompt, 30, return_tokens=True)
            # Later, two tokens are as likely at times, and the order of sums decides.
            assert said["tokens"][:8] == direct.complete(prompt, 8, return_tokens=True)["tokens"]
            assert said["timings"]["prompt_n"] <= len(prompt) - (turn and len(prompt) - BLOCK - 20)
            here.settled()
            prompt = [*prompt, *said["tokens"], *tokens(20, seed=turn)[1:]]
            assert there.status()["failures"] == 0


def test_a_shared_prompt_is_stored_once(proxy: Served, own_daemon: LocalDaemon) -> None:
    system = tokens(10 * BLOCK)
    for number in range(10):
        proxy.complete([*system, *tokens(2 * BLOCK + 1, seed=number + 1)[1:]], 1)
        proxy.settled()
    said = proxy.status()
    assert said["stored_blocks"] == 10 + 10 * 2
    assert said["denied_blocks"] == said["failures"] == 0


def test_what_the_slot_has_is_not_loaded(proxy: Served) -> None:
    proxy.complete(PROMPT)
    proxy.settled()
    again = proxy.complete(PROMPT)
    assert again["timings"]["cache_n"] == len(PROMPT) - 1
    said = proxy.settled()
    assert (said["restored_requests"], said["saved"]) == (0, 1)


def test_the_answer_tells_the_restored_tokens(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon
) -> None:
    def header(proxy: Served) -> str | None:
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
        connection.request("POST", "/completion", json.dumps({"prompt": PROMPT, "n_predict": 1}))
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.getheader("X-KVStore-Restored-Tokens")

    for expected in ("0", str(5 * BLOCK)):
        with proxied(models["llama"], tmp_path, own_daemon.url) as proxy:
            assert header(proxy) == expected
            proxy.settled()


def test_a_caller_may_forbid_the_cache(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon
) -> None:
    for _ in range(2):
        with proxied(models["llama"], tmp_path, own_daemon.url) as proxy:
            assert timings(proxy.complete(PROMPT, cache_prompt=False)) == WHOLE
            proxy.settled()


def test_moved_chunks_are_not_stored(proxy: Served, direct: Served) -> None:
    """`n_cache_reuse` would let llama-server move KV to other positions."""
    first, second = tokens(4 * BLOCK), tokens(4 * BLOCK, seed=1)
    proxy.complete([*first, *second])
    proxy.settled()
    moved = [*first[:BLOCK], *second, *tokens(4, seed=2)[1:]]
    said = proxy.complete(moved, n_cache_reuse=8)
    assert said["timings"]["cache_n"] == BLOCK
    assert said["content"] == direct.text(moved)


def test_slow_loads_are_not_done(
    models: dict[str, Path], tmp_path: Path, own_daemon: LocalDaemon, direct: Served
) -> None:
    """The rates are set as if this model were faster than any store."""
    fast = (
        "from kvstore_llamacpp.proxy.rates import Rates\n"
        "made = Rates.__init__\n"
        "def start(self, always=False):\n"
        "    made(self, False)\n"
        "    self.tokens_per_s, self.bytes_per_s = 1e12, 1.0\n"
        "Rates.__init__ = start\n"
    )
    with proxied(models["llama"], tmp_path, own_daemon.url) as proxy:
        proxy.complete(PROMPT)
        proxy.settled()
    with proxied(models["llama"], tmp_path, own_daemon.url, runs=fast + RUNS_MAIN) as proxy:
        said = proxy.complete(PROMPT)
        assert (said["content"], timings(said)) == (direct.text(PROMPT), WHOLE)
        assert proxy.settled()["slow_loads"] == 1
