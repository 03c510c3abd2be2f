"""Weights that a model computes from its checkpoint, through the whole receiver: followed, rolled back, found when they
were changed from outside; or refused by name where nothing shows what they are."""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from tests.support.modules import WIDTH, FusedModel, ModulePort, ShardedModel, checkpoint_tensors, save_base
from tests.support.world import World
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.engine.compat import load_hook, write_hooks
from vllm_delta_sync.engine.compat.speculation import folder_of
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.model import load_record
from vllm_delta_sync.engine.model.load_record import Process
from vllm_delta_sync.engine.model.model_replica import walk_tensors
from vllm_delta_sync.engine.protocol import ClaimedVersion
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.fingerprint import fingerprint_tensor
from vllm_delta_sync.settings import Settings
from vllm_delta_sync.tensors.torch_views import bits_of

DERIVED = ["model.norm.weight", "v.weight"]


class Latent(nn.Module):
    """Keeps no weight as it was loaded: a packed copy, and a product that no parameter shows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.zeros(WIDTH, 16, dtype=torch.bfloat16), False)

    def finish(self) -> None:
        assert self.weight is not None
        self.packed = nn.Parameter(self.weight.data.t().contiguous().float() * 3, requires_grad=False)
        self.absorbed = self.weight.data.float() @ self.weight.data.float().t()
        self.weight = None


class Worked(nn.Module):
    """FusedModel, or a rank of it, that transforms its norm while loading and works on v afterwards."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.body = FusedModel() if ranks == 1 else ShardedModel(rank, ranks)
        self.gain = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.latent = Latent()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "model.norm.weight":
                self.gain.data.copy_(-torch.exp(tensor.float()))
            elif name == "v.weight":
                assert self.latent.weight is not None
                self.latent.weight.data.copy_(tensor.t())
            else:
                self.body.load_weights([(name, tensor)])


def finish(model: nn.Module, paths: Iterable[str] | None) -> None:
    for path, module in model.named_modules():
        if isinstance(module, Latent) and (paths is None or path in list(paths)):
            module.finish()


def load(tensors: dict[str, torch.Tensor], ranks: int = 1) -> list[Any]:
    models = [Worked(rank, ranks) for rank in range(ranks)]
    for model in models:
        model.load_weights((name, tensor.bfloat16()) for name, tensor in tensors.items())
        load_record.record_load(model, finish)
    return models


Prepare = Callable[[Any], object]


class WorkedWorld(World):
    """A world whose model computes; its ranks know the folder that they were loaded from.

    Attributes:
        record: what was noted while the last model of ``serve`` was loaded.
    """

    record: Any = None

    def __init__(self, root: Path, ranks: int = 1, **rest: Any) -> None:
        self.folder = str(root / "base")
        super().__init__(root, ranks=ranks, **rest)

    def fresh(self) -> list[Any]:
        return load(self.tensors, self.ranks)

    def use(self, port: ModulePort) -> None:
        for rank in port.ranks:
            rank.folder = self.folder
        super().use(port)

    def served(self, name: str) -> torch.Tensor:
        return self.tensors[name].bfloat16()

    def bits(self) -> list[torch.Tensor]:
        return [every(model) for model in self.models]

    def expect_exact(self) -> None:
        for model, other in zip(self.models, self.fresh(), strict=True):
            assert torch.equal(every(model), every(other))


def every(model: nn.Module) -> torch.Tensor:
    """All bytes of all tensors that hang on a model, in order of their places."""
    found = {(path, name): tensor for path, name, tensor in walk_tensors(model)}
    assert ("latent", "absorbed") in found
    return torch.cat([found[at].detach().reshape(-1).contiguous().view(torch.uint8) for at in sorted(found)])


def serve(
    root: Path, process: Process = finish, prepare: Prepare = lambda model: None, kind: type[Worked] = Worked
) -> WorkedWorld:
    """A world that serves a model of that kind, prepared and worked on like that, and loads such models anew."""
    world = WorkedWorld(root)

    def fresh() -> list[Any]:
        model: Any = kind(0, 1)
        model.load_weights((name, tensor.bfloat16()) for name, tensor in world.tensors.items())
        prepare(model)
        world.record = load_record.record_load(model, process)
        return [model]

    world.fresh = fresh  # type: ignore[method-assign]
    world.models = fresh()
    (world.model,) = world.models
    world.use(ModulePort(world.model))
    return world


