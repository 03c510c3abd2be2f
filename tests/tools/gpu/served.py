"""Real vLLM servers on GPUs, as users start them: with CUDA graphs and torch.compile, compared with fresh servers."""

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.e2e.servers import Load, Server, serving
from tests.support.tiny import make_model, save_checkpoint, train_steps
from tests.tools.gpu.modules import filled
from tests.tools.gpu.report import LeftOutError, Report
from trainer_side import Publisher
from vllm_delta_sync.engine import WORKER_EXTENSION

VERSIONS = 5
"""That are compared with fresh servers."""
BACK = 3
SLEEPS = 5
LARGE_SHARE = 0.25
"""Changed where staging has to take a while, or much memory."""
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
FLAGS = (
    *("--max-model-len", "256"),
    *("--max-num-seqs", "16"),
    *("--served-model-name", "tiny"),
    *("--gpu-memory-utilization", "0.5"),
    "--enable-sleep-mode",
)
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""Serves the routes for sleep and digests."""
SECONDS = 300.0


class ServedTrial:
    """A trainer on the first GPU, its run, and a server of some ranks that follows it.

    Attributes:
        seen: digests and outputs, by version.
    """

    def __init__(self, root: Path, ranks: int, quick: bool) -> None:
        root.mkdir()
        self.root, self.ranks, self.pauses = root, ranks, 10 if quick else 100
        self.compared = (VERSIONS,) if quick else range(VERSIONS + 1)
        self.flags = (*FLAGS, "--tensor-parallel-size", str(ranks))
        self.environment = {**DEVELOPMENT, "DELTA_SYNC_STATE_DIR": str(root / "state")}
        self.model = make_model("llama", seed=5, **SIZES).cuda()
        self.steps = train_steps(self.model, lr=3e-5)
        self.publisher = Publisher(self.model, str(root / "run"), base=self.save(0))
        self.seen: dict[int, dict[str, Any]] = {}

    def start(self, stack: ExitStack) -> str:
        command = [sys.executable, "-m", "vllm_delta_sync.cli", "serve", str(self.root / "v0"), *self.flags]
        command += ["--bucket", str(self.root / "run"), "--poll-seconds", "0.1"]
        log = self.root / "server.log"
        self.server = stack.enter_context(serving(log, command, self.environment, cold=True))
        self.server.wait_served(0, SECONDS)
        captured = self.server.log_lines("Graph capturing finished")
        assert captured, "no CUDA graphs were captured"
        return captured[0].partition("Graph capturing finished ")[2]

    def save(self, version: int) -> Path:
        return save_checkpoint(self.model, self.root / f"v{version}")

    def train(self) -> int:
        """A step of AdamW; the version that it makes."""
        next(self.steps)
        return self.publish()

    def change(self, share: float) -> int:
        """Change a share of all elements; the version that it makes."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + 0.02 * (torch.rand_like(parameter) < share))
        return self.publish()

    def publish(self) -> int:
        version = self.publisher.publish(step=0, wait=True).version
        self.publisher.flush()
        assert version is not None
        return version

    def expect_verified(self) -> None:
        answer = self.server.post("/delta_sync/verify").json()
        assert answer["verdict"] is True, answer

    # The checks

    def follow(self) -> str:
        self.seen[0] = look(self.server)
        for _ in range(VERSIONS):
            version = self.train()
            self.server.wait_served(version, SECONDS)
            self.expect_verified()
            self.save(version)
            self.seen[version] = look(self.server)
        assert self.seen[0]["outputs"] != self.seen[VERSIONS]["outputs"], "versions do not differ enough to tell"
        return f"{VERSIONS} versions, {len(self.seen[0]['digests'])} tensors"

    def rollback(self) -> str:
        answer = self.server.post("/delta_sync/rollback", {"version": BACK}).json()
        assert answer["served"]["version"] == BACK, answer
        assert look(self.server) == self.seen[BACK]
        self.server.post("/delta_sync/release")
        self.server.wait_served(VERSIONS, SECONDS)
        assert look(self.server) == self.seen[VERSIONS]
        return f"to version {BACK} and forwards to {VERSIONS}: weights, tokens and log-probs as before"

    def pause(self) -> str:
        found: dict[int, float] = {}
        with Load(self.server) as load:
            for _ in range(self.pauses):
                version = self.train()
                self.server.wait_served(version, SECONDS)
                recent = self.server.status()["recent"]
                found |= {commit["version"]: commit["timings_ms"]["pause"] for commit in recent}
        load.check()
        figures = [ms for version, ms in found.items() if version > VERSIONS]
        middle, worst = np.percentile(figures, [50, 99])
        return f"{len(figures)} pauses under load: p50 {middle:.1f} ms, p99 {worst:.1f} ms; {len(load.answers)} answers"

    def sleep(self) -> str:
        caught = 0
        for _ in range(SLEEPS):
            version, deadline = self.change(LARGE_SHARE), time.monotonic() + SECONDS
            while (status := self.server.status())["state"] != "staging" and served_by(status) != version:
                assert time.monotonic() < deadline, status
            assert self.server.post("/sleep?level=1").status_code == 200
            caught += served_by(self.server.status()) != version
            assert self.server.post("/wake_up").status_code == 200
            self.server.wait_served(version, SECONDS)
            self.expect_verified()
        if not caught:
            raise LeftOutError(f"staging was always over before the server slept, {SLEEPS} times")
        return f"{caught} of {SLEEPS} times before the version was served; awake, each was served"

    def out_of_memory(self) -> str:
        self.server.post("/delta_sync/hold")
        version, before = self.change(LARGE_SHARE), self.server.digests()
        said, deadline = "", time.monotonic() + SECONDS
        with ExitStack() as memory:
            for number in range(self.ranks):
                memory.enter_context(filled(torch.device("cuda", number)))
            self.server.post("/delta_sync/release")
            while not said:
                status = self.server.status()
                if served_by(status) == version:
                    said = "staged and committed all the same"
                elif (status["last_error"] or {}).get("kind") == "memory":
                    assert self.server.digests() == before
                    said = "refused as `memory`, weights unchanged; served when there was memory"
                assert time.monotonic() < deadline, status
                time.sleep(0.05)
        self.server.wait_served(version, SECONDS)
        self.expect_verified()
        return said

    def compare_fresh(self) -> str:
        tokens, largest = 0, 0.0
        unequal: list[str] = []
        for version in self.compared:
            seen = self.seen[version]
            checkpoint = self.root / f"v{version}"
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), *self.flags]
            command += ["--worker-extension-cls", WORKER_EXTENSION]
            log = self.root / f"fresh-{version}.log"
            with serving(log, command, DEVELOPMENT, cold=True) as server:
                fresh = look(server)
            unequal += [f"{name} of version {version}" for name in fresh if fresh[name] != seen[name]]
            for ours, theirs in zip(seen["outputs"], fresh["outputs"], strict=True):
                tokens += len(theirs["tokens"])
                pairs = zip(ours["logprobs"], theirs["logprobs"], strict=True)
                largest = max(largest, *(abs(one - other) for one, other in pairs))
        said = f"{len(self.compared)} versions, {tokens} tokens, largest difference of log-probs {largest:g}"
        assert not unequal, f"{', '.join(unequal)} differ; {said}"
        return f"weights, tokens and log-probs equal: {said}"


