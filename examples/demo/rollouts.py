"""HTTP client of the server: completions with token ids, log-probs and the weight version of every token."""

import http.client
import json
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

CONNECTIONS = 4
REQUEST_SECONDS = 120.0


class ServerError(Exception):
    """The server could not be reached, refused, or answered something else than was asked for.

    ``status``: of its HTTP answer, if that is what is wrong.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Completion:
    """One answer.

    ``tokens`` ends with the end token if ``finished``; ``logprobs`` and ``versions`` are per token. A version is
    None where the server has not proven yet which version it serves.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int | None]
    finished: bool


class JsonClient:
    """JSON over HTTP to one server; keeps one connection per thread."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._local = threading.local()

    def request(self, method: str, path: str, body: object = None, seconds: float = REQUEST_SECONDS) -> Any:
        """Send one request and return the decoded JSON answer.

        A connection that the server closed while it was idle is opened anew, once.

        Raises:
            ServerError: not reachable, or a status of 400 and above.
        """
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(2):
            connection = self._connection(fresh=attempt > 0, seconds=seconds)
            try:
                connection.request(method, path, data, {"Content-Type": "application/json"})
                response = connection.getresponse()
                text = response.read()
            except (http.client.HTTPException, OSError) as error:
                if attempt == 0 and not isinstance(error, TimeoutError):
                    continue
                raise ServerError(f"{method} {path}: {type(error).__name__}: {error}") from error
            if response.status >= 400:
                shown = text[:500].decode(errors="replace")
                raise ServerError(f"{method} {path}: HTTP {response.status}: {shown}", response.status)
            return json.loads(text) if text else None
        raise ServerError(f"{method} {path}: no answer")

    def _connection(self, fresh: bool, seconds: float) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None or fresh:
            if connection is not None:
                connection.close()
            connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
            self._local.connection = connection
        if connection.sock is not None:
            connection.sock.settimeout(seconds)
        return connection


class ServerClient(JsonClient):
    """A vLLM server; has as many threads as are useful for ``complete``."""

    def __init__(self, url: str, model: str, connections: int = CONNECTIONS) -> None:
        super().__init__(url)
        self._model = model
        self._pool = ThreadPoolExecutor(connections, thread_name_prefix="rollouts")
        self._connections = connections

    def complete(
        self,
        prompts: list[list[int]],
        samples: int,
        max_tokens: int,
        temperature: float,
    ) -> list[list[Completion]]:
        """``samples`` completions of every prompt (token ids), spread over the connections.

        Raises:
            ServerError: see ``request``; also when an answer lacks ids, log-probs or versions.
        """
        body = {
            "model": self._model,
            "n": samples,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "logprobs": 0,
            "return_token_ids": True,
        }
        share = -(-len(prompts) // self._connections)
        pieces = [prompts[start : start + share] for start in range(0, len(prompts), share)]
        bodies = [{**body, "prompt": piece} for piece in pieces]
        answers = self._pool.map(lambda one: self.request("POST", "/v1/completions", one), bodies)
        return [group for answer in answers for group in parse_completions(answer, samples)]

    def close(self) -> None:
        """End the threads; their connections close with them."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def parse_completions(answer: Any, samples: int) -> list[list[Completion]]:
    """Group the choices of one ``/v1/completions`` answer by prompt.

    Without ``delta_sync`` in the answer (a server that follows no run) every version is None.

    Raises:
        ServerError: a field is missing, or spans do not cover a choice's tokens.
    """
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        spans = answer.get("delta_sync", {}).get("spans", [])
        follows = "delta_sync" in answer
        completions = [_completion(choice, spans, follows) for choice in choices]
    except (KeyError, TypeError) as error:
        raise ServerError(f"the answer of /v1/completions lacks {error}") from error
    return [completions[start : start + samples] for start in range(0, len(completions), samples)]


def _completion(choice: Any, spans: Iterable[Any], follows: bool) -> Completion:
    tokens = list(choice["token_ids"])
    logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
    if len(logprobs) != len(tokens):
        raise ServerError(f"choice {choice['index']} has {len(tokens)} tokens and {len(logprobs)} log-probs")
    versions: list[int | None] = []
    for span in spans:
        if span["index"] == choice["index"]:
            versions += [span["version"]] * (span["end"] - span["start"])
    if not follows:
        versions = [None] * len(tokens)
    if len(versions) != len(tokens):
        raise ServerError(f"choice {choice['index']} has {len(tokens)} tokens, its spans cover {len(versions)}")
    finished = choice["finish_reason"] == "stop"
    return Completion(choice["text"], tokens, logprobs, versions, finished)
