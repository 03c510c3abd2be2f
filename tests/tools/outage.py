"""A training on a real S3 server that is away for minutes, from a chosen moment of a version on.

    python -m tests.tools.outage                     # ten minutes, at five moments at once; about 15 minutes
    python -m tests.tools.outage --seconds 20 object

Each moment has a process, an S3 server on loopback and a TCP proxy of its own. A training changes 1 % of 4 M bf16
weights and publishes, ten times a second: first undisturbed for 40 s, then with an outage between calm parts of 20 s.
The outage begins right before the store gets an object, a manifest, HEAD.json or a request to list, or right before a
notice is sent; connections break, and new ones are refused. Checked: the training's thread never calls the bucket, and
at the end the run has the trainer's weights, bit for bit. Printed for each moment: the 95th percentile of ``publish``
with the outage, over that without, for all calls and for those that publish; how many versions and errors there were;
the largest memory before and after.

Exit status: 0 all of it holds and no ratio is above 1.5; 1 it does not.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support import s3_store
from tests.support.proxy import HOST, TcpProxy
from trainer_side import Publisher
from vllm_delta_sync.bucket import Bucket, ObjectInfo, open_bucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware
from vllm_delta_sync.client import open_run
from vllm_delta_sync.errors import PublishError

POINTS = ("object", "manifest", "head", "notice", "listing")
LIMIT = 1.5
ELEMENTS, CHANGED = 4_000_000, 40_000
STEP_SECONDS, CALM_SECONDS = 0.1, 20.0


class Watched(BucketMiddleware):
    """Makes the call ``strike`` once, at the moment asked for, and counts calls on the training's thread."""

    def __init__(self, inner: Bucket, point: str) -> None:
        super().__init__(inner)
        self._point = point
        self.strike: Callable[[], None] | None = None
        self.training: threading.Thread | None = None
        self.on_training = 0

    def _reached(self, point: str) -> None:
        self.on_training += threading.current_thread() is self.training
        if self.strike is not None and point == self._point:
            strike, self.strike = self.strike, None
            strike()

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        manifest = key.startswith("versions/")
        point = "object" if key.startswith("objects/") else "manifest" if manifest else "head"
        self._reached(point if manifest or point == "object" or key == "HEAD.json" else "")
        self._inner.put(key, data, if_absent=if_absent)
        if manifest:
            self._reached("notice")

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        self._reached("")
        return self._inner.get(key, max_bytes=max_bytes)

    def stat(self, key: str) -> ObjectInfo:
        self._reached("")
        return self._inner.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._reached("listing")
        return self._inner.list(prefix)


def train(publisher: Publisher, weight: torch.Tensor, first_step: int, goes_on: Callable[[], bool]) -> dict[str, Any]:
    """Train and publish → seconds of each call, and of each that published; how many raised; the next step."""
    bits, errors, step = weight.view(torch.int16), 0, first_step
    seconds: list[float] = []
    comparing: list[float] = []
    generator = torch.Generator().manual_seed(first_step)
    while goes_on():
        chosen = torch.randint(ELEMENTS, (CHANGED,), generator=generator)
        bits[chosen] ^= 1
        began = time.perf_counter()
        try:
            published = publisher.publish(step).version is not None
        except PublishError:
            errors, published = errors + 1, False
        took = time.perf_counter() - began
        seconds.append(took)
        if published:
            comparing.append(took)
        step += 1
        time.sleep(max(0.0, STEP_SECONDS - took))
    return {"seconds": seconds, "comparing": comparing, "errors": errors, "step": step}


def p95(seconds: list[float]) -> float:
    return float(np.percentile(seconds, 95))


