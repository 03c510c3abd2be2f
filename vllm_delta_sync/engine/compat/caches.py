"""``WeightCaches``: what an engine keeps that was computed from weights, and what a commit does to it.

docs/pause.md has the whole list as a table. Whatever is on it has the version in its key, is dropped at a commit, or is
refused when the engine starts (``check_caches``). Servers and ``LLM`` objects use the same object, which lives in the
engine core's process: only there are a commit and the next lookup in one order.

With ``prefix_cache: salt``, vLLM's hash of each block of keys and values covers the run, the version, the number of the
commit and the client's own ``cache_salt``, so that nothing is dropped and nothing old is found:

- A request gets its key when it is created, and another one when its blocks are looked up and the key is no longer the
  current one. So a request that holds no blocks always looks for, and stores, blocks of the weights served now.
- A request that holds blocks at a commit continues with them and the new weights. What it computes from then on is of
  no single version, so its blocks are stored under no key: not in the prefix cache, and not through a connector.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from vllm_delta_sync.engine.compat.patches import wrap_method
from vllm_delta_sync.engine.compat.version_labels import NO_VERSION, SERIAL, relabel, split_label, version_label
from vllm_delta_sync.errors import EngineError

RESET, SALT, KEEP = "reset", "salt", "keep"
"""Values of the setting ``prefix_cache``."""
BY_HASH, RESETTABLE = "by hash", "resettable"
CONNECTORS: dict[str, frozenset[str]] = {
    # Also "by hash" with every spec; "resettable" only with the one that keeps all in this engine's memory.
    "OffloadingConnector": frozenset((BY_HASH, RESETTABLE)),
    # By vLLM's hash too, but not tested with salted hashes, because it needs a GPU.
    "SimpleCPUOffloadConnector": frozenset((RESETTABLE,)),
}
"""KV connectors of vLLM that can be followed: what keeps blocks of older weights from coming back through them. All
others are refused, until a test shows that they can be followed."""
MULTI = "MultiConnector"
IN_MEMORY_SPEC = "CPUOffloadingSpec"
"""The kind of OffloadingConnector whose blocks are all in this engine's memory, and vLLM's default."""


def check_caches(vllm_config: Any, prefix_cache: str) -> None:
    """Refuse connectors through which answers could come from older weights. Raises EngineError."""
    if vllm_config.ec_transfer_config is not None:
        raise EngineError(
            f"--ec-transfer-config has connector {vllm_config.ec_transfer_config.ec_connector!r}: it would return what "
            "older weights made of an image, because its keys have no version and nothing resets it; leave it out"
        )
    for name, options, module in _parts(vllm_config.kv_transfer_config):
        kinds = frozenset() if module else CONNECTORS.get(name, frozenset())
        if name == "OffloadingConnector" and options.get("spec_name", IN_MEMORY_SPEC) != IN_MEMORY_SPEC:
            # Other kinds keep blocks on disk or on other machines, where a reset leaves them.
            kinds -= {RESETTABLE}
        if not kinds:
            reason = (
                "keys and values of older weights could come back through it: it has keys without a version and drops "
                f"nothing at a commit, or it is unknown here; use one of {', '.join(sorted(CONNECTORS))}, or leave it "
                "out"
            )
        elif prefix_cache == RESET and RESETTABLE not in kinds:
            reason = "a reset does not reach all that it keeps; set prefix_cache to salt, or leave it out"
        elif prefix_cache == SALT and BY_HASH not in kinds:
            reason = "it was not tested with prefix_cache 'salt'; set prefix_cache to reset, or leave it out"
        else:
            continue
        raise EngineError(f"--kv-transfer-config has connector {name!r}: {reason}")


def _parts(config: Any) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Yield name, options and module of each connector; those of a MultiConnector instead of itself."""
    if config is None or config.kv_connector is None:
        return
    options = config.kv_connector_extra_config or {}
    if config.kv_connector != MULTI or config.kv_connector_module_path:
        yield str(config.kv_connector), options, config.kv_connector_module_path
        return
    for part in options.get("connectors", ()):
        module = part.get("kv_connector_module_path")
        yield str(part.get("kv_connector")), part.get("kv_connector_extra_config") or {}, module


