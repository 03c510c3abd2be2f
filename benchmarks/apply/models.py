"""Real vLLM model objects on the CPU, with random weights: no engine, no KV cache, weights where our plugin keeps them.

The process that imports vLLM is started with ``pinned_environment()``.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_COMMON = {
    "head_dim": 128,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": True,
}
_DENSE = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
_MOE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
_EXPERTS = {"moe_intermediate_size": 384, "num_experts_per_tok": 8, "norm_topk_prob": True}


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 model, or of a Qwen3-MoE model if ``experts``."""

    name: str
    layers: int
    vocabulary: int
    experts: int = 0

    def config(self) -> Any:
        """The transformers config, in bfloat16."""
        from transformers import Qwen3Config, Qwen3MoeConfig

        sizes = {"vocab_size": self.vocabulary, "num_hidden_layers": self.layers, **_COMMON}
        if self.experts:
            config = Qwen3MoeConfig(**sizes, **_MOE, **_EXPERTS, num_experts=self.experts)
        else:
            config = Qwen3Config(**sizes, **_DENSE)
        config.dtype = torch.bfloat16
        config.architectures = ["Qwen3MoeForCausalLM" if self.experts else "Qwen3ForCausalLM"]
        return config


FULL = (Shape("dense", layers=28, vocabulary=65_536), Shape("moe", layers=8, vocabulary=32_768, experts=64))
"""0.51 and 0.33 billion parameters."""
QUICK = (Shape("dense", layers=1, vocabulary=1024), Shape("moe", layers=1, vocabulary=1024, experts=16))


def pinned_environment() -> dict[str, str]:
    """The environment of a process that makes models: one thread, no other plugin, no network."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def write_checkpoint(shape: Shape, folder: Path) -> Path:
    """Write config and random bfloat16 weights; the folder."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape.config()).to(torch.bfloat16).save_pretrained(folder)
    return folder


class Loader:
    """Loads checkpoints of one architecture with vLLM's own loader.

    ``store`` is a file that must last as long as the process: torch.distributed meets there. With ``plain`` the layouts
    are those that our worker extension keeps; it patches vLLM in this process for good.
    """

    def __init__(self, folder: Path, store: Path, plain: bool = True) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.engine.arg_utils import EngineArgs

        # What vLLM's CPU worker does before it loads: there is no accelerator whose cache could be emptied.
        torch.accelerator.empty_cache = lambda: None
        if plain:
            from vllm_delta_sync.engine.compat import cpu_experts, patches

            patches.keep_plain_cpu_weights()
            cpu_experts.keep_plain_cpu_experts()
        self._config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            dtype="bfloat16",
            use_tqdm_on_load=False,
        ).create_engine_config()
        with set_current_vllm_config(self._config):
            if not torch.distributed.is_initialized():
                parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            # A model of experts needs groups that a dense one before it did not.
            parallel_state.destroy_model_parallel()
            parallel_state.ensure_model_parallel_initialized(1, 1)

    def load(self, folder: Path) -> Any:
        """A new model object, loaded from a checkpoint of this architecture."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model

        config = self._config
        config.compilation_config.static_forward_context.clear()
        config.model_config.model = str(folder)
        with set_current_vllm_config(config):
            return get_model(vllm_config=config)


def digests(model: Any) -> dict[str, str]:
    """SHA-256 of each parameter's bytes, by runtime name: vLLM's own function."""
    from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

    found: dict[str, str] = compute_tensor_digests(model)
    return found
