"""A server from nothing but ``delta-sync serve --bucket URL``: no checkpoint, configuration or tokenizer of its own."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.fresh import MAX_TOKENS, PROMPTS, fresh_vllm
from tests.e2e.servers import serving
from tests.support.s3_store import serving as serving_s3
from tests.support.tiny import make_model, make_tokenizer, save_checkpoint, train_steps
from trainer_side import Publisher
from vllm_delta_sync import open_run

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("stores")]
DEADLINE = {"DELTA_SYNC_STORE_DEADLINE": "8"}


def test_a_server_starts_from_the_bucket_alone_and_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_s3() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        url = store.create_bucket("weights") + "/runs/alone"
        model = make_model("qwen3", seed=5)
        model.config.dtype = torch.bfloat16
        steps = train_steps(model, lr=3e-4)
        make_tokenizer().save_pretrained(tmp_path / "tokenizer")
        with Publisher(model, url, files=tmp_path / "tokenizer") as publisher:
            next(steps)
            publisher.publish(1, wait=True)
            # What the trainer has on its disk is nowhere near the server.
            for file in (tmp_path / "tokenizer").iterdir():
                file.unlink()
            home = tmp_path / "home"
            home.mkdir()
            program = str(Path(sys.executable).with_name("delta-sync"))
            command = [program, "serve", "--bucket", url, "--poll-seconds", "0.2"]
            # As small as README says for machines like the one that runs the tests.
            command += ["--enforce-eager", "--max-model-len", "256"]
            environment = {"XDG_CACHE_HOME": str(home / "cache"), "HOME": str(home), "VLLM_SERVER_DEV_MODE": "1"}
            environment |= {**store.environment, **DEADLINE}
            with serving(home, tmp_path / "server.log", command, environment) as server:
                server.wait_served(1)
                assert server.status()["commits"] == 0, "version 1 was loaded, not patched in"
                loaded = server.digests()
                first = save_checkpoint(model, tmp_path / "first")
                assert [entry["id"] for entry in server.get("/v1/models").json()["data"]] == ["alone"]
                next(steps)
                publisher.publish(2, wait=True)
                server.wait_served(2)
                # The store answers nobody: the server goes on with what it serves, and with the run once that is over.
                os.kill(store.pid, signal.SIGSTOP)
                try:
                    assert server.wait_error("deadline")["served"]["version"] == 2
                    assert server.post("/delta_sync/verify").json()["verdict"] is True
                    request = {"model": "alone", "temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
                    answers = [
                        server.post("/v1/completions", {**request, "prompt": prompt, "return_token_ids": True}).json()
                        for prompt in PROMPTS
                    ]
                finally:
                    os.kill(store.pid, signal.SIGCONT)
                second = save_checkpoint(model, tmp_path / "second")
                next(steps)
                publisher.publish(3, wait=True)
                assert server.wait_served(3)["last_error"] is None
        with open_run(url) as run:
            kept = sorted(item.name for item in run.info.files)
            written = home / "cache" / "vllm-delta-sync" / "models" / run.info.run
        assert sorted(path.name for path in written.iterdir()) == kept
    tokens = [answer["choices"][0]["token_ids"] for answer in answers]
    fresh = fresh_vllm(tmp_path, [first, second])
    assert loaded == fresh[0]["digests"]
    assert tokens == [output["tokens"] for output in fresh[1]["outputs"]]
