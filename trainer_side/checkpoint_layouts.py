"""``find_checkpoints`` finds the checkpoints that a trainer writes below a folder, with their steps.

Trainers name a folder for each step and put the weights in it, or some folders below it: ``checkpoint-100/``
(transformers, TRL, LLaMA-Factory), ``global_step_10/actor/huggingface/`` (verl), ``global_step100_hf/`` (OpenRLHF),
``step_10/policy/weights/model/consolidated/`` (NeMo-RL), ``epoch_0_step_20/model/consolidated/`` (NeMo AutoModel),
``global_step_10/policy/`` (SkyRL), ``weights/step_10/`` (prime-rl), ``step-10/`` (torchtitan), ``weight_v000010/``
(slime, miles).
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from vllm_delta_sync.errors import FormatError, NotFoundError, StoreError, UsageError
from vllm_delta_sync.format.base_document import load_json
from vllm_delta_sync.tensors.checkpoint import INDEX_NAME, SINGLE_NAME
from vllm_delta_sync.units import listed

TRAINER_STATE = "trainer_state.json"
MAX_STEP = 2**53 - 1
MAX_DEPTH = 8
"""Levels of folders below the given one that are looked at."""
PARENTS = 4
"""Folders above a checkpoint whose names may have its step, as in ``global_step_10/actor/huggingface``."""

_STEP = re.compile(
    r"(?:epoch[-_]?[0-9]+[-_]?(?:epochstep[0-9]+)?)?"
    r"(?:(?:checkpoint|ckpt)[-_])?"
    r"(?:checkpoint|ckpt|global[-_]?steps?|step|iter|iteration|epoch|weight_v)[-_]?([0-9]+)"
    r"(?:[-_](?:hf|merged))?",
    re.IGNORECASE,
)
_UNFINISHED = re.compile(r"\.|tmp")
"""Beginnings of names that trainers, and Python's ``tempfile``, use until a checkpoint is complete."""
_OTHER_MODEL = re.compile(r"_?(critic|reward|ref|reference|value)([-_](model|hf|huggingface))?", re.IGNORECASE)
_OPTIMIZER = re.compile(r"optim(izer)?(_states?)?", re.IGNORECASE)
_UNREADABLE = re.compile(
    r".+\.(safetensors|distcp)|(pytorch_model.*|adapter_model)\.bin|(model_world_size_.+|.+_model_states)\.pt"
)
"""Files with weights of other forms: other safetensors files, parts of distributed checkpoints, LoRA adapters."""


@dataclass(frozen=True)
class FileState:
    """Size of a file in bytes, and time of its last change in nanoseconds. ``inode`` changes with its successor."""

    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, found: os.stat_result) -> "FileState":
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


FolderState = tuple[tuple[str, FileState], ...]
"""Path and state of each file of a folder, by path."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder that a trainer wrote for a step, or that holds weights.

    Attributes:
        name: its path below the folder that was searched; ``.`` for that folder itself.
        path: the folder of its weights, which may lie below it.
        step: its step; None if neither a name nor trainer_state.json tells it.
        reason: why it cannot be published, with the remedy; empty if it can.
        state: of its files, for comparison.
    """

    name: str
    path: Path
    step: int | None
    reason: str
    state: FolderState

    @property
    def written(self) -> tuple[int, int]:
        """Times of the first and the last change of its safetensors files, in nanoseconds."""
        times = [state.modified for name, state in self.state if name.endswith(".safetensors")]
        return min(times, default=0), max(times, default=0)


def named_step(name: str) -> int | None:
    """Return the step in the name of a folder, as trainers write it; None without one.

    ``checkpoint-100``, ``step_100``, ``global_step_100``, ``iter_0000100``, ``epoch_3`` and the like. Digits at the end
    of any other name are no step: ``Qwen3-0.6B-v2025``.
    """
    found = _STEP.fullmatch(name)
    step = None if found is None else int(found[1])
    return step if step is not None and step <= MAX_STEP else None


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint: in its name, or the nearest of four folders above; else in trainer_state.json.

    None if none of them tells it.
    """
    for name in path.resolve().parts[: -PARENTS - 2 : -1]:
        step = named_step(name)
        if step is not None:
            return step
    return _recorded_step(path)


def _recorded_step(path: Path) -> int | None:
    """Return ``global_step`` of transformers' trainer_state.json; None without one."""
    try:
        state = load_json((path / TRAINER_STATE).read_bytes(), TRAINER_STATE, finite=False)
    except (OSError, FormatError):
        return None
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if type(step) is int and 0 <= step <= MAX_STEP else None


@dataclass
class _SearchedFolder:
    """A folder below the searched one. Attributes: parts: names from there. left_out: why nothing in it counts."""

    path: Path
    parts: tuple[str, ...]
    left_out: str = ""
    files: dict[str, FileState] = field(default_factory=dict)

    @property
    def has_weights(self) -> bool:
        return SINGLE_NAME in self.files or INDEX_NAME in self.files

    @property
    def unit(self) -> tuple[str, ...]:
        """Names down to the last one with a step; all of them without one."""
        with_step = [depth for depth, name in enumerate(self.parts, 1) if named_step(name) is not None]
        return self.parts[: with_step[-1]] if with_step else self.parts

    @property
    def unreadable_weights(self) -> str | None:
        """The name of a file with weights that cannot be read."""
        return min((name for name in self.files if _UNREADABLE.fullmatch(name)), default=None)


