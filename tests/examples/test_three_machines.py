"""The three machines' scripts without vLLM: trajectories, kills of the trainer, rollouts, environment, verdict, run."""

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.three_machines import environment, rollouts, trainer
from examples.three_machines.trainer import read_batch
from tests.support import three_killed
from tests.support.answers import Answer, answering
from tests.support.running import mentioning
from tests.tools import three_machines_verdict as verdict
from tests.trainer.sharded.nursery import Nursery
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware

FOLDER = Path(environment.__file__).parent
SECONDS = 60
VERSIONS = 4
RUN = "0123456789abcdef" * 2


# Trajectories


def save_policy(folder: Path) -> Path:
    """A checkpoint with the example's vocabulary and 20,000 parameters."""
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"num_hidden_layers": 2, "head_dim": 16, "vocab_size": len(trainer.CHARACTERS), "pad_token_id": 0}
    config = Qwen3Config(**shape, max_position_embeddings=trainer.POSITIONS, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def key_of(worker: str, number: int) -> str:
    return f"trajectories/{worker}/{number:010d}.json.gz"


def some_batch(number: int = 0, version: int = 0, run: str = RUN, worker: str = "w1") -> dict[str, Any]:
    """A batch with three plays of each game, log-probs drawn at random; the same for the same arguments."""
    rng = random.Random(f"{worker} {number}")
    games = []
    for group in range(2):
        for _ in range(3):
            turns = [
                {
                    "prompt": prompt,
                    "output": output,
                    "logprobs": [-rng.random() for _ in output],
                    "spans": [{"version": version, "start": 0, "end": len(output)}],
                }
                for prompt, output in trainer.example_game(rng)
            ]
            games.append({"game": group, "turns": turns, "solved": len(turns) < 4, "reward": rng.random()})
    return {"format_version": 1, "run": run, "worker": worker, "number": number, "games": games}


def packed(document: Any) -> bytes:
    return gzip.compress(json.dumps(document).encode(), mtime=0)


def write_batch(url: str, batch: dict[str, Any]) -> str:
    """Put a batch where it belongs; its key."""
    key = key_of(batch["worker"], batch["number"])
    with open_bucket(url) as bucket:
        bucket.put(key, packed(batch), if_absent=True)
    return key


def setting(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *owners, last = path.split(".")

    def change(document: Any) -> None:
        for part in owners:
            document = document[int(part) if isinstance(document, list) else part]
        document[int(last) if isinstance(document, list) else last] = value

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (setting("format_version", 2), "format_version\n"),
        (setting("number", 1), "is batch 1 of worker 'w1'"),
        (setting("worker", "w2"), "of worker 'w2'"),
        (setting("games", []), "games\n"),
        (setting("games.0.reward", "1.0"), "games.0.reward\n"),
        (setting("games.0.turns.0.output", []), "games.0.turns.0.output\n"),
        (setting("games.0.turns.0.output.0", 4000), "games.0.turns.0.output.0\n"),
        (setting("games.0.turns.0.logprobs", [-1.0]), "1 logprobs for 3 output tokens"),
        (setting("games.0.turns.0.logprobs.0", 0.5), "games.0.turns.0.logprobs.0\n"),
        (setting("games.0.turns.0.spans.0.end", 2), "spans end at 2"),
        (setting("games.0.turns.0.spans.0.start", 1), "span 1-3 of version 0"),
        (setting("games.0.turns.1.prompt.0", 40), "the prompt of turn 1"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_name(change: Callable[[dict[str, Any]], None], named: str) -> None:
    document = some_batch()
    assert read_batch(packed(document), key_of("w1", 0)).games[0].game == 0
    change(document)
    with pytest.raises(ValueError) as refused:
        read_batch(packed(document), key_of("w1", 0))
    assert named in str(refused.value)


# The trainer


class Trainings:
    """Trainers in real processes, on one run.

    Attributes:
        run: id. url: of the run. games: URL of what is trained on.
    """

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery, self.folder = nursery, folder
        self.url, self.games = str(folder / "run"), str(folder / "games")
        policy = save_policy(folder / "state" / "policy")
        with Publisher(Qwen3ForCausalLM.from_pretrained(policy, dtype=torch.bfloat16), self.url) as publisher:
            self.run = publisher.run

    def write(self, *versions: int, worker: str = "w1", run: str | None = None) -> None:
        """One batch per version, sampled by it."""
        with open_bucket(self.games) as bucket:
            taken = len(list(bucket.list(f"trajectories/{worker}/")))
        for number, version in enumerate(versions, start=taken):
            write_batch(self.games, some_batch(number, version, run or self.run, worker))

    def train(self, point: str = "-", versions: int = VERSIONS, **options: Any) -> int:
        """Exit status of a trainer that is killed at a point, if any."""
        settings = {"bucket": self.url, "games": self.games, "folder": self.folder / "state", "versions": versions}
        settings |= {"max-staleness": 100, "patience": SECONDS, **options}
        flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        [status] = self._nursery.statuses(1, three_killed.train, folder=str(self.folder), point=point, arguments=flags)
        return status

    def said(self) -> str:
        """What trainers wrote to standard error."""
        return (self.folder / "errors").read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (self.folder / "events").read_text().splitlines() if line[0] == "{"]
        return [event for event in found if event["event"] == kind]

    def consumed(self) -> list[dict[str, Any]]:
        """Of every version, first to last, as the bucket has it."""
        run = open_run(self.url)
        return [json.loads(run.sidecar(version, "trained")) for version in range(1, run.head().version + 1)]

    def fingerprint(self) -> str:
        return str(open_run(self.url).head().fingerprint)


@pytest.fixture
def trainings(nursery: Nursery, tmp_path: Path) -> Trainings:
    return Trainings(nursery, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Fingerprint of what comes of the same trajectories without a kill."""
    made = Trainings(nursery, tmp_path_factory.mktemp("undisturbed"))
    made.write(*[0] * VERSIONS)
    assert made.train() == 0
    return made.fingerprint()


@pytest.mark.slow
@pytest.mark.parametrize(
    "points",
    [
        ["save:after:2", "manifest:before:1", "manifest:after:1"],
        *(
            [point]
            for point in (
                *("save:before:2", "manifest:after:2"),
                *("gradient:before:2", "flush:before:3", "flush:after:3", "step:after:2", "sync:after:1"),
                *("sync:before:2", "publish:after:2", "sidecar:after:2", "object:after:2", "manifest:before:2"),
                "head:before:2",
            )
        ),
    ],
    ids="+".join,
)
def test_a_killed_trainer_goes_on_and_each_trajectory_is_trained_on_once(
    trainings: Trainings, undisturbed: str, points: list[str]
) -> None:
    trainings.write(*[0] * VERSIONS)
    assert [trainings.train(point) for point in points] == [-9] * len(points)
    assert trainings.train() == 0
    consumed = trainings.consumed()
    assert [one["step"] for one in consumed] == list(range(1, VERSIONS + 1))
    assert [one["trained"] for one in consumed] == [[key_of("w1", number)] for number in range(VERSIONS)]
    assert trainings.fingerprint() == undisturbed


@pytest.mark.slow
def test_a_trainer_that_sigterm_ends_publishes_the_step_under_way(trainings: Trainings, undisturbed: str) -> None:
    trainings.write(*[0] * VERSIONS)
    assert trainings.train("gradient:before:2:SIGTERM") == 0
    assert [(event["version"], event["step"]) for event in trainings.events("ended")] == [(2, 2)]
    assert open_run(trainings.url).head().step == 2
    assert trainings.train() == 0
    assert trainings.fingerprint() == undisturbed


@pytest.mark.slow
def test_what_is_too_old_or_no_batch_of_this_run_is_left_out_and_recorded(trainings: Trainings) -> None:
    trainings.write(0, 0, 0)
    trainings.write(0, worker="other", run="f" * 32)
    trainings.write(9, worker="prophet")
    with open_bucket(trainings.games) as bucket:
        bucket.put(key_of("broken", 0), b"nothing of the kind")
        bucket.put("trajectories/x.y/0000000001.json.gz", b"")
    assert trainings.train(versions=2, max_staleness=1) == 0
    trainings.write(1, 2)
    assert trainings.train(versions=3, max_staleness=1) == 0
    consumed = trainings.consumed()
    assert [one["trained"] for one in consumed] == [[key_of("w1", number)] for number in (0, 1, 3)]
    assert consumed[2]["stale"] == [key_of("w1", 2)] == [event["key"] for event in trainings.events("stale")]
    reasons = {event["key"].split("/")[1]: event["why"] for event in trainings.events("set_aside")}
    assert [key for one in consumed for key in one["set_aside"]] == [key_of(name, 0) for name in reasons]
    assert reasons.keys() == {"broken", "other", "prophet"}
    assert "is of run ffff" in reasons["other"]
    assert "version 9" in reasons["prophet"]


@pytest.mark.slow
def test_a_state_that_is_not_of_the_runs_newest_version_is_refused(trainings: Trainings) -> None:
    state = trainings.folder / "state" / "state.pt"
    trainings.write(0, 0, 0)
    assert trainings.train(versions=1) == 0
    older = state.read_bytes()
    assert trainings.train(versions=3) == 0
    before = trainings.fingerprint()
    assert trainings.train(versions=4, patience=0.1) == 1
    state.write_bytes(older)
    assert trainings.train(versions=4) == 1
    state.unlink()
    assert trainings.train(versions=4) == 1
    said = trainings.said()
    assert "no trajectory to train on" in said
    assert f"is of step 1 of run {trainings.run}" in said
    assert f"is of step 0 of run {trainings.run}" in said
    assert trainings.fingerprint() == before


# Rollouts and environment


def test_what_the_trainer_warms_up_on_is_what_rollouts_play() -> None:
    assert rollouts.IDS == trainer.IDS
    assert (trainer.GUESSES, trainer.WORDS) == (environment.GUESSES, environment.WORDS)
    for secret in environment.WORDS:
        for guess in environment.WORDS:
            assert rollouts.reply(guess, environment.feedback(secret, guess)) == trainer.marked(secret, guess) + ">"


class Repeating(BucketMiddleware):
    """Each put is repeated, as if its first answer had been lost."""

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        super().put(key, data, if_absent=if_absent)
        super().put(key, data, if_absent=if_absent)


def test_a_batch_whose_answer_was_lost_is_written_once(tmp_path: Path) -> None:
    """Twice it would be trained on twice. The number of another process is left to it."""
    with open_bucket(str(tmp_path)) as bucket:
        worker = rollouts.Worker(Namespace(worker="w1", environment="http://none"), "http://none", Repeating(bucket))
        bucket.put(key_of("w1", 0), b"of another process")
        assert worker._put(RUN, []) == key_of("w1", 1)
        assert [item.key for item in bucket.list("trajectories/")] == [key_of("w1", 0), key_of("w1", 1)]


class World:
    """A server, an environment, a bucket, and rollouts that play.

    Attributes:
        version: that the server serves. It writes random words, of which one half is another version's.
        failing: answers of the server that are errors.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.version: int | None = 0
        self.failing = 0
        self.chance = random.Random(1)
        server = stack.enter_context(answering())
        server.reply = lambda asked: self.reply(json.loads(asked.body or b"{}") if asked.method == "POST" else None)
        environment.Handler.seed = 3
        rated = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), environment.Handler))
        threading.Thread(target=rated.serve_forever, daemon=True).start()
        stack.callback(rated.shutdown)
        self.games = str(folder / "games")
        self.urls = {"server": server.url, "environment": f"http://127.0.0.1:{rated.server_address[1]}"}

    def reply(self, asked: dict[str, Any] | None) -> Answer:
        """What rollouts see of a server: a status, a verification, completions."""
        version = self.version
        if asked is None:
            found: Any = {"run": RUN, "served": None if version is None else {"version": version}, "recent": []}
        elif "prompt" not in asked:
            found = {"verdict": True, "fingerprint": "f"}
        elif self.failing:
            self.failing -= 1
            return Answer(503, b'{"error": "not now"}')
        else:
            choices, spans = [], []
            for index in range(len(asked["prompt"])):
                tokens = rollouts.encode(self.chance.choice(environment.WORDS))
                logprobs = {"token_logprobs": [-1.5, -0.5, -0.25]}
                choices.append({"index": index, "token_ids": tokens, "logprobs": logprobs})
                later = version if version is None else version + 1
                spans.append({"index": index, "version": version, "start": 0, "end": 1})
                spans.append({"index": index, "version": later, "start": 1, "end": 3})
            found = {"choices": choices[::-1], "delta_sync": {"spans": spans}}
        return Answer(200, json.dumps(found).encode())

    def rollouts(self, **options: Any) -> "subprocess.Popen[str]":
        settings: dict[str, Any] = {**self.urls, "games": self.games, "bucket": "unused", "folder": "unused"}
        settings |= {"worker": "w1", "groups": 3, "plays": 4, "versions": 9, **options}
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, str(FOLDER / "rollouts.py"), *words]
        # A proxy for the world outside, which nothing here is asked through.
        around = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
        around["http_proxy"] = "http://127.0.0.1:9"
        return subprocess.Popen(command, env=around, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def batches(self) -> list[trainer.Batch]:
        with open_bucket(self.games) as bucket:
            return [read_batch(bucket.get(item.key), item.key) for item in bucket.list("trajectories/")]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, stack)


