"""One architecture: a small checkpoint, a run over it, and a worker's model that follows it and is compared."""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.support.modules import ModulePort
from tests.support.tiny import make_tokenizer
from tests.tools.models import checkpoints, vllm_side, without_transformers
from tests.tools.models.checkpoints import VERSIONS, NotBuildableError, Tensors
from tests.tools.models.drafts import Drafting, ModelAndDraft
from tests.tools.models.reachable import differences, reachable
from trainer_side import Publisher
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.model.draft import Draft
from vllm_delta_sync.engine.model.tied_head import TiedHead
from vllm_delta_sync.engine.protocol import A, Identified, RankFailure, RankRequest
from vllm_delta_sync.engine.worker.rank_worker import RankWorker
from vllm_delta_sync.errors import ChainError, DeltaSyncError, ModelError
from vllm_delta_sync.settings import Settings

Outcome = Literal["WRONG", "exact", "exact through the fallback", "refused", "not buildable here"]
MOST_NAMED = 6


@dataclass
class Row:
    """What came of one architecture.

    Attributes:
        by_transformers: whether its checkpoint was; see ``without_transformers``.
        reason: why it is not exact. tensors: in the checkpoint. derived: of these, through the fallback.
        unloaded: of these, those that vLLM's loader leaves out. compared: tensors reached in the model.
    """

    architecture: str
    outcome: Outcome = "WRONG"
    by_transformers: bool = True
    reason: str = ""
    tensors: int = 0
    derived: int = 0
    unloaded: list[str] = field(default_factory=list)
    compared: int = 0
    load_ms: float = 0.0
    trace_ms: float = 0.0
    scan_ms: float = 0.0

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class WrongError(Exception):
    """Weights are not what they have to be."""


class _Port(ModulePort):
    """Keeps what ``identify`` answered, which the receiver's status has in part only."""

    def __init__(self, model: Any, config: Any, folder: Path, draft: Draft | None = None) -> None:
        super().__init__()
        self.ranks = [RankWorker(model, 0, str(folder), tied_head=TiedHead(config.model_config), draft=draft)]
        self.proof: Identified | None = None

    def call_rank(self, rank: RankWorker, request: RankRequest[A]) -> A | RankFailure:
        answer = super().call_rank(rank, request)
        if isinstance(answer, Identified):
            self.proof = answer
        return answer


MTP = "@mtp"
RERANKER = "Qwen3ForCausalLM@reranker"
"""Its classifier is made by vLLM, from two rows of the head."""
RERANKS = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["the", "fox"],
    "is_original_qwen3_reranker": True,
}


def attempt(architecture: str, root: Path) -> Row:
    """Try one architecture in a folder that is empty; the process must be new, as vLLM keeps its state in globals.

    Args:
        architecture: its name; with ``@pooling`` behind it, for vLLM's pooling runner; with ``@mtp``, with layers that
            draft, which are followed and compared with it.
    """
    row = Row(architecture)
    drafting: Drafting | None = None
    try:
        if architecture.endswith(MTP):
            drafting = Drafting(architecture.removesuffix(MTP), root / "v0")
            versions, config, model = [drafting.tensors], drafting.config, drafting.served
            row.tensors = len(drafting.tensors)
        else:
            versions, config, model = _built(row, root / "v0")
    except NotBuildableError as error:
        row.outcome, row.reason = "not buildable here", str(error)
        return row
    began = time.perf_counter()
    vllm_side.fresh_model(config, root / "v0")
    # The first load of a process has to import and to warm up.
    row.load_ms = 1e3 * (time.perf_counter() - began)
    try:
        _follow(row, model, config, versions, root, drafting)
    except (ModelError, ChainError) as error:
        # Before the first version is served these are refusals; later on they would be a wrong start.
        row.outcome, row.reason = ("WRONG" if row.compared else "refused"), error.message
    except DeltaSyncError as error:
        row.reason = f"{error.kind}: {error.message}"
    except WrongError as error:
        row.reason = str(error)
    return row


def _built(row: Row, folder: Path) -> tuple[list[Tensors], Any, Any]:
    """Version 0, vLLM's configuration for it, and the model that serves it. Raises NotBuildableError."""
    name, _, served = row.architecture.partition("@")
    row.by_transformers = checkpoints.transformers_class(name) is not None
    if row.by_transformers:
        tensors = checkpoints.write_base(name, folder)
        overrides: dict[str, Any] = RERANKS if row.architecture == RERANKER else {}
        if overrides:
            make_tokenizer().save_pretrained(folder)
        config = vllm_side.worker_config(folder, runner="pooling" if served else "auto", **overrides)
        model = vllm_side.worker_model(vllm_side.started_worker(config), config)
    else:
        tensors = without_transformers.write_base(name, folder)
        config = vllm_side.worker_config(folder)
        try:
            model = vllm_side.fresh_model(config, folder)
        except Exception as error:  # foreign code, which may raise anything of names that it does not know
            raise NotBuildableError(
                "no such class in transformers, and vLLM does not load what is written instead: "
                + checkpoints.said(error)
            ) from error
    row.tensors = len(tensors)
    return [tensors], config, model


def _follow(row: Row, served: Any, config: Any, versions: list[Tensors], root: Path, drafting: Drafting | None) -> None:
    """Publish and follow all versions, then one back and forward again.

    Raises:
        WrongError: after any of these the model is not what a fresh load gives. DeltaSyncError: as ``Receiver``.
    """
    live = dict(versions[0])
    model = served if drafting is None else ModelAndDraft(served, drafting.draft.model)

    def load(folder: Path) -> Any:
        return vllm_side.fresh_model(config, folder) if drafting is None else drafting.fresh(folder)

    fresh = [load(root / "v0")]
    port = _Port(served, config, root / "v0", None if drafting is None else drafting.draft)
    receiver = Receiver(port, Settings(bucket=str(root / "run")))
    with Publisher(lambda: live.items(), str(root / "run"), base=root / "v0", codec="plain", merge=False) as publisher:
        receiver.advance()
        _take_proof(row, port)
        _expect(row, model, fresh[0], "at version 0")
        for version in range(1, VERSIONS + 1):
            versions.append(checkpoints.next_version(versions[-1], version))
            live.update(versions[-1])
            publisher.publish(step=version, wait=True)
            publisher.flush()
            checkpoints.write_version(root / "v0", versions[-1], root / f"v{version}")
            fresh.append(load(root / f"v{version}"))
            if not differences(fresh[-1], fresh[-2]):
                raise WrongError(f"version {version} is like the one before: nothing was tried")
            receiver.advance()
            _expect(row, model, fresh[-1], f"after the commit of version {version}")
    receiver.rollback(VERSIONS - 1)
    _expect(row, model, fresh[-2], f"taken back to version {VERSIONS - 1}")
    receiver.release()
    receiver.advance()
    _expect(row, model, fresh[-1], f"forward again to version {VERSIONS}")
    verdict = receiver.verify()
    if not verdict["verdict"]:
        raise WrongError(f"verify: {verdict}")
    row.outcome = "exact through the fallback" if row.derived else "exact"


def _take_proof(row: Row, port: _Port) -> None:
    assert port.proof is not None
    row.derived = len(port.proof.derived)
    row.unloaded = port.proof.unloaded
    row.trace_ms, row.scan_ms = port.proof.ms["trace"], port.proof.ms["scan"]


def _expect(row: Row, model: Any, fresh: Any, when: str) -> None:
    found = differences(model, fresh)
    row.compared = len(reachable(model))
    if found:
        more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        raise WrongError(f"{when}: {'; '.join(found[:MOST_NAMED])}{more}")
