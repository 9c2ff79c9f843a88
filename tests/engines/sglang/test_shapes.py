"""Every served model shape: a loaded prefix gives the computed answer, and the loaded bytes are used."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.lab.local_daemon import LocalDaemon
from tests.engines.sglang.engine import Engine, full_pages, prompt, same
from tests.engines.sglang.shapes import SHAPES
from tests.engines.sglang.stored import keys_of, layout_of, watched, zero


def check_hit(
    daemon: LocalDaemon,
    folder: Path,
    name: str,
    layout: str = "page_first_direct",
    page_tokens: int = 16,
) -> None:
    asked, whole = prompt(300, 200), full_pages(200, page_tokens)
    model = SHAPES[name].save(folder / "model")
    how = watched(
        daemon,
        folder / "watched",
        layout=layout,
        engine={"page_size": page_tokens},
        weights_revision=f"{name} {layout}",
    )
    with Engine(model, **how) as engine:
        computed = engine.store([asked])
        loaded = engine.fresh([asked])
        assert (computed[0].cached, loaded[0].stored) == (0, whole)
        assert same(loaded, computed)
        zero(daemon, layout_of(folder / "watched"), keys_of(asked, page_tokens))
        changed = engine.fresh([asked])
        assert (changed[0].stored, same(changed, computed)) == (whole, False)


@pytest.mark.parametrize("name", SHAPES)
def test_a_hit_answers_as_computed(daemon: LocalDaemon, tmp_path: Path, name: str) -> None:
    check_hit(daemon, tmp_path, name)


@pytest.mark.parametrize(
    ("layout", "page_tokens"), [("layer_first", 16), ("layer_first", 1), ("page_first_direct", 64)]
)
def test_layouts_of_latents(daemon: LocalDaemon, tmp_path: Path, layout: str, page_tokens: int) -> None:
    check_hit(daemon, tmp_path, "deepseek v2", layout, page_tokens)
