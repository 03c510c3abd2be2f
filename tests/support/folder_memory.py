"""``python -m tests.support.folder_memory URL FOLDER…`` publishes checkpoint folders, and prints what memory it took.

Before that it publishes a small one of the same dtypes to a run of its own, so that code and kernels are there.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.support.checkpoints import weights, write_checkpoint
from tests.support.exporting import watched
from trainer_side.checkpoint_folders import CheckpointPublisher


def main(url: str, *folders: str) -> None:
    with tempfile.TemporaryDirectory() as small, CheckpointPublisher(f"{small}/run") as publisher:
        for step in (1, 2):
            publisher.publish(write_checkpoint(Path(small) / f"checkpoint-{step}", weights(step)))
    with watched() as most, CheckpointPublisher(url) as publisher:
        versions = [publisher.publish(folder).manifest.version for folder in folders]
    print(json.dumps({"versions": versions, "anonymous": most[0]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
