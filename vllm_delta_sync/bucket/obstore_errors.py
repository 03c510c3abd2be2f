"""What exceptions of obstore mean: one of the project's errors for each, with what to do about it.

obstore has a class for few failures and puts the others, from a refused connection to 503, into GenericError, of which
the text is all there is to go by. Tried with 0.12.1.
"""

import os
import re
from dataclasses import dataclass

from vllm_delta_sync.errors import (
    AccessError,
    ConflictError,
    DeltaSyncError,
    NotFoundError,
    StoreError,
    UnavailableError,
    UsageError,
)

try:
    from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, PreconditionError, UnauthenticatedError
    from obstore.exceptions import BaseError as ClientError
except ImportError as missing:
    raise UsageError(
        "s3://, gs://, az:// and memory:// buckets and mirrors at https:// need obstore, which is not installed; "
        "pip install 'vllm-delta-sync[stores]'"
    ) from missing

RAISED = (ClientError, OSError, ValueError)
"""What a call of obstore may raise: a missing object is the builtin FileNotFoundError."""

_STATUS = re.compile(r"status code: (\d{3})( [A-Za-z -]+)?")
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})")
_SYSTEM = re.compile(r'message: "([^"]{1,200})"')
# Of object_store's own texts for an answer that is not there, or not all of it.
_NETWORK = re.compile(
    r"HTTP error|error sending request|error decoding response body|Content-Range header not present|"
    r"kind: (?:Timeout|Connect|Request|Interrupted|Decode)|Error getting response"
)
_CERTIFICATE = re.compile(r"(?i)certificate|UnknownIssuer|NotValidForName")
_REPEATED = (408, 425, 429, 500, 502, 503, 504)
_REPEATED_CODES = (
    "RequestTimeout",
    "SlowDown",
    "InternalError",
    "OperationAborted",
    "ConditionalRequestConflict",
    # The upload was completed, and the answer to that was lost.
    "NoSuchUpload",
)
_REFUSED_CODES = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "AuthenticationFailed")
_MACHINE = re.compile(r"/latest/(?:api/token|meta-data)|computeMetadata|metadata/identity/oauth2")
"""Where a cloud's machines get credentials if the environment has none."""
_ISSUERS = re.compile(r"Action=AssumeRoleWithWebIdentity|oauth2\.googleapis\.com|/oauth2/v2\.0/token|//169\.254\.170\.")
_UNREACHED = re.compile(r"\b(?:EndpointConnection|ConnectTimeout|ReadTimeout|ConnectionClosed|HTTPClient)Error\b")
"""Of boto3, when it renews credentials."""

_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (with AWS_SESSION_TOKEN, if there is one), or AWS_PROFILE "
    "with boto3 installed, or run where a role gives them",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a credentials file, or run `gcloud auth application-default login`",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or AZURE_TENANT_ID, AZURE_CLIENT_ID and "
    "AZURE_CLIENT_SECRET",
}
_RIGHTS = {
    "s3": "check AWS_ACCESS_KEY_ID or the role, and that its policy has s3:GetObject, s3:PutObject, s3:DeleteObject "
    "and s3:ListBucket here; without the last, S3 answers so for any object that is not there",
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS, and that the account is a Storage Object Admin here",
    "az": "check AZURE_STORAGE_ACCOUNT_KEY or the identity, and that it is a Storage Blob Data Contributor here",
}


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A call that failed.

    Attributes:
        action: as in "cannot ACTION of URL", the key included. key: "" if it is about none. url: of the bucket.
        scheme: of the URL. writing: it puts or deletes. overwriting: whatever is there. answered: this store has
        answered before, so there are credentials that were good.
    """

    action: str
    key: str
    url: str
    scheme: str
    writing: bool = False
    answered: bool = False
    overwriting: bool = False


@dataclass(frozen=True, slots=True)
class Cause:
    """What can be read from an exception's text. ``text`` is one line and holds no address."""

    status: int | None
    code: str
    text: str
    network: bool

    @classmethod
    def of(cls, error: Exception) -> "Cause":
        whole = str(error)
        first = whole.split("\n\nDebug source:")[0].strip()
        status, code, message = _STATUS.search(first), _CODE.search(first), _MESSAGE.search(first)
        if status is not None:
            said = ": ".join(found[1].strip() for found in (code, message) if found is not None)
            text = f"the store answered {status[1]}{status[2] or ''}" + (f" ({said})" if said else "")
            return cls(int(status[1]), code[1] if code else "", text, False)
        if _NETWORK.search(whole) is None:
            return cls(None, "", " ".join(re.sub(r"\S+://\S+", "…", first).split(" - ")[-1].split())[:300], False)
        if "kind: Timeout" in whole or "TimedOut" in whole:
            return cls(None, "", "no answer in time", True)
        system = _SYSTEM.search(whole)
        text = "no connection" if "kind: Connect" in whole else "the connection broke"
        return cls(None, "", f"{text} ({system[1]})" if system else text, True)


