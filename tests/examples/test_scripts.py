"""The examples are scripts that run as they are; a real server follows them in the tests marked slow."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples import publish, rl_loop, rollback_ab
from examples.rl_loop import Answer, DemoError, Server
from tests.support.web import Site
from vllm_delta_sync import open_run

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = ("publish.py", "rl_loop.py", "rollback_ab.py")


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
        rollback_ab.tour(client, str(tmp_path / "run"), "a b c", publish_next)
        status = client.get("/delta_sync/status").json()
        assert (status["target"], status["holding"], status["served"]["version"]) == ("head", False, 4)
    finally:
        site.end()
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" ")[2] for line in said if line.startswith(("A:", "B:"))] == ["2", "4"]
    held = next(line for line in said if line.startswith("while"))
    assert held.endswith("409"), "a held server refuses to wait"


def test_rollback_needs_both_server_and_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    for argument in ("--server=http://127.0.0.1:8000", "--bucket=/mnt/run"):
        monkeypatch.setattr(sys, "argv", ["rollback_ab.py", argument])
        with pytest.raises(SystemExit) as usage:
            rollback_ab.main()
        assert usage.value.code == 2


class InProcess:
    """Stands in for both servers of rl_loop: every other answer is right, and what is published is served at once."""

    def __init__(self, name: str, command: list[str], log: Path, port: int, core: int) -> None:
        self._url = command[command.index("--bucket") + 1] if "--bucket" in command else None

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def wait_ready(self) -> None:
        return

    def wait_version(self, version: int) -> None:
        assert self._url is not None
        with open_run(self._url) as run:
            assert run.head().version >= version

    def request(self, method: str, path: str, body: object = None) -> Any:
        assert self._url is not None
        with open_run(self._url) as run:
            head = run.head()
        if path == "/delta_sync/verify":
            return {"verdict": True, "fingerprint": head.fingerprint}
        recent = [{"version": head.version, "timings_ms": {"pause": 2.0}}]
        return {"last_error": None, "served": {"version": head.version}, "recent": recent}

    def sample(self, prompts: list[list[int]], samples: int, temperature: float) -> list[Answer]:
        answers = []
        for number, prompt in enumerate(prompt for prompt in prompts for _ in range(samples)):
            word = "".join(rl_loop.VOCABULARY[token] for token in prompt[:-1])
            right = word[::-1] if number % 2 else word
            tokens = [*rl_loop.encode(right), 1]
            versions: list[int | None] = [0, *[1] * (len(tokens) - 2), None]
            answers.append(Answer(right, tokens, [-3.0] * len(tokens), versions, True))
        return answers

    def greedy(self, words: list[str]) -> list[Answer]:
        return self.sample([rl_loop.prompt_ids(word) for word in words], 1, 0.0)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_loop, "Server", InProcess)
    monkeypatch.setattr(rl_loop, "WARM_UP_TARGET", 0.0)
    monkeypatch.setattr(rl_loop, "PROMPTS", 2)
    monkeypatch.delenv("DELTA_SYNC_BUCKET", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_rl_loop_publishes_each_step_and_writes_its_summary(
    tmp_path: Path, in_process: None, one_thread: None, capsys: pytest.CaptureFixture[str]
) -> None:
    cores = os.sched_getaffinity(0)
    assert rl_loop.run(rl_loop.parse_options(["--steps", "4", "--out", str(tmp_path / "out")])) == 0
    assert os.sched_getaffinity(0) == cores
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["verdict"] == dict.fromkeys(("weights_bit_identical", "tokens_equal", "logprobs_equal"), True)
    assert summary["versions"] == 4
    assert summary["full_bytes"] > summary["payload_bytes"] > 0
    assert summary["pause_ms"] == {"p50": 2.0, "p99": 2.0}
    assert {"reward", "seconds", "changed_share"} <= summary.keys()
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    with open_run(str(tmp_path / "out" / "bucket")) as run:
        assert run.head().step == 4
    said = capsys.readouterr().out
    assert said.count("✓") == 3
    assert "step   4" in said
    # One bit of the trainer's checkpoint is another: that is seen, and the script fails.
    file = tmp_path / "out" / "checkpoint" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] *= -1
    save_file(tensors, file)
    bucket = str(tmp_path / "out" / "bucket")
    server: Any = InProcess("", ["--bucket", bucket], file, 0, 0)
    assert rl_loop.prove_weights(server, bucket, file.parent) == (False, open_run(bucket).head().fingerprint)
    summary["verdict"]["weights_bit_identical"] = False
    assert rl_loop.shortcomings(summary, 4)


def test_answers_are_compared_exactly() -> None:
    one = Answer("ab", [4, 5, 1], [-0.5, -0.5, -0.1], [3, 3, 3], True)
    other = Answer("ab", [4, 5, 1], [-0.5, -0.5 - 1e-9, -0.1], [3, 3, 3], True)
    equal, unequal = rl_loop.compare_answers([one], [one]), rl_loop.compare_answers([one], [other])
    assert (equal["tokens_equal"], equal["logprobs_equal"]) == (True, True)
    assert (unequal["tokens_equal"], unequal["logprobs_equal"]) == (True, False)
    assert not rl_loop.compare_answers([], [])["tokens_equal"]


def completion(spans: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Body of ``/v1/completions`` with two choices of three tokens, in the wrong order."""
    choices = [
        {"index": index, "text": "ab", "token_ids": [1, 2, 3], "finish_reason": "stop"}
        | {"logprobs": {"token_logprobs": [-0.5] * 3}}
        for index in (1, 0)
    ]
    return {"choices": choices} | ({} if spans is None else {"delta_sync": {"run": "r", "spans": spans}})


