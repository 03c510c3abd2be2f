"""Adapters that follow runs, in the worker of an engine that is asked nothing.

Run as ``python -m tests.e2e.lora_worker FOLDER FAMILY``. What vLLM's layers make of an adapter from a run is compared
with what they make of the trainer's adapter, in PEFT's files and loaded by vLLM under a number of its own. Writes what
it saw to ``seen.json``.
"""

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from tests.e2e.fresh import make_engine, worker_of
from tests.e2e.fresh import refusal as said
from tests.e2e.world import World
from tests.support.adapters import lose_adapter_memory
from tests.support.exporting import file_size_limit
from vllm_delta_sync.process_folders import PREFIX

RANK, ALPHA, LARGEST_RANK, SLOTS, HELD = 4, 6, 8, 2, 4
TOKENS = 5
TARGETS = ("q_proj", "k_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head", "experts")
"""Neither o_proj nor v_proj: a layer, and a part of a fused one, are without."""
CHECKS = 40


class Adapter:
    """An adapter in training, and its run."""

    def __init__(self, root: Path, name: str, model: Any, seed: int) -> None:
        self.root, self.name, self.steps = root, name, 0
        self.url = str(root / f"run-{name}")
        self._generator = torch.Generator().manual_seed(seed)
        self._tensors = dict(_zeros(model))
        self._step()
        self.begin(ALPHA)

    def begin(self, alpha: int) -> None:
        """Begin a run with the tensors as they are."""
        from trainer_side import Publisher

        self.alpha = alpha
        self.publisher = Publisher(lambda: self._tensors.items(), self.url, files=self.save(), merge=False)

    def replace(self, alpha: int) -> None:
        """Begin another run with the same tensors, in the place of the one that is there."""
        self.publisher.close()
        shutil.rmtree(self.url)
        self.begin(alpha)

    def _step(self) -> None:
        for tensor in self._tensors.values():
            tensor += torch.randn(tensor.shape, generator=self._generator) / 8

    def publish(self) -> None:
        self.steps += 1
        self._step()
        self.publisher.publish(step=self.steps, wait=True)
        self.publisher.flush()

    def save(self) -> Path:
        """PEFT's files of the adapter as it is now."""
        folder = self.root / f"{self.name}-{self.steps}-{self.alpha}"
        if not folder.exists():
            folder.mkdir()
            save_file(self._tensors, folder / "adapter_model.safetensors")
            config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": self.alpha}
            config |= {"bias": "none", "target_modules": sorted(TARGETS)}
            (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder


def _zeros(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an adapter under PEFT's names, in the form that vLLM loads."""
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        path = f"base_model.model.{module}"
        if module.endswith("embed_tokens"):
            size, width = parameter.shape
            yield f"{path}.lora_embedding_A", torch.zeros(RANK, size)
            yield f"{path}.lora_embedding_B", torch.zeros(width, RANK)
        elif ".experts." in name:
            # transformers holds all experts of a layer in one tensor.
            parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            experts, rows, columns = parameter.shape
            for expert in range(experts):
                for part in parts:
                    one = f"{path.rpartition('.')[0]}.{expert}.{part}"
                    yield f"{one}.lora_A.weight", torch.zeros(RANK, columns)
                    yield f"{one}.lora_B.weight", torch.zeros(rows // len(parts), RANK)
        elif module.endswith(TARGETS):
            rows, columns = parameter.shape
            yield f"{path}.lora_A.weight", torch.zeros(RANK, columns)
            yield f"{path}.lora_B.weight", torch.zeros(rows, RANK)


class Llm:
    """An engine in this process, and what its layers make of adapters.

    Attributes:
        engine: ``vllm.LLM``. worker, runner, model, manager: parts of it.
    """

    def __init__(self, checkpoint: Path) -> None:
        options = {"enable_lora": True, "max_lora_rank": LARGEST_RANK, "max_loras": SLOTS, "max_cpu_loras": HELD}
        self.engine = make_engine(checkpoint, **options)
        self.worker = worker_of(self.engine)
        self.runner, self.model = self.worker.model_runner, self.worker.get_model()
        self.manager = self.runner.lora_manager._adapter_manager
        self._numbers = iter(range(1, 1000))

    def request(self, folder: Path, number: int | None = None, **options: Any) -> Any:
        """For an adapter in a folder, under a number that no run has."""
        from vllm.lora.request import LoRARequest

        number = next(self._numbers) if number is None else number
        return LoRARequest(f"adapter-{number}", number, str(folder), **options)

    def activate(self, request: Any) -> None:
        """As before each step of a request; None: without an adapter."""
        number = 0 if request is None else request.lora_int_id
        self.runner._set_active_loras((number,) * TOKENS, (number,) * TOKENS, set() if request is None else {request})

    @torch.inference_mode()
    def say(self, request: Any) -> list[Any]:
        """What each layer that vLLM adapts makes of some input, in its order."""
        from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
        from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
        from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA

        self.activate(request)
        generator = torch.Generator().manual_seed(17)
        said = []
        for name, layer in self.manager.modules.items():
            if isinstance(layer, FusedMoEWithLoRA):
                # Its kernel is for GPUs, so what it would read is compared.
                found = [] if request is None else self._in_slot(layer, request.lora_int_id)
            elif isinstance(layer, VocabParallelEmbeddingWithLoRA):
                found = [layer(torch.arange(3, 3 + TOKENS))]
            elif isinstance(layer, LogitsProcessorWithLoRA):
                hidden = torch.randn(TOKENS, layer.hidden_size, generator=generator).bfloat16()
                found = [self.model.compute_logits(hidden)]
            else:
                made = layer(torch.randn(TOKENS, layer.input_size, generator=generator).bfloat16())
                found = [made[0] if isinstance(made, tuple) else made]
            said.append([name, *(tensor.float().tolist() for tensor in found)])
        return said

    def _in_slot(self, layer: Any, number: int) -> list[torch.Tensor]:
        slot = self.manager.lora_index_to_id.index(number)
        buffers = (layer.w13_lora_a_stacked, layer.w13_lora_b_stacked, layer.w2_lora_a_stacked, layer.w2_lora_b_stacked)
        return [*(part[slot] for buffer in buffers for part in buffer), layer.adapter_enabled[slot : slot + 1]]

    def sleep(self, level: int) -> None:
        """As vLLM's workers on GPUs do."""
        self.worker.sleep(level)
        if level == 2:
            lose_adapter_memory(self.model)


class Trial:
    """One worker, one adapter that it follows, and what is tried with both."""

    def __init__(self, root: Path, family: str) -> None:
        self.world = World(root, family, rate=1e-3, publishes=False)
        self.llm = Llm(self.world.base)
        self.plain = self.llm.say(None)
        self.adapter, self.other = (
            Adapter(root, name, self.world.model, seed) for seed, name in enumerate(("math", "other"))
        )
        self.sync = self.follow()
        self.sync.to()

    def follow(self) -> Any:
        from vllm_delta_sync.engine import attach

        with mock.patch.dict(os.environ, DELTA_SYNC_LORA_NAME=self.adapter.name):
            return attach(self.llm.engine, bucket=self.adapter.url)

    @property
    def number(self) -> int:
        return int(self.sync.lora_request.lora_int_id)

    @property
    def served(self) -> int | None:
        served = self.sync.status()["served"]
        return None if served is None else int(served["version"])

    def right(self) -> bool:
        """Whether the adapter that is served does what a fresh load of it does, and not what the base does."""
        said = self.llm.say(self.sync.lora_request)
        return said == self.llm.say(self.llm.request(self.adapter.save())) != self.plain

    def same_plain(self) -> bool:
        """Whether the base alone does what it did. On a CPU, vLLM's head then computes with the last slot."""
        pairs = zip(self.llm.say(None), self.plain, strict=True)
        return all(now == before for now, before in pairs if now[0] != "lm_head")

    def state(self) -> dict[str, Any]:
        status, label = self.sync.status(), self.llm.engine.llm_engine.get_weight_version()
        return {"served": self.served, "state": status["state"], "label": label, **status["ready"]}

    # Sleep

    def sleeping(self, level: int) -> dict[str, Any]:
        before = self.served
        assert self.right()
        self.llm.sleep(level)
        seen: dict[str, Any] = {"verify": said(self.sync.verify)}
        folder = self.adapter.save()
        self.adapter.publish()
        seen |= {"to": said(self.sync.to), "asleep": self.state(), "before": before}
        self.llm.worker.wake_up()
        # The first thing after waking up is a request: no status, no poll.
        fresh = self.llm.say(self.llm.request(folder))
        seen["first answer"] = self.llm.say(self.sync.lora_request) == fresh != self.plain
        seen["plain"] = self.same_plain()
        seen["verdicts"] = [self.sync.verify()["verdict"]]
        self.sync.to()
        seen |= {"after": self.served, "right": self.right()}
        seen["verdicts"].append(self.sync.verify()["verdict"])
        return seen

    def sleeping_with_base(self) -> dict[str, Any]:
        """The base follows a run too, and loses its weights too."""
        from vllm_delta_sync.engine import attach

        self.world.begin()
        base = attach(self.llm.engine, bucket=self.world.url)
        base.to()
        self.world.publish()
        self.llm.sleep(2)
        for parameter in self.llm.model.parameters():
            parameter.data.zero_()
        seen: dict[str, Any] = {"asleep": [said(base.to), said(self.sync.to)]}
        self.llm.worker.wake_up()
        self.sync.to()
        seen |= {"found again": said(base.to), "base": base.status()["served"]["version"]}
        return seen | {"right": self.right(), "verdicts": [base.verify()["verdict"], self.sync.verify()["verdict"]]}

    # What something else does to an adapter

    def changed(self, change: Callable[[], None]) -> dict[str, Any]:
        """It is found by ``verify``, nothing is served, and the next call repairs it."""
        before = self.served
        self.llm.say(self.sync.lora_request)
        change()
        verdict = self.sync.verify()
        seen = {"verdict": verdict["verdict"], "mismatched": verdict["mismatched"], "found": self.state()}
        self.sync.to()
        seen |= {"restored": self.served == before, "right": self.right()}
        return seen | {"verify": self.sync.verify()["verdict"]}

    def changes(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for change in (self.zero_slot, self.flip_held, self.flip_host_copy, self.load_another):
            yield change.__name__, change
        for change in (self.change_weights_file, self.change_config_file, self.remove_file):
            yield change.__name__, change
        yield "v_proj", partial(self.flip_buffer, "model.layers.0.self_attn.qkv_proj", part=2)
        for name in self.llm.manager.modules:
            if "layers.0" not in name:
                yield name, partial(self.flip_buffer, name)

    def flip_buffer(self, name: str, part: int = 0) -> None:
        """Where vLLM computes with the adapter, in one layer."""
        layer = self.llm.manager.modules[name]
        buffer = layer.w2_lora_a_stacked if name.endswith("experts") else layer.lora_b_stacked
        flip((buffer if isinstance(buffer, torch.Tensor) else buffer[part])[self.slot])

    @property
    def slot(self) -> int:
        return int(self.llm.manager.lora_index_to_id.index(self.number))

    def zero_slot(self) -> None:
        for layer in self.llm.manager.modules.values():
            layer.reset_lora(self.slot)

    def flip_held(self) -> None:
        """In host memory, from which vLLM fills slots."""
        held = self.llm.manager.list_adapters()[self.number]
        flip(held.loras["model.layers.1.self_attn.qkv_proj"].lora_a[1])

    def flip_host_copy(self) -> None:
        flip(self.llm.worker.delta_sync_adapters[self.adapter.name]._weights.tensors()[0])

    def load_another(self) -> None:
        """As /v1/load_lora_adapter with load_inplace does."""
        self.llm.worker.add_lora(self.llm.request(self.other.save(), self.number, load_inplace=True))

    @property
    def folder(self) -> Path:
        return Path(self.sync.lora_request.lora_path)

    def change_weights_file(self) -> None:
        data = bytearray((self.folder / "adapter_model.safetensors").read_bytes())
        data[-1] ^= 1
        (self.folder / "adapter_model.safetensors").write_bytes(data)

    def change_config_file(self) -> None:
        text = (self.folder / "adapter_config.json").read_text()
        (self.folder / "adapter_config.json").write_text(
            text.replace(f'"lora_alpha": {self.adapter.alpha}', '"lora_alpha": 1')
        )

    def remove_file(self) -> None:
        (self.folder / "adapter_model.safetensors").unlink()

    def noticed(self) -> dict[str, Any]:
        """Without ``verify``: before the next version is taken."""
        before = self.served
        self.load_another()
        self.adapter.publish()
        seen: dict[str, Any] = {"to": said(self.sync.to), "state": self.state(), "before": before}
        self.sync.to()
        return seen | {"after": self.served, "right": self.right()}

    # What changes no answer

    def unchanged(self, act: Callable[[], None]) -> dict[str, Any]:
        self.llm.say(self.sync.lora_request)
        act()
        verdicts, refusals = [self.sync.verify()["verdict"]], [said(self.sync.to)]
        right = self.right()
        refusals.append(said(self.sync.to))
        verdicts.append(self.sync.verify()["verdict"])
        return {"verdicts": verdicts, "to": refusals, "right": right}

    def take_slots(self) -> None:
        for _ in range(SLOTS):
            self.llm.activate(self.llm.request(self.other.save()))
        assert self.number not in self.llm.manager.lora_index_to_id

    def take_all_places(self) -> None:
        for _ in range(HELD):
            self.llm.activate(self.llm.request(self.other.save()))
        assert self.number not in self.llm.manager.list_adapters()

    def remove(self) -> None:
        self.llm.worker.remove_lora(self.number)

    def reset(self) -> None:
        """vLLM does this after it has replaced the base's weights."""
        self.llm.runner.reset_lora_state()

    def swapped(self, others: int) -> dict[str, Any]:
        """Other adapters push ours out and it comes back, again and again, while it is compared."""
        from vllm_delta_sync.engine.protocol import Scan
        from vllm_delta_sync.format.fingerprint import Fingerprint

        rank = self.llm.worker.delta_sync_adapters[self.adapter.name]
        verdicts: list[Any] = []
        turns = 0

        def compare() -> None:
            while min(len(verdicts), turns) < CHECKS:
                with rank.memory.background_thread():
                    found = rank.scan(Scan(list(range(len(rank.run.table)))))
                sums = {tensor: sum(parts, Fingerprint()) for tensor, parts in found.measured.items()}
                verdicts.append(sums == found.expected)

        requests = [self.sync.lora_request, *(self.llm.request(self.other.save()) for _ in range(others))]
        reader = threading.Thread(target=compare)
        reader.start()
        while reader.is_alive():
            self.llm.activate(requests[turns % len(requests)])
            turns += 1
        reader.join()
        return {"verdicts": verdicts, "turns": turns, "right": self.right()}

    def buffer_out_of_sight(self) -> dict[str, Any]:
        """As a later vLLM may have it: what is compared beside the model is not written to the model."""
        layer = self.llm.manager.modules["model.layers.1.self_attn.qkv_proj"]
        self.llm.say(self.sync.lora_request)
        buffers = layer.lora_b_stacked
        before = [buffer.clone() for buffer in buffers]
        layer.lora_b_stacked = dict(enumerate(buffers))
        seen = {"verify": said(self.sync.verify), "same": all(map(torch.equal, before, buffers))}
        layer.lora_b_stacked = buffers
        return seen | {"verdict": self.sync.verify()["verdict"]}

    def disk_full(self) -> dict[str, Any]:
        """Neither the next version nor the one before can be written; what is served stays."""
        before: int = self.sync.status()["served"]["version"]
        size = (self.folder / "adapter_model.safetensors").stat().st_size
        served = self.llm.request(self.adapter.save())
        self.adapter.publish()
        with file_size_limit(size - 1):
            seen: dict[str, Any] = {"to": said(self.sync.to), "back": said(lambda: self.sync.rollback(before - 1))}
        seen |= {"served": self.served == before, "right": self.llm.say(self.sync.lora_request) == self.llm.say(served)}
        seen["files"] = sorted(path.name for path in self.folder.iterdir())
        seen["verdicts"] = [self.sync.verify()["verdict"]]
        self.sync.rollback(before - 1)
        seen["verdicts"].append(self.sync.verify()["verdict"])
        self.sync.to()
        return seen | {"later": self.served == before + 1, "right later": self.right()}

    # What the host copy alone would not tell

    def replaced(self) -> dict[str, Any]:
        """Another run with the same tensors and another factor comes in the place of the run."""
        self.adapter.replace(2 * ALPHA)
        self.sync.to()
        return {"served": self.served, "right": self.right(), "verify": self.sync.verify()["verdict"]}

    def attached_again(self) -> dict[str, Any]:
        """What vLLM is to load stays in its folder, and no other one is made."""
        before, folders = self.folder, set(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
        self.sync = self.follow()
        self.sync.to()
        made = set(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")) - folders
        seen = {"moved": self.folder != before, "made": sorted(map(str, made)), "right": self.right()}
        self.reset()
        return seen | {"loaded again": self.right(), "verify": self.sync.verify()["verdict"]}

    def all(self) -> dict[str, Any]:
        seen: dict[str, Any] = {"start": [self.served, self.right(), self.sync.verify()["verdict"]]}
        seen |= {f"sleep {level}": self.sleeping(level) for level in (1, 2)}
        seen["changed"] = {name: self.changed(change) for name, change in self.changes()}
        seen["noticed"] = self.noticed()
        seen["disk full"] = self.disk_full()
        quiet = (self.take_slots, self.take_all_places, self.remove, self.reset)
        seen["unchanged"] = {act.__name__: self.unchanged(act) for act in quiet}
        seen["swapped"] = {others: self.swapped(others) for others in (SLOTS, HELD)}
        seen["out of sight"] = self.buffer_out_of_sight()
        seen["replaced"] = self.replaced()
        seen["attached again"] = self.attached_again()
        seen["with base"] = self.sleeping_with_base()
        return seen


def flip(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.uint8)[0] ^= 1


def main(root: Path, family: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    torch.set_num_threads(1)
    trial = Trial(root, family)
    try:
        (root / "seen.json").write_text(json.dumps(trial.all()))
    finally:
        trial.adapter.publisher.close()
        trial.other.publisher.close()
        trial.world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
