"""The command `kvstore-llama-proxy [options] -- llama-server ARGUMENTS`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from kvstore import Client
from kvstore.errors import ConfigError, KVStoreError, MisuseError, UnavailableError
from kvstore_llamacpp.proxy import namespace
from kvstore_llamacpp.proxy.app import Proxy
from kvstore_llamacpp.proxy.completions import Completions
from kvstore_llamacpp.proxy.llama_server import ollama
from kvstore_llamacpp.proxy.llama_server.http_client import Headers, NoAnswerError, ask
from kvstore_llamacpp.proxy.llama_server.options import ServerOptions, read_options
from kvstore_llamacpp.proxy.llama_server.process import LlamaServer, slot_folder
from kvstore_llamacpp.proxy.llama_server.trial import Trial
from kvstore_llamacpp.proxy.rates import Rates
from kvstore_llamacpp.proxy.slots import SlotPool
from kvstore_llamacpp.proxy.store import SlotStore

_logger = logging.getLogger("kvstore_llamacpp.proxy")

_EXAMPLE = "kvstore-llama-proxy -- llama-server -m model.gguf -c 8192"
_DRAIN_S = 5
_USAGE_CODE = 2
_MOST_PORT = 1 << 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the proxy until a signal, or the end of llama-server. Returns the exit code.

    That of llama-server if it ends first, 0 after a signal, 1 for an error, 2 for a refusal or wrong usage.
    """
    logging.basicConfig(level=logging.INFO, format="kvstore-llama-proxy: %(message)s")
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    settings = _parser().parse_args(given[:cut])
    try:
        options = _server_options(settings, given[cut + 1 :])
        with _runner() as runner:
            return runner.run(_run(settings, options))
    except MisuseError as error:
        print(f"kvstore-llama-proxy: {error.message}\n  hint: {error.hint}", file=sys.stderr)
        return _USAGE_CODE
    except KVStoreError as error:
        print(f"kvstore-llama-proxy: {error.message}\n  hint: {error.hint}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "kvstore-llama-proxy",
        "kvstore-llama-proxy [options] -- llama-server -m FILE [arguments of llama-server]",
        "Starts llama-server, and answers its requests with prefixes from the store.",
        f"Example: {_EXAMPLE}. The tenant's token is in KVSTORE_TOKEN.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--listen", metavar="HOST:PORT", default="127.0.0.1:8080", help="where to listen (%(default)s)")
    add("--url", help="the daemon's socket, unix:///PATH (KVSTORE_SOCKET, or the default one)")
    add(
        "--deadline",
        metavar="S",
        type=float,
        default=1.0,
        help="seconds for a load, or a store (%(default)s)",
    )
    add("--block-tokens", metavar="N", type=int, default=64, help="tokens of a stored block (%(default)s)")
    add("--revision", metavar="NAME", help="a name for the weights (a digest of the model's file)")
    add(
        "--queue", metavar="N", type=int, default=256, help="most requests that wait for a slot (%(default)s)"
    )
    add("--restore", choices=("measured", "always"), default="measured",
        help="load prefixes that are faster to load than to evaluate, or all (%(default)s)")  # fmt: skip
    add("--slot-folder", metavar="PATH", type=Path, help="where slot files are made (/dev/shm)")
    add("--start-timeout", metavar="S", type=float, default=600.0, help="seconds for the start (%(default)s)")
    add("--ollama", metavar="MODEL", help="serve a model that Ollama has pulled, instead of -m FILE")
    return parser


def _server_options(settings: argparse.Namespace, command: Sequence[str]) -> ServerOptions:
    """Returns the options of llama-server, once all settings are checked. Raises KVStoreError."""
    if settings.block_tokens < 1:
        raise MisuseError(f"--block-tokens is {settings.block_tokens}", "at least 1 token a block")
    if settings.queue < 0:
        raise MisuseError(f"--queue is {settings.queue}", "0 or more requests")
    if settings.start_timeout <= 0:
        raise MisuseError(f"--start-timeout is {settings.start_timeout:g}", "seconds, more than 0")
    namespace.check_configuration(os.environ)
    if settings.ollama is not None:
        if not command:
            raise MisuseError("there is no command of llama-server", f"{_EXAMPLE.partition(' -m')[0]}")
        command = [*command, "-m", str(ollama.model_file(settings.ollama, os.environ))]
    return read_options(command, os.environ)


