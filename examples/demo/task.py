"""The task the toy policy learns: write a word backwards.

A prompt is the word and ``>``; the right answer is the reversed word followed by the end token. Whether an
answer is right can be checked exactly, so the reward needs no judge.
"""

import random

SEPARATOR = ">"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
MIN_LETTERS = 4
MAX_LETTERS = 8
MAX_ANSWER_TOKENS = MAX_LETTERS + 2

SHOWN_WORDS = ("delta", "sparse", "trainer", "gradient")


def random_word(rng: random.Random) -> str:
    """A word of 4 to 8 independent letters; every length is equally likely."""
    return "".join(rng.choices(ALPHABET, k=rng.randint(MIN_LETTERS, MAX_LETTERS)))


def prompt_of(word: str) -> str:
    """The text the policy sees."""
    return word + SEPARATOR


def answer_of(word: str) -> str:
    """The only text that earns a reward, without the end token."""
    return word[::-1]


def reward(word: str, text: str, finished: bool) -> float:
    """1.0 for the exact answer, else 0.0.

    ``text`` is the completion without the end token; ``finished`` says whether the policy ended it itself
    (an answer that runs into the token limit is wrong even where it starts right).
    """
    return 1.0 if finished and text == answer_of(word) else 0.0
