"""The command `python -m kvstore_sglang check MODEL [options] [server arguments of SGLang]`.

Exit codes: 0 served, 1 refused, 2 wrong usage, or SGLang refuses the model or its arguments.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings

from kvstore.model_check import CheckCommand


def main(arguments: list[str]) -> int:
    """Runs the command. Returns its exit code."""
    return CheckCommand(
        package="kvstore_sglang",
        engine="SGLang",
        prints="the KV pools of a model",
        example="--tp-size 2",
        environment={"HF_HUB_OFFLINE": "1"},
        check=_check,
    ).run(arguments)


def _check(
    options: argparse.Namespace, rest: list[str], dram_bytes: int, nvme_bytes: int
) -> tuple[bool, str]:
    # SGLang tells of kernels that this machine lacks, and of what it has changed in its arguments.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from kvstore_sglang.check import as_json, as_text, check, configure  # noqa: PLC0415 - see `environment`

    report = check(configure(options.model, rest), dram_bytes, nvme_bytes)
    return report.served, as_json(report) if options.json else as_text(report)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
