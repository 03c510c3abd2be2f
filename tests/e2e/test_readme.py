"""The quick start's trainer, server and requests, as they stand there; only places and ports are others."""

import json
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.docs.test_docs import ROOT, SHARED, named, run_python, trainer_of_the_readme
from tests.e2e import warm
from tests.e2e.servers import Server, serving
from tests.support.answers import closed_port
from tests.support.commands import delta_sync
from tests.support.tiny import make_model, save_checkpoint
from vllm_delta_sync import open_run

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("readme")]

MODEL = "Qwen3-0.6B"
SMALL = "--enforce-eager --max-model-len 256"
"""What the page adds on a small machine without a GPU; ``serving`` sets the variable that goes with it."""
URL = "http://127.0.0.1:8000"


def curled(server: Server, line: str) -> httpx.Response:
    """Send the request of a ``curl`` command line."""
    words = shlex.split(line, comments=True)
    assert words[0] == "curl"
    headers, body, method = {}, None, "GET"
    url = next(word for word in words if word.startswith(f"{URL}/"))
    for flag, value in pairwise(words):
        if flag == "-H":
            name, _, content = value.partition(": ")
            headers[name] = content
        elif flag == "-d":
            method, body = "POST", value
        elif flag == "-X":
            method = value
    path = url.removeprefix(URL)
    return httpx.request(method, server.url + path, headers=headers, content=body, timeout=300, verify=False)


def lines(document: str, name: str) -> list[str]:
    """Command lines of a named block, continued lines joined."""
    return named(document, name).replace("\\\n", " ").splitlines()


def test_trainer_server_requests_and_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_checkpoint(make_model("qwen3"), tmp_path / MODEL)
    shared = str(tmp_path / "shared")
    trainer = trainer_of_the_readme(tmp_path / "shared")
    said = run_python(trainer, tmp_path)
    last = int(re.findall(r"range\(1, (\d+)\)", trainer)[0]) - 1
    assert re.findall(r"^step (\d+): version (\d+), ", said, re.MULTILINE) == [
        (str(step), str(step)) for step in range(1, last + 1)
    ]
    with open_run(f"{shared}/first-run") as run:
        assert run.manifest(0).kind == "reference"
        assert run.verify(checkpoint).head == last
    assert f"head={last}" in run_python(named("docs/runs.md", "reader").replace(SHARED, shared), tmp_path)
    (serve,) = lines("README.md", "server")
    serve = serve.replace(SHARED, shared).replace(":5555", f":{closed_port()}").replace("--port 8000", SMALL)
    assert SMALL in (ROOT / "docs/first-run.md").read_text()
    _, verb, model, *flags = shlex.split(serve)
    assert (verb, model) == ("serve", MODEL)
    program = str(Path(sys.executable).with_name("delta-sync"))
    command = [program, verb, str(checkpoint), *flags, "--served-model-name", MODEL]
    with serving(tmp_path / "server.log", command, {}) as server:
        server.wait_served(last)
        (completion,) = lines("README.md", "completion")
        answer = curled(server, completion)
        assert answer.headers["x-delta-sync-version"] == str(last)
        assert answer.json()["delta_sync"]["spans"] == [{"index": 0, "version": last, "start": 0, "end": 8}]
        (status,), (verify,) = lines("docs/first-run.md", "status"), lines("docs/first-run.md", "verify")
        assert curled(server, status).json()["served"]["version"] == last
        assert curled(server, verify).json()["verdict"]
        rollback, release = lines("docs/first-run.md", "rollback")
        wanted = json.loads(shlex.split(rollback, comments=True)[-1])["version"]
        assert curled(server, rollback).status_code == 200
        assert server.status()["served"]["version"] == wanted < last
        assert curled(server, release).status_code == 200
        assert server.wait_served(last)["served"]["version"] == last
        for line in lines("README.md", "operate"):
            words = shlex.split(line.replace(SHARED, shared).replace(URL, server.url), comments=True)
            done = delta_sync(*words[1:])
            assert (words[0], done.code) == ("delta-sync", 0), done
        assert server.wait_served(last)["served"]["version"] == last
    assert open_run(f"{shared}/second-run").manifest(0).base is not None
    # As users have it, the engine of an ``LLM`` is a process of its own.
    for name, value in warm.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    offline = named("docs/serve.md", "offline").replace(SHARED, shared)
    small = offline.replace(f'LLM("{MODEL}", ', f'LLM("{MODEL}", enforce_eager=True, max_model_len=256, ')
    assert small != offline
    said = run_python(f"{small}    print(sync.status()['served'], flush=True)\n", tmp_path)
    assert re.findall(r"'version': (\d+)", said) == ["3", "3"]
    assert "\nTrue\n" in said
