"""``restore`` rebuilds the weights of a version from the bucket: a root, then steps, each of them verified.

A root that is not in the run is found by ``locate_base``, a checkpoint, or by ``open_branch_source``, a run. Whatever
is wrong with the data of either raises BaseUnavailableError, and is never taken for damage in the bucket.

If a document or object turns out to be bad, another path is taken: the deltas under a merged delta, a merged delta
across a lost delta, or an older anchor.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from vllm_delta_sync.bucket import open_beside
from vllm_delta_sync.bucket.base import exists
from vllm_delta_sync.codec.delta_reader import pieces_of
from vllm_delta_sync.codec.tiles.grid import CutTileError
from vllm_delta_sync.errors import (
    BaseUnavailableError,
    ChainError,
    DataError,
    DeltaSyncError,
    FingerprintError,
    LostError,
    NotFoundError,
    StoreError,
    UsageError,
)
from vllm_delta_sync.format.documents import Anchor, MergedDelta
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import RUN_KEY, Manifest
from vllm_delta_sync.format.safetensors_file import Buffer
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.process_folders import temporary_directory
from vllm_delta_sync.run.checks import check_bits, check_tensor, read_shard
from vllm_delta_sync.run.decode import decode_objects
from vllm_delta_sync.run.objects import (
    declared_change,
    open_step_objects,
    read_object,
    read_steps,
    scratch_folder,
    step_objects,
)
from vllm_delta_sync.run.read_plan import GapError, Plan, Root, Step, plan_read
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, Changes
from vllm_delta_sync.tensors.checkpoint import Checkpoint, names_model, resolve_base
from vllm_delta_sync.tensors.state import AllocateBits, ModelState, contiguous_buffer


class BaseMissingError(BaseUnavailableError):
    """Nothing is where the checkpoint or run that version 0 refers to is expected."""


@contextmanager
def errors_of_base(explanation: str, remedy: str) -> Iterator[None]:
    """Raise BaseUnavailableError for each DataError in the block: data that are missing, damaged or not as declared.

    Args:
        explanation: follows the error's message, and names the base. remedy: what to pass as base instead.
    """
    try:
        yield
    except BaseUnavailableError:
        raise
    except DataError as error:
        raise BaseUnavailableError(
            f"{error.message}: {explanation}; pass base= with {remedy} (--base on the command line)"
        ) from error


def locate_base(root: Manifest, base: str | Path | None = None) -> Path:
    """Find version 0's checkpoint directory: ``base`` if given, else the recorded one or public model.

    Raises:
        BaseMissingError: it is not here. StoreError, UsageError: the public model cannot be fetched.
    """
    place = Path("" if root.base is None else root.base.location)
    if base is None and root.base is not None and root.base.model is not None and not os.path.isdir(place):
        base = f"{root.base.model}@{root.base.revision}"
    try:
        path = place if base is None else resolve_base(base).path
    except NotFoundError as error:
        raise BaseMissingError(
            f"version 0 refers to the checkpoint {str(base)!r}, which is not there: {error}; pass base= with its path "
            "(--base on the command line)"
        ) from error
    if not os.path.isdir(path):  # no error where this user may not look, unlike Path.is_dir
        raise BaseMissingError(
            f"version 0 refers to the checkpoint {str(path)!r}, which is not here; pass base= with its path "
            "(--base on the command line)"
        )
    return path


@contextmanager
def open_branch_source(
    run: RunReader, root: Manifest, base: str | Path | None
) -> Iterator[tuple[RunReader, Manifest, str | Path | None]]:
    """Open the source run of a branch: the run, its manifest that the branch began at, and the base to rebuild it with.

    The run is closed at the end of the block.

    Raises:
        BaseMissingError: the run is not there. BaseUnavailableError: another run is there; also what the block raises
            about data of the run. StoreError: the store of ``base`` failed.
    """
    recorded = root.base.location if root.base is not None else ""
    source_url = str(base) if base is not None and _is_run(run, base) else None
    fact = f"the run at {source_url or recorded!r}, which run {run.info.run} branches from, cannot be used"
    with errors_of_base(fact, "the URL of that run, or of an intact copy"), ExitStack() as stack:
        try:
            source = stack.enter_context(run.open_source(root, source_url))
        except NotFoundError as error:
            raise BaseMissingError(
                f"run {run.info.run} branches from a run at {recorded!r}, which is not there; pass base= with its URL "
                f"(--base on the command line): {error}"
            ) from error
        if source.table.digest != run.table.digest:
            raise ChainError(f"run {run.info.run} branches from run {source.info.run}, which has other tensors")
        version = root.base.version if root.base is not None and root.base.version is not None else 0
        yield source, source.manifest(version), base if source_url is None else None


def _is_run(run: RunReader, base: str | Path) -> bool:
    """Return whether a branch's base is a run, not a checkpoint. Raises StoreError, UsageError (not a URL)."""
    if names_model(base):
        return False
    # The name of a directory may look like a URL.
    with open_beside(run.bucket, Path(base).resolve() if os.path.isdir(base) else base) as bucket:
        return exists(bucket, RUN_KEY)


