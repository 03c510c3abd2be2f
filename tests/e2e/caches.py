"""What an ``LLM`` answers from its caches after a version: run as ``python -m tests.e2e.caches FOLDER PART``.

Writes what it saw to ``seen.json``. Parts:

- ``images``: a model that sees; versions change its vision tower and projector only, and the image stays the same.
- ``connector``: a KV connector that keeps blocks by vLLM's hash, with keys salted by version, and then with a reset.
- ``unplugged``: an engine whose process has not loaded our plugin, because VLLM_PLUGINS names others only.
- ``draining``: images that are asked for while a commit waits for requests in flight.
"""

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    OPTConfig,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from tests.e2e.fresh import make_engine, tokens_of
from tests.e2e.world import World
from tests.support.tiny import VOCABULARY, make_tokenizer

BLOCK = 32
PROMPT = [3 + place % 40 for place in range(150)]
CACHED = len(PROMPT) // BLOCK * BLOCK
PROMPT_OF_IMAGES = "the quick brown fox"
SHORT, LONG = 8, 230
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24},
}
SIDE, PATCH, QUERIES = 28, 14, 4
"""Pixels of an image's side and of a patch's; tokens that stand for an image."""
WIDTH = 128


def make_vision_model() -> Any:
    """BLIP-2 with random weights in float32, which vLLM runs without torchvision."""
    torch.manual_seed(5)
    tower = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**tower, image_size=SIDE, patch_size=PATCH),
        qformer_config=Blip2QFormerConfig(**tower, encoder_hidden_size=64, vocab_size=VOCABULARY),
        text_config=OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            word_embed_proj_dim=WIDTH,
            ffn_dim=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
        ),
        num_query_tokens=QUERIES,
        image_token_index=_processor().tokenizer.get_vocab()["<image>"],
    )
    model = Blip2ForConditionalGeneration(config).float()
    with torch.no_grad():
        model.query_tokens.normal_()
        for name, parameter in model.named_parameters():
            if is_vision(name):
                # As initialized it hardly tells images apart.
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def save_vision_model(model: Any, path: Path) -> Path:
    """Write what a server would be started from: bfloat16 safetensors, config, tokenizer, image processor."""
    config = type(model.config).from_dict(model.config.to_dict())
    copy = Blip2ForConditionalGeneration(config).to(torch.bfloat16)
    copy.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()})
    copy.save_pretrained(path)
    _processor().save_pretrained(path)
    return path


def is_vision(name: str) -> bool:
    """Whether a parameter belongs to what looks at images."""
    return name.startswith(("vision_model", "qformer", "query_tokens", "language_projection"))


def _processor() -> Any:
    images = BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return Blip2Processor(image_processor=images, tokenizer=make_tokenizer(), num_query_tokens=QUERIES)


def images(root: Path) -> dict[str, Any]:
    from PIL import Image

    from trainer_side import Publisher

    model = make_vision_model()
    folders = [save_vision_model(model, root / "v0")]
    picture = Image.effect_mandelbrot((SIDE, SIDE), (-2.0, -1.5, 1.0, 1.5), 20).convert("RGB")
    picture.save(root / "picture.png")
    prompt = {"prompt": PROMPT_OF_IMAGES, "multi_modal_data": {"image": picture}}
    seen: dict[str, Any] = {}
    with Publisher(model, bucket=str(root / "run"), base=folders[0]) as publisher:
        llm = make_engine(folders[0])
        seen["v0"] = ask(llm, prompt)
        for setting in ("reset", "salt"):
            before = len(folders) - 1
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if is_vision(name):
                        parameter.add_(torch.randn_like(parameter), alpha=0.1)
            folders.append(save_vision_model(model, root / f"v{before + 1}"))
            publisher.publish(step=before + 1, wait=True)
            publisher.flush()
            sync = attached(llm, root, setting)
            seen[f"{setting}, before"] = ask(llm, prompt)
            sync.to(before + 1)
            seen[f"{setting}, after"] = ask(llm, prompt)
            seen[f"{setting}, status"] = [sync.status()["served"]["version"], sync.verify()["verdict"]]
            sync.to(before)
            seen[f"{setting}, back"] = ask(llm, prompt)
            sync.to(before + 1)
    seen["fresh"] = [ask(make_engine(folder), prompt) for folder in folders]
    return seen


