"""vLLM's own weight transfer API with the bucket as its source: backend ``delta_bucket``.

vLLM's engine clients pass these calls to each worker separately. Our commits must reach all ranks or none, so the calls
end at the client and go to the receiver, which stages beside generation and pauses only for the commit. Every update is
complete in itself, so calls share no session: with several API servers, each call may go to another one.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_delta_sync.engine.api.access import answer_error
from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.names import TRANSFER_BACKEND
from vllm_delta_sync.engine.observe.readiness import Answer
from vllm_delta_sync.errors import DeltaSyncError, EngineError, NotFoundError, UsageError, WeightsLostError
from vllm_delta_sync.format.limits import MAX_VERSION
from vllm_delta_sync.redaction import public_url

if TYPE_CHECKING:
    from vllm_delta_sync.engine.api.api_servers import Serving

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
    """``update_info``: the version (None: the newest), and how long to wait until it is published and served."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)
    version: Annotated[int | None, Field(ge=0, le=MAX_VERSION)] = None
    timeout_s: Annotated[float | None, Field(ge=0, le=LONGEST_WAIT_SECONDS)] = None


class TransferChecks:
    """Checks the arguments of the calls.

    Args:
        bucket: the setting.
        status: returns the body of ``GET /delta_sync/status``.
    """

    def __init__(self, bucket: str, status: Callable[[], Answer]) -> None:
        self._bucket = bucket
        self._status = status
        self._reached: int | None = None

    def init(self, init_info: Any) -> None:
        """Raises TransferError: another bucket than the one followed."""
        asked = _parsed(InitInfo, "init_info", init_info).bucket
        if asked is not None and asked != self._bucket:
            raise TransferError(
                f"init_info.bucket is {public_url(asked)!r}, and {public_url(self._bucket)!r} is followed; omit it, "
                "or change the setting bucket"
            )

    def start(self) -> None:
        """Raises WeightsLostError: no update can succeed."""
        status = self._status()
        if status["state"] == "lost":
            raise WeightsLostError(f"nothing can be updated: {status['last_error']['message']}")

    def draft(self) -> None:
        """Raises TransferError: a run has no draft model for speculative decoding."""
        raise TransferError(f"backend {TRANSFER_BACKEND} updates the served model only; call start_weight_update")

    def update(self, update_info: Any) -> UpdateInfo:
        """Parse ``update_info``. Raises TransferError."""
        if isinstance(update_info, list):
            raise TransferError(
                f"update_info is a list of {len(update_info)}, one for each rank; backend {TRANSFER_BACKEND} takes one "
                'document for all of them, {"version": n} or {}'
            )
        return _parsed(UpdateInfo, "update_info", update_info)

    def late(self, asked: UpdateInfo) -> DeltaSyncError:
        """Return the error for an update that did not end in time: its version is not published, or not served yet."""
        head, limit = self._status()["head"], f"within timeout_s = {asked.timeout_s:g}"
        what = "the newest version" if asked.version is None else f"version {asked.version}"
        if head is None or (asked.version is not None and head["version"] < asked.version):
            return NotFoundError(f"{what} was not seen in the bucket {limit}; see /delta_sync/status")
        return OverdueError(f"{what} was not served {limit}; a running update continues, see /delta_sync/status")

    def record_reached(self, status: Answer) -> None:
        """Remember the version that an update reached."""
        served = status["served"]
        self._reached = None if served is None else served["version"]

    def label(self, label: str | None) -> None:
        """Check a caller's label: it must be the version served, because spans are derived from labels.

        Raises:
            EngineError: no version is served. TransferError: the label names another version.
        """
        served = self._status()["served"]
        if served is None:
            raise EngineError("no version is served yet; see /delta_sync/status")
        # Following may have served a newer version since the update.
        if label is not None and label not in (str(served["version"]), str(self._reached)):
            raise TransferError(
                f"weight_version is {label[:80]!r}, and version {served['version']} is served: backend "
                f"{TRANSFER_BACKEND} labels outputs with the run's versions, from which spans are derived; omit it, or "
                "give the published version"
            )


