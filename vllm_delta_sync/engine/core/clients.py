"""``EngineCoreClients`` makes all engine cores behind a server's client act as one: all are called, or none.

With data parallelism each engine core has its own scheduler and ranks. Engines of a dense model are independent; those
of a mixture of experts run in step and wait for each other in every forward pass, in pauses and when they resume.
Therefore every call goes to all engines at once, and waits for all answers even if one fails: the caller must not
continue while another engine is still at work.

Answers list the ranks of all engines, in the order of data parallel ranks.
"""

import asyncio
from typing import Any

from vllm_delta_sync.engine.commit.transaction import Answer
from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.compat.layout_checks import ranks_per_engine, reached_engines
from vllm_delta_sync.engine.core import rank_rpc
from vllm_delta_sync.engine.core.hooks import missing_names
from vllm_delta_sync.engine.logger import logger
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

    def _split_arguments(self, method: str, arguments: Answer, *rest: Any) -> list[tuple[Any, ...]]:
        """Return, per engine, the arguments of a call to its ranks."""
        size = ranks_per_engine(self._client)
        engines = len(reached_engines(self._client))
        return [
            (method, rank_rpc.slice_per_rank(arguments, engine * size, (engine + 1) * size), *rest)
            for engine in range(engines)
        ]

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

    async def renew(self, limit_s: float) -> Answer:
        """Call PauseWatchdog.renew in every engine core: {"expired": whether any engine has no pause to renew}."""
        if missing_names():
            return {"expired": False}
        return {"expired": any(answer["expired"] for answer in await self._call_engines("delta_sync_renew", limit_s))}

    async def call(self, method: str, arguments: Answer) -> list[Answer]:
        """Make ``delta_sync_call`` on every rank of every engine.

        No timeout inside the engine: the next call would receive a late answer.
        """
        if missing_names():
            number = rank_rpc.next_number()
            plain = rank_rpc.slice_per_rank(arguments)
            answers = await self._client.collective_rpc(rank_rpc.METHOD, args=(method, plain, number))
            return rank_rpc.check_numbers(answers, number)
        return _concatenate(
            await self._call_engines("delta_sync_call_ranks", per_engine=self._split_arguments(method, arguments))
        )

    async def call_paused(self, method: str, arguments: Answer, timeout_s: float) -> Answer:
        """Call PauseWatchdog.call_paused in every engine core: for ``commit`` and ``revert``, only during a pause.

        Returns:
            {"expired": whether the pause of any engine had expired and it did nothing; "answers": one per rank, if
            none had}. An engine whose watchdog has already reached the version of a ``revert`` counts as done.
        """
        if missing_names():
            return {"expired": False, "answers": await self.call(method, arguments)}
        several = len(reached_engines(self._client)) > 1
        # Check first, so that no engine begins a commit that another one can no longer do within its pause.
        if several and method == "commit" and (await self.renew(timeout_s))["expired"]:
            return {"expired": True, "answers": []}
        outcomes = await self._call_engines(
            "delta_sync_paused_call", per_engine=self._split_arguments(method, arguments, timeout_s)
        )
        if several and method == "revert" and any(outcome["expired"] for outcome in outcomes):
            described = await self._call_engines("delta_sync_call_ranks", "describe", {})
            for outcome, answers in zip(outcomes, described, strict=True):
                if outcome["expired"] and all(answer.get("version") == arguments["version"] for answer in answers):
                    outcome.update({"expired": False, "answers": answers})
        if any(outcome["expired"] for outcome in outcomes):
            return {"expired": True, "answers": []}
        return {"expired": False, "answers": _concatenate([outcome["answers"] for outcome in outcomes])}

    async def label(self, version: int | None) -> None:
        """Set vLLM's weight version, which outputs carry per span: the decimal version, or no version."""
        await patches.label_weights(self._client, version)

    async def label_paused(self, version: int | None) -> Answer:
        """Call PauseWatchdog.label_paused in every engine core; weights that a watchdog reverted keep their label.

        Returns:
            {"expired": whether the pause of any engine had expired, in which case it was not labelled}.
        """
        if missing_names():
            await self.label(version)
            return {"expired": False}
        label = patches.NO_VERSION if version is None else str(version)
        answers = await self._call_engines("delta_sync_paused_label", label)
        return {"expired": any(answer["expired"] for answer in answers)}

    async def resume(self) -> Answer:
        """Call PauseWatchdog.resume in every engine core: {"expired": whether any resumed itself, "outcome": its}."""
        if missing_names():
            await self._core.resume_scheduler_async()
            return {"expired": False, "outcome": None}
        answers = await self._call_engines("delta_sync_resume")
        expired = [answer for answer in answers if answer["expired"]]
        return {"expired": bool(expired), "outcome": expired[0]["outcome"] if expired else None}

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


def _concatenate(per_engine: list[list[Answer]]) -> list[Answer]:
    return [answer for answers in per_engine for answer in answers]