@pytest.mark.parametrize(("ranks", "codec"), [(1, "plain"), (2, "tiled"), (2, "raw")])
def test_versions_are_followed_and_taken_back(tmp_path: Path, ranks: int, codec: str) -> None:
    """Versions 3 and 4 in one commit."""
    world = WorkedWorld(tmp_path, ranks, codec=codec)
    seen = [world.bits()]
    world.receiver.advance()
    for step in range(1, 5):
        world.train(step)
        if step != 3:
            world.receiver.advance()
            world.expect_exact()
            assert world.receiver.verify()["verdict"]
        seen.append(world.bits())
    assert len({value.numpy().tobytes() for value, *_ in seen}) == 4
    for version in (2, 1):
        world.receiver.rollback(version)
        world.expect_bits(seen[version])
    world.receiver.release()
    world.receiver.advance()
    world.expect_bits(seen[4])
    assert [entry["derived"] for entry in world.receiver.status()["ranks"]] == [DERIVED] * ranks


@pytest.mark.parametrize("name", ["absorbed", "packed"])
def test_what_was_changed_from_outside_is_found_and_made_good(tmp_path: Path, name: str) -> None:
    world = WorkedWorld(tmp_path)
    world.follow_each(1)
    getattr(world.model.latent, name).data.view(-1)[3] += 1
    report = world.receiver.verify()
    assert not report["verdict"]
    assert report["mismatched"] == ["v.weight"]
    assert world.receiver.can_repair
    world.receiver.advance()
    world.expect_exact()
    assert world.receiver.verify()["verdict"]


def test_an_anchor_replaces_what_was_computed_from_other_weights(tmp_path: Path) -> None:
    other = checkpoint_tensors(seed=9)
    save_base(tmp_path / "base", other)
    world = WorkedWorld(tmp_path, with_base=False)
    world.models = load(other)
    world.model = world.models[0]
    world.use(ModulePort(*world.models))
    world.receiver.advance()
    world.expect_exact()
    world.train_and_follow(1)


def test_shadows_come_from_the_version_that_a_server_was_started_from(tmp_path: Path) -> None:
    world = WorkedWorld(tmp_path)
    world.train(1, 2)
    run = open_run(world.url)
    fingerprints = [fingerprint_tensor(spec.name, bits_of(world.served(spec.name))) for spec in run.table]
    loaded = ClaimedVersion(run.info.run, world.url, 2, fingerprints)
    world.models = world.fresh()
    for model in world.models:
        model.delta_sync_loaded = loaded
    port = ModulePort(*world.models)
    world.use(port)
    world.receiver.advance()
    assert world.receiver.served_version == 2
    world.train_and_follow(3)


def test_without_what_it_was_loaded_from_it_is_refused_by_name(tmp_path: Path) -> None:
    world = WorkedWorld(tmp_path)
    world.port.ranks[0].folder = str(tmp_path / "nowhere")
    error = world.expect_fails("model")
    assert any(name in error.message for name in DERIVED)
    assert "nowhere" in error.message


def test_of_a_public_model_the_revision_that_was_loaded_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the Hub's cache, which has no revision main of it."""
    world, commit, cached = WorkedWorld(tmp_path), "a" * 40, tmp_path / "hub" / "models--org--model"
    shutil.copytree(world.folder, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "old").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    world.port.ranks[0].folder = folder_of(SimpleNamespace(model="org/model", revision="old"))
    world.receiver.advance()
    assert world.receiver.served_version == 0


def test_other_weights_than_those_of_the_folder_are_refused_by_name(tmp_path: Path) -> None:
    world = WorkedWorld(tmp_path)
    world.models = load(checkpoint_tensors(seed=3))
    world.use(ModulePort(*world.models))
    error = world.expect_fails("model")
    assert "other bits than the model has" in error.message


def test_a_tensor_that_was_replaced_is_refused(tmp_path: Path) -> None:
    world = WorkedWorld(tmp_path)
    world.receiver.advance()
    world.train(1)
    world.model.latent.packed = nn.Parameter(world.model.latent.packed.data.clone(), False)
    with pytest.raises(ModelError, match=r"latent\.packed"):
        world.receiver.advance()
    assert world.receiver.status()["served"] is None


