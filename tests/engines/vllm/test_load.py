"""Many requests, long prompts, little memory: bit-identical wherever two runs without the connector are."""

from __future__ import annotations

from tests.engines.vllm.engine import Engine, cached, full_blocks, prompt, said


def mixed() -> list[list[int]]:
    """32 prompts of 20 to 640 tokens; a third starts with one system prompt, one is another's first half."""
    system = prompt(100, 160)
    prompts = []
    for i in range(32):
        own = prompt(200 + i, 20 * (i + 1))
        prompts.append(system + own if i % 3 == 0 else own)
    prompts[7] = prompts[30][: len(prompts[30]) // 2]
    return prompts


def compare(plain: Engine, engine: Engine, prompts: list[list[int]], **more: object) -> list[list[int]]:
    """Runs cold and warm against two plain runs; cached tokens of each run with the connector."""
    reference = [said(plain.fresh(prompts, **more)) for _ in range(2)]
    assert reference[0] == reference[1], "two runs without the connector differ: nothing to compare with"
    runs = [engine.fresh(prompts, **more) for _ in range(2)]
    for run in runs:
        assert said(run) == reference[0]
    assert engine("failures") == {}
    return [cached(run) for run in runs]


def test_32_mixed_requests_at_once(plain: Engine, engine: Engine) -> None:
    prompts = mixed()
    _, warm = compare(plain, engine, prompts, max_tokens=16)
    assert warm == [full_blocks(len(each)) for each in prompts]


def test_prompts_longer_than_the_budget_are_stored_chunk_by_chunk(plain: Engine, engine: Engine) -> None:
    chunks = {"max_num_batched_tokens": 128, "max_num_seqs": 8}
    prompts = [prompt(300 + i, n) for i, n in enumerate((1000, 130, 515))]
    with plain.instead(**chunks), engine.instead(**chunks):
        _, warm = compare(plain, engine, prompts)
        assert warm == [full_blocks(len(each)) for each in prompts]
        # Gone in the middle of its prompt: the chunks before were stored as they came.
        asked = [prompt(310, 1000)]
        engine.generate(asked, abort_after=5)
        [found] = cached(engine.fresh(asked))
        assert 384 <= found <= 640


def test_preempted_requests_are_loaded_from_the_store(plain: Engine, engine: Engine) -> None:
    """Engine blocks for a third of what the requests want."""
    little = {"num_gpu_blocks_override": 33, "max_model_len": 1024, "max_num_seqs": 8}
    prompts = [prompt(320 + i, 250) for i in range(8)]
    with plain.instead(**little), engine.instead(**little):
        compare(plain, engine, prompts, max_tokens=96)
        assert plain("preemptions") > 0
        assert engine("preemptions") > 0
