"""``collect_files``: the small files of a model that a run keeps, so that servers start from the bucket.

These are configuration, tokenizer and the like, from the base or a transformers model, and from a folder of the user.
"""

import copy
import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from trainer_side.model.live_tensors import LiveTensors
from trainer_side.model.module import transformers_model, unwrap
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import ModelError, UsageError
from vllm_delta_sync.format.base_document import FILE_NAME
from vllm_delta_sync.format.limits import MAX_RUN_FILE_BYTES, MAX_RUN_FILES, MAX_RUN_FILES_BYTES
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.process_folders import ProcessFolder
from vllm_delta_sync.tensors.checkpoint import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    MODEL_FILE_SUFFIXES,
    ResolvedBase,
    model_files,
    read_small_file,
)

logger = guarded_logger(__name__)


def check_folder(files: str | Path | None) -> None:
    """Raise UsageError unless ``files`` is None or a folder of files that a run can keep; StoreError: unreadable."""
    _kept_of(files)


_OVERRULING = (
    ({"tokenizer.json", "tokenizer_config.json"}, {"special_tokens_map.json", "added_tokens.json"}),
    ({"chat_template.jinja"}, {"chat_template.json"}),
)
"""(files that transformers saves, files of older releases that it reads instead where they lie beside them)."""


def collect_files(model: object, files: str | Path | None, base: ResolvedBase | None) -> dict[str, bytes]:
    """Return name → content of the files that a new run keeps.

    Files of ``files`` take precedence over those of the base. If the base has no configuration, that of a transformers
    model is written. Those beside the weights of a checkpoint folder take precedence over the base's, except
    ``config.json``: it has the dtypes, and the base decides these. Left out are files that loaders would prefer to ones
    that take precedence (``_OVERRULING``), and with a warning files of the base or the model that a run cannot keep.

    Args:
        model: as of ``Publisher``. files: folder of the user. base: checkpoint that version 0 starts from.
    """
    kept = _kept_of(files)
    pretrained = transformers_model(unwrap(model)) if isinstance(model, nn.Module) else None
    with ProcessFolder() as folder:
        found = {} if base is None or not os.path.isdir(base.path) else model_files(base.path)
        if isinstance(model, LiveTensors) and model.folder is not None:
            own = model_files(model.folder)
            _drop_overruling(found, own)
            found |= {name: path for name, path in own.items() if name != CONFIG_NAME or name not in found}
        if CONFIG_NAME not in found and pretrained is not None:
            _write_configuration(pretrained, str(folder.path))
            found |= model_files(folder.path)
        _drop_overruling(found, kept.contents)
        # First the files that every server needs.
        for name in sorted(found, key=lambda name: (not name.startswith(("config.", "generation", "tokenizer")), name)):
            if kept.known_as(name) is None and (reason := kept.add(found[name])) is not None:
                logger.warning("the run does not keep the model's file %r: %s", name, reason)
    return kept.contents


def _drop_overruling(found: dict[str, Path], given: Collection[str]) -> None:
    """Remove from ``found`` what would overrule files of a tokenizer or processor that are given."""
    for saved, older in _OVERRULING:
        if saved <= set(given):
            for name in older.difference(given):
                found.pop(name, None)


@contextmanager
def tokenizer_folder(processing_class: Any) -> Iterator[Path | None]:
    """Yield a temporary folder with the files of a Trainer's tokenizer or processor.

    None if there is none, or it cannot be saved, or has no file that a run can keep; the last two log a warning.
    """
    if not hasattr(processing_class, "save_pretrained"):
        yield None
        return
    with ProcessFolder() as folder:
        found: dict[str, Path] = {}
        try:
            processing_class.save_pretrained(str(folder.path))
            found = model_files(folder.path)
        except Exception as error:  # noqa: BLE001  another library's code, and training continues without a tokenizer
            logger.warning("the run does not keep the Trainer's tokenizer, as it cannot be saved: %s", error)
        kept = _KeptFiles()
        for name, path in found.items():
            # Skipped, not refused: the user did not name these files.
            if (reason := kept.add(path)) is not None:
                logger.warning("the run does not keep the Trainer's file %r: %s", name, reason)
                path.unlink()
        yield folder.path if kept.contents else None