def told(process: "subprocess.Popen[str]", kind: str) -> dict[str, Any]:
    """The next event of a kind; ends with the process."""
    assert process.stdout is not None
    for line in process.stdout:
        found: dict[str, Any] = json.loads(line)
        if found["event"] == kind:
            return found
    raise AssertionError(f"rollouts ended without {kind!r}: {process.communicate()[1]}")


@pytest.mark.slow
def test_batches_hold_whole_games_and_killed_it_goes_on_under_the_next_number(world: World) -> None:
    world.version, world.failing = None, 3
    with world.rollouts(ahead=2) as process:
        told(process, "ready")
        world.version = 0
        assert "503" in told(process, "away")["error"]
        assert told(process, "back")["what"] == "server"
        assert [told(process, "batch")["version"] for _ in range(2)] == [0, 0]
        # It has played as many as it may for this version.
        world.version = 1
        assert told(process, "batch")["version"] == 1
        process.kill()
    held = world.batches()
    with world.rollouts() as process:
        assert told(process, "ready")["number"] == len(held)
        told(process, "batch")
        world.version = 9
        assert told(process, "verified")["fingerprint"] == "f"
        assert process.wait(SECONDS) == 0
    batches = world.batches()
    assert batches[: len(held)] == held
    assert [batch.number for batch in batches] == list(range(len(batches)))
    assert {(batch.run, len(batch.games)) for batch in batches} == {(RUN, 12)}
    for batch, versions in ((batches[0], {0, 1}), (batches[-1], {1, 2})):
        assert {span.version for play in batch.games for turn in play.turns for span in turn.spans} == versions
    assert len({play.game for batch in batches for play in batch.games}) == 3 * len(batches)
    for play in batches[0].games:
        guesses = ["".join(rollouts.CHARACTERS[token] for token in turn.output) for turn in play.turns]
        signs = [environment.feedback(environment.secret_of(3, play.game), guess) for guess in guesses]
        assert play.solved is (signs[-1] == "ggg")
        assert play.solved or len(signs) == 4
        assert play.reward == pytest.approx(environment.reward(signs))
        assert play.turns[0].logprobs == [-1.5, -0.5, -0.25]


