"""``DeltaWeightTransfer`` where TRL trains a LoRA adapter: each version is the base with the adapter merged."""

from pathlib import Path

import torch
from peft import LoraConfig

from tests.support.async_trainers import Watched, async_trainer, served_form
from tests.support.publishing import assert_holds
from tests.support.tiny import make_model, save_checkpoint
from tests.support.trainers import SIZES
from vllm_delta_sync.chain import open_run


def test_a_version_is_the_base_with_the_adapter_merged(url: str, tmp_path: Path) -> None:
    base = save_checkpoint(make_model("qwen3", **SIZES), tmp_path / "base")
    transfer = Watched(url, base)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = async_trainer(base, tmp_path, transfer, peft=adapter, learning_rate=1e-2, max_steps=2)
    trainer.train()
    run = open_run(url)
    assert [manifest.changed > 0 for manifest in run.log()] == [False, False, True, True]
    assert not any("lora" in name for name in transfer.sent[-1])
    before, now = transfer.sent[0], transfer.sent[-1]
    moved = {name.split(".")[-2] for name in now if not torch.equal(now[name].bfloat16(), before[name].bfloat16())}
    assert moved == {"q_proj", "v_proj"}
    assert_holds(run, 3, served_form(trainer.model.merge_and_unload()), base)
