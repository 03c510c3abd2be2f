"""The course of the three-machines example: real processes that play its programs' parts are killed and go on."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo.processes import DemoError
from examples.fleet.screen import Screen
from examples.three_machines import course
from examples.three_machines.__main__ import parse_options
from examples.three_machines.course import Course
from examples.three_machines.machines import Machine
from examples.three_machines.programs import Program
from examples.three_machines.record import Record
from examples.three_machines.settings import ENVIRONMENT, PARTS, ROLLOUT, SERVER, TRAINER, WITNESS, WORKER
from examples.three_machines.sockets import Watch

VERSIONS = 40
HERE = Machine("here", "127.0.0.1", "127.0.0.1")
COMMON = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def tell(event, **fields):
    print(json.dumps({"event": event, "at": time.monotonic(), **fields}), flush=True)
def lines(name):
    file = folder / name
    return file.read_text().splitlines() if file.exists() else []
def add(name):
    with (folder / name).open("a") as file:
        file.write("x\\n")
    return len(lines(name))
"""
ROLES = {
    # Trains a step on each batch that is there, and publishes; the steps are its state.
    TRAINER: """
tell("ready")
while len(lines("steps")) < int(sys.argv[2]):
    if len(lines("batches")) > len(lines("steps")):
        step = add("steps")
        tell("step", step=step, trained=[str(step)], staleness=0, reward=0.5, solved=0.5)
        tell("published", step=step, version=step)
    time.sleep(0.1)
tell("done", version=len(lines("steps")))
""",
    WORKER: """
while True:
    if len(lines("batches")) <= len(lines("steps")):
        tell("batch", key=str(add("batches")))
    time.sleep(0.01)
""",
    WITNESS: """
import threading
def follow():
    while True:
        tell("served", version=len(lines("steps")), pauses_ms=[])
        time.sleep(0.02)
threading.Thread(target=follow, daemon=True).start()
for line in sys.stdin:
    tell("verified", verdict=True)
""",
    ENVIRONMENT: "time.sleep(600)",
    SERVER: "time.sleep(600)",
}


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[..., tuple[Course, Record, dict[str, Program]]]]:
    """All programs, each a process with its part; those that are named have another part."""
    with ExitStack() as stack:

        def start(kills: bool = True, **parts: str) -> tuple[Course, Record, dict[str, Program]]:
            record = Record(replace(parse_options([]), versions=VERSIONS, kills=kills))
            watch = Watch({}, {})
            programs = {}
            for name, part in {**ROLES, **parts}.items():
                words = [sys.executable, "-c", COMMON + part, str(tmp_path), str(VERSIONS)]
                programs[name] = Program(name, HERE, words, {}, tmp_path / f"{name}.log", watch)
                programs[name].start()
                stack.callback(programs[name].close)
            said = stack.enter_context((tmp_path / "said").open("w"))
            return Course(programs, record, Screen(Console(file=said))), record, programs

        yield start


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "DOWN_SECONDS", 0.2)


def test_each_part_is_killed_once_and_it_goes_on(
    play: Callable[..., tuple[Course, Record, dict[str, Program]]],
) -> None:
    made, record, programs = play()
    halfway: list[int] = []
    made.await_ready(60)
    made.run(lambda: halfway.append(record.head))
    assert tuple(kill.part for kill in record.kills) == PARTS
    assert all(kill.going is not None and kill.at < (kill.back or 0) < kill.going for kill in record.kills)
    assert {name: program.lives for name, program in programs.items()} == {
        TRAINER: 2,
        WORKER: 3,
        SERVER: 2,
        ENVIRONMENT: 2,
        WITNESS: 1,
    }
    assert len(halfway) == 1
    assert halfway[0] >= VERSIONS // 2
    assert max(record.served) == record.head == VERSIONS
    assert made.verified()["verdict"] is True


def test_without_kills_nobody_dies(play: Callable[..., tuple[Course, Record, dict[str, Program]]]) -> None:
    made, record, programs = play(kills=False)
    made.run(lambda: None)
    assert record.kills == []
    assert {program.lives for program in programs.values()} == {1}


def test_a_program_that_ends_by_itself_ends_the_example(
    play: Callable[..., tuple[Course, Record, dict[str, Program]]],
) -> None:
    made, _, _ = play(worker="sys.exit('no store')")
    with pytest.raises(DemoError, match=r"the worker ended with status 1; the end of worker\.log:\nno store"):
        made.run(lambda: None)


def test_a_course_that_stands_still_ends_with_a_reason(
    play: Callable[..., tuple[Course, Record, dict[str, Program]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "STILL_SECONDS", 1.0)
    made, _, _ = play(worker="time.sleep(600)")
    with pytest.raises(DemoError, match="no new version for 1 s after version 0"):
        made.run(lambda: None)


def test_a_server_that_does_not_come_to_the_last_version_is_named(
    play: Callable[..., tuple[Course, Record, dict[str, Program]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "END_SECONDS", 1.0)
    made, _, _ = play(kills=False, witness="tell('served', version=1, pauses_ms=[]); time.sleep(600)")
    with pytest.raises(DemoError, match=f"not within 1 s: the server serves version {VERSIONS}"):
        made.run(lambda: None)


def test_events_of_a_life_that_was_killed_are_not_lost(tmp_path: Path) -> None:
    words = [sys.executable, "-c", COMMON + "tell('one'); (folder / 'said').touch(); time.sleep(600)", str(tmp_path)]
    program = Program(ROLLOUT, HERE, words, {}, tmp_path / "log", Watch({}, {}))
    program.start()
    while not (tmp_path / "said").exists():
        program.check()
    program.kill()
    program.start()
    found = [event["event"] for event in program.new_events()]
    program.close()
    assert found[:1] == ["one"]