def test_a_batch_that_another_process_has_written_is_left_alone(world: World) -> None:
    world.version = None
    with world.rollouts() as process:
        assert told(process, "ready")["number"] == 0
        write_batch(world.games, some_batch(0, run="f" * 32))
        world.version = 0
        assert told(process, "batch")["key"] == key_of("w1", 1)
        process.kill()
    assert [(batch.number, batch.run) for batch in world.batches()] == [(0, "f" * 32), (1, RUN)]


# The verdict


def sampled_by(model: Qwen3ForCausalLM, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with the log-probs that a model gives its tokens."""
    for turn in (turn for game in batch["games"] for turn in game["turns"]):
        row = torch.tensor([turn["prompt"] + turn["output"]])
        with torch.no_grad():
            logits = torch.log_softmax(model(input_ids=row[:, :-1]).logits.float(), dim=-1)
        chosen = logits.gather(-1, row[:, 1:, None]).flatten()[len(turn["prompt"]) - 1 :]
        turn["logprobs"] = [min(0.0, value) for value in chosen.tolist()]
    return batch


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four versions as three machines leave it: version n was trained on batch n - 1."""
    folder = tmp_path_factory.mktemp("story")
    policy = save_policy(folder / "trainer" / "policy")
    model = Qwen3ForCausalLM.from_pretrained(policy, dtype=torch.bfloat16)
    torch.manual_seed(5)
    events: dict[str, list[dict[str, Any]]] = {"trainer": [], "rollout": []}
    with Publisher(model, str(folder / "run")) as publisher:
        for version in range(VERSIONS):
            served = Qwen3ForCausalLM.from_pretrained(policy, dtype=torch.float32)
            served.load_state_dict({name: part.float() for name, part in model.state_dict().items()})
            write_batch(str(folder / "games"), sampled_by(served, some_batch(version, version, publisher.run)))
            for parameter in model.parameters():
                parameter.data += 0.02 * torch.randn_like(parameter)
            consumed = trainer.Consumed(step=version + 1, trained=[key_of("w1", version)])
            publisher.publish(version + 1, wait=True, sidecars={"trained": consumed.model_dump_json().encode()})
            events["trainer"].append({"event": "published", "version": version + 1, "called": 10.0 * version})
        publisher.flush()
        events["rollout"].append(
            {"event": "served", "version": VERSIONS, "at": 31.0, "pauses_ms": {"4": 5.0, "3": None}}
        )
        scanned = open_run(str(folder / "run")).head().fingerprint
        events["rollout"].append({"event": "verified", "verdict": True, "fingerprint": scanned})
    model.save_pretrained(folder / "trainer" / "checkpoint")
    (folder / "rollout").mkdir()
    for name, lines in events.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / name / "events.jsonl").write_text("[WARNING] a line that a library prints\n" + text)
    return folder


