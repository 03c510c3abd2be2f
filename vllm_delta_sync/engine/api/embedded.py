"""Follow a run in the caller's own process: ``attach`` for a ``vllm.LLM``, ``attach_async`` for a ``vllm.AsyncLLM``.

An ``LLM`` changes its version between two ``generate`` calls, only when asked. An ``AsyncLLM`` follows beside
``generate``, as a server does: the receiver has its own thread and reaches the engine through the caller's event loop,
which must not be blocked. The setting ``pause_mode`` says what happens to requests in flight at a commit.
"""

import asyncio
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_delta_sync.engine.api.adapters import check_lora, make_adapter
from vllm_delta_sync.engine.api.weight_transfer import OverdueError
from vllm_delta_sync.engine.compat.features import check_engine, fit_pause_mode
from vllm_delta_sync.engine.compat.lora import lora_request
from vllm_delta_sync.engine.compat.version_labels import hide_serials
from vllm_delta_sync.engine.core.ports import OfflineEnginePort, ServerEnginePort
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.engine.observe.states import Answer
from vllm_delta_sync.engine.protocol import Adapter
from vllm_delta_sync.errors import EngineError, SettingsError, UsageError
from vllm_delta_sync.settings import Settings, load_settings

ATTACHED = "delta_sync_attached"
"""Attribute of an engine: what ``attach_async`` returned; of an ``LLM``: what ``attach`` returned last, by adapter."""
ADAPTERS = "delta_sync_adapters"
"""Attribute of both: its adapters by name. Their folders stay until the process ends, as vLLM may read them again."""


class OfflineSync:
    """Moves an ``LLM`` from version to version. Use it in the thread that uses the ``LLM``.

    After another ``attach`` to the same ``LLM`` its methods raise EngineError, except ``status``.

    Attributes:
        replaced: whether there was another ``attach``.
    """

    def __init__(self, receiver: Receiver, adapter: Adapter | None = None) -> None:
        self._receiver = receiver
        self._adapter = adapter
        self.replaced = False

    @property
    def _current(self) -> Receiver:
        # Another receiver has moved the weights, and this one would take them for lost.
        if self.replaced:
            raise EngineError("attach was called again for this LLM; use what the last call returned")
        return self._receiver

    @property
    def lora_request(self) -> Any:
        """vLLM's ``LoRARequest`` for the adapter that the setting ``lora_name`` names, to pass to ``generate``.

        Raises:
            EngineError: no version of an adapter is served.
        """
        return _lora_request(self._adapter, self._current.served_version)

    def to(self, version: int | None = None) -> dict[str, Any]:
        """Bring the weights to a version, newer or older; None means the version that the setting ``target`` names.

        Returns:
            ``status()``.

        Raises:
            DeltaSyncError: what failed; ``status()`` says which version is served.
        """
        version = None if version is None else _number(version)
        served = self._current.served_version
        if version is not None and served is not None and version < served:
            return self.rollback(version)
        self._current.advance(version)
        return self.status()

    def rollback(self, version: int) -> dict[str, Any]:
        """Serve an older version: from the undo log if ``status()["undo"]`` has it, else from the bucket.

        Returns:
            ``status()``.

        Raises:
            NotFoundError: it is not published, or no longer retained. ChainError: it is newer than the served one.
            DeltaSyncError: what failed; ``status()`` says which version is served.
        """
        receiver, version = self._current, _number(version)
        try:
            receiver.rollback(version)
        finally:  # after an interrupt too, because nothing else here ends a hold
            receiver.release()
        return self.status()

    def status(self) -> dict[str, Any]:
        """Return the same document as ``GET /delta_sync/status``."""
        return self._receiver.status()

    def verify(self) -> dict[str, Any]:
        """Rescan all weights against the served version: {"verdict", "version", "mismatched", "chain", …}.

        Raises:
            BusyError: no version is served yet.
        """
        return self._current.verify()


