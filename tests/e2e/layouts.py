"""A trainer, and the engines of a server with any layout of ranks.

Run as ``python -m tests.e2e.layouts FOLDER FAMILY FLAG=VALUE...``: flags of ``AsyncEngineArgs``, and one of ours,
``vocabulary``, the number of tokens that the model knows.

The engines are those that ``vllm serve`` starts, with their own processes, behind the same client and the same port.
After every version each rank of each engine compares its parameters with those that it loads anew by vLLM's own loader.
In the end engines are started anew from the last checkpoint, and say what they make of it.
"""

import asyncio
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.e2e import exchanging
from tests.e2e.fresh import MAX_TOKENS, PROMPTS, digests, load_with, tokens_of
from tests.e2e.world import World
from tests.support.tiny import VOCABULARY

VERSIONS = 3
BACK = 1
LOST_SECONDS = 0.5
PATIENCE_SECONDS = 60
SIZES = {"llama_one_kv_head": {"num_hidden_layers": 4}}
TRACED = {"compilation_config": {"mode": 2, "backend": "eager"}}
"""With ``enforce_eager`` vLLM's CPU workers never make the buffers that a pipeline's later stages receive into, and end
in the first forward pass. Traced by dynamo, and not compiled, they do make them."""


def make_engines(checkpoint: Path, flags: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    exchanging.exchange_tokens()
    arguments = AsyncEngineArgs(
        str(checkpoint),
        worker_extension_cls="tests.e2e.exchanging.WorkerExtension",
        max_model_len=256,
        max_num_seqs=16,
        **{**flags, **(TRACED if flags.get("pipeline_parallel_size", 1) > 1 else {"enforce_eager": True})},
    )
    return AsyncLLM.from_engine_args(arguments)


def equals_fresh_load(worker: Any, checkpoint: str) -> dict[str, Any]:
    """In a worker: whether its parameters are those that vLLM loads from a checkpoint on the same rank."""
    mine, other = digests(worker.get_model()), digests(load_with(worker.vllm_config, checkpoint))
    return {"different": sorted(name for name in other if mine.get(name) != other[name]), "compared": len(other)}


async def on_every_rank(client: Any, function: Any, *args: Any) -> list[Any]:
    """What a function answers in each worker, over all engines."""
    each = await client.engine_core.call_utility_all_async("collective_rpc", function, None, args, {})
    return [answer for answers in each for answer in answers]


async def said(client: Any) -> list[list[dict[str, Any]]]:
    """Per engine, greedy tokens and their log probabilities."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, logprobs=1, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    engines = len(client.engine_core.core_engines)
    found = []
    for engine in range(engines):
        outputs = []
        for number, prompt in enumerate(PROMPTS):
            rank = engine if engines > 1 else None
            async for output in client.generate(prompt, params, f"{engine}-{number}", data_parallel_rank=rank):
                completion = output.outputs[0]
            outputs.append(tokens_of(completion))
        found.append(outputs)
    return found


async def follow(root: Path, family: str, flags: dict[str, Any]) -> None:
    from vllm_delta_sync.engine.compat.features import check_layout
    from vllm_delta_sync.engine.compat.version_labels import plain_label
    from vllm_delta_sync.engine.core.ports import ServerEnginePort
    from vllm_delta_sync.engine.follow.receiver import Receiver
    from vllm_delta_sync.settings import load_settings

    sizes = {"vocab_size": flags.pop("vocabulary", VOCABULARY), **SIZES.get(family, {})}
    world = World(root, family, sizes=sizes, publishes=False)
    client = make_engines(world.base, flags)
    check_layout(client.vllm_config)
    settings = load_settings({"bucket": world.url})
    port = ServerEnginePort(client, asyncio.get_running_loop(), settings)
    receiver = Receiver(port, settings)
    seen: list[dict[str, Any]] = [{"outputs": await said(client)}]

    async def look(checkpoint: Path, outcome: Any) -> None:
        seen.append(
            {
                "status": receiver.status(),
                "equal": await on_every_rank(client, equals_fresh_load, str(checkpoint)),
                "verify": await asyncio.to_thread(receiver.verify),
                "label": [*map(plain_label, await client.engine_core.call_utility_all_async("get_weight_version"))],
            }
        )

    with closing(world):
        world.begin()
        await look(world.base, await asyncio.to_thread(receiver.advance))
        seen[-1]["outputs"] = await said(client)
        for _ in range(VERSIONS):
            world.publish()
            await look(world.save(), await asyncio.to_thread(receiver.advance))
    seen[-1]["outputs"] = await said(client)
    await look(root / f"v{BACK}", await asyncio.to_thread(receiver.rollback, BACK))
    seen[-1]["outputs"] = await said(client)
    # Whoever paused is lost: every engine goes on by itself, in whatever step they are.
    await port.pause_engines(LOST_SECONDS)
    await look(root / f"v{BACK}", None)
    seen[-1]["outputs"] = await asyncio.wait_for(said(client), PATIENCE_SECONDS)
    (root / "seen.json").write_text(json.dumps(seen))
    client.shutdown()


async def fresh(root: Path, flags: dict[str, Any]) -> None:
    client = make_engines(root / f"v{VERSIONS}", flags)
    (root / "fresh.json").write_text(json.dumps(await said(client)))
    client.shutdown()


async def main(root: Path, family: str, flags: dict[str, Any]) -> None:
    await follow(root, family, flags)
    await fresh(root, flags)


if __name__ == "__main__":
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # collective_rpc of a function of these tests
    folder, name, *pairs = sys.argv[1:]
    given = {flag: json.loads(value) for flag, value in (pair.split("=", 1) for pair in pairs)}
    asyncio.run(main(Path(folder), name, given))
