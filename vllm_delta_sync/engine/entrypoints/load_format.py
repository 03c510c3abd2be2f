"""``DeltaSyncLoader`` is ``--load-format delta_sync``: it loads weights from the bucket; a model folder needs none."""

import copy
import gc
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, ClassVar

import torch
from vllm.distributed import get_world_group
from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.engine.compat.speculation import is_draft, same_folder
from vllm_delta_sync.engine.follow.standing_orders import peek_order
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.model import tied_head
from vllm_delta_sync.engine.model.model_with_draft import load_weights
from vllm_delta_sync.engine.names import LOAD_FORMAT
from vllm_delta_sync.engine.planning.trusted_head import TrustedHead
from vllm_delta_sync.engine.protocol import ClaimedVersion
from vllm_delta_sync.engine.staging.reconstruct import drain_tensors, newest_good_manifest, rebuild, restore_version
from vllm_delta_sync.errors import (
    ChainError,
    DataError,
    DeltaSyncError,
    EngineError,
    SettingsError,
    TensorMismatchError,
)
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import DRAFT_PREFIX
from vllm_delta_sync.run.run_reader import parse_target
from vllm_delta_sync.run.service_policy import ServicePolicy
from vllm_delta_sync.settings import HEAD, load_settings


def from_rank_0(value: Any) -> Any:
    """Return rank 0's ``value`` on every rank of this engine."""
    return get_world_group().broadcast_object(value)


def is_in_run(vllm_config: Any, model_config: Any) -> bool:
    """Return whether a model that vLLM loads has the run's tensors by their names: the run replaces the served folder.

    vLLM also loads the drafts of speculative decoding with the load format of the served model. Layers that belong to
    the served checkpoint have its folder; other drafts have a folder of their own.
    """
    # In a draft's configuration, ``model_config`` may be the draft's.
    target = getattr(vllm_config.speculative_config, "target_model_config", None) or vllm_config.model_config
    return same_folder(model_config.model, target.model)


