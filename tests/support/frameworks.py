"""What the recipes import from verl and prime-rl, in their shape, where they are not installed.

Names, arguments, and the order of calls are those of verl 0.9.1 and of prime-rl at the commits that
``examples/recipes/prime_rl.py`` names. With the real verl on the path, that is used.
"""

import asyncio
import importlib.util
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.state_dict import _get_fqns

Pairs = Generator[tuple[str, torch.Tensor], None, None]


class CheckpointEngine(ABC):
    """As ``verl.checkpoint_engine.base.CheckpointEngine``."""

    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Pairs, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


class CheckpointEngineRegistry:
    """As ``verl.checkpoint_engine.base.CheckpointEngineRegistry``."""

    _registry: ClassVar[dict[str, type]] = {}

    @staticmethod
    def register(backend: str) -> Callable[[type], type]:
        def wrapper(cls: type) -> type:
            CheckpointEngineRegistry._registry[backend] = cls
            return cls

        return wrapper

    @classmethod
    def get(cls, backend: str) -> type:
        return cls._registry[backend]

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        return cls.get(backend)(*args, **kwargs)


class WeightSender(ABC):
    """As ``prime_rl.transports.weights.base.WeightSender``: four marker files for each step."""

    master = True

    def __init__(self, output_dir: Path, timeout: int) -> None:
        self.world = SimpleNamespace(is_master=type(self).master)
        self.output_dir, self.timeout = output_dir, timeout

    def broadcast(self, model: torch.nn.Module, step: int) -> None:
        step_dir = self.output_dir / "broadcasts" / f"step_{step}"
        if self.world.is_master:
            shutil.rmtree(step_dir, ignore_errors=True)
            step_dir.mkdir(parents=True)
            (step_dir / ".sender_ready").touch()
            asyncio.run(asyncio.wait_for(wait_for_path(step_dir / ".receiver_ready"), self.timeout))
            (step_dir / ".started").touch()
        self._broadcast(model, step, step_dir)
        if self.world.is_master:
            (step_dir / ".finished").touch()

    @abstractmethod
    def _broadcast(self, model: torch.nn.Module, step: int, step_dir: Path) -> None: ...


class WeightReceiver(ABC):
    """As ``prime_rl.transports.weights.base.WeightReceiver``."""

    def __init__(self, broadcast_dir: Path, config: Any, admin_plane: Any, model_name: str) -> None:
        self.broadcast_dir, self.config = broadcast_dir, config
        self.admin_plane, self.model_name = admin_plane, model_name

    def step_dir(self, step: int) -> Path:
        return self.broadcast_dir / f"step_{step}"

    async def wait_published(self, step: int) -> None:
        await wait_for_path(self.step_dir(step) / ".sender_ready")

    def _ack(self, step: int) -> None:
        (self.step_dir(step) / ".receiver_ready").touch()

    @abstractmethod
    async def receive(self, step: int) -> None: ...

    async def sync_startup(self, step: int, timeout: float) -> None:
        await asyncio.wait_for(self.wait_published(step), timeout=timeout)
        await self.receive(step)


async def wait_for_path(path: Path) -> None:
    """As ``prime_rl.utils.pathing.wait_for_path``."""
    while not path.exists():
        await asyncio.sleep(0.01)


def resolve_fqn(model: torch.nn.Module, key: str) -> str:
    """As ``prime_rl.utils.weights.resolve_fqn``."""
    (name,) = _get_fqns(model, key)
    return str(name)


def convert_state_dict_to_hf(model: Any, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As ``prime_rl.utils.weights.convert_state_dict_to_hf``: by all keys of the model, of those that are given."""
    keys = dict.fromkeys(resolve_fqn(model, key) for key in model.state_dict())
    return dict(model.convert_to_hf(state_dict)) if model.is_prime_state_dict(keys) else state_dict


class Named(torch.nn.Module):
    """Parameters under dotted names; in prime-rl's words a model in the layout of its checkpoint."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            module: torch.nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, torch.nn.Parameter(tensor.clone()))

    def is_prime_state_dict(self, state_dict: dict[str, Any]) -> bool:
        return any(".mlp.experts.w1" in name for name in state_dict)


PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class Experts(Named):
    """A model in prime-rl's own layout: the experts of a layer stacked, one tensor for each of their projections."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """``tensors``: of a checkpoint whose experts are named ``….mlp.experts.3.gate_proj.weight``."""
        stacks: dict[str, list[torch.Tensor]] = {}
        for name, tensor in tensors.items():
            before, marker, after = name.partition(".mlp.experts.")
            if marker:
                part = next(ours for ours, theirs in PARTS.items() if theirs in after)
                stacks.setdefault(f"{before}.mlp.experts.{part}", []).append(tensor)
        others = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
        super().__init__({**others, **{name: torch.stack(parts) for name, parts in stacks.items()}})

    def convert_to_hf(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, tensor in state_dict.items():
            before, marker, part = name.partition(".mlp.experts.")
            if marker:
                names = (f"{before}.mlp.experts.{i}.{PARTS[part]}.weight" for i in range(len(tensor)))
                found.update(zip(names, tensor.unbind(), strict=True))
            else:
                found[name] = tensor
        return found


@cache
def modules() -> dict[str, ModuleType]:
    """What is to be in ``sys.modules`` for the recipes to be imported."""
    known: dict[str, dict[str, Any]] = {
        "prime_rl.transports.weights.base": {
            "WeightSender": WeightSender,
            "WeightReceiver": WeightReceiver,
            "FINISHED_MARKER": ".finished",
        },
        "prime_rl.utils.pathing": {"wait_for_path": wait_for_path},
        "prime_rl.utils.weights": {"convert_state_dict_to_hf": convert_state_dict_to_hf, "resolve_fqn": resolve_fqn},
    }
    if importlib.util.find_spec("verl") is None:
        known["verl.checkpoint_engine.base"] = {
            "CheckpointEngine": CheckpointEngine,
            "CheckpointEngineRegistry": CheckpointEngineRegistry,
        }
    found: dict[str, ModuleType] = {}
    for name, members in known.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        vars(found[name]).update(members)
    return found


def imported(name: str) -> Any:
    for framework, module in modules().items():
        sys.modules.setdefault(framework, module)
    return importlib.import_module(f"examples.recipes.{name}")


async def verl_update(
    actors: Sequence[Any], rollouts: Sequence[Any], weights: Callable[[], Pairs], step: int | None
) -> tuple[list[Any], list[dict[str, torch.Tensor]]]:
    """One ``CheckpointEngineManager.update_weights`` → what senders returned, and what each rollout worker received."""
    everybody = [*actors, *rollouts]
    metadata = [engine.prepare() for engine in everybody]
    for group, told in zip(
        (actors, rollouts), type(actors[0]).build_topology(len(actors), len(rollouts), metadata), strict=True
    ):
        for index, engine in enumerate(group):
            engine.init_process_group(**{key: values[index] for key, values in told.items()})

    async def received(engine: Any) -> dict[str, torch.Tensor]:
        return {name: tensor async for name, tensor in engine.receive_weights(global_steps=step)}

    sends = [engine.send_weights(weights(), global_steps=step) for engine in actors]
    sent, *found = await asyncio.gather(asyncio.gather(*sends), *(received(engine) for engine in rollouts))
    for engine in everybody:
        engine.finalize()
    return sent, found
