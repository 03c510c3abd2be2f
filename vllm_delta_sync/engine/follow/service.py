"""The thread that follows a run: wakes on a notice, a request or the clock, and drives the receiver."""

import atexit
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm_delta_sync.engine.commit.transaction import EnginePort
from vllm_delta_sync.engine.follow.heartbeat import Heartbeat
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.follow.standing_orders import StandingOrderStore
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.observe.log_lines import RepeatedErrors
from vllm_delta_sync.errors import DeltaSyncError, EngineError, NotFoundError, NoticeError, SignatureError
from vllm_delta_sync.notice import Notice, NoticeSubscriber
from vllm_delta_sync.notice.curve import client_keys
from vllm_delta_sync.settings import Settings

LONGEST_RETRY_SECONDS = 30.0
LONGEST_REPAIR_SECONDS = 600.0
NOTICE_WAIT_SECONDS = 0.5
SHORTEST_LOOK_SECONDS = 0.02
LEAVE_SECONDS = 5.0
"""How long the end of this process may be held up to say so in the bucket."""


class ReceiverService:
    """Owns the receiver's thread and, if a notice address is set, a thread that listens there.

    Raises:
        SettingsError: the keys for notices cannot be used.

    Attributes:
        receiver: for ``status`` and ``served_version``, from any thread.
        show: what requests are answered with; the receiver's status, where nobody has more to say.
    """

    def __init__(self, port: EnginePort, settings: Settings) -> None:
        self._notice_keys = client_keys(settings.notice_key, settings.notice_server_key)
        self.receiver = Receiver(port, settings, orders=StandingOrderStore(settings))
        self.show: Callable[[], dict[str, Any]] = self.receiver.status
        self.receiver.board.export()
        self._settings = settings
        self._requests: queue.SimpleQueue[tuple[str, Any, Future[Any]]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._announced: Notice | None = None
        self._patience = SHORTEST_LOOK_SECONDS
        self._failures = 0
        self._told = RepeatedErrors()
        self._threads = [threading.Thread(target=self._follow, name="delta-sync", daemon=True)]
        self._keeper: Heartbeat | None = None
        if settings.receiver_id is not None:
            self._keeper = Heartbeat(self.receiver, settings.receiver_id, settings.lease_seconds)
            self.receiver.board.watch(self._keeper.nudge)
            keep = threading.Thread(target=self._keeper.keep, args=(self._stop,), name="delta-sync-keeper", daemon=True)
            self._keeping = len(self._threads)
            self._threads.append(keep)
        if settings.notice is not None:
            self.receiver.board.set(listens=True)
            self._threads.append(threading.Thread(target=self._listen, name="delta-sync-notice", daemon=True))

    def start(self) -> None:
        """Begin to follow."""
        if self._keeper is not None:
            atexit.register(self._leave)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask the threads to end; they are daemons and hold nothing that must be saved."""
        atexit.unregister(self._leave)
        self._stop.set()
        self._wake.set()
        self._nudge()

    def _leave(self) -> None:
        """The process ends: say so to those who would wait for this server."""
        self.stop()
        self._threads[self._keeping].join(LEAVE_SECONDS)

    def join(self, timeout: float) -> None:
        """Wait for the threads to end, after ``stop``, each for so many seconds at most."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout)

    def request(self, action: str, argument: Any = None) -> "Future[Any]":
        """Queue an action.

        Args:
            action: ``sync`` (argument: version or None), ``rollback`` (a version), ``target`` (what to follow, and the
                URL of a run or None), ``hold``, ``release`` or ``verify``.

        Returns:
            the status reached, or the verdict; or the error.
        """
        future: Future[Any] = Future()
        self._requests.put((action, argument, future))
        self._wake.set()
        return future

    def _follow(self) -> None:
        while not self._stop.is_set():
            looked = time.monotonic()
            self._serve_requests()
            announced, self._announced = self._announced, None
            self.receiver.expected = None if announced is None else announced.version
            self._look_after()
            self._weigh(announced)
            self._nudge()
            self._rest(looked)
            # Whoever asks, the bucket is looked at so often and no oftener.
            self._stop.wait(max(0.0, looked + SHORTEST_LOOK_SECONDS - time.monotonic()))

    def _rest(self, looked: float) -> None:
        """Wait for the clock or a request; or for a notice, and until it may cost a look."""
        due = time.monotonic() + self._delay()
        while not self._stop.is_set() and self._requests.empty():
            if self._announced is not None and not self._is_news(self._announced):
                self._announced = None
            until = due if self._announced is None else min(due, looked + self._patience)
            left = until - time.monotonic()
            if left <= 0:
                return
            self._wake.wait(left)
            self._wake.clear()

    def _weigh(self, announced: Notice | None) -> None:
        """Have notices wait longer for their look each time that one was false: anybody may be able to send them."""
        if announced is None:
            return
        if not self._is_news(announced):
            self._patience = SHORTEST_LOOK_SECONDS
        else:
            self._patience = min(2 * self._patience, max(self._settings.poll_seconds, SHORTEST_LOOK_SECONDS))

    def _delay(self) -> float:
        if not self._failures:
            return self._settings.poll_seconds
        # A repair reads the whole model.
        error = self.receiver.board.error
        reads = self.receiver.can_repair and (error is None or error["kind"] != SignatureError.kind)
        longest = LONGEST_REPAIR_SECONDS if reads else LONGEST_RETRY_SECONDS
        return float(min(longest, self._settings.poll_seconds * 2 ** min(self._failures - 1, 10)))

    def _look_after(self) -> None:
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
                receiver.mend()
            elif receiver.owes or (follows and (served is None or not receiver.board.holding)):
                receiver.advance(until=self._is_asked)
            elif not follows and not receiver.can_repair:
                receiver.observe()
            elif served is not None:
                receiver.check()
            self._failures = 0
        except NotFoundError as error:
            # Waiting for a publisher is no failure: keep looking at the usual pace.
            self._failures = 0 if receiver.board.head is None or self._waits() else self._failures + 1
            self._say(error)
        except DeltaSyncError as error:
            self._failures = 0 if self._waits() else self._failures + 1
            self._say(error)
        except Exception as error:  # the thread must outlive any bug, and status must show it
            self._failures += 1
            failure = EngineError(f"unexpected {type(error).__name__}: {error}")
            self.receiver.fail(failure)
            if self._told.is_due(failure.message):
                logger.exception("the receiver failed unexpectedly; it goes on, and tries again")

    def _waits(self) -> bool:
        """Whether all is well but that the setting ``target`` names nothing to go to."""
        return self.receiver.waits and self.receiver.served_version is not None

    def _is_asked(self) -> bool:
        """Between two commits: whether somebody waits for an answer."""
        self._nudge()
        return not self._requests.empty()

    def _nudge(self) -> None:
        if self._keeper is not None:
            self._keeper.nudge()

    def _replaced(self) -> bool:
        """Whether another run lies at the URL than the one that was refused."""
        try:
            return self.receiver.is_replaced()
        except DeltaSyncError:
            return False

    def _say(self, error: DeltaSyncError) -> None:
        if self._told.is_due(f"{error.kind}: {error.message}"):
            logger.warning("%s: %s", error.kind, error.message)

    def _serve_requests(self) -> None:
        while True:
            try:
                action, argument, future = self._requests.get_nowait()
            except queue.Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._act(action, argument))
            except Exception as error:  # noqa: BLE001  handed to whoever asked, through the future
                future.set_exception(error)

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
            named, bucket = argument
            receiver.target(named, bucket)
        elif action == "hold":
            receiver.hold()
        else:
            receiver.release()
        return self.show()

    def _listen(self) -> None:
        """Take notices; the run's id is the topic, so wait until it is known."""
        subscriber: NoticeSubscriber | None = None
        topic: str | None = None
        while not self._stop.is_set():
            run = self.receiver.run_id
            if run is None:
                self._stop.wait(NOTICE_WAIT_SECONDS)
                continue
            try:
                if subscriber is None or run != topic:
                    if subscriber is not None:
                        subscriber.close()
                    subscriber, topic = self._subscribe(run), run
                notice = subscriber.receive(NOTICE_WAIT_SECONDS)
                if notice is not None:
                    self.receiver.board.set(heard=time.monotonic())
                if notice is not None and self._is_news(notice):
                    self._announced = notice
                    self._wake.set()
            except Exception as error:  # the thread must outlive any bug: the status says that it listens
                if isinstance(error, NoticeError):
                    self._say(error)
                elif self._told.is_due(f"notices {type(error).__name__}: {error}"):
                    logger.exception("listening for notices failed unexpectedly; it is tried again")
                if subscriber is not None:
                    subscriber.close()
                subscriber = None
                self._stop.wait(LONGEST_RETRY_SECONDS)
        if subscriber is not None:
            subscriber.close()

    def _subscribe(self, run: str) -> NoticeSubscriber:
        followed = self.receiver.history.run
        return NoticeSubscriber(
            str(self._settings.notice),
            run,
            keys=self._notice_keys,
            keyring=followed.keyring,
            allowed=lambda: self.receiver.history.run.verifier.keys.allowed(),
            log=logger,
        )

    def _is_news(self, notice: Notice) -> bool:
        """Whether a notice names a version that is not known yet, or is known otherwise: any other costs no look."""
        head = self.receiver.board.head
        if head is None or notice.version > head.version:
            return True
        return notice.version == head.version and notice.manifest != head.digest
