"""The examples are scripts that run as they are; a real server follows them in the tests marked slow."""

import ast
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from examples import publish, rl_loop, rollback_ab
from examples.rl_loop import Server, serving
from tests.support.running import run_python
from tests.support.web import Site
from vllm_delta_sync import open_run

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = ("publish.py", "rl_loop.py", "rollback_ab.py", "real_model.py", "prove_served.py")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_needs_nothing_of_this_repository_but_the_packages(name: str) -> None:
    tree = ast.parse((EXAMPLES / name).read_text())
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert not {str(module).partition(".")[0] for module in imported} & {"tests", "examples", "benchmarks", "None"}


def test_every_script_has_a_row_in_the_readme() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"({path.name})" in text for path in EXAMPLES.glob("*.py") if path.name != "__init__.py")


def test_publish_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    url = str(tmp_path / "run")
    for steps in ("2", "1"):
        monkeypatch.setattr(sys, "argv", ["publish.py", "--bucket", url, "--steps", steps, "--rate", "1e-3"])
        assert publish.main() == 0
    with open_run(url) as run:
        assert [manifest.step for manifest in run.log()][-3:] == [1, 2, 3]
        assert {"config.json", "tokenizer.json"} <= {item.name for item in run.info.files}


def test_publish_names_a_text_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "notes.txt"
    monkeypatch.setattr(sys, "argv", ["publish.py", "--text", str(text)])
    assert publish.main() == 1
    assert str(text) in capsys.readouterr().err


def test_the_tour_leaves_a_server_with_its_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(tmp_path, state_dir=tmp_path / "state")

    @site.app.post("/v1/completions")
    async def completions() -> dict[str, Any]:
        spans = [{"version": site.service.receiver.served_version}]
        return {"choices": [{"text": "x"}], "delta_sync": {"spans": spans}}

    def publish_next() -> int:
        site.publish(site.publisher.version + 1)
        return site.publisher.version

    try:
        site.serve()
        client: Any = site.client()
        with pytest.raises(SystemExit, match="two versions"):
            rollback_ab.tour(client, str(tmp_path / "run"), "a b c")
        site.publisher.tag("best", 0)
        rollback_ab.tour(client, str(tmp_path / "run"), "a b c", publish_next)
        status = client.get("/delta_sync/status").json()
        assert (status["target"], status["holding"], status["served"]["version"]) == ("head", False, 4)
        with open_run(str(tmp_path / "run")) as run:
            assert {name: tag.version for name, tag in run.tags().items()} == {"best": 0}
    finally:
        site.end()
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" ")[2] for line in said if line.startswith(("A:", "B:"))] == ["2", "4"]
    held = next(line for line in said if line.startswith("while"))
    assert held.endswith("409"), "a held server refuses to wait"


def stand_in(request: httpx.Request, url: str = "") -> httpx.Response:
    """A server's answers in rl_loop: every other one is right, and what is published is served at once."""
    if request.url.path == "/v1/completions":
        choices, spans = [], []
        for index, prompt in enumerate(json.loads(request.content)["prompt"]):
            word = "".join(rl_loop.VOCABULARY[token] for token in prompt[:-1])
            tokens = rl_loop.right_answer(word) if index % 2 else prompt
            choices.append({"index": index, "token_ids": tokens, "logprobs": {"token_logprobs": [-3.0] * len(tokens)}})
            for version, start, end in ((0, 0, 1), (1, 1, len(tokens) - 1), (None, len(tokens) - 1, len(tokens))):
                spans.append({"index": index, "version": version, "start": start, "end": end})
        return httpx.Response(200, json={"choices": choices[::-1], "delta_sync": {"spans": spans}})
    with open_run(url) as run:
        head = run.head()
    if request.url.path == "/delta_sync/wait":
        assert head.version >= int(request.url.params["version"])
    recent = [{"version": head.version, "timings_ms": {"pause": 2.0}}]
    body = {"last_error": None, "served": {"version": head.version}, "recent": recent}
    return httpx.Response(200, json=body | {"verdict": True, "fingerprint": head.fingerprint})


def server_of(handler: Any) -> Server:
    return Server(httpx.Client(base_url="http://server", transport=httpx.MockTransport(handler)))


