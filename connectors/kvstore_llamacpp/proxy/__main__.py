"""Runs the proxy: `python -m kvstore_llamacpp.proxy`, as `kvstore-llama-proxy` does."""

from kvstore_llamacpp.proxy.command import main

if __name__ == "__main__":
    raise SystemExit(main())
