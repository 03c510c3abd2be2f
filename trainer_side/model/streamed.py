"""``StreamedWeights``: weights that a framework yields parameter by parameter, as the tensors of a checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from trainer_side.model.conversion_trace import Route
from trainer_side.model.live_tensors import (
    CheckpointTensor,
    LiveTensors,
    NamedTensors,
    Selection,
    check_readable,
    note_renamed,
    pairs,
)
from trainer_side.model.module import ModuleForm, assume_loaded_from
from vllm_delta_sync.errors import ModelError, TensorMismatchError
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.tensors.checkpoint import Checkpoint, resolve_base
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES

logger = guarded_logger(__name__)


class StreamedWeights(LiveTensors):
    """The tensors of a checkpoint; their values come only with each ``Publisher.publish(weights=…)``.

    The weights may have the names and shapes of the checkpoint, or those of parameters in a module that transformers
    loads it into: the class that ``config.json`` names, or that of ``AutoModelForCausalLM``, which of a vision-language
    checkpoint may be the language model alone. They are converted tensor by tensor, by views where possible. A
    parameter is kept only until the other parts of its checkpoint tensors have arrived. Tensors that are never yielded
    keep the values of the checkpoint.
    """

    has_values = False

    def __init__(self, base: str | Path) -> None:
        """Trace the modules' conversions to their checkpoint once, on modules without data.

        Args:
            base: checkpoint directory, or public model as ``org/name@revision``. If transformers does not know its
                architecture, only the names and shapes of the checkpoint are accepted.

        Raises:
            NotFoundError, FormatError, StoreError: it cannot be read. ModelError: the conversion cannot be traced.
        """
        folder = resolve_base(base).path
        checkpoint = Checkpoint(folder)
        self._sources: dict[str, torch.Tensor] = {}
        self._routes: list[tuple[str, Route]] = []
        self._routes_by_source: dict[str, list[int]] = {}
        self._selection = Selection()
        self._published: set[str] = set()
        self.excluded: set[str] = set()
        forms: list[ModuleForm] = []
        for module in _meta_modules(folder):
            assume_loaded_from(module, checkpoint.specs)
            try:
                forms.append(ModuleForm(module, described=True))
            except ModelError as error:
                if not forms:
                    raise
                logger.info("parameters of a %s are not accepted: %s", type(module).__name__, error)
        if not forms:
            specs = checkpoint.specs.items()
            self.aliases = {}
            self.tensors = {name: CheckpointTensor(name, spec.shape, TORCH_DTYPES[spec.dtype]) for name, spec in specs}
            return
        self.tensors, self.aliases = forms[0].tensors, forms[0].aliases
        for form in forms:
            self._accept(form)

    def _accept(self, form: ModuleForm) -> None:
        """Convert the parameters of a module to ``tensors``; of a second module only those whose names are free."""
        sources, _ = form.state()
        known = {*self._sources, *self.tensors} if self._sources else set()
        for target, route in form.routes.items():
            if target not in self.tensors or not known.isdisjoint(route.sources):
                continue
            for source in route.sources:
                self._sources[source] = sources[source]
                self._routes_by_source.setdefault(source, []).append(len(self._routes))
            self._routes.append((target, route))

    def select(self, selection: Selection, model: object) -> None:
        self._selection = selection

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def convert(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        waiting: dict[str, torch.Tensor] = {}
        read: set[int] = set()
        for name, value in self._selected(weights):
            numbers = self._routes_by_source.get(name)
            if numbers is None:
                # A name of the checkpoint; unknown names are refused in the comparison.
                yield name, check_readable(name, value)
                continue
            waiting[name] = self._as_in_module(name, value)
            for number in numbers:
                target, route = self._routes[number]
                if all(source in waiting for source in route.sources):
                    yield target, route.read(waiting)
                    read.add(number)
            self._release(name, waiting, read)
        if waiting:
            number = next(
                number for source in waiting for number in self._routes_by_source[source] if number not in read
            )
            incomplete, route = self._routes[number]
            sources = [source for source in route.sources if source not in waiting]
            raise ModelError(
                f"checkpoint tensor {incomplete!r} is made of several parameters, of which {sources[0]!r} was not "
                f"yielded ({len(sources)} of {len(route.sources)}); yield all of them, or none"
            )

    def _selected(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights under their names in the base; of those left out, only what the base has."""
        given: dict[str, str] = {}
        left_out: set[str] = set()
        self.excluded.clear()  # a call that was refused may have found others
        for name, value in pairs(weights):
            kept, renamed = self._selection.keeps(name), self._selection.renamed(name)
            numbers = self._routes_by_source.get(renamed, [])
            targets = [self._routes[number][0] for number in numbers] or [renamed]
            if kept:
                self._published.add(renamed)
                if renamed in left_out:
                    raise ModelError(
                        f"rename gives {given[renamed]!r}, which is left out, and {name!r} the same name, {renamed!r}; "
                        f"yield {name!r} first, or let rename leave the other one as it is"
                    )
            else:
                # As in a module, it gives way to what is published under that name.
                if renamed in self._published:
                    continue
                if not numbers and renamed not in self.tensors and renamed not in self.aliases:
                    continue
                left_out.add(renamed)
                self.excluded.update(targets)
            note_renamed(given, name, renamed)
            yield renamed, value
        self._selection.check_used(list(given.values()))

    def _as_in_module(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a parameter, with the strides of the module that the conversion was traced on."""
        tensor, known = check_readable(name, value), self._sources[name]
        if tensor.shape != known.shape:
            raise TensorMismatchError(
                f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, but {list(known.shape)} in the model of the "
                "base's configuration; give the checkpoint that the model was loaded from, or, if it was resized "
                "since, save it and give that checkpoint"
            )
        if tensor.stride() == known.stride():
            return tensor
        laid_out = torch.empty_strided(known.shape, known.stride(), dtype=tensor.dtype, device=tensor.device)
        return laid_out.copy_(tensor)

    def _release(self, name: str, waiting: dict[str, torch.Tensor], read: set[int]) -> None:
        """Drop parameters that no other tensor needs; copy the newest, ``name``, to its own memory."""
        routes = [self._routes[number][1] for number in self._routes_by_source[name]]
        for source in {source for route in routes for source in route.sources}:
            if source in waiting and read.issuperset(self._routes_by_source[source]):
                del waiting[source]
        if name in waiting:
            # Frameworks may refill one buffer.
            waiting[name] = waiting[name].clone(memory_format=torch.preserve_format)


def _meta_modules(folder: Path) -> list[nn.Module]:
    """Return the modules that a checkpoint is loaded into, on the meta device; the class of config.json comes first."""
    try:
        import transformers
    except ImportError:
        return []
    if not (folder / "config.json").is_file():
        return []
    modules: list[nn.Module] = []
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        named = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
                modules.append(named(config))
            try:
                language = transformers.AutoModelForCausalLM.from_config(config)
            except (ValueError, TypeError, AttributeError, LookupError, RuntimeError):
                # Of a model that is no language model, or has none inside.
                if not modules:
                    raise
            else:
                modules += [] if type(language) is named else [language]
    except (ValueError, OSError) as error:
        logger.warning(
            "transformers does not know the model of %s, so names must be the checkpoint's: %s", folder, error
        )
    return modules
