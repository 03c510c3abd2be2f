"""``DeltaSyncLoader`` is ``--load-format delta_sync``: it loads weights from the bucket; a model folder needs none."""

import copy
import gc
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm.distributed import get_world_group
from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.engine.compat import tied_head
from vllm_delta_sync.engine.follow.standing_orders import peek_order
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.names import LOAD_FORMAT
from vllm_delta_sync.engine.planning.trusted_head import TrustedHead
from vllm_delta_sync.engine.staging.reconstruct import drain_tensors, newest_good_manifest, rebuild
from vllm_delta_sync.errors import (
    ChainError,
    DataError,
    DeltaSyncError,
    EngineError,
    SettingsError,
    TensorMismatchError,
)
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.run.run_reader import parse_target
from vllm_delta_sync.run.service_policy import ServicePolicy
from vllm_delta_sync.settings import HEAD, Settings, load_settings


@dataclass(frozen=True)
class LoadedVersion:
    """What was passed to a model's ``load_weights``; stored on the model as ``delta_sync_loaded``.

    Attributes:
        run: run id. url: the run's URL. version: version number.
        fingerprints: hex, one per tensor of the run's table, in its order.
    """

    run: str
    url: str
    version: int
    fingerprints: tuple[str, ...]


def from_rank_0(value: Any) -> Any:
    """Return rank 0's ``value`` on every rank of this engine."""
    return get_world_group().broadcast_object(value)


def is_in_run(vllm_config: Any, model_config: Any, prefix: str) -> bool:
    """Return whether a model that vLLM loads has its weights in the run, which replaces the served model's folder.

    vLLM also loads the drafts of speculative decoding with the load format of the served model. Heads that belong to
    the served checkpoint have its folder; another model, which vLLM loads under a prefix, has a folder of its own.
    """
    # In a draft's configuration, ``model_config`` may be the draft's.
    target = getattr(vllm_config.speculative_config, "target_model_config", None) or vllm_config.model_config
    return not prefix and bool(model_config.model == target.model)


class DeltaSyncLoader(BaseModelLoader):  # type: ignore[misc, unused-ignore]
    """Loads the version to serve of the run that ``DELTA_SYNC_BUCKET`` names, or else its newest good version.

    A model that is not in the run, such as a draft, is loaded from its own folder.
    """

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
            SettingsError: no bucket is set. NotFoundError: there is no run.
        """
        settings = load_settings()
        folder = settings.cache_folder()
        cache = None if folder is None else ObjectCache(folder, settings.cache_bytes)
        return open_run(settings.bucket, settings.keyring(), settings.store(), cache)

    def download_model(self, model_config: Any) -> None:
        """Do nothing: objects are read when needed."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Load a model from the run, or one that is not in the run as ``--load-format auto`` would."""
        if is_in_run(vllm_config, model_config, prefix):
            return super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        logger.info("loading %s from its own folder: it is not the served model", model_config.model)
        own_config = copy.copy(self.load_config)
        own_config.load_format = "auto"
        loader = get_model_loader(own_config)
        return loader.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Create the model as vLLM does, with the run's own output head if it has one."""
        tied_head.decide_by(self.run.table, model_config)
        return super().create_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Rebuild the version, pass every tensor to the model's ``load_weights``, and store a ``LoadedVersion`` on it.

        Raises:
            DeltaSyncError: see ``newest_good_manifest`` and ``rebuild``.
            TensorMismatchError: the run's tensors leave some of the model's parameters unset.
            EngineError, ChainError: ranks cannot agree on a version.
        """
        began = time.perf_counter()
        run, chosen = self.run, self._agree_on_version()
        held, state = rebuild(run, chosen, model_config.model, _policy(load_settings()))
        if from_rank_0(held.version) != held.version:
            raise EngineError(f"this rank could rebuild version {held.version}, rank 0 another one; restart the server")
        fingerprints = tuple(value.hex() for value in state.fingerprints)
        names = model.load_weights(drain_tensors(run, state))
        if names is not None and model_config.quantization is None:
            self._check_all_set(model, set(names))
        model.delta_sync_loaded = LoadedVersion(held.run, run.bucket.url, held.version, fingerprints)
        del state
        gc.collect()
        logger.info("loaded version %d of run %s in %.2f s", held.version, held.run, time.perf_counter() - began)

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
        head = newest_good_manifest(run, _policy(settings), trusted_head)
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


def _policy(settings: Settings) -> ServicePolicy:
    return ServicePolicy.of_settings(settings.quarantined, settings.require_exact)