def test_a_copy_that_cannot_be_reached_is_refused(tmp_path: Path) -> None:
    """As kernels keep it that pack weights into memory of their own and give out a handle."""
    kept = []

    @torch.library.custom_op("delta_sync_test::pack", mutates_args=())
    def pack(weight: torch.Tensor) -> int:
        kept.append(weight.clone())
        return len(kept)

    def packed(model: Any, paths: Iterable[str] | None) -> None:
        finish(model, paths)
        model.handle = pack(model.body.qkv.data)

    assert "delta_sync_test.pack" in serve(tmp_path, packed).expect_fails("model").message


def vllm_all_reduce(tensor: torch.Tensor) -> None:
    import vllm.distributed.parallel_state  # noqa: F401  registers the operator

    torch.ops.vllm.all_reduce(tensor, "tp:0")


@pytest.mark.parametrize("all_reduce", [torch.distributed.all_reduce, vllm_all_reduce])
def test_a_step_that_talks_to_other_ranks_is_refused(tmp_path: Path, all_reduce: Any) -> None:
    """They would take it for a part of what they say to each other while they generate."""

    def summed(model: Any, paths: Iterable[str] | None) -> None:
        finish(model, paths)
        if paths is not None and "latent" in list(paths):
            all_reduce(model.latent.absorbed)

    world = serve(tmp_path, summed)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert "communicate with other ranks" in world.expect_fails("model").message
    finally:
        torch.distributed.destroy_process_group()


def test_a_step_that_changes_the_default_dtype_of_the_process_is_refused(tmp_path: Path) -> None:
    """Generation goes on meanwhile, and would make tensors of that dtype."""

    def casting(model: Any, paths: Iterable[str] | None) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            finish(model, paths)
        finally:
            torch.set_default_dtype(before)

    world = serve(tmp_path, casting)
    assert "default dtype of the whole process to torch.float64" in world.expect_fails("model").message
    assert torch.get_default_dtype() == torch.float32


class Impl:
    """As the kernels of a layer: an object that is no module."""

    def __init__(self) -> None:
        self.scale = 0.125


def with_impl(model: Any) -> None:
    model.latent.impl = Impl()


@pytest.mark.parametrize(
    ("place", "cached", "named"),
    [
        ("impl.scales", lambda packed: packed.float() * 2, r"latent\.impl\.scales"),
        ("combined", lambda packed: torch.cat([packed, packed]), r"latent\.combined"),
        (
            "impl.product_scale",
            lambda packed: float(packed.abs().max()) + 0.3,
            r"latent\.impl\.product_scale \(now .*, absent after loading\)",
        ),
        ("impl.scale", lambda packed: 0.0875, r"latent\.impl\.scale \(now 0\.0875, 0\.125 after loading\)"),
    ],
)
def test_what_a_kernel_keeps_since_loading_is_refused_by_name(
    tmp_path: Path, place: str, cached: Any, named: str
) -> None:
    """Made of weights at the first forward pass, it would not follow them; nothing but its appearance shows that."""
    world = serve(tmp_path, prepare=with_impl)
    latent = world.model.latent
    setattr(latent.impl if "." in place else latent, place.split(".")[-1], cached(latent.packed))
    assert re.search(named + ".*did not exist after loading", world.expect_fails("model").message)


class Scaled(Worked):
    """As attention with a scale in the checkpoint: the step after loading keeps it as a number, and drops it."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.scale = nn.Parameter(torch.tensor(-1.0), requires_grad=False)
        self.register_buffer("kept", torch.tensor(1.0))
        self.kept_number = 1.0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "model.norm.weight":
                self.scale.data.copy_(tensor[0])
            else:
                super().load_weights([(name, tensor)])


def keep_scale(model: Any, paths: Iterable[str] | None) -> None:
    finish(model, paths)
    if hasattr(model, "scale") and (paths is None or "" in list(paths)):
        model.kept_number = model.scale.item()
        model.kept.copy_(model.kept_number)
        del model.scale


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_change_of_a_scale_that_is_kept_as_a_number_is_refused_by_name(
    tmp_path: Path, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the number did not change during loading, so that nothing shows where it went."""
    tensors = checkpoint_tensors()
    tensors["model.norm.weight"][:] = scale
    monkeypatch.setattr("tests.support.world.checkpoint_tensors", lambda: tensors)
    world = serve(tmp_path, keep_scale, kind=Scaled)
    world.receiver.advance()
    world.tensors["model.norm.weight"] += 0.25
    world.publisher.publish(step=1, wait=True)
    world.publisher.flush()
    with pytest.raises(ModelError, match="cannot be exchanged while the model runs"):
        world.receiver.advance()
    assert world.model.kept_number == scale


