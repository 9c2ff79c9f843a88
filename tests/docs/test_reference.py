"""Everything in the code is documented in the reference; what is not is named, and fails `make check`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from fastapi import FastAPI
from pydantic.fields import FieldInfo

import kvstore
from kvstore.admin import metrics
from kvstore.config.file import Config
from kvstore.config.sections import Section
from kvstore.core.residency.decision_log import DecisionKind
from kvstore.daemon.runtime.entry_kinds import EntryKind
from kvstore.errors import TierError
from kvstore.wire import messages
from tests.docs.blocks import blocks
from tests.docs.commands import ROOT
from tests.docs.hook import PAGES, site


class Bare(Section):
    """A section with a key that has no docstring."""

    speed: int = 1


def missing(page: str) -> list[str]:
    """Returns what a page says is not documented."""
    return list(PAGES[page].missing())


def test_everything_is_documented() -> None:
    command = [sys.executable, "packaging/site.py"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "0 items without documentation" in ran.stdout
    assert (
        "packaging/site.py" in (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0]
    )


def test_a_key_without_a_docstring_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(Config.model_fields, "bare", FieldInfo.from_annotation(Bare))
    assert missing("configuration")[0].startswith("bare.speed has no docstring: add one below its field")
    assert site.check() == 1
    assert "configuration: bare.speed has no docstring" in capsys.readouterr().err


def test_a_metric_without_a_help_text_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(metrics._COUNTERS["core"], "new_blocks", ("new_blocks", ""))
    assert "kvstore_new_blocks_total has no help text" in missing("metrics")[0]


def test_a_label_without_a_meaning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(metrics.LABELS, "waited")
    assert "the label waited of kvstore_call_seconds has no meaning" in missing("metrics")[0]


def test_a_command_and_an_option_without_help_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()

    @app.command()
    def bare(fast: bool = False) -> None:
        pass

    @app.command()
    def other() -> None:
        """Does something."""

    monkeypatch.setattr(PAGES["commands"], "app", app)
    command, option = missing("commands")
    assert command.startswith("kvstore bare has no help")
    assert option.startswith("kvstore bare --fast, --no-fast has no help")


def test_a_path_and_a_parameter_without_a_description_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()

    @app.get("/bare/{name}")
    async def bare(name: str) -> None:
        pass

    monkeypatch.setattr(PAGES["rest"], "make", lambda *_: app)
    path, parameter, *_ = missing("rest")
    assert path.startswith("GET /bare/{name} has no docstring")
    assert parameter == "GET /bare/{name}: the parameter name has no description"


@pytest.mark.parametrize("kind", [EntryKind.JOINED, DecisionKind.DENIED])
def test_an_event_without_a_meaning_fails(
    monkeypatch: pytest.MonkeyPatch, kind: EntryKind | DecisionKind
) -> None:
    monkeypatch.setattr(kind, "meaning", "")
    assert missing("events")[0].startswith(f"{kind.name.lower()} has no meaning")


def test_an_error_without_a_docstring_and_a_status_without_a_meaning_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TierError, "__doc__", None)
    monkeypatch.delitem(PAGES["errors"]._STATUSES, 412)
    error, status = missing("errors")
    assert error.startswith("TierError has no docstring")
    assert status.startswith("the HTTP status 412 has no meaning")


def test_a_method_without_a_docstring_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore.Client.namespace, "__doc__", None)
    assert "Client.namespace has no docstring" in missing("python")


def test_a_message_without_a_docstring_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages.Ping, "__doc__", None)
    assert missing("wire")[0].startswith("Ping has no docstring")


def test_a_field_without_a_meaning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAGES["formats"]._MEANINGS["slot header"], "gone", "not there any more")
    monkeypatch.delitem(PAGES["formats"]._MEANINGS["slot header"], "stamp")
    field, meaning = missing("formats")
    assert field.startswith("slot header: stamp has no meaning")
    assert meaning.startswith("slot header: there is no field gone")


def test_every_message_names_its_sender() -> None:
    sent = dict(zip(messages.ALL, messages.SENDERS, strict=True))
    for folder, sender in (("client", "client"), ("daemon", "daemon")):
        code = "".join(file.read_text() for file in (ROOT / "kvstore" / folder).rglob("*.py"))
        for message in messages.ALL:
            if f"send(m.{message.__name__}(" in code or f"yield m.{message.__name__}(" in code:
                assert sent[message] == sender, message.__name__


def test_messages_of_errors_have_their_hints() -> None:
    found = {message.text: message for message in PAGES["errors"].messages()}
    assert len(found) > 200
    assert found["there is no network tier"].hint == "set network.url"
    assert found["there is no network tier"].where == "daemon.requests"


def test_examples_of_the_reference_parse() -> None:
    for name, module in PAGES.items():
        for block in blocks("\n".join(module.page())):
            assert block.language in ("", "python", "json"), f"{name}:{block.line}"
