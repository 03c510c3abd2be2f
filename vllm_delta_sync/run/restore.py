"""Rebuild the weights of a version from what is in the bucket: root, then steps, every one verified.

What turns out to be bad is avoided and another way is looked for: the deltas below a folded range, a folded range
over a lost delta, an older anchor.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np

from vllm_delta_sync.codec.delta_reader import pieces_of
from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    FingerprintError,
    NotFoundError,
    StoreError,
    TensorMismatchError,
    UnsupportedError,
)
from vllm_delta_sync.format.documents import Anchor, MergedDelta
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.format.safetensors_file import Buffer
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.run.checks import check_fingerprint, check_tensors, decode_objects, object_limit, read_shard
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.lazy_objects import MAPPED_BYTES, fetch_file, mapped, open_step, scratch_folder
from vllm_delta_sync.run.objects import declared
from vllm_delta_sync.run.plan import GapError, Plan, Step, plan
from vllm_delta_sync.run.roots import BaseError as BaseError
from vllm_delta_sync.run.roots import branches, locate_base, origin
from vllm_delta_sync.tensors.bits import BaseLookup, BaseTensor, Bits
from vllm_delta_sync.tensors.changes import Changes
from vllm_delta_sync.tensors.checkpoint import Checkpoint
from vllm_delta_sync.tensors.state import AllocateBits, ModelState, contiguous_buffer

logger = guarded_logger(__name__)

IN_MEMORY_BYTES = 1024**3
"""Models up to this size are rebuilt in memory, larger ones in a temporary file that the system may write out."""
DECODED_ELEMENTS = 4 * 1024 * 1024
"""A step that carries more is decoded in pieces: whole it would take 10 bytes per element of a 16-bit dtype."""

Progress = Callable[[int, int], None]
"""Called with bytes so far and bytes in all: of the model, whose tensors are filled one by one, and of deltas."""


class StepTarget(Protocol):
    """What a step is applied to: a whole model (``ModelState``), or some of it.

    Attributes:
        fingerprint: of the whole model.
    """

    @property
    def fingerprint(self) -> Fingerprint: ...

    def base_tensor(self, tensor: int) -> BaseTensor: ...

    def apply(self, changes: Changes) -> None: ...


_Weights = TypeVar("_Weights", bound=StepTarget)


@dataclass
class Restored:
    """Weights of a version.

    Attributes:
        manifest: of the version. state: its weights. plan: what they were made from.
    """

    manifest: Manifest
    state: ModelState
    plan: Plan


def restore(
    run: RunDocuments,
    target: Manifest,
    base: str | Path | None = None,
    in_memory: bool | None = None,
    progress: Progress | None = None,
    avoid: set[str] | None = None,
    scratch: str | Path | None = None,
    room: AllocateBits | None = None,
) -> Restored:
    """Rebuild a version: O(model) memory, or O(model) of the temporary directory's disk.

    Args:
        base: checkpoint directory of version 0, or URL of the run branched from, where it is not at the recorded place.
        in_memory: None decides by the model's size (``IN_MEMORY_BYTES``).
        progress: called after each tensor of the root, and each delta.
        avoid: keys of documents known to be bad; those that turn out to be are added.
        scratch: folder for temporary files; None for the system's.
        room: where the weights are to lie, instead of what ``in_memory`` says; may be asked for more than once.

    Raises:
        BaseError: version 0 lies elsewhere, is needed, and is not at hand.
        FingerprintError, TensorMismatchError: the base is another checkpoint.
        NotFoundError: the version is no longer kept, or an object is missing.
        DeltaSyncError: the first thing that was wrong, where no other way leads to the version.
        StoreError: the store failed, or there is no room for the weights.
    """

    def begin(found: Plan) -> ModelState:
        def filled(done: int) -> None:
            if progress is not None:
                progress(done, work_bytes(found))

        return whole(run, found.root, found.beside, base, in_memory, scratch, room, filled)

    found, state = carry_out(run, target, begin, progress, avoid, scratch)
    return Restored(target, state, found)


def carry_out(
    run: RunDocuments,
    target: Manifest,
    begin: Callable[[Plan], _Weights],
    progress: Progress | None = None,
    avoid: set[str] | None = None,
    scratch: str | Path | None = None,
) -> tuple[Plan, _Weights]:
    """Go the cheapest way to a version; where that fails, the next one.

    Args:
        begin: makes the weights of a plan's root. progress, avoid, scratch: as ``restore``.

    Raises:
        Whatever ``begin`` raises of the last root. Else as ``restore``.
    """
    avoid = set() if avoid is None else avoid
    first: DeltaSyncError | None = None
    while True:
        try:
            found = plan(run, target, avoid)
        except StoreError:
            raise
        except DeltaSyncError as error:
            told = _unkept(run, target, first or error)
            if told is error:
                # Not from itself, which would hide what it was raised from.
                raise
            raise told from error
        attempt = _Attempt(found, begin, progress, scratch)
        try:
            return found, attempt.build()
        except StoreError:
            raise
        except DeltaSyncError as error:
            first = first or error
            if attempt.key in avoid:
                raise first from error
            avoid.add(attempt.key)
            logger.warning(
                "%s cannot be used, looking for another way to version %d: %s", attempt.key, target.version, error
            )


def _unkept(run: RunDocuments, target: Manifest, error: DeltaSyncError) -> DeltaSyncError:
    """What to say of a version that cannot be rebuilt: that it was let go of, if nothing but that is wrong."""
    if isinstance(error, BaseError) or not isinstance(error, NotFoundError | GapError):
        return error
    record = run.retention()
    if record is None or not record.gave_up(target.version):
        return error
    return NotFoundError(
        f"version {target.version} is no longer kept: what leads to it was removed (delta-sync gc); choose another "
        f"version: {error.message}"
    )


class _Attempt(Generic[_Weights]):
    """One plan carried out.

    Attributes:
        key: of the document in use: what to avoid if it fails.
    """

    def __init__(
        self, found: Plan, begin: Callable[[Plan], _Weights], progress: Progress | None, scratch: str | Path | None
    ) -> None:
        self._plan, self._begin, self._progress, self._scratch = found, begin, progress, scratch
        self._done = 0
        self.key = found.root_key

    def build(self) -> _Weights:
        state = self._begin(self._plan)
        self._count(self._plan.run.table.full_bytes)
        for step in self._plan.steps:
            self.key = step.key
            advance(step, state, self._scratch)
            self._count(step.payload_bytes)
        return state

    def _count(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, work_bytes(self._plan))


def work_bytes(found: Plan) -> int:
    """Bytes that ``Progress`` counts to: those of the model, and of the deltas that follow."""
    return found.run.table.full_bytes + sum(step.payload_bytes for step in found.steps)


def advance(step: Step, state: StepTarget, scratch: str | Path | None = None) -> None:
    """Apply a step, a large one in pieces. Errors as ``apply_step`` and ``apply_mapped``."""
    if step.changed <= DECODED_ELEMENTS:
        apply_step(step, state)
    else:
        apply_mapped(step, state, scratch)


def apply_step(step: Step, state: StepTarget) -> None:
    """Fetch, verify and apply a step; the weights are not touched unless all that it declares fits them.

    Raises:
        FingerprintError: it was made against other weights. Else as ``step_changes``.
    """
    changes = step_changes(step, old=state.base_tensor)
    check_step(step, state.fingerprint, changes)
    state.apply(changes)


def apply_mapped(step: Step, state: StepTarget, scratch: str | Path | None = None) -> None:
    """As ``apply_step``, in the memory of a few tensors: objects go through a scratch folder and are decoded in pieces.

    Raises:
        FingerprintError: as ``apply_step``; if a piece does not come out as declared, the state is unusable.
        StoreError: there is no room for the objects. Else as ``step_changes``.
    """
    with scratch_folder(scratch, step.key, step.payload_bytes) as folder:
        try:
            parts = open_step(step, folder, None if step.backwards else state.base_tensor)
        except UnsupportedError:
            # Of a codec that is not read in pieces.
            apply_step(step, state)
            return
        change = sum((declared(part) for part in parts), Fingerprint())
        if step.backwards:
            change = Fingerprint() - change
        check_step(step, state.fingerprint, Changes(fingerprints={0: change}))
        for piece in pieces_of(parts):
            state.apply(piece.reversed() if step.backwards else piece)


def check_step(step: Step, held: Fingerprint, changes: Changes) -> Fingerprint:
    """The fingerprint that a step leads to from the one held.

    Raises:
        FingerprintError: what its objects declare does not lead to, or back from, what its document declares.
    """
    reached = held + changes.fingerprint
    low, high = (reached, held) if step.backwards else (held, reached)
    if high != step.high_fingerprint:
        raise FingerprintError(
            f"{step.key}: objects lead {'back from' if step.backwards else 'to'} fingerprint {high.hex()}, it says "
            f"{step.high_fingerprint.hex()}"
        )
    if isinstance(step.document, MergedDelta) and low.hex() != step.document.first_fingerprint:
        raise FingerprintError(
            f"{step.key} is made for weights of fingerprint {step.document.first_fingerprint}, these have {low.hex()}"
        )
    return reached


def step_changes(
    step: Step, fetch: Callable[[ObjectRef], Buffer] | None = None, old: BaseLookup | None = None
) -> Changes:
    """What a step changes, in its direction.

    Args:
        fetch: reads an object instead of ``RunDocuments.fetch``, with the digest checked.
        old: the bits that the step is applied to, such as ``ModelState.base_tensor``. Codec ``context`` needs it.

    Raises:
        UnsupportedError: codec ``context``, and no old bits, or the step goes backwards.
        NotFoundError, DigestError, FormatError, TensorMismatchError, ChainError: see ``RunDocuments.changes``.
    """
    objects = [(fetch or step.run.fetch)(ref) for ref in step.objects]
    # Backwards they would be those of the wrong version.
    changes = decode_objects(step.document, step.run.table, objects, None if step.backwards else old)
    return changes.reversed() if step.backwards else changes


def whole(
    run: RunDocuments,
    root: Manifest,
    beside: bool = False,
    base: str | Path | None = None,
    in_memory: bool | None = None,
    scratch: str | Path | None = None,
    room: AllocateBits | None = None,
    filled: Callable[[int], None] | None = None,
) -> ModelState:
    """Weights of a version that is held whole somewhere: an anchor, one beside the chain, a checkpoint, another run.

    Args:
        room: as ``restore``. filled: called with bytes of the model that are there, as they come.

    Raises:
        BaseError: it is not at hand. FingerprintError, TensorMismatchError: a tensor is not as declared.
        DeltaSyncError: an object is missing or damaged.
    """
    if branches(root, beside):
        with origin(run, root, base) as (source, at, further):

            def scaled(done: int, total: int) -> None:
                if filled is not None:
                    filled(run.table.full_bytes * done // max(1, total))

            return _checked(root, restore(source, at, further, in_memory, scaled, None, scratch, room).state)
    if room is None and not _fits_in_memory(run.table, in_memory):
        room = contiguous_buffer(scratch_file if scratch is None else partial(scratch_file, folder=scratch))
    with held_whole(run, root, beside, base, scratch) as (document, tensors):
        return _checked(document, ModelState(run.table, tensors if filled is None else _counted(tensors, filled), room))


def _counted(tensors: Iterator[tuple[str, Bits]], filled: Callable[[int], None]) -> Iterator[tuple[str, Bits]]:
    """The pairs as they are; ``filled`` is called with the bytes of those that were taken."""
    done = 0
    for name, bits in tensors:
        yield name, bits
        done += bits.nbytes
        filled(done)


@contextmanager
def held_whole(
    run: RunDocuments, root: Manifest, beside: bool, base: str | Path | None, scratch: str | Path | None
) -> Iterator[tuple[Manifest | Anchor, Iterator[tuple[str, Bits]]]]:
    """What declares the weights of a plan's root, which does not branch, and (name, bits) of its tensors.

    Objects are checked by digest, one at a time. The tensors of a checkpoint are not checked: the block does that, and
    errors of it say which checkpoint is meant. Errors as ``whole``.
    """
    if beside:
        anchor = run.anchor(root.version)
        if anchor.manifest != root.digest or anchor.fingerprint != root.fingerprint:
            raise ChainError(f"the anchor of version {root.version} was made of another version {anchor.manifest}")
        yield anchor, _shards(run, anchor, scratch)
        return
    if root.kind == "anchor":
        yield root, _shards(run, root, scratch)
        return
    path = locate_base(root, base)
    checkpoint = Checkpoint(path)
    try:
        yield root, ((spec.name, checkpoint.bits(spec.name)) for spec in run.table)
    except (FingerprintError, TensorMismatchError) as error:
        raise type(error)(
            f"{error}: the checkpoint in {str(path)!r} is not the one that the run started from, or was overwritten "
            "since; pass --base (base= in Python) with the original checkpoint"
        ) from error


def _shards(run: RunDocuments, document: Manifest | Anchor, scratch: str | Path | None) -> Iterator[tuple[str, Bits]]:
    """(name, bits) of an anchor's tensors; one shard is held at a time."""
    seen: set[str] = set()
    for ref in document.objects:
        with _shard(run, ref, scratch) as data:
            for name, bits in read_shard(data, run.table, ref.key):
                if name in seen:
                    raise ChainError(f"{ref.key}: tensor {name!r} is carried twice")
                seen.add(name)
                yield name, bits


