"""Measure the host memory of a publisher: ``python -m tests.tools.publisher_memory --model-mb 128``; prints JSON.

A small version warms everything up (kernels, allocators). Then every element of the model changes, and the kernel's
high-water mark of resident memory says what the dense version took beyond that.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.common.timing import peak_extra_bytes
from trainer_side import Publisher
from vllm_delta_sync import open_run

CHANGES = ("small", "random")


def model(mb: int) -> dict[str, torch.Tensor]:
    """bfloat16 weights of so many MB in matrices of 4 MB, after an embedding that has a quarter of them."""
    elements = mb * 500_000
    rows = {"embedding": elements // 4 // 1024}
    left = elements // 1024 - rows["embedding"]
    rows |= {f"layer.{number}": 2048 for number in range(left // 2048)}
    return {name: torch.randn(size, 1024).mul_(0.02).bfloat16() for name, size in rows.items()}


def change(live: dict[str, torch.Tensor], kind: str) -> None:
    """Change every element: by a few units in the last place, as large steps do, or to new random weights."""
    for tensor in live.values():
        bits = tensor.view(torch.int16)
        for rows in bits.split(1024):
            if kind == "small":
                rows += (torch.randn(rows.shape) * 6).to(torch.int16).abs_() + 1
            else:
                fresh = (torch.randn(rows.shape) * 0.02).bfloat16().view(torch.int16)
                rows.copy_(torch.where(fresh == rows, fresh ^ 1, fresh))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-mb", type=int, default=256)
    parser.add_argument("--codec", default="tiled")
    parser.add_argument("--change", choices=CHANGES, default="small")
    parser.add_argument("--verify", action="store_true", help="read the version back and compare it")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    live = model(options.model_mb)
    nbytes = sum(tensor.nbytes for tensor in live.values())
    with tempfile.TemporaryDirectory() as folder:
        url = str(Path(folder) / "run")
        with Publisher(live, url, codec=options.codec, merge=False, anchor_every=1000) as publisher:
            for step in (1, 2):
                for tensor in live.values():
                    tensor.view(torch.int16)[::7, ::97] ^= 1
                publisher.publish(step, wait=True)
                publisher.flush()
            change(live, options.change)
            expected = {name: tensor.clone() for name, tensor in live.items()} if options.verify else {}
            results = []

            def publish() -> None:
                results.append(publisher.publish(3, wait=True))
                publisher.flush()

            peak = peak_extra_bytes(publish)
            found: dict[str, object] = {
                "model_bytes": nbytes,
                "peak_bytes": peak,
                "share": round(peak / nbytes, 3),
                "changed": results[0].changed / results[0].total,
                "memory": asdict(publisher.memory),
            }
        if options.verify:
            with open_run(url) as run:
                for name, tensor in run.tensors():
                    assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16)), name
    print(json.dumps(found))


if __name__ == "__main__":
    main()
