"""The example from start to end: machines, links, and five scenes."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples.demo import serving
from examples.demo.orchestrate import Events
from examples.demo.processes import Child, DemoError
from examples.demo.verdict import checkpoint_fingerprint
from examples.fleet import store
from examples.fleet.links import Links, Passed
from examples.fleet.probe import far_end, measure
from examples.fleet.record import MB, Arrival, Change, Full, Record
from examples.fleet.replicas import Replica, script
from examples.fleet.screen import Screen
from examples.fleet.settings import Options, TrainerSettings
from vllm_delta_sync import open_run

TRAINER = "trainer"
WEIGHTS = "model.safetensors"
LOOK_SECONDS = 0.5
LISTING_SECONDS = 120.0
MISSED = 3
"""Versions that are published while the killed server is down."""
SETTLE_SECONDS = 3.0
"""For a fleet that has just started: vLLM's processes are busy for a while after their first work."""


class Fleet:
    """One run. ``record`` is filled while it goes on."""

    def __init__(self, options: Options, out: Path, screen: Screen) -> None:
        self.record = Record(options)
        self._options = options
        self._out = out
        self._screen = screen
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self._replicas: list[Replica] = []
        self._waiters = ThreadPoolExecutor(thread_name_prefix="waiters")
        self._step = 0

    def run(self) -> None:
        """Everything up to the measurements the verdict is made of.

        Raises:
            DemoError: a process did not start, died or fell behind. ServerError, DeltaSyncError: what else failed.
        """
        with ExitStack() as stack:
            stack.callback(self._waiters.shutdown, wait=False, cancel_futures=True)
            self._server = stack.enter_context(store.serving(self._out / "store", self._out / "store.log"))
            rate, round_trip = self._options.bits_per_second, self._options.round_trip
            log = self._out / "links.log"
            self._links = stack.enter_context(Links(rate, round_trip, log, self._options.slow_start))
            self._far_port = stack.enter_context(far_end())
            self._measure_links(TRAINER, "replica-1")
            trainer = stack.enter_context(self._begin())
            self._events = Events(trainer)
            self._trainer = trainer
            stack.callback(self._close_replicas)
            self._follow_run()
            self._scenes()

    def _scenes(self) -> None:
        for _ in range(self._options.versions):
            self._change("follow", self._replicas)
        self._kill_and_restart(self._replicas[-1])
        self._add_from_bucket()
        self._compare_with_full(self._replicas[0])
        self._measure_links("replica-1")
        self._prove()

    # Machines

    def _begin(self) -> Child:
        """The trainer's process, behind its link, at work on a run of its own."""
        runs = self._server.create_bucket("runs")
        self._settings = TrainerSettings(
            out=str(self._out),
            bucket=f"{runs}/run",
            full=f"{runs}/full",
            size=self._options.size,
            seed=self._options.seed,
        )
        environment = serving.trainer_environment() | self._reaching_store(TRAINER)
        command = [sys.executable, "-m", "examples.fleet.trainer", json.dumps(self._settings.to_dict())]
        return Child("the trainer", command, self._out / "trainer.log", environment=environment, talk=True)

    def _reaching_store(self, link: str) -> dict[str, str]:
        return store.through(self._server, self._links.forward(link, self._server.port))

    def _follow_run(self) -> None:
        """Start the first replicas, one after the other, once version 0 is in the bucket."""
        self._screen.begin("making the model")
        made = self._next("made")
        self.record.parameters = made["parameters"]
        self._screen.begin(f"{made['parameters'] / MB:.1f} M parameters; storing version 0 through the trainer's link")
        ready = self._next("ready")
        self._screen.say(f"version 0 stored in {ready['seconds']:.1f} s")
        notice = self._links.forward(TRAINER, int(ready["notice"].rsplit(":", 1)[1]), inward=True)
        self._notice_port = notice
        for _ in range(self._options.replicas):
            replica = self._new_replica()
            self._screen.begin(f"starting {replica.name}: delta-sync serve, from a checkpoint on its disk")
            replica.start(self._settings.base)
            seconds = replica.await_served(0)
            self._screen.say(f"{replica.name} serves version 0, {seconds:.1f} s after its start")
        time.sleep(SETTLE_SECONDS)

    def _new_replica(self) -> Replica:
        number = len(self._replicas) + 1
        name = f"replica-{number}"
        port = self._links.forward(name, self._notice_port)
        replica = Replica(
            name=name,
            bucket=self._settings.bucket,
            environment=self._reaching_store(name),
            notice=f"tcp://127.0.0.1:{port}",
            core=self._cores[(number - 1) % len(self._cores)],
            folder=self._out / name,
        )
        self._replicas.append(replica)
        return replica

    def _close_replicas(self) -> None:
        """All at once, for each takes its time to end."""
        for replica in self._replicas:
            if replica.child is not None:
                replica.child.ask_to_end()
        for replica in self._replicas:
            replica.close()

    # Scenes

    def _change(self, scene: str, watched: list[Replica]) -> Change:
        """One step, one version, and the time until each of these replicas serves it."""
        self._step += 1
        number = self._step
        self._screen.begin(f"version {number}: a step of training, then publish()")
        self._order(do="step")
        self._next("stepped")
        before = self._links.passed()
        waiting: dict[str, Future[float]] = {}
        for replica in watched:
            waiting[replica.name] = self._waiters.submit(replica.fresh, number)
        self._order(do="publish", step=number)
        published = self._next("published")
        if published["version"] != number:
            raise DemoError(f"publish number {number} made version {published['version']}; see trainer.log")
        served = {name: future.result() for name, future in waiting.items()}
        passed = difference(self._links.passed(), before)
        timings = {replica.name: replica.commit_timings(number) for replica in watched}
        change = Change(
            scene=scene,
            version=number,
            changed=published["changed"],
            total=published["total"],
            payload_bytes=published["payload_bytes"],
            seconds=published["seconds"],
            fresh={name: at - published["called"] for name, at in served.items()},
            passed=passed,
            timings=timings,
        )
        self.record.changes.append(change)
        self._say_change(change, published["full_bytes"])
        return change

    def _say_change(self, change: Change, full_bytes: int) -> None:
        fresh = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in change.fresh.items())
        self._screen.say(
            f"version {change.version}: {100 * change.changed / change.total:.2f} % changed, "
            f"{change.payload_bytes / MB:.2f} MB of {full_bytes / MB:.1f} MB; fresh: {fresh or 'nobody follows'}"
        )

    def _kill_and_restart(self, replica: Replica) -> None:
        """A server is killed, versions go on, and it starts again from the checkpoint it once started from."""
        others = [other for other in self._replicas if other is not replica]
        replica.kill()
        self._screen.say(f"{replica.name} was killed")
        for _ in range(MISSED):
            self._change("killed", others)
        before = self._links.passed()
        replica.start(self._settings.base)
        self._screen.say(f"{replica.name} starts again, from version 0 on its disk")
        # What the others see now is no measure: on this machine the starting server takes their processors.
        self._change("restart", others)
        self._arrived(replica, "killed, started again", before)
        self._change("caught up", self._replicas)

    def _add_from_bucket(self) -> None:
        """One more server, with configuration and tokenizer and no weights."""
        replica = self._new_replica()
        before = self._links.passed()
        self._screen.begin(f"starting {replica.name}, from the bucket alone")
        replica.start(self._settings.bare, cold=True)
        self._arrived(replica, "new, from the bucket alone", before)
        self._change("four", self._replicas)

    def _arrived(self, replica: Replica, how: str, before: dict[str, Passed]) -> None:
        self._screen.begin(f"{replica.name} starts and catches up")
        seconds = replica.await_served(self._step)
        down = difference(self._links.passed(), before)[replica.name]["down"]
        self.record.arrivals.append(Arrival(replica.name, how, self._step, seconds, down))
        self._screen.say(
            f"{replica.name} serves version {self._step}, {seconds:.1f} s after its start; {down / MB:.2f} MB came down"
        )
        time.sleep(SETTLE_SECONDS)

    def _compare_with_full(self, replica: Replica) -> None:
        """What it takes without deltas: the checkpoint into the store, and from there to a replica's disk."""
        self._screen.begin("full weights: the checkpoint goes through the trainer's link into the store")
        before = self._links.passed()
        file = replica.folder / "fetched.safetensors"
        command = [sys.executable, "-m", "examples.fleet.fetch", self._settings.full, WEIGHTS, str(file)]
        environment = serving.clean_environment() | self._reaching_store(replica.name)
        log = replica.folder / "fetch.log"
        with Child("the fetching machine", command, log, environment=environment, talk=True) as child:
            events = Events(child)
            self._await(events, child, "ready")
            self._order(do="full")
            stored = self._next("stored")
            self._screen.begin(f"full weights: from the store through {replica.name}'s link")
            child.say("now")
            fetched = self._await(events, child, "fetched")
        if file.stat().st_size != stored["bytes"]:
            raise DemoError(f"{file} has {file.stat().st_size} bytes instead of {stored['bytes']}")
        file.unlink()
        passed = difference(self._links.passed(), before)
        up, down = stored["at"] - stored["called"], fetched["at"] - fetched["began"]
        self.record.full = Full(stored["bytes"], stored["save_seconds"], up, down, passed)
        self.record.full_replica = replica.name
        self._screen.say(f"full weights, {stored['bytes'] / MB:.1f} MB: {up:.1f} s up, {down:.1f} s down")

    def _prove(self) -> None:
        """Every replica's weights are rescanned and its answers compared with the others'."""
        record = self.record
        record.fingerprints["the trainer's checkpoint"] = checkpoint_fingerprint(self._settings.checkpoint)
        os.environ.update(self._server.environment)
        record.fingerprints["the run's head"] = open_run(self._settings.bucket).head().fingerprint
        for replica in self._replicas:
            self._screen.begin(f"rescanning {replica.name}, and asking it")
            scan = replica.verify()
            record.fingerprints[replica.name] = scan["fingerprint"]
            record.served[replica.name] = scan["version"]
            record.answers[replica.name] = [[one.tokens, one.logprobs] for one in replica.answers()]
        record.listing = listing(self._settings.bucket)

    def _measure_links(self, *names: str) -> None:
        for name in names:
            self._screen.begin(f"measuring the link of {name}")
            found = measure(self._links, name, self._far_port, self._options.bits_per_second)
            again = name in self.record.links
            self.record.links[f"{name}, at the end" if again else name] = found
            self._screen.say(
                f"the link of {name}: {found.round_trip_ms:.1f} ms, {found.up_mbit_s:.1f} Mbit/s up, "
                f"{found.down_mbit_s:.1f} down"
            )

    # The trainer

    def _order(self, **order: Any) -> None:
        self._trainer.say(json.dumps(order))

    def _next(self, wanted: str) -> dict[str, Any]:
        return self._await(self._events, self._trainer, wanted)

    def _await(self, events: Events, child: Child, wanted: str) -> dict[str, Any]:
        """The next event, which has to be the wanted one; every process must live that long."""
        while (event := events.next(LOOK_SECONDS)) is None:
            if events.ended:
                child.wait(LOOK_SECONDS)
            for each in (child, *(replica.child for replica in self._replicas)):
                if each is not None and each.exit_code is not None:
                    raise DemoError(
                        f"{each.name} ended with status {each.exit_code}; the end of {each.log.name}:\n{each.tail()}"
                    )
        if event["event"] != wanted:
            raise DemoError(f"{child.name} said {event['event']!r} instead of {wanted!r}; see {child.log}")
        return event


def listing(bucket: str) -> str:
    """What ``delta-sync fleet`` prints. Raises DemoError: it failed."""
    command = [script("delta-sync"), "fleet", "--bucket", bucket]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LISTING_SECONDS, check=False)
    if done.returncode:
        raise DemoError(f"delta-sync fleet ended with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def difference(after: dict[str, Passed], before: dict[str, Passed]) -> dict[str, Passed]:
    """Bytes that passed between two looks."""
    return {
        name: {way: count - before.get(name, {}).get(way, 0) for way, count in ways.items()}
        for name, ways in after.items()
    }
