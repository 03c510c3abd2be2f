"""Keeps a signed HEAD.json from running out while its publisher lives, also when nothing is published."""

import threading

from trainer_side.writer import RunWriter

THREAD_NAME = "delta-sync-head"


class HeadRenewal:
    """One thread that writes HEAD again, each time a third of its lifetime is over.

    Args:
        needed: whether HEAD has an end at all.
    """

    def __init__(self, writer: RunWriter, needed: bool) -> None:
        self._writer = writer
        self._ended = threading.Event()
        # It never keeps a process alive: that HEAD runs out is what tells of a publisher that has ended.
        self._thread = threading.Thread(target=self._serve, name=THREAD_NAME, daemon=True) if needed else None
        if self._thread is not None:
            self._thread.start()

    def close(self) -> None:
        """End the thread, once what it has under way is done. May be called twice."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        seconds = self._writer.renew()
        while seconds is not None and not self._ended.wait(seconds):
            seconds = self._writer.renew()
