"""Architectures in processes of their own: one that crashes, hangs or eats memory is a row, and not the end."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import cast

from tests.tools.models import vllm_side
from tests.tools.models.trial import Row, attempt

SECONDS = 120.0
MEMORY_BYTES = 10 << 30


def architectures() -> list[str]:
    """All that generate text, by vLLM's registry, and of the multimodal ones those whose class transformers has."""
    import transformers
    from vllm.model_executor.models import registry

    multimodal = [name for name in registry._MULTIMODAL_MODELS if hasattr(transformers, name)]
    return sorted({*registry._TEXT_GENERATION_MODELS, *multimodal})


def rows(names: Sequence[str], jobs: int = 1) -> Iterator[Row]:
    """Try architectures, ``jobs`` at a time; rows as they are done."""
    vllm_side.prepare()
    _warm_up()
    context = multiprocessing.get_context("fork")
    waiting = list(names)
    running: dict[int, tuple[ForkProcess, str, Path]] = {}
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                root = Path(folder) / name
                root.mkdir()
                process = context.Process(target=_child, args=(name, root))
                process.start()
                running[process.sentinel] = (process, name, root)
            for sentinel in wait(list(running)):
                process, name, root = running.pop(cast(int, sentinel))
                process.join()
                yield _row(process, name, root)


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _child(name: str, root: Path) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    # The default action ends the process, whatever foreign code is at.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    log = os.open(root / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    (root / "work").mkdir()
    row = attempt(name, root / "work")
    (root / "row").write_text(json.dumps(row.plain()))
    # Threads of the receiver and of vLLM are no reason to wait.
    os._exit(0)


def _row(process: ForkProcess, name: str, root: Path) -> Row:
    try:
        row = Row(**json.loads((root / "row").read_text()))
        row.reason = row.reason.replace(str(root / "work"), "CHECKPOINT")
        return row
    except FileNotFoundError:
        last = (root / "log").read_text(errors="replace").strip().rpartition("\n")[2] if (root / "log").exists() else ""
        if process.exitcode == -signal.SIGALRM:
            return Row(name, reason=f"did not end within {SECONDS:.0f} s")
        return Row(name, reason=f"the process ended with {process.exitcode}: {last[:300]}")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _warm_up() -> None:
    """Compile what is compiled at first use, one element type after the other, and import what saving a model does."""
    from tests.support.tiny import make_model, save_checkpoint
    from tests.support.world import World
    from vllm_delta_sync.codec import merge as merging
    from vllm_delta_sync.engine.commit import apply as commits
    from vllm_delta_sync.format.table import DTYPES

    elements = {DTYPES[name] for name in ("BF16", "F32")}
    commits.compile_kernels(elements)
    merging.warm_up(elements)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(make_model("qwen3"), Path(folder, "model"))
        world = World(Path(folder))
        world.receiver.advance()
        world.train(1)
        world.receiver.advance()
        world.publisher.close()