def attach(llm: Any, bucket: str | Path, trusted_keys: str | Path | Sequence[str | Path] | None = None) -> OfflineSync:
    """Attach to a run. The ``LLM`` must have been made with ``worker_extension_cls=WORKER_EXTENSION``.

    May be called again, with other settings; for the weights, or one adapter, only what it returned last can be used.

    Args:
        llm: a ``vllm.LLM``.
        bucket: run URL; other settings come from the environment and the settings file (docs/REFERENCE.md).
        trusted_keys: public key files; separated by commas in a string. None means the setting ``trusted_keys``.

    Raises:
        EngineError: not an ``LLM``, the extension is missing, or an option or the layout is not supported.
        SettingsError: a setting is invalid.
    """
    if not hasattr(llm, "llm_engine"):
        raise EngineError(
            f"attach is for a vllm.LLM, this is {type(llm).__name__}; for a vllm.AsyncLLM call "
            "await attach_async(engine, bucket=URL)"
        )
    settings = _settings(bucket, trusted_keys)
    check_engine(llm.llm_engine.vllm_config, settings.prefix_cache, offline=True)
    adapter = _make_adapter(settings, llm, llm.llm_engine.vllm_config)
    sync = OfflineSync(Receiver(OfflineEnginePort(llm, settings, adapter), settings), adapter)
    attached: dict[str | None, OfflineSync] = vars(llm).setdefault(ATTACHED, {})
    if (earlier := attached.get(settings.lora_name)) is not None:
        earlier.replaced = True
    attached[settings.lora_name] = sync
    return sync


def _number(version: int) -> int:
    """Return the number of a version. Raises UsageError: it is none, such as a tag."""
    try:
        number = -1 if isinstance(version, bool) else operator.index(version)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(
            f"version is {version!r}; give the number of a version, of a name such as tag:best that of "
            "open_run(url).resolve('tag:best').version"
        )
    return number


def _make_adapter(settings: Settings, engine: Any, vllm_config: Any) -> Adapter | None:
    """Return an engine's adapter that the setting ``lora_name`` names, the same at each call; None if there is none.

    Raises:
        SettingsError: ``lora_adapters`` is set. EngineError: vLLM was started without LoRA.
    """
    if settings.lora_adapters is not None:
        raise SettingsError("lora_adapters is for servers; set lora_name, and attach once for each adapter")
    if settings.lora_name is None:
        return None
    check_lora(vllm_config, [settings.lora_name])
    adapters: dict[str, Adapter] = vars(engine).setdefault(ADAPTERS, {})
    if settings.lora_name not in adapters:
        adapters[settings.lora_name] = make_adapter(settings.lora_name)
    return adapters[settings.lora_name]


def _lora_request(adapter: Adapter | None, served: int | None) -> Any:
    if adapter is None or served is None:
        raise EngineError("no adapter is served: set lora_name, and bring it to a version first")
    return lora_request(adapter)


def _settings(bucket: str | Path, trusted_keys: str | Path | Sequence[str | Path] | None) -> Settings:
    if trusted_keys is not None and not isinstance(trusted_keys, str | Path):
        trusted_keys = ",".join(map(str, trusted_keys))
    given = {"bucket": bucket, "trusted_keys": trusted_keys}
    return load_settings({name: str(value) if isinstance(value, Path) else value for name, value in given.items()})


WAIT_STEP_SECONDS = 0.01
CLOSE_SECONDS = 60.0
CLOSED = "this is closed and no longer follows; call attach_async again"


