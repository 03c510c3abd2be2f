"""A server from nothing but ``delta-sync serve --bucket URL``: no checkpoint, configuration or tokenizer of its own."""

import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.fresh import fresh_vllm
from tests.e2e.servers import serving
from tests.support.tiny import make_model, make_tokenizer, save_checkpoint, train_steps
from trainer_side import Publisher
from vllm_delta_sync import open_run

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("stores")]


@pytest.mark.slow
def test_a_server_starts_from_the_bucket_alone_and_follows(tmp_path: Path) -> None:
    root, url = tmp_path, str(tmp_path / "runs" / "alone")
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
        environment = {"XDG_CACHE_HOME": str(home / "cache"), "HOME": str(home), "VLLM_SERVER_DEV_MODE": "1"}
        with serving(root / "server.log", command, environment) as server:
            server.wait_served(1)
            assert server.status()["commits"] == 0, "version 1 was loaded, not patched in"
            served = [server.digests()]
            assert [entry["id"] for entry in server.get("/v1/models").json()["data"]] == ["alone"]
            publish(2)
            server.wait_served(2)
            assert server.post("/delta_sync/verify").json()["verdict"] is True
            publish(3)
            assert server.wait_served(3)["last_error"] is None
            served.append(server.digests())
            answers = server.outputs("alone")
    with open_run(url) as run:
        kept = sorted(item.name for item in run.info.files)
        written = home / "cache" / "vllm-delta-sync" / "models" / run.info.run
    assert sorted(path.name for path in written.iterdir()) == kept
    first, last = fresh_vllm(root, [checkpoints[0], checkpoints[2]])
    assert served == [first["digests"], last["digests"]]
    assert answers == last["outputs"]
