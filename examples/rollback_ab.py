"""Tag a version, roll a running server back to it, hold, release, and compare the tag with the head (A/B).

    python examples/rollback_ab.py      # starts a small model and a server; about 2 minutes on a CPU
    python examples/rollback_ab.py --server http://127.0.0.1:8000 --bucket s3://models/runs/first --prompt "3 + 4 ="

With --server nothing is published: the run must have at least two versions. At the end the tag is removed, and the
server follows again what it followed before. One server answers for A and then for B; with two, give each its target
and split the traffic.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer_side import Publisher

PROGRAM = str(Path(sys.executable).with_name("delta-sync"))
TAG = "rollback-ab"  # no name that other servers of the run may follow


def connect(url: str) -> httpx.Client:
    token = os.environ.get("DELTA_SYNC_ADMIN_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False)


def order(server: httpx.Client, name: str, **body: Any) -> None:
    """Give an order to a server that follows a run, and print what it serves afterwards."""
    status = server.post(f"/delta_sync/{name}", json=body or None).raise_for_status().json()
    served = status["served"] and status["served"]["version"]
    print(name, body or "", f"→ serves version {served} of {status['head']['version']}, holding: {status['holding']}")


def tour(server: httpx.Client, bucket: str, prompt: str, publish: Callable[[], int] | None = None) -> None:
    """Run all steps of this example; ``publish`` makes the next version."""
    if publish:
        for _ in range(3):
            server.get(f"/delta_sync/wait?version={publish()}&timeout=60").raise_for_status()
    before = server.get("/delta_sync/status").raise_for_status().json()
    if before["holding"]:
        sys.exit("another client's order holds the server; release it first")
    if before["head"] is None or before["head"]["version"] < 1:
        sys.exit("the run needs at least two versions")
    older = before["head"]["version"] - 1
    subprocess.run([PROGRAM, "tag", "set", TAG, "--bucket", bucket, "--version", str(older)], check=True)
    try:
        order(server, "rollback", version=older)
        if publish:
            version = publish()  # the server is held, so it stays at its version
            waited = server.get(f"/delta_sync/wait?version={version}&timeout=5")
            print(f"while it holds, waiting for version {version} is HTTP {waited.status_code}")
        for name in ("release", "sync", "hold", "release"):
            order(server, name)

        for name, target in (("A", f"tag:{TAG}"), ("B", "head")):
            order(server, "target", target=target)
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
            answer = server.post("/v1/completions", json=body).raise_for_status().json()
            versions = sorted({span["version"] for span in answer["delta_sync"]["spans"]})
            print(f"{name}: {prompt!r} → {answer['choices'][0]['text']!r}, written by version", *versions)
    finally:
        order(server, "target", target=before["target"])
        subprocess.run([PROGRAM, "tag", "rm", TAG, "--bucket", bucket], check=True)


def small_model(folder: str) -> Qwen3ForCausalLM:
    """A model of random weights that knows letters; its tokenizer is written to the folder."""
    ids = {word: number for number, word in enumerate(["<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"])}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": len(ids)}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    return Qwen3ForCausalLM(Qwen3Config(eos_token_id=1, dtype="bfloat16", **sizes, **heads)).to(torch.bfloat16)


@torch.no_grad()
def train(model: Qwen3ForCausalLM, publisher: Publisher) -> int:
    """Stands in for training: change the weights slightly at random, publish them, and return the version."""
    for parameter in model.parameters():
        parameter += 0.03 * torch.randn_like(parameter)
    publisher.publish(step=publisher.version + 1, wait=True)
    publisher.flush()
    print(f"published version {publisher.version}")
    return publisher.version


@contextmanager
def serving(bucket: str, folder: Path) -> Iterator[httpx.Client]:
    """Client of a server that starts from the bucket alone, and ends with the block."""
    log, deadline = folder / "server.log", time.monotonic() + 300
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [PROGRAM, "serve", "--bucket", bucket, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", "64", "--state-dir", str(folder)]  # standing orders go with the folder
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"} | os.environ
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True) as process,
    ):
        try:
            with connect(f"http://127.0.0.1:{port}") as server:
                while True:
                    with suppress(httpx.TransportError):
                        if server.get("/delta_sync/ready", timeout=5).is_success:
                            break
                    if process.poll() is not None or time.monotonic() > deadline:
                        sys.exit(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")
                    time.sleep(0.5)
                yield server
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # any child processes that are left


def main() -> int:
    """Exit status: 0 done, 2 wrong usage, otherwise that of the error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="URL of a server that follows a run (default: start one)")
    parser.add_argument("--bucket", help="the run that --server follows")
    parser.add_argument("--prompt", default="a b c", help="prompt to complete (default: 'a b c')")
    options = parser.parse_args()
    if bool(options.server) != bool(options.bucket):
        parser.error("--server and --bucket go together: nothing is published into a run of yours")
    try:
        if options.server:
            tour(connect(options.server), options.bucket, options.prompt)
        else:
            with tempfile.TemporaryDirectory() as folder:
                model = small_model(f"{folder}/tokenizer")
                print("starting a server from the bucket alone", flush=True)
                with Publisher(model, f"{folder}/run", files=f"{folder}/tokenizer") as publisher:
                    with serving(publisher.url, Path(folder)) as server:
                        tour(server, publisher.url, options.prompt, partial(train, model, publisher))
    except httpx.HTTPError as error:
        reason = error.response.text if isinstance(error, httpx.HTTPStatusError) else error
        sys.exit(f"{error.request.url}: {reason}")
    except subprocess.CalledProcessError as error:
        return error.returncode  # the command has printed why
    return 0


if __name__ == "__main__":
    sys.exit(main())
