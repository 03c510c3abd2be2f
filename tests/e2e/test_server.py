"""Real ``vllm serve`` on the CPU: follows real training, bit for bit, and survives what it must refuse."""

import itertools
import json
import threading
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from tests.e2e import warm
from tests.e2e.fresh import MAX_TOKENS, PROMPTS
from tests.e2e.servers import Server, delta_sync_serve, plain_vllm_serve, serving
from tests.support.forge import BAD_VERSIONS
from tests.support.tiny import make_model, save_checkpoint, train_steps
from trainer_side import Publisher
from vllm_delta_sync.engine.compat import allow_list

VERSIONS = 5
pytestmark = pytest.mark.e2e


def outputs_of(server: Server) -> list[dict[str, Any]]:
    """Greedy tokens and log probabilities, in the form of tests/e2e/fresh.py."""
    outputs = []
    for prompt in PROMPTS:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        choice = server.post("/v1/completions", body).json()["choices"][0]
        outputs.append({"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]})
    return outputs


def digests_of(server: Server) -> dict[str, str]:
    """SHA-256 of every runtime parameter, from vLLM's own weight checker."""
    found: dict[str, str] = server.post("/weight_checker", {"action": "checksum"}).json()["checksums"]
    return {name.removeprefix("dp0:pp0:pcp0:tp0:"): digest for name, digest in found.items()}


def fresh_vllm(root: Path, checkpoints: list[Path]) -> dict[str, Any]:
    """What a fresh vLLM in another process makes of the checkpoints."""
    out = root / "fresh.json"
    done = warm.run("tests.e2e.fresh", str(out), *map(str, checkpoints), seconds=300)
    assert done.status == 0, done.said[-4000:]
    results: dict[str, Any] = json.loads(out.read_text())
    return results


class Load:
    """Two threads of one long request after the other, from the start of the block, once they are at it, to its end."""

    def __init__(self, server: Server, responses: list[Any]) -> None:
        self._server = server
        self._stop = threading.Event()
        self._answered = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(2)]
        self._responses = responses

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()
        # The next request follows at once, so that one is in flight from now on.
        assert self._answered.wait(120)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _ask(self) -> None:
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 230, "temperature": 0, "ignore_eos": True}
        # One client: making one takes as long as half of such a request, and nothing is in flight meanwhile.
        with httpx.Client(base_url=self._server.url, timeout=120) as client:
            while not self._stop.is_set():
                self._responses.append(client.post("/v1/completions", json=body))
                self._answered.set()


def command_of(family: str, base: Path, url: str, notice: str) -> tuple[list[str], dict[str, str]]:
    """``delta-sync serve`` for one family, plain ``vllm serve`` for the other."""
    if family == "qwen3":
        return delta_sync_serve(base, "--bucket", url, "--notice", notice, "--poll-seconds", "0.5"), {}
    environment = {
        "VLLM_PLUGINS": allow_list(None),
        "DELTA_SYNC_BUCKET": url,
        "DELTA_SYNC_NOTICE": notice,
        "DELTA_SYNC_POLL_SECONDS": "0.5",
    }
    return plain_vllm_serve(base, "--worker-extension-cls", "vllm_delta_sync.engine.WorkerExtension"), environment


