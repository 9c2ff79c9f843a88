"""obstore stores of `s3://`, `gs://` and `az://` URLs, and their credentials."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from urllib.request import getproxies, proxy_bypass

from kvstore.errors import ConfigError
from kvstore.tiers.network import BackendSettings

_OPTIONS = {
    "s3": ("endpoint", "region", "unsigned_payload", "profile"),
    "gs": (),
    "az": ("account", "endpoint"),
}
_KEYS = {
    "s3": (("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), ("AWS_PROFILE",)),
    "gs": (
        ("GOOGLE_APPLICATION_CREDENTIALS",),
        ("GOOGLE_SERVICE_ACCOUNT",),
        ("GOOGLE_SERVICE_ACCOUNT_PATH",),
        ("GOOGLE_SERVICE_ACCOUNT_KEY",),
    ),
    "az": (
        ("AZURE_STORAGE_ACCOUNT_KEY",),
        ("AZURE_STORAGE_SAS_KEY",),
        ("AZURE_STORAGE_SAS_TOKEN",),
        ("AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET"),
    ),
}
"""Environment variables from which obstore takes keys, by scheme. A group is complete or unused."""

_GS_FILE = Path("~/.config/gcloud/application_default_credentials.json")
_RETRY: dict[str, Any] = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=2), "base": 2},
}


def store_of(settings: BackendSettings) -> Any:
    """Returns the obstore store of a URL. Paths are relative to the URL's prefix. Sends no request yet.

    Keys come from the configuration, or from the environment as for each cloud's tools. Without keys, obstore
    would use the cloud's metadata service. This is allowed only if `settings` say so. Raises ConfigError.
    """
    try:
        import obstore.store as stores  # noqa: PLC0415  optional
    except ImportError as error:
        raise ConfigError(f"network.url: {error}", "pip install 'kvstore[network]'") from None
    url = urlsplit(settings.url)
    options = _options(settings.url)
    bucket, prefix = url.netloc, url.path.strip("/")
    if not bucket:
        hint = f"{url.scheme}://BUCKET/PREFIX"
        raise ConfigError(f"network.url: {settings.url!r:.120} names no bucket", hint)
    client = {
        "allow_http": options.get("endpoint", "").startswith("http://"),
        "connect_timeout": "5s",
        "timeout": "60s",
    }
    more: dict[str, Any] = {"prefix": prefix or None, "client_options": client, "retry_config": _RETRY}
    if settings.credentials == "anonymous":
        more["skip_signature"] = True
    makers: dict[str, Callable[[], Any]] = {
        "s3": lambda: stores.S3Store(bucket, **_s3(settings, options), **more),
        "gs": lambda: stores.GCSStore(bucket, **_gs(settings), **more),
        "az": lambda: stores.AzureStore(bucket, **_az(settings, options), **more),
    }
    if settings.credentials == "keys" and not _has_keys(settings, options):
        raise ConfigError(
            f"network.url: no credentials for {url.scheme}://{bucket:.80}",
            'set network.user and network.password_file, or network.credentials = "anonymous" or "instance"',
        )
    try:
        return makers[url.scheme]()
    except ConfigError:
        raise
    except Exception as error:
        text = str(error).partition("\n\nDebug source")[0]
        raise ConfigError(f"network.url: {settings.url!r:.120} cannot be used: {text:.300}") from None


def _has_keys(settings: BackendSettings, options: dict[str, str]) -> bool:
    """Returns whether keys are configured or in the environment."""
    scheme = urlsplit(settings.url).scheme
    if settings.password or options.get("profile"):
        return True
    complete = any(all(os.environ.get(name) for name in together) for together in _KEYS[scheme])
    return complete or (scheme == "gs" and _GS_FILE.expanduser().exists())


def behind_proxy(url: str) -> bool:
    """Returns whether the environment has a proxy for the service of an `s3://` URL."""
    endpoint = urlsplit(_options(url).get("endpoint", "https://s3.amazonaws.com"))
    return endpoint.scheme in getproxies() and not proxy_bypass(endpoint.hostname or "")


def _options(url: str) -> dict[str, str]:
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = _OPTIONS[parts.scheme]
    for name in options:
        if name not in known:
            hint = f"one of {', '.join(known)}" if known else "none"
            raise ConfigError(f"network.url: {parts.scheme}:// has no option {name!r:.40}", hint)
    endpoint = options.get("endpoint")
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"network.url: endpoint {endpoint!r:.80}", "http://HOST:PORT or https://HOST:PORT")
    return options


def _s3(settings: BackendSettings, options: dict[str, str]) -> dict[str, Any]:
    """Returns S3 settings. Over TLS, bodies are not hashed for the signature."""
    unsigned = options.get("unsigned_payload", "")
    if unsigned not in ("", "0", "1"):
        raise ConfigError(f"network.url: unsigned_payload {unsigned!r:.40}", "0 or 1")
    tls = not options.get("endpoint", "").startswith("http://")
    config: dict[str, Any] = {"unsigned_payload": unsigned == "1" or (tls and unsigned == "")}
    for name in ("endpoint", "region"):
        if name in options:
            config[name] = options[name]
    if settings.user or settings.password:
        config |= {"access_key_id": settings.user, "secret_access_key": settings.password}
    elif profile := options.get("profile") or os.environ.get("AWS_PROFILE"):
        config["credential_provider"] = _profile(profile)
    return config


def _profile(name: str) -> Any:
    """Returns the credentials of a profile in the AWS configuration files."""
    try:
        import boto3  # noqa: PLC0415  optional
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415
    except ImportError:
        raise ConfigError(f"network.url: profile {name!r:.80} cannot be read", "pip install boto3") from None
    try:
        return Boto3CredentialProvider(boto3.Session(profile_name=name))
    except Exception as error:
        raise ConfigError(f"network.url: profile {name!r:.80}: {error!s:.200}") from None


def _gs(settings: BackendSettings) -> dict[str, Any]:
    if settings.user or settings.password:
        raise ConfigError("network: gs:// takes no user and password", "set GOOGLE_APPLICATION_CREDENTIALS")
    return {}


def _az(settings: BackendSettings, options: dict[str, str]) -> dict[str, Any]:
    config = {"account_name": options.get("account") or settings.user}
    if "endpoint" in options:
        config["endpoint"] = options["endpoint"]
    if settings.password:
        config["account_key"] = settings.password
    return {name: value for name, value in config.items() if value}
