"""The `kvstore` command, which is also `python -m kvstore`."""

import gc
import os
import sys
from pathlib import Path


def main() -> None:
    """Runs the command in `sys.argv`. `serve` with nothing but a configuration starts without a parser.

    The modules of all other commands would delay the first answer of a daemon by a fifth of a second.
    """
    match sys.argv[1:]:
        case ["serve"]:
            _serve(None)
        case ["serve", "-c" | "--config", path] if not path.startswith("-"):
            _serve(Path(path))
        case _:
            from kvstore.cli import app  # noqa: PLC0415

            app(prog_name="kvstore")


def _serve(config: Path | None) -> None:
    # Imports make no garbage to speak of. The daemon enables the collector again.
    gc.disable()
    # Pydantic would look for plug-ins in all packages that are installed beside kvstore.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from kvstore.daemon.main import run  # noqa: PLC0415
    from kvstore.errors import KVStoreError, for_terminal  # noqa: PLC0415

    try:
        sys.exit(run(config))
    except KVStoreError as error:
        print(for_terminal(error), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
