"""``ServerEnginePort`` and ``OfflineEnginePort``: the ``EnginePort`` of a server's client and of an ``LLM`` object."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from vllm_delta_sync.engine.commit.transaction import DrainError
from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.core import rank_rpc
from vllm_delta_sync.engine.core.clients import EngineCoreClients
from vllm_delta_sync.engine.protocol import (
    OPERATIONS,
    A,
    RankFailure,
    RankRequest,
    decode_answers,
    encode_request,
)
from vllm_delta_sync.errors import EngineError, WeightsLostError
from vllm_delta_sync.settings import Settings

CALL_TIMEOUT_S = 120.0
"""Bound on one call to a running engine; every call is short, because long work runs in the background."""
ANSWER_SECONDS = 5.0
"""Extra time for an answer, on top of the time that the engine gives its ranks."""

R = TypeVar("R")


class ServerEnginePort:
    """All engines of a vLLM server, called from the receiver's thread through the server's event loop."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop, settings: Settings) -> None:
        self._engines = EngineCoreClients(client)
        self._loop = loop
        self._pause_mode = settings.pause_mode
        self._reset_prefix_cache = settings.prefix_cache == "reset"
        self._pause_seconds = settings.pause_seconds
        self._drain_seconds = settings.wait_seconds

    def _run(self, call: Coroutine[Any, Any, R], timeout: float = CALL_TIMEOUT_S) -> R:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(timeout)
        except TimeoutError as error:
            future.cancel()
            raise EngineError(f"the engine did not answer within {timeout:.0f} s") from error
        except Exception as error:  # vLLM reports a worker's failure as a bare exception
            raise EngineError(f"the engine failed: {type(error).__name__}: {error}") from error

    def call(self, request: RankRequest[A]) -> list[A | RankFailure]:
        """See EnginePort.

        Raises:
            WeightsLostError: a rank does not answer during a commit, so its weights are unknown.
            EngineError: the engine failed, or the pause had expired and nothing was done.
        """
        if not OPERATIONS[request.operation].paused:
            return self._run(self._engines.call(request))
        try:
            answers = self._run(
                self._engines.call_paused(request, self._pause_seconds), self._pause_seconds + ANSWER_SECONDS
            )
        except EngineError as error:
            raise WeightsLostError(f"{request.operation} has no outcome: {error.message}") from error
        if answers is None:
            raise EngineError(f"the pause expired before {request.operation}, so it was not done on every rank")
        return answers

    def pause(self) -> None:
        """See EnginePort. Mode ``wait`` lasts as long as the requests in flight.

        Raises:
            DrainError: they took too long. The caller must still end the pause, by ``resume``.
        """
        pausing = self._engines.pause(self._pause_mode, self._reset_prefix_cache, self._pause_seconds)
        if self._pause_mode != "wait":
            self._run(pausing)
            return
        try:
            self._run(pausing, self._drain_seconds)
        except EngineError as error:
            if not isinstance(error.__cause__, TimeoutError):
                raise
            raise DrainError(
                f"requests in flight did not finish within wait_seconds = {self._drain_seconds:g}, so the commit will "
                "be tried again; bound max_tokens, raise wait_seconds, or set pause_mode to keep"
            ) from error

    def resume(self) -> bool:
        """See EnginePort."""
        return self._run(self._engines.resume())

    def label(self, version: int | None) -> None:
        """See EnginePort."""
        self._run(self._engines.label(version))

    def label_paused(self, version: int | None) -> None:
        """See EnginePort."""
        if not self._run(self._engines.label_paused(version)):
            raise EngineError(f"the pause expired before its outputs were labelled with version {version}")

    def end(self, reason: str) -> None:
        """See EnginePort; the server ends with its engine."""
        self._run(self._engines.end(reason))


@contextmanager
def _engine_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # vLLM reports a worker's failure as a bare exception
        raise EngineError(f"the engine failed: {type(error).__name__}: {error}") from error


class OfflineEnginePort:
    """An ``LLM`` object, used between two ``generate`` calls, where no pause is needed."""

    def __init__(self, llm: Any, settings: Settings) -> None:
        self._llm = llm
        self._reset_prefix_cache = settings.prefix_cache == "reset"

    def call(self, request: RankRequest[A]) -> list[A | RankFailure]:
        """See EnginePort."""
        number = rank_rpc.next_number()
        with _engine_errors():
            answers = self._llm.collective_rpc(rank_rpc.METHOD, args=(encode_request(request), number))
        return decode_answers(request, rank_rpc.check_numbers(answers, number))

    def pause(self) -> None:
        """Check that nothing runs. Raises EngineError if requests are unfinished."""
        if self._llm.llm_engine.has_unfinished_requests():
            raise EngineError("requests are unfinished; call sync.to() between two generate() calls")

    def resume(self) -> bool:
        """Drop the prefix cache of the old weights, if the setting says so."""
        with _engine_errors():
            if self._reset_prefix_cache:
                self._llm.reset_prefix_cache()
        return False

    def label(self, version: int | None) -> None:
        """See EnginePort."""
        with _engine_errors():
            self._llm.llm_engine.set_weight_version(patches.NO_VERSION if version is None else str(version))

    def label_paused(self, version: int | None) -> None:
        """See EnginePort; nothing runs, so nothing expires."""
        self.label(version)

    def end(self, reason: str) -> None:
        """Do nothing: an ``LLM`` belongs to its caller, who gets the error and must make another one."""
