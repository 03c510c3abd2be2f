"""``ReceiverService`` is the thread that drives the receiver; a notice, a request or the clock wakes it."""

import atexit
import queue
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from vllm_delta_sync.engine.commit.transaction import EnginePort, EngineStopped
from vllm_delta_sync.engine.follow.heartbeat import HeartbeatWriter
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.follow.standing_orders import StandingOrderStore
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.errors import DeltaSyncError, EngineError, NoticeError, SignatureError
from vllm_delta_sync.logs import LogThrottle, without_numbers
from vllm_delta_sync.notice import Notice, NoticeSubscriber
from vllm_delta_sync.notice.curve import client_keys
from vllm_delta_sync.settings import Settings

LONGEST_RETRY_SECONDS = 30.0
LONGEST_REPAIR_SECONDS = 600.0
NOTICE_WAIT_SECONDS = 0.5
MIN_POLL_SECONDS = 0.02
POLL_SPREAD = 0.25
"""Share by which intervals differ: a notice makes all servers of a run poll at once, and they must not stay in step."""
MOVING = ("sync", "release", "target")
"""Requests after which a version may be served that would not come by itself."""
OVERRULING = ("hold", "rollback", "target")
"""Requests that come before the commit of a version that is only staged."""
STOPPED = "following has stopped, so this request was not carried out"
END_HEARTBEAT_SECONDS = 5.0
"""Longest delay of this process's exit for the last heartbeat."""


