"""``DeltaWeightTransfer``: publish from TRL's ``AsyncGRPOTrainer``, in place of its weight transfer over NCCL.

TRL's other trainers take ``DeltaSyncCallback``.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from trainer_side.integrations.peft import AdapterTensors, adapter_name, adapter_publisher, check_adapter_options
from trainer_side.integrations.training import GRACE_SECONDS, TrainingPublisher, find_calling_trainer
from trainer_side.integrations.transformers import DeltaSyncCallback
from trainer_side.model.live_tensors import read_to_end
from trainer_side.model.streamed import StreamedWeights
from trainer_side.publisher import CLOSE_SECONDS, Publisher
from trainer_side.ranks.group import in_world
from trainer_side.result import Deadline
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import ConflictError, DeltaSyncError, PublishError, PublishTimeoutError, UsageError
from vllm_delta_sync.logs import guarded_logger

__all__ = ["DeltaSyncCallback", "DeltaWeightTransfer", "NoWeightTransfer"]

logger = guarded_logger(__name__)


class DeltaWeightTransfer:
    """The argument of ``AsyncGRPOTrainer(weight_transfer=…)``: each weight sync becomes a version in the bucket.

    Trainer and servers communicate through the bucket only. A server may start before, during or after training, from
    ``base`` or from the bucket, and there may be several. The trainer pauses no server: each pauses itself for the
    milliseconds in which it applies a version.

    Training waits for the comparison, and for at most ``send_seconds`` for the previous version if that is still being
    uploaded; then the sync is skipped, and the next one carries its changes. Encoding and upload run beside the next
    steps. With ``wait_served`` it also waits until the servers serve the version.

    In a training of several processes TRL calls it in the first one only. Add ``callback`` to the trainer's callbacks
    there: with it the others wait for the beginning and the end in a process group of their own, so that no collective
    call of the training times out; and SIGTERM ends the training at the next step::

        transfer = DeltaWeightTransfer(bucket=URL, base=CHECKPOINT)
        trainer = AsyncGRPOTrainer(..., weight_transfer=transfer, callbacks=[transfer.callback])

    Attributes:
        publisher: while the transfer is open, for tags and the like; else None.
        callback: for ``callbacks=`` of the trainer, in all processes.
    """

    def __init__(
        self,
        bucket: str | Path | Bucket,
        base: str | Path | None = None,
        wait_served: float | None = None,
        replicas: int = 1,
        *,
        adapter: bool | str = False,
        stop_on_error: bool = True,
        send_seconds: float | None = 300.0,
        close_seconds: float = CLOSE_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        **options: Any,
    ) -> None:
        """Make the transfer; nothing is opened before training begins.

        Args:
            bucket: as of ``Publisher``.
            base: checkpoint that training and servers start from, a directory or ``org/name@revision``. Version 0 is a
                reference to it, and parameters that TRL leaves out (frozen ones) keep its values. Left out with
                ``adapter``.
            wait_served: maximum seconds that ``resume`` waits until the version that was sent is durable, and again
                until all live servers, and at least ``replicas``, serve it or, if it is quarantined, the newest one
                that is not; they need a ``receiver_id``. If None, it does not wait.
            adapter: publish the LoRA adapter alone, as a run of its own, and not the weights with it merged: that of
                this name, or with True the one named ``default``. Each sync publishes its values at that moment; TRL
                merges nothing meanwhile. Not for an adapter that is sharded over processes.
            stop_on_error: let errors of publishing and waiting stop training. Otherwise they are logged, training
                continues, and the changes go out with the next version; errors at the beginning, and of another writer
                that has taken over the run, are always raised.
            send_seconds: how long a sync waits for the version before it; None means no limit. The other processes wait
                meanwhile in a collective call of TRL, whose limit is that of the trainer's process group.
            close_seconds: how long ``destroy`` waits for the last version.
            grace_seconds: how long the process may still work after SIGTERM (with ``callback``).
            options: of ``Publisher``, such as ``notice`` and ``codec``.

        Raises:
            UsageError: an argument is invalid, or is not one of ``Publisher``.
        """
        if "every" in options:
            raise UsageError("every= is given; TRL decides when to sync: set weight_sync_steps of AsyncGRPOConfig")
        if wait_served is not None and not (isinstance(wait_served, int | float) and 0 < wait_served < math.inf):
            raise UsageError(f"wait_served is {wait_served!r}; give a number of seconds above 0, or None")
        if type(replicas) is not int or replicas < 1:
            raise UsageError(f"replicas is {replicas!r}; give a number of servers from 1 on")
        Deadline(send_seconds, "send_seconds")
        given = options if base is None else {**options, "base": base}
        check_adapter_options(adapter, given)
        if base is None and not adapter:
            raise UsageError("base is missing; give the checkpoint that training and servers start from")
        self._adapter = adapter_name(adapter)
        self._base, self._wait_served, self._replicas = base, wait_served, replicas
        self._stop_on_error, self._send_seconds = stop_on_error, send_seconds
        self._training = TrainingPublisher(
            bucket, given, stop_on_error, close_seconds, grace_seconds, (ConflictError, UsageError)
        )
        self._sends = 0
        self._sent = False
        self._handled = 0
        self._merging = ExitStack()
        self.callback = WaitingCallback(self, self._training)

    @property
    def publisher(self) -> Publisher | None:
        return self._training.publisher

    def init_weight_transfer(self) -> None:
        """Begin the run, or take it over if it exists. Does nothing if ``callback`` has done it for this training.

        Raises:
            DeltaSyncError: see ``Publisher`` and ``adapter_publisher``; or ``base`` is not a checkpoint of a supported
                model.
        """
        if self.callback.opened:
            self.callback.opened = False
            return
        if self.publisher is not None:
            self._close_logging_errors()
        if in_world() and not self._training.waits:
            logger.warning(
                "this is one of several processes, and the others do not wait for the store: give the trainer "
                "callbacks=[transfer.callback] in all of them, or a slow store makes their collective calls time out"
            )
        self._sends, self._sent = 0, False
        # Trained again, perhaps, where the exception of an earlier training is handled.
        self._handled = id(sys.exc_info()[1])
        self._training.open(self._make_publisher)
        if self._training.reports.trainer is not None:
            _at_last_log(self._training.reports.trainer, self._settle)

    def pause(self) -> None:
        """Do nothing: servers pause themselves."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish (parameter name, tensor) pairs as the next version; return after the comparison.

        They are always read to their end, except after an interrupt: each may be gathered on all ranks.

        Raises:
            UsageError: the transfer is not open.
            PublishError: the previous version could not be made durable; nothing of this one was published either.
            TensorMismatchError, ModelError: a tensor does not fit; nothing was published.
            ConflictError: another writer has taken over the run; every later call raises it too.
        """
        with read_to_end(iterator):
            self._training.attempt(lambda: self._send(iterator))

    def resume(self) -> None:
        """Return at once; or with ``wait_served``, once the version that was sent is served.

        Raises:
            FleetLateError: the timeout passed; the message names the servers that lag. StoreError: the store failed.
            PublishError, ConflictError: it could not be made durable.
        """
        publisher, seconds = self.publisher, self._wait_served
        if publisher is None:
            return
        if seconds is not None and self._sent:
            self._training.attempt(lambda: publisher.wait_served(replicas=self._replicas, timeout=seconds))
        self._training.reports.report()

    def destroy(self) -> None:
        """Wait until what was sent is durable, and release everything. May be called twice, or without an init.

        Raises:
            PublishError, ConflictError: it could not be made durable; everything is released in any case. Only logged
                while an exception of the training is being handled, and without ``stop_on_error``, except for
                ConflictError.
        """
        try:
            self._close()
        finally:
            # The callback does not hear of a training that ends by an exception.
            self._training.release()

    def keep_from_merging(self, model: Any) -> None:
        """Until ``let_merge``, let TRL merge no adapter into a PEFT model that is published without its base.

        No server reads the merged weights, and taking the adapter out again by subtraction would change last bits of
        the base, which servers have as it was. Of several processes each calls it, or none: their bases must stay
        equal.
        """
        self.let_merge()
        if self._adapter is not None:
            self._merging.enter_context(_without_merging(AdapterTensors(model, self._adapter).model))

    def let_merge(self) -> None:
        """Take ``keep_from_merging`` back."""
        self._merging.close()

    # Helpers

    def _close(self) -> None:
        """Do ``destroy`` while the other processes wait."""
        self.let_merge()
        self.callback.opened = False  # TRL's own call never came, if training has ended at its beginning
        if sys.exc_info()[1] is not None and id(sys.exc_info()[1]) != self._handled:
            self._close_logging_errors()
            return
        try:
            self._training.close(finish=True)
        except PublishError as error:
            if self._stop_on_error:
                raise
            logger.error("the last weights are not published: %s", error)

    def _make_publisher(self, **options: Any) -> Publisher:
        if self._adapter is None:
            return Publisher(StreamedWeights(self._base or ""), **options)
        trainer = find_calling_trainer()
        if trainer is None:
            raise UsageError("adapter= is given, and no Trainer is among the callers, whose model has the adapter")
        tensors = AdapterTensors(trainer.model, self._adapter)
        if tensors.need_ranks:
            raise UsageError(
                f"adapter {self._adapter!r} is sharded over processes, and TRL calls a weight transfer in the first "
                "only; give the trainer callbacks=[DeltaSyncCallback(bucket, adapter=…)] and "
                "weight_transfer=NoWeightTransfer()"
            )
        publisher = adapter_publisher(trainer.model, adapter=self._adapter, **options)
        if not in_world():
            self.keep_from_merging(tensors.model)
        return publisher

    def _send(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._sent = False
        if self.publisher is None:
            raise UsageError(
                "weights are sent, but init_weight_transfer was not called, or destroy was called since; TRL calls it "
                "for the first train() of a trainer only: make a new trainer"
            )
        self._sends += 1
        trainer = self._training.reports.trainer
        step = self._sends if trainer is None else trainer.state.global_step
        try:
            # Of an adapter the publisher reads the tensors itself.
            weights = iterator if self._adapter is None else None
            result = self.publisher.publish(step, wait=True, weights=weights, timeout=self._send_seconds)
        except PublishTimeoutError as error:
            logger.warning("this sync is skipped, and the next one carries its changes: %s", error)
            return
        self._training.reports.published(result)
        self._training.reports.report()
        self._sent = True

    def _settle(self) -> None:
        """Wait for the last version, and log its metrics while the loggers are still open."""
        self._training.attempt(self._training.finish)
        self._training.reports.report()
        self._training.reports.trainer = None

    def _close_logging_errors(self) -> None:
        try:
            self._training.close(finish=False)
        except DeltaSyncError as failure:
            logger.error("closing the weight transfer: %s", failure)


@contextmanager
def _without_merging(model: Any) -> Iterator[None]:
    """Let calls that merge a PEFT model's adapter and take it out again do nothing in the block."""
    model.merge_adapter = model.unmerge_adapter = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del model.merge_adapter, model.unmerge_adapter