def connector(root: Path) -> dict[str, Any]:
    """With each setting, on an engine of its own: one prompt before and after a version, and after a rollback."""
    use_host_memory()
    prompt = {"prompt_token_ids": PROMPT}
    world = publish_one(root)
    folders = (world.base, world.save())
    # First: an engine with a connector leaves it to all later ones of its process.
    seen: dict[str, Any] = {"fresh": [ask(make_engine(folder, block_size=BLOCK), prompt) for folder in folders]}
    for setting in ("salt", "reset"):
        # The engine's process has to know before it keeps its first block.
        os.environ["DELTA_SYNC_PREFIX_CACHE"] = setting
        llm = make_engine(world.base, block_size=BLOCK, kv_transfer_config=OFFLOADING)
        sync = attached(llm, root, setting)
        sync.to(0)
        seen[setting] = {"first": ask(llm, prompt)}

        def from_connector(llm: Any = llm) -> Any:
            # What the connector keeps stays; whatever is found then comes from there.
            llm.reset_prefix_cache()
            return ask(llm, prompt)

        seen[setting]["again"] = from_connector()
        sync.to(1)
        seen[setting]["after"] = from_connector()
        seen[setting]["after again"] = from_connector()
        sync.to(0)
        seen[setting]["back"] = from_connector()
    return seen


def unplugged(root: Path) -> dict[str, Any]:
    """What ``attach`` says, and that the engine goes on."""
    llm = make_engine(publish_one(root).base)
    try:
        said = str(attached(llm, root, "reset").to(1))
    except Exception as error:  # noqa: BLE001  whatever it is, it is compared by its text
        said = f"{type(error).__name__}: {error}"
    return {"said": said, "answer": ask(llm, {"prompt_token_ids": PROMPT})}


def draining(root: Path) -> dict[str, Any]:
    """Six images, each asked for once while a commit waits and again after it: what each request came to."""
    from PIL import Image

    from trainer_side import Publisher
    from vllm_delta_sync.engine import attach_async

    model = make_vision_model()
    base = save_vision_model(model, root / "v0")
    pictures = [Image.effect_noise((SIDE, SIDE), 20.0 + number).convert("RGB") for number in range(6)]
    prompts = [{"prompt": PROMPT_OF_IMAGES, "multi_modal_data": {"image": picture}} for picture in pictures]
    url = str(root / "run")

    async def run() -> dict[str, Any]:
        engine = make_async_llm(base)
        settings = {"PAUSE_MODE": "wait", "POLICY": "manual", "STATE_DIR": str(root / "state")}
        os.environ.update({f"DELTA_SYNC_{name}": value for name, value in settings.items()})
        sync = await attach_async(engine, bucket=url)
        with Publisher(model, bucket=url, base=base) as publisher:
            for parameter in model.language_model.parameters():
                parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
            publisher.publish(step=1, wait=True)
        running = asyncio.Event()
        long = asyncio.create_task(ask_async(engine, prompts[0], LONG, running))
        await running.wait()
        moving = asyncio.create_task(sync.to(1))
        while sync.status()["state"] != "draining":
            await asyncio.sleep(0.002)
        meanwhile = [asyncio.create_task(ask_async(engine, prompt)) for prompt in prompts]
        await moving
        seen = {"long": await long, "meanwhile": [await task for task in meanwhile]}
        seen["again"] = [await ask_async(engine, prompt) for prompt in prompts]
        seen["served"] = sync.status()["served"]["version"]
        await sync.close()
        engine.shutdown()
        return seen

    return asyncio.run(run())


