"""The recipes for other trainers, each driven as its framework drives it, with real publishers and real buckets."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.recipes import slime
from tests.support.architectures import same_bits
from tests.support.frameworks import Experts, Named, Pairs, imported, verl_update
from tests.support.modules import FusedModel, ModulePort, checkpoint_tensors, save_base
from tests.support.publishing import Tensors, assert_holds, assert_same, snapshot
from tests.support.tiny import make_model, save_checkpoint, train_steps
from tests.support.trainers import SIZES
from trainer_side.integrations.gathered import gathered_publisher, publish_gathered
from vllm_delta_sync import open_run
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.errors import TensorMismatchError, UsageError
from vllm_delta_sync.settings import Settings

WAIT = 60.0


class Trained:
    """A tiny model with a tied head, its checkpoint, and the place of a run.

    Attributes:
        read: pairs that generators of ``weights`` have yielded.
    """

    def __init__(self, folder: Path) -> None:
        self.model = make_model("qwen3", **SIZES)
        self.base = save_checkpoint(self.model, folder / "base")
        self.url = str(folder / "run")
        self._steps: Iterator[float] = train_steps(self.model, lr=1e-3)
        self.read = 0

    def train(self) -> None:
        next(self._steps)

    def weights(self, **more: torch.Tensor) -> Pairs:
        """A state dict as frameworks yield it: the head too, although it is the embedding."""
        for name, tensor in {**self.model.state_dict(), **more}.items():
            self.read += 1
            yield name, tensor.clone()

    def checkpoint(self) -> Tensors:
        """What a server has to hold now."""
        tensors = {name: tensor for name, tensor in self.model.state_dict().items() if name != "lm_head.weight"}
        return snapshot(tensors, torch.bfloat16)


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(tmp_path)


def test_generator_is_published_from_one_rank_and_read_to_its_end_on_all(trained: Trained) -> None:
    with gathered_publisher(trained.url, trained.base) as publisher:  # type: ignore[union-attr]
        trained.train()
        result = publish_gathered(publisher, 1, trained.weights())
        assert result is not None
        assert result.version == 1
        assert_holds(open_run(trained.url), 1, trained.checkpoint())
        one = trained.read
        other = gathered_publisher(trained.url, trained.base, leads=False)
        assert publish_gathered(other, 1, trained.weights()) is None
        assert trained.read == 2 * one
        with pytest.raises(TensorMismatchError, match=r"lora_A.*such as 'model\.embed.*rename= and exclude="):
            publish_gathered(publisher, 2, trained.weights(**{"lora_A.weight": torch.ones(2)}))
        assert trained.read == 3 * one + 1
        assert open_run(trained.url).head().version == 1


# verl


@pytest.fixture
def engines(trained: Trained) -> Iterator[Callable[..., Any]]:
    """Engines as verl makes them: by name, with what the configuration says."""
    base = imported("verl")
    registry: Any = base.CheckpointEngineRegistry
    made = []

    def make(**kwargs: Any) -> Any:
        options = {"bucket": trained.url, "base": str(trained.base)}
        made.append(registry.new("delta_sync", bucket_size=2048 << 20, **{**options, **kwargs}))
        return made[-1]

    yield make
    for engine in made:
        if engine.publisher is not None:
            engine.publisher.close()


def test_verl_update_reaches_every_rollout_worker_and_the_bucket(trained: Trained, engines: Callable[..., Any]) -> None:
    actors = [engines(is_master=True), engines(is_master=False)]
    rollouts = [engines(), engines()]
    for version, step in enumerate((None, 7, 8), start=1):
        if step is not None:
            trained.train()
        (metrics, nothing), received = asyncio.run(verl_update(actors, rollouts, trained.weights, step))
        assert metrics["delta_sync/version"] == version
        assert metrics["delta_sync/step"] == (step or 0)
        assert nothing == {}
        expected = trained.checkpoint()
        assert_holds(open_run(trained.url), version, expected)
        for tensors in received:
            assert_same(tensors, expected)
    run = open_run(trained.url)
    assert [manifest.kind for manifest in run.log()] == ["reference", "delta", "delta", "delta"]
    assert trained.read == 3 * 2 * len(trained.model.state_dict())


def test_verl_rollout_worker_does_not_wait_for_ever(trained: Trained, engines: Callable[..., Any]) -> None:
    engines(is_master=True)
    waiting = engines(timeout=0.3)
    waiting.init_process_group(version=1)

    async def receive() -> list[Any]:
        return [pair async for pair in waiting.receive_weights()]

    with pytest.raises(TimeoutError, match=r"no version 1 after 0\.3 s.*timeout"):
        asyncio.run(receive())


# prime-rl


def test_prime_rl_stacked_experts_become_those_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = imported("prime_rl")
    base = save_checkpoint(make_model("qwen3_moe", **SIZES), tmp_path / "base")
    model = Experts(load_file(base / "model.safetensors")).float()
    # A wrapper puts itself into the names of one layer.
    layers: Any = model.get_submodule("model.layers")
    layers.add_module("0", torch.compile(layers.get_submodule("0")))
    config = SimpleNamespace(bucket=str(tmp_path / "run"), base=str(base), timeout=WAIT)
    sender = recipe.DeltaSyncWeightSender(tmp_path, config)
    for step in (1, 2):
        for parameter in model.parameters():
            parameter.data.view(-1)[step::7] += 0.01
        sender._broadcast(model, step, tmp_path)
        names = {name.replace("_orig_mod.", ""): tensor for name, tensor in model.state_dict().items()}
        assert_holds(open_run(config.bucket), step, snapshot(model.convert_to_hf(names), torch.bfloat16))
    assert (tmp_path / recipe.VERSION).read_text() == "2"
    monkeypatch.setattr(recipe.WeightSender, "master", False)
    other = recipe.DeltaSyncWeightSender(tmp_path, config)
    other._broadcast(model, 3, tmp_path)
    assert open_run(config.bucket).head().version == 2
    sender.publisher.close()


def test_prime_rl_receiver_returns_once_the_servers_serve_the_offer(tmp_path: Path) -> None:
    recipe = imported("prime_rl")
    tensors = checkpoint_tensors()
    base = save_base(tmp_path / "base", tensors)
    config = SimpleNamespace(bucket=str(tmp_path / "run"), base=str(base), timeout=WAIT, replicas=1)
    sender = recipe.DeltaSyncWeightSender(tmp_path, config)
    receiver = recipe.DeltaSyncWeightReceiver(tmp_path / "broadcasts", config, None, "tiny")
    served = FusedModel()
    served.load_weights((name, tensor.to(torch.bfloat16)) for name, tensor in tensors.items())
    settings = {"bucket": config.bucket, "poll_seconds": 0.05, "receiver_id": "a", "state_dir": tmp_path / "state"}
    service = ReceiverService(ModulePort(served), Settings.model_validate(settings))
    service.start()
    model = Named(tensors)
    query = model.get_parameter("q.weight").data
    try:
        for step in (1, 2):
            query += 0.01
            trainer = threading.Thread(target=sender.broadcast, args=(model, step))
            trainer.start()
            asyncio.run(receiver.sync_startup(step, timeout=WAIT))
            trainer.join(WAIT)
            assert same_bits(served.qkv[:16].detach(), query.to(torch.bfloat16))
            assert open_run(config.bucket).head().version == step
    finally:
        service.stop()
        service.join(WAIT)
        sender.publisher.close()


# slime


@pytest.fixture
def hook(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """The hook, as slime calls it on each rank."""
    args = SimpleNamespace(hf_checkpoint=str(trained.base), update_weight_transport="disk")
    monkeypatch.setenv("DELTA_SYNC_BUCKET", trained.url)
    slime.publisher_of.cache_clear()
    yield lambda folder: slime.publish_checkpoint(args, str(folder), [object()])
    if slime.publisher_of.cache_info().currsize:
        held = slime.publisher_of(str(trained.base))
        assert held is not None
        held.close()
    slime.publisher_of.cache_clear()


def test_slime_checkpoint_that_was_written_is_published(
    trained: Trained, hook: Callable[[Path], None], tmp_path: Path
) -> None:
    for number in (1, 2):
        trained.train()
        folder = tmp_path / f"weight_v{number:06d}"
        trained.model.save_pretrained(folder, max_shard_size="40kB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        hook(folder)
        run = open_run(trained.url)
        assert (run.head().version, run.manifest(number).step) == (number, number)
        assert_holds(run, number, trained.checkpoint())


def test_slime_deltas_are_refused(trained: Trained, hook: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "weight_v000001"
    trained.model.save_pretrained(folder, max_shard_size="40kB")
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["metadata"] |= {"delta_encoding": "xor", "compression_format": "zstd"}
    index.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="--update-weight-mode full"):
        hook(folder)
    # The first call of delta mode names the folder of all versions.
    with pytest.raises(UsageError, match="--update-weight-mode full"):
        hook(tmp_path)
    assert not Path(trained.url).exists()


def test_slime_hook_needs_the_url_of_a_run(
    trained: Trained, hook: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DELTA_SYNC_BUCKET")
    trained.model.save_pretrained(tmp_path / "weight_v000001")
    with pytest.raises(UsageError, match="DELTA_SYNC_BUCKET is not set"):
        hook(tmp_path / "weight_v000001")
