"""Every served model shape: a loaded prefix gives the computed answer, and the loaded bytes are used."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.sglang.engine import Engine, full_pages, prompt, same
from tests.engines.sglang.shapes import SHAPES
from tests.engines.sglang.stored import keys_of, layout_of, watched, zero


@pytest.mark.parametrize("name", SHAPES)
def test_a_hit_answers_as_computed(daemon: LocalDaemon, tmp_path: Path, name: str) -> None:
    asked = prompt(300, 200)
    folder = tmp_path / "watched"
    model = SHAPES[name].save(tmp_path / "model")
    with Engine(model, **watched(daemon, folder, weights_revision=name)) as engine:
        computed = engine.store([asked])
        loaded = engine.fresh([asked])
        assert (computed[0].cached, loaded[0].stored) == (0, full_pages(200))
        assert same(loaded, computed)
        zero(daemon, layout_of(folder), keys_of(asked, 16))
        changed = engine.fresh([asked])
        assert (changed[0].stored, same(changed, computed)) == (full_pages(200), False)
