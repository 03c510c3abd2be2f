"""Clients: threads that ask one thing after the other, and keep what they were answered."""

import json
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx

from tests.e2e.servers import PATIENCE_SECONDS, PLAIN
from tests.support.fits import Answered, Span
from tests.support.tiny import VOCABULARY
from tests.tools.soak.lives import Life, Lives

FIRST_TOKEN = 3
LONGEST_PROMPT, LONGEST_ANSWER = 24, 200


def covers(spans: list[Span], tokens: int) -> bool:
    """Whether spans lie end to end from the first token to the last."""
    ends = [0, *(span.end for span in spans)]
    return [span.start for span in spans] == ends[:-1] and ends[-1] == tokens


def read_plain(prompt: list[int], body: dict[str, Any]) -> Answered:
    """The answer in the body of a completion."""
    choice = body["choices"][0]
    return Answered(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"], spans_of(body))


def read_stream(prompt: list[int], chunks: list[dict[str, Any]]) -> Answered:
    """The answer in the chunks of a streamed completion; the last one says the spans."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    logprobs = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
    return Answered(prompt, tokens, logprobs, spans_of(chunks[-1]))


def spans_of(body: dict[str, Any]) -> list[Span]:
    found = body["delta_sync"]["spans"]
    return [Span(span["version"], span["start"], span["end"]) for span in found]


class Load:
    """So many threads, from ``start`` to ``stop``.

    Attributes:
        answers: all that finished. cut: requests that ended with the server. wrong: what should not have been.
    """

    def __init__(self, lives: Lives, threads: int, seed: int) -> None:
        self._lives = lives
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(random.Random(seed + number), number % 2 == 1), daemon=True)
            for number in range(threads)
        ]
        self.answers: list[Answered] = []
        self.cut = 0
        self.wrong: list[str] = []

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Returns once what is in flight is answered."""
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)

    def _ask(self, chance: random.Random, streaming: bool) -> None:
        while not self._stop.is_set():
            life = self._lives.wait(self._stop.is_set)
            if life is None:
                continue
            with closing(httpx.Client(base_url=life.server.url, timeout=PATIENCE_SECONDS, verify=PLAIN)) as client:
                while not self._stop.is_set() and self._lives.now() is life:
                    self._once(client, life, chance, streaming)

    def _once(self, client: httpx.Client, life: Life, chance: random.Random, streaming: bool) -> None:
        prompt = [chance.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(chance.randint(2, LONGEST_PROMPT))]
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": chance.randint(20, LONGEST_ANSWER),
            "temperature": 1.0,
            "seed": chance.randrange(2**31),
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": streaming,
        }
        try:
            answer = _streamed(client, body) if streaming else _plain(client, body)
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            # What was cut off in the middle is no whole JSON either.
            if life.ended:
                self.cut += 1
            else:
                self.wrong.append(f"{'streamed' if streaming else 'plain'} request: {type(error).__name__}: {error}")
            return
        if len(answer.tokens) != body["max_tokens"] or len(answer.logprobs) != len(answer.tokens):
            self.wrong.append(f"{body['max_tokens']} tokens were asked for, {len(answer.tokens)} came")
        elif not covers(answer.spans, len(answer.tokens)):
            self.wrong.append(f"spans do not cover {len(answer.tokens)} tokens end to end: {answer.spans}")
        else:
            self.answers.append(answer)


def _plain(client: httpx.Client, body: dict[str, Any]) -> Answered:
    response = client.post("/v1/completions", json=body)
    response.raise_for_status()
    return read_plain(body["prompt"], response.json())


def _streamed(client: httpx.Client, body: dict[str, Any]) -> Answered:
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        return read_stream(body["prompt"], list(_chunks(response)))


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and not line.endswith("[DONE]"):
            yield json.loads(line.removeprefix("data: "))