def translated(error: Exception, request: FailedRequest) -> DeltaSyncError:
    """The project's error for what a call of obstore raised."""
    cause = Cause.of(error)
    failed = f"cannot {request.action} of {request.url}: {cause.text}"
    whole = str(error)
    if _CERTIFICATE.search(whole) and cause.status is None:
        return StoreError(f"{failed}; if the store has a CA of its own, name its file in SSL_CERT_FILE")
    if "BadScheme" in whole:
        return StoreError(f"{failed}; http:// is used only for an endpoint that is given: set store_endpoint")
    if _MACHINE.search(whole) or _ISSUERS.search(whole) or _from_container(whole):
        return _without_credentials(cause, whole, request)
    if (
        isinstance(error, PermissionDeniedError | UnauthenticatedError)
        or cause.status in (401, 403)
        or cause.code in _REFUSED_CODES
    ):
        return _refused(error, cause, failed, request)
    if cause.code in _REPEATED_CODES or cause.status in _REPEATED or cause.network:
        return UnavailableError(f"{failed}; try again, and check the network and the store if that does not help")
    # A server that does not know HEAD is not found either, if obstore is asked (405).
    if cause.status == 404 or (isinstance(error, FileNotFoundError) and cause.status is None):
        return _missing(cause, failed, request)
    # 409 has other reasons too: a lease, a legal hold, a bucket that is being deleted.
    if isinstance(error, AlreadyExistsError) and request.writing and not request.overwriting:
        return ConflictError(f"key {request.key!r} exists already in {request.url}; another writer was first")
    if isinstance(error, PreconditionError) and not request.writing:
        return UnavailableError(f"{failed}; it was replaced while it was read: try again")
    return StoreError(f"{failed}; {_mend(cause, whole)}")


def _without_credentials(cause: Cause, whole: str, request: FailedRequest) -> DeltaSyncError:
    """Who should give credentials did not. Machines that are no cloud's have nobody at that address."""
    denied = cause.status is not None and 400 <= cause.status < 500 and cause.status not in _REPEATED
    mend = _CREDENTIALS.get(request.scheme, "check its credentials")
    if denied or (_MACHINE.search(whole) and not request.answered):
        return AccessError(
            f"cannot {request.action} of {request.url}: no credentials in the environment, and none were given to this "
            f"machine ({cause.text}); {mend}"
        )
    return UnavailableError(
        f"cannot {request.action} of {request.url}: credentials could not be renewed ({cause.text}); try again"
    )


def _refused(error: Exception, cause: Cause, failed: str, request: FailedRequest) -> DeltaSyncError:
    if "credential provider" in str(error):
        if _UNREACHED.search(str(error)):
            return UnavailableError(f"{failed}; credentials could not be renewed: try again")
        return AccessError(f"{failed}; {_CREDENTIALS.get(request.scheme, 'check its credentials')}")
    if "Expired" in cause.code:
        return AccessError(f"{failed}; get new credentials: these have run out")
    if cause.code == "RequestTimeTooSkewed":
        return AccessError(f"{failed}; set the clock of this machine")
    mend = _RIGHTS.get(request.scheme, "it has to be readable without credentials")
    return AccessError(f"{failed}; {mend}")


def _missing(cause: Cause, failed: str, request: FailedRequest) -> DeltaSyncError:
    if request.writing:
        return StoreError(f"{failed}; there is no such bucket: create it, or check the bucket URL")
    if cause.code in ("NoSuchBucket", "ContainerNotFound"):
        return NotFoundError(f"no object {request.key!r}: {request.url} does not exist; check the bucket URL")
    return NotFoundError(f"no object {request.key!r} in {request.url}")


def _mend(cause: Cause, whole: str) -> str:
    if "redirect" in cause.text:
        return "set AWS_REGION to the region of the bucket, or store_endpoint to the address of the store"
    if cause.status == 501:
        return "the store lacks what is needed here: create-if-absent takes If-None-Match on PUT"
    if "invalid path" in whole:
        return "remove that object: its key has an empty part, '.' or '..'"
    if cause.status == 507 or "Quota" in cause.code:
        return "free some space there or raise the quota"
    return "check the bucket URL and store_endpoint"


def _from_container(whole: str) -> bool:
    address = os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    return bool(address) and str(address) in whole