def test_spans_give_every_token_its_version() -> None:
    spans = [(0, 6, 0, 2), (0, 7, 2, 3), (1, None, 0, 3)]
    body = completion([dict(zip(("index", "version", "start", "end"), span, strict=True)) for span in spans])
    assert [answer.versions for answer in rl_loop.parse_answers(body)] == [[6, 6, 7], [None] * 3]
    assert [answer.versions for answer in rl_loop.parse_answers(completion(None))] == [[None] * 3] * 2
    beyond = completion([{"index": 0, "version": 6, "start": 0, "end": 4}])
    lacking = completion(None)
    del lacking["choices"][0]["token_ids"]
    for wrong in (beyond, lacking):
        with pytest.raises(DemoError):
            rl_loop.parse_answers(wrong)


def test_the_loss_weighs_tokens_by_ratio_advantage_and_age() -> None:
    def gradient(ratio: list[float], ages: list[float], advantage: float) -> list[float]:
        logprobs = torch.tensor([ratio]).log().requires_grad_()
        answers = torch.ones(1, len(ratio), dtype=torch.bool)
        zeros, weight = torch.zeros(1, len(ratio)), torch.tensor([advantage])
        rl_loop.policy_loss(logprobs, zeros, torch.tensor([ages]), weight, answers).backward()
        assert logprobs.grad is not None
        return logprobs.grad[0].tolist()

    # At ratio 1 it is the advantage over the number of tokens; what is too old, or of unknown age, does not count.
    old = float(rl_loop.MAX_AGE)
    assert gradient([1.0, 1.0], [0.0, old], 3.0) == pytest.approx([-1.5, -1.5])
    assert gradient([1.0, 1.0, 1.0], [0.0, old + 1, float("inf")], 3.0) == pytest.approx([-3.0, 0.0, 0.0])
    # Beyond the clip a ratio stops to push only in the direction that it went.
    above, below = rl_loop.CLIP_HIGH + 0.1, rl_loop.CLIP_LOW - 0.1
    for advantage, moving in ((1.0, [False, True]), (-1.0, [True, False])):
        assert [value != 0 for value in gradient([above, below], [0.0, 0.0], advantage)] == moving


def test_advantages_are_normalised_within_groups() -> None:
    advantages = rl_loop.group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]), group=4)
    assert advantages[:4].std(unbiased=False) == pytest.approx(1.0, abs=1e-4)
    assert advantages[0] > 0 > advantages[1]
    assert advantages[4:].tolist() == [0.0] * 4


def test_a_batch_marks_the_positions_whose_next_token_was_written() -> None:
    batch = rl_loop.make_batch([[5, 6, 3], [7, 3]], [[6, 5, 1], [7, 1]])
    assert batch.tokens.tolist() == [[5, 6, 3, 6, 5, 1], [7, 3, 7, 1, 0, 0]]
    assert [batch.tokens[row, 1:][batch.answers[row]].tolist() for row in range(2)] == [[6, 5, 1], [7, 1]]
    assert batch.spread([[1, 2, 3], [4, 5]]).tolist() == [[0, 0, 1, 2, 3], [0, 4, 5, 0, 0]]


