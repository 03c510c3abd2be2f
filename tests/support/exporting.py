"""What the tests of exports share.

``python -m tests.support.exporting URL FOLDER VERSION [follow]`` exports or follows, and says the memory that it took.
"""

import json
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_delta_sync import follow, open_run
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.maintenance.export import WORK_NAME, export
from vllm_delta_sync.tensors.changes import Bits


def held(folder: Path) -> dict[str, bytes]:
    """Name → bytes of the tensors of a checkpoint, read as others do: by its index, with the safetensors library."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        assert not (folder / "model.safetensors").exists(), "transformers would load that instead"
        places: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    else:
        with safe_open(folder / "model.safetensors", "pt") as file:
            places = dict.fromkeys(file.keys(), "model.safetensors")
    found: dict[str, bytes] = {}
    for name in sorted(set(places.values())):
        with safe_open(folder / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert set(file.keys()) == {tensor for tensor, place in places.items() if place == name}
        found |= tensors_in(folder / name)
    return found


def tensors_in(*files: Path) -> dict[str, bytes]:
    """Name → bytes of the tensors in files, by the safetensors library."""
    import torch
    from safetensors.torch import load_file

    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


def expected(table: TensorTable, bits: list[Bits]) -> dict[str, bytes]:
    return {spec.name: bits[tensor].tobytes() for tensor, spec in enumerate(table)}


def names(folder: Path) -> list[str]:
    """What a folder shows, sorted; what is below it too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def stored(folder: Path) -> dict[str, bytes]:
    """All files of a folder, but for what is kept to go on from."""
    return {
        name: (folder / name).read_bytes()
        for name in names(folder)
        if not name.startswith(WORK_NAME) and (folder / name).is_file()
    }


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Files of this process cannot become larger, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def anonymous() -> int:
    """Bytes of this process's memory that are in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@contextmanager
def watched() -> Iterator[list[int]]:
    """The most that ``anonymous`` was within the block, more than before it."""
    before, done = anonymous(), threading.Event()
    most, found = [before], list[int]()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield found
    done.set()
    watcher.join()
    found.append(most[0] - before)


def main(url: str, folder: str, version: str, way: str = "export") -> None:
    run = open_run(url)
    run.head()
    with watched() as most:
        reached = export(run, folder, int(version)) if way == "export" else next(follow(url, folder, int(version)))
    print(json.dumps({"version": reached.version, "anonymous": most[0]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
