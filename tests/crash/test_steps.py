"""Each fault at one of its steps; `make crash` visits them all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.crash.steps import AT_ONCE, FAULTS, all_steps, visit


@pytest.mark.long
def test_nothing_is_lost_or_wrong_whichever_step_fails() -> None:
    steps = all_steps()
    chosen = []
    for name, faults in FAULTS.items():
        own = list(dict.fromkeys(at for at, _ in steps if at.startswith(f"{name}:")))
        # With a full tier, when slots and records of other blocks are written again.
        full = own[2:] if name in ("pwritev", "fdatasync") else own[-3:0:-1]
        chosen += list(zip(full, faults, strict=False))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        problems = [problem for found in pool.map(visit, *zip(*chosen, strict=True)) for problem in found]
    assert not problems
