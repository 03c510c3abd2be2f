"""Tag a version, roll a running server back to it, hold, release, and compare the tag with the head (A/B).

    python examples/rollback_ab.py      # starts a small model and a server; about 2 minutes on a CPU
    python examples/rollback_ab.py --server http://127.0.0.1:8000 --bucket s3://models/runs/first --prompt "3 + 4 ="

With --server nothing is published: the run must have at least two versions. At the end the server follows again what it
followed before. One server answers for A and then for B; with two, give each its target and split the traffic.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer_side import Publisher
from vllm_delta_sync import DeltaSyncError, open_run

TAG = "best"
WORDS = ("<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz")
PROGRAM = str(Path(sys.executable).with_name("delta-sync"))
START_SECONDS = 300


class Control:
    """The control routes of a server that follows a run; each returns the resulting status."""

    def __init__(self, url: str) -> None:
        token = os.environ.get("DELTA_SYNC_ADMIN_TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False)

    def request(self, method: str, path: str, **body: Any) -> Any:
        """Send a request and return its JSON; exit if it is an error."""
        response = self.client.request(method, path, json=body or None)
        if response.status_code >= 400:
            sys.exit(f"{method} {path}: HTTP {response.status_code}: {response.text}")
        return response.json()

    def order(self, name: str, **body: Any) -> None:
        """Give an order and print what the server serves afterwards."""
        status = self.request("POST", f"/delta_sync/{name}", **body)
        show = f"{name} {body}" if body else name
        version = status["served"] and status["served"]["version"]
        print(f"{show:32} serves version {version} of {status['head']['version']}, holding: {status['holding']}")

    def ask(self, prompt: str) -> str:
        """The greedy continuation, with the versions of the weights that wrote it."""
        model = self.request("GET", "/v1/models")["data"][0]["id"]
        answer = self.request("POST", "/v1/completions", model=model, prompt=prompt, max_tokens=8, temperature=0)
        versions = sorted({span["version"] for span in answer["delta_sync"]["spans"]})
        return f"{answer['choices'][0]['text']!r}, written by version {', '.join(map(str, versions))}"


def tour(control: Control, bucket: str, prompt: str, trainer: "Trainer | None") -> None:
    """Run all steps of this example."""
    if trainer:
        for _ in range(3):
            trainer.step(control)
    with open_run(bucket) as run:
        older = run.head().version - 1
    subprocess.run([PROGRAM, "tag", "set", TAG, "--bucket", bucket, "--version", str(older)], check=True)

    control.order("rollback", version=older)
    if trainer:
        trainer.step()  # the server is held, so it stays at its version
        waited = control.client.get("/delta_sync/wait", params={"version": trainer.version, "timeout": 5})
        print(f"while it holds, waiting for version {trainer.version} is HTTP {waited.status_code}")
    control.order("release")
    control.order("sync")
    control.order("hold")
    control.order("release")

    for name, target in (("A", f"tag:{TAG}"), ("B", "head")):
        control.order("target", target=target)
        print(f"{name}: {prompt!r} → {control.ask(prompt)}")


class Trainer:
    """A stand-in for training: each step changes the weights slightly at random, and publishes them."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[0]))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        files = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=WORDS[0], eos_token=WORDS[1])
        files.save_pretrained(folder / "tokenizer")
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = Qwen3Config(
            vocab_size=len(WORDS), num_key_value_heads=2, head_dim=32, eos_token_id=1, dtype="bfloat16", **sizes
        )
        self._model = Qwen3ForCausalLM(config).to(torch.bfloat16)
        self.publisher = Publisher(self._model, str(folder / "run"), files=folder / "tokenizer")
        self.bucket, self.version = self.publisher.url, 0

    @torch.no_grad()
    def step(self, control: Control | None = None) -> None:
        """Publish a version; with a server, wait until it serves that version."""
        for parameter in self._model.parameters():
            parameter += 0.03 * torch.randn_like(parameter)
        self.publisher.publish(step=self.version + 1, wait=True)
        self.publisher.flush()
        self.version = self.publisher.version
        print(f"published version {self.version}")
        if control:
            control.request("GET", f"/delta_sync/wait?version={self.version}&timeout=60")


@contextmanager
def serving(bucket: str, folder: Path) -> Iterator[str]:
    """URL of a server that starts from the bucket alone, and ends with the block."""
    log = folder / "server.log"
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
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
            while True:
                try:
                    if httpx.get(f"{url}/delta_sync/ready", timeout=5, trust_env=False).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.5)
            yield url
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
    parser.add_argument("--bucket", help="the run that --server follows (default: $DELTA_SYNC_BUCKET)")
    parser.add_argument("--prompt", default="a b c", help="prompt to complete (default: 'a b c')")
    options = parser.parse_args()
    if options.bucket and not options.server:
        parser.error("--bucket goes with --server: nothing is published into a run of yours")
    bucket = options.bucket or os.environ.get("DELTA_SYNC_BUCKET")
    if options.server and not bucket:
        parser.error("--server needs --bucket, the run that it follows")
    try:
        if options.server and bucket:
            control = Control(options.server)
            before = control.request("GET", "/delta_sync/status")
            if before["holding"]:
                sys.exit("another client's order holds the server; release it first")
            try:
                tour(control, bucket, options.prompt, None)
            finally:
                control.order("target", target=before["target"])
            return 0
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(Path(folder))
            print("starting a server from the bucket alone", flush=True)
            with trainer.publisher, serving(trainer.bucket, Path(folder)) as url:
                tour(Control(url), trainer.bucket, options.prompt, trainer)
    except DeltaSyncError as error:
        print(f"{error.kind}: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
