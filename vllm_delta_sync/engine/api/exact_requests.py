"""``ExactRequests`` keeps requests with ``X-Delta-Sync-Version`` to one version: an answer is all of it, or an error.

The proof is in the labels of the weights, which vLLM sends with the outputs of each step of an engine, and which never
come twice (``version_label``). A request is admitted at a label. Every step that makes a part of its answer
must have that label, so no commit lay between the two. The first output with another label ends the request: its
output is not passed on, and the engine aborts what is left of it.

The request travels in a context variable, which the server's tasks inherit from the one that read its header: all that
they ask of the engine belongs to it, whatever the route makes of it.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from weakref import WeakKeyDictionary

from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.compat.version_labels import label_of, split_label
from vllm_delta_sync.engine.core.engine_shutdown import ask_engines
from vllm_delta_sync.errors import BusyError, EngineError, UsageError

VERSION_HEADER = "X-Delta-Sync-Version"
MIN_VERSION_HEADER = "X-Delta-Sync-Min-Version"
_current: "ContextVar[ExactRequest | None]" = ContextVar("delta_sync_exact", default=None)


class VersionError(BusyError):
    """A request asks for exactly one version, and other weights are served, or were while it was answered."""

    kind = "version"


@dataclass(eq=False)
class ExactRequest:
    """A request of a client.

    Attributes:
        version: what it asks for. labels: of the engines' weights when it was admitted.
        error: why there is no answer, or none of that version alone; set once. interrupted: whether a commit is why.
    """

    version: int
    labels: frozenset[str]
    error: VersionError | UsageError | None = None
    interrupted: bool = False

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let what is asked of the engine in this block, and in tasks that begin in it, belong to this request."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def check_step(self, label: str | None, adapter: str | None) -> None:
        """Compare the label of a step that made a part of the answer, with an adapter whose run is followed or none."""
        if label is None:
            self.fail("and vLLM does not say which weights made its answer; use " + MIN_VERSION_HEADER)
            return
        if label_of(label, adapter) in {label_of(each, adapter) for each in self.labels}:
            return
        own, adapters = split_label(label)
        found = own if adapter is None else adapters.get(adapter)
        self.fail(
            f"and a commit changed the weights before its answer was complete; version {found} is served now. Ask for "
            "that one, or set pause_mode to wait",
            interrupted=True,
        )

    def fail(
        self, reason: str, kind: type[VersionError | UsageError] = VersionError, interrupted: bool = False
    ) -> None:
        """Note why there is no answer of the version alone, unless a reason is known."""
        if self.error is None:
            self.interrupted = interrupted
            self.error = kind(f"version {self.version} is asked for ({VERSION_HEADER}), {reason}")

    def raise_in_vllm(self) -> None:
        """Raise the error as one that vLLM's routes answer with our status code, in streams too."""
        if self.error is None:
            return
        from vllm.exceptions import GenerationError

        failure = GenerationError(f"{self.error.kind}: {self.error.message}")
        failure.status_code = HTTPStatus.CONFLICT if isinstance(self.error, VersionError) else HTTPStatus.BAD_REQUEST
        raise failure from None


def _refuse_background(original: Callable[..., Any], asked: Any, *args: Any, **kwargs: Any) -> Any:
    """Do ``create_responses``, unless the answer would be made after the client has gone: vLLM stores no error of it,
    so that it would never be complete."""
    request = _current.get()
    if request is not None and getattr(asked, "background", False):
        request.fail("and background is true; leave one of them out", UsageError)
        request.raise_in_vllm()
    return original(asked, *args, **kwargs)


