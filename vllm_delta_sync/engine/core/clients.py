"""``EngineCoreClients`` makes all engine cores behind a server's client act as one: all are called, or none.

With data parallelism each engine core has its own scheduler and ranks. Engines of a dense model are independent; those
of a mixture of experts run in step and wait for each other in every forward pass, in pauses and when they resume.
Therefore every call goes to all engines at once, and waits for all answers even if one fails: the caller must not
continue while another engine is still at work.

Answers list the ranks of all engines, in the order of data parallel ranks.
"""

import asyncio
from typing import Any

from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.compat.layout_checks import ranks_per_engine, reached_engines
from vllm_delta_sync.engine.core import rank_rpc
from vllm_delta_sync.engine.core.hooks import missing_names
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.protocol import (
    A,
    Commit,
    Describe,
    Done,
    RankFailure,
    RankRequest,
    RankState,
    Revert,
    decode_answers,
    encode_answer,
    encode_request,
)
from vllm_delta_sync.errors import EngineError

END_SECONDS = 10.0


class EngineCoreClients:
    """The engine cores behind one ``AsyncLLM``. Coroutines run in its event loop.

    If this vLLM's engine core is not as expected (``missing_names``), this class makes vLLM's own calls instead, to a
    single engine: ``layout_checks.check_layout`` refuses several.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._core = client.engine_core

    async def _call_engines(
        self, method: str, *args: Any, per_engine: list[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """Call a utility method of every engine core at once.

        Args:
            per_engine: per engine, the arguments to pass instead of ``args``.

        Returns:
            the answers, in the order of engines.

        Raises:
            Exception: the first error among the answers, once all have answered.
        """
        # vLLM's own call reaches every engine too, but returns only the first one's answer, and stops at an error.
        calls = [
            self._core._call_utility_async(method, *(args if per_engine is None else per_engine[index]), engine=engine)
            for index, engine in enumerate(reached_engines(self._client))
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    async def _call_ranks(self, method: str, request: RankRequest[Any], *args: Any) -> list[Any]:
        """Pass a request to a utility method of every engine core, each with the entries of its own ranks."""
        size = ranks_per_engine(self._client)
        payloads = [
            encode_request(request, engine * size, (engine + 1) * size)
            for engine in range(len(reached_engines(self._client)))
        ]
        return await self._call_engines(method, per_engine=[(payload, *args) for payload in payloads])

    async def pause(self, mode: str, clear_cache: bool, limit_s: float) -> None:
        """Pause every engine core for at most ``limit_s`` seconds, not counting the wait for requests in flight.

        Cause: ``pause_generation`` ends with a fixed 20 ms sleep for the order of outputs, which weights do not need.
        Symptom: every pause is 20 ms longer. Remove when: the sleep is gone.

        Raises:
            EngineError: an engine sleeps; none was paused.
        """
        if clear_cache:
            await self._client.renderer.clear_mm_cache_async()
        if missing_names():
            await self._core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
            return
        # If one engine refused, engines that run in step with it would wait for it.
        if len(reached_engines(self._client)) > 1 and any(await self._call_engines("is_sleeping")):
            raise EngineError("the engine sleeps and holds no weights to patch; wake it up first (POST /wake_up)")
        request = asyncio.ensure_future(self._call_engines("delta_sync_pause", mode, clear_cache, limit_s))
        try:
            # Mode ``wait`` lasts until the slowest engine has finished its requests in flight, so renew meanwhile.
            while not (await asyncio.wait({request}, timeout=limit_s / 3))[0]:
                await self.renew(limit_s)
            await request
        finally:
            request.cancel()

    async def renew(self, limit_s: float) -> bool:
        """Call PauseWatchdog.renew in every engine core. False if any engine has no pause to renew."""
        return bool(missing_names()) or all(await self._call_engines("delta_sync_renew", limit_s))

    async def call(self, request: RankRequest[A]) -> list[A | RankFailure]:
        """Make a call to every rank of every engine.

        No timeout inside the engine: the next call would receive a late answer.
        """
        if missing_names():
            number = rank_rpc.next_number()
            answers = await self._client.collective_rpc(rank_rpc.METHOD, args=(encode_request(request), number))
            return decode_answers(request, rank_rpc.check_numbers(answers, number))
        return _decode_all(request, await self._call_ranks("delta_sync_call_ranks", request))

    async def call_paused(self, request: RankRequest[A], timeout_s: float) -> list[A | RankFailure] | None:
        """Call PauseWatchdog.call_paused in every engine core: only during a pause.

        Returns:
            an answer per rank; None if the pause of any engine had expired, and it did nothing. An engine whose
            watchdog has already reached the version of a ``Revert`` counts as done.
        """
        if missing_names():
            return await self.call(request)
        several = len(reached_engines(self._client)) > 1
        # Check first, so that no engine begins a commit that another one can no longer do within its pause.
        if several and isinstance(request, Commit) and not await self.renew(timeout_s):
            return None
        outcomes = await self._call_ranks("delta_sync_call_paused", request, timeout_s)
        if several and isinstance(request, Revert) and None in outcomes:
            described = await self._call_ranks("delta_sync_call_ranks", Describe())
            for engine, payloads in enumerate(described):
                ranks = decode_answers(Describe(), payloads)
                if outcomes[engine] is None and all(
                    isinstance(rank, RankState) and rank.version == request.version for rank in ranks
                ):
                    outcomes[engine] = [encode_answer(Done())] * len(ranks)
        return None if None in outcomes else _decode_all(request, outcomes)

    async def label(self, version: int | None) -> None:
        """Set vLLM's weight version, which outputs carry per span: the decimal version, or no version."""
        await patches.label_weights(self._client, version)

    async def label_paused(self, version: int | None) -> bool:
        """Call PauseWatchdog.label_paused in every engine core; weights that a watchdog reverted keep their label.

        Returns:
            False if the pause of any engine had expired, in which case it was not labelled.
        """
        if missing_names():
            await self.label(version)
            return True
        label = patches.NO_VERSION if version is None else str(version)
        return all(await self._call_engines("delta_sync_label_paused", label))

    async def resume(self) -> bool:
        """Call PauseWatchdog.resume in every engine core. True if any had resumed itself."""
        if missing_names():
            await self._core.resume_scheduler_async()
            return False
        return any(await self._call_engines("delta_sync_resume"))

    async def end(self, reason: str) -> None:
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
        if len(processes) >= len(reached_engines(self._client)):
            return
        try:
            await asyncio.wait_for(self._call_engines("delta_sync_end", reason), END_SECONDS)
        except TimeoutError as error:
            raise EngineError("an engine core is not this server's own process and does not answer: end it") from error
        except Exception:  # noqa: BLE001  an engine that ends cannot answer
            return


def _decode_all(request: RankRequest[A], per_engine: list[list[bytes]]) -> list[A | RankFailure]:
    return decode_answers(request, [payload for payloads in per_engine for payload in payloads])