SCALING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""What decides, beside the tensors, what an adapter computes. A run keeps the configuration that it began with."""


def check_adapter(run: Run, files: str | Path | None) -> None:
    """Raise ModelError if ``files`` has the configuration of an adapter that computes something else than the run's."""
    adapter = None if files is None else Path(files) / ADAPTER_CONFIG_NAME
    if adapter is None or adapter not in _files_in(adapter.parent):
        return
    try:
        kept, own = dict(json.loads(run.file(ADAPTER_CONFIG_NAME))), dict(json.loads(_read(adapter)))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{str(adapter)!r}, or that of the run at {run.bucket.url}, is damaged: {error}") from error
    for name in SCALING:
        if kept.get(name) != own.get(name):
            raise ModelError(
                f"the run at {run.bucket.url} was begun with {name} = {kept.get(name)!r}, and this adapter has "
                f"{own.get(name)!r}; a run keeps its adapter_config.json, so publish to a new URL"
            )


class _KeptFiles:
    """The files chosen so far: name → content."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}

    def known_as(self, name: str) -> str | None:
        """Return the name of a file chosen; some file systems treat names that differ in case as one file."""
        return next((known for known in self.contents if known.lower() == name.lower()), None)

    def add(self, path: Path) -> str | None:
        """Choose a file and return None, or return why it cannot be kept."""
        name, data = path.name, _read(path)
        if re.fullmatch(FILE_NAME, name) is None:
            return "its name is not 1 to 100 of A-Z a-z 0-9 . _ -, beginning with a letter or a digit"
        if (known := self.known_as(name)) is not None:
            return f"it differs from {known!r} in upper and lower case only"
        if len(data) > MAX_RUN_FILE_BYTES:
            return f"it has more than {MAX_RUN_FILE_BYTES:,} bytes (MAX_RUN_FILE_BYTES)"
        if len(self.contents) == MAX_RUN_FILES:
            return f"a run keeps at most {MAX_RUN_FILES} files (MAX_RUN_FILES)"
        total = sum(map(len, self.contents.values())) + len(data)
        if total > MAX_RUN_FILES_BYTES:
            return (
                f"with it the files have {total:,} bytes, and all files together may have {MAX_RUN_FILES_BYTES:,} "
                "(MAX_RUN_FILES_BYTES)"
            )
        self.contents[name] = data
        return None


def _files_in(files: str | Path) -> list[Path]:
    """Return the paths of the files in a folder that the user named.

    ``adapter_config.json`` makes transformers load an adapter, so it belongs in no model's folder; a folder without
    ``config.json`` is that of an adapter.
    """
    if not isinstance(files, str | Path) or not str(files) or not os.path.isdir(files):
        raise UsageError(f"files is {str(files)!r}, not a folder; give one that holds config.json and similar files")
    found = list(model_files(Path(files)).values())
    adapter = Path(files) / ADAPTER_CONFIG_NAME
    if adapter.is_file() and not (Path(files) / CONFIG_NAME).exists():
        found.append(adapter)
    if not found:
        raise UsageError(
            f"files is {str(files)!r}, a folder without any file that a run keeps ({', '.join(MODEL_FILE_SUFFIXES)}); "
            "give one that holds config.json and similar files"
        )
    return found


def _kept_of(files: str | Path | None) -> _KeptFiles:
    """Choose the files of a folder that the user named; UsageError: one cannot be kept."""
    kept = _KeptFiles()
    for path in _files_in(files) if files is not None else ():
        if (reason := kept.add(path)) is not None:
            raise UsageError(f"files: {str(path)!r} cannot be kept: {reason}; rename it or remove it from that folder")
    return kept


def _read(path: Path) -> bytes:
    """Return a file's content; of one that is too large to be kept, only its beginning, which is too large as well."""
    return read_small_file(path, MAX_RUN_FILE_BYTES + 1)


def _write_configuration(model: Any, folder: str) -> None:
    """Write config.json and generation_config.json as the model's ``save_pretrained`` would."""
    try:
        config = copy.deepcopy(model.config)
        # FSDP2 gives a sharded module a new class.
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        if getattr(config, "dtype", None) is None:
            config.dtype = model.dtype
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    except Exception as error:  # noqa: BLE001  another library's code, and publishing continues without a configuration
        logger.warning(
            "the run does not keep all of the model's configuration, as it cannot be written (%s); give files= with a "
            "folder that holds it",
            error,
        )