class ExactRequests:
    """The requests of one API server that ask for exactly one version.

    Args:
        client: vLLM's engine client.
        adapters: names of LoRA adapters whose runs are followed.
        follows_model: whether the model's own weights follow a run.
        prefix_cache: the setting.
    """

    def __init__(self, client: Any, adapters: Collection[str], follows_model: bool, prefix_cache: str) -> None:
        self._client = client
        self._adapters = frozenset(adapters)
        self._follows_model = follows_model
        self._prefix_cache = prefix_cache
        self._in_engine: WeakKeyDictionary[Any, tuple[ExactRequest, str | None]] = WeakKeyDictionary()
        """By vLLM's state of each request to the engine, which it drops when that ends: the client's request, and the
        adapter that it uses."""
        self._aborting: set[asyncio.Task[None]] = set()

    def install(self, state: Any) -> None:
        """Wrap the engine client's methods, on the instance.

        Args:
            state: the API server's, with vLLM's serving objects.
        """
        patches.wrap_method(self._client, "generate", self._ask_engine)
        patches.wrap_method(self._client, "encode", self._ask_engine)
        patches.wrap_method(self._client.output_processor, "add_request", self._add)
        patches.wrap_method(self._client.output_processor, "process_outputs", self._process)
        responses = getattr(state, "openai_serving_responses", None)
        if hasattr(responses, "create_responses"):
            patches.wrap_method(responses, "create_responses", _refuse_background)

    @property
    def objection(self) -> str | None:
        """Why this server cannot keep a request to one version; None if it can."""
        if self._prefix_cache == "keep":
            return (
                "and prefix_cache is 'keep': the version would sample from keys and values that older weights "
                f"computed; set prefix_cache to reset, or use {MIN_VERSION_HEADER}"
            )
        config = getattr(self._client, "vllm_config", None)
        for field in ("kv_transfer_config", "ec_transfer_config"):
            if getattr(config, field, None) is not None:
                flag = f"--{field.replace('_', '-')}"
                return f"and {flag} is set: what other weights computed may come from there; use {MIN_VERSION_HEADER}"
        return None

    async def admit(self, version: int) -> ExactRequest:
        """Return the request for a version that is served now.

        Raises:
            VersionError: another version is served. EngineError: the engine does not say which one.
        """
        core = self._client.engine_core
        try:
            calls = [core._call_utility_async("get_weight_version", engine=engine) for engine in core.core_engines]
            labels = await ask_engines(self._client, calls)
        except Exception as error:  # vLLM reports a failed engine with exceptions of its own
            raise EngineError(f"the engine does not say which version it serves: {error}") from error
        request = ExactRequest(version, frozenset(labels))
        own, adapters = split_label(labels[0])
        followed = {name: held for name, held in adapters.items() if name in self._adapters}
        served = sorted({held for held in [own, *followed.values()] if held is not None})
        if any(split_label(label) != (own, adapters) for label in labels):
            request.fail("and a commit is under way; retry")
        elif version not in served:
            newer = version > max(served, default=-1)
            remedy = f"send {MIN_VERSION_HEADER}: {version} too" if newer else f"roll this server back to {version}"
            request.fail(
                f"and {' and '.join(map(str, served)) or 'none'} is served; ask for that one, {remedy}, or ask another "
                "server"
            )
        if request.error is not None:
            raise request.error
        return request

    def _adapter_of(self, lora_request: Any) -> str | None:
        name = None if lora_request is None else lora_request.lora_name
        return name if name in self._adapters else None

    def _ask_engine(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do ``generate`` or ``encode``. A plain function, so that it raises before a stream begins."""
        request = _current.get()
        if request is None:
            return original(*args, **kwargs)
        adapter = self._adapter_of(kwargs.get("lora_request"))
        own, adapters = split_label(next(iter(request.labels)))
        served = own if adapter is None else adapters.get(adapter)
        if adapter is None and not self._follows_model:
            request.fail(f"and this model is of no run; as model, name one of {', '.join(sorted(self._adapters))}")
        elif served != request.version:
            request.fail(f"and {served} of {'the model' if adapter is None else adapter} is served; ask for that one")
        request.raise_in_vllm()
        return self._pass_on(request, original(*args, **kwargs))

    async def _pass_on(self, request: ExactRequest, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Pass outputs on while all steps had the label of the request."""
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    request.raise_in_vllm()
                    yield output
            except Exception:
                # An aborted request may fail in its own way.
                request.raise_in_vllm()
                raise
        request.raise_in_vllm()

    def _add(self, original: Callable[..., Any], added: Any, *args: Any, **kwargs: Any) -> None:
        original(added, *args, **kwargs)
        request, state = _current.get(), self._client.output_processor.request_states.get(added.request_id)
        if request is not None and state is not None:
            self._in_engine[state] = request, self._adapter_of(added.lora_request)

    def _process(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._in_engine:
            self._check_outputs(outputs, kwargs.get("weight_version"))
        return original(outputs, *args, **kwargs)

    def _check_outputs(self, outputs: Any, label: str | None) -> None:
        """Check the outputs of a step before vLLM hands them to those who wait for them."""
        states = self._client.output_processor.request_states
        failed: set[ExactRequest] = set()
        for output in outputs:
            state = states.get(output.request_id)
            if state is None or state not in self._in_engine:
                continue
            request, adapter = self._in_engine[state]
            if output.new_token_ids or output.pooling_output is not None:
                request.check_step(label, adapter)
            elif str(output.finish_reason) == "abort":
                request.fail("and the engine aborted it, as pause_mode abort does at a commit; retry", interrupted=True)
            if request.error is not None:
                failed.add(request)
        if label is not None and len(self._client.engine_core.core_engines) == 1:
            # Those that still wait for their first output would get it from these weights, or later ones.
            for state, (request, adapter) in list(self._in_engine.items()):
                if states.get(state.request_id) is state:
                    request.check_step(label, adapter)
                    if request.error is not None:
                        failed.add(request)
        if failed:
            ids = [state.request_id for state, (request, _) in list(self._in_engine.items()) if request in failed]
            task = asyncio.get_running_loop().create_task(self._client.abort(ids, internal=True))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)
