"""The documentation site: a hook of MkDocs that adds generated pages, see mkdocs.yml.

The reference comes from the code, see `reference`. The README and the documents beside the code become pages
with links that work there. Not covered: pages of docs/, which are written by hand.

    python packaging/site.py      checks that everything in the code is documented; part of `make check`
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from reference import PAGES, undocumented

ROOT = Path(__file__).parents[1]

COPIES = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "benchmark-results.md": "bench/RESULTS.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security-reports.md": "SECURITY.md",
    "explained/core.md": "kvstore/core/README.md",
    "explained/policy.md": "kvstore/core/policy/README.md",
    "explained/tiers.md": "kvstore/tiers/README.md",
    "explained/tenancy.md": "kvstore/daemon/tenancy/README.md",
    "explained/network.md": "kvstore/daemon/network/README.md",
    "explained/cuda.md": "kvstore/cuda/README.md",
}
"""Pages that are copies of documents, by their place on the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    pages = {page: _copy(source) for page, source in COPIES.items()}
    for name, module in PAGES.items():
        pages[f"reference/{name}.md"] = "\n".join(module.page()) + "\n"
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Returns a page of docs/ with links to copied documents, such as `../bench/RESULTS.md`, for the site."""
    here = posixpath.dirname(page.file.src_uri)
    pages = {document: copy for copy, document in COPIES.items()}

    def link(match: re.Match[str]) -> str:
        copy = pages.get(posixpath.normpath(posixpath.join("docs", here, match[1])))
        return f"]({posixpath.relpath(copy, here or '.')}" if copy else match[0]

    return re.sub(r"\]\((\.\./[^)#\s]+)", link, markdown)


def _copy(source: str) -> str:
    """Returns a document with links to places on the site. Links to files that are no pages become text."""
    pages = {document: page for page, document in COPIES.items()}

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if target.startswith("docs/"):
            return f"[{text}]({target.removeprefix('docs/')}{anchor})"
        return f"[{text}]({pages[target]}{anchor})" if target in pages else text

    document = (ROOT / source).read_text(encoding="utf-8").replace('="docs/', '="')
    return re.sub(r"\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)", link, document)


def check() -> int:
    """Prints each item of the code without documentation. Returns the exit code."""
    lines = undocumented()
    for line in lines:
        print(line, file=sys.stderr)
    print(f"reference: {len(PAGES)} pages, {len(lines)} items without documentation")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(check())