@contextmanager
def _shard(run: RunDocuments, ref: ObjectRef, scratch: str | Path | None) -> Iterator[Buffer]:
    if ref.bytes <= MAPPED_BYTES:
        yield run.fetch(ref)
        return
    if (data := mapped(run, ref)) is not None:
        yield data
        return
    with scratch_folder(scratch, ref.key, ref.bytes) as folder:
        yield np.memmap(fetch_file(run.bucket, ref, folder, object_limit(run.table)), np.uint8, mode="r")


def _checked(document: Manifest | Anchor, state: ModelState) -> ModelState:
    check_tensors(document, state)
    if isinstance(document, Manifest):
        check_fingerprint(document, state.fingerprint)
    return state


def _fits_in_memory(table: TensorTable, in_memory: bool | None) -> bool:
    return table.full_bytes <= IN_MEMORY_BYTES if in_memory is None else in_memory


def scratch_file(size: int, folder: str | Path | None = None) -> np.ndarray:
    """(size,) bytes of a temporary file that has no name any more, so that nothing is left whatever happens.

    Raises:
        StoreError: there is no room for it.
    """
    place = tempfile.gettempdir() if folder is None else str(folder)
    try:
        with tempfile.TemporaryFile(prefix="delta-sync-", dir=place) as file:
            # Room is asked for now: a page that cannot be written later would end the process.
            os.posix_fallocate(file.fileno(), 0, max(1, size))
            return np.memmap(file, np.uint8, mode="r+", shape=(size,)) if size else np.empty(0, np.uint8)
    except OSError as error:
        raise StoreError(
            f"no room for {size:,} bytes of weights in {place}: {error.strerror or error}; free space there, or "
            f"{'set TMPDIR' if folder is None else 'name another folder'}"
        ) from error
