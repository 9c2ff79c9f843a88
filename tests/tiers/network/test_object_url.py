"""What a URL of an object store may say."""

from __future__ import annotations

import os
import sys

import pytest

from kvstore.errors import ConfigError
from kvstore.tiers.network import BackendSettings, open_backend

pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nonexistent")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3:///prefix", "names no bucket"),
        ("s3://bucket?regoin=eu", "no option 'regoin'"),
        ("gs://bucket?region=eu", "no option 'region'"),
        ("s3://bucket?endpoint=127.0.0.1:9000", "http://HOST:PORT"),
        ("s3://bucket?unsigned_payload=yes", "0 or 1"),
        ("az://container", "cannot be used"),
    ],
)
def test_unusable_settings_are_named(url, words) -> None:
    with pytest.raises(ConfigError, match=words):
        open_backend(BackendSettings(url, credentials="anonymous"))


@pytest.mark.parametrize("url", ["s3://bucket", "gs://bucket", "az://container?account=a"])
def test_credentials_are_requested_only_if_configured(url) -> None:
    with pytest.raises(ConfigError, match="no credentials for") as told:
        open_backend(BackendSettings(url))
    assert "network.credentials" in told.value.hint
    unsigned = open_backend(BackendSettings(url, credentials="anonymous"))
    assert str(unsigned._store.config["skip_signature"]).lower() == "true"
    assert not unsigned._signs
    unsigned.close()
    open_backend(BackendSettings(url, credentials="instance")).close()


@pytest.mark.parametrize(
    ("url", "variables"),
    [
        ("s3://bucket", {"AWS_ACCESS_KEY_ID": "made-up", "AWS_SECRET_ACCESS_KEY": "made-up"}),
        ("az://container?account=a", {"AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}),
    ],
)
def test_keys_may_be_in_the_environment(monkeypatch, url, variables) -> None:
    for name, value in variables.items():
        with pytest.raises(ConfigError, match="no credentials"):
            open_backend(BackendSettings(url))
        monkeypatch.setenv(name, value)
    open_backend(BackendSettings(url)).close()


def test_gs_has_no_password() -> None:
    with pytest.raises(ConfigError, match="GOOGLE_APPLICATION_CREDENTIALS"):
        open_backend(BackendSettings("gs://bucket", user="u", password="p"))


@pytest.mark.parametrize(
    ("endpoint", "option", "unsigned"),
    [
        ("", "", True),
        ("https://127.0.0.1:9", "", True),
        ("http://127.0.0.1:9", "", False),
        ("http://127.0.0.1:9", "&unsigned_payload=1", True),
        ("https://127.0.0.1:9", "&unsigned_payload=0", False),
    ],
)
def test_bodies_are_signed_where_nothing_else_protects_them(endpoint, option, unsigned) -> None:
    where = f"&endpoint={endpoint}" if endpoint else ""
    url = f"s3://bucket/prefix?region=eu-west-1{where}{option}"
    backend = open_backend(BackendSettings(url, user="key", password="secret"))
    config = backend._store.config
    assert str(config["unsigned_payload"]).lower() == str(unsigned).lower()
    assert config["region"] == "eu-west-1"
    assert backend._store.prefix == "prefix"
    backend.close()


def test_azure_takes_the_account_from_the_url() -> None:
    key = "a2V5"
    backend = open_backend(BackendSettings("az://container/prefix?account=blobs", password=key))
    assert backend._store.config["account_name"] == "blobs"
    backend.close()


@pytest.mark.parametrize(("bypassed", "straight"), [("", False), ("127.0.0.1", True)])
def test_reads_go_through_a_proxy_where_there_is_one(monkeypatch, bypassed, straight) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", bypassed)
    settings = BackendSettings("s3://bucket?endpoint=http://127.0.0.1:9", user="key", password="secret")
    backend = open_backend(settings)
    assert backend._signs is straight
    backend.close()


@pytest.mark.parametrize(
    ("absent", "url"), [("obstore.store", "s3://bucket"), ("boto3", "s3://bucket?profile=mine")]
)
def test_packages_that_are_missing_are_named(monkeypatch, absent, url) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ConfigError, match="pip install"):
        open_backend(BackendSettings(url))