logger = guarded_logger(__name__)

IN_MEMORY_BYTES = 1024**3
"""Models up to this size are rebuilt in memory, larger ones in a temporary file."""
DECODED_ELEMENTS = 4 * 1024 * 1024
"""Steps above this size are decoded in pieces; decoded at once, 16-bit dtypes take 10 bytes per element."""

Progress = Callable[[int, int], None]
"""Called with bytes done and total bytes; counts the model's bytes, tensor by tensor, and those of the deltas."""


def _no_progress(done: int, total: int) -> None:
    pass


class StepTarget(Protocol):
    """What a step is applied to: a whole model (``ModelState``) or parts of it (``PartialState``).

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
        state: the weights. plan: the plan that they were rebuilt by.
    """

    state: ModelState
    plan: Plan


def restore(
    run: RunReader,
    target: Manifest,
    base: str | Path | None = None,
    in_memory: bool | None = None,
    progress: Progress | None = None,
    avoid: set[str] | None = None,
    scratch: str | Path | None = None,
    room: AllocateBits | None = None,
) -> Restored:
    """Rebuild a version, in O(model) memory or on O(model) of the temporary directory's disk.

    Args:
        base: checkpoint directory of version 0, or URL of the source run, if it is not at the recorded place.
        in_memory: None decides by the model's size (``IN_MEMORY_BYTES``).
        progress: called after each tensor of the root, and after each delta.
        avoid: keys of documents known to be bad; keys that turn out to be bad are added.
        scratch: folder for temporary files; None for the system's.
        room: allocates the memory of the weights, and overrides ``in_memory``; may be called more than once.

    Raises:
        BaseUnavailableError: version 0 refers to a checkpoint or run that is needed, and missing, damaged or another.
        NotFoundError: the version is no longer kept. LostError: an object is missing.
        UsageError: the URL or the model name of the base is invalid, or a library for it is not installed.
        DataError: if no other path leads to the version: the first error, or that of the base if there is one.
        StoreError: the store failed, or there is no room for the weights.
    """

    report = progress or _no_progress

    def load(found: Plan) -> ModelState:
        total = work_bytes(found)
        return load_root(run, found.root, base, in_memory, scratch, room, lambda done: report(done, total))

    found, state = execute_plan(run, target, load, report, avoid, scratch)
    return Restored(state, found)


def execute_plan(
    run: RunReader,
    target: Manifest,
    load: Callable[[Plan], _Weights],
    progress: Progress = _no_progress,
    avoid: set[str] | None = None,
    scratch: str | Path | None = None,
) -> tuple[Plan, _Weights]:
    """Rebuild a version by the cheapest plan; if that fails, by the next cheapest.

    Args:
        load: loads the weights of a plan's root. progress, avoid, scratch: as ``restore``.

    Raises:
        Whatever ``load`` raises for the last root. CutTileError: ``load`` returned parts of tensors, which cut a tile.
        Otherwise as ``restore``.
    """
    avoid = set() if avoid is None else avoid
    first: DeltaSyncError | None = None
    while True:
        try:
            found = plan_read(run, target, avoid)
        except DataError as error:
            explained = _explain_failure(run, target, first or error)
            if explained is error:
                # ``raise error from error`` would hide its cause.
                raise
            raise explained from error
        # The key of the document in use, which is avoided if it fails.
        key = found.root.key
        # Frees those of a failed attempt before others are loaded.
        weights: _Weights | None = None
        try:
            weights = load(found)
            done, total = run.table.full_bytes, work_bytes(found)
            progress(done, total)
            objects = read_steps(found.steps, DECODED_ELEMENTS)
            for step in found.steps:
                key = step.key
                apply_step(step, weights, scratch, read=next(objects))
                done += step.payload_bytes
                progress(done, total)
            return found, weights
        except CutTileError:
            # No other path helps: the caller has to hold more.
            raise
        except (DataError, UsageError) as error:
            # The caller can name another base, so what is wrong with this one matters more than damage in the bucket.
            if first is None or (isinstance(error, BaseUnavailableError) > isinstance(first, BaseUnavailableError)):
                first = error
            if key in avoid:
                raise first from error
            avoid.add(key)
            logger.warning("%s cannot be used, trying another path to version %d: %s", key, target.version, error)


