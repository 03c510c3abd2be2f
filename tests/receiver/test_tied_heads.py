"""vLLM ties an output head or not, depending on the checkpoint: a run is followed as a fresh load would use it, or a
run is refused by name. With vLLM's own models, loaders and worker, without an engine.

Cases run in a process of their own: ``python -m tests.receiver.test_tied_heads FOLDER CASE...``.
"""

import copy
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.modules import ModulePort
from tests.support.tiny import make_model, save_checkpoint
from tests.tools.models import vllm_side
from tests.tools.models.reachable import differences
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.engine.compat.tied_head import TiedHead, kept_untied
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.staging.reconstruct import drain_tensors
from vllm_delta_sync.engine.worker.rank_worker import RankWorker
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.settings import Settings

SECONDS = 400
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
        live: what is published. held: what the model folder has; None: the same.
        base: whether the run refers to that folder.
    """

    def __init__(
        self, root: Path, loader: Loader, live: Tensors, held: Tensors | None = None, base: bool = False
    ) -> None:
        self.root, self.loader, self.live = root, loader, live
        root.mkdir(exist_ok=True)
        self.folder = write(root / "folder", loader.tied, live if held is None else held)
        self.url = str(root / "run")
        self.publisher = Publisher(
            lambda: self.live.items(), self.url, base=self.folder if base else None, codec="plain", merge=False
        )
        self.version = 0
        self.seen: list[dict[str, Any]] = []

    def serve(self, load_format: str = "auto", retie: bool = False) -> None:
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
        port.ranks = [RankWorker(self.model, 0, str(self.folder), tie_rule=TiedHead(config))]
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


def left_out(root: Path, loader: Loader) -> Any:
    """The model folder has no head, and the run has one, with equal bits."""
    tensors = load_file(loader.tied / WEIGHTS)
    site = Site(root, loader, {**tensors, HEAD: tensors[EMBEDDING].clone()}, held=tensors)
    site.serve()
    site.follow()
    return site.seen


def train_both(site: Site) -> Any:
    site.follow()
    for changed in ((HEAD,), (EMBEDDING,), (HEAD, EMBEDDING, NORM)):
        site.publish(*changed)
        site.follow()
    site.follow(lambda: site.receiver.rollback(0))
    site.receiver.release()
    site.follow()
    return site.seen


def both_in_base(root: Path, loader: Loader) -> Any:
    """The base has both, with equal bits."""
    tensors = load_file(loader.tied / WEIGHTS)
    site = Site(root, loader, {**tensors, HEAD: tensors[EMBEDDING].clone()}, base=True)
    site.serve()
    return train_both(site)


def from_bucket(root: Path, loader: Loader) -> Any:
    """The model folder has no head, and the load format is ``delta_sync``; version 0 has both, with equal bits."""
    tensors = load_file(loader.tied / WEIGHTS)
    site = Site(root, loader, {**tensors, HEAD: tensors[EMBEDDING].clone()}, held=tensors)
    site.serve("delta_sync")
    return train_both(site)


def tied_again(root: Path, loader: Loader) -> Any:
    """The base has both, with equal bits, and vLLM has tied them again."""
    tensors = load_file(loader.tied / WEIGHTS)
    site = Site(root, loader, {**tensors, HEAD: tensors[EMBEDDING].clone()}, base=True)
    site.serve(retie=True)
    site.follow()
    return site.seen


def head_in_base_only(root: Path, loader: Loader) -> Any:
    """The model folder has both, with equal bits; the run was published by a trainer that ties them."""
    tensors = load_file(loader.tied / WEIGHTS)
    site = Site(root, loader, tensors, held={**tensors, HEAD: tensors[EMBEDDING].clone()})
    site.serve()
    site.follow()
    for _ in range(2):
        site.publish(EMBEDDING, NORM)
        site.follow()
    return site.seen


def head_in_base_only_and_cast(root: Path, loader: Loader) -> Any:
    """As before, with a run in float32, which vLLM casts: the embedding and the head are loaded again together."""
    tensors = {name: tensor.float() for name, tensor in load_file(loader.tied / WEIGHTS).items()}
    site = Site(root, loader, tensors, held={**tensors, HEAD: tensors[EMBEDDING].clone()})
    site.serve()
    site.follow()
    site.publish(EMBEDDING, NORM, scale=1.01)
    site.follow()
    return site.seen


def other_head_in_base_only(root: Path, loader: Loader) -> Any:
    """As before, but the head of the model folder is another one."""
    tensors = load_file(loader.tied / WEIGHTS)
    site = Site(root, loader, tensors, held={**tensors, HEAD: tensors[EMBEDDING].flip(0).contiguous()})
    site.serve()
    site.follow()
    site.publish(EMBEDDING, NORM)
    site.follow()
    return site.seen


def head_in_folder_only(root: Path, loader: Loader) -> Any:
    """As before, and the load format is ``delta_sync``."""
    tensors = load_file(loader.tied / WEIGHTS)
    site = Site(root, loader, tensors, held={**tensors, HEAD: tensors[EMBEDDING].flip(0).contiguous()})
    site.serve("delta_sync")
    site.follow()
    site.publish(EMBEDDING, NORM)
    site.follow()
    return site.seen


def other_vocabulary(root: Path, loader: Loader) -> str:
    """The run is of a model with more tokens; what the refusal says."""
    larger = load_file(save_checkpoint(make_model("qwen3", seed=5, vocab_size=310), root / "larger") / WEIGHTS)
    site = Site(root, loader, larger, held=load_file(loader.tied / WEIGHTS))
    site.serve()
    site.follow()
    return str(site.seen[0]["raised"])


CASES: dict[str, Callable[[Path, Loader], Any]] = {
    case.__name__: case
    for case in (
        left_out,
        both_in_base,
        from_bucket,
        tied_again,
        head_in_base_only,
        head_in_base_only_and_cast,
        other_head_in_base_only,
        head_in_folder_only,
    )
}


CASES["other_vocabulary"] = other_vocabulary
QUICK = ("left_out", "both_in_base", "tied_again", "other_vocabulary")
SLOW = tuple(name for name in CASES if name not in QUICK)


@cache
def outcomes(names: tuple[str, ...]) -> dict[str, Any]:
    """What came of these cases."""
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-m", "tests.receiver.test_tied_heads", root, *names]
        done = subprocess.run(command, timeout=SECONDS, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads((Path(root) / "seen.json").read_text())
        return found


SERVED = {
    "left_out": [None],
    "both_in_base": [0, 1, 2, 3, 0, 3],
    "from_bucket": [0, 1, 2, 3, 0, 3],
    "tied_again": [None],
    "head_in_base_only": [0, 1, 2],
    "head_in_base_only_and_cast": [0, 1],
    "other_head_in_base_only": [0, 1],
    "head_in_folder_only": [0, 1],
}
"""The version served after each step of a case; None: the run is refused."""
SEPARATE = (
    "both_in_base",
    "from_bucket",
    "head_in_base_only",
    "head_in_base_only_and_cast",
    "other_head_in_base_only",
)


@pytest.mark.xdist_group("tied_heads")
@pytest.mark.parametrize("case", [*QUICK[:-1], *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_a_head_is_what_a_fresh_load_makes_of_it(case: str) -> None:
    """The models that are served and loaded afresh are compared bit for bit, with everything that can be reached."""
    steps = outcomes(QUICK if case in QUICK else SLOW)[case]
    assert isinstance(steps, list), steps
    assert [step["served"] for step in steps] == SERVED[case]
    for step in steps:
        if step["served"] is None:
            assert step["state"] == "refused"
            assert step["raised"].startswith(f"model: tensor {HEAD!r} is left out by this model")
            assert "start vLLM with --load-format delta_sync" in step["raised"]
            continue
        assert (step["raised"], step["differences"], step["verdict"]) == ("", [], True)
        assert step["state"] in ("idle", "held")
        assert step["tied"] is (case not in SEPARATE)


@pytest.mark.xdist_group("tied_heads")
def test_another_vocabulary_is_named_with_its_shape() -> None:
    refusal = outcomes(QUICK)["other_vocabulary"]
    assert f"tensor {EMBEDDING!r} cannot be routed" in refusal
    assert "it is [310, 128] in the run" in refusal


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
    # vLLM collects garbage at each load, and would look at all that was imported.
    gc.freeze()
    found = {}
    for name in names:
        try:
            found[name] = CASES[name](root / name, loader)
        except Exception:  # noqa: BLE001  it is part of what was seen, and fails the test of that case only
            found[name] = traceback.format_exc()
    (root / "seen.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
