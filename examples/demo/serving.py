"""How the demo starts vLLM servers: one that follows the run, and one for comparison that does not."""

import os
import sysconfig
from pathlib import Path

from examples.demo.processes import Child, DemoError
from examples.demo.settings import MODEL_NAME
from vllm_delta_sync.engine import WORKER_EXTENSION

KEEP_ALIVE_SECONDS = "600"
"""vLLM closes idle connections after 5 s, which a slow training step exceeds."""

SERVE_ARGUMENTS = (
    *("--host", "127.0.0.1"),
    *("--served-model-name", MODEL_NAME),
    *("--dtype", "bfloat16"),
    *("--max-model-len", "64"),
    *("--max-num-seqs", "128"),
    *("--generation-config", "vllm"),
    *("--uvicorn-log-level", "warning"),
    "--enforce-eager",
)


def clean_environment() -> dict[str, str]:
    """This process's environment without settings that would reach into the demo's servers."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DELTA_SYNC_") and name != "VLLM_PLUGINS"
    }
    # No word to the network, except where the run lies in a Hub.
    return {"HF_HUB_OFFLINE": "1"} | kept


def trainer_environment() -> dict[str, str]:
    """The trainer's threads sleep while they wait for each other: spinning collapses where cores are busy."""
    return clean_environment() | {"OMP_WAIT_POLICY": "PASSIVE"}


def server_environment(core: int) -> dict[str, str]:
    """Environment of both servers: one pinned computing thread, a small cache."""
    return clean_environment() | {
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": KEEP_ALIVE_SECONDS,
        "VLLM_NO_USAGE_STATS": "1",
    }


def following_server(model: Path, bucket: str, notice: str, port: int, core: int, log: Path) -> Child:
    """``delta-sync serve`` on the base checkpoint: ``vllm serve`` that takes every version of the run."""
    command = [_script("delta-sync"), "serve", str(model), "--bucket", bucket, "--notice", notice]
    return Child(
        "the server",
        [*command, "--port", str(port), *SERVE_ARGUMENTS],
        log,
        environment=server_environment(core),
    )


def fresh_server(model: Path, port: int, core: int, log: Path) -> Child:
    """Plain ``vllm serve`` on a finished checkpoint, with our worker extension for equal kernels, and no run."""
    command = [_script("vllm"), "serve", str(model), "--worker-extension-cls", WORKER_EXTENSION]
    return Child(
        "the fresh server",
        [*command, "--port", str(port), *SERVE_ARGUMENTS],
        log,
        environment=server_environment(core),
    )


def _script(name: str) -> str:
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        raise DemoError(f"the command {name} is not installed beside {path.parent}/python; run make demo, or make test")
    return str(path)