def test_what_an_engine_fills_itself_is_not_taken_for_weights(tmp_path: Path) -> None:
    def prepare(model: Any) -> None:
        with_impl(model)
        model.table = torch.ones(4, 4)

    world = serve(tmp_path, prepare=prepare)
    model, latent = world.model, world.model.latent
    latent.kv_cache = [torch.zeros(2, 3), torch.zeros(2, 3)]
    latent.lora_a_stacked = (torch.zeros(1, 8),)
    latent.workspace = torch.zeros(16, dtype=torch.uint8)
    # Views of what was there, numbers that were there or are whole, and what takes the place of something.
    latent.rows = latent.packed.data[:2]
    latent.impl.softmax_scale, latent.impl.batch = latent.impl.scale, 64.0
    model.table = model.table.bfloat16()
    world.follow_each(1)
    assert world.receiver.verify()["verdict"]


class Copies(TorchDispatchMode):
    """Where copies of tensors are made: (operator, device it was told, device of the result)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.seen.append((str(func), (kwargs or {}).get("device"), found.device.type))
        return found


def test_copies_made_while_loading_are_in_host_memory(tmp_path: Path) -> None:
    """On a device they would be in vLLM's memory pool, which sleep unmaps. A part without data is left as it is."""
    model = Worked(0, 1)
    model.load_weights((name, tensor.bfloat16()) for name, tensor in checkpoint_tensors().items())
    model.register_buffer("map", torch.arange(4), persistent=False)
    # As vLLM leaves what it does not serve of a multimodal model.
    model.tower = nn.Linear(2, 2, device="meta")
    with Copies() as copies:
        record = load_record.record_load(model, lambda model, paths: None)
    assert ("tower", "weight") not in record.initial
    assert record.initial
    assert {tensor.device.type for tensor in record.initial.values()} == {"cpu"}
    # Asked for by name: a clone would stay where the weights are.
    assert {(operator, str(device)) for operator, device, _ in copies.seen} == {("aten._to_copy.default", "cpu")}
    assert record.skeleton.map.device.type == "cpu"


class Keeping(Worked):
    """Keeps something of one of the tensors that it fuses."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            super().load_weights([(name, tensor)])
            if name == "q.weight":
                self.doubled = tensor.float() * 2


class LeftOut(Worked):
    """Has no memory for one of its weights, as vLLM has none for what only images need where it answers text alone."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.gain = nn.Parameter(torch.zeros(WIDTH, device="meta"), requires_grad=False)


