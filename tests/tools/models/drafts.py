"""Checkpoints whose own layers draft (multi-token prediction), and the models that vLLM makes of them.

transformers leaves these layers out of its models, so their tensors are those that vLLM's class for the draft has,
taken apart and under the names that its loader reads.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.tools.models import checkpoints, vllm_side, without_transformers
from tests.tools.models.checkpoints import NotBuildableError
from vllm_delta_sync.engine.compat.speculation import draft_of
from vllm_delta_sync.engine.model.draft import Draft
from vllm_delta_sync.engine.model.load_record import load_record_of

FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}
SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 1}


def _numbered(name: str) -> str:
    """Layers after the last of the model, whose block has no level of its own in a checkpoint."""
    return name.replace(".mtp_block.", ".")


def _apart(name: str) -> str:
    return name.replace("model.", "mtp.", 1)


NAMES: dict[str, tuple[Callable[[str], str], dict[str, Any]]] = {
    "DeepseekV3ForCausalLM": (_numbered, {"num_nextn_predict_layers": 1}),
    "Glm4MoeForCausalLM": (_numbered, {"num_nextn_predict_layers": 1}),
    "Qwen3NextForCausalLM": (_apart, {"num_nextn_predict_layers": 1}),
    "ExaoneMoeForCausalLM": (_apart, {"num_nextn_predict_layers": 1}),
}
"""Architecture → the name in a checkpoint of a parameter of the draft, and what config.json says of such layers."""


class ModelAndDraft(nn.Module):
    """Both, to be compared together."""

    def __init__(self, model: Any, draft: Any) -> None:
        super().__init__()
        self.model, self.draft = model, draft


class Drafting:
    """A worker with its draft, of a checkpoint that it has written.

    Attributes:
        tensors: what the checkpoint holds. served: the worker's model. draft: see ``Draft``.
    """

    def __init__(self, architecture: str, folder: Path) -> None:
        """Write the checkpoint and load it. Raises NotBuildableError: vLLM or transformers does not, here."""
        if architecture not in NAMES:
            raise NotBuildableError("where checkpoints keep its draft is not known here")
        rename, fields = NAMES[architecture]
        self.tensors = checkpoints.write_base(architecture, folder)
        config = json.loads((folder / "config.json").read_text())
        (config.get("text_config") or config).update(fields)
        (folder / "config.json").write_text(json.dumps(config))
        config = vllm_side.worker_config(folder, load_format="dummy", speculative=SPECULATIVE)
        worker = vllm_side.started_worker(config)
        vllm_side.worker_model(worker, config)
        found = draft_of(worker)
        record = None if found is None else load_record_of(found.model)
        if record is None:
            raise NotBuildableError("vLLM makes no draft of it")
        self._drafter = worker.model_runner.drafter
        torch.manual_seed(1)
        for name, shape, dtype in without_transformers.named(record.skeleton, FUSED):
            if not any(shared in name for shared in ("embed_tokens", "lm_head")):
                self.tensors[rename(name)] = (0.05 * torch.randn(shape)).to(dtype)
        save_file(self.tensors, folder / "model.safetensors", metadata={"format": "pt"})
        self.config = vllm_side.worker_config(folder, speculative=SPECULATIVE)
        both = self.fresh(folder)
        self.served: Any = both.model
        self.draft = Draft(both.draft, str(folder), own_checkpoint=False, is_head=True)

    def fresh(self, folder: Path) -> ModelAndDraft:
        """Both models, loaded from a checkpoint by vLLM's own loaders, and shared as vLLM shares them."""
        try:
            model = vllm_side.fresh_model(self.config, folder)
            settings = copy.copy(self._drafter._create_draft_vllm_config())
            settings.model_config = self.config.speculative_config.draft_model_config
            settings.load_config = self.config.load_config
            self._drafter.model = vllm_side.fresh_model(settings, folder)
            self._drafter._maybe_share_embeddings(model)
            self._drafter._maybe_share_lm_head(model)
        except Exception as error:  # foreign code, which may raise anything of names that it does not know
            raise NotBuildableError(f"vLLM does not load what is written here: {checkpoints.said(error)}") from error
        return ModelAndDraft(model, self._drafter.model)
