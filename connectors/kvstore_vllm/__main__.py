"""The command `python -m kvstore_vllm check MODEL [options] [engine arguments of vLLM]`.

Exit codes: 0 served, 1 refused, 2 wrong usage, or vLLM cannot build the model.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import redirect_stdout

from kvstore.errors import KVStoreError, MisuseError, printable
from kvstore.tier_sizes import parse_size

_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Variables that vLLM reads when it is imported, unless the caller has set them."""


def main(arguments: list[str]) -> int:
    """Runs the command. Returns its exit code."""
    try:
        _check_order(arguments)
        options, rest = _parser().parse_known_args(arguments)
        dram_bytes, nvme_bytes = _tier("--dram", options.dram), _tier("--nvme", options.nvme)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with redirect_stdout(sys.stderr):
            from kvstore_vllm.check import check, configuration  # noqa: PLC0415

            report = check(configuration(options.model, rest), dram_bytes, nvme_bytes)
    except KVStoreError as error:
        print(f"error: {printable(error.message)}\nhint: {printable(error.hint)}", file=sys.stderr)
        return 2
    from kvstore_vllm.tables import as_json, as_text  # noqa: PLC0415

    print(as_json(report) if options.json else as_text(report))
    return 0 if report.served else 1


def _check_order(arguments: list[str]) -> None:
    """Raises MisuseError if the model is not first: the value of an option of vLLM would be taken for it."""
    first = arguments[1] if len(arguments) > 1 else ""
    if first.startswith("-") and first not in ("-h", "--help"):
        raise MisuseError(f"{first} comes before the model", "check MODEL [options] [arguments of vLLM]")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvstore_vllm",
        description="Commands of the vLLM connector.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="check")
    check = commands.add_parser(
        "check",
        allow_abbrev=False,
        help="check what the connector does with a model",
        description="Prints the KV groups of a model, the sizes of its blocks, how many prompts fit in the "
        "tiers, and what is not served. Loads no weights and starts no engine.",
        epilog="Every other argument is one of vLLM's engine, such as --tensor-parallel-size 2. "
        "Exit codes: 0 served, 1 refused, 2 wrong usage, or vLLM cannot build the model.",
    )
    check.add_argument(
        "model", metavar="MODEL", help="a folder, or a name in the hub's cache of this machine"
    )
    check.add_argument(
        "--dram", metavar="SIZE", default="1GiB", help="of the DRAM tier (default: %(default)s)"
    )
    check.add_argument(
        "--nvme", metavar="SIZE", default="1GiB", help="of the NVMe tier (default: %(default)s)"
    )
    check.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _tier(option: str, text: str) -> int:
    """Returns the bytes of a tier. Raises MisuseError."""
    try:
        if size := parse_size(text):
            return size
    except MisuseError as error:
        raise MisuseError(f"{option}: {error.message}", error.hint) from error
    raise MisuseError(f"{option}: {text!r} is nothing", "a size such as 64GiB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