OPTIONS = {"versions": VERSIONS, "max_staleness": 1, "network": ""}


def found_in(story: Path) -> verdict.Found:
    return verdict.read(str(story / "run"), str(story / "games"), story)


def test_a_run_in_order_holds(story: Path) -> None:
    words = ["--bucket", str(story / "run"), "--games", str(story / "games"), "--out", str(story)]
    assert verdict.main([*words, "--versions", str(VERSIONS)]) == 0
    summary = json.loads((story / "summary.json").read_text())
    claims = ("weights_exact", "trained_once", "none_too_stale", "versions_explain_tokens")
    assert summary["verdict"] == dict.fromkeys(claims, True)
    assert summary["fresh_seconds"] == {"median": 16.0, "longest": 31.0}
    assert (summary["versions"], summary["pause_ms"]["median"]) == (VERSIONS, 5.0)
    assert verdict.main([*words, "--versions", str(VERSIONS + 1)]) == 1


def test_each_claim_can_fail(story: Path) -> None:
    found = found_in(story)
    found.scan["fingerprint"] = "0" * 32
    found.consumed[2]["trained"] = [key_of("w1", 0)]
    found.consumed[3] = {"step": 3, "trained": [key_of("w1", 3)], "stale": [], "set_aside": []}
    wrong_model = Qwen3ForCausalLM.from_pretrained(story / "trainer" / "policy", dtype=torch.float32)
    sampled_by(wrong_model, found.batches[key_of("w1", 3)])
    summary = verdict.judge(found, Namespace(out=story, **OPTIONS))
    assert not any(summary["verdict"].values()), summary["verdict"]
    assert f"{key_of('w1', 0)} was consumed 2 times" in summary["wrong"]
    assert f"{key_of('w1', 2)} was lost: later ones were consumed" in summary["wrong"]
    assert "batch 3 of versions 3 to 3 was trained on by version 2" in summary["wrong"]