class WeightCaches:
    """The caches of one engine core. All methods run on the thread of its loop, except the hash of a new request.

    Args:
        engine: vLLM's ``EngineCore``. Its scheduler may not exist yet.
        prefix_cache: the setting of this process.
    """

    def __init__(self, engine: Any, prefix_cache: str) -> None:
        self._engine = engine
        self._prefix_cache = prefix_cache
        self._equipped = False
        # Weights that are no known version share nothing with any other engine, or with this one in another life.
        self._unknown = f"unknown:{os.urandom(16).hex()}"
        # Of the model's own weights (None), and of each adapter: label; run and version; and commits so far.
        self._labels: dict[str | None, str] = {}
        self._versions: dict[str | None, str] = {}
        self._commits: dict[str | None, int] = {}
        # The current key by adapter; replaced as a whole, because the thread that receives requests reads it.
        self._keys: dict[str | None, str] = {}
        self._update_keys()

    # What a controller does

    def use(self, prefix_cache: str) -> None:
        """Follow a controller's setting from now on. Raises EngineError: it is too late for the engine's connector."""
        if prefix_cache == self._prefix_cache:
            return
        if self._engine.scheduler.connector is not None:
            raise EngineError(
                f"prefix_cache is {prefix_cache!r}, and was {self._prefix_cache!r} when the engine with its KV "
                "connector started; set it before the engine is made"
            )
        self._prefix_cache = prefix_cache
        self._update_keys()
        self.equip()

    def name_weights(self, adapter: str | None, label: str, run: str | None) -> None:
        """Label outputs with the version that the weights are from now on.

        Args:
            adapter: whose weights; None for the model's own. label: a ``version_label``, of this commit alone. run: run
                id of the version; None if it is not known.
        """
        engine = self._engine
        engine.set_weight_version(relabel(engine.get_weight_version(), adapter, label))
        self._labels[adapter] = label
        version, _ = split_label(label)
        if version is None or run is None:
            self._versions.pop(adapter, None)
        else:
            self._versions[adapter] = f"{run}:{version}"
        self._change_keys()

    def name_version(self, adapter: str | None, version: int | None) -> None:
        """As ``name_weights``, where only the version is known. If it is the one named last, no other has run since."""
        label = self._labels.get(adapter, NO_VERSION)
        if split_label(label)[0] != version:
            label = version_label(version, serial=any(SERIAL in each for each in self._labels.values()))
        self.name_weights(adapter, label, run=None)

    def begin_change(self, adapter: str | None) -> None:
        """Give everything that is computed from now on another key: weights are about to change, or to change back."""
        self._commits[adapter] = self._commits.get(adapter, 0) + 1
        self._change_keys()

    def drop(self) -> int:
        """Drop what has no version in its key; called when a pause for a commit is complete.

        Returns:
            number of requests that hold blocks which cannot be computed again now, such as those that wait for a KV
            connector or for more input; nothing was dropped then, and no request has lost anything.

        Raises:
            RuntimeError: vLLM could not drop a cache.
        """
        engine, scheduler = self._engine, self._engine.scheduler
        if self._prefix_cache == RESET:
            running = set(map(id, scheduler.running))
            others = [request for request in scheduler.requests.values() if id(request) not in running]
            # vLLM would find out only after it has taken the blocks of all running requests.
            held = [request for request in others if request.num_computed_tokens and _holds_blocks(scheduler, request)]
            if held:
                return len(held)
            if not scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
                raise RuntimeError("the KV connector did not drop its cache")
        # Text models have none, and asking every rank takes a while.
        if getattr(scheduler, "max_num_encoder_input_tokens", 1):
            engine.reset_encoder_cache()
        return 0

    # Keys

    def equip(self) -> None:
        """Hash with the current key and store no block of mixed weights, from now on. The scheduler must exist."""
        if self._equipped or self._prefix_cache != SALT:
            return
        self._equipped = True
        if self._engine.request_block_hasher is None:
            return  # there is neither a prefix cache nor a connector
        self._engine.request_block_hasher = partial(self._hash_blocks, self._engine.request_block_hasher)
        blocks = self._engine.scheduler.kv_cache_manager
        for name in ("get_computed_blocks", "get_computed_blocks_for_connector"):
            wrap_method(blocks, name, self._look_up)
        wrap_method(blocks.coordinator, "cache_blocks", self._store)

    def _update_keys(self) -> None:
        adapters = {*self._versions, *self._commits} - {None}
        self._keys = {} if self._prefix_cache != SALT else {name: self._key(name) for name in (None, *adapters)}

    def _key(self, adapter: str | None) -> str:
        own = f"{self._versions.get(None, self._unknown)}:{self._commits.get(None, 0)}"
        if adapter is None:
            return own
        return f"{own};{adapter}={self._versions.get(adapter, self._unknown)}:{self._commits.get(adapter, 0)}"

    def _key_of(self, request: Any) -> str | None:
        """Return the current key for a request; None if blocks have no key of ours."""
        keys, lora = self._keys, request.lora_request
        if lora is None:
            return keys.get(None)
        return keys.get(lora.lora_name) or keys.get(None)

    def _change_keys(self) -> None:
        """Replace the keys. Requests that hold blocks keep theirs, under which nothing more is stored."""
        before = self._keys
        self._update_keys()
        if self._keys == before or not self._equipped:
            return
        scheduler = self._engine.scheduler
        for request in scheduler.requests.values():
            if _key_at_hashing(request) == self._key_of(request) or not _holds_blocks(scheduler, request):
                continue
            computed = request.num_computed_tokens // scheduler.hash_block_size
            request.block_hashes[computed:] = map(_unique, request.block_hashes[computed:])
            for state in _offloading_states(scheduler.connector, request):
                limits = (state.max_offload_tokens, request.num_computed_tokens)
                state.max_offload_tokens = min(limit for limit in limits if limit is not None)

    def _hash_blocks(self, original: Callable[[Any], list[bytes]], request: Any) -> list[bytes]:
        """Return the hashes of a request's next full blocks."""
        key = self._key_of(request)
        if not hasattr(request, "delta_sync_key"):
            # A new request. The thread that receives it may be a commit late, which its lookup makes up for.
            request.delta_sync_salt = request.cache_salt
            _set_key(request, key)
        hashes = original(request)
        return hashes if request.delta_sync_key == key else list(map(_unique, hashes))

    def _look_up(self, original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        """Look for cached blocks of a request that holds none, under the current key."""
        key = self._key_of(request)
        if _key_at_hashing(request) != key:
            if not hasattr(request, "delta_sync_key"):
                request.delta_sync_salt = request.cache_salt
                request._block_hasher = self._engine.request_block_hasher
            _set_key(request, key)
            request.block_hashes.clear()
            request.update_block_hashes()
            for state in _offloading_states(self._engine.scheduler.connector, request):
                # Its hashes are read again, all of which have changed.
                state.max_offload_tokens = (request.kv_transfer_params or {}).get("max_offload_tokens")
                for group in state.group_states:
                    group.offload_keys.clear()
                    group.next_stored_chunk_idx = group.num_hit_chunks = 0
        return original(request, *args, **kwargs)

    def _store(self, original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a request's full blocks findable, unless weights have changed since it got its first one."""
        if _key_at_hashing(request) == self._key_of(request):
            original(request, *args, **kwargs)


def _key_at_hashing(request: Any) -> str | None:
    return getattr(request, "delta_sync_key", "")


def _set_key(request: Any, key: str | None) -> None:
    salt = request.delta_sync_salt
    request.delta_sync_key = key
    request.cache_salt = salt if key is None else key if salt is None else f"{key}|{salt}"


def _unique(block_hash: bytes) -> bytes:
    """Return a hash that no request has: for blocks that were not computed by one version alone."""
    return os.urandom(len(block_hash))


def _holds_blocks(scheduler: Any, request: Any) -> bool:
    return any(scheduler.kv_cache_manager.get_block_ids(request.request_id))


def _offloading_states(connector: Any, request: Any) -> list[Any]:
    """Return what vLLM's OffloadingConnectors remember of a request, its hashes among it."""
    parts = getattr(connector, "_connectors", None)
    if parts is not None:
        return [state for part in parts for state in _offloading_states(part, request)]
    scheduler = getattr(connector, "connector_scheduler", None)
    state = None if scheduler is None else scheduler._req_status.get(request.request_id)
    return [] if state is None else [state]
