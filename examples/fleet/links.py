"""The links' own process, and the client that tells it what to connect.

    python -m examples.fleet.links BYTES_PER_SECOND ROUND_TRIP_SECONDS [slow-start]

Speaks JSON lines: ``{"forward": LINK, "port": PORT, "inward": BOOL, "host": ADDRESS, "target": ADDRESS}`` is answered
by ``{"port": PORT}``, and ``{}`` by ``{LINK: {"up": BYTES, "down": BYTES}, …}``. A link is made when it is first named.
"""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from examples.demo.processes import Child, DemoError
from examples.fleet.shaping import HOST, Link

SLOW_START = "slow-start"
Passed = dict[str, int]
"""Bytes that a link has passed: ``up`` and ``down``."""


class Links:
    """All links of a fleet; any thread may ask.

    Attributes:
        child: the process.
    """

    def __init__(self, bits_per_second: float, round_trip_seconds: float, log: Path, slow_start: bool = False) -> None:
        command = [sys.executable, "-m", "examples.fleet.links", str(bits_per_second / 8), str(round_trip_seconds)]
        command += [SLOW_START] if slow_start else []
        self.child = Child("the links", command, log, talk=True)
        self._lock = threading.Lock()

    def forward(self, link: str, port: int, inward: bool = False, host: str = HOST, target: str = HOST) -> int:
        """A port through which this link's machine reaches ``port``; inward: through which others reach it there.

        Args:
            host: address at which the returned port is opened. target: address of ``port``.

        Raises:
            DemoError: the process is gone.
        """
        question = {"forward": link, "port": port, "inward": inward, "host": host, "target": target}
        return int(self._ask(question)["port"])

    def passed(self) -> dict[str, Passed]:
        """Bytes so far, of every link. Raises DemoError: the process is gone."""
        answer: dict[str, Passed] = self._ask({})
        return answer

    def _ask(self, question: dict[str, Any]) -> Any:
        with self._lock:
            self.child.say(json.dumps(question))
            line = self.child.lines.readline()
        if not line:
            raise DemoError(f"the process of the links is gone; the end of {self.child.log.name}:\n{self.child.tail()}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.child.stop()


async def _answer(links: dict[str, Link], question: dict[str, Any], make: Callable[[], Link]) -> Any:
    if not question:
        return {name: {"up": link.up.passed, "down": link.down.passed} for name, link in links.items()}
    name = question["forward"]
    if name not in links:
        links[name] = make()
    port, inward = question["port"], question["inward"]
    return {"port": await links[name].forward(port, inward, question["host"], question["target"])}


def main(arguments: list[str]) -> None:
    """Serve until standard input ends."""
    rate, round_trip = map(float, arguments[:2])
    slow_start = SLOW_START in arguments[2:]
    links: dict[str, Link] = {}
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    for line in sys.stdin:
        print(
            json.dumps(run(_answer(links, json.loads(line), lambda: Link.make(rate, round_trip, slow_start)))),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
