"""What the programs of the machines share: events for whoever started them, and waiting for what is away."""

import json
import os
import time
from collections.abc import Callable
from typing import IO, Any, Self, TypeVar

from examples.demo.rollouts import ServerError
from vllm_delta_sync.errors import PublishError, StoreError

RETRY_SECONDS = 0.5
SHOWN_CHARACTERS = 300

_Given = TypeVar("_Given")


class Events:
    """JSON lines. Each has ``event`` and ``at``, seconds on the monotonic clock that a machine's processes share."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    @classmethod
    def on_stdout(cls) -> Self:
        """Take over standard output, and send what libraries print there now and then to standard error."""
        stream = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        return cls(stream)

    def tell(self, event: str, **fields: Any) -> None:
        """Write one event."""
        self._stream.write(json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n")
        self._stream.flush()


class Patience:
    """Tries again for ``seconds`` what fails because somebody is away, and says so."""

    def __init__(self, events: Events, seconds: float) -> None:
        self._events = events
        self.seconds = seconds

    def until_done(self, what: str, call: Callable[[], _Given]) -> _Given:
        """What ``call`` gives, as soon as it gives it.

        Args:
            what: is away, for the events ``away`` and ``back``.

        Raises:
            ServerError: an HTTP server refused (4xx), or is away for longer. StoreError, PublishError: the store is.
        """
        began: float | None = None
        while True:
            try:
                given = call()
            except (ServerError, StoreError, PublishError) as error:
                if isinstance(error, ServerError) and error.status is not None and error.status < 500:
                    raise
                if began is None:
                    began = time.monotonic()
                    self._events.tell("away", what=what, error=str(error)[:SHOWN_CHARACTERS])
                if time.monotonic() - began > self.seconds:
                    raise
                time.sleep(RETRY_SECONDS)
                continue
            if began is not None:
                self._events.tell("back", what=what, seconds=time.monotonic() - began)
            return given