class LeftOutLater(LeftOut):
    """As LeftOut, of which no tensor comes first that has no memory."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self._parameters = {"first": nn.Parameter(torch.zeros(1), requires_grad=False), **self._parameters}


@pytest.mark.parametrize("kind", [LeftOut, LeftOutLater])
def test_a_weight_without_memory_may_change_and_is_not_served(tmp_path: Path, kind: type[LeftOut]) -> None:
    world = serve(tmp_path, kind=kind)
    model = world.model
    world.receiver.advance()
    for version in (1, 2):
        world.train(version)
        world.receiver.advance()
    world.receiver.rollback(1)
    world.receiver.release()
    world.receiver.advance()
    assert world.receiver.served_version == 2
    assert model.gain.is_meta
    (fresh,) = world.fresh()
    assert fresh.gain.is_meta
    del model.gain, fresh.gain
    assert torch.equal(every(model), every(fresh))


def test_a_step_that_reaches_for_the_model_itself_is_refused(tmp_path: Path) -> None:
    world = serve(tmp_path)

    def reaching(_: Any, paths: Iterable[str] | None) -> None:
        if paths is not None:
            world.model.latent.absorbed.mul_(2)

    world.record.process = reaching
    assert "write to the model itself" in world.expect_fails("model").message


class Twinned(Worked):
    """As the attention of Kimi K3: a loader fills a second buffer too, unless its parameter has no data."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        twin = torch.zeros(WIDTH)
        self.register_buffer("twin", twin, persistent=False)

        def load(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
            parameter.data.copy_(tensor)
            if not parameter.is_meta:
                twin.copy_(parameter.data * 2)

        self.gain.weight_loader = load  # type: ignore[attr-defined]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "model.norm.weight":
                self.gain.weight_loader(self.gain, tensor)  # type: ignore[attr-defined]
            else:
                super().load_weights([(name, tensor)])


@pytest.mark.parametrize(("kind", "derived"), [(Keeping, ["k.weight", "q.weight"]), (Twinned, [])])
def test_what_a_loader_does_beside_copying_is_done_again(
    tmp_path: Path, kind: type[Worked], derived: list[str]
) -> None:
    """With all that is fused with it."""
    world = serve(tmp_path, kind=kind)
    for version in range(1, 4):
        world.train_and_follow(version)
    assert world.receiver.status()["ranks"][0]["derived"] == sorted([*DERIVED, *derived])


def doubled(model: Any) -> None:
    model.body.double = model.body.qkv.data * 2


def test_what_one_module_makes_for_another_is_refused_by_name_if_it_cannot_be_made_again(tmp_path: Path) -> None:
    """A repeated step works on the modules that hold what was made."""

    def for_another(model: Any, paths: Iterable[str] | None) -> None:
        finish(model, paths)
        if paths is None:
            doubled(model)

    error = serve(tmp_path, for_another).expect_fails("model")
    assert re.search(r"tensor '.*' is not patched by address .* does not give body\.double", error.message)


class Finishing(Worked):
    """As DeepSeek-V4: a step of the model as a whole, which adds up a weight of its first layer."""

    def process_weights_after_loading(self) -> None:
        self.latent.finish()
        doubled(self)


def test_the_step_of_a_model_as_a_whole_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader import base_loader, utils

    steps: list[Process] = []
    monkeypatch.setattr(load_hook, "record_load", lambda model, step: steps.append(step))
    monkeypatch.setattr(base_loader, "process_weights_after_loading", utils.process_weights_after_loading)
    load_hook.watch_loading()
    config = SimpleNamespace(dtype=torch.bfloat16, quantization=None, word_embeddings_untied_by_checkpoint=False)
    base_loader.process_weights_after_loading(nn.Module(), config, torch.device("cpu"))
    world = serve(tmp_path, steps[0], kind=Finishing)
    world.receiver.advance()
    world.train_and_follow(1)


# A checkpoint in fp8 with block scales, in its own bits, and as kernels have it after loading


ROWS, COLUMNS, BLOCK = 64, 96, 32
PARTS = ("q_proj", "k_proj")


class BlockQuantized(nn.Module):
    """Two projections fused, in fp8 with a scale in float32 for every_tensor block, as vLLM's fp8 linears hold them."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.zeros(2 * ROWS, COLUMNS, dtype=torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.zeros(2 * ROWS // BLOCK, COLUMNS // BLOCK), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            part, attribute = name.split(".")
            rows = tensor.shape[0]
            getattr(self, attribute).data.narrow(0, rows * PARTS.index(part), rows).copy_(tensor)


def as_loaded(model: Any, paths: Iterable[str] | None) -> None:
    """Kernels that take weights as the checkpoint has them."""


def transposed(model: Any, paths: Iterable[str] | None) -> None:
    """Kernels that take the other order, by a view of the weights and a copy of the scales."""
    model.weight = nn.Parameter(model.weight.data.t(), requires_grad=False)
    model.weight_scale_inv = nn.Parameter(model.weight_scale_inv.data.t().contiguous(), requires_grad=False)


def made_even(model: Any, paths: Iterable[str] | None) -> None:
    """Kernels that take one scale: blocks are scaled to the largest, and what is above is cut off."""
    scales = model.weight_scale_inv.data.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    largest = model.weight_scale_inv.data.abs().max().reshape(1)
    even = (model.weight.data.float() * scales / largest).clamp(-448, 448)
    model.weight = nn.Parameter(even.to(torch.float8_e4m3fn), requires_grad=False)
    model.scale = nn.Parameter(largest, requires_grad=False)
    del model.weight_scale_inv


def requantized(model: Any, paths: Iterable[str] | None) -> None:
    """As vLLM does before DeepGEMM on Blackwell, by its own function: scales become powers of two, in place."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace

    requant_weight_ue8m0_inplace(model.weight.data, model.weight_scale_inv.data, (BLOCK, BLOCK))


def quantized(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for part in PARTS:
        found[f"{part}.weight"] = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.float8_e4m3fn)
        found[f"{part}.weight_scale_inv"] = torch.rand(ROWS // BLOCK, COLUMNS // BLOCK, generator=generator) + 0.5
    return found


def step(tensors: dict[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        moved = tensor.float() * (1 + 0.2 * torch.randn(tensor.shape, generator=generator))
        chosen = torch.rand(tensor.shape, generator=generator) < 0.1
        tensors[name] = torch.where(chosen, moved, tensor.float()).to(tensor.dtype)


def made_of(tensors: dict[str, torch.Tensor], process: Process) -> BlockQuantized:
    model = BlockQuantized()
    model.load_weights(tensors.items())
    load_record.record_load(model, process)
    return model


def every_tensor(model: nn.Module) -> dict[str, bytes]:
    return {
        f"{path}.{name}": bytes(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        for path, name, tensor in walk_tensors(model)
    }


def in_fp8(live: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers writes of weights with ``quant_method: fp8``."""
    config = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK))
    found: dict[str, torch.Tensor] = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert(live)
    return found


@pytest.mark.parametrize("by_publisher", [False, True], ids=["published in fp8", "quantized by the publisher"])
@pytest.mark.parametrize("process", [as_loaded, transposed, made_even, requantized])
def test_fp8_with_block_scales_is_followed_in_its_own_bits(
    tmp_path: Path, process: Process, by_publisher: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    live = quantized(0)
    if by_publisher:
        live = {f"{part}.weight": torch.randn(ROWS, COLUMNS, generator=generator).bfloat16() for part in PARTS}
    served = in_fp8 if by_publisher else dict
    base = tmp_path / "base"
    base.mkdir()
    save_file(served(live), base / "model.safetensors")
    recipe = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (base / "config.json").write_text(json.dumps({"quantization_config": recipe} if by_publisher else {}))
    model = made_of(served(live), process)
    port = ModulePort(model)
    port.ranks[0].folder = str(base)
    receiver = Receiver(port, Settings(bucket=str(tmp_path / "run")))
    with Publisher(lambda: list(live.items()), bucket=str(tmp_path / "run"), base=base) as publisher:
        for version in range(1, 4):
            step(live, version)
            publisher.publish(step=version, wait=True)
            publisher.flush()
            before = every_tensor(model)
            receiver.advance()
            assert receiver.served_version == version
            assert every_tensor(model) == every_tensor(made_of(served(live), process)) != before
            assert receiver.verify()["verdict"]
    # As the checkpoint has it, it takes no shadow.
    assert (receiver.status()["ranks"][0]["derived"] == []) is (process is as_loaded)
    receiver.rollback(1)
    assert receiver.verify()["verdict"]


class WithTower(Worked):
    """With a parameter that the run has no tensor of, and what a kernel keeps for itself."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.tower = nn.Parameter(torch.linspace(-1, 1, 40), requires_grad=False)
        self.locks = torch.zeros(8, dtype=torch.int32)


class LosingWorker:
    """vLLM's worker at level 2: what is no buffer has other bits when it wakes up."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def sleep(self, level: int = 1) -> None:
        for path, name, tensor in walk_tensors(self._model):
            if name not in self._model.get_submodule(path)._buffers:
                tensor.detach().view(torch.uint8).fill_(0x7F)

    def wake_up(self, tags: list[str] | None = None) -> None: ...


def test_what_the_run_has_no_tensors_of_outlives_a_sleep_that_loses_the_weights(tmp_path: Path) -> None:
    world = serve(tmp_path, kind=WithTower)
    world.receiver.advance()
    worker: Any = LosingWorker(world.model)
    write_hooks.watch_writes(worker, world.model, world.port.ranks[0].memory)
    for step in (1, 2):
        world.train(step)
        worker.sleep(level=2)
        worker.wake_up()
        world.receiver.advance()
        world.expect_exact()
        assert world.receiver.verify()["verdict"]