def _replacements(
    vllm_config: Any, checks: TransferChecks, update: Callable[[Any], Any]
) -> dict[str, Callable[..., Any]]:
    """Return what replaces vLLM's calls: all of them if the backend is ours, none if it is another one, and without a
    backend only the call for labels, because vLLM's other calls raise then."""
    backend = patches.transfer_backend(vllm_config)
    calls: dict[str, Callable[..., Any]] = {
        "init_weight_transfer_engine": lambda request: checks.init(_field(request, "init_info")),
        "shutdown_weight_transfer_engine": lambda: None,
        "start_weight_update": checks.start,
        "start_draft_weight_update": checks.draft,
        "update_weights": lambda request: update(_field(request, "update_info")),
        "finish_weight_update": lambda weight_version=None: checks.label(weight_version),
        "update_weight_version": lambda new_version: checks.label(new_version),
    }
    if backend is None:
        return {"update_weight_version": calls["update_weight_version"]}
    return calls if backend == TRANSFER_BACKEND else {}


def install_async(
    client: Any,
    checks: TransferChecks,
    ask: Callable[[str, Any], Awaitable[Answer]],
    convert: Callable[[DeltaSyncError], Exception] = lambda error: error,
) -> None:
    """Replace the calls of an asynchronous client.

    Args:
        ask: awaits ReceiverService.request.
        convert: converts an error for the caller's side.
    """

    async def update(info: Any) -> None:
        asked = checks.update(info)
        deadline = None if asked.timeout_s is None else time.monotonic() + asked.timeout_s
        while True:
            try:
                async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    checks.record_reached(await ask("sync", asked.version))
                return
            except TimeoutError:
                raise checks.late(asked) from None
            except NotFoundError:
                if deadline is None or time.monotonic() + PUBLISH_STEP_SECONDS >= deadline:
                    raise
            await asyncio.sleep(PUBLISH_STEP_SECONDS)

    def converting(call: Callable[..., Any]) -> Callable[..., Awaitable[None]]:
        async def converted(*args: Any, **kwargs: Any) -> None:
            try:
                done = call(*args, **kwargs)
                if inspect.isawaitable(done):
                    await done
            except DeltaSyncError as error:
                shown = convert(error)
                if shown is error:
                    raise
                raise shown from error

        return converted

    for name, call in _replacements(client.vllm_config, checks, update).items():
        if hasattr(client, name):
            setattr(client, name, converting(call))


def install_on_server(client: Any, controller: "Serving", bucket: str) -> None:
    """Replace the calls of a server's client. ``bucket``: the setting."""

    async def ask(action: str, argument: Any) -> Answer:
        outcome: Answer = await asyncio.wrap_future(controller.request(action, argument))
        return outcome

    install_async(client, TransferChecks(bucket, lambda: controller.receiver.status()), ask, _as_http)


def _as_http(error: DeltaSyncError) -> Exception:
    """Return the error that vLLM's routes answer with our status code; other errors become 500 there."""
    from vllm.exceptions import GracefulHTTPError

    failure: Exception = GracefulHTTPError(
        f"{error.kind}: {error.message}", HTTPStatus(answer_error(error).status_code)
    )
    return failure


def install_offline(llm: Any, checks: TransferChecks, to: Callable[[int | None], Answer]) -> None:
    """Replace the calls of an ``LLM``, whose version changes between two ``generate`` calls.

    Args:
        to: OfflineSync.to.
    """

    def update(info: Any) -> None:
        asked = checks.update(info)
        deadline = time.monotonic() + (asked.timeout_s or 0.0)
        while True:
            try:
                checks.record_reached(to(asked.version))
                return
            except NotFoundError:
                if time.monotonic() + PUBLISH_STEP_SECONDS >= deadline:
                    raise
            time.sleep(PUBLISH_STEP_SECONDS)

    for name, call in _replacements(llm.llm_engine.vllm_config, checks, update).items():
        if hasattr(llm, name):
            setattr(llm, name, call)


def _field(request: Any, name: str) -> Any:
    return request[name] if isinstance(request, dict) else getattr(request, name)


def _parsed(model: type[Document], name: str, value: Any) -> Document:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join([name, *(str(part)[:40] for part in problem["loc"])])
        known = ", ".join(model.model_fields)
        raise TransferError(f"{field}: {problem['msg']}; backend {TRANSFER_BACKEND} knows {known}") from error
