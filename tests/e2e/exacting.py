"""Clients that ask for exactly one version, and a server that goes back and forth between two of them meanwhile."""

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import httpx

from tests.e2e.servers import PLAIN, Server, beside

EXACT = "X-Delta-Sync-Version"
TOKENS = 200
LONG = {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True}
CHAT = [{"role": "user", "content": "lazy dog"}]
INTERRUPTED = "a commit changed the weights before its answer was complete"
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {**LONG, "prompt": ["the quick", "fox"], "n": 2}),
    "completions, streamed": ("/v1/completions", {**LONG, "prompt": ["the quick", "fox"], "n": 2, "stream": True}),
    "chat, streamed": ("/v1/chat/completions", {**LONG, "messages": CHAT, "n": 2, "stream": True}),
}
"""Requests whose answers say which version made each token."""
MOST_SECONDS = 120


class Answer:
    """What a client got to its request for exactly one version.

    Attributes:
        status: of HTTP. named: version in the header. documents: bodies, of a stream one for each event.
        done: whether a stream ended as OpenAI's do.
    """

    def __init__(
        self, client: httpx.Client, path: str, body: Any, version: int, begun: Callable[[], object] = int
    ) -> None:
        """``begun``: called at the first part of the body."""
        parts = []
        with client.stream("POST", path, json=body, headers={EXACT: str(version)}) as response:
            for part in response.iter_text():
                parts.append(part)
                begun()
            self.status, self.named = response.status_code, int(response.headers.get(EXACT, -1))
            streamed = response.headers["content-type"].startswith("text/event-stream")
        text = "".join(parts)
        data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        bodies = data if streamed else [text]
        self.documents: list[dict[str, Any]] = [json.loads(one) for one in bodies if one != "[DONE]"]
        self.done = bodies[-1] == "[DONE]"

    @property
    def error(self) -> dict[str, Any] | None:
        """Of the last document."""
        error: dict[str, Any] | None = self.documents[-1].get("error")
        return error

    def expect_error(self, version: int) -> None:
        """It is the one that another version makes of an answer."""
        assert self.error is not None
        assert f"version {version} is asked for ({EXACT}), and" in self.error["message"], self.error
        if self.status == 200:
            assert self.error["code"] == 409, self.error
        else:
            assert (self.status, self.error["kind"]) == (409, "version"), self.error

    def versions(self) -> set[int]:
        """Those that made the tokens, as ours or vLLM's spans say."""
        if "delta_sync" in self.documents[-1]:
            return {span["version"] for span in self.documents[-1]["delta_sync"]["spans"]}
        choices = [choice for document in self.documents for choice in document["choices"]]
        return {int(span["version"]) for choice in choices for span in choice["weight_versions"] or ()}


class Mover:
    """Takes a server back to an older version and forward again, and knows which of the two it serves."""

    def __init__(self, server: Server, back: int, forward: int) -> None:
        self.versions = (back, forward)
        # Another test may have left it at either.
        self.served: int = server.status()["served"]["version"]
        self.server = server

    def move(self) -> None:
        back, forward = self.versions
        if self.served == forward:
            done = self.server.post("/delta_sync/rollback", {"version": back})
        else:
            done = self.server.post("/delta_sync/sync", {"version": forward})
        assert done.status_code == 200, done.text
        self.served = back if self.served == forward else forward


def client_of(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=300, verify=PLAIN)


def race(mover: Mover, asked: Mapping[str, tuple[httpx.Client, str, dict[str, Any]]], seconds: float) -> None:
    """As fast as they can, clients ask and versions change, until each was answered and was ended by a commit.

    Every answer is of the version asked for, and every other one an error.

    Args:
        asked: client, path and body by name.
    """
    seen = {name: Counter[str]() for name in asked}
    problems: list[str] = []

    def ask(name: str, client: httpx.Client, path: str, body: dict[str, Any], ended: threading.Event) -> None:
        for tokens in itertools.cycle((1, 8, 40, TOKENS)):
            if ended.is_set():
                return
            version = mover.versions[tokens % 3 == 1]
            answer = Answer(client, path, shortened(body, tokens), version)
            if answer.error is not None:
                answer.expect_error(version)
                seen[name]["interrupted" if INTERRUPTED in answer.error["message"] else "refused"] += 1
                continue
            seen[name]["answered"] += 1
            if answer.status != 200 or answer.named != version or answer.versions() != {version}:
                problems.append(f"{name}: {version} was asked for: {answer.status}, {answer.versions()}")

    def enough() -> bool:
        assert problems == []
        return all(counted["answered"] and counted["interrupted"] for counted in seen.values())

    move_while(mover, [partial(ask, name, *each) for name, each in asked.items()], enough, seconds)
    assert problems == []


def move_while(
    mover: Mover, clients: Sequence[Callable[[threading.Event], None]], enough: Callable[[], bool], seconds: float
) -> None:
    """Change versions while clients ask, for so many seconds at least and until it is enough."""
    began = time.monotonic()
    with beside(*clients) as threads:
        while time.monotonic() < began + seconds or not enough():
            assert time.monotonic() < began + MOST_SECONDS, "not all that was to come has come"
            assert all(thread.is_alive() for thread in threads), "a client failed"
            mover.move()


def shortened(body: dict[str, Any], tokens: int) -> dict[str, Any]:
    if "sampling_params" in body:
        return {**body, "sampling_params": {**body["sampling_params"], "max_tokens": tokens}}
    return {**body, "max_output_tokens" if "input" in body else "max_tokens": tokens}
