"""An ``AsyncLLM`` with ``attach_async``: run as ``python -m tests.e2e.attached FOLDER some|others``.

One engine, attached to again and again with other settings, which is cheaper than a server each. Writes what it saw to
``seen.json``: for some pause modes and prefix cache settings what became of requests at a commit, and with ``some``
also ``doors``, ``drain`` and ``held``.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from tests.e2e.fresh import tokens_of
from tests.e2e.world import World
from tests.support.tiny import VOCABULARY

SOME = [("keep", "reset"), ("wait", "keep"), ("abort", "reset"), ("keep", "salt")]
OTHERS = [("keep", "keep"), ("wait", "reset"), ("abort", "keep")]
"""Pause mode and what becomes of the prefix cache."""
BLOCK = 32
PROMPT = 3 * BLOCK + 4
TOKENS = 360
STARTED = 40
"""Output tokens after which a request counts as in flight."""
SHORT = 8
LEFT_OPEN = "from here on nothing is closed"


class Trial:
    """One engine, one run, and a receiver that is replaced for each part."""

    def __init__(self, root: Path) -> None:
        self.world = World(root, "llama", rate=3e-3)
        self.publish = self.world.publish
        self.requests = 0
        self.engine = self.make_engine()

    def make_engine(self) -> Any:
        from vllm import AsyncEngineArgs, AsyncLLMEngine

        from vllm_delta_sync.engine import WORKER_EXTENSION

        arguments = AsyncEngineArgs(
            model=str(self.world.base),
            worker_extension_cls=WORKER_EXTENSION,
            weight_transfer_config={"backend": "delta_bucket"},  # type: ignore[arg-type]
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=2,
            block_size=BLOCK,
            enable_prefix_caching=True,
        )
        return AsyncLLMEngine.from_engine_args(arguments)

    async def attach(self, **settings: str) -> Any:
        from vllm_delta_sync.engine import attach_async

        for name in [name for name in os.environ if name.startswith("DELTA_SYNC_")]:
            del os.environ[name]
        settings["state_dir"] = str(self.world.root / "state")
        os.environ.update({f"DELTA_SYNC_{name.upper()}": value for name, value in settings.items()})
        return await attach_async(self.engine, bucket=self.world.url)

    async def ask(
        self, tokens: list[int], length: int, started: asyncio.Event | None = None, more: asyncio.Event | None = None
    ) -> dict[str, Any]:
        """What a request comes to: tokens, their log probabilities, how it ended, its spans, and what was cached.

        Args:
            more: the request asks for as much again after this event, and holds its blocks until then.
        """
        from vllm import SamplingParams
        from vllm.engine.protocol import StreamingInput
        from vllm.inputs.engine import tokens_input

        async def parts() -> AsyncIterator[Any]:
            assert more is not None
            for _ in range(2):
                yield StreamingInput(tokens_input(tokens))
                await more.wait()

        self.requests += 1
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=1)
        last: Any = None
        prompt = {"prompt_token_ids": tokens} if more is None else parts()
        async for output in self.engine.generate(prompt, params, f"request-{self.requests}"):
            last = output
            if started is not None and len(output.outputs[0].token_ids) >= min(STARTED, length):
                started.set()
        completion = last.outputs[0]
        return {
            **tokens_of(completion),
            "ended": completion.finish_reason,
            "spans": [[span.version, span.start, span.end] for span in completion.weight_versions or []],
            "cached": last.num_cached_tokens,
        }


def random_tokens(seed: int) -> list[int]:
    """A prompt that shares no block with another."""
    return [random.Random(seed).randrange(3, VOCABULARY) for _ in range(PROMPT)]


async def refused(call: Awaitable[Any]) -> str:
    """What a call is refused with; empty if it is not."""
    try:
        await call
    except Exception as error:  # noqa: BLE001  whatever it is, it is compared by its text
        return f"{type(error).__name__}: {error}"
    return ""


async def pause(trial: Trial, mode: str, cache: str) -> dict[str, Any]:
    """A commit with two requests in flight, a third that waits for a place, and a fourth that comes meanwhile."""
    sync = await trial.attach(policy="manual", pause_mode=mode, prefix_cache=cache)
    before = (await sync.to())["served"]["version"]
    version = trial.publish()
    first = random_tokens(100 * version)
    running = [asyncio.Event(), asyncio.Event()]
    prompts = [first, random_tokens(100 * version + 1)]
    flying = [asyncio.create_task(trial.ask(*each)) for each in zip(prompts, [TOKENS] * 2, running, strict=True)]
    for event in running:
        await event.wait()
    queued = asyncio.create_task(trial.ask(random_tokens(100 * version + 2), SHORT))
    await asyncio.sleep(0)
    moving = asyncio.create_task(sync.to(version))
    states: list[str] = []
    late: asyncio.Task[dict[str, Any]] | None = None
    while not moving.done():
        if sync.status()["state"] not in states:
            states.append(sync.status()["state"])
        if late is None and states[-1] in ("draining", "committing"):
            late = asyncio.create_task(trial.ask(random_tokens(100 * version + 3), SHORT))
        await asyncio.sleep(0.0005)
    status = await moving
    answers = [await task for task in flying]
    seen = {
        "before": before,
        "version": status["served"]["version"],
        "timings": status["timings_ms"],
        "states": states,
        "flying": answers,
        "queued": await queued,
        "late": None if late is None else await late,
        "again": await trial.ask(first, SHORT),
    }
    await trial.engine.reset_prefix_cache()
    seen["fresh"] = await trial.ask(first, SHORT)
    if mode == "keep":
        # What the second half of the first answer is if all of it is computed with the weights served now.
        cut = answers[0]["spans"][-1][1]
        if cache != "salt":
            await trial.engine.reset_prefix_cache()
        seen["cut"] = cut
        seen["rest"] = await trial.ask(first + answers[0]["tokens"][:cut], TOKENS - cut)
    seen["verdict"] = (await sync.verify())["verdict"]
    if cache == "salt":
        # Back to a version whose blocks are still there, as are those of the version after it.
        await sync.to(before)
        seen["back"] = await trial.ask(first, SHORT)
        seen["back again"] = await trial.ask(first, SHORT)
        await trial.engine.reset_prefix_cache()
        seen["back fresh"] = await trial.ask(first, SHORT)
        await sync.to(version)
        # A hold outlives the receiver, and the next one would stay here.
        await sync.release()
    await sync.close()
    return seen


async def drain(trial: Trial) -> dict[str, Any]:
    """Mode ``wait`` with a request that takes longer than it may."""
    sync = await trial.attach(policy="manual", pause_mode="wait", wait_seconds="0.05")
    before = (await sync.to())["served"]["version"]
    version = trial.publish()
    running = asyncio.Event()
    flying = asyncio.create_task(trial.ask(random_tokens(9), TOKENS, running))
    await running.wait()
    error = await refused(sync.to(version))
    status = sync.status()
    answer = await flying
    # A busy machine may take longer than that to pause an engine that has nothing to do, and then it is tried again.
    while "DrainError" in (late := await refused(sync.to(version))):
        await asyncio.sleep(0.05)
    reached = late or sync.status()["served"]["version"]
    await sync.close()
    seen = {"before": before, "version": version, "error": error, "status": status}
    return seen | {"answer": answer, "reached": reached}


async def held(trial: Trial, cache: str) -> dict[str, Any]:
    """A commit while one request waits for more input, with its blocks, and another one runs."""
    sync = await trial.attach(policy="manual", prefix_cache=cache)
    await sync.to()
    version = trial.publish()
    more, waits, runs = asyncio.Event(), asyncio.Event(), asyncio.Event()
    waiting = asyncio.create_task(trial.ask(random_tokens(11), SHORT, waits, more))
    running = asyncio.create_task(trial.ask(random_tokens(12), TOKENS, runs))
    await asyncio.gather(waits.wait(), runs.wait())
    before = preemptions()
    error = await refused(sync.to(version))
    status = sync.status()
    seen = {"version": version, "error": error, "status": status, "preempted": preemptions() - before}
    more.set()
    seen["answers"] = [len((await task)["tokens"]) for task in (waiting, running)]
    seen["reached"] = (await sync.to(version))["served"]["version"]
    await sync.close()
    return seen


def preemptions() -> float:
    """How often running requests of this process's engines had to give their blocks back."""
    from prometheus_client import REGISTRY

    name = "vllm:num_preemptions_total"
    return sum(sample.value for metric in REGISTRY.collect() for sample in metric.samples if sample.name == name)


