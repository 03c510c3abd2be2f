"""vLLM ties an output head or not, depending on the checkpoint: a run is followed as a fresh load would use it, or a
run is refused by name. With vLLM's own models, loaders and worker, without an engine.

Cases run in a process of their own: ``python -m tests.receiver.test_tied_heads FOLDER CASE...``.
"""

import copy
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.warm import see
from tests.support.modules import ModulePort
from tests.support.tiny import make_model, save_checkpoint
from tests.tools.models import vllm_side
from tests.tools.models.reachable import differences
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.engine.compat.load_hook import kept_untied
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.model.tied_head import TiedHead
from vllm_delta_sync.engine.staging.reconstruct import drain_tensors
from vllm_delta_sync.engine.worker.rank_worker import RankWorker
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.settings import Settings

HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def write(folder: Path, config_from: Path, tensors: Tensors) -> Path:
    """A checkpoint with these tensors, and everything else of another one."""
    folder.mkdir()
    for file in config_from.iterdir():
        if file.name != WEIGHTS:
            (folder / file.name).write_bytes(file.read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    return folder


class Loader:
    """Loads models as vLLM does at its start: the tensors in the folder decide whether the head is tied."""

    def __init__(self, tied: Path) -> None:
        self.tied = tied
        # It takes seconds to make one. None of a model that was loaded is in it.
        self._config = vllm_side.worker_config(tied)
        vllm_side.started_worker(self._config)

    def load(self, folder: Path, load_format: str = "auto") -> tuple[Any, Any]:
        """A model, and the configuration that it was created with."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model

        config = copy.deepcopy(self._config)
        config.model_config.model = str(folder)
        config.load_config.load_format = load_format
        config.model_config.maybe_untie_word_embeddings()
        vllm_side.reproducible()
        with set_current_vllm_config(config):
            return get_model(vllm_config=config), config.model_config


class Site:
    """A trainer's tensors, a run of them, and a model that follows it.

    Args:
        live: what is published. held: what the model folder has.
        base: whether the run refers to that folder.
    """

    def __init__(self, root: Path, loader: Loader, live: Tensors, held: Tensors, base: bool) -> None:
        self.root, self.loader, self.live = root, loader, live
        root.mkdir(exist_ok=True)
        self.folder = write(root / "folder", loader.tied, held)
        self.url = str(root / "run")
        self.publisher = Publisher(
            lambda: self.live.items(), self.url, base=self.folder if base else None, codec="plain", merge=False
        )
        self.version = 0
        self.seen: list[dict[str, Any]] = []

    def serve(self, load_format: str, retie: bool) -> None:
        """Load a model and give it a receiver.

        Args:
            retie: whether vLLM ties the head of the loaded model again, as it does without our hook.
        """
        from vllm.model_executor.model_loader.weight_tying import maybe_retie_word_embeddings

        os.environ["DELTA_SYNC_BUCKET"] = self.url
        self.model, config = self.loader.load(self.folder, load_format)
        if retie:
            maybe_retie_word_embeddings(self.model, config)
        port = ModulePort()
        port.ranks = [RankWorker(self.model, 0, str(self.folder), tied_head=TiedHead(config))]
        self.receiver = Receiver(port, Settings(bucket=self.url))

    def publish(self, *changed: str, scale: float | None = None) -> None:
        """Change these tensors, all in the same way, and publish a version.

        Args:
            scale: multiply every element by it; None: change some elements.
        """
        self.version += 1
        for name in changed:
            generator = torch.Generator().manual_seed(self.version)
            tensor = self.live[name].clone()
            if scale is not None:
                tensor *= scale
            else:
                tensor.view(torch.int16)[torch.rand(tensor.shape, generator=generator) < 0.02] += 3
            self.live[name] = tensor
        self.publisher.publish(step=self.version, wait=True)
        self.publisher.flush()

    def follow(self, act: Callable[[], object] | None = None) -> None:
        """Follow, or do something else, and note what came of it."""
        try:
            (act or self.receiver.advance)()
            raised = ""
        except DeltaSyncError as error:
            raised = f"{error.kind}: {error.message}"
        status = self.receiver.status()
        found = {"served": None, "state": status["state"], "raised": raised}
        if status["served"] is not None:
            found["served"] = status["served"]["version"]
            fresh, _ = self.loader.load(self.exported(status["served"]["version"]))
            found["differences"] = differences(self.model, fresh)
            found["verdict"] = self.receiver.verify()["verdict"]
            found["unloaded"] = status["ranks"][0]["unloaded"]
            embedding, head = self.model.model.embed_tokens.weight, self.model.lm_head.weight
            found["tied"] = embedding.data_ptr() == head.data_ptr()
        self.seen.append(found)

    def exported(self, version: int) -> Path:
        """A checkpoint with the tensors of a version."""
        folder = self.root / f"version-{version}"
        if not folder.exists():
            run = open_run(self.url)
            state = run.snapshot(version=version, base=self.folder)
            write(folder, self.loader.tied, {name: tensor.clone() for name, tensor in drain_tensors(run, state)})
        return folder


def equal(embedding: torch.Tensor) -> torch.Tensor:
    return embedding.clone()


def other(embedding: torch.Tensor) -> torch.Tensor:
    return embedding.flip(0).contiguous()


@dataclass(frozen=True)
class Case:
    """A run, a model folder, and what comes of them.

    Attributes:
        served: the version served after each step; None: the run is refused.
        in_run: whether version 0 has a head, with the bits of the embedding.
        in_folder: makes the head that the model folder has, of the embedding; None: it has none.
        base: whether the run refers to that folder. retie: whether vLLM ties the loaded model's head again.
        is_cast: whether run and folder are in float32, which vLLM casts.
        changes: what each version changes. goes_back: whether it ends with a rollback to version 0, and its release.
        separate: whether the head has memory of its own.
    """

    served: list[int | None]
    in_run: bool = False
    in_folder: Callable[[torch.Tensor], torch.Tensor] | None = None
    base: bool = False
    retie: bool = False
    load_format: str = "auto"
    is_cast: bool = False
    changes: tuple[tuple[str, ...], ...] = ()
    goes_back: bool = False
    separate: bool = True

    def play(self, root: Path, loader: Loader) -> list[dict[str, Any]]:
        tensors = load_file(loader.tied / WEIGHTS)
        if self.is_cast:
            tensors = {name: tensor.float() for name, tensor in tensors.items()}
        live = {**tensors, HEAD: equal(tensors[EMBEDDING])} if self.in_run else tensors
        held = tensors if self.in_folder is None else {**tensors, HEAD: self.in_folder(tensors[EMBEDDING])}
        site = Site(root, loader, live, held, self.base)
        site.serve(self.load_format, self.retie)
        site.follow()
        for changed in self.changes:
            site.publish(*changed, scale=1.01 if self.is_cast else None)
            site.follow()
        if self.goes_back:
            site.follow(lambda: site.receiver.rollback(0))
            site.receiver.release()
            site.follow()
        return site.seen


EACH = ((HEAD,), (EMBEDDING,), (HEAD, EMBEDDING, NORM))
TIED = (EMBEDDING, NORM)
"""What a trainer changes that ties the head."""
THERE_AND_BACK: list[int | None] = [0, 1, 2, 3, 0, 3]
CASES = {
    "left_out": Case([None], in_run=True),
    "both_in_base": Case(THERE_AND_BACK, in_run=True, in_folder=equal, base=True, changes=EACH, goes_back=True),
    "from_bucket": Case(THERE_AND_BACK, in_run=True, load_format="delta_sync", changes=EACH, goes_back=True),
    "tied_again": Case([None], in_run=True, in_folder=equal, base=True, retie=True),
    "head_in_base_only": Case([0, 1, 2], in_folder=equal, changes=(TIED, TIED)),
    # The embedding and the head are loaded again together.
    "head_in_base_only_and_cast": Case([0, 1], in_folder=equal, is_cast=True, changes=(TIED,)),
    "other_head_in_base_only": Case([0, 1], in_folder=other, changes=(TIED,)),
    "head_in_folder_only": Case([0, 1], in_folder=other, load_format="delta_sync", changes=(TIED,), separate=False),
}
QUICK = ("left_out", "both_in_base", "tied_again")
SLOW = tuple(name for name in CASES if name not in QUICK)


@cache
def outcomes(names: tuple[str, ...]) -> dict[str, Any]:
    """What came of these cases."""
    with tempfile.TemporaryDirectory() as root:
        found: dict[str, Any] = see("tests.receiver.test_tied_heads", Path(root), *names)
        return found


@pytest.mark.xdist_group("engines")
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_a_head_is_what_a_fresh_load_makes_of_it(case: str) -> None:
    """The models that are served and loaded afresh are compared bit for bit, with everything that can be reached."""
    steps = outcomes(QUICK if case in QUICK else SLOW)[case]
    assert isinstance(steps, list), steps
    assert [step["served"] for step in steps] == CASES[case].served
    for step in steps:
        if step["served"] is None:
            assert step["state"] == "refused"
            assert step["raised"].startswith(f"model: tensor {HEAD!r} is left out by this model")
            assert "start vLLM with --load-format delta_sync" in step["raised"]
            continue
        assert (step["raised"], step["differences"], step["verdict"]) == ("", [], True)
        assert step["state"] in ("idle", "held")
        assert step["tied"] is not CASES[case].separate


@pytest.mark.parametrize(("runner", "inside"), [("generate", False), ("draft", True)])
def test_only_the_served_model_is_kept_untied(runner: str, inside: bool) -> None:
    """The draft of speculative decoding is of no run, and saves the memory as ever."""
    config = SimpleNamespace(word_embeddings_untied_by_checkpoint=True, runner=runner)
    with kept_untied(config):
        assert config.word_embeddings_untied_by_checkpoint is inside
    assert config.word_embeddings_untied_by_checkpoint is True
    other = SimpleNamespace(runner=runner)
    with kept_untied(other):
        assert vars(other) == {"runner": runner}


def main(root: Path, names: list[str]) -> None:
    vllm_side.prepare()
    loader = Loader(save_checkpoint(make_model("qwen3", seed=5), root / "tied"))
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = CASES[name].play(root / name, loader)
        except Exception:  # noqa: BLE001  it is part of what was seen, and fails the test of that case only
            found[name] = traceback.format_exc()
    (root / "seen.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
