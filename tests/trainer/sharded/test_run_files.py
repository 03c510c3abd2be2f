"""Run files of ranks that publish together: rank 0 collects and writes them, once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny import make_model, make_tokenizer
from tests.trainer.sharded.training import make, sharded
from tests.trainer.sharded.world import run_world
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.upkeep.export import export
from vllm_delta_sync.wire.manifest import FILES_PREFIX


def publish(rank: int, size: int, url: str, files: str) -> list[str]:
    """Only rank 0 has the folder, as where ranks are on several machines; what each rank has put into the bucket."""
    bucket = open_bucket(url)
    put: list[str] = []
    real = type(bucket).put

    def counted(self: Any, key: str, data: Any, **options: Any) -> None:
        put.append(key)
        real(self, key, data, **options)

    type(bucket).put = counted  # type: ignore[method-assign]
    model = sharded(make("llama"), "fsdp")
    with Publisher(model, bucket, files=files if rank == 0 else files + "-is-elsewhere") as publisher:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        publisher.publish(1, wait=True)
    return [key for key in put if key.startswith(FILES_PREFIX)]


def begin_badly(rank: int, size: int, url: str, files: str) -> str:
    with pytest.raises(UsageError) as caught:
        Publisher(sharded(make("mixed"), "fsdp"), url, files=files)
    return caught.value.message


def test_rank_0_writes_them_once(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    put = run_world(2, publish, url=url, files=str(tmp_path / "tokenizer"))
    run = open_run(url)
    assert sorted(put[0]) == sorted(item.key for item in run.info.files)
    assert put[1] == []
    names = {item.name for item in run.info.files}
    assert names > {"config.json", "generation_config.json", "tokenizer.json"}
    # The class of a sharded module is not the one that others have to load.
    assert json.loads(run.file("config.json"))["architectures"] == ["LlamaForCausalLM"]
    assert run.verify().files == len(names)
    report = export(run, tmp_path / "out")
    assert report.missing == []
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = make_model("llama", 0, hidden_size=48, vocab_size=300, intermediate_size=40).state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor * 2), name


def test_what_rank_0_cannot_keep_is_refused_on_every_rank(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    said = run_world(2, begin_badly, url=url, files=str(tmp_path / "never"))
    assert said[1] == f"rank 0: {said[0]}"
    assert "which is no folder; give one that holds config.json" in said[0]
    assert not (tmp_path / "run").exists()
