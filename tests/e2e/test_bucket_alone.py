"""A server from nothing but ``delta-sync serve --bucket URL``: no checkpoint, configuration or tokenizer of its own."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.fresh import MAX_TOKENS, PROMPTS, fresh_vllm
from tests.e2e.servers import Server, serving
from tests.support.s3_store import S3Server
from tests.support.s3_store import serving as serving_s3
from tests.support.tiny import make_model, make_tokenizer, save_checkpoint, train_steps
from trainer_side import Publisher
from vllm_delta_sync import open_run

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("stores")]
DEADLINE = {"DELTA_SYNC_STORE_DEADLINE": "8"}


@contextmanager
def silent(store: S3Server) -> Iterator[None]:
    """The store answers nobody."""
    os.kill(store.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(store.pid, signal.SIGCONT)


def follow(root: Path, url: str, environment: dict[str, str], check: Callable[[Server], Any], *, cold: bool) -> None:
    """Start from version 1, follow to version 2, which is checked then as well, and on to version 3."""
    model = make_model("qwen3", seed=5)
    model.config.dtype = torch.bfloat16
    steps = train_steps(model, lr=3e-4)
    make_tokenizer().save_pretrained(root / "tokenizer")
    checkpoints = []
    with Publisher(model, url, files=root / "tokenizer") as publisher:

        def publish(step: int) -> None:
            next(steps)
            publisher.publish(step, wait=True)
            checkpoints.append(save_checkpoint(model, root / f"v{step}"))

        publish(1)
        # What the trainer has on its disk is nowhere near the server.
        for file in (root / "tokenizer").iterdir():
            file.unlink()
        home = root / "home"
        home.mkdir()
        program = str(Path(sys.executable).with_name("delta-sync"))
        command = [program, "serve", "--bucket", url, "--poll-seconds", "0.2"]
        # As small as README says for machines like the one that runs the tests.
        command += ["--enforce-eager", "--max-model-len", "256"]
        environment = {
            "XDG_CACHE_HOME": str(home / "cache"),
            "HOME": str(home),
            "VLLM_SERVER_DEV_MODE": "1",
            **environment,
        }
        with serving(home, root / "server.log", command, environment, cold=cold) as server:
            server.wait_served(1)
            assert server.status()["commits"] == 0, "version 1 was loaded, not patched in"
            served = [server.digests()]
            assert [entry["id"] for entry in server.get("/v1/models").json()["data"]] == ["alone"]
            publish(2)
            server.wait_served(2)
            assert server.post("/delta_sync/verify").json()["verdict"] is True
            check(server)
            publish(3)
            assert server.wait_served(3)["last_error"] is None
            served.append(server.digests())
            answers = tokens(server)
    with open_run(url) as run:
        kept = sorted(item.name for item in run.info.files)
        written = home / "cache" / "vllm-delta-sync" / "models" / run.info.run
    assert sorted(path.name for path in written.iterdir()) == kept
    first, last = fresh_vllm(root, [checkpoints[0], checkpoints[2]])
    assert served == [first["digests"], last["digests"]]
    assert answers == [output["tokens"] for output in last["outputs"]]


def tokens(server: Server) -> list[list[int]]:
    request = {"model": "alone", "temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    answers = [
        server.post("/v1/completions", {**request, "prompt": prompt, "return_token_ids": True}) for prompt in PROMPTS
    ]
    return [answer.json()["choices"][0]["token_ids"] for answer in answers]


@pytest.mark.slow
def test_a_server_starts_from_the_bucket_alone_and_follows(tmp_path: Path) -> None:
    follow(tmp_path, str(tmp_path / "runs" / "alone"), {}, tokens, cold=False)


@pytest.mark.slow
def test_it_does_from_s3_and_survives_that_the_store_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_s3() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)

        def check(server: Server) -> None:
            before = tokens(server)
            with silent(store):
                assert server.wait_error("deadline")["served"]["version"] == 2
                assert tokens(server) == before

        url = store.create_bucket("weights") + "/runs/alone"
        # Not forked: the S3 client's threads, which read the bucket before vLLM starts, would be missing in its ranks.
        follow(tmp_path, url, {**store.environment, **DEADLINE}, check, cold=True)
