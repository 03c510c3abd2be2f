"""``translate_error``: translates exceptions of obstore into this project's errors, with a remedy.

obstore has classes for few failures and raises GenericError for the others, from a refused connection to status 503, so
only the text tells them apart. Tested with obstore 0.12.1.
"""

import os
import re
from dataclasses import dataclass

from vllm_delta_sync.bucket.base import conflict_error
from vllm_delta_sync.errors import AccessError, DeltaSyncError, NotFoundError, StoreError, UnavailableError, UsageError

try:
    from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, PreconditionError, UnauthenticatedError
    from obstore.exceptions import BaseError as ClientError
except ImportError as missing:
    raise UsageError(
        "s3://, gs://, az:// and memory:// buckets and mirrors at https:// need obstore, which is not installed; "
        "pip install 'vllm-delta-sync[stores]'"
    ) from missing

CLIENT_ERRORS = (ClientError, OSError, ValueError)
"""All exceptions that obstore raises; a missing object raises the builtin FileNotFoundError."""

_STATUS = re.compile(r"status code: (\d{3})( [A-Za-z -]+)?")
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_MESSAGE = re.compile(r"<Message>([^<\n]{1,300})")
# What Azure says beyond a text that is always the same; up to what it quotes of the request, which has a signature.
_DETAIL = re.compile(r"<AuthenticationErrorDetail>([^<\n']{1,200})")
# Of a service that gives credentials.
_DESCRIPTION = re.compile(r'"error_description":\s*"([^"\\\n]{1,300})')
_HOST = re.compile(r"https?://([^/\s:]+)")
_SYSTEM = re.compile(r'message: "([^"]{1,200})"')
# Texts of the object_store crate for a missing or incomplete answer.
_NETWORK = re.compile(
    r"HTTP error|error sending request|error decoding response body|Content-Range header not present|"
    r"kind: (?:Timeout|Connect|Request|Interrupted|Decode)|Error getting response"
)
_CERTIFICATE = re.compile(r"(?i)invalid ?(peer )?certificate|certificate.verify.failed|UnknownIssuer|NotValidForName")
_REPEATED = (408, 425, 429, 500, 502, 503, 504)
_REPEATED_CODES = (
    "RequestTimeout",
    "SlowDown",
    "InternalError",
    "OperationAborted",
    "ConditionalRequestConflict",
    # The upload was completed, and the answer was lost.
    "NoSuchUpload",
    # Of AWS's service for credentials, with status 400.
    "Throttling",
    "IDPCommunicationError",
)
_ARCHIVED_CODES = "InvalidObjectState", "BlobArchived"
_REFUSED_CODES = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "AuthenticationFailed")
_MACHINE = re.compile(r"/latest/(?:api/token|meta-data)|computeMetadata|metadata/identity/oauth2")
"""Metadata services, where machines of a cloud get credentials if the environment has none."""
_ISSUERS = re.compile(r"Error performing token request|Error performing POST REDACTED|//169\.254\.170\.")
"""Requests to other services that give credentials. obstore hides the address of AWS's, which has the token."""
_EXPIRED = re.compile(r"(?i)expired|not valid in the specified time frame")
_CLOCK = re.compile(r"RequestTimeTooSkewed|Request date header too old|Signature expired|Signature not yet current")
_REGIONS = re.compile(r"redirect|AuthorizationHeaderMalformed|IllegalLocationConstraintException")
_UNREACHED = re.compile(
    r"\b(?:EndpointConnection|ProxyConnection|ConnectTimeout|ReadTimeout|ConnectionClosed|HTTPClient)Error\b"
)
"""Errors of boto3 when it cannot renew credentials."""