def find_checkpoints(root: Path) -> list[FoundCheckpoint]:
    """Find the checkpoints below a folder, and what looks like one, by name.

    A folder for a step is one checkpoint, whichever folder below it has the weights; those of critics, reward models,
    references and optimizers are not looked at. Symbolic links into the searched folder are left out.

    Raises:
        StoreError: the folder itself cannot be read.
    """
    units: dict[tuple[str, ...], list[_SearchedFolder]] = {}
    try:
        for folder in _folders(root):
            units.setdefault(folder.unit, []).append(folder)
    except OSError as error:
        raise StoreError(f"folder {str(root)!r} cannot be read: {error.strerror}") from error
    found = []
    for unit, folders in units.items():
        is_step = bool(unit) and named_step(unit[-1]) is not None
        holds = [folder for folder in folders if folder.has_weights]
        says = [folder for folder in folders if folder.left_out or folder.unreadable_weights]
        # A folder without weights is only on the way to others, unless a trainer made it for a step.
        if not holds and not says and (not is_step or any(other[: len(unit)] == unit != other for other in units)):
            continue
        found.append(_checkpoint(root, unit, holds, says, folders))
    return sorted(found, key=lambda each: each.name)


def check_folder(path: Path) -> None:
    """Raise NotFoundError unless there is a folder."""
    if not os.path.isdir(path):
        raise NotFoundError(
            f"checkpoint folder {str(path)!r} does not exist, or this user may not enter it; give the path of a local "
            "one"
        )


def locate(path: Path) -> Path:
    """Return the folder with the weights of the checkpoint at ``path``: that folder, or the only one below it.

    Raises:
        NotFoundError: there is no folder, or no weights in it that can be read; the message says what is there.
        UsageError: there are several checkpoints in it. StoreError: it cannot be read.
    """
    check_folder(path)
    if os.path.exists(path / SINGLE_NAME) or os.path.exists(path / INDEX_NAME):
        return path
    found = find_checkpoints(path)
    readable = [each for each in found if not each.reason]
    if len(readable) == 1:
        return readable[0].path
    if readable:
        raise UsageError(
            f"{str(path)!r} holds {len(readable)} checkpoints ({listed([each.name for each in readable])}); "
            "give one of them, or --watch"
        )
    why = "".join(f"; {each.name}: {each.reason}" for each in found[:3])
    raise NotFoundError(f"{str(path)!r} has neither {SINGLE_NAME} nor {INDEX_NAME}; only safetensors can be read{why}")


def _checkpoint(
    root: Path,
    unit: tuple[str, ...],
    holds: list[_SearchedFolder],
    says: list[_SearchedFolder],
    folders: list[_SearchedFolder],
) -> FoundCheckpoint:
    """Return what is known of one unit. Args: holds, says: those of its folders with weights, and with other files."""
    path = holds[0].path if holds else root.joinpath(*unit)
    if len(holds) > 1:
        names = listed([folder.path.relative_to(root) for folder in holds])
        reason = f"it holds {len(holds)} checkpoints ({names}); publish one with --from"
    elif holds:
        reason = "" if unit else "it is the searched folder itself; publish it with --from"
    elif says and says[0].left_out:
        reason = says[0].left_out
    elif says:
        name = "/".join((*says[0].parts[len(unit) :], str(says[0].unreadable_weights)))
        reason = (
            f"{name} is not of the form that can be read ({SINGLE_NAME}, or {INDEX_NAME} and its files); if it is "
            "still being written, wait; otherwise docs/publish.md says what each trainer has to save"
        )
    else:
        reason = f"it holds no weights; only safetensors can be read ({SINGLE_NAME}, or {INDEX_NAME} and its files)"
    named = [step for name in unit if (step := named_step(name)) is not None]
    state = tuple(
        sorted(
            ("/".join((*folder.parts[len(unit) :], name)), file)
            for folder in (holds if len(holds) == 1 else folders)
            for name, file in folder.files.items()
        )
    )
    return FoundCheckpoint("/".join(unit) or ".", path, named[-1] if named else _recorded_step(path), reason, state)


def _folders(root: Path) -> Iterator[_SearchedFolder]:
    """Yield the folders that may have weights, from the root down; nothing below one that has."""
    searched = [root.resolve()]
    waiting = [_SearchedFolder(root, ())]
    while waiting:
        folder = waiting.pop()
        try:
            found = sorted(os.scandir(folder.path), key=lambda entry: entry.name, reverse=True)
            entries = [entry for entry in found if not _leads_nowhere(entry)]
            for entry in entries:
                if entry.is_file():
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        folder.files[entry.name] = FileState.of(entry.stat())
        except (FileNotFoundError, NotADirectoryError):
            if not folder.parts:
                raise
            continue  # deleted meanwhile
        except OSError as error:
            if not folder.parts:
                raise
            folder.left_out = f"it cannot be read: {error.strerror}"
        yield folder
        if folder.left_out or (folder.parts and folder.has_weights) or len(folder.parts) == MAX_DEPTH:
            continue
        for entry in entries:
            if not entry.is_dir() or _UNFINISHED.match(entry.name) or _OPTIMIZER.fullmatch(entry.name):
                continue
            if entry.is_symlink():
                target = Path(entry.path).resolve()
                is_loop = folder.path.resolve().is_relative_to(target)
                if is_loop or any(target.is_relative_to(known) for known in searched):
                    continue
                searched.append(target)
            below = _SearchedFolder(Path(entry.path), (*folder.parts, entry.name))
            if not _OTHER_MODEL.fullmatch(entry.name):
                waiting.append(below)
            elif below.unit == below.parts:  # of a step, only the policy matters
                below.left_out = (
                    "by its name it holds another model than the policy; publish it with --from if it does not"
                )
                yield below


def _leads_nowhere(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a symbolic link that cannot be followed; one to weights is reported instead."""
    return entry.is_symlink() and entry.name not in (SINGLE_NAME, INDEX_NAME) and not os.path.exists(entry.path)