class AsyncSync:
    """Follows a run with an ``AsyncLLM``. Use it in the event loop that uses the engine.

    With the setting ``policy`` at ``follow``, every new version is taken in the background; with ``manual``, only
    ``to`` changes the version. Use ``async with`` to close it at the end of the block.
    """

    def __init__(self, engine: Any, settings: Settings) -> None:
        self._engine = engine
        self._adapter = _make_adapter(settings, engine, engine.vllm_config)
        self._port = ServerEnginePort(engine, asyncio.get_running_loop(), settings, self._adapter)
        self._service = ReceiverService(self._port, settings)
        self._pending: set[asyncio.Future[Answer]] = set()
        self._closed = False
        self._service.start()

    @property
    def lora_request(self) -> Any:
        """vLLM's ``LoRARequest`` for the adapter that the setting ``lora_name`` names, to pass to ``generate``.

        Raises:
            EngineError: no version of an adapter is served.
        """
        return _lora_request(self._adapter, self._service.receiver.served_version)

    async def __aenter__(self) -> "AsyncSync":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(self, action: str, argument: Any = None) -> Answer:
        if self._closed:
            raise EngineError(CLOSED)
        future: asyncio.Future[Answer] = asyncio.wrap_future(self._service.request(action, argument))
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        try:
            return await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not the caller but ``close`` cancelled it.
            raise EngineError("this was closed before the call finished") from None

    async def to(self, version: int | None = None) -> Answer:
        """Bring the weights to a version (None: the one that the setting ``target`` names); returns ``status()``.

        A version older than the one served is held until ``release``, as after ``rollback``.

        Raises:
            DeltaSyncError: what failed; ``status()`` says which version is served.
        """
        return await self._ask("sync", None if version is None else _number(version))

    async def rollback(self, version: int) -> Answer:
        """Serve an older version and hold it; returns ``status()``.

        Raises:
            DeltaSyncError: what failed; ``status()`` says which version is served.
        """
        return await self._ask("rollback", _number(version))

    async def hold(self) -> Answer:
        """Stay at the version served until ``release``; returns ``status()``."""
        return await self._ask("hold")

    async def release(self) -> Answer:
        """End a hold; returns ``status()``."""
        return await self._ask("release")

    async def verify(self) -> Answer:
        """Rescan all weights against the served version: {"verdict", "version", "mismatched", "chain", …}.

        Raises:
            BusyError: no version is served yet.
        """
        return await self._ask("verify")

    def status(self) -> Answer:
        """Return the same document as ``GET /delta_sync/status``."""
        return self._service.receiver.status()

    async def wait(self, version: int, timeout: float = 30.0) -> Answer:
        """Return ``status()`` once the version, or a later one, is served.

        Args:
            timeout: seconds.

        Raises:
            OverdueError: it is not served in time. EngineError: this was closed, or the engine has ended.
        """
        version = _number(version)
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            served = self._service.receiver.served_version
            if served is not None and served >= version:
                return self.status()
            if self._closed:
                raise EngineError(CLOSED)
            if self._engine.errored:
                raise EngineError("the engine has ended, see its log; make a new one, and call attach_async for it")
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise OverdueError(
                    f"version {version} was not served within {timeout:g} s; version {served} is, see status()"
                )
            await asyncio.sleep(min(WAIT_STEP_SECONDS, left))

    async def close(self) -> None:
        """Stop following. The engine keeps the version it serves; pending calls raise EngineError.

        A commit under way ends first; what is only staged by then is not served, however long staging still takes.
        After a call that was cancelled, another one waits for what is left.
        """
        self._closed = True
        self._port.stop()
        self._service.stop()
        # In a thread: a running commit needs the loop to finish.
        await asyncio.to_thread(self._service.join, CLOSE_SECONDS)
        for future in [*self._pending]:
            # Unlike an error set here, this lets the thread's answer come later, and be dropped.
            future.cancel()
        if getattr(self._engine, ATTACHED, None) is self:
            setattr(self._engine, ATTACHED, None)


async def attach_async(
    engine: Any, bucket: str | Path, trusted_keys: str | Path | Sequence[str | Path] | None = None
) -> AsyncSync:
    """Follow a run. The engine must have been made with ``worker_extension_cls=WORKER_EXTENSION``.

    Args:
        engine: a ``vllm.AsyncLLM``.
        bucket: run URL; other settings come from the environment and the settings file (docs/REFERENCE.md).
        trusted_keys: public key files; separated by commas in a string. None means the setting ``trusted_keys``.

    Raises:
        EngineError: not an ``AsyncLLM``, the extension or the plugin is missing, an option or the layout is not
            supported, or the engine is attached already.
        SettingsError: a setting is invalid.
    """
    if hasattr(engine, "llm_engine") or not hasattr(engine, "engine_core"):
        raise EngineError(
            f"attach_async is for a vllm.AsyncLLM, this is {type(engine).__name__}; for a vllm.LLM call "
            "attach(llm, bucket=URL)"
        )
    if getattr(engine, ATTACHED, None) is not None:
        raise EngineError("this engine is attached already; close() what attach_async returned before")
    settings = fit_pause_mode(_settings(bucket, trusted_keys), engine.vllm_config)
    check_engine(engine.vllm_config, settings.prefix_cache)
    hide_serials(engine)
    sync = AsyncSync(engine, settings)
    setattr(engine, ATTACHED, sync)
    return sync
