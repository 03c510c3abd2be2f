"""Train a causal language model on a text and publish every step: all that a trainer needs.

    python examples/publish.py                      # makes a small model; half a minute on a CPU
    python examples/publish.py --checkpoint Qwen3-0.6B --text notes.txt --bucket s3://models/runs/first

A server follows with `delta-sync serve --bucket URL`; other programs read with `vllm_delta_sync.open_run(URL)`. Started
again with the same bucket, the script continues from the newest version. It needs no vLLM.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer_side import Publisher
from vllm_delta_sync import DeltaSyncError, open_run

TEXT = "the quick brown fox jumps over the lazy dog while the lazy dog dreams of the quick brown fox . " * 8


def small_model(text: str) -> tuple[torch.nn.Module, PreTrainedTokenizerFast]:
    """A Qwen3 of half a million parameters that knows the words of the text, and its tokenizer."""
    words = ["<unk>", "</s>", *sorted(set(text.split()))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_id=1,
        bos_token_id=None,
        dtype="bfloat16",  # the served dtype; the weights trained below are float32
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).float(), PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", model_max_length=256
    )


def train(options: argparse.Namespace) -> None:
    """Publish ``options.steps`` versions."""
    text = options.text.read_text() if options.text else TEXT
    if options.checkpoint:
        model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    else:
        model, tokenizer = small_model(text)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.tensor([tokenizer(text).input_ids[: options.length]], device=model.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.0)

    with tempfile.TemporaryDirectory() as folder:
        # Without a base, the run itself keeps what a server needs beside the weights.
        tokenizer.save_pretrained(folder)
        publisher = Publisher(model, options.bucket, base=options.checkpoint, files=folder, notice=options.notice)
    with publisher:
        print(f"run {publisher.run} at {publisher.url}, version {publisher.version}", flush=True)
        if publisher.version > 0:  # the run exists: continue with its weights
            with open_run(options.bucket) as run:
                run.load_into(model)
        for step in range(publisher.version + 1, publisher.version + 1 + options.steps):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # Waits for the previous version; encoding and upload of this one run beside the next step.
            result = publisher.publish(step=step, wait=True)
            share = result.changed / result.total
            print(f"step {step}: loss {loss.item():.3f}, version {result.version}, {share:.2%} changed", flush=True)
        publisher.flush()
        print(f"the last version took {result.payload_bytes:,} bytes instead of {result.full_bytes:,}")


def main() -> int:
    """Exit status: 0 done, 2 wrong usage, otherwise that of the error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", help="directory of a checkpoint to train, and for servers to start from (default: a toy)")
    add("--text", type=Path, help="file to learn (default: a few words about a fox)")
    add("--length", type=int, default=128, help="tokens of the text to train on (default: 128)")
    add("--bucket", default=os.environ.get("DELTA_SYNC_BUCKET", "publish-out"), help="run URL (default: publish-out)")
    add("--steps", type=int, default=20, help="optimizer steps, one version each (default: 20)")
    add("--rate", type=float, default=1e-5, help="learning rate; a large model wants about 1e-6 (default: 1e-5)")
    add("--notice", help="where to announce versions, such as tcp://*:5555 (default: servers poll the bucket)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    try:
        train(options)
    except DeltaSyncError as error:
        print(f"{error.kind}: {error.message}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # no such checkpoint or text
        print(f"publish: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
