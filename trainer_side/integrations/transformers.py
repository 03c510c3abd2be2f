"""``DeltaSyncCallback``: publish from the Trainer of transformers. Importing this imports transformers."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer_side.checkpoint_layouts import named_step
from trainer_side.integrations.peft import AdapterTensors, adapter_name, adapter_publisher, check_adapter_options
from trainer_side.integrations.training import GRACE_SECONDS, TrainingPublisher
from trainer_side.publisher import CLOSE_SECONDS, Publisher
from trainer_side.ranks.shard_parts import needs_ranks
from trainer_side.run_files import tokenizer_folder
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import DeltaSyncError, PublishError, UsageError
from vllm_delta_sync.logs import guarded_logger

logger = guarded_logger(__name__)


class DeltaSyncCallback(TrainerCallback):
    """Publishes the model that a Trainer trains: at each k-th optimizer step and at the end of training.

    When training begins, the run is begun, or taken over if it exists: the next version follows the newest one, even
    if training resumes from a checkpoint. When training ends, the callback waits until all versions are durable, and
    closes the run. The metrics of each version go to the progress log, ``state.log_history`` and the loggers of
    ``report_to`` once it is durable; ``PublishResult.metrics`` lists them. Training waits for the comparison only.

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
        bucket: str | Path | Bucket,
        every: int = 1,
        *,
        adapter: bool | str = False,
        stop_on_error: bool = False,
        close_seconds: float = CLOSE_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        **options: Any,
    ) -> None:
        """Make the callback; nothing is opened before training begins.

        Args:
            bucket: as of ``Publisher``. every: publish after optimizer steps that are multiples of it.
            adapter: publish a LoRA adapter alone, as a run of its own (docs/lora.md), and not the model with it merged:
                that of this name, or with True the one named ``default``. The model is a ``peft.PeftModel``.
            stop_on_error: let errors of publishing stop training. Otherwise they are logged, training continues, and
                the changes go out with the next version; errors at the beginning of training are always raised.
            close_seconds: how long the end of training tries to publish the last weights while the store fails.
            grace_seconds: how long the process may still work after SIGTERM.
            options: of ``Publisher``, such as ``base``, ``notice`` and ``codec``. Without ``files`` a new run keeps the
                Trainer's tokenizer (``processing_class``), so that servers start from the bucket alone.

        Raises:
            UsageError: ``every`` is not a positive integer, or an option is not one of ``Publisher``, or does not fit.
        """
        check_adapter_options(adapter, options)
        if type(every) is not int or every < 1:
            raise UsageError(f"every is {every!r}; give a number of optimizer steps from 1 on")
        self._every, self._stop_on_error = every, stop_on_error
        self._adapter = adapter_name(adapter)
        self._training = TrainingPublisher(bucket, options, stop_on_error, close_seconds, grace_seconds)
        self._last_step: int | None = None

    @property
    def publisher(self) -> Publisher | None:
        return self._training.publisher

    def close(self) -> None:
        """Wait until the version under way is durable, and release everything; needed only after an exception.

        Nothing new is published, since training may have ended in the middle of a step; errors are logged.
        """
        self._training.reports.trainer = None
        try:
            self._training.close(finish=False)
        finally:
            self._training.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Events of the Trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()
        model: nn.Module = kwargs["model"]
        with ExitStack() as undo:
            undo.callback(self.close)
            self._last_step = None
            # One process has all the weights, and the others, if there are any, wait for it; or each has its shards.
            together = needs_ranks(model) if self._adapter is None else AdapterTensors(model, self._adapter).need_ranks
            self._training.begin(one_publishes=not together)
            self._training.on_rank0("the beginning", lambda: self._open(model, kwargs.get("processing_class"), state))
            undo.pop_all()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._attempt(self._training.reports.report)
        if state.global_step % self._every == 0:
            self._attempt(lambda: self._publish(state.global_step))
        if self._training.is_stopped(state.global_step):
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
        if args.load_best_model_at_end and state.best_model_checkpoint:
            # The Trainer has restored the weights of this checkpoint. The best step may have had none.
            named = named_step(Path(state.best_model_checkpoint).name)
            best = state.best_global_step if named is None else named
            if best is not None and best != step:
                step, self._last_step = best, None
        self._training.reports.trainer = None
        self._settle(step)
        try:
            self._training.on_rank0("closing", lambda: self._training.close(finish=True))
        except DeltaSyncError as error:
            logger.error("training has ended at step %d, and its last weights are not published: %s", step, error)
            if self._stop_on_error:
                raise
        finally:
            self.close()

    # Helpers of the events

    def _open(self, model: nn.Module, tokenizer: Any, state: TrainerState) -> None:
        more: dict[str, Any] = {"first_step": state.global_step}  # of a training that resumes
        if self._adapter is not None:
            make = partial(adapter_publisher, model, adapter=self._adapter)
            self._training.open(make, state.is_world_process_zero, **more)
            return
        with tokenizer_folder(tokenizer) as folder:
            more |= {} if folder is None else {"files": folder}
            self._training.open(partial(Publisher, model), state.is_world_process_zero, **more)

    def _publish(self, step: int, skip_unchanged: bool = False) -> None:
        if self.publisher is not None:
            self._last_step = step
            self._training.reports.published(self.publisher.publish(step, skip_unchanged=skip_unchanged))

    def _settle(self, step: int) -> None:
        """Leave the run at the current weights, and wait until they are durable; the other processes wait too."""
        self._attempt(lambda: self._training.on_rank0("the end", lambda: self._finish(step)))

    def _finish(self, step: int) -> None:
        if self._last_step != step:
            try:
                # As of a training that had ended, and is started again. Ranks that publish together cannot tell.
                self._publish(step, skip_unchanged=self._training.waits)
            except PublishError as error:
                logger.debug("tried again next: %s", error)
        self._training.finish()

    def _attempt(self, call: Callable[[], None]) -> None:
        """Make a call that publishes; its errors are logged, or raised after everything is released."""
        try:
            self._training.attempt(call)
        except BaseException:  # including interrupts: no event follows, and the thread would stay
            self.close()
            raise
