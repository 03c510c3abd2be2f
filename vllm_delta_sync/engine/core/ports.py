"""``ServerEnginePort`` and ``OfflineEnginePort``: the ``EnginePort`` of a server's client and of an ``LLM`` object.

Both call methods that ``pause_watchdog.install`` has added to vLLM's engine core. A server's client may have several
engine cores: with data parallelism each has its own scheduler and ranks. Engines of a dense model are independent;
those of a mixture of experts run in step and wait for each other in every forward pass, in pauses and when they resume.
Therefore every call goes to all engines at once, and waits for all answers even if one fails: the caller must not
continue while another engine is still at work. Answers list the ranks of all engines, in the order of data parallel
ranks.
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from itertools import chain
from typing import Any, ClassVar, TypeVar

import msgspec

from vllm_delta_sync.engine import protocol
from vllm_delta_sync.engine.commit.transaction import DrainError, EngineStopped
from vllm_delta_sync.engine.compat.version_labels import version_label
from vllm_delta_sync.engine.core.engine_shutdown import ask_engine, ask_engines, watch_shutdown
from vllm_delta_sync.engine.core.pause_watchdog import NOT_PAUSED
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.model.weight_memory import ASLEEP
from vllm_delta_sync.engine.protocol import A, RankFailure, RankRequest, decode_answers, encode_request
from vllm_delta_sync.errors import BusyError, EngineError, WeightsLostError
from vllm_delta_sync.settings import Settings

CALL_TIMEOUT_S = 120.0
"""Bound on one call to a running engine; every call is short, because long work runs in the background."""
ANSWER_SECONDS = 5.0
"""Extra time for an answer, on top of the time that the engine gives its ranks."""
END_SECONDS = 10.0
HELD_TRIES = 5
HELD_SECONDS = 0.1
"""How often a pause is tried while requests hold blocks that cannot be dropped, and the time to the second try, which
doubles each time. In between generation continues, so that transfers of a KV connector can end."""
LOOP_CHECK_SECONDS = 0.5
"""Interval between checks, during a call, that the event loop still exists."""
STOP_SECONDS = 1.0
"""How long to wait, after the engine died or a call was cancelled, for the sign that the server is being stopped. A
signal to all processes of a server reaches the engine first."""
STOP_STEP_SECONDS = 0.01
R = TypeVar("R")


class HeldBlocksError(BusyError):
    """With ``prefix_cache`` reset: requests hold cached blocks that cannot be computed again now."""

    kind = "held_blocks"


def _try_while_held(pause: Callable[[], int], resume: Callable[[], Any]) -> None:
    """Pause, and try again for a while if requests hold blocks.

    Raises:
        HeldBlocksError: they still do. BusyError: the engine sleeps. After both, the pause must still end.
    """
    for attempt in range(HELD_TRIES):
        held = pause()
        if held == NOT_PAUSED:
            raise BusyError(ASLEEP)
        if not held:
            return
        if attempt + 1 < HELD_TRIES:
            resume()
            time.sleep(HELD_SECONDS * 2**attempt)
    raise HeldBlocksError(
        f"keys and values of requests that wait for a KV connector or for more input cannot be dropped ({held} such "
        "requests); the version is tried again later. With prefix_cache salt nothing is dropped"
    )


class _WatchedPort:
    """What both ports do with the methods that ``pause_watchdog.install`` has added to engine cores."""

    _serial_labels: ClassVar[bool]
    """See ``version_label``."""

    def __init__(self, settings: Settings, adapter: protocol.Adapter | None) -> None:
        self._adapter = adapter
        self._name = None if adapter is None else adapter.name
        self._prefix_cache = settings.prefix_cache
        self._pause_seconds = settings.pause_seconds

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every engine core."""
        raise NotImplementedError

    def _ask_ranks(self, request: RankRequest[Any]) -> list[list[bytes]]:
        """Make a call to every rank, paused or not; returns encoded answers per engine."""
        raise NotImplementedError

    def _ask_paused(self, request: RankRequest[Any]) -> list[list[bytes] | None]:
        """As ``_ask_ranks``, only during a pause; None for an engine whose pause had expired."""
        raise NotImplementedError

    def call(self, request: RankRequest[A]) -> list[A | RankFailure]:
        """See EnginePort.

        Raises:
            WeightsLostError: a rank does not answer during a commit, so its weights are unknown.
            EngineError: the engine failed, or the pause had expired and nothing was done.
        """
        if self._adapter is not None:
            request = msgspec.structs.replace(request, adapter=self._adapter)
        if not request.paused:
            return decode_answers(request, [*chain.from_iterable(self._ask_ranks(request))])
        try:
            per_engine = self._ask_paused(request)
            if None not in per_engine:
                return decode_answers(request, [*chain.from_iterable(filter(None, per_engine))])
        except EngineError as error:
            raise WeightsLostError(f"{request.operation} has no outcome: {error.message}") from error
        raise EngineError(f"the pause expired before {request.operation}, so it was not done on every rank")

    def _pause_arguments(self, mode: str, limit_s: float) -> list[Any]:
        """Return the arguments of ``PauseWatchdog.pause``."""
        changed = [] if self._adapter is None else [msgspec.msgpack.encode(self._adapter)]
        return [mode, self._prefix_cache, limit_s, *changed]

    def label(self, version: int | None, run: str | None) -> None:
        # One label for all engines: vLLM refuses to tell several.
        label = version_label(version, serial=self._serial_labels)
        self._ask("delta_sync_label", self._name, label, run, self._prefix_cache)

    def label_paused(self, version: int | None, run: str | None) -> None:
        """See EnginePort. Weights that a watchdog has reverted keep their label."""
        label = version_label(version, serial=self._serial_labels)
        if not all(self._ask("delta_sync_label_paused", self._name, label, run)):
            raise EngineError(f"the pause expired before its outputs were labelled with version {version}")


