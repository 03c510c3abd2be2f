"""The device path without vLLM: a run of Llama-shaped tensors that a plain module on the device follows.

Receiver, background thread, staging, commits and publisher are those of servers and trainers. A second receiver follows
the run on the CPU in compiled loops, one step behind: the device is compared with it, backwards as well as forwards.
With ``--device cpu`` the device is simulated: a rank has an accelerator whose streams do nothing.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tests.support.device import SimulatedDevice
from tests.support.modules import ModulePort, save_base
from tests.tools.gpu.report import LeftOutError, Report
from trainer_side import Publisher
from trainer_side.diff.buffers import BaselineLocation, DeviceBuffer, HostSlab
from trainer_side.diff.change_log import ChangeLog
from trainer_side.diff.device import DeviceComparer
from trainer_side.diff.device_queue import open_queue
from vllm_delta_sync import open_run
from vllm_delta_sync.engine import protocol
from vllm_delta_sync.engine.compat import write_hooks
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.engine.protocol import A, RankFailure, RankRequest, Revert
from vllm_delta_sync.engine.worker.rank_worker import RankWorker
from vllm_delta_sync.errors import BusyError, MemoryLimitError
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.settings import Settings

SHARES = (0.001, 0.01, 0.05)
LOCATIONS: dict[BaselineLocation, str] = {"host": "in host memory", "device": "on the device"}
PUBLISHED = 3
LEFT_BYTES = 64 << 20
"""Of a device that is filled: for what the runtime needs."""
BUSY_CYCLES = 100_000_000
"""Some 50 ms, in which a thread that does not wait reads or writes long before."""
TRANSPOSED = "out_0"
"""The parameter whose weights lie transposed, as some kernels want them."""
Parts = dict[str, tuple[int, ...]]


def llama(hidden: int, keys: int, mlp: int, vocabulary: int, layers: int) -> dict[str, Parts]:
    """Per parameter of the module: the checkpoint tensors that lie in it, row after row, with their shapes."""
    found: dict[str, Parts] = {"embedding": {"embedding": (vocabulary, hidden)}, "head": {"head": (vocabulary, hidden)}}
    for layer in range(layers):
        fused: dict[str, Parts] = {
            "qkv": {"q": (hidden, hidden), "k": (keys, hidden), "v": (keys, hidden)},
            "out": {"o": (hidden, hidden)},
            "gate_up": {"gate": (mlp, hidden), "up": (mlp, hidden)},
            "down": {"down": (hidden, mlp)},
            "norm": {"norm": (hidden,)},
        }
        for name, parts in fused.items():
            found[f"{name}_{layer}"] = {f"{layer}.{part}.weight": size for part, size in parts.items()}
    return found


LLAMA_8B = partial(llama, 4096, 1024, 14336, 128256)
QUICK = llama(256, 64, 896, 2000, 2)


class FusedLayers(nn.Module):
    """Weights in bfloat16, fused as vLLM fuses them."""

    def __init__(self, parameters: dict[str, Parts], device: torch.device) -> None:
        super().__init__()
        self.places: dict[str, tuple[str, int]] = {}
        for name, parts in parameters.items():
            rows = 0
            whole: tuple[int, ...] = ()
            for part, size in parts.items():
                self.places[part] = (name, rows)
                rows += size[0]
                whole = (rows, *size[1:])
            memory = torch.zeros(whole[::-1] if name == TRANSPOSED else whole, dtype=torch.bfloat16, device=device)
            self.register_parameter(name, nn.Parameter(memory, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for part, tensor in weights:
            name, row = self.places[part]
            live = getattr(self, name).data
            (live.t() if name == TRANSPOSED else live).narrow(0, row, tensor.shape[0]).copy_(tensor)
            loaded.add(part)
        return loaded


class TimedPort(ModulePort):
    """An engine with one rank, which commits each version several times in its pause: forwards, back, and so on.

    Attributes:
        repeats: how often; 0 for one commit, as in an engine.
        staged: the last answer.
        commit_ms: of the last pause, with the patch on the device as staging leaves it.
        revert_ms: as if another rank had failed: the patch is still on the device.
        rollback_ms: the patch comes from host memory.
        allocations: by torch, in each pause.
        wrong: parameters that differed from the reference when the last commit was reverted.
    """

    staged: protocol.Staged
    commit_ms: list[float]
    revert_ms: list[float]
    rollback_ms: list[float]
    wrong: list[str]

    def __init__(self, model: FusedLayers, reference: FusedLayers, device: torch.device, repeats: int) -> None:
        super().__init__()
        memory = WeightMemory(SimulatedDevice()) if device.type == "cpu" else None
        self.ranks = [RankWorker(model, memory=memory)]
        self.model, self.reference, self.device, self.repeats = model, reference, device, repeats
        self.allocations: list[int] = []

    def call_rank(self, rank: RankWorker, request: RankRequest[A]) -> A | RankFailure:
        call: Callable[[], A | RankFailure] = partial(super().call_rank, rank, request)
        before, patch = rank.version, rank._staged
        if not isinstance(request, protocol.Commit) or not self.repeats:
            answer = call()
            if isinstance(answer, protocol.Staged):
                self.staged = answer
            return answer
        answers: list[A | RankFailure] = []
        self.commit_ms, self.revert_ms, self.rollback_ms = [], [], []
        allocated = self._measure(self.commit_ms, lambda: answers.append(call()))
        if isinstance(answers[0], RankFailure):
            return answers[0]
        assert patch is not None
        uploaded = patch.on_device
        assert uploaded is not None
        for _ in range(self.repeats):
            allocated += self._measure(self.revert_ms, lambda: rank.revert(Revert(before)))
            # A revert drops what staging has uploaded.
            with torch.inference_mode():
                uploaded.upload()
            allocated += self._measure(self.commit_ms, lambda: rank.revert(Revert(request.version)))
            uploaded.release()
            allocated += self._measure(self.rollback_ms, lambda: rank.revert(Revert(before)))
            rank.revert(Revert(request.version))
            with torch.inference_mode():
                uploaded.upload()
        self.allocations.append(allocated)
        rank.revert(Revert(before))
        self.wrong = differences(self.model, self.reference)
        rank.revert(Revert(request.version))
        return answers[0]

    def _measure(self, milliseconds: list[float], action: Callable[[], object]) -> int:
        """Time an action of a pause; return how often torch allocated memory of the device."""
        allocated = allocations(self.device)
        milliseconds.append(timed(self.device, action))
        return allocations(self.device) - allocated


class SleepingWorker:
    """vLLM's worker, as far as ``/sleep`` is concerned: the weights go to the host, and their memory is lost."""

    def __init__(self, model: FusedLayers) -> None:
        self._weights = weights_of(model)
        self._saved: list[torch.Tensor] = []

    def sleep(self, level: int = 1) -> None:
        self._saved = [weight.to("cpu", copy=True) for weight in self._weights]
        for weight in self._weights:
            weight.fill_(-1)

    def wake_up(self, tags: list[str] | None = None) -> None:
        for weight, saved in zip(self._weights, self._saved, strict=True):
            weight.copy_(saved)


