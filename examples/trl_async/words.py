"""The demo's task as TRL wants it: a dataset of conversations, a chat template, and a reward function."""

import random

from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from examples.demo import policy, task
from examples.demo.characters import EOS, EOS_ID, encode

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}" + task.SEPARATOR + "{% endif %}"
)
"""A conversation is one word; ``>`` asks for the answer."""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "fields": {"content": {"close_pattern": EOS, "content": "text"}},
}
"""How an answer becomes a message. TRL knows that of the chat templates of large models only."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The demo's tokenizer of characters, for conversations."""
    tokenizer = policy.make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def make_dataset(count: int, seed: int) -> Dataset:
    """``count`` random words, each as a conversation (``prompt``) and by itself (``word``)."""
    rng = random.Random(seed)
    words = [task.random_word(rng) for _ in range(count)]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": word}] for word in words], "word": words})


def exact_reversal(completion_ids: list[list[int]], word: list[str], **_columns: object) -> list[float]:
    """Reward of each answer: 1.0 for the reversed word and the end token after it, else 0.0.

    Args:
        completion_ids: sampled tokens, one list for each answer. word: what was to be reversed, one for each answer.
    """
    right = ([*encode(task.answer_of(one)), EOS_ID] for one in word)
    return [float(ids == wanted) for ids, wanted in zip(completion_ids, right, strict=True)]
