"""A model for `bench blend`, see `tests.engines.commands`: prompts with documents from the store."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch

from kvstore import Client
from kvstore_transformers import ChunkCache, PrefixCache
from tests.engines.commands import answer_commands
from tests.engines.transformers import documents, smollm
from tests.engines.transformers.models import llama

_BLOCK_TOKENS = 16
PREFIX_ONLY = "prefix-only"
COMPUTED = "computed"


class Served:
    """A model, its prompts, and its caches. Commands are the methods. One thread computes."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        torch.set_num_threads(1)

    def start(self, url: str, real: bool, prompts: int, chunks: int, chunk_tokens: int) -> dict[str, float]:
        """Loads SmolLM2 (`real`) or a tiny random model, and stores documents and system prompt in a daemon.

        Returns the mean number of tokens of a prompt, and the bytes that are stored of a token.
        """
        if real:
            self._model, tokenizer = smollm.load()
            self._prompts = documents.prompts(tokenizer, prompts, chunks, chunk_tokens)
        else:
            self._model = llama(attention="sdpa")
            self._prompts = documents.random_prompts(
                self._model.config.vocab_size, prompts, chunks, chunk_tokens
            )
        client = self._stack.enter_context(Client(url, deadline_s=30.0, strict=True))
        revision = "SmolLM2-135M-Instruct" if real else "random"
        self._chunks = ChunkCache(self._model, client, _BLOCK_TOKENS, revision=revision)
        self._prefixes = PrefixCache(self._model, client, _BLOCK_TOKENS, revision=revision)
        self._answers: list[tuple[Any, Any]] = []
        for prompt in self._prompts:
            self._chunks.store(prompt.chunks)
        self._chunks.blend([[1]], [1], self._prompts[0].prefix)
        shape = self._prefixes.shape
        return {
            "tokens": sum(len(prompt.tokens) for prompt in self._prompts) / len(self._prompts),
            "token_bytes": shape.block_bytes / shape.block_tokens,
        }

    def first_token(self, how: str, number: int) -> dict[str, float]:
        """Answers a prompt with one token. `how`: computed, prefix-only, or the share to recompute.

        Returns the seconds, the tokens from the store, and the recomputed ones.
        """
        prompt = self._prompts[number % len(self._prompts)]
        ids = torch.tensor([prompt.tokens])
        began_s, loaded, recomputed = time.monotonic(), 0, 0
        if how == COMPUTED:
            inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        elif how == PREFIX_ONLY:
            past = self._prefixes.restore(ids)
            loaded = self._prefixes.last.restored_tokens
            inputs = {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "past_key_values": past,
            }
        else:
            blend = self._chunks.blend(prompt.chunks, prompt.question, prompt.prefix, recompute=float(how))
            loaded, recomputed, inputs = blend.loaded_tokens, blend.recomputed_tokens, blend.inputs
        self._model.generate(**inputs, max_new_tokens=1, do_sample=False)
        return {"seconds": time.monotonic() - began_s, "loaded": loaded, "recomputed": recomputed}

    def answers(self, tokens: int) -> None:
        """Answers all prompts greedily with `tokens` tokens each. `quality` compares with them."""
        for prompt in self._prompts:
            ids = torch.tensor([prompt.tokens])
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            self._answers.append((output.sequences[0, ids.shape[1] :], torch.cat(output.logits)))

    def quality(self, share: float | None) -> dict[str, float]:
        """Compares the next tokens behind blends with those of `answers`. None: without the documents.

        Every place of an answer is predicted from the answer's tokens before it. Returns the agreement, the
        share of places with the same most likely token; kl, the mean Kullback-Leibler divergence of the next
        token's distribution in nats; kl_first, at the first places alone.
        """
        agreed, kl = [], []
        for prompt, (answer, expected) in zip(self._prompts, self._answers, strict=True):
            logits = self._predicted(prompt, share, answer)
            agreed.append((logits.argmax(-1) == expected.argmax(-1)).float().mean())
            kl.append(torch.nn.functional.kl_div(
                logits.log_softmax(-1), expected.log_softmax(-1), reduction="none", log_target=True
            ).sum(-1))  # fmt: skip
        away = torch.stack(kl)
        return {
            "agreement": float(torch.stack(agreed).mean()),
            "kl": float(away.mean()),
            "kl_first": float(away[:, 0].mean()),
        }

    @torch.no_grad()
    def _predicted(self, prompt: documents.Prompt, share: float | None, answer: Any) -> Any:
        """Returns the logits (tokens, vocabulary) of each token of an answer."""
        if share is None:
            ids, past = torch.tensor([[*prompt.prefix, *prompt.question]]), None
        else:
            blend = self._chunks.blend(prompt.chunks, prompt.question, prompt.prefix, recompute=share)
            ids, past = blend.input_ids[:, -1:], blend.past_key_values
        given = torch.cat((ids, answer[None, :-1]), 1)
        return self._model(given, past_key_values=past, logits_to_keep=len(answer)).logits[0]


def main() -> None:
    with ExitStack() as stack:
        answer_commands(Served(stack))


if __name__ == "__main__":
    main()
