"""A run of the benchmark from start to end: machines, links, and five scenes."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleet.probe import far_end, measure
from benchmarks.fleet.record import MB, Arrival, Change, Full, Record
from benchmarks.fleet.replica import Replica
from benchmarks.fleet.trainers import Trainer
from tests.support.links import Links, Passed, difference
from tests.support.s3_store import serving
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.bucket.ranged import download
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.tensors.checkpoint import Checkpoint
from vllm_delta_sync.trust.keys import generate

TRAINER = "trainer"
WEIGHTS = "model.safetensors"
MISSED = 3
"""Versions that are published while the killed server is down."""
SETTLE_SECONDS = 3.0
"""For a fleet that has just started: vLLM's processes are busy for a while after their first work."""


@dataclass(frozen=True)
class Options:
    """``make`` the trainer. ``replicas`` at the start; one joins. ``versions`` before the first server is killed.

    ``bits``: per second. ``poll_seconds``: the servers get no notices and poll so often; None: they get notices.
    """

    make: Callable[[], Trainer]
    replicas: int
    versions: int
    bits: float
    round_trip: float
    slow_start: bool
    signed: bool = False
    poll_seconds: float | None = None


class Fleet:
    """One run. ``record`` is filled while it goes on; ``say`` gets a line for each thing that happened."""

    def __init__(self, options: Options, folder: Path, say: Callable[[str], None]) -> None:
        self.record = Record()
        self._options, self._folder, self._say = options, folder, say
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self._replicas: list[Replica] = []
        self._flags: list[str] = []
        self._notice_port: int | None = None
        self._step = 0

    def run(self) -> None:
        """Everything up to the measurements that the verdict is made of.

        Raises:
            ReplicaError: a server did not start, ended or fell behind. DeltaSyncError, httpx.HTTPError: what failed.
        """
        options = self._options
        with ExitStack() as stack:
            self._waiters = stack.enter_context(ThreadPoolExecutor(thread_name_prefix="waiters"))
            self._store = stack.enter_context(serving("runs", keep_alive=True))
            self._links = stack.enter_context(Links(options.bits, options.round_trip, options.slow_start))
            self._far = stack.enter_context(far_end())
            self._measure_links(TRAINER, "replica-1")
            self._trainer = options.make()
            parameters = sum(parameter.numel() for parameter in self._trainer.model.parameters())
            self._base = self._folder / "base"
            self._trainer.save(self._base)
            # This process is the trainer's machine: it reaches the store through the trainer's link.
            os.environ.update(self._store.environment | {"AWS_ENDPOINT_URL": self._endpoint(TRAINER)})
            self._say(f"{parameters / MB:.1f} M parameters; version 0 is stored through the trainer's link")
            # Without a base: version 0 is an anchor in the bucket, from which a server can start without weights.
            key = self._folder / "signing.key"
            if options.signed:
                generate(key)
                self._flags += ["--trusted-keys", f"{key}.pub"]
            publisher = Publisher(
                self._trainer.model,
                "s3://runs/run",
                notice=None if options.poll_seconds else "tcp://127.0.0.1:*",
                files=self._base,
                signing_key=key if options.signed else None,
            )
            self._publisher = stack.enter_context(publisher)
            if options.poll_seconds:
                self._flags += ["--poll-seconds", str(options.poll_seconds)]
            else:
                port = int(str(self._publisher.notice_address).rsplit(":", 1)[1])
                self._notice_port = self._links.forward(TRAINER, port, inward=True)
            stack.callback(self._close)
            self._scenes()

    def _scenes(self) -> None:
        for _ in range(self._options.replicas):
            replica = self._new_replica()
            replica.start(self._base)
            self._say(f"{replica.name} serves version 0, {replica.await_served(0):.1f} s after its start")
        time.sleep(SETTLE_SECONDS)
        for _ in range(self._options.versions):
            self._change("follow", self._replicas)
        self._kill_and_restart(self._replicas[-1])
        self._add_from_bucket()
        self._compare_with_full(self._replicas[0])
        self._measure_links("replica-1")
        self._prove()

    def _endpoint(self, link: str) -> str:
        return f"http://127.0.0.1:{self._links.forward(link, self._store.port)}"

    def _new_replica(self) -> Replica:
        number = len(self._replicas) + 1
        name = f"replica-{number}"
        flags = list(self._flags)
        if self._notice_port is not None:
            flags += ["--notice", f"tcp://127.0.0.1:{self._links.forward(name, self._notice_port)}"]
        core = self._cores[(number - 1) % len(self._cores)]
        replica = Replica(name, "s3://runs/run", self._endpoint(name), flags, core, self._folder / name)
        self._replicas.append(replica)
        return replica

    def _close(self) -> None:
        """All at once, for each takes its time to end."""
        for replica in self._replicas:
            replica.ask_to_end()
        for replica in self._replicas:
            replica.close()

    def _change(self, scene: str, watched: list[Replica]) -> None:
        """One step, one version, and the time until each of these replicas serves it."""
        self._step += 1
        for replica in watched:
            replica.check()
        self._trainer.step()
        before = self._links.passed()
        waiting = {replica.name: self._waiters.submit(replica.fresh, self._step) for replica in watched}
        called = time.monotonic()
        result = self._publisher.publish(step=self._step)
        if result.version != self._step:
            raise RuntimeError(f"publish number {self._step} made version {result.version}")
        fresh = {name: future.result() - called for name, future in waiting.items()}
        passed = difference(self._links.passed(), before)
        timings = {replica.name: replica.commit_timings(self._step) for replica in watched}
        sizes = (result.changed, result.total, result.payload_bytes)
        self.record.changes.append(Change(scene, self._step, *sizes, dict(result.seconds), fresh, passed, timings))
        served = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in fresh.items())
        self._say(
            f"version {self._step}: {100 * result.changed / result.total:.2f} % changed, "
            f"{result.payload_bytes / MB:.2f} MB of {result.full_bytes / MB:.1f} MB; fresh: {served}"
        )

    def _kill_and_restart(self, replica: Replica) -> None:
        """A server is killed, versions go on, and it starts again from the checkpoint it once started from."""
        others = [other for other in self._replicas if other is not replica]
        replica.kill()
        self._say(f"{replica.name} was killed")
        for _ in range(MISSED):
            self._change("killed", others)
        before = self._links.passed()
        replica.start(self._base)
        # What the others see now is no measure: on this machine the starting server takes their processors.
        self._change("restart", others)
        self._arrived(replica, "killed, started again", before)
        self._change("caught up", self._replicas)

    def _add_from_bucket(self) -> None:
        """One more server, which has nothing on its disk."""
        replica = self._new_replica()
        before = self._links.passed()
        replica.start(None)
        self._arrived(replica, "new, from the bucket alone", before)
        self._change("joined", self._replicas)

    def _arrived(self, replica: Replica, how: str, before: dict[str, Passed]) -> None:
        seconds = replica.await_served(self._step)
        down = difference(self._links.passed(), before)[replica.name]["down"]
        self.record.arrivals.append(Arrival(replica.name, how, self._step, seconds, down))
        self._say(f"{replica.name}, {how}: version {self._step} after {seconds:.1f} s, {down / MB:.2f} MB came down")
        time.sleep(SETTLE_SECONDS)

    def _compare_with_full(self, replica: Replica) -> None:
        """What it takes without deltas: the checkpoint into the store, and from there to a replica's disk."""
        file = replica.folder / "fetched.safetensors"
        before = self._links.passed()
        with (
            open_bucket("s3://runs/full") as near,
            open_bucket("s3://runs/full", StoreOptions(store_endpoint=self._endpoint(replica.name))) as far,
        ):
            began = time.monotonic()
            self._trainer.save(self.checkpoint)
            near.put(WEIGHTS, self.checkpoint / WEIGHTS)
            stored = time.monotonic()
            download(far, WEIGHTS, far.stat(WEIGHTS).bytes, file)
            fetched = time.monotonic()
        if file.read_bytes() != (self.checkpoint / WEIGHTS).read_bytes():
            raise RuntimeError("the fetched weights are not those that were stored")
        down = difference(self._links.passed(), before)[replica.name]["down"]
        self.record.full = Full(stored - began, fetched - stored, down)
        self._say(f"full weights, {down / MB:.1f} MB: {stored - began:.1f} s up, {fetched - stored:.1f} s down")

    @property
    def checkpoint(self) -> Path:
        """What the trainer saved at its end, as any trainer would."""
        return self._folder / "checkpoint"

    def _prove(self) -> None:
        """Every replica's weights are rescanned and its answers compared with the others'."""
        record, checkpoint, total = self.record, Checkpoint(self.checkpoint), Fingerprint()
        for name in checkpoint.specs:
            total += fingerprint_tensor(name, checkpoint.bits(name))
        record.fingerprints["the trainer's checkpoint"] = total.hex()
        record.fingerprints["the run's head"] = open_run("s3://runs/run").head().fingerprint
        for replica in self._replicas:
            scan = replica.verify()
            record.fingerprints[replica.name], record.served[replica.name] = scan["fingerprint"], scan["version"]
            record.answers[replica.name] = replica.answers(self._trainer.prompts())

    def _measure_links(self, *names: str) -> None:
        for name in names:
            found = measure(self._links.forward(name, self._far), self._options.bits)
            self.record.links[f"{name}, at the end" if name in self.record.links else name] = found
            self._say(f"the link of {name}: {found.round_trip_ms:.1f} ms, {found.up_mbit_s:.1f} Mbit/s up")
