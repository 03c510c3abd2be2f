"""``LivePage`` builds what ``GET /delta_sync/overview`` answers: one document for all viewers of the page."""

import math
import time
from collections.abc import Callable
from typing import Any

from vllm_delta_sync.client import open_run
from vllm_delta_sync.dashboard.overview import PAGE_SECONDS, BackgroundReader, ServerView, build_overview
from vllm_delta_sync.dashboard.page import harmless_json
from vllm_delta_sync.dashboard.page_reader import PageReader
from vllm_delta_sync.engine.observe.states import STATES
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.settings import Settings


class LivePage:
    """The page's document on a server.

    The bucket is read in a thread of its own, only while there are viewers, and no read begins in a pause.

    Args:
        settings: of the run; it is opened at the first view.
    """

    def __init__(self, settings: Settings) -> None:
        reader = PageReader(
            # Without the heat map: it reads objects, and this machine is there to generate. Without the URL: anyone
            # who reaches the port may read the page.
            lambda: open_run(settings.bucket, settings.keyring(), settings.store()),
            heat=False,
            show_url=False,
        )
        self._reader = BackgroundReader(reader.read)
        self._answer = b""
        self._built = -math.inf

    def answer(self, status: Callable[[], dict[str, Any]]) -> bytes:
        """Return the document as JSON, at most half of ``PAGE_SECONDS`` old; never waits.

        Args:
            status: returns the server's status; may raise DeltaSyncError.
        """
        if time.monotonic() - self._built < PAGE_SECONDS / 2:
            return self._answer
        try:
            found: dict[str, Any] | DeltaSyncError = status()
        except DeltaSyncError as error:
            found = error
        paused = isinstance(found, dict) and found["state"] == "committing"
        if paused and self._answer:
            return self._answer
        view = self._reader.latest(may_read=not paused)
        overview = build_overview("server", time.time(), view, [ServerView(None, found)], STATES, PAGE_SECONDS)
        self._answer = harmless_json(overview)
        # The first document comes before the bucket was read: the next viewer shall not wait for its turn.
        self._built = time.monotonic() if overview["run"] is not None else -math.inf
        return self._answer
