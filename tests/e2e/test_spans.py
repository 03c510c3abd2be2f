"""Which policy answered, token by token, on one real vLLM that follows training meanwhile."""

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from tests.e2e.servers import Server, beside
from tests.e2e.world import Follower

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("follower")]
TOKENS = 100
LONG = {"model": "tiny", "n": 2, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {**LONG, "prompt": ["the quick", "fox"], "stream": True},
    "/v1/chat/completions": {
        **LONG,
        "messages": [{"role": "user", "content": "lazy dog"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
}
MOST_VERSIONS = 20
Answers = list[tuple[str, int, list[dict[str, Any]]]]
"""Path, version of the header, and chunks of each stream."""


@contextmanager
def streaming(server: Server, answers: Answers) -> Iterator[None]:
    """One stream of each kind after the other, from the start of the block to its end."""
    begun = {path: threading.Event() for path in STREAMS}

    def read(path: str, ended: threading.Event) -> None:
        with httpx.Client(base_url=server.url, timeout=300) as client:
            while not ended.is_set():
                with client.stream("POST", path, json=STREAMS[path]) as response:
                    lines = response.iter_lines()
                    chunks = [next(lines)]
                    begun[path].set()
                    chunks += lines
                    answers.append((path, int(response.headers["x-delta-sync-version"]), documents(chunks)))

    with beside(*(partial(read, path) for path in STREAMS)):
        assert all(event.wait(120) for event in begun.values()), "a stream did not begin"
        yield


def documents(lines: list[str]) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


def check_stream(path: str, admitted: int, chunks: list[dict[str, Any]]) -> int:
    """Spans are in the last chunk alone, and cover the tokens of each choice; how many lie before another version."""
    assert [number for number, chunk in enumerate(chunks) if "delta_sync" in chunk] == [len(chunks) - 1]
    assert ("usage" in chunks[-1]) == path.endswith("chat/completions")
    tokens: Counter[int] = Counter()
    for choice in itertools.chain.from_iterable(chunk["choices"] for chunk in chunks):
        tokens[choice["index"]] += len(choice.get("token_ids") or ())
    spans = chunks[-1]["delta_sync"]["spans"]
    assert dict(tokens) == dict.fromkeys(range(2 if path.endswith("chat/completions") else 4), TOKENS)
    for index, found in itertools.groupby(spans, key=lambda span: span["index"]):
        own = list(found)
        assert [own[0]["start"], own[-1]["end"]] == [0, tokens.pop(index)]
        assert all(left["end"] == right["start"] for left, right in itertools.pairwise(own))
        versions = [span["version"] for span in own]
        assert versions == sorted(set(versions))
        assert versions[0] >= admitted
    assert not tokens, "choices without spans"
    return len(spans) - len({span["index"] for span in spans})


def test_which_policy_answered(follower: Follower) -> None:
    world, server = follower.world, follower.server
    answers: Answers = []
    with streaming(server, answers):
        # A commit may fall between two streams of a kind.
        for published in range(MOST_VERSIONS):
            if published >= 3 and all(crossings(answers).values()):
                break
            server.wait_served(world.publish())
            assert server.get("/delta_sync/ready").status_code == 200
    crossed = crossings(answers)
    assert all(crossed.values()), f"none of {len(answers)} streams met a commit: {crossed}"


def crossings(answers: Answers) -> Counter[str]:
    """Per kind of stream, how often one met a commit."""
    crossed = Counter(dict.fromkeys(STREAMS, 0))
    for path, admitted, chunks in list(answers):
        crossed[path] += check_stream(path, admitted, chunks)
    return crossed
