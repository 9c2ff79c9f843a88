"""What obstore's errors mean: an outcome of one object, or that the store as a whole refuses."""

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


def reason(error: BaseException) -> str:
    """What happened, in one line of at most 300 characters."""
    told = _text(error).partition("\n\nDebug source")[0] or type(error).__name__
    return f"{' '.join(told.split()):.300}"


def outcome(error: BaseException, where: str) -> Outcome:
    """How the object of a failed request ended. Raises a fatal NetworkError where none would end better.

    `where` names bucket and service.
    """
    text = _text(error)
    found = _CODE.search(text)
    code = found[1] if found else ""
    status = _STATUS.search(text)
    if code in _FULL or (status is not None and status[1] == "507"):
        return Outcome.FULL
    if code in _NO_BUCKET or "bucket does not exist" in text:
        raise NetworkError(f"{where}: there is no such bucket", "make it, or name another one", fatal=True)
    if code in _SKEWED:
        raise NetworkError(f"{where}: {code}", "set this machine's clock: it differs too much", fatal=True)
    if code in _REFUSED or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        raise NetworkError(
            f"{where}: access is refused ({code or reason(error)})",
            "credentials that may read, write, delete and list there; without the right to list, S3 answers "
            "so for what is not there",
            fatal=True,
        )
    if "latest/api/token" in text or "metadata.google.internal" in text:
        raise NetworkError(
            f"{where}: no credentials, and this machine's cloud gives none",
            "set network.user and network.password_file, or the environment's variables",
            fatal=True,
        )
    if "redirect without LOCATION" in text:
        raise NetworkError(f"{where}: the bucket is in another region", "set ?region=", fatal=True)
    return Outcome.MISSING if isinstance(error, FileNotFoundError) else Outcome.FAILED


def is_silence(error: BaseException) -> bool:
    """Whether nothing came from the store: no connection, or one that ended without an answer."""
    return "error sending request" in _text(error)


def _text(error: BaseException) -> str:
    """What an error says, which may be the body of an answer: only its beginning counts."""
    return str(error)[:_MOST_CHARS]