async def doors(trial: Trial) -> dict[str, Any]:
    from vllm_delta_sync.engine import attach

    engine = trial.engine
    seen: dict[str, Any] = {"unattached": await refused(engine.start_weight_update())}
    try:
        attach(engine, bucket=trial.world.url)
    except Exception as error:  # noqa: BLE001  compared by its text
        seen["attach"] = f"{type(error).__name__}: {error}"

    sync = await trial.attach(policy="manual", poll_seconds="0.05")
    seen["twice"] = await refused(trial.attach(policy="manual", poll_seconds="0.05"))
    version = trial.publish()
    await until(lambda: (sync.status()["head"] or {}).get("version") == version)
    seen["manual"] = sync.status()
    # A pause of the caller's own, of each kind, around an update.
    seen["paused"] = []
    for mode in ("keep", "wait", "abort"):
        await engine.pause_generation(mode=mode)
        version = trial.publish()
        await sync.to()
        held = await engine.is_paused()
        await engine.resume_generation()
        answer = await trial.ask(random_tokens(version), SHORT)
        seen["paused"].append([held, version, sync.status()["served"]["version"], answer["spans"]])
    seen["label"] = await engine.get_weight_version()
    seen["to"] = await refused(sync.to(version + 9))
    await sync.close()
    seen["closed"] = await refused(sync.to())
    seen.update(await following(trial))
    return seen