class ReceiverService:
    """Owns the receiver's thread, and threads for notices and the heartbeat where the settings ask for them.

    Args:
        exports_metrics: whether the gauges of Prometheus, which a process has once, show this receiver.

    Raises:
        SettingsError: the keys for notices cannot be used.

    Attributes:
        receiver: ``status`` and ``served_version`` may be read from any thread.
    """

    def __init__(self, port: EnginePort, settings: Settings, exports_metrics: bool = True) -> None:
        self._notice_keys = client_keys(settings.notice_key, settings.notice_server_key)
        self._orders = StandingOrderStore(settings)
        self.receiver = Receiver(port, settings, orders=self._orders)
        if exports_metrics:
            self.receiver.board.export_metrics()
        self._settings = settings
        self._requests: queue.SimpleQueue[tuple[str, Any, Future[Any]]] = queue.SimpleQueue()
        # Set before such a request is queued, so that the thread never misses one that is.
        self._overruled = threading.Event()
        self._wake = threading.Event()
        self._stop = threading.Event()
        # Written by one thread each: the newest notice by ``_listen``, the newest one handled by ``_follow``.
        self._announced: Notice | None = None
        self._handled: Notice | None = None
        self._notice_delay = MIN_POLL_SECONDS
        self._failures = 0
        self._throttle = LogThrottle(logger)
        self._threads = [threading.Thread(target=self._follow, name="delta-sync", daemon=True)]
        self._heartbeat: HeartbeatWriter | None = None
        if settings.receiver_id is not None:
            self._heartbeat = HeartbeatWriter(self.receiver, settings.receiver_id, settings.heartbeat_seconds)
            self.receiver.board.watch(self._heartbeat.notify)
            self._heartbeat_thread = threading.Thread(
                target=self._heartbeat.run, args=(self._stop,), name="delta-sync-heartbeat", daemon=True
            )
            self._threads.append(self._heartbeat_thread)
        if settings.notice is not None:
            self.receiver.board.set(listens=True)
            self._threads.append(threading.Thread(target=self._listen, name="delta-sync-notice", daemon=True))

    def start(self) -> None:
        """Start all threads."""
        if self._heartbeat is not None:
            atexit.register(self._end_heartbeat)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask the threads to end. They are daemons and hold no unsaved state."""
        atexit.unregister(self._end_heartbeat)
        self._stop_threads()

    def _stop_threads(self) -> None:
        self._stop.set()
        self._wake.set()
        self._notify_heartbeat()

    def _end_heartbeat(self) -> None:
        """Write the last heartbeat when the process exits, so that the fleet does not wait for this server."""
        self.stop()
        self._heartbeat_thread.join(END_HEARTBEAT_SECONDS)

    def join(self, timeout: float) -> None:
        """Wait for the threads to end, after ``stop``; ``timeout`` in seconds, per thread."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout)

    def request(self, action: str, argument: Any = None) -> "Future[Any]":
        """Queue an action.

        Args:
            action: ``sync`` (argument: version or None), ``rollback`` (a version), ``target`` (what to follow),
                ``hold``, ``release`` or ``verify``.

        Returns:
            a future of the status reached (of the verdict for ``verify``), or of the error.
        """
        future: Future[Any] = Future()
        if action in MOVING:
            self.receiver.board.add_request(future)
        if action in OVERRULING:
            self._overruled.set()
        self._requests.put((action, argument, future))
        self._wake.set()
        if self._stop.is_set():
            self._refuse_requests()
        return future

    def _follow(self) -> None:
        try:
            self._follow_until_stop()
        except EngineStopped as stopped:
            logger.info("no longer following: %s", str(stopped) or "the engine has stopped")
            # The last heartbeat may take until the process exits.
            self._stop_threads()
        finally:
            self._refuse_requests()
            # Not by ``join``, whose caller may have given up waiting: what follows next must find the order.
            self._orders.release()

    def _follow_until_stop(self) -> None:
        while not self._stop.is_set():
            polled = time.monotonic()
            self._serve_requests()
            announced = self._pending_notice()
            self._handled = announced or self._handled
            self.receiver.announced_version = None if announced is None else announced.version
            self._run_once()
            self._adjust_notice_delay(announced)
            self._notify_heartbeat()
            self._wait_for_work(polled)
            # However many requests come, the bucket is polled no more often than this.
            self._stop.wait(max(0.0, polled + MIN_POLL_SECONDS - time.monotonic()))

    def _wait_for_work(self, polled: float) -> None:
        """Wait for the next poll, for a request, or for a notice and its delay.

        The interval counts from the start of the last poll, so it includes the poll's round trips. After a failure it
        counts from the end, so that a store that times out is not polled again at once.
        """
        due = (time.monotonic() if self._failures else polled) + self._delay()
        while not self._stop.is_set() and self._requests.empty():
            notice = self._pending_notice()
            if notice is not None and not self._is_new(notice):
                self._handled = notice
                continue
            until = due if notice is None else min(due, polled + self._notice_delay)
            left = until - time.monotonic()
            if left <= 0:
                return
            self._wake.wait(left)
            self._wake.clear()

    def _pending_notice(self) -> Notice | None:
        """Return the newest notice if no poll has followed it."""
        notice = self._announced
        return None if notice is self._handled else notice

    def _adjust_notice_delay(self, announced: Notice | None) -> None:
        """Double the delay of polls after a false notice, because anyone may send one; reset it after a true one."""
        if announced is None:
            return
        if not self._is_new(announced):
            self._notice_delay = MIN_POLL_SECONDS
        else:
            self._notice_delay = min(2 * self._notice_delay, max(self._settings.poll_seconds, MIN_POLL_SECONDS))

    def _delay(self) -> float:
        if not self._failures:
            return self._settings.poll_seconds * random.uniform(1 - POLL_SPREAD, 1 + POLL_SPREAD)
        # A repair reads the whole model, so it is retried less often.
        error = self.receiver.board.error
        reads = self.receiver.can_repair and (error is None or error["kind"] != SignatureError.kind)
        longest = LONGEST_REPAIR_SECONDS if reads else LONGEST_RETRY_SECONDS
        return float(min(longest, self._settings.poll_seconds * 2 ** min(self._failures - 1, 10)))

    def _run_once(self) -> None:
        receiver = self.receiver
        state, served = receiver.board.state, receiver.served_version
        follows = self._settings.policy == "follow"
        if state == "lost":
            return
        try:
            receiver.port.set_pending_label()
            if state == "refused" and not receiver.can_repair and not self._replaced():
                return
            if receiver.can_repair and follows:
                receiver.repair()
            elif receiver.has_pending_order or (follows and (served is None or not receiver.board.holding)):
                receiver.advance(until=self._has_requests, overruled=self._is_overruled)
            elif not follows and not receiver.can_repair:
                receiver.observe()
            elif served is not None:
                receiver.check_served()
            self._failures = 0
        except DeltaSyncError as error:
            # While it waits the poll interval stays: what it waits for must not be seen late.
            self._failures = 0 if receiver.only_waits(error) else self._failures + 1
            self._log_error(error)
        except Exception as error:  # the thread must survive any bug, and the status must show it
            self._failures += 1
            failure = EngineError(f"unexpected {type(error).__name__}: {error}")
            self.receiver.fail(failure)
            if self._throttle.is_due(without_numbers(failure.message)):
                logger.exception("the receiver failed unexpectedly; it will retry")

    def _has_requests(self) -> bool:
        """Return whether a request waits; called between two commits."""
        self._notify_heartbeat()
        return not self._requests.empty()

    def _is_overruled(self) -> bool:
        return self._overruled.is_set() and not self._requests.empty()

    def _notify_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.notify()

    def _replaced(self) -> bool:
        """Return whether another run has replaced the refused one."""
        try:
            return self.receiver.history.is_replaced()
        except DeltaSyncError:
            return False

    def _log_error(self, error: DeltaSyncError) -> None:
        text = f"{error.kind}: {error.message}"
        self._throttle.warn(text, without_numbers(text))

    def _taken_requests(self) -> "Iterator[tuple[str, Any, Future[Any]]]":
        """Take the requests that wait from the queue, without those whose callers have gone."""
        while True:
            try:
                action, argument, future = self._requests.get_nowait()
            except queue.Empty:
                return
            if future.set_running_or_notify_cancel():
                yield action, argument, future

    def _serve_requests(self) -> None:
        self._overruled.clear()
        for action, argument, future in self._taken_requests():
            try:
                future.set_result(self._act(action, argument))
            except EngineStopped:
                future.set_exception(EngineError(STOPPED))
                raise
            except Exception as error:  # noqa: BLE001  the caller gets it through the future
                future.set_exception(error)

    def _refuse_requests(self) -> None:
        """Fail the requests that came too late."""
        for *_, future in self._taken_requests():
            future.set_exception(EngineError(STOPPED))

    def _act(self, action: str, argument: Any) -> Any:
        receiver = self.receiver
        if action == "verify":
            return receiver.verify()
        served = receiver.served_version
        if action == "rollback" or (action == "sync" and argument is not None and served and argument < served):
            receiver.rollback(argument)
        elif action == "sync":
            receiver.advance(argument)
        elif action == "target":
            receiver.target(argument)
        elif action == "hold":
            receiver.hold()
        else:
            receiver.release()
        return receiver.status()

    def _listen(self) -> None:
        """Receive notices. The topic is the run's id, so wait until the run is known."""
        while not self._stop.is_set():
            run = self.receiver.run_id
            if run is None:
                self._stop.wait(NOTICE_WAIT_SECONDS)
                continue
            address, keyring = str(self._settings.notice), self.receiver.history.keyring
            try:
                with closing(NoticeSubscriber(address, run, self._notice_keys, keyring, logger)) as subscriber:
                    while self.receiver.run_id == run and not self._stop.is_set():
                        self._hear(subscriber.receive(NOTICE_WAIT_SECONDS))
            except Exception as error:  # the thread must survive any bug, because the status says that it listens
                if isinstance(error, NoticeError):
                    self._log_error(error)
                elif self._throttle.is_due(without_numbers(f"notices {type(error).__name__}: {error}")):
                    logger.exception("listening for notices failed unexpectedly; it will be retried")
                self._stop.wait(LONGEST_RETRY_SECONDS)

    def _hear(self, notice: Notice | None) -> None:
        if notice is not None:
            self.receiver.board.set(notice_heard_at=time.monotonic())
            if self._is_new(notice):
                self._announced = notice
                self._wake.set()

    def _is_new(self, notice: Notice) -> bool:
        """Return whether a notice names an unknown version or another manifest of the head, and so causes a poll."""
        head = self.receiver.board.head
        if head is None or notice.version > head.version:
            return True
        return notice.version == head.version and notice.manifest != head.digest
