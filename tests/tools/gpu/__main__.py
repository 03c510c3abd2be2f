"""Prove the device path on this machine's GPU: ``python -m tests.tools.gpu``; ``make test-gpu`` does it all.

First, where vLLM is installed, ``LLM`` objects and real servers; then kernels, staging, proofs and comparisons on
plain modules with Llama-8B's shapes, which takes torch and Triton only. Prints each check and a table, and writes
docs/gpu.md.

Exit status: 0 all checks passed, 1 one failed, 2 this machine lacks what is needed.
"""

import argparse
import datetime
import gc
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from tests.tools.gpu.report import LeftOutError, Report

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "gpu.md"
PARTS = ("engines", "servers", "modules")
NEEDED = "test-gpu needs an NVIDIA GPU, a CUDA build of torch with Triton and, for its checks of servers, vLLM"


def missing(device: str) -> str | None:
    """What is needed and not here; None if nothing is."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch"
    import torch

    if device == "cpu":
        return None
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU"
    return None if importlib.util.find_spec("triton") else f"{sys.executable} has no Triton"


def version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def said_by(*command: str) -> str:
    """The first line that a command prints."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.partition("\n")[0]


def machine(device: str) -> dict[str, str]:
    import torch

    gpus = "none: simulated on the CPU"
    if device == "cuda":
        gpus = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}"
    return {
        "device": gpus,
        "driver": said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "Triton": version_of("triton"),
        "vLLM": version_of("vllm"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": said_by("git", "describe", "--always", "--dirty"),
    }


def servers_are_possible(device: str) -> str:
    """A check. Raises LeftOutError if servers cannot be checked here."""
    version = version_of("vllm")
    if device == "cpu":
        raise LeftOutError("they take a GPU")
    if version == "none":
        raise LeftOutError("vLLM is not installed")
    if "cpu" in version:
        raise LeftOutError(f"vLLM {version} is built for CPUs")
    # What they import may be missing: that fails this check, and ends no other.
    importlib.import_module("tests.tools.gpu.engines")
    importlib.import_module("tests.tools.gpu.served")
    return f"vLLM {version}"


def run(report: Report, device: str, layers: int, quick: bool, root: Path, parts: Collection[str]) -> None:
    """Make all checks of some ``PARTS`` that can be made here."""
    # Imported late: torch may be missing, and what ``served`` imports comes with vLLM.
    import torch

    quick = quick or device == "cpu"
    wanted = {"engines", "servers"} & set(parts)
    if wanted and report.check("engines, and servers on one GPU and on two", lambda: servers_are_possible(device)):
        from tests.tools.gpu.engines import check_engines
        from tests.tools.gpu.served import check_server

        if "engines" in wanted:
            check_engines(report, root / "engines")
        for ranks in range(1, min(2, torch.cuda.device_count()) + 1) if "servers" in wanted else ():
            check_server(report, root / f"tp{ranks}", ranks, quick)
    if "modules" in parts:
        from tests.tools.gpu.modules import LLAMA_8B, QUICK, check_modules

        gc.collect()
        torch.cuda.empty_cache()
        chosen = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        check_modules(report, QUICK if quick else LLAMA_8B(layers), chosen, root, 3 if quick else 10)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: see ``--help``."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu simulates a device, to try this tool")
    add("--quick", action="store_true", help="small shapes and fewer versions")
    add("--layers", type=int, default=8, help="of Llama-8B's 32: each takes 1.3 GB of the device (default: 8)")
    add("--write", type=Path, help="the page to write (default: docs/gpu.md, and none for --device cpu)")
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts (default: all)")
    add("--probe", action="store_true", help="only say whether this machine has what is needed")
    options = parser.parse_args(arguments)
    if reason := missing(options.device):
        print(f"{NEEDED}: {reason}", file=sys.stderr)
        return 2
    if options.probe:
        return 0
    # Whatever servers need is local.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Servers are in process groups of their own, and would keep the device after this program.
    signal.signal(signal.SIGTERM, _end)
    report = Report(machine(options.device), options.write or (PAGE if options.device == "cuda" else None))
    with tempfile.TemporaryDirectory(prefix="test-gpu-") as folder:
        run(report, options.device, options.layers, options.quick, Path(folder), options.only)
    print(report.table(), end="")
    return int(report.failed)


def _end(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