class ServerEnginePort(_WatchedPort):
    """The ``EnginePort`` to all engine cores of a vLLM server.

    The receiver's thread calls it; coroutines run in the server's event loop. Each receiver of an engine has a port of
    its own: ``adapter`` says whose weights it changes, and ``turns``, which all ports share, lets one at a time pause
    the engine.

    Raises:
        EngineStopped: by its methods, once the engine is shut down or the event loop is closed; by ``pause``, once
            ``stop`` was called.
    """

    _serial_labels = True

    def __init__(
        self,
        client: Any,
        loop: asyncio.AbstractEventLoop,
        settings: Settings,
        adapter: protocol.Adapter | None = None,
        turns: "threading.Lock | None" = None,
    ) -> None:
        super().__init__(settings, adapter)
        self._client = client
        self._turns = turns or threading.Lock()
        self._has_turn = False
        self._core = client.engine_core
        self._loop = loop
        self._stopping = watch_shutdown(client)
        self._stopped = False
        self._pause_mode = settings.pause_mode
        self._drain_seconds = settings.wait_seconds

    def _ask(self, method: str, *args: Any) -> list[Any]:
        return self._run(self._call_engines(method, *args))

    def _ask_ranks(self, request: RankRequest[Any]) -> list[list[bytes]]:
        return self._run(self._call_ranks("delta_sync_call_ranks", request))

    def _ask_paused(self, request: RankRequest[Any]) -> list[list[bytes] | None]:
        return self._run(self._move_ranks(request), self._pause_seconds + ANSWER_SECONDS)

    def pause(self) -> None:
        """See EnginePort. Mode ``wait`` lasts as long as the requests in flight.

        Raises:
            DrainError: they took too long. The caller must still end the pause, by ``resume``.
            HeldBlocksError: caches cannot be dropped now; likewise.
            BusyError: the engine sleeps; or it is paused for another run's commit, which does not end.
        """
        self._check_not_stopped()
        if not self._has_turn and not self._turns.acquire(timeout=self._pause_seconds + ANSWER_SECONDS):
            raise BusyError("the engine is paused for a version of another run; this one is tried again later")
        self._has_turn = True
        _try_while_held(self._pause_once, lambda: self._ask("delta_sync_resume"))
        self._check_not_stopped()  # requests in flight may have taken long

    def stop(self) -> None:
        """Let no commit begin any more; one that is under way ends."""
        self._stopped = True

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise EngineStopped("it was closed")
        if self._stopping.is_set():
            # Requests in flight may still be finishing.
            raise EngineStopped

    def _pause_once(self) -> int:
        """Pause all engines; returns how many requests hold blocks that cannot be dropped."""
        pausing = self.pause_engines(self._pause_seconds)
        if self._pause_mode != "wait":
            return self._run(pausing)
        try:
            return self._run(pausing, self._drain_seconds)
        except EngineError as error:
            if not isinstance(error.__cause__, TimeoutError):
                raise
            raise DrainError(
                f"requests in flight did not finish within wait_seconds = {self._drain_seconds:g}, so the commit will "
                "be tried again; bound max_tokens, raise wait_seconds, or set pause_mode to keep"
            ) from error

    def resume(self) -> bool:
        if not self._has_turn:
            return False  # the pause, if there is one, is another run's
        expired = any(self._ask("delta_sync_resume"))
        self._has_turn = False
        self._turns.release()
        return expired

    def end(self, reason: str) -> None:
        """See EnginePort; the server ends with its engine."""
        self._run(self._end(reason))

    @property
    def _engines(self) -> list[bytes]:
        """Identities of the engine cores, by data parallel rank."""
        return list(self._core.core_engines)

    def _run(self, call: Coroutine[Any, Any, R], timeout: float = CALL_TIMEOUT_S) -> R:
        """Run a coroutine in the event loop, and wait for its result.

        Time in which others block the loop, such as a training that runs in it, does not count: what an engine has
        answered, and what it was not even asked, waits there.

        Raises:
            EngineError: it failed, or took too long. EngineStopped: it failed because of a stop.
        """
        left, checked_at = timeout, time.monotonic()
        loop_ran = threading.Event()
        loop_ran.set()
        try:
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        except RuntimeError as error:  # the loop is closed
            call.close()
            raise EngineStopped from error
        while not wait([future], min(LOOP_CHECK_SECONDS, left)).done:
            if self._loop.is_closed():
                if inspect.getcoroutinestate(call) == inspect.CORO_CREATED:
                    # Python would warn that nothing has awaited it.
                    call.close()
                raise EngineStopped
            now = time.monotonic()
            if loop_ran.is_set():
                left -= now - checked_at
                if left <= 0:
                    future.cancel()
                    raise EngineError(f"the engine did not answer within {timeout:.0f} s") from TimeoutError()
                loop_ran.clear()
                with suppress(RuntimeError):  # the loop was closed just now
                    self._loop.call_soon_threadsafe(loop_ran.set)
            checked_at = now
        try:
            return future.result()
        except Exception as error:  # vLLM reports a worker's failure as a bare exception
            if self._is_stop(error):
                raise EngineStopped from error
            raise _engine_error(error) from error

    def _is_stop(self, error: Exception) -> bool:
        """Return whether a call failed because the engine is shut down on purpose, or the event loop is ending."""
        may_be_stop = isinstance(error, CancelledError) or self._client.errored
        deadline = time.monotonic() + (STOP_SECONDS if may_be_stop else 0.0)
        while not (stops := self._stopping.is_set() or self._loop.is_closed()) and time.monotonic() < deadline:
            time.sleep(STOP_STEP_SECONDS)
        return stops

    async def _call_engines(
        self, method: str, *args: Any, per_engine: list[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """Call a utility method of every engine core at once, and return the answers in the order of engines.

        Args:
            per_engine: per engine, the arguments to pass instead of ``args``.

        Raises:
            Exception: as ``ask_engines``.
        """
        # vLLM's own call reaches every engine too, but returns only the first one's answer, and stops at an error.
        calls = [
            self._core._call_utility_async(method, *(args if per_engine is None else per_engine[index]), engine=engine)
            for index, engine in enumerate(self._engines)
        ]
        return await ask_engines(self._client, calls)

    async def _call_ranks(self, method: str, request: RankRequest[Any], *args: Any) -> list[Any]:
        """Pass a request to a utility method of every engine core, each with the entries of its own ranks."""
        size = int(self._client.vllm_config.parallel_config.world_size)
        payloads = [encode_request(request, first, first + size) for first in range(0, size * len(self._engines), size)]
        return await self._call_engines(method, per_engine=[(payload, *args) for payload in payloads])

    async def _move_ranks(self, request: RankRequest[Any]) -> list[list[bytes] | None]:
        """Do ``PauseWatchdog.call_paused`` in every engine core: only during a pause.

        Returns:
            encoded answers of the ranks, per engine; None if its pause had expired, and it did nothing. An engine
            whose watchdog has already reached the version of a ``Revert`` counts as done.
        """
        several = len(self._engines) > 1
        # Check first, so that no engine begins a commit that another one can no longer do within its pause.
        if several and isinstance(request, protocol.Commit) and not await self._renew(self._pause_seconds):
            return [None]
        outcomes = await self._call_ranks("delta_sync_call_paused", request, self._pause_seconds)
        if several and isinstance(request, protocol.Revert) and None in outcomes:
            describe = protocol.Describe(adapter=self._adapter)
            described = await self._call_ranks("delta_sync_call_ranks", describe)
            for engine, payloads in enumerate(described):
                ranks = decode_answers(describe, payloads)
                if outcomes[engine] is None and all(
                    isinstance(rank, protocol.RankState) and rank.version == request.version for rank in ranks
                ):
                    outcomes[engine] = [protocol.encode_answer(protocol.Done())] * len(ranks)
        return outcomes

    async def pause_engines(self, limit_s: float) -> int:
        """Pause every engine core for at most ``limit_s`` seconds, not counting the wait for requests in flight.

        Cause: ``pause_generation`` ends with a fixed 20 ms sleep for the order of outputs, which weights do not need.
        Symptom: every pause is 20 ms longer. Remove when: the sleep is gone.

        Returns:
            number of requests of all engines that hold blocks which cannot be dropped now, see ``WeightCaches.drop``;
            NOT_PAUSED if an engine sleeps.
        """
        # If one engine refused, engines that run in step with it would wait for it.
        if len(self._engines) > 1 and any(await self._call_engines("delta_sync_sleeps")):
            return NOT_PAUSED
        arguments = self._pause_arguments(self._pause_mode, limit_s)
        request = asyncio.ensure_future(self._call_engines("delta_sync_pause", *arguments))
        try:
            # Mode ``wait`` lasts until the slowest engine has finished its requests in flight, so renew meanwhile.
            while not (await asyncio.wait({request}, timeout=limit_s / 3))[0]:
                await self._renew(limit_s)
            held = await request
            return NOT_PAUSED if NOT_PAUSED in held else sum(held)
        finally:
            request.cancel()

    async def _renew(self, limit_s: float) -> bool:
        """Do ``PauseWatchdog.renew`` in every engine core. False if any engine has no pause to renew."""
        return all(await self._call_engines("delta_sync_renew", limit_s))

    async def _end(self, reason: str) -> None:
        """End every engine core and its workers, even if they hang in a call; the server then ends too.

        Raises:
            EngineError: an engine's process does not belong to this server, and does not answer.
        """
        logger.critical("ending the engine: %s", reason)
        processes = getattr(self._core.resources.engine_manager, "processes", None) or []
        if processes:
            from vllm.utils.system_utils import kill_process_tree

            for process in processes:
                kill_process_tree(process.pid)
        if len(processes) >= len(self._engines):
            return
        try:
            await asyncio.wait_for(self._call_engines("delta_sync_end", reason), END_SECONDS)
        except TimeoutError as error:
            raise EngineError("an engine core is not this server's own process and does not answer: end it") from error
        except Exception:  # noqa: BLE001  an engine that ends cannot answer
            return


def _engine_error(error: Exception) -> EngineError:
    """Return vLLM's error, or the remedy where its engine core does not know our methods."""
    if "has no attribute 'delta_sync_" in str(error):
        return EngineError(
            "the engine core was started without our plugin, so it cannot be paused safely: name delta_sync in "
            "VLLM_PLUGINS, or unset it, before the engine is made; on all nodes, if there are several"
        )
    return EngineError(f"the engine failed: {type(error).__name__}: {error}")


class OfflineEnginePort(_WatchedPort):
    """The ``EnginePort`` to an ``LLM`` object, used between two ``generate`` calls, when nothing runs."""

    _serial_labels = False

    def __init__(self, llm: Any, settings: Settings, adapter: protocol.Adapter | None = None) -> None:
        super().__init__(settings, adapter)
        self._llm = llm

    def _ask_ranks(self, request: RankRequest[Any]) -> list[list[bytes]]:
        return self._ask("delta_sync_call_ranks", encode_request(request))

    def _ask_paused(self, request: RankRequest[Any]) -> list[list[bytes] | None]:
        return self._ask("delta_sync_call_paused", encode_request(request), self._pause_seconds)

    def pause(self) -> None:
        """See EnginePort.

        Raises:
            EngineError: requests are unfinished. HeldBlocksError: caches cannot be dropped now. BusyError: the engine
                sleeps.
        """
        if self._llm.llm_engine.has_unfinished_requests():
            raise EngineError("requests are unfinished; call sync.to() between two generate() calls")
        arguments = self._pause_arguments("keep", self._pause_seconds)
        _try_while_held(lambda: int(self._ask("delta_sync_pause", *arguments)[0]), self.resume)

    def resume(self) -> bool:
        return any(self._ask("delta_sync_resume"))

    def end(self, reason: str) -> None:
        """Do nothing: an ``LLM`` belongs to its caller, who gets the error and must make another one."""

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the engine core, in its own process or in this one."""
        client = self._llm.llm_engine.engine_core
        try:
            if hasattr(client, "call_utility"):
                return [ask_engine(client, method, *args)]
            return [getattr(client.engine_core, method)(*args)]
        except Exception as error:  # vLLM reports a worker's failure as a bare exception
            raise _engine_error(error) from error