_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (with AWS_SESSION_TOKEN, if there is one), or AWS_PROFILE "
    "with boto3 installed, or run on a machine with a role",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a credentials file, or run `gcloud auth application-default login`",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or AZURE_TENANT_ID, AZURE_CLIENT_ID and "
    "AZURE_CLIENT_SECRET",
}
_RIGHTS = {
    "s3": "check AWS_ACCESS_KEY_ID or the role, and that its policy has s3:GetObject, s3:PutObject, s3:DeleteObject "
    "and s3:ListBucket here; without the last, S3 answers so for every missing object",
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS, and that the account is a Storage Object Admin here",
    "az": "check AZURE_STORAGE_ACCOUNT_KEY or the identity, and that it is a Storage Blob Data Contributor here",
}


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that failed.

    Attributes:
        action: as in "cannot ACTION of URL", the key included. key: "" if the request is about no single key. url: of
        the bucket. scheme: of the URL. writing: whether it puts or deletes. overwriting: whether it may replace an
        object. answered: whether this store has answered before, which shows that its credentials were valid.
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
    """The cause of a failure, parsed from an exception's text.

    Attributes:
        status: of the HTTP answer. code: the store's error code. text: one line without addresses. network: whether
        the network failed.
    """

    status: int | None
    code: str
    text: str
    network: bool

    @classmethod
    def of(cls, error: Exception) -> "Cause":
        full_text = str(error)
        first = full_text.split("\n\nDebug source:")[0].strip()
        status, code = _STATUS.search(first), _CODE.search(first)
        message = _DETAIL.search(first) or _MESSAGE.search(first) or _DESCRIPTION.search(first)
        reason = ": ".join(found[1].strip() for found in (code, message) if found is not None)
        if status is not None:
            text = f"the store answered {status[1]}{status[2] or ''}" + (f" ({reason})" if reason else "")
            return cls(int(status[1]), code[1] if code else "", text, False)
        if code is not None:
            # S3 may answer the completion of an upload with status 200 and an error.
            return cls(None, code[1], f"the store answered {reason}", False)
        if _NETWORK.search(full_text) is None:
            return cls(None, "", " ".join(re.sub(r"\S+://\S+", "…", first).split(" - ")[-1].split())[:300], False)
        if "kind: Timeout" in full_text or "TimedOut" in full_text:
            return cls(None, "", "no answer in time", True)
        if '"dns error"' in full_text:
            host = _HOST.search(first)
            return cls(None, "", f"{'the store' if host is None else host[1]} has no address", True)
        system = _SYSTEM.search(full_text)
        text = "no connection" if "kind: Connect" in full_text else "the connection broke"
        return cls(None, "", f"{text} ({system[1]})" if system else text, True)


def translate_error(error: Exception, request: FailedRequest) -> DeltaSyncError:
    """Return this project's error for an exception of obstore."""
    cause = Cause.of(error)
    failed = f"cannot {request.action} of {request.url}: {cause.text}"
    full_text = str(error)
    if not cause.code and (cause.network or cause.status is not None) and '"dns error"' not in full_text:
        failed += _proxy_note()
    if _CERTIFICATE.search(full_text) and cause.status is None:
        return StoreError(f"{failed}; if the store uses a private CA, set SSL_CERT_FILE to its certificate file")
    if "BadScheme" in full_text:
        return StoreError(f"{failed}; http:// is allowed only for a configured endpoint: set store_endpoint")
    if _MACHINE.search(full_text) or _ISSUERS.search(full_text) or _from_container(full_text):
        return _without_credentials(cause, full_text, request)
    if cause.code in _ARCHIVED_CODES:
        return StoreError(f"{failed}; restore it from the archive, and let no lifecycle rule archive objects of a run")
    if (
        isinstance(error, PermissionDeniedError | UnauthenticatedError)
        or cause.status in (401, 403)
        or cause.code in _REFUSED_CODES
    ):
        return _refused(error, cause, failed, request)
    if cause.status == 400 and request.scheme == "s3" and "performing HEAD " in full_text:
        # An answer to HEAD has no body. S3 refuses so what it refuses other requests for with a code.
        return AccessError(
            f"{failed}; renew the credentials if they have expired, or set AWS_REGION to the region of the bucket"
        )
    if '"dns error"' in full_text:
        return UnavailableError(
            f"{failed}; try again, and check the network, store_endpoint, and the region or account in the environment"
        )
    if cause.code in _REPEATED_CODES or cause.status in _REPEATED or cause.network:
        return UnavailableError(f"{failed}; try again, and check the network and the store if that does not help")
    # obstore raises FileNotFoundError too for a server that refuses HEAD (405).
    if cause.status == 404 or (isinstance(error, FileNotFoundError) and cause.status is None):
        return _missing(cause, failed, request)
    # 409 may also mean a lease, a legal hold, or a bucket that is being deleted.
    if isinstance(error, AlreadyExistsError) and request.writing and not request.overwriting:
        return conflict_error(request.url, request.key)
    if isinstance(error, PreconditionError) and not request.writing:
        return UnavailableError(f"{failed}; it was replaced while it was read: try again")
    return StoreError(f"{failed}; {_remedy(cause, full_text)}")


