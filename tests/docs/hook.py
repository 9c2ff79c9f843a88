"""The hook of the documentation site, which mkdocs and `make check` load from packaging/."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_PACKAGING = Path(__file__).parents[2] / "packaging"

sys.path.insert(0, str(_PACKAGING))
try:
    _spec = spec_from_file_location("documentation_site", _PACKAGING / "site.py")
    assert _spec is not None
    assert _spec.loader is not None
    site = module_from_spec(_spec)
    _spec.loader.exec_module(site)
finally:
    sys.path.remove(str(_PACKAGING))

COPIES: dict[str, str] = site.COPIES
PAGES = site.PAGES
