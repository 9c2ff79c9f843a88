"""vLLM's calls of the garbage collector. It walks the objects of all imports nine times a start, in three
quarters of the time. Here it does so when an engine ends, and what is left is not walked again. In between it
never does: what is left of an engine would shut the next one down.
"""

from __future__ import annotations

import gc

_collect, _freeze = gc.collect, gc.freeze


def collect_between_engines_only() -> None:
    """From now on only `collect` collects."""
    gc.collect = lambda generation=2: 0
    gc.freeze = gc.unfreeze = lambda: None
    gc.disable()
    collect()


def collect() -> None:
    """Collects until nothing more is freed."""
    while _collect():
        pass
    _freeze()