def _proxy_note() -> str:
    """Return, for a failure that may not be the store's own, which variables set a proxy; empty without one."""
    names = [name for name in ("HTTP_PROXY", "HTTPS_PROXY") if os.environ.get(name) or os.environ.get(name.lower())]
    return f"; a proxy may have been asked ({', '.join(names)}; NO_PROXY names hosts without one)" if names else ""


def _without_credentials(cause: Cause, full_text: str, request: FailedRequest) -> DeltaSyncError:
    """Return the error for a credential service that gave no credentials; outside a cloud there is no such service."""
    again = cause.status in _REPEATED or cause.code in _REPEATED_CODES
    denied = cause.status is not None and 400 <= cause.status < 500 and not again
    remedy = _CREDENTIALS.get(request.scheme, "check its credentials")
    failed = f"cannot {request.action} of {request.url}"
    why = cause.text.replace("the store answered", "the answer was")
    machine = _MACHINE.search(full_text) is not None
    if denied and not machine:
        return AccessError(f"{failed}: the credentials of the environment were refused, {why}; renew them, or {remedy}")
    # A service that answered exists, so trying again may help.
    if denied or (machine and not request.answered and cause.status is None):
        return AccessError(
            f"{failed}: the environment has no credentials, and this machine has no role that provides them ({why}); "
            f"{remedy}"
        )
    return UnavailableError(f"{failed}: credentials could not be renewed ({why}); try again")


def _refused(error: Exception, cause: Cause, failed: str, request: FailedRequest) -> DeltaSyncError:
    if "credential provider" in str(error):
        if _UNREACHED.search(str(error)):
            return UnavailableError(f"{failed}; credentials could not be renewed: try again")
        return AccessError(f"{failed}; {_CREDENTIALS.get(request.scheme, 'check its credentials')}")
    if _CLOCK.search(cause.text):
        return AccessError(f"{failed}; set the clock of this machine")
    if _EXPIRED.search(cause.text):
        return AccessError(f"{failed}; get new credentials: these have expired")
    remedy = _RIGHTS.get(request.scheme, "it has to be readable without credentials")
    return AccessError(f"{failed}; {remedy}")


def _missing(cause: Cause, failed: str, request: FailedRequest) -> DeltaSyncError:
    if request.writing:
        kind = "container" if request.scheme == "az" else "bucket"
        return StoreError(f"{failed}; there is no such {kind}: create it, or check the bucket URL")
    if cause.code in ("NoSuchBucket", "ContainerNotFound"):
        return NotFoundError(f"no object {request.key!r}: {request.url} does not exist; check the bucket URL")
    return NotFoundError(f"no object {request.key!r} in {request.url}")


def _remedy(cause: Cause, full_text: str) -> str:
    if _REGIONS.search(cause.text):
        return "set AWS_REGION to the region of the bucket, or store_endpoint to the address of the store"
    if cause.status == 501:
        return "use a store that supports If-None-Match on PUT, which create-if-absent requires"
    if "invalid path" in full_text:
        return "remove that object: its key has an empty part, '.' or '..'"
    if cause.status == 507 or "Quota" in cause.code:
        return "free some space there or raise the quota"
    return "check the bucket URL and store_endpoint"


def _from_container(full_text: str) -> bool:
    address = os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    return bool(address) and str(address) in full_text
