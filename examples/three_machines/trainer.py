"""The trainer's machine: learns from trajectories in a bucket and publishes its weights to another place in it.

    python -m examples.three_machines.trainer --bucket RUN --trajectories URL --checkpoint DIR --folder STATE \\
        --versions N --max-staleness K

It knows no server, and no worker but by the names of what they wrote. Each trajectory is trained on once, or passed by:
too old, or no batch of this run. What became of which is a sidecar, ``trained``, of the version that came of it.

The state is saved before its version is published, and nothing changes the weights before that version is durable. So
whenever it is killed, the state is of the newest version, or of the one to be published next: then it is published
first. Writes JSON lines of events to standard output.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from examples.demo import policy
from examples.demo.rollouts import ServerError
from examples.three_machines.learning import Learner, Step
from examples.three_machines.state import Consumed, Progress, Store
from examples.three_machines.telling import Events, Patience
from examples.three_machines.trajectories import Batch, Found, Reader
from trainer_side import Publisher
from trainer_side.result import PublishResult
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import ConflictError, DeltaSyncError, FormatError, NotFoundError, UnsupportedError

SIDECAR = "trained"
LOOK_SECONDS = 0.2


class OutOfTrajectoriesError(Exception):
    """None came that could be trained on, for longer than the trainer waits."""


class Trainer:
    """The loop, between two kills."""

    def __init__(self, options: argparse.Namespace, events: Events) -> None:
        self._options, self._events = options, events
        self._patience = Patience(events, options.give_up)
        self._store = Store(options.folder)
        self._learner = Learner(policy.load_model(options.checkpoint), options.rate, options.eps)
        self._held = self._store.load()
        if self._held is not None:
            self._restore(self._held[1])
        self._published: PublishResult | None = None
        self._version = 0
        """Of the weights in memory, from the moment on that they are handed to the publisher."""

    def _restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        try:
            self._learner.masters.restore(tensors)
        except (KeyError, ValueError, RuntimeError) as error:
            raise FormatError(
                f"{self._store.path} is not of the model in {self._options.checkpoint}: {str(error)[:200]}; give the "
                "--checkpoint that it began with, or another --folder"
            ) from error

    def run(self) -> None:
        """Until the run has as many versions as asked for.

        Raises:
            OutOfTrajectoriesError: there are none to train on. ConflictError: the state is not this run's newest.
            DeltaSyncError: the store was away for too long, or the run cannot be gone on with.
        """
        options = self._options
        with open_bucket(options.trajectories) as bucket, self._open() as publisher:
            self._publisher = publisher
            self._reader = Reader(bucket, self._progress.cursor)
            self._consumed = Consumed(step=self._progress.step + 1)
            self._settle()
            self._tell_ready()
            while self._version < options.versions:
                self._one_step()
            self._settle()
        policy.save(self._learner.model, policy.make_tokenizer(), options.folder / "checkpoint")
        self._events.tell("done", version=self._version, step=self._progress.step)

    def _open(self) -> Publisher:
        """Begin the run or take it over, and see that the state is of its newest version or of the next."""
        publisher = self._patience.until_done("store", lambda: Publisher(self._learner.model, self._options.bucket))
        step = self._recorded_step(publisher.version)
        if self._held is None:
            self._progress = Progress(run=publisher.run)
            self._save()
        else:
            self._progress = self._held[0]
        self._version = publisher.version
        kept = self._progress
        if kept.run != publisher.run or kept.step not in (step, step + 1):
            publisher.close()
            raise ConflictError(
                f"{self._store.path} is of step {kept.step} of run {kept.run}, and {self._options.bucket} holds run "
                f"{publisher.run} up to step {step}; give the --folder that the run was last trained in, or another "
                "--bucket"
            )
        return publisher

    def _recorded_step(self, version: int) -> int:
        """Of the newest version that says what was consumed; 0 if none does."""
        run = open_run(self._options.bucket)
        while version > 0:
            if any(sidecar.name == SIDECAR for sidecar in run.manifest(version).sidecars):
                return Consumed.from_bytes(run.sidecar(version, SIDECAR), f"version {version}: {SIDECAR}").step
            version -= 1
        return 0

    def _one_step(self) -> None:
        began = time.monotonic()
        batches = self._collect()
        collected = time.monotonic()
        step = self._learner.gradient(batches, self._version)
        learnt = time.monotonic()
        # The upload of the version before went on beside all this. It is of the weights that are about to change.
        self._settle()
        norm = self._learner.step()
        self._progress = Progress(
            run=self._progress.run,
            step=self._progress.step + 1,
            cursor=self._reader.cursor,
            consumed=self._consumed,
        )
        self._save()
        self._tell_step(step, batches, norm, collected - began, learnt - collected)
        self._consumed = Consumed(step=self._progress.step + 1)
        self._publish()

    def _collect(self) -> list[Batch]:
        """As many batches as one step takes, as soon as they are there."""
        began = time.monotonic()
        batches: list[Batch] = []
        while True:
            for found in self._patience.until_done("store", lambda: list(self._reader.new())):
                batch = self._judged(found)
                self._reader.pass_by(found)
                if batch is not None:
                    batches.append(batch)
                    self._consumed.trained.append(found.key)
                if len(batches) == self._options.take:
                    return batches
            if time.monotonic() - began > self._options.patience:
                raise OutOfTrajectoriesError(
                    f"no trajectory to train on came to {self._options.trajectories} for {self._options.patience:g} s; "
                    "see whether a worker plays, and whether its server follows the run"
                )
            if self._published is not None and self._published.done:
                self._settle()
            time.sleep(LOOK_SECONDS)

    def _judged(self, found: Found) -> Batch | None:
        """The batch, if it is one to train on; otherwise it is put down and told why not."""
        try:
            batch = self._patience.until_done("store", lambda: self._reader.read(found))
            self._check(batch)
        except (FormatError, UnsupportedError, NotFoundError) as error:
            self._consumed.set_aside.append(found.key)
            self._events.tell("set_aside", key=found.key, kind=error.kind, why=error.message[:300])
            return None
        staleness = self._version - batch.lowest
        if staleness > self._options.max_staleness:
            self._consumed.stale.append(found.key)
            self._events.tell("stale", key=found.key, staleness=staleness, version=self._version, lowest=batch.lowest)
            return None
        return batch

    def _check(self, batch: Batch) -> None:
        if batch.run != self._progress.run:
            raise FormatError(f"{batch.key} is of run {batch.run}, this one is {self._progress.run}")
        if batch.highest > self._version:
            raise FormatError(f"{batch.key} names version {batch.highest}; the newest is {self._version}")
        self._learner.check(batch)

    def _save(self) -> None:
        self._store.save(self._progress, self._learner.masters.tensors())

    def _publish(self) -> None:
        """Hand the weights of the state to the publisher; they go up in the background."""
        consumed = {SIDECAR: self._progress.consumed.to_bytes()}
        self._published = self._publisher.publish(self._progress.step, wait=True, sidecars=consumed)
        self._version = self._published.version or self._version

    def _settle(self) -> None:
        """Wait until the version of the last step is durable, and publish it as often as that takes."""
        self._patience.until_done("store", self._settled)
        published, self._published = self._published, None
        if published is not None:
            self._tell_published(published)

    def _settled(self) -> None:
        # What failed, or what a kill cut off, may have arrived all the same: then it is not to be there twice.
        if self._published is None or self._published.failed:
            self._published = None
            if self._recorded_step(self._publisher.version) < self._progress.step:
                self._publish()
        self._publisher.flush()

    def _tell_ready(self) -> None:
        self._events.tell(
            "ready",
            run=self._progress.run,
            version=self._version,
            step=self._progress.step,
            resumed=self._held is not None,
            parameters=sum(parameter.numel() for parameter in self._learner.model.parameters()),
        )

    def _tell_step(self, step: Step, batches: Sequence[Batch], norm: float, waited: float, learnt: float) -> None:
        self._events.tell(
            "step",
            step=self._progress.step,
            trained=self._progress.consumed.trained,
            stale=len(self._progress.consumed.stale),
            set_aside=len(self._progress.consumed.set_aside),
            staleness=self._version - min(batch.lowest for batch in batches),
            norm=norm,
            wait_s=waited,
            learn_s=learnt,
            **step.figures,
        )

    def _tell_published(self, result: PublishResult) -> None:
        self._events.tell(
            "published",
            version=result.version,
            step=result.step,
            changed=result.changed,
            total=result.total,
            payload_bytes=result.payload_bytes,
            full_bytes=result.full_bytes,
            seconds=dict(result.seconds),
        )


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with status 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.three_machines.trainer", description="Trains on trajectories and publishes weights."
    )
    parser.add_argument("--bucket", required=True, metavar="RUN", help="run to publish; begun, or gone on with")
    parser.add_argument("--trajectories", required=True, metavar="URL", help="bucket that workers write to")
    parser.add_argument("--checkpoint", required=True, type=Path, metavar="DIR", help="policy to start from")
    parser.add_argument("--folder", required=True, type=Path, metavar="DIR", help="where the state is kept")
    parser.add_argument("--versions", required=True, type=int, metavar="N", help="end when the run has so many")
    parser.add_argument(
        "--max-staleness",
        type=int,
        default=4,
        metavar="K",
        help="train on what is at most so many versions behind the weights (default %(default)s)",
    )
    parser.add_argument("--take", type=int, default=1, help="trajectory objects per step (default %(default)s)")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate of Adam (default %(default)s)")
    parser.add_argument("--eps", type=float, default=1e-3, help="epsilon of Adam (default %(default)s)")
    parser.add_argument(
        "--patience", type=float, default=600.0, help="seconds to wait for a trajectory, then end (default %(default)s)"
    )
    parser.add_argument(
        "--give-up", type=float, default=300.0, help="seconds to wait for the store, then end (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch (default %(default)s)")
    options = parser.parse_args(arguments)
    if not (options.checkpoint / "config.json").is_file():
        parser.error(f"--checkpoint {options.checkpoint} holds no config.json; make one with the policy program")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the trainer as its module's docstring says."""
    options = parse_options(arguments)
    events = Events.on_stdout()
    torch.set_num_threads(options.threads)
    try:
        Trainer(options, events).run()
    except (OutOfTrajectoriesError, ServerError, DeltaSyncError) as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
