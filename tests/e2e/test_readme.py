"""README's trainer, and then README's server and requests, as they stand there; only places and ports are others."""

import json
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.docs.test_docs import ROOT, SHARED, blocks, python_blocks, run_python
from tests.e2e.servers import Server, free_port, serving
from tests.support.tiny import make_model, save_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("readme")]

MODEL = "Qwen3-0.6B"
TEXT = (ROOT / "README.md").read_text()
SMALL = "--enforce-eager --max-model-len 256"
"""What README adds on a small machine without a GPU; ``serving`` sets the variable that goes with it."""


def curled(server: Server, line: str) -> httpx.Response:
    """Send the request of a ``curl`` command line."""
    words = shlex.split(line, comments=True)
    assert words[0] == "curl"
    headers, body, method = {}, None, "GET"
    url = next(word for word in words if word.startswith("http://127.0.0.1:8000/"))
    for flag, value in pairwise(words):
        if flag == "-H":
            name, _, content = value.partition(": ")
            headers[name] = content
        elif flag == "-d":
            method, body = "POST", value
        elif flag == "-X":
            method = value
    path = url.removeprefix("http://127.0.0.1:8000")
    return httpx.request(method, server.url + path, headers=headers, content=body, timeout=300, verify=False)


def commands(begin: str) -> list[str]:
    """README's command lines that begin so, continued lines joined."""
    lines = "\n".join(blocks(TEXT, "bash")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(begin)]


def test_trainer_server_and_requests_of_the_readme(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(make_model("qwen3"), tmp_path / MODEL)
    places = {SHARED: str(tmp_path / "shared"), "tcp://*:5555": "tcp://127.0.0.1:*"}
    trainer = python_blocks("README.md")[0]
    for text, place in places.items():
        assert text in trainer
        trainer = trainer.replace(text, place)
    said = run_python(trainer, tmp_path)
    last = int(re.findall(r"^step \d+: version (\d+), ", said, re.MULTILINE)[-1])
    serve = next(line for line in commands("delta-sync serve") if "--notice" in line and "--port 8000" in line)
    serve = serve.replace(SHARED, places[SHARED]).replace(":5555", f":{free_port()}").replace("--port 8000", SMALL)
    assert SMALL in TEXT
    _, verb, model, *flags = shlex.split(serve)
    assert (verb, model) == ("serve", MODEL)
    program = str(Path(sys.executable).with_name("delta-sync"))
    command = [program, verb, str(checkpoint), *flags, "--served-model-name", MODEL]
    with serving(checkpoint, tmp_path / "server.log", command, {}) as server:
        server.wait_served(last)
        status, completion = commands("curl -s http")[0], commands("curl -si http")[0]
        assert curled(server, status).json()["served"]["version"] == last
        answer = curled(server, completion)
        assert answer.headers["x-delta-sync-version"] == str(last)
        assert answer.json()["delta_sync"]["spans"] == [{"index": 0, "version": last, "start": 0, "end": 8}]
        verify = re.findall(r"`(curl [^`]*/delta_sync/verify)`", TEXT)[0]
        assert curled(server, verify).json()["verdict"]
        rollback, release = commands("curl -s -X POST")[:2]
        wanted = json.loads(shlex.split(rollback)[-1])["version"]
        assert curled(server, rollback).status_code == 200
        assert server.status()["served"]["version"] == wanted < last
        assert curled(server, release).status_code == 200
        assert server.wait_served(last)["served"]["version"] == last