async def following(trial: Trial) -> dict[str, Any]:
    async with await trial.attach(poll_seconds="0.05") as sync:
        version = trial.publish()
        seen: dict[str, Any] = {"follow": [(await sync.wait(version, timeout=120))["served"]["version"], version]}
        seen["back"] = await sync.rollback(version - 1)
        seen["back label"] = await trial.engine.get_weight_version()
        seen["late"] = await refused(sync.wait(version, timeout=0.2))
        await sync.release()
        seen["forward"] = (await sync.wait(version, timeout=120))["served"]["version"]
        seen["held"] = (await sync.hold())["state"]
        seen["verify"] = await sync.verify()
        # A hold outlives the receiver, and the next one would go nowhere.
        await sync.release()
    return seen


async def until(reached: Callable[[], bool], seconds: float = 120) -> None:
    async with asyncio.timeout(seconds):
        while not reached():
            await asyncio.sleep(0.02)


async def trials(root: Path, what: str) -> dict[str, Any]:
    trial = Trial(root)
    seen: dict[str, Any] = {}
    try:
        if what == "some":
            seen |= {"doors": await doors(trial), "drain": await drain(trial)}
            seen["held"] = {cache: await held(trial, cache) for cache in ("reset", "salt")}
        for mode, cache in SOME if what == "some" else OTHERS:
            seen[f"{mode}, {cache}"] = await pause(trial, mode, cache)
        await leave_open(trial)
    finally:
        trial.world.close()
        if what == "some":
            trial.engine.shutdown()
    return seen


async def leave_open(trial: Trial) -> None:
    """Follow, in the middle of polls and commits, and end without ``close``: the engine, or only the event loop."""
    sync = await trial.attach(poll_seconds="0.02")
    print(LEFT_OPEN, flush=True)
    for _ in range(3):
        version = await asyncio.to_thread(trial.publish)
    await sync.wait(version - 1, timeout=120)


def main(root: Path, what: str) -> None:
    torch.set_num_threads(1)
    seen = asyncio.run(trials(root, what))
    # Time for whatever follows without a loop to complain.
    time.sleep(2)
    (root / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
