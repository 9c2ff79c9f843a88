"""Arguments, models and files that are not served are refused by name, with a hint."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.errors import ConfigError, MisuseError
from kvstore_llamacpp.proxy.command import main
from kvstore_llamacpp.proxy.llama_server import ollama
from kvstore_llamacpp.proxy.llama_server.gguf_header import architecture_of
from kvstore_llamacpp.proxy.llama_server.options import read_options
from kvstore_llamacpp.proxy.namespace import check_configuration, check_model
from tests.daemons import eventually
from tests.engines.llamaserver.build import program
from tests.engines.llamaserver.serving import proxied

ARGUMENTS = {
    "--context-shift": "moved KV is not the KV of its prefix",
    "--cache-reuse 256": "moved KV is not the KV of its prefix",
    "--lora a.gguf": "an adapter changes KV",
    "--control-vector a.gguf": "a control vector changes KV",
    "--override-kv a=int:1": "no longer names its KV",
    "--mmproj a.gguf": "images have none",
    "-md a.gguf": "speculative decoding is not tested",
    "--swa-full": "models with sliding windows are not served",
    "--embeddings": "only completions are served",
    "--pooling mean": "only completions are served",
    "-hf a/b": "must be a local file",
    "--host 0.0.0.0": "the proxy listens instead",
    "--port 80": "the proxy listens instead",
    "--slot-save-path /tmp": "the proxy sets it",
    "--cache-ram 100": "the proxy sets it",
    "--no-kv-unified": "one unified buffer only",
    "--no_kv_unified": "one unified buffer only",
    "--api-prefix /a": "without a prefix",
    "--sleep-idle-seconds 5": "has no slots",
    "--some-new-option": "is not known to leave KV as it is",
    "--ctx-size": "has no value",
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_arguments_of_llama_server(argument: str) -> None:
    with pytest.raises(MisuseError) as caught:
        read_options(["llama-server", "-m", "a.gguf", *argument.split()], {})
    assert caught.value.message.startswith(argument.partition(" ")[0])
    assert ARGUMENTS[argument] in caught.value.message
    assert caught.value.hint


def test_variables_of_llama_server() -> None:
    for name in ("LLAMA_ARG_CONTEXT_SHIFT", "LLAMA_ARG_MMPROJ", "LLAMA_ARG_OF_TOMORROW"):
        with pytest.raises(MisuseError, match=f"the variable {name} is set"):
            read_options(["llama-server", "-m", "a.gguf"], {name: "1"})


def test_a_command_without_program_or_model() -> None:
    for command, says in (([], "no command"), (["llama-server"], "without a model")):
        with pytest.raises(MisuseError, match=says):
            read_options(command, {})
    assert read_options(["llama-server"], {"LLAMA_ARG_MODEL": "b.gguf"}).model == Path("b.gguf")


def counted(*arguments: str, **variables: str) -> tuple[str, ...]:
    return read_options(["llama-server", "-m", "a.gguf", *arguments], variables).counted


def test_what_the_namespace_contains() -> None:
    assert counted() == counted("-t", "4", "--api-key", "a", "-np", "3", "--temp", "0.5", "--metrics", "-v")
    assert counted(LLAMA_ARG_THREADS="2", LLAMA_API_KEY="a", LLAMA_ARG_HOST="0.0.0.0") == counted()
    assert counted("-c", "4096") == counted("--ctx_size", "4096") == ("--ctx-size 4096",)
    others = [
        ("--rope-freq-base", "20000"), ("-ctk", "q8_0"), ("-ctv", "q8_0"), ("-fa", "on"),
        ("-ngl", "9"), ("-nkvo",),
    ]  # fmt: skip
    assert len({counted(), *(counted(*other) for other in others)}) == len(others) + 1
    assert counted(LLAMA_ARG_CTX_SIZE="4096") == ("LLAMA_ARG_CTX_SIZE=4096",)
    assert counted(LLAMA_ATTN_ROT_DISABLE="1") == ("LLAMA_ATTN_ROT_DISABLE=1",)


def test_keys_of_llama_server(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# comment\nthree\n\n")
    command = ["llama-server", "-m", "a", "--api-key", "one,two", "--api-key-file", str(file)]
    assert read_options(command, {"LLAMA_API_KEY": "four"}).keys == ("one", "two", "three", "four")
    with pytest.raises(ConfigError, match="cannot read the API keys"):
        read_options([*command[:3], "--api-key-file", str(tmp_path / "none")], {})


def test_files_with_options(tmp_path: Path) -> None:
    file = tmp_path / "llama.cpp/config.ini"
    check_configuration({"XDG_CONFIG_HOME": str(tmp_path)})
    file.parent.mkdir()
    file.touch()
    with pytest.raises(MisuseError, match=r"config\.ini has options"):
        check_configuration({"XDG_CONFIG_HOME": str(tmp_path)})


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss"])
def test_models_with_windows(models: dict[str, Path], name: str) -> None:
    options = read_options(["llama-server", "-m", str(models[name])], {})
    with pytest.raises(MisuseError, match=f"{name} has sliding windows"):
        check_model(options, None)


def test_windows_are_found_in_the_slot_too(models: dict[str, Path], tmp_path: Path) -> None:
    """As if the architecture had passed: the first slot file is refused."""
    passes = (
        "from kvstore_llamacpp.proxy import namespace\n"
        "namespace._WINDOWS = ()\n"
        "namespace.SERVED_MODELS += ('gemma3',)\n"
        "from kvstore_llamacpp.proxy.command import main; raise SystemExit(main())"
    )
    says = "a slot file has two caches: the model has sliding windows"
    with (
        pytest.raises(AssertionError, match=says),
        proxied(models["gemma3"], tmp_path, f"unix://{tmp_path}/none.sock", runs=passes),
    ):
        pass


def gguf(*pairs: tuple[str, int, bytes], keys: int | None = None) -> bytes:
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs) if keys is None else keys)
    return raw + b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in pairs)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


MAMBA = ("general.architecture", 8, text("mamba"))


def test_architectures_that_are_not_tested(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(gguf(MAMBA))
    with pytest.raises(MisuseError, match="the architecture mamba is not tested"):
        check_model(read_options(["llama-server", "-m", str(file)], {}), None)


def test_a_model_in_several_files_needs_a_name(models: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "a-00001-of-00003.gguf"
    file.symlink_to(models["llama"])
    options = read_options(["llama-server", "-m", str(file)], {})
    with pytest.raises(MisuseError, match="in several files"):
        check_model(options, None)
    check_model(options, "named")


def test_the_architecture_is_found_behind_values_of_all_types(tmp_path: Path) -> None:
    before = [
        ("a", 4, struct.pack("<I", 1)), ("b", 7, b"\1"), ("c", 12, struct.pack("<d", 1)), ("d", 8, text("x")),
        ("e", 9, struct.pack("<IQ", 4, 3) + bytes(12)),
        ("f", 9, struct.pack("<IQ", 8, 2) + text("y") + text("")),
    ]  # fmt: skip
    file = tmp_path / "a.gguf"
    file.write_bytes(gguf(*before, MAMBA))
    assert architecture_of(file) == "mamba"


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"GGUF", b"GGML" + bytes(20), gguf(), gguf(MAMBA)[:-1], gguf(MAMBA, keys=1 << 40),
        gguf(("a", 8, struct.pack("<Q", 1 << 60))), gguf(("a", 77, b"")),
        gguf(("a", 9, struct.pack("<IQ", 9, 1))),
        b"GGUF" + struct.pack("<IQQ", 9, 0, 1),
        gguf(("general.architecture", 8, struct.pack("<Q", 1) + b"\xff")),
    ],
    ids=range(11),
)  # fmt: skip
def test_files_that_are_no_models(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(raw)
    with pytest.raises(ConfigError, match="is no GGUF file that can be read"):
        architecture_of(file)


def said_by_main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(arguments)
    said = capsys.readouterr().err
    assert "hint: " in said
    return code, said


def test_the_command_refuses(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(models["llama"])
    server: Sequence[str] = ("--", str(program()), "-m", model)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        for code, says, arguments in (
            (2, "there is no command", ()),
            (2, "without a model", ("--", "llama-server")),
            (2, "--block-tokens is 0", ("--block-tokens", "0", *server)),
            (2, "--queue is -1", ("--queue", "-1", *server)),
            (2, "--start-timeout is 0", ("--start-timeout", "0", *server)),
            (2, "--listen is '8080'", ("--listen", "8080", *server)),
            (1, f"cannot listen on {where}", ("--listen", where, *server)),
            (1, "there is no program no-such-server", ("--", "no-such-server", "-m", model)),
            (1, "cannot read the model", ("--", "llama-server", "-m", f"{model}.none")),
            (
                1,
                "cannot make a folder",
                ("--slot-folder", f"{tmp_path}/none", "--listen", "127.0.0.1:0", *server),
            ),
            (2, "has sliding windows", ("--", "llama-server", "-m", str(models["gemma3"]))),
            (2, "is no model of Ollama", ("--ollama", "../x", "--", "llama-server")),
        ):
            assert said_by_main(capsys, *arguments)[0] == code, says
            # Printed once more by the first call only.
            assert says in said_by_main(capsys, *arguments)[1]


def test_a_wrapper_that_hides_the_program(models: dict[str, Path], tmp_path: Path) -> None:
    wrapper = tmp_path / "llama-server"
    wrapper.write_text(f'#!/bin/sh\necho $$ > {tmp_path}/pid\n{program()} "$@"\n')
    wrapper.chmod(0o755)
    with (
        pytest.raises(AssertionError, match=r"does not run llama\.cpp in its own process"),
        proxied(models["llama"], tmp_path, f"unix://{tmp_path}/none.sock", server=wrapper),
    ):
        pass
    # Nothing is left of the group of processes.
    eventually(lambda: not group_of((tmp_path / "pid").read_text().strip()))


def group_of(number: str) -> list[str]:
    """The processes of a group."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group = file.read_text().rpartition(")")[2].split()[:3]
            if group == number and state != "Z":
                found.append(file.parent.name)
    return found