class Trial:
    """A trainer on the device, its run, and the two receivers that follow it."""

    def __init__(
        self, parameters: dict[str, Parts], device: torch.device, root: Path, repeats: int, codec: Codec = "plain"
    ) -> None:
        self.parameters, self.device, self.root, self.repeats = parameters, device, root, repeats
        self.random = torch.Generator(device).manual_seed(0)
        self.tensors = {
            name: 0.02 * torch.randn(size, generator=self.random, device=device, dtype=torch.bfloat16)
            for parts in parameters.values()
            for name, size in parts.items()
        }
        base, url = save_base(root / "base", self.tensors), str(root / "run")
        # No merged deltas: each version has to be a commit of its own.
        self.publisher = Publisher(lambda: self.tensors.items(), url, base=base, codec=codec, merge=False)
        self.model, self.reference = self.fresh(device), self.fresh(torch.device("cpu"))
        self.nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        self.port, self.cpu = TimedPort(self.model, self.reference, device, repeats), ModulePort(self.reference)
        settings = Settings(bucket=url, undo_bytes=4 << 30)
        self.receivers = [Receiver(port, settings) for port in (self.port, self.cpu)]

    def fresh(self, device: torch.device) -> FusedLayers:
        """A module that has loaded the trainer's weights of this moment."""
        module = FusedLayers(self.parameters, device)
        module.load_weights(self.tensors.items())
        return module

    def change(self, share: float) -> None:
        for tensor in self.tensors.values():
            flat = bits_of(tensor)
            where = torch.randint(len(flat), (int(share * len(flat)),), generator=self.random, device=self.device)
            flat[where] = flat[where] ^ 1
        synchronize(self.device)

    def publish(self, share: float) -> float:
        """Change a share of all elements, and publish; milliseconds of the comparison."""
        self.change(share)
        result = self.publisher.publish(step=0, wait=True)
        self.publisher.flush()
        return 1e3 * result.seconds["diff"]

    def follow(self) -> None:
        """Bring both receivers to the head; then both modules hold what a fresh load gives."""
        for receiver in self.receivers:
            receiver.advance()
        self.expect_equal()
        assert differences(self.model, self.fresh(self.device)) == []

    def expect_equal(self) -> None:
        assert differences(self.model, self.reference) == []

    def identify(self) -> str:
        self.follow()
        return f"{self.nbytes / 1e9:.2f} GB in {len(self.tensors)} tensors"

    def commit(self, share: float) -> str:
        compared = self.publish(share)
        self.receivers[0].advance()
        bare = self.scatter_ms()
        self.follow()
        port, staged = self.port, self.port.staged
        assert port.wrong == [], f"reverted, but not to the bits from before: {port.wrong}"
        ours, back, rollback = map(statistics.median, (port.commit_ms, port.revert_ms, port.rollback_ms))
        rate = (staged.nbytes + 4 * staged.elements) / ours / 1e6
        return (
            f"{staged.elements:,} elements: {ours:.2f} ms (first {port.commit_ms[0]:.2f}), {rate:.0f} GB/s, "
            f"{ours / bare:.2f} × `index_put_` ({bare:.2f} ms); back in the same pause {back:.2f} ms, later "
            f"{rollback:.2f} ms; compared in {compared:.0f} ms, staged in {sum(staged.ms.values()):.0f} ms, "
            f"{staged.ms.get('decode', 0):.0f} ms of it decoding"
        )

    def scatter_ms(self) -> float:
        """Milliseconds of ``index_put_`` for all that changed since the version that the reference holds."""
        found = []
        for live, reference in zip(weights_of(self.model), weights_of(self.reference), strict=True):
            old = reference.to(self.device)
            where = torch.nonzero(live != old).view(-1)
            found.append((live, where, old[where], live[where]))

        def scatter(new: bool) -> None:
            for live, where, before, after in found:
                live.index_put_((where,), after if new else before)

        return statistics.median(
            timed(self.device, partial(scatter, new)) for _ in range(self.repeats) for new in (False, True)
        )

    def no_allocation(self) -> str:
        if self.device.type == "cpu":
            raise LeftOutError("torch counts no allocations on a CPU")
        assert not any(self.port.allocations), f"allocations in each pause: {self.port.allocations}"
        return f"none in {len(self.port.allocations)} pauses"

    def rollback(self) -> str:
        for receiver in self.receivers:
            receiver.rollback(1)
        self.expect_equal()
        for receiver in self.receivers:
            receiver.release()
        self.follow()
        return "to version 1, and forwards again"

    def fingerprints(self) -> str:
        expected = scan(self.cpu.ranks[0])
        times = []
        for _ in range(self.repeats):
            began = time.perf_counter()
            found = scan(self.port.ranks[0])
            times.append(1e3 * (time.perf_counter() - began))
            assert found == expected, "not those that the CPU computes"
        assert isinstance(expected, protocol.Scanned)
        for tensor, measured in expected.measured.items():
            assert sum(measured, Fingerprint()) == expected.expected[tensor], "not those of the run"
        ms = statistics.median(times)
        return f"{ms:.2f} ms, {self.nbytes / ms / 1e6:.0f} GB/s"

    def sleep(self) -> str:
        rank, worker = self.port.ranks[0], SleepingWorker(self.model)
        write_hooks.watch_writes(worker, self.model, rank.memory)
        outcome = scan(rank, meanwhile=worker.sleep)
        assert rank.describe().asleep
        worker.wake_up()
        self.receivers[0].check_served()
        assert self.receivers[0].verify()["verdict"]
        self.expect_equal()
        if not isinstance(outcome, RankFailure):
            raise LeftOutError("the scan was over before the worker slept; the weights are right")
        assert outcome.kind == BusyError.kind, outcome.message
        return "refused as `busy`; awake, all weights are right"

    def out_of_memory(self) -> str:
        if self.device.type == "cpu":
            raise LeftOutError("takes a device")
        self.publish(max(SHARES))
        # To compare takes memory.
        self.port.repeats = 0
        said = "staged and committed all the same"
        with filled(self.device):
            try:
                self.receivers[0].advance()
            except MemoryLimitError:
                said = "refused as `memory`, not a bit changed; served when there was memory"
        if self.receivers[0].served_version == self.receivers[1].served_version:
            self.expect_equal()
        self.follow()
        return said

    def publish_from(self, location: BaselineLocation) -> str:
        """Publish another run of the same weights. Args: location: of its baseline."""
        url = str(self.root / location)
        with Publisher(lambda: self.tensors.items(), url, codec="plain", merge=False, baseline=location) as publisher:
            results = []
            # The first one moves the baseline.
            for step in range(PUBLISHED):
                self.change(0.01)
                results.append(publisher.publish(step=step, wait=True))
                publisher.flush()
            self.expect_kept(publisher, location)
        with open_run(url) as run:
            pairs = ((name, bits_of(found), bits_of(self.tensors[name]).cpu()) for name, found in run.tensors())
            wrong = [name for name, found, expected in pairs if not torch.equal(found, expected)]
        assert not wrong, f"published wrong: {wrong}"
        first, *later = (1e3 * result.seconds["diff"] for result in results)
        ours, copy = statistics.median(later), self.copy_ms()
        return (
            f"{results[-1].changed:,} elements: {ours:.0f} ms (first {first:.0f}), {ours / copy:.2f} × copying all "
            f"weights to pinned memory ({copy:.0f} ms)"
        )

    def expect_kept(self, publisher: Publisher, location: BaselineLocation) -> None:
        """The baseline is where ``publisher.memory`` says, and pinned in one piece if it is in host memory."""
        if self.device.type != "cuda":
            return
        at_rest, baseline = publisher.memory.at_rest, publisher._committer.baseline
        if location == "device":
            assert (at_rest.host, at_rest.pinned, at_rest.device) == (0, 0, self.nbytes)
            return
        assert (at_rest.host, at_rest.device) == (0, 0)
        assert self.nbytes <= at_rest.pinned <= 1.03 * self.nbytes
        held = torch.from_numpy(baseline.read(0).view(np.int16))
        assert held.is_pinned(), "the baseline is not pinned"
        publisher.close()
        assert not held.is_pinned(), "the baseline is still pinned after close"

    def unpinnable(self) -> str:
        """Memory that CUDA refuses to pin, since it is pinned already: a warning, and the next kernel runs."""
        if self.device.type != "cuda":
            raise LeftOutError("takes a device")
        spec = TensorSpec("pinned", "BF16", (1 << 20,))
        first, second = HostSlab([spec]), HostSlab([spec])
        second._memory = first._memory
        for slab in (first, second):
            slab.pin(self.device)
        assert [slab.pinned for slab in (first, second)] == [True, False]
        assert torch.ones(5, device=self.device).sum().item() == 5
        first.close()
        return "stays pageable"

    def busy_streams(self) -> str:
        """A step on a busy side stream is published there, and the next one begins as soon as ``publish`` returns."""
        weights = self.tensors["0.down.weight"].clone()
        url, wanted = str(self.root / "busy"), []
        with Publisher({"w": weights}, url, baseline="device") as publisher:
            for step in range(self.repeats):
                with busy_stream(self.device):
                    bits_of(weights)[step::100] ^= 1
                    publisher.publish(step=step, wait=True)
                    wanted.append(weights.to("cpu", copy=True))
                    bits_of(weights)[step::50] ^= 1
                    synchronize(self.device)
        with open_run(url) as run:
            for version, expected in enumerate(wanted, 1):
                for _, found in run.tensors(version):
                    assert torch.equal(bits_of(found), bits_of(expected)), f"version {version} is another step's"
        return f"{self.repeats} times, with {BUSY_CYCLES:,} cycles of other work before each step"

    def copy_ms(self) -> float:
        """Milliseconds to copy all weights to the host: the least that sending them whole takes."""
        pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.device.type == "cuda")
                  for tensor in self.tensors.values()]  # fmt: skip

        def copy() -> None:
            for target, tensor in zip(pinned, self.tensors.values(), strict=True):
                target.copy_(tensor, non_blocking=True)

        return statistics.median(timed(self.device, copy) for _ in range(self.repeats))

    def compare(self, dtype: torch.dtype) -> str:
        """The pass for which training waits, beside reading both sides, over all tensors at once.

        In float32 over a third of them, which takes as much memory.
        """
        given = list(self.tensors.items())
        given = given[: -(-len(given) // 3)] if dtype == torch.float32 else given
        live = {name: tensor.to(dtype) for name, tensor in given}
        specs = [TensorSpec(name, "BF16", tuple(tensor.shape)) for name, tensor in live.items()]
        held = [
            DeviceBuffer(tensor.to(torch.bfloat16, copy=True).view(torch.int16).view(-1)) for tensor in live.values()
        ]
        for buffer in held:
            buffer.flat[::100] ^= 1
        comparer = DeviceComparer(open_queue(self.device), TensorTable(specs))
        sums = torch.zeros(2 * len(specs), dtype=torch.int64, device=self.device)

        def ours() -> None:
            comparer.drop()
            for spec, buffer, tensor in zip(specs, held, live.values(), strict=True):
                comparer.add(spec, buffer, tensor, ChangeLog(spec.element))
            counts = comparer.finish()
            assert sum(counts.values()) == sum(-(-spec.numel // 100) for spec in specs)

        def read() -> None:
            # The least that a comparison can do: each side once, as wide integers.
            for number, side in enumerate([*(buffer.flat for buffer in held), *live.values()]):
                words = side.view(-1).view(torch.int16)
                words = words[: words.numel() // 4 * 4].view(torch.int64)
                torch.sum(words, 0, out=sums[number])

        ours_ms, read_ms = (
            statistics.median(timed(self.device, action) for _ in range(1 + self.repeats)) for action in (ours, read)
        )
        nbytes = sum(buffer.flat.nbytes for buffer in held) + sum(tensor.nbytes for tensor in live.values())
        return (
            f"{sum(spec.numel for spec in specs) / 1e6:.0f} M elements, 1 % changed: {ours_ms:.2f} ms, "
            f"{nbytes / ours_ms / 1e6:.0f} GB/s, {ours_ms / read_ms:.2f} × reading both sides ({read_ms:.2f} ms)"
        )


def check_modules(report: Report, parameters: dict[str, Parts], device: torch.device, root: Path, repeats: int) -> None:
    made: list[Trial] = []

    def begin() -> str:
        made.append(Trial(parameters, device, root, repeats))
        return made[0].identify()

    if report.check("a module on the device is identified as version 0", begin):
        trial = made[0]
        for share in SHARES:
            report.check(f"commit, {share:.1%} changed, and back", partial(trial.commit, share))
        report.check("allocations in the pause", trial.no_allocation)
        report.check("rollback", trial.rollback)
        report.check("fingerprints of all weights", trial.fingerprints)
        report.check("sleep in the middle of a scan", trial.sleep)
        report.check("staging without device memory", trial.out_of_memory)
        for location, where in LOCATIONS.items():
            report.check(f"publishing, 1% changed, baseline {where}", partial(trial.publish_from, location))
        report.check("a baseline that cannot be pinned", trial.unpinnable)
        report.check("publishing from a busy stream", trial.busy_streams)
        for dtype in (torch.bfloat16, torch.float32):
            report.check(f"the publisher's comparison, {str(dtype)[6:]}", partial(trial.compare, dtype))
    for trial in made:
        trial.publisher.close()

    def tiled() -> str:
        """Staging decodes on the device; of a quarter of the model, since the other trial keeps its memory."""
        some = dict(list(parameters.items())[: -(-len(parameters) // 4)])
        trial = Trial(some, device, root / "tiled", repeats, codec="tiled")
        try:
            return f"{trial.identify()}; {trial.commit(0.01)}"
        finally:
            trial.publisher.close()

    report.check("commit, 1.0% changed, codec tiled", tiled)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """(numel,) int16 view of a contiguous bfloat16 tensor."""
    return tensor.data.view(torch.int16).view(-1)


def weights_of(module: nn.Module) -> list[torch.Tensor]:
    return [bits_of(parameter) for parameter in module.parameters()]


def differences(module: nn.Module, other: nn.Module) -> list[str]:
    names = [name for name, _ in module.named_parameters()]
    pairs = zip(names, weights_of(module), weights_of(other), strict=True)
    return [name for name, mine, theirs in pairs if not torch.equal(mine, theirs.to(mine.device))]


def scan(rank: RankWorker, meanwhile: Callable[[], None] = lambda: None) -> protocol.RankAnswer:
    """Hash all weights of a rank in its background thread; what it answers in the end."""
    assert rank.routes is not None
    request = protocol.Scan(list(range(len(rank.routes.table))))
    rank.answer(request)
    meanwhile()
    while rank.answer(protocol.Poll()) == protocol.Progress(True):
        time.sleep(0.0002)
    return rank.answer(protocol.Outcome.of(request))


def timed(device: torch.device, action: Callable[[], object]) -> float:
    """Milliseconds until the device has done an action."""
    synchronize(device)
    began = time.perf_counter()
    action()
    synchronize(device)
    return 1e3 * (time.perf_counter() - began)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def busy_stream(device: torch.device) -> Iterator[None]:
    """Work on a stream of its own, which does not begin before the device has been busy for ``BUSY_CYCLES``."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(BUSY_CYCLES)
        yield


def allocations(device: torch.device) -> int:
    """How often torch has allocated memory of the device."""
    return int(torch.cuda.memory_stats(device)["allocation.all.allocated"]) if device.type == "cuda" else 0


@contextmanager
def filled(device: torch.device) -> Iterator[None]:
    """Leave no memory of a device for this process, and little for others."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    usable = torch.cuda.memory_reserved(device) + max(0, free - LEFT_BYTES)
    torch.cuda.set_per_process_memory_fraction(usable / total, device)
    taken, size = [], 1 << 36
    try:
        while size >= 1 << 20:
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device=device))
            except torch.OutOfMemoryError:
                size //= 2
        yield
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()