@pytest.mark.parametrize("family", ["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
def test_follows_training_bit_for_bit(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    base = save_checkpoint(model, tmp_path / "base")
    url = str(tmp_path / "run")
    steps = train_steps(model, lr=3e-5)
    codec: Literal["auto", "context"] = "auto" if family == "qwen3" else "context"
    with Publisher(model, bucket=url, base=base, notice="tcp://127.0.0.1:*", codec=codec) as publisher:
        command, environment = command_of(family, base, url, str(publisher.notice_address))
        environment["VLLM_SERVER_DEV_MODE"] = "1"
        with serving(base, tmp_path / "server.log", command, environment) as server:
            server.wait_served(0)
            served: dict[str, dict[str, Any]] = {
                str(base): {"digests": digests_of(server), "outputs": outputs_of(server)}
            }
            checkpoints = [base]
            responses: list[Any] = []
            for version in range(1, VERSIONS + 1):
                next(steps)
                with Load(server, responses):
                    result = publisher.publish(step=version, wait=True)
                    assert result.version == version
                    status = server.wait_served(version)
                assert status["served"]["fingerprint"] == status["head"]["fingerprint"]
                checkpoints.append(save_checkpoint(model, tmp_path / f"v{version}"))
                served[str(checkpoints[-1])] = {"digests": digests_of(server)}
            served[str(checkpoints[-1])]["outputs"] = outputs_of(server)
            check_in_flight(responses)
            outcome = server.post("/delta_sync/verify").json()
            assert outcome["verdict"] is True
            assert outcome["fingerprint"] == server.status()["head"]["fingerprint"]
            if family == "qwen3":
                check_answers(server)
                check_rollback(server, [served[str(checkpoint)]["digests"] for checkpoint in checkpoints])
                check_refusals(server, Path(url))
                next(steps)
                publisher.publish(step=VERSIONS + 1, wait=True)
                server.wait_served(VERSIONS + 1)
                assert server.post("/delta_sync/verify").json()["verdict"] is True
    assert served == fresh_vllm(tmp_path, checkpoints)


def check_in_flight(responses: list[Any]) -> None:
    """Requests that met commits finished, and say which weights sampled which of their tokens."""
    crossed = 0
    for response in responses:
        body = response.json()
        assert body["usage"]["completion_tokens"] == 230
        spans = body["delta_sync"]["spans"]
        assert [spans[0]["start"], spans[-1]["end"]] == [0, 230]
        assert all(left["end"] == right["start"] for left, right in itertools.pairwise(spans))
        versions = [span["version"] for span in spans]
        assert versions == sorted(set(versions))
        assert int(response.headers["x-delta-sync-version"]) <= versions[0]
        crossed += len(spans) > 1
    assert crossed, f"no request of {len(responses)} was in flight across a commit"


def check_answers(server: Server) -> None:
    """Header and spans of plain, several-prompt, several-choice and chat requests; streams are in test_spans.py."""
    body = {"model": "tiny", "prompt": ["the", "fox"], "n": 2, "max_tokens": 5, "ignore_eos": True}
    response = server.post("/v1/completions", body)
    assert response.headers["x-delta-sync-version"] == str(VERSIONS)
    assert response.json()["delta_sync"] == {
        "run": server.status()["run"],
        "spans": [{"index": index, "version": VERSIONS, "start": 0, "end": 5} for index in range(4)],
    }
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "fox"}],
        "max_tokens": 4,
        "ignore_eos": True,
    }
    answer = server.post("/v1/chat/completions", chat)
    assert answer.json()["delta_sync"]["spans"] == [{"index": 0, "version": VERSIONS, "start": 0, "end": 4}]
    stream = server.post("/v1/completions", {**body, "stream": True})
    assert stream.headers["x-delta-sync-version"] == str(VERSIONS)
    assert "[DONE]" in stream.text
    assert server.get("/delta_sync/wait", params={"version": 99, "timeout": 0.2}).status_code == 408
    assert server.post("/delta_sync/sync", {"version": 99}).status_code == 404
    assert server.post("/delta_sync/sync", {"wersion": 2}).status_code == 400
    refused = server.post("/delta_sync/sync", {}, headers={"Origin": "http://example.invalid"})
    assert refused.status_code == 403


def check_rollback(server: Server, digests: list[dict[str, str]]) -> None:
    """Back to versions in the undo log, held there, and forward again on release."""
    assert server.status()["undo"] == list(reversed(range(VERSIONS)))
    assert server.post("/delta_sync/rollback", {"version": 99}).json()["error"]["kind"] == "not_found"
    for route, version in (("rollback", VERSIONS - 2), ("sync", 1)):
        status = server.post(f"/delta_sync/{route}", {"version": version}).json()
        assert (status["served"]["version"], status["state"]) == (version, "held")
        assert digests_of(server) == digests[version]
        body = {"model": "tiny", "prompt": "fox", "max_tokens": 3, "ignore_eos": True}
        spans = server.post("/v1/completions", body).json()["delta_sync"]["spans"]
        assert [span["version"] for span in spans] == [version]
    assert server.post("/delta_sync/sync", {}).json()["error"]["kind"] == "busy"
    assert server.post("/delta_sync/release").json()["holding"] is False
    server.wait_served(VERSIONS)
    assert server.post("/delta_sync/hold").json()["state"] == "held"
    assert server.post("/delta_sync/release").json()["state"] == "idle"
    assert digests_of(server) == digests[VERSIONS]


def check_refusals(server: Server, run: Path) -> None:
    """Each bad version is refused with one error in status while the server answers as before."""
    before, answers = digests_of(server), outputs_of(server)
    for bad in BAD_VERSIONS:
        forgery = bad.write(run)
        answer = server.post("/delta_sync/sync", {})
        assert answer.json()["error"]["kind"] == bad.kind, (bad.name, answer.text)
        status = server.status()
        assert status["served"]["version"] == VERSIONS
        assert status["last_error"] == answer.json()["error"]
        assert digests_of(server) == before, bad.name
        forgery.remove()
    assert server.post("/delta_sync/sync", {}).json()["last_error"] is None
    assert outputs_of(server) == answers