def _runner() -> asyncio.Runner:
    """Returns a runner on uvloop, which halves what the proxy adds to a request, or on asyncio without it."""
    try:
        import uvloop  # noqa: PLC0415 - absent where it does not build
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def _run(settings: argparse.Namespace, options: ServerOptions) -> int:
    """Runs until the first signal. A signal is no error."""
    serving = asyncio.ensure_future(_serve(settings, options))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, serving.cancel)
    try:
        return await serving
    except asyncio.CancelledError:
        return 0


async def _serve(settings: argparse.Namespace, options: ServerOptions) -> int:
    model = namespace.check_model(options, settings.revision)
    program = _found(options.program)
    options = ServerOptions(program, options.arguments, options.model, options.counted, options.keys)
    client = Client(settings.url, deadline_s=settings.deadline)
    headers: Headers = [(b"authorization", b"Bearer " + key.encode()) for key in options.keys[:1]]
    with client, _listening(settings.listen) as listener, slot_folder(settings.slot_folder) as folder:
        server = LlamaServer(options, folder)
        try:
            await server.start(settings.start_timeout)
            identity = namespace.program_identity(options, server.pid)
            form = await Trial(server, headers).run()
            slots, cells = await _sizes(server, headers)
            size = settings.block_tokens
            layout = namespace.layout_of(options, model, form, identity, cells, size, settings.revision)
            completions = Completions(
                server.port,
                folder,
                SlotPool(slots, settings.queue),
                SlotStore(client, layout, form),
                Rates(settings.restore == "always"),
                cells,
            )
            _logger.info(
                "listening on http://%s, %d slots, blocks of %d tokens; llama-server: port %d, pid %d",
                settings.listen, slots, size, server.port, server.pid,
            )  # fmt: skip
            return await _until_it_ends(
                Proxy(server.port, completions, options.keys), completions, listener, server
            )
        finally:
            await server.stop()


async def _until_it_ends(
    app: Proxy, completions: Completions, listener: socket.socket, server: LlamaServer
) -> int:
    """Serves requests until llama-server ends. Returns its exit code."""
    config = uvicorn.Config(
        app, http="h11", ws="none", lifespan="off", log_level=logging.CRITICAL, access_log=False,
        server_header=False, date_header=False, timeout_graceful_shutdown=_DRAIN_S,
    )  # fmt: skip
    web = _WebServer(config)
    serving = asyncio.ensure_future(web.serve(sockets=[listener]))
    try:
        code = await server.wait()
        _logger.error("llama-server has ended with exit code %d", code)
        return code
    finally:
        web.should_exit = True
        await asyncio.wait([serving])
        await completions.close()


class _WebServer(uvicorn.Server):
    """Leaves signals to the proxy, which must end llama-server."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn.Server."""
        yield


async def _sizes(server: LlamaServer, headers: Headers) -> tuple[int, int]:
    """Returns the number of slots, and the tokens that they may have together. Raises UnavailableError."""
    try:
        _, said = await ask(server.port, b"GET", b"/props", headers)
        props: Any = json.loads(said)
        return int(props["total_slots"]), int(props["default_generation_settings"]["n_ctx"])
    except (NoAnswerError, ValueError, KeyError, TypeError) as error:
        raise UnavailableError(f"llama-server does not tell its slots: {error}", "see its output") from error


def _found(program: str) -> str:
    """Returns the path of a program."""
    for folder in ("",) if "/" in program else os.get_exec_path():
        path = os.path.join(folder, program)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise ConfigError(f"there is no program {program}", "install llama.cpp, or give the path of llama-server")


@contextmanager
def _listening(where: str) -> Iterator[socket.socket]:
    """Binds the address, so that a wrong one is an error before the model is loaded."""
    host, _, port = where.rpartition(":")
    if not host or not port.isdigit() or int(port) >= _MOST_PORT:
        raise MisuseError(f"--listen is {where!r:.80}", "HOST:PORT, for example 127.0.0.1:8080")
    host = host.strip("[]")
    try:
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, int(port)), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {where}: {error}", "use --listen with another address"
        ) from error
    with listener:
        yield listener
