"""A trainer in full precision, and a worker of vLLM that holds its weights in 4 or 8 bits as kernels of GPUs do.

Run as ``python -m tests.receiver.small_floats FOLDER CASE…``. The model, its loader, the quantization method and the
step after loading are vLLM's own; nothing is computed with the weights, for which most of these kernels need a GPU. So
only what asks for the platform is replaced: the choice of the kernel, and ``cuda()``, which leaves tensors where they
are. Writes what it saw of each case, from a process of its own, to ``FOLDER/CASE.json``.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.modules import ModulePort
from tests.support.quantizing import Tensors, save_quantized
from tests.support.small_floats import save_modelopt, save_powers, save_stacked
from tests.support.tiny import make_model, train_steps
from tests.tools.models import sweep, vllm_side
from tests.tools.models.reachable import differences

VERSIONS = 5
ROLLED_BACK_TO = 2
Save = Callable[[Any, Path], Path]


def kernel(module: str, name: str, made_by: str) -> Callable[[], None]:
    """Let layers have a kernel of vLLM that this machine cannot run."""

    def choose() -> None:
        from importlib import import_module

        cls = getattr(import_module(f"vllm.model_executor.kernels.linear.{module}"), name)
        for where in USERS[made_by]:
            user = import_module(f"vllm.model_executor.layers.quantization.{where}")
            setattr(user, made_by, lambda *rest, **more: made(cls))
        torch.Tensor.cuda = lambda self, *rest, **more: self  # type: ignore[method-assign, assignment]

    return choose


def made(cls: Any) -> Any:
    """A kernel that is not asked whether the platform supports it."""
    found = object.__new__(cls)
    found.config = None
    return found


SCHEMES = "compressed_tensors.schemes.compressed_tensors_"
USERS = {
    "init_nvfp4_linear_kernel": (f"{SCHEMES}w4a4_nvfp4", "modelopt"),
    "init_mxfp4_linear_kernel": (f"{SCHEMES}w4a4_mxfp4",),
    "init_mxfp8_linear_kernel": (f"{SCHEMES}w8a8_mxfp8",),
}


def nvfp4(module: str, name: str) -> Callable[[], None]:
    return kernel(f"nvfp4.{module}", name, "init_nvfp4_linear_kernel")


def library(scheme: str) -> Save:
    return lambda model, path: save_quantized(model, path, scheme)


def as_it_is() -> None:
    """vLLM's own choice on a CPU."""


CASES: dict[str, tuple[Save, Callable[[], None], dict[str, int]]] = {
    "nvfp4 emulated": (library("nvfp4"), nvfp4("emulation", "EmulationNvFp4LinearKernel"), {}),
    "nvfp4 cutlass": (library("nvfp4"), nvfp4("cutlass", "CutlassNvFp4LinearKernel"), {}),
    "nvfp4 padded": (library("nvfp4"), nvfp4("cutlass", "CutlassNvFp4LinearKernel"), {"intermediate_size": 176}),
    "nvfp4 fbgemm": (library("nvfp4 a16"), nvfp4("fbgemm", "FbgemmNvFp4LinearKernel"), {}),
    "modelopt emulated": (save_modelopt, nvfp4("emulation", "EmulationNvFp4LinearKernel"), {}),
    "modelopt flashinfer": (save_modelopt, nvfp4("flashinfer", "FlashInferCutlassNvFp4LinearKernel"), {}),
    "mxfp4 emulated": (
        library("mxfp4"), kernel("mxfp4.emulation", "EmulationMxfp4LinearKernel", "init_mxfp4_linear_kernel"), {}
    ),
    "mxfp4 flashinfer": (
        library("mxfp4"), kernel("mxfp4.flashinfer", "FlashInferMxFp4LinearKernel", "init_mxfp4_linear_kernel"), {}
    ),
    "ue8m0": (lambda model, path: save_powers(model, path, 128), as_it_is, {"num_key_value_heads": 4}),
    "gpt-oss": (save_stacked, as_it_is, {}),
}  # fmt: skip
"""Name → how a checkpoint is written, arguments for vLLM, and sizes of the model."""


def follow(case: str, root: Path) -> dict[str, Any]:
    """Publish and follow all versions, and one back; return what was seen."""
    from trainer_side import Publisher
    from vllm_delta_sync import open_run
    from vllm_delta_sync.engine.follow.receiver import Receiver
    from vllm_delta_sync.engine.model.tied_head import TiedHead
    from vllm_delta_sync.engine.worker.rank_worker import RankWorker
    from vllm_delta_sync.maintenance.export import export
    from vllm_delta_sync.settings import Settings

    save, choose, sizes = CASES[case]
    model = make_model("gpt_oss" if case == "gpt-oss" else "llama", seed=5, **sizes)
    base = save(model, root / "base")
    steps = train_steps(model, lr=1e-3)
    config = vllm_side.worker_config(base)
    worker = vllm_side.started_worker(config)
    choose()
    served = vllm_side.worker_model(worker, config)
    port = ModulePort()
    port.ranks = [RankWorker(served, 0, str(base), tied_head=TiedHead(config.model_config))]
    url = str(root / "run")
    receiver = Receiver(port, Settings(bucket=url))
    seen: list[dict[str, Any]] = []
    fresh = vllm_side.fresh_model(config, base)
    with Publisher(model, url, base=base) as publisher, open_run(url) as run:
        receiver.advance()
        for version in range(1, VERSIONS + 1):
            next(steps)
            publisher.publish(step=version, wait=True)
            publisher.flush()
            expected = load_file(save(model, root / f"fresh{version}") / "model.safetensors")
            export(run, root / f"v{version}")
            before = fresh
            receiver.advance()
            fresh = vllm_side.fresh_model(config, root / f"v{version}")
            seen.append(
                {
                    "version": receiver.served_version,
                    "kind": run.manifest(version).kind,
                    "library": same(expected, run.tensors(version)),
                    "differences": differences(served, fresh),
                    "changed": len(differences(fresh, before)),
                    "verdict": receiver.verify()["verdict"],
                }
            )
        derived = receiver.status()["ranks"][0]["derived"]
        kind = run.manifest(0).kind
    receiver.rollback(ROLLED_BACK_TO)
    back = differences(served, vllm_side.fresh_model(config, root / f"v{ROLLED_BACK_TO}"))
    return {"seen": seen, "derived": derived, "rolled_back": back, "base": kind, "tensors": len(expected)}


def same(expected: Tensors, found: Iterable[tuple[str, torch.Tensor]]) -> bool:
    """Whether a version is what the library writes of the trainer's weights."""
    held = dict(found)
    return held.keys() == expected.keys() and all(
        tensor.dtype == held[name].dtype
        and torch.equal(tensor.reshape(-1).view(torch.uint8), held[name].reshape(-1).view(torch.uint8))
        for name, tensor in expected.items()
    )


def write(case: str, root: Path, folder: Path) -> None:
    (root / f"{case}.json").write_text(json.dumps(follow(case, folder)))
    sys.stdout.flush()
    # Threads of the receiver and of vLLM are no reason to wait.
    os._exit(0)


def main(root: Path, cases: list[str]) -> None:
    vllm_side.prepare()
    sweep._warm_up()
    for case in cases:
        folder = root / case.replace(" ", "-")
        folder.mkdir()
        process = multiprocessing.get_context("fork").Process(target=write, args=(case, root, folder))
        process.start()
        process.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
