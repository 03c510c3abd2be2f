"""The codecs ``packed`` and ``context`` that this project had before: their code of commit PREVIOUS, run by itself.

The process gets the pairs as files, encodes (comparison included) and decodes on one thread, checks what it decoded,
and says sizes and the best of several times.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

import numpy as np

from benchmarks.common.rows import Row, row
from benchmarks.common.training_data import Pair, elements

PREVIOUS = "797494e"
CODECS = ("packed", "context")
_PROGRAM = """
import json, sys, time
import numpy as np
from benchmarks.common.copying import one_thread
from benchmarks.common.formats import Own, flats, table_of
one_thread()
found = np.load(sys.argv[1])
names = sorted(name[4:] for name in found if name.startswith("old "))
old = {name: found["old " + name] for name in names}
new = {name: found["new " + name] for name in names}
said = {}
for name in sys.argv[2].split(","):
    codec, encode, decode = Own(name), [], []
    for repeat in range(int(sys.argv[3])):
        codec.begin(old)
        began = time.perf_counter()
        data = codec.encode(old, new)
        encode.append(time.perf_counter() - began)
        began = time.perf_counter()
        changes = codec.decode(data, old)
        decode.append(time.perf_counter() - began)
    restored = codec.restore(changes, old)
    if not all(np.array_equal(restored[tensor], new[tensor]) for tensor in names):
        raise SystemExit(f"{name} did not give back the new weights")
    said[name] = {"bytes": len(data), "encode": min(encode), "decode": min(decode)}
print(json.dumps(said))
"""


class Previous:
    """The code of commit PREVIOUS, in a temporary folder until ``close``.

    Raises:
        subprocess.CalledProcessError: this is not a clone that has the commit.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        archive = subprocess.run(["git", "archive", PREVIOUS], check=True, capture_output=True).stdout
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(self._folder.name, filter="data")

    def measure(self, bench: str, case: str, pair: Pair, repeats: int) -> list[Row]:
        """Rows of both codecs on a pair, whose names ascend; speeds only if repeated."""
        total, changed = elements(pair)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pair.npz"
            arrays = {f"old {name}": bits for name, bits in pair.old.items()}
            arrays |= {f"new {name}": bits for name, bits in pair.new.items()}
            np.savez(path, allow_pickle=False, **arrays)
            program = [sys.executable, "-c", _PROGRAM, str(path), ",".join(CODECS), str(repeats)]
            done = subprocess.run(program, cwd=self._folder.name, check=True, capture_output=True, text=True)
        rows = []
        for name, said in json.loads(done.stdout.splitlines()[-1]).items():
            own = f"{case}, {name} of {PREVIOUS}"
            rows += [
                row(bench, own, "object", said["bytes"] / 1e6, "MB"),
                row(bench, own, "size", said["bytes"] / changed, "B/changed"),
            ]
            if repeats > 1:
                rows += [
                    row(bench, own, "encode", 2 * total / said["encode"] / 1e9, "GB/s"),
                    row(bench, own, "decode", 1e9 * said["decode"] / changed, "ns/changed"),
                ]
        return rows

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()