def _explain_failure(run: RunReader, target: Manifest, error: DeltaSyncError) -> DeltaSyncError:
    """Return the error for a version that cannot be rebuilt; it says if garbage collection removed the version."""
    if not isinstance(error, NotFoundError | GapError):
        return error
    record = run.retention()
    if record is None or not record.gave_up(target.version):
        return LostError(error.message) if isinstance(error, NotFoundError) else error
    return NotFoundError(
        f"version {target.version} is no longer kept: garbage collection removed what it needs (delta-sync gc); "
        f"choose another version ({error.message})"
    )


def work_bytes(found: Plan) -> int:
    """Return the total that ``Progress`` counts to: the bytes of the model and of the plan's deltas."""
    return found.run.table.full_bytes + sum(step.payload_bytes for step in found.steps)


def apply_step(
    step: Step,
    state: StepTarget,
    scratch: str | Path | None = None,
    in_pieces: bool | None = None,
    read: Sequence[Buffer | None] | None = None,
) -> None:
    """Fetch, verify and apply a step. The weights are not touched unless all declared fingerprints fit them.

    Args:
        scratch: folder for temporary files; None for the system's.
        in_pieces: True maps the objects and decodes them in pieces, in the memory of a few tensors. False decodes the
            whole step before anything is applied. None decides by the step's size (``DECODED_ELEMENTS``).
        read: its objects, of ``read_steps``.

    Raises:
        FingerprintError: the step was made for other weights; if a tensor has another fingerprint than declared after
            its change, the state is unusable.
        UnsupportedError: the codec is ``tiled``, and the step goes backwards.
        StoreError: the store failed, or there is no room for the objects. Otherwise as ``RunReader.changes``.
    """
    if in_pieces is None:
        in_pieces = step.changed > DECODED_ELEMENTS
    if in_pieces:
        with scratch_folder(scratch, step.key, step.payload_bytes) as folder:
            parts = open_step_objects(step, folder, state.base_tensor)
            check_step(step, state.fingerprint, declared_change(parts))
            for piece in pieces_of(parts):
                state.apply(piece)
            return
    objects = list(step_objects(step, read))
    changes = decode_objects(step.document, step.run.table, objects, state.base_tensor, step.backwards)
    check_step(step, state.fingerprint, changes.fingerprint)
    state.apply(changes)


def check_step(step: Step, held: Fingerprint, change: Fingerprint) -> Fingerprint:
    """Return the model's fingerprint after a step, where it is ``held`` before.

    Args:
        change: of the model's fingerprint, in the step's direction, as the objects declare it.

    Raises:
        FingerprintError: it does not fit the fingerprints that the document declares.
    """
    reached = held + change
    low, high = (reached, held) if step.backwards else (held, reached)
    if high != step.high_fingerprint:
        raise FingerprintError(
            f"{step.key}: objects lead {'back from' if step.backwards else 'to'} fingerprint {high.hex()}, the "
            f"document declares {step.high_fingerprint.hex()}"
        )
    if isinstance(step.document, MergedDelta) and low.hex() != step.document.first_fingerprint:
        raise FingerprintError(
            f"{step.key} is made for weights with fingerprint {step.document.first_fingerprint}, these have {low.hex()}"
        )
    return reached


