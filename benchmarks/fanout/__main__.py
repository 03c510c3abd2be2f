"""Fan-out: eight readers behind one slow link, with and without a peer that fetches each object once.

Each reader is ``follow``, which keeps a checkpoint folder, with a cache of its own; the peer is ``delta-sync mirror``.
All reach an S3 server through the same link, whose bytes are counted. Version 0 is an anchor, read by all at once; then
each version changes 1 % of the weights. The peer also lies (in the last byte of each object), stalls (answers nothing),
or is killed in the middle of its third answer. Exit status 0 means that every folder has the published weights.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.rows import Row, parser, row, start, write
from benchmarks.common.tables import Place, pivot
from tests.support.checkpoints import write_checkpoint
from tests.support.links import Links, difference
from tests.support.s3_store import serving
from trainer_side import Publisher
from vllm_delta_sync.admin_token import VARIABLE
from vllm_delta_sync.bucket import StoreOptions
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.maintenance.follow import follow
from vllm_delta_sync.tensors.checkpoint import Checkpoint

PAGE = "slow-links.md"
URL, MB = "s3://runs/run", 1e6
PEERS = ("none", "mirror", "lies", "stalls", "killed")


class _Faulty(ThreadingHTTPServer):
    """Passes requests on to the mirror, and does to the answers what ``fault`` says."""

    daemon_threads = True

    def __init__(self, fault: str, mirror: "subprocess.Popen[str]", url: str) -> None:
        super().__init__(("127.0.0.1", 0), _FaultyHandler)
        self.fault, self.mirror, self.address = fault, mirror, url.removeprefix("http://")
        self.ended, self.lock, self.answers = threading.Event(), threading.Lock(), 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the killed mirror breaks connections."""


class _FaultyHandler(BaseHTTPRequestHandler):
    server: _Faulty

    def do_GET(self) -> None:
        if self.server.fault == "stalls":
            self.server.ended.wait()
            return
        if self.server.mirror.poll() is not None:
            return
        connection = HTTPConnection(self.server.address, timeout=60)
        connection.request("GET", self.path, headers=dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            self.send_header(name, value)
        self.end_headers()
        if self.server.fault == "lies" and answer.status in (200, 206):
            data = data[:-1] + bytes([data[-1] ^ 1])
        with self.server.lock:
            self.server.answers += answer.status in (200, 206)
            killing = self.server.fault == "killed" and self.server.answers == 3
        if killing:
            self.wfile.write(data[: len(data) // 2])
            self.server.mirror.kill()
            self.server.mirror.wait()
            return
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def peer(kind: str, folder: Path) -> Iterator[str | None]:
    """Start the peer, and yield its URL."""
    if kind == "none":
        yield None
        return
    command = [sys.executable, "-m", "vllm_delta_sync.cli", "mirror", "--bucket", URL, "--host", "127.0.0.1"]
    command += ["--port", "0", "--to", str(folder / "mirror")]
    mirror = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert mirror.stdout is not None
        url = mirror.stdout.readline().split(" at ")[1].split(" from ")[0]
        threading.Thread(target=mirror.stdout.read, daemon=True).start()
        if kind == "mirror":
            yield url
            return
        server = _Faulty(kind, mirror, url)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.ended.set()
        server.shutdown()
        server.server_close()
    finally:
        mirror.terminate()
        mirror.wait()


def fingerprint(folder: Path) -> str:
    """The fingerprint of a checkpoint's tensors."""
    checkpoint, total = Checkpoint(folder), Fingerprint()
    for name in checkpoint.specs:
        total += fingerprint_tensor(name, checkpoint.bits(name))
    return total.hex()


def measure(kind: str, readers: int, versions: int, rows_of: int, bits: float, round_trip: float) -> list[Row]:
    """Publish versions, have all readers follow each, and count what crosses the link."""
    folder = Path(tempfile.mkdtemp(prefix="delta-sync-fanout-"))
    generator = torch.Generator().manual_seed(54)
    tensors = {f"layer.{n}.weight": torch.randn(rows_of, 1024, generator=generator).bfloat16() for n in range(4)}
    found: list[Row] = []
    try:
        write_checkpoint(folder / "base", tensors)
        with serving("runs", keep_alive=True) as store, Links(bits, round_trip) as links:
            os.environ.update(store.environment | {VARIABLE: "a-token-of-this-benchmark"})
            far = f"http://127.0.0.1:{links.forward('site', store.port)}"
            near = os.environ["AWS_ENDPOINT_URL"]
            publisher = Publisher(lambda: tensors.items(), URL, files=folder / "base")  # type: ignore[arg-type]
            with publisher, ThreadPoolExecutor(readers) as pool:
                os.environ["AWS_ENDPOINT_URL"] = far
                with peer(kind, folder) as url:
                    os.environ["AWS_ENDPOINT_URL"] = near
                    options = StoreOptions(store_endpoint=far, peer=url, store_progress="off")
                    for version in range(versions + 1):
                        if version:
                            for tensor in tensors.values():
                                chosen = torch.rand(tensor.shape, generator=generator) < 0.01
                                tensor.view(torch.int16)[chosen] ^= 1
                            publisher.publish(step=version, wait=True)
                        before, began = links.passed(), time.monotonic()

                        def read(number: int) -> str:
                            place = folder / f"reader-{number}"
                            for _ in follow(URL, place, once=True, store=options):
                                pass
                            return fingerprint(place / "current")

                        seen = set(pool.map(read, range(readers)))
                        seconds = time.monotonic() - began
                        down = difference(links.passed(), before)["site"]["down"]
                        write_checkpoint(folder / f"is-{version}", tensors)
                        if seen != {fingerprint(folder / f"is-{version}")}:
                            raise RuntimeError(f"{kind}: a reader does not have the weights of version {version}")
                        case = f"{kind}: {'anchor' if version == 0 else f'version {version}'}"
                        found.append(row("fanout", case, "bytes down", down / MB, "MB"))
                        found.append(row("fanout", case, "seconds to all", seconds, "s"))
                        print(f"{case}: {down / MB:.2f} MB over the link, {seconds:.1f} s", file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; see the docstring of the module."""
    known = parser("fanout", str(__doc__), minutes=4)
    known.add_argument("--readers", type=int, default=8, help="readers behind the link (default 8)")
    known.add_argument("--mbit", type=float, default=100.0, help="Mbit/s of the link (default 100)")
    known.add_argument("--round-trip-ms", type=float, default=50.0, help="of the link (default 50)")
    given = start(known, arguments)
    found: list[Row] = []
    for kind in PEERS:
        size = 64 if given.quick else 3072
        versions = 1 if given.quick else 3
        found += measure(kind, given.readers, versions, size, given.mbit * 1e6, given.round_trip_ms / 1e3)
    write(given.json, found)
    return 0


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """Rows as Markdown."""

    def placed(item: Row) -> Place:
        kind, _, what = item["case"].partition(": ")
        return (f"peer: {kind}", f"{what}: {item['metric']} [{item['unit']}]")

    return pivot("8 readers, one link", rows, placed, lambda column: False)


if __name__ == "__main__":
    sys.exit(main())
