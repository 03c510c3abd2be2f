"""A trainer to try the images with: a small model learns to add digits, and each optimizer step is a version.

    python train.py --bucket URL --steps 1000

It ends when the run has that many versions. Started again it goes on with the weights of the newest version, on the
same machine or another. Ask a server that follows for the continuation of "3 + 4 =".
"""

import argparse
import signal
import sys
import tempfile
import time
from types import FrameType

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import DeltaSyncError, NotFoundError
from vllm_delta_sync.settings import client_settings

WORDS = ["<unk>", "</s>", "+", "=", *(str(number) for number in range(19))]
ANSWER_AT = 4
"""Position of the sum in the tokens of "3 + 4 = 7 </s>"."""
RATE = 1e-3
SLOWER_AFTER = 20
"""Steps after which the rate is half, then a third, and so on: late versions change fewer weights."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", model_max_length=64)


def make_model() -> Qwen3ForCausalLM:
    """A model of half a million parameters: trained in float32, published and served in the bfloat16 of its config."""
    torch.manual_seed(0)
    # So small a model gains nothing from more, which only wait for each other where cores are busy.
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        eos_token_id=WORDS.index("</s>"),
        bos_token_id=None,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    return Qwen3ForCausalLM(config).float()


def make_examples(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Tokens (100, 6) of all sums of two digits, int64."""
    texts = [f"{first} + {second} = {first + second} </s>" for first in range(10) for second in range(10)]
    return torch.tensor(tokenizer(texts).input_ids)


def train_step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, examples: torch.Tensor) -> float:
    """One step on all examples; returns the share that the model answered right before it."""
    logits = model(input_ids=examples).logits[:, ANSWER_AT - 1 : -1].float()
    wanted = examples[:, ANSWER_AT:]
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()
    optimizer.step()
    return float((logits[:, 0].argmax(-1) == wanted[:, 0]).float().mean())


def take_over(model: Qwen3ForCausalLM, bucket: str) -> None:
    """Write the newest version of the run into the model, if there is a run."""
    try:
        with open_run(bucket) as run:
            run.load_into(model)
    except NotFoundError:
        return


def train(bucket: str, steps: int, pause: float, notice: str | None) -> None:
    """Publish until the run has that many versions beside version 0."""
    model, tokenizer = make_model(), make_tokenizer()
    take_over(model, bucket)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    examples = make_examples(tokenizer).to(model.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        publisher = Publisher(model, bucket, notice=notice, files=folder)
    with publisher:
        print(f"run {publisher.run} at {publisher.url}, version {publisher.version}", flush=True)
        for step in range(publisher.version + 1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = RATE / (1 + step / SLOWER_AFTER)
            right = train_step(model, optimizer, examples)
            result = publisher.publish(step=step, wait=True)
            share = result.changed / result.total
            print(f"version {result.version}: {right:.0%} right before it, {share:.2%} changed", flush=True)
            time.sleep(pause)


def main() -> int:
    """Exit status: 0 done, otherwise that of the error."""
    parser = argparse.ArgumentParser(description="Train a toy that adds digits, and publish every step.")
    parser.add_argument("--bucket", help="run URL; default: $DELTA_SYNC_BUCKET")
    parser.add_argument("--steps", type=int, default=1000, help="versions to publish in all (default: 1000)")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two versions (default: 1)")
    parser.add_argument("--notice", help="where to announce versions, as Publisher(notice=…); empty: nowhere")
    options = parser.parse_args()
    # The first process of a container has no handlers of its own, and would not end.
    signal.signal(signal.SIGTERM, _end)
    try:
        bucket = options.bucket or client_settings().bucket
        if not bucket:
            parser.error("no bucket; give --bucket or set DELTA_SYNC_BUCKET")
        train(bucket, options.steps, options.pause, options.notice or None)
    except DeltaSyncError as error:
        print(f"{error.kind}: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