def publish_one(root: Path) -> World:
    """A run with one version after the base."""
    with closing(World(root, "llama", rate=3e-3)) as world:
        world.publish()
    return world


def attached(llm: Any, root: Path, prefix_cache: str) -> Any:
    from vllm_delta_sync.engine import attach

    os.environ["DELTA_SYNC_PREFIX_CACHE"] = prefix_cache
    return attach(llm, bucket=str(root / "run"))


def make_async_llm(folder: Path) -> Any:
    from vllm import AsyncEngineArgs, AsyncLLMEngine

    from vllm_delta_sync.engine import WORKER_EXTENSION

    options: dict[str, Any] = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4}
    return AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(str(folder), worker_extension_cls=WORKER_EXTENSION, **options)
    )


async def ask_async(
    engine: Any, prompt: Any, length: int = SHORT, started: asyncio.Event | None = None
) -> dict[str, Any]:
    """The same as ``ask``, or what the request failed with."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=length, logprobs=1, ignore_eos=True)
    last: Any = None
    try:
        async for output in engine.generate(prompt, params, os.urandom(8).hex()):
            last = output
            if started is not None:
                started.set()
    except Exception as error:  # noqa: BLE001  whatever it is, it is what the caller gets
        return {"failed": f"{type(error).__name__}: {error}"}
    return _answer(last)


def ask(llm: Any, prompt: Any) -> dict[str, Any]:
    """Greedy tokens, their log probabilities, and how many tokens of the prompt were found in a cache."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=SHORT, logprobs=1, ignore_eos=True)
    return _answer(llm.generate([prompt], params, use_tqdm=False)[0])


def _answer(output: Any) -> dict[str, Any]:
    return {**tokens_of(output.outputs[0]), "cached": output.num_cached_tokens}


def use_host_memory() -> None:
    """Let vLLM's OffloadingConnector run on a CPU: all of it is real but what copies between a GPU and host memory."""
    from vllm.v1.kv_offload.base import TransferResult
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    class HostWorker:
        def __init__(self, kv_caches: Any) -> None:
            self._caches = [cache.tensor for cache in kv_caches.tensors]
            self._stored: dict[int, list[torch.Tensor]] = {}
            self._done: list[TransferResult] = []

        def submit_store(self, job: int, source: Any, target: Any) -> bool:
            for block, chunk in zip(source.block_ids, target.block_ids, strict=True):
                self._stored[int(chunk)] = [cache[int(block)].clone() for cache in self._caches]
            return self._end(job)

        def submit_load(self, job: int, source: Any, target: Any) -> bool:
            for chunk, block in zip(source.block_ids, target.block_ids, strict=True):
                for cache, kept in zip(self._caches, self._stored[int(chunk)], strict=True):
                    cache[int(block)].copy_(kept)
            return self._end(job)

        def _end(self, job: int) -> bool:
            fields = {field.name for field in dataclasses.fields(TransferResult)}
            self._done.append(TransferResult(job_id=job, success=True, **dict.fromkeys(fields - {"job_id", "success"})))
            return True

        def get_finished(self) -> list[TransferResult]:
            done, self._done = self._done, []
            return done

        def wait(self, job_ids: set[int]) -> None:
            """Each copy has ended when it was submitted."""

        def shutdown(self) -> None:
            self._stored.clear()

    class HostSpec(CPUOffloadingSpec):  # type: ignore[misc, unused-ignore]
        def get_worker(self, kv_caches: Any) -> Any:
            return HostWorker(kv_caches)

    OffloadingSpecFactory._registry["CPUOffloadingSpec"] = lambda: HostSpec


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    part.__name__: part for part in (images, connector, unplugged, draining)
}

if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    (root / "seen.json").write_text(json.dumps(PARTS[sys.argv[2]](root)))
