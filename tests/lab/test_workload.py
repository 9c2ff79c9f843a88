"""Traces as arrays: block numbers, the closed loop of users, and invalid lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import KVStoreError, MisuseError
from kvstore.lab.closed_loop import ClosedLoop, of_conversations
from kvstore.lab.traces import Trace
from kvstore.lab.workload import Workload, of_chats
from tests.lab.small import agent, call, chat, conversation, prompts_of, workload, write


def test_equal_numbers_are_equal_prefixes(tmp_path: Path) -> None:
    rows = [chat(5000, [7, 8, 9], rest=11), chat(5000, [7, 8, 3]), chat(6500, [1, 8, 9]), chat(6500, [])]
    load = of_chats(Trace(write(tmp_path / "t", rows)), 512)
    assert prompts_of(load) == [[0, 1, 2], [0, 1, 3], [4, 5, 6], []]
    assert (load.requests, load.accesses, load.unique_blocks, load.longest) == (4, 9, 7, 3)
    assert load.times_s.tolist() == [0.0, 0.0, 1.5, 1.5]
    assert load.input_tokens.tolist() == [1547, 1536, 1536, 0]
    assert load.duration_s == 1.5


def test_coarser_blocks_join_their_ids(tmp_path: Path) -> None:
    """Ids of some traces name the contents of a block alone, so the last id of four says nothing of three."""
    rows = [chat(0, [1, 2, 3, 4, 5]), chat(1, [1, 2, 3, 9]), chat(2, [1]), chat(3, [1, 2, 8, 4])]
    trace = Trace(write(tmp_path / "t", rows))
    assert prompts_of(of_chats(trace, 1024)) == [[0, 1], [0, 2], [], [0, 3]]
    with pytest.raises(MisuseError, match="blocks of 700 tokens cannot be made of the trace's 512"):
        of_chats(trace, 700)


def test_a_loaded_workload_equals_the_saved_one(tmp_path: Path) -> None:
    load = workload([[1, 2], [1, 3], []])
    load.save(tmp_path)
    again = Workload.load(tmp_path)
    assert again.digest() == load.digest()
    assert again.sessions.tolist() == load.sessions.tolist()
    assert prompts_of(again) == prompts_of(load)
    assert workload([[1, 2], [1, 3]]).digest() != load.digest()


TALKS = [
    conversation(
        call(0, [1, 2, 3, 4]),
        agent(10, call(0, [1, 2]), call(700, [1, 2, 9])),
        call(20, [1, 2, 3, 4, 5]),
        call(1000, [1, 2, 3, 4, 5, 6]),
        tools=200,
        system=56,
    ),
    conversation(call(0, [1, 2, 7]), call(1, [1, 2, 7], model="other"), tools=256, system=0),
]


def of(tmp_path: Path, rows: list[dict[str, object]] = TALKS, **loop: float) -> Workload:
    return of_conversations(Trace(write(tmp_path / "t", rows)), 64, ClosedLoop(**{"users": 1, **loop}))  # type: ignore[arg-type]


def test_a_prompt_continues_the_session_of_the_prompt_that_it_starts_with() -> None:
    load = workload([[1, 2], [3], [1, 2, 4], [1, 2, 5], [1], [], [1, 2, 4, 6], [1, 7]])
    # A prompt is continued once: the second one that starts with 1, 2 begins a session.
    assert load.sessions.tolist() == [0, 1, 0, 2, 3, 4, 0, 3]
    assert load.session_count == 5
    twice = load.repeated(2)
    assert twice.sessions.tolist() == [*load.sessions.tolist(), *(load.sessions + 5).tolist()]


def test_conversations_are_sessions(tmp_path: Path) -> None:
    load = of(tmp_path)
    session_of = dict(zip(map(len, prompts_of(load)), load.sessions.tolist(), strict=True))
    assert sorted(np.bincount(load.sessions).tolist()) == [2, 5], "sub-agents belong to their conversation"
    assert session_of[6] == session_of[5] == session_of[4]


def test_conversations_share_a_part_of_the_preamble(tmp_path: Path) -> None:
    """Half of 256 tokens are the first two blocks of main prompts of a model. No other blocks are shared."""
    load = of(tmp_path, shared=0.5)
    mains = [p for p in prompts_of(load) if len(p) >= 4]
    short = [p for p in prompts_of(load) if len(p) == 3]
    assert {tuple(p[:2]) for p in mains} == {(0, 1)}
    heads = {tuple(p[:2]) for p in short}
    assert (0, 1) in heads, "the second conversation has the same head"
    assert len(heads) == 3, "but not under another model, and sub-agents share nothing"
    assert len({p[2] for p in short}) == 3
    assert load.unique_blocks == 2 + 4 + 3 + 1 + 3
    none = of(tmp_path, shared=0.0)
    assert none.unique_blocks == 7 + 3 + 3, "without sharing, a sub-agent goes on where the main prompt began"


def test_gaps_are_capped_and_nested_times_merged(tmp_path: Path) -> None:
    load = of(tmp_path, TALKS[:1], gap_cap_s=100.0)
    assert np.diff(load.times_s).tolist() == pytest.approx([10.0, 10.0, 100.0, 100.0])
    uncapped = of(tmp_path, TALKS[:1], gap_cap_s=1000.0)
    assert np.diff(uncapped.times_s).tolist() == pytest.approx([10.0, 10.0, 690.0, 290.0])
    assert 0 <= load.times_s[0] <= 100


def test_each_user_plays_conversations_in_sequence(tmp_path: Path) -> None:
    talks = [conversation(call(0, [i]), call(50, [i, i])) for i in range(40)]
    rows = [dict(each) for each in talks]
    for users in (1, 4):
        load = of(tmp_path, rows, users=users, gap_cap_s=60.0)
        open_talks = at_once = 0
        for blocks in prompts_of(load):
            open_talks += 1 if len(blocks) == 1 else -1
            at_once = max(at_once, open_talks)
        assert at_once == users
    assert of(tmp_path, rows, seed=3).digest() == of(tmp_path, rows, seed=3).digest()
    assert of(tmp_path, rows, seed=3).digest() != of(tmp_path, rows, seed=4).digest()


@pytest.mark.parametrize(
    "bad", [{"users": 0}, {"gap_cap_s": -1.0}, {"gap_cap_s": float("nan")}, {"shared": 1.1}, {"shared": -0.1}]
)
def test_invalid_loops_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(MisuseError, match=next(iter(bad))):
        ClosedLoop(**bad)  # type: ignore[arg-type]


GOOD = chat(3000, [1, 2])
BAD_CHATS = [
    ("{not json", "is not JSON"),
    ('{"timestamp": 1, "input_length": 1, "output_length": 1}', "has no field hash_ids"),
    ("[]", "line 2: "),
    (chat(2999, [1, 2]), r"line 2: timestamp goes back from 3000 to 2999"),
    ({**chat(3000, [1, 2]), "input_length": 2000}, r"line 2: 2 hash_ids for 2000 tokens.*: 3"),
]
BAD_TALKS = [
    (conversation(call(5, [1]), call(4, [1])), "line 2: t goes back from 5 to 4"),
    (conversation(call(0, [1]), agent(9, call(3, [1]), call(2, [1]))), "line 2: t goes back from 3 to 2"),
    (conversation(call(-1, [1])), "line 2: t goes back from 0 to -1"),
    ({**conversation(), "block_size": 32}, "line 2: block_size is 32, the first line has 64"),
    (conversation({**call(0, [1]), "in": 640}), "line 2: 1 hash_ids for 640 tokens"),
]


@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [(GOOD, bad, says) for bad, says in BAD_CHATS] + [(TALKS[0], bad, says) for bad, says in BAD_TALKS],
)
def test_bad_lines_are_errors_or_skipped(
    tmp_path: Path, good: dict[str, object], bad: dict[str, object] | str, says: str
) -> None:
    path = write(tmp_path / "trace", [good, bad, good])
    with pytest.raises(KVStoreError, match=rf"trace (line 2)?.*{says}"):
        list(Trace(path))
    trace = Trace(path, skip_bad=True)
    for _ in range(2):
        assert len(list(trace.sessions())) == 2
        assert [text.split(": ")[0].split(" is ")[0].split(" has ")[0] for text in trace.skipped] == [
            f"{path} line 2"
        ]


def test_bad_lines_before_the_first_good_one(tmp_path: Path) -> None:
    path = write(tmp_path / "t", ["nonsense", '{"a": 1}', GOOD])
    trace = Trace(path, skip_bad=True)
    assert trace.kind == "requests"
    assert len(list(trace)) == 1
    assert len(trace.skipped) == 2
    with pytest.raises(KVStoreError, match="line 1 is not JSON"):
        Trace(path)
    with pytest.raises(KVStoreError, match="holds no requests"):
        Trace(write(path, ["nonsense"]), skip_bad=True)
