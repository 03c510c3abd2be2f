"""The clients of ``benchmarks.serving``: ``python -m benchmarks.serving.load URL STREAMS TOKENS FILE [LENGTH POOL]``.

So many streams at a time, each one request after the other: greedy, of fixed length, whatever token comes. Prompts have
LENGTH tokens (default: 8) and differ, so that no answer comes from another's cache; with POOL, all streams take their
prompts from a pool of so many, in one order. Prints ``STREAMING`` when each stream has a token. Ends with a line on
standard input, and then writes FILE: an array of (seconds by the monotonic clock, request, tokens) for each piece of an
answer that arrived.
"""

import asyncio
import json
import random
import sys
from array import array
from collections.abc import Iterator
from itertools import count, cycle, islice
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.common.processes import MODEL_NAME
from examples.rl_loop import VOCABULARY

PROMPT_TOKENS = 8
DATA, DONE = b"data: ", b"data: [DONE]"
STREAMING = "every stream has a token"


class Arrivals:
    """What arrived when."""

    def __init__(self) -> None:
        self._times, self._requests, self._tokens = array("d"), array("d"), array("d")
        self._asked = 0
        self._waits_for: set[int] = set()
        self.streaming = asyncio.Event()

    def wait_for_first(self, streams: int) -> None:
        """Set ``streaming`` when each of the first so many requests has a token."""
        self._waits_for = set(range(1, streams + 1))

    def new_request(self) -> int:
        """A number for one more request."""
        self._asked += 1
        return self._asked

    def add(self, now: float, request: int, tokens: int) -> None:
        self._times.append(now)
        self._requests.append(request)
        self._tokens.append(tokens)
        self._waits_for.discard(request)
        if not self._waits_for:
            self.streaming.set()

    def save(self, path: Path) -> None:
        np.save(path, np.stack([np.frombuffer(part) for part in (self._times, self._requests, self._tokens)], axis=1))


async def ask(session: aiohttp.ClientSession, prompt: list[int], tokens: int, arrivals: Arrivals) -> None:
    """One request, to the end of its answer."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    clock = asyncio.get_running_loop().time
    request, arrived, left = arrivals.new_request(), 0, b""
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        # Whatever is read at once is one arrival: its parts have no gaps between them that the server made.
        while data := await response.content.readany():
            *lines, left = (left + data).split(b"\n")
            got = sum(map(tokens_in, lines))
            if got:
                arrived += got
                arrivals.add(clock(), request, got)
    if arrived != tokens:
        raise SystemExit(f"a request for {tokens} tokens was answered with {arrived}")


def tokens_in(line: bytes) -> int:
    """How many tokens a line of the stream brings."""
    if not line.startswith(DATA) or line.startswith(DONE):
        return 0
    return sum(len(choice["token_ids"] or ()) for choice in json.loads(line[len(DATA) :])["choices"])


def prompts(length: int, pool: int, seed: int) -> Iterator[list[int]]:
    """Prompts without end; of a pool, unless it is 0, the same ones for each seed."""
    chance = random.Random(-1 if pool else seed)
    made = ([chance.randrange(4, len(VOCABULARY)) for _ in range(length)] for _ in count())
    return cycle(islice(made, pool)) if pool else made


async def stream(session: aiohttp.ClientSession, asked: Iterator[list[int]], tokens: int, arrivals: Arrivals) -> None:
    """Requests without end."""
    for prompt in asked:
        await ask(session, prompt, tokens, arrivals)


async def load(url: str, streams: int, tokens: int, arrivals: Arrivals, length: int, pool: int) -> None:
    """Keep the streams going until a line comes; the first that fails ends them all."""
    connector = aiohttp.TCPConnector(limit=0)
    patience = aiohttp.ClientTimeout(total=None, sock_read=120)
    async with aiohttp.ClientSession(url, connector=connector, timeout=patience) as session:
        arrivals.wait_for_first(streams)
        running = [
            asyncio.create_task(stream(session, prompts(length, pool, seed), tokens, arrivals))
            for seed in range(streams)
        ]
        told = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        begun = asyncio.create_task(arrivals.streaming.wait())
        done, _ = await asyncio.wait([begun, told, *running], return_when=asyncio.FIRST_COMPLETED)
        if begun in done:
            print(STREAMING, flush=True)
            done, _ = await asyncio.wait([told, *running], return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
        for task in done - {told, begun}:
            task.result()
            raise SystemExit("a stream ended by itself")


def main(url: str, streams: str, tokens: str, file: str, length: str = str(PROMPT_TOKENS), pool: str = "0") -> None:
    arrivals = Arrivals()
    asyncio.run(load(url, int(streams), int(tokens), arrivals, int(length), int(pool)))
    arrivals.save(Path(file))


if __name__ == "__main__":
    main(*sys.argv[1:7])