def test_masters_keep_what_bf16_cannot_hold() -> None:
    model = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    masters = rl_loop.Masters(model, rate=2e-4, eps=1e-8)
    seen = []
    for _ in range(40):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        masters.step(max_norm=1e9)
        seen.append(model.weight[0, 0].item())
    assert seen[0] == 1.0, "a step smaller than half the distance to the next bf16 number shows nothing"
    assert seen[-1] < 1.0, "many of them do"


def test_the_tokenizer_is_what_encode_says() -> None:
    tokenizer = rl_loop.make_tokenizer()
    assert tokenizer.encode("delta>ATLED07") == rl_loop.encode("delta>ATLED07")
    assert tokenizer.decode([*rl_loop.encode("ab"), rl_loop.IDS[rl_loop.EOS]], skip_special_tokens=True) == "ab"
    assert rl_loop.reward("abcde", "edcba", True) == 1.0
    assert rl_loop.reward("abcde", "edcba", False) == rl_loop.reward("abcde", "abcde", True) == 0.0


def test_the_command_line_refuses_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    assert rl_loop.parse_options(["--steps", "12"]).steps == 12
    for wrong in (["--steps", "0"], ["--port", "x"], ["--unknown"]):
        with pytest.raises(SystemExit) as exit_info:
            rl_loop.parse_options(wrong)
        assert exit_info.value.code == 2


def test_output_is_cleared_only_where_it_is_the_scripts_own(tmp_path: Path) -> None:
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    rl_loop.prepare_output(own)
    for name in ("summary.json", "notes.txt"):
        (own / name).write_text("{}")
    (own / "bucket").mkdir()
    rl_loop.prepare_output(own)
    assert sorted(path.name for path in own.iterdir()) == [rl_loop.MARKER, "notes.txt"]
    foreign.mkdir()
    (foreign / "summary.json").write_text("{}")
    for path in (foreign, foreign / "summary.json"):
        with pytest.raises(DemoError):
            rl_loop.prepare_output(path)
    assert (foreign / "summary.json").read_text() == "{}"


def ended(pid: int) -> bool:
    """Whether a process has ended; one that only waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


FAMILY = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {inner.pid} .")
time.sleep(600)
"""


def test_leaving_a_server_ends_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_loop, "END_SECONDS", 0.2)
    pids = tmp_path / "pids"
    with Server("family", [sys.executable, "-c", FAMILY, str(pids)], tmp_path / "log", 9, 0) as server:
        while not (pids.exists() and pids.read_text().endswith(".")):
            server.check_alive(0.05)
    family, deadline = [int(pid) for pid in pids.read_text().split()[:2]], time.monotonic() + 60
    # What was killed is gone a moment later.
    while not all(map(ended, family)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(map(ended, family))


def test_a_server_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with Server("the server", command, tmp_path / "server.log", 9, 0) as server:
        with pytest.raises(DemoError, match=r"(?s)status 1.*server\.log.*no such model"):
            server.wait_ready()


SHOW = "import os; print(os.environ.get('DELTA_SYNC_BUCKET')); raise SystemExit(3)"


@pytest.mark.parametrize(("kind", "bucket"), [("dir", "None"), ("file:///elsewhere", "file:///elsewhere")])
def test_the_loopback_store_says_where_the_run_is(kind: str, bucket: str) -> None:
    done = with_store(kind, "-c", SHOW)
    assert (done.returncode, done.stdout.strip()) == (3, bucket)


def with_store(kind: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python with a store of that kind."""
    command = [sys.executable, "-m", "tests.tools.loopback_store", kind, "--", sys.executable, *arguments]
    environment = os.environ | {"DELTA_SYNC_BUCKET": "memory://other"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hf", "s3"])
def test_rl_loop_with_real_servers(kind: str, tmp_path: Path) -> None:
    done = with_store(kind, "examples/rl_loop.py", "--steps", "4", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert all(summary["verdict"].values())
    assert not (tmp_path / "out" / "bucket").exists()


@pytest.mark.e2e
@pytest.mark.slow
def test_rollback_and_a_b_with_a_real_server() -> None:
    done = with_store("dir", "examples/rollback_ab.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rollback {'version': 2}" in done.stdout
    assert [line.rpartition(" ")[2] for line in done.stdout.splitlines() if line.startswith(("A:", "B:"))] == ["2", "4"]
