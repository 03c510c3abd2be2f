"""``translate_hub_error``: translates exceptions of the Hub's clients into this project's errors, with a remedy."""

import errno
import re
import ssl
from dataclasses import dataclass

from vllm_delta_sync.errors import AccessError, DeltaSyncError, StoreError, UnavailableError, UsageError
from vllm_delta_sync.logs import redact

try:
    import hf_xet  # type: ignore[import-untyped]  # noqa: F401  checked here for all modules of the Hub
    from huggingface_hub.errors import OfflineModeIsEnabled
except ImportError as missing:
    raise UsageError(
        "hf:// buckets need huggingface_hub and hf_xet, which are not installed; pip install 'vllm-delta-sync[stores]'"
    ) from missing

_NO_BUCKET = "RepoNotFound"
"""The Hub's error code for a bucket that does not exist or that the token cannot access."""
NO_FILE = "EntryNotFound"

_RETRIED_STATUS = (408, 425, 429)
_FULL_TEXT = re.compile(r"quota|storage limit|limit reached|used up|insufficient storage", re.I)
_FULL_STATUS = (402, 413, 507)
_XET_STATUS = re.compile(r"\(([1-5]\d\d) [A-Z]|status(?: code)?:? ([45]\d\d)")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_LOCAL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOTDIR)
_CERTIFICATE = re.compile(r"(?i)invalid ?(peer )?certificate|certificate.verify.failed|UnknownIssuer|NotValidForName")
_MAX_TEXT = 300


class RefusedError(Exception):
    """The Hub or its content store refused a request.

    Attributes:
        status: of the answer. code: the Hub's error code, if any. text: the error message.
        with_token: whether the request had a token.
        from_content_store: whether the content store answered, to which the Hub redirected with a signed URL.
    """

    def __init__(
        self, status: int, code: str | None, text: str, with_token: bool, from_content_store: bool = False
    ) -> None:
        text = redact(text)
        super().__init__(f"{status} {text}".strip())
        self.status, self.code, self.text = status, code, text
        self.with_token, self.from_content_store = with_token, from_content_store

    @property
    def no_bucket(self) -> bool:
        return self.status == 404 and not self.from_content_store and self.code == _NO_BUCKET

    @property
    def no_file(self) -> bool:
        return self.status == 404 and not self.from_content_store and self.code == NO_FILE


class StaleError(Exception):
    """A cached connection to the content store is no longer valid; the next call requests a new one."""


class UnexpectedAnswerError(Exception):
    """An answer that does not follow the Hub's API; the text quotes it."""

    def __init__(self, text: str) -> None:
        super().__init__(redact(text))


@dataclass(frozen=True, slots=True)
class HubLocation:
    """Names for messages. ``url``: of the run. ``id``: of the bucket, ``namespace/name``."""

    url: str
    id: str


