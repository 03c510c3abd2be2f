"""What the Hub's clients raise, as errors of this project: which of them is worth trying again, and what mends it."""

import errno
import re
from dataclasses import dataclass

from vllm_delta_sync.errors import AccessError, DeltaSyncError, StoreError, UnavailableError, UsageError
from vllm_delta_sync.redaction import redact

try:
    import hf_xet  # type: ignore[import-untyped]  # noqa: F401  told here, once for all modules of the Hub
    from huggingface_hub.errors import OfflineModeIsEnabled
except ImportError as missing:
    raise UsageError(
        "hf:// buckets need huggingface_hub and hf_xet, which are not installed; pip install 'vllm-delta-sync[stores]'"
    ) from missing

_NO_BUCKET = "RepoNotFound"
"""The Hub's code for a bucket that does not exist, or that this token may not know of."""
NO_FILE = "EntryNotFound"

_AGAIN = (408, 425, 429)
_FULL = re.compile(r"quota|storage limit|limit reached|used up|insufficient storage", re.I)
_FULL_STATUS = (402, 413, 507)
_XET_STATUS = re.compile(r"\(([1-5]\d\d) [A-Z]|status(?: code)?:? ([45]\d\d)")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_OF_OWN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOTDIR)
_SHOWN = 300


class RefusedError(Exception):
    """The Hub has answered, and said no.

    Attributes:
        status: of the answer. code: the Hub's own word for the reason, if any. text: what it says.
        with_token: whether the request carried one.
        beyond: the answer is the content store's, to which the Hub had sent the request on with a signed address.
    """

    def __init__(self, status: int, code: str | None, text: str, with_token: bool, beyond: bool = False) -> None:
        text = redact(text)
        super().__init__(f"{status} {text}".strip())
        self.status, self.code, self.text = status, code, text
        self.with_token, self.beyond = with_token, beyond

    @property
    def no_bucket(self) -> bool:
        return self.status == 404 and not self.beyond and self.code == _NO_BUCKET

    @property
    def no_file(self) -> bool:
        return self.status == 404 and not self.beyond and self.code == NO_FILE


class StaleError(Exception):
    """What was known of the way to the content store does not hold any more; it is asked for anew next time."""


class UnexpectedAnswerError(Exception):
    """An answer that is not one of the Hub's; the text says which."""

    def __init__(self, text: str) -> None:
        super().__init__(redact(text))


@dataclass(frozen=True, slots=True)
class HubLocation:
    """What messages name. ``url``: of the run. ``id``: of the bucket, ``namespace/name``."""

    url: str
    id: str


def mapped(error: Exception, action: str, site: HubLocation) -> DeltaSyncError:
    """The error of this project that says what ``error`` means.

    Args:
        action: what was asked for, such as ``read key 'a'``.
    """
    if isinstance(error, DeltaSyncError):
        return error
    if isinstance(error, RefusedError):
        return _refused(error, action, site)
    doing = f"cannot {action} of {site.url}"
    if isinstance(error, StaleError):
        return UnavailableError(f"{doing}: the content store does not take what it took before ({error}); try again")
    if isinstance(error, UnexpectedAnswerError):
        return StoreError(f"{doing}: {error}; check that HF_ENDPOINT or store_endpoint names a Hub")
    if isinstance(error, OfflineModeIsEnabled):
        return StoreError(f"{doing}: HF_HUB_OFFLINE is set; unset it where buckets are used")
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"InvalidURL", "UnsupportedProtocol", "TooManyRedirects"}:
        return StoreError(f"{doing}: {text_of(error)}; check HF_ENDPOINT or store_endpoint")
    status = _status(error)
    if status is not None or names & {"XetAuthenticationError", "XetObjectNotFoundError"}:
        return _refused_by_store(error, status, names, doing, site)
    own_disk = _OS_ERROR.search(str(error))
    if own_disk is not None and int(own_disk[1]) in _OF_OWN_DISK:
        return StoreError(f"{doing}: {text_of(error)}; check that HF_XET_CACHE, or HF_HOME, can be written to")
    if names & {"TransportError", "OSError", "RuntimeError"}:
        # hf_xet has no classes for what goes wrong on the way: a cut connection may well be a RuntimeError.
        return UnavailableError(f"{doing}: {text_of(error)}; check the network and the Hub's status page")
    return StoreError(f"{doing}: {type(error).__name__}: {text_of(error)}; check the store and try again")


def _refused(error: RefusedError, action: str, site: HubLocation) -> DeltaSyncError:
    doing, said = f"cannot {action} of {site.url}", f"{error.status} {error.text}".strip()
    if error.beyond and error.status not in _FULL_STATUS and 400 <= error.status < 500:
        # The Hub itself has given the address: what is wrong with it, such as its age, another one has not.
        return UnavailableError(f"{doing}: the Hub's content store answers {said}; try again")
    if error.status in _FULL_STATUS or (error.status < 500 and error.status != 429 and is_full(error.text)):
        return StoreError(
            f"{doing}: the Hub has no room for it ({said}); remove what is not needed (delta-sync gc) or raise the "
            f"storage limit of {site.id.partition('/')[0]}"
        )
    if error.status in (401, 403):
        return AccessError(f"{doing}: the Hub refuses {_who(error)} ({said}); {_access_mend(site)}")
    if error.no_bucket:
        mend = f"create it (hf buckets create {site.id}) or check the URL; if it is private, {_access_mend(site)}"
        return StoreError(f"{doing}: there is no bucket {site.id}, or {_who(error)} may not see it; {mend}")
    if error.status in _AGAIN or error.status >= 500:
        slower = "; fewer requests a minute help" if error.status == 429 else "; check the Hub's status page"
        return UnavailableError(f"{doing}: the Hub answers {said}{slower}")
    return StoreError(f"{doing}: the Hub answers {said}; check HF_ENDPOINT, or whether this release knows that Hub")


def _refused_by_store(
    error: Exception, status: int | None, names: set[str], doing: str, site: HubLocation
) -> DeltaSyncError:
    """An answer of the content store, as far as hf_xet's text tells it."""
    said = text_of(error)
    if is_full(said) or status in _FULL_STATUS:
        return StoreError(f"{doing}: the Hub has no room for it ({said}); remove what is not needed (delta-sync gc)")
    if status in (401, 403) or "XetAuthenticationError" in names:
        return AccessError(f"{doing}: the Hub's content store refuses the token ({said}); {_access_mend(site)}")
    if status is not None and (status in _AGAIN or status >= 500):
        return UnavailableError(f"{doing}: the Hub's content store answers: {said}")
    return StoreError(f"{doing}: the Hub's content store answers: {said}; check the store and try again")


def _who(error: RefusedError) -> str:
    return "this token" if error.with_token else "a request without a token"


def _access_mend(site: HubLocation) -> str:
    return f"set HF_TOKEN to a token that has the right to {site.id}, or run hf auth login"


def _status(error: Exception) -> int | None:
    found = _XET_STATUS.search(str(error))
    return None if found is None else int(found[1] or found[2])


def is_full(text: str) -> bool:
    """Whether a refusal says that there is no room."""
    return _FULL.search(text) is not None


def text_of(error: Exception) -> str:
    """The client's own words, without what is secret, on one line."""
    text = " ".join(redact(str(error)).split()) or type(error).__name__
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
