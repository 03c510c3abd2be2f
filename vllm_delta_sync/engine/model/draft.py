"""``Draft``: the model that drafts for an engine, and how it is joined with the served one; see ``ModelWithDraft``."""

from dataclasses import dataclass

from torch import nn

from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.model.load_record import LoadRecord, TensorPath, is_under, keep_record, load_record_of
from vllm_delta_sync.engine.model.model_replica import walk_tensors
from vllm_delta_sync.engine.model.model_with_draft import DRAFT, MODEL, ModelWithDraft
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.table import DRAFT_PREFIX, TensorTable


@dataclass(frozen=True)
class Draft:
    """The draft of an engine.

    Attributes:
        folder: what vLLM loaded it from.
        own_checkpoint: whether that is another one than the served model's.
        is_head: whether it was trained for the served model, and is not a model of its own.
    """

    model: nn.Module
    folder: str
    own_checkpoint: bool
    is_head: bool

    def join(self, model: nn.Module, table: TensorTable) -> nn.Module:
        """Return the served model with this draft; the model alone if the run has no weights of the draft.

        Raises:
            ModelError: it is not known how one of them was loaded.
        """
        if self.own_checkpoint and not any(spec.name.startswith(DRAFT_PREFIX) for spec in table):
            if self.is_head:
                logger.warning(
                    "the run has no tensor of the draft head %s, which stays as it is: fewer and fewer of its drafts "
                    "will be accepted while the model is trained; publish it with the model, under names that begin "
                    "with %r",
                    self.folder, DRAFT_PREFIX,
                )  # fmt: skip
            return model
        records = {name: load_record_of(part) for name, part in ((MODEL, model), (DRAFT, self.model))}
        known = {name: record for name, record in records.items() if record is not None}
        if len(known) < len(records):
            raise ModelError(
                "speculative decoding drafts with weights of the run, and how vLLM loaded them is not known; name "
                "delta_sync in VLLM_PLUGINS, so that loading is observed"
            )
        served = {tensor.untyped_storage()._cdata for _, _, tensor in walk_tensors(model)}
        shared = {
            _inside(DRAFT, (path, name))
            for path, name, tensor in walk_tensors(self.model)
            if tensor.untyped_storage()._cdata in served
        }
        joined = ModelWithDraft(model, self.model, self.own_checkpoint, shared)
        skeleton = ModelWithDraft(known[MODEL].skeleton, known[DRAFT].skeleton, self.own_checkpoint, shared)
        keep_record(joined, _join_records(skeleton, known))
        return joined


def _join_records(skeleton: ModelWithDraft, records: dict[str, LoadRecord]) -> LoadRecord:
    def process(replica: ModelWithDraft, paths: list[str] | None) -> None:
        for part, record in records.items():
            own = None if paths is None else [path[len(part) + 1 :] for path in paths if is_under(path, (part,))]
            if own is None or own:
                record.process(getattr(replica, part), own)

    joined = LoadRecord(skeleton, process)
    for part, record in records.items():
        joined.changed |= {_path(part, path): {_inside(part, at) for at in of} for path, of in record.changed.items()}
        joined.made |= {_inside(part, at) for at in record.made}
        joined.initial |= {_inside(part, at): tensor for at, tensor in record.initial.items()}
        joined.live |= {_inside(part, at): tensor for at, tensor in record.live.items()}
        joined.numbers |= {_inside(part, at): value for at, value in record.numbers.items()}
        joined.opaque_operations += record.opaque_operations
    return joined


def _path(part: str, path: str) -> str:
    return f"{part}.{path}" if path else part


def _inside(part: str, at: TensorPath) -> TensorPath:
    return _path(part, at[0]), at[1]