@contextmanager
def serving_in_process(command: Sequence[str], log: Path, core: int) -> Iterator[Server]:
    yield server_of(partial(stand_in, url=command[command.index("--bucket") + 1] if "--bucket" in command else ""))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_loop, "serving", serving_in_process)
    monkeypatch.setattr(rl_loop, "WARM_UP_TARGET", 0.0)
    monkeypatch.setattr(rl_loop, "PROMPTS", 2)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.delenv("DELTA_SYNC_BUCKET", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("name", "marker"),
    [("rl_loop", rl_loop.MARKER), ("real_model", ".delta-sync-real"), ("trl_async", ".delta-sync-trl")],
)
def test_a_wrong_url_is_refused_before_anything_is_removed(
    name: str, marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As a script it imports the one beside it.
    monkeypatch.syspath_prepend(str(EXAMPLES))
    script = importlib.import_module(f"examples.{name}")
    kept = tmp_path / "of an earlier run"
    for file in (kept, tmp_path / marker):
        file.touch()
    model = [str(tmp_path)] if name == "real_model" else []
    with pytest.raises(SystemExit) as ended:
        script.main([*model, "--bucket", "ftp://x", "--out", str(tmp_path)])
    assert (ended.value.code, kept.exists()) == (2, True)
    assert "'ftp://x' has the unknown scheme 'ftp'" in capsys.readouterr().err


def test_rl_loop_publishes_each_step_and_writes_its_summary(
    tmp_path: Path, in_process: None, one_thread: None, capsys: pytest.CaptureFixture[str]
) -> None:
    cores, out = os.sched_getaffinity(0), tmp_path / "out"
    out.mkdir()
    for name in (rl_loop.MARKER, "of an earlier run"):
        (out / name).touch()
    assert rl_loop.main(["--steps", "4", "--out", str(out)]) == 0
    assert os.sched_getaffinity(0) == cores
    assert not (out / "of an earlier run").exists()
    summary, details = (json.loads((out / f"{name}.json").read_text()) for name in ("summary", "details"))
    assert summary["verdict"] == dict.fromkeys(("weights_bit_identical", "tokens_equal", "logprobs_equal"), True)
    assert summary["versions"] == 4
    assert summary["full_bytes"] > summary["payload_bytes"] > 0
    assert summary["pause_ms"] == {"p50": 2.0, "p99": 2.0}
    assert summary["reward"] == {"first": 0.5, "last": 0.5}
    assert {"seconds", "changed_share"} <= summary.keys()
    assert [(step["step"], step["version"]) for step in details["steps"]] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert details["steps"][-1]["served"] == 4
    assert {"lag", "changed", "total", "payload_bytes", "upload_s"} <= details["steps"][0].keys()
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    with open_run(str(out / "bucket")) as run:
        assert run.head().step == 4
    said = capsys.readouterr().out
    assert said.count("✓") == 3
    assert "step   4" in said
    # One bit of the trainer's checkpoint is another: that is seen, and the script fails.
    file = out / "checkpoint" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] *= -1
    save_file(tensors, file)
    bucket = str(out / "bucket")
    server = server_of(partial(stand_in, url=bucket))
    assert rl_loop.prove_weights(server, bucket, file.parent) == (False, open_run(bucket).head().fingerprint)
    assert not rl_loop.conclude(summary["verdict"] | {"weights_bit_identical": False}, details, {1: 2.0}, out)
    assert capsys.readouterr().out.count("✗") == 1


def ended(pid: int) -> bool:
    """Whether a process has ended; one that only waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


FAMILY = """
import http.server, os, pathlib, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {inner.pid}")
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


def test_leaving_a_server_ends_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_loop, "END_SECONDS", 0.2)
    pids = tmp_path / "pids"
    with serving([sys.executable, "-c", FAMILY, str(pids)], tmp_path / "log", 0):
        family = [int(pid) for pid in pids.read_text().split()]
        assert not any(map(ended, family))
    deadline = time.monotonic() + 60
    # A killed process ends a moment later.
    while not all(map(ended, family)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(map(ended, family))


def with_store(kind: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = ["-m", "tests.tools.loopback_store", kind, "--", sys.executable, *arguments]
    return run_python(*command, environment={"DELTA_SYNC_BUCKET": "memory://other"}, seconds=1200)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hf", "s3"])
def test_rl_loop_with_real_servers(kind: str, tmp_path: Path) -> None:
    with_store(kind, "examples/rl_loop.py", "--steps", "4", "--out", str(tmp_path / "out"))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert all(summary["verdict"].values())
    assert not (tmp_path / "out" / "bucket").exists()


@pytest.mark.e2e
@pytest.mark.slow
def test_rollback_and_a_b_with_a_real_server() -> None:
    done = with_store("dir", "examples/rollback_ab.py")
    assert "rollback {'version': 2}" in done.stdout
    assert [line.rpartition(" ")[2] for line in done.stdout.splitlines() if line.startswith(("A:", "B:"))] == ["2", "4"]
