"""``RankCoordinator``: run the code of a single process on rank 0, and the steps on weights on every rank.

Where rank 0's code reads or writes weights it sends a command, which every rank executes on its own parts.
``put_shards`` writes an anchor of a sharded model: ranks take turns at writing files, one tensor at a time.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from trainer_side.diff.pending_delta import PendingDelta, VersionChanges
from trainer_side.encode.update_gate import nonfinite_by_tensor
from trainer_side.model.live_tensors import read_to_end
from trainer_side.model.module import ModelLike
from trainer_side.options import PublisherOptions
from trainer_side.ranks.given_parts import GivenParts
from trainer_side.ranks.group import (
    Json,
    LostRankError,
    ProcessGroup,
    added_rows,
    encode_document,
    error_document,
    error_from_rank,
)
from trainer_side.ranks.shard_baseline import ShardBaseline, changes_of_tensors, check_same_models
from trainer_side.ranks.shard_parts import ModuleParts, RankParts, boxes_document, check_coverage
from trainer_side.run_weights import FullState, Put, RunWeights, Shards, prepare
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import (
    BaseUnavailableError,
    DeltaSyncError,
    FingerprintError,
    LimitError,
    PublishError,
    TensorMismatchError,
    UsageError,
)
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.format.safetensors_file import shard_tables
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.run.partial import restore_boxes
from vllm_delta_sync.run.restore import check_base_bits
from vllm_delta_sync.tensors.boxes import Box
from vllm_delta_sync.tensors.changes import BaseTensor, Bits
from vllm_delta_sync.tensors.checkpoint import Checkpoint

logger = guarded_logger(__name__)

Command = Literal["fit", "check_base", "capture", "checkout", "nonfinite", "put_shards"]
"""The methods of ``RankCoordinator`` that rank 0 has the other ranks call."""


class RankCoordinator(RunWeights):
    """The parts of one rank among those that publish a run together.

    Args:
        group: of the thread that publishes.
    """

    live: RankParts
    baseline: ShardBaseline

    def __init__(self, model: ModelLike, bucket: Bucket, options: PublisherOptions, group: ProcessGroup) -> None:
        if isinstance(model, GivenParts):
            model.agree(group, options.selection)
            self.live = model
        elif isinstance(model, nn.Module):
            self.live = ModuleParts(model, options.selection)
        else:
            raise UsageError("only a module, or parts=, can be published by several ranks together")
        self.base: str | Path | None = None
        self._bucket, self._options, self._group = bucket, options, group
        self._work_name = ""

    def _hold(self, baseline: ShardBaseline) -> None:
        self.baseline, self.table, self.places = baseline, baseline.whole, baseline.boxes
        prepare(self.baseline, self.table, self._options)

    def begin(self) -> tuple[FullState, str | None]:
        def work() -> Json:
            self._hold(ShardBaseline.captured_parts(self.live, self.base, self._group.rank, self._options.baseline))
            self.baseline.scan()
            return {
                "model": self.live.digest,
                "tensors": self.table.digest,
                "boxes": boxes_document(self.places),
                "difference": self.baseline.first_difference,
                **_shares_document(self.baseline),
            }

        def judge(reports: list[Json]) -> None:
            check_same_models(reports)
            check_coverage(self.table, [item["boxes"] for item in reports], self.live.remedy)

        reports = self._group.all_or_raise("weights", work, judge)
        difference = next((item["difference"] for item in reports if item["difference"] is not None), None)
        return _gathered_state(self.table, reports), difference

    def restore(self, manifest: Manifest) -> list[Bits]:
        found = restore_boxes(self.run, manifest, self.baseline.wanted(), self.base)
        return self.baseline.in_part_order(found)

    def changes(self, pending: PendingDelta) -> VersionChanges:
        return changes_of_tensors(self.baseline, pending)

    def base_tensor(self, tensor: int) -> BaseTensor:
        return self.baseline.base_tensor(tensor)

    def keep(self, changes: Mapping[int, Fingerprint]) -> None:
        known = self.baseline.shares
        # In one assignment, so that a failure in the middle changes nothing.
        self.baseline.shares = known | {
            tensor: known.get(tensor, Fingerprint()) + change for tensor, change in changes.items()
        }

    # Work on rank 0, and the commands that it sends

    def run_on_rank0(self, what: str, work: Callable[[], Json]) -> Json:
        self._work_name = what
        if self._group.is_rank0:
            return self._group.from_rank0(what, work)
        while True:
            message = self._group.broadcast(what)
            if "error" in message:
                raise error_from_rank(message["error"], 0)
            if "command" not in message:
                return message["value"]
            try:
                self._execute(message["command"], message["argument"])
            except LostRankError:
                raise
            except Exception:  # rank 0 received the error, and raises it in ``work``
                logger.debug("rank %d could not execute a command", self._group.rank, exc_info=True)

    def _command(self, command: Command, argument: str = "") -> None:
        """On rank 0, send a command that the other ranks ``_execute``."""
        if self._group.is_rank0:
            self._group.broadcast(self._work_name, {"command": command, "argument": argument})

    def _execute(self, command: Command, argument: str) -> None:
        calls: dict[Command, Callable[[], object]] = {
            "fit": lambda: self._fit(argument),
            "check_base": self.check_base,
            "capture": lambda: self.capture(None),
            "checkout": lambda: self.checkout(Manifest.from_bytes(argument.encode())),
            "nonfinite": self.nonfinite,
            "put_shards": lambda: self.put_shards(lambda ref, path: self._bucket.put(ref.key, path)),
        }
        calls[command]()

    def fit(self, run: Run) -> None:
        self.run = run
        self._command("fit", run.table.digest)
        self._fit(run.table.digest)

    def _fit(self, tensors: str) -> None:
        """Do ``fit`` on every rank. Args: tensors: digest of the table of the run that rank 0 sees."""

        def work() -> Json:
            if self.run.table.digest != tensors:
                raise UsageError(
                    f"rank {self._group.rank} sees another run at {self._bucket.url} than rank 0: give every rank the "
                    "URL of one bucket that all of them reach"
                )
            self._hold(ShardBaseline.parts_of_run(self.live, self.run, self._group.rank))
            return {"model": self.live.digest, "boxes": boxes_document(self.places)}

        def judge(reports: list[Json]) -> None:
            check_same_models(reports)
            check_coverage(self.run.table, [item["boxes"] for item in reports], self.live.remedy)

        self._group.all_or_raise("parts", work, judge)

    def check_base(self) -> None:
        self._command("check_base")
        self._group.all_or_raise("base bits", lambda: check_base_bits(self.run, self.base))

    def capture(self, fallback: Checkpoint | None) -> None:
        self._command("capture")

        def work() -> None:
            self.baseline.capture(self.live, fallback)
            self.baseline.scan()

        self._group.all_or_raise("capture", work)

    def checkout(self, manifest: Manifest) -> None:
        self._command("checkout", manifest.to_bytes().decode())
        restored: list[tuple[list[Bits], dict[int, Fingerprint]]] = []

        def work() -> str:
            bits = self.restore(manifest)
            restored.append((bits, self.baseline.shares_of(bits)))
            return sum(restored[0][1].values(), Fingerprint()).hex()

        def judge(reports: list[Json]) -> None:
            reached = sum(map(Fingerprint.from_hex, reports), Fingerprint())
            if reached != manifest.model_fingerprint:
                raise FingerprintError(
                    f"weights have fingerprint {reached.hex()}, the manifest says {manifest.fingerprint}"
                )

        try:
            self._group.all_or_raise("restore", work, judge)
        except (FingerprintError, BaseUnavailableError):
            raise
        except DeltaSyncError as error:
            if not restored:
                raise
            # The version exists, because this rank was able to read it: do not start over.
            raise PublishError(f"version {manifest.version} cannot be restored: {error.message}") from error
        self.baseline.replace_bits(*restored[0])

    def nonfinite(self) -> dict[int, int]:
        self._command("nonfinite")

        def work() -> Json:
            return [*nonfinite_by_tensor(self.baseline, self.places).items()]

        return added_rows(self._group.all_or_raise("nonfinite", work))

    def put_shards(self, put: Put) -> tuple[FullState, list[ObjectRef]]:
        self._command("put_shards")
        reports = self._group.all_or_raise("fingerprints", lambda: _shares_document(self.baseline))
        refs = put_shards(self._group, self.baseline, self._options.shard_bytes, put)
        return _gathered_state(self.table, reports), refs


def _shares_document(baseline: ShardBaseline) -> Json:
    return {"shares": {str(tensor): share.hex() for tensor, share in baseline.shares.items()}}


def _gathered_state(table: TensorTable, reports: list[Json]) -> FullState:
    fingerprints = [Fingerprint()] * len(table)
    for item in reports:
        for tensor, share in item["shares"].items():
            fingerprints[int(tensor)] += Fingerprint.from_hex(share)
    return FullState(table, fingerprints)


# An anchor of a sharded model


def put_shards(group: ProcessGroup, baseline: ShardBaseline, shard_bytes: int, put: Put) -> list[ObjectRef]:
    """Store all tensors as an anchor's objects; every rank calls it. A rank holds one whole tensor at a time.

    Args:
        put: as in ``Shards``.

    Returns:
        On rank 0 the objects, in the order of their tensors; none elsewhere.
    """
    tables = list(enumerate(shard_tables(baseline.whole, shard_bytes)))
    own: list[tuple[int, ObjectRef]] = []

    def work() -> list[tuple[int, dict[str, Any]]]:
        with ExitStack() as stack:

            def prepare() -> tuple[Shards, Bits]:
                specs = (spec for number, table in tables if number % group.size == group.rank for spec in table)
                largest = max(specs, key=lambda spec: spec.nbytes, default=None)
                return stack.enter_context(Shards(put)), _room_for(largest, group.rank)

            # From here on a rank can receive whatever comes, even if its own file fails.
            files, room = group.on_every_rank("anchor: memory", prepare)
            failure: Exception | None = None
            for number, table in tables:
                writer = number % group.size
                if writer != group.rank:
                    _send_all(group, writer, baseline, table)
                    continue
                tensors = _gathered(group, baseline, table, room)
                try:
                    with read_to_end(tensors):  # the others keep sending
                        if failure is None:
                            own.append((number, files.add(table, tensors)))
                except LostRankError:
                    raise
                except Exception as error:  # noqa: BLE001 - raised below, once no rank waits for this one
                    failure = failure or error
            if failure is not None:
                raise failure
        return [(number, ref.model_dump()) for number, ref in own]

    reports = group.all_or_raise("anchor", work)
    rows = sorted((number, rank, ref) for rank, theirs in enumerate(reports) for number, ref in theirs)
    return [ObjectRef(**{**ref, "rank": rank}) for _, rank, ref in rows]


def _room_for(spec: TensorSpec | None, rank: int) -> Bits:
    """Return memory for the bytes of the largest tensor that a rank writes."""
    if spec is None:
        return np.empty(0, np.uint8)
    try:
        return np.empty(spec.nbytes, np.uint8)
    except MemoryError as error:
        raise LimitError(
            f"tensor {spec.name!r} has {spec.nbytes} bytes, for which rank {rank} has no memory: no snapshot is "
            "written; a rank holds one whole tensor at a time for it"
        ) from error


def _gathered(
    group: ProcessGroup, baseline: ShardBaseline, table: TensorTable, room: Bits
) -> Iterator[tuple[str, Bits]]:
    """Yield (name, (numel,) bits) of the tensors of one file, assembled in ``room`` from the parts of all ranks.

    An error that a rank reports is raised at the end, once all that the others send is received.
    """
    failure: Exception | None = None
    for spec in table:
        bits, filled = room[: spec.nbytes].view(spec.element.uint), 0
        for rank in range(group.size):
            try:
                filled += _fill(group, baseline, rank, spec, bits)
            except LostRankError:
                raise
            except Exception as error:  # noqa: BLE001 - raised below
                failure = failure or error
        if filled != spec.numel and failure is None:
            failure = TensorMismatchError(
                f"the ranks hold {filled} of the {spec.numel} elements of tensor {spec.name!r}: no snapshot is written"
            )
        yield spec.name, bits
    if failure is not None:
        raise failure


def _fill(group: ProcessGroup, baseline: ShardBaseline, rank: int, spec: TensorSpec, bits: Bits) -> int:
    """Write the parts that a rank has of a tensor into the (numel,) bits of the whole; return how many elements."""
    if rank == group.rank:
        for box, here in _own_pieces(baseline, spec):
            box.view(bits)[...] = here.reshape(box.shape)
        return sum(box.numel for _, box in baseline.parts_of(spec.name))
    header = json.loads(group.receive(rank).tobytes())
    if "error" in header:
        raise error_from_rank(header["error"], rank)
    boxes = [Box(tuple(offsets), tuple(shape), spec.shape) for offsets, shape in header["boxes"]]
    for box in boxes:
        if box.is_range:  # received in place: tensors may be large
            group.receive(rank, bits[box.start : box.stop].view(np.uint8))
        else:
            box.view(bits)[...] = group.receive(rank).view(bits.dtype).reshape(box.shape)
    return sum(box.numel for box in boxes)


def _own_pieces(baseline: ShardBaseline, spec: TensorSpec) -> list[tuple[Box, Bits]]:
    return [(box, baseline.read(part)) for part, box in baseline.parts_of(spec.name)]


def _send_all(group: ProcessGroup, writer: int, baseline: ShardBaseline, table: TensorTable) -> None:
    """Send this rank's parts of a file's tensors to the writing rank: for each tensor its boxes, then their bits."""
    for spec in table:
        try:
            # torch needs writable memory, and bits mapped from a base are read only.
            pieces = [
                (box, np.require(bits, requirements=["C", "W"]).view(np.uint8))
                for box, bits in _own_pieces(baseline, spec)
            ]
        except Exception as error:  # noqa: BLE001 - the writing rank waits for an answer, and raises it
            group.send(writer, encode_document({"error": error_document(error)}))
            continue
        group.send(writer, encode_document({"boxes": [(box.offsets, box.shape) for box, _ in pieces]}))
        for _, data in pieces:
            group.send(writer, data)
