"""A worker with vLLM's Model Runner V2, which takes versions: ``python -m tests.e2e.model_runner_v2 FOLDER``.

vLLM uses that runner wherever there is Triton, which a CPU lacks. So only the worker is made, without an engine: it
loads a real model with LoRA, and receives the calls that an engine passes on; nothing is generated. Writes what it saw
to ``seen.json``.
"""

import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.e2e.fresh import digests, load_with, refusal
from tests.e2e.world import World
from tests.support.adapters import adapted, randomize
from tests.support.tiny import make_model
from vllm_delta_sync.engine import protocol

VERSIONS = 3
RATE = 1e-3


class WorkerPort:
    """An ``EnginePort`` to one worker of this process. Nothing runs, so there is nothing to pause."""

    def __init__(self, worker: Any, adapter: protocol.Adapter | None = None) -> None:
        self.worker, self.adapter = worker, adapter
        self.number = 0

    def call(self, request: protocol.RankRequest[Any]) -> list[Any]:
        import msgspec

        self.number += 1
        request = msgspec.structs.replace(request, adapter=self.adapter)
        answer = self.worker.delta_sync_call(protocol.encode_request(request), self.number)
        assert answer["call"] == self.number
        return protocol.decode_answers(request, [answer["answer"]])

    def pause(self) -> None: ...

    def resume(self) -> bool:
        return False

    def label(self, version: int | None, run: str | None) -> None: ...

    def label_paused(self, version: int | None, run: str | None) -> None: ...

    def end(self, reason: str) -> None:
        raise AssertionError(reason)


def make_worker(checkpoint: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.network_utils import get_distributed_init_method, get_open_port
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from vllm_delta_sync.engine import WORKER_EXTENSION

    config = EngineArgs(
        model=str(checkpoint),
        enforce_eager=True,
        max_model_len=64,
        enable_lora=True,
        max_lora_rank=8,
        worker_extension_cls=WORKER_EXTENSION,
    ).create_engine_config()
    # Only now: a configuration with that runner is refused where there is no Triton.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    wrapper = WorkerWrapperBase(rpc_rank=0, global_rank=0)
    method = get_distributed_init_method("127.0.0.1", get_open_port())
    place = {"local_rank": 0, "rank": 0, "distributed_init_method": method, "is_driver_worker": True}
    wrapper.init_worker([{"vllm_config": config, **place}])
    wrapper.init_device()
    wrapper.load_model()
    return wrapper.worker


def main(root: Path) -> None:
    from vllm.plugins import load_general_plugins

    from trainer_side.integrations.peft import adapter_publisher
    from vllm_delta_sync.engine.api.adapters import make_adapter
    from vllm_delta_sync.engine.follow.receiver import Receiver
    from vllm_delta_sync.settings import Settings

    load_general_plugins()
    world = World(root, rate=RATE)
    worker = make_worker(world.base)
    seen: dict[str, Any] = {"modules": [cls.__module__ for cls in type(worker.model_runner).__mro__]}

    def equals(checkpoint: Path) -> bool:
        fresh = digests(load_with(worker.vllm_config, checkpoint))
        held = {name.replace(".base_layer.", "."): digest for name, digest in digests(worker.get_model()).items()}
        return all(held[name] == digest for name, digest in fresh.items())

    def follow(receiver: Any, served: int) -> list[Any]:
        receiver.advance()
        found = receiver.status()["served"]["version"]
        return [found == served, receiver.verify()["verdict"], equals(root / f"v{served}")]

    receiver = Receiver(WorkerPort(worker), Settings(bucket=world.url))
    with closing(world):
        for version in range(1, VERSIONS + 1):
            world.publish()
            world.save()
            seen[f"version {version}"] = follow(receiver, version)
    receiver.rollback(VERSIONS - 1)
    seen["rollback"] = equals(root / f"v{VERSIONS - 1}")
    receiver.release()
    seen["forward"] = follow(receiver, VERSIONS)
    # Calls of vLLM's that write weights: each loads the base again, and is noticed.
    for name, owner in (("worker", worker), ("runner", worker.model_runner)):
        owner.reload_weights()
        seen[name] = refusal(receiver.check_served)
        receiver.repair()
        seen[f"{name}, repaired"] = [receiver.verify()["verdict"], equals(root / f"v{VERSIONS}")]
    trained = adapted(make_model("qwen3", seed=5))
    adapter = make_adapter("math")
    following = Receiver(WorkerPort(worker, adapter), Settings(bucket=str(root / "adapter"), lora_name="math"))
    with adapter_publisher(trained, bucket=str(root / "adapter")) as publisher:
        for version in range(1, 3):
            randomize(trained, version)
            publisher.publish(step=version, wait=True)
            publisher.flush()
            following.advance()
            listed = sorted(worker.list_loras()) == [adapter.number]
            seen[f"adapter {version}"] = [following.served_version, listed, following.verify()["verdict"]]
    (root / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
