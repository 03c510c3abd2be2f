"""docs/architecture.md lists the modules on the path of a publish and of an apply: both are traced and compared."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.world import World
from trainer_side import Budget, Gate, Publisher
from vllm_delta_sync.bucket.factory import open_bucket
from vllm_delta_sync.settings import StoreOptions

ROOT = Path(__file__).parents[2]
OF_A_SERVER = {
    "vllm_delta_sync/notice/subscriber.py",
    "vllm_delta_sync/engine/follow/service.py",
    "vllm_delta_sync/engine/core/ports.py",
    "vllm_delta_sync/engine/core/pause_watchdog.py",
    "vllm_delta_sync/engine/planning/trusted_head.py",
}
"""Of the steps of an apply: those that only a server with several processes takes, or one with certain settings."""


class Tracer:
    """Collects the modules of this project in which functions are called while it records, maintenance excepted."""

    def __init__(self) -> None:
        self.recording = False
        self.seen: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        # Anchors and merged deltas are made beside the path.
        if self.recording and event == "call" and threading.current_thread().name != "delta-sync-maintenance":
            name = frame.f_code.co_filename
            if name.startswith((f"{ROOT}/trainer_side/", f"{ROOT}/vllm_delta_sync/")):
                self.seen.add(name.removeprefix(f"{ROOT}/"))


@contextmanager
def tracing() -> Iterator[Tracer]:
    """Trace this thread and those that begin in the block."""
    tracer = Tracer()
    sys.setprofile(tracer)
    threading.setprofile(tracer)
    try:
        yield tracer
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def section(title: str) -> str:
    text = (ROOT / "docs" / "architecture.md").read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def steps(title: str) -> set[str]:
    """The modules that the section's table names."""
    return set(re.findall(r"^\| [0-9]+ \|.*\| `([^`]+)` \|$", section(title), re.M))


def helpers(title: str) -> tuple[str, ...]:
    """The modules and packages that the section says its steps call."""
    line = re.search(r"^Its steps call helpers in (.*?)\.$", section(title), re.M | re.S)
    assert line, f"{title}: no list of helpers"
    return tuple(re.findall(r"`([^`]+)`", line[1]))


def compare(title: str, seen: set[str], elsewhere: set[str]) -> None:
    listed = steps(title)
    assert elsewhere <= listed
    assert not listed - elsewhere - seen, "listed, but not on the path"
    beside = helpers(title)
    assert not {name for name in seen - listed if not name.startswith(beside)}, "on the path, but not listed"
    for name in beside:
        assert any(module.startswith(name) for module in seen - listed), f"nothing is called in {name}"


def test_the_path_of_a_publish(tmp_path: Path) -> None:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **size)).to(torch.bfloat16)  # type: ignore[arg-type]
    mirrored = StoreOptions(mirror=str(tmp_path / "mirror"))
    with (
        tracing() as tracer,
        open_bucket(tmp_path / "run", mirrored) as bucket,
        Publisher(
            model, bucket, notice="tcp://127.0.0.1:*", gate=Gate(), budget=Budget(max_share=0.01), merge=False
        ) as publisher,
    ):
        for step in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.view(-1)[step::97] += 0.5
            tracer.recording = step == 2
            publisher.publish(step=step)
            publisher.flush()
        tracer.recording = False
    compare("The path of a publish", tracer.seen, set())


def test_the_path_of_an_apply(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.receiver.advance()
    world.train(1, 2)
    with tracing() as tracer:
        tracer.recording = True
        world.receiver.advance()
        tracer.recording = False
    world.expect_exact()
    compare("The path of an apply", tracer.seen, OF_A_SERVER)
