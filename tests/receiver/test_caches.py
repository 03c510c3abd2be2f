"""What becomes of cached keys and values at a commit: vLLM's own cache manager, requests and hashes, without an engine.

``tests/e2e/test_caches.py`` and ``tests/e2e/test_pause.py`` ask real engines.
"""

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from vllm_delta_sync.engine.compat import caches
from vllm_delta_sync.engine.compat.caches import WeightCaches, check_caches
from vllm_delta_sync.engine.compat.version_labels import version_label
from vllm_delta_sync.errors import EngineError

BLOCK = 4
LONGEST = 64
ADAPTER = "sql"


class Engine:
    """An engine core's scheduler side, as far as its caches go: what vLLM does there, in the tests' order.

    Attributes:
        made_by: per block: what computed the tokens in it, and all before them: (base, adapter, salt), or None once
            weights changed within. Kept here from what is done, not from hashes.
    """

    def __init__(self, prefix_cache: str = "salt") -> None:
        init_none_hash(sha256)
        self.request_block_hasher: Any = get_request_block_hasher(BLOCK, sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
            max_model_len=LONGEST,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        self.scheduler = SimpleNamespace(
            kv_cache_manager=self.manager,
            requests={},
            running=[],
            connector=None,
            hash_block_size=BLOCK,
            max_num_encoder_input_tokens=0,
        )
        self.label = "default"
        self.caches = WeightCaches(self, prefix_cache)
        self.caches.equip()
        self.weights = {None: 0, ADAPTER: 0}
        self.made_by: dict[int, Any] = {}
        self._number = 0

    def get_weight_version(self) -> str:
        return self.label

    def set_weight_version(self, label: str) -> None:
        self.label = label

    def add(self, prompt: list[int], salt: str | None = None, adapter: bool = False) -> Request:
        self._number += 1
        request = Request(
            str(self._number),
            prompt,
            SamplingParams(max_tokens=LONGEST),
            None,
            cache_salt=salt,
            lora_request=LoRARequest(ADAPTER, 1, "/adapter") if adapter else None,
            block_hasher=self.request_block_hasher,
        )
        vars(request)["given"] = salt
        self.scheduler.requests[request.request_id] = request
        return request

    def maker(self, request: Request) -> Any:
        """What computes a request's tokens now."""
        own = self.weights[ADAPTER] if request.lora_request else None
        return self.weights[None], own, vars(request)["given"]

    def admit(self, request: Request, chunk: int = LONGEST) -> int:
        """Look for its blocks, and compute a chunk of the rest; returns how many tokens were found."""
        blocks, found, *_ = self.manager.get_computed_blocks(request)
        for block in blocks.blocks[0]:
            assert self.made_by[block.block_id] == self.maker(request), "found what other weights have computed"
        self._compute(request, min(chunk, request.num_tokens - found), found, blocks)
        self.scheduler.running.append(request)
        request.status = RequestStatus.RUNNING
        return found

    def step(self, request: Request, chunk: int = LONGEST) -> None:
        """Compute the next chunk of its prompt, or its next token."""
        left = request.num_tokens - request.num_computed_tokens
        if not left:
            request.append_output_token_ids(request.num_tokens % 3)
            left = 1
        self._compute(request, min(chunk, left))

    def _compute(self, request: Request, tokens: int, found: int = 0, blocks: Any = None) -> None:
        given = {"num_new_computed_tokens": found, "new_computed_blocks": blocks} if blocks is not None else {}
        assert self.manager.allocate_slots(request, tokens, **given) is not None
        first = request.num_computed_tokens + found
        request.num_computed_tokens = first + tokens
        own = self.manager.get_block_ids(request.request_id)[0]
        maker = self.maker(request)
        for place, block in enumerate(own[: -(-request.num_computed_tokens // BLOCK)]):
            if (place + 1) * BLOCK <= first:
                continue
            before = [self.made_by[other] for other in own[:place]]
            begun = [self.made_by[block]] if place * BLOCK < first else []
            self.made_by[block] = maker if all(other == maker for other in before + begun) else None

    def stop(self, request: Request, status: RequestStatus) -> None:
        """Take its blocks away, for good or until it is admitted again."""
        self.manager.free(request)
        self.scheduler.running.remove(request)
        request.status, request.num_computed_tokens = status, 0
        if status is RequestStatus.PREEMPTED:
            request.num_preemptions += 1
        else:
            del self.scheduler.requests[request.request_id]

    def commit(self, version: int | None, adapter: str | None = None, run: str = "run") -> None:
        self.caches.begin_change(adapter)
        self.weights[adapter] += 1
        self.caches.name_weights(adapter, version_label(version), run)


PROMPT = list(range(4 * BLOCK + 1))


def test_a_request_finds_what_its_own_version_has_computed_and_nothing_else() -> None:
    engine = Engine()
    engine.commit(1)
    first = engine.add(PROMPT)
    engine.admit(first)
    engine.stop(first, RequestStatus.FINISHED_STOPPED)
    assert engine.admit(engine.add(PROMPT)) == 4 * BLOCK
    engine.commit(2)
    assert engine.admit(engine.add(PROMPT)) == 0
    # Back to the version before, whose blocks are still there, and whose commit has another number.
    engine.commit(1)
    assert engine.admit(engine.add(PROMPT)) == 0
    assert engine.admit(engine.add(PROMPT)) == 4 * BLOCK
    # A client's own salt counts as well.
    assert engine.admit(engine.add(PROMPT, salt="mine")) == 0
    assert engine.admit(engine.add(PROMPT, salt="mine")) == 4 * BLOCK


def test_requests_without_blocks_are_hashed_again() -> None:
    engine = Engine()
    engine.commit(1)
    waiting, preempted = engine.add(PROMPT), engine.add(PROMPT)
    engine.admit(preempted)
    engine.stop(preempted, RequestStatus.PREEMPTED)
    engine.commit(2)
    engine.admit(engine.add(PROMPT))
    assert engine.admit(waiting) == 4 * BLOCK
    assert engine.admit(preempted) == 4 * BLOCK


def test_an_adapter_has_a_key_of_its_own() -> None:
    engine = Engine()
    engine.commit(1)
    engine.commit(1, ADAPTER, "adapter-run")
    for adapter in (False, True):
        engine.admit(engine.add(PROMPT, adapter=adapter))
    engine.commit(2, ADAPTER, "adapter-run")
    assert engine.admit(engine.add(PROMPT)) == 4 * BLOCK
    assert engine.admit(engine.add(PROMPT, adapter=True)) == 0
    engine.commit(2)
    assert [engine.admit(engine.add(PROMPT, adapter=adapter)) for adapter in (False, True)] == [0, 0]


def test_weights_that_are_no_known_version_share_nothing_with_another_engine() -> None:
    one, other = Engine(), Engine()
    assert one.add(PROMPT).block_hashes != other.add(PROMPT).block_hashes
    for engine in (one, other):
        engine.commit(7)
    assert one.add(PROMPT).block_hashes == other.add(PROMPT).block_hashes
    other.commit(None)
    assert one.add(PROMPT).block_hashes != other.add(PROMPT).block_hashes


@pytest.mark.parametrize("setting", ["reset", "keep"])
def test_without_salt_hashes_are_those_of_vllm(setting: str) -> None:
    """Routers and readers of KV events rely on vLLM's own hashes."""
    engine, plain = Engine(setting), get_request_block_hasher(BLOCK, sha256)
    engine.commit(1)
    ours = engine.add(PROMPT, salt="mine")
    theirs = Request("plain", PROMPT, SamplingParams(), None, cache_salt="mine", block_hasher=plain)
    assert ours.block_hashes == theirs.block_hashes
    assert ours.cache_salt == "mine"


def test_a_setting_may_change_between_two_receivers() -> None:
    engine = Engine("keep")
    engine.admit(engine.add(PROMPT))
    engine.caches.begin_change(None)
    assert engine.admit(engine.add(PROMPT)) == 4 * BLOCK
    engine.caches.use("salt")
    assert engine.admit(engine.add(PROMPT)) == 0
    engine.commit(2)
    assert engine.admit(engine.add(PROMPT)) == 0
    assert engine.admit(engine.add(PROMPT)) == 4 * BLOCK
    engine.scheduler.connector = SimpleNamespace()
    with pytest.raises(EngineError, match="prefix_cache is 'reset', and was 'salt' when the engine"):
        engine.caches.use("reset")


ACTIONS = st.tuples(
    st.sampled_from(["add", "add", "admit", "admit", "step", "step", "commit", "preempt", "finish"]),
    st.integers(0, 3),
    st.integers(1, 3 * BLOCK),
)


@given(actions=st.lists(ACTIONS, min_size=10, max_size=60))
def test_no_order_of_requests_and_commits_finds_blocks_of_other_weights(actions: list[tuple[str, int, int]]) -> None:
    engine = Engine()
    waiting: list[Request] = []
    for action, choice, size in actions:
        running = engine.scheduler.running
        if action == "add":
            prompt = [token // 3 for token in range(size + 2 * BLOCK)]
            waiting.append(engine.add(prompt, "mine" if choice == 3 else None, adapter=choice == 2))
        elif action == "admit" and waiting:
            engine.admit(waiting.pop(choice % len(waiting)), size)
        elif action == "step" and running and running[choice % len(running)].num_tokens < LONGEST:
            engine.step(running[choice % len(running)], size)
        elif action == "commit":
            # Versions come again, as after a rollback.
            engine.commit(choice % 2, ADAPTER if size % 3 == 0 else None)
        elif action == "preempt" and running:
            waiting.append(request := running[choice % len(running)])
            engine.stop(request, RequestStatus.PREEMPTED)
        elif action == "finish" and running:
            engine.stop(running[choice % len(running)], RequestStatus.FINISHED_STOPPED)
    mixed = {block for block, maker in engine.made_by.items() if maker is None}
    assert all(engine.manager.block_pool.blocks[block].block_hash is None for block in mixed)


# What is refused


def config(connector: str | None = None, encoders: str | None = None, **options: Any) -> Any:
    kv = SimpleNamespace(
        kv_connector=connector,
        kv_connector_extra_config=options.get("extra", {}),
        kv_connector_module_path=options.get("module"),
    )
    return SimpleNamespace(
        kv_transfer_config=None if connector is None else kv,
        ec_transfer_config=None if encoders is None else SimpleNamespace(ec_connector=encoders),
    )


TIERS = {"spec_name": "TieringOffloadingSpec"}
PARTS = [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "NixlConnector"}]


def always(words: str) -> dict[str, str]:
    return dict.fromkeys(("reset", "salt", "keep"), words)


@pytest.mark.parametrize(
    ("found", "refused"),
    [
        (config(), {}),
        (config("OffloadingConnector"), {}),
        (config("OffloadingConnector", extra=TIERS), {"reset": "set prefix_cache to salt"}),
        (config("SimpleCPUOffloadConnector"), {"salt": "set prefix_cache to reset"}),
        (config("ExampleConnector"), always("'ExampleConnector': keys and values")),
        (config("OffloadingConnector", module="mine"), always("leave it out")),
        (config("Unheard"), always("'Unheard'")),
        (config("MultiConnector", extra={"connectors": PARTS[:1]}), {}),
        (config("MultiConnector", extra={"connectors": PARTS}), always("'NixlConnector'")),
        (config(encoders="ECExampleConnector"), always("--ec-transfer-config has connector 'ECExampleConnector'")),
    ],
)
def test_connectors_are_followed_or_refused_by_name(found: Any, refused: dict[str, str]) -> None:
    for setting in ("reset", "salt", "keep"):
        words = refused.get(setting)
        with nullcontext() if words is None else pytest.raises(EngineError, match=re.escape(words)):
            check_caches(found, setting)


REFUSED_CONNECTORS = {
    # Keys of their own, without a version, and no reset.
    "DecodeBenchConnector", "ExampleConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "LMCacheConnectorV1",
    "LMCacheMPConnector",
    # Its reset empties a store that other servers fill again, with blocks of the version that they still have.
    "MooncakeStoreConnector",
    # Between servers for prefill and decode, which may have different versions.
    "MooncakeConnector", "MoRIIOConnector", "NixlConnector", "NixlPullConnector", "NixlPushConnector",
    # Not looked into.
    "ExampleHiddenStatesConnector", "HiSparseConnector",
}  # fmt: skip


def test_every_connector_of_vllm_is_known() -> None:
    known = {*caches.CONNECTORS, *REFUSED_CONNECTORS, caches.MULTI}
    assert set(KVConnectorFactory._registry) == known, "look up what its keys cover, and whether it can drop all"
