"""Pooling models on a real vLLM: they follow their run, and no answer is pooled from two versions."""

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.exacting import INTERRUPTED, Mover, client_of, move_while
from tests.e2e.servers import Server
from tests.e2e.test_features import follow_each
from tests.e2e.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.xdist_group("pooling")]
LENGTH = 240
FLAGS = (
    *("--runner", "pooling", "--pooler-config", '{"task": "token_embed"}'),
    # A prompt is pooled from eight chunks.
    *("--enable-chunked-prefill", "--max-num-batched-tokens", "32"),
    *("--poll-seconds", "0.2"),
)
PROMPTS = [[5 + (7 * place + number) % 200 for place in range(LENGTH)] for number in range(3)]
RACE_SECONDS = 10
Rows = list[list[float]]


def test_attach_to_a_pooling_model(tmp_path: Path) -> None:
    follow_each(tmp_path, family="llama", runner="pooling")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("pooling"), rate=1e-3)
    yield world
    world.close()


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[Server]:
    with world.serve(*FLAGS) as server:
        server.wait_served(0)
        yield server


def ask(client: Any, prompt: int, **headers: object) -> httpx.Response:
    given = {name.replace("_", "-"): str(value) for name, value in headers.items()}
    answer: httpx.Response = client.post("/pooling", json={"model": "tiny", "input": PROMPTS[prompt]}, headers=given)
    return answer


def rows(answer: httpx.Response) -> Rows:
    assert answer.status_code == 200, answer.text
    [found] = answer.json()["data"]
    return [list(row) for row in found["data"]]


def distance(left: Rows, right: Rows) -> float:
    if len(left) != len(right):
        return float("inf")
    return max(abs(one - other) for rows in zip(left, right, strict=True) for one, other in zip(*rows, strict=True))


def mover_of(world: World, server: Server) -> Mover:
    while world.version < 2:
        server.wait_served(world.publish())
    return Mover(server, world.version - 1, world.version)


def test_no_answer_is_pooled_from_two_versions(world: World, server: Server) -> None:
    """With no header too: requests that have begun finish before a commit, whatever pause_mode is."""
    mover = mover_of(world, server)
    expected: dict[tuple[int, int], Rows] = {}
    with client_of(server) as client:
        for _ in range(2):
            for prompt in range(len(PROMPTS)):
                expected[mover.served, prompt] = rows(ask(client, prompt))
            mover.move()
    back, forward = mover.versions
    far = min(distance(expected[back, prompt], expected[forward, prompt]) for prompt in range(len(PROMPTS)))
    assert far > 1e-2, "the versions cannot be told apart"
    seen: Counter[str] = Counter()

    def of(version: int, prompt: int, answer: Rows) -> bool:
        return distance(answer, expected[version, prompt]) < far / 4

    def read(prompt: int, exactly: bool, ended: threading.Event) -> None:
        with client_of(server) as client:
            for version in itertools.cycle(mover.versions):
                if ended.is_set():
                    return
                answer = ask(client, prompt, **({"X_Delta_Sync_Version": version} if exactly else {}))
                if exactly and answer.status_code == 409:
                    assert answer.json()["error"]["kind"] == "version"
                    seen["409"] += 1
                elif exactly:
                    seen["exact" if of(version, prompt, rows(answer)) else "wrong version"] += 1
                else:
                    either = any(of(each, prompt, rows(answer)) for each in mover.versions)
                    seen["plain" if either else f"mixed: {len(rows(answer))} rows"] += 1

    readers = [partial(read, prompt, exactly) for prompt in range(len(PROMPTS)) for exactly in (False, True)]
    move_while(mover, readers, lambda: set(seen) >= {"plain", "exact", "409"}, RACE_SECONDS)
    assert set(seen) == {"plain", "exact", "409"}, seen


def test_a_score_is_of_the_version_that_it_asks_for(world: World, server: Server) -> None:
    """Its query and its documents are requests of their own to the engine, between which commits fall."""
    mover = mover_of(world, server)
    body = {"model": "tiny", "text_1": "the quick fox", "text_2": ["lazy dog jumps " * 12, "over the fox " * 15]}
    with client_of(server) as client:
        expected = {}
        for _ in range(2):
            expected[mover.served] = scores(client.post("/score", json=body))
            mover.move()
    far = distance([expected[mover.versions[0]]], [expected[mover.versions[1]]])
    assert far > 1e-2, "the versions cannot be told apart"
    seen: Counter[str] = Counter()

    def read(version: int, ended: threading.Event) -> None:
        with client_of(server) as client:
            while not ended.is_set():
                answer = client.post("/score", json=body, headers={"X-Delta-Sync-Version": str(version)})
                if answer.status_code == 409:
                    kind = answer.json()["error"]["message"]
                    seen["interrupted" if INTERRUPTED in kind else "refused"] += 1
                    continue
                right = distance([scores(answer)], [expected[version]]) < far / 4
                seen["right" if right else "of two versions"] += 1

    readers = [partial(read, version) for version in mover.versions]
    move_while(mover, readers, lambda: {"right", "interrupted"} <= set(seen), RACE_SECONDS)
    assert "of two versions" not in seen, seen


def scores(answer: httpx.Response) -> list[float]:
    assert answer.status_code == 200, answer.text
    return [float(each["score"]) for each in answer.json()["data"]]
