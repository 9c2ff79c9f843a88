"""What tests see of a worker's KV memory, also in a process of its own."""

from __future__ import annotations

from typing import Any

import torch
from blake3 import blake3


class PageDigests:
    """Methods that vLLM adds to its workers (`worker_extension_cls`)."""

    model_runner: Any

    def page_digests(self) -> list[str]:
        """Returns digests of all pages that are not zero, all layers of each, in order of pages."""
        caches = [each.view(torch.uint8).flatten(1) for each in self.model_runner.kv_caches]
        pages = torch.cat(caches, 1).numpy()
        return [blake3(page.tobytes()).hexdigest(8) for page in pages if page.any()]
