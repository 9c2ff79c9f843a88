"""What every engine imports, once: the processes of engines are forks of one that has imported this module.

SGLang takes a quarter of a minute to import its models, in each of its processes.
"""

from __future__ import annotations

import sglang.launch_server
import sglang.srt.entrypoints.engine
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.scheduler
import sglang.srt.mem_cache.unified_radix_cache
import sglang.srt.models.registry  # noqa: F401

import kvstore_sglang.storage  # noqa: F401
