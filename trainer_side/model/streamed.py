"""``StreamedWeights``: weights that a framework yields parameter by parameter, as the tensors of a checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from trainer_side.model.conversion_trace import Route
from trainer_side.model.module import ModuleForm
from trainer_side.model.sources import CheckpointTensor, LiveTensors, NamedTensors, check_readable, pairs
from vllm_delta_sync.errors import ModelError, TensorMismatchError
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.tensors.checkpoint import Checkpoint, resolve_base
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES

logger = guarded_logger(__name__)


class StreamedWeights(LiveTensors):
    """The tensors of a checkpoint; their values come only with each ``Publisher.publish(weights=…)``.

    The weights may have the names and shapes of parameters in the module of transformers, or those of the checkpoint.
    They are converted tensor by tensor, by views where possible. A parameter is kept only until the other parts of its
    checkpoint tensors have arrived. Tensors that are never yielded keep the values of the checkpoint.
    """

    has_values = False

    def __init__(self, base: str | Path) -> None:
        """Trace the module's conversion to its checkpoint once, on a module without data.

        Args:
            base: checkpoint directory, or public model as ``org/name@revision``. If transformers does not know its
                architecture, only the names and shapes of the checkpoint are accepted.

        Raises:
            NotFoundError, FormatError, StoreError: it cannot be read. ModelError: the conversion cannot be traced.
        """
        folder = resolve_base(base).path
        checkpoint = Checkpoint(folder)
        self._sources: dict[str, torch.Tensor] = {}
        self._routes: dict[str, Route] = {}
        self._targets_by_source: dict[str, list[str]] = {}
        module = _meta_module(folder)
        if module is None:
            specs = checkpoint.specs.items()
            self.aliases = {}
            self.tensors = {name: CheckpointTensor(name, spec.shape, TORCH_DTYPES[spec.dtype]) for name, spec in specs}
            return
        form = ModuleForm(module, described=True)
        self.tensors, self.aliases = form.tensors, form.aliases
        (self._sources, _), self._routes = form.state(), form.routes
        for target, route in self._routes.items():
            for source in route.sources:
                self._targets_by_source.setdefault(source, []).append(target)

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def convert(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        waiting: dict[str, torch.Tensor] = {}
        produced: set[str] = set()
        for name, value in pairs(weights):
            targets = self._targets_by_source.get(name)
            if targets is None:
                # A name of the checkpoint; unknown names are refused in the comparison.
                yield name, check_readable(name, value)
                continue
            waiting[name] = self._as_in_module(name, value)
            for target in targets:
                route = self._routes[target]
                if all(source in waiting for source in route.sources):
                    yield target, route.read(waiting)
                    produced.add(target)
            self._release(name, waiting, produced)
        if waiting:
            incomplete = next(
                target for source in waiting for target in self._targets_by_source[source] if target not in produced
            )
            sources = [source for source in self._routes[incomplete].sources if source not in waiting]
            raise ModelError(
                f"checkpoint tensor {incomplete!r} is made of several parameters, of which {sources[0]!r} was not "
                f"yielded ({len(sources)} of {len(self._routes[incomplete].sources)}); yield all of them, or none"
            )

    def _as_in_module(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a parameter, with the strides of the module that the conversion was traced on."""
        tensor, known = check_readable(name, value), self._sources[name]
        if tensor.shape != known.shape:
            raise TensorMismatchError(
                f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, but {list(known.shape)} in the model of the "
                "base's configuration; give the checkpoint that the model was loaded from"
            )
        if tensor.stride() == known.stride():
            return tensor
        laid_out = torch.empty_strided(known.shape, known.stride(), dtype=tensor.dtype, device=tensor.device)
        return laid_out.copy_(tensor)

    def _release(self, name: str, waiting: dict[str, torch.Tensor], produced: set[str]) -> None:
        """Drop parameters that no other tensor needs; copy the newest, ``name``, to its own memory."""
        for source in {source for target in self._targets_by_source[name] for source in self._routes[target].sources}:
            if source in waiting and produced.issuperset(self._targets_by_source[source]):
                del waiting[source]
        if name in waiting:
            # Frameworks may refill one buffer.
            waiting[name] = waiting[name].clone(memory_format=torch.preserve_format)


def _meta_module(folder: Path) -> nn.Module | None:
    """Return the module that a checkpoint is loaded into, on the meta device; None if transformers does not know it."""
    try:
        import transformers
    except ImportError:
        return None
    if not (folder / "config.json").is_file():
        return None
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        named = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
                module: nn.Module = named(config)
            else:
                module = transformers.AutoModelForCausalLM.from_config(config)
    except (ValueError, OSError) as error:
        logger.warning(
            "transformers does not know the model of %s, so names must be the checkpoint's: %s", folder, error
        )
        return None
    return module