class NoWeightTransfer:
    """The argument of ``AsyncGRPOTrainer(weight_transfer=…)`` where a ``DeltaSyncCallback`` publishes."""

    def init_weight_transfer(self) -> None:
        """Do nothing."""

    def pause(self) -> None:
        """Do nothing: servers pause themselves."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Read to the end: each tensor may be gathered on all ranks."""
        for _ in iterator:
            pass

    def resume(self) -> None:
        """Do nothing."""

    def destroy(self) -> None:
        """Do nothing."""


class WaitingCallback(TrainerCallback):
    """Opens the transfer when training begins, and settles it at the end, while the other processes wait.

    Attributes:
        opened: whether it has opened the transfer, and TRL's own call is still to come.
    """

    def __init__(self, transfer: DeltaWeightTransfer, training: TrainingPublisher) -> None:
        self._transfer, self._training = transfer, training
        self.opened = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.release()
        with ExitStack() as undo:
            undo.callback(self._training.release)  # TRL calls nothing more in the other processes
            self._training.begin(one_publishes=True)
            self._training.on_rank0("the beginning", self._transfer.init_weight_transfer)
            self.opened = self._training.is_rank0
            if in_world():
                self._transfer.keep_from_merging(kwargs["model"])
            undo.pop_all()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training.is_stopped(state.global_step):
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        try:
            if self._training.waits:
                self._training.on_rank0("the end", self._transfer._close)
        finally:
            self._transfer.let_merge()
            self._training.release()


def _at_last_log(trainer: Any, call: Callable[[], None]) -> None:
    """Make ``call`` at the Trainer's last log: its loggers end before the weight transfer is destroyed."""

    class LastLog(TrainerCallback):
        def on_log(self, *events: Any, logs: dict[str, Any] | None = None, **others: Any) -> None:
            if logs is not None and "train_runtime" in logs:
                call()

    trainer.add_callback(LastLog())
