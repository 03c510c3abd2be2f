"""Readers of slime's folders that this project did not write follow a run, and have its bits after each version.

``PYTHONPATH=.venv/slime-readers:. python -m tests.tools.slime_reader WORK`` reads with modelexpress, from an S3 server
on loopback that the folders are uploaded to. ``--reader FILE`` reads with a module that has the ``pull`` of SGLang's
``/pull_weights`` (``local_checkpoint.py`` of the branch ``sglang-miles``, or of slime's ``sglang-pull_weights.patch``),
which no release of SGLang has; get the file yourself. Prints a line of JSON with what was read, and fails at the first
difference.
"""

import argparse
import importlib.util
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from tests.support.chains import Chain
from tests.support.exporting import expected, tensors_in
from tests.support.s3_store import serving
from vllm_delta_sync import follow
from vllm_delta_sync.codec.slime import folder_name

GROWTH: list[dict[str, Any]] = [{}, {"codec": "plain"}, {"full": [1]}, {"base": 1}, {"share": 0.0}, {"count": 3}]
GROWTH += [{"count": 70, "share": 0.003}, {}, {"share": 0.5}, {"share": 0.5}, {}]
"""What the run gets before each look: deltas, a tensor in full, one that builds on an older version, no change, some at
once, more than are written one by one, and so many changes that a whole checkpoint comes between."""


class Reader(Protocol):
    def read(self, version: int) -> Path:
        """Bring the reader's own checkpoint to a version; return its folder."""


class Pull:
    """SGLang's ``pull``: the server was started from version 0, and patches files of its own."""

    def __init__(self, file: Path, source: Path, local: Path) -> None:
        spec = importlib.util.spec_from_file_location("local_checkpoint", file)
        if spec is None or spec.loader is None:
            raise SystemExit(f"{file} is no Python file")
        self._module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._module)
        self._source, self._local = source, local
        self._base = source.with_name("base")

    def read(self, version: int) -> Path:
        self._module.pull(str(self._local), str(self._base), str(self._source), version)
        return self._local


class ModelExpress:
    """modelexpress's receiver, as its ranks prepare a version on the host before an engine loads it."""

    def __init__(self, source: Path, local: Path, bucket: str, endpoint: str) -> None:
        from modelexpress_rl.inference import receiver
        from modelexpress_rl.object_storage import ObjectStorageType
        from modelexpress_rl.s3 import S3Client
        from modelexpress_rl.train import WeightPayloadFormat

        self._source, self._bucket, self._receiver, self._kinds = source, bucket, receiver, WeightPayloadFormat
        self._s3 = S3Client(endpoint_url=endpoint, region_name="us-east-1")
        config = receiver.ObjectStorageGeneratorConfig(
            ObjectStorageType.S3, "000000", source.with_name("base"), local, endpoint_url=endpoint
        )
        self._checkpoint = receiver._LocalCheckpoint(model_name="model", config=config, s3=self._s3)
        self._checkpoint.initialize()
        self._active = 0

    def read(self, version: int) -> Path:
        chain: list[Any] = []
        at = version
        while at > self._active:
            folder = self._source / folder_name(at)
            for path in folder.iterdir():
                self._s3.put(uri=f"{self._bucket}/{folder.name}/{path.name}", data=path.read_bytes())
            index = json.loads((folder / "model.safetensors.index.json").read_bytes())["metadata"]
            base = index.get("base_version")
            kind = self._kinds.FULL_HF_CHECKPOINT if base is None else self._kinds.XOR_DELTA
            uri = f"{self._bucket}/{folder.name}/model.safetensors.index.json"
            chain.insert(0, self._receiver._S3Version(index["version"], base, kind, uri))
            if base is None:
                break
            at = int(base)
        if chain:
            prepared = self._checkpoint.prepare_chain(tuple(chain))
            self._checkpoint.activate(prepared)
            self._active = version
        return Path(self._checkpoint.local_checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--reader", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"reader": str(options.reader or "modelexpress"), "deltas": 0, "whole": 0, "looks": 0}
    with ExitStack() as stack:
        server = None if options.reader else stack.enter_context(serving())
        if server is not None:
            os.environ.update(server.environment)
        for format in ("slime", "slime-full"):
            work = options.work / format
            work.mkdir(parents=True)
            chain = Chain(work, base=True)
            readers: list[Reader] = []
            for number, growth in enumerate([{}, *GROWTH]):
                if number:
                    chain.grow(**growth)
                for update in follow(chain.url, work / "out", once=True, format=format, shard_bytes=2000):
                    version = update.version
                # One that follows from the beginning, and one that starts now.
                for place in (0, number):
                    if place == len(readers):
                        local = work / f"local{place}"
                        if server is None:
                            readers.append(Pull(options.reader, work / "out", local))
                        else:
                            bucket = server.create_bucket(f"{format}-{place}")
                            readers.append(ModelExpress(work / "out", local, bucket, server.endpoint))
                    found = tensors_in(*readers[place].read(version).glob("*.safetensors"))
                    if found != expected(chain.table, chain.bits[version]):
                        sys.exit(f"{report['reader']} has other bits than version {version} ({format})")
                    report["looks"] += 1
                index = (update.folder / "model.safetensors.index.json").read_bytes()
                report["deltas" if b"delta_encoding" in index else "whole"] += 1
    print(json.dumps(report))


if __name__ == "__main__":
    main()
