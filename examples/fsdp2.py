"""Train with FSDP2 in a loop of your own: every rank publishes its shards, and nothing is gathered for it.

    torchrun --nproc-per-node 2 examples/fsdp2.py --checkpoint Qwen3-0.6B --bucket /mnt/shared/fsdp2 --steps 20

With CUDA devices each rank takes one (NCCL), otherwise the ranks share the CPU (gloo). The example trains on one
sentence; put your loss in ``loss_of``.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer_side import Publisher

TEXT = "The quick brown fox jumps over the lazy dog"


def begin() -> torch.device:
    """Join the world that torchrun made; return this rank's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return device


def sharded(model: Any, device: torch.device) -> nn.Module:
    """Shard each layer separately and the rest together; float32 masters, bfloat16 computation."""
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return cast(nn.Module, model)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Loss of next tokens; each rank has another row, so that gradients have to be combined."""
    row = tokens.roll(distributed.get_rank(), dims=1)
    return cast(torch.Tensor, model(input_ids=row, labels=row).loss)


def save(model: nn.Module, folder: Path) -> None:
    """Write the masters as one checkpoint for the trainer itself; it is no part of a run."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if distributed.get_rank() == 0:
        if cast(Any, model).config.tie_word_embeddings:
            del whole["lm_head.weight"]
        cast(Any, model).save_pretrained(folder, state_dict=whole)
    distributed.barrier()


def train(options: argparse.Namespace) -> None:
    device = begin()
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).to(device)
    tokens = AutoTokenizer.from_pretrained(options.checkpoint)(TEXT, return_tensors="pt").input_ids.to(device)
    model = sharded(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    # Every rank makes the publisher and all of its calls: docs/sharded.md.
    with Publisher(model, options.bucket, base=options.checkpoint, notice=options.notice) as publisher:
        for step in range(1, options.steps + 1):
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            result = publisher.publish(step, wait=True)
            if distributed.get_rank() == 0:
                print(f"step {step}: version {result.version}, {result.payload_bytes} bytes", flush=True)
    if options.save is not None:
        save(model, options.save)
    distributed.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="directory that training and servers start from")
    parser.add_argument("--bucket", required=True, help="run URL; an existing run is taken over")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps, one version each (default: 20)")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate (default: 1e-6)")
    parser.add_argument("--notice", help="where to announce versions, such as tcp://*:5555")
    parser.add_argument("--save", type=Path, help="directory for the trained weights in float32")
    train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
    # Gloo's threads outlive the process group, and one that drops a tensor while the interpreter shuts down aborts the
    # process (PyTorch issue 190489). Nothing is left to clean up, so skip the shutdown.
    sys.stdout.flush()
    os._exit(0)