class DeltaSyncLoader(BaseModelLoader):  # type: ignore[misc, unused-ignore]
    """Loads the version to serve of the run that ``DELTA_SYNC_BUCKET`` names, or else its newest good version.

    A draft with a folder of its own is loaded from there, but for the tensors that the run has of it.
    """

    served: ClassVar[tuple[Manifest, str] | None] = None
    """What the served model of this process was last loaded with: the version, and the model folder."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        if load_config.model_loader_extra_config:
            raise SettingsError(
                f"model_loader_extra_config is {str(load_config.model_loader_extra_config)[:80]!r}: load format "
                f"{LOAD_FORMAT!r} takes none; set DELTA_SYNC_BUCKET"
            )

    @cached_property
    def run(self) -> Run:
        """The run to load from.

        Raises:
            SettingsError: no bucket is set, or it has the run of an adapter. NotFoundError: there is no run.
        """
        settings = load_settings()
        if settings.lora_name is not None:
            raise SettingsError(
                f"lora_name is {settings.lora_name!r}, so the run in bucket is that of an adapter, and load format "
                f"{LOAD_FORMAT!r} would load the whole model from it; leave one of them out"
            )
        folder = settings.cache_folder()
        cache = None if folder is None else ObjectCache(folder, settings.cache_bytes)
        return open_run(settings.bucket, settings.keyring(), settings.store(), cache)

    def download_model(self, model_config: Any) -> None:
        """Do nothing: objects are read when needed."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Load a model from the run; one of which the run has nothing, as ``--load-format auto`` would."""
        has_draft = is_draft(model_config) and any(spec.name.startswith(DRAFT_PREFIX) for spec in self.run.table)
        if is_in_run(vllm_config, model_config) or has_draft:
            return super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        logger.info("loading %s from its own folder: the run has nothing of it", model_config.model)
        loader = get_model_loader(self._default_config())
        return loader.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)

    def _default_config(self) -> Any:
        found = copy.copy(self.load_config)
        found.load_format = "auto"
        return found

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Create the model as vLLM does, with the run's own output head if it has one."""
        if is_in_run(vllm_config, model_config):
            tied_head.decide_by(self.run.table, model_config)
        return super().create_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Rebuild the version, pass every tensor to the model's ``load_weights``, and note it as ``delta_sync_loaded``.

        A draft gets the version that the served model of this process was loaded with.

        Raises:
            DeltaSyncError: see ``newest_good_manifest`` and ``rebuild``.
            TensorMismatchError: the run's tensors leave some of the model's parameters unset.
            EngineError, ChainError: ranks cannot agree on a version.
        """
        began = time.perf_counter()
        run, served, drafts = self.run, DeltaSyncLoader.served, is_draft(model_config)
        if drafts and served is not None:
            held, folder = served
            state = restore_version(run, held, folder)
        else:
            chosen, folder = self._agree_on_version(), model_config.model
            held, state = rebuild(run, chosen, folder, ServicePolicy.of_settings(load_settings()))
            if from_rank_0(held.version) != held.version:
                raise EngineError(
                    f"this rank could rebuild version {held.version}, rank 0 another one; restart the server"
                )
            DeltaSyncLoader.served = held, folder
        tensors = drain_tensors(run, state)
        if drafts and not same_folder(model_config.model, folder):
            names = model.load_weights(self._own_checkpoint(model, model_config, tensors))
        else:
            names = load_weights(model, lambda: tensors)
        if names is not None and model_config.quantization is None:
            self._check_all_set(model, set(names))
        model.delta_sync_loaded = ClaimedVersion(held.run, run.bucket.url, held.version, state.fingerprints)
        del state
        gc.collect()
        logger.info("loaded version %d of run %s in %.2f s", held.version, held.run, time.perf_counter() - began)

    def _own_checkpoint(
        self, model: Any, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what the draft's own folder holds, with the run's tensors of it in place of the folder's."""
        own = {name.removeprefix(DRAFT_PREFIX): each for name, each in tensors if name.startswith(DRAFT_PREFIX)}
        for name, tensor in DefaultModelLoader(self._default_config()).get_all_weights(model_config, model):
            if name not in own:
                yield name, tensor
        yield from own.items()

    def _agree_on_version(self) -> Manifest:
        """Return the version that rank 0 chose for all ranks, because the head may move meanwhile."""
        if get_world_group().rank_in_group != 0:
            chosen = from_rank_0(None)
            if chosen is None:
                raise EngineError("rank 0 found no version to load; its error says why")
            version, digest = chosen
            manifest = self.run.manifest(version)
            if manifest.digest != digest:
                raise ChainError(f"version {version} is {manifest.digest} here and {digest} on rank 0")
            return manifest
        try:
            manifest = self.choose_version()
        except DeltaSyncError:
            from_rank_0(None)
            raise
        from_rank_0((manifest.version, manifest.digest))
        return manifest

    def choose_version(self) -> Manifest:
        """Return the version to serve: the one that a standing order holds, the target, or else the newest.

        Raises:
            DeltaSyncError: as ``open_run`` and ``newest_good_manifest``.
        """
        settings, run = load_settings(), self.run
        order = peek_order(settings)
        target = order.target if order is not None and order.target is not None else settings.target
        trusted_head = TrustedHead(settings, run.keyring, writes=False)
        head = newest_good_manifest(run, ServicePolicy.of_settings(settings), trusted_head)
        holds = order is not None and order.holding and order.run == run.info.run
        version = order.version if order is not None and holds else None
        if version is None and target == HEAD:
            return head
        try:
            # Not the newest for the time being: the loaded version generates as soon as the server answers.
            manifest = run.resolve(parse_target(target) if version is None else version)
            run.check_descends(head, manifest)
        except DataError as error:
            logger.warning("starting with version %d of run %s: %s", head.version, run.info.run, error)
            return head
        return manifest

    def _check_all_set(self, model: Any, names: set[str]) -> None:
        try:
            DefaultModelLoader(self.load_config).track_weights_loading(model, names)
        except ValueError as error:
            raise TensorMismatchError(
                f"run {self.run.info.run} lacks weights of this model; does config.json belong to the run? {error}"
            ) from error
