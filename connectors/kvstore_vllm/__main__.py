"""The command `python -m kvstore_vllm check MODEL [options] [engine arguments of vLLM]`.

Exit codes: 0 served, 1 refused, 2 wrong usage, or vLLM cannot build the model.
"""

from __future__ import annotations

import argparse
import sys

from kvstore.model_check import CheckCommand

_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Variables that vLLM reads when it is imported, unless the caller has set them."""


def main(arguments: list[str]) -> int:
    """Runs the command. Returns its exit code."""
    return CheckCommand(
        package="kvstore_vllm",
        engine="vLLM",
        prints="the KV groups of a model",
        example="--tensor-parallel-size 2",
        environment=_ENVIRONMENT,
        check=_check,
    ).run(arguments)


def _check(
    options: argparse.Namespace, rest: list[str], dram_bytes: int, nvme_bytes: int
) -> tuple[bool, str]:
    from kvstore_vllm.check import check, configuration  # noqa: PLC0415 - the environment is set before
    from kvstore_vllm.tables import as_json, as_text  # noqa: PLC0415

    report = check(configuration(options.model, rest), dram_bytes, nvme_bytes)
    return report.served, as_json(report) if options.json else as_text(report)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
