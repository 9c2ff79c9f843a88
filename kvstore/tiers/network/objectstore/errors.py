"""The meaning of obstore's errors: an outcome of one object, or a NetworkError of the whole store."""

from __future__ import annotations

import re

from kvstore.tiers.network.base import NetworkError, Outcome

_MOST_CHARS = 8192
_CODE = re.compile(r"<Code>(\w{1,80})</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"}
_FULL = {"XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded", "InsufficientStorage"}
_SKEWED = {"RequestTimeTooSkewed", "RequestExpired"}
_REFUSED = {
    "AccessDenied",
    "AllAccessDisabled",
    "AuthenticationFailed",
    "AuthorizationHeaderMalformed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
}
_RIGHTS_HINT = (
    "allow the credentials to read, write, delete and list; without the right to list, S3 refuses access to "
    "missing keys"
)


def reason(error: BaseException) -> str:
    """Returns an error's text in one line of at most 300 characters."""
    line = _text(error).partition("\n\nDebug source")[0] or type(error).__name__
    return f"{' '.join(line.split()):.300}"


def outcome(error: BaseException, where: str) -> Outcome:
    """Returns the outcome of a failed request. Raises a fatal NetworkError if all requests would fail.

    `where` names the bucket and service in messages.
    """
    text = _text(error)
    found = _CODE.search(text)
    code = found[1] if found else ""
    status = _STATUS.search(text)
    if code in _FULL or (status is not None and status[1] == "507"):
        return Outcome.FULL
    if code in _NO_BUCKET or "bucket does not exist" in text:
        raise NetworkError(f"{where}: there is no such bucket", "create it, or name another one", fatal=True)
    if code in _SKEWED:
        raise NetworkError(f"{where}: {code}", "set this machine's clock: it is too far off", fatal=True)
    if code in _REFUSED or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        raise NetworkError(f"{where}: access is refused ({code or reason(error)})", _RIGHTS_HINT, fatal=True)
    if "latest/api/token" in text or "metadata.google.internal" in text:
        hint = "set network.user and network.password_file, or environment variables"
        what = f"{where}: no credentials, and the cloud's metadata service gives none"
        raise NetworkError(what, hint, fatal=True)
    if "redirect without LOCATION" in text:
        raise NetworkError(f"{where}: the bucket is in another region", "set ?region=", fatal=True)
    return Outcome.MISSING if isinstance(error, FileNotFoundError) else Outcome.FAILED


def is_silence(error: BaseException) -> bool:
    """Returns whether the store gave no answer at all."""
    return "error sending request" in _text(error)


def _text(error: BaseException) -> str:
    """Returns the start of an error's text, which may be the body of a reply."""
    return str(error)[:_MOST_CHARS]
