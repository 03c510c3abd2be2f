"""Who may do what: user tokens, tokens of the content store, and signed addresses."""

import hmac
import time
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.support.hub_store.store import Bucket, Store

READ, WRITE = "read", "write"


@dataclass
class Options:
    """What may be changed while the server runs.

    Attributes:
        token: may write. None: everybody may. read_token: may read only.
        quota: bytes of files per bucket; 0: any number.
        xet_seconds: life of a token of the content store. url_seconds: life of a signed address.
        page: entries of a listing per page.
        strict_delete: deleting a file that is not there is a failed operation.
        epoch: tokens and addresses given out under an earlier one are void.
    """

    token: str | None = None
    read_token: str | None = None
    quota: int = 0
    xet_seconds: int = 3600
    url_seconds: int = 3600
    page: int = 1000
    strict_delete: bool = True
    epoch: int = 0


class Denied(Exception):
    """Carries the answer."""

    def __init__(self, answer: Response) -> None:
        super().__init__(answer.status_code)
        self.answer = answer


def failure(status: int, message: str, code: str | None = None) -> JSONResponse:
    """An error as the Hub words it."""
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return JSONResponse({"error": message}, status, headers)


class Access:
    """Checks and gives out rights.

    Args:
        content: origin of the content store, on another port than the Hub's as in the real one.
    """

    def __init__(self, options: Options, store: Store, content: str) -> None:
        self.options, self.store, self.content = options, store, content

    def check_user(self, request: Request, right: str) -> None:
        """Raises Denied: 401 for a missing or unknown token, 403 for one without the right."""
        if self.options.token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if not given:
            raise Denied(failure(401, "Invalid username or password.", "RepoNotFound"))
        if scheme == "Bearer" and hmac.compare_digest(given.encode(), self.options.token.encode()):
            return
        if scheme != "Bearer" or given != self.options.read_token:
            raise Denied(failure(401, "Invalid credentials in Authorization header"))
        if right == WRITE:
            raise Denied(failure(403, "you must use a token with write permission"))

    def xet_token(self, bucket: Bucket, right: str) -> tuple[str, int]:
        """A token of the content store for one life of a bucket, and when it expires (Unix seconds)."""
        expiry = int(time.time()) + self.options.xet_seconds
        told = f"xet_{right}_{bucket.inner}_{expiry}"
        return f"{told}_{self._sign(told)}", expiry

    def check_xet(self, request: Request, right: str) -> str:
        """Inner name of the bucket. Raises Denied: 401 for a void or expired token, 403 for one that may only read."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        told, _, signature = given.rpartition("_")
        parts = told.split("_")
        known = len(parts) == 4 and hmac.compare_digest(signature, self._sign(told)) and self.store.lives(parts[2])
        if not known or int(parts[3]) <= time.time():
            raise Denied(failure(401, "xet token is unknown or has expired"))
        if right == WRITE and parts[1] != WRITE:
            raise Denied(failure(403, "xet token has no write scope"))
        return parts[2]

    def signed(self, path: str, **fields: str) -> str:
        """An address at the content store that needs no token until it expires."""
        fields["Expires"] = str(int(time.time()) + self.options.url_seconds)
        fields["Signature"] = self._sign(path + urlencode(sorted(fields.items())))
        return f"{self.content}{quote(path)}?{urlencode(fields)}"

    def check_signed(self, request: Request) -> None:
        """Raises Denied: 403 for a wrong signature, an expired address, or another range than the signed one."""
        fields = dict(request.query_params)
        signature = fields.pop("Signature", "")
        expected = self._sign(request.url.path + urlencode(sorted(fields.items())))
        if not hmac.compare_digest(signature, expected) or int(fields["Expires"]) <= time.time():
            raise Denied(Response("signature is wrong or has expired", 403))
        if "range" in fields and request.headers.get("range") != fields["range"]:
            raise Denied(Response("range is not the signed one", 403))

    def _sign(self, text: str) -> str:
        return hmac.new(self.store.key, f"{self.options.epoch}\n{text}".encode(), "sha256").hexdigest()