def memory() -> float:
    """Return the most memory that this process has held so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure(point: str, away: float) -> dict[str, Any]:
    """Run both trainings; return the figures of one moment."""
    weight = torch.randn(ELEMENTS).bfloat16()
    with s3_store.serving() as server:
        url = f"{server.create_bucket('runs')}/run"
        with TcpProxy(server.port) as proxy:
            os.environ.update(server.environment | {"AWS_ENDPOINT_URL": f"http://{HOST}:{proxy.port}"})
            # A publisher that takes a run over looks for tags of the former one.
            Publisher({"w": weight}, url).close()
            store = Watched(open_bucket(url), point)
            began, cut, ended = time.monotonic(), threading.Event(), threading.Event()

            def outage() -> None:
                proxy.cut()
                cut.set()
                threading.Timer(away, end).start()

            def end() -> None:
                proxy.resume()
                ended.set()

            def calm(seconds: float) -> Callable[[], bool]:
                until = time.monotonic() + seconds
                return lambda: time.monotonic() < until

            with Publisher({"w": weight}, store, notice="tcp://127.0.0.1:*") as publisher:
                store.training = threading.current_thread()
                without: dict[str, Any] = {"step": 1}
                if point != "listing":
                    without = train(publisher, weight, 1, calm(2 * CALM_SECONDS))
                store.strike = outage
                before = memory()
                with_outage = train(publisher, weight, without["step"], lambda: not ended.is_set())
                after = train(publisher, weight, with_outage["step"], calm(CALM_SECONDS))
                if point == "listing":
                    # Tags are listed after the first version, so that the undisturbed part comes last.
                    without = train(publisher, weight, after["step"], calm(2 * CALM_SECONDS))
                    after["step"] = without["step"]
                store.training = None
                largest = memory()
            run = open_run(url)
            held = dict(run.tensors())["w"]
            head_step = run.head().step
    calls = with_outage["seconds"] + after["seconds"]
    comparing = with_outage["comparing"] + after["comparing"]
    return {
        "point": point,
        "away_s": away,
        "struck": cut.is_set(),
        "ratio": p95(calls) / p95(without["seconds"]),
        "ratio_of_comparing": p95(comparing) / p95(without["comparing"]),
        "p95_ms": 1e3 * p95(calls),
        "longest_ms": 1e3 * max(calls),
        "p95_without_ms": 1e3 * p95(without["seconds"]),
        "calls": len(calls),
        "published": len(comparing),
        "errors": with_outage["errors"],
        "memory_mb": [before, largest],
        "on_training_thread": store.on_training,
        "head_is_trainer": bool(torch.equal(held.view(torch.int16), weight.view(torch.int16))),
        "head_step": head_step,
        "last_step": after["step"] - 1,
        "seconds": time.monotonic() - began,
    }


def holds(found: dict[str, Any]) -> bool:
    """Return whether a moment's figures are as they must be."""
    exact = found["head_is_trainer"] and found["head_step"] == found["last_step"]
    return found["struck"] and exact and found["on_training_thread"] == 0 and found["ratio"] <= LIMIT


def main(arguments: list[str] | None = None) -> int:
    """Exit status: see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", nargs="*", metavar="MOMENT", help=f"of {', '.join(POINTS)}; default: all")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the store is away (default 600)")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for point in options.points:
        if point not in POINTS:
            parser.error(f"argument MOMENT: {point!r} is none of {', '.join(POINTS)}")
    if options.one:
        torch.set_num_threads(1)
        print(json.dumps(measure(options.points[0], options.seconds)), flush=True)
        return 0
    command = [sys.executable, "-m", "tests.tools.outage", "--one", "--seconds", str(options.seconds)]
    running = [
        subprocess.Popen([*command, point], stdout=subprocess.PIPE, text=True) for point in options.points or POINTS
    ]
    status = 0
    try:
        for process in running:
            said = process.communicate()[0]
            found = json.loads(said.splitlines()[-1]) if process.returncode == 0 else {}
            print(said if found else f"a process ended with {process.returncode}", flush=True)
            status |= not (found and holds(found))
    finally:
        for process in running:
            process.terminate()
    return status


if __name__ == "__main__":
    sys.exit(main())
