"""Prove that a server has the weights of a checkpoint, and answers like a vLLM that loaded it afresh.

    python examples/prove_served.py --server http://127.0.0.1:8000 --bucket BUCKET --checkpoint DIR --prompts FILE

BUCKET is the run that the server follows, DIR the checkpoint that the trainer saved after the last version, FILE a JSON
list of prompts, each a list of token ids. The script

1. lets the server rescan its weights and compares their fingerprint with that of the run's newest version,
2. compares that version with the checkpoint, bit for bit,
3. starts `vllm serve` on the checkpoint, and compares greedy tokens and log-probs of both, exactly. What follows ``--``
   goes to `vllm serve`: give it what the server was started with. On a CPU also give it as many cores (--core), since
   kernels round by the number of threads.

Exit status: 0 all are equal, 1 something differs or failed, 2 wrong usage.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file

from vllm_delta_sync import DeltaSyncError, open_run

MAX_TOKENS = 24
START_SECONDS, WAIT_SECONDS, END_SECONDS = 600.0, 120.0, 10.0


def greedy(server: httpx.Client, prompts: Sequence[list[int]]) -> list[tuple[list[int], list[float]]]:
    """(tokens, log-probs) of the answer to each prompt, one after the other: kernels round by the shape of a batch."""
    body = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "logprobs": 0, "return_token_ids": True}
    found = []
    for prompt in prompts:
        choice = server.post("/v1/completions", json=body | {"prompt": prompt}).raise_for_status().json()["choices"][0]
        found.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return found


def same_weights(bucket: str, checkpoint: Path) -> tuple[bool, str]:
    """Whether the run's newest version is the checkpoint, bit for bit; and its fingerprint.

    Reading a version checks its tensors against its fingerprint.
    """
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        stored |= load_file(file)
    with open_run(bucket) as run:
        fingerprint = run.head().fingerprint
        published = dict(run.tensors())
    same = published.keys() == stored.keys() and all(
        torch.equal(published[name].view(torch.uint8), stored[name].view(torch.uint8)) for name in stored
    )
    return same, fingerprint


def fresh_answers(options: argparse.Namespace, prompts: Sequence[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Greedy answers of a vLLM started for this on the checkpoint. It ends with the call."""
    with socket.socket() as probe:  # finds a free port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # It follows no run, but has the worker extension, for equal kernels.
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(options.checkpoint)]
    command += ["--worker-extension-cls", "vllm_delta_sync.engine.WorkerExtension", *options.arguments]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    settings = {"VLLM_NO_USAGE_STATS": "1"}
    if options.core is not None:
        settings |= {"VLLM_CPU_OMP_THREADS_BIND": str(options.core), "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = Path(options.log)
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | settings, start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_SECONDS, trust_env=False) as server:
            deadline = time.monotonic() + START_SECONDS
            while True:
                with suppress(httpx.TransportError):
                    if server.get("/health").is_success:
                        return greedy(server, prompts)
                if process.poll() is not None or time.monotonic() > deadline:
                    tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
                    sys.exit(f"prove_served: the fresh vLLM did not start; the end of {log}:\n{tail}")
                time.sleep(0.2)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # any child processes that are left
        process.wait()


def prove(options: argparse.Namespace) -> bool:
    """Compare, print a line for each claim, and write the outcome if asked to."""
    prompts = json.loads(options.prompts.read_text())
    headers = {"Authorization": f"Bearer {token}"} if (token := os.environ.get("DELTA_SYNC_ADMIN_TOKEN")) else {}
    with httpx.Client(base_url=options.server, headers=headers, timeout=WAIT_SECONDS, trust_env=False) as server:
        scan = server.post("/delta_sync/verify").raise_for_status().json()
        same, fingerprint = same_weights(options.bucket, options.checkpoint)
        running = greedy(server, prompts)
    print("starting a fresh vLLM on the checkpoint, to compare answers", flush=True)
    fresh = fresh_answers(options, prompts)
    pairs = list(zip(running, fresh, strict=True))
    differences = [abs(a - b) for one, two in pairs for a, b in zip(one[1], two[1], strict=False)]
    count, largest = sum(len(tokens) for tokens, _ in running), max(differences, default=0.0)
    claims = {
        f"the server's weights, rescanned, are the run's newest version ({fingerprint})": bool(scan["verdict"])
        and scan["fingerprint"] == fingerprint,
        "that version is the trainer's checkpoint, bit for bit": same,
        f"greedy tokens equal to a freshly loaded vLLM's ({count} tokens)": all(one[0] == two[0] for one, two in pairs),
        f"their log-probs equal (largest difference {largest:g})": all(one[1] == two[1] for one, two in pairs),
    }
    for claim, holds in claims.items():
        print("✓" if holds else "✗", claim)
    if options.out:
        options.out.write_text(json.dumps(claims, indent=2, ensure_ascii=False) + "\n")
    return all(claims.values())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options for ``prove``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--server", required=True, metavar="URL", help="address of the server that follows the run")
    add("--bucket", required=True, metavar="URL", help="the run")
    add("--checkpoint", required=True, type=Path, metavar="DIR", help="the trainer's checkpoint, in the served dtypes")
    add("--prompts", required=True, type=Path, metavar="FILE", help="JSON list of prompts, each a list of token ids")
    add("--core", type=int, help="on a CPU: the core that the fresh vLLM computes on (default: as vLLM chooses)")
    add("--log", type=Path, default=Path("fresh-server.log"), help="log of the fresh vLLM (default: fresh-server.log)")
    add("--out", type=Path, metavar="FILE", help="also write the outcome as JSON")
    add("arguments", nargs="*", metavar="-- ARGUMENT", help="for `vllm serve`, as the server has them")
    return parser.parse_args(arguments)


def main() -> int:
    """Exit status: see ``--help``."""
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return 0 if prove(options) else 1
    except KeyboardInterrupt:
        print("interrupted; the fresh vLLM has ended")
        return 130
    except (DeltaSyncError, OSError, httpx.HTTPError) as error:
        print(f"prove_served: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
