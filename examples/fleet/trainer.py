"""The trainer process: steps, publishes, and for comparison stores its full checkpoint, each when it is told to.

    python -m examples.fleet.trainer SETTINGS_JSON

Speaks JSON lines. Times are those of the machine's monotonic clock, which all processes share.
"""

import json
import os
import shutil
import sys
import time
from typing import IO, Any

import torch

from examples.demo import policy
from examples.fleet.noise import NoisyAdam
from examples.fleet.settings import CONTEXT, SHARE, SIZES, TrainerSettings
from trainer_side import Publisher
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import DeltaSyncError

WEIGHTS = "model.safetensors"


class Trainer:
    """One model and its run; ``events`` gets one JSON object per line."""

    def __init__(self, settings: TrainerSettings, events: IO[str]) -> None:
        self._settings = settings
        self._events = events
        self._tokenizer = policy.make_tokenizer()
        self._tokenizer.model_max_length = CONTEXT
        self._adam = NoisyAdam(SIZES[settings.size], settings.seed, SHARE)

    def tell(self, event: str, **fields: Any) -> None:
        """Write one event."""
        self._events.write(json.dumps({"event": event, **fields}) + "\n")
        self._events.flush()

    def run(self, orders: IO[str]) -> None:
        """Begin the run, then do what each line says until there is none."""
        settings = self._settings
        policy.save(self._adam.model, self._tokenizer, settings.base)
        shutil.copytree(settings.base, settings.bare, ignore=shutil.ignore_patterns(WEIGHTS))
        self.tell("made", parameters=sum(parameter.numel() for parameter in self._adam.model.parameters()))
        began = time.monotonic()
        # Without a base: version 0 is an anchor in the bucket, from which a server can start that has no weights.
        with Publisher(self._adam.model, settings.bucket, notice="tcp://127.0.0.1:*") as publisher:
            self.tell("ready", notice=publisher.notice_address, seconds=time.monotonic() - began)
            for line in orders:
                order = json.loads(line)
                if order["do"] == "step":
                    self._adam.step()
                    self.tell("stepped")
                elif order["do"] == "publish":
                    self._publish(publisher, order["step"])
                else:
                    self._store_full()

    def _publish(self, publisher: Publisher, step: int) -> None:
        called = time.monotonic()
        result = publisher.publish(step=step)
        self.tell(
            "published",
            called=called,
            version=result.version,
            changed=result.changed,
            total=result.total,
            payload_bytes=result.payload_bytes,
            full_bytes=result.full_bytes,
            seconds=dict(result.seconds),
        )

    def _store_full(self) -> None:
        """What a trainer without deltas does: write the checkpoint, and put its weights into the store."""
        called = time.monotonic()
        policy.save(self._adam.model, self._tokenizer, self._settings.checkpoint)
        saved = time.monotonic()
        weights = self._settings.checkpoint / WEIGHTS
        with open_bucket(self._settings.full) as bucket:
            bucket.put(WEIGHTS, weights)
        self.tell(
            "stored", called=called, save_seconds=saved - called, at=time.monotonic(), bytes=weights.stat().st_size
        )


def main(arguments: list[str]) -> None:
    """Run the trainer as its module's docstring says."""
    # Libraries print to standard output now and then; events must not be mixed with that.
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_grad_enabled(False)
    Trainer(TrainerSettings.from_dict(json.loads(arguments[0])), events).run(sys.stdin)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DeltaSyncError as error:
        sys.exit(f"trainer: {error}")
