"""``WeightTransferCalls`` is vLLM's own weight transfer API on a server, with the bucket as its source.

vLLM's engine client passes these calls to each worker separately. Our commits must reach all ranks or none, so with
backend ``delta_bucket`` the calls end at the client and go to the receiver, which stages beside generation and pauses
only for the commit. Every update is complete in itself, so calls share no session: with several API servers, each call
may go to another one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_delta_sync.engine.api.access import answer_error
from vllm_delta_sync.engine.api.api_servers import Serving
from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.names import TRANSFER_BACKEND
from vllm_delta_sync.engine.observe.states import Answer
from vllm_delta_sync.errors import BusyError, DeltaSyncError, NotFoundError, UsageError, WeightsLostError
from vllm_delta_sync.format.limits import MAX_VERSION
from vllm_delta_sync.logs import public_url

PUBLISH_STEP_SECONDS = 0.1
"""Seconds between polls for a version that is not published yet."""
LONGEST_WAIT_SECONDS = 3600.0
Document = TypeVar("Document", bound=BaseModel)


class TransferError(UsageError, ValueError):
    """A weight transfer call asks for something that this backend does not support."""

    kind = "transfer"


class OverdueError(DeltaSyncError):
    """A version was not served within the caller's timeout; a running update continues."""

    kind = "overdue"


class InitInfo(BaseModel):
    """``init_info``: may be empty, because the bucket is a setting."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)
    bucket: str | None = None


class UpdateInfo(BaseModel):
    """``update_info``: the version (None: what ``target`` names), and the seconds to wait until it is served."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)
    version: Annotated[int | None, Field(ge=0, le=MAX_VERSION)] = None
    timeout_s: Annotated[float | None, Field(ge=0, le=LONGEST_WAIT_SECONDS)] = None


class WeightTransferCalls:
    """What replaces vLLM's calls of the same names.

    Args:
        bucket: the setting.
        has_ended: returns whether the engine has died.
    """

    def __init__(self, controller: Serving, bucket: str, has_ended: Callable[[], bool] = lambda: False) -> None:
        self._controller = controller
        self._bucket = bucket
        self._has_ended = has_ended
        self._reached: int | None = None

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Raises TransferError: another bucket than the one followed."""
        asked = _parsed(InitInfo, request, "init_info").bucket
        if asked is not None and asked != self._bucket:
            raise TransferError(
                f"init_info.bucket is {public_url(asked)!r}, and {public_url(self._bucket)!r} is followed; omit it, "
                "or change the setting bucket"
            )

    async def shutdown_weight_transfer_engine(self) -> None:
        """Do nothing."""

    async def start_weight_update(self) -> None:
        """Raises WeightsLostError: no update can succeed."""
        status = self._status()
        if status["state"] == "lost":
            raise WeightsLostError(f"nothing can be updated: {status['last_error']['message']}")

    async def start_draft_weight_update(self) -> None:
        """Raises TransferError: the weights of a draft come with the version of the model."""
        raise TransferError(f"backend {TRANSFER_BACKEND} updates the served model only; call start_weight_update")

    async def update_weights(self, request: Any) -> None:
        """Serve a version. With ``timeout_s``, wait until it is published and served.

        Raises:
            TransferError: the request makes no sense. NotFoundError: the version is not published. OverdueError: it is
                not served in time. DeltaSyncError: what failed.
        """
        asked = _parsed(UpdateInfo, request, "update_info")
        deadline = None if asked.timeout_s is None else time.monotonic() + asked.timeout_s
        while True:
            try:
                async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    status = await asyncio.wrap_future(self._controller.request("sync", asked.version))
                self._reached = None if status["served"] is None else status["served"]["version"]
                return
            except TimeoutError:
                raise self._late(asked) from None
            except NotFoundError:
                if deadline is None or time.monotonic() + PUBLISH_STEP_SECONDS >= deadline or self._has_ended():
                    raise
            await asyncio.sleep(PUBLISH_STEP_SECONDS)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Check a caller's label: it must be the version served, because spans are derived from labels.

        Raises:
            BusyError: no version is served. TransferError: the label names another version.
        """
        served = self._status()["served"]
        if served is None:
            raise BusyError("no version is served yet; see /delta_sync/status")
        # Following may have served a newer version since the update.
        if weight_version is not None and weight_version not in (str(served["version"]), str(self._reached)):
            raise TransferError(
                f"weight_version is {weight_version[:80]!r}, and version {served['version']} is served: backend "
                f"{TRANSFER_BACKEND} labels outputs with the run's versions, from which spans are derived; omit it, or "
                "give the published version"
            )

    async def update_weight_version(self, new_version: str) -> None:
        """As ``finish_weight_update``."""
        await self.finish_weight_update(new_version)

    def _status(self) -> Answer:
        return self._controller.receiver.status()

    def _late(self, asked: UpdateInfo) -> DeltaSyncError:
        """Return the error for an update that did not end in time: its version is not published, or not served yet."""
        head, limit = self._status()["head"], f"within timeout_s = {asked.timeout_s:g}"
        what = "the newest version" if asked.version is None else f"version {asked.version}"
        if head is None or (asked.version is not None and head["version"] < asked.version):
            return NotFoundError(f"{what} was not seen in the bucket {limit}; see /delta_sync/status")
        return OverdueError(f"{what} was not served {limit}; a running update continues, see /delta_sync/status")


CALLS = tuple(name for name in vars(WeightTransferCalls) if not name.startswith("_"))


def install(client: Any, controller: Serving, bucket: str) -> None:
    """Replace the calls of a server's client: all of them if the backend is ours, none if it is another one, and
    without a backend only the call for labels, because vLLM's other calls raise then.

    Args:
        bucket: the setting.
    """
    backend = patches.transfer_backend(client.vllm_config)
    replaced = {None: ("update_weight_version",), TRANSFER_BACKEND: CALLS}.get(backend, ())
    calls = WeightTransferCalls(controller, bucket, lambda: client.errored)
    for name in replaced:
        setattr(client, name, _with_http_errors(getattr(calls, name)))


def _with_http_errors(call: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Let a call raise the error that vLLM's routes answer with our status code; other errors become 500 there."""
    from vllm.exceptions import GracefulHTTPError

    @wraps(call)
    async def converted(*args: Any, **kwargs: Any) -> None:
        try:
            await call(*args, **kwargs)
        except DeltaSyncError as error:
            code = HTTPStatus(answer_error(error).status_code)
            raise GracefulHTTPError(f"{error.kind}: {error.message}", code) from error

    return converted


def _parsed(model: type[Document], request: Any, name: str) -> Document:
    value = request[name] if isinstance(request, dict) else getattr(request, name)
    if isinstance(value, list):
        raise TransferError(
            f"{name} is a list of {len(value)}, one for each rank; backend {TRANSFER_BACKEND} takes one document for "
            'all of them, {"version": n} or {}'
        )
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join([name, *(str(part)[:40] for part in problem["loc"])])
        known = ", ".join(model.model_fields)
        raise TransferError(f"{field}: {problem['msg']}; backend {TRANSFER_BACKEND} knows {known}") from error