# -- models of Ollama

DIGEST = "sha256:" + "0123456789abcdef" * 4


def pulled(folder: Path, name: str, *kinds: str) -> Path:
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True)
    layers = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": DIGEST} for kind in kinds]
    manifest.write_text(json.dumps({"layers": layers}))
    blob = folder / "blobs" / DIGEST.replace(":", "-")
    blob.parent.mkdir(exist_ok=True)
    blob.touch()
    return blob


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ("llama3.2", "registry.ollama.ai/library/llama3.2/latest"),
        ("llama3.2:3b", "registry.ollama.ai/library/llama3.2/3b"),
        ("me/mine:1", "registry.ollama.ai/me/mine/1"),
        ("hf.co/some/model:Q4_K_M", "hf.co/some/model/Q4_K_M"),
    ],
)
def test_a_model_of_ollama_is_found(tmp_path: Path, asked: str, place: str) -> None:
    blob = pulled(tmp_path / ".ollama/models", place, "license", "model", "template")
    assert ollama.model_file(asked, {"HOME": str(tmp_path)}) == blob
    assert ollama.model_file(asked, {"OLLAMA_MODELS": str(tmp_path / ".ollama/models")}) == blob


def test_models_of_ollama_that_are_refused(tmp_path: Path) -> None:
    place = {"OLLAMA_MODELS": str(tmp_path)}
    pulled(tmp_path, "registry.ollama.ai/library/adapted/latest", "model", "adapter")
    pulled(tmp_path, "registry.ollama.ai/library/empty/latest")
    broken = tmp_path / "manifests/registry.ollama.ai/library/broken/latest"
    broken.parent.mkdir()
    broken.write_text("[]")
    for asked, says in (
        ("adapted", "has an adapter"),
        ("empty", "cannot read"),
        ("broken", "cannot read"),
        ("absent", "is not in"),
        ("", "is no model of Ollama"),
        ("../../etc/passwd", "is no model of Ollama"),
        ("a/b/c/d", "is no model of Ollama"),
        ("a:", "is no model of Ollama"),
    ):
        with pytest.raises((MisuseError, ConfigError), match=says) as caught:
            ollama.model_file(asked, place)
        assert caught.value.hint
    for file in (tmp_path / "blobs").iterdir():
        file.unlink()
    pulled(tmp_path, "registry.ollama.ai/library/gone/latest", "model").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        ollama.model_file("gone", place)
