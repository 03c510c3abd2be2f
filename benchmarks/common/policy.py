"""A toy policy, a Qwen3 of 3.2 M parameters over characters, its task (write a word backwards), and its loss."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, EOS, UNKNOWN, SEPARATOR = "<pad>", "<eos>", "<unk>", ">"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = (PAD, EOS, UNKNOWN, SEPARATOR, *ALPHABET, *ALPHABET.upper(), *"01234567")
IDS = {entry: number for number, entry in enumerate(VOCABULARY)}
PAD_ID, EOS_ID = IDS[PAD], IDS[EOS]
MIN_LETTERS, MAX_LETTERS = 4, 8
MAX_ANSWER_TOKENS = MAX_LETTERS + 2
WARM_UP_TARGET, WARM_UP_BATCH, WARM_UP_RATE = 0.28, 128, 1.5e-3
CLIP_LOW, CLIP_HIGH = 0.8, 1.28


def encode(text: str) -> list[int]:
    """Token ids of a text, one per character."""
    return [IDS.get(character, IDS[UNKNOWN]) for character in text]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, nothing added around a text."""
    tokenizer = Tokenizer(WordLevel(IDS, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, model_max_length=64
    )


def make_model(seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised policy, all parameters bf16, embeddings tied."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        dtype="bfloat16",
        attn_implementation="eager",
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences: prompt and completion in a row.

    ``tokens`` (n, length) int64; ``answers`` (n, length - 1) bool marks the positions whose *next* token the policy
    wrote. Causal attention needs no mask for padding on the right.
    """

    tokens: torch.Tensor
    answers: torch.Tensor


def make_batch(prompts: Iterable[list[int]], completions: Iterable[list[int]]) -> Batch:
    """Lay out prompt and completion token ids as one padded batch."""
    pairs = list(zip(prompts, completions, strict=True))
    length = max(len(prompt) + len(completion) for prompt, completion in pairs)
    tokens = torch.full((len(pairs), length), PAD_ID, dtype=torch.int64)
    answers = torch.zeros((len(pairs), length - 1), dtype=torch.bool)
    for row, (prompt, completion) in enumerate(pairs):
        end = len(prompt) + len(completion)
        tokens[row, :end] = torch.tensor(prompt + completion)
        answers[row, len(prompt) - 1 : end - 1] = True
    return Batch(tokens, answers)


def next_token_logprobs(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Log-probability of every next token, (n, length - 1) float32; padding positions are meaningless."""
    logits = model(input_ids=batch.tokens[:, :-1], use_cache=False).logits.float()
    return torch.log_softmax(logits, dim=-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)


def right_answers(rng: random.Random, count: int) -> Batch:
    """``count`` fresh words with their right answers."""
    words = ["".join(rng.choices(ALPHABET, k=rng.randint(MIN_LETTERS, MAX_LETTERS))) for _ in range(count)]
    return make_batch([encode(word + SEPARATOR) for word in words], [[*encode(word[::-1]), EOS_ID] for word in words])


def group_advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Reward minus the mean of its group, over the group's standard deviation; (n,) float32.

    ``rewards`` (n,) holds ``group`` answers to one prompt after another. Groups of equal rewards get zeros.
    """
    groups = rewards.view(-1, group)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, unbiased=False, keepdim=True) + 1e-6)).flatten()


def policy_loss(
    logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, answers: torch.Tensor
) -> torch.Tensor:
    """Clipped policy-gradient loss, averaged over the tokens that the policy wrote.

    Args:
        logprobs: (n, length) float32 under the weights being trained, with gradient.
        sampled: (n, length) float32 under the weights that sampled.
        advantages: (n,) float32. answers: (n, length) bool, True where the policy wrote the next token.
    """
    ratio = torch.where(answers, logprobs - sampled, 0.0).exp()
    weight = advantages[:, None]
    surrogate = torch.minimum(ratio * weight, ratio.clamp(CLIP_LOW, CLIP_HIGH) * weight)
    return -(surrogate * answers).sum() / answers.sum().clamp(min=1)
