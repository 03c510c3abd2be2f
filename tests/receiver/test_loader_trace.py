"""Tracing a loader on a replica: plain copies are routed exactly, anything else is refused with tensor and reason."""

import gc
import os
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing import shared_memory
from typing import Any

import pytest
import torch
from torch import nn

from vllm_delta_sync.engine.model.model_replica import READABLE_ELEMENTS, MetaLeaf, replicate
from vllm_delta_sync.engine.model.route_compiler import trace_routes
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.table import TensorSpec, TensorTable

Load = Callable[["Toy", str, torch.Tensor], object]


class Toy(nn.Module):
    """One 4 × 6 parameter and a loader given by the test."""

    def __init__(self, load: Load, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6).to(dtype), requires_grad=False)
        self.load = load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load(self, name, tensor)


def table(*shapes: tuple[int, ...], dtype: str = "BF16") -> TensorTable:
    return TensorTable(TensorSpec(f"t{i}", dtype, shape) for i, shape in enumerate(shapes))


ONE = table((4, 6))


def copied(model: Toy, name: str, tensor: torch.Tensor) -> object:
    return model.weight.data.copy_(tensor)


def asserted(model: Toy, name: str, tensor: torch.Tensor) -> None:
    """As vLLM's loaders do, without a message; pytest would add one to an ``assert``."""
    parameter = model.weight
    if parameter.shape != tensor.shape:
        raise AssertionError
    parameter.data.copy_(tensor)


