"""``DeltaSyncCallback``: publish from the Trainer of transformers. Importing this imports transformers."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer_side.integrations.reports import MetricReporter
from trainer_side.integrations.stop_signal import GRACE_SECONDS, StopSignal
from trainer_side.options import checked_options
from trainer_side.publisher import CLOSE_SECONDS, Publisher
from trainer_side.ranks.group import WORK_SECONDS, ProcessGroup, in_world
from trainer_side.result import Deadline
from trainer_side.run_files import tokenizer_folder
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import ConflictError, DeltaSyncError, PublishError, UsageError
from vllm_delta_sync.redaction import guarded_logger

logger = guarded_logger(__name__)


class DeltaSyncCallback(TrainerCallback):
    """Publishes the model that a Trainer trains: at each k-th optimizer step and at the end of training.

    When training begins, the run is begun, or taken over if it exists: the next version follows the newest one, even
    if training resumes from a checkpoint. When training ends, the callback waits until all versions are durable, and
    closes the run. The metrics of each version go to the progress log, ``state.log_history`` and the loggers of
    ``report_to`` once it is durable; ``PublishResult.metrics`` lists them, and ``delta_sync/receivers_lag`` is added
    if receivers write heartbeats. Training waits for the comparison only.

    SIGTERM ends the training at the next step, and what is left of ``grace_seconds`` goes to publishing its weights.

    No event follows an exception from elsewhere that ends training, such as an interrupt: if the process continues, use
    the callback as a context manager or call ``close``. The next training with the same callback closes it too. A
    process that ends still finishes the version under way.

    Where one process of several publishes for all, the others wait for it when training begins and ends, in a process
    group of their own, so that no collective call of the training times out.

    Attributes:
        publisher: during training, for tags and the like; None before and after, and in processes that publish
            nothing.
    """

    def __init__(
        self,
        bucket: str | Bucket,
        every: int = 1,
        *,
        stop_on_error: bool = False,
        receivers_lag: bool = True,
        close_seconds: float = CLOSE_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        **options: Any,
    ) -> None:
        """Make the callback; nothing is opened before training begins.

        Args:
            bucket: as of ``Publisher``. every: publish after optimizer steps that are multiples of it.
            stop_on_error: let errors of publishing stop training. Otherwise they are logged, training continues, and
                the changes go out with the next version; errors at the beginning of training are always raised.
            receivers_lag: read the heartbeats of receivers, in another thread, at most every 10 s.
            close_seconds: how long the end of training tries to publish the last weights while the store fails.
            grace_seconds: how long the process may still work after SIGTERM.
            options: of ``Publisher``, such as ``base``, ``notice`` and ``codec``. Without ``files`` a new run keeps the
                Trainer's tokenizer (``processing_class``), so that servers start from the bucket alone.

        Raises:
            UsageError: ``every`` is not a positive integer, or an option is not one of ``Publisher``.
        """
        if type(every) is not int or every < 1:
            raise UsageError(f"every is {every!r}; give a number of optimizer steps from 1 on")
        checked_options(bucket, **options)
        self._bucket = bucket
        self._every = every
        self._stop_on_error = stop_on_error
        self._report_lag = receivers_lag
        self._close_seconds, self._grace_seconds = close_seconds, grace_seconds
        self._options = options
        self.publisher: Publisher | None = None
        # Of a training whose other processes wait for the one that publishes.
        self._waiting: ProcessGroup | None = None
        self._stop: StopSignal | None = None
        self._forget()

    def _forget(self) -> None:
        self._reports = MetricReporter()
        self._last_step: int | None = None
        self._end: Deadline | None = None

    def close(self) -> None:
        """Wait until the version under way is durable, and release everything; needed only after an exception.

        Nothing new is published, since training may have ended in the middle of a step; errors are logged.
        """
        try:
            self._close_publisher(finish=False)
        finally:
            stop, waiting, self._stop, self._waiting = self._stop, self._waiting, None, None
            if stop is not None:
                stop.close()
            if waiting is not None:
                waiting.close()

    def _close_publisher(self, finish: bool) -> None:
        """Args: finish: as of ``Publisher.close``."""
        publisher, reports = self.publisher, self._reports
        self.publisher = None
        self._forget()
        try:
            if publisher is not None:
                publisher.close(self._seconds_left(), finish=finish)
        finally:
            reports.close()

    def _seconds_left(self) -> float:
        """Return how long the end of training may still take; it begins with the first call."""
        self._end = self._end or Deadline(self._close_seconds)
        return min(self._end.left or 0.0, math.inf if self._stop is None else self._stop.left)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Events of the Trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()
        model: nn.Module = kwargs["model"]
        from trainer_side.ranks.shard_parts import needs_ranks

        with ExitStack() as undo:
            undo.callback(self.close)
            self._stop = StopSignal(self._grace_seconds)
            if not needs_ranks(model):
                # One process has all the weights, and the others, if there are any, wait for it.
                self._waiting = ProcessGroup(WORK_SECONDS, alone=not in_world())
            self._on_rank0("the beginning", lambda: self._open(model, kwargs.get("processing_class"), state))
            undo.pop_all()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._attempt(self._reports.report)
        if state.global_step % self._every == 0:
            self._attempt(lambda: self._publish(state.global_step))
        if self._stop is not None and self._stop.came():
            logger.warning("SIGTERM: training ends after step %d, and its weights are published", state.global_step)
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # The last log of a training. Loggers end with it, before ``on_train_end`` is called.
        if logs is not None and "train_runtime" in logs:
            self._settle(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step = state.global_step
        best = state.best_global_step if args.load_best_model_at_end and state.best_model_checkpoint else None
        if best is not None and best != step:
            # The Trainer has restored the best weights.
            step, self._last_step = best, None
        self._reports.trainer = None
        self._settle(step)
        try:
            self._on_rank0("closing", lambda: self._close_publisher(finish=True))
        except DeltaSyncError as error:
            logger.error("training has ended at step %d, and its last weights are not published: %s", step, error)
            if self._stop_on_error:
                raise
        finally:
            self.close()

    # Helpers of the events

    def _open(self, model: nn.Module, tokenizer: Any, state: TrainerState) -> None:
        with tokenizer_folder(tokenizer) as folder:
            options = self._options if folder is None else {"files": folder, **self._options}
            self.publisher = publisher = Publisher(model, self._bucket, **self._reports.listening(options))
        if state.is_world_process_zero:
            self._reports.begin(self._bucket, publisher, self._report_lag)

    def _publish(self, step: int) -> None:
        if self.publisher is not None:
            self._last_step = step
            self._reports.published(self.publisher.publish(step))

    def _settle(self, step: int) -> None:
        """Leave the run at the current weights, and wait until they are durable; the other processes wait too."""
        self._attempt(lambda: self._on_rank0("the end", lambda: self._finish(step)))

    def _finish(self, step: int) -> None:
        if self.publisher is None:
            return
        if self._last_step != step:
            try:
                self._publish(step)
            except PublishError as error:
                logger.debug("tried again next: %s", error)
        self.publisher.finish(self._seconds_left())
        self._reports.report()

    def _on_rank0(self, what: str, work: Callable[[], None]) -> None:
        """Do ``work`` in each process that publishes; where only the first does, all raise its error."""
        if self._waiting is None:
            work()
        else:
            self._waiting.from_rank0(what, work)

    def _attempt(self, call: Callable[[], None]) -> None:
        """Make a call that publishes; its errors are logged, or raised after everything is released."""
        try:
            call()
        except DeltaSyncError as error:
            if self._stop_on_error:
                self.close()
                raise
            self._tell(error)
        except BaseException:  # including interrupts: no event follows, and the thread would stay
            self.close()
            raise

    def _tell(self, error: DeltaSyncError) -> None:
        if self.publisher is None:
            return  # the process that publishes says it
        if isinstance(error, ConflictError):
            logger.error("nothing more is published by this training, which continues: %s", error)
            self._close_publisher(finish=False)
        else:
            self._reports.failed(error)
