"""Operators who cannot make up their minds: rollbacks, holds, and versions asked for, at random."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx

from tests.e2e.servers import Server
from tests.tools.soak.lives import Life, Lives

REFUSED_LATE = ("chain", "busy", "not_found")
"""What may have become of a version between the look at the status and the request."""
PAUSE_SECONDS = (0.3, 1.5)


class Chaos(threading.Thread):
    """One after the other, until ``stop``; each ends with the run being followed again.

    Attributes:
        done: how often what was done, refusals counted apart. wrong: answers that none of this explains.
    """

    def __init__(self, lives: Lives, seed: int) -> None:
        super().__init__(daemon=True)
        self._lives = lives
        self._chance = random.Random(seed)
        self._ending = threading.Event()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self) -> None:
        acts: list[Callable[[Server], None]] = [self._roll_back, self._hold, self._catch_up, self._to_and_fro]
        acts.append(self._aim)
        while not self._rest():
            life = self._lives.wait(self._ending.is_set)
            if life is not None:
                self._attempt(life, self._chance.choice(acts))

    def stop(self) -> None:
        """Returns once what is under way is done, and the run is followed."""
        self._ending.set()
        self.join()

    def _rest(self) -> bool:
        return self._ending.wait(self._chance.uniform(*PAUSE_SECONDS))

    def _attempt(self, life: Life, act: Callable[[Server], None]) -> None:
        try:
            act(life.server)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            if not life.ended:
                self.wrong.append(f"{act.__name__}: {type(error).__name__}: {error}")

    def _post(self, server: Server, action: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer's document; a refusal is counted, and is none of ours unless it is one of REFUSED_LATE."""
        response = server.post(f"/delta_sync/{action}", body)
        document: dict[str, Any] = response.json()
        if response.status_code == 200:
            self.done[action] += 1
            return document
        kind = document["error"]["kind"]
        self.done[f"{action} refused: {kind}"] += 1
        if kind not in REFUSED_LATE:
            self.wrong.append(f"{action} {body}: {response.text}")
        return document

    def _roll_back(self, server: Server) -> None:
        """Back, stay there for a while, and follow again."""
        undo = server.status()["undo"]
        if undo:
            version = self._chance.choice(undo)
            self._expect(self._post(server, "rollback", {"version": version}), version)
            self._rest()
        self._post(server, "release")

    def _hold(self, server: Server) -> None:
        """Let versions pile up, so that they are merged."""
        held = self._post(server, "hold")
        self._rest()
        self._rest()
        status = server.status()
        if held["served"] != status["served"]:
            self.wrong.append(f"held at {held['served']}, and {status['served']} was served")
        self._post(server, "release")

    def _catch_up(self, server: Server) -> None:
        """Held, and one step at a time after that."""
        self._post(server, "hold")
        self._rest()
        for _ in range(2):
            status = server.status()
            served, head = status["served"]["version"], status["head"]["version"]
            if served < head:
                version = self._chance.randint(served + 1, head)
                self._expect(self._post(server, "sync", {"version": version}), version)
        self._post(server, "release")

    def _to_and_fro(self, server: Server) -> None:
        """Back by what means forward, and on again."""
        undo = server.status()["undo"]
        if undo:
            back = self._chance.choice(undo)
            document = self._post(server, "sync", {"version": back})
            self._expect(document, back)
            if "error" not in document:
                self._expect(self._post(server, "sync", {"version": back + 1}), back + 1)
        self._post(server, "release")

    def _aim(self, server: Server) -> None:
        """Another target for a while: a version before the newest."""
        status = server.status()
        version = max(0, status["served"]["version"] - self._chance.randint(0, 3))
        self._expect(self._post(server, "target", {"target": str(version)}), version)
        self._rest()
        self._post(server, "target", {"target": "head"})

    def _expect(self, document: dict[str, Any], version: int) -> None:
        if "error" not in document and document["served"]["version"] != version:
            self.wrong.append(f"version {version} was asked for, {document['served']} was served")
