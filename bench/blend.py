"""blend: documents in any order from stored chunks, with transformers: how fast, and how close to a prefill.

The model is SmolLM2-135M-Instruct in float32, one thread computes, and prompts have a system prompt, six
documents of 96 tokens and a question. The documents are in the store, each computed alone.

`ttft/SHARE`: time to the first token by `ChunkCache.blend` with this share recomputed, against a prefill.
`ttft/prefix-only`: with the system prompt restored, which is all that these prompts have as a common prefix.

`agreement/SHARE`: of the prefill's 16 greedy tokens, the share that a blend predicts too, from the tokens
before each. `kl_nats`: the divergence of the next token's distributions at these places; `kl_first_nats`: at
the first. `agreement/without-documents`: the same for the question alone, to tell what the documents matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.harness import GIB, Bench, Result, Rounds, Target, expect
from bench.served import serve
from bench.worker import Worker, worker

SHARES = ("0", "0.05", "0.15", "0.3", "0.5", "1")
WITHOUT = "without-documents"
PREFIX_ONLY = "prefix-only"
CASES = (
    *(f"ttft/{how}" for how in (*SHARES, PREFIX_ONLY)),
    *(f"agreement/{how}" for how in (*SHARES, WITHOUT)),
)

_CHUNKS = 6
_ANSWER_TOKENS = 16
_TARGETS = {"0.15": Target("<=", 0.5)}


def run(bench: Bench) -> Iterator[Result]:
    """Yields a row for each share and measure."""
    prompts, chunk_tokens = bench.pick(8, 2), bench.pick(96, 40)
    with serve(GIB) as (_, daemon), worker(bench, "transformers") as made:
        bench.doing("storing documents")
        said = made(
            "start",
            url=daemon.url,
            real=not bench.smoke,
            prompts=prompts,
            chunks=_CHUNKS,
            chunk_tokens=chunk_tokens,
        )
        yield from _times(bench, made, _CHUNKS * chunk_tokens, said)
        bench.doing("answers")
        made("answers", tokens=_ANSWER_TOKENS)
        for how in (*SHARES, WITHOUT):
            bench.doing(f"quality of {how}")
            found = made("quality", share=None if how == WITHOUT else float(how))
            yield Result(
                f"blend/agreement/{how}", found["agreement"], "share", None, None, prompts,
                extra={"kl_nats": found["kl"], "kl_first_nats": found["kl_first"]},
            )  # fmt: skip


def _times(bench: Bench, made: Worker, document_tokens: int, said: dict[str, float]) -> Iterator[Result]:
    """Yields the times to the first token, all of the same rounds."""
    ways = (*SHARES, PREFIX_ONLY)
    samples = [partial(_sample, made, how, document_tokens) for how in ("computed", *ways)]
    rounds = bench.interleave("blend/ttft", samples)
    for i, how in enumerate(ways, 1):
        pairs = [(figures[i], figures[0]) for figures in rounds.figures]
        row = Rounds(pairs, rounds.discarded, rounds.noisy)
        yield row.result(f"blend/ttft/{how}", "s", _TARGETS.get(how), prompt_tokens=said["tokens"])


def _sample(made: Worker, how: str, document_tokens: int, number: int) -> float:
    answered = made("first_token", how=how, number=number)
    if how in SHARES:
        loaded = document_tokens if float(how) < 1 else 0
        expect(answered["loaded"], loaded, "tokens of documents from the store")
        expect(answered["recomputed"], -int(-float(how) * loaded // 1), "tokens recomputed")
    elif how == PREFIX_ONLY:
        expect(answered["loaded"] > 0, True, "tokens of the system prompt from the store")
    return float(answered["seconds"])
