"""Models and settings that are not served are refused by name, with a hint, before anything is stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama_cpp
import pytest
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from kvstore import Client
from kvstore.errors import MisuseError
from kvstore_llamacpp import KVStoreCache, context, trial
from kvstore_llamacpp.checks import SERVED_MODELS
from kvstore_llamacpp.state import NewState
from tests.engines.gguf_models import BLOCK, tokens
from tests.engines.llamacpp.models import answer

Make = Callable[..., Llama]

OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "embeddings": ({"embedding": True}, "is made for embeddings"),
    "logits_all": ({"logits_all": True}, "logits_all is set"),
    "draft_model": ({"draft_model": LlamaPromptLookupDecoding()}, "logits_all is set|draft_model"),
    "kv_overrides": ({"kv_overrides": {"general.x": 1}}, "kv_overrides has general.x"),
    "attention": ({"attention_type": llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL}, "attention_type is 1"),
}


def refusal(llm: Llama, client: Client, **options: Any) -> MisuseError:
    with pytest.raises(MisuseError) as caught:
        KVStoreCache(llm, client, **{"block_tokens": BLOCK, "revision": "test", **options})
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_a_llama(plain: Make, client: Client, option: str) -> None:
    options, says = OPTIONS[option]
    error = refusal(plain(**options), client)
    assert any(part in error.message for part in says.split("|"))


def test_a_window_without_the_tokens_before_it(plain: Make, client: Client) -> None:
    assert "swa_full is False" in refusal(plain("gemma3", swa_full=False), client).message
    # Without windows the setting means nothing.
    KVStoreCache(plain("llama", swa_full=False), client, revision="test")


@pytest.mark.parametrize("architecture", ["mamba", "deepseek2", "qwen2vl", "gemma3n", "llama4"])
def test_architectures_that_are_not_tested(plain: Make, client: Client, architecture: str) -> None:
    llm = plain()
    llm.metadata = {**llm.metadata, "general.architecture": architecture}
    error = refusal(llm, client)
    assert error.message == f"the architecture {architecture} is not tested"
    assert all(name in error.hint for name in SERVED_MODELS)


@pytest.mark.parametrize("attribute", ["_is_recurrent", "_is_hybrid"])
def test_recurrent_and_hybrid_models(plain: Make, client: Client, attribute: str) -> None:
    llm = plain()
    setattr(llm, attribute, True)
    assert "recurrent or hybrid" in refusal(llm, client).message


def test_a_lora(plain: Make, client: Client) -> None:
    llm = plain()
    llm.lora_path = "adapter.gguf"
    assert refusal(llm, client).message == "a LoRA is set: adapter.gguf"


def test_versions_of_the_state_that_are_not_known(
    plain: Make, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "LLAMA_STATE_SEQ_VERSION", 4)
    error = refusal(plain(), client)
    assert (error.message, error.hint) == (
        "llama.cpp writes states of versions 10 and 4", "served are 10 and 3"
    )  # fmt: skip


def test_a_llama_of_an_unknown_release(plain: Make, client: Client) -> None:
    llm = plain()
    del llm._requires_eval
    assert "Llama has no _requires_eval" in refusal(llm, client).message


def test_a_model_in_several_files_needs_a_name(plain: Make, client: Client) -> None:
    llm = plain()
    llm.metadata = {**llm.metadata, "split.count": "3"}
    assert "in several files" in refusal(llm, client, revision=None).message
    KVStoreCache(llm, client, revision="test")


def test_a_file_that_is_newer_than_the_process_needs_a_name(
    plain: Make, client: Client, models: dict[str, Path]
) -> None:
    error = refusal(plain(), client, revision=None)
    assert str(models["llama"]) in error.message
    assert "revision=" in error.hint


def test_blocks_without_tokens_or_larger_than_a_slot(plain: Make, client: Client) -> None:
    assert "block_tokens is 0" in refusal(plain(), client, block_tokens=0).message
    assert "layout.block_bytes" in refusal(plain(), client, block_tokens=1 << 16).message


def test_a_context_without_room_for_the_trial(plain: Make, client: Client) -> None:
    assert "a context of 16 tokens" in refusal(plain(n_ctx=16), client).message


def test_a_backend_that_does_not_give_back_its_state(
    plain: Make, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = NewState.fill

    def zeroed(self: NewState, block_tokens: int, first: int, blocks: Any) -> None:
        real(self, block_tokens, first, 0 * blocks)

    monkeypatch.setattr(NewState, "fill", zeroed)
    llm = plain()
    assert "has not kept a state" in refusal(llm, client).message
    assert llm.n_tokens == 0


def test_a_state_that_is_not_enough(plain: Make, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of state outside the caches: after a restore, other tokens are evaluated."""
    real = context.logits
    calls: list[int] = []

    def strange(llm: Llama, prompt: list[int]) -> Any:
        calls.append(len(prompt))
        return real(llm, prompt if len(calls) == 1 else prompt[::-1])

    monkeypatch.setattr(trial.context, "logits", strange)
    assert "gives other logits" in refusal(plain(), client).message
    assert calls == [24, 8]


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("chat_handler", SimpleNamespace()), ("draft_model", LlamaPromptLookupDecoding())],
)
def test_what_is_set_later_is_refused_at_each_call(cached: Make, attribute: str, value: Any) -> None:
    llm = cached()
    setattr(llm, attribute, value)
    with pytest.raises(KeyError):
        llm.cache[tokens(40)]
    llm.eval(tokens(40))
    llm.cache[tokens(40)] = llm.save_state()
    assert llm.cache.failures == {"restore": 1, "store": 1}
    assert tokens(40) not in llm.cache


def test_a_chat_handler_is_refused(plain: Make, client: Client) -> None:
    llm = plain()
    llm.chat_handler = SimpleNamespace()
    assert "puts more than text into the context" in refusal(llm, client).message


def test_a_key_that_is_no_tokens_is_a_miss(cached: Make) -> None:
    llm = cached()
    answer(llm, tokens(40))
    for key in (["a"] * 40, [-1] * 40, None):
        with pytest.raises(KeyError):
            llm.cache[key]
        assert key not in llm.cache
    assert llm.cache.failures == {"restore": 3, "lookup": 3}