def look(server: Server) -> dict[str, Any]:
    """Digests of all weights, and greedy tokens with their log-probs."""
    return {"digests": server.digests(), "outputs": server.outputs()}


def served_by(status: dict[str, Any]) -> int | None:
    return status["served"] and int(status["served"]["version"])


def check_server(report: Report, root: Path, ranks: int, quick: bool) -> None:
    """Make all checks of this module on a server of some ranks. ``quick``: with fewer pauses and fresh servers."""
    made: list[ServedTrial] = []
    followed = False
    with ExitStack() as stack:

        def begin() -> str:
            trial = ServedTrial(root, ranks, quick)
            stack.callback(trial.publisher.close)
            made.append(trial)
            return trial.start(stack)

        at = f"server, TP {ranks}:"
        if report.check(f"{at} starts with CUDA graphs", begin):
            trial = made[0]
            followed = report.check(f"{at} follows AdamW steps", trial.follow)
            if followed:
                report.check(f"{at} rollback", trial.rollback)
            report.check(f"{at} pauses", trial.pause)
            report.check(f"{at} sleep in the middle of staging", trial.sleep)
            report.check(f"{at} staging without device memory", trial.out_of_memory)
    # Fresh servers take the memory that this one has given back.
    if followed:
        report.check(f"{at} equal to fresh servers", made[0].compare_fresh)
