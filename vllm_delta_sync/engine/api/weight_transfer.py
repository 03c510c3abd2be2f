"""vLLM's own weight transfer API with the bucket as its source: backend ``delta_bucket``.

vLLM's engine clients pass these calls to each worker separately. Our commits must reach all ranks or none, so the calls
end at the client and go to the receiver, which stages beside generation and pauses only for the commit. Every update is
complete in itself, so calls share no session: with several API servers, each call may go to another one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from http import HTTPStatus
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_delta_sync.engine.api.access import answer_error
from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.observe.readiness import Answer
from vllm_delta_sync.errors import DeltaSyncError, EngineError, NotFoundError, UsageError, WeightsLostError
from vllm_delta_sync.format.limits import MAX_VERSION
from vllm_delta_sync.redaction import public_url

BACKEND = patches.TRANSFER_BACKEND
BACKEND_MODULE = "vllm_delta_sync.engine.entrypoints.transfer_backend"
"""vLLM's workers import it by this name."""
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


def register() -> None:
    """Register the backend with vLLM, once per process, because vLLM raises if it is repeated."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, BACKEND_MODULE, "BucketTransferEngine")


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
        raise TransferError(f"backend {BACKEND} updates the served model only; call start_weight_update")

    def update(self, update_info: Any) -> UpdateInfo:
        """Parse ``update_info``. Raises TransferError."""
        if isinstance(update_info, list):
            raise TransferError(
                f"update_info is a list of {len(update_info)}, one for each rank; backend {BACKEND} takes one document "
                'for all of them, {"version": n} or {}'
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
                f"weight_version is {label[:80]!r}, and version {served['version']} is served: backend {BACKEND} "
                "labels outputs with the run's versions, from which spans are derived; omit it, or give the "
                "published version"
            )


class AsyncTransfer:
    """The calls on an asynchronous client.

    Args:
        ask: awaits ReceiverService.request.
        convert: converts an error for the caller's side.
    """

    def __init__(
        self,
        checks: TransferChecks,
        ask: Callable[[str, Any], Awaitable[Answer]],
        convert: Callable[[DeltaSyncError], Exception] = lambda error: error,
    ) -> None:
        self._checks = checks
        self._ask = ask
        self._convert = convert

    def install(self, client: Any, labels_only: bool = False) -> None:
        """Replace the calls of one client.

        Args:
            labels_only: no backend is configured: replace only the call for labels. vLLM's other calls raise.
        """
        calls: dict[str, Callable[..., Awaitable[None]]] = {
            "init_weight_transfer_engine": self._init,
            "shutdown_weight_transfer_engine": self._shutdown,
            "start_weight_update": self._start,
            "start_draft_weight_update": self._start_draft,
            "update_weights": self._update,
            "finish_weight_update": self._finish,
        }
        for name, call in {**({} if labels_only else calls), "update_weight_version": self._label}.items():
            if hasattr(client, name):
                patches.wrap_method(client, name, self._guarded(call))

    def _guarded(self, call: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def guarded(original: Any, *args: Any, **kwargs: Any) -> None:
            try:
                await call(*args, **kwargs)
            except DeltaSyncError as error:
                convert = self._convert(error)
                if convert is error:
                    raise
                raise convert from error

        return guarded

    async def _init(self, request: Any) -> None:
        self._checks.init(_field(request, "init_info"))

    async def _shutdown(self) -> None:
        """Do nothing: there is nothing to release."""

    async def _start(self) -> None:
        self._checks.start()

    async def _start_draft(self) -> None:
        self._checks.draft()

    async def _update(self, request: Any) -> None:
        asked = self._checks.update(_field(request, "update_info"))
        deadline = None if asked.timeout_s is None else time.monotonic() + asked.timeout_s
        while True:
            try:
                async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    self._checks.record_reached(await self._ask("sync", asked.version))
                return
            except TimeoutError:
                raise self._checks.late(asked) from None
            except NotFoundError:
                if deadline is None or time.monotonic() + PUBLISH_STEP_SECONDS >= deadline:
                    raise
            await asyncio.sleep(PUBLISH_STEP_SECONDS)

    async def _finish(self, weight_version: str | None = None) -> None:
        self._checks.label(weight_version)

    async def _label(self, new_version: str) -> None:
        self._checks.label(new_version)


class RequestSink(Protocol):
    """What is needed of ``LeaderElection``."""

    @property
    def receiver(self) -> Any:
        """Has ``status()``."""

    def request(self, action: str, argument: Any = None) -> "Future[Any]":
        """See ReceiverService."""


def install_on_server(client: Any, controller: RequestSink, bucket: str) -> None:
    """Replace the calls of a server's client, unless it was started with another backend.

    Args:
        bucket: the setting.
    """
    backend = patches.transfer_backend(client.vllm_config)
    if backend not in (None, BACKEND):
        return

    async def ask(action: str, argument: Any) -> Answer:
        outcome: Answer = await asyncio.wrap_future(controller.request(action, argument))
        return outcome

    checks = TransferChecks(bucket, lambda: controller.receiver.status())
    AsyncTransfer(checks, ask, _as_http).install(client, labels_only=backend is None)


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

    def update(request: Any) -> None:
        asked = checks.update(_field(request, "update_info"))
        deadline = time.monotonic() + (asked.timeout_s or 0.0)
        while True:
            try:
                checks.record_reached(to(asked.version))
                return
            except NotFoundError:
                if time.monotonic() + PUBLISH_STEP_SECONDS >= deadline:
                    raise
            time.sleep(PUBLISH_STEP_SECONDS)

    calls: dict[str, Callable[..., None]] = {
        "init_weight_transfer_engine": lambda request: checks.init(_field(request, "init_info")),
        "shutdown_weight_transfer_engine": lambda: None,
        "start_weight_update": checks.start,
        "start_draft_weight_update": checks.draft,
        "update_weights": update,
        "finish_weight_update": lambda weight_version=None: checks.label(weight_version),
    }
    ours = patches.transfer_backend(llm.llm_engine.vllm_config) == BACKEND
    for name, call in {**(calls if ours else {}), "update_weight_version": checks.label}.items():
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
        raise TransferError(f"{field}: {problem['msg']}; backend {BACKEND} knows {known}") from error