# run.sh


def run_sh(*words: str, **variables: str) -> list[str]:
    return ["env", f"PYTHON={sys.executable}", "bash", str(FOLDER / "run.sh"), *words]


def left_of(pid: int) -> list[str]:
    """Namespaces and interfaces that a run has made and not removed."""
    listings = [subprocess.run(["ip", *words], capture_output=True, text=True, check=True) for words in LISTINGS]
    return [line for done in listings for line in done.stdout.splitlines() if f"ds3m-{pid}-" in line]


LISTINGS = (("netns", "list"), ("-o", "link"))
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
    print("connected")
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.parametrize("words", [["--versions", "1.5"], ["--mbit", "fast"], ["--seed"], ["--steps", "1"]])
def test_wrong_arguments_start_nothing(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(run_sh("--out", str(out), *words), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("three machines: ")
    assert words[0] in done.stderr
    assert not out.exists()


@pytest.mark.parametrize("network", ["auto", pytest.param("loopback", marks=pytest.mark.slow)])
def test_a_machine_has_one_way_out_and_an_interrupt_leaves_nothing(tmp_path: Path, network: str) -> None:
    out = tmp_path / "out"
    # A background shell takes SIGINT away from what it starts.
    begin = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", begin, *run_sh("--network", network, "--out", str(out))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline = time.monotonic() + SECONDS
        while not mentioning(Path(f"THREE_MACHINE={process.pid}-trainer")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        variables = dict(line.split("=", 1) for line in (out / "store.env").read_text().splitlines())
        host, _, port = variables["STORE_trainer"].removeprefix("http://").rpartition(":")
        if host != "127.0.0.1":
            assert len(left_of(process.pid)) == 6
            other = variables["STORE_rollout"].removeprefix("http://").rpartition(":")[0]
            inside = ["ip", "netns", "exec", f"ds3m-{process.pid}-trainer", sys.executable, "-c", CONNECT]
            ways = [
                subprocess.run([*inside, address, port], capture_output=True, text=True, check=True).stdout.strip()
                for address in (host, other, "127.0.0.1", "8.8.8.8")
            ]
            assert ways == ["connected", "Network is unreachable", "Connection refused", "Network is unreachable"]
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        said = process.stdout.read()
        assert process.wait(SECONDS) == 130, said
    assert "interrupted; all processes have ended" in said
    assert (host == "127.0.0.1") is (network == "loopback" or "share this one's loopback" in said)
    while mentioning(out) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert mentioning(out) == set()
    assert shutil.which("ip") is None or left_of(process.pid) == []