def load_root(
    run: RunReader,
    root: Root,
    base: str | Path | None = None,
    in_memory: bool | None = None,
    scratch: str | Path | None = None,
    room: AllocateBits | None = None,
    filled: Callable[[int], None] = lambda done: None,
) -> ModelState:
    """Load the weights of a plan's root from an anchor, a standalone anchor, a checkpoint, or the source run.

    Args:
        room: as ``restore``.
        filled: called with the bytes of the model that are loaded, as they come.

    Raises:
        BaseUnavailableError: the checkpoint or source run is missing, damaged or another one.
        DataError: an object of the run is missing or damaged, or a tensor in it is not as declared.
    """
    if root.is_branch:
        with open_branch_source(run, root.manifest, base) as (source, at, further):

            def scaled(done: int, total: int) -> None:
                filled(run.table.full_bytes * done // max(1, total))

            return _checked(root.manifest, restore(source, at, further, in_memory, scaled, None, scratch, room).state)
    in_memory = run.table.full_bytes <= IN_MEMORY_BYTES if in_memory is None else in_memory
    if room is None and not in_memory:
        room = contiguous_buffer(scratch_file if scratch is None else partial(scratch_file, folder=scratch))
    with root_tensors(run, root, base, scratch) as tensors:
        state = ModelState(run.table, _counted(tensors, filled), room)
        return _checked(root.document, state)


def _counted(tensors: Iterator[tuple[str, Bits]], filled: Callable[[int], None]) -> Iterator[tuple[str, Bits]]:
    """Yield the pairs, and call ``filled`` with the bytes of those that were consumed."""
    done = 0
    for name, bits in tensors:
        yield name, bits
        done += bits.nbytes
        filled(done)


@contextmanager
def root_tensors(
    run: RunReader, root: Root, base: str | Path | None, scratch: str | Path | None
) -> Iterator[Iterator[tuple[str, Bits]]]:
    """Yield the (name, bits) of a root's tensors, which ``root.document`` declares; not for a branch.

    Objects are checked by digest, one at a time. The block must check a checkpoint's tensors; its errors become
    BaseUnavailableError with the checkpoint's path. Errors as ``load_root``.
    """
    if root.is_stored:
        yield _shards(run, root.document, scratch)
        return
    path = locate_base(root.manifest, base)
    fact = f"the checkpoint in {str(path)!r} is not the one that the run started from, or was changed later"
    with errors_of_base(fact, "the original checkpoint"):
        checkpoint = Checkpoint(path)
        yield ((spec.name, checkpoint.bits(spec.name)) for spec in run.table)


def check_base_bits(run: RunReader, base: str | Path | None = None) -> None:
    """Check that the base holds version 0. Reads a checkpoint in full; of a branch's source run only the documents.

    Does nothing if the run's own objects hold version 0, or if its manifest is lost, so that nothing can be compared.

    Args:
        base: as ``restore``.

    Raises:
        BaseUnavailableError: the base is missing, damaged or another one. StoreError, UsageError: as ``restore``.
    """
    try:
        root = Root(run.manifest(0))
    except DataError:
        return
    if root.is_branch:
        with open_branch_source(run, root.manifest, base) as (source, _, further):
            if further is not None:
                check_base_bits(source, further)
    elif not root.is_stored:
        with root_tensors(run, root, base, None) as tensors:
            for name, bits in tensors:
                check_bits(root.manifest, run.table.by_name(name), bits)


def _shards(run: RunReader, document: Manifest | Anchor, scratch: str | Path | None) -> Iterator[tuple[str, Bits]]:
    """Yield (name, bits) of an anchor's tensors; holds one shard at a time."""
    seen: set[str] = set()
    for ref in document.objects:
        with ExitStack() as stack:
            # The folder is made only if it is needed.
            folder = partial(stack.enter_context, scratch_folder(scratch, ref.key, ref.bytes))
            data = read_object(run, ref, folder)
            for name, bits in read_shard(data, run.table, ref.key):
                if name in seen:
                    raise ChainError(f"{ref.key}: tensor {name!r} is carried twice")
                seen.add(name)
                yield name, bits


def _checked(document: Manifest | Anchor, state: ModelState) -> ModelState:
    """Return the state. Raises FingerprintError unless a root declares the fingerprints of its tensors and of it."""
    for spec, value in zip(state.table, state.fingerprints, strict=True):
        check_tensor(document, spec.name, value)
    if state.fingerprint != document.model_fingerprint:
        raise FingerprintError(
            f"version {document.version}: weights have fingerprint {state.fingerprint.hex()}, the manifest says "
            f"{document.fingerprint}"
        )
    return state


def scratch_file(size: int, folder: str | Path | None = None) -> np.ndarray:
    """Map (size,) bytes of an unnamed temporary file, which the system removes even if the process is killed.

    Raises:
        StoreError: there is no room for it.
    """
    directory = temporary_directory(folder)
    try:
        with tempfile.TemporaryFile(prefix="delta-sync-", dir=directory) as file:
            # Space is reserved now: a page that cannot be written later would kill the process (SIGBUS).
            os.posix_fallocate(file.fileno(), 0, max(1, size))
            return np.memmap(file, np.uint8, mode="r+", shape=(size,)) if size else np.empty(0, np.uint8)
    except OSError as error:
        raise StoreError(
            f"no room for {size:,} bytes of weights in {directory}: {error.strerror or error}; free space there, or "
            f"{'set TMPDIR' if folder is None else 'name another folder'}"
        ) from error
