"""``DeltaSyncCallback``: publish from the Trainer of transformers. Importing this imports transformers."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer_side.integrations.reports import MetricReporter, check_publisher_options
from trainer_side.publisher import Publisher
from trainer_side.run_files import tokenizer_folder
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import ConflictError, DeltaSyncError, UsageError
from vllm_delta_sync.redaction import guarded_logger

logger = guarded_logger(__name__)


class DeltaSyncCallback(TrainerCallback):
    """Publishes the model that a Trainer trains: at each k-th optimizer step and at the end of training.

    When training begins, the run is begun, or taken over if it exists: the next version follows the newest one, even
    if training resumes from a checkpoint. When training ends, the callback waits until all versions are durable, and
    closes the run. The metrics of each version go to the progress log, ``state.log_history`` and the loggers of
    ``report_to`` once it is durable; ``PublishResult.metrics`` lists them, and ``delta_sync/receivers_lag`` is added
    if receivers write heartbeats. Training waits for the comparison only.

    No event follows an exception from elsewhere that ends training, such as an interrupt: if the process continues, use
    the callback as a context manager or call ``close``. The next training with the same callback closes it too. A
    process that ends still finishes the version under way.

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
        **options: Any,
    ) -> None:
        """Make the callback; nothing is opened before training begins.

        Args:
            bucket: as of ``Publisher``. every: publish after optimizer steps that are multiples of it.
            stop_on_error: let errors of publishing stop training. Otherwise they are logged, training continues, and
                the changes go out with the next version; errors at the beginning of training are always raised.
            receivers_lag: read the heartbeats of receivers, in another thread, at most every 10 s.
            options: of ``Publisher``, such as ``base``, ``notice`` and ``codec``. Without ``files`` a new run keeps the
                Trainer's tokenizer (``processing_class``), so that servers start from the bucket alone.

        Raises:
            UsageError: ``every`` is not a positive integer, or an option is not one of ``Publisher``.
        """
        if type(every) is not int or every < 1:
            raise UsageError(f"every is {every!r}; give a number of optimizer steps from 1 on")
        check_publisher_options(bucket, options)
        self._bucket = bucket
        self._every = every
        self._stop_on_error = stop_on_error
        self._report_lag = receivers_lag
        self._options = options
        self.publisher: Publisher | None = None
        self._forget()

    def _forget(self) -> None:
        self._reports = MetricReporter()
        self._last_step: int | None = None

    def close(self) -> None:
        """Wait until everything published is durable, and release everything; needed only after an exception.

        Raises:
            PublishError, ConflictError: a version could not be made durable; everything is released in any case.
        """
        publisher, reports = self.publisher, self._reports
        self.publisher = None
        self._forget()
        try:
            reports.close()
        finally:
            if publisher is not None:
                publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close_after(error)

    # Events of the Trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.publisher is not None:
            self._close_after(None)
        model: nn.Module = kwargs["model"]
        if not _takes_part(model, state):
            return
        with tokenizer_folder(kwargs.get("processing_class")) as folder:
            options = self._options if folder is None else {"files": folder, **self._options}
            self.publisher = publisher = Publisher(model, self._bucket, **options)
        if state.is_world_process_zero:
            self._reports.begin(self._bucket, publisher, self._report_lag)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._attempt(self._report)
        if state.global_step % self._every == 0:
            self._attempt(lambda: self._publish(state.global_step))

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
        if self.publisher is not None and self._last_step != step:
            logger.error("training has ended at step %d, and its last weights are not published", step)
        self._attempt(self.close)

    # Helpers of the events

    def _publish(self, step: int, wait: bool = False) -> None:
        if self.publisher is None:
            return
        result = self.publisher.publish(step, wait=wait)
        self._reports.published(result)
        if result.version is not None:
            self._last_step = step

    def _settle(self, step: int) -> None:
        """Publish the current weights, unless that was done, and wait until they are durable."""
        self._attempt(self._flush)
        if self._last_step != step:
            self._attempt(lambda: self._publish(step, wait=True))
            self._attempt(self._flush)

    def _flush(self) -> None:
        try:
            if self.publisher is not None:
                self.publisher.flush()
        finally:
            self._report()

    def _report(self) -> None:
        """Log the version under way, if it is durable."""
        if not self._reports.report():
            self._last_step = None

    def _attempt(self, call: Callable[[], None]) -> None:
        """Make a call that publishes; its errors are logged, or raised after everything is released."""
        if self.publisher is None:
            return
        try:
            call()
        except DeltaSyncError as error:
            if self._stop_on_error:
                self._close_after(error)
                raise
            self._tell(error)
        except BaseException as error:  # including interrupts: no event follows, and the thread would stay
            self._close_after(error)
            raise

    def _tell(self, error: DeltaSyncError) -> None:
        if isinstance(error, ConflictError):
            logger.error("nothing more is published by this training, which continues: %s", error)
            self._close_after(error)
        else:
            self._reports.failed(error)

    def _close_after(self, error: BaseException | None) -> None:
        """Close, and log its error unless another DeltaSyncError is being raised."""
        try:
            self.close()
        except DeltaSyncError as failure:
            if not isinstance(error, DeltaSyncError):
                logger.error("closing the publisher: %s", failure)


def _takes_part(model: nn.Module, state: TrainerState) -> bool:
    """Return whether this process publishes: every process with a part of the model, or the first of equal ones."""
    if state.is_world_process_zero:
        return True
    from trainer_side.ranks.shard_parts import needs_ranks

    return needs_ranks(model)