def translate_hub_error(error: Exception, action: str, location: HubLocation) -> DeltaSyncError:
    """Return this project's error for an exception.

    Args:
        action: the failed request, such as ``read key 'a'``.
    """
    if isinstance(error, DeltaSyncError):
        return error
    if isinstance(error, RefusedError):
        return _refused(error, action, location)
    failed = f"cannot {action} of {location.url}"
    if isinstance(error, StaleError):
        return UnavailableError(f"{failed}: the content store no longer accepts this connection ({error}); try again")
    if isinstance(error, UnexpectedAnswerError):
        return StoreError(f"{failed}: {error}; check that HF_ENDPOINT or store_endpoint names a Hub")
    if isinstance(error, OfflineModeIsEnabled):
        return StoreError(f"{failed}: HF_HUB_OFFLINE is set; unset it where buckets are used")
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"InvalidURL", "UnsupportedProtocol", "TooManyRedirects"}:
        return StoreError(f"{failed}: {text_of(error)}; check HF_ENDPOINT or store_endpoint")
    found = _XET_STATUS.search(str(error))
    status = None if found is None else int(found[1] or found[2])
    if status is not None or names & {"XetAuthenticationError", "XetObjectNotFoundError"}:
        return _refused_by_store(error, status, names, failed, location)
    if _CERTIFICATE.search(str(error)):
        return StoreError(f"{failed}: {text_of(error)}; for a private CA, set SSL_CERT_FILE to its certificate file")
    # Unlike the Hub's own client, hf_xet brings no certificates. Both take SSL_CERT_FILE as it is: the Hub's client
    # raises the errors of Python's ssl, without the file's name, and wraps all errors of connections.
    unnamed = isinstance(error, FileNotFoundError | PermissionError) and error.filename is None
    if "builder error" in str(error) or unnamed or isinstance(error, ssl.SSLError):
        return StoreError(
            f"{failed}: {text_of(error)}; this machine may have no CA certificates: install ca-certificates, or set "
            "SSL_CERT_FILE to a file of them"
        )
    own_disk = _OS_ERROR.search(str(error))
    if own_disk is not None and int(own_disk[1]) in _LOCAL_DISK_ERRORS:
        return StoreError(f"{failed}: {text_of(error)}; check that HF_XET_CACHE, or HF_HOME, can be written to")
    if names & {"TransportError", "OSError", "RuntimeError"}:
        # hf_xet has no classes for network failures: it may raise RuntimeError for a lost connection.
        return UnavailableError(f"{failed}: {text_of(error)}; check the network and the Hub's status page")
    return StoreError(f"{failed}: {type(error).__name__}: {text_of(error)}; check the store and try again")


def _refused(error: RefusedError, action: str, location: HubLocation) -> DeltaSyncError:
    failed, text = f"cannot {action} of {location.url}", f"{error.status} {error.text}".strip()
    if error.from_content_store and error.status not in _FULL_STATUS and 400 <= error.status < 500:
        # The Hub gave us this signed URL. Whatever is wrong with it, such as its age, a new one may work.
        return UnavailableError(f"{failed}: the Hub's content store answers {text}; try again")
    if error.status in _FULL_STATUS or (error.status < 500 and error.status != 429 and _FULL_TEXT.search(error.text)):
        return StoreError(
            f"{failed}: the Hub has no room for it ({text}); free space (delta-sync gc) or raise the "
            f"storage limit of {location.id.partition('/')[0]}"
        )
    if error.status in (401, 403):
        return AccessError(f"{failed}: the Hub refuses {_sender(error)} ({text}); {_access_remedy(location)}")
    if error.no_bucket:
        return StoreError(
            f"{failed}: there is no bucket {location.id}, or {_sender(error)} may not see it; create it (hf buckets "
            f"create {location.id}) or check the URL; if it is private, {_access_remedy(location)}"
        )
    if error.status in _RETRIED_STATUS or error.status >= 500:
        slower = "; send fewer requests per minute" if error.status == 429 else "; check the Hub's status page"
        return UnavailableError(f"{failed}: the Hub answers {text}{slower}")
    return StoreError(f"{failed}: the Hub answers {text}; check HF_ENDPOINT, or whether this release supports that Hub")


def _refused_by_store(
    error: Exception, status: int | None, names: set[str], failed: str, location: HubLocation
) -> DeltaSyncError:
    """Return the error for a refusal of the content store, as parsed from hf_xet's text."""
    text = text_of(error)
    if _FULL_TEXT.search(text) or status in _FULL_STATUS:
        return StoreError(f"{failed}: the Hub has no room for it ({text}); free space (delta-sync gc)")
    if status in (401, 403) or "XetAuthenticationError" in names:
        return AccessError(f"{failed}: the Hub's content store refuses the token ({text}); {_access_remedy(location)}")
    if status is not None and (status in _RETRIED_STATUS or status >= 500):
        return UnavailableError(f"{failed}: the Hub's content store answers: {text}")
    return StoreError(f"{failed}: the Hub's content store answers: {text}; check the store and try again")


def _sender(error: RefusedError) -> str:
    return "this token" if error.with_token else "a request without a token"


def _access_remedy(location: HubLocation) -> str:
    return f"set HF_TOKEN to a token that has the right to {location.id}, or run hf auth login"


def text_of(error: Exception) -> str:
    """Return an exception's text on one line, without secrets."""
    text = " ".join(redact(str(error)).split()) or type(error).__name__
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"