@pytest.mark.parametrize(
    ("load", "loaded", "reason"),
    [
        (lambda m, n, t: m.weight.data.copy_(-torch.exp(t)), ONE, "t0.*computed values"),
        (lambda m, n, t: m.weight.data.copy_(t + 1), ONE, "t0.*computed values"),
        (lambda m, n, t: m.weight.data.add_(t), ONE, "t0.*not a copy"),
        (lambda m, n, t: m.weight.data.copy_(t[:1].expand(4, 6)), ONE, "t0.*repeated elements"),
        (lambda m, n, t: m.weight.data.copy_(t[:1]), ONE, "t0.*broadcasting"),
        (lambda m, n, t: (copied(m, n, t), m.weight.data[:1].copy_(t[:1])), ONE, "t0.*loaded to two places"),
        (lambda m, n, t: m.weight.data.view(torch.int16).copy_(t.view(torch.int16)), ONE, "t0.*another dtype"),
        (lambda m, n, t: torch.add(t, 1, out=m.weight.data), ONE, "t0.*not a copy"),
        (lambda m, n, t: m.weight.data.fill_(t.flatten()[0].item()), ONE, "t0.*raised"),
        (lambda m, n, t: {}[n], ONE, "t0.*raised KeyError"),
        (asserted, table((5, 6)), r"t0' cannot be routed: .* raised AssertionError; it is \[5, 6\] in the run"),
        (copied, table((4, 6), dtype="F32"), r"casts t0 from torch\.float32 .* base="),
        (copied, table((4, 6), (4, 6)), "'t0' and 't1' are loaded to the same memory"),
        (lambda m, n, t: (copied(m, n, t), m.weight.data[3:].fill_(0)), ONE, "padding"),
        (lambda m, n, t: m.weight.data[:2].copy_(t[:2]), ONE, "'weight' gets 12 of its 24"),
    ],
)
def test_what_is_no_plain_copy_is_refused(load: Load, loaded: TensorTable, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        trace_routes(Toy(load), loaded)


# Replicas of a model: what its loader may read of them, and what they share with the model


EXPERTS, HIDDEN = 8, 4


def expert_map_manager(ep_rank: int) -> Any:
    """vLLM's own, of one of two expert parallel ranks."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    parallel = FusedMoEParallelConfig(
        tp_size=1,
        pcp_size=1,
        dp_size=1,
        ep_size=2,
        tp_rank=0,
        pcp_rank=0,
        dp_rank=0,
        ep_rank=ep_rank,
        sp_size=1,
        use_ep=True,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )
    return ExpertMapManager(64, 2, EXPERTS, 0, None, parallel, "linear", False)


class Experts(nn.Module):
    """Holds one rank's experts; its loader asks vLLM's map which they are, as vLLM's ``RoutedExperts`` does."""

    _expert_map: torch.Tensor
    manager: Any

    def __init__(self, ep_rank: int) -> None:
        super().__init__()
        self.manager = expert_map_manager(ep_rank)
        self.register_buffer("_expert_map", self.manager.expert_map, persistent=False)
        self.weight = nn.Parameter(torch.zeros(self.manager.local_num_experts, HIDDEN, HIDDEN), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            local = self.manager.map_global_to_local(int(name.split(".")[1]))
            if local >= 0:
                self.weight.data[local].copy_(tensor)


def table_of_experts() -> TensorTable:
    return TensorTable(TensorSpec(f"experts.{expert}", "F32", (HIDDEN, HIDDEN)) for expert in range(EXPERTS))


@pytest.mark.parametrize("ep_rank", [0, 1])
def test_a_loader_reads_which_experts_are_here(ep_rank: int) -> None:
    model = Experts(ep_rank)
    model.load_weights((spec.name, torch.full(spec.shape, float(i))) for i, spec in enumerate(table_of_experts()))
    before = model._expert_map.clone()
    routes = trace_routes(model, table_of_experts())
    here = [expert for expert in range(EXPERTS) if expert // (EXPERTS // 2) == ep_rank]
    assert [expert for expert in range(EXPERTS) if routes.routes[expert]] == here
    for expert in here:
        (route,) = routes.routes[expert]
        held = routes.destinations[route.destination].flat.view(torch.float32)
        assert (held[route.target.offset : route.target.offset + route.target.numel] == expert).all()
    assert torch.equal(model._expert_map, before)


class Plain:
    """An object that is no module."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def test_only_small_integers_that_are_no_weights_keep_their_data() -> None:
    model = nn.Module()
    model.register_buffer("saved", torch.zeros(4, dtype=torch.int64))
    model.register_buffer("map", torch.tensor([1, -1]), persistent=False)
    model.register_buffer("large", torch.zeros(READABLE_ELEMENTS + 1).int(), persistent=False)
    replica = replicate(model, MetaLeaf(model))
    kept = {name: buffer.device.type == "cpu" for name, buffer in replica.named_buffers()}
    assert kept == {"saved": False, "map": True, "large": False}


class Reader(Experts):
    """Chooses among fused experts by the data of a tensor that it has computed, as vLLM's loader of Llama 4 does."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            here = (self._expert_map != -1).nonzero().flatten().to(tensor.device)
            chosen = tensor[here]
            self.weight.data[int(here[0].item()) % len(self.weight)].copy_(chosen[0])


def test_a_loader_that_reads_other_data_is_refused_by_name() -> None:
    fused = TensorTable([TensorSpec("experts.fused", "F32", (EXPERTS, HIDDEN, HIDDEN))])
    with pytest.raises(ModelError, match=r"experts\.fused.*reads the data of a tensor.*--enable-expert-parallel"):
        trace_routes(Reader(1), fused)


def test_a_checkpoint_that_would_fill_what_a_loader_reads_is_refused_by_name() -> None:
    class Filled(Experts):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                self._expert_map.copy_(tensor)

    with pytest.raises(ModelError, match=r"'map' cannot be routed.*reads the data of a tensor"):
        trace_routes(Filled(0), TensorTable([TensorSpec("map", "I32", (EXPERTS,))]))


class Owning(nn.Linear):
    """A module that keeps an object."""

    owner: Any

    def __init__(self, owner: Any) -> None:
        super().__init__(2, 2)
        self.owner = owner


class Releasing:
    """Owns a file descriptor until it is collected."""

    def open(self) -> Any:
        self.descriptor = os.open(os.devnull, os.O_RDONLY)
        return self

    def __del__(self) -> None:
        os.close(self.descriptor)


class ReleasingModule(Releasing, nn.Linear):
    """A module that does the same."""


def test_a_replica_releases_nothing_of_the_model() -> None:
    """An object that releases something is shared, a module is copied."""
    model: Any = nn.Sequential(Owning(Releasing().open()), ReleasingModule(2, 2).open())
    replica = replicate(model, MetaLeaf(model))
    assert replica[0].owner is model[0].owner
    assert replica[1] is not model[1]
    assert isinstance(replica[1], ReleasingModule)
    assert replica[1].weight.device.type == "meta"
    del replica
    gc.collect()
    os.fstat(model[0].owner.descriptor)
    os.fstat(model[1].descriptor)


def test_vllms_shared_memory_outlives_a_replica() -> None:
    from torch._C._distributed_c10d import HashStore
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
    from vllm.distributed.utils import StatelessProcessGroup

    ring = ShmRingBuffer(n_reader=1, max_chunk_bytes=64, max_chunks=2)
    group = StatelessProcessGroup(rank=0, world_size=1, store=HashStore())
    model = Owning(Plain(ring=ring, group=group))
    replica = replicate(model, MetaLeaf(model))
    assert replica.owner.ring is ring
    assert replica.owner.group is group
    del replica
    gc.collect()
    with ring.get_data(0) as data:
        data[:3] = b"abc"
    attached = shared_memory.SharedMemory(name=ring.shared_memory.name)
    assert attached.buf is not None
    assert bytes(attached.buf[ring.data_offset : ring.data_offset + 3]) == b"abc"
    attached.close()


class Generating(MetaLeaf):
    """What generation adds meanwhile, in another thread: attributes of a parameter, as torch.compile's, and buffers."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        setattr(self.model.weight, f"added_{len(vars(self.model.weight))}", True)
        self.model.queue.append(1)
        return super().__call__(tensor)

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.model = model


def test_what_is_added_while_a_replica_is_made_does_no_harm() -> None:
    model: Any = nn.Linear(2, 2)
    model.weight.scale, model.queue = torch.ones(1), deque([torch.ones(1)])
    replica = replicate(model, Generating(model))
    assert replica.weight.scale.device.type == replica.queue[0].device.type == "meta"
